"""Link: one worker's end of the slow wire.

An algorithm knows nothing else of the network. A link moves opaque payloads, tells the time, and lets a round be taken
back: whatever was exchanged becomes valid only when `commit()` returns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from thinwire.errors import LinkError, WireError
from thinwire.network import Op, Traffic, dealt_traffic, ring_traffic
from thinwire.payload import Payload, once

if TYPE_CHECKING:
    from thinwire.links.elastic import ElasticLink
    from thinwire.links.two_level import TwoLevel


class Ticket(ABC):
    """A posted exchange that may still be under way."""

    _result: list[Payload] | None = None

    def wait(self) -> list[Payload]:
        """The result, once it is there: one payload per rank for "gather", those of both members for "pair", else a single one.

        Waiting again gives the same result and costs nothing.
        """
        if self._result is None:
            self._result = self._finish()
        return self._result

    @abstractmethod
    def _finish(self) -> list[Payload]:
        """Wait for the exchange to end."""


class Done(Ticket):
    """A ticket whose result is known already."""

    def __init__(self, result: list[Payload]):
        """Hold the result."""
        self._result = result

    def _finish(self) -> list[Payload]:
        return self._result or []


@dataclass(frozen=True)
class Peers:
    """Who takes part in a round: a snapshot, which a round takes once and keeps.

    On a link whose workers never change, an id is a rank, and all workers are members and expected.

    Attributes:
        id: this worker.
        members: ids of the workers that may take part, in order.
        expected: ids of those whose messages are expected in this round, in order.
    """

    id: int
    members: tuple[int, ...]
    expected: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This worker's place among those that are expected."""
        return self.expected.index(self.id)

    @property
    def size(self) -> int:
        """How many workers are expected."""
        return len(self.expected)


class Link(ABC):
    """One worker's end of the wire. All workers post the same exchanges in the same order."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many workers there are; may change between rounds on an elastic link."""

    @property
    def elastic(self) -> ElasticLink | None:
        """The link whose workers come and go, where this is one or is around one; None where they are the same at all times."""
        return None

    @property
    def two_level(self) -> TwoLevel | None:
        """The link whose workers are sites of several processes, where this is one or is around one; else None."""
        return None

    @property
    def data_rank(self) -> int:
        """Which part of the data this process reads, of `data_size`: the rank, but where a worker is several processes."""
        return self.rank

    @property
    def data_size(self) -> int:
        """How many parts of the data there are: one for each process."""
        return self.size

    def peers(self) -> Peers:
        """Who takes part in the next round. Whatever belongs to a round uses this snapshot, never the link again."""
        ids = tuple(range(self.size))
        return Peers(self.rank, ids, ids)

    @abstractmethod
    def post(self, payload: Payload, op: Op) -> Ticket:
        """Start an exchange and return at once; the wait may come steps later.

        Only a message whose length the others do not know (`fixed=False`) may first wait for an exchange of lengths. The
        link owns the payload's buffer from now on. Gathered and swapped payloads are shared: read them, do not write to them.

        Args:
            payload: this worker's message.
            op: "gather" for everyone's messages in rank order, each with its `sender`, "mean" for their element-wise mean,
                "broadcast" for that of worker `payload.source` (the others post a message of the same length, whose contents
                do not matter), "deal" for the parts that all workers have for this one (`payload.dealt`, `payload.due`), in
                rank order, each with its `sender`; "spread" for everyone's messages as in "gather", where their lengths differ
                and are known (`payload.due`). "pair" is no collective: the
                message goes to `payload.partner`, whose own comes back, and no other worker is waited for. Both members get
                [the lower rank's, the higher rank's], both of one length; a worker without a partner gets its own.
        """

    def all_gather(self, payload: Payload) -> list[Payload]:
        """Everyone's messages in rank order, the same list on every worker."""
        return self.post(payload, "gather").wait()

    def mean(self, payload: Payload) -> Payload:
        """Element-wise mean of everyone's message; legal for payloads of linear codecs."""
        return self.post(payload, "mean").wait()[0]

    def broadcast(self, payload: Payload) -> Payload:
        """The message of worker `payload.source` (0 by default) on every worker."""
        return self.post(payload, "broadcast").wait()[0]

    def commit(self) -> None:  # noqa: B027 (a link with fixed members has nothing to vote on)
        """Make the round valid, or raise `RoundAborted` on every worker. Shared state may change only after it."""

    def tick(self) -> None:  # noqa: B027 (only simulated and delayed links care)
        """Called by the algorithm after each local step; advances simulated time and delays stragglers."""

    def now(self) -> float:
        """Seconds on this worker's clock."""
        return time.perf_counter()

    def elapse(self, seconds: float) -> None:
        """Let time pass on this worker's clock."""
        if seconds > 0:
            time.sleep(seconds)

    def traffic(self, op: Op, sizes: Sequence[int]) -> Traffic:
        """Bytes that this worker sends and receives when messages of `sizes` bytes are exchanged."""
        return ring_traffic(op, sizes, self.rank)

    def straight_traffic(self, dealt: Sequence[int], due: Sequence[int]) -> Traffic:
        """Bytes that this worker sends and receives in a "deal" or "spread": see `dealt_traffic`."""
        return dealt_traffic(dealt, due, self.rank)


