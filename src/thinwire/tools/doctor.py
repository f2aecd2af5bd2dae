"""What `thinwire doctor` looks at: this machine, and the links between the ranks of a job.

All ranks call `measure` together. In every round of a tournament each rank swaps messages with one other, until all pairs have
met; then all of them make an all-reduce. A swap takes latency + bytes / bandwidth, as in `thinwire.network`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from thinwire.core.gates import read_json, read_number
from thinwire.errors import WireError
from thinwire.links import Link
from thinwire.links.rendezvous import backends
from thinwire.network import Network, ring_hops, ring_traffic, show_bandwidth, show_bytes, show_seconds
from thinwire.payload import Payload
from thinwire.tools.config import versions
from thinwire.tools.namespaces import SBIN

J = TypeVar("J")

# Optional packages by the names they are installed and imported by.
EXTRAS = {"matplotlib": "matplotlib", "scipy": "scipy", "scikit-learn": "sklearn", "pillow": "PIL", "torchft": "torchft"}
LITTLE_SPACE = 2e9  # bytes of a disk


@dataclass(frozen=True)
class Finding:
    """Something worth saying.

    Attributes:
        level: "broken" means that thinwire cannot train here.
        text: what, and what to do.
    """

    level: Literal["warning", "broken"]
    text: str


# --- This machine ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What a rank knows of the machine it runs on.

    Attributes:
        host: its name.
        address: what that name resolves to; None where it does not.
        interfaces: network interfaces with their IPv4 address, where they have one.
        gloo_interface: GLOO_SOCKET_IFNAME.
        versions: of thinwire, torch, numpy, Python, and the platform.
        extras: optional packages, and whether they are installed.
        backends: of torch, and whether it was built with them.
        devices: GPUs by name.
        cores: that this process may use.
        threads: that torch uses.
        omp: OMP_NUM_THREADS.
        lab: what `thinwire lab` needs, and whether it is there.
        free: bytes on the disk of this folder.
    """

    host: str
    address: str | None
    interfaces: dict[str, str | None]
    gloo_interface: str | None
    versions: dict[str, str]
    extras: dict[str, bool]
    backends: dict[str, bool]
    devices: list[str]
    cores: int
    threads: int
    omp: str | None
    lab: dict[str, bool]
    free: int


def inspect_machine() -> Machine:
    """Look around; nothing is started."""
    host = socket.gethostname()
    where = os.pathsep.join([os.environ.get("PATH", ""), *SBIN])
    cuda = torch.cuda.is_available()
    return Machine(
        host=host,
        address=_resolved(host),
        interfaces=dict(_interfaces()),
        gloo_interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        versions=versions(),
        extras={name: importlib.util.find_spec(module) is not None for name, module in EXTRAS.items()},
        backends=backends(),
        devices=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        omp=os.environ.get("OMP_NUM_THREADS"),
        lab={
            "root": hasattr(os, "geteuid") and os.geteuid() == 0,
            "ip": shutil.which("ip", path=where) is not None,
            "tc": shutil.which("tc", path=where) is not None,
        },
        free=shutil.disk_usage(".").free,
    )


def _resolved(host: str, patience: float = 3.0) -> str | None:
    """The address of a host name; None where it has none, or a name server does not answer in time."""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(host))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience)
    return found[0] if found else None


