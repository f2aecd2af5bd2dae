"""Pace: how many of the H local steps of a round each worker takes, so that fast and slow ones arrive together.

Steps are counted in the time of the fastest worker, which takes all H of a round. A worker that needs t seconds for a step
where the fastest needs t_min takes

    quota = max(1, round(H t_min / t))

of them, and each of its steps moves its counter on by H / quota (rounded so that the last one arrives at H). So the counter is
the same on all workers at every round, and learning rate schedules, checkpoints and the end of a run need not know of it.

Workers that stay tell each other their seconds after a round. Where workers come and go, the seconds of a worker are in its
message, and a round tells those of the workers that it counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch
from torch import Tensor

from thinwire.core.gates import read_number, say_number
from thinwire.errors import ConfigError
from thinwire.links.base import Link
from thinwire.sharding.shards import Shards


class Pace:
    """One worker's pace. What must survive a checkpoint is in `state`; speeds are measured again.

    Args:
        link: its clock times the steps; the workers tell each other their speeds over it.
        H: steps of a round.

    Attributes:
        state: [quota, steps taken in this round, steps taken since the last committed round], float64.
    """

    def __init__(self, link: Link, H: int):
        """Everyone takes all steps until the first round has been timed."""
        self.link, self.H = link, H
        self.state: Tensor = torch.tensor([H, 0, 0], dtype=torch.float64, device="cpu")
        self._since: float | None = None
        self._seconds: list[float] = []
        self._measured = 0.0  # before `_seconds` was emptied

    @property
    def quota(self) -> int:
        """Steps that this worker takes per round."""
        return int(self.state[0]) or self.H  # zeros where a checkpoint of another world was taken over

    @property
    def work(self) -> int:
        """Steps since the last committed round: what this worker's contribution weighs."""
        return int(self.state[2])

    def in_step(self, step: int) -> bool:
        """Whether all workers have taken the same number of steps when the counter is here; they meet at rounds."""
        return step % self.H == 0

    def check_total(self, steps: int) -> None:
        """Raise a `ConfigError` for a number of steps at which the workers cannot stop together."""
        if not self.in_step(steps):
            raise ConfigError(f"with pace=speed workers meet every H={self.H} steps only: steps={steps} is no multiple")

    def next_step(self, step: int) -> int:
        """The counter after one more step of this worker."""
        done, quota = int(self.state[1]), self.quota
        start = step - step % self.H
        self.state[1] = (done + 1) % quota
        self.state[2] += 1
        # Further than that only where a run goes on in the middle of a round, after a `finish()` that did not end it.
        return max(step + 1, start + (done + 1) * self.H // quota)

    def worked(self) -> None:
        """A local step has just been taken."""
        if self._since is not None:
            self._seconds.append(self.link.now() - self._since)

    def restart_clock(self) -> None:
        """The next step begins now: what came before was a round, an evaluation or a checkpoint."""
        self._since = self.link.now()

    def committed(self) -> None:
        """A round took place: what has been contributed weighs no more."""
        self.state[2] = 0

    def skipped(self) -> None:
        """The step was not taken after all: no work was done."""
        self.state[2] -= 1

    @property
    def seconds(self) -> float:
        """The median of this worker's steps since the last round, or before; 0 where none was timed."""
        return statistics.median(self._seconds) if self._seconds else self._measured

    def agree(self, shards: Shards, *, settle: bool) -> None:
        """After a round: tell the others how fast this worker is and find its quota for the next one.

        Args:
            shards: the processes that share this worker's model, and must find the same quota.
            settle: whether this worker has taken all its steps of the round, so that its quota may change.
        """
        total, count = shards.totals([self.seconds, 1.0])
        mine = total / count
        told = self.link.all_gather(say_number(mine, "pace"))
        seconds = [read_number(p, rank) for rank, p in enumerate(told)]
        if settle:
            self._settle(mine, min(seconds))

    def told(self, seconds: Iterable[float], step: int) -> None:
        """After a round of workers that come and go: find the quota from the seconds of those who were counted.

        Args:
            seconds: of a step of each; 0 of one that has timed none.
            step: of the run's counter, where this worker goes on whatever it has done since the round before.
        """
        self.state[1] = 0
        theirs = [s for s in seconds if s > 0]
        if theirs and self.in_step(step):
            self._settle(self.seconds, min(self.seconds, *theirs))

    def _settle(self, mine: float, fastest: float) -> None:
        self._measured, self._seconds = mine, []
        self.state[1] = 0
        if fastest > 0:  # else somebody has not been timed yet
            self.state[0] = max(1, round(self.H * fastest / mine))
