"""What a process holds of its job is bounded while it is in it, and given back when it leaves: threads, groups, handlers."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.links.test_torch import Job
from tests.processes import Pool, meet, own_group, thread_count
from thinwire.links import Link, TorchLink, disconnect
from thinwire.links.heartbeat import Heartbeat
from thinwire.payload import Payload
from thinwire.sharding.mesh import make_mesh, shard_model

OFTEN = 12


def _use_meshes(link: Link) -> tuple[int, int]:
    """The threads after the first use of two meshes, and after many uses."""
    counts = []
    for _ in range(OFTEN):
        for shards in (2, 4):
            mesh = make_mesh(workers=4 // shards, shards=shards)
            slow = TorchLink(mesh["replicate"])
            assert slow.mean(Payload(torch.full((4,), float(slow.rank)))).data[0] == (slow.size - 1) / 2
            shard_model(nn.Linear(8, 8), mesh)(torch.ones(1, 8)).sum().backward()
        counts.append(thread_count())
    return counts[0], counts[-1]


def test_many_meshes_links_and_sharded_models_hold_no_more_threads_than_one(pool: Pool) -> None:
    for first, last in pool.run(_use_meshes, 4):
        assert last == first


def _use_groups(link: Link) -> tuple[int, int]:
    counts = []
    for _ in range(OFTEN):
        with own_group(link, [0, 1, 2, 3]) as group:
            TorchLink(group).mean(Payload(torch.ones(4)))
        del group
        counts.append(thread_count())
    return counts[0], counts[-1]


def test_a_group_that_is_destroyed_takes_its_threads_along(pool: Pool) -> None:
    """The link leaves nothing behind that would keep it."""
    for first, last in pool.run(_use_groups, 4):
        assert last == first


@pytest.mark.parametrize("leave", [disconnect, dist.destroy_process_group], ids=["disconnect", "destroy_process_group"])
def test_no_mesh_of_a_job_that_was_left_is_used_in_the_next(leave) -> None:
    """Torch gives the groups of the next job the same names, so that an old mesh would look right."""
    made = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = make_mesh(workers=1, shards=1)
        assert all(mesh is not old for old in made)
        assert TorchLink(mesh["replicate"]).mean(Payload(torch.ones(2))).data.tolist() == [1, 1]
        made.append(mesh)
        leave()
    disconnect()


# A job of its own: torch's caches of sharding keep a mesh whose groups were destroyed, and take it for its successor.


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    members = Job(2)
    yield members
    members.end()


def _destroy_an_axis(rank: int) -> None:
    everyone = TorchLink()
    mesh = make_mesh(workers=2, shards=1)
    assert make_mesh(workers=2, shards=1) is mesh
    assert make_mesh(workers=1, shards=2) is not mesh
    meet(everyone)
    dist.destroy_process_group(mesh.get_group("shard"))
    fresh = make_mesh(workers=2, shards=1)
    assert fresh is not mesh
    assert make_mesh(workers=2, shards=1) is fresh
    for axis, mean in (("replicate", 0.5), ("shard", rank)):
        assert TorchLink(fresh[axis]).mean(Payload(torch.tensor([float(rank)]))).data.item() == mean


def test_the_same_shape_is_the_same_mesh_until_a_group_of_it_is_destroyed(job: Job) -> None:
    job.tell(_destroy_an_axis)
    assert [job.answer(rank) for rank in range(2)] == [None, None]


def _come_and_go(rank: int) -> tuple[list[int], list[int]]:
    """Threads and exit handlers of a process that has joined and left one job after the other."""
    store = dist.distributed_c10d._get_default_store()
    threads, handlers = [], []
    for turn in range(6):
        disconnect()
        gc.collect()
        threads.append(thread_count())
        handlers.append(atexit._ncallbacks())
        dist.init_process_group("gloo", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=2)
        link = TorchLink()
        assert link.mean(Payload(torch.tensor([float(rank)]))).data.item() == 0.5
        assert Heartbeat._running is not None and Heartbeat._running._thread.is_alive()
        mesh = make_mesh(workers=2, shards=1)
        TorchLink(mesh["replicate"]).mean(Payload(torch.ones(4)))
        del link, mesh
    return threads, handlers


def test_joining_and_leaving_again_and_again_leaves_no_thread_and_no_exit_handler(job: Job) -> None:
    job.tell(_come_and_go)
    for rank in range(2):
        threads, handlers = job.answer(rank)
        assert threads[-1] == threads[1], threads
        assert handlers[-1] == handlers[1], handlers


def test_leaving_ends_the_heartbeat() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    beat = Heartbeat.start()
    assert beat._thread.is_alive()
    disconnect()
    assert not beat._thread.is_alive()
    assert Heartbeat._running is None
