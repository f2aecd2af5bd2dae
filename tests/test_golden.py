"""A change that should change nothing changes nothing: the first 64 steps of every method against `tests/golden`."""

from __future__ import annotations

import functools

import pytest

from tests import golden
from tests.processes import Pool
from thinwire import kernels
from thinwire.algorithms import found
from thinwire.errors import MissingData


@functools.cache
def _same_arithmetic(name: str) -> bool:
    return kernels.name() == "off" and golden.read(name)["control"] == golden.control()


@pytest.mark.parametrize(
    ("place", "name", "size", "gather"),
    [key if key[1] in found() and key[2] == 2 else pytest.param(*key, marks=pytest.mark.slow) for key in golden.set_ups()],
)
def test_a_conformance_set_up_gives_what_it_gave(place: str, name: str, size: int, gather: bool, pool: Pool) -> None:
    before = golden.read("conformance")["entries"][repr((place, name, size, gather))]
    found = golden.measure_set_up(place, name, size, gather, pool)
    assert golden.differences(before, found, same_arithmetic=_same_arithmetic("conformance")) == []


def test_every_arm_and_set_up_has_a_golden_entry_and_no_other_has() -> None:
    assert golden.read("arms")["entries"].keys() == golden.arms().keys()
    assert golden.read("conformance")["entries"].keys() == {repr(key) for key in golden.set_ups()}


# All of them: python -m tests.golden, about 20 minutes.
SOME_ARMS = [name for name in golden.arms() if not name.startswith("larger")][::16]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME_ARMS)
def test_an_arm_of_the_records_begins_as_it_did(name: str) -> None:
    before = golden.read("arms")["entries"][name]
    try:
        found = golden.measure_arm(golden.arms()[name])
    except MissingData as missing:
        pytest.skip(str(missing))  # it says how to get them
    assert golden.differences(before, found, same_arithmetic=_same_arithmetic("arms")) == []
