"""Short storms over runs on a cluster of real processes; `make chaos` has the long ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.against_torchft import Trial, run_trial
from benchmarks.cluster import ZERO, Storm, count, run_storm


def check(row: dict[str, Any], events: int) -> None:
    assert {name: row[name] for name in ZERO} == dict.fromkeys(ZERO, 0), row
    assert sum(row["done"].values()) == events and row["rounds"] >= events


@pytest.mark.slow
def test_a_storm(tmp_path: Path) -> None:
    check(run_storm(Storm("diloco", events=6, seed=1), tmp_path), 6)


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["kill all", "host"])
def test_everybody_is_back_after_an_outage(outage: str, tmp_path: Path) -> None:
    row = run_storm(Storm("diloco", events=3, seed=3, outage=outage), tmp_path)
    check(row, 3)
    assert row["done"] == {outage: 3} and row["founded"] >= 2


@pytest.mark.slow
def test_workers_that_die_within_large_exchanges_do_not_stop_the_others(tmp_path: Path) -> None:
    """4 workers with messages of 16 MB, which take longer than the steps between them."""
    row = run_trial(Trial("thinwire", kills=3, seconds=30.0, workers=4, width=2048), tmp_path)
    logs = "".join((tmp_path / f"{id}.log").read_text() for id in range(4))
    assert "Error" not in logs, logs[-4000:]
    assert row["rounds"] >= 3 and row["next_commit"]["worst"] < 30.0, row


# --- What is counted: that a fault would be seen ------------------------------------------------------------------------------


def decided(number: int, *, chain: str, before: str, **digests: str) -> dict[str, Any]:
    return {"decided": number, "chain": chain, "before": before, "digests": {id[1:]: told for id, told in digests.items()}}


def applied(number: int, *, chain: str, **changes: Any) -> dict[str, Any]:
    return {"round": number, "chain": chain, "hash": 7, "finite": True, "nan": [], "left_out": [], "mine": True} | changes


def sent(number: int, digest: str, *blocks: int) -> dict[str, Any]:
    return {"sent": number, "digest": digest, "blocks": list(blocks)}


def ended(chain: str, number: int, **ledger: Any) -> dict[str, Any]:
    told = {"cursor": 3, "done": 2, "debt": [], "held": {"0": [2]}} | ledger
    return {"event": "ended", "round": number, "chain": chain, "ledger": told}


FOUNDED = {"event": "founded", "number": 0, "chain": ""}
JOINED = {"event": "joined", "begun": 0, "round": 1, "step": 0}
FIRST, SECOND = decided(0, chain="a", before="", w0="s0"), decided(1, chain="b", before="a", w0="s1")
SOUND = [FOUNDED, sent(0, "s0", 0), FIRST, applied(0, chain="a"), sent(1, "s1", 1), SECOND, applied(1, chain="b"), JOINED]


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ([], {}),
        ([applied(1, chain="b", hash=8)], {"two_hashes": 1}),
        ([decided(1, chain="c", before="a", w0="s1")], {"two_hashes": 1}),
        ([decided(1, chain="c", before="a", w0="s1"), FOUNDED | {"number": 1}], {}),
        ([JOINED | {"begun": 12}], {"fresh": 1}),
        ([applied(1, chain="b", finite=False)], {"invalid": 1}),
        ([ended("b", 2, cursor=4)], {"lost": 1}),
        ([ended("b", 2, debt=[1])], {"twice": 1}),
        ([ended("b", 2, done=3)], {"misbooked": 1}),
    ],
)
def test_a_fault_would_be_counted(more: list[dict[str, Any]], fault: dict[str, int], tmp_path: Path) -> None:
    lines = [*SOUND, *more]
    if not any(line.get("event") == "ended" for line in more):
        lines.append(ended("b", 2))
    (tmp_path / "worker0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = count(tmp_path, 1)
    assert {name: found[name] for name in ZERO} == dict.fromkeys(ZERO, 0) | fault
    assert found["rounds"] == 2 and found["unseen"] == 0
