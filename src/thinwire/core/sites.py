"""Site: the processes that are one worker of a `TwoLevel` link, as an optimizer sees them.

Each reads data of its own. Before the optimizer looks at the gradients they are averaged over the site, so that all members
compute the same from there on, bit for bit: parameters, error feedback, moments, messages. What one member finds, all know
before any of them acts (`Shards.any`). What is invalid on one member is invalid on all of them, and refused by the rounds in
the name of the site; which member it was is said in a warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.codecs.dense import Dense
from thinwire.core.average import average
from thinwire.core.gates import handshake, hash_of_gradients
from thinwire.core.gradients import gradients_and_presence, set_gradients
from thinwire.core.hashing import hash_tensors, show_hash
from thinwire.core.replicas import compare_replicas
from thinwire.errors import ConfigError, Diverged, FingerprintMismatch, NonFiniteRound
from thinwire.links.two_level import TwoLevel
from thinwire.sharding.shards import Shards

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

log = logging.getLogger("thinwire")


class Site:
    """The members of this process's site.

    Args:
        optimizer: of this process; from now on its `shards` ask the whole site.
        link: its link.

    Raises:
        ConfigError: for a model that is sharded: its processes each send their part, without a second level.
    """

    def __init__(self, optimizer: Algorithm, link: TwoLevel):
        """Nothing is exchanged yet."""
        if optimizer.shards.several:
            raise ConfigError(
                "a model that FSDP2 shards takes TorchLink(mesh['replicate']) in place of a TwoLevel link: the processes of a "
                "site share one worker's model already, and each sends the message of its shard"
            )
        self.opt, self.link, self.codec = optimizer, link, Dense(link.wire)
        self._compared = 0  # the last round after which the members were compared
        optimizer.shards = Shards(optimizer.params(), link.inside)

    @property
    def members(self) -> int:
        """How many processes a site has."""
        return self.link.inside.size

    def greet(self) -> None:
        """Before the first step: refuse to begin unless all members were started alike, with the same state."""
        told = {"sites": self.link.size, "number of the site": self.link.rank, **self.opt.fingerprint()}
        told |= {f"values of {name!r}": show_hash(tensors) for name, tensors in self._everything().items()}
        try:
            handshake(self.link.inside, told, gradients=hash_of_gradients(self.opt))
        except FingerprintMismatch as difference:
            raise FingerprintMismatch(f"inside site {self.link.rank}, where ranks are its members: {difference}") from None

    def average_gradients(self) -> None:
        """Give all members the mean of their gradients; NaN, where that of any member is not finite."""
        set_gradients(self.opt, self._mean(gradients_and_presence(self.opt), "gradients"))

    def average_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Likewise of buffers, such as running statistics."""
        torch._foreach_copy_(list(buffers), self._mean(buffers, "buffers"))

    def _mean(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        try:
            return average(self.link.inside, self.codec, tensors, round=self.opt.rounds, purpose="site mean")[0]
        except NonFiniteRound as refusal:
            members = ", ".join(map(str, refusal.culprits)) or "none alone: their sum overflowed"
            log.warning("site %d, step %d: NaN or Inf in the %s of member %s", self.link.rank, self.opt.steps, what, members)
            return [torch.full_like(t, math.nan) for t in tensors]

    def compare(self) -> None:
        """After a round, as often as the alarm compares workers: check that the members are still bit-equal in all they have.

        Raises:
            Diverged: on all members of the site, naming what differs and where.
        """
        policy, number = self.opt.policy, self.opt.rounds
        if not policy.alarm_every or number == self._compared or number % policy.alarm_every:
            return
        self._compared = number
        try:
            hashes = {name: hash_tensors(tensors) for name, tensors in self._everything().items()}
            compare_replicas(self.link.inside, hashes, round=number)
        except Diverged as alarm:
            what = f"inside site {self.link.rank}, where ranks are its members: {alarm}"
            if policy.on_divergence == "raise":
                raise Diverged(what) from None
            log.warning("%s", what)

    def _everything(self) -> dict[str, list[Tensor]]:
        """All state of this process by name: the members are one worker, so what is a worker's own is equal on them too."""
        opt = self.opt
        slots = sorted({name for entries in opt.own_state.values() for name in entries})
        inner = {f"inner.{name}": tensors for name, tensors in opt.inner_state().items()}
        return {"param": opt.params()} | {name: opt.slot(name) for name in slots} | inner
