"""What `thinwire doctor` measures: bandwidth and latency of the links between the ranks of a job.

All ranks call `measure` together. In every round of a tournament each rank swaps messages with one other, until all pairs have
met; then all of them make an all-reduce. A swap takes latency + bytes / bandwidth, as in `thinwire.network`.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, TypeVar

import torch

from thinwire.core.gates import read_json, read_number
from thinwire.errors import WireError
from thinwire.links import Link
from thinwire.network import Network, ring_hops, ring_traffic, show_bandwidth, show_seconds
from thinwire.payload import Payload
from thinwire.tools.doctor.machine import Finding, Machine

J = TypeVar("J")


@dataclass(frozen=True)
class Swap:
    """What one rank measured with another.

    Attributes:
        latency: seconds of the smallest exchange.
        bandwidth: bits per second both ways at once.
        nbytes: length of the messages that the bandwidth was measured with.
    """

    latency: float
    bandwidth: float
    nbytes: int


@dataclass(frozen=True)
class Measurements:
    """What was measured between the ranks of a job; the same on all of them.

    Attributes:
        pairs: by (lower rank, higher rank); of the two that measured, the one that found it slower.
        hop: seconds of one hop of the smallest all-reduce.
        bandwidth: bits per second of each worker in a long all-reduce.
        nbytes: length of its message.
        seconds: how long it took.
    """

    pairs: dict[tuple[int, int], Swap] = field(default_factory=dict)
    hop: float = 0.0
    bandwidth: float = math.inf
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def pair_bandwidth(self) -> float:
        """Bits per second of the slowest pair, which all others wait for."""
        return min((swap.bandwidth for swap in self.pairs.values()), default=math.inf)

    @property
    def pair_latency(self) -> float:
        """Seconds of the longest latency of a pair."""
        return max((swap.latency for swap in self.pairs.values()), default=0.0)

    @property
    def network(self) -> Network:
        """The network that these figures describe: what a plan should be made for."""
        return Network(bandwidth=self.pair_bandwidth, latency=self.pair_latency)

    @property
    def slowest(self) -> tuple[int, int]:
        """The pair with the least bandwidth."""
        return min(self.pairs, key=lambda pair: self.pairs[pair].bandwidth)

    def as_json(self) -> dict[str, Any]:
        """Everything, with pairs as a list."""
        pairs = [{"ranks": list(pair), **asdict(swap)} for pair, swap in self.pairs.items()]
        return {**{k: v for k, v in vars(self).items() if k != "pairs"}, "pairs": pairs}

    @staticmethod
    def from_json(told: dict[str, Any]) -> Measurements:
        """What `as_json` gave."""
        pairs = {(p["ranks"][0], p["ranks"][1]): Swap(p["latency"], p["bandwidth"], p["nbytes"]) for p in told["pairs"]}
        return Measurements(**{**told, "pairs": pairs})


SMALLEST, LARGEST, LADDER = 1 << 16, 1 << 24, 7  # bytes of the messages, and how many are sent at most
TARGET = 0.3  # seconds that a message should take, so that bursts and start-up do not count
RING = 10_000_000  # bytes of the long all-reduce, less where that would take longer than a second or two


def measure(link: Link) -> Measurements:
    """Measure all pairs and the whole ring; called by all ranks together."""
    if link.size < 2:
        return Measurements()
    mine: dict[int, Swap] = {}
    for partners in tournament(link.size):
        partner = partners[link.rank]
        swap = _measure_pair(link, partner)
        if partner is not None:
            mine[partner] = swap
    told = tell_each_other(link, {str(partner): list(astuple(swap)) for partner, swap in mine.items()}, dict)
    pairs = {}
    for a, b in itertools.combinations(range(link.size), 2):
        found = (Swap(*_numbers(told[x].get(str(y)), 3, x)) for x, y in ((a, b), (b, a)))
        pairs[a, b] = min(found, key=lambda swap: swap.bandwidth)
    return _measure_ring(link, Measurements(pairs), Measurements(pairs).pair_bandwidth)


def measure_ring(link: Link) -> Measurements:
    """Measure the ring alone, in some seconds: messages grow until one takes long enough; called by all ranks together."""
    if link.size < 2:
        return Measurements()
    nbytes, rate = SMALLEST, 0.0
    for _ in range(LADDER):
        told = tell_each_other(link, _all_reduce(link, nbytes))
        seconds = max(_numbers([each], 1, rank)[0] for rank, each in enumerate(told))  # all go by the slowest
        rate = 8 * ring_traffic("mean", [nbytes] * link.size, 0).sent / max(seconds, 1e-9)
        if seconds > TARGET / 3 or nbytes >= LARGEST:
            break
        nbytes *= 4
    return _measure_ring(link, Measurements(), rate)


def tournament(players: int) -> list[list[int | None]]:
    """Rounds in which everybody meets everybody once: the partner of each, in order; None for who has none.

    >>> tournament(3)
    [[None, 2, 1], [2, None, 0], [1, 0, None]]
    """
    places: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        partner: dict[int | None, int | None] = {}
        for a, b in zip(places[: len(places) // 2], reversed(places), strict=False):
            partner |= {a: b, b: a}
        rounds.append([partner[r] for r in range(players)])
        places = [places[0], places[-1], *places[1:-1]]  # the first stays, the others move on
    return rounds


def _measure_pair(link: Link, partner: int | None) -> Swap:
    """Every rank posts as many swaps as any other, also one without a partner: links count them."""
    for _ in range(3):  # the first exchange of two ranks opens their connection
        _swap(link, partner, 8)
    latency = statistics.median(_swap(link, partner, 8) for _ in range(15))
    nbytes, enough = SMALLEST, 0
    best = (0.0, 0)
    for _ in range(LADDER):
        idle = enough > 2
        _swap(link, partner, 8)  # so that both start together
        seconds = _swap(link, partner, 8 if idle else nbytes)
        seconds = _slower(link, partner, seconds)
        if idle:
            continue
        rate = 8 * nbytes / max(seconds - latency, 1e-9)
        best = (max(rate, best[0]) if nbytes == best[1] else rate, nbytes)  # of one length, the run with the least disturbance
        if seconds > TARGET / 3:
            enough += 1
        else:
            nbytes = min(4 * nbytes, LARGEST)
    return Swap(latency, *best)


def _swap(link: Link, partner: int | None, nbytes: int) -> float:
    """Seconds of one exchange with a partner."""
    payload = Payload(torch.zeros(nbytes, dtype=torch.uint8), purpose="doctor", partner=partner)
    started = link.now()
    link.post(payload, "pair").wait()
    return link.now() - started


def _slower(link: Link, partner: int | None, seconds: float) -> float:
    """The longer of the two times that a pair has found, so that both go on alike."""
    mine = torch.tensor([seconds], dtype=torch.float64).view(torch.uint8)
    both = link.post(Payload(mine, purpose="doctor", partner=partner), "pair").wait()
    ranks = sorted({link.rank, link.rank if partner is None else partner})
    return max(read_number(p, rank) for rank, p in zip(ranks, both, strict=True))


def _measure_ring(link: Link, measured: Measurements, slowest: float) -> Measurements:
    """With what an all-reduce takes, which the figures of the pairs can be checked by.

    Args:
        link: between all ranks.
        measured: the figures of the pairs, where there are any.
        slowest: bits per second that its message is chosen by.
    """
    hops = ring_hops("mean", link.size)
    small = statistics.median(_all_reduce(link, 4) for _ in range(9))
    per_byte = ring_traffic("mean", [1_000_000] * link.size, 0).sent / 1e6  # what a ring sends for one byte of a message
    nbytes = int(min(RING, max(SMALLEST, slowest / 8 / per_byte))) // 4 * 4
    seconds = statistics.median(_all_reduce(link, nbytes) for _ in range(3))
    bandwidth = 8 * nbytes * per_byte / max(seconds - small, 1e-9)
    said = tell_each_other(link, [small / hops, bandwidth, seconds])  # clocks differ: all go by the slowest
    told = [_numbers(numbers, 3, rank) for rank, numbers in enumerate(said)]
    return Measurements(measured.pairs, max(t[0] for t in told), min(t[1] for t in told), nbytes, max(t[2] for t in told))


def _all_reduce(link: Link, nbytes: int) -> float:
    tell_each_other(link, None)  # so that all start together
    payload = Payload(torch.zeros(nbytes // 4), purpose="doctor")
    started = link.now()
    link.mean(payload)
    return link.now() - started


def tell_each_other(link: Link, said: Any, kind: type[J] = object) -> list[J]:
    """What each rank says, in rank order, on every rank; what is not JSON of this kind is a `WireError`."""
    answers = link.all_gather(Payload.of_bytes(json.dumps(said).encode(), purpose="doctor"))
    return [read_json(answer, rank, kind) for rank, answer in enumerate(answers)]


def _numbers(told: Any, count: int, rank: int) -> list[Any]:
    """Measured figures that a rank has told."""
    fits = isinstance(told, list) and len(told) == count and all(type(n) in (int, float) for n in told)
    if not fits or not all(0 <= n < math.inf for n in told):
        raise WireError(f"not the {count} figures that it should have measured", rank=rank)
    return told


def look_at_links(
    measured: Measurements, machines: Sequence[Machine], *, params: int | None = None, timeout: float = 120.0
) -> list[Finding]:
    """What is unusual about the links.

    Args:
        measured: between the ranks.
        machines: of the ranks, in order.
        params: of the model to train, where it is known.
        timeout: seconds that a worker of `thinwire train` waits for the others.
    """
    found = [_about_unequal(measured, [m.host for m in machines])]
    if params is not None and len(machines) > 1:
        seconds = measured.network.seconds("mean", [4 * params] * len(machines))
        if seconds > 0.8 * timeout:
            text = f"an all-reduce of {params:,} float32 parameters takes {show_seconds(seconds)}, and a worker waits "
            text += f"{timeout:g} s for the others: give thinwire train --timeout {math.ceil(2 * seconds)}s"
            found.append(Finding("warning", text))
    return [finding for finding in found if finding is not None]


def _about_unequal(measured: Measurements, hosts: Sequence[str]) -> Finding | None:
    """A link that is much slower than others: one between machines, where there are several."""
    between = {pair: s.bandwidth for pair, s in measured.pairs.items() if hosts[pair[0]] != hosts[pair[1]]}
    rates = between or {pair: s.bandwidth for pair, s in measured.pairs.items()}
    fastest, pair = max(rates.values(), default=0.0), min(rates, key=lambda p: rates[p], default=None)
    if pair is None or rates[pair] >= 0.5 * fastest:
        return None
    slow = Counter(rank for p, rate in rates.items() if rate < 0.5 * fastest for rank in p)
    text = f"links are unequal: {show_bandwidth(rates[pair])} between rank {pair[0]} and rank {pair[1]}, the fastest has "
    text += (
        f"{show_bandwidth(fastest)}; rank {slow.most_common(1)[0][0]} is in most of the slow ones, and all wait for the slowest"
    )
    return Finding("warning", text)


def plan_command(measured: Measurements, *, workers: int, params: str | None) -> str:
    """The `thinwire plan` that goes on from here, for the slowest pair; what was measured has no headers any more."""
    rate, latency = show_bandwidth(measured.pair_bandwidth), f"{1e3 * measured.pair_latency:.3g}ms"
    return (
        f"thinwire plan --workers {workers} --bandwidth {rate} --latency {latency} --framing 1 "
        f"--params {params or '...'} --step-time ..."
    )
