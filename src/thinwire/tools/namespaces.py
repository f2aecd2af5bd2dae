"""The network of a lab: the commands of iproute2 that make it, shape it and count what passed. No torch here.

A lab called NAME is one network namespace per worker, `thinwire-NAME-0` and so on, and one for the bridge that joins them,
`thinwire-NAME-hub`. Nothing in the machine's own network changes, and removing the namespaces removes everything. All that
is known of a lab is read back from the kernel, so that one process may make it and another one use it.

    worker 0 [eth0] ---- [w0]  bridge  [w1] ---- [eth0] worker 1
               up ->      <- down

A worker's rate upward is a token bucket (tbf) on its own end of the wire, its rate downward one on the hub's end.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError, check_whole_number
from thinwire.network import Network, per_worker, show_bandwidth

WIRE = "eth0"  # a worker's end of its wire, in its own namespace
MOST_WORKERS = 250  # addresses of one /24
SLOWEST = 10e3  # bits per second: below it a single frame takes longer than a second
HEADERS = 66  # bytes of Ethernet, IPv4 and TCP with timestamps around the payload of a packet
QUEUE = 0.02  # seconds that a full queue before a token bucket takes to drain
SBIN = ("/usr/sbin", "/sbin")  # where iproute2 lives, also where PATH does not say so
PATIENCE = 20.0  # seconds for one call of a tool; they take milliseconds
NAMED = r"[a-z0-9][a-z0-9-]{0,39}"


class LabError(ConfigError):
    """The lab cannot be had as asked; the message says what is missing, or what is in the way."""


@dataclass(frozen=True)
class Rates:
    """Bits per second of one worker's wire.

    Args:
        up: of what it sends.
        down: of what it receives.
    """

    up: float = math.inf
    down: float = math.inf

    def __str__(self) -> str:
        up, down = ("unshaped" if rate == math.inf else show_bandwidth(rate) for rate in (self.up, self.down))
        return up if up == down else f"{up} up, {down} down"


@dataclass(frozen=True)
class Counters:
    """What passed one worker's interface.

    With segmentation offload an interface handles packets of up to 64 kB and counts the headers of each once; the shaper
    counts, and charges for, the frames of 1514 bytes that a network card would make of them.

    Attributes:
        sent: bytes that the interface sent, `tx_bytes`.
        received: bytes that it received, `rx_bytes`.
        packets_sent: packets that it sent, each with `HEADERS` bytes around its payload.
        packets_received: packets that it received.
        framed_sent: bytes that the shaper let out, all headers of all frames included.
        framed_received: bytes that it let in.
    """

    sent: int = 0
    received: int = 0
    packets_sent: int = 0
    packets_received: int = 0
    framed_sent: int = 0
    framed_received: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        """What passed since `earlier`."""
        return Counters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def __add__(self, other: Counters) -> Counters:
        """Both together."""
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def payload_sent(self) -> int:
        """Bytes sent without the headers."""
        return self.sent - HEADERS * self.packets_sent


def rates_of(
    workers: int, bandwidth: float | Sequence[float], down: float | Sequence[float] | None = None
) -> tuple[Rates, ...]:
    """The rates of every worker.

    Args:
        workers: how many.
        bandwidth: bits per second upward, and downward too unless `down` is given; one number, or one per worker.
        down: bits per second downward.
    """
    check_whole_number("workers", workers)
    if workers > MOST_WORKERS:
        raise ConfigError(f"a lab has at most {MOST_WORKERS} workers, got {workers}")
    ups = per_worker("bandwidth", bandwidth, workers)
    downs = ups if down is None else per_worker("down", down, workers)
    Network(bandwidth=ups, down=downs)  # refuses what is not above zero
    for rate in (*ups, *downs):
        if rate < SLOWEST:
            raise ConfigError(f"the lab shapes to {show_bandwidth(SLOWEST)} and more, got {show_bandwidth(rate)}")
    return tuple(map(Rates, ups, downs))


# --- What is called -------------------------------------------------------------------------------------------------------


def hub(name: str) -> str:
    """The namespace of a lab's bridge."""
    return f"thinwire-{name}-hub"


