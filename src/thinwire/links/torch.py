"""TorchLink: torch.distributed as the wire (gloo, NCCL, or whatever backend the process group has).

Every wait has a time limit, and a failure names the rank that reports it, the round, and the ranks that are gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import ConfigError, LinkError
from thinwire.links.base import Done, Link, Ticket, members_of
from thinwire.links.heartbeat import Heartbeat
from thinwire.links.solo import SoloLink
from thinwire.network import Op, Traffic, ring_traffic, show_bytes
from thinwire.payload import Payload

_LONGEST = 1 << 30  # bytes of a message whose length the sender decides; nothing is allocated for more

_CALLED = {"mean": "all-reduce", "gather": "all-gather", "broadcast": "broadcast"}


class TorchLink(Link):
    """A link over a process group, or over one axis of a device mesh.

    `TorchLink(mesh["replicate"], timeout=120)` is the slow axis of a mesh whose fast axis FSDP2 uses.

    Args:
        group: a process group, a 1-D `DeviceMesh` such as `mesh["replicate"]`, or None for the default group.
        timeout: seconds that a wait may take before it fails with a `LinkError`.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, *, timeout: float = 600.0):
        """Attach to `group`; torch.distributed must be initialised."""
        if not dist.is_initialized():
            raise ConfigError("TorchLink needs an initialised process group: call thinwire.connect() or torchrun's set-up")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                axes = ", ".join(map(repr, group.mesh_dim_names or ())) or "unnamed"
                raise ConfigError(f"a link lives on one mesh axis, got a mesh with {group.ndim} ({axes}): index it first")
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError("this process is not a member of the group that the link was given")
        if not timeout > 0:
            raise ConfigError(f"timeout must be above zero seconds, got {timeout!r}")
        self.group, self.timeout = group, timeout
        self.round = 0
        self._pairs = 0  # swaps so far, those of others too: all workers count them alike
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        # NCCL moves nothing but GPU memory; small control messages are made on the CPU.
        self._device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
        self._failure: LinkError | None = None
        self._heartbeat = Heartbeat.start() if self._size > 1 else None

    @property
    def rank(self) -> int:
        """This worker's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return self._size

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Start the exchange; it runs in the backend's own threads."""
        self.check()
        members = members_of(payload, op, self.rank, self.size)
        if payload.purpose == "round":
            self.round += 1
        if op == "pair":
            self._pairs += 1
            if len(members) == 1:
                return Done([payload])
        if self._device is not None:
            payload = payload.like(payload.data.to(self._device))  # does nothing to what is there already
        return _TorchTicket(self, payload, op)

    @contextlib.contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Within it, a collective of somebody else (DDP, FSDP, a checkpoint) that fails because a rank is gone says so."""
        try:
            yield
        except RuntimeError as cause:
            if isinstance(cause, LinkError):
                raise
            lost, reached = self._who_is_gone()
            if not lost and reached:
                raise
            raise self._failed(f"rank {self.rank}, after round {self.round}", cause, lost, reached) from cause

    def fail(self, cause: Exception, payload: Payload, op: Op, round: int) -> LinkError:
        """Turn a backend's exception into an error that says who is lost."""
        round_name = f"round {round}" if payload.purpose == "round" else f"the {payload.purpose} after round {round}"
        called = f"swap with rank {payload.partner}" if op == "pair" else _CALLED[op]
        what = f"rank {self.rank}, {round_name} ({called} of {show_bytes(payload.nbytes)})"
        return self._failed(what, cause, *self._who_is_gone())

    def check(self) -> None:
        """Raise at once on a link that has failed before."""
        if self._failure is not None:
            raise LinkError(f"this link is broken since: {self._failure}", lost=self._failure.lost)

    def traffic(self, op: Op, sizes: Sequence[int]) -> Traffic:
        """As a ring; messages of unequal length travel padded to the longest, after an exchange of lengths."""
        padded = [max(sizes) + 8] * self.size if op == "gather" and len(set(sizes)) > 1 else sizes
        return ring_traffic(op, padded, self.rank)

    def _failed(self, what: str, cause: Exception, lost: list[int], reached: bool) -> LinkError:
        if self._heartbeat is not None:
            self._heartbeat.leave()
        if lost:
            names = ", ".join(f"rank {r}" for r in lost)
            verdict = f"lost {names} (no heartbeat)"
        elif not reached:
            verdict = (
                "lost the job's key-value store, and with it the rank or launcher that held it (rank 0 without a launcher)"
            )
        else:
            verdict = (
                f"no answer within {self.timeout:g} s although every rank is alive: "
                "a worker is slower than the timeout, or does not take part in this round"
            )
        self._failure = LinkError(f"{what}: {verdict} [{_gist(cause)}]", lost=lost)
        return self._failure

    def _who_is_gone(self) -> tuple[list[int], bool]:
        if self._heartbeat is None:
            return [], True
        world = [dist.get_global_rank(self.group, r) if self.group else r for r in range(self.size)]
        others = [w for r, w in enumerate(world) if r != self.rank]
        silent, reached = self._heartbeat.silent(others)
        return [world.index(w) for w in silent], reached


def _gist(cause: Exception) -> str:
    """The first sentence of a backend's message, without the place in its sources."""
    lines = str(cause).splitlines() or [type(cause).__name__]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", lines[0]).split(". ")[0][:160]


