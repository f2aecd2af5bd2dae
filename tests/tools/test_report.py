"""`thinwire report`: statistics by hand, figures that are right in light and dark, and the page in a real browser."""

from __future__ import annotations

import builtins
import html
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.browser import CHROMIUM, Browser
from tests.tools.made_records import PARAMETERS, made_comparison, made_record
from thinwire.errors import ConfigError, MissingDependency, how_to_install
from thinwire.tools.cli import main
from thinwire.tools.config import RunConfig, write_run_toml
from thinwire.tools.records import Record, append_record, read_records, thinned
from thinwire.tools.report import write_report
from thinwire.tools.report.comparison import Comparison, Sample, comparisons, p_value
from thinwire.tools.report.curves import curves_of, evaluations, round_sizes, smoothed, steps
from thinwire.tools.report.drawing import DARK_ARMS, LIGHT_ARMS, save_svg
from thinwire.tools.report.figures import drawings
from thinwire.tools.report.page import UNFINISHED
from thinwire.tools.report.svg import inline_svg
from thinwire.tools.report.table import headline, show_p, show_times, table
from thinwire.tools.report.terminal import show
from thinwire.tools.report.watch import watch

EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "records" / "evidence.jsonl"
SPEEDS = [("10mbit", 1e7), ("100mbit", 1e8), ("1gbit", 1e9)]
NASTY = '<script>alert(1)</script> & "$x^2$" {{title}}'


def only(records: list[Record], **how: Any) -> Comparison:
    (comparison,) = comparisons(records, **how)
    return comparison


def with_losses(arm: str, losses: list[float], algorithm: str = "diloco", **more: Any) -> list[Record]:
    made = [made_record(arm, seed=seed, algorithm=algorithm, **more) for seed in range(len(losses))]
    return [replace(r, figures=r.figures | {"val_loss": loss}) for r, loss in zip(made, losses, strict=True)]


def cells(comparison: Comparison) -> list[dict[str, str]]:
    columns, rows = table(comparison)
    return [dict(zip(columns, (cell.text for cell in row), strict=True)) for row in rows]


# --- Statistics ----------------------------------------------------------------------------------------------------------


def test_mean_and_spread_by_hand() -> None:
    sample = Sample((1.0, 2.0, 4.0))
    assert sample.mean == pytest.approx(7 / 3)
    assert sample.spread == pytest.approx(math.sqrt(7 / 3)), "(16/9 + 1/9 + 25/9) / (3 - 1)"
    assert math.isnan(Sample((1.0,)).spread) and math.isnan(Sample(()).mean)
    assert math.isnan(Sample((1.0, math.nan)).mean) and math.isnan(Sample((1.0, math.nan)).spread)


def test_the_p_value_by_hand() -> None:
    # Means 2 and 4, variances 1 and 1, n = 3: t = -2 / sqrt(2/3) = -2.4495, and Welch's degrees of freedom are 4.
    # For 4 degrees the distribution function is algebraic: p = 1 - x (1 + (1 - x^2) / 2), x = t / sqrt(t^2 + 4).
    t = 2 / math.sqrt(2 / 3)
    x = t / math.sqrt(t**2 + 4)
    assert p_value([1, 2, 3], [3, 4, 5]) == pytest.approx(1 - x * (1 + (1 - x**2) / 2))
    assert p_value([1, 2, 3], [3, 4, 5]) == pytest.approx(0.0705, abs=1e-4)
    # Unequal variances and sizes: 2 degrees where one side has no spread (n = 3), p = 1 - t / sqrt(t^2 + 2).
    t = 2 / math.sqrt(1 / 3)
    assert p_value([1, 2, 3], [4, 4]) == pytest.approx(1 - t / math.sqrt(t**2 + 2))


def test_there_is_no_p_value_where_there_is_nothing_to_test() -> None:
    assert p_value([1.0], [1.0, 2.0]) is None
    assert p_value([1.0, 2.0], [1.0]) is None
    assert p_value([1.0, math.nan], [1.0, 2.0]) is None
    assert p_value([2.0, 2.0], [1.0, 1.0]) is None, "no spread at all: no test"
    assert p_value([1.0, 2.0], [1.0, 2.0]) == pytest.approx(1.0)


def test_without_scipy_there_is_a_table_without_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.tools.report.comparison.scipy_is_here", lambda: False)
    monkeypatch.setattr("thinwire.tools.report.terminal.scipy_is_here", lambda: False)
    assert p_value([1, 2, 3], [3, 4, 5]) is None
    told = StringIO()
    show([only(made_comparison())], Console(file=told, width=200))
    assert f"needs scipy: {how_to_install('report')}" in " ".join(told.getvalue().split())


