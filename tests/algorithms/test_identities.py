"""The limits in which the methods must equal each other or something known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.conformance.training import adamw, assert_close, assert_same, backward, build, model_of, sgd, snapshot, train
from tests.processes import Pool
from thinwire import Dense, Link, Metered, SoloLink, Warmup, World
from thinwire.errors import ConfigError
from thinwire.links import TorchLink
from thinwire.links.ddp import MeteredDDP
from thinwire.schedules import Every


def run(name: str, workers: int = 3, steps: int = 12, *, inner: Callable[[Any], Any] = sgd, **settings: Any) -> list:
    def worker(link: Link) -> list:
        model = model_of()
        opt = build(name, model.parameters(), link, inner=inner, **settings)
        train(model, opt, link.rank, steps)
        return snapshot(model)

    return World(workers).run(worker)


def all_close(a: list, b: list) -> None:
    for x, y in zip(a, b, strict=True):
        assert_close(x, y)


def test_local_sgd_with_h_1_is_data_parallel_sgd() -> None:
    all_close(run("local-sgd", H=1), run("data-parallel"))


def test_diloco_with_outer_sgd_of_lr_1_is_local_sgd() -> None:
    for inner in (sgd, adamw):
        diloco = run("diloco", H=4, outer_lr=1.0, outer_momentum=0.0, inner=inner)
        all_close(diloco, run("local-sgd", H=4, inner=inner))


def test_diloco_with_h_1_and_outer_sgd_of_lr_1_is_data_parallel_sgd() -> None:
    all_close(run("diloco", H=1, outer_lr=1.0, outer_momentum=0.0), run("data-parallel"))


def test_warmup_is_synchronous_then_local() -> None:
    warm = run("local-sgd", H=Warmup(12, Every(100)))
    all_close(warm, run("data-parallel"))
    a, b, _ = run("local-sgd", H=Warmup(4, Every(100)))
    assert not torch.equal(a[0], b[0]), "after the warm-up the workers go their own ways"


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_torchs_sgd_on_the_mean_difference(nesterov: bool) -> None:
    """DiLoCo's outer optimizer is torch.optim.SGD, momentum and Nesterov form included, bit for bit."""
    H, rounds, workers = 3, 4, 2
    ours = run("diloco", workers, H * rounds, H=H, outer_lr=0.7, outer_momentum=0.9, nesterov=nesterov)
    models = [model_of() for _ in range(workers)]
    inners = [sgd(m.parameters()) for m in models]
    reference = model_of()
    outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=nesterov)
    for step in range(1, H * rounds + 1):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            backward(model, rank, step)
            inner.step()
            inner.zero_grad()
        if step % H == 0:
            for p, *theirs in zip(reference.parameters(), *(m.parameters() for m in models), strict=True):
                if p.requires_grad:
                    p.grad = sum(p.detach() - x.detach() for x in theirs) / workers
            outer.step()
            for model in models:
                model.load_state_dict(reference.state_dict())
    for params in ours:
        assert_close(params, snapshot(reference))


def test_local_adam_averages_the_moments() -> None:
    def worker(link: Link) -> tuple:
        model = model_of()
        opt = build("local-adam", model.parameters(), link, H=4)
        train(model, opt, link.rank, 3)
        before = {k: [t.clone() for t in v] for k, v in opt.inner_state().items()}
        train(model, opt, link.rank, 1, first=4)
        return before, opt.inner_state(), snapshot(model)

    (before_a, after_a, _), (before_b, after_b, _) = World(2).run(worker)
    assert set(after_a) == {"exp_avg", "exp_avg_sq"}
    for key in after_a:
        assert any(not torch.equal(x, y) for x, y in zip(before_a[key], before_b[key], strict=True))
        assert_same(after_a[key], after_b[key])


@pytest.mark.parametrize("bad_rank", [None, 1], ids=["no gradient for one parameter", "and a NaN on one worker"])
def test_local_adam_averages_moments_that_a_worker_has_not_made_yet(bad_rank: int | None) -> None:
    def worker(link: Link) -> tuple:
        model = model_of()
        opt = build("local-adam", model.parameters(), link, H=1, alarm_every=1)
        backward(model, link.rank, 1)  # an odd step: one parameter has no gradient
        if link.rank == bad_rank:
            model.first.weight.grad.fill_(float("nan"))
        opt.step()
        opt.zero_grad()
        train(model, opt, link.rank, 2, first=2)
        return snapshot(model), opt.inner_state(), opt.aborted_rounds

    (a, moments_a, aborted), (b, moments_b, _) = World(2).run(worker)
    assert aborted == 0
    assert_same(a, b)
    assert len(moments_a["exp_avg"]) == 5
    for key in moments_a:
        assert_same(moments_a[key], moments_b[key])


