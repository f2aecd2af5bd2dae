"""What an elastic run keeps beside its rounds: the settings it was begun with, and checkpoints of its state."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from thinwire.errors import LinkError, WireError
from thinwire.links.manifest import Signer, Store, number_of
from thinwire.links.signed import open_text, seal_text

log = logging.getLogger("thinwire")

_KEPT = 2  # checkpoints
_MOST_SETTINGS = 1 << 20  # bytes


class Archive:
    """Settings and checkpoints of a run.

    Args:
        store: where the objects are.
        signer: of this worker.
    """

    def __init__(self, store: Store, signer: Signer):
        """Nothing is read yet."""
        self.store, self.signer = store, signer

    def settle_settings(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What the first worker of the run was started with; this one's, where it is the first. JSON.

        Raises:
            LinkError: what stands there was written by nobody who may take part.
        """
        text = json.dumps(mine | {"by": self.signer.id}, sort_keys=True).encode()
        raw = self.store.decide("settings", seal_text(self.signer, "settings", b"", text), most=_MOST_SETTINGS)
        try:
            told = json.loads(raw[: len(raw) - self.signer.nbytes])
            open_text(self.signer, int(told["by"]), "settings", b"", raw)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:  # a WireError is a ValueError
            raise LinkError(f"the settings of this run cannot be read: {str(cause)[:100]}") from None
        return told

    def write(self, number: int, state: bytes) -> None:
        """Write the state after a round; checkpoints before the last two go, and the messages that no checkpoint needs.

        Manifests stay: a worker that was away for long must not take an old round for one that nobody has decided.
        """
        name = f"{number:08d}-{self.signer.id}"
        self.store.create(f"ckpt/{name}", seal_text(self.signer, f"ckpt {name}", b"", state))
        there = {name: at for name, at in self._names().items() if at <= number}  # nobody has verified the others
        numbers = sorted(set(there.values()))
        if len(numbers) <= _KEPT:
            return
        needed = numbers[-_KEPT]
        first = 0 if self._messages(1) else numbers[0] + 1  # what is older went with the checkpoint before
        old = [name for n in range(first, needed + 1) for name in self._messages(n)]
        self.store.delete([f"ckpt/{name}" for name, at in there.items() if at < needed] + old)

    def _messages(self, number: int) -> list[str]:
        """Keys of what is in a round, but for its manifests."""
        prefix = f"x/{number:08d}/"
        return [prefix + name for name in self.store.list(prefix) if not name.startswith("manifest-")]

    def newest(self) -> int:
        """The number of the round after which the newest checkpoint was written; -1 where there is none."""
        return max(self._names().values(), default=-1)

    def states(self, *, most: int) -> Iterator[bytes]:
        """The states in the checkpoints that can be read and are signed, newest first."""
        for name in sorted(self._names(), reverse=True):
            try:
                raw = self.store.get(f"ckpt/{name}", most=most)
                if raw is not None:
                    yield open_text(self.signer, int(name.partition("-")[2]), f"ckpt {name}", b"", raw)
            except WireError as error:
                log.warning("the checkpoint %s is passed over: %s", name, error)

    def _names(self) -> dict[str, int]:
        """Names of the checkpoints, and the numbers of the rounds after which they were written; nobody has verified them."""
        found = {}
        for name in self.store.list("ckpt/"):
            padded, _, who = name.partition("-")
            number = number_of(padded.lstrip("0") or "0")
            if padded == f"{number:08d}" and number_of(who) >= 0:
                found[name] = number
        return found
