"""TorchLink: torch.distributed as the wire (gloo, NCCL, or whatever backend the process group has).

Every wait has a time limit, and a failure names the rank that reports it, the round, and the ranks that are gone. A rank that
has left the job is named as soon as another rank waits for it, long before the timeout.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import ConfigError, LinkError, ThinwireError
from thinwire.links.base import Done, Link, SoloLink, Ticket, check_length, members_of
from thinwire.links.heartbeat import Departure, Heartbeat, Part
from thinwire.links.rendezvous import in_job, join_job
from thinwire.links.store import gist, hold_store, loopback_interface
from thinwire.network import Op, Traffic, ring_traffic, show_bytes
from thinwire.payload import Payload

PATIENCE = 1.0  # seconds of a wait between two looks at who has left the job

_CALLED = {"mean": "all-reduce", "gather": "all-gather", "broadcast": "broadcast", "deal": "all-to-all"}
_CALLED["spread"] = _CALLED["deal"]


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
        self._group_name = (group or dist.distributed_c10d._get_default_group()).group_name
        self._part = Part() if self._heartbeat is None else self._heartbeat.part(self._group_name)
        # Gloo's collectives can be waited for piece by piece. Its swaps cannot (a wait that times out closes the connection),
        # but there the partner's end of that connection tells. NCCL's waits are the GPU's affair.
        self._in_pieces = dist.get_backend(group) == "gloo"

    @property
    def rank(self) -> int:
        """This worker's number in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return self._size

    @property
    def moves_devices(self) -> bool:
        """NCCL does."""
        return self._device is not None

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Start the exchange; it runs in the backend's own threads."""
        self.check()
        members = members_of(payload, op, self.rank, self.size)
        check_length(payload, self.rank, payload.nbytes)
        self.round += payload.purpose == "round"
        number = self._part.begin(is_round=payload.purpose == "round")
        if op == "pair":
            self._pairs += 1
            if len(members) == 1:
                self._part.open.discard(number)
                return Done([payload.of(self.rank)])
        if self._device is not None:
            payload = payload.like(payload.data.to(self._device))  # does nothing to what is there already
        return _TorchTicket(self, payload, op, number, members)

    @contextlib.contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Within it, a collective of somebody else (DDP, FSDP, a checkpoint) that fails because a rank is gone says so."""
        try:
            yield
        except RuntimeError as cause:
            if isinstance(cause, ThinwireError):  # raised on all workers alike: another may have left because of it already
                raise
            verdict = self._who_is_to_blame(range(self.size), self._part.posts + 1)
            blamed = verdict.lost or not verdict.reached
            # One that has left without an error may have been done: it is to blame only for an error of the wire.
            if not blamed or (verdict.left and not any(d.reason for d in verdict.left) and not _OF_THE_WIRE.search(str(cause))):
                raise
            raise self._failed(f"rank {self.rank}, after round {self.round}", gist(cause), verdict) from cause

    def fail(self, ticket: _TorchTicket, cause: Exception) -> LinkError:
        """Turn a backend's exception into an error that says who is to blame."""
        return self._failed(ticket.words(), gist(cause), self._who_is_to_blame(ticket.members, ticket.number))

    def await_work(self, work: dist.Work | _Both, ticket: _TorchTicket) -> None:
        """Wait for a backend's work; where that takes long, check from time to time whether a rank has left.

        Raises:
            LinkError: when one that must take part has left, or the time is over, or the backend has failed.
        """
        deadline = time.monotonic() + self.timeout
        if self._in_pieces and self._heartbeat is not None and isinstance(work, dist.Work):
            done = False
            while not done and deadline - time.monotonic() > PATIENCE:
                with contextlib.suppress(RuntimeError):  # whatever has ended, well or not, says so again below
                    work.wait(timedelta(seconds=PATIENCE))
                done = work.is_completed()
                if not done:
                    self._look_for_leavers(ticket)
        at_most = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        try:  # of a round the GPU waits, and not the host as it would with a limit: NCCL itself ends what takes too long
            work.wait(*([] if self._device and ticket.payload.purpose in ("round", "vote") else [at_most]))
        except RuntimeError as cause:
            raise self.fail(ticket, cause) from cause

    def _look_for_leavers(self, ticket: _TorchTicket) -> None:
        assert self._heartbeat is not None
        if self._heartbeat.news():
            gone, followers = self._departed(ticket.members, ticket.number)
            if gone:
                raise self._failed(ticket.words(), "", _Verdict([], gone))
            if followers:  # they will not come back to this exchange: find out why they gave up
                raise self._failed(ticket.words(), "", self._who_is_to_blame(ticket.members, ticket.number))

    def check(self) -> None:
        """Raise at once on a link that has failed before."""
        if self._failure is not None:
            raise LinkError(f"this link is broken since: {self._failure}", lost=self._failure.lost)

    def traffic(self, op: Op, sizes: Sequence[int]) -> Traffic:
        """As a ring; messages of unequal length travel padded to the longest, after an exchange of lengths."""
        padded = [max(sizes) + 8] * self.size if op == "gather" and len(set(sizes)) > 1 else sizes
        return ring_traffic(op, padded, self.rank)

    def _failed(self, what: str, cause: str, verdict: _Verdict) -> LinkError:
        if self._heartbeat is not None:
            self._heartbeat.give_up(self._group_name)
        if verdict.left:
            named = "; ".join(f"rank {self._number(d.rank)} {d.words(self._group_name)}" for d in verdict.left)
        elif verdict.silent:
            named = f"lost {', '.join(f'rank {self._number(r)}' for r in verdict.silent)} (no heartbeat)"
        elif not verdict.reached:
            named = "lost the job's key-value store, and with it the rank or launcher that held it (rank 0 without a launcher)"
        elif verdict.followers and not cause:
            ranks = ", ".join(f"rank {self._number(d.rank)}" for d in verdict.followers)
            named = f"{ranks} gave up waiting for others, although every rank is alive"
        else:
            named = (
                f"no answer within {self.timeout:g} s although every rank is alive: "
                "a worker is slower than the timeout, or does not take part in this round"
            )
        lost = [self._number(r) for r in verdict.lost]
        self._failure = LinkError(f"{what}: {named}{f' [{cause}]' if cause else ''}", lost=lost)
        return self._failure

    def _who_is_to_blame(self, members: Sequence[int], number: int) -> _Verdict:
        """Who keeps the exchange of this number from ending: those who left before it, or who do not beat any more."""
        if self._heartbeat is None:
            return _Verdict()
        gone, _ = self._departed(members, number)
        if gone:
            return _Verdict([], gone)
        silent, reached = self._heartbeat.silent(self._others(members))
        gone, followers = self._departed(members, number)
        said = {d.rank for d in self._heartbeat.departures(silent) if d.ended or d.gave_up(self._group_name)}
        return _Verdict([r for r in silent if r not in said], gone, followers, reached)

    def _departed(self, members: Sequence[int], number: int) -> tuple[list[Departure], list[Departure]]:
        """Those of the members who left without taking part, and those who gave up on this group because of others."""
        assert self._heartbeat is not None
        said = self._heartbeat.departures(self._others(members))
        followers = [d for d in said if d.gave_up(self._group_name)]
        gone = [d for d in said if d.ended and not d.took_part(self._group_name, number) and d not in followers]
        return gone, followers

    def _others(self, members: Sequence[int]) -> list[int]:
        """The global ranks of those of the members that are not this worker."""
        others = [r for r in members if r != self.rank]
        return [dist.get_global_rank(self.group, r) if self.group else r for r in others]

    def _number(self, rank: int) -> int:
        """The number in this group of a global rank."""
        return dist.get_group_rank(self.group, rank) if self.group else rank


