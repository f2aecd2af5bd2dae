"""Runs whose numbers are lost: a clear error on all workers, an exit code that says so, and the last good checkpoint stays."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import snapshot
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import Link, World, checkpoint
from thinwire.algorithms import found
from thinwire.errors import TrainingDiverged
from thinwire.links import SoloLink
from thinwire.tasks.quadratic import QuadraticTask
from thinwire.tools.cli import main
from thinwire.tools.config import RunConfig, presets
from thinwire.tools.train import Progress, Trainer

NAMES = sorted({*presets(), *found()})
QUICK = ["--task", "quadratic", "--workers", "2", "--steps", "24"]


class Scaled(QuadraticTask):
    """The quadratic task, with the loss of some workers times a number from some step on."""

    def __init__(self, factor: float, *, first: int, last: int = 10**9, workers: int, bad: tuple[int, ...] | None = None):
        super().__init__("quadratic", seed=0, workers=workers, batch=None, non_iid=None)
        self.factor, self.first, self.last, self.bad = factor, first, last, bad
        self.worker = self.step = 0

    def batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        self.worker, self.step = worker, step
        return super().batch(worker, step)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(model, batch) * (self.factor if self.hit else 1)

    @property
    def hit(self) -> bool:
        return self.first <= self.step <= self.last and (self.bad is None or self.worker in self.bad)


class Poisoned(Scaled):
    """The quadratic task, with parameters that are times a number before the loss is computed."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.hit:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(self.factor)
        return QuadraticTask.loss(self, model, batch)


def config_of(algorithm: str, **more: object) -> RunConfig:
    settings = {"algorithm": algorithm, "task": "quadratic", "steps": 40, "lr": 0.05, "eval_every": 0, "clip_norm": 0.0}
    return RunConfig(**(settings | {"device": "cpu", "inner": "sgd"} | more))  # type: ignore[arg-type]


def nobody(_: Progress) -> None:
    pass


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("algorithm", NAMES)
def test_an_absurd_learning_rate_ends_in_the_same_error_on_all_workers(algorithm: str, workers: int) -> None:
    config = RunConfig(algorithm=algorithm, task="quadratic", steps=24, lr=1e38, workers=workers, device="cpu")

    def worker(link: Link) -> str:
        try:
            return f"ended well: {Trainer(config, link).run(nobody)}"
        except TrainingDiverged as error:
            return str(error)

    messages = World(workers).run(worker)
    if algorithm != "alone":  # where each worker has a run of its own
        assert len(set(messages)) == 1
    for message in messages:
        assert message.startswith("training has diverged at step ")
        assert "most likely the learning rate is too high (lr is " in message
        assert message.endswith("or the data hold NaN or Inf; there is no checkpoint")
        assert "\n" not in message


@pytest.mark.parametrize("factor", first_quick([math.inf, 1e30]), ids=["infinite", "out of all bounds"])
@pytest.mark.parametrize("algorithm", ["data-parallel", "demo", "diloco", "lordo", "mt-dao", "noloco", "streaming-diloco"])
def test_no_checkpoint_of_bad_parameters_takes_the_place_of_a_good_one(algorithm: str, factor: float, tmp_path: Path) -> None:
    settings = {} if algorithm in ("data-parallel", "demo") else {"H": 4}
    config = config_of(algorithm, settings=settings, inner=None if algorithm in ("demo", "lordo") else "sgd")
    trainer = Trainer(config, SoloLink(), task=Poisoned(factor, first=11, workers=1))
    with pytest.raises(TrainingDiverged, match=r"training has diverged at step \d+: .*; the checkpoint of step 10 is kept"):
        trainer.run(nobody, checkpoints=tmp_path, checkpoint_every=2)
    assert [checkpoint.step_of(path) for path in checkpoint.finished(tmp_path)] == [8, 10]
    resumed = Trainer(config, SoloLink(), task=Scaled(1, first=1, workers=1))
    assert resumed.resume(tmp_path)[0] == "resumed from step 10"
    assert all(bool(torch.isfinite(p).all()) for p in snapshot(resumed.model))
    assert math.isfinite(resumed.run(nobody, checkpoints=tmp_path, checkpoint_every=2).loss)


def _diverges(link: Link, algorithm: str, folder: Path) -> tuple[str, int]:
    config = config_of(algorithm, settings={"H": 4} if algorithm == "diloco" else {})
    trainer = Trainer(config, link, task=Poisoned(math.inf, first=11, workers=link.size))
    try:
        trainer.run(nobody, checkpoints=folder, checkpoint_every=2)
    except TrainingDiverged as error:
        return str(error), trainer.step
    return "ended well", trainer.step


