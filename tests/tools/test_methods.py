"""How runs treat the methods: presets, wires, clipping, drift, pace, BatchNorm."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.training import adamw, assert_close, assert_same, backward, model_of, snapshot, train
from thinwire import MTDAO, Chain, DataParallel, DecoupledDiLoCo, DeMo, Link, SoloLink, World, parse_codec
from thinwire.errors import ConfigError
from thinwire.tools.build import optimizer_of, task_of
from thinwire.tools.cli import main
from thinwire.tools.command_flags import TrainFlags
from thinwire.tools.config import RunConfig, check_same_run, presets, read_run_toml, write_run_toml
from thinwire.tools.flags import parse_run
from thinwire.tools.train import Progress, Trainer
from thinwire.tools.words import words_of


def made(algorithm: str, **settings: Any) -> Any:
    config = RunConfig(algorithm=algorithm, task="quadratic", lr=4e-4, weight_decay=0.0, **settings)
    return optimizer_of(config, nn.Linear(4, 4), SoloLink())


@pytest.mark.parametrize(
    ("preset", "method"),
    [
        ("demo-v1", DeMo.v1),
        ("demo-v2", DeMo.v2),
        ("sparseloco", DecoupledDiLoCo.sparseloco),
        ("coarse-diloco", DecoupledDiLoCo.coarse),
        ("des-loc", partial(MTDAO.des_loc, clip_norm=1.0)),
    ],
)
def test_presets_of_the_command_line_are_those_of_the_classes(preset: str, method: Any) -> None:
    params = nn.Linear(4, 4).parameters()
    expected = method(params if preset.startswith("demo") else adamw(params), SoloLink())
    got = made(preset)
    assert type(got) is type(expected)
    assert got.settings == expected.settings
    assert got.codec == expected.codec
    assert preset == "des-loc" or got.codec == parse_codec(presets()[preset][1]["wire"])


def test_a_wire_that_is_given_wins_over_the_methods_own() -> None:
    assert made("demo").codec == DeMo(nn.Linear(4, 4).parameters(), SoloLink()).codec
    for algorithm in ("demo", "demo-v1", "sparseloco", "decoupled-diloco"):
        assert made(algorithm, wire="Hadamard(8) >> TopK(3)").codec == parse_codec("Hadamard(8) >> TopK(3)")
    assert made("demo", wire="bf16").codec == Chain.of(parse_codec("Float('bf16')"))


def test_settings_that_are_pairs_survive_run_toml(tmp_path: Path) -> None:
    config = RunConfig(algorithm="demo", settings={"betas": [0.8, 0.9], "phi": "adam"})
    write_run_toml(tmp_path / "run.toml", config)
    again = read_run_toml(tmp_path / "run.toml")
    check_same_run(tmp_path, again, config)
    assert made("demo", settings=again.settings).param_groups[0]["betas"] == [0.8, 0.9]


@pytest.mark.parametrize("algorithm", ["demo", "coarse-diloco", "mt-dao", "lordo"])
def test_flags_begin_with_the_settings_of_a_run_that_is_resumed(algorithm: str, tmp_path: Path) -> None:
    begun, _ = parse_run("train", ["--algorithm", algorithm], TrainFlags)
    write_run_toml(tmp_path / "run.toml", begun)
    again, _ = parse_run("train", ["--resume"], TrainFlags, saved=read_run_toml(tmp_path / "run.toml"))
    assert again.settings == begun.settings
    check_same_run(tmp_path, begun, again)


@pytest.mark.parametrize("wrong", [{"beta": 1.5}, {"phi": "tanh"}, {"over": "all"}, {"inflow": "none"}, {"betas": [0.9, 1.0]}])
def test_a_bad_setting_is_refused_with_its_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(wrong.values()))).replace("[", r"\[")):
        made("demo", settings=wrong)


def test_the_mean_gradient_is_clipped_as_torch_does() -> None:
    def averaged(link: Link) -> list:
        model = model_of()
        train(model, DataParallel(adamw(model.parameters()), link, clip_norm=0.3), link.rank, 5)
        return snapshot(model)

    reference = model_of()
    inner = adamw(reference.parameters())
    for step in range(1, 6):
        for rank in range(2):
            backward(reference, rank, step)
        for p in reference.parameters():
            if p.grad is not None:
                p.grad /= 2
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
        assert norm > 0.3, "else the test shows nothing"
        inner.step()
        inner.zero_grad()
    for got in World(2).run(averaged):
        assert_close(got, snapshot(reference), 1e-5)
    with pytest.raises(ConfigError, match="clip_norm must be at least 0"):
        DataParallel(adamw(reference.parameters()), SoloLink(), clip_norm=-1)


def _trained(link: Link, **config: Any) -> tuple[Progress, Trainer]:
    trainer = Trainer(RunConfig(device="cpu", **{"task": "quadratic", "eval_every": 0, **config}), link)
    return trainer.run(lambda _: None), trainer


def test_the_loop_clips_each_workers_gradient_where_the_method_does_not() -> None:
    settings: dict[str, Any] = {
        "algorithm": "local-sgd",
        "inner": "sgd",
        "lr": 0.01,
        "steps": 1,
        "lr_warmup": 0,
        "lr_final": 1.0,
    }
    _, free = _trained(SoloLink(), clip_norm=0.0, settings={"H": 1}, **settings)
    _, clipped = _trained(SoloLink(), clip_norm=0.5, settings={"H": 1}, **settings)
    start = clipped.task.model()

    def moved(trainer: Trainer) -> float:
        pairs = zip(trainer.model.parameters(), start.parameters(), strict=True)
        return math.sqrt(sum(float((p.detach() - q.detach()).square().sum()) for p, q in pairs))

    assert moved(clipped) == pytest.approx(0.01 * 0.5, rel=1e-3)
    assert moved(free) > 2 * moved(clipped)


def test_drift_is_reported_with_the_loss_of_the_mean_where_there_is_any() -> None:
    def run(mode: str) -> tuple[dict[str, float], str]:
        def worker(link: Link) -> tuple[dict[str, float], str]:
            settings = {"mode": mode, "H": 4, "beta": 0.9, "outer_lr": 0.7}
            progress, trainer = _trained(link, algorithm="decoupled-diloco", steps=12, non_iid=1.0, settings=settings)
            return progress.validation or {}, trainer.optimizer.evaluated

        return World(3).run(worker)[2]

    figures, which = run("consensus")
    assert figures["drift"] == 0.0
    assert "mean_loss" not in figures
    assert "all workers agreed" in which
    figures, which = run("published")
    assert figures["drift"] > 0
    assert figures["mean_loss"] != figures["loss"]
    assert "worker 0's own" in which


def test_the_summary_tells_of_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--task quadratic --workers 3 --steps 8 --H 4 --mode published --non-iid 1.0 --eval-every 0"
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--algorithm", "decoupled-diloco", *flags.split(), "--out", str(tmp_path / "run")])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "worker 0's own" in said
    assert "apart (relative), their mean has a loss of" in said


def test_workers_of_different_speed_train_the_same_number_of_rounds_and_evaluate_together() -> None:
    def worker(link: Link) -> tuple[int, int, int, list[int]]:
        seen: list[int] = []
        settings = {"H": 8, "pace": "speed"}
        config = RunConfig(
            algorithm="decoupled-diloco", task="quadratic", steps=40, eval_every=10, device="cpu", settings=settings
        )
        trainer = Trainer(config, link)
        taken = 0

        def watch(progress: Progress) -> None:
            nonlocal taken
            taken += 1
            if progress.validation:
                seen.append(progress.step)

        trainer.run(watch)
        return trainer.optimizer.rounds, trainer.step, taken, seen

    fast, slow = World(2, step_time=(1.0, 2.0)).run(worker)
    assert fast[:2] == slow[:2] == (5, 40)
    assert fast[3] == slow[3] == [16, 24, 32, 40], "at the first round after every 10 steps"
    assert (fast[2], slow[2]) == (40, 8 + 4 * 4), "half the steps from the second round on"


def test_steps_that_are_no_multiple_of_H_are_refused_for_workers_of_different_speed() -> None:
    with pytest.raises(ConfigError, match=r"meet every H=8 steps only: steps=20 is no multiple"):
        _trained(SoloLink(), algorithm="decoupled-diloco", steps=20, settings={"H": 8, "pace": "speed"})


@pytest.mark.slow  # trains; tests/test_agreement.py averages them, too
def test_batchnorm_statistics_are_averaged_in_runs() -> None:
    def worker(link: Link) -> list:
        _, trainer = _trained(
            link, algorithm="decoupled-diloco", task="resnet-digits", batch=4, steps=2, non_iid=0.5, settings={"H": 2}
        )
        names = [n for n, _ in trainer.model.named_buffers() if "running" in n]
        assert names
        return [trainer.model.get_buffer(n).clone() for n in names]

    first, second = World(2).run(worker)
    assert_same(first, second)


def test_a_batch_that_does_not_divide_among_the_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a batch of 8 does not divide among 3 shards"):
        Trainer(RunConfig(task="gpt-nano", device="cpu"), SoloLink(), part=(0, 3))


def test_alone_exchanges_nothing_and_every_worker_is_its_inner_optimizer() -> None:
    config = RunConfig(algorithm="alone", task="quadratic", steps=12, lr=0.05, lr_warmup=0, lr_final=1.0, clip_norm=0.0)

    def worker(link: Link) -> tuple[Progress, list]:
        trainer = Trainer(config, link)
        return trainer.run(lambda _: None), snapshot(trainer.model)

    task = task_of(config, 2)
    for rank, (progress, ended) in enumerate(World(2).run(worker)):
        assert (progress.sent, progress.payload, progress.rounds, progress.waiting) == (0, 0, 0, 0.0)
        assert progress.validation is not None
        assert progress.validation["drift"] > 0
        model = task.model()
        inner = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.01)
        for step in range(1, 13):
            task.loss(model, task.batch(rank, step)).backward()
            inner.step()
            inner.zero_grad()
        assert_same(ended, snapshot(model))


@pytest.mark.parametrize(
    ("words", "betas"),
    [
        (["--beta2", "0.99"], [0.9, 0.99]),
        (["--beta2", "0.99", "--betas", "0.8", "0.97"], [0.8, 0.97]),
        ([], [0.9, 0.99]),
    ],
)
def test_beta2_is_the_second_beta_of_methods_without_an_inner_optimizer(words: list[str], betas: list[float]) -> None:
    config, _ = parse_run("sim", ["--algorithm", "demo", *words])
    assert list(optimizer_of(config, nn.Linear(2, 2), SoloLink()).param_groups[0]["betas"]) == betas
    assert parse_run("sim", words_of(config))[0] == config
