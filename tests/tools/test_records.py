"""Records: what is kept of a run, from its folder and back from a line; damaged ones are left out with a word."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.made_records import made_record
from thinwire.errors import ConfigError
from thinwire.tools.cli import main
from thinwire.tools.link_time import ran_on, record_on_link, seconds_on_link
from thinwire.tools.records import Point, Record, append_record, read_records, record_from, record_of, thinned, without_repeats

EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "records" / "evidence.jsonl"


def point(step: int, loss: float = 1.0, val_loss: float | None = None, **more: float) -> Point:
    totals = {"seconds": float(step), "waiting": 0.0, "sent": 10 * step, "payload": 10 * step, "rounds": step, **more}
    return Point(step=step, loss=loss, val_loss=val_loss, **totals)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished simulated run."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = "--task quadratic --workers 3 --steps 30 --H 10 --eval-every 10 --bandwidth 1mbit --latency 5ms --step-time 10ms"
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--algorithm", "diloco", *flags.split(), "--seed", "4", "--out", str(out)])
    assert ended.value.code == 0
    return out


# --- From a folder -------------------------------------------------------------------------------------------------------


def test_the_record_of_a_run_has_all_that_its_folder_says(run: Path) -> None:
    record = record_of(run)
    summary = json.loads((run / "summary.json").read_text())
    assert (record.arm, record.config.algorithm, record.config.seed, record.config.settings["H"]) == ("diloco", "diloco", 4, 10)
    assert record.place == "simulated 1mbit 5ms"
    assert record.figures == summary
    assert record.loss == summary["val_loss"]
    assert [p.step for p in record.curve] == list(range(1, 31))
    assert [p.step for p in record.curve if p.val_loss is not None] == [10, 20, 30]
    last = record.curve[-1]
    assert (last.sent, last.rounds, last.seconds) == (summary["sent"], 3, summary["seconds"])
    assert record.versions["torch"] and record.cores >= 1 and record.date.startswith("20")
    assert record_of(run, arm="mine", place="elsewhere").arm == "mine"
    assert record_of(run, arm="mine", place="elsewhere").place == "elsewhere"


def test_a_record_comes_back_from_its_line_as_it_was(run: Path, tmp_path: Path) -> None:
    record = replace(record_of(run), arm='<b>"quoted"\n')
    append_record(tmp_path / "some.jsonl", record)
    append_record(tmp_path / "some.jsonl", replace(record, arm="other"))
    assert len((tmp_path / "some.jsonl").read_text().splitlines()) == 2
    back, other = read_records(tmp_path / "some.jsonl")
    assert back == record
    assert other.arm == "other"


def test_what_is_no_number_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    record = made_record("a", steps=3)
    diverged = replace(record, figures=record.figures | {"val_loss": math.nan}, curve=(point(1, loss=math.inf), point(2)))
    append_record(tmp_path / "r.jsonl", diverged)
    line = (tmp_path / "r.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line, "JSON as everybody reads it"
    (back,) = read_records(tmp_path / "r.jsonl")
    assert math.isnan(back.loss) and math.isnan(back.curve[0].loss) and back.curve[1].loss == 1.0


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path, notes = tmp_path / "r.jsonl", []
    append_record(path, made_record("a"))
    path.write_text(path.read_text() + '{"format": 1, "arm": "b", "conf')  # no newline: killed while writing
    append_record(path, made_record("c"))
    assert [record.arm for record in read_records(path, note=notes.append)] == ["a", "c"]
    assert notes == [f"left out: line 2 of {path} is no JSON"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"format": 99}, "format 99, made by a newer thinwire"),
        ({"some": "thing"}, "no record of a run: KeyError 'command'"),
        ({"config": {"settings": {}}, "arm": "a"}, "no record of a run: KeyError 'command'"),
        ([1, 2], "no record of a run"),
    ],
)
def test_a_line_that_is_no_record_is_left_out_with_the_reason(row: object, why: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    notes: list[str] = []
    assert read_records(tmp_path / "r.jsonl", note=notes.append) == []
    assert len(notes) == 1 and why in notes[0]


# --- Thinning ------------------------------------------------------------------------------------------------------------


def test_a_short_curve_is_kept_as_it_is() -> None:
    points = [point(step, loss=float(step)) for step in range(1, 201)]
    assert thinned(points) == tuple(points)
    assert thinned([]) == ()


def test_a_long_curve_keeps_evaluations_the_end_and_mean_losses() -> None:
    points = [point(step, loss=float(step), val_loss=9.0 if step % 333 == 0 else None) for step in range(1, 5001)]
    kept = thinned(points)
    assert len(kept) <= 200
    assert [p.step for p in kept if p.val_loss is not None] == list(range(333, 5001, 333))
    assert kept[-1].step == 5000 and kept[-1].sent == 50_000
    before = 0
    for p in kept:
        assert p.loss == pytest.approx((before + 1 + p.step) / 2), "the mean over the steps since the point before"
        before = p.step
    assert max(b.step - a.step for a, b in itertools.pairwise(kept)) <= 28, "evenly"


def test_more_evaluations_than_points_are_all_kept() -> None:
    points = [point(step, val_loss=1.0) for step in range(1, 1001)]
    assert len(thinned(points)) == 1000


def test_an_unfinished_run_is_taken_as_far_as_it_went_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    stopped = shutil.copytree(run, tmp_path / "stopped")
    (stopped / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (stopped / "metrics.jsonl").write_text("\n".join(lines[:17]) + '\n{"step": 18, "lo')  # cut short by a kill
    with pytest.raises(ConfigError, match=r"stopped is not finished: it has 17 of 30 steps and no summary\.json"):
        record_of(stopped)
    record = record_of(stopped, unfinished=True)
    assert record.arm == "diloco (unfinished, step 17 of 30)"
    assert record.unfinished and not record_of(run).unfinished
    assert (record.figures["step"], record.figures["workers"], len(record.curve)) == (17, 3, 17)
    assert record.figures["sent"] == json.loads(lines[16])["sent"]
    (tmp_path / "stopped" / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="stopped has no step yet"):
        record_of(stopped, unfinished=True)


# --- Folders of runs -----------------------------------------------------------------------------------------------------


def test_a_folder_is_read_with_all_runs_below_it_and_what_is_damaged_is_said(run: Path, tmp_path: Path) -> None:
    for name in ("deep/er/good", "unfinished", "no-json", "half", "no-toml", "no-metrics", "gone-on", "short"):
        shutil.copytree(run, tmp_path / name)
    (tmp_path / "unfinished/summary.json").unlink()
    (tmp_path / "no-json/summary.json").write_text("{")
    (tmp_path / "half/summary.json").write_text('{"val_loss": 1.0}')
    (tmp_path / "no-toml/run.toml").write_text("[run")
    (tmp_path / "no-metrics/metrics.jsonl").unlink()
    described = (run / "run.toml").read_text()
    (tmp_path / "gone-on/run.toml").write_text(described.replace("steps = 30", "steps = 40"))
    cut = (run / "metrics.jsonl").read_text()
    (tmp_path / "short/metrics.jsonl").write_text(cut[:-20])  # the last line was cut by a kill: the rest is good
    with (tmp_path / "short/run.toml").open("a") as about:
        about.write('\narm = "short"\n')
    notes: list[str] = []
    records = read_records(tmp_path, note=notes.append)
    assert sorted(record.arm for record in records) == ["diloco", "short"]
    assert len(next(record for record in records if record.arm == "short").curve) == 29
    assert len(notes) == 6
    assert any("gone-on is not finished: it has 30 of 40 steps" in note for note in notes)
    for name, why in (
        ("unfinished", "30 of 30 steps and no summary.json"),
        ("half", "has no parameters"),
        ("no-toml", "not a run.toml"),
    ):
        assert any(name in note and why in note for note in notes), (name, notes)


def test_a_compare_folder_counts_each_run_once_even_if_its_folder_is_gone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "there")
    append_record(tmp_path / "records.jsonl", record_of(tmp_path / "there"))
    gone = made_record("gone")
    append_record(tmp_path / "records.jsonl", gone)
    notes: list[str] = []
    assert sorted(record.arm for record in read_records(tmp_path, note=notes.append)) == ["diloco", "gone"]
    assert notes == []


def test_the_same_run_twice_is_one_sample() -> None:
    notes: list[str] = []
    first, again, other = made_record("a"), replace(made_record("a"), date="later"), made_record("a", seed=1)
    assert without_repeats([first, again, other], note=notes.append) == [first, other]
    assert notes == ["left out: a, seed 0 is there twice; the first counts"]


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run, folder of runs or file of records at"):
        read_records(tmp_path / "nothing")


# --- Older rows ----------------------------------------------------------------------------------------------------------


def test_rows_of_the_older_evidence_are_records_without_curves() -> None:
    notes: list[str] = []
    records = read_records(EVIDENCE, note=notes.append)
    assert notes == [] and len(records) == len(EVIDENCE.read_text().splitlines())
    row, record = json.loads(EVIDENCE.read_text().splitlines()[0]), records[0]
    assert record.curve == () and record.place == "simulated"
    assert (record.arm, record.loss, record.command) == (row["arm"], row["loss"], row["command"])
    assert (record.config.lr, record.config.steps, record.config.workers) == (row["lr"], row["steps"], 4)
    assert record.figure("payload") == row["payload"]
    assert record.figure("sent") == row["sent"] and record.figure("seconds") is None
    warm = next(r for r in records if r.config.warm_start)
    assert warm.config.warm_lr is not None, "settings of the run are in `run`"
    drawn = next(r for r in records if r.curve)
    assert drawn.curve[-1].step == drawn.config.steps and drawn.curve[-1].payload == drawn.figure("payload")
    assert all(math.isnan(p.seconds) for p in drawn.curve), "the time of a simulation on a busy machine is nobody's time"


def test_an_old_row_with_something_missing_is_refused() -> None:
    row = json.loads(EVIDENCE.read_text().splitlines()[0])
    del row["loss"]
    assert math.isnan(record_from(row).loss)
    del row["settings"]
    with pytest.raises(ConfigError, match="no record of a run: KeyError 'settings'"):
        record_from(row)


# --- Time on another link ------------------------------------------------------------------------------------------------


def test_time_on_a_link_is_computing_plus_bytes_plus_hops() -> None:
    # 3 workers all-reduce 600 bytes at every step: each sends 2 * 600 * 2/3 = 800 in 4 hops.
    points = [point(s, seconds=0.5 * s, waiting=0.2 * s, sent=800 * s, payload=600 * s, rounds=s) for s in (1, 2, 3)]
    per_step = 0.3 + 8 * 800 / 64_000 + 4 * 0.01
    thin = {"workers": 3, "bandwidth": 64_000, "latency": 0.01}
    assert seconds_on_link(points, **thin) == pytest.approx([per_step, 2 * per_step, 3 * per_step])
    assert seconds_on_link(points, workers=3, bandwidth=math.inf) == pytest.approx([0.3, 0.6, 0.9])
    assert seconds_on_link(points[-1:], **thin) == pytest.approx([3 * per_step])
    assert seconds_on_link([], workers=3, bandwidth=1.0) == []


def test_a_gather_has_half_the_hops_of_an_all_reduce() -> None:
    gathered = [point(1, seconds=1.0, sent=3 * 500, payload=500, rounds=1)]  # 4 workers: (M - 1) N
    assert seconds_on_link(gathered, workers=4, bandwidth=math.inf, latency=0.1) == pytest.approx([1.0 + 3 * 0.1])
    reduced = [point(1, seconds=1.0, sent=750, payload=500, rounds=1)]
    assert seconds_on_link(reduced, workers=4, bandwidth=math.inf, latency=0.1) == pytest.approx([1.0 + 6 * 0.1])
    swapped = [point(1, seconds=1.0, sent=500, payload=500, rounds=1)]
    assert seconds_on_link(swapped, workers=4, bandwidth=math.inf, latency=0.1) == pytest.approx([1.0 + 0.1])


def test_streaming_hides_the_wire_behind_tau_steps() -> None:
    # A round every second step; steps take 1 s each, a message 1.5 s.
    points = [point(s, seconds=float(s), sent=1500 * (s // 2), payload=1500 * (s // 2), rounds=s // 2) for s in range(1, 9)]
    on = lambda tau: seconds_on_link(points, workers=2, bandwidth=8000, tau=tau)[-1]  # noqa: E731
    assert on(0) == pytest.approx(8 + 4 * 1.5)
    assert on(1) == pytest.approx(8 + 4 * 0.5), "one step of 1 s hides 1 s of each message"
    assert on(2) == pytest.approx(8), "all of it is hidden"
    slow = seconds_on_link(points, workers=2, bandwidth=1000, tau=2)[-1]  # 12 s per message, one after the other
    assert slow == pytest.approx(4 * 12, abs=2), "one wire: what is hidden cannot overlap with itself"


def test_the_time_of_the_simulator_comes_out_where_it_ran_without_a_wire(tmp_path: Path) -> None:
    """The same run simulated on a thin link, and computed for it from a run on an unlimited one."""
    flags = ["sim", "--task", "quadratic", "--workers", "3", "--steps", "60", "--eval-every", "0", "--step-time", "10ms"]
    thin = ["--bandwidth", "1mbit", "--latency", "5ms"]
    for arm in (["--algorithm", "ddp"], ["--algorithm", "streaming-diloco", "--H", "4", "--fragments", "2", "--tau", "1"]):
        for name, network in (("thin", thin), ("free", [])):
            with pytest.raises(SystemExit):
                main([*flags, *arm, *network, "--out", str(tmp_path / arm[1] / name)])
        simulated, free = record_of(tmp_path / arm[1] / "thin"), record_of(tmp_path / arm[1] / "free")
        computed = record_on_link(free, bandwidth=1e6, latency=0.005)[-1]
        # The handshake's latency, and of streaming the last messages, which have no steps to hide behind.
        assert computed == pytest.approx(simulated.figures["seconds"], rel=0.03), arm


def test_a_run_on_such_a_link_is_shown_as_it_was() -> None:
    lab = made_record("a", place="lab 100mbit")
    assert ran_on(lab, bandwidth=100e6) and not ran_on(lab, bandwidth=10e6) and not ran_on(lab, bandwidth=100e6, latency=0.02)
    assert record_on_link(lab, bandwidth=100e6) == [p.seconds for p in lab.curve]
    assert record_on_link(lab, bandwidth=10e6)[-1] > lab.curve[-1].seconds
    assert ran_on(made_record("a", place="simulated 10mbit 20ms"), bandwidth=10e6, latency=0.02)
    for place in ("processes", "lab 100mbit down 20mbit", "simulated 100mbit 0ms down 20mbit", "my own cluster"):
        assert not ran_on(made_record("a", place=place), bandwidth=100e6)


def test_records_are_equal_only_if_the_run_is(run: Path) -> None:
    record: Record = record_of(run)
    assert record.key == replace(record, date="later", figures={}).key
    assert record.key != replace(record, config=replace(record.config, seed=5)).key
    assert record.key != replace(record, place="processes").key
