"""World: N simulated workers in one process, running ordinary training code, with a clock of their own.

    world = World(8, network=Network(bandwidth=100e6, latency=0.02), step_time=0.1)
    results = world.run(lambda link: train(link))       # the same train() as under torchrun

Results are deterministic: workers run one at a time in a fixed order and reductions go in rank order. Simulated time is
apart from wall time: a local step adds `step_time` to its worker's clock; an exchange ends at

    max over workers of the time they posted it  +  hops * latency  +  bytes / bandwidth

and a worker that waits for it has its clock moved there, so computing between `post()` and `wait()` hides the wire. Of a swap
in pairs, "workers" are the two of a pair: no other worker is waited for, and each pair has a wire of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from thinwire.errors import ConfigError, LinkError, WireError, check_whole_number
from thinwire.links.base import Link, Ticket, check_length, members_of
from thinwire.links.sim import SimLink
from thinwire.network import Network, Op, Wire, dealt_traffic, per_worker, ring_hops
from thinwire.payload import Payload
from thinwire.sim.baton import Baton, random_state, seed_everything, set_random_state
from thinwire.sim.churn import Churn, Habitat, Killed

T = TypeVar("T")


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


class World:
    """N simulated workers joined by a simulated network.

    Args:
        size: number of workers.
        network: bandwidth and latency; unlimited by default.
        step_time: seconds that one local step takes, one number or one per worker (stragglers); None charges the wall
            time that the worker really computed on this machine.
        seed: worker r starts with torch's, numpy's and Python's global generators seeded by seed + r.
        churn: workers come and go: their links are elastic, `run` calls `worker` once for each life of a worker, and what a
            worker returned that is dead for good is None. Exchanges go through a store, not over rings.

    Attributes:
        clocks: simulated seconds of each worker.
        habitat: with `churn`, the store of the run and the deaths that took place.
    """

    def __init__(
        self,
        size: int,
        *,
        network: Network | None = None,
        step_time: float | Sequence[float] | None = None,
        seed: int = 0,
        churn: Churn | None = None,
    ):
        """Make the world; nothing runs yet."""
        check_whole_number("size", size)
        self.network = network or Network()
        self.network.check(size)
        self.step_time = None if step_time is None else per_worker("step_time", step_time, size)
        if self.step_time is not None and not all(seconds >= 0 for seconds in self.step_time):
            raise ConfigError(f"step_time must be zero or more seconds, got {step_time!r}")
        self.size, self.seed, self.churn = size, seed, churn
        self.clocks = [0.0] * size
        self.habitat: Habitat | None = None
        self._running = False

    def run(self, worker: Callable[[Link], T]) -> list[T]:
        """Run `worker(link)` on every simulated worker and return what each returned, in rank order.

        If a worker raises, the others are stopped at their next exchange and its exception is raised here, with a note that
        names the rank.
        """
        if self._running:
            raise ConfigError("this World is already running; make another one")
        self._reset()
        results: list[T | None] = [None] * self.size
        threads = [
            threading.Thread(target=self._live, args=(rank, worker, results), name=f"sim-worker-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        caller_random = random_state()
        self._running = True
        try:
            for thread in threads:
                thread.start()
            self._baton.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.5)  # a bounded wait, so that Ctrl-C reaches the main thread
        except KeyboardInterrupt:
            self._failure = (-1, KeyboardInterrupt())  # workers leave at their next exchange
            raise
        finally:
            self._running = False
            set_random_state(caller_random)
        if self._failure is not None:
            rank, error = self._failure
            error.add_note(f"raised by simulated worker {rank} of {self.size}")
            raise error
        return results  # type: ignore[return-value]

    @property
    def seconds(self) -> float:
        """Simulated time so far: the clock of the latest worker."""
        return max(self.clocks)

    # What SimLink asks for.

    def post(self, rank: int, payload: Payload, op: Op) -> Ticket:
        """Take worker `rank`'s message of its next exchange; when all that take part have posted, the result is made."""
        self._charge_wall_time(rank)
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
        exchange.posted[rank] = (payload, self.clocks[rank])
        exchange.members[rank] = members
        if all(member in exchange.posted for member in members):
            self._complete(exchange, members)
        return _SimTicket(self, rank, number)

    def step_taken(self, rank: int, times: float = 1.0) -> None:
        """Charge one local step, or one that took so many times longer."""
        if self.step_time is None:
            self._charge_wall_time(rank)
        else:
            self.clocks[rank] += times * self.step_time[rank]

    def now(self, rank: int) -> float:
        """Worker `rank`'s clock."""
        self._charge_wall_time(rank)
        return self.clocks[rank]

    def elapse(self, rank: int, seconds: float) -> None:
        """Move worker `rank`'s clock forward."""
        self.clocks[rank] += max(0.0, seconds)

    # How it works.

    def _reset(self) -> None:
        self.clocks = [0.0] * self.size
        self._posts = [0] * self.size
        self._awaited: list[int | None] = [None] * self.size
        self._exchanges: dict[int, _Exchange] = {}
        self._wire = Wire(self.network, self.size)
        self._failure: tuple[int, BaseException] | None = None
        self._since = [0.0] * self.size
        self._ready: list[Callable[[int], bool] | None] = [None] * self.size
        self._baton = Baton(self.size, self._can_go_on, seed=self.seed)
        self.habitat = None if self.churn is None else Habitat(self, self.churn)

    def _live(self, rank: int, worker: Callable[[Link], T], results: list[T | None]) -> None:
        self._baton.take(rank)
        self._since[rank] = time.perf_counter()
        try:
            if self._failure is None:
                results[rank] = worker(SimLink(self, rank)) if self.habitat is None else self._lives(self.habitat, rank, worker)
        except BaseException as error:
            if self._failure is None:
                self._failure = (rank, error)
        finally:
            self._charge_wall_time(rank)
            if self.habitat is not None:
                self.habitat.leave(rank)
            self._baton.retire(rank)

    def _lives(self, habitat: Habitat, rank: int, worker: Callable[[Link], T]) -> T | None:
        """One life of a worker after the other, until it returns something or stays dead."""
        first = True
        while habitat.come(rank, first=first):
            try:
                seed_everything(self.seed + rank)
                return worker(habitat.link(rank))
            except Killed:
                first = False
        return None

    def yield_turn(self, rank: int, ready: Callable[[int], bool]) -> None:
        """Let others run until worker `rank` is ready."""
        self._charge_wall_time(rank)
        if not ready(rank):
            self._ready[rank] = ready
            self._baton.yield_until_ready(rank)
            self._ready[rank] = None
            self._since[rank] = time.perf_counter()
        if self._failure is not None:
            culprit, error = self._failure
            raise LinkError(f"rank {rank}: rank {culprit} failed: {error!r}", lost=[culprit])

    def _can_go_on(self, rank: int) -> bool:
        if (ready := self._ready[rank]) is not None:
            return self._failure is not None or ready(rank)
        number = self._awaited[rank]
        return self._failure is not None or number is None or rank in self._exchanges[number].results

    def _collect(self, rank: int, number: int) -> list[Payload]:
        """Wait for exchange `number`: others run meanwhile."""
        self._charge_wall_time(rank)
        exchange = self._exchanges[number]
        if rank not in exchange.results:
            self._awaited[rank] = number
            arrived = self._baton.yield_until_ready(rank)
            self._awaited[rank] = None
            self._since[rank] = time.perf_counter()
            if not arrived or rank not in exchange.results:
                raise self._in_vain(rank, number, exchange)
        result, end = exchange.results[rank]
        self.clocks[rank] = max(self.clocks[rank], end)
        exchange.collected += 1
        if exchange.collected == self.size:
            del self._exchanges[number]
        if exchange.refused is not None:
            raise exchange.refused
        if exchange.op in ("gather", "pair"):
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
        if exchange.op == "deal":
            self._complete_deal(exchange, payloads)
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
            payloads = [p.of(r) for p, r in zip(payloads, members, strict=True)]
        end = self._wire.send(max(exchange.posted[r][1] for r in members), exchange.op, sizes, members)
        for r in members:
            exchange.results[r] = (payloads, end)

    def _complete_deal(self, exchange: _Exchange, payloads: list[Payload]) -> None:
        """Each worker gets its part of every message; they are cut when they are collected."""
        for rank, (p, due) in enumerate(zip(payloads, zip(*(p.dealt for p in payloads), strict=True), strict=True)):
            if p.due != due:
                raise LinkError(f"rank {rank}: parts of {list(p.due)} bytes are due, but {list(due)} bytes were dealt to it")
        traffic = [dealt_traffic(p.dealt, p.due, rank) for rank, p in enumerate(payloads)]
        at = max(posted for _, posted in exchange.posted.values())
        end = self._wire.occupy(at, self.network.seconds_of(traffic, ring_hops("deal", self.size)))
        payloads = [p.of(rank) for rank, p in enumerate(payloads)]
        exchange.results = dict.fromkeys(range(self.size), (payloads, end))

    def _in_vain(self, rank: int, number: int, exchange: _Exchange) -> LinkError:
        missing = [r for r in exchange.members[rank] if r not in exchange.posted]
        if self._failure is not None:
            culprit, error = self._failure
            return LinkError(f"rank {rank}, exchange {number + 1}: rank {culprit} failed: {error!r}", lost=[culprit])
        names = ", ".join(f"rank {r}" for r in missing)
        return LinkError(f"rank {rank}, exchange {number + 1}: {names} will never take part", lost=missing)

    def _charge_wall_time(self, rank: int) -> None:
        if self.step_time is None:
            now = time.perf_counter()
            self.clocks[rank] += now - self._since[rank]
            self._since[rank] = now


class _SimTicket(Ticket):
    def __init__(self, world: World, rank: int, number: int):
        self._world, self._rank, self._number = world, rank, number

    def _finish(self) -> list[Payload]:
        return self._world._collect(self._rank, self._number)


def _parts_for(payloads: list[Payload], rank: int) -> list[Payload]:
    """What each message that was dealt has for a worker."""
    starts = [sum(p.dealt[:rank]) for p in payloads]
    return [p.like(p.data[start : start + p.dealt[rank]]) for p, start in zip(payloads, starts, strict=True)]


def _paired(rank: int, members: tuple[int, ...]) -> str:
    partner = next((r for r in members if r != rank), None)
    return f"rank {rank} has no partner" if partner is None else f"rank {rank} has rank {partner} for its partner"
