"""How long a recorded run would have taken on another link: computing as measured, plus the wire's time for its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thinwire.errors import ConfigError
from thinwire.network import Op, Wire, parse_bandwidth, parse_duration, ring_hops
from thinwire.tools.records import Point, Record


def record_on_link(record: Record, *, bandwidth: float, latency: float = 0.0) -> list[float]:
    """Seconds after each point of a record's curve on such a link; as recorded where it was run on such a link.

    Args:
        record: the run.
        bandwidth: bits per second of each worker's end of the wire.
        latency: seconds of one message.
    """
    if ran_on(record, bandwidth=bandwidth, latency=latency):
        return [point.seconds for point in record.curve]
    tau = record.config.settings.get("tau", 0)
    workers = int(record.figures["workers"])
    return seconds_on_link(record.curve, workers=workers, bandwidth=bandwidth, latency=latency, tau=tau)


def ran_on(record: Record, *, bandwidth: float, latency: float = 0.0) -> bool:
    """Whether the record's own seconds are those of such a link, in the lab or simulated."""
    kind, *link = record.place.split()
    if len(link) > 2:  # a downward speed of its own
        return False
    try:
        speed = parse_bandwidth(link[0]) if link else math.inf
        delay = parse_duration(link[1]) if len(link) > 1 else 0.0
    except ConfigError:  # a place in somebody's own words
        return False
    return kind in ("lab", "simulated") and (speed, delay) == (bandwidth, latency)


def seconds_on_link(
    points: Sequence[Point], *, workers: int, bandwidth: float, latency: float = 0.0, tau: int = 0
) -> list[float]:
    """Seconds after each point: the time computed there, and between two points the wire's time for what was sent.

    Collectives are rings, as in `thinwire.network`. A message that is applied tau steps after it was sent travels while these
    are computed, and only what is late is waited for. Nothing else is taken to overlap, not even DDP with its backward pass.

    Args:
        points: totals of the run at some steps, in order.
        workers: how many took part.
        bandwidth: bits per second of each worker's end of the wire.
        latency: seconds of one message.
        tau: steps between sending and applying.
    """
    if not points:
        return []
    hops = ring_hops(_op_of(points[-1], workers), workers)
    clock, wire = 0.0, Wire()
    before = Point(step=0, loss=0.0, seconds=0.0, waiting=0.0, sent=0, payload=0, rounds=0)
    clocks = []
    for point in points:
        computing = max(0.0, (point.seconds - point.waiting) - (before.seconds - before.waiting))
        rounds = point.rounds - before.rounds
        travel = 8 * (point.sent - before.sent) / bandwidth + rounds * hops * latency
        messages = max(1, rounds)  # bytes without a round are a handshake or an alarm
        head_start = tau * computing / max(1, point.step - before.step)
        for _ in range(messages):
            clock += computing / messages
            clock = max(clock, wire.occupy(clock - head_start, travel / messages))
        clocks.append(clock)
        before = point
    return clocks


def _op_of(end: Point, workers: int) -> Op:
    """The collective that multiplies messages as this run's were; an all-reduce where that cannot be seen."""
    if workers <= 2 or not end.payload:
        return "mean"
    factors: dict[Op, float] = {"mean": 2 * (workers - 1) / workers, "gather": workers - 1, "pair": 1.0}
    return min(factors, key=lambda op: abs(factors[op] - end.sent / end.payload))
