"""Founding: how workers of a cluster begin a run, or begin it again after its manifests were lost.

Every worker offers the place of the state that it has. Once all are there who should be, or the wait is over, one proposes to
begin with the newest of these; a compare-and-set decides. A worker without a state never founds a run that had begun: the host
keeps a note of that on disk. As long as anybody alive holds the state, nothing is founded again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.errors import LinkError
from thinwire.links.beats import Beats
from thinwire.links.decided import Era
from thinwire.links.manifest import NO_CHAIN
from thinwire.links.register import Register
from thinwire.links.view import Place

BEGUN, MAY_BEGIN, WISH = "begun", "may begin", "wish"  # by the host: it had begun, its note is written; by a worker: write it
ENDED = "ended"
OFFERS, WAITS, HOLDS, LEAVES = "offers", "waits", "holds", "leaves"  # what workers say with their beats


class Founding:
    """A worker's part in the founding of a run.

    Args:
        register: of the run.
        beats: of this worker.
        members: ids that may take part.
        first_wait: seconds that those who found a run wait for each other.
        timeout: seconds after which waiting ends.
        pause: sleeps so many seconds.
    """

    def __init__(
        self,
        register: Register,
        beats: Beats,
        members: Sequence[int],
        *,
        first_wait: float,
        timeout: float,
        pause: Callable[[float], None],
    ):
        """Nothing is asked yet."""
        self.register, self.beats, self.members = register, beats, frozenset(members)
        self.first_wait, self.timeout, self._pause = first_wait, timeout, pause

    def newest(self, *, after: int = -1) -> Era | None:
        """The newest era that was founded, of those from `after` + 1 on."""
        found = None
        while (raw := self.register.get(f"founded/{after + 1}")) is not None:
            after, told = after + 1, json.loads(raw)
            found = Era(after, told["number"], bytes.fromhex(told["chain"]), told["by"])
        return found

    def runs(self, era: int) -> bool:
        """Whether another worker is alive that holds the state of an era."""
        return any(word == f"{HOLDS}-{era}" for _, word in self.beats.alive().values())

    def settle(self, place: Place | None) -> Era:
        """Found the run with the others, or learn that it runs.

        Args:
            place: of the state that this worker has; None where it has none.
        """
        started, last = time.monotonic(), self.newest()
        self.beats.say(OFFERS)
        while True:
            waited = time.monotonic() - started
            if self.register.get(ENDED) is not None:
                raise LinkError("this run has ended: a cluster keeps nothing after that")
            era = self.newest()
            if era is not None and (last is None or era.index > last.index or self.runs(era.index)):
                return era
            self._offer(0 if era is None else era.index + 1, place)
            self._try(era, place, waited)
            if waited > self.timeout:
                raise LinkError(self._in_vain(waited))
            self._pause(0.02)

    def _offer(self, index: int, place: Place | None) -> None:
        told: dict[str, Any] = {"life": self.beats.life}
        if place is not None:
            told |= {"number": place.number, "chain": place.chain.hex(), "expected": place.expected}
        self.register.ask("set", f"offer/{index}/{self.beats.id}", json.dumps(told))

    def _offers(self, index: int) -> dict[int, dict[str, Any]]:
        """What the workers that are alive have offered, this one included."""
        lives = {id: life for id, (life, _) in self.beats.alive().items()} | {self.beats.id: self.beats.life}
        found = {}
        for id, life in sorted(lives.items()):
            raw = self.register.get(f"offer/{index}/{id}")
            if raw is not None and (told := json.loads(raw))["life"] == life:
                found[id] = told
        return found

    def _try(self, era: Era | None, place: Place | None, waited: float) -> None:
        """Propose to begin, where this worker may."""
        index = 0 if era is None else era.index + 1
        offers = self._offers(index)
        holders = {id: told for id, told in offers.items() if "number" in told}
        if era is not None and waited < 2 * self.beats.silence:
            return  # somebody who holds the state may be alive, and not heard yet
        if holders:
            if place is None:
                return
            by = max(holders, key=lambda id: (holders[id]["number"], -id))
            best = holders[by]
            if set(best["expected"]) <= set(offers) or waited > self.first_wait:
                self._propose(index, {"number": best["number"], "chain": best["chain"], "by": by})
        elif self._may_begin(era) and (self.members <= set(offers) or waited > self.first_wait):
            self._propose(index, {"number": 0, "chain": NO_CHAIN.hex(), "by": self.beats.id})

    def _may_begin(self, era: Era | None) -> bool:
        """Whether workers without a state may begin: the run is new, and its host has noted that it begins."""
        if era is not None or self.register.get(BEGUN) is not None:
            return False
        self.register.ask("set", WISH, b"1")
        return self.register.get(MAY_BEGIN) is not None

    def _propose(self, index: int, told: dict[str, Any]) -> None:
        self.register.ask("compare_set", f"founded/{index}", b"", json.dumps(told))

    def _in_vain(self, waited: float) -> str:
        return (
            f"worker {self.beats.id}: for {waited:.0f} s nobody was there who holds the state of this run, and a run that has "
            "begun is not begun again without it: start a worker that keeps checkpoints (keep=folder), or a new run"
        )
