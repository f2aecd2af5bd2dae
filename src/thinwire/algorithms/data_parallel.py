"""DataParallel: synchronous gradient averaging, the baseline that every other method is measured against.

    every step, every worker i:   g <- mean_i g_i;   x <- InnerOpt(x, g)

All workers hold the same parameters and the same optimizer state at any time. With P parameters in T tensors, M workers and
b bytes per value, one step's message is N = b (P + T + M) bytes: the gradients, one number per tensor that says whether any
worker has a gradient for it, and one per worker that says whether its contribution is finite. A ring all-reduce sends

    2 N (M - 1) / M   bytes per worker and step.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch.optim import Optimizer

from thinwire.codecs import Codec, Dense
from thinwire.core.gradients import gradients_and_presence, set_gradients
from thinwire.core.optimizer import PolicyOptions
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError, check_not_negative
from thinwire.links.base import Link
from thinwire.sharding.shards import local


class DataParallel(Wrapper):
    """Average gradients at every step, then step the inner optimizer.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.DataParallel(torch.optim.SGD(model.parameters(), lr=0.1), thinwire.connect())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> _ = opt.step()

    Args:
        inner: any torch optimizer.
        link: this worker's end of the wire.
        codec: `Dense` in a format of choice; float32 by default. Codecs that leave something out need a method that feeds it
            back.
        clip_norm: scale the mean gradient down to this norm; 0 never.
        options: see `thinwire.Policy`. A refused round skips the step on all workers.
    """

    name = "data-parallel"
    replicated = frozenset({"param", "inner"})
    sends_as_they_are = True

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        codec: Codec | None = None,
        clip_norm: float = 0.0,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`."""
        if codec is not None and not isinstance(codec, Dense):
            raise ConfigError(
                f"DataParallel sends whole gradients, without error feedback: its codec is a Dense one, got {codec!r}"
            )
        check_not_negative("clip_norm", clip_norm)
        super().__init__(inner, link, codec=codec, settings={"clip_norm": clip_norm}, **options)
        self.clip_norm = clip_norm

    def local_step(self) -> None:
        """Nothing: workers never act alone."""

    def send(self) -> Outgoing:
        """The gradients, and one number per tensor that says whether there is one."""
        return self.outgoing(gradients_and_presence(self))

    def carried(self) -> None:
        """Nothing: a gradient that came too late was one of other parameters."""

    def apply(self, arrived: Arrived) -> None:
        """One synchronous step."""
        set_gradients(self, arrived.mean, counted=arrived.included)  # g <- mean_i g_i
        if self.clip_norm:
            torch._foreach_mul_([local(p.grad) for p in self._active if p.grad is not None], self.clip_factor(self.clip_norm))
        self.inner.step()  # x <- InnerOpt(x, g)
