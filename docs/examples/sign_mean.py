"""SignMean: step by the sign of the averaged gradient.

    every step, every worker i:    g <- mean_i g_i
                                   x <- x - lr sign(g)

With P parameters, M workers and b bytes per value, one step's message is N = b (P + M) bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from thinwire.core.optimizer import Algorithm, Policy
from thinwire.links.base import Link
from thinwire.sharding.shards import local


class SignMean(Algorithm):
    """Step by the sign of the averaged gradient.

    Args:
        params: parameters or parameter groups.
        link: this worker's end of the wire.
        lr: the step size.
        policy: see `thinwire.core.optimizer.Policy`.
    """

    name = "sign-mean"
    replicated = frozenset({"param"})

    def __init__(self, params: Iterable[Any], link: Link, *, lr: float = 0.02, **policy: Unpack[Policy]):
        """The learning rate may differ per group."""
        super().__init__(params, link, defaults={"lr": lr}, **policy)

    def update(self) -> None:
        """One synchronous step."""
        x, lr = self.params(), {p: group["lr"] for group in self.param_groups for p in group["params"]}
        g = [torch.zeros_like(x_) if p.grad is None else local(p.grad) for p, x_ in zip(self._active, x, strict=True)]
        mean, _ = self.average(g)  # g <- mean_i g_i: the network line
        self.commit()  # below it, and only below it, shared state may change
        for p, x_, g_ in zip(self._active, x, mean, strict=True):
            x_.sub_(lr[p] * g_.sign())  # x <- x - lr sign(g)
