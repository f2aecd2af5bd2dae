"""Rendezvous: join a job, and name the ranks that do not arrive in time."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from thinwire.errors import ConfigError, LinkError
from thinwire.links.store import gist, hold_store


def backends() -> dict[str, bool]:
    """Which ways to exchange messages this torch was built with; all False without torch.distributed."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def in_job() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_job(backend: str, timeout: float) -> None:
    """Make the default process group of the job that the environment describes.

    Every rank first says in the job's store that it is there, so that those who are missing can be named.

    Args:
        backend: "gloo" or "nccl".
        timeout: seconds to wait for the others, and that any wait of the group may take afterwards.

    Raises:
        LinkError: with the ranks that did not come as `lost`; or who came, but could not be joined.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"WORLD_SIZE is set, but {missing[0]} is not: start all ranks with torchrun, or set all of them")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A job that torchrun starts again may find what the attempt before it has left in the store.
    store = dist.PrefixStore(f"thinwire/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _store(rank, timeout))
    lost = _missing(store, rank, size, timeout)
    if lost:
        if holds_store(rank):
            time.sleep(1)  # let the others see who is missing, too
        names = ", ".join(f"rank {r}" for r in lost)
        raise LinkError(f"rank {rank} of {size}: no sign of {names} within {timeout:g} s; {_WHY_MISSING}", lost=lost)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except RuntimeError as cause:
        what = f"rank {rank} of {size}: all ranks are there, but {backend} cannot join them"
        raise LinkError(f"{what}; {_HINT} [{gist(cause)}]") from cause


_WHY_MISSING = "they were not started, have another MASTER_ADDR or MASTER_PORT, or cannot reach it"
_HINT = "set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to the interface by which the machines reach each other"


def holds_store(rank: int) -> bool:
    """Whether this rank is the one that holds the job's store: rank 0, unless the launcher does."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _store(rank: int, timeout: float) -> dist.Store:
    """The job's key-value store: the launcher's, or held by rank 0."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not holds_store(rank) and not _answers(host, port, timeout):
        why = "rank 0 or its launcher is not there, or the address is wrong"
        raise LinkError(f"rank {rank}: the job's store at {host}:{port} does not answer within {timeout:g} s; {why}", lost=[0])
    try:
        if holds_store(rank):
            return hold_store(host, port, timeout=timeout)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    except LinkError as cause:
        raise LinkError(f"rank {rank}: {cause}") from cause
    except (RuntimeError, ValueError) as cause:
        raise LinkError(f"rank {rank}: the job's store at {host}:{port} cannot be opened [{gist(cause)}]") from cause


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
    """The ranks that have not joined by the end of the timeout."""
    keys = [f"here/{r}" for r in range(size)]
    deadline = time.monotonic() + timeout
    missing, pause = list(range(size)), 0.02
    with contextlib.suppress(RuntimeError):  # rank 0 has given up, and the store with it
        store.set(keys[rank], "1")
        while not store.check(keys):  # one question for all ranks, and one for each only where it takes long
            if pause >= 0.2:
                missing = [r for r in missing if not store.check([keys[r]])]
            if time.monotonic() > deadline:
                return [r for r in missing if not store.check([keys[r]])]
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
        return []
    return [r for r in missing if r != rank]
