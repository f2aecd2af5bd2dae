"""Gradients as they are averaged over processes: a parameter may have none on some of them, or on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.device.bits import table
from thinwire.core.slots import SlotOptimizer
from thinwire.sharding.shards import local


def gradients_and_presence(optimizer: SlotOptimizer) -> list[Tensor]:
    """What is averaged: the gradients, and behind them one number per tensor that says whether there is one."""
    grads = optimizer.gradients()
    present = tuple(float(p.grad is not None) for p in optimizer._active)
    return [*grads, table(present, torch.float32, grads[0].device if grads else torch.device("cpu"))]


def set_gradients(optimizer: SlotOptimizer, mean: Sequence[Tensor], *, counted: bool = False) -> None:
    """Overwrite the gradients by the mean of `gradients_and_presence`.

    One that no process has is left alone: the inner optimizer must not touch its parameter, not even by decay.

    Args:
        optimizer: whose gradients they are.
        mean: of all processes.
        counted: whether this process's own gradients are in it: where it has them all, nobody need look at the numbers.
    """
    *grads, somewhere = mean
    everywhere = counted and all(p.grad is not None for p in optimizer._active)
    for p, g, used in zip(optimizer._active, grads, [1.0] * len(grads) if everywhere else somewhere.tolist(), strict=True):
        if used == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        local(p.grad).copy_(g)
