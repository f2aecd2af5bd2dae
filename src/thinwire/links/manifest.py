"""What an elastic run is made of: objects that are written once, and the manifests among them that say what a round was.

A round is what its manifest says it is: whose messages count, by their SHA-256, and who is expected in the next one. Anybody
may propose it; a store that creates a key only where there is none (`Store.create`) picks one proposal, and all workers apply
exactly that. `thinwire.links.elastic` is the logic on top.

Keys of a run:

    settings                    what the workers were started with, from whoever came first
    x/{n:08}/{id}               the message of worker id in round n
    x/{n:08}/hello-{id}         "I have just come, and shall be there in the next round"; likewise here-, bye- and end-{id}
    x/{n:08}/manifest-{k}       k = 0, unless what stands there is unsound
    ckpt/{n:08}-{id}            the replicated state after round n
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.errors import ConfigError, WireError

MOST_MANIFEST = 1 << 20  # bytes: 1e4 workers with a hash each
NO_CHAIN = bytes(32)  # what the first manifest follows


class Store(ABC):
    """Where the objects of a run are. Everything is written once, and nothing is overwritten."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write an object where there is none; False where the key is taken by other bytes, True where it holds these."""

    @abstractmethod
    def get(self, key: str, *, most: int) -> bytes | None:
        """The bytes of an object, None where there is none; a `WireError` where it has more than `most`."""

    @abstractmethod
    def list(self, prefix: str) -> dict[str, int]:
        """Names below a prefix that ends with a slash, without it, and their sizes in bytes."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; only those that a checkpoint has made superfluous."""

    def decide(self, key: str, proposal: bytes, *, most: int = MOST_MANIFEST) -> bytes:
        """Propose the contents of a key; returns what stands there for good, which may be another's proposal."""
        if self.create(key, proposal):
            return proposal
        winner = self.get(key, most=most)
        if winner is None:
            raise WireError(f"the store says that {key} is taken, but has nothing there")
        return winner


class MemoryStore(Store):
    """A dict: for the simulator and for tests."""

    def __init__(self) -> None:
        """Nothing is there."""
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> bool:
        """Write an object where there is none."""
        with self._lock:
            return self.objects.setdefault(key, data) == data

    def get(self, key: str, *, most: int) -> bytes | None:
        """The bytes of an object."""
        found = self.objects.get(key)
        check_size(key, len(found or b""), most)
        return found

    def list(self, prefix: str) -> dict[str, int]:
        """Names below a prefix and their sizes."""
        with self._lock:
            return {k.removeprefix(prefix): len(v) for k, v in sorted(self.objects.items()) if k.startswith(prefix)}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)


def check_size(key: str, nbytes: int, most: int) -> None:
    """Raise a `WireError` for an object that is longer than it may be."""
    if nbytes > most:
        raise WireError(f"{key} has {nbytes} bytes, where at most {most} are allowed")


