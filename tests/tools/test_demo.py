"""`thinwire demo`: what it runs, what it says of it, and what it does where something is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import webbrowser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.tools.test_lab import real
from thinwire.errors import MissingDependency
from thinwire.tools.cli import main
from thinwire.tools.compare import Run
from thinwire.tools.config import RunConfig
from thinwire.tools.demo import PERIOD, SLICE, STEPS, runs, show
from thinwire.tools.lab import JobFailed
from thinwire.tools.records import Point, Record
from thinwire.tools.runners import LabRunner, ProcessRunner, Runner, SimulatedRunner

SENT = {"ddp": 1_706_496, "demo": 13_642, "coarse-diloco": 68_260}  # bytes per step
PACE = {"ddp": 0.3, "demo": 0.1, "coarse-diloco": 0.08}  # seconds per step on the thin link


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["demo", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def one_line(text: str) -> str:
    return " ".join(text.split())


def ended(run: Run, runner: Runner) -> Record:
    """A run as if it had been made: every step of the same length, the first one twice as long."""
    config = run.config
    pace = PACE[config.algorithm] if isinstance(runner, LabRunner) else 0.05
    sent = SENT[config.algorithm]
    curve = tuple(
        Point(step=step, loss=2.0, seconds=(step + 1) * pace, waiting=0.0, sent=sent * step, payload=sent * step, rounds=step)
        for step in range(1, config.steps + 1)
    )
    figures = {
        **{"val_loss": {"ddp": 2.0, "demo": 2.01, "coarse-diloco": 2.1}[config.algorithm], "sent": sent * config.steps},
        **{
            "workers": 2,
            "shards": 1,
            "parameters": 426_624,
            "step": config.steps,
            "seconds": curve[-1].seconds,
            "waiting": 0.0,
        },
    }
    about: dict[str, Any] = {"command": "", "versions": {}, "cores": 2, "date": ""}
    return Record(arm=run.arm, config=config, place=runner.name, figures=figures, curve=curve, **about)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Run, Runner]]:
    """No training takes place and no page is drawn; here is what would have been run, and where."""
    asked: list[tuple[Run, Runner]] = []

    def run_one(run: Run, runner: Runner, _: Console) -> Record:
        asked.append((run, runner))
        return ended(run, runner)

    monkeypatch.setattr(runs, "run_one", run_one)
    monkeypatch.setattr(runs, "check_machine", lambda: None)
    monkeypatch.setattr(show, "write_report", lambda *_, **__: None)
    return asked


# --- What is run ---------------------------------------------------------------------------------------------------------


def test_three_methods_do_the_same_job_and_then_a_slice_of_it(
    made: list[tuple[Run, Runner]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = call(capsys, "--out", tmp_path / "demo")
    assert code == 0
    assert [run.config.algorithm for run, _ in made] == ["ddp", "demo", "coarse-diloco"] * 2
    trained, timed = made[:3], made[3:]
    assert all(isinstance(runner, ProcessRunner) for _, runner in trained)
    assert [runner.name for _, runner in timed] == ["lab 100mbit"] * 3
    assert {run.config.steps for run, _ in trained} == {STEPS} and {run.config.steps for run, _ in timed} == {SLICE}
    same = {(run.config.task, run.config.batch, run.config.seed, run.config.lr_final) for run, _ in made}
    assert same == {("gpt-micro", 2, 0, 0.0)}, "all decay alike"
    assert made[2][0].config.settings["H"] == PERIOD and SLICE % PERIOD == 0, "a slice has whole periods"
    assert out.startswith("thinwire demo: starting, torch is being imported ...\n")
    for word in ("500 steps on 2 workers", "every 25 steps", "Then 50 steps of each on a link of 100mbit. About 3 minutes"):
        assert word in out
    assert "Training 3 of 3\nDiLoCo, ternary, H=25: starting 2 workers ...\n" in out
    assert re.search(r"│ DeMo, 1-bit +│ +2.010 \(\+0.5%\) │ +6.82 MB │ +125x │ +50 ms │ +100 ms │", out)
    assert "behind links that the kernel holds to 100mbit" in one_line(out)
    said = "DeMo, 1-bit against torch DDP: 125x fewer bytes, validation loss +0.5%, 3.0x as fast at 100mbit."
    assert said in one_line(out) and "say little" not in out
    assert out.endswith(f"runs: {tmp_path / 'demo'}\nreport: {tmp_path / 'demo' / 'report.html'}\n")
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80


def test_a_short_demo_says_nothing_that_is_not_so(
    made: list[tuple[Run, Runner]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = call(capsys, "--steps", 12, "--workers", 3, "--bandwidth", "10mbit", "--out", tmp_path / "demo")
    assert code == 0
    assert "12 steps on 3 workers of this machine" in out and "3 minutes" not in out
    assert "DiLoCo, ternary, H=12  its weights' change, coarsely, once, at the end" in out
    assert "Then 12 steps of each on a link of 10mbit." in out
    assert "The settings were chosen for 500 steps: after 12 the losses say little." in out
    assert [run.config.lr_warmup for run, _ in made] == [0] * 6
    assert call(capsys, "--steps", 1, "--out", tmp_path / "one")[0] == 0, "the first step is all there is"


def test_the_first_step_is_not_timed() -> None:
    record = ended(Run("x", RunConfig(algorithm="demo", steps=5), Path()), SimulatedRunner())
    assert runs.seconds_per_step(record.curve) == pytest.approx(0.05)
    assert runs.seconds_per_step(record.curve[:1]) == pytest.approx(0.1)


def test_it_really_trains_and_ends_with_a_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated = SimulatedRunner(step_time="10ms")  # the same training, without processes
    monkeypatch.setattr(ProcessRunner, "run", lambda _, folder, __: simulated.run(folder, Console(file=StringIO())))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, _ = call(capsys, "--steps", 2, "--out", tmp_path / "demo")
    assert code == 0
    assert "computed" in out
    assert "It could not be measured: network namespaces need root" in one_line(out)
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "DiLoCo, ternary, H=2" in page and "thinwire train --algorithm demo --task gpt-micro --workers 2 --steps 2" in page


@pytest.mark.slow
def test_the_settings_keep_the_demos_promise(tmp_path: Path) -> None:
    """In the simulator, which computes what real processes do: 2% of the loss at most for 50 times fewer bytes."""
    ddp, demo, _ = runs.arms_of(STEPS, 2)
    runner = SimulatedRunner(step_time="10ms")
    dense, thin = (runs._run([arm], tmp_path, runner, Console(file=StringIO()))[0] for arm in (ddp, demo))
    assert thin.loss < 1.02 * dense.loss
    assert dense.figures["sent"] > 50 * thin.figures["sent"]


@pytest.mark.slow
@real
def test_processes_behind_a_thin_link(tmp_path: Path) -> None:
    code = "import sys; from thinwire.tools.cli import main; main(sys.argv[1:])"
    words = ["demo", "--steps", "2", "--out", str(tmp_path / "demo"), "--bandwidth", "50mbit"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "behind links that the kernel holds to 50mbit" in one_line(done.stdout)
    places = [path.read_text() for path in (tmp_path / "demo" / "timed").glob("*/run.toml")]
    assert len(places) == 3 and all('place = "lab 50mbit"' in text for text in places)


# --- What may be missing, or go wrong --------------------------------------------------------------------------------------


def test_what_cannot_be_timed_is_computed_and_the_table_says_so(
    made: list[tuple[Run, Runner]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_one(run: Run, runner: Runner, _: Console) -> Record:
        if isinstance(runner, LabRunner):
            raise JobFailed("rank 1 of `python` was killed by SIGKILL; all ranks were ended")
        return ended(run, runner)

    monkeypatch.setattr(runs, "run_one", run_one)
    code, out, _ = call(capsys, "--out", tmp_path / "demo")
    assert code == 0
    assert "computed" in out and "measured │" not in out
    assert "It could not be measured: rank 1 of `python` was killed by SIGKILL" in one_line(out)
    # 1,706,496 bytes take 137 ms at 100 Mbit/s, and a step 50 ms
    assert re.search(r"│ torch DDP +│ +2.000 │ +853 MB │ +1x │ +50 ms │ +187 ms │", out)


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (0, "the demo was stopped by Ctrl-C before the first training had ended"),
        (2, "what was finished (torch DDP, DeMo, 1-bit) is in {out}: thinwire report {out}"),
    ],
)
def test_ctrl_c_names_what_was_finished(
    done: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Run] = []

    def run_one(run: Run, runner: Runner, _: Console) -> Record:
        if len(asked) == done:
            raise KeyboardInterrupt
        asked.append(run)
        return ended(run, runner)

    monkeypatch.setattr(runs, "run_one", run_one)
    code, out, err = call(capsys, "--out", tmp_path / "demo")
    assert code == 130 and "What is lost" not in out
    assert said.format(out=tmp_path / "demo") in err and "error" not in err


def test_without_matplotlib_there_is_a_table_and_a_sentence(
    made: list[tuple[Run, Runner]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_matplotlib(*_: object, **__: object) -> None:
        raise MissingDependency("a report needs matplotlib: pip install 'thinwire[report]'")

    monkeypatch.setattr(show, "write_report", no_matplotlib)
    code, out, _ = call(capsys, "--out", tmp_path / "demo")
    assert code == 0 and "│ torch DDP" in out
    assert one_line(out).endswith(
        f"no report: a report needs matplotlib: pip install 'thinwire[report]', then thinwire report {tmp_path / 'demo'}"
    )


@pytest.mark.parametrize(("display", "terminal", "flags"), [("", True, []), (":0", False, []), (":0", True, ["--no-open"])])
def test_the_page_opens_only_before_a_person(
    display: str,
    terminal: bool,
    flags: list[str],
    made: list[tuple[Run, Runner]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call(capsys, "--out", tmp_path / "seen")[0] == 0
    assert opened == [(tmp_path / "seen" / "report.html").as_uri()]
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert call(capsys, *flags, "--out", tmp_path / "unseen")[0] == 0
    assert len(opened) == 1


def test_it_says_that_it_starts_before_torch_is_imported() -> None:
    code = "import sys, thinwire.tools.commands.demo; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "steps must be a whole number of at least 1, got 0"),
        (["--workers", "1"], "workers must be a whole number of at least 2, got 1"),
        (["--out", "."], ". is not an empty folder: choose another --out"),
    ],
)
def test_what_is_wrong_is_said_at_once(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *flags)
    assert (code, out) == (2, "")
    assert message in err
