"""History: a checkpoint and the rounds since, which are the state of an elastic run, bit for bit."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from thinwire.core import transfer
from thinwire.core.door import check_door, started_with
from thinwire.core.ledger import Ledger
from thinwire.errors import CheckpointError, LinkError
from thinwire.links.archive import Archive
from thinwire.links.decided import Decided, Moved, RoundGone
from thinwire.links.manifest import Manifest
from thinwire.links.view import Place

if TYPE_CHECKING:
    from thinwire.core.elastic import ElasticEngine

log = logging.getLogger("thinwire")

_MOST_FOUNDINGS = 100  # times that a run is founded again at one place
_MOST_ENTRIES = 1000  # rounds that a worker says hello in before it gives up


class History:
    """How a worker comes to the newest round, and leaves checkpoints for others.

    Args:
        engine: whose rounds they are.

    Attributes:
        replaying: whether a round is being applied that this worker only follows.
        has_state: whether this worker has a state of the run that others can go on with.
    """

    def __init__(self, engine: ElasticEngine):
        """Nothing was followed yet."""
        self.engine, self.opt, self.link = engine, engine.opt, engine.link
        self.replaying = self.has_state = self._kept_one = False
        self._began_at: int | None = None
        self._started_with: dict[str, Any] | None = None

    def enter(self) -> None:
        """Say hello until the others expect this worker."""
        for _ in range(_MOST_ENTRIES):
            try:
                self.link.say("hello")
                decided = self.link.wait_as_guest()
            except Moved as moved:
                self.settle(moved)
                continue
            except RoundGone as gone:
                self._begin_later(gone.number)
                self.follow()
                continue
            if decided is None:  # the run has ended
                return
            self._follow_one(decided)
            self.follow()
            if self.link.rank in self.link.place.expected:
                return
        raise LinkError(f"worker {self.link.rank} said hello in {_MOST_ENTRIES} rounds, and was expected in none")

    def settle(self, why: Moved | None = None) -> None:
        """Where objects can be lost: found the run with the others, or again, or learn that it runs, and have its state.

        Args:
            why: it has to be founded again.
        """
        if why is not None:
            log.warning("worker %d, round %d: %s", self.link.rank, self.link.place.number, why)
        for _ in range(_MOST_FOUNDINGS):
            try:
                return self._settle()
            except Moved as again:
                log.warning("worker %d: %s", self.link.rank, again)
        raise LinkError(f"the run was founded {_MOST_FOUNDINGS} times, and lost each time")

    def _settle(self) -> None:
        kept, place = None, self.link.place if self.has_state else None
        if place is None and self.link.own_checkpoints is not None:
            kept, place = self._newest_kept(self.link.own_checkpoints)
        self.link.arrive()
        if place is not None:
            self._check_door(fresh=False)  # whose state it is, says what the settings are
        era = self.link.settle(place)
        if place is None:
            self._check_door(fresh=era is None or not era.number)
        if era is None:
            self.begin_at_checkpoint(needed=False)
        elif place is not None and (place.number, place.chain) == (era.number, era.chain):
            if kept is not None:
                self._take_state(kept)
            self.link.start_over(place)
            self.hold_state()
            if era.by == self.link.rank:
                self.save()  # for those who are behind
        elif place is not None or era.number:
            log.warning("worker %d takes the state that the run was founded with again", self.link.rank)
            self.begin_at_checkpoint(needed=True, after=era.number - 1)
        else:
            self.begin_at_checkpoint(needed=False)

    def _check_door(self, *, fresh: bool) -> None:
        self._started_with = self._started_with or started_with(self.link, self.opt)
        check_door(self.link, self._started_with, compare_values=fresh and self.link.archive.newest() < 0)

    def found_again(self, why: Moved) -> None:
        """Go on where the run goes on, after what was lost; with what this worker had done, or as one that comes."""
        before = self.link.place
        self.settle(why)
        if self.link.place != before and self.engine.joined:
            self.follow()
            self.enter()

    def _newest_kept(self, kept: Archive) -> tuple[bytes | None, Place | None]:
        """The newest checkpoint that this worker has kept for itself, and where it is in the history."""
        for state in kept.states(most=transfer.most_nbytes(self.opt)):
            with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
                return state, _place_of(transfer.read_extra(state))
        return None, None

    def begin_at_checkpoint(self, *, needed: bool, after: int = -1, older: bool = False) -> None:
        """Take the newest checkpoint that can be read.

        Args:
            needed: raise a `LinkError` where there is none.
            after: the number of a round whose messages are gone: the checkpoint must be of that one or a later one.
            older: take one that is older than the one that was taken last, which was wrong.
        """
        before = self._began_at if older else None
        while not self._take_newest(after, before) and needed:
            if not self.link.ask_for_state(after):
                raise LinkError(f"worker {self.link.rank} needs a checkpoint of the run to go on from, and there is none")

    def _take_newest(self, after: int, before: int | None) -> bool:
        """Take the newest checkpoint between two rounds that can be read; whether there was one."""
        for state in self.link.archive.states(most=transfer.most_nbytes(self.opt)):
            try:
                place = _place_of(transfer.read_extra(state))
                if place.number <= after:
                    return False
                if before is not None and place.number >= before:
                    continue
                self._take_state(state)
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                log.warning("a checkpoint is passed over: %s", error)
                continue
            return True
        return False

    def _take_state(self, state: bytes) -> None:
        extra = transfer.read_extra(state)
        place, ledger = _place_of(extra), Ledger.from_json(extra["ledger"])
        self._begin_with(state)
        self.link.start_over(place)
        self.engine.ledger, self._began_at = ledger, place.number
        self.link.waits.took([float(seconds) for seconds in extra["periods"]])
        self.hold_state()

    def hold_state(self) -> None:
        """This worker has a state of the run that others can go on with."""
        self.has_state = True
        self.link.hold_state()

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
        self.link.archive.write(self.link.place.number - 1, self._packed())

    def _packed(self) -> bytes:
        place = asdict(self.link.place) | {"chain": self.link.place.chain.hex()}
        extra: dict[str, Any] = {"place": place, "ledger": self.engine.ledger.to_json(), "periods": self.link.waits.periods}
        return transfer.pack(self.opt, extra)

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
        except Moved as moved:
            self.found_again(moved)
            return self._next_decided()
        except RoundGone as gone:
            if self.engine.joined:
                self.take_checkpoint(str(gone), after=gone.number)
            else:
                self._begin_later(gone.number)
            return self._next_decided()

    def _follow_one(self, decided: Decided) -> None:
        gradients, self.replaying = [p.grad for p in self.opt._active], True
        try:
            self.engine.take(decided, None)
        finally:
            self.replaying = False
            for p, grad in zip(self.opt._active, gradients, strict=True):
                p.grad = grad

    def write_in_turn(self, manifest: Manifest, *, mine: bool) -> None:
        """Members write checkpoints in turn; what a worker keeps for itself, each does."""
        every, ids, number = self.link.checkpoint_every, sorted(manifest.counted), manifest.number
        due = bool(every) and number % every == 0
        if self.link.own_checkpoints is not None and (due or not self._kept_one):  # the first one at once: all may die early
            self.link.own_checkpoints.write(number, self._packed())
            self._kept_one = True
        try:
            turn = ids[(number // every if due else number) % len(ids)]
            if mine and turn == self.link.rank and (due or self.link.state_wanted()):
                self.save()
        except Moved as moved:
            log.warning("no checkpoint after round %d: %s", number, moved)  # the round counts; the next request says so again

    def take_checkpoint(self, why: str, *, after: int = -1, older: bool = False) -> None:
        """Begin again at a checkpoint, as a worker that comes; see `begin_at_checkpoint`."""
        log.warning("worker %d takes the newest checkpoint, and what it had not sent is lost: %s", self.link.rank, why)
        self._begin_later(after, older=older)
        self.follow()
        if self.engine.joined:
            self.enter()

    def _begin_later(self, after: int, *, older: bool = False) -> None:
        try:
            self.begin_at_checkpoint(needed=True, after=after, older=older)
        except Moved as moved:  # nobody has a later one
            self.settle(moved)


def _place_of(extra: dict[str, Any]) -> Place:
    told = extra["place"]
    return Place(**told | {"chain": bytes.fromhex(told["chain"]), "expected": tuple(told["expected"])})
