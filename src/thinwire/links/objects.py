"""ObjectStore: the objects of a run in a bucket or a folder, through `obstore` (extra `thinwire[store]`).

Every request may be repeated: objects are written once, so that a second PUT meets its own object and a second GET reads the
same bytes. This is the only place where requests are repeated; obstore's own retries are off.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from thinwire.errors import ConfigError, LinkError, MissingDependency, WireError, how_to_install
from thinwire.links.manifest import MOST_MANIFEST, Store, check_size

if TYPE_CHECKING:
    import obstore.store

log = logging.getLogger("thinwire")

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "file")
MOST_NAMES = 250_000  # of one listing: whoever writes more names than that wants to exhaust memory
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds between two tries
_ANSWER = 20.0  # seconds that a request may take besides the time of its bytes
_SLOWEST = 1e5  # bytes per second: a link of 1 Mbit/s, with room to spare

_used_by: int | None = None  # the process in which obstore has threads: they do not survive a fork


class ObjectStore(Store):
    """Objects below an address: a bucket of S3, Google or Azure, or a folder.

    Args:
        url: `s3://bucket/run`, `gs://bucket/run`, `az://container/run`, or `file:///folder`. Credentials, region and endpoint
            come from the environment, as the provider's own tools have it (AWS_ACCESS_KEY_ID, AWS_ENDPOINT, ...).
        outage: seconds that the store may be away; a request is repeated so long.
        conditional: whether the store refuses to overwrite; `probe` finds out. Where it does not, an object is looked for
            before it is written, which is only safe for keys that a single worker writes.
        options: for the store of obstore: `endpoint`, `access_key_id`, ...
    """

    def __init__(self, url: str, *, outage: float = 600.0, conditional: bool = True, **options: Any):
        """Nothing is asked of the store yet."""
        self.url, self.outage, self.conditional = url, outage, conditional
        self.requests, self.errors = Counter[str](), 0
        self._clients = _Clients(url, options)

    def __repr__(self) -> str:
        """The address."""
        return f"ObjectStore({self.url!r})"

    # --- What a run needs -------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Write an object, once: True where the key holds exactly `data` now, also from an earlier try."""
        try:
            there = self._write(key, data, most=len(data))
        except WireError:  # longer than ours
            return False
        return there is None or there == data

    def decide(self, key: str, proposal: bytes, *, most: int = MOST_MANIFEST) -> bytes:
        """Propose the contents of a key; returns what stands there for good. One request where this worker wins, else two."""
        there = self._write(key, proposal, most=most)
        return proposal if there is None else there

    def get(self, key: str, *, most: int) -> bytes | None:
        """An object, None where there is none. Its size is known before its bytes are read.

        Raises:
            WireError: where it is longer than `most`.
        """

        def ask(client: obstore.store.ObjectStore) -> bytes:
            result = _obstore().get(client, key)
            check_size(key, result.meta["size"], most)
            return bytes(result.bytes())

        try:
            data = self._ask("GET", ask, nbytes=most)
        except FileNotFoundError:
            return None
        check_size(key, len(data), most)  # whatever the server said before
        return data

    def list(self, prefix: str) -> dict[str, int]:
        """The names below a prefix that ends with "/", without it, and their sizes in bytes."""

        def ask(client: obstore.store.ObjectStore) -> dict[str, int]:
            names: dict[str, int] = {}
            for page in _obstore().list(client, prefix=prefix):
                names.update((meta["path"].removeprefix(prefix), meta["size"]) for meta in page)
                if len(names) > MOST_NAMES:
                    raise LinkError(f"{self.url} has more than {MOST_NAMES} objects below {prefix!r}: somebody floods it")
            return names

        return self._ask("LIST", ask)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for key in keys:
            try:
                self._ask("DELETE", lambda client, key=key: _obstore().delete(client, key))
            except FileNotFoundError:
                continue

    def probe(self, who: int | str) -> None:
        """Refuse a store that overwrites what was to be written only where nothing was.

        Args:
            who: this worker; each has a key of its own for this.

        Raises:
            ConfigError: the store says that it had written, twice.
        """
        key, first, second = f"probe/{who}", secrets.token_bytes(16), secrets.token_bytes(16)
        if self._put(key, first) and self._put(key, second):
            raise ConfigError(
                f"{self.url} has no conditional put: it overwrote an object that was to be written only where there was none. "
                "Name a keeper, the one worker that writes manifests (thinwire run create ... --keeper ID), or another store"
            )

    # --- Requests ---------------------------------------------------------------------------------------------------------

    def _write(self, key: str, data: bytes, *, most: int) -> bytes | None:
        """Write where there is nothing; what is there already, None where this wrote."""
        if not self.conditional:
            there = self.get(key, most=most)
            if there is None:
                self._ask("PUT", lambda client: _obstore().put(client, key, data, use_multipart=False), nbytes=len(data))
            return there
        while not self._put(key, data):
            if (there := self.get(key, most=most)) is not None:
                return there  # perhaps ours: the answer to an earlier try was lost
            time.sleep(_FIRST_WAIT)  # it was deleted meanwhile
        return None

    def _put(self, key: str, data: bytes) -> bool:
        """A conditional put; False where the store refuses."""
        from obstore.exceptions import AlreadyExistsError

        try:
            self._ask(
                "PUT", lambda client: _obstore().put(client, key, data, mode="create", use_multipart=False), nbytes=len(data)
            )
        except (AlreadyExistsError, FileExistsError):
            return False
        return True

    def _ask(self, kind: str, request: Callable[[Any], T], *, nbytes: int = 0) -> T:
        """Make a request, and again until it is answered or the store has been away for too long."""
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            InvalidPathError,
            NotSupportedError,
            PermissionDeniedError,
            UnauthenticatedError,
        )

        client = self._clients.get(nbytes)
        started, wait = time.monotonic(), _FIRST_WAIT
        while True:
            self.requests[kind] += 1
            try:
                return request(client)
            except (FileNotFoundError, FileExistsError, AlreadyExistsError) as error:
                if kind == "PUT" and isinstance(error, FileNotFoundError):
                    raise LinkError(f"{self.url}: there is no such bucket: {_short(error)}") from error
                raise
            except (PermissionDeniedError, UnauthenticatedError, InvalidPathError, NotSupportedError) as error:
                raise LinkError(f"{self.url} refuses a {kind}: {_short(error)}") from error
            except (BaseError, OSError) as error:
                self.errors += 1
                away = time.monotonic() - started
                if away > self.outage:
                    raise LinkError(f"{self.url} has not answered a {kind} for {away:.0f} s: {_short(error)}") from error
                if wait == _FIRST_WAIT:
                    log.info("%s: a %s failed and is repeated: %s", self.url, kind, _short(error))
                time.sleep(wait)
                wait = min(_LONGEST_WAIT, 2 * wait)


