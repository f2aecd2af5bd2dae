from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import assert_same, snapshot
from tests.processes import Pool
from thinwire import Link
from thinwire.errors import ConfigError, FingerprintMismatch, NonFiniteRound
from thinwire.links import SoloLink
from thinwire.tasks.quadratic import QuadraticTask
from thinwire.tools.config import RunConfig, check_same_run, presets, read_run_toml, resolve_algorithm, write_run_toml
from thinwire.tools.display import MetricsFile
from thinwire.tools.train import Progress, Trainer


class Poisoned(QuadraticTask):
    """The quadratic task, with a NaN in the gradient of one worker at one step."""

    def __init__(self, *, rank: int, bad_rank: int, bad_step: int, workers: int):
        super().__init__("quadratic", seed=0, workers=workers, batch=None, non_iid=None)
        self.rank, self.bad_rank, self.bad_step, self.step = rank, bad_rank, bad_step, 0

    def batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        self.step = step
        return super().batch(worker, step)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        return loss * float("nan") if (self.rank, self.step) == (self.bad_rank, self.bad_step) else loss


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _nobody(_: Progress) -> None:
    pass


def _poisoned_run(link: Link, algorithm: str, on_nonfinite: str) -> tuple:
    settings = {"on_nonfinite": on_nonfinite} | ({} if "d" in algorithm[:2] and algorithm != "diloco" else {"H": 5})
    config = RunConfig(algorithm=algorithm, task="quadratic", steps=40, lr=0.05, eval_every=0, device="cpu", settings=settings)
    heard = Records()
    logging.getLogger("thinwire").addHandler(heard)
    task = Poisoned(rank=link.rank, bad_rank=1, bad_step=20, workers=link.size)
    trainer = Trainer(config, link, task=task)
    start = trainer.evaluate()["loss"]
    try:
        trainer.run(_nobody)
    except NonFiniteRound as refusal:
        return "raised", str(refusal), [], 0
    finally:
        logging.getLogger("thinwire").removeHandler(heard)
    return snapshot(trainer.model), trainer.optimizer.steps, heard.messages, trainer.evaluate()["loss"] / start


@pytest.mark.parametrize("algorithm", ["ddp", "data-parallel", "diloco", "local-sgd"])
def test_a_nan_at_step_20_of_40_on_real_processes(algorithm: str, pool: Pool) -> None:
    """The bar: finite parameters, equal on all workers, and the log names the rank."""
    results = pool.run(_poisoned_run, 3, algorithm, "skip")
    said = [message for *_, messages, _ in results for message in messages]
    assert said
    assert all("rank 1" in message and "NaN or Inf" in message for message in said)
    for params, steps, _, remains in results:
        assert steps == 40
        assert all(bool(torch.isfinite(p).all()) for p in params)
        assert_same(params, results[0][0])
        assert remains < 0.9, "it learned"


def test_torchs_ddp_raises_on_all_workers_when_asked_to(pool: Pool) -> None:
    for outcome, message, *_ in pool.run(_poisoned_run, 3, "ddp", "raise"):
        assert outcome == "raised"
        assert message == "step 20 refused on all 3 workers: NaN or Inf in the contribution of rank 1"


def _different_ddp(link: Link) -> str:
    config = RunConfig(algorithm="ddp", task="quadratic", steps=2, weight_decay=0.1 * link.rank, device="cpu")
    try:
        Trainer(config, link).run(_nobody)
    except FingerprintMismatch as refusal:
        return str(refusal)
    return "accepted"


def test_torchs_ddp_passes_the_handshake_too(pool: Pool) -> None:
    for message in pool.run(_different_ddp, 2):
        assert "weight_decay is 0.0 on rank 0 and 0.1 on rank 1" in message


def test_every_preset_is_an_algorithm_with_known_settings() -> None:
    for name in presets():
        config = RunConfig(algorithm=name, task="quadratic", steps=3, eval_every=0, device="cpu")
        assert Trainer(config, SoloLink()).run(_nobody).step == 3
    with pytest.raises(ConfigError, match="unknown algorithm 'ddpp' \\(did you mean 'ddp'\\?\\)"):
        resolve_algorithm("ddpp", {})


def test_run_toml_round_trips_every_setting(tmp_path: Path) -> None:
    config = RunConfig(
        workers=3, lr=1e-5, data='odd "name"\\', non_iid=0.5, settings={"H": 7, "nesterov": False, "outer_lr": 0.1}
    )
    write_run_toml(tmp_path / "run.toml", config, command="x")
    assert read_run_toml(tmp_path / "run.toml") == config
    for route, due in (("gather", None), ("owners", 1.0)):  # before methods had a feedback of their own all runs said 1
        write_run_toml(tmp_path / "run.toml", replace(config, route=route, owner_feedback=1.0))
        assert read_run_toml(tmp_path / "run.toml").owner_feedback == due
    (tmp_path / "run.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"is not a run.toml of thinwire"):
        read_run_toml(tmp_path / "run.toml")


def test_run_toml_takes_any_text(tmp_path: Path) -> None:
    config = RunConfig(data='d\U0001f600/\x7f\n\t"quoted".txt')
    write_run_toml(tmp_path / "run.toml", config, command="\U0001f600")
    assert read_run_toml(tmp_path / "run.toml") == config


def test_resume_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    config = RunConfig(task="quadratic", steps=6, eval_every=0, device="cpu", settings={"H": 2})
    Trainer(config, SoloLink()).run(_nobody, checkpoints=tmp_path, checkpoint_every=2)
    (tmp_path / "step-00000006" / "worker0.0.safetensors").write_bytes(b"")
    trainer = Trainer(config, SoloLink())
    notes = trainer.resume(tmp_path)
    assert "step-00000006 is damaged" in notes[0]
    assert notes[1] == "resumed from step 4"
    assert trainer.run(_nobody, checkpoints=tmp_path, checkpoint_every=2).step == 6
    assert Trainer(replace(config, steps=8), SoloLink()).resume(tmp_path)[0] == "resumed from step 6"


def test_what_may_change_between_a_run_and_its_continuation(tmp_path: Path) -> None:
    old = RunConfig(steps=10, workers=2, settings={"H": 4})
    check_same_run(tmp_path, old, RunConfig(steps=20, workers=3, settings={"H": 4}))
    with pytest.raises(ConfigError, match="H was 4, now it is 5"):
        check_same_run(tmp_path, old, RunConfig(steps=10, workers=2, settings={"H": 5}))
    with pytest.raises(ConfigError, match="task was 'gpt-nano', now it is 'quadratic'"):
        check_same_run(tmp_path, old, RunConfig(task="quadratic", settings={"H": 4}))
    check_same_run(tmp_path, old, replace(old, wire="bf16"), resumed=True)  # what was the default may be named
    with pytest.raises(ConfigError, match="wire was None, now it is 'bf16'"):  # but a finished run is none of another codec
        check_same_run(tmp_path, old, replace(old, wire="bf16"))
    with pytest.raises(ConfigError, match="wire was 'bf16', now it is None"):
        check_same_run(tmp_path, replace(old, wire="bf16"), old, resumed=True)


def test_metrics_after_the_resumed_step_are_dropped_and_a_torn_line_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    metrics = MetricsFile(path, after=2)
    metrics(Progress(step=3, loss=0.5, seconds=1.0, items=1, sent=0, received=0, payload=0, rounds=0, waiting=0.0))
    metrics.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"step": 2}']
    assert len(lines) == 3
    assert lines[2].startswith('{"step": 3, "loss": 0.5')
