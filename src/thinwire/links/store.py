"""The job's key-value store, held at an address that only the job's processes need to reach.

torch's TCPStore listens on all interfaces of the machine, whatever address it is given, without authentication. So the
socket is bound here, to the one address that the job's processes connect to, and handed to it.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import re
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors import LinkError

log = logging.getLogger("thinwire")

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the interface by which processes of one machine reach each other


def hold_store(host: str, port: int = 0, *, timeout: float = 300.0) -> dist.TCPStore:
    """Serve a key-value store at this address of this machine, and at no other.

    Args:
        host: an address of this machine, or a name of it: 127.0.0.1 serves this machine's processes only. Where this machine
            cannot listen there (the address is translated on the way, or the name stands for the loopback here and for
            something else elsewhere), the store listens on all interfaces, and a warning says so.
        port: 0 for any that is free.
        timeout: seconds that a call to the store may take.

    Raises:
        LinkError: when the port is taken.
    """
    listening = _bound(host, port)
    try:
        listening.listen(4096)
        store = dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listening.fileno(),
        )
    except (OSError, RuntimeError, ValueError) as cause:
        listening.detach()  # torch may have it already, and closes it then
        raise LinkError(f"the job's store at {host}:{port} cannot be opened [{gist(cause)}]") from cause
    listening.detach()  # torch closes it with the store
    return store


def loopback_interface() -> dict[str, str]:
    """The environment that keeps gloo's sockets on the loopback, unless the user has chosen an interface."""
    return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)}


def _bound(host: str, port: int) -> socket.socket:
    """A socket at one address of this machine; at all of them where that one cannot be had."""
    taken = None
    for family, at in _addresses(host):
        try:
            return _socket(family, at, port)
        except OSError as cause:
            if _is_taken(cause):
                taken = cause
    if taken is not None:
        raise LinkError(f"the job's store at {host}:{port} cannot be opened [{gist(taken)}]") from taken
    log.warning(
        "MASTER_ADDR is %r, at which this machine cannot listen for others: the job's store listens on all interfaces. "
        "It has no authentication: give an address of this machine in a private network, or close port %d in the firewall",
        host,
        port,
    )
    try:
        return _socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, "", port)
    except OSError as cause:
        raise LinkError(f"the job's store at {host}:{port} cannot be opened [{gist(cause)}]") from cause


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """What to listen on: a literal address and localhost as they are, a name by the addresses that others may know too."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [(family, str(at[0])) for family, _, _, _, at in found]
    if host == "localhost" or _literal(host):
        return addresses
    # Many systems give a machine's own name the address 127.0.1.1, while the others know the real one.
    return [(family, at) for family, at in addresses if not ipaddress.ip_address(at.partition("%")[0]).is_loopback]


def _literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _socket(family: socket.AddressFamily, at: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: the port of a job that has just ended
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(at)))
        made.bind((at, port))
    except OSError:
        made.close()
        raise
    return made


def _is_taken(cause: OSError) -> bool:
    return cause.errno in (errno.EADDRINUSE, errno.EACCES)


def gist(cause: Exception) -> str:
    """The first sentence of a backend's message, without the place in its sources."""
    lines = str(cause).splitlines() or [type(cause).__name__]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", lines[0]).split(". ")[0][:160]