class _Clients:
    """The clients of one store, made when they are first used: a longer message has a longer time limit."""

    def __init__(self, url: str, options: dict[str, Any]):
        scheme = url.partition("://")[0]
        if scheme not in SCHEMES or "://" not in url:
            allowed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
            raise ConfigError(f"an object store is one of {allowed}, got {url!r}")
        self.url, self.scheme, self.options = url, scheme, options
        self._made: dict[int, Any] = {}
        self._lock = threading.Lock()

    def get(self, nbytes: int) -> Any:
        """The client for a message of this length."""
        global _used_by
        if _used_by not in (None, os.getpid()):
            raise LinkError(
                "this process was forked from one that had used an object store, whose threads do not survive a fork: "
                "start workers with spawn or forkserver, or open the store after the fork"
            )
        _used_by = os.getpid()
        doublings = 0 if self.scheme == "file" else max(0, int(nbytes / _SLOWEST / _ANSWER)).bit_length()
        with self._lock:
            if doublings not in self._made:
                self._made[doublings] = self._make(_ANSWER * 2**doublings)
            return self._made[doublings]

    def _make(self, seconds: float) -> Any:
        store = _obstore().store
        if self.scheme == "file":
            return store.from_url(self.url, mkdir=True)
        from datetime import timedelta

        return store.from_url(
            self.url,
            client_options={"timeout": timedelta(seconds=seconds), "allow_http": self._plain_http()},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
            **self.options,
        )

    def _plain_http(self) -> bool:
        """Without TLS only to this machine, or where the environment allows it."""
        endpoint = str(
            self.options.get("endpoint") or os.environ.get("AWS_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL") or ""
        )
        allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
        return allowed or endpoint.startswith(("http://127.0.0.1:", "http://localhost:", "http://[::1]:"))


def _obstore() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise MissingDependency(f"an object store needs obstore: {how_to_install('store')}") from error
    return obstore


def _short(error: BaseException) -> str:
    """The first line of an error, without the URLs and headers that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