def _interfaces() -> Iterator[tuple[str, str | None]]:
    for _, name in socket.if_nameindex():
        yield name, _address_of(name)


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None where it has none, or where the system cannot be asked like this."""
    if sys.platform != "linux":
        return None
    import fcntl

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        answer = fcntl.ioctl(asking.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def look_at_machine(machine: Machine) -> list[Finding]:
    """What is broken or odd about a machine by itself."""
    found = []
    if not any(machine.backends.values()):
        found.append(Finding("broken", "this torch has no torch.distributed backend: install a build with gloo or nccl"))
    elif not machine.backends["gloo"]:
        found.append(Finding("broken", "this torch has no gloo, which workers without GPUs are joined by"))
    if machine.gloo_interface is None:
        found += _about_interfaces(machine)
    elif machine.gloo_interface.split(",")[0] not in machine.interfaces:
        there = f"the interfaces of {machine.host} are {', '.join(machine.interfaces)}"
        found.append(Finding("broken", f"GLOO_SOCKET_IFNAME is {machine.gloo_interface!r}, but {there}"))
    if machine.free < LITTLE_SPACE:
        found.append(Finding("warning", f"only {show_bytes(machine.free)} are free on this disk: checkpoints may not fit"))
    return found


def _about_interfaces(machine: Machine) -> list[Finding]:
    if machine.address is not None and not machine.address.startswith("127."):
        return []
    others = [name for name, at in machine.interfaces.items() if at is not None and not at.startswith("127.")]
    how = f"export GLOO_SOCKET_IFNAME={others[0]}" if others else "export GLOO_SOCKET_IFNAME"
    what = "does not resolve" if machine.address is None else f"resolves to {machine.address}"
    text = f"the host name {machine.host!r} {what}, so gloo cannot be reached from other machines: {how} for jobs over several"
    return [Finding("warning", text)]


def look_at_all(machines: Sequence[Machine]) -> list[Finding]:
    """What is odd about the machines of a job together, in rank order."""
    found = []
    for package in ("thinwire", "torch", "python"):
        seen = [m.versions[package] for m in machines]
        for rank, version in enumerate(seen):
            if version != seen[0]:
                text = f"{package} is {seen[0]} on rank 0 and {version} on rank {rank}: install the same everywhere"
                found.append(Finding("warning", text))
                break
    for host, ranks in Counter(m.host for m in machines).items():
        here = [m for m in machines if m.host == host]
        cores, threads = here[0].cores, sum(m.threads for m in here)
        if ranks > cores:
            found.append(Finding("warning", f"{ranks} ranks share the {cores} cores of {host}: steps and figures suffer"))
        elif threads > cores and ranks > 1:
            fair = max(1, cores // ranks)
            text = f"{ranks} ranks on {host} have {threads} threads for {cores} cores: export OMP_NUM_THREADS={fair}"
            found.append(Finding("warning", text))
    return found


# --- The links ---------------------------------------------------------------------------------------------------------------


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
TARGET = 0.3  # seconds that a message should be under way, so that bursts and start-up do not count
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
    slowest = min(swap.bandwidth for swap in pairs.values())
    return _measure_ring(link, pairs, slowest)


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


def _measure_ring(link: Link, pairs: dict[tuple[int, int], Swap], slowest: float) -> Measurements:
    hops = ring_hops("mean", link.size)
    small = statistics.median(_all_reduce(link, 4) for _ in range(9))
    per_byte = ring_traffic("mean", [1_000_000] * link.size, 0).sent / 1e6  # what a ring sends for one byte of a message
    nbytes = int(min(RING, max(SMALLEST, slowest * 1.0 / 8 / per_byte))) // 4 * 4
    seconds = statistics.median(_all_reduce(link, nbytes) for _ in range(3))
    bandwidth = 8 * nbytes * per_byte / max(seconds - small, 1e-9)
    said = tell_each_other(link, [small / hops, bandwidth, seconds])  # clocks differ: all go by the slowest
    told = [_numbers(numbers, 3, rank) for rank, numbers in enumerate(said)]
    return Measurements(pairs, max(t[0] for t in told), min(t[1] for t in told), nbytes, max(t[2] for t in told))


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


def machine_of(told: dict[str, Any], rank: int, mine: Machine) -> Machine:
    """The machine that another rank has told of; `mine` shows what it must look like."""
    hints = get_type_hints(Machine)
    fits = told.keys() == hints.keys() and all(_is_a(hint, told[name]) for name, hint in hints.items())
    if not fits or any(told[name].keys() != getattr(mine, name).keys() for name in ("versions", "backends", "extras", "lab")):
        raise WireError("not the description of a machine", rank=rank)
    return Machine(**told)


def _is_a(hint: Any, value: object) -> bool:
    """Whether something that was JSON is what a field of `Machine` should be."""
    kind, inside = get_origin(hint), get_args(hint)
    if kind is dict:
        return isinstance(value, dict) and all(isinstance(v, inside[1]) for v in value.values())
    if kind is list:
        return isinstance(value, list) and all(isinstance(v, inside[0]) for v in value)
    return isinstance(value, hint)


def look_at_links(
    measured: Measurements, machines: Sequence[Machine], *, params: int | None = None, timeout: float = 120.0
) -> list[Finding]:
    """What is odd about the links.

    Args:
        measured: between the ranks.
        machines: of the ranks, in order.
        params: of the model to train, where it is known.
        timeout: seconds that a worker of `thinwire train` waits for the others.
    """
    found = [_about_unequal(measured, [m.host for m in machines])]
    if params is not None and len(machines) > 1:
        network = Network(bandwidth=measured.bandwidth, latency=measured.hop)
        seconds = network.seconds("mean", [4 * params] * len(machines))
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
    """The `thinwire plan` that goes on from here; what was measured has no headers any more."""
    rate, latency = show_bandwidth(measured.bandwidth), f"{1e3 * measured.hop:.3g}ms"
    return (
        f"thinwire plan --workers {workers} --bandwidth {rate} --latency {latency} --framing 1 "
        f"--params {params or '...'} --step-time ..."
    )
