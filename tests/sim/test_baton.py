"""Baton: one thread at a time, in a fixed order, each with random generators of its own."""

from __future__ import annotations

import random
import threading

import numpy as np
import torch

from tests.processes import LIMIT
from thinwire.sim.baton import Baton


def run(size: int, worker, ready, *, seed: int = 0) -> None:
    """Run `worker(baton, rank)` on `size` threads under one baton."""
    baton = Baton(size, ready, seed=seed)

    def live(rank: int) -> None:
        baton.take(rank)
        try:
            worker(baton, rank)
        finally:
            baton.retire(rank)

    threads = [threading.Thread(target=live, args=(r,), daemon=True) for r in reversed(range(size))]
    for thread in threads:
        thread.start()
    baton.start()
    for thread in threads:
        thread.join(timeout=LIMIT)
        assert not thread.is_alive(), "the baton was lost"


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_workers_run_one_at_a_time_in_rank_order_whatever_the_order_of_their_threads() -> None:
    log: list[tuple[int, int]] = []
    running: list[int] = []

    def worker(baton: Baton, rank: int) -> None:
        for turn in range(3):
            running.append(rank)
            log.append((turn, rank))
            assert running == [rank]
            running.remove(rank)
            assert baton.yield_until_ready(rank)

    run(4, worker, lambda rank: True)
    assert log == [(turn, rank) for turn in range(3) for rank in range(4)]


def test_who_is_not_ready_is_passed_over() -> None:
    log: list[str] = []
    released = threading.Event()

    def worker(baton: Baton, rank: int) -> None:
        log.append(f"start {rank}")
        if rank == 0:
            assert baton.yield_until_ready(0), "somebody made it ready"
        else:
            assert baton.yield_until_ready(rank)
            if rank == 2:
                released.set()
        log.append(f"end {rank}")

    run(3, worker, lambda rank: rank > 0 or released.is_set())
    assert log == ["start 0", "start 1", "start 2", "end 1", "end 2", "end 0"]


def test_waiting_in_vain_is_noticed_by_everyone_who_waits() -> None:
    answers: dict[int, bool] = {}

    def worker(baton: Baton, rank: int) -> None:
        if rank > 0:  # worker 0 ends at once
            answers[rank] = baton.yield_until_ready(rank)

    run(3, worker, lambda rank: False)
    assert answers == {1: False, 2: False}


def test_each_worker_has_the_generators_it_would_have_alone() -> None:
    streams: dict[int, list] = {}

    def worker(baton: Baton, rank: int) -> None:
        streams[rank] = []
        for turn in range(3):
            streams[rank] += [draw() for _ in range(rank + turn)]  # different numbers of draws
            baton.yield_until_ready(rank)

    run(3, worker, lambda rank: True, seed=40)
    for rank, stream in streams.items():
        torch.manual_seed(40 + rank)
        np.random.seed(40 + rank)
        random.seed(40 + rank)
        assert stream == [draw() for _ in range(3 * rank + 3)]


def test_making_a_baton_leaves_the_callers_generators_alone() -> None:
    def seed() -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    seed()
    expected = draw()
    seed()
    Baton(3, lambda rank: True, seed=99)
    assert draw() == expected


def test_seeds_beyond_32_bits_are_taken() -> None:
    Baton(2, lambda rank: True, seed=2**32 + 5)