def test_the_table_by_hand() -> None:
    records = with_losses("ddp", [3.0, 4.0, 5.0], "ddp") + with_losses("far", [1.0, 2.0, 3.0], every=40, settings={"H": 40})
    base, far = cells(only(records))
    assert (base["method"], base["loss"], base["vs baseline"], base["p"]) == ("ddp", "4.000 ±1.000", "baseline", "-")
    assert (far["loss"], far["vs baseline"], far["p"], far["seeds"]) == ("2.000 ±1.000", "-52.2% ±7.8", "0.02", "3")
    assert far["settings"].startswith("H=40") and far["place"] == "simulated"
    # 120 steps, a ring of 4: DDP sends 2 * 4 P * 3/4 per step, the other the same at every 40th.
    assert base["bytes sent"] == "591 MB" and pytest.approx(591e6, rel=1e-3) == 6 * PARAMETERS * 120
    assert (far["bytes sent"], far["fewer"], base["fewer"]) == ("14.8 MB", "40x", "1.0x")
    assert (far["seconds"], far["waiting"]) == ("6.03", "0%") and base["waiting"] == "17%"
    assert "accuracy" not in base, "a column in which nobody has anything"


def test_differences_are_of_the_same_seed_and_their_test_is_paired() -> None:
    # Seeds differ by far more than methods do: 1%, 2% and 3% above the baseline of the same seed.
    records = with_losses("ddp", [1.0, 2.0, 4.0], "ddp") + with_losses("close", [1.01, 2.04, 4.12])
    _, close = cells(only(records))
    assert close["vs baseline"] == "+2.0% ±0.6", "a standard deviation of 1 over the root of 3"
    # t = 2 / (1 / sqrt(3)) = 3.46 with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.074
    assert close["p"] == "0.07"
    other_seeds = [replace(r, config=replace(r.config, seed=r.config.seed + 5)) for r in with_losses("far", [2.0, 3.0, 4.0])]
    _, far = cells(only(with_losses("ddp", [1.0, 2.0, 3.0], "ddp") + other_seeds))
    assert (far["vs baseline"], far["p"]) == ("+50.0%", "0.29"), "no pairs: the ratio of the means, and Welch's test"


def test_bytes_among_other_numbers_of_workers() -> None:
    ring = made_record("ring", every=8, settings={"H": 8})  # a ring of 4 every 8 steps, at any number of workers 8x
    message, steps = 20_000, 120
    gathered = {"payload": message * steps, "sent": 3 * message * steps}  # each of 4 workers to 3 others
    gather = replace(made_record("gather"), figures=made_record("gather").figures | gathered)
    start = {"payload": 4 * PARAMETERS * 20 + message * 100, "sent": 6 * PARAMETERS * 20 + 3 * message * 100}
    mixed = replace(made_record("mixed"), figures=made_record("mixed").figures | start)
    base, *rows = cells(only([made_record("ddp", algorithm="ddp"), ring, gather, mixed]))
    assert "with 4" not in base, "the column of the run's own number is called fewer"
    assert [(row["fewer"], row["with 8"]) for row in rows] == [
        ("8.0x", "8.0x"),
        (f"{6 * PARAMETERS / (3 * message):.0f}x", f"{7 * PARAMETERS / (7 * message):.0f}x"),
        (
            f"{6 * PARAMETERS * steps / start['sent']:.1f}x",
            f"{7 * PARAMETERS * steps / (7 * PARAMETERS * 20 + 7 * message * 100):.1f}x",
        ),
    ]
    assert [row["rounds"] for row in rows] == ["15", "120", "120"]
    owners = replace(gather, config=replace(gather.config, route="owners"))
    assert cells(only([made_record("ddp", algorithm="ddp"), owners]))[1]["with 8"] == "-", "what was sent does not tell"


def test_one_seed_has_no_spread_and_no_p() -> None:
    rows = cells(only(made_comparison(seeds=1)))
    assert all("±" not in row["loss"] for row in rows)
    assert "p" not in rows[0]


