"""Which tests are quick (`make test`), slow (`make test-full` has them too), and rare (only `make test-all` has them)."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import groupby
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


FAMILIES = ("conformance", "algorithms", "elastic", "tools", "tests")  # folders whose tests are of whole rounds and runs
_MOST = 4  # cases of a test there that are left as they are
WHOLE = ("test_syncs.py",)  # files there whose cases are bars of their own: none is left out for there being many


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Of a test of whole rounds with many cases, make three quarters of them slow, and half of them rare.

    The first case stays as it is. Which others follow from their names, so that they are the same everywhere, and no value of a
    parameter is left out of all tests.
    """
    for _, family in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        first, *others = family
        if first.path.parent.name in FAMILIES and first.path.name not in WHOLE and len(others) >= _MOST:
            for item in others:
                place = zlib.crc32(item.nodeid.encode()) % 4
                if place:
                    item.add_marker(pytest.mark.slow)
                if place > 1:
                    item.add_marker(pytest.mark.rare)


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> int:
    """How many examples hypothesis tries: `count`, or an eighth of them where slow tests are left out."""
    return count if full else -(-count // 8)