_OF_THE_WIRE = re.compile(r"gloo|nccl|connection|socket|peer|timed out|timeout", re.IGNORECASE)


class _Verdict(NamedTuple):
    """Who is to blame for an exchange that does not end, by global ranks.

    Attributes:
        silent: do not beat any more.
        left: have left the job without taking part.
        followers: have given up because of others.
        reached: the job's store could be asked.
    """

    silent: Sequence[int] = ()
    left: Sequence[Departure] = ()
    followers: Sequence[Departure] = ()
    reached: bool = True

    @property
    def lost(self) -> list[int]:
        """All who are gone."""
        return [d.rank for d in self.left] or list(self.silent)


class _TorchTicket(Ticket):
    """An exchange under way. Messages of unequal length first exchange their lengths, then travel padded."""

    def __init__(self, link: TorchLink, payload: Payload, op: Op, number: int, members: Sequence[int]):
        self.link, self.payload, self.round = link, payload, link.round
        self.op: Op = op
        self.number, self.members = number, members
        self.lengths: list[int] | None = None
        self.parts: list[Tensor] = []
        try:
            self.work = self._start()
        except LinkError:
            raise
        except RuntimeError as cause:
            raise link.fail(self, cause) from cause

    def words(self) -> str:
        """This exchange, for an error message."""
        payload = self.payload
        round_name = f"round {self.round}" if payload.purpose == "round" else f"the {payload.purpose} after round {self.round}"
        called = f"swap with rank {payload.partner}" if self.op == "pair" else _CALLED[self.op]
        return f"rank {self.link.rank}, {round_name} ({called} of {show_bytes(payload.nbytes)})"

    def _start(self) -> dist.Work | _Both:
        data, group = self.payload.data, self.link.group
        if self.op == "pair":
            return self._start_pair(data)
        if self.op == "mean":
            return self._work(dist.all_reduce(data, op=dist.ReduceOp.SUM, group=group, async_op=True))
        if self.op == "broadcast":
            source = dist.get_global_rank(group, self.payload.source) if group else self.payload.source
            return self._work(dist.broadcast(data, src=source, group=group, async_op=True))
        if self.op in ("deal", "spread"):
            return self._start_straight(data)
        if not self.payload.fixed:
            data = self._pad_to_longest(data)
        self.parts = [torch.empty_like(data) for _ in range(self.link.size)]
        return self._work(dist.all_gather(self.parts, data, group=group, async_op=True))

    def _start_straight(self, data: Tensor) -> dist.Work:
        """All lengths are known, so nothing is padded."""
        due, dealt = list(self.payload.due), list(self.payload.dealt)
        if self.op == "spread":
            data, dealt = data.repeat(self.link.size), [data.numel()] * self.link.size
        arrived = data.new_empty(sum(due))
        self.parts = list(arrived.split(due))
        return self._work(dist.all_to_all_single(arrived, data, due, dealt, group=self.link.group, async_op=True))

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
        self.link.await_work(self._work(dist.all_gather(theirs, mine, group=self.link.group, async_op=True)), self)
        self.lengths = [int(n) for n in theirs]
        for rank, n in enumerate(self.lengths):  # before anything is allocated for it
            check_length(self.payload, rank, n * data.element_size())
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
        self.link.await_work(self.work, self)
        self.link._part.open.discard(self.number)
        if self.op == "mean":
            return [self.payload.like(self.payload.data.div_(self.link.size))]
        if self.op == "broadcast":
            return [self.payload]
        lengths = self.lengths or [part.numel() for part in self.parts]
        arrived = zip(self.parts, lengths, self.members, strict=True)
        return [self.payload.like(part[:n]).of(rank) for part, n, rank in arrived]


