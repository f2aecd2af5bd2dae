"""Elastic runs in the lab: real processes behind real wires, one of which is slow, or all of which are thin."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.straggler import Job, measure

from tests.processes import LIMIT
from tests.tools.lab_straggler import ROUND
from tests.tools.test_lab import name, real  # noqa: F401
from thinwire.tools.lab import Lab


@pytest.mark.slow
@real
def test_a_straggler_does_not_hold_the_others_up_and_is_counted_later(name: str, tmp_path: Path) -> None:  # noqa: F811
    """It takes no further step until the others have decided rounds without it: with fixed workers nobody would go on."""
    with Lab(3, name=name) as lab:
        lab.run([sys.executable, "-m", "tests.tools.lab_straggler", str(tmp_path)], timeout=LIMIT)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    first, straggler = told[0]["counted"], told[2]
    alone = [number for number, ids in first.items() if 0 < int(number) <= ROUND and ids]
    assert alone and all(2 not in first[number] for number in alone)
    assert any(2 in ids for number, ids in first.items() if int(number) > ROUND), "what it did is sent later"
    common = set(straggler["states"]) & set(told[0]["states"])
    assert len(common) > ROUND, "it follows the rounds that it missed"
    assert all(straggler["states"][number] == told[0]["states"][number] for number in common)


@pytest.mark.slow
@real
def test_a_run_on_links_of_1_mbit_advances(name: str) -> None:  # noqa: F811
    job = Job("elastic", "demo", H=0, rounds=8, tail=0.0, step_seconds=0.0, workers=3, bandwidth=1e6)
    with Lab(job.workers, name=name) as lab:
        figures = measure(lab, job)
    assert figures["seconds per round"] > 0
    for sent in figures["sent"]:
        assert 8 * sent <= 1.05 * job.bandwidth * figures["seconds"], "no faster than the wire"
    message = min(figures["sent"][1:]) / job.rounds
    assert message > 1000, "messages pass the wire"
