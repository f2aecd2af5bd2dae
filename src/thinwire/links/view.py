"""What a worker has seen of one round of an elastic run: messages and marks, checked."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from thinwire.errors import WireError
from thinwire.links.manifest import Signer, Store, number_of
from thinwire.links.signed import MESSAGE_NBYTES, Message, open_message, open_text

log = logging.getLogger("thinwire")

MARKS = ("hello", "here", "bye", "end")


@dataclass(frozen=True)
class Place:
    """Where a worker is in the history of a run; a checkpoint holds it.

    Attributes:
        number: of the round at hand.
        chain: SHA-256 of the manifest before.
        expected: ids that the round at hand waits for.
        step: the run's counted step after the round before.
        roster: token of the revision in force.
    """

    number: int
    chain: bytes
    expected: tuple[int, ...]
    step: int
    roster: str

    def key(self, name: str) -> str:
        """Where an object of the round at hand is."""
        return f"x/{self.number:08d}/{name}"


class View:
    """What a worker has seen of the round at hand.

    Args:
        store: where the objects are.
        signer: checks signatures.
        place: the round.
        members: ids that may take part.

    Attributes:
        messages: sound ones, by the ids of their senders.
        digests: SHA-256 of the objects they came in.
        bad: ids whose message is not sound.
        marks: ids that said "hello", "here" (left out of the round before, but not late for this one), "bye" and "end".
    """

    def __init__(self, store: Store, signer: Signer, place: Place, members: tuple[int, ...]):
        """Nothing was seen."""
        self.store, self.signer, self.place, self.members = store, signer, place, frozenset(members)
        self.messages: dict[int, Message] = {}
        self.digests: dict[int, str] = {}
        self.bad: set[int] = set()
        self.marks: dict[str, set[int]] = {kind: set() for kind in MARKS}
        self._looked_at: set[str] = set()

    @property
    def left(self) -> set[int]:
        """Ids that said that they are no longer there."""
        return self.marks["bye"] | self.marks["end"]

    @property
    def come(self) -> set[int]:
        """Ids that have come and are still there."""
        return self.marks["hello"] - self.left

    @property
    def most_there(self) -> bool:
        """Whether more than half of those who are expected have sent their message."""
        return 2 * sum(i in self.messages for i in self.place.expected) > len(self.place.expected)

    def add(self, message: Message, raw: bytes) -> None:
        """Note a sound message and the object that it came in."""
        self.messages[message.sender], self.digests[message.sender] = message, hashlib.sha256(raw).hexdigest()

    def look(self, names: dict[str, int], *, most: int) -> None:
        """Read what is new.

        Args:
            names: of the objects of this round, with their sizes.
            most: bytes that the body of a message may have.
        """
        for name, size in names.items():
            kind, _, who = name.rpartition("-")
            sender = number_of(who)
            if name in self._looked_at or kind not in ("", *MARKS) or sender not in self.members:
                continue
            self._looked_at.add(name)
            try:
                if kind:
                    self._read_mark(kind, sender)
                elif sender not in self.messages:
                    self._read_message(sender, size, most)
            except WireError as error:
                log.warning(
                    "round %d: the %s of worker %d is left out: %s", self.place.number, kind or "message", sender, error
                )
                self.bad |= set() if kind else {sender}

    def _read_mark(self, kind: str, sender: int) -> None:
        raw = self.store.get(self.place.key(f"{kind}-{sender}"), most=self.signer.nbytes)
        open_text(self.signer, sender, kind, self.place.chain, raw or b"")
        self.marks[kind].add(sender)

    def _read_message(self, sender: int, size: int, most: int) -> None:
        if size > self.room(most):
            raise WireError(f"{size} bytes, where at most {self.room(most)} are allowed", rank=sender)
        raw = self.store.get(self.place.key(str(sender)), most=self.room(most))
        if raw is not None:
            self.add(self.open(sender, raw), raw)

    def room(self, most: int) -> int:
        """Bytes that the object of a message may have whose body has `most`."""
        return most + MESSAGE_NBYTES + self.signer.nbytes

    def open(self, sender: int, raw: bytes) -> Message:
        """A message of this round; a `WireError` for anything else."""
        return open_message(self.signer, raw, number=self.place.number, sender=sender, chain=self.place.chain)

    def find(self, sender: int, digest: str, *, most: int) -> Message | None:
        """A message that a manifest counts; None where it is not there.

        Whoever can overwrite objects must not be able to show the message to one worker and something else to the next: what
        is there in its place counts as nothing, unless it is signed by the sender.

        Raises:
            WireError: what is there is not what the manifest counts, or is not sound: all workers find that alike.
        """
        if self.digests.get(sender) == digest:
            return self.messages[sender]
        try:
            raw = self.store.get(self.place.key(str(sender)), most=self.room(most))
        except WireError:
            return None
        if raw is None:
            return None
        if hashlib.sha256(raw).hexdigest() == digest:
            return self.open(sender, raw)
        try:
            self.open(sender, raw)
        except WireError:
            return None
        raise WireError("another message than the manifest counts", rank=sender)