class _TorchTicket(Ticket):
    """An exchange under way. Messages of unequal length first exchange their lengths, then travel padded."""

    def __init__(self, link: TorchLink, payload: Payload, op: Op):
        self.link, self.payload, self.round = link, payload, link.round
        self.op: Op = op
        self.limit = timedelta(seconds=link.timeout)
        self.lengths: list[int] | None = None
        self.parts: list[Tensor] = []
        try:
            self.work = self._start()
        except LinkError:
            raise
        except RuntimeError as cause:
            raise link.fail(cause, payload, op, self.round) from cause

    def _start(self) -> dist.Work | _Both:
        data, group = self.payload.data, self.link.group
        if self.op == "pair":
            return self._start_pair(data)
        if self.op == "mean":
            return self._work(dist.all_reduce(data, op=dist.ReduceOp.SUM, group=group, async_op=True))
        if self.op == "broadcast":
            first = dist.get_global_rank(group, 0) if group else 0
            return self._work(dist.broadcast(data, src=first, group=group, async_op=True))
        if not self.payload.fixed:
            data = self._pad_to_longest(data)
        self.parts = [torch.empty_like(data) for _ in range(self.link.size)]
        return self._work(dist.all_gather(self.parts, data, group=group, async_op=True))

    def _start_pair(self, data: Tensor) -> _Both:
        """Send and receive at once. With several under way, the number of the swap keeps their messages apart."""
        link, partner = self.link, self.payload.partner
        assert partner is not None
        peer = dist.get_global_rank(link.group, partner) if link.group else partner
        self.parts = [data, torch.empty_like(data)]
        if partner < link.rank:
            self.parts.reverse()
        theirs = self.parts[partner > link.rank]
        # NCCL knows no tags and goes by the order of posting, which is the same on both sides.
        receive = dist.P2POp(dist.irecv, theirs, peer, link.group, tag=link._pairs)
        send = dist.P2POp(dist.isend, data, peer, link.group, tag=link._pairs)
        return _Both(dist.batch_isend_irecv([receive, send]))

    def _pad_to_longest(self, data: Tensor) -> Tensor:
        mine = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
        theirs = [torch.empty_like(mine) for _ in range(self.link.size)]
        self._work(dist.all_gather(theirs, mine, group=self.link.group, async_op=True)).wait(self.limit)
        self.lengths = [int(n) for n in theirs]
        for rank, n in enumerate(self.lengths):
            if not 0 <= n <= _LONGEST:
                raise LinkError(f"rank {self.link.rank}: rank {rank} announces a message of {n} bytes, {_LONGEST} are allowed")
        padded = torch.zeros(max(self.lengths), dtype=data.dtype, device=data.device)
        padded[: data.numel()] = data
        return padded

    @staticmethod
    def _work(work: dist.Work | None) -> dist.Work:
        if work is None:
            raise RuntimeError("torch.distributed returned no handle to wait for")
        return work

    def _finish(self) -> list[Payload]:
        self.link.check()
        try:
            self.work.wait(self.limit)
        except RuntimeError as cause:
            raise self.link.fail(cause, self.payload, self.op, self.round) from cause
        if self.op == "mean":
            return [self.payload.like(self.payload.data.div_(self.link.size))]
        if self.op == "broadcast":
            return [self.payload]
        lengths = self.lengths or [part.numel() for part in self.parts]
        return [self.payload.like(part[:n]) for part, n in zip(self.parts, lengths, strict=True)]


class _Both:
    """The two halves of a swap, as one thing to wait for."""

    def __init__(self, works: Sequence[dist.Work]):
        self.works = works

    def wait(self, limit: timedelta) -> None:
        for work in self.works:
            work.wait(limit)


def connect(*, backend: str | None = None, timeout: float = 600.0) -> Link:
    """The link of this process: joins the job that torchrun or `thinwire train` started, or stands alone.

    Under torchrun (or any launcher that sets RANK and WORLD_SIZE) the default process group is made if it is not there
    yet. Without one, a `SoloLink` is returned, so that the same script runs on one process.

    Args:
        backend: "gloo" or "nccl", used only where the process group has to be made; by default NCCL where torch finds GPUs
            (each process should have chosen its own with torch.cuda.set_device), gloo elsewhere.
        timeout: seconds that any wait may take.
    """
    if dist.is_initialized():
        return TorchLink(timeout=timeout)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SoloLink()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return TorchLink(timeout=timeout)


def host_job(processes: int) -> tuple[dist.Store, list[dict[str, str]]]:
    """Hold the key-value store of a job on this machine, so that any of its processes may die without taking it along.

    Args:
        processes: how many the job has.

    Returns:
        The store, to be kept alive as long as the job, and the environment in which each process finds it by `connect()`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is held here: no process shall open one
    }
    return store, [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


_let_go: list[Callable[[], object]] = [Heartbeat.end]


def at_disconnect(let_go: Callable[[], object]) -> None:
    """Have `disconnect()` call a function that lets go of what belongs to the job."""
    _let_go.append(let_go)


def disconnect() -> None:
    """Leave the job: end the heartbeat and destroy all process groups, if there are any.

    Nothing of the job is left behind in this process once its links are gone too, so it can join another one.
    """
    for let_go in _let_go:
        let_go()
    if dist.is_initialized():
        dist.destroy_process_group()
