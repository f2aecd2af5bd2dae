"""Whole runs on real processes: the main job, resume after a kill, torchrun, shards, and the simulator beside them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.processes import LIMIT, until
from thinwire.tools.cli import main
from thinwire.tools.config import RunConfig

ENDLESS = 10_000_000  # steps of a run that a test stops
QUICK = ["--task", "quadratic", "--steps", "40", "--H", "8", "--lr", "0.05", "--eval-every", "20"]


def thinwire(*arguments: object, launcher: tuple[str, ...] = (), check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(launcher or ("-m",)), "thinwire", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def simulated(*arguments: object) -> None:
    """A run in the simulator, in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["sim", *map(str, arguments)])
    assert ended.value.code == 0


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command says that ends before it starts anything; in this process, since a new one takes seconds to come up."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    assert ended.value.code == 2
    said = capfd.readouterr().err.removeprefix("starting 2 workers ...\n")  # which comes before torch is imported
    assert said.count("\n") == 1, said
    return said


def test_the_main_job_writes_everything_a_person_needs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    done = thinwire("train", "--algorithm", "diloco", *QUICK, "--workers", 2, "--checkpoint-every", 10, "--out", out)
    assert "validation loss" in done.stdout
    assert "fewer bytes than sending every gradient" in done.stdout
    assert "\x1b" not in done.stdout, "no terminal, no escape codes"
    record = tomllib.loads((out / "run.toml").read_text())
    assert record["run"]["workers"] == 2
    assert record["settings"]["H"] == 8
    assert record["versions"]["torch"] == torch.__version__
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert [line["step"] for line in lines if "val_loss" in line] == [20, 40]
    assert {"loss", "seconds", "items", "sent", "received", "rounds", "waiting"} <= lines[0].keys()
    assert lines[-1]["rounds"] == 5
    assert summary(out)["val_loss"] < lines[19]["val_loss"]
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["step-00000030", "step-00000040"]

    again = refused(capfd, "train", "--algorithm", "diloco", *QUICK, "--workers", 2, "--out", out)
    assert "already holds this run: add --resume" in again
    other = refused(capfd, "train", "--algorithm", "diloco", *QUICK, "--outer-lr", "0.5", "--out", out)
    assert "holds a run of another config: outer_lr was 0.7, now it is 0.5" in other
    finished = refused(capfd, "train", "--resume", "--out", out)
    assert "is finished: it has all 40 steps; give a larger --steps" in finished


