"""Which tests are quick. `make test` runs those; `make test-full` all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

full = False  # whether slow tests were asked for; set before tests are collected


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Values for `parametrize`: tests with the first few are quick, those with the others slow."""
    return [value if n < quick else _slow(value) for n, value in enumerate(values)]


def diagonals(rows: Sequence[Any], columns: Sequence[Any], every: int = 4) -> list[Any]:
    """All pairs for `parametrize`: quick on every so many-th diagonal, so that each value is in a quick pair; else slow."""
    assert min(len(rows), len(columns)) >= every, "some value would be in slow pairs only"
    pairs = [(i + j, (row, column)) for i, row in enumerate(rows) for j, column in enumerate(columns)]
    return [_slow(pair) if place % every else pair for place, pair in pairs]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> int:
    """How many examples hypothesis tries: `count`, or an eighth of them where slow tests are left out."""
    return count if full else -(-count // 8)
