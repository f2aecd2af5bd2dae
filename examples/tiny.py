"""What the examples beside this file share: a text, a small GPT, and the loop of one worker."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from thinwire import Algorithm, Link
from thinwire.tasks.gpt import GPT, GPTConfig

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))  # some Python, which every machine has
CONTEXT = 32


def gpt(layers: int = 2) -> GPT:
    """The same weights on all workers."""
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, width=32, heads=2, context=CONTEXT))


def batch(seed: int, sequences: int = 8) -> Tensor:
    """Sequences of one token more than the context; each worker and step has a seed of its own."""
    starts = torch.randint(len(TEXT) - CONTEXT - 1, (sequences,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts.tolist()])


def train(model: nn.Module, opt: Algorithm, link: Link, steps: int, logits: Callable[[Tensor], Tensor] | None = None) -> float:
    """Train, print what it gave and what it sent, and return the loss of the model that all workers agree on.

    Args:
        model: its mode is switched between training and evaluation.
        opt: the thinwire optimizer.
        link: this worker's end of the wire.
        steps: how many.
        logits: the forward pass, where it is not `model` itself.
    """
    forward = model if logits is None else logits

    def loss(tokens: Tensor) -> Tensor:
        return cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        with opt.shared_model():
            return loss(batch(seed=-1, sequences=32)).item()

    before = evaluate()
    model.train()
    for step in range(steps):
        loss(batch(seed=1000 * step + link.rank)).backward()
        opt.step()
        opt.zero_grad()
    opt.finish()
    after = evaluate()
    sent = f"{opt.rounds} rounds of {opt.message_nbytes():,} bytes"
    print(f"worker {link.rank} of {link.size}: validation loss {before:.3f} -> {after:.3f}, {sent}")
    return after
