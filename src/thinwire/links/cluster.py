"""A run of workers that reach each other: the objects of an elastic run in torch's TCPStore, which one process holds in memory.

`TCPStore.compare_set` writes a key only where there is none, which is all that an elastic run needs. All bytes go through the
process that holds the store: with M workers and messages of N bytes it receives M N and sends M (M - 1) N bytes per round. So
this is for messages of a few MB and a few dozen workers; large dense messages are better off in an object store. What is in the
store is lost with its process: workers then found the run again, from checkpoints of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors import LinkError
from thinwire.links.manifest import Store, check_size
from thinwire.links.store import gist, hold_store

_TAKEN, _GONE = "+", "-"  # what a line of an index begins with


class ClusterStore(Store):
    """The objects of a run in a `TCPStore`.

    It has no authentication: a private network only.

    Args:
        host: where the store is held.
        port: 0 for any that is free, where this process holds it.
        hold: whether this process holds it; the others reach it at `port`.
        timeout: seconds that a request may take.
    """

    def __init__(self, host: str, port: int, *, hold: bool = False, timeout: float = 60.0):
        """Hold the store, or reach it."""
        try:
            if hold:
                self._store = hold_store(host, port, timeout=timeout)
            else:
                wait = timedelta(seconds=timeout)
                self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        except RuntimeError as cause:
            raise LinkError(f"no store of a run at {host}:{port} [{gist(cause)}]") from cause
        self.host, self.port = host, self._store.port

    def create(self, key: str, data: bytes) -> bool:
        """Write an object where there is none, then name it in the index of its folder."""
        held = data or _NOTHING
        there = self._ask("compare_set", key, b"", held)
        if there == held:
            self._name(_TAKEN, key, len(data))
        return there == held

    def get(self, key: str, *, most: int) -> bytes | None:
        """The bytes of an object."""
        if not self._ask("check", [key]):
            return None
        found = self._ask("get", key)
        found = b"" if found == _NOTHING else found
        check_size(key, len(found), most)
        return found

    def list(self, prefix: str) -> dict[str, int]:
        """Names below a prefix and their sizes; the prefix is a folder."""
        index = _INDEX + prefix
        if not self._ask("check", [index]):
            return {}
        found: dict[str, int] = {}
        for line in self._ask("get", index).decode().splitlines():
            sign, name, size = line.split(" ")
            if sign == _TAKEN:
                found[name] = int(size)
            else:
                found.pop(name, None)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; their folders remember that."""
        for key in keys:
            self._ask("delete_key", key)
            self._name(_GONE, key, 0)

    def _name(self, sign: str, key: str, size: int) -> None:
        folder, _, name = key.rpartition("/")
        self._ask("append", f"{_INDEX}{folder}/", f"{sign} {name} {size}\n")

    def _ask(self, what: str, *arguments: object):
        try:
            return getattr(self._store, what)(*arguments)
        except RuntimeError as cause:
            raise LinkError(f"the store of the run at {self.host}:{self.port} does not answer [{gist(cause)}]") from cause


_INDEX = "index/"
_NOTHING = b"\x00thinwire nothing"  # a TCPStore cannot tell an empty value from none
