"""WarmStart: a synchronous start and then a method, as one optimizer to schedulers, checkpoints and loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire
from tests.conformance.training import adamw, assert_same, backward, model_of, qhadam, snapshot, train
from tests.processes import Pool
from thinwire import MTDAO, DataParallel, DeMo, DiLoCo, Link, LocalSGD, SoloLink, WarmStart, World, checkpoint
from thinwire.core.stats import Stats
from thinwire.errors import CheckpointError, ConfigError

START, STEPS = 5, 14


def by_demo(inner: Optimizer, link: Link) -> DeMo:
    return DeMo(inner.param_groups, link, codec=thinwire.Float("fp32"))


def late_demo(inner: Optimizer, link: Link) -> DeMo:
    return DeMo(inner.param_groups, link, delay=True)


def diloco(inner: Optimizer, link: Link) -> DiLoCo:
    return DiLoCo(inner, link, H=4)


def mt_dao(inner: Optimizer, link: Link) -> MTDAO:
    return MTDAO(inner, link, H=4)


KINDS: dict[str, tuple] = {
    "synchronous, DiLoCo": (adamw, None, diloco),
    "synchronous, MT-DAO": (qhadam, None, mt_dao),
    "DeMo, DiLoCo": (adamw, by_demo, diloco),
    "DeMo with a delay, DiLoCo": (adamw, late_demo, diloco),
    "synchronous, DeMo": (adamw, None, by_demo),
}


def warm(kind: str, model: nn.Module, link: Link) -> WarmStart:
    inner, start, then = KINDS[kind]
    return WarmStart(inner(model.parameters()), link, steps=START, start=start, then=then)


@pytest.mark.parametrize("made", [adamw, qhadam, lambda params: torch.optim.SGD(params, lr=0.1)])
def test_the_second_moments_of_demo_go_over_to_the_inner_optimizer(made: Callable) -> None:
    def worker(link: Link) -> None:
        model = model_of()
        inner = made(model.parameters())
        start = lambda _, link: DeMo(model.parameters(), link, betas=(0.9, 0.9))  # noqa: E731
        opt = WarmStart(inner, link, steps=START, start=start, then=diloco, second_moments=True)
        train(model, opt, link.rank, START - 1)  # type: ignore[arg-type]
        demo = opt.at_work
        train(model, opt, link.rank, 1, first=START)  # type: ignore[arg-type]
        assert isinstance(opt.at_work, DiLoCo)
        if isinstance(inner, torch.optim.SGD):
            assert not any("exp_avg_sq" in state for state in inner.state.values())
            return
        for p in demo._active:
            t, theirs, mine = float(demo.state[p]["own_count"]), demo.state[p]["own_v"], inner.state[p]
            beta2 = inner.param_groups[0].get("beta2") or inner.param_groups[0]["betas"][1]
            torch.testing.assert_close(mine["exp_avg_sq"] / (1 - beta2**t), theirs / (1 - 0.9**t))
            assert not mine["exp_avg"].any()
            assert float(mine["step"]) == t
        train(model, opt, link.rank, 9, first=START + 1)  # type: ignore[arg-type]
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    World(2).run(worker)


def scheduled(opt: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)  # multiplies the rate that it finds in the groups


def run(model: nn.Module, opt: WarmStart, scheduler: torch.optim.lr_scheduler.LRScheduler, rank: int, steps: range) -> None:
    for step in steps:
        train(model, opt, rank, 1, first=step)  # type: ignore[arg-type]
        scheduler.step()


def test_it_is_the_start_and_then_the_method_by_hand() -> None:
    """Bit for bit DataParallel for five steps, and DiLoCo around the same AdamW after them."""

    def by_hand(link: Link) -> list[Tensor]:
        model = model_of()
        inner = adamw(model.parameters())
        train(model, DataParallel(inner, link), link.rank, START)
        opt = DiLoCo(inner, link, H=4)  # counters stand in the groups, which are the inner optimizer's
        assert opt.steps == START
        train(model, opt, link.rank, STEPS - START, first=START + 1)
        opt.finish()
        return snapshot(model)

    def as_one(link: Link) -> tuple[list[Tensor], WarmStart]:
        model, seen = model_of(), list[Stats]()
        opt = warm("synchronous, DiLoCo", model, link)
        opt.on_round(seen.append)
        assert isinstance(opt, Optimizer) and isinstance(opt.at_work, DataParallel) and opt.starting
        assert "first 5 steps: DataParallel" in repr(opt)
        train(model, opt, link.rank, STEPS)  # type: ignore[arg-type]
        assert (opt.steps, opt.rounds, opt.pending_steps) == (STEPS, START + 2, 2)
        assert isinstance(opt.at_work, DiLoCo) and not opt.starting
        with opt.shared_model():
            assert_same(opt.params(), opt.slot("anchor"))
        opt.finish()
        assert [s["step"] for s in seen] == [1, 2, 3, 4, 5, 8, 12, 14], "told of the rounds of both"
        assert seen[0]["sent.round"] == seen[1]["sent.round"] / 2 and opt.stats()["sent"] == opt.meter.totals.sent
        assert opt.stats()["sent.handshake"] == 2 * 32
        return snapshot(model), opt

    for mine, (theirs, _) in zip(World(2, step_time=0.0).run(by_hand), World(2, step_time=0.0).run(as_one), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_bit_for_bit_before_at_and_after_the_switch(kind: str, tmp_path: Path) -> None:
    """With a scheduler, from state dicts and from checkpoints, also back across the switch."""

    def worker(link: Link) -> None:
        model = model_of()
        opt = warm(kind, model, link)
        scheduler, states = scheduled(opt), {}
        for step in range(1, STEPS + 1):
            run(model, opt, scheduler, link.rank, range(step, step + 1))
            if step in (3, START, 10):
                states[step] = copy.deepcopy((opt.state_dict(), model.state_dict(), scheduler.state_dict()))
                checkpoint.save(tmp_path, model, opt, link, keep=9)
        rate = opt.param_groups[0]["lr"]
        assert rate == pytest.approx(opt.param_groups[0]["initial_lr"] * 0.9**STEPS), "one schedule through both"
        opt.finish()
        straight = snapshot(model)
        saved = {checkpoint.step_of(path): path for path in checkpoint.finished(tmp_path)}
        again = warm(kind, model := model_of(seed=9), link)
        for step in (10, START, 3):  # one optimizer for all of them: later states first
            state, params, schedule = states[step]
            scheduler = scheduled(again)
            again.load_state_dict(copy.deepcopy(state))
            model.load_state_dict(params)
            scheduler.load_state_dict(schedule)
            assert again.starting == (step < START)
            run(model, again, scheduler, link.rank, range(step + 1, STEPS + 1))
            again.finish()
            assert_same(snapshot(model), straight, f"state of step {step}")
        for step in (3, START, 10):
            another = warm(kind, fresh := model_of(seed=7), link)
            scheduler = scheduled(another)
            assert checkpoint.load(saved[step], fresh, another, link).step == step
            scheduler.load_state_dict(states[step][2])
            run(fresh, another, scheduler, link.rank, range(step + 1, STEPS + 1))
            another.finish()
            assert_same(snapshot(fresh), straight, f"checkpoint of step {step}")

    World(2, step_time=0.0).run(worker)


def _resumed_by_processes(link: Link, folder: Path) -> tuple[list[Tensor], float]:
    model = model_of()
    opt = warm("synchronous, MT-DAO", model, link)
    train(model, opt, link.rank, 7)  # type: ignore[arg-type]
    path = checkpoint.save(folder, model, opt, link, extra=opt.meter.state_dict())
    again = warm("synchronous, MT-DAO", other := model_of(seed=3), link)
    again.meter.load_state_dict(checkpoint.load(path, other, again, link).extra, handshake_repeats=True)
    for each, optimizer in ((model, opt), (other, again)):
        train(each, optimizer, link.rank, 5, first=8)  # type: ignore[arg-type]
        optimizer.finish()
    assert_same(snapshot(model), snapshot(other))
    assert again.stats()["sent"] == opt.stats()["sent"], "bytes of the start are counted, before and after a resume"
    return snapshot(model), opt.stats()["sent"]


def test_on_real_processes_as_in_the_simulator(tmp_path: Path, pool: Pool) -> None:
    real = pool.run(_resumed_by_processes, 2, tmp_path / "real")
    simulated = World(2, step_time=0.0).run(lambda link: _resumed_by_processes(link, tmp_path / "simulated"))
    for (mine, sent), (theirs, as_many) in zip(real, simulated, strict=True):
        assert_same(mine, theirs)
        assert sent == as_many


def test_a_grad_scaler_reaches_the_one_at_work() -> None:
    """Scaled by a power of two, so that nothing is rounded."""

    def trained(scaled: bool) -> list[Tensor]:
        model = model_of()
        opt = warm("synchronous, DiLoCo", model, SoloLink())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(1, STEPS + 1):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(x, step).square().mean()).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return snapshot(model)

    assert_same(trained(True), trained(False))


def test_parameters_can_be_added_around_an_inner_optimizer() -> None:
    model, extra = model_of(), nn.Parameter(torch.ones(3))
    opt = warm("synchronous, DiLoCo", model, SoloLink())
    opt.add_param_group({"params": [extra]})
    assert opt.param_groups[-1]["params"] == [extra] and opt.inner.param_groups is opt.param_groups
    for step in range(1, STEPS + 1):
        backward(model, 0, step)
        extra.grad = torch.ones(3)
        opt.step()
    assert float(extra.detach().mean()) < 1 and opt.steps == STEPS
    demo = warm("DeMo, DiLoCo", model_of(), SoloLink())
    with pytest.raises(ConfigError, match="DeMo has no inner optimizer: parameters can be added after its 5 steps"):
        demo.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_what_does_not_fit_is_refused() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="steps must be a whole number of at least 1, got 0"):
        WarmStart(adamw(model.parameters()), SoloLink(), steps=0, then=diloco)
    with pytest.raises(ConfigError, match=r"must be a torch\.optim\.Optimizer, got list"):
        WarmStart(list(model.parameters()), SoloLink(), then=diloco)  # type: ignore[arg-type]
    bad: Callable = lambda inner, link: inner  # noqa: E731
    with pytest.raises(ConfigError, match=r"must make a thinwire optimizer of \(inner, link\), got a AdamW"):
        WarmStart(adamw(model.parameters()), SoloLink(), then=diloco, start=bad)
    opt = warm("synchronous, DiLoCo", model, SoloLink())
    with pytest.raises(ConfigError, match="WarmStart cannot be the inner optimizer of LocalSGD: it uses a link"):
        LocalSGD(opt, SoloLink(), H=2)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(opt)
    with pytest.raises(AttributeError, match="nothing"):
        opt.nothing  # noqa: B018
    with pytest.raises(CheckpointError, match="thinwire_step is None"):
        opt.load_state_dict({"state": {}, "param_groups": [{"params": []}]})
    train(model, opt, 0, 2)  # type: ignore[arg-type]
    state = copy.deepcopy(opt.state_dict())
    state["param_groups"][0]["thinwire_step"] = START + 2  # of the method, whose slots it lacks
    with pytest.raises(CheckpointError, match="anchor"):
        opt.load_state_dict(state)
    assert opt.starting and isinstance(opt.at_work, DataParallel), "what is refused changes nothing"
    train(model, opt, 0, 2, first=3)  # type: ignore[arg-type]
    assert opt.steps == 4
