"""Refusals: rounds that were refused, as all workers count them, and when training is given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from thinwire.errors import DamagedRound, NonFiniteRound, RoundAborted, TrainingDiverged, WireError
from thinwire.payload import LARGEST, all_finite

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

MOST_DAMAGED = 3  # rounds in a row whose messages could not be read: the network, or a worker's program, is broken


class Refusals:
    """The rounds in a row that were refused.

    Attributes:
        in_row: how many, one after the other.
        since: the step of the first of them.
        round: the number of the last of them.
        step: the step of the last of them.
        lost: whether that one was refused because this worker's parameters were not finite.
        damaged: how many in a row could not be read.
    """

    def __init__(self, optimizer: Algorithm):
        """None yet."""
        self.opt = optimizer
        self.in_row, self.since, self.round, self.step, self.lost = 0, 0, -2, -1, False
        self.damaged, self._last_damaged = 0, -2

    def count(self, refusal: RoundAborted, number: int, step: int) -> Exception | None:
        """Count a refused round; the error to raise where training is given up."""
        if isinstance(refusal, DamagedRound):
            self.damaged = self.damaged + 1 if number - self._last_damaged == 1 else 1
            self._last_damaged = number
            again = f"{refusal}; that was so in {self.damaged} rounds in a row"
            return WireError(again) if self.damaged >= MOST_DAMAGED else None
        if not isinstance(refusal, NonFiniteRound):
            return None
        opt = self.opt
        mine = opt.peers.id in refusal.culprits
        if opt.in_pairs and not mine:
            return None
        if not 0 <= number - self.round <= 1:  # the one before was taken, or a checkpoint was loaded
            self.in_row, self.since = 0, step
        self.in_row += 1
        self.round, self.step, self.lost = number, step, mine and not opt.params_finite()
        everyone = len(refusal.culprits) == opt.peers.size > 1 and "param" not in opt.replicated
        if opt.shards.any(not all_finite(self._common_parameters(), LARGEST)):
            what = f"the parameters of all workers hold NaN, Inf or values beyond {LARGEST:g}"
        elif everyone:
            what = f"the parameters of all {opt.peers.size} workers have become invalid since the round before"
        elif opt.give_up_after and self.in_row >= opt.give_up_after:
            what = f"{self.in_row} rounds in a row were refused"
        else:
            return None
        return self.training_diverged(f"{what} ({refusal})", since=self.since)

    def training_diverged(self, what: str, *, since: int) -> TrainingDiverged:
        """The error for training that has diverged: what was found, since which step, and what is the likely cause."""
        rates = sorted({float(group["lr"]) for group in self.opt.param_groups if "lr" in group})
        lr = f" (lr is {', '.join(f'{rate:g}' for rate in rates)})" if rates else ""
        cause = f"most likely the learning rate is too high{lr}, or the data hold NaN or Inf"
        return TrainingDiverged(f"training has diverged at step {since}: {what}; {cause}", since=since)

    def agreed_finite(self) -> bool:
        """Whether the parameters that this worker would go back to are finite, on all of its shards."""
        agreed = self.opt.agreed() or (self.opt.params() if "param" in self.opt.replicated else [])
        return not self.opt.shards.any(not all_finite(agreed))

    @property
    def lost_parameters(self) -> bool:
        """Whether after the last step a round was refused because this worker's parameters were not finite."""
        return self.lost and self.step == self.opt.steps

    def _common_parameters(self) -> list[Tensor]:
        """The parameters that are bit-equal on all workers at any time, where there are such."""
        if "param" in self.opt.replicated:
            return self.opt.params()
        return self.opt.slot("anchor") if "anchor" in self.opt.replicated else []
