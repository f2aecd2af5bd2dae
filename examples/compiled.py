"""torch.compile: compile the model as usual; the optimizer is made of the same parameters.

    python examples/compiled.py
    torchrun --nproc-per-node 2 examples/compiled.py

Needs a C++ compiler on CPUs. The model is compiled twice, since evaluation has no gradients. Save and export `model` rather
than `compiled`, whose parameters have other names.
"""

from __future__ import annotations

import sys

import tiny
import torch

import thinwire


def main(backend: str = "inductor", steps: int = 24) -> None:
    link = thinwire.connect()
    model = tiny.gpt()
    compiled = torch.compile(model, backend=backend)
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=8)
    tiny.train(model, opt, link, steps, logits=compiled)
    thinwire.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:2])
