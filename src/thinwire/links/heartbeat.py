"""Heartbeat: which ranks are alive, and which have left and why, so that an error can name the rank that caused it.

A collective that fails says "connection closed by peer" or "timed out"; which rank caused it, it does not say, and a
rank that waits for the dead one looks just as silent. So every process raises a counter in the job's key-value
store twice a second from a thread of its own; a rank whose counter stands still is gone (killed, stopped or cut off).

A process that ends, by an exception or because it is done, says so in the store, with the number of exchanges that it took
part in: whoever waits for it in a later one need not wait any longer. A rank that gives up because of another says that too, so
that it is not taken for the cause. The store is read only when a wait has taken long, or has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.links.rendezvous import holds_store

INTERVAL = 0.5  # seconds between two beats
SILENCE = 2.5  # seconds without a beat after which a rank counts as lost
LAST_OUT = 3.0  # seconds that the rank which holds the store waits for the others to leave before it

_NEWS = "thinwire/left"  # changes whenever a rank leaves or gives up: one question tells whether to ask for each


@dataclass
class Part:
    """What this process has done in one group.

    Attributes:
        posts: exchanges begun.
        rounds: those of them that were rounds.
        open: numbers of those that were begun and not waited for.
        gave_up: it has given up on this group, because of others.
    """

    posts: int = 0
    rounds: int = 0
    open: set[int] = field(default_factory=set)
    gave_up: bool = False

    def begin(self, *, is_round: bool) -> int:
        """Count an exchange and return its number."""
        self.posts += 1
        self.rounds += is_round
        self.open.add(self.posts)
        return self.posts


@dataclass(frozen=True)
class Departure:
    """What a rank has said about itself in the store.

    Attributes:
        rank: its global rank.
        ended: it has left the job; otherwise it has only given up on some groups.
        reason: the exception that ended it, empty where there was none.
        parts: by the name of a group, what it has done in it: posts, rounds, open, gave_up.
    """

    rank: int
    ended: bool
    reason: str
    parts: Mapping[str, Mapping[str, Any]]

    def took_part(self, group: str, number: int) -> bool:
        """Whether it saw this exchange through."""
        part = self.parts.get(group, {})
        return part.get("posts", 0) >= number and number not in part.get("open", ())

    def gave_up(self, group: str) -> bool:
        """Whether it has given up on this group because of others."""
        return bool(self.parts.get(group, {}).get("gave_up"))

    def words(self, group: str) -> str:
        """When it left and why."""
        after = f"after round {self.parts.get(group, {}).get('rounds', 0)}"
        return f"left {after}: {self.reason or 'its program ended (did it take fewer steps, or skip finish()?)'}"


class Heartbeat:
    """This process's beat in the store, and a reader of the others'."""

    _running: Heartbeat | None = None

    @classmethod
    def start(cls) -> Heartbeat:
        """The heartbeat of this process in the job it is in, started at the first call."""
        store = dist.distributed_c10d._get_default_store()
        running = cls._running
        if running is None or running._job is not store or not running._thread.is_alive():
            if running is not None:
                running.stop()
            cls._running = running = cls(store, dist.get_rank(), dist.get_world_size())
        return running

    @classmethod
    def end(cls, reason: BaseException | None = None) -> None:
        """Report that this process leaves the job, and why; does nothing where it is in none, or has reported it."""
        running, cls._running = cls._running, None
        if running is not None:
            running._leave(_gist(reason) if reason is not None else _uncaught)

    def __init__(self, store: dist.Store, rank: int, size: int = 1):
        """Beat as global rank `rank` into `store` until the process ends."""
        # One connection for the beat and one for listening: a store connection serves one caller at a time.
        self._job, self._rank, self._size = store, rank, size
        self._store, self._mine = _connection(store), f"thinwire/beat/{rank}"
        self._listen = _connection(store)
        self._parts: dict[str, Part] = {}
        self._said = 0
        self._news = b""
        with contextlib.suppress(RuntimeError):  # a process that comes back is there again
            self._listen.delete_key(_departure_key(rank))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="thinwire-heartbeat", daemon=True)
        self._thread.start()
        _watch_this_process()

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

    # --- What this process says -------------------------------------------------------------------------------------------

    def part(self, group: str) -> Part:
        """The account of what this process does in a group; one that comes back to it has not given up."""
        part = self._parts.setdefault(group, Part())
        if part.gave_up:
            part.gave_up = False
            self._say(ended=False)
        return part

    def give_up(self, group: str) -> None:
        """Tell the others that this rank gives up on a group because of others, and is not lost."""
        self._parts.setdefault(group, Part()).gave_up = True
        self._say(ended=False)

    def _leave(self, reason: str) -> None:
        self._say(ended=True, reason=reason)
        if holds_store(self._rank):  # the store goes with this process: let the others read what it says, or leave as well
            deadline = time.monotonic() + LAST_OUT
            with contextlib.suppress(RuntimeError):
                while not self._all_left() and time.monotonic() < deadline:
                    time.sleep(0.05)
        self.stop()

    def _all_left(self) -> bool:
        if not self._listen.check([_departure_key(r) for r in range(self._size)]):
            return False
        return all(d.ended for d in self.departures(range(self._size)))

    def _say(self, *, ended: bool, reason: str = "") -> None:
        parts = {
            group: {"posts": p.posts, "rounds": p.rounds, "open": sorted(p.open)[:1000], "gave_up": p.gave_up}
            for group, p in self._parts.items()
        }
        self._said += 1
        with contextlib.suppress(RuntimeError):
            told = {"ended": ended, "reason": reason, "parts": parts}
            self._listen.set(_departure_key(self._rank), json.dumps(told))
            self._listen.set(_NEWS, f"{self._rank}.{self._said}")  # after what it announces

    # --- What the others say ----------------------------------------------------------------------------------------------

    def news(self) -> bool:
        """Whether a rank has left or given up since this was asked last; one question to the store."""
        try:
            told = self._listen.get(_NEWS) if self._listen.check([_NEWS]) else b""
        except RuntimeError:  # the store is gone, which an exchange may survive
            return False
        new, self._news = told != self._news, told
        return new

    def departures(self, ranks: Iterable[int]) -> list[Departure]:
        """What these global ranks have said about leaving, of those that have; none where the store is gone."""
        found = []
        with contextlib.suppress(RuntimeError):
            for rank in ranks:
                key = _departure_key(rank)
                if self._listen.check([key]):
                    found.append(_departure(rank, self._listen.get(key)))
        return found

    def silent(self, ranks: Sequence[int]) -> tuple[list[int], bool]:
        """Listen for `SILENCE` seconds.

        Args:
            ranks: global ranks to listen for.

        Returns:
            The ranks that did not beat meanwhile, and whether the store could be reached.
        """
        try:
            before = [self._count(r) for r in ranks]
            time.sleep(SILENCE)
            after = [self._count(r) for r in ranks]
        except RuntimeError:
            return [], False
        return [r for r, b, a in zip(ranks, before, after, strict=True) if a == b], True

    def _count(self, rank: int) -> bytes:
        key = f"thinwire/beat/{rank}"
        return self._listen.get(key) if self._listen.check([key]) else b""


def _departure_key(rank: int) -> str:
    return f"{_NEWS}/{rank}"


def _departure(rank: int, raw: bytes) -> Departure:
    """What a rank wrote; whatever does not look like it counts as nothing said."""
    try:
        told = json.loads(raw[: 1 << 20])
        parts = told["parts"]
        known = {
            str(group): {
                "posts": int(part["posts"]),
                "rounds": int(part["rounds"]),
                "open": [int(n) for n in part["open"]],
                "gave_up": part["gave_up"] is True,
            }
            for group, part in parts.items()
        }
        return Departure(rank, told["ended"] is True, _one_line(str(told["reason"])), known)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Departure(rank, ended=False, reason="", parts={})


def _connection(store: dist.Store) -> dist.Store:
    try:
        own: dist.Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, RuntimeError):  # file and in-memory stores need no connection of their own
        own = store
    own.set_timeout(timedelta(seconds=5))
    return own


# --- How this process ends -----------------------------------------------------------------------------------------------

_uncaught = ""  # of an uncaught exception
_watched = False


def _watch_this_process() -> None:
    """From now on, an uncaught exception is recorded, and the end of the process is reported to the other ranks."""
    global _watched
    if _watched:
        return
    _watched = True
    main, threads = sys.excepthook, threading.excepthook

    def in_main(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _remember(error)
        main(kind, error, trace)

    def in_thread(told: threading.ExceptHookArgs) -> None:
        if told.exc_value is not None:
            _remember(told.exc_value)
        threads(told)

    sys.excepthook, threading.excepthook = in_main, in_thread
    atexit.register(Heartbeat.end)


def _remember(error: BaseException) -> None:
    global _uncaught
    _uncaught = _gist(error)


def _gist(error: BaseException) -> str:
    """An exception in one short line."""
    said = _one_line(str(error))
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _one_line(text: str, limit: int = 200) -> str:
    """The first line of a text, short and without control characters."""
    first = text.strip().splitlines()[0] if text.strip() else ""
    shown = "".join(c if c.isprintable() else "?" for c in first[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."
