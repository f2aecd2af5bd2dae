"""A short storm of kills on real processes; `make chaos` has the long one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from benchmarks.chaos import METHODS, Storm, run_storm
from torch.distributed.device_mesh import init_device_mesh

from tests.links.test_torch import VERY_LONG, Job
from thinwire import DeMo, Link, Sign, TopK, TorchLink, TwoLevel
from thinwire.errors import LinkError

SLOW = [pytest.param(name, 4, marks=pytest.mark.slow) for name in ("diloco", "mt-dao")]


@pytest.mark.parametrize(("algorithm", "kills"), [("demo", 4), ("demo by owners", 2), *SLOW])
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    algorithm: str, kills: int, tmp_path: Path
) -> None:
    result = run_storm(Storm(algorithm, kills=kills, steps=6 * kills), tmp_path)
    assert result["kills"] == kills
    assert result["equal"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(METHODS)[-3:])  # all of them: make chaos
def test_a_longer_storm(algorithm: str, tmp_path: Path) -> None:
    workers = 4 if algorithm == "demo in sites" else 3
    result = run_storm(Storm(algorithm, kills=8, steps=40, workers=workers, seed=1), tmp_path)
    assert result["kills"] == 8
    assert result["equal"]


def _named(rank: int, how: str, victim: int) -> tuple[int, tuple[int, ...]]:
    """Train until one is killed, in the middle of a run; the number of this worker, and who is missed."""
    link: Link = TorchLink(timeout=VERY_LONG)
    if how == "in sites":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "member"))
        link = TwoLevel(*(TorchLink(mesh[axis], timeout=VERY_LONG) for axis in ("member", "site")))
    p = torch.nn.Parameter(torch.zeros(64, 64))
    opt = DeMo([p], link, codec=TopK(4) >> Sign(), route="owners" if how == "by owners" else "gather")
    try:
        for step in range(1000):
            if rank == victim and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + rank))
            opt.step()
    except LinkError as error:
        return link.rank, error.lost
    return link.rank, ()


@pytest.mark.parametrize("how", ["by owners", "in sites"])
def test_the_others_name_an_owner_and_a_site_that_is_killed(how: str) -> None:
    """Long before the timeout. Its site names it by its number there, and all members of the other site name the site."""
    job, victim = Job(4), 2
    try:
        job.tell(_named, how, victim)
        told = [job.answer(rank) for rank in range(4) if rank != victim]
    finally:
        job.end()
    if how == "by owners":
        assert told == [(0, (2,)), (1, (2,)), (3, (2,))]
    else:
        assert told == [(0, (1,)), (0, (1,)), (1, (0,))]
