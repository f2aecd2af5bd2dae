"""What `thinwire doctor` looks at on a machine: versions, backends, names, interfaces, disk and packages."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from thinwire.errors import WireError
from thinwire.links.rendezvous import backends
from thinwire.network import show_bytes
from thinwire.tools.config import versions
from thinwire.tools.namespaces import SBIN

# Optional packages by the names they are installed and imported by.
EXTRAS = {"matplotlib": "matplotlib", "scipy": "scipy", "scikit-learn": "sklearn", "pillow": "PIL", "torchft": "torchft"}
PARTS = {"report": ("matplotlib", "scipy"), "images": ("scikit-learn", "pillow")}  # which of them are installed together
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
    """What is broken or unusual about a machine by itself."""
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
    """What is unusual about the machines of a job together, in rank order."""
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
