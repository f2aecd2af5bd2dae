"""Beats: which workers of a cluster are alive, told by counters in its register, and by a connection to each: see `Watch`."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import LinkError
from thinwire.links.decided import Moved
from thinwire.links.register import Register
from thinwire.links.watch import Watch

_PER_SILENCE = 4  # beats in the time after which a worker counts as gone
_JOINED = 30.0  # seconds that the end of a thread is waited for at most: the store's own limits are shorter


@dataclass
class _Heard:
    """The last beat of a worker and when it was new on this worker's clock.

    Attributes:
        there: whether the process is known to live, and not only to have left a beat behind.
        ended: whether it refused a connection.
        since: beats since then; the first one may have been under way.
    """

    text: str
    at: float
    there: bool = False
    ended: bool = False
    since: int = 0

    @property
    def life(self) -> str:
        return self.text.split(" ")[0]


class Beats:
    """This worker's beat, and those of the others, in a thread with a connection of its own.

    Args:
        register: of the run.
        id: this worker.
        ids: all workers that may take part.
        silence: seconds without a beat after which a worker counts as gone.
        address: host and port where this process listens, with a bar between them: who is refused there knows that it ended.
    """

    def __init__(self, register: Register, id: int, ids: Sequence[int], silence: float = 1.0, *, address: str):
        """Nothing is said before `say`."""
        self.id, self.ids, self.silence = id, tuple(i for i in ids if i != id), silence
        self.life = f"{address}|{secrets.token_hex(8)}"
        self._register, self._said, self._count = register, "", 0
        self._heard: dict[int, _Heard] = {}
        self._watch = Watch(self._reached, self._ended)
        self._lock, self._asking, self._stop, self._thread = threading.Lock(), threading.Lock(), threading.Event(), None
        self._looked = time.monotonic()

    def say(self, what: str) -> None:
        """Say what this worker does, one word, from now on with every beat."""
        self._said = what
        if self._thread is None:
            self._register = self._register.another()
            self._thread = threading.Thread(target=self._run, name="thinwire beats", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # of a link that is never closed
        self._beat()

    def close(self) -> None:
        """Beat no longer."""
        atexit.unregister(self.close)
        self._stop.set()
        if self._thread is not None:
            # Not for a moment only: a thread that is within the store's C++ code when Python ends takes the process along.
            self._thread.join(_JOINED)
        self._watch.close()

    def silent(self, times: float = 1.0) -> set[int]:
        """Ids of workers that have beaten before, and do no longer; none where this worker could not listen itself.

        Args:
            times: how often the seconds after which a worker counts as gone.
        """
        now = time.monotonic()
        with self._lock:
            listening = now - self._looked < self.silence / 2  # else others may have been kept from beating, too
            late = now - times * self.silence
            return {id for id, heard in self._heard.items() if heard.ended or (listening and heard.at < late)}

    def alive(self) -> dict[int, tuple[str, str]]:
        """Life and word of the other workers whose beat is known to go on."""
        now = time.monotonic()
        with self._lock:
            heard = {id: heard for id, heard in self._heard.items() if heard.there and not heard.ended}
            told = {id: heard.text.split(" ") for id, heard in heard.items() if now - heard.at <= self.silence}
        return {id: (life, word) for id, (life, _, word) in told.items()}

    def _run(self) -> None:
        while not self._stop.wait(self.silence / _PER_SILENCE):
            with contextlib.suppress(LinkError):  # whoever needs the host says so
                self._beat()

    def _beat(self) -> None:
        with self._asking:  # a host that is frozen keeps who beats waiting, and nobody who looks
            self._count += 1
            try:
                told = self._speak_and_listen()
            except Moved:  # a host that was started again knows nothing of anybody
                self._register.arrive()
                told = self._speak_and_listen()
                with self._lock:
                    self._heard.clear()
            with self._lock:
                self._note(told, time.monotonic())

    def _note(self, told: dict[int, str], now: float) -> None:
        for id, text in told.items():
            self._hear(id, text, now)
        if now - self._looked > self.silence / 2:  # this process was frozen, or the host: others may have been silent too
            for heard in self._heard.values():
                heard.at = max(heard.at, now - self.silence / 2)
        self._looked = now

    def _speak_and_listen(self) -> dict[int, str]:
        self._register.ask("set", _key(self.id), f"{self.life} {self._count} {self._said}")
        told = {id: self._register.get(_key(id)) for id in self.ids}
        return {id: raw.decode("ascii", "replace") for id, raw in told.items() if raw is not None}

    def _hear(self, id: int, text: str, now: float) -> None:
        before = self._heard.get(id)
        if before is None or before.life != text.split(" ")[0]:
            self._heard[id] = heard = _Heard(text, now)
            self._watch.follow(id, heard.life, heard.life.rpartition("|")[0])
        elif before.text != text:
            before.text, before.at, before.there = text, now, True
            before.since += before.ended
            before.ended = before.ended and before.since < 2  # it beats on: only the connection is refused

    def _reached(self, id: int, life: str) -> None:
        with self._lock:
            if (heard := self._heard.get(id)) is not None and heard.life == life:
                heard.there, heard.at = True, time.monotonic()

    def _ended(self, id: int, life: str) -> None:
        with self._lock:
            if (heard := self._heard.get(id)) is not None and heard.life == life:
                heard.ended, heard.since = True, 0


def _key(id: int) -> str:
    return f"beat/{id}"