def test_a_diverged_arm_is_called_so_and_is_never_the_best() -> None:
    records = with_losses("ddp", [2.0, 2.0], "ddp") + with_losses("gone", [math.nan, math.inf], message=100)
    records += with_losses("half", [2.0, math.nan], message=200) + with_losses("good", [2.01, 2.01], message=1000)
    comparison = only(records)
    rows = cells(comparison)
    assert [row["loss"] for row in rows] == ["2.000 ±0.000", "diverged", "diverged in 1 of 2", "2.010 ±0.000"]
    assert [row["vs baseline"] for row in rows] == ["baseline", "-", "-", "+0.5% ±0.0"]
    assert headline(comparison).startswith("good: ")


def test_the_headline_is_the_thinnest_arm_within_one_percent() -> None:
    records = with_losses("ddp", [2.0], "ddp") + with_losses("near", [2.018], message=PARAMETERS)
    records += with_losses("nearer", [2.001], message=2 * PARAMETERS) + with_losses("thin", [2.1], message=100)
    assert headline(only(records)) == "near: 4.0 times fewer bytes than ddp, validation loss +0.9%."
    apart = with_losses("ddp", [2.0], "ddp") + with_losses("thin", [2.1], message=PARAMETERS)
    assert headline(only(apart)) == ("No method ended within 1% of ddp. The closest is thin, +5.0% with 4.0 times fewer bytes.")
    assert headline(only(with_losses("ddp", [2.0], "ddp"))) == ""
    same = with_losses("ddp", [2.0], "ddp") + with_losses("as fat", [1.9])
    assert headline(only(same)) == "", "nothing is gained"


def test_the_baseline_is_the_first_data_parallel_arm_or_the_named_one() -> None:
    records = [made_record("far"), made_record("dense", algorithm="data-parallel"), made_record("ddp", algorithm="ddp")]
    assert only(records).baseline.name == "dense"
    assert only(records, baseline="far").baseline.name == "far"
    assert only(records[:1]).baseline.name == "far"
    with pytest.raises(ConfigError, match="no method is called 'fat', to be the baseline: choose from 'far', 'dense', 'ddp'"):
        only(records, baseline="fat")


def test_other_jobs_are_other_comparisons_unless_asked_for_together() -> None:
    records = [made_record("a"), made_record("b", steps=60), made_record("b"), made_record("c", task="gpt-small")]
    assert [(c.title, [arm.name for arm in c.arms]) for c in comparisons(records)] == [
        ("gpt-nano, 4 workers, 120 steps", ["a", "b"]),
        ("gpt-nano, 4 workers, 60 steps", ["b"]),
        ("gpt-small, 4 workers, 120 steps", ["c"]),
    ]
    nano, small = comparisons(records, together=True)
    assert (nano.title, small.title) == ("gpt-nano", "gpt-small")
    assert [arm.name for arm in nano.arms] == ["a", "b (steps=60)", "b (steps=120)"]
    assert nano.settings_of(nano.arms[1])["steps"] == 60


def test_arms_of_one_name_are_told_apart_and_the_best_can_be_kept() -> None:
    records = with_losses("x", [2.0, 2.2], lr=1e-3) + with_losses("x", [1.9, 1.9], lr=2e-3) + with_losses("x", [1.0], lr=3e-3)
    assert [arm.name for arm in only(records).arms] == ["x (lr=0.001)", "x (lr=0.002)", "x (lr=0.003)"]
    (best,) = only(records, best=True).arms
    assert (best.name, best.first.config.lr) == ("x", 2e-3), "the most seeds first, then the least loss"
    places = [made_record("x"), made_record("x", place="lab 10mbit")]
    assert [arm.name for arm in only(places).arms] == ["x (simulated)", "x (lab 10mbit)"]


def test_common_settings_are_said_once() -> None:
    records = [made_record("a", lr=0.01, settings={"H": 5}), made_record("b", lr=0.01, settings={"H": 6, "outer_lr": 0.3})]
    comparison = only(records)
    assert comparison.common == {"lr": 0.01}
    assert [row["settings"] for row in cells(comparison)] == ["H=5", "H=6, outer_lr=0.3"]


def test_numbers_for_people() -> None:
    assert [show_times(x) for x in (0.4, 1.0, 8.04, 103.6, 1056.2)] == ["0.4x", "1.0x", "8.0x", "104x", "1,056x"]
    assert [show_p(p) for p in (0.0004, 0.0042, 0.0704, 1.0)] == ["<0.001", "0.0042", "0.07", "1.00"]


