"""What a wire costs: bytes of a collective, seconds on a link, and the words people use for both ("100mbit", "20ms").

Collectives are counted as rings, because that is what gloo and NCCL run for large messages and because a ring sends the
fewest bytes. With M workers and a message of N bytes each,

    mean  (all-reduce):  sends 2 N (M-1)/M bytes in 2 (M-1) hops
    gather (all-gather): sends   N (M-1)   bytes in   (M-1) hops
    broadcast:           sends   N         bytes in   (M-1) hops, from worker 0 down the line

No torch here, so that the command line can use it without waiting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinwire.errors import ConfigError

Op = Literal["mean", "gather", "broadcast"]


class Traffic(NamedTuple):
    """Bytes that one worker sends and receives in one collective."""

    sent: int
    received: int


def ring_traffic(op: Op, sizes: Sequence[int], rank: int) -> Traffic:
    """Bytes that worker `rank` sends and receives.

    Args:
        op: "mean", "gather" or "broadcast".
        sizes: message length in bytes of each worker, in rank order (all equal but for "gather").
        rank: whose traffic.
    """
    workers = len(sizes)
    if op == "mean":
        one_way = 2 * sizes[rank] * (workers - 1) // workers
        return Traffic(one_way, one_way)
    if op == "broadcast":
        return Traffic(sizes[rank] if rank < workers - 1 else 0, sizes[rank] if rank > 0 else 0)
    # In a ring every message passes through every worker; mine stops one short of coming back to me.
    everything = sum(sizes)
    return Traffic(everything - sizes[(rank + 1) % workers], everything - sizes[rank])


def ring_hops(op: Op, workers: int) -> int:
    """Sequential messages of a ring collective: each costs one latency."""
    return (2 if op == "mean" else 1) * (workers - 1)


_NUMBER = r"[0-9.]+(?:e[+-]?[0-9]+)?"
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0}


def parse_bandwidth(text: str) -> float:
    """Bits per second from "100mbit", "1.5gbit", "100Mbps" or a plain number; "inf" for an unlimited link.

    >>> parse_bandwidth("100mbit")
    100000000.0
    """
    if text.strip().lower() == "inf":
        return math.inf
    match = re.fullmatch(rf"({_NUMBER})\s*([kmgt]?)(?:bit|bps|bits|bit/s|)", text.strip().lower())
    value = _number(match[1]) if match else None
    if match is None or value is None or value <= 0:
        raise ConfigError(f"bandwidth must look like 100mbit, 1.5gbit or inf and be above zero, got {text!r}")
    return value * _BITS[match[2]]


def parse_duration(text: str) -> float:
    """Seconds from "20ms", "1.5s", "200us", "2min" or a plain number of seconds.

    >>> parse_duration("20ms")
    0.02
    """
    match = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", text.strip().lower())
    value = _number(match[1]) if match else None
    if match is None or value is None or match[2] not in _SECONDS or value == math.inf:
        raise ConfigError(f"a duration must look like 20ms, 1.5s or 2min, got {text!r}")
    return value * _SECONDS[match[2]]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def show_bytes(count: float) -> str:
    """Bytes for people, in powers of 1000 as networks are sold.

    >>> show_bytes(3_300_000)
    '3.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


@dataclass(frozen=True)
class Network:
    """Bandwidth and latency of each worker's end of the wire.

    Args:
        bandwidth: bits per second, upward and downward alike; one number for all workers or one per worker.
        latency: seconds that one message is under way; one number or one per worker (a message pays its sender's).
        down: bits per second downward where it differs from `bandwidth`, as on home links.
    """

    bandwidth: float | tuple[float, ...] = math.inf
    latency: float | tuple[float, ...] = 0.0
    down: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check that bandwidths are above zero and latencies not below."""
        for name in ("bandwidth", "latency", "down"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, value in (("bandwidth", self.bandwidth), ("down", self.down)):
            if value is not None and not all(v > 0 for v in _each(value)):
                raise ConfigError(f"{name} must be above zero bits per second, got {value!r}")
        if not all(0 <= v < math.inf for v in _each(self.latency)):
            raise ConfigError(f"latency must be zero or more seconds, got {self.latency!r}")

    def check(self, workers: int) -> None:
        """Raise a `ConfigError` where a per-worker list does not have `workers` entries."""
        for name in ("bandwidth", "latency", "down"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != workers:
                raise ConfigError(f"{name} lists {len(value)} workers, but there are {workers}")

    def seconds(self, op: Op, sizes: Sequence[int]) -> float:
        """How long a ring collective takes when all workers start together: the slowest worker sets the pace.

        Args:
            op: "mean", "gather" or "broadcast".
            sizes: message length in bytes of each worker, in rank order.
        """
        workers = len(sizes)
        if workers < 2:
            return 0.0
        up, latency = _of_all(self.bandwidth, workers), _of_all(self.latency, workers)
        down = up if self.down is None else _of_all(self.down, workers)
        transfer = 0.0
        for rank in range(workers):
            sent, received = ring_traffic(op, sizes, rank)
            transfer = max(transfer, 8 * sent / up[rank], 8 * received / down[rank])
        return ring_hops(op, workers) * max(latency) + transfer


def _each(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _of_all(value: float | tuple[float, ...], workers: int) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,) * workers
