"""Heartbeat: who is still there? Asked only when an exchange has failed, so that the error can name the lost rank.

A collective that fails says "connection closed by peer" or "timed out"; which rank is to blame it does not say, and a
healthy rank that waits for the dead one looks just as silent. So every process raises a counter in the job's key-value
store twice a second from a thread of its own; whose counter stands still is gone (killed, stopped or cut off). A rank that
gives up because of it says so in the store before it leaves, so that nobody takes it for lost as well.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

INTERVAL = 0.5  # seconds between two beats
SILENCE = 2.5  # seconds without a beat after which a rank counts as lost


class Heartbeat:
    """This process's beat in the store, and the means to listen to the others'."""

    _running: Heartbeat | None = None

    @classmethod
    def start(cls) -> Heartbeat:
        """The heartbeat of this process in the job it is in, started at the first call."""
        store = dist.distributed_c10d._get_default_store()
        running = cls._running
        if running is None or running._job is not store or not running._thread.is_alive():
            if running is not None:
                running.stop()
            cls._running = running = cls(store, dist.get_rank())
        return running

    @classmethod
    def end(cls) -> None:
        """Stop the heartbeat of this process, if there is one: at the end of the job or of the process."""
        running, cls._running = cls._running, None
        if running is not None:
            running.stop()

    def __init__(self, store: dist.Store, rank: int):
        """Beat as global rank `rank` into `store` until the process ends."""
        # One connection for the beat and one for listening: a store connection serves one caller at a time.
        self._job, self._rank = store, rank
        self._store, self._mine = _connection(store), f"thinwire/beat/{rank}"
        self._listen = _connection(store)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="thinwire-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the beat."""
        self._stop.set()
        self._thread.join(timeout=2 * INTERVAL)

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._store.set(self._mine, str(count))
            except RuntimeError:  # the store is gone: the job is over, or its host was lost
                return
            self._stop.wait(INTERVAL)

    def leave(self) -> None:
        """Tell the others that this rank gives up and is not lost."""
        with contextlib.suppress(RuntimeError):
            self._listen.set(f"thinwire/left/{self._rank}", "1")

    def silent(self, ranks: Iterable[int]) -> tuple[list[int], bool]:
        """Listen for `SILENCE` seconds.

        Args:
            ranks: global ranks to listen for.

        Returns:
            The ranks that did not beat meanwhile and did not say that they leave, and whether the store could be reached.
        """
        ranks = list(ranks)
        try:
            before = [self._count(r) for r in ranks]
            time.sleep(SILENCE)
            after = [self._count(r) for r in ranks]
            left = [self._listen.check([f"thinwire/left/{r}"]) for r in ranks]
        except RuntimeError:
            return [], False
        return [r for r, b, a, gone in zip(ranks, before, after, left, strict=True) if a == b and not gone], True

    def _count(self, rank: int) -> bytes:
        key = f"thinwire/beat/{rank}"
        return self._listen.get(key) if self._listen.check([key]) else b""


atexit.register(Heartbeat.end)  # once, however many jobs the process joins; before the store goes away


def _connection(store: dist.Store) -> dist.Store:
    try:
        own: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):  # file and in-memory stores need no connection of their own
        own = store
    own.set_timeout(timedelta(seconds=5))
    return own
