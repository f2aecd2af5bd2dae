"""Saves a checkpoint every 32 steps and goes on from the newest one when started again."""

import sys
from pathlib import Path

import torch

import thinwire
from thinwire import checkpoint


def train(link, folder, steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=16)

    saved = checkpoint.finished(folder)  # finished checkpoints, oldest first
    if saved:
        resumed = checkpoint.load(saved[-1], model, opt, link)
        print(f"worker {link.rank} goes on from step {resumed.step}", *resumed.notes, sep="; ")

    for step in range(opt.steps + 1, steps + 1):
        for group in opt.param_groups:
            group["lr"] = 1e-2 * (1 - step / 1000)  # a pure function of the step has nothing to save
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * link.rank + step))  # so has the data
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 32 == 0:
            checkpoint.save(folder, model, opt, link)  # called by all workers after the same step
    opt.finish()
    with opt.shared_model(), torch.no_grad():
        x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        return (model(x) - x.sum(1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    link = thinwire.connect()
    loss = train(link, Path(sys.argv[1]), steps=int(sys.argv[2]))
    print(f"worker {link.rank} of {link.size}: validation loss {loss:.6f}")
    thinwire.disconnect()
