"""A short storm of kills on real processes; `make chaos` has the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.chaos import METHODS, Storm, run_storm


@pytest.mark.parametrize("algorithm", ["demo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("diloco", "mt-dao"))])
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(algorithm: str, tmp_path: Path) -> None:
    result = run_storm(Storm(algorithm, kills=4, steps=24), tmp_path)
    assert result["kills"] == 4
    assert result["equal"]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(METHODS)[-1:])  # all of them: make chaos
def test_a_longer_storm(algorithm: str, tmp_path: Path) -> None:
    result = run_storm(Storm(algorithm, kills=8, steps=40, workers=3, seed=1), tmp_path)
    assert result["kills"] == 8
    assert result["equal"]
