"""Refusals: rounds that were refused, as all workers count them, and when training is given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from thinwire.errors import DamagedRound, NonFiniteRound, RoundAborted, TrainingDiverged, WireError
from thinwire.links.base import Peers
from thinwire.payload import LARGEST, Payload, all_finite

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

    def of_any_pair(self, refusal: RoundAborted | None, number: int) -> RoundAborted | None:
        """Tell all workers of a round that some pair has refused, so that all can raise: one byte from each."""
        peers = self.opt.peers
        said = isinstance(refusal, NonFiniteRound) + 2 * (peers.id in culprits_of(refusal))
        told = self.opt.link.all_gather(Payload.of_bytes(bytes([said]), purpose="refusals", fixed=True))
        heard = {p.sender: int(p.to_bytes()[0]) for p in told}
        if not any(heard.values()):
            return refusal
        by, culprits = ([r for r, flags in heard.items() if r is not None and flags & bit] for bit in (1, 2))
        names, whose = (", ".join(f"rank {r}" for r in ranks) for ranks in (by, culprits))
        what = f"round {number} refused by {names}: NaN or Inf in the contribution of {whose or 'another shard'}"
        return NonFiniteRound(f"{what}; all {peers.size} workers stop", culprits=culprits)


def culprits_of(refusal: RoundAborted | None) -> tuple[int, ...]:
    """Ids of the workers that a round was refused for."""
    return refusal.culprits if isinstance(refusal, NonFiniteRound) else ()


def refusal(round: int, peers: Peers, culprits: list[int], pair: tuple[int, ...] | None = None) -> NonFiniteRound:
    """The refusal of a round for NaN or Inf.

    Args:
        round: its number.
        peers: who takes part.
        culprits: ids of those whose contribution is invalid; [-1] where only the sum is, none where another shard refuses it.
        pair: the ranks of a pair that refuses it; None for all workers.
    """
    named = [r for r in culprits if r >= 0]
    reason = "the sum of all contributions overflowed" if culprits else "another shard of this worker refused it"
    if named:
        reason = f"NaN or Inf in the contribution of {', '.join(f'rank {r}' for r in named)}"
    together = f"on all {peers.size} workers" if pair is None else f"by rank {' and rank '.join(map(str, pair))}"
    return NonFiniteRound(f"round {round} refused {together}: {reason}", culprits=named)


def damaged(round: int, failed: Sequence[int | None], size: int, error: WireError | None) -> DamagedRound | WireError:
    """What a round is refused with whose messages some workers could not read.

    Args:
        round: its number.
        failed: those workers. Where all of them could not, a message was wrong when it was sent, else damaged on the way.
        size: how many workers there are.
        error: what this worker found.
    """
    names = ", ".join(f"rank {r}" for r in failed)
    what = f"round {round} refused on all {size} workers: {names} could not read the messages"
    if len(failed) == size and error is not None:
        return error
    return DamagedRound(f"{what} ({error})" if error is not None else what)
