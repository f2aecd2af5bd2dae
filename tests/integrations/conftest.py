from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Pool

collect_ignore_glob = ["*_runs.py"]  # what tests train; imported by them, where the framework is installed


@pytest.fixture(scope="package")
def pair() -> Iterator[Pool]:
    """Two real gloo processes that are a job of their own: frameworks look at the whole job, not at a group of it."""
    workers = Pool(2)
    yield workers
    workers.close()