@pytest.mark.parametrize("algorithm", ["ddp", "diloco"])
def test_real_processes_stop_together_and_keep_the_last_good_checkpoint(algorithm: str, tmp_path: Path, pool: Pool) -> None:
    first, *others = pool.run(_diverges, 4, algorithm, tmp_path)
    assert others == [first] * 3
    assert first[0].endswith("; the checkpoint of step 10 is kept")
    assert [checkpoint.step_of(path) for path in checkpoint.finished(tmp_path)] == [8, 10]


def _one_is_bad_for_a_while(link: Link, folder: Path) -> tuple[list[int], int, bool]:
    config = config_of("diloco", steps=16, settings={"H": 4})
    trainer = Trainer(config, link, task=Poisoned(math.inf, first=5, last=5, bad=(1,), workers=link.size))
    seen: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.step in (6, 7, 8, 9):  # before what is due at this step is saved
            seen.extend(checkpoint.step_of(path) for path in checkpoint.finished(folder)[-1:])

    trainer.run(watch, checkpoints=folder, checkpoint_every=3)
    return seen, trainer.optimizer.aborted_rounds, all(bool(torch.isfinite(p).all()) for p in snapshot(trainer.model))


def test_a_checkpoint_waits_until_a_bad_worker_is_healed(tmp_path: Path, pool: Pool) -> None:
    """Its parameters are Inf from step 5 to the round after step 8: one is due at step 6, and saved after step 8."""
    for seen, aborted, finite in pool.run(_one_is_bad_for_a_while, 4, tmp_path):
        assert seen == [3, 3, 3, 8]
        assert aborted == 1
        assert finite
    assert [checkpoint.step_of(path) for path in checkpoint.finished(tmp_path)] == [15, 16]


@pytest.mark.parametrize("algorithm", ["diloco", "lordo", "mt-dao", "noloco"])
@pytest.mark.parametrize("workers", [1, 3])
def test_losses_that_are_nan_on_all_workers_end_the_run(algorithm: str, workers: int) -> None:
    """All local steps are skipped, so that nothing bad is ever exchanged: the run would end with the model it began with."""
    config = config_of(algorithm, steps=24, inner=None if algorithm == "lordo" else "sgd")

    def worker(link: Link) -> str:
        with pytest.raises(TrainingDiverged) as error:
            Trainer(config, link, task=Scaled(math.nan, first=5, workers=workers)).run(nobody)
        return str(error.value)

    for message in World(workers).run(worker):
        assert "training has diverged at step 5: the losses of " in message
        assert "have been NaN or Inf for 8 steps or more" in message


@pytest.mark.parametrize("algorithm", ["diloco", "data-parallel"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_few_bad_losses_end_nothing(algorithm: str, workers: int) -> None:
    config = config_of(algorithm, steps=24, settings={"H": 4} if algorithm == "diloco" else {})

    def worker(link: Link) -> float:
        task = Scaled(math.nan, first=18, workers=workers)  # of all workers, in the last 7 steps
        return (Trainer(config, link, task=task).run(nobody).validation or {})["loss"]

    assert all(math.isfinite(loss) for loss in World(workers).run(worker))


def test_a_model_whose_validation_loss_is_not_finite_is_no_result() -> None:
    class Overflows(QuadraticTask):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {"loss": math.inf}

    task = Overflows("quadratic", seed=0, workers=1, batch=None, non_iid=None)
    with pytest.raises(TrainingDiverged, match="training has diverged at step 4: the validation loss at the end is not finite"):
        Trainer(config_of("diloco", steps=4), SoloLink(), task=task).run(nobody)


# --- The command line --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_says_so_in_a_line_and_with_its_exit_code(tmp_path: Path) -> None:
    command = [
        "train",
        "--algorithm",
        "demo",
        *QUICK,
        "--lr",
        "1e38",
        "--checkpoint-every",
        "4",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run([sys.executable, "-m", "thinwire", *command], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert "Traceback" not in done.stdout + done.stderr
    assert any(line.startswith("thinwire: training has diverged at step ") for line in said), done.stderr
    assert said[-1].startswith("thinwire: error: worker ")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_sim_says_so_in_a_line_and_with_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--algorithm", "ddp", *QUICK, "--lr", "1e38", "--out", str(tmp_path / "run")])
    assert ended.value.code == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("thinwire: ")]
    assert line.startswith("thinwire: error: training has diverged at step 2: the parameters of all workers hold NaN, Inf or ")
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_compare_goes_on_with_the_other_arms(jobs: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arms = ["diloco --H 4 --lr 1e38", "ddp"]
    with pytest.raises(SystemExit) as ended:
        main(["compare", *arms, *QUICK, "--lr", "0.05", "--sim", "--jobs", jobs, "--out", str(tmp_path)])
    assert ended.value.code == 1
    out, _ = capfd.readouterr()
    assert "failed: diloco --H 4 --lr 1e38, seed 0: training has diverged at step 4: " in out
    assert "Traceback" not in out
    (record,) = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert record["arm"] == "ddp"
