"""How runs treat the methods with several clocks: inner optimizers, warm starts, newcomers, the beta command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.training import H, assert_same, build, model_of, snapshot, train
from tests.processes import Pool
from thinwire import MTDAO, DataParallel, DeMo, Link, SoloLink, TorchLink, World, checkpoint
from thinwire.core.phases import at_work
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError
from thinwire.optim import QHADOPT, QHM, LowRankAdam, QHAdam, QHMuon, propose_beta
from thinwire.schedules import Every, Periods, Stages
from thinwire.tools.build import optimizer_of, warm_start_of
from thinwire.tools.cli import main
from thinwire.tools.config import RunConfig, check_same_run, read_run_toml, write_run_toml
from thinwire.tools.flags import parse_run
from thinwire.tools.plan.messages import period_of, run_messages
from thinwire.tools.train import Progress, Trainer
from thinwire.tools.words import words_of


def config_of(algorithm: str, **settings: Any) -> RunConfig:
    own = settings.pop("settings", {"H": 4})
    return RunConfig(algorithm=algorithm, task="quadratic", steps=24, lr=0.05, eval_every=0, settings=own, **settings)


def inner_of(config: RunConfig) -> torch.optim.Optimizer:
    opt = optimizer_of(config, nn.Linear(4, 4), SoloLink())
    assert isinstance(opt, Wrapper)
    return opt.inner


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qhadam", QHAdam), ("qhadopt", QHADOPT), ("qhm", QHM), ("qhmuon", QHMuon), ("muon", QHMuon), ("low-rank", LowRankAdam)],
)
def test_inner_optimizers_by_name(name: str, kind: type) -> None:
    assert type(inner_of(config_of("data-parallel", inner=name, settings={}))) is kind


def test_each_method_has_its_usual_inner_optimizer() -> None:
    assert type(inner_of(config_of("mt-dao"))) is QHAdam
    for algorithm in ("diloco", "local-adam", "des-loc", "local-sgd"):
        assert type(inner_of(config_of(algorithm))) is torch.optim.AdamW
    assert type(inner_of(config_of("local-adam", inner="qhm"))) is QHM, "a name that is given wins over the preset's"


def test_a_beta_is_proposed_from_the_period_and_the_length_of_the_run() -> None:
    group = inner_of(replace(config_of("mt-dao", settings={"H": 16}), steps=100_000)).param_groups[0]
    assert group["betas"] == (propose_beta(16).beta,)
    assert group["omegas"] == (0.95,)
    short = inner_of(replace(config_of("mt-dao", settings={}), steps=100)).param_groups[0]["betas"]
    assert short == (propose_beta(32, steps=100).beta,), "of the default period"
    assert inner_of(config_of("mt-dao", qh_betas=(0.5, 0.9), qh_omegas=(0.1, 0.8))).param_groups[0]["betas"] == (0.5, 0.9)


def test_settings_of_slow_momenta_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"qh-betas is a setting of qhadam, .* not of adamw, got"):
        inner_of(config_of("diloco", qh_betas=(0.9,)))
    with pytest.raises(ConfigError, match=r"qh-lives is a setting of .* not of demo, got 4.0"):
        optimizer_of(config_of("demo", qh_lives=4.0, settings={}), nn.Linear(4, 4), SoloLink())
    with pytest.raises(ConfigError, match="lordo is an optimizer itself and has no inner one, got --inner adamw"):
        optimizer_of(config_of("lordo", inner="adamw"), nn.Linear(4, 4), SoloLink())
    with pytest.raises(ConfigError, match="beta2 is of a second moment, which sgd does not have"):
        inner_of(config_of("diloco", inner="sgd", beta2=0.9))
    with pytest.raises(ConfigError, match=r"qh-omegas must be given with qh-betas=\(0.9, 0.99\)"):
        inner_of(config_of("mt-dao", qh_betas=(0.9, 0.99)))


# --- Periods that grow -------------------------------------------------------------------------------------------------------


def test_periods_that_grow_are_typed_in_as_a_text(tmp_path: Path) -> None:
    config, _ = parse_run("train", ["--algorithm", "mt-dao", "--H", "2 until 4, 8", "--K-v", "16", "--steps", "99999"])
    assert (config.settings["H"], config.settings["K_v"]) == ("2 until 4, 8", 16)
    opt = optimizer_of(config, nn.Linear(4, 4), SoloLink())
    assert opt.schedule == Periods((Stages(2, 4, 8), Stages(2, 4, 8), Every(16)))
    assert opt.fingerprint()["H"] == "2 until 4, 8"
    assert opt.param_groups[0]["betas"] == (propose_beta(8).beta,), "of the longest period"
    assert parse_run("train", words_of(config))[0] == config
    write_run_toml(tmp_path / "run.toml", config)
    assert read_run_toml(tmp_path / "run.toml") == config
    with pytest.raises(ConfigError, match=r"a period is a number of steps, or several such as .* got 'often'"):
        optimizer_of(config_of("diloco", settings={"H": "often"}), nn.Linear(4, 4), SoloLink())


@pytest.mark.parametrize("algorithm", ["local-sgd", "mt-dao", "diloco", "decoupled-diloco", "lordo", "noloco"])
def test_a_plan_counts_the_rounds_of_a_run_whose_periods_grow(algorithm: str) -> None:
    config = config_of(algorithm, settings={"H": "2 until 6, 4 until 12, 8"})
    messages = run_messages(config, nn.Linear(8, 8), workers=2)
    assert [int(m.posted) for m in messages] == [2, 4, 6, 8, 12, 16, 24]
    period = period_of(config, nn.Linear(8, 8), workers=2)
    assert (period.steps, [m.posted for m in period.messages if m.nbytes > 1]) == (8, [8])


def test_a_run_whose_periods_grow_resumes_bit_for_bit() -> None:
    def worker(link: Link, stop: int) -> list:
        model, growing = model_of(), Stages(1, 3, 4, 8, 6)
        opt = build("mt-dao", model.parameters(), link, H=growing, alarm_every=1)
        train(model, opt, link.rank, stop)
        assert opt.rounds == len([s for s in range(1, stop + 1) if growing.due(s)])
        again = model_of(seed=9)
        again.load_state_dict(model.state_dict())
        resumed = build("mt-dao", again.parameters(), link, H=growing, alarm_every=1)
        resumed.load_state_dict(opt.state_dict())
        train(again, resumed, link.rank, 14 - stop, first=stop + 1)
        return snapshot(again)

    straight, early, late = (World(2).run(lambda link, stop=stop: worker(link, stop)) for stop in (0, 2, 10))
    for mine in (early, late):
        assert_same(mine[0], straight[0])
        assert_same(mine[1], straight[1])


def test_what_needs_a_plain_period_refuses_one_that_grows() -> None:
    with pytest.raises(ConfigError, match="tau=1 needs a plain number of steps per round, got H=2 until 4, 8"):
        optimizer_of(config_of("diloco", settings={"H": "2 until 4, 8", "tau": 1}), nn.Linear(4, 4), SoloLink())


def test_pairs_and_defaults_survive_run_toml(tmp_path: Path) -> None:
    config = config_of("mt-dao", qh_betas=(0.9, 0.99), qh_omegas=(0.1, 0.8), warm_start=8)
    write_run_toml(tmp_path / "run.toml", config)
    again = read_run_toml(tmp_path / "run.toml")
    check_same_run(tmp_path, again, config)
    assert again == config


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"warm_start": 24}, "below steps=24"), ({"warm_lr": -1.0}, "warm-lr"), ({"qh_lives": -1.0}, "lives")],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config_of("mt-dao", **wrong).validate()


# --- Warm starts -------------------------------------------------------------------------------------------------------------


def _nobody(_: Progress) -> None:
    pass


def trained(config: RunConfig, workers: int = 3) -> list[tuple[list, Any]]:
    def worker(link: Link) -> tuple[list, Any]:
        trainer = Trainer(config, link)
        trainer.run(_nobody)
        return snapshot(trainer.model), trainer.optimizer

    return World(workers, step_time=0.0).run(worker)


def test_a_warm_start_is_data_parallel_and_then_the_method() -> None:
    """Up to the switch bit for bit the synchronous run; after it other than either."""
    seen: dict[str, list] = {}

    def until(name: str, config: RunConfig) -> None:
        def worker(link: Link) -> None:
            trainer = Trainer(config, link)

            def watch(progress: Progress) -> None:
                if progress.step == 8:
                    seen.setdefault(name, []).append(snapshot(trainer.model))

            trainer.run(watch)

        World(3, step_time=0.0).run(worker)

    until("warm", config_of("local-adam", warm_start=8))
    until("synchronous", config_of("data-parallel", settings={}))
    for mine, theirs in zip(seen["warm"], seen["synchronous"], strict=True):
        assert_same(mine, theirs)
    finals = {name: trained(config_of(name, warm_start=warm)) for name, warm in (("mt-dao", 8), ("local-adam", 8))}
    for results in finals.values():
        for params, opt in results:
            assert isinstance(at_work(opt), MTDAO)
            assert_same(params, results[0][0])
            assert (opt.steps, opt.rounds) == (24, 8 + 4), "eight synchronous rounds, then one every four steps"
            assert opt.pending_steps == 0


def test_slow_momenta_are_switched_on_when_the_warm_start_ends() -> None:
    _, opt = trained(config_of("mt-dao", warm_start=8, qh_betas=(0.99,), qh_omegas=(0.9,)))[0]
    state = opt.inner.state[opt._active[0]]
    assert (int(state["step"]), int(state["step_of_reset"])) == (24, 8)
    assert opt.param_groups[0]["warmup"] == 8
    _, other = trained(config_of("mt-dao", warm_start=8, qh_warmup=0, qh_betas=(0.99,), qh_omegas=(0.9,)))[0]
    assert int(other.inner.state[other._active[0]]["step_of_reset"]) == 0


def test_the_learning_rate_of_a_warm_start() -> None:
    config = config_of("mt-dao", warm_start=8, warm_lr=0.5, lr_warmup=2, lr_final=1.0)
    assert [config.lr_at(step) for step in (1, 2, 8, 9, 24)] == [0.25, 0.5, 0.5, 0.05, 0.05]


def _resumed_run(link: Link, folder: Path, stop: int) -> list:
    config = config_of("mt-dao", warm_start=8, qh_betas=(0.9,), qh_omegas=(0.9,))
    first = Trainer(replace(config, lr_final=1.0), link)
    for step in range(1, stop + 1):
        first._one_step(step)
    first.save(folder)
    again = Trainer(replace(config, lr_final=1.0), link)
    again.resume(folder)
    for trainer in (first, again):
        for step in range(stop + 1, 25):
            trainer._one_step(step)
    assert type(at_work(again.optimizer)) is MTDAO
    assert_same(snapshot(first.model), snapshot(again.model))
    return snapshot(first.model)


@pytest.mark.parametrize("stop", [5, 8, 14], ids=["during", "at its end", "after"])
def test_a_run_with_a_warm_start_resumes_bit_for_bit(stop: int, tmp_path: Path, pool: Pool) -> None:
    pool.run(_resumed_run, 4, tmp_path, stop)


def test_a_method_without_an_inner_optimizer_has_a_warm_start_too() -> None:
    results = trained(config_of("demo", warm_start=8, settings={}))
    for params, opt in results:
        assert isinstance(at_work(opt), DeMo)
        assert opt.steps == 24
        assert_same(params, results[0][0])


def test_lordo_goes_on_with_the_projectors_of_its_warm_start() -> None:
    config = config_of("lordo", warm_start=8, settings={"H": 4, "rank": 3})
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    opt = warm_start_of(config, model, SoloLink())
    assert type(opt.inner) is LowRankAdam
    for _ in range(8):
        assert isinstance(opt.at_work, DataParallel)
        model(torch.randn(4, 8)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    fresh = optimizer_of(config, model, SoloLink())
    assert not torch.equal(fresh.state[model.weight]["Q"], opt.inner.state[model.weight]["Q"])
    assert torch.equal(opt.state[model.weight]["Q"], opt.inner.state[model.weight]["Q"])
    assert opt.steps == 8
    assert not opt.state[model.weight]["exp_avg"].any()


def test_the_start_of_lordo_takes_its_projectors_from_where_lordo_does() -> None:
    config = config_of("lordo", warm_start=8, settings={"H": 4, "rank": 3, "source": "sketch"})
    inner = warm_start_of(config, nn.Linear(8, 8), SoloLink()).inner
    assert isinstance(inner, LowRankAdam)
    assert (inner.source, inner.H) == ("sketch", 4)
    baseline = inner_of(config_of("data-parallel", inner="low-rank", low_rank_source="gradient", qh_lives=4.0, settings={}))
    assert isinstance(baseline, LowRankAdam)
    assert (baseline.source, baseline.param_groups[0]["lives"]) == ("gradient", 4.0)


def test_moments_of_a_start_by_demo_are_not_of_low_rank() -> None:
    config = config_of("lordo", warm_start=8, warm_by="demo", settings={"H": 4, "from_start": "v"})
    with pytest.raises(ConfigError, match="from-start=v goes on with the moments of a start by ddp"):
        warm_start_of(config, nn.Linear(8, 8), SoloLink())


def test_embeddings_may_be_left_at_full_rank() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
    both = [
        optimizer_of(config_of("lordo", full_rank="embeddings", settings={"H": 4}), model, SoloLink()),
        warm_start_of(config_of("lordo", full_rank="embeddings", settings={"H": 4}, warm_start=8), model, SoloLink()),
    ]
    assert [[(len(g["params"]), g["rank"]) for g in opt.param_groups] for opt in both] == [[(2, 0.25), (1, 0)]] * 2
    assert "Q" not in both[0].state[model[0].weight]
    assert "Q" in both[0].state[model[1].weight]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of("diloco", full_rank="embeddings"), "full-rank is a setting of lordo and --inner low-rank, not of adamw"),
        (config_of("mt-dao", full_rank="embeddings"), "not of qhadam, got 'embeddings'"),
        (config_of("demo", full_rank="embeddings", settings={}), "not of demo, got 'embeddings'"),
        (config_of("lordo", low_rank_source="sketch"), "low-rank-source is a setting of --inner low-rank, not of lordo"),
    ],
    ids=lambda value: getattr(value, "algorithm", ""),
)
def test_settings_of_low_rank_moments_are_refused_where_there_are_none(config: RunConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        optimizer_of(config, nn.Linear(4, 4), SoloLink())


# --- Newcomers ---------------------------------------------------------------------------------------------------------------


def _save(link: TorchLink, folder: Path) -> list:
    model = model_of()
    opt = build("mt-dao", model.parameters(), link)
    train(model, opt, link.rank, 2 * H)  # two rounds, the last one just ended
    checkpoint.save(folder, model, opt, link)
    return snapshot(model)


def _join(link: TorchLink, folder: Path) -> tuple[list, list, list[str]]:
    model = model_of(seed=99)
    opt = build("mt-dao", model.parameters(), link)
    notes = checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link).notes
    before, moments = snapshot(model), [m.clone() for m in opt.inner_state()["exp_avg"]]
    train(model, opt, link.rank, H, first=2 * H + 1)
    return before, moments, notes


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_workers_takes_parameters_and_moments_from_the_first(size: int, tmp_path: Path, pool: Pool) -> None:
    saved = pool.run(_save, 2, tmp_path)
    for before, moments, notes in pool.run(_join, size, tmp_path):
        assert_same(before, saved[0])
        assert all(bool(m.any()) for m in moments), "and not from zero"
        assert notes == ["all workers start from the parameters of the first, and from its averaged states"]


# --- thinwire beta ---------------------------------------------------------------------------------------------------------


def test_the_beta_command_proposes_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["beta", "32", "--steps", "200"])
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert "too slow for a run of 200 steps" in out
    with pytest.raises(SystemExit) as left:
        main(["beta", "0"])
    assert left.value.code == 2
    assert "K must be a whole number of at least 1, got 0" in capsys.readouterr().err
