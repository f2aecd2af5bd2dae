"""TorchLink on real gloo processes: the contract that every link keeps, mesh axes, and who is named when a rank is lost."""

from __future__ import annotations

import os
import signal
import socket
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.processes import LIMIT, WARM, Pool, hear, join_job, meet, own_group, start_store, tell, until
from thinwire.errors import ConfigError, LinkError, TrainingDiverged, WireError
from thinwire.links import Link, SoloLink, TorchLink, connect, disconnect
from thinwire.links.heartbeat import Departure, Heartbeat
from thinwire.links.torch import _Verdict
from thinwire.payload import Payload
from thinwire.sim import World


def message(value: float = 1.0, length: int = 4, *, purpose: str = "round", fixed: bool = True) -> Payload:
    return Payload(torch.full((length,), float(value)), purpose=purpose, fixed=fixed)


# --- The contract of a link --------------------------------------------------------------------------------------------------


def _keep_the_contract(link: Link) -> dict[str, Any]:
    """Every kind of exchange, as plain values."""
    rank = link.rank
    seen: dict[str, Any] = {"rank": rank, "size": link.size}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        mean = link.post(Payload(torch.tensor([rank, 10.0 * rank, -1.0]).to(dtype)), "mean").wait()
        assert len(mean) == 1
        assert mean[0].data.dtype == dtype
        seen[f"mean {dtype}"] = mean[0].data.tolist()
    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.int64):
        gathered = link.all_gather(Payload(torch.tensor([rank, 7]).to(dtype)))
        assert {p.data.dtype for p in gathered} == {dtype}
        seen[f"gather {dtype}"] = [p.data.tolist() for p in gathered]
    unequal = link.post(message(rank, 3 * rank, purpose="handshake", fixed=False), "gather").wait()
    assert all((p.purpose, p.fixed) == ("handshake", False) for p in unequal)
    seen["unequal"] = [p.data.tolist() for p in unequal]
    seen["equal, not said"] = [p.data.tolist() for p in link.all_gather(message(rank, 2, fixed=False))]
    seen["bytes"] = [p.to_bytes() for p in link.all_gather(Payload.of_bytes(b"ab" * (rank + 1)))]
    for fixed in (True, False):
        seen[f"nothing {fixed}"] = [p.nbytes for p in link.all_gather(message(length=0, fixed=fixed))]
    seen["mean of nothing"] = link.mean(message(length=0)).nbytes

    tickets = [link.post(message(rank + 10 * i), "mean") for i in range(3)]
    tickets.append(link.post(message(rank, 1 + rank, fixed=False), "gather"))
    late = {i: [p.data.tolist() for p in tickets[i].wait()] for i in (2, 3, 0, 1)}
    again = {i: [p.data.tolist() for p in tickets[i].wait()] for i in late}
    assert again == late, "waiting again changes nothing"
    seen["late"] = late
    link.commit()
    link.tick()
    return seen


def _expected(rank: int, size: int) -> dict[str, Any]:
    mean, everyone = (size - 1) / 2, range(size)
    expected: dict[str, Any] = {"rank": rank, "size": size}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        expected[f"mean {dtype}"] = [mean, 10 * mean, -1]
    for dtype in (torch.uint8, torch.float32, torch.bfloat16, torch.int64):
        expected[f"gather {dtype}"] = [[r, 7] for r in everyone]
    expected["unequal"] = [[r] * 3 * r for r in everyone]
    expected["equal, not said"] = [[r, r] for r in everyone]
    expected["bytes"] = [b"ab" * (r + 1) for r in everyone]
    expected["nothing True"] = expected["nothing False"] = [0] * size
    expected["mean of nothing"] = 0
    expected["late"] = {i: [[mean + 10 * i] * 4] for i in range(3)} | {3: [[r] * (1 + r) for r in everyone]}
    return expected


