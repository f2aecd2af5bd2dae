"""`thinwire compare`: arms from words, all checked before any runs; what is finished is not run again, what fails is said."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tools.test_lab import real
from thinwire.errors import ConfigError
from thinwire.tools import runners
from thinwire.tools.cli import main
from thinwire.tools.command_flags import CompareFlags
from thinwire.tools.commands.compare import parse_arms, parse_seeds
from thinwire.tools.compare import Run, run_all, run_folders
from thinwire.tools.config import RunConfig
from thinwire.tools.flags import parse_run
from thinwire.tools.records import read_records
from thinwire.tools.runners import LabRunner, ProcessRunner, SimulatedRunner, simulated_runner
from thinwire.tools.words import words_of

QUICK = ["--task", "quadratic", "--workers", "2", "--steps", "12", "--eval-every", "4", "--lr", "0.05"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arguments])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


# --- Arms ----------------------------------------------------------------------------------------------------------------


def test_an_arm_is_a_method_with_flags_of_its_own_which_win() -> None:
    words = ["ddp", "diloco --H 16 --lr 0.1", "thin  one = demo --wire 'DCT(64) >> TopK(22) >> Sign()'"]
    arms, flags = parse_arms(words, ["--lr", "0.2", "--steps", "50", "--seeds", "3", "--sim"])
    assert list(arms) == ["ddp", "diloco --H 16 --lr 0.1", "thin one"]
    assert [config.algorithm for (config,) in arms.values()] == ["ddp", "diloco", "demo"]
    assert [config.lr for (config,) in arms.values()] == [0.2, 0.1, 0.2]
    assert arms["diloco --H 16 --lr 0.1"][0].settings["H"] == 16
    assert arms["thin one"][0].wire == "DCT(64) >> TopK(22) >> Sign()"
    assert all(config.steps == 50 for (config,) in arms.values())
    assert (flags.seeds, flags.sim, flags.lab) == ("3", True, False)


def test_an_equals_sign_of_a_flag_names_nothing() -> None:
    arms, _ = parse_arms(["diloco --H=4", "diloco --wire 'fp32' --H 5"], [])
    assert [config.settings["H"] for (config,) in arms.values()] == [4, 5]
    assert next(iter(arms)) == "diloco --H=4"


def test_seeds() -> None:
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("0,5,7") == [0, 5, 7]
    for wrong in ("0", "-1", "two", "1,1", "", "1.5"):
        with pytest.raises(ConfigError, match="seeds must be a number of seeds"):
            parse_seeds(wrong)


def test_every_arm_has_a_folder_of_its_own() -> None:
    names = ["ddp", "diloco --H 32", "diloco -- h 32", "diloco h 32 2", "../../etc", "<script>", "ünïcode", "???"]
    folders = run_folders(names)
    assert folders[:3] == ["ddp", "diloco-h-32", "diloco-h-32-2"]
    assert len(set(folders)) == len(names)
    assert all(folder and "/" not in folder and not folder.startswith(".") for folder in folders)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the methods to compare before all flags"),
        (["--steps", "3", "ddp"], "name the methods to compare before all flags"),
        (["ddp", "ddp"], "two methods are called 'ddp': give one a name of its own"),
        (["ddp", "dilocoo"], "in 'dilocoo': unknown algorithm 'dilocoo' (did you mean 'diloco'?)"),
        (["ddp", "diloco --H 0"], "in 'diloco --H 0': H must be a whole number of at least 1, got 0"),
        (["ddp", "diloco --outer-lr inf"], "in 'diloco --outer-lr inf': outer_lr must be above zero and finite"),
        (["ddp", "demo --wire 'TopK(8'"], "in "),
        (["ddp", "demo --wire 'open"], 'cannot read "demo --wire \'open": No closing quotation'),
        (["ddp", " = demo"], "name a method with flags of its own"),
        (["ddp", "x = "], "name a method with flags of its own"),
        (["ddp", "--algorithm", "demo"], "--algorithm is not for all methods of a comparison"),
        (["ddp", "--seed", "3"], "--seed is not for all methods of a comparison: give --seeds"),
        (["ddp", "diloco --seed 3"], "seeds are those of --seeds"),
        (["ddp", "diloco --jobs 2"], "'diloco --jobs 2' has a flag that is for the whole comparison"),
        (["diloco --sim", "ddp"], "'diloco --sim' has a flag that is for the whole comparison"),
        (["ddp", "--seeds", "none"], "seeds must be a number of seeds"),
        (["ddp", "--bandwidth", "1mbit"], "--bandwidth 1mbit needs --sim or --lab"),
        (["ddp", "--step-time", "1ms"], "--step-time 1ms needs --sim"),
        (["ddp", "--lab", "--bandwidth", "1mbit", "--latency", "1ms"], "--latency 1ms needs --sim"),
        (["ddp", "--jobs", "2"], "--jobs 2 needs --sim: real processes would take each other's cores and wire"),
        (["ddp", "--jobs", "0", "--sim"], "jobs must be a whole number of at least 1, got 0"),
        (["ddp", "--sim", "--lab"], "choose --sim or --lab, not both"),
        (["ddp", "--lab"], "--lab needs the --bandwidth of its wires"),
        (["ddp", "--sim", "--bandwidth", "fast"], "bandwidth must look like 100mbit"),
        (["ddp", "--sim", "--bandwidth", "1mbit,2mbit,3mbit"], "in 'ddp': bandwidth lists 3 workers, but there are 2"),
        (["ddp", "diloco --shards 2", "--sim"], "the simulator does not shard models, got --shards 2"),
        (
            ["ddp", "d = diloco --shards 2", "--lab", "--bandwidth", "1mbit"],
            "a worker in the lab is one process, got --shards 2",
        ),
        (["ddp --wire bf16"], "which ignores --wire bf16: use --algorithm data-parallel"),
        (["ddp", "--timeout", "0s"], "timeout must be above zero seconds, got '0s'"),
        (["ddp", "--checkpoint-every", "-1"], "checkpoint-every must be a whole number of at least 0, got -1"),
    ],
)
def test_a_mistake_in_any_arm_is_one_line_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("thinwire: error: ") and err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_a_setting_of_one_method_among_the_flags_of_all_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "ddp", "diloco", "--H", "32")
    assert code == 2
    assert "--H" in err
    assert "in 'ddp': ddp exchanges at every step and has no --H" in err
    assert "a setting of one method is given with it, such as 'diloco --H 32'" in err


def test_help_shows_how_arms_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert 'thinwire compare ddp demo "diloco --H 32"' in " ".join(out.split())
    assert "--seeds" in out and "--jobs" not in out
    assert "--jobs" in call(capsys, "--help-all")[1]


def test_not_under_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, err = call(capsys, "ddp")
    assert (code, err) == (2, "thinwire: error: compare starts its workers itself: call it without torchrun\n")


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm diloco --H 7 --no-nesterov --workers 3",
        "--algorithm demo --wire DCT(64)>>TopK(8) --betas 0.8 0.9",
        "--algorithm sparseloco --batch 2",
        "--algorithm mt-dao --qh-betas 0.9 0.999 --qh-omegas 0.5 0.4 --warm-start 5 --warm-lr 0.01",
        "--algorithm des-loc --H 8 --K-u 16 --K-v 32 --lr-final 1.0",
        "--algorithm alone --non-iid 0.5 --device cpu",
    ],
)
def test_the_words_of_a_run_give_the_same_run(flags: str) -> None:
    config, _ = parse_run("train", flags.split(), CompareFlags)
    assert parse_run("train", words_of(config), CompareFlags)[0] == config


# --- Running -------------------------------------------------------------------------------------------------------------


def test_a_comparison_records_every_run_and_runs_none_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "both"
    command = ["ddp", "far = diloco --H 4", *QUICK, "--sim", "--bandwidth", "1mbit", "--latency", "2ms", "--out", str(out)]
    code, printed, err = call(capsys, *command, "--seeds", "2")
    assert (code, err) == (0, "")
    begun = [line.partition("  ")[0] for line in printed.splitlines() if line.startswith("[")]
    assert begun == ["[1/4] ddp, seed 0", "[2/4] far, seed 0", "[3/4] ddp, seed 1", "[4/4] far, seed 1"]
    assert "[4/4] far, seed 1  about " in printed
    assert "far: " in printed and "times fewer bytes than ddp" in printed
    assert f"figures: thinwire report {out}" in printed
    folders = ["ddp-seed0", "ddp-seed1", "far-seed0", "far-seed1"]
    assert sorted(p.name for p in out.iterdir()) == [*folders, "records.jsonl"]
    records = read_records(out / "records.jsonl")
    assert [(r.arm, r.config.seed) for r in records] == [("ddp", 0), ("far", 0), ("ddp", 1), ("far", 1)]
    assert {r.place for r in records} == {"simulated 1mbit 2ms"}
    assert all(len(r.curve) == 12 for r in records)
    about = tomllib.loads((out / "far-seed1" / "run.toml").read_text())["about"]
    assert about["command"].startswith("sim --bandwidth 1mbit --latency 2ms --algorithm diloco --task quadratic --workers 2")
    assert simulated_runner(out / "far-seed1") == SimulatedRunner(bandwidth="1mbit", latency="2ms")

    before = (out / "ddp-seed0" / "summary.json").stat().st_mtime_ns
    (out / "far-seed1" / "summary.json").unlink()  # as if it had been killed
    code, printed, _ = call(capsys, *command, "--seeds", "3")
    assert code == 0
    assert "6 runs in" in printed and "3 of 6 are there already" in printed
    begun = [line.partition("  ")[0] for line in printed.splitlines() if line.startswith("[")]
    assert begun == ["[4/6] far, seed 1", "[5/6] ddp, seed 2", "[6/6] far, seed 2"]
    assert (out / "ddp-seed0" / "summary.json").stat().st_mtime_ns == before
    assert len(read_records(out)) == 6


def test_runs_of_a_file_of_records_are_not_made_again_and_others_are_added_to_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "records" / "mine.jsonl"
    command = ["ddp", "far = diloco --H 4", *QUICK, "--sim", "--step-time", "0s", "--tune", "0.05,0.1", "--records", str(kept)]
    code, first, _ = call(capsys, *command, "--seeds", "1", "--out", str(tmp_path / "a"))
    assert code == 0 and "[1/" in first
    tuning = kept.with_name("mine-tuning.jsonl")
    lines, tuned = kept.read_text(), tuning.read_text()
    assert len(lines.splitlines()) == 2 and {r.config.val_part for r in read_records(tuning)} == {"tuning"}

    code, again, _ = call(capsys, *command, "--seeds", "1", "--out", str(tmp_path / "b"))  # another machine, so to speak
    assert code == 0
    assert "[1/" not in again, "all is recorded"
    assert (kept.read_text(), tuning.read_text()) == (lines, tuned)
    assert [r.loss for r in read_records(tmp_path / "b")] == [r.loss for r in read_records(kept)]

    kept.write_text(re.sub(r'"outer_momentum": [0-9.]+, ', "", lines))  # as if they were made before there was this setting
    assert kept.read_text() != lines
    code, again, _ = call(capsys, *command, "--seeds", "1", "--out", str(tmp_path / "b2"))
    assert code == 0 and "[1/" not in again
    other = [words.replace("--H 4", "--H 4 --outer-momentum 0.3") for words in command]
    code, again, _ = call(capsys, *other, "--seeds", "1", "--out", str(tmp_path / "b3"))
    assert code == 0 and "[2/2] far, seed 0" in again
    kept.write_text(lines)

    code, more, _ = call(capsys, *command, "--seeds", "2", "--out", str(tmp_path / "c"))
    assert code == 0
    assert "2 of 4 are there already" in more and "[3/4] ddp, seed 1" in more
    assert [r.config.seed for r in read_records(kept)] == [0, 0, 1, 1]


def test_records_must_be_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = call(capsys, "ddp", *QUICK, "--sim", "--records", str(tmp_path), "--out", str(tmp_path / "c"))
    assert code == 2
    assert f"records must be a file such as records.jsonl, {tmp_path} is a folder" in err.replace("\n", " ")


def test_the_command_in_the_record_repeats_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call(capsys, "diloco --H 4", *QUICK, "--sim", "--step-time", "1ms", "--seeds", "3,", "--out", str(tmp_path / "c"))
    (record,) = read_records(tmp_path / "c")
    words = shlex.split(record.command)
    assert words[0] == "thinwire"
    with pytest.raises(SystemExit):
        main([*words[1:], "--out", str(tmp_path / "again")])
    (again,) = read_records(tmp_path / "again")
    assert (again.loss, again.curve, again.config) == (record.loss, record.curve, record.config)


def test_a_finished_run_whose_record_was_lost_is_recorded_without_running(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["ddp", *QUICK, "--sim", "--out", str(tmp_path / "c")]
    call(capsys, *command)
    (tmp_path / "c" / "records.jsonl").unlink()
    code, printed, _ = call(capsys, *command)
    assert (code, "1 run in" in printed, "[1/1]" in printed) == (0, True, False)
    assert len(read_records(tmp_path / "c" / "records.jsonl")) == 1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["--lr", "0.06"], "holds a run of another config: lr was 0.05, now it is 0.06; choose another --out"),
        (["--steps", "13"], "holds a run of steps 12, now it is steps 13; choose another --out"),
        (["--bandwidth", "2mbit"], "holds a run that was simulated, now it is simulated 2mbit 0ms, 2mbit"),
        (["--step-time", "2ms"], "holds a run that was simulated, now it is simulated, 2ms"),
    ],
)
def test_a_folder_of_another_comparison_is_refused(
    other: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    call(capsys, "ddp", *QUICK, "--sim", "--out", str(tmp_path / "c"))
    code, _, err = call(capsys, "new = ddp", "ddp", *QUICK, "--sim", *other, "--out", str(tmp_path / "c"))
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "c" / "new-seed0").exists(), "said before anything runs"
    _, _, err = call(capsys, "DDP = ddp", *QUICK, "--sim", "--out", str(tmp_path / "c"))
    assert "ddp-seed0 holds a run of 'ddp', not of 'DDP'" in err


class _Broken:
    """A runner with which the second run fails."""

    def __init__(self, error: BaseException):
        self.error, self.calls, self.inside = error, 0, SimulatedRunner()
        self.name, self.about = self.inside.name, {}

    def command(self, config: RunConfig) -> list[str]:
        return self.inside.command(config)

    def check(self, config: RunConfig) -> None: ...

    def run(self, folder: Path, console: Console) -> None:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        self.inside.run(folder, console)


def _three_runs(out: Path) -> list[Run]:
    config = RunConfig(algorithm="ddp", task="quadratic", workers=2, steps=3, eval_every=0)
    return [Run("ddp", replace(config, seed=seed), out / f"ddp-seed{seed}") for seed in range(3)]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ConfigError("bad luck"), "bad luck"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory (see "),
        (SystemExit(2), "its workers refused the settings"),
    ],
)
def test_a_run_that_fails_does_not_keep_the_others_from_running(error: BaseException, why: str, tmp_path: Path) -> None:
    runner: Any = _Broken(error)
    with open(os.devnull, "w") as nobody:
        failures = run_all(_three_runs(tmp_path), runner, tmp_path, jobs=1, console=Console(file=nobody)).failures
    assert [str(failure.run) for failure in failures] == ["ddp, seed 1"]
    assert failures[0].why.startswith(why)
    assert [record.config.seed for record in read_records(tmp_path / "records.jsonl")] == [0, 2]
    if isinstance(error, RuntimeError):
        assert "out of memory" in (tmp_path / "ddp-seed1" / "error.txt").read_text(), "with its traceback"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_ends_the_whole_comparison(error: BaseException, tmp_path: Path) -> None:
    runner: Any = _Broken(error)
    with open(os.devnull, "w") as nobody, pytest.raises(type(error)):
        run_all(_three_runs(tmp_path), runner, tmp_path, jobs=1, console=Console(file=nobody))
    assert [record.config.seed for record in read_records(tmp_path / "records.jsonl")] == [0]


def test_the_exit_code_says_that_an_arm_failed_and_the_table_has_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = runners.simulate

    def fails_for_diloco(config: RunConfig, *arguments: Any, **more: Any) -> Any:
        if config.algorithm == "diloco":
            raise ConfigError("no such luck")
        return simulate(config, *arguments, **more)

    monkeypatch.setattr(runners, "simulate", fails_for_diloco)
    code, out, _ = call(capsys, "ddp", "diloco --H 4", *QUICK, "--sim", "--out", str(tmp_path / "c"))
    assert code == 1
    assert out.count("failed: diloco --H 4, seed 0: no such luck") == 2, "when it happens, and at the end"
    assert "│ ddp" in out and "│ diloco" not in out


@pytest.mark.slow
def test_several_simulated_runs_at_once_give_what_one_at_a_time_gives_and_failures_are_said(tmp_path: Path) -> None:
    runner = SimulatedRunner(step_time="1ms")
    good, *_ = _three_runs(tmp_path / "two")
    bad = Run("bad", replace(good.config, task="gpt-nano", data="/no/such/text"), tmp_path / "two" / "bad-seed0")
    told = io.StringIO()
    failures = run_all([bad, good], runner, tmp_path / "two", jobs=2, console=Console(file=told, width=200)).failures
    assert [failure.run for failure in failures] == [bad]
    assert "/no/such/text" in failures[0].why and "Traceback" not in failures[0].why
    assert "done: ddp, seed 0, validation loss" in told.getvalue()
    assert [record.arm for record in read_records(tmp_path / "two" / "records.jsonl")] == ["ddp"]
    assert not (good.folder / "error.txt").exists()

    alone, *_ = _three_runs(tmp_path / "one")
    assert run_all([alone], runner, tmp_path / "one", jobs=1, console=Console(file=told)).failures == []
    assert (alone.folder / "metrics.jsonl").read_text() == (good.folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_real_processes_go_on_from_a_checkpoint_after_ctrl_c(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "c"
    monkeypatch.setattr("thinwire.tools.commands.compare.new_folder", lambda _: str(out))
    flags = "--workers 2 --batch 1 --steps 40 --eval-every 0 --checkpoint-every 8"
    command = ["diloco --H 5", *flags.split()]
    ended = threading.Event()

    def press_ctrl_c() -> None:
        while not list(out.glob("*/checkpoints/step-*")):
            if ended.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_ctrl_c)
    presser.start()
    try:
        code, printed, errors = call(capfd, *command)
    finally:
        ended.set()
        presser.join()
    assert code == 130
    command_again = f"thinwire compare 'diloco --H 5' {flags} --out {out}"
    assert errors == f"thinwire: stopped by Ctrl-C; the runs are in {out}; go on with: {command_again}\n"
    assert not (out / "diloco-h-5-seed0" / "summary.json").exists()

    code, printed, _ = call(capfd, *command, "--out", str(out))
    assert code == 0
    assert "resumed from step" in printed
    (record,) = read_records(out)
    assert (record.place, record.figures["step"], len(record.curve)) == ("processes", 40, 40)
    assert not (out / "diloco-h-5-seed0" / "checkpoints").exists(), "a finished run needs none"


# --- Places --------------------------------------------------------------------------------------------------------------


def test_how_runners_are_called_and_repeated() -> None:
    config = RunConfig(workers=3)
    real = ProcessRunner(checkpoint_every=5, timeout=1.0)
    assert (real.name, real.command(config)) == ("processes", ["train"])
    lab = LabRunner(bandwidth="100mbit,10mbit,1mbit", down=None, checkpoint_every=5, timeout=1.0)
    assert lab.name == "lab 100mbit,10mbit,1mbit"
    assert shlex.join(lab.command(config)) == "lab run --workers 3 --bandwidth 100mbit:10mbit:1mbit -- thinwire train"
    assert LabRunner(bandwidth="1mbit", down="2mbit", checkpoint_every=5, timeout=1.0).name == "lab 1mbit down 2mbit"
    assert (SimulatedRunner().name, SimulatedRunner().command(config), SimulatedRunner().about) == ("simulated", ["sim"], {})
    assert SimulatedRunner(latency="20ms", step_time="1ms").name == "simulated inf 20ms"
    assert SimulatedRunner(bandwidth="1mbit", down="5mbit").name == "simulated 1mbit 0ms down 5mbit"


def test_a_lab_that_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for rate, told in (("1mbit", "network namespaces need root"), ("1kbit", "in 'ddp': the lab shapes to")):
        code, _, err = call(capsys, "ddp", "--lab", "--bandwidth", rate, *QUICK, "--out", str(tmp_path / "c"))
        assert code == 2 and told in err, err
        assert not (tmp_path / "c").exists()


@pytest.mark.slow
@real
def test_a_comparison_in_the_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c"
    code, _, err = call(capsys, "ddp", "--lab", "--bandwidth", "1mbit", *QUICK, "--out", str(out))
    assert (code, err) == (0, "")
    (record,) = read_records(out / "records.jsonl")
    assert record.place == "lab 1mbit"
    wire = 8 * record.figures["sent"] / 1e6
    assert record.figures["waiting"] > 0.5 * wire, "the wire is really thin"
    assert record.command.startswith("thinwire lab run --workers 2 --bandwidth 1mbit -- thinwire train --algorithm ddp")
