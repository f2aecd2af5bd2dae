"""The page of many workers says what the records say."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
from benchmarks import record, scaling

from thinwire import DCT, Chain, Owners, Sign, TopK
from thinwire.core.route import owned_nbytes
from thinwire.tasks import make_task
from thinwire.tools.arms import split_arguments
from thinwire.tools.commands.compare import parse_arms


def test_the_page_is_what_its_text_and_the_records_make() -> None:
    assert scaling.PAGE.read_text(encoding="utf-8") == scaling.page(), "run python -m benchmarks.scaling"


def test_a_word_that_cannot_be_filled_in_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    text = tmp_path / "scaling.md"
    monkeypatch.setattr(scaling, "SOURCE", text)
    text.write_text("{{ losses }}")
    with pytest.raises(SystemExit, match="must begin with one of bytes, growth, off, loss"):
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


def test_what_leaves_a_worker_by_owners_grows_by_less_than_8_percent_from_16_to_64_workers() -> None:
    params = list(make_task("gpt-nano").model().parameters())
    codec = Chain.of(DCT(64) >> TopK(32) >> Sign())
    sent = {}
    for workers in (16, 64):
        halves = owned_nbytes(Owners(), codec, params, range(len(params)), workers)
        sent[workers] = sum(sum(halves.sent(rank)) + workers - 1 for rank in range(workers)) / workers
    assert sent[64] / sent[16] < 1.08
    assert scaling.growth("gpt-nano", "mean") == pytest.approx(sent[64] / sent[16] - 1), "as recorded"


def test_a_mean_and_its_standard_error() -> None:
    assert scaling.mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert math.isnan(scaling.mean_and_error([1.0])[1])


def test_records_of_a_matrix_are_shown_and_win_over_older_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert scaling._arms("owners-1000") == "*Not run yet.*"
    rows = [row for row in scaling._rows("owners_loss") if row["config"]["batch"] == 8]
    (tmp_path / "owners_loss.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        del row["table"]
        row["config"]["seed"] += 10
    (tmp_path / "owners-8.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    table = scaling._arms("owners-8").splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| DeMo gathered", "| DeMo by owners"] and "±" in table[3]
    [(_, runs)] = scaling.paired("DeMo gathered", "DeMo by owners").items()
    assert [run["config"]["seed"] for run, _ in runs] == [10, 11, 12]
    assert scaling._loss_commands("DeMo gathered", "DeMo by owners").endswith("--seeds 10,11,12")


def test_commands_of_the_page_are_understood() -> None:
    lines = [line for line in scaling.page().splitlines() if line.startswith("thinwire compare @")]
    assert any("owners-ddp" in line for line in lines)
    for line in lines:
        arms, _ = parse_arms(*split_arguments(shlex.split(line.partition("  #")[0])[2:]))
        beta2 = 0.95 if any(name in line for name in ("owners.txt", "owners-ddp")) else 0.99  # as in their records
        for (config,) in arms.values():
            assert config.algorithm != "demo" or list(config.settings["betas"]) == [0.9, beta2], line
