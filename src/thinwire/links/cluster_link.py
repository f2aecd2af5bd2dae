"""ClusterLink: an elastic link between workers that reach each other. Manifests are in a register, messages with the workers.

The logic is that of `ElasticLink`. What differs is that objects can be lost with those who hold them:

    a message counts   once all who are there for the round hold it, so that any of them can apply the round
    a dead worker      is noticed by its closed connection, or by its beats, and not waited for
    a newcomer         asks for the state, and a member writes a checkpoint at the end of the next round
    nobody is left     who holds the state, or the host was started again: the run is founded again, see `Founding`
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, LinkError
from thinwire.links.archive import Archive
from thinwire.links.beats import Beats
from thinwire.links.bodies import Bodies
from thinwire.links.cluster import ClusterStore
from thinwire.links.decided import Decided, Era, Moved
from thinwire.links.elastic import ElasticLink
from thinwire.links.folder import FolderStore
from thinwire.links.founding import ENDED, HOLDS, LEAVES, OFFERS, WAITS, Founding
from thinwire.links.manifest import Manifest, Signer, Unsigned
from thinwire.links.register import Register
from thinwire.links.signed import MESSAGE_NBYTES
from thinwire.links.view import Place

_WANT = "want"  # in the register: a checkpoint of a later round than this is wanted
_LINGER = 10.0  # seconds that a worker which has ended serves those who are behind


class ClusterLink(ElasticLink):
    """One worker's end of a run on a cluster.

    Args:
        register: of the run.
        id: this worker.
        workers: how many may take part; ids are from 0 on.
        keep: a folder in which this worker keeps checkpoints for itself; None keeps none.
        run: a name of the run: what was kept of another is refused.
        silence: seconds without a beat after which a worker counts as gone.
        room: bytes of messages and checkpoints that this worker holds for others.
        options: for `ElasticLink`.
    """

    store: ClusterStore

    def __init__(
        self,
        register: Register,
        id: int,
        *,
        workers: int,
        keep: str | Path | None = None,
        run: str = "",
        silence: float = 1.0,
        room: int = 1 << 30,
        **options: Any,
    ):
        """Listen for others, and tell them where."""
        self.register, self.bodies = register, Bodies(register.own_address, room=room)
        self.beats = Beats(register, id, range(workers), silence, address=self.bodies.address)
        store = ClusterStore(register, id, self.bodies)
        super().__init__(store, Unsigned(id), roster=range(workers), **{"poll": 0.01, **options})
        self.own_checkpoints = None if keep is None else _open_kept(FolderStore(keep), self.signer, run)
        self._founding = Founding(
            register, self.beats, self.members, first_wait=self.waits.first, timeout=self.timeout, pause=self.elapse
        )
        self._era, self._looked = Era(0, 0, self.place.chain, id), time.monotonic()

    @property
    def era(self) -> int:
        """How often the run was founded again."""
        return self._era.index

    # --- Founding ---------------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Go on with a host that was started again."""
        self.register.arrive()
        self.store.announce()

    def settle(self, place: Place | None) -> Era:
        """Found the run with the others, or learn that it runs."""
        self._era = self._founding.settle(place)
        self.store.era = self._era.index
        self.beats.say(WAITS)
        return self._era

    def hold_state(self) -> None:
        """Say that this worker has the state of the run."""
        self.beats.say(f"{HOLDS}-{self.era}")

    def ask_for_state(self, after: int) -> bool:
        """Wait for a checkpoint of a later round than `after`."""
        after, started, want = max(after, self.archive.newest()), time.monotonic(), f"{_WANT}/{self.era}"
        self.beats.say(WAITS)
        while self.archive.newest() <= after:
            if int(self.register.get(want) or b"-2") < after:
                self.register.ask("set", want, str(after))
            self._check_era()
            waited = time.monotonic() - started
            if waited > 2 * self.beats.silence and not self._founding.runs(self.era):
                raise Moved("nobody who is there holds the state of the run")
            if waited > self.timeout:
                raise LinkError(f"worker {self.rank}: no checkpoint after round {after} was written for {waited:.0f} s")
            self.elapse(self.waits.poll)
        return True

    def state_wanted(self) -> bool:
        """Whether somebody waits for a later checkpoint than the newest."""
        wanted = self.register.get(f"{_WANT}/{self.era}")
        return wanted is not None and int(wanted) >= self.archive.newest()

    def _check_era(self) -> None:
        """Raise `Moved` where the run was founded again without this worker."""
        self._looked = time.monotonic()
        if self._founding.newest(after=self.era) is not None:
            raise Moved("the run was founded again while this worker was away")

    # --- Rounds -----------------------------------------------------------------------------------------------------------

    def start_over(self, place: Place) -> None:
        """Go to a place in the history."""
        super().start_over(place)
        self.store.at_hand = place.key("")

    def absent(self) -> Collection[int]:
        """Who is silent, or has come without a state."""
        new = self.place.number <= self._era.number + 1  # those who have just founded the run still say that they do
        idle = (WAITS, LEAVES) if new else (WAITS, LEAVES, OFFERS)
        return self.beats.silent() | {id for id, (_, word) in self.beats.alive().items() if word in idle}

    def _may_close(self, waited: float, *, posted: bool) -> bool:
        if time.monotonic() - self._looked > self.beats.silence:
            self._check_era()
        self.store.longest = self.longest + MESSAGE_NBYTES + self.signer.nbytes
        patient = max(2 * self.waits.deadline(), 4 * self.beats.silence)
        return super()._may_close(waited, posted=posted) and (self._safe() or waited > patient)

    def _safe(self) -> bool:
        """Whether all who have sent a message, and are alive, hold all messages; who was there a moment ago is waited for."""
        there = set(self._view.messages)
        readers = there - self.beats.silent(2.0)
        return all(readers <= set(self.store.holders(self.place.key(str(id)))) for id in there)

    def _take(self, manifest: Manifest, raw: bytes, *, posted: bool) -> Decided:
        self.store.longest = self.longest + MESSAGE_NBYTES + self.signer.nbytes
        self._check_era()
        return super()._take(manifest, raw, posted=posted)

    def _gone(self, waited: float) -> bool:
        return super()._gone(waited) or waited > 2 * self.beats.silence

    # --- Leaving ----------------------------------------------------------------------------------------------------------

    def say(self, kind: str) -> None:
        """Tell the others something in the round at hand; that a run has ended, to all who come later too."""
        super().say(kind)
        if kind == "end":
            self.register.ask("set", ENDED, b"1")

    def close(self) -> None:
        """Leave: serve those who are behind for a while, then end all connections and threads of this link."""
        super().close()
        self.beats.say(LEAVES)
        until = time.monotonic() + _LINGER
        while self.ended and self._founding.runs(self.era) and time.monotonic() < until:
            self.elapse(self.waits.poll)
        self.beats.close()
        self.bodies.close()


def _open_kept(folder: FolderStore, signer: Signer, run: str) -> Archive:
    """What a worker keeps for itself; a `ConfigError` where the folder is that of another run."""
    if folder.decide("run", run.encode()) != run.encode():
        raise ConfigError(f"the folder {folder.folder} keeps checkpoints of another run: choose another one")
    return Archive(folder, signer)
