"""Channel: exchanges among some of the workers of a world, over a network of their own.

The workers of a world have one channel for all of them; where they are grouped into sites, one inside each site and one
between the members of different sites that have the same number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.errors import LinkError, WireError
from thinwire.links.base import Ticket, check_length, members_of
from thinwire.network import Network, Op, Wire, dealt_traffic, ring_hops
from thinwire.payload import Delivery, Payload, once

if TYPE_CHECKING:
    from thinwire.sim.world import World


@dataclass
class _Exchange:
    """One exchange: what each worker posted and when, and its result and end once all have posted that it needs."""

    op: Op
    purpose: str
    posted: dict[int, tuple[Payload, float]] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    results: dict[int, tuple[list[Payload], float]] = field(default_factory=dict)
    collected: int = 0
    refused: WireError | None = None


class Channel:
    """What joins some workers; on it a worker has the number of its place among them.

    Args:
        world: whose workers they are.
        workers: their numbers in the world, in order.
        network: bandwidth and latency of each of them.
    """

    def __init__(self, world: World, workers: Sequence[int], network: Network):
        """Nothing is under way."""
        self.world, self.workers, self.size = world, tuple(workers), len(workers)
        network.check(self.size)
        self._posts = [0] * self.size
        self._exchanges: dict[int, _Exchange] = {}
        self._wire = Wire(network, self.size)

    @property
    def open(self) -> int:
        """Exchanges that somebody has yet to collect."""
        return len(self._exchanges)

    # What SimLink asks for.

    def post(self, rank: int, payload: Payload, op: Op) -> Ticket:
        """Take worker `rank`'s message of its next exchange; when all that take part have posted, the result is made."""
        members = members_of(payload, op, rank, self.size)
        number = self._posts[rank]
        self._posts[rank] += 1
        exchange = self._exchanges.setdefault(number, _Exchange(op, payload.purpose))
        if (exchange.op, exchange.purpose) != (op, payload.purpose):
            raise LinkError(
                f"rank {rank}, exchange {number + 1}: posted {op} for {payload.purpose!r} while rank "
                f"{min(exchange.posted)} posted {exchange.op} for {exchange.purpose!r}"
            )
        for other, theirs in exchange.members.items() if op == "pair" else ():
            if theirs != members and (rank in theirs or other in members):
                raise LinkError(
                    f"rank {rank}, exchange {number + 1}: {_paired(rank, members)}, but {_paired(other, theirs)}: "
                    "all workers must pair alike"
                )
        exchange.posted[rank] = (payload, self.now(rank))
        exchange.members[rank] = members
        if len(exchange.posted) >= len(members) and all(member in exchange.posted for member in members):
            self._complete(exchange, members)
        return _SimTicket(self, rank, number)

    def step_taken(self, rank: int) -> None:
        """Charge worker `rank` for one local step."""
        self.world.step_taken(self.workers[rank])

    def now(self, rank: int) -> float:
        """Seconds on the virtual clock of worker `rank`."""
        return self.world.now(self.workers[rank])

    def elapse(self, rank: int, seconds: float) -> None:
        """Move the virtual clock of worker `rank` forward."""
        self.world.elapse(self.workers[rank], seconds)

    # How it works.

    def collect(self, rank: int, number: int) -> list[Payload]:
        """Wait for exchange `number`: others run meanwhile."""
        world, worker, exchange = self.world, self.workers[rank], self._exchanges[number]
        if not world.wait(worker, lambda: rank in exchange.results, purpose=exchange.purpose):
            raise self._in_vain(rank, number, exchange)
        result, end = exchange.results[rank]
        world.clocks[worker] = max(world.clocks[worker], end)
        exchange.collected += 1
        if exchange.collected == self.size:
            del self._exchanges[number]
        if exchange.refused is not None:
            raise exchange.refused
        if exchange.op in ("gather", "pair", "spread"):
            return result
        if exchange.op == "deal":
            return _parts_for(result, rank)
        return [p.like(p.data.clone()) for p in result]  # each worker may write into its own

    def _complete(self, exchange: _Exchange, members: tuple[int, ...]) -> None:
        payloads = [exchange.posted[r][0] for r in members]
        sizes = [p.nbytes for p in payloads]
        try:
            for rank, payload in zip(members, payloads, strict=True):
                check_length(payload, rank, payload.nbytes)
        except WireError as refusal:  # on all that take part, as on a real link
            exchange.refused = refusal
        if exchange.op in ("deal", "spread"):
            self._complete_straight(exchange, payloads)
            return
        one_length = exchange.op != "gather" or any(p.fixed for p in payloads)
        if one_length and len({(p.nbytes, p.data.dtype) for p in payloads}) > 1:
            kinds = ", ".join(f"{p.nbytes} bytes of {str(p.data.dtype).removeprefix('torch.')}" for p in payloads)
            raise LinkError(f"cannot {exchange.op} messages of different lengths or dtypes: {kinds}, in rank order")
        if exchange.op == "mean":
            total = payloads[0].data.clone()
            for p in payloads[1:]:
                total += p.data
            payloads = [payloads[0].like(total.div_(self.size))]
        elif exchange.op == "broadcast":
            payloads = [payloads[members.index(payloads[0].source)]]
        else:
            payloads = Delivery(p.of(r) for p, r in zip(payloads, members, strict=True))
        end = self._wire.send(max(exchange.posted[r][1] for r in members), exchange.op, sizes, members)
        for r in members:
            exchange.results[r] = (payloads, end)
            exchange.posted[r] = (payloads[0], exchange.posted[r][1])  # of a mean, the messages are not needed any more

    def _complete_straight(self, exchange: _Exchange, payloads: list[Payload]) -> None:
        """Messages that go straight to who they are for; those that are dealt are cut when they are collected."""
        dealt = [p.dealt or (p.nbytes,) * self.size for p in payloads]
        for rank, (p, due) in enumerate(zip(payloads, zip(*dealt, strict=True), strict=True)):
            if p.due != due:
                raise LinkError(f"rank {rank}: {list(p.due)} bytes are due, but {list(due)} bytes were sent to it")
        traffic = [dealt_traffic(parts, p.due, rank) for rank, (parts, p) in enumerate(zip(dealt, payloads, strict=True))]
        at = max(posted for _, posted in exchange.posted.values())
        end = self._wire.occupy(at, self._wire.network.seconds_of(traffic, ring_hops(exchange.op, self.size)))
        delivered = Delivery(p.of(rank) for rank, p in enumerate(payloads))
        exchange.results = dict.fromkeys(range(self.size), (delivered, end))

    def _in_vain(self, rank: int, number: int, exchange: _Exchange) -> LinkError:
        if self.world.failure is not None:
            culprit, error = self.world.failure
            return LinkError(f"rank {rank}, exchange {number + 1}: rank {culprit} failed: {error!r}", lost=[culprit])
        missing = [r for r in exchange.members[rank] if r not in exchange.posted]
        names = ", ".join(f"rank {r}" for r in missing)
        return LinkError(f"rank {rank}, exchange {number + 1}: {names} will never take part", lost=missing)


class _SimTicket(Ticket):
    def __init__(self, channel: Channel, rank: int, number: int):
        self._channel, self._rank, self._number = channel, rank, number

    def _finish(self) -> list[Payload]:
        return self._channel.collect(self._rank, self._number)


def _parts_for(payloads: list[Payload], rank: int) -> list[Payload]:
    """What each message that was dealt has for a worker."""
    starts = once(payloads, "starts", lambda: [list(itertools.accumulate(p.dealt, initial=0)) for p in payloads])
    if all(at[rank] == at[rank + 1] for at in starts):  # of many workers most may own nothing
        return once(payloads, "nothing", lambda: [p.like(p.data[:0]) for p in payloads])
    return [p.like(p.data[at[rank] : at[rank + 1]]) for p, at in zip(payloads, starts, strict=True)]


def _paired(rank: int, members: tuple[int, ...]) -> str:
    partner = next((r for r in members if r != rank), None)
    return f"rank {rank} has no partner" if partner is None else f"rank {rank} has rank {partner} for its partner"
