from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.processes import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes; tests use the first `size` of them."""
    workers = Pool(4)
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