def test_old_evidence_is_compared_by_the_bytes_that_its_workers_sent() -> None:
    found = comparisons(read_records(EVIDENCE), best=True)
    first = next(c for c in found if c.title == "gpt-nano, 4 workers, 384 steps, batch 4")
    assert first.baseline.name == "AdamW-DDP"
    rows = {row["method"]: row for row in cells(first)}
    assert rows["AdamW-DDP"]["loss"].startswith("1.720") and rows["AdamW-DDP"]["fewer"] == "1.0x", "as in docs/results.md"
    runs = next(arm for arm in first.arms if arm.name == "DeMo 1-bit k=172").records
    sent, payload = (sum(run.figures[name] for run in runs) / len(runs) for name in ("sent", "payload"))
    assert sent == 3 * payload, "a gathered message goes to each of the 3 others"
    assert rows["DeMo 1-bit k=172"]["fewer"] == show_times(1.5 * 4 * 820_352 * 384 / sent)
    assert 45 < 1.5 * 4 * 820_352 * 384 / sent < 55


def test_an_arm_without_bytes_sent_has_no_ratio() -> None:
    record = made_record("a")
    old = replace(record, figures={name: value for name, value in record.figures.items() if name != "sent"})
    assert only([old]).arms[0].fewer is None


def test_later_evidence_is_drawn_over_steps_too() -> None:
    found = comparisons(read_records(EVIDENCE), best=True)
    first = next(c for c in found if c.title == "gpt-nano, 4 workers, 384 steps, batch 4")
    assert [d.name for d in drawings(first, speeds=SPEEDS, latency=("0ms", 0.0))] == ["loss-bytes"]
    drawn = [c for c in found if all(r.curve for arm in c.arms for r in arm.records)]
    assert drawn, "later rows have curves, though without a time"
    names = ["loss-bytes", "loss-steps", "bytes-rounds"]
    assert all([d.name for d in drawings(c, speeds=SPEEDS, latency=("0ms", 0.0))] == names for c in drawn)


def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers() -> None:
    for width, there, gone in ((140, ["waiting"], []), (80, ["loss", "fewer", "120 steps, simulated"], ["waiting"])):
        told = StringIO()
        show([only(made_comparison())], Console(file=told, width=width))
        assert max(map(len, told.getvalue().splitlines())) <= width and "┓" in told.getvalue()
        assert all(name in told.getvalue() for name in ["1.717 ±0.011", "164x", *there])
        assert not any(name in told.getvalue() for name in [*gone, "…"])
    told = StringIO()
    show([only([made_record("a"), made_record("b", place="lab 1mbit")])], Console(file=told, width=80))
    assert "lab 1mbit" in told.getvalue() and "120 steps, " not in told.getvalue(), "two places: a column says which"


# --- Curves --------------------------------------------------------------------------------------------------------------


def test_smoothing_has_no_bias_but_at_the_end_and_no_noise_but_at_the_start() -> None:
    line = np.array([3 - 0.01 * i for i in range(200)])
    assert smoothed(list(line))[:-5] == pytest.approx(line[:-5])
    assert smoothed(list(line))[-1] == pytest.approx(line[-6:].mean())
    noisy = [1 + (-1) ** i for i in range(200)]
    assert np.abs(smoothed(noisy)[5:] - 1).max() < 0.2
    assert smoothed([5.0]) == pytest.approx([5.0])


def test_curves_are_means_over_seeds_with_the_least_and_the_largest() -> None:
    records = [made_record("a", seed=0, steps=20), made_record("a", seed=1, steps=20)]
    higher = tuple(replace(p, loss=q.loss + 1) for q, p in zip(*(r.curve for r in records), strict=True))
    arm = only([records[0], replace(records[1], curve=higher)]).arms[0]
    curves = curves_of(arm, steps)
    assert (curves.x[0], curves.x[-1]) == (1, 20)
    assert curves.high - curves.low == pytest.approx(np.ones(20))
    assert curves.mean == pytest.approx((curves.high + curves.low) / 2)
    x, y = evaluations(arm, steps)
    assert x == [20.0]
    assert y == [pytest.approx(np.mean([r.curve[-1].val_loss for r in arm.records]))]


def test_the_bytes_of_rounds() -> None:
    record = made_record("a", every=30, message=4000, steps=90)
    assert round_sizes(record) == [(30, 6000.0), (60, 6000.0), (90, 6000.0)], "2 * 4000 * 3/4 each"


# --- Figures -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> list[Any]:
    return drawings(only(made_comparison()), speeds=SPEEDS, latency=("20ms", 0.02))


