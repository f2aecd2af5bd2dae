"""A run folder on a disk that is full: the result is told, nothing that was saved is lost, and the exit code says so."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT
from thinwire import SoloLink, checkpoint
from thinwire.tools.config import RunConfig
from thinwire.tools.display import MetricsFile
from thinwire.tools.train import Progress, Trainer

SETTINGS = ["--algorithm", "diloco", "--task", "quadratic", "--H", "8", "--lr", "0.05", "--eval-every", "100"]
SETTINGS += ["--workers", "2", "--checkpoint-every", "20"]


def _train(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_run(small_disk: Path) -> None:
    out = small_disk / "run"
    done = _train(*SETTINGS, "--steps", 120, "--out", out)  # metrics and checkpoints take more
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "validation loss" in done.stdout, "the result is told"
    assert "after 120 steps on 2 workers" in done.stdout
    assert "the run ended after 120 steps as shown above, but could not be saved whole: metrics.jsonl: No space left" in said
    assert "Traceback" not in said, said
    kept = checkpoint.finished(out / "checkpoints")
    assert kept, "what was saved before is there"
    assert not list((out / "checkpoints").glob(".writing-*")), "and what could not be finished is not"
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[10])["step"] == 11

    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    resumed = _train("--resume", "--out", out)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resumed from step {checkpoint.step_of(kept[-1])}" in resumed.stdout
    assert json.loads((out / "summary.json").read_text())["step"] == 120


@pytest.mark.slow
def test_a_disk_that_is_full_before_the_run_goes_on(small_disk: Path) -> None:
    out = small_disk / "run"
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)  # enough for the first run
    first = _train(*SETTINGS, "--steps", 40, "--out", out)
    assert first.returncode == 0, first.stdout + first.stderr
    saved = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))
    done = _train("--resume", "--out", out, "--steps", 80)
    assert done.returncode == 2
    assert "cannot write the run folder" in done.stderr
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == saved


def test_metrics_that_cannot_be_written_do_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    point = Progress(step=1, loss=0.5, seconds=1.0, items=1, sent=0, received=0, payload=0, rounds=0, waiting=0.0)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics(point)
    metrics.close()
    metrics._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 (every write fails as on a full disk)
    metrics(point)
    metrics(point)
    metrics.close()
    assert metrics.problem == "metrics.jsonl: No space left on device"
    assert [r.getMessage() for r in caplog.records].count(
        "cannot write metrics.jsonl any more (No space left on device); training goes on without it"
    ) == 1


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(task="quadratic", steps=8, eval_every=0, device="cpu", settings={"H": 2})

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    trainer = Trainer(config, SoloLink())
    with monkeypatch.context() as patch:
        patch.setattr("thinwire.checkpoint.api.publish", full)
        trainer.run(lambda _: None, checkpoints=tmp_path, checkpoint_every=2)
    assert trainer.step == 8
    assert "could not write the checkpoint of step 8: OSError: [Errno 28] No space left on device" in trainer.unsaved
    assert sum("training goes on" in r.getMessage() for r in caplog.records) == 4
    assert checkpoint.finished(tmp_path) == []
