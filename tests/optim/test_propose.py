"""Which beta suits a period: the retention asked for, half-lives as the paper has them, and what a short run can bear."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.maths.propose import LIVES, half_life
from thinwire.optim import propose_beta

calm = settings(deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize(
    ("beta", "steps"), [(0.9, 6.58), (0.95, 13.5), (0.99, 69.0), (0.995, 138), (0.999, 693), (0.9999, 6931)]
)
def test_half_lives_are_the_papers(beta: float, steps: float) -> None:
    assert half_life(beta) == pytest.approx(steps, rel=3e-3)
    assert beta ** half_life(beta) == pytest.approx(0.5)


@pytest.mark.parametrize(("K", "beta"), [(32, 0.9967), (128, 0.99918), (512, 0.99979)])
def test_nine_tenths_are_left_by_default(K: int, beta: float) -> None:
    found = propose_beta(K)
    assert found.beta == pytest.approx(beta, abs=6e-6 if K > 32 else 6e-5)
    assert found.retention == pytest.approx(0.9)
    assert not found.limited_by_run


@pytest.mark.parametrize(
    ("K", "beta", "kept"),
    [(32, 0.9, 0.034), (32, 0.99, 0.725), (32, 0.999, 0.968), (128, 0.99, 0.276), (512, 0.995, 0.077), (1024, 0.999, 0.359)],
)
def test_the_table_of_retentions_backwards(K: int, beta: float, kept: float) -> None:
    assert propose_beta(K, retention=kept).beta == pytest.approx(beta, rel=1e-3)


@given(K=st.integers(1, 5000), retention=st.floats(0.01, 0.99))
@calm
def test_the_retention_asked_for_is_the_one_given(K: int, retention: float) -> None:
    found = propose_beta(K, retention=retention)
    assert found.K == K
    assert found.beta**K == pytest.approx(retention, rel=1e-6)
    assert found.retention == pytest.approx(retention, rel=1e-6)
    assert found.half_life == pytest.approx(math.log(0.5) / math.log(found.beta))
    assert 0 < found.beta < 1


@given(K=st.integers(1, 5000), retention=st.floats(0.01, 0.99), steps=st.integers(1, 100_000))
@calm
def test_a_run_holds_some_half_lives_of_what_is_proposed(K: int, retention: float, steps: int) -> None:
    free, found = propose_beta(K, retention=retention), propose_beta(K, retention=retention, steps=steps)
    assert found.half_life * LIVES <= steps * (1 + 1e-6)
    assert found.beta <= free.beta
    assert found.limited_by_run == (found.beta < free.beta)
    assert found.retention == pytest.approx(found.beta**K)
    if not found.limited_by_run:
        assert found == free


def test_a_long_run_is_no_limit_and_a_short_one_is() -> None:
    assert propose_beta(32, steps=100_000) == propose_beta(32)
    short = propose_beta(32, steps=200)
    assert short.limited_by_run
    assert short.half_life == pytest.approx(50)
    assert short.beta == pytest.approx(0.5 ** (1 / 50))


def test_the_explanation_names_the_numbers() -> None:
    found = propose_beta(32)
    for part in ("0.9967", "90%", "K = 32", f"{found.half_life:.0f} steps"):
        assert part in found.explanation
    assert "half-lives" not in found.explanation
    short = propose_beta(128, steps=1000)
    for part in (
        f"{short.beta:.5g}",
        f"{short.retention:.0%}",
        "K = 128",
        "250 steps",
        "90%",
        "0.99918",
        "1000 steps",
        str(LIVES),
    ):
        assert part in short.explanation, part
    assert re.search(r"more often.*train longer", short.explanation), "it says what to do"
    assert short.explanation.endswith(".")


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, None, "32"])
def test_a_period_is_a_whole_number(bad: object) -> None:
    with pytest.raises(ConfigError, match=f"K must be a whole number of at least 1, got {bad!r}"):
        propose_beta(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -3, 1.5])
def test_so_is_the_length_of_a_run(bad: object) -> None:
    with pytest.raises(ConfigError, match=f"steps must be a whole number of at least 1, got {bad!r}"):
        propose_beta(32, steps=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.5, 2.0, math.nan])
def test_a_retention_is_a_share(bad: float) -> None:
    with pytest.raises(ConfigError, match=f"retention must be above 0 and below 1, got {bad!r}"):
        propose_beta(32, retention=bad)
    with pytest.raises(ConfigError, match=f"beta must be above 0 and below 1, got {bad!r}"):
        half_life(bad)