class _Both:
    """The two halves of a swap, as one thing to wait for."""

    def __init__(self, works: Sequence[dist.Work]):
        self.works = works

    def wait(self, *limit: timedelta) -> None:
        for work in self.works:
            work.wait(*limit)


def connect(*, backend: str | None = None, timeout: float = 600.0) -> Link:
    """The link of this process: joins the job that torchrun or `thinwire train` started, or stands alone.

    Under torchrun (or any launcher that sets RANK and WORLD_SIZE) the default process group is made if it is not there
    yet. Without one, a `SoloLink` is returned, so that the same script runs on one process.

    Args:
        backend: "gloo" or "nccl", used only where the process group has to be made; by default NCCL where torch finds GPUs
            (each process should have chosen its own with torch.cuda.set_device), gloo elsewhere.
        timeout: seconds that any wait may take, that for the other ranks to come included.

    Raises:
        LinkError: when ranks do not come, with their numbers as `lost`.
    """
    if dist.is_initialized():
        return TorchLink(timeout=timeout)
    if not in_job():
        return SoloLink()
    join_job(backend or ("nccl" if torch.cuda.is_available() else "gloo"), timeout)
    return TorchLink(timeout=timeout)


def host_job(processes: int) -> tuple[dist.Store, list[dict[str, str]]]:
    """Hold the key-value store of a job on this machine, so that any of its processes may die without taking it along.

    The store, and what gloo listens on, can be reached from this machine only.

    Args:
        processes: how many the job has.

    Returns:
        The store, to be kept alive as long as the job, and the environment in which each process finds it by `connect()`.
    """
    store = hold_store("127.0.0.1")
    job = {
        **loopback_interface(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is held here: no process may open one
    }
    return store, [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


_let_go: list[Callable[[], object]] = [Heartbeat.end]


def at_disconnect(let_go: Callable[[], object]) -> None:
    """Have `disconnect()` call a function that lets go of what belongs to the job."""
    _let_go.append(let_go)


def disconnect() -> None:
    """Leave the job: tell the others so and destroy all process groups, if there are any.

    Nothing of the job is left behind in this process once its links are gone too, so it can join another one.
    """
    for let_go in _let_go:
        let_go()
    if dist.is_initialized():
        dist.destroy_process_group()