def home(name: str, rank: int) -> str:
    """The namespace of a worker."""
    return f"thinwire-{name}-{rank}"


def address(rank: int) -> str:
    """A worker's address; every lab has the same, as they do not see each other."""
    return f"10.77.0.{rank + 1}"


def burst(rate: float) -> int:
    """Bytes that may pass at once: 10 ms of the rate, so that a pause of the CPU costs nothing, and two frames at least.

    More would be free traffic after each pause: 256 kB are a fifth of a second at 10 Mbit/s.
    """
    return max(4000, int(rate / 8 * 0.010))


def shaper(rate: float, queue: float = QUEUE) -> list[str]:
    """The words of `tc` for a rate; an unshaped wire has a plain queue, which counts alike."""
    if rate == math.inf:
        return ["pfifo"]
    return ["tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst(rate)}b", "latency", f"{1e3 * queue:g}ms"]


def commands_shape(name: str, rates: Sequence[Rates], queue: float = QUEUE) -> list[list[str]]:
    """The commands that give every worker its rates, whether it has others or none."""
    commands = []
    for rank, rate in enumerate(rates):
        commands.append(["tc", "-n", home(name, rank), "qdisc", "replace", "dev", WIRE, "root", *shaper(rate.up, queue)])
        commands.append(["tc", "-n", hub(name), "qdisc", "replace", "dev", f"w{rank}", "root", *shaper(rate.down, queue)])
    return commands


def commands_up(name: str, rates: Sequence[Rates], queue: float = QUEUE) -> list[list[str]]:
    """The commands that make a lab, in order. The first one makes the hub, which no two labs of a name can have."""
    at_hub = ["ip", "-n", hub(name)]
    commands = [
        ["ip", "netns", "add", hub(name)],
        [*at_hub, "link", "add", "br0", "type", "bridge"],
        [*at_hub, "link", "set", "dev", "br0", "addrgenmode", "none", "up"],
    ]
    for rank in range(len(rates)):
        at_home = ["ip", "-n", home(name, rank)]
        commands += [
            ["ip", "netns", "add", home(name, rank)],
            [*at_home, "link", "set", "dev", "lo", "up"],
            [*at_hub, "link", "add", f"w{rank}", "type", "veth", "peer", "name", WIRE, "netns", home(name, rank)],
            # Without IPv6 addresses nothing is sent that no worker has asked for.
            [*at_hub, "link", "set", "dev", f"w{rank}", "addrgenmode", "none", "master", "br0", "up"],
            [*at_home, "link", "set", "dev", WIRE, "addrgenmode", "none"],
            [*at_home, "addr", "add", f"{address(rank)}/24", "dev", WIRE],
            [*at_home, "link", "set", "dev", WIRE, "up"],
        ]
    return commands + commands_shape(name, rates, queue)


# --- Calling it -----------------------------------------------------------------------------------------------------------


def check_machine() -> None:
    """Raise a `LabError` that says what is missing: root, or iproute2."""
    if os.geteuid() != 0:
        raise LabError("network namespaces need root: run this with sudo, or as root in a container with CAP_SYS_ADMIN")
    for tool in ("ip", "tc"):
        tool_path(tool)


def tool_path(tool: str) -> str:
    """Where a tool of iproute2 is."""
    found = shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *SBIN]))
    if found is None:
        raise LabError(f"the command {tool!r} is missing: install iproute2 (Debian, Ubuntu: apt-get install iproute2)")
    return found


def call(command: Sequence[str]) -> str:
    """Run a command of iproute2 and return what it says.

    Raises:
        LabError: when it fails, with its own words and what they may mean.
    """
    words = [tool_path(command[0]), *command[1:]]
    try:
        # A session of its own: Ctrl-C is for us, and the tool finishes what it does.
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except subprocess.TimeoutExpired as cause:
        raise LabError(f"`{' '.join(command)}` does not answer within {PATIENCE:g} s") from cause
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise LabError(f"`{' '.join(command)}` says: {said}{_meaning(command)}")
    return done.stdout


