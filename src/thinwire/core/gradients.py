"""Gradients as they are averaged over processes: a parameter may have none on some of them, or on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.slots import SlotOptimizer
from thinwire.sharding.shards import local


def gradients_and_presence(optimizer: SlotOptimizer) -> list[Tensor]:
    """What is averaged: the gradients, and behind them one number per tensor that says whether there is one."""
    grads = optimizer.gradients()
    present = [float(p.grad is not None) for p in optimizer._active]
    return [*grads, torch.tensor(present, device=grads[0].device if grads else "cpu")]


def set_gradients(optimizer: SlotOptimizer, mean: Sequence[Tensor]) -> None:
    """Overwrite the gradients by the mean of `gradients_and_presence`.

    One that no process has is left alone: the inner optimizer must not touch its parameter, not even by decay.
    """
    *grads, somewhere = mean
    for p, g, used in zip(optimizer._active, grads, somewhere.tolist(), strict=True):
        if used == 0:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        local(p.grad).copy_(g)