def test_alone_is_a_link_like_any_other() -> None:
    assert _keep_the_contract(SoloLink()) == _expected(0, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["sim", "torch"])
def test_every_kind_of_link_keeps_the_contract(kind: str, size: int, pool: Pool) -> None:
    everyone = World(size).run(_keep_the_contract) if kind == "sim" else pool.run(_keep_the_contract, size)
    for rank, seen in enumerate(everyone):
        assert seen == _expected(rank, size)


def _announce_too_much(link: TorchLink, announced: int) -> str:
    if link.rank == 1:  # past the check of its own messages: only the lengths are ever sent
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(link.size)]
        dist.all_gather(lengths, torch.tensor([announced]), group=link.group)
        return "announced"
    with pytest.raises(WireError) as caught:
        link.all_gather(Payload.of_bytes(b"hello", purpose="handshake"))
    return str(caught.value)


@pytest.mark.parametrize("announced", [(1 << 20) + 1, 1 << 30, 1 << 62, -1])
def test_nothing_is_allocated_for_an_absurd_length(pool: Pool, announced: int) -> None:
    refused = f"the message of rank 1: {announced} bytes for 'handshake', at most 1048576 are allowed"
    assert pool.run(_announce_too_much, 3, announced) == [refused, "announced", refused]


def _say_too_much(link: Link) -> str:
    link.all_gather(Payload.of_bytes(bytes(100), purpose="handshake", limit=100))
    with pytest.raises(WireError) as caught:
        link.all_gather(Payload.of_bytes(bytes(101), purpose="handshake", limit=100))
    link.mean(message())  # nothing was sent, and the link goes on
    return str(caught.value)


@pytest.mark.parametrize("kind", ["sim", "torch"])
def test_a_message_of_ones_own_that_is_too_long_is_not_sent(pool: Pool, kind: str) -> None:
    everyone = World(2).run(_say_too_much) if kind == "sim" else pool.run(_say_too_much, 2)
    for rank, said in enumerate(everyone):
        whose = 0 if kind == "sim" else rank
        assert said == f"the message of rank {whose}: 101 bytes for 'handshake', at most 100 are allowed"


def _post_early(link: Link, posted: str) -> list[float]:
    """Rank 1 posts only when rank 0 has posted and gone on."""
    if link.rank == 1:
        hear(posted)
    ticket = link.post(message(link.rank, 4, fixed=True), "gather")
    if link.rank == 0:
        tell(posted)
    return [p.data[0].item() for p in ticket.wait()]


def test_posting_does_not_wait_for_the_others(pool: Pool) -> None:
    assert pool.run(_post_early, 2, uuid.uuid4().hex) == [[0.0, 1.0]] * 2


# --- Groups and meshes -------------------------------------------------------------------------------------------------------


def _on_a_mesh(link: Link) -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    seen = []
    for axis in ("replicate", "shard"):
        one = TorchLink(mesh[axis], timeout=LIMIT)
        gathered = [p.data[0].item() for p in one.all_gather(message(link.rank))]
        seen.append((one.rank, one.size, gathered, one.mean(message(link.rank)).data[0].item()))
    with pytest.raises(ConfigError) as refused:
        TorchLink(mesh)
    meet(link)
    for group in mesh.get_all_groups():
        dist.destroy_process_group(group)
    return *seen, str(refused.value)


def test_a_mesh_axis_is_a_link_and_a_mesh_is_not(pool: Pool) -> None:
    for rank, (replicate, shard, said) in enumerate(pool.run(_on_a_mesh, 4)):
        row, column = divmod(rank, 2)  # the mesh is [[0, 1], [2, 3]]
        assert replicate == (column, 2, [2 * row, 2 * row + 1], 2 * row + 0.5)
        assert shard == (row, 2, [column, column + 2], column + 1.0)
        assert "got a mesh with 2 ('shard', 'replicate'): index it first" in said


