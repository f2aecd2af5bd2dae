"""Which tests are quick. `make test` runs those; `make test-full` all of them."""

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
_MOST = 4  # cases of a test there that are all quick


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Of tests of whole rounds with many cases, make two thirds of the cases slow: all but the first and a fixed third.

    Which third follows from the names of the cases, so that it is the same everywhere, and no value of a parameter is left
    out of all tests.
    """
    quick = (item for item in items if item.path.parent.name in FAMILIES and item.get_closest_marker("slow") is None)
    for _, family in groupby(quick, key=lambda item: item.nodeid.partition("[")[0]):
        _, *others = family
        if len(others) >= _MOST:
            for item in others:
                if zlib.crc32(item.nodeid.encode()) % 3:
                    item.add_marker(pytest.mark.slow)


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> int:
    """How many examples hypothesis tries: `count`, or an eighth of them where slow tests are left out."""
    return count if full else -(-count // 8)
