"""What an elastic run is made of: a store of objects that are written once, signatures, and a roster of workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence


class Store(ABC):
    """Where the objects of a run are. Everything is written once; nothing is overwritten."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write an object; False where the key is taken by another one."""

    @abstractmethod
    def get(self, key: str, *, most: int) -> bytes | None:
        """An object of at most `most` bytes; None where there is none."""

    @abstractmethod
    def list(self, prefix: str) -> dict[str, int]:
        """The names below a prefix, and their sizes in bytes."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; only compaction does it."""

    def decide(self, key: str, proposal: bytes) -> bytes:
        """The object of this key: the proposal where there was none."""
        if self.create(key, proposal):
            return proposal
        winner = self.get(key, most=1 << 20)
        assert winner is not None
        return winner


class Signer(ABC):
    """Signs what this worker sends, and checks what others sent."""

    id: int

    @abstractmethod
    def sign(self, data: bytes) -> bytes:
        """This worker's signature."""

    @abstractmethod
    def verify(self, id: int, data: bytes, signature: bytes) -> bool:
        """Whether worker `id` signed the data."""


class Roster(ABC):
    """Who may take part; revisions are named by tokens, and later tokens are greater as text."""

    first: str

    @abstractmethod
    def newest(self, token: str) -> str:
        """The newest revision that this worker knows of; `token` where there is no newer one."""

    @abstractmethod
    def members(self, token: str) -> tuple[int, ...]:
        """The ids that may take part under a revision, in order."""


class FixedRoster(Roster):
    """A roster that never changes."""

    def __init__(self, ids: Iterable[int]):
        self.first, self._ids = "0", tuple(sorted(ids))

    def newest(self, token: str) -> str:
        return token

    def members(self, token: str) -> tuple[int, ...]:
        return self._ids
