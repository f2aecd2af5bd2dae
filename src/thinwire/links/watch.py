"""Watch: a connection to each worker of a cluster, which the kernel closes at the moment its process ends."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

_REACH = 2.0  # seconds that a worker has to accept a connection
_LATER = 5.0  # seconds after which one that could not be reached is tried again
_MOST_TRIES = 4  # connections to one process in a row: one that ends each of them at once is left to its beats
_SHORT = 10.0  # seconds that a connection lasts at least which was not ended at once: idle ones are closed some time


@dataclass(frozen=True)
class _Process:
    """One life of a worker, where it listens, how often it ended a connection at once, and when the last one began."""

    id: int
    life: str
    address: str
    tries: int = 0
    since: float = 0.0


class Watch:
    """Tells at once which processes are there and which have ended, where a connection can tell it.

    A process that is frozen, or whose machine has lost its power, keeps its connection: beats tell of those.

    Args:
        reached: called with id and life of a process that has accepted a connection.
        ended: called with id and life of one whose connection was closed, and that does not listen any more.
    """

    def __init__(self, reached: Callable[[int, str], None], ended: Callable[[int, str], None]):
        """Nothing is watched yet."""
        self._reached, self._ended = reached, ended
        self._new: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._newest: dict[int, str] = {}  # the life of each worker that is watched
        self._kept: dict[int, tuple[str, socket.socket]] = {}  # its connection
        self._later: list[tuple[float, _Process]] = []
        self._open, self._thread, self._wake = True, None, None

    def follow(self, id: int, life: str, address: str) -> None:
        """Watch a process from now on, and no other of this worker any more; returns at once."""
        self._newest[id] = life
        self._new.put(_Process(id, life, address))
        if self._thread is None and self._open:
            self._wake, woken = socket.socketpair()
            self._wake.setblocking(False)
            self._thread = threading.Thread(target=self._run, args=(self._wake, woken), name="thinwire watch", daemon=True)
            self._thread.start()
        self._rouse()

    def close(self) -> None:
        """End all connections."""
        self._open = False
        self._rouse()
        if self._thread is not None:
            self._thread.join(2 * _REACH)

    def _rouse(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # it has been roused already, or has ended
                self._wake.send(b"\x00")

    def _run(self, wake: socket.socket, woken: socket.socket) -> None:
        with wake, woken, selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while self._open:
                for key, _ in selector.select(_LATER if self._later else None):
                    if key.data is None:
                        woken.recv(1 << 12)
                    else:
                        self._drop(selector, key.data.id)
                        short = time.monotonic() - key.data.since < _SHORT
                        self._new.put(replace(key.data, tries=key.data.tries + 1 if short else 0))
                while self._open and (process := self._next()) is not None:
                    self._connect(selector, process)
            for id in list(self._kept):
                self._drop(selector, id)

    def _next(self) -> _Process | None:
        """A process to connect to; None where there is none now."""
        if not self._new.empty():
            return self._new.get()
        if self._later and self._later[0][0] <= time.monotonic():
            return self._later.pop(0)[1]
        return None

    def _drop(self, selector: selectors.BaseSelector, id: int) -> None:
        _, connection = self._kept.pop(id)
        selector.unregister(connection)
        connection.close()

    def _connect(self, selector: selectors.BaseSelector, process: _Process) -> None:
        known = self._kept.get(process.id)
        if process.tries == _MOST_TRIES or self._newest[process.id] != process.life or (known and known[0] == process.life):
            return
        if known:
            self._drop(selector, process.id)  # of a life before
        host, _, port = process.address.rpartition("|")
        try:
            connection = socket.create_connection((host, int(port)), timeout=_REACH)
        except ConnectionRefusedError:
            self._ended(process.id, process.life)
        except ValueError:
            return
        except OSError:  # nothing can be told now
            self._later.append((time.monotonic() + _LATER, process))
        else:
            self._kept[process.id] = process.life, connection
            selector.register(connection, selectors.EVENT_READ, replace(process, since=time.monotonic()))
            self._reached(process.id, process.life)