def _meaning(command: Sequence[str]) -> str:
    """What a kernel or a container must have for a command that failed."""
    needs = {
        "tbf": "the kernel needs the token bucket sch_tbf (CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`)",
        "bridge": "the kernel needs bridges (CONFIG_BRIDGE; try `modprobe bridge`)",
        "veth": "the kernel needs veth pairs (CONFIG_VETH; try `modprobe veth`)",
        "netns": "namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN, which a container has only with --privileged",
    }
    return next((f" ({need})" for word, need in needs.items() if word in command), "")


def namespaces() -> dict[str, list[str]]:
    """The namespaces of every lab on this machine, by the lab's name; also of one that was left half made."""
    labs: dict[str, list[str]] = {}
    for line in call(["ip", "netns", "list"]).splitlines():
        if match := re.match(rf"(thinwire-({NAMED})-(?:hub|\d+))(?:\s|$)", line):
            labs.setdefault(match[2], []).append(match[1])
    return {name: sorted(parts, key=lambda part: (len(part), part)) for name, parts in sorted(labs.items())}


def read_rates(name: str, workers: int) -> tuple[Rates, ...]:
    """The rates that the kernel has for a lab."""
    ups = [_rate(_qdiscs(home(name, rank))[WIRE]) for rank in range(workers)]
    at_hub = _qdiscs(hub(name))
    return tuple(Rates(up, _rate(at_hub[f"w{rank}"])) for rank, up in enumerate(ups))


def read_counters(name: str, workers: int) -> tuple[Counters, ...]:
    """What has passed every worker's interface so far."""
    at_hub = _qdiscs(hub(name))
    counters = []
    for rank in range(workers):
        [link] = json.loads(call(["ip", "-n", home(name, rank), "-s", "-j", "link", "show", "dev", WIRE]))
        tx, rx = link["stats64"]["tx"], link["stats64"]["rx"]
        framed = _qdiscs(home(name, rank))[WIRE]["bytes"], at_hub[f"w{rank}"]["bytes"]
        counters.append(Counters(tx["bytes"], rx["bytes"], tx["packets"], rx["packets"], *framed))
    return tuple(counters)


def _qdiscs(namespace: str) -> dict[str, dict[str, Any]]:
    """The root queue of every interface of a namespace, with its options and counts."""
    queues = json.loads(call(["tc", "-n", namespace, "-s", "-j", "qdisc", "show"]))
    return {queue["dev"]: queue for queue in queues if queue.get("root")}


def _rate(queue: dict[str, Any]) -> float:
    return 8.0 * queue["options"]["rate"] if queue["kind"] == "tbf" else math.inf


# --- Taking it down -------------------------------------------------------------------------------------------------------


def processes_in(names: Iterable[str]) -> set[int]:
    """The processes that run in these namespaces."""
    here = os.stat("/proc/self/ns/net").st_ino
    inside: set[int] = set()
    for name in names:
        place = Path("/var/run/netns", name)
        if not place.exists():  # removed meanwhile
            continue
        if place.stat().st_ino == here:
            raise LabError(f"this process runs inside of the namespace {name} itself: call it from outside of the lab")
        inside |= set(map(int, call(["ip", "netns", "pids", name]).split()))
    return inside


def end_processes(pids: Iterable[int]) -> None:
    """End processes of a lab: ask first, then insist."""
    left = set(pids)
    for how, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            left = {pid for pid in left if _runs(pid)}
            time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process is there and is more than an entry that its parent has not taken note of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def remove(names: Sequence[str]) -> None:
    """Remove namespaces, and with them their ends of all wires; tries them all before it complains."""
    problems = []
    for name in names:
        try:
            call(["ip", "netns", "delete", name])
        except LabError as error:
            problems.append(str(error))
    if problems:
        raise LabError("; ".join(problems))