@pytest.mark.slow  # kills are also in tests/test_kill_storm.py, names of the killed in tests/links/test_torch.py
@pytest.mark.parametrize("algorithm", ["diloco", "ddp"])
def test_a_killed_worker_is_named_and_resume_ends_as_if_nothing_had_happened(algorithm: str, tmp_path: Path) -> None:
    """The run that is broken would not end by itself, so that the kill comes before its end, however late."""
    settings = ["--algorithm", algorithm, "--batch", "1", "--eval-every", "0", "--lr-final", "1"]
    settings += ["--task", "quadratic" if algorithm == "diloco" else "gpt-nano"]
    settings += ["--workers", "3", "--checkpoint-every", "6"] + (["--H", "5"] if algorithm == "diloco" else [])
    straight, broken = tmp_path / "straight", tmp_path / "broken"

    endless = ["--steps", str(ENDLESS), "--timeout", f"{10 * LIMIT:g}s"]
    command = [sys.executable, "-m", "thinwire", "train", *settings, *endless, "--out", str(broken)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            until(lambda: list(broken.glob("checkpoints/step-*")) or job.poll() is not None, "the first checkpoint")
            os.kill(_worker_process(job.pid, rank=1), signal.SIGKILL)
            _, errors = job.communicate(timeout=LIMIT)  # the others do not wait for the lost one until the timeout
        finally:
            job.kill()
    assert job.returncode == 1
    for rank in (0, 2):
        assert f"rank {rank}, " in errors
    assert errors.count("lost rank 1 (no heartbeat)") == 2, errors
    assert "Traceback" not in errors
    assert "worker 1 was killed by SIGKILL; the last checkpoint is of step" in errors
    assert f"thinwire train --resume --out {broken}" in errors

    steps = max(int(p.name.removeprefix("step-")) for p in broken.glob("checkpoints/step-*")) + 15
    resumed = thinwire("train", "--resume", "--steps", steps, "--out", broken)
    assert f"resumed from step {steps - 15}" in resumed.stdout
    thinwire("train", *settings, "--steps", steps, "--out", straight)
    assert summary(broken)["val_loss"] == summary(straight)["val_loss"], "bit for bit"
    assert [line["loss"] for line in metrics(broken)] == [line["loss"] for line in metrics(straight)]
    assert summary(broken)["sent"] == summary(straight)["sent"], "the handshake of the second start is counted apart"


def _worker_process(launcher: int, rank: int) -> int:
    """The process id of the launcher's worker with this rank, from /proc."""
    for children in Path(f"/proc/{launcher}/task").glob("*/children"):
        for child in children.read_text().split():
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return int(child)
    raise AssertionError(f"no worker with rank {rank}")


def _workers_once_training(job: subprocess.Popen, folder: Path) -> list[int]:
    """The process ids of two workers, as soon as the run writes metrics."""
    until(lambda: (folder / "metrics.jsonl").exists() or job.poll() is not None, "the first metrics")
    return [_worker_process(job.pid, rank) for rank in range(2)]


@pytest.mark.slow  # starts a job; what the command says is tested in tests/tools/test_cli.py
def test_ctrl_c_ends_all_workers_and_says_so(tmp_path: Path) -> None:
    endless = ["--steps", str(ENDLESS), "--workers", "2", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "thinwire", "train", *endless]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            workers = _workers_once_training(job, tmp_path / "run")
            job.send_signal(signal.SIGINT)
            _, errors = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
    assert job.returncode == 130
    first, last = errors.splitlines()
    assert first == "starting 2 workers ..."
    assert last.startswith(f"thinwire: stopped by Ctrl-C; the run is in {tmp_path / 'run'}; "), "which is no error"
    assert last.endswith(f": thinwire train --resume --out {tmp_path / 'run'}")
    assert not any(_is_running(worker) for worker in workers)


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGKILL"],
)
@pytest.mark.slow  # Ctrl-C above goes the same way
def test_no_worker_outlives_its_launcher(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    endless = ["--steps", str(ENDLESS), "--workers", "2", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "thinwire", "train", *endless]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            workers = _workers_once_training(job, tmp_path / "run")
            job.send_signal(sent)
            assert job.wait(timeout=LIMIT) == code
        finally:
            job.kill()
    until(lambda: not any(_is_running(worker) for worker in workers), "the end of all workers")


def _is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sim", "train"])
def test_training_goes_on_when_nobody_reads_its_output(command: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = f"{command} --algorithm diloco {' '.join(QUICK)} --eval-every 1 --workers 2 --out {out}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m thinwire {arguments} | head -1"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "diloco quadratic x2  step 1/40" in done.stdout
    assert summary(out)["step"] == 40


@pytest.mark.slow
def test_under_torchrun_it_joins_the_job(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    joined = tmp_path / "joined"
    thinwire("train", "--algorithm", "local-adam", *QUICK, "--out", joined, launcher=launcher)
    simulated("--algorithm", "local-adam", *QUICK, "--workers", 2, "--out", tmp_path / "simulated")
    assert summary(joined)["workers"] == 2
    assert summary(joined)["val_loss"] == pytest.approx(summary(tmp_path / "simulated")["val_loss"], abs=1e-6)


@pytest.mark.slow
def test_under_torchrun_it_ends_like_a_run_of_its_own_and_is_not_overwritten(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    joined, started = tmp_path / "joined", tmp_path / "started"
    thinwire("train", "--algorithm", "local-adam", *QUICK, "--out", joined, launcher=launcher)
    thinwire("train", "--algorithm", "local-adam", *QUICK, "--out", started)
    assert summary(joined)["val_loss"] == summary(started)["val_loss"]
    again = thinwire("train", "--algorithm", "local-adam", *QUICK, "--out", joined, launcher=launcher, check=False)
    assert again.returncode != 0
    assert "already holds this run" in again.stderr


@pytest.mark.slow
def test_resume_with_another_number_of_workers_says_what_was_re_initialised(tmp_path: Path) -> None:
    out = tmp_path / "run"
    thinwire("train", "--algorithm", "diloco", *QUICK, "--workers", 2, "--checkpoint-every", 20, "--out", out)
    done = thinwire("train", "--resume", "--out", out, "--workers", 3, "--steps", 80)
    assert "resumed from step 40" in done.stdout
    assert "re-initialised, since it was each worker's own: the inner optimizer's state" in " ".join(done.stdout.split())
    assert summary(out)["workers"] == 3
    assert summary(out)["step"] == 80


@pytest.mark.slow
def test_sharded_workers_end_like_whole_ones(tmp_path: Path) -> None:
    settings = ["--algorithm", "diloco", "--batch", 2, "--steps", 12, "--H", 4, "--eval-every", 5]
    simulated(*settings, "--workers", 2, "--out", tmp_path / "whole")
    thinwire("train", *settings, "--workers", 2, "--shards", 2, "--checkpoint-every", 6, "--out", tmp_path / "sharded")
    whole, sharded = summary(tmp_path / "whole"), summary(tmp_path / "sharded")
    assert sharded["val_loss"] == pytest.approx(whole["val_loss"], abs=1e-5)
    assert sharded["sent"] == pytest.approx(whole["sent"] / 2, rel=0.01), "each process sends its shard only"


@pytest.mark.slow
def test_ddp_and_data_parallel_and_the_simulator_agree(tmp_path: Path) -> None:
    settings = ["--task", "gpt-nano", "--batch", "1", "--steps", "10", "--workers", "2", "--eval-every", "0"]
    losses = {}
    for command, algorithm in (("train", "ddp"), ("train", "data-parallel"), ("sim", "ddp")):
        out = tmp_path / f"{command}-{algorithm}"
        thinwire(command, "--algorithm", algorithm, *settings, "--out", out)
        losses[command, algorithm] = summary(out)["val_loss"]
    first = losses["train", "ddp"]
    assert losses == {key: pytest.approx(first, abs=1e-6) for key in losses}


def test_sim_reports_the_time_that_the_network_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = ["--bandwidth", "1mbit", "--latency", "20ms", "--step-time", "10ms"]
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--algorithm", "ddp", "--task", "quadratic", "--steps", "10", *network, "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    figures = summary(tmp_path / "run")
    P, T, M = figures["parameters"], 3, 2
    message = 4 * (P + T + M)
    digest = 32  # the handshake before the first round
    per_step = 2 * (M - 1) * 0.02 + 2 * message * (M - 1) / M * 8 / 1e6
    handshake = (M - 1) * 0.02 + digest * 8 / 1e6
    assert figures["simulated_seconds"] == pytest.approx(10 * (0.01 + per_step) + handshake, rel=1e-6)
    assert "simulated time" in capsys.readouterr().out
    assert figures["simulated"] is True


def test_sim_waits_for_the_straggler(tmp_path: Path) -> None:
    flags = "--algorithm ddp --task quadratic --workers 3 --steps 10 --eval-every 0 --step-time 10ms,10ms,50ms"
    with pytest.raises(SystemExit):
        main(["sim", *flags.split(), "--out", str(tmp_path / "run")])
    figures = summary(tmp_path / "run")
    assert figures["simulated_seconds"] == pytest.approx(10 * 0.05)
    assert figures["waiting"] == pytest.approx(10 * (0.05 - 0.01)), "worker 0 waits for the slow one at every step"


def test_sim_is_the_same_bit_for_bit_from_run_to_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with pytest.raises(SystemExit):
            main(
                ["sim", "--algorithm", "diloco", *QUICK, "--workers", "5", "--step-time", "1ms", "--out", str(tmp_path / name)]
            )
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


@pytest.mark.slow  # trains; shares of images are tested in tests/tasks
def test_non_iid_images_on_the_cnn_learn(tmp_path: Path) -> None:
    flags = "--algorithm diloco --task cnn-digits --workers 3 --non-iid 0.5 --steps 120 --H 10 --eval-every 0 --step-time 1ms"
    with pytest.raises(SystemExit) as ended:
        main(["sim", *flags.split(), "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    assert summary(tmp_path / "run")["val_accuracy"] > 0.8


def test_the_learning_rate_is_a_pure_function_of_the_step() -> None:
    config = RunConfig(lr=1.0, lr_warmup=10, lr_final=0.1, steps=110)
    assert config.lr_at(1) == pytest.approx(0.1)
    assert config.lr_at(10) == 1.0
    assert config.lr_at(60) == pytest.approx(0.55)
    assert config.lr_at(110) == pytest.approx(0.1)
    assert RunConfig(lr=1.0, lr_warmup=0, lr_final=1.0).lr_at(250) == 1.0
