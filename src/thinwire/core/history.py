"""History: a checkpoint and the rounds since, which are the state of an elastic run, bit for bit."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from thinwire.core import transfer
from thinwire.core.ledger import Ledger
from thinwire.errors import CheckpointError, LinkError
from thinwire.links.elastic import Decided, RoundGone
from thinwire.links.manifest import Manifest
from thinwire.links.view import Place

if TYPE_CHECKING:
    from thinwire.core.elastic import ElasticEngine

log = logging.getLogger("thinwire")

_MOST_ENTRIES = 1000  # rounds that a worker says hello in before it gives up


class History:
    """How a worker comes to the newest round, and leaves checkpoints for others.

    Args:
        engine: whose rounds they are.

    Attributes:
        replaying: whether a round is being applied that this worker only follows.
    """

    def __init__(self, engine: ElasticEngine):
        """Nothing was followed yet."""
        self.engine, self.opt, self.link = engine, engine.opt, engine.link
        self.replaying = False
        self._began_at: int | None = None

    def enter(self) -> None:
        """Say hello until the others expect this worker."""
        for _ in range(_MOST_ENTRIES):
            self.link.say("hello")
            decided = self.link.wait_as_guest()
            if decided is None:  # the run has ended
                return
            self._follow_one(decided)
            self.follow()
            if self.link.rank in self.link.place.expected:
                return
        raise LinkError(f"worker {self.link.rank} said hello in {_MOST_ENTRIES} rounds, and was expected in none")

    def begin_at_checkpoint(self, *, needed: bool, after: int = -1, older: bool = False) -> None:
        """Take the newest checkpoint that can be read.

        Args:
            needed: raise a `LinkError` where there is none.
            after: the number of a round whose messages are gone: the checkpoint must be of that one or a later one.
            older: take one that is older than the one that was taken last, which was wrong.
        """
        before = self._began_at if older else None
        for state in self.link.archive.states(most=transfer.most_nbytes(self.opt)):
            try:
                extra = transfer.read_extra(state)
                told, ledger = extra["place"], Ledger.from_json(extra["ledger"])
                place = Place(**told | {"chain": bytes.fromhex(told["chain"]), "expected": tuple(told["expected"])})
                if place.number <= after:
                    break
                if before is not None and place.number >= before:
                    continue
                self._begin_with(state)
                self.link.start_over(place)
                self.engine.ledger, self._began_at = ledger, place.number
                self.link.waits.took([float(seconds) for seconds in extra["periods"]])
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                log.warning("a checkpoint is passed over: %s", error)
                continue
            return
        if needed:
            raise LinkError(f"worker {self.link.rank} needs a checkpoint of the run to go on from, and there is none")

    def _begin_with(self, state: bytes) -> None:
        """Take over what all have in common; what is this worker's own begins at zero."""
        transfer.unpack(self.opt, state)
        self.opt.handshake_done, self.engine.carrying, self.engine.worked_on = self.engine.joined, False, None

    def forget(self) -> None:
        """Drop what is this worker's own, like one that has just come: others train by now on what it was made of."""
        log.warning("worker %d was away for so long that its blocks were issued again: it drops what it kept", self.link.rank)
        self._begin_with(transfer.pack(self.opt, {}))

    def save(self) -> None:
        """Write a checkpoint of the replicated state after the round before."""
        place = asdict(self.link.place) | {"chain": self.link.place.chain.hex()}
        extra: dict[str, Any] = {"place": place, "ledger": self.engine.ledger.to_json(), "periods": self.link.waits.periods}
        self.link.archive.write(self.link.place.number - 1, transfer.pack(self.opt, extra))

    def follow(self) -> int:
        """Apply all rounds that are decided, without a message; how many there were."""
        count = 0
        while (decided := self._next_decided()) is not None:
            self._follow_one(decided)
            count += 1
        if count:
            self.opt.caught_up()
            self.engine.rates.move_schedulers()
        return count

    def _next_decided(self) -> Decided | None:
        try:
            return self.link.next_round()
        except RoundGone as gone:
            if self.engine.joined:
                self.take_checkpoint(str(gone), after=gone.number)
            else:
                self.begin_at_checkpoint(needed=True, after=gone.number)
            return self.link.next_round()

    def _follow_one(self, decided: Decided) -> None:
        gradients, self.replaying = [p.grad for p in self.opt._active], True
        try:
            self.engine.take(decided, None)
        finally:
            self.replaying = False
            for p, grad in zip(self.opt._active, gradients, strict=True):
                p.grad = grad

    def write_in_turn(self, manifest: Manifest, *, mine: bool) -> None:
        """Members write checkpoints in turn."""
        every, ids = self.link.checkpoint_every, sorted(manifest.counted)
        if not every or manifest.number % every or not mine:
            return
        if ids[manifest.number // every % len(ids)] == self.link.rank:
            self.save()

    def take_checkpoint(self, why: str, *, after: int = -1, older: bool = False) -> None:
        """Begin again at a checkpoint, as a worker that comes; see `begin_at_checkpoint`."""
        log.warning("worker %d takes the newest checkpoint, and what it had not sent is lost: %s", self.link.rank, why)
        self.begin_at_checkpoint(needed=True, after=after, older=older)
        self.follow()
        if self.engine.joined:
            self.enter()
