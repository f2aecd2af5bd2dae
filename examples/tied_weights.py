"""Tied weights: a matrix with two uses is one parameter, sent once. Tie before the optimizer is made.

python examples/tied_weights.py
torchrun --nproc-per-node 2 examples/tied_weights.py
"""

from __future__ import annotations

import tiny
import torch
from torch import Tensor, nn

import thinwire


class Bigrams(nn.Module):
    """Predicts the next byte from the last one."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def main(steps: int = 24) -> None:
    link = thinwire.connect()
    torch.manual_seed(0)
    model = Bigrams()
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=8)
    tiny.train(model, opt, link, steps)
    assert model.head.weight is model.embed.weight, "still tied: parameters are changed in place"
    once, tied = sum(p.numel() for p in model.parameters()), model.embed.weight.numel()
    print(f"{once:,} parameters, sent in {opt.message_nbytes():,} bytes: the tied matrix of {tied:,} once")
    thinwire.disconnect()


if __name__ == "__main__":
    main()
