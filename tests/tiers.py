"""Which tests are quick. `make test` runs those; `make test-full` all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

full = False  # whether slow tests were asked for; set before tests are collected


def first_quick(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Values for `parametrize`: tests with the first few are quick, those with the others slow."""
    return [value if n < quick else _slow(value) for n, value in enumerate(values)]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> int:
    """How many examples hypothesis tries: `count`, or an eighth of them where slow tests are left out."""
    return count if full else -(-count // 8)
