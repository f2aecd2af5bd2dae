"""Synchronous steps first, then DiLoCo around the same AdamW; a line per round in rounds.jsonl."""

import sys

import torch

import thinwire


def worker(link):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = thinwire.WarmStart(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        link,
        steps=16,
        then=lambda inner, link: thinwire.DiLoCo(inner, link, H=8),
    )
    thinwire.log.jsonl(opt, sys.argv[1])
    data = torch.Generator().manual_seed(link.rank)
    for _ in range(64):
        x = torch.randn(32, 8, generator=data)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.finish()
    return opt.stats()


for stats in thinwire.World(2).run(worker):
    print({name: stats[name] for name in ("step", "rounds", "sent", "sent.round", "sent.handshake")})
