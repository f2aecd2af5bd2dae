"""What a wire costs: bytes of a collective, seconds on a link, and the words people use for both ("100mbit", "20ms").

Collectives are counted as rings, because that is what gloo and NCCL run for large messages and because a ring sends the
fewest bytes. With M workers and a message of N bytes each,

    mean  (all-reduce):  sends 2 N (M-1)/M bytes in 2 (M-1) hops
    gather (all-gather): sends   N (M-1)   bytes in   (M-1) hops
    broadcast:           sends   N         bytes in   (M-1) hops, from worker 0 down the line

Workers that swap messages two by two need no ring, and the others do not matter; nor does a message of which each worker gets
a part of its own, or that goes straight to all:

    pair:                sends   N         bytes in      1  hop; nothing without a partner
    deal  (all-to-all):  sends   N         bytes in      1  hop, without the part that a worker deals to itself
    spread:              sends   N (M-1)   bytes in      1  hop

No torch here, so that the command line can use it without waiting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinwire.errors import ConfigError

Op = Literal["mean", "gather", "broadcast", "pair", "deal", "spread"]

GOODPUT = 1448 / 1514  # of an Ethernet link: a frame of 1514 bytes has headers of Ethernet, IP and TCP with timestamps
# On the wire with every part that goes straight to another worker, however short: gloo says that it is ready to send, that it
# is ready to receive and what comes, 48 bytes each in a frame of its own, and TCP acknowledges these three (66 bytes of headers
# each time). The lab counts 562.
CONTROL_NBYTES = 3 * (48 + 66) + 3 * 66
BACKWARD = 2 / 3  # of a step: a backward pass has twice the matrix products of a forward pass


class Traffic(NamedTuple):
    """Bytes that one worker sends and receives in one exchange."""

    sent: int
    received: int


def ring_traffic(op: Op, sizes: Sequence[int], rank: int) -> Traffic:
    """Bytes that worker `rank` sends and receives.

    Args:
        op: "mean", "gather", "broadcast" or "pair".
        sizes: message length in bytes of each worker, in rank order (all equal but for "gather"); of a "pair", those of its
            members.
        rank: whose traffic.
    """
    workers = len(sizes)
    if op == "pair":
        one_way = sizes[0] if workers > 1 else 0
        return Traffic(one_way, one_way)
    if op == "mean":
        one_way = 2 * sizes[rank] * (workers - 1) // workers
        return Traffic(one_way, one_way)
    if op == "broadcast":
        return Traffic(sizes[rank] if rank < workers - 1 else 0, sizes[rank] if rank > 0 else 0)
    # In a ring every message passes through every worker; mine stops one short of coming back to me.
    everything = sum(sizes)
    return Traffic(everything - sizes[(rank + 1) % workers], everything - sizes[rank])


def dealt_traffic(dealt: Sequence[int], due: Sequence[int], rank: int) -> Traffic:
    """Bytes that worker `rank` sends and receives when messages are dealt.

    Args:
        dealt: length in bytes of its part for each worker; what it deals to itself does not travel.
        due: length in bytes of what comes from each worker.
        rank: whose traffic.
    """
    return Traffic(sum(dealt) - dealt[rank], sum(due) - due[rank])


def ddp_bytes(parameters: int, workers: int, steps: int = 1) -> float:
    """Bytes that a worker sends when torch's DDP averages float32 gradients at every step: what methods are compared with.

    >>> ddp_bytes(1_000_000, workers=4)
    6000000.0
    """
    return 2 * 4 * parameters * (workers - 1) / workers * steps


def ring_hops(op: Op, workers: int) -> int:
    """Sequential messages of a ring collective, or of a pair: each costs one latency."""
    if op in ("pair", "deal", "spread"):
        return min(1, workers - 1)
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


def show_bandwidth(bits: float) -> str:
    """Bits per second for people, in words that `parse_bandwidth` reads.

    >>> show_bandwidth(12.34e9)
    '12.3gbit'
    """
    if math.isinf(bits):
        return "inf"
    for unit, length in (("tbit", 1e12), ("gbit", 1e9), ("mbit", 1e6)):
        if bits >= 0.9995 * length:
            return f"{bits / length:.3g}{unit}"
    return f"{bits / 1e3:.3g}kbit"


def show_seconds(seconds: float) -> str:
    """A duration for people.

    >>> show_seconds(0.0213), show_seconds(415.8), show_seconds(106_000)
    ('21.3 ms', '6.93 min', '29.4 h')
    """
    units = (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 1), ("s", 1, 1), ("ms", 1e-3, 1), ("us", 1e-6, 0.01))
    for unit, length, least in units:
        if seconds >= 0.9995 * least * length:
            return f"{seconds / length:.3g} {unit}"
    return "0 s"


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
            if (value := getattr(self, name)) is not None:
                per_worker(name, value, workers)

    def seconds(self, op: Op, sizes: Sequence[int], ranks: Sequence[int] | None = None) -> float:
        """How long an exchange takes when all that take part start together: the slowest of them sets the pace.

        Args:
            op: "mean", "gather", "broadcast" or "pair".
            sizes: message length in bytes of each worker that takes part, in rank order.
            ranks: who takes part, where not everybody does: the members of a pair.
        """
        traffic = [ring_traffic(op, sizes, place) for place in range(len(sizes))]
        return self.seconds_of(traffic, ring_hops(op, len(sizes)), ranks)

    def seconds_of(self, traffic: Sequence[Traffic], hops: int, ranks: Sequence[int] | None = None) -> float:
        """The same, of what each worker that takes part sends and receives, in so many sequential messages."""
        if len(traffic) < 2:
            return 0.0
        ranks = range(len(traffic)) if ranks is None else ranks
        up, latency = _of(self.bandwidth, ranks), _of(self.latency, ranks)
        down = up if self.down is None else _of(self.down, ranks)
        transfer = max(max(8 * sent / up[i], 8 * received / down[i]) for i, (sent, received) in enumerate(traffic))
        return hops * max(latency) + transfer


class Wire:
    """The wire as a queue: an exchange starts when those that take part are ready and their earlier ones have ended.

    Args:
        network: bandwidth and latency.
        workers: how many workers there are.
    """

    def __init__(self, network: Network | None = None, workers: int = 1):
        """The wire is free."""
        self.network = network or Network()
        self._free_at = [0.0] * workers

    def send(self, at: float, op: Op, sizes: Sequence[int], ranks: Sequence[int] | None = None) -> float:
        """Take an exchange, and say when it ends.

        Args:
            at: when the last worker that takes part has posted it, in seconds.
            op: "mean", "gather", "broadcast" or "pair".
            sizes: message length in bytes of each worker that takes part, in rank order.
            ranks: who takes part; everybody by default.
        """
        return self.occupy(at, self.network.seconds(op, sizes, ranks), ranks)

    def occupy(self, at: float, seconds: float, ranks: Sequence[int] | None = None) -> float:
        """Take an exchange of known duration, and say when it ends."""
        ranks = range(len(self._free_at)) if ranks is None else ranks
        end = max(at, *(self._free_at[rank] for rank in ranks)) + seconds
        for rank in ranks:
            self._free_at[rank] = end
        return end


def per_worker(name: str, value: float | Sequence[float], workers: int) -> tuple[float, ...]:
    """One value for each worker, of one number for all or of a list.

    Args:
        name: of the setting, for the error.
        value: one number, or one per worker.
        workers: how many there are.

    Raises:
        ConfigError: where the list has another length.
    """
    if not isinstance(value, Sequence):
        return (float(value),) * workers
    if len(value) != workers:
        raise ConfigError(f"{name} lists {len(value)} workers, but there are {workers}")
    return tuple(float(v) for v in value)


def _each(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _of(value: float | tuple[float, ...], ranks: Sequence[int]) -> list[float]:
    return [value[rank] if isinstance(value, tuple) else value for rank in ranks]
