"""The loop of docs/examples/plain.py as a worker of a run whose workers come and go: ten changed lines.

Every worker makes a key; the owner of the run, who may be one of them, makes the run with their public keys:

    thinwire keys new --out a.key
    thinwire run create file:///path/to/run --own-loop --key a.key --add a.key ed25519:...

Then each starts alone, on its own machine, whenever it likes. Stop one and start it again: it takes the state of the run from
the store and goes on with the others.

    python examples/elastic.py file:///path/to/run a.key
"""

import sys

import torch

import thinwire  # 1


def train(link, steps=800):  # 2
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=16)  # 3
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    opt.join(scheduler)  # 4: take the state of the run
    while opt.steps < steps and not opt.ended:  # 5: steps of the run, which goes on without this worker too
        data = torch.Generator().manual_seed(1 + 1000 * opt.block + opt.block_step)  # 6: what nobody else trains on
        x = torch.randn(32, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
    opt.finish()  # 7
    with opt.shared_model(), torch.no_grad():  # 8: the parameters that all workers agreed on
        x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        return (model(x) - x.sum(1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    address, key = sys.argv[1:]  # 9
    link = thinwire.join(address, key=key)  # 10
    print(f"worker {link.rank}: validation loss {train(link):.4f}")