class LinkDecorator(Link):
    """A link around another one that changes or watches some of what it does."""

    def __init__(self, link: Link):
        """Wrap `link`."""
        self.link = link

    @property
    def rank(self) -> int:
        """The wrapped link's rank."""
        return self.link.rank

    @property
    def size(self) -> int:
        """The wrapped link's size."""
        return self.link.size

    @property
    def elastic(self) -> ElasticLink | None:
        """The wrapped link, where it is elastic."""
        return self.link.elastic

    @property
    def two_level(self) -> TwoLevel | None:
        """The wrapped link, where it has two levels."""
        return self.link.two_level

    @property
    def data_rank(self) -> int:
        """As the wrapped link has it."""
        return self.link.data_rank

    @property
    def data_size(self) -> int:
        """As the wrapped link has it."""
        return self.link.data_size

    def peers(self) -> Peers:
        """The peers of the wrapped link."""
        return self.link.peers()

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Post on the wrapped link."""
        return self.link.post(payload, op)

    def commit(self) -> None:
        """Commit on the wrapped link."""
        self.link.commit()

    def tick(self) -> None:
        """Count a step on the wrapped link."""
        self.link.tick()

    def now(self) -> float:
        """The clock of the wrapped link."""
        return self.link.now()

    def elapse(self, seconds: float) -> None:
        """Let time pass on the wrapped link."""
        self.link.elapse(seconds)

    def traffic(self, op: Op, sizes: Sequence[int]) -> Traffic:
        """As the wrapped link counts it."""
        return self.link.traffic(op, sizes)

    def straight_traffic(self, dealt: Sequence[int], due: Sequence[int]) -> Traffic:
        """As the wrapped link counts it."""
        return self.link.straight_traffic(dealt, due)


def sizes_of(op: Op, result: Sequence[Payload], workers: int) -> list[int]:
    """Message lengths in bytes of all workers that took part, as the result of an exchange shows them."""
    if op in ("gather", "pair", "deal", "spread"):
        return once(result, "sizes", lambda: [p.nbytes for p in result])
    return [result[0].nbytes] * workers


def check_length(payload: Payload, rank: int, nbytes: int) -> None:
    """Refuse a message of free length that is longer than its purpose allows, before anything is sent or allocated for it.

    Args:
        payload: this worker's message, which says what for.
        rank: whose message has the length: this worker's own, or another's that announces it.
        nbytes: the length.

    Raises:
        WireError: with the length and what is allowed.
    """
    if not payload.fixed and not 0 <= nbytes <= payload.longest:
        raise WireError(f"{nbytes} bytes for {payload.purpose!r}, at most {payload.longest} are allowed", rank=rank)


def members_of(payload: Payload, op: Op, rank: int, size: int) -> tuple[int, ...]:
    """The ranks that take part in an exchange with this worker, in order.

    Args:
        payload: this worker's message.
        op: what is done with it.
        rank: this worker.
        size: how many workers there are.

    Raises:
        LinkError: for a pair that cannot be, or a message in it whose length the other does not know.
    """
    if op in ("deal", "spread"):
        _check_straight(payload, op, rank, size)
    if op != "pair":
        return tuple(range(size))
    if not payload.fixed:
        raise LinkError(f"rank {rank}: a message that is swapped in a pair must have a fixed length, got fixed=False")
    if payload.partner is not None and (payload.partner == rank or not 0 <= payload.partner < size):
        raise LinkError(f"rank {rank} of {size} workers cannot be paired with rank {payload.partner}")
    return pair_of(rank, payload.partner)


def _check_straight(payload: Payload, op: Op, rank: int, size: int) -> None:
    """Raise a `LinkError` for a message that does not say how long its parts are, and what is due from all workers."""
    dealt, due = payload.dealt if op == "deal" else (payload.nbytes,) * size, payload.due
    whole = sum(dealt) == payload.nbytes if op == "deal" else not payload.dealt
    if payload.data.dtype != torch.uint8 or len(dealt) != size or len(due) != size or not whole or dealt[rank] != due[rank]:
        what = f"{payload.nbytes} bytes in parts of {list(payload.dealt)} bytes, with {list(due)} bytes due"
        raise LinkError(f"rank {rank}: a {op} among {size} workers needs bytes, and lengths for each of them, got {what}")


def pair_of(rank: int, partner: int | None) -> tuple[int, ...]:
    """The ranks of a pair in order; a worker's own alone where it has no partner."""
    return (rank,) if partner is None else (min(rank, partner), max(rank, partner))


class SoloLink(Link):
    """The link of a worker that is alone: every exchange returns its own message.

    One device is the size == 1 case of the same code, not another code path.
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def post(self, payload: Payload, op: Op) -> Ticket:
        """The mean of one message is the message itself, and so is the list of all; there is no partner."""
        members_of(payload, op, self.rank, self.size)
        return Done([payload.of(self.rank)])