def test_all_figures_are_there_and_say_what_they_show(drawn: list[Any]) -> None:
    assert [d.name for d in drawn] == ["loss-bytes", "loss-steps", "loss-time", "bytes-rounds", "drift"]
    assert [title for title, _ in drawn[2].panels] == ["at 10mbit", "at 100mbit", "at 1gbit"]
    assert "ddp 1.7" in drawn[0].says and "591 MB" in drawn[0].says
    assert "20ms per message" in drawn[2].caption
    assert "noloco" in drawn[4].says and "ddp" not in drawn[4].says


def test_a_figure_has_the_names_of_colours_and_ids_of_its_own(drawn: list[Any]) -> None:
    both = [inline_svg(drawn[1], panel=0, prefix=prefix) for prefix in ("one", "two")]
    for svg, prefix in zip(both, ("one", "two"), strict=True):
        assert svg.startswith("<svg viewBox=") and 'role="img"' in svg and 'aria-label="Training loss' in svg
        assert not re.search(r"#[0-9a-f]{6}\b", svg), "no colour of its own: dark and light are the page's"
        for name in ("--ink", "--faint", "--grid", "--arm-0", "--arm-4"):
            assert f"var({name})" in svg
        ids, used = re.findall(r' id="([^"]*)"', svg), re.findall(r'(?:href="#|url\(#)([^")]*)', svg)
        assert len(ids) == len(set(ids)) and set(used) <= set(ids) and used
        assert all(name.startswith(prefix) for name in ids)
        assert {'data-arm="0"', 'data-arm="4"'} <= set(re.findall(r'data-arm="\d"', svg))
        assert "<style" not in svg and "http" not in svg.replace("http://www.w3.org/", "")
    assert not set(re.findall(r' id="([^"]*)"', both[0])) & set(re.findall(r' id="([^"]*)"', both[1]))


def test_a_name_is_text_in_a_figure_whatever_it_is(tmp_path: Path) -> None:
    records = [made_record(name) for name in (NASTY, r"$\frac{", "漢字 🙂", "x" * 300)]
    figure = drawings(only(records), speeds=SPEEDS, latency=("0ms", 0.0))[0]
    svg = inline_svg(figure, panel=0, prefix="f")
    assert "<script" not in svg and "&lt;script" in svg
    assert r"$\frac{" in svg and "漢字 🙂" in svg
    assert "x" * 100 not in re.sub(r'aria-label="[^"]*"', "", svg), "a long name is cut"
    with (tmp_path / "f.svg").open("wb") as file:
        save_svg(figure, file, panel=0)


@pytest.mark.slow  # draws many figures
def test_a_run_that_diverged_or_sent_nothing_does_not_break_the_figures(tmp_path: Path) -> None:
    bad = made_record("bad", steps=40)
    bad = replace(
        bad,
        figures=bad.figures | {"val_loss": math.nan},
        curve=tuple(replace(p, loss=math.nan if p.step > 20 else 1e9) for p in bad.curve),
    )
    silent = made_record("silent", every=1000, steps=40)
    for records in ([bad, silent], [made_record("one", steps=1)], [bad, made_record("ok", steps=40)]):
        write_report(comparisons(records), tmp_path / "report.html")
    assert "diverged" in (tmp_path / "report.html").read_text()


def test_the_colours_can_be_told_from_the_ground() -> None:
    css = (Path(__file__).parents[2] / "src/thinwire/tools/report/page.css").read_text()
    light, dark = re.findall(r"--card: (#\w{6})", css)
    assert len(LIGHT_ARMS) == len(DARK_ARMS) == len(set(LIGHT_ARMS)) == len(set(DARK_ARMS))
    for ground, colours in ((light, LIGHT_ARMS), (dark, DARK_ARMS)):
        for colour in colours:
            assert _contrast(ground, colour) >= 4.5, colour
    for words, ground in zip(re.findall(r"--faint: (#\w{6})", css), re.findall(r"--ground: (#\w{6})", css), strict=True):
        assert _contrast(ground, words) >= 4.5


def _contrast(one: str, other: str) -> float:
    """As WCAG 2 has it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# --- The command ---------------------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the records of a comparison."""
    for record in made_comparison():
        append_record(tmp_path / "records.jsonl", record)
    return tmp_path


