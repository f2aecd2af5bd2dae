"""The objects of a run of workers that reach each other: names and manifests in a register, bodies between the workers.

`TCPStore.compare_set` writes a key only where there is none, which decides what a round was. Messages and checkpoints stay with
the worker that made them; the register knows who holds them, and whoever has fetched one holds it too. What only one worker
holds is lost with it: see `ClusterLink`, which counts a message only when others have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from thinwire.errors import WireError
from thinwire.links.bodies import Bodies
from thinwire.links.manifest import Store, check_size
from thinwire.links.register import MOST_VALUE, Register

_TAKEN, _HELD, _GONE = "+", "=", "-"  # what a line of an index begins with
_BODIES = ("x/", "ckpt/")  # folders whose objects stay with the workers, where their names are those of messages or states
_NOTHING = b"\x00thinwire nothing"  # a TCPStore cannot tell an empty value from none


class ClusterStore(Store):
    """The objects of one era of a run on a cluster.

    It has no authentication: a private network only.

    Args:
        register: of the run.
        id: this worker.
        bodies: what this worker holds, and serves to others.

    Attributes:
        era: index of the era; another one has other objects.
        longest: bytes that a message may have.
        at_hand: folder of the round at hand, whose messages are fetched.
    """

    def __init__(self, register: Register, id: int, bodies: Bodies):
        """Tell the others where this worker's objects are."""
        self.register, self.id, self.bodies = register, id, bodies
        self.era, self.longest, self.at_hand = 0, 1 << 20, ""
        self._holders: dict[str, set[int]] = {}  # of the objects of the folder that was listed last, by key
        self._addresses: dict[int, str] = {}
        self.announce()

    def __repr__(self) -> str:
        """The address."""
        return f"ClusterStore('tcp://{self.register.host}:{self.register.port}')"

    def announce(self) -> None:
        """Tell where this worker's objects are: at the start, and again to a host that was started again."""
        self.register.ask("set", f"at/{self.id}", self.bodies.address)

    # --- What a run needs -------------------------------------------------------------------------------------------------

    def create(self, key: str, data: bytes) -> bool:
        """Write an object where there is none, then name it in the index of its folder."""
        body = _is_body(key)
        told = hashlib.sha256(data).hexdigest().encode() if body else data or _NOTHING
        check_size(key, len(told), MOST_VALUE)
        there = self.register.ask("compare_set", self._key(key), b"", told)
        if there != told:
            return False
        if body:
            self.bodies.put(self._key(key), data)
        self._note(_TAKEN, key, len(data))
        return True

    def get(self, key: str, *, most: int) -> bytes | None:
        """The bytes of an object; None where there is none, or nobody who holds it answers."""
        if _is_body(key):
            return self._body(key, most=most)
        found = self.register.get(self._key(key))
        found = b"" if found == _NOTHING else found
        check_size(key, len(found or b""), most)
        return found

    def list(self, prefix: str) -> dict[str, int]:
        """Names below a folder and their sizes; of messages of the round at hand, those that this worker could fetch."""
        found = self._read_index(prefix)
        if prefix != self.at_hand:
            return found
        return {name: size for name, size in found.items() if not _is_body(prefix + name) or self._fetch(prefix + name, size)}

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; their folders remember that."""
        self.bodies.drop(self._key(key) for key in keys)
        for key in keys:
            self.register.ask("delete_key", self._key(key))
            self._note(_GONE, key, 0)

    def holders(self, key: str) -> Collection[int]:
        """Ids of the workers that hold an object of the folder that was listed last."""
        return self._holders.get(key, ())

    # --- Where bodies are -------------------------------------------------------------------------------------------------

    def _read_index(self, prefix: str) -> dict[str, int]:
        raw = self.register.get(f"{self._key('index/')}{prefix}") or b""
        found: dict[str, int] = {}
        self._holders = {}
        for line in raw.decode("ascii", "replace").splitlines():
            sign, name, size, who = line.split(" ")
            if sign == _GONE:
                found.pop(name, None)
            else:
                self._holders.setdefault(prefix + name, set()).add(int(who))
            if sign == _TAKEN:
                found[name] = int(size)
        return found

    def _fetch(self, key: str, size: int) -> bool:
        """Have a message here, and say so; whether it could be had. One that is too long counts as not there."""
        if self.bodies.get(self._key(key)) is not None:
            return True
        if size > self.longest:
            return False
        try:
            return self._body(key, most=self.longest) is not None
        except WireError:
            return False

    def _body(self, key: str, *, most: int) -> bytes | None:
        place, folder = self._key(key), key.rpartition("/")[0]
        if (here := self.bodies.get(place)) is not None:
            check_size(key, len(here), most)
            return here
        if (digest := self.register.get(place)) is None:
            return None
        asked = {self.id}
        for _ in range(2):  # others may hold it since the folder was listed
            for id in sorted(self._holders.get(key, set()) - asked):
                asked.add(id)
                data = self._ask(id, place, most)
                if data is not None and hashlib.sha256(data).hexdigest().encode() == digest:
                    self.bodies.put(place, data)
                    if folder.startswith("x/"):
                        self._note(_HELD, key, len(data))
                    return data
            self._read_index(f"{folder}/")
        return None

    def _ask(self, id: int, place: str, most: int) -> bytes | None:
        """An object from one worker, whose address may be another one since it was asked last."""
        for _ in range(2):
            address = self._addresses.get(id)
            if address is not None and (data := self.bodies.ask(address, place, most=most)) is not None:
                return data
            now = (self.register.get(f"at/{id}") or b"").decode("ascii", "replace")
            if now == address or not now:
                return None
            self._addresses[id] = now
        return None

    def _note(self, sign: str, key: str, size: int) -> None:
        folder, _, name = key.rpartition("/")
        self.register.ask("append", f"{self._key('index/')}{folder}/", f"{sign} {name} {size} {self.id}\n")
        if sign != _GONE:
            self._holders.setdefault(key, set()).add(self.id)

    def _key(self, key: str) -> str:
        """Where an object is: eras are counted anew by a host that was started again, and settings are the same in all."""
        return key if key == "settings" else f"{self.register.life}/{self.era}/{key}"


def _is_body(key: str) -> bool:
    """Whether an object stays with the workers: messages and checkpoints do, marks and manifests are in the register."""
    return key.startswith(_BODIES) and not key.rpartition("/")[2].startswith(("manifest-", "hello-", "here-", "bye-", "end-"))
