"""Short storms over elastic runs on real processes; `make chaos` has the long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore", reason="needs obstore: pip install 'thinwire[store]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'thinwire[store]'")

from benchmarks import servers
from benchmarks.diaries import MANIFESTS, ZERO, count
from benchmarks.elastic import METHODS, OUTAGES, Storm, run_storm


def check(result: dict[str, Any], events: int) -> None:
    assert sum(result["done"].values()) == events
    assert result["rounds"] > events
    assert {name: result[name] for name in ZERO} == dict.fromkeys(ZERO, 0)


def test_workers_that_are_killed_and_frozen_stay_bit_equal(tmp_path: Path) -> None:
    check(run_storm(Storm("demo", events=3, workers=2), tmp_path), 3)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", list(METHODS)[-2:])  # all of them: make chaos
def test_a_longer_storm(algorithm: str, tmp_path: Path) -> None:
    check(run_storm(Storm(algorithm, events=6, seed=1), tmp_path), 6)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["moto", "rclone"])
def test_a_storm_on_a_real_server(store: str, tmp_path: Path) -> None:
    if why := servers.missing(store):
        pytest.skip(why)
    check(run_storm(Storm("diloco", store, events=5, seed=2), tmp_path), 5)


@pytest.mark.slow
@pytest.mark.parametrize("outage", OUTAGES)
def test_all_workers_are_counted_again_after_an_outage(outage: str, tmp_path: Path) -> None:
    store = OUTAGES[outage]
    if why := servers.missing(store) if store != "file" else "":
        pytest.skip(why)
    check(run_storm(Storm("decoupled-diloco", store, events=2, seed=3, outage=outage), tmp_path), 2)


# --- What is counted: that a fault would be seen ------------------------------------------------------------------------------


def diary(folder: Path, worker: int, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"worker{worker}.jsonl").write_text(text + '{"round": 9, "ha')  # a kill cut the last line short


def sent(digest: str, *blocks: int) -> dict[str, Any]:
    return {"sent": 1, "digest": digest, "blocks": blocks}


def round_of(number: int, **changes: Any) -> dict[str, Any]:
    line = {"round": number, "hash": 7, "finite": True, "mine": True, "counted": [0, 1], "nan": [], "left_out": []}
    return line | {"requests": {"PUT": 2}} | changes


def end(cursor: int = 6, debt: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {"event": "ended", "round": 3, "ledger": {"cursor": cursor, "done": 4, "debt": debt, "held": {"0": [5]}}}


JOINED = {"event": "joined", "begun": 0, "round": 1, "step": 0}
SOUND = [JOINED, sent("a", 0, 1), round_of(1), sent("b", 2, 3), round_of(2), end()]


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, {}),
        ({2: round_of(1, hash=8)}, {"two_hashes": 1}),
        ({0: JOINED | {"begun": 12}}, {"fresh": 1}),
        ({4: round_of(2, finite=False)}, {"invalid": 1}),
        ({3: sent("b", 2)}, {"lost": 1, "misbooked": 1}),
        ({5: end(cursor=7)}, {"lost": 1}),
        ({3: sent("b", 1, 2, 3)}, {"twice": 1}),
        ({5: end(debt=(3, 4))}, {"twice": 1}),
        ({4: round_of(2, nan=[1])}, {"nan": 2}),
        ({4: round_of(2, left_out=[1])}, {"lost": 2, "misbooked": 2}),
        ({4: {}}, {"unseen": 1}),
    ],
)
def test_a_fault_would_be_counted(changed: dict[int, Any], fault: dict[str, int], tmp_path: Path) -> None:
    diary(tmp_path, 0, JOINED, round_of(0), round_of(1))
    diary(tmp_path, 1, *[changed.get(number, line) for number, line in enumerate(SOUND)])
    manifests = [{"round": 0, "counted": {}}, {"round": 1, "counted": {"0": "a"}}, {"round": 2, "counted": {"1": "b"}}]
    (tmp_path / MANIFESTS).write_text("".join(json.dumps(manifest) + "\n" for manifest in manifests))
    found, names = count(tmp_path, 2), (*ZERO, "nan", "unseen")
    assert {name: found[name] for name in names} == dict.fromkeys(names, 0) | fault
    assert found["requests"] == {"PUT": 2.0, "GET": 0.0, "LIST": 0.0}