def test_local_adam_refuses_an_inner_state_that_does_not_begin_at_zero() -> None:
    with pytest.raises(ConfigError, match="NAdam keeps 'mu_product', which does not begin at zero"):
        build("local-adam", model_of().parameters(), SoloLink(), H=1, inner=lambda p: torch.optim.NAdam(p))


def test_local_sgd_refuses_a_wire_that_would_round_the_weights() -> None:
    with pytest.raises(ConfigError, match=r"DiLoCo\(outer_lr=1"):
        build("local-sgd", model_of().parameters(), SoloLink(), codec=Dense("bf16"))
    build("local-sgd", model_of(dtype=torch.bfloat16).parameters(), SoloLink(), codec=Dense("bf16"))


def test_diloco_on_a_bf16_wire_stays_close_to_fp32() -> None:
    narrow, wide = run("diloco", codec=Dense("bf16")), run("diloco", codec=Dense("fp32"))
    for a, b in zip(narrow, wide, strict=True):
        assert not all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert_close(a, b, 2e-3)


def test_diloco_keeps_float32_state_for_bf16_parameters() -> None:
    """A small outer step on a large weight would be lost in bf16; the anchor remembers it."""
    model = model_of(dtype=torch.bfloat16)
    opt = build("diloco", model.parameters(), SoloLink())
    assert all(t.dtype == torch.float32 for t in [*opt.slot("anchor"), *opt.slot("momentum")])
    train(model, opt, 0, 8)
    for x, a in zip(opt.params(), opt.slot("anchor"), strict=True):
        assert torch.equal(x, a.to(torch.bfloat16))
    assert any(not torch.equal(a, a.to(torch.bfloat16).float()) for a in opt.slot("anchor"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"H": 0}, "H must be a whole number of at least 1, got 0"),
        ({"H": -3}, "got -3"),
        ({"H": 2.5}, "got 2.5"),
        ({"outer_lr": 0.0}, "outer_lr must be above zero and finite, got 0.0"),
        ({"outer_lr": float("nan")}, "got nan"),
        ({"outer_lr": float("inf")}, "got inf"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"alarm_every": -1}, "alarm_every must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("diloco", model_of().parameters(), SoloLink(), **settings)


def test_wrong_objects_are_refused_by_name() -> None:
    params = list(model_of().parameters())
    with pytest.raises(ConfigError, match=r"must be a torch.optim.Optimizer, got list"):
        thinwire.DiLoCo(params, SoloLink())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be a thinwire Link .* got NoneType"):
        thinwire.DiLoCo(sgd(params), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be the inner optimizer of DiLoCo"):
        thinwire.DiLoCo(thinwire.DataParallel(sgd(params), SoloLink()), SoloLink())


def test_what_cannot_be_wrapped_is_refused_by_name() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match="LBFGS evaluates its closure several times"):
        thinwire.DiLoCo(torch.optim.LBFGS([weights]), SoloLink())
    with pytest.raises(ConfigError, match=r"real floating-point tensors, got torch.complex64 of shape \(2,\)"):
        thinwire.DiLoCo(sgd([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]), SoloLink())
    with pytest.raises(ConfigError, match="DiLoCo has nothing to train"):
        thinwire.DiLoCo(sgd([torch.nn.Parameter(torch.ones(2), requires_grad=False)]), SoloLink())


def test_parameters_added_behind_its_back_are_refused() -> None:
    inner = sgd([torch.nn.Parameter(torch.ones(3))])
    opt = thinwire.DiLoCo(inner, SoloLink())
    inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match=r"1 parameters were added to the inner optimizer .* add_param_group of DiLoCo"):
        opt.step()


def test_copies_are_refused_and_state_dict_fires_no_hooks() -> None:
    model = model_of()
    inner = adamw(model.parameters())
    opt = thinwire.DiLoCo(inner, SoloLink())
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: use state_dict\(\)"):
        copy.deepcopy(opt)
    fired = []
    inner.register_step_pre_hook(lambda *_: fired.append("pre"))
    inner.register_step_post_hook(lambda *_: fired.append("post"))
    opt.state_dict()
    assert fired == []
    train(model, opt, 0, 1)
    assert fired == ["pre", "post"]


# --- Gates -----------------------------------------------------------------------------------------------------------------


