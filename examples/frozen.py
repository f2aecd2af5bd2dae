"""Frozen parts: what does not train is not sent. Freeze before the optimizer is made.

    python examples/frozen.py
    torchrun --nproc-per-node 2 examples/frozen.py

Frozen weights must be the same on all workers: from the same file or seed, or by `thinwire.broadcast(link, model)`. To train
more of the model later, make a new optimizer.
"""

from __future__ import annotations

import tiny
import torch

import thinwire


def main(steps: int = 24) -> None:
    link = thinwire.connect()
    model = tiny.gpt(layers=3)
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    before = model.embed.weight.clone()
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=8)
    tiny.train(model, opt, link, steps)
    assert torch.equal(model.embed.weight, before)
    count = [sum(p.numel() for p in model.parameters() if p.requires_grad == trained) for trained in (True, False)]
    print(f"{count[0]:,} parameters trained, {count[1]:,} frozen: {opt.message_nbytes():,} bytes per round")
    thinwire.disconnect()


if __name__ == "__main__":
    main()
