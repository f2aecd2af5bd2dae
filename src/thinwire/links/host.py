"""RunHost: the process that holds the register of a run on a cluster. It decides nothing, and sees no message."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, LinkError
from thinwire.links.folder import FolderStore
from thinwire.links.founding import BEGUN, MAY_BEGIN, WISH
from thinwire.links.register import LIFE, Register
from thinwire.links.store import hold_store

RUN, NAME = "run", "name"
_LOOK = 0.05  # seconds between two looks for workers that wish to begin
_MOST = 1 << 20  # bytes of a run's settings


class RunHost:
    """Holds the register of a run until it is closed.

    Args:
        host: the address of this machine to listen at, and no other.
        port: 0 for any that is free.
        workers: how many may take part.
        folder: where a note is kept that the run has begun, and its settings, so that a host that is started again does not let
            workers without a state begin anew; None keeps none.
        train: settings for `thinwire train --join`.
        quorum: messages that a round needs.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        workers: int,
        folder: str | Path | None = None,
        train: dict[str, Any] | None = None,
        quorum: int = 1,
    ):
        """Listen, and let workers in."""
        if not 1 <= quorum <= workers:
            raise ConfigError(f"quorum must be from 1 to {workers} with {workers} workers, got {quorum}")
        _check_here(host)
        self._notes = None if folder is None else FolderStore(folder)
        told, name = json.dumps({"workers": workers, "quorum": quorum, "train": train or {}}, sort_keys=True), "-"
        if self._notes is not None:
            name = self._notes.decide("name", secrets.token_hex(16).encode()).decode("ascii", "replace")
            there = self._notes.decide("run.json", told.encode(), most=_MOST).decode("utf-8", "replace")
            if there != told:
                raise ConfigError(f"the folder {folder} is that of a run with other settings: {there[:200]}")
        self._store = hold_store(host, port)
        self.host, self.port = host, self._store.port
        self._store.set(RUN, told)
        self._store.set(NAME, name)
        if self._notes is not None and self._notes.get("begun", most=1) is not None:
            self._store.set(BEGUN, "1")
        self._store.set(LIFE, secrets.token_hex(8))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="thinwire host", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address for `thinwire.join`."""
        return f"tcp://{self.host}:{self.port}"

    def _watch(self) -> None:
        """Note that the run begins, before it does."""
        while not self._stop.wait(_LOOK):
            if self._store.check([WISH]):
                if self._notes is not None:
                    self._notes.create("begun", b"1")
                self._store.set(MAY_BEGIN, "1")
                return

    def close(self) -> None:
        """Hold it no longer."""
        self._stop.set()
        self._thread.join()
        del self._store


def _check_here(host: str) -> None:
    """A store that cannot listen at its address would listen at all of them: refuse that, since it lets in anybody."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as cause:
        raise ConfigError(
            f"this machine cannot listen at {host!r} [{cause.strerror or cause}]: give an address of its own"
        ) from None


def read_hosted_run(register: Register) -> dict[str, Any]:
    """What the host says of its run: workers, quorum, train, and its name."""
    raw, name = register.get(RUN), (register.get(NAME) or b"").decode("ascii", "replace")
    try:
        told = json.loads(raw or b"")
        return {"workers": int(told["workers"]), "quorum": int(told["quorum"]), "train": dict(told["train"]), "name": name}
    except (ValueError, KeyError, TypeError) as cause:
        raise LinkError(f"what is at {register.host}:{register.port} is not the host of a run: {str(cause)[:80]}") from None
