from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Pool


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    """Two real gloo processes that are a job of their own, as frameworks expect it."""
    workers = Pool(2)
    yield workers
    workers.close()
