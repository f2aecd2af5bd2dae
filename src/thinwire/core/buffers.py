"""Buffers: what is not trained but should be the same everywhere, such as the running statistics of BatchNorm."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor, nn

from thinwire.codecs.dense import Dense
from thinwire.core.average import average
from thinwire.core.hashing import hash_tensors
from thinwire.errors import NonFiniteRound
from thinwire.links.base import Link
from thinwire.sharding.shards import Shards, local

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
        self.agreed, self.averaged = [m.clone() for m in mean], True
        for b, agreed in zip(mine, mean, strict=True):
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
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]
