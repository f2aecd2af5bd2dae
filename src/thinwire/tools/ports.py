"""Which ports the processes of a job have open, and who can reach them: neither gloo nor torch's store has authentication."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import ConfigError

PROC = Path("/proc")


@dataclass(frozen=True, order=True)
class Port:
    """A socket that listens.

    Attributes:
        address: of this machine; 0.0.0.0 or :: for all that it has.
        port: the number.
        owner: whose it is, in words.
    """

    address: str
    port: int
    owner: str = ""

    @property
    def reach(self) -> str:
        """Who can connect to it, in words."""
        if ipaddress.ip_address(self.address).is_loopback:
            return "this machine only"
        if self.everywhere:
            return "every network that this machine is in"
        return f"the network of {self.address}"

    @property
    def local(self) -> bool:
        """Whether only processes of this machine can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def everywhere(self) -> bool:
        """Whether it listens on all interfaces, or at an address of the internet."""
        at = ipaddress.ip_address(self.address)
        return at.is_unspecified or at.is_global

    def __str__(self) -> str:
        """As `ss` shows it."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def can_tell() -> bool:
    """Whether this system says which sockets a process has open."""
    return (PROC / "self/net/tcp").exists()


def listening(pid: int, owner: str = "") -> list[Port]:
    """The TCP sockets that a process listens on; of another user's process only root is told."""
    mine = set()
    with contextlib.suppress(OSError):
        for fd in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                mine.add(os.readlink(fd))
    return sorted(Port(at, port, owner) for at, port, inode in _table(pid) if f"socket:[{inode}]" in mine)


def at_port(number: int, owner: str = "") -> list[Port]:
    """What listens at a port of this machine, whichever process it is."""
    return sorted({Port(at, port, owner) for at, port, _ in _table(os.getpid()) if port == number})


def of_job(pid: int) -> list[Port]:
    """The sockets that a process and all that it has started listen on.

    Raises:
        ConfigError: where there is no such process, or the system does not tell.
    """
    if not can_tell():
        raise ConfigError(f"this system does not show the sockets of a process: ask `lsof -nP -iTCP -sTCP:LISTEN -a -p {pid}`")
    if not (PROC / str(pid)).exists():
        raise ConfigError(f"there is no process {pid}")
    return [port for member in [pid, *_descendants(pid)] for port in listening(member, f"{_name(member)} (pid {member})")]


def _table(pid: int) -> Iterable[tuple[str, int, str]]:
    """Address, port and inode of every listening TCP socket in the network that a process is in."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A":  # LISTEN
                at, port = words[1].split(":")
                yield _address(at), int(port, 16), words[9]


def _address(hexadecimal: str) -> str:
    """An address as the kernel prints it: 32-bit words in the machine's byte order."""
    words = [int(hexadecimal[i : i + 8], 16) for i in range(0, len(hexadecimal), 8)]
    raw = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = raw.ipv4_mapped if isinstance(raw, ipaddress.IPv6Address) else None
    return str(mapped or raw)


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(after_name[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        children = sorted(parents.get(left.pop(), []))
        found += children
        left += children
    return found


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return "gone"


def advice(ports: Sequence[Port], *, one_machine: bool) -> list[str]:
    """What to do about ports that more can reach than need to.

    Args:
        ports: of a job.
        one_machine: all its processes run on this machine, so that no other machine needs to reach it.
    """
    found = []
    open_ports = [p for p in ports if not p.local and (one_machine or p.everywhere)]
    if open_ports:
        names = ", ".join(f"{p} ({p.owner})" if p.owner else str(p) for p in open_ports[:4])
        more = f" and {len(open_ports) - 4} more" if len(open_ports) > 4 else ""
        todo = (
            "start it with `thinwire train --workers`, or export GLOO_SOCKET_IFNAME=lo and close the store's port to other "
            "machines"
            if one_machine
            else "give the store an address of a private network (MASTER_ADDR, --rdzv-endpoint), export GLOO_SOCKET_IFNAME, "
            "and close the ports to machines outside of the job"
        )
        who = "although all ranks are on this machine" if one_machine else "and whoever connects can write into the job"
        found.append(f"open to more than the job needs: {names}{more}, {who}: {todo}")
    return found