def _join_from_outside(link: Link) -> str:
    with own_group(link, [1, 3]) as group:
        try:
            inside = TorchLink(group, timeout=LIMIT)
        except ConfigError as error:
            return str(error)
        return f"rank {inside.rank} of {inside.size}: {inside.mean(message(link.rank)).data[0].item()}"


def test_a_group_one_is_not_in_is_refused_at_once(pool: Pool) -> None:
    said = pool.run(_join_from_outside, 4)
    assert (said[1], said[3]) == ("rank 0 of 2: 2.0", "rank 1 of 2: 2.0")
    assert all("not a member" in said[r] for r in (0, 2))


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"call thinwire.connect\(\)"):
        TorchLink()


def test_connecting_without_a_launcher_is_being_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(connect(), SoloLink)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(connect(), SoloLink)
    disconnect()  # nothing to leave
    assert not dist.is_initialized()


@pytest.fixture
def alone() -> Iterator[dist.Store]:
    """This process is a gloo job of one."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield store
    disconnect()
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_connecting_to_a_group_that_is_there_uses_it() -> None:
    link = connect(timeout=7)
    assert isinstance(link, TorchLink)
    assert (link.rank, link.size, link.timeout) == (0, 1, 7)
    assert link.mean(message(5)).data.tolist() == [5] * 4


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_what_is_no_timeout_is_refused_with_its_value(bad: float) -> None:
    with pytest.raises(ConfigError, match=f"timeout must be above zero seconds, got {bad}"):
        TorchLink(timeout=bad)


# --- What an error says ------------------------------------------------------------------------------------------------------


class Broken:
    """A collective that fails."""

    def wait(self, limit: timedelta) -> None:
        raise RuntimeError("Connection closed by peer\nand a long stack")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("purpose", "op", "said"),
    [
        ("round", "mean", "rank 0, round 3 (all-reduce of 4 kB)"),
        ("round", "gather", "rank 0, round 3 (all-gather of 4 kB)"),
        ("alarm", "gather", "rank 0, the alarm after round 2 (all-gather of 4 kB)"),
    ],
)
def test_an_error_names_the_rank_the_round_the_operation_and_the_cause(purpose: str, op, said: str) -> None:
    link = TorchLink()
    link.mean(message())
    link.all_gather(message(purpose="handshake"))
    link.mean(message())
    ticket = link.post(message(length=1000, purpose=purpose), op)
    ticket.work = Broken()  # type: ignore[attr-defined]
    with pytest.raises(LinkError) as caught:
        ticket.wait()
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("[Connection closed by peer]"), "the first line of the backend's own words"
    with pytest.raises(LinkError, match="this link is broken since: rank 0, ") as caught:
        link.post(message(), "mean")
    assert said in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_other_peoples_errors_pass_unchanged_while_nobody_is_lost() -> None:
    link = TorchLink()
    for error in (RuntimeError("out of memory"), LinkError("known already", lost=[3]), KeyError("data")):
        with pytest.raises(type(error)) as caught, link.naming_the_lost():
            raise error
        assert caught.value is error
    link.mean(message())  # and the link is not broken


@pytest.mark.usefixtures("alone")
def test_an_error_of_all_workers_is_no_lost_rank_where_another_has_left_because_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    link, error = TorchLink(), TrainingDiverged("training has diverged at step 2", since=2)
    left = Departure(1, ended=True, reason="TrainingDiverged: training has diverged at step 2", parts={})
    monkeypatch.setattr(link, "_who_is_to_blame", lambda members, number: _Verdict([], [left]))
    with pytest.raises(TrainingDiverged) as caught, link.naming_the_lost():
        raise error
    assert caught.value is error
    with pytest.raises(LinkError, match="rank 1 left after round 0: TrainingDiverged"), link.naming_the_lost():
        raise RuntimeError("connection closed by peer")


@pytest.mark.usefixtures("alone")
def test_with_two_rounds_under_way_the_one_that_failed_is_named() -> None:
    link = TorchLink()
    first, _second = (link.post(message(), "mean") for _ in range(2))
    first.work = Broken()  # type: ignore[attr-defined]
    with pytest.raises(LinkError, match="rank 0, round 1 "):
        first.wait()


def test_the_heartbeat_follows_the_process_into_its_next_job() -> None:
    """A process that leaves one job and joins another must beat where the others of the new job listen."""
    stores = [dist.HashStore(), dist.HashStore()]
    for store in stores:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        beat = Heartbeat.start()
        try:
            assert Heartbeat.start() is beat, "one heartbeat per job"
            default = dist.distributed_c10d._get_default_store()
            until(lambda default=default: default.check(["thinwire/beat/0"]), f"a beat in job {stores.index(store) + 1}")
        finally:
            disconnect()


# --- Ranks that are lost -----------------------------------------------------------------------------------------------------

VERY_LONG = 10 * LIMIT  # seconds: who waits that long for a rank that is gone gives its answer too late for the test


class Job:
    """Processes of a gloo job of its own, which a test may stop and kill."""

    def __init__(self, size: int, *, once: bool = False, host: bool = False):
        """With `once` a process leaves after its first answer; with `host` rank 0 holds the store, as without a launcher."""
        self._store = None if host else start_store()
        port = _free_port() if self._store is None else self._store.port
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = WARM.Pipe()
            process = WARM.Process(target=_member, args=(rank, size, port, theirs, once, host), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def tell(self, function: Callable[..., Any], *args: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, args))

    def answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(LIMIT), f"rank {rank} gave no answer within {LIMIT:g} s"
        ok, answer = self.pipes[rank].recv()
        assert ok, f"rank {rank}:\n{answer}"
        return answer

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _member(rank: int, size: int, port: int, pipe: Connection, once: bool, host: bool) -> None:
    if host:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        torch.set_num_threads(1)
        connect(timeout=LIMIT)
    else:
        join_job(rank, size, port)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        if once:
            return


def _report(link: TorchLink) -> dict[str, Any]:
    """Go on exchanging until the link fails, and say how; then try once more."""
    try:
        while True:
            link.mean(message(length=1000))
    except LinkError as error:
        report = {"rank": link.rank, "said": str(error), "lost": error.lost}
    try:
        link.post(message(), "mean")
    except LinkError as error:
        report |= {"next": str(error), "next lost": error.lost}
    return report


def _hit_by(rank: int, signal_: int, victim: int, members: list[int] | None, timeout: float) -> dict[str, Any] | str:
    """One good round; then `victim` sends itself a signal, and the others wait for it for `timeout` seconds."""
    group = dist.new_group(members) if members else None
    if members and rank not in members:
        return "not in it"
    link = TorchLink(group, timeout=LIMIT)
    link.mean(message())
    if rank == victim:
        os.kill(os.getpid(), signal_)
        return "went on"
    link.timeout = timeout
    return _report(link)


def _killed(rank: int, victim: int, elsewhere: int) -> dict[str, Any]:
    """One is killed; the others say what they know and leave, one of them after a collective that is not the link's."""
    report = _hit_by(rank, signal.SIGKILL, victim, None, VERY_LONG)
    if rank == elsewhere:
        try:
            with TorchLink(timeout=VERY_LONG).naming_the_lost():
                dist.all_reduce(torch.ones(3))
        except LinkError as error:
            report |= {"elsewhere": str(error), "elsewhere lost": error.lost}
    return report


