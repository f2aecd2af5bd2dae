"""Beats: which workers of a cluster are alive, told by counters in its register."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import LinkError
from thinwire.links.decided import Moved
from thinwire.links.register import Register

_PER_SILENCE = 4  # beats in the time after which a worker counts as gone


@dataclass
class _Heard:
    """The last beat of a worker: its text, and when it was new on this worker's clock; whether it was seen to change."""

    text: str
    at: float
    changed: bool = False


class Beats:
    """This worker's beat, and those of the others, in a thread with a connection of its own.

    Args:
        register: of the run.
        id: this worker.
        ids: all workers that may take part.
        silence: seconds without a beat after which a worker counts as gone.
    """

    def __init__(self, register: Register, id: int, ids: Sequence[int], silence: float = 1.0):
        """Nothing is said before `say`."""
        self.id, self.ids, self.silence = id, tuple(i for i in ids if i != id), silence
        self.life = secrets.token_hex(8)
        self._register, self._said, self._count = register, "", 0
        self._heard: dict[int, _Heard] = {}
        self._lock, self._stop, self._thread = threading.Lock(), threading.Event(), None
        self._looked = time.monotonic()

    def say(self, what: str) -> None:
        """Say what this worker does, one word, from now on with every beat."""
        self._said = what
        if self._thread is None:
            self._register = self._register.another()
            self._thread = threading.Thread(target=self._run, name="thinwire beats", daemon=True)
            self._thread.start()
        self._beat()

    def close(self) -> None:
        """Beat no longer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(self.silence)

    def silent(self, times: float = 1.0) -> set[int]:
        """Ids of workers that have beaten before, and do no longer; none where this worker could not listen itself.

        Args:
            times: how often the seconds after which a worker counts as gone.
        """
        now = time.monotonic()
        with self._lock:
            listening = now - self._looked < self.silence
            return {id for id, heard in self._heard.items() if listening and now - heard.at > times * self.silence}

    def alive(self) -> dict[int, tuple[str, str]]:
        """Life and word of the other workers whose beat is known to go on."""
        now = time.monotonic()
        with self._lock:
            told = {id: heard.text for id, heard in self._heard.items() if heard.changed and now - heard.at <= self.silence}
        return {id: (text.split(" ")[0], text.split(" ")[2]) for id, text in told.items()}

    def _run(self) -> None:
        while not self._stop.wait(self.silence / _PER_SILENCE):
            with contextlib.suppress(LinkError):  # whoever needs the host says so
                self._beat()

    def _beat(self) -> None:
        with self._lock:
            self._count += 1
            try:
                self._speak_and_listen()
            except Moved:  # a host that was started again knows nothing of anybody
                self._register.arrive()
                self._heard.clear()
                self._speak_and_listen()
            now = time.monotonic()
            if now - self._looked > self.silence / 2:  # this process was frozen, or the host: others may have been silent too
                for heard in self._heard.values():
                    heard.at = max(heard.at, now - self.silence / 2)
            self._looked = now

    def _speak_and_listen(self) -> None:
        self._register.ask("set", _key(self.id), f"{self.life} {self._count} {self._said}")
        for id in self.ids:
            if (raw := self._register.get(_key(id))) is not None:
                self._hear(id, raw.decode("ascii", "replace"))

    def _hear(self, id: int, text: str) -> None:
        before = self._heard.get(id)
        if before is None or before.text.split(" ")[0] != text.split(" ")[0]:
            self._heard[id] = _Heard(text, time.monotonic())
        elif before.text != text:
            before.text, before.at, before.changed = text, time.monotonic(), True


def _key(id: int) -> str:
    return f"beat/{id}"
