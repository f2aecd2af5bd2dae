"""Gradient checkpointing: blocks are computed again in the backward pass instead of being kept; nothing else changes.

python examples/gradient_checkpointing.py
torchrun --nproc-per-node 2 examples/gradient_checkpointing.py
"""

from __future__ import annotations

from functools import partial

import tiny
import torch
from torch.utils.checkpoint import checkpoint

import thinwire
from thinwire import Link


def run(link: Link, *, checkpointing: bool, steps: int = 24) -> float:
    model = tiny.gpt()
    if checkpointing:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=8)
    return tiny.train(model, opt, link, steps)


def main() -> None:
    link = thinwire.connect()
    assert run(link, checkpointing=False) == run(link, checkpointing=True), "the same training, to the last bit"
    thinwire.disconnect()


if __name__ == "__main__":
    main()