def test_the_command_shows_the_table_and_writes_page_and_pngs(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, str(kept), "--title", "My <title>", "--bandwidth", "1mbit, 5gbit", "--latency", "20ms")
    assert (code, err) == (0, "")
    assert "│ DeMo small" in out and "DeMo small: 164 times fewer bytes than ddp" in out
    assert f"report: {kept / 'report.html'}" in out
    page = (kept / "report.html").read_text()
    assert "<title>My &lt;title&gt;</title>" in page and "at 1mbit" in page and "at 5gbit" in page
    pictures = sorted((kept / "report-figures").iterdir())
    assert [p.name for p in pictures] == ["bytes-rounds.png", "drift.png", "loss-bytes.png", "loss-steps.png", "loss-time.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def test_a_pipe_has_all_columns_unless_it_says_how_wide_it_is(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compare` shows the same table."""
    widths = {}
    for columns in ("", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = call(capsys, str(kept), "--no-html")
        widths[columns] = max(len(line.rstrip()) for line in out.splitlines() if line.startswith(("┏", "│")))
    assert widths["80"] <= 80 < widths[""]


def test_no_html_writes_nothing(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, str(kept / "records.jsonl"), "--no-html")
    assert (code, "report:" in out) == (0, False)
    assert [p.name for p in kept.iterdir()] == ["records.jsonl"]


@pytest.mark.slow  # draws many figures
def test_several_jobs_are_several_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in (made_record("a"), made_record("b", steps=60)):
        append_record(tmp_path / "some.jsonl", record)
    out = tmp_path / "both.html"
    assert call(capsys, str(tmp_path / "some.jsonl"), "--out", str(out))[0] == 0
    assert out.read_text().count("<h2>") == 2
    assert {p.name for p in (tmp_path / "both-figures").iterdir()} >= {"1-loss-bytes.png", "2-loss-bytes.png"}
    call(capsys, str(tmp_path / "some.jsonl"), "--out", str(out), "--together")
    assert out.read_text().count("<section") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the runs to report"),
        (["no/such/run"], "no run, folder of runs or file of records at no/such/run"),
        (["{kept}", "--baseline", "fat"], "no method is called 'fat', to be the baseline: choose from 'ddp', 'diloco --H 30'"),
        (
            ["{kept}", "--bandwidth", "10mbit,fast"],
            "bandwidth must look like 100mbit, 1.5gbit or inf and be above zero",
        ),
        (["{kept}", "--latency", "soon"], "a duration must look like 20ms"),
        (["{kept}", "--out", "{kept}/records.jsonl/report.html"], "cannot write the report"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, *(argument.format(kept=kept) for argument in arguments))
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_a_folder_without_a_finished_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("[run")
    code, out, err = call(capsys, str(tmp_path))
    assert (code, err) == (2, f"thinwire: error: there is no run with any step in {tmp_path}\n")
    assert "left out: " in out


# --- Runs that are not finished ------------------------------------------------------------------------------------------


def _described(folder: Path, *, steps: int, to: int, evaluated: tuple[int, ...] = (10,)) -> Path:
    """A run folder of `steps` steps that has come as far as `to`."""
    folder.mkdir(exist_ok=True)
    write_run_toml(folder / "run.toml", RunConfig(algorithm="diloco", workers=2, steps=steps), place="processes")
    same = {"seconds": 1.0, "items": 8, "sent": 100, "received": 100, "payload": 100, "rounds": 1, "waiting": 0.5}
    lines = [{"step": n, "loss": 2 / n, **same, **({"val_loss": 3 / n} if n in evaluated else {})} for n in range(1, to + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _finish(folder: Path, *, steps: int) -> None:
    _described(folder, steps=steps, to=steps, evaluated=(steps,))
    figures = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    (folder / "summary.json").write_text(json.dumps({**figures, "workers": 2, "shards": 1, "parameters": 1000}))


def test_an_interrupted_run_is_reported_as_far_as_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _described(tmp_path / "stopped", steps=40, to=17)
    _described(tmp_path / "early", steps=40, to=3)
    _finish(tmp_path / "done", steps=40)
    code, out, _ = call(capsys, str(tmp_path))
    assert code == 0
    words = " ".join(out.split())
    assert "diloco (unfinished, step 17 of 40): interrupted or still running; shown as far as it went" in words
    assert "0.300" in out, "its last evaluation"
    assert "diverged" not in out, "what was not evaluated yet has not diverged"
    page = (tmp_path / "report.html").read_text()
    assert "unfinished, step 17 of 40" in page and UNFINISHED in page
    assert 'http-equiv="refresh"' not in page


@pytest.mark.slow  # draws many figures
def test_a_report_is_refreshed_until_all_runs_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    to_come: list[Callable[[], object]] = [partial(_described, folder, steps=40, to=step) for step in (5, 17)]
    to_come.append(partial(_finish, folder, steps=40))
    pages: list[str] = []

    def sleep(seconds: float) -> None:
        assert seconds == 2
        if (tmp_path / "report.html").exists():
            pages.append((tmp_path / "report.html").read_text())
        to_come.pop(0)()

    monkeypatch.setattr("thinwire.tools.commands.report.sleep", sleep)
    code, out, _ = call(capsys, str(tmp_path), "--watch", "--every", "2s")
    assert (code, to_come) == (0, [])
    assert f"no step yet in {tmp_path}" in out
    assert ["step 5 of 40" in pages[0], "step 17 of 40" in pages[1]] == [True, True]
    assert all('<meta http-equiv="refresh" content="2">' in page for page in pages)
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text(), "nothing changes any more"


@pytest.mark.slow  # draws many figures; the refreshing above ends too
def test_watching_ends_with_ctrl_c_and_where_nothing_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    assert not watch(lambda: "step 17", every=10, patience=60, sleep=waited.append)
    assert waited == [10] * 7
    states = iter(["step 1", "step 2", "step 3", None])
    assert watch(lambda: next(states), every=10, patience=10, sleep=waited.append)

    _described(tmp_path / "run", steps=40, to=17)

    def press_ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thinwire.tools.commands.report.sleep", press_ctrl_c)
    assert call(capsys, str(tmp_path), "--watch")[0] == 0
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()
    assert call(capsys, str(tmp_path), "--watch", "--every", "1h")[0] == 2


def test_without_matplotlib_it_says_what_to_install(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def no_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest)

    for name in [n for n in sys.modules if n.startswith(("thinwire.tools.report.", "matplotlib"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    code, out, err = call(capsys, str(kept))
    assert (code, err) == (2, "thinwire: error: a report needs matplotlib: pip install -e '.[report]'\n"), (
        "the tests run in a clone"
    )
    assert "│ DeMo small" in out, "the table is there all the same"
    assert issubclass(MissingDependency, ConfigError)


# --- The page ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with three seeds, an arm of a nasty name, and one that was run in the lab."""
    records = made_comparison()
    records += [made_record(NASTY, seed=seed, loss=1.8, message=300_000, settings={"H": 3}) for seed in range(3)]
    records += [made_record("in the lab", seed=seed, loss=1.81, message=200_000, place="lab 100mbit") for seed in range(2)]
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(comparisons(records), path)
    return path


def test_the_page_escapes_names_and_says_where_runs_were_made(page: Path) -> None:
    text = page.read_text()
    assert text.count("<script>") == 1, "its own"
    assert html.escape(NASTY) in text, "braces of a template in a name mean nothing"
    assert "lab 100mbit" in text and ">simulated<" in text
    assert "Simulated runs compute what real workers would" in text
    assert "thinwire sim --algorithm ddp --task gpt-nano --workers 4 --steps 120 --seed 0" in text
    assert "torch 2.13.0" in text and "2 cores" in text and "2026-11-16" in text
    assert not re.search(r'(?:src|href)="(?!#)', text) and "@import" not in text and "url(http" not in text


@pytest.mark.slow
def test_ten_arms_of_three_seeds_are_a_small_file(tmp_path: Path) -> None:
    records = [
        made_record(f"arm {i}", seed=seed, loss=1.7 + 0.02 * i, message=10**6 >> i, every=i + 1, steps=2000, drift=0.1)
        for i in range(10)
        for seed in range(3)
    ]
    records = [replace(record, curve=thinned(record.curve)) for record in records]
    write_report(comparisons(records), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2_000_000


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="the report in a browser: apt-get install chromium")


@needs_chromium
def test_in_a_browser_the_page_opens_without_errors_and_asks_for_nothing_else(page: Path) -> None:
    with Browser() as browser:
        browser.open(page)
        assert browser.run("document.title") == "gpt-nano, 4 workers, 120 steps"
        assert browser.problems == []
        assert browser.requests == [page.resolve().as_uri()]
        figures = browser.run("[...document.querySelectorAll('figure')].map(f => f.dataset.figure)")
        assert figures == ["loss-bytes", "loss-steps", "loss-time", "bytes-rounds", "drift"]
        sizes = json.loads(
            browser.run(
                "JSON.stringify([...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
                " s.querySelectorAll('path').length, s.getAttribute('aria-label').length]))"
            )
        )
        assert len(sizes) == 7, "three panels of time"
        assert all(width > 250 and paths > 10 and label > 30 for width, paths, label in sizes)
        doubled = "(ids => ids.length - new Set(ids).size)([...document.querySelectorAll('[id]')].map(e => e.id))"
        assert browser.run(doubled) == 0
        assert browser.run("typeof alert === 'function' && document.querySelectorAll('main script').length") == 0
        names = browser.run("[...document.querySelectorAll('tbody th')].map(c => c.textContent)")
        assert NASTY in names, "shown as text"


@pytest.mark.slow  # a browser; the page opens and fits in quick ones
@needs_chromium
def test_in_a_browser_the_table_sorts_by_click_and_by_keyboard(page: Path) -> None:
    column = "(name => [...document.querySelectorAll('thead th')].findIndex(h => h.textContent === name))"
    order = "[...document.querySelectorAll('tbody tr')].map(r => r.cells[0].textContent)"
    with Browser() as browser:
        browser.open(page)
        first = browser.run(order)
        press = f"document.querySelectorAll('thead button')[{column}('bytes sent')].click()"
        browser.run(press)
        up = browser.run(order)
        assert up != first and up[0] == "DeMo small" and up[-1] == "ddp"
        assert browser.run(f"document.querySelectorAll('thead th')[{column}('bytes sent')].ariaSort") == "ascending"
        browser.run(press)
        assert browser.run(order)[0] == "ddp"
        assert browser.run("document.querySelectorAll('[aria-sort=descending]').length") == 1

        browser.run(f"document.querySelectorAll('thead button')[{column}('p')].focus()")
        browser.press("Enter", 13, "\r")
        assert browser.run(order)[-1] == "ddp", "who has no p is last"
        browser.press("Enter", 13, "\r")
        assert browser.run(order)[-1] == "ddp", "this way round, too"
        browser.run(f"document.querySelectorAll('thead button')[{column}('method')].focus()")
        browser.press(" ", 32, " ")
        assert browser.run(order) == sorted(first, key=str.lower)
        assert browser.problems == []


@pytest.mark.slow  # a browser; the page opens and fits in quick ones
@needs_chromium
def test_in_a_browser_an_arm_can_be_hidden_and_lit(page: Path) -> None:
    with Browser() as browser:
        browser.open(page)
        parts = "[...document.querySelectorAll('.figures [data-arm=\"1\"]')]"
        shown = f"{parts}.filter(part => part.getBoundingClientRect().width).length"
        before = browser.run(shown)
        assert before > 5
        browser.run("document.querySelector('.key [data-of=\"1\"]').click()")
        assert browser.run(shown) == 0
        assert browser.run("document.querySelector('.key [data-of=\"1\"]').ariaPressed") == "false"
        browser.run("document.querySelector('.key [data-of=\"1\"]').click()")
        assert browser.run(shown) == before
        browser.run("document.querySelector('tbody tr').dispatchEvent(new PointerEvent('pointerenter'))")
        assert browser.run("document.querySelectorAll('svg.muted').length") == 7
        assert browser.run("document.querySelectorAll('.arm.lit').length") > 5
        browser.run("document.querySelector('tbody tr').dispatchEvent(new PointerEvent('pointerleave'))")
        assert browser.run("document.querySelectorAll('.muted, .lit').length") == 0


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(360, True), (360, False), (1280, True)])
def test_in_a_browser_it_fits_a_phone_and_follows_the_colours_of_the_system(width: int, dark: bool, page: Path) -> None:
    with Browser(width=width, dark=dark) as browser:
        browser.open(page)
        assert browser.run("document.documentElement.scrollWidth") <= width, "only the table scrolls, in its own box"
        if width == 360:
            assert browser.run("(t => t.scrollWidth > t.clientWidth)(document.querySelector('.table'))") is True
        tops = browser.run("[...document.querySelectorAll('figure')].map(f => Math.round(f.getBoundingClientRect().left))")
        assert (len(set(tops)) == 1) is (width == 360), "one below the other on a phone"
        ground = _channels(browser.run("getComputedStyle(document.body).backgroundColor"))
        text = "document.querySelector('figure text')"
        words = _channels(browser.run(f"getComputedStyle({text}).fill"))
        paths = "[...document.querySelectorAll('[data-figure=loss-steps] .arm path')]"
        strokes = browser.run(f"{paths}.map(path => getComputedStyle(path).stroke)")
        line = _channels(next(stroke for stroke in strokes if stroke != "none"))
        assert (sum(ground) < 150) is dark
        assert abs(sum(words) - sum(ground)) > 400 and abs(sum(line) - sum(ground)) > 150
        pixels = browser.run(f"{text}.getBoundingClientRect().height")
        assert pixels >= 8, "the words in a figure can be read"
        assert browser.problems == []


def _channels(colour: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", colour)[:3]]
