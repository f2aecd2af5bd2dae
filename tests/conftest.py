from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from tests.processes import Pool, thread_count

MOST_THREADS = 80  # of a process of the pool at the end: three for each of the groups and meshes that tests share

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job, as CI may be, ignores Ctrl-C and hands that on to what it starts; tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes; tests use the first `size` of them."""
    workers = Pool(4)
    yield workers
    threads = max(workers.run(thread_count, 4))
    workers.close()
    assert threads <= MOST_THREADS, (
        f"a process of the pool has {threads} threads: a test keeps the process groups that it makes"
    )


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
