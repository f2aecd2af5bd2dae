"""Buffers: what is not trained but should be the same everywhere, such as the running statistics of BatchNorm."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import Tensor, nn

from thinwire.codecs.dense import Dense
from thinwire.core.average import average
from thinwire.core.hashing import hash_tensors
from thinwire.errors import NonFiniteRound
from thinwire.links.base import Link
from thinwire.sharding.shards import Shards, local

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

log = logging.getLogger("thinwire")


class Buffers:
    """Buffers that are averaged after rounds.

    Args:
        buffers: those of the model; only floating-point ones are averaged.

    Attributes:
        starting: a hash of the values that they had when the optimizer was made: the first forward pass changes them.
        agreed: the values that were averaged last; those at the start before.
    """

    def __init__(self, buffers: Iterable[Tensor]):
        """Remember the values at the start."""
        self.tensors = [b for b in buffers if b.is_floating_point()]
        # The planner's, on the meta device, have no values.
        self.starting = hash_tensors([local(b) for b in self.tensors if not b.is_meta])
        self.agreed = [local(b).detach().clone() for b in self.tensors]
        self.averaged = False
        self.said_left_out = False  # that there are others, which are not averaged

    def local(self) -> list[Tensor]:
        """This process's part of each."""
        return [local(b) for b in self.tensors]

    def average(self, link: Link, shards: Shards, *, round: int) -> None:
        """Give all workers the mean of the buffers.

        A worker whose own are not finite counts with weight 0, is named, and takes the mean of the others. Where that is so of
        all of them, all go back to the values that they agreed on last.
        """
        if not self.tensors:
            return
        mine = self.local()
        try:
            mean, _ = average(link, Dense(), mine, round=round, any_shard=shards.any, purpose="buffers")
        except NonFiniteRound as refusal:
            mean = self._mean_of_the_others(link, shards, refusal, round)
        mean = [m.contiguous() for m in mean]
        shards.average_(mean)
        self.agree_on(mean)

    def agree_on(self, mean: Sequence[Tensor]) -> None:
        """Take these values, as all workers do."""
        self.agreed = [m.to(b, copy=True) for b, m in zip(self.local(), mean, strict=True)]
        self.averaged = True
        self.restore()

    def restore(self) -> None:
        """Go back to the values that all workers agreed on last, if they ever have."""
        for b, agreed in zip(self.local(), self.agreed, strict=True) if self.averaged else ():
            b.copy_(agreed)

    def _mean_of_the_others(self, link: Link, shards: Shards, refusal: NonFiniteRound, round: int) -> list[Tensor]:
        peers, mine = link.peers(), self.local()
        if refusal.culprits and len(refusal.culprits) < peers.size:
            log.warning("buffers: %s; it takes the mean of the others", refusal)
            invalid = peers.id in refusal.culprits
            given = self.agreed if invalid else mine
            mean, _ = average(
                link,
                Dense(),
                given,
                round=round,
                any_shard=shards.any,
                purpose="buffers",
                weight=float(not invalid),
            )
            return mean
        log.warning("buffers: %s; all go back to the values they agreed on last", refusal)
        return [a.clone() for a in self.agreed]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of a model's BatchNorm layers: what `buffers=` of an algorithm is for."""
    return [b for m in _norms(model) for b in (m.running_mean, m.running_var) if b is not None]


def _norms(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]


# Models that were shown to this process before their optimizer was made, which never sees them itself.
_SHOWN: WeakSet[nn.Module] = WeakSet()


def remember_model(model: nn.Module) -> None:
    """Keep a model in mind, weakly, for the first step of the optimizer that is made of its parameters."""
    if running_statistics(model):
        _SHOWN.add(model)


def check_remembered(optimizer: Algorithm) -> None:
    """`check_statistics` of the model that an optimizer trains, where it was remembered."""
    trained = {id(p) for p in optimizer._active}
    for model in list(_SHOWN):
        if not trained.isdisjoint(id(p) for p in model.parameters()):
            check_statistics(optimizer, model)


def check_statistics(optimizer: Algorithm, model: nn.Module) -> None:
    """Say once that running statistics of a model are not averaged, where its optimizer was not given them as `buffers`.

    Layers that are in eval mode while the model trains do not change theirs, and may be left out.
    """
    buffers, changing = optimizer.buffer_average, [m for m in _norms(model) if m.training or not model.training]
    given = {id(b) for b in buffers.tensors}
    left_out = {type(m).__name__ for m in changing for b in running_statistics(m) if id(b) not in given}
    if left_out and not buffers.said_left_out and optimizer.link.peers().size > 1:
        buffers.said_left_out = True
        log.warning(
            "the running statistics of %s are not averaged: each worker goes on with its own, and evaluates another model than "
            "the others. Give the optimizer buffers=thinwire.running_statistics(model), after the model is on its device",
            " and ".join(sorted(left_out)),
        )
