"""The page of results says what the records say, and the commands of the records can still be run."""

from __future__ import annotations

import shlex

import pytest
from benchmarks import reproduce, results
from benchmarks.arms import PARTS, run_of
from benchmarks.evidence import best_point, recorded

from thinwire.run.flags import parse_run


def test_the_page_is_what_its_text_and_the_records_make() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "run python -m benchmarks.results"


def test_a_word_that_cannot_be_filled_in_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    text = tmp_path / "results.md"
    monkeypatch.setattr(results, "SOURCE", text)
    for wrong, told in {
        "{{ loss gpt / Adam }}": "arm 'Adam' of gpt: it has AdamW-DDP",
        "{{ loss gtp / AdamW-DDP }}": "part 'gtp': there are gpt, cnn",
        "{{ mean gpt / AdamW-DDP }}": "must begin with one of table, loss",
    }.items():
        text.write_text(wrong)
        with pytest.raises(SystemExit, match=told):
            results.page()


def test_figures_in_the_text_are_filled_in(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    rows = [row for row in recorded().values() if row["arm"] == "AdamW-DDP" and row["steps"] == 384 and row["lr"] == 2.8e-3]
    mean = sum(row["loss"] for row in rows) / len(rows)
    assert len(rows) == 3
    text = tmp_path / "results.md"
    monkeypatch.setattr(results, "SOURCE", text)
    text.write_text("a {{ loss gpt / AdamW-DDP }} b {{ against gpt / AdamW-DDP / AdamW-DDP }} c {{ times gpt / AdamW-DDP }}")
    assert results.page().splitlines()[-1] == f"a {mean:.3f} b +0.0% c 1.00x"


def test_the_commands_of_the_best_rows_are_still_commands() -> None:
    rows = recorded()
    for arms in PARTS.values():
        for arm in arms:
            if (point := best_point(arm, rows)) is None:
                continue
            run = run_of(arm, point, 0)
            config, _ = parse_run("sim", shlex.split(run.key)[2:])
            assert (config.algorithm, config.lr, config.steps, config.batch) == (run.algorithm, run.lr, run.steps, run.batch)
            told = {k: tuple(v) if isinstance(v := config.settings[k], list) else v for k in run.settings}
            assert told == run.settings


def test_every_table_has_a_row_to_be_repeated() -> None:
    assert set(reproduce.ROWS) == set(PARTS)
    for part, name in reproduce.ROWS.items():
        assert name in [arm.name for arm in PARTS[part]], part
