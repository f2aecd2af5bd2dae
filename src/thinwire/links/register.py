"""Register: the key-value store of a cluster, torch's TCPStore, reached by a worker that outlives a restart of its host.

What is in it is in the memory of the process that holds it (`RunHost`). Each life of that process has a name; a worker that
finds another one knows that all it had read and written is gone.
"""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.errors import LinkError
from thinwire.links.decided import Moved
from thinwire.links.store import gist

log = logging.getLogger("thinwire")

LIFE = "life"
MOST_VALUE = 8 << 20  # bytes: a TCPStore ends the connection on which more comes
_ANSWER = 30.0  # seconds that a request may take
_MOST_RECONNECTS = 100  # for one request
_PAUSE = 0.1  # seconds between two attempts to reach the host


class Register:
    """A connection to the register of a run.

    Args:
        host: where it is held.
        port: of the host.
        outage: seconds that the host may be away.
    """

    def __init__(self, host: str, port: int, *, outage: float = 60.0):
        """Reach it."""
        self.host, self.port, self.outage = host, port, outage
        self._client, self.life = self._connect()
        self.moved = False  # the host has begun another life, in which this worker has not been

    def another(self) -> Register:
        """A connection of its own, for another thread."""
        return Register(self.host, self.port, outage=self.outage)

    def arrive(self) -> None:
        """Go on in the life that the host has now."""
        self.moved = False

    @property
    def own_address(self) -> str:
        """The address of this machine by which it reaches the host: others of the cluster reach it there."""
        with socket.create_connection((self.host, self.port), timeout=_ANSWER) as connection:
            return connection.getsockname()[0]

    def get(self, key: str) -> bytes | None:
        """What is at a key."""
        return self.ask("get", key) if self.ask("check", [key]) else None

    def ask(self, what: str, *arguments: object) -> Any:
        """Call a method of the TCPStore, again where the connection was lost: none that is used here minds.

        Raises:
            Moved: the host was started again, and is empty.
            LinkError: it does not answer.
        """
        for _ in range(_MOST_RECONNECTS):
            if self.moved:
                raise Moved(f"the host of the run at {self.host}:{self.port} was started again")
            try:
                return getattr(self._client, what)(*arguments)
            except dist.DistNetworkError as cause:
                log.warning("the host of the run at %s:%d is away [%s]", self.host, self.port, gist(cause))
                before = self.life
                self._client, self.life = self._connect()
                self.moved = self.life != before
            except RuntimeError as cause:
                raise LinkError(f"the host of the run at {self.host}:{self.port} does not answer [{gist(cause)}]") from cause
        raise LinkError(f"the host of the run at {self.host}:{self.port} ended {_MOST_RECONNECTS} connections of one request")

    def _connect(self) -> tuple[dist.TCPStore, str]:
        started, why = time.monotonic(), ""
        while True:
            try:
                # A plain connection first: torch would print a trace of its own calls for every attempt in vain.
                socket.create_connection((self.host, self.port), timeout=_ANSWER).close()
                wait = timedelta(seconds=_ANSWER)
                client = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=wait)
                return client, client.get(LIFE).decode("ascii", "replace")
            except (OSError, RuntimeError) as cause:
                why = gist(cause)
            if time.monotonic() - started > self.outage:
                raise LinkError(
                    f"no run at tcp://{self.host}:{self.port} for {self.outage:g} s [{why}]: is `thinwire run serve` there?"
                )
            time.sleep(_PAUSE)
