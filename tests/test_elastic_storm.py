"""Short storms over elastic runs on real processes; `make chaos` has the long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="needs obstore: pip install 'thinwire[store]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'thinwire[store]'")

from benchmarks import servers
from benchmarks.elastic import METHODS, ZERO, Storm, count, run_storm


def check(result: dict[str, Any], events: int) -> None:
    assert sum(result["done"].values()) == events
    assert result["rounds"] > events
    assert {name: result[name] for name in ZERO} == dict.fromkeys(ZERO, 0)


def test_workers_that_are_killed_and_frozen_stay_bit_equal(tmp_path: Path) -> None:
    check(run_storm(Storm("demo", events=3, workers=2), tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", METHODS)
def test_a_longer_storm(algorithm: str, tmp_path: Path) -> None:
    check(run_storm(Storm(algorithm, events=6, seed=1), tmp_path), 6)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["moto", "rclone"])
def test_a_storm_on_a_real_server(store: str, tmp_path: Path) -> None:
    if why := servers.missing(store):
        pytest.skip(why)
    check(run_storm(Storm("diloco", store, events=5, seed=2), tmp_path), 5)


# --- What is counted: that a fault would be seen ------------------------------------------------------------------------------


def diary(folder: Path, worker: int, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"worker{worker}.jsonl").write_text(text + '{"round": 9, "ha')  # a kill cut the last line short


def round_of(number: int, **changes: Any) -> dict[str, Any]:
    line = {"round": number, "hash": 7, "finite": True, "counted": [0, 1], "blocks": [], "mine": True, "requests": {"PUT": 2}}
    return line | changes


def end(cursor: int, debt: list[int], held: dict[str, list[int]]) -> dict[str, Any]:
    return {"event": "ended", "round": 3, "ledger": {"cursor": cursor, "done": 4, "debt": debt, "held": held}}


JOINED = {"event": "joined", "begun": 0, "round": 1, "step": 0}
SOUND = [JOINED, round_of(1, blocks=[0, 1]), round_of(2, blocks=[2, 3]), end(6, [4], {"0": [5]})]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, {}),
        ({1: round_of(1, blocks=[0, 1], hash=8)}, {"two_hashes": 1}),
        ({0: JOINED | {"begun": 12}}, {"fresh": 1}),
        ({2: round_of(2, blocks=[2, 3], finite=False)}, {"invalid": 1}),
        ({3: end(7, [4], {"0": [5]}) | {"round": 4}}, {"lost": 1}),
        ({3: end(6, [3, 4], {"0": [5]}) | {"round": 4}}, {"twice": 1}),
    ],
)
def test_a_fault_would_be_counted(changed: dict[int, Any], fault: dict[str, int], tmp_path: Path) -> None:
    diary(tmp_path, 0, *SOUND)
    diary(tmp_path, 1, *[changed.get(number, line) for number, line in enumerate(SOUND)])
    found = count(tmp_path, 2)
    assert {name: found[name] for name in ZERO} == dict.fromkeys(ZERO, 0) | fault
    assert found["requests"] == {"PUT": 2.0, "GET": 0.0, "LIST": 0.0}