def number_of(text: str) -> int:
    """The number that a part of a name is, as we write it: "7"; -1 for anything else, such as "07" or "²"."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    return number if str(number) == text else -1


# --- Who speaks ----------------------------------------------------------------------------------------------------------


class Signer(ABC):
    """Signs what this worker writes, and checks what others have written.

    Attributes:
        id: this worker.
        nbytes: length of a signature.
    """

    id: int
    nbytes: int

    @abstractmethod
    def sign(self, data: bytes) -> bytes:
        """A signature of this worker."""

    @abstractmethod
    def verify(self, id: int, data: bytes, signature: bytes) -> bool:
        """Whether a signature is that of the worker with this id."""


class Unsigned(Signer):
    """A checksum in place of a signature: it finds damage, not forgery. For one machine, a private network, or tests.

    Args:
        id: this worker.
    """

    nbytes = 32

    def __init__(self, id: int):
        """Speak as `id`."""
        self.id = id

    def sign(self, data: bytes) -> bytes:
        """The checksum."""
        return hashlib.sha256(data + self.id.to_bytes(8, "little")).digest()

    def verify(self, id: int, data: bytes, signature: bytes) -> bool:
        """Whether the checksum is right."""
        return signature == hashlib.sha256(data + id.to_bytes(8, "little")).digest()


class Roster(ABC):
    """Who may take part. A revision is named by a token; newer ones are larger as text.

    Attributes:
        first: the token of the revision that a run begins with.
    """

    first: str

    @abstractmethod
    def newest(self, token: str) -> str:
        """The token of the newest revision that this worker knows of; `token` itself where there is none newer."""

    @abstractmethod
    def members(self, token: str) -> tuple[int, ...]:
        """Ids that may take part under a revision, in order; a `WireError` where there is none such."""


class FixedRoster(Roster):
    """The same workers at all times.

    Args:
        ids: of the workers that may take part.
    """

    first = "0"

    def __init__(self, ids: Sequence[int]):
        """Keep them in order."""
        self._ids = tuple(sorted(set(ids)))
        if not self._ids or self._ids[0] < 0:
            raise ConfigError(f"a roster has at least one id, none of them negative, got {list(ids)!r}")

    def newest(self, token: str) -> str:
        """The only one."""
        return token

    def members(self, token: str) -> tuple[int, ...]:
        """All of them."""
        if token != self.first:
            raise WireError(f"a fixed roster has the revision {self.first!r} only, not {token[:80]!r}")
        return self._ids


# --- The manifest ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """What a round is, as a worker understands it: part of its message, and of the manifest that it would propose.

    Attributes:
        step: the run's counted step at which the round takes place.
        last: whether it is the one of `finish()`, with everything in it.
        lr: the learning rate of each parameter group, for those who apply the round without having been there.
    """

    step: int
    last: bool = False
    lr: tuple[float, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a round was.

    Attributes:
        number: of the round.
        chain: SHA-256 of the manifest before.
        by: the worker that proposed it.
        counted: SHA-256 of the messages that count, by the ids of their senders; none where it only settles who is there.
        expected: ids that the next round waits for: those counted, and those who said hello.
        hello: ids that came, without anything from before.
        bye: ids that left.
        here: ids that said, before this round, that they carry what the round before left out, and that are left out again.
        terms: see `Terms`.
        seconds: from the manifest before until most messages were there, on the clock of the proposer; 0 where it cannot say.
        roster: token of the revision in force from the next round on.
    """

    number: int
    chain: bytes
    by: int
    counted: Mapping[int, str]
    expected: tuple[int, ...]
    hello: tuple[int, ...]
    bye: tuple[int, ...]
    terms: Terms
    seconds: float
    roster: str
    here: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """As JSON, the same bytes for the same contents."""
        told = asdict(self) | {"chain": self.chain.hex(), "counted": {str(i): self.counted[i] for i in sorted(self.counted)}}
        return json.dumps(told, sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(raw: bytes) -> Manifest:
        """What `to_bytes` gave; a `WireError` for anything else."""
        try:
            told = json.loads(raw)
            found = Manifest(
                number=_count(told["number"]),
                chain=bytes.fromhex(told["chain"]),
                by=_count(told["by"]),
                counted={int(i): _sha(digest) for i, digest in told["counted"].items()},
                expected=_ids(told["expected"]),
                hello=_ids(told["hello"]),
                bye=_ids(told["bye"]),
                terms=Terms(_count(told["terms"]["step"]), bool(told["terms"]["last"]), _rates(told["terms"]["lr"])),
                seconds=_number(told["seconds"]),
                roster=_text(told["roster"]),
                here=_ids(told["here"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as cause:
            raise WireError(f"not a manifest: {type(cause).__name__} {str(cause)[:80]}") from None
        if found.to_bytes() != raw:
            raise WireError("a manifest that is not written as it should be")
        return found


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]!r} where a whole number should be")
    return value


def _ids(values: Any) -> tuple[int, ...]:
    ids = tuple(_count(v) for v in values)
    if list(ids) != sorted(set(ids)):
        raise ValueError("ids that are not in order")
    return ids


def _sha(value: Any) -> str:
    if len(bytes.fromhex(value)) != 32:
        raise ValueError("no SHA-256")
    return value


def _number(value: Any) -> float:
    if type(value) is not float or not 0 <= value < math.inf:
        raise ValueError(f"{str(value)[:40]!r} where a number of at least 0 should be")
    return value


def _rates(values: Any) -> tuple[float, ...]:
    return tuple(_number(v) for v in values)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 256 or not value.isprintable():
        raise ValueError("a text that is none")
    return value
