"""The page of many workers says what the records say."""

from __future__ import annotations

import math

import pytest
from benchmarks import scaling


def test_the_page_is_what_its_text_and_the_records_make() -> None:
    assert scaling.PAGE.read_text(encoding="utf-8") == scaling.page(), "run python -m benchmarks.scaling"


def test_a_word_that_cannot_be_filled_in_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    text = tmp_path / "scaling.md"
    monkeypatch.setattr(scaling, "SOURCE", text)
    text.write_text("{{ losses }}")
    with pytest.raises(SystemExit, match="must begin with one of bytes, loss"):
        scaling.page()
    text.write_text("{{ world owners / 1024 / seconds }}")
    assert scaling.page().splitlines()[-1].endswith(" s")


def test_runs_are_paired_by_their_seeds() -> None:
    pairs = scaling.paired("DeMo gathered", "DeMo by owners")
    assert {8, 16} <= {workers for workers, _, _ in pairs}
    for (workers, batch, steps), runs in pairs.items():
        for run in (run for pair in runs for run in pair):
            config = run["config"]
            assert (config["workers"], config["batch"], config["steps"]) == (workers, batch, steps)
        assert all(a["config"]["seed"] == b["config"]["seed"] and a["arm"] != b["arm"] for a, b in runs)


def test_a_mean_and_its_standard_error() -> None:
    assert scaling.mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert math.isnan(scaling.mean_and_error([1.0])[1])
