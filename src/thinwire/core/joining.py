"""What an optimizer offers for going on where others are: on an elastic link joining a run, following it, what to train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from thinwire.core.slots import SlotOptimizer
from thinwire.errors import ConfigError

if TYPE_CHECKING:
    from thinwire.core.elastic import ElasticEngine
    from thinwire.core.outgoing import Outgoing
    from thinwire.core.rounds import RoundEngine


class JoiningOptimizer(SlotOptimizer):
    """Base of all methods: on an elastic link a worker joins before its first batch, and may read along without training."""

    engine: RoundEngine

    def join(self, *schedulers: LRScheduler) -> None:
        """Join the run: take its state, follow it to where the others are, and be expected in the next round.

        Call it before the first batch. Whoever comes first founds the run.

        Args:
            schedulers: of the learning rate; they are moved along where this worker's steps jump.

        Raises:
            FingerprintMismatch: this worker was started with other settings than the run.
        """
        with torch.no_grad():
            self._elastic("join").join(schedulers)

    def follow(self) -> int:
        """Apply the rounds that the others have decided since, without taking part; returns how many there were.

        For a worker that only reads along: `join()` and `step()` do it by themselves.
        """
        with torch.no_grad():
            return self._elastic("follow").follow()

    @property
    def block(self) -> int | None:
        """Which block of samples to train on until the next round; None on a link whose workers are always the same."""
        return None if self.engine.elastic is None else self.engine.elastic.block

    @property
    def block_step(self) -> int:
        """How many steps this worker has taken in its block."""
        return self._elastic("block_step").block_step

    @property
    def ended(self) -> bool:
        """Whether the run has ended: a worker has called `finish()`."""
        return self.engine.elastic is not None and self.engine.elastic.link.ended

    def carried(self) -> Outgoing | None:
        """What a worker whose message was not counted sends as soon as it has caught up; None where that is of no use."""
        return self.engine.opt.send()

    def caught_up(self) -> None:
        """Told when this worker has followed rounds in which it took no steps."""

    def taken_over(self, before: Optimizer) -> None:
        """Told when it goes on where the optimizer of a start has stopped, after it was given what `takes_over` names."""

    def _elastic(self, what: str) -> ElasticEngine:
        if self.engine.elastic is None:
            raise ConfigError(f"{what} is for an elastic link, such as thinwire.join() returns: the workers of this one stay")
        return self.engine.elastic