def test_workers_started_differently_are_refused_by_name_on_all_workers() -> None:
    def worker(link: Link) -> str:
        model = model_of()
        opt = build("diloco", model.parameters(), link, H=2, outer_lr=0.7 if link.rank != 2 else 0.5)
        try:
            train(model, opt, link.rank, 2)
        except thinwire.errors.FingerprintMismatch as refusal:
            return str(refusal)
        return "accepted"

    for message in World(3).run(worker):
        assert "outer_lr is 0.7 on rank 0 and 0.5 on rank 2" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rank: {"codec": Dense("bf16" if rank else "fp32")}, "codec is"),
        (lambda rank: {"inner": adamw if rank else sgd}, "inner is 'SGD' on rank 0 and 'AdamW' on rank 1"),
        (lambda rank: {"H": 2 + 2 * rank}, r"H is 2 on rank 0 and 4 on rank 1"),
    ],
)
def test_each_kind_of_difference_is_named(change: Callable[[int], dict], named: str) -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = build("diloco", model.parameters(), link, **{"H": 2, **change(link.rank)})
        train(model, opt, link.rank, 4)

    with pytest.raises(thinwire.errors.FingerprintMismatch, match=named):
        World(2).run(worker)


def test_other_shapes_are_refused() -> None:
    def worker(link: Link) -> None:
        model = torch.nn.Linear(4, 4 + link.rank)
        opt = build("data-parallel", model.parameters(), link)
        model(torch.ones(1, 4)).sum().backward()
        opt.step()

    with pytest.raises(
        thinwire.errors.FingerprintMismatch, match=r"float32\[4, 4\]' on rank 0 and 'float32\[5, 4\]' on rank 1"
    ):
        World(2).run(worker)


@pytest.mark.parametrize(("name", "what"), [("data-parallel", "param"), ("local-sgd", "anchor"), ("diloco", "anchor")])
def test_workers_that_start_from_other_weights_are_refused(name: str, what: str) -> None:
    def worker(link: Link) -> None:
        model = model_of(seed=link.rank)
        train(model, build(name, model.parameters(), link), link.rank, 1)

    with pytest.raises(
        thinwire.errors.FingerprintMismatch,
        match=f"the starting value of '{what}' differs: its hash is '.*' on rank 0 .*: seed all",
    ):
        World(2).run(worker)


def _broadcast(link: Link) -> tuple[list, list]:
    torch.manual_seed(link.rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model.append(torch.nn.Linear(3, 1).to(torch.bfloat16))
    model[0].bias.data[0] = -0.0
    model[1](model[0](torch.randn(8, 4)))  # other statistics on every worker
    before = [t.clone() for t in model.state_dict().values()]
    thinwire.broadcast(link, model)
    return before, [t.clone() for t in model.state_dict().values()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast_makes_all_workers_start_from_the_first_ones_weights(size: int, pool: Pool) -> None:
    for workers in (World(size).run(_broadcast), pool.run(_broadcast, size)):
        first = workers[0][0]
        for rank, (before, after) in enumerate(workers):
            assert rank == 0 or not torch.equal(before[0], first[0]), "they did differ"
            assert [t.dtype for t in after] == [t.dtype for t in first]
            for a, b in zip(after, first, strict=True):
                assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), "bit for bit"


def test_broadcast_refuses_another_model() -> None:
    with pytest.raises(thinwire.errors.FingerprintMismatch, match=r"tensor\[0\] is 'float32\[2, 2\]' on rank 0"):
        World(2).run(lambda link: thinwire.broadcast(link, torch.nn.Linear(2, 2 + link.rank)))


def test_after_a_broadcast_training_begins() -> None:
    def worker(link: Link) -> list:
        model = model_of(seed=link.rank)
        thinwire.broadcast(link, model)
        opt = build("diloco", model.parameters(), link)
        train(model, opt, link.rank, 4)
        return snapshot(model)

    a, b = World(2).run(worker)
    assert_same(a, b)


def test_workers_that_resume_from_different_steps_are_refused() -> None:
    saved = {}
    for steps in (1, 3):
        model = model_of()
        opt = build("diloco", model.parameters(), SoloLink())
        train(model, opt, 0, steps)
        saved[steps] = opt.state_dict()

    def worker(link: Link) -> None:
        model = model_of()
        opt = build("diloco", model.parameters(), link)
        opt.load_state_dict(saved[1 + 2 * link.rank])
        train(model, opt, link.rank, 1)

    with pytest.raises(thinwire.errors.FingerprintMismatch, match="steps so far is 1 on rank 0 and 3 on rank 1"):
        World(2).run(worker)


def test_the_divergence_alarm_names_what_and_who() -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = build("diloco", model.parameters(), link, H=2, alarm_every=2)
        train(model, opt, link.rank, 2)
        if link.rank == 1:
            with torch.no_grad():
                opt.slot("momentum")[0] += 1e-6  # a cosmic ray
        train(model, opt, link.rank, 2, first=3)

    with pytest.raises(thinwire.errors.Diverged, match=r"round 2: .* momentum on rank 1"):
        World(2).run(worker)


def test_the_divergence_alarm_may_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link) -> int:
        model = model_of()
        opt = build("data-parallel", model.parameters(), link, alarm_every=1, on_divergence="warn")
        train(model, opt, link.rank, 1)
        if link.rank == 1:
            with torch.no_grad():
                model.gain.add_(1.0)
        train(model, opt, link.rank, 2, first=2)
        return opt.steps

    assert World(2).run(worker) == [3, 3]
    assert any("param on rank 1" in r.getMessage() for r in caplog.records)


