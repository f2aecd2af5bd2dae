"""Roll call: join a job, and where somebody does not come, say who. For `thinwire doctor`, asked when nothing works."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors import ConfigError, LinkError
from thinwire.links.base import Link
from thinwire.links.solo import SoloLink
from thinwire.links.torch import TorchLink, _gist


def backends() -> dict[str, bool]:
    """Which ways to exchange messages this torch was built with; all False without torch.distributed."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def in_job() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def connect_all(*, backend: str = "gloo", timeout: float = 60.0) -> Link:
    """As `connect`, but every rank first says that it is there, so that those who are missing can be named.

    Args:
        backend: "gloo" or "nccl".
        timeout: seconds to wait for the others, and that any wait may take afterwards.

    Raises:
        LinkError: with the ranks that did not come as `lost`; or who came, but could not be joined.
    """
    if not in_job():
        return SoloLink()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set, but {missing[0]} is not: start all ranks with torchrun, or set all of them")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, timeout)
    lost = _missing(store, rank, size, timeout)
    if lost:
        if rank == 0:
            time.sleep(1)  # it may hold the store: let the others see who is missing, too
        names = ", ".join(f"rank {r}" for r in lost)
        raise LinkError(f"rank {rank} of {size}: no sign of {names} within {timeout:g} s; {_WHY_MISSING}", lost=lost)
    try:
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=dist.PrefixStore("thinwire", store), rank=rank, world_size=size, timeout=limit)
    except RuntimeError as cause:
        what = f"rank {rank} of {size}: all ranks are there, but {backend} cannot join them"
        raise LinkError(f"{what}; {_HINT} [{_gist(cause)}]") from cause
    return TorchLink(timeout=timeout)


_WHY_MISSING = "they were not started, have another MASTER_ADDR or MASTER_PORT, or cannot reach it"
_HINT = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface by which the machines reach each other"


def _store(rank: int, timeout: float) -> dist.Store:
    """The job's key-value store: the launcher's, or held by rank 0."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    mine = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not mine and not _answers(host, port, timeout):
        why = "rank 0 or its launcher is not there, or the address is wrong"
        raise LinkError(f"rank {rank}: the job's store at {host}:{port} does not answer within {timeout:g} s; {why}", lost=[0])
    try:
        return dist.TCPStore(host, port, is_master=mine, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as cause:
        raise LinkError(f"rank {rank}: the job's store at {host}:{port} cannot be opened [{_gist(cause)}]") from cause


def _answers(host: str, port: int, timeout: float) -> bool:
    """Whether anybody listens there by the end of the timeout; asked without torch, whose store complains at length."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())):
                return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


def _missing(store: dist.Store, rank: int, size: int, timeout: float) -> list[int]:
    """The ranks that have not answered the roll call by the end of the timeout."""
    call = f"thinwire/here/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    deadline = time.monotonic() + timeout
    missing = list(range(size))
    with contextlib.suppress(RuntimeError):  # rank 0 has given up, and the store with it
        store.set(f"{call}/{rank}", "1")
        while True:
            missing = [r for r in missing if not store.check([f"{call}/{r}"])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)
    return [r for r in missing if r != rank]