def _desert(rank: int, deserter: int, timeout: float) -> dict[str, Any] | str:
    link = TorchLink(dist.new_group(list(range(dist.get_world_size()))), timeout=LIMIT)
    link.mean(message())
    link.timeout = timeout
    return "never took part again" if rank == deserter else _report(link)


def assert_names(report: dict[str, Any], lost: tuple[int, ...], size: int) -> None:
    """The report says who reports, in which round, and exactly who is lost, and later posts say the same."""
    others = [f"rank {r}" for r in range(size) if r not in (*lost, report["rank"])]
    assert f"rank {report['rank']}, round 2 (all-reduce of 4 kB)" in report["said"]
    assert report["lost"] == lost, report["said"]
    assert "lost " + ", ".join(f"rank {r}" for r in lost) + " " in report["said"]
    assert not any(other in report["said"].split("[")[0] for other in others)
    assert report["next lost"] == lost
    assert "this link is broken since: " + report["said"] in report["next"]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Four processes for tests that leave them alive, though not on speaking terms: each test makes a group of its own."""
    members = Job(4)
    yield members
    members.end()


def test_a_rank_that_is_alive_but_takes_no_part_is_not_called_lost(job: Job) -> None:
    job.tell(_desert, 2, 1.0)
    for rank in (0, 1, 3):
        report = job.answer(rank)
        assert report["lost"] == ()
        assert f"rank {rank}, round 2 " in report["said"]
        assert "no answer within 1 s although every rank is alive" in report["said"]
        assert "lost" not in report["said"].split("[")[0]
        assert "this link is broken since: " + report["said"] in report["next"]
    assert job.answer(2) == "never took part again"


def test_a_stopped_rank_is_named_after_the_timeout_by_its_number_in_the_group(job: Job) -> None:
    """SIGSTOP closes no connection: only the time limit ends the wait. Global rank 2 is rank 1 of the group of 1, 2 and 3."""
    job.tell(_hit_by, signal.SIGSTOP, 2, [1, 2, 3], 3.0)
    try:
        for rank in (1, 3):
            report = job.answer(rank)
            assert_names(report, (1,), 3)
            assert "imed out" in report["said"].partition("[")[2], "the cause that gloo gives"
    finally:
        os.kill(job.processes[2].pid, signal.SIGCONT)
    assert job.answer(2) == "went on"
    assert job.answer(0) == "not in it"


@pytest.fixture(scope="module")
def killed() -> Iterator[list[dict[str, Any]]]:
    """What the others of a ring of four said when rank 0 was killed, before they left: ranks 1 and 3 are its neighbours."""
    job = Job(4, once=True)
    try:
        job.tell(_killed, 0, 3)
        reports = [{}] + [job.answer(rank) for rank in (1, 2, 3)]
        job.processes[0].join(timeout=LIMIT)
        assert job.processes[0].exitcode == -signal.SIGKILL
        yield reports
    finally:
        job.end()


@pytest.mark.parametrize("rank", [1, 3])
def test_a_killed_rank_is_named_by_its_neighbours_long_before_the_timeout(killed: list[dict[str, Any]], rank: int) -> None:
    assert_names(killed[rank], (0,), 4)


def test_those_who_leave_because_a_rank_was_killed_are_not_called_lost(killed: list[dict[str, Any]]) -> None:
    """Rank 2 hears of the loss only when its neighbours have given up and left; the lost rank is still rank 0 alone."""
    assert_names(killed[2], (0,), 4)


def test_a_rank_that_is_lost_in_somebody_elses_collective_is_named_too(killed: list[dict[str, Any]]) -> None:
    assert "rank 3, after round 0: lost rank 0" in killed[3]["elsewhere"]
    assert 0 in killed[3]["elsewhere lost"]


def test_when_the_rank_that_holds_the_store_is_killed_the_error_says_so() -> None:
    job = Job(2, host=True)
    try:
        job.tell(_hit_by, signal.SIGKILL, 0, None, VERY_LONG)
        report = job.answer(1)
        assert "rank 1, round 2 (all-reduce of 4 kB): lost " in report["said"]
        assert "key-value store" in report["said"] or report["lost"] == (0,)
        assert "alive" not in report["said"]
    finally:
        job.end()
