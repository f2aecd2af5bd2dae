"""The learning rates of a worker whose steps may jump: those of the manifests, and schedulers that are moved along."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm


class Rates:
    """The learning rates of one worker on an elastic link.

    Args:
        optimizer: whose they are.

    Attributes:
        schedulers: that the user's loop steps, once per step.
    """

    def __init__(self, optimizer: Algorithm):
        """No schedulers yet."""
        self.opt = optimizer
        self.schedulers: tuple[LRScheduler, ...] = ()

    def told(self) -> tuple[float, ...]:
        """The learning rate of each group that has one."""
        return tuple(float(group["lr"]) for group in self.opt.param_groups if "lr" in group)

    def set(self, rates: Sequence[float]) -> None:
        """Give the groups these rates; where there are as many as groups, which is so in any honest manifest."""
        groups = [group for group in self.opt.param_groups if "lr" in group]
        for group, rate in zip(groups, rates, strict=True) if len(rates) == len(groups) else ():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    @contextmanager
    def of_round(self, rates: Sequence[float], *, keep: bool) -> Iterator[None]:
        """Within it the rates are those that all workers apply a round with; afterwards too for one that follows (`keep`)."""
        mine = self.told()
        self.set(rates)
        yield
        if not keep:
            self.set(mine)

    def move_schedulers(self, *, step: bool = False) -> None:
        """After a jump: schedulers count the run's steps; the last one is counted by the user's loop, or here (`step`)."""
        for scheduler in self.schedulers:
            scheduler.last_epoch = max(0, self.opt.steps - 1)
            if step:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # this process has taken no step yet
                    scheduler.step()
