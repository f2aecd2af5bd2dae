"""The same loop with thinwire: runs as one process, under torchrun, and in the simulator."""

import torch

import thinwire


def train(link, steps=800):
    torch.manual_seed(0)  # every worker starts from the same weights
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=16)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    data = torch.Generator().manual_seed(1 + link.rank)  # every worker reads data of its own
    for _ in range(steps):
        x = torch.randn(32, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
    opt.finish()  # brings in the steps since the last round
    with opt.shared_model(), torch.no_grad():  # the parameters that all workers agreed on
        x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        return (model(x) - x.sum(1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    link = thinwire.connect()
    print(f"worker {link.rank} of {link.size}: validation loss {train(link):.4f}")
    thinwire.disconnect()
