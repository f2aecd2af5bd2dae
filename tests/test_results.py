"""The page of results says what the records say, and the commands of the records can still be run."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from benchmarks import decayed, losses, readme, recompute, record, reproduce, results, thin_wire
from benchmarks.arms import PARTS, run_of
from benchmarks.evidence import best_point, recorded
from benchmarks.tables import fewer, mean_of, rows_of

from thinwire.errors import MissingData
from thinwire.tools.advice import METHODS
from thinwire.tools.flags import parse_run


def test_the_page_is_what_its_text_and_the_records_make() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(), "run python -m benchmarks.results"


def test_the_tables_of_the_readme_are_those_of_the_records() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert readme.readme_with_tables(text) == text, "run python -m benchmarks.results"
    with pytest.raises(SystemExit, match="must have the table 'methods' once"):
        readme.readme_with_tables("# thinwire")


def test_bytes_of_the_records_are_those_of_the_messages_of_today() -> None:
    rows = list(recorded().values())
    for row in rows[:: len(rows) // 20]:
        assert recompute.recomputed(row) == row, "run python -m benchmarks.recompute"
    assert all(row["payload"] > 0 and row["workers"] == 4 and row["bytes"] == recompute.HOW for row in rows)


def test_fewer_bytes_are_those_that_leave_a_worker() -> None:
    rows = recorded()
    arms = {arm.name: arm for arm in PARTS["gpt"]}
    gathered, reduced = (rows_of(arms[name], rows) for name in ("DeMo 1-bit k=172", "DiLoCo H=8"))
    assert mean_of(gathered, "sent") == 3 * mean_of(gathered, "payload"), "to each of 3 others"
    assert mean_of(reduced, "sent") == pytest.approx(1.5 * mean_of(reduced, "payload")), "a ring of 4"
    dense = 384 * 4 * 820_352
    assert fewer(arms["DiLoCo H=8"], reduced, None) == pytest.approx(dense / mean_of(reduced, "payload"))
    assert fewer(arms["DeMo 1-bit k=172"], gathered, None) == pytest.approx(dense / mean_of(gathered, "payload") / 2)


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


@pytest.mark.slow  # reads every command of the records
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


def test_every_table_of_decayed_runs_has_a_row_to_be_repeated_or_is_named_as_too_long() -> None:
    shown = set(re.findall(r"\{\{ decayed (\S+) \}\}", results.SOURCE.read_text(encoding="utf-8")))
    swept = {"sweep-4"} if "{{ swept }}" in results.SOURCE.read_text(encoding="utf-8") else set()
    assert shown | swept == {*reproduce.DECAYED, *reproduce.TOO_LONG}
    for name, arm in reproduce.DECAYED.items():
        assert decayed.arm_of(name, arm).records, name


def test_a_row_without_its_data_is_left_out_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_one(*_: object) -> None:
        raise MissingData("fashion needs --data FOLDER")

    monkeypatch.setattr(reproduce.compare, "run_one", run_one)
    told, close = reproduce.repeat_decayed("cnn")
    assert close and told == f"decayed cnn, {reproduce.DECAYED['cnn']}: left out: fashion needs --data FOLDER"


def test_the_losses_of_the_plan_are_those_of_the_records() -> None:
    assert losses.FILE.read_text(encoding="utf-8") == losses.text(), "run python -m benchmarks.results"
    told = {method.name: method.losses for method in METHODS if method.losses}
    assert told.keys() == {"ddp", *losses.ARMS}, "every method with a decayed run is in the plan, and no other has a loss"
    for method, arms in losses.ARMS.items():
        for value, (records, name) in arms.items():
            mine, base = (arm.records for arm in (decayed.arm_of(records, name), decayed.compared(records).baseline))
            ratios = [a.loss / b.loss - 1 for a in mine for b in base if a.config.seed == b.config.seed]
            assert len(ratios) >= 3, name
            assert dict(told[method])[value] == pytest.approx(100 * sum(ratios) / len(ratios), abs=0.051), name


def test_an_interval_is_that_of_the_t_distribution_and_agrees_with_p(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decayed.compared("pico")
    for arm in found.arms[1:]:
        low, high = (float(word) for word in decayed.interval("pico", arm.name, found.baseline.name).rstrip("%").split(" to "))
        middle, error, p = found.against(arm), found.error(arm), found.p_value(arm)
        assert middle is not None and error is not None and p is not None
        assert (low + high) / 2 == pytest.approx(middle, abs=0.06)
        assert (high - low) / 2 == pytest.approx(4.303 * error, abs=0.06), "three seeds have two degrees of freedom"
        if min(abs(low), abs(high)) > 0.1:
            assert (low * high > 0) == (p < 0.05), arm.name
    first = tuple(replace(arm, records=arm.records[:1]) for arm in found.arms)
    monkeypatch.setattr(decayed, "compared", lambda _: replace(found, arms=first, baseline=first[0]))
    assert decayed.interval("pico", first[1].name, first[0].name) == "", "one seed has none"


def test_times_on_thin_wires_are_shown_beside_the_plan_and_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(way: str, speed: str, seconds: float, predicted: float) -> dict[str, Any]:
        times = {"factor": seconds / 0.5, "seconds_per_step": seconds, "predicted_seconds_per_step": predicted, "alone": 0.5}
        return {"way": way, "speed": speed, **times, "command": f"thinwire train --algorithm {way} --batch 16"}

    machine = {"cores": 2, "torch": "2", "python": "3", "date": "2026-01-01"}
    about = {**machine, "workers": 4, "task": "gpt-small"}
    rows = [row("ddp", "inf", 0.55, 0.55), row("ddp", "10mbit", 20.0, 19.0), row("demo", "10mbit", 0.6, 0.66)]
    counted = [{"way": way, "command": way, "interface_over_metered": 1.0123} for way in ("ddp", "demo")]
    records = {"thin_wire": {**about, "rows": rows}, "thin_wire_bytes": {**about, "rows": counted}}
    monkeypatch.setattr(results.record, "last", records.__getitem__)
    shown = results.FILL["thin-wire"]().splitlines()
    assert "| ddp | 1.10 | 40.00 |" in shown and "| demo |  | 1.20 |" in shown
    assert "| ddp | -5% | 1.012 |" in shown and "| demo | +10% | 1.012 |" in shown
    assert any("0.500 to 0.500 s" in line for line in shown)


def test_the_record_of_the_lab_holds_what_is_said_of_it() -> None:
    rows = {(row["way"], row["speed"]): row for row in record.last("thin_wire")["rows"]}
    assert {way.name for way in thin_wire.WAYS} == {way for way, _ in rows}
    for seed in ("DeMo k=32", "DeMo k=8", "decoupled DiLoCo H=8", "MT-DAO fp4"):
        assert rows[seed, "100mbit"]["factor"] <= 1.15 and rows[seed, "10mbit"]["factor"] <= 1.4, seed
    close = [
        way.name
        for way in thin_wire.WAYS
        if all(abs(plan_off(rows[way.name, s])) <= 0.15 for s in ("1gbit", "100mbit", "10mbit") if (way.name, s) in rows)
    ]
    three = [name for name in close if (name, "1gbit") in rows]
    assert len(three) >= 5, f"the plan is within 15% at three bandwidths for {three} only"
    readme = " ".join((results.PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    told = {
        "a step of torch's DDP takes {:.1f} times as long": "torch DDP",
        "of DeMo {:.2f} times": "DeMo k=8",
        "of decoupled DiLoCo {:.2f} times": "decoupled DiLoCo H=8",
        "of MT-DAO in 4 bits {:.2f} times": "MT-DAO fp4",
    }
    for sentence, way in told.items():
        assert sentence.format(rows[way, "10mbit"]["factor"]) in readme, f"{way} in the README"
    counted = record.last("thin_wire_bytes")["rows"]
    assert len(counted) == len(thin_wire.WAYS) and all(1 <= row["interface_over_metered"] <= 1.05 for row in counted)


def test_methods_that_were_not_measured_again_stay_in_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    new = [{"way": "DiLoCo H=32", "factor": 1.0}]
    assert thin_wire._with_last("thin_wire", new) == new, "there is no record yet"
    record.append(
        "thin_wire", {"rows": [{"way": w, "factor": 2.0} for w in ("torch DDP", "DiLoCo H=32", "gone", "LoRDO K=32")]}
    )
    rows = thin_wire._with_last("thin_wire", new)
    assert [(row["way"], row["factor"]) for row in rows] == [("torch DDP", 2.0), ("DiLoCo H=32", 1.0), ("LoRDO K=32", 2.0)]


def plan_off(row: dict[str, Any]) -> float:
    return row["predicted_seconds_per_step"] / row["seconds_per_step"] - 1


def test_the_sweep_is_held_against_the_better_of_the_synchronous_arms() -> None:
    lines = decayed.swept().splitlines()
    assert lines[2].startswith("| AdamW-DDP |")
    losses = [float(cell.split()[0]) for cell in lines[2].split("|")[2 : 2 + len(decayed.SWEEP)]]
    for batch, loss, column in zip(decayed.SWEEP, losses, range(2, 2 + len(decayed.SWEEP)), strict=True):
        arms = decayed.compared(f"sweep-{batch}").arms
        synchronous = [arm for arm in arms if arm.first.config.algorithm == "data-parallel"]
        assert synchronous
        best = min(synchronous, key=lambda arm: arm.loss.mean)
        assert loss == pytest.approx(best.loss.mean, abs=5e-4)
        shown = {cells[1].strip(): cells[column].strip() for line in lines[3:7] if (cells := line.split("|"))}
        assert shown.keys() == {arm.name for arm in arms} - {arm.name for arm in synchronous}
        assert shown["Local Adam K=16"].partition(" (lr")[0] == decayed.difference(
            f"sweep-{batch}", "Local Adam K=16", best.name
        )