# --- DataParallel against torch's own ------------------------------------------------------------------------------------


def test_a_parameter_without_gradient_anywhere_is_left_alone() -> None:
    """Weight decay must not shrink what no worker used; a gradient on any worker reaches all."""

    def worker(link: Link) -> tuple:
        used, unused, sometimes = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        opt = build("data-parallel", [used, unused, sometimes], link)
        used.grad = torch.ones(3)
        if link.rank == 0:
            sometimes.grad = torch.full((3,), 2.0)
        opt.step()
        return [p.detach().clone() for p in (used, unused, sometimes)], sometimes.grad.clone()

    (a, grad), (b, _) = World(2).run(worker)
    assert_same(a, b)
    assert torch.equal(a[1], torch.ones(3))
    assert not torch.equal(a[2], torch.ones(3))
    assert torch.equal(grad, torch.ones(3)), "mean over all workers, a missing gradient counting as zero"


def _ours_and_torchs(link: TorchLink, steps: int) -> tuple:
    ours = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    torch.manual_seed(3)
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.5)
    theirs = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    theirs.load_state_dict(ours.state_dict())
    opt = thinwire.DataParallel(adamw(ours.parameters()), link)
    ddp, inner = DistributedDataParallel(theirs, process_group=link.group), adamw(theirs.parameters())
    for step in range(steps):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * link.rank + step))
        for model, optimizer in ((ours, opt), (ddp, inner)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(ours), snapshot(theirs)


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel_agrees_with_torchs_ddp(size: int, pool: Pool) -> None:
    for ours, theirs in pool.run(_ours_and_torchs, size, 20):
        assert_close(ours, theirs, 1e-6)


def _metered_ddp(link: TorchLink) -> tuple[int, int, int]:
    model = torch.nn.Linear(100, 50)
    metered = Metered(link)
    ddp = MeteredDDP(model, metered)
    for _ in range(3):
        ddp.module(torch.ones(2, 100)).sum().backward()
        ddp.backward_done()
    totals = metered.meter.totals
    return totals.sent, totals.rounds, sum(p.numel() for p in model.parameters())


def test_the_bytes_of_torchs_ddp_are_metered_by_the_same_formula(pool: Pool) -> None:
    for sent, rounds, parameters in pool.run(_metered_ddp, 4):
        assert rounds == 3
        assert sent == 3 * (2 * 4 * parameters * 3 // 4)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("data-parallel", lambda P, T: P + T),
        ("local-sgd", lambda P, T: P),
        ("local-adam", lambda P, T: 3 * P),
        ("diloco", lambda P, T: P),
    ],
)
@pytest.mark.parametrize(("wire", "b"), [("fp32", 4), ("bf16", 2)])
def test_bytes_are_the_documented_formula(name: str, values: Callable[[int, int], int], wire: str, b: int) -> None:
    """2 N (M - 1) / M with N = b (values + M), as each method's page has it: P parameters in T tensors, M workers."""
    dtype = torch.bfloat16 if wire == "bf16" else torch.float32

    def worker(link: Link) -> tuple:
        model, metered = model_of(dtype=dtype), Metered(link)
        opt = (
            build(name, model.parameters(), metered, H=1, codec=Dense(wire))
            if name != "data-parallel"
            else build(name, model.parameters(), metered, codec=Dense(wire))
        )
        train(model, opt, link.rank, 5)
        trained = [p for p in model.parameters() if p.requires_grad]
        return metered.meter, sum(p.numel() for p in trained), len(trained)

    M = 4
    for meter, P, T in World(M).run(worker):
        rounds = [e for e in meter.recent if e.purpose == "round"]
        assert [e.sent for e in rounds] == [2 * b * (values(P, T) + M) * (M - 1) // M] * 5
