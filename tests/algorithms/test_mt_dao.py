"""MT-DAO by what its paper says of it: retention, noise, alignment, bytes, drift; and by what it is in known limits."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tests.conformance.training import assert_close, assert_same, backward, model_of, snapshot, train
from tests.tiers import first_quick
from thinwire import DCT, MTDAO, Codec, DataParallel, Dense, Float, Int8, Link, Metered, SoloLink, TopK, World
from thinwire.errors import ConfigError
from thinwire.optim import QHADOPT, QHM, QHAdam, QHMuon

Inner = Callable[[Any], torch.optim.Optimizer]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def slow(params: Any) -> torch.optim.Optimizer:
    return QHAdam(params, 0.01, betas=0.99, omegas=0.9)


def averaged_by_hand(rows: Sequence[Tensor]) -> None:
    """All rows of each tensor become their mean."""
    for t in rows:
        t.copy_(t.mean(0, keepdim=True).expand_as(t))


# --- T1: what is left of an agreed momentum, and how noisy it becomes --------------------------------------------------------


@pytest.mark.parametrize(
    ("beta", "K", "kept"),
    [(0.9, 32, 0.034), (0.99, 32, 0.725), (0.999, 32, 0.968), (0.995, 128, 0.526), (0.999, 128, 0.880)],
)
@pytest.mark.parametrize("kind", [QHM, QHAdam])
def test_of_an_agreed_momentum_beta_to_the_k_is_left(kind: type, beta: float, K: int, kept: float) -> None:
    def worker(link: Link) -> tuple[Tensor, Tensor]:
        p = nn.Parameter(torch.zeros(50))
        opt = MTDAO(kind([p], 0.01, betas=beta, omegas=0.9), link, H=K)
        g = torch.Generator().manual_seed(link.rank)
        seen = []
        for step in range(1, 2 * K + 1):
            p.grad = torch.randn(50, generator=g) if step <= K else torch.zeros(50)
            opt.step()
            if step % K == 0:
                seen.append(opt.inner_state()["exp_avg"][0].clone())
        return seen[0], seen[1]

    for agreed, later in World(2).run(worker):
        torch.testing.assert_close(later, beta**K * agreed, rtol=2e-5, atol=0)
        assert float(later.norm() / agreed.norm()) == pytest.approx(kept, abs=6e-4)


@pytest.mark.parametrize(("beta", "K", "gain"), [(0.9, 32, 0.0526), (0.99, 32, 0.00238), (0.999, 32, 0.000031), (0.9, 4, None)])
def test_the_noise_of_a_fresh_momentum_is_the_papers(beta: float, K: int, gain: float | None) -> None:
    n, sigma = 400_000, 3.0
    p = nn.Parameter(torch.zeros(n))
    opt = MTDAO(QHM([p], 0.0, betas=beta, omegas=1.0), SoloLink(), H=K)
    g = torch.Generator().manual_seed(0)
    for _ in range(K):
        p.grad = torch.randn(n, generator=g).mul_(sigma)
        opt.step()
    found = opt.inner_state()["exp_avg"][0].double().var().item()
    assert found == pytest.approx((1 - beta) / (1 + beta) * (1 - beta ** (2 * K)) * sigma**2, rel=1e-2)
    if gain is not None:
        assert found == pytest.approx(gain * sigma**2, rel=3e-2)


# --- T2: workers go on in one direction --------------------------------------------------------------------------------------


def alignment(beta: float, omega: float, *, d: int = 400, M: int = 4, K: int = 32, rounds: int = 12) -> tuple[float, float]:
    """Cosine of a worker's path in a round to the mean path, and to the momentum agreed on before it."""

    def worker(link: Link) -> list[tuple[Tensor, Tensor]]:
        h, g = torch.logspace(-2, 0, d), torch.Generator().manual_seed(link.rank + 1)
        p = nn.Parameter(torch.ones(d))
        opt = MTDAO(QHAdam([p], 2e-3, betas=beta, omegas=omega), link, H=K)
        seen = []
        for _ in range(rounds):
            start, u = p.detach().clone(), opt.inner_state()["exp_avg"][0].clone()
            for k in range(K):
                p.grad = h * p.detach() + torch.randn(d, generator=g)
                if k == K - 1:
                    seen.append((p.detach() - start, u))
                opt.step()
        return seen

    workers = World(M).run(worker)
    to_mean, to_momentum = [], []
    for now in list(zip(*workers, strict=True))[rounds // 2 :]:
        mean = torch.stack([path for path, _ in now]).mean(0)
        to_mean += [float(cosine_similarity(path, mean, dim=0)) for path, _ in now]
        to_momentum += [float(cosine_similarity(-path, u, dim=0)) for path, u in now]
    return sum(to_mean) / len(to_mean), sum(to_momentum) / len(to_momentum)


@pytest.mark.slow  # three trainings; the identities above are what it rests on
def test_a_slow_momentum_keeps_workers_aligned() -> None:
    fast, medium, ours = alignment(0.9, 1.0), alignment(0.95, 1.0), alignment(0.999, 0.95)
    for i in range(2):
        assert fast[i] < medium[i] < ours[i], (fast, medium, ours)
    assert ours[0] > 0.99
    assert ours[1] > 0.95
    assert fast[0] == pytest.approx(0.865, abs=0.05)
    assert medium[0] == pytest.approx(0.916, abs=0.05)


# --- T3: a slow momentum alone fails, with some of the gradient it does not --------------------------------------------------


def rosenbrock(x: Tensor) -> Tensor:
    """Its gradient, [..., 2]."""
    a, r = x[..., 0], x[..., 1] - x[..., 0] ** 2
    return torch.stack([-2 * (1 - a) - 400 * a * r, 200 * r], -1)


@pytest.mark.parametrize(
    ("beta", "omega", "distance"), first_quick([(0.9999, 0.95, 0.139), (0.9, 1.0, 0.26), (0.9999, 1.0, 1.57)])
)
def test_rosenbrocks_valley_as_the_paper_walks_it(beta: float, omega: float, distance: float) -> None:
    """256 workers as rows of one tensor, every state averaged over the rows; in the simulator it would take minutes."""
    M, g = 256, torch.Generator().manual_seed(0)
    x = nn.Parameter(torch.tensor([-1.0, 1.5]).repeat(M, 1))
    opt = QHAdam([x], 3e-3, betas=beta, omegas=omega, beta2=0.999)
    x.grad = torch.empty_like(x)
    for step in range(1, 6001):
        x.grad.normal_(generator=g).mul_(2.0).add_(rosenbrock(x.detach()))
        opt.step()
        if step % 32 == 0:
            averaged_by_hand([x.data, opt.state[x]["exp_avg"], opt.state[x]["exp_avg_sq"]])
    assert float((x.detach().mean(0) - 1).norm()) == pytest.approx(distance, rel=0.1)


@pytest.mark.parametrize(("beta", "omega"), [(0.9999, 1.0), (0.9999, 0.95)])
def test_rows_of_one_tensor_are_the_workers_of_a_world(beta: float, omega: float) -> None:
    M, steps, K, start = 8, 96, 32, torch.tensor([-1.0, 1.5])
    noise = torch.randn(M, steps, 2, generator=torch.Generator().manual_seed(1))

    def worker(link: Link) -> Tensor:
        x = nn.Parameter(start.clone())
        opt = MTDAO(QHAdam([x], 3e-3, betas=beta, omegas=omega, beta2=0.999), link, H=K)
        for t in range(steps):
            x.grad = rosenbrock(x.detach()) + 2 * noise[link.rank, t]
            opt.step()
        return x.detach().clone()

    rows = nn.Parameter(start.repeat(M, 1))
    opt = QHAdam([rows], 3e-3, betas=beta, omegas=omega, beta2=0.999)
    for t in range(steps):
        rows.grad = rosenbrock(rows.detach()) + 2 * noise[:, t]
        opt.step()
        if (t + 1) % K == 0:
            averaged_by_hand([rows.data, opt.state[rows]["exp_avg"], opt.state[rows]["exp_avg_sq"]])
    for x, row in zip(World(M).run(worker), rows.detach(), strict=True):
        torch.testing.assert_close(x, row, rtol=1e-4, atol=1e-5)


# --- T6, T7 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])  # of three, a sum divided by three may be off by its last bit
@pytest.mark.parametrize("kind", [QHAdam, QHADOPT, QHM, QHMuon])
def test_identical_batches_averaged_at_every_step_are_one_worker_bit_for_bit(kind: type, workers: int) -> None:
    def run(link: Link | None) -> list[Tensor]:
        model = model_of()
        inner = kind(model.parameters(), 0.01, betas=(0.9, 0.99), omegas=(0.2, 0.7))
        opt = inner if link is None else MTDAO(inner, link, H=1)
        for step in range(1, 13):
            backward(model, 0, step)
            opt.step()
            opt.zero_grad()
        return snapshot(model)

    alone = run(None)
    for params in World(workers).run(run):
        assert_same(params, alone)


def test_a_worker_that_dies_at_a_round_is_missed_by_nobody_and_rejoins_by_a_copy() -> None:
    d, K = 60, 8
    h = torch.logspace(-1, 0, d)
    losses: list[float] = []

    def phase(states: list[tuple[Tensor, dict]] | None, workers: int, steps: int, seed: int) -> list[tuple[Tensor, dict]]:
        def worker(link: Link) -> tuple[Tensor, dict, list[float]]:
            p = nn.Parameter(torch.ones(d))
            opt = MTDAO(QHAdam([p], 0.01, betas=0.99, omegas=0.95), link, H=K, alarm_every=1)
            if states is not None:
                x, saved = states[link.rank]
                p.data.copy_(x)
                opt.load_state_dict(saved)
            g, seen = torch.Generator().manual_seed(1000 * seed + link.rank), []
            for _ in range(steps):
                p.grad = h * p.detach() + 0.3 * torch.randn(d, generator=g)
                opt.step()
                seen.append(float(0.5 * (h * p.detach() ** 2).sum()))
            return p.detach().clone(), opt.state_dict(), seen

        done = World(workers).run(worker)
        losses.extend(max(now) for now in zip(*(seen for *_, seen in done), strict=True))
        for x, _, _ in done:
            assert torch.equal(x, done[0][0]), "they end with a round"
        return [(x, saved) for x, saved, _ in done]

    four = phase(None, 4, 5 * K, 1)
    three = phase(four[:3], 3, 3 * K, 2)
    phase([*three, three[1]], 4, 4 * K, 3)
    assert len(losses) == 12 * K
    for before, after in itertools.pairwise(losses):
        assert after < 1.1 * before + 0.02 * losses[0], "no spike at any step"
    assert losses[-1] < 0.3 * losses[0]


# --- Bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "steps", "ratio"),
    [
        (lambda p, link: MTDAO(slow(p), link, H=32), 96, 32 / 3),
        (lambda p, link: MTDAO.des_loc(adam(p), link), 1536, 512 / 3),
        (lambda p, link: MTDAO.des_loc(adam(p), link, H=4), 48, 8 / 3),
        (lambda p, link: MTDAO(QHAdam(p, betas=(0.9, 0.999), omegas=(0.05, 0.9)), link, H=4, K_u=[8, 16], K_v=16), 32, 2.0),
        (lambda p, link: MTDAO(QHM(p), link, H=32), 64, 16.0),
    ],
    ids=["all 32", "des-loc", "des-loc of 4", "two momenta", "sgdm"],
)
def test_bytes_are_units_over_periods(make: Any, steps: int, ratio: float) -> None:
    P, M = 1000, 2

    def worker(link: Link) -> tuple[int, int, int]:
        ours, theirs = Metered(link), Metered(link)
        p, q = nn.Parameter(torch.zeros(P)), nn.Parameter(torch.zeros(P))
        opt, ddp = make([p], ours), DataParallel(torch.optim.SGD([q], 0.1), theirs, alarm_every=0)
        for step in range(steps):
            p.grad = q.grad = torch.ones(P)
            opt.step()
            if step < 3:
                ddp.step()
        rounds, every = ([e for e in m.meter.recent if e.purpose == "round"] for m in (ours, theirs))
        # Behind a message stand a status number of each worker, and with gradients one per tensor.
        return sum(e.payload - 4 * M for e in rounds), sum(e.payload - 4 * (M + 1) for e in every) // 3, len(rounds)

    for ours, theirs, rounds in World(M).run(worker):
        assert theirs == 4 * P
        assert theirs * steps / ours == pytest.approx(ratio, rel=1e-12)
        assert rounds < steps / 3


def test_the_length_of_a_full_message_is_known_beforehand() -> None:
    p = nn.Parameter(torch.zeros(1000))
    assert MTDAO(slow([p]), SoloLink()).message_nbytes() == 4 * (3 * 1000 + 1)
    assert MTDAO(slow([p]), SoloLink(), codec=Int8()).message_nbytes() < 4500


# --- DES-LOC's drift bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.9, 0.99])
@pytest.mark.parametrize("K", [1, 8, 32])
def test_between_averages_moments_drift_no_further_than_the_bounds(beta: float, K: int) -> None:
    rho, b2 = 0.5, 0.99
    p = nn.Parameter(torch.zeros(64))
    inner = QHAdam([p], 1e-3, betas=beta, omegas=1.0, beta2=b2)
    opt = MTDAO(inner, SoloLink(), H=4 * K, clip_value=rho)
    g = torch.Generator().manual_seed(0)
    seen = []
    for step in range(12 * K + 200):
        signs = torch.where(torch.arange(64) < 32, 1.0, -1.0) * (1 if step < 6 * K + 100 else -1)
        p.grad = 1e3 * signs if step % 2 else 10 * torch.randn(64, generator=g).abs() * signs
        opt.step()
        seen.append([opt.inner_state()[name][0].clone() for name in ("exp_avg", "exp_avg_sq")])
    u, v = (torch.stack(each).double() for each in zip(*seen, strict=True))
    drift_u, drift_v = (float((s[K:] - s[:-K]).abs().max()) for s in (u, v))
    assert drift_u <= 2 * rho * (1 - beta**K) * (1 + 1e-5)
    assert drift_v <= 2 * rho**2 * (1 - b2**K) * (1 + 1e-5)
    assert drift_u > 0.5 * 2 * rho * (1 - beta**K), "and the test comes near the bound"


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_clip_norm_is_torchs(max_norm: float) -> None:
    ours, theirs = model_of(), model_of()
    opt, inner = MTDAO(slow(ours.parameters()), SoloLink(), H=3, clip_norm=max_norm), slow(theirs.parameters())
    for step in range(1, 10):
        backward(ours, 0, step)
        opt.step()
        opt.zero_grad()
        backward(theirs, 0, step)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        inner.step()
        inner.zero_grad()
    assert_close(snapshot(ours), snapshot(theirs))


def test_clip_value_is_torchs_bit_for_bit() -> None:
    ours, theirs = model_of(), model_of()
    opt, inner = MTDAO(slow(ours.parameters()), SoloLink(), H=3, clip_value=0.05), slow(theirs.parameters())
    for step in range(1, 10):
        backward(ours, 0, step)
        opt.step()
        opt.zero_grad()
        backward(theirs, 0, step)
        torch.nn.utils.clip_grad_value_(theirs.parameters(), 0.05)
        inner.step()
        inner.zero_grad()
    assert_same(snapshot(ours), snapshot(theirs))


# --- Known methods as limits -------------------------------------------------------------------------------------------------


def by_hand(inner: Inner, workers: int, steps: int, *, H: int, K_u: int, K_v: int, outer: Any = None) -> list[list[Tensor]]:
    """Models and torch optimizers in a row; parameters and moments averaged at their periods."""
    models = [model_of() for _ in range(workers)]
    opts = [inner(m.parameters()) for m in models]
    reference = model_of()
    step_outer = None if outer is None else outer(reference.parameters())
    # A moment that has no gradient yet is zero, not missing.
    trained = [[p for p in m.parameters() if p.requires_grad] for m in models]
    for step in range(1, steps + 1):
        for rank, (model, opt) in enumerate(zip(models, opts, strict=True)):
            backward(model, rank, step)
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            for k, same in enumerate(zip(*trained, strict=True)):
                if step % H == 0:
                    mean = torch.stack([p.detach() for p in same]).mean(0)
                    if step_outer is not None:
                        target = [p for p in reference.parameters() if p.requires_grad][k]
                        target.grad = target.detach() - mean
                    else:
                        for p in same:
                            p.copy_(mean)
                for name, period in (("exp_avg", K_u), ("exp_avg_sq", K_v)):
                    if step % period == 0 and name in opts[0].state[same[0]]:
                        mean = torch.stack([o.state[p][name] for o, p in zip(opts, same, strict=True)]).mean(0)
                        for o, p in zip(opts, same, strict=True):
                            o.state[p][name].copy_(mean)
            if step_outer is not None and step % H == 0:
                step_outer.step()
                for model in models:
                    model.load_state_dict(reference.state_dict())
    return [snapshot(m) for m in models]


def with_us(inner: Inner, workers: int, steps: int, **settings: Any) -> list[list[Tensor]]:
    def worker(link: Link) -> list[Tensor]:
        model = model_of()
        train(model, MTDAO(inner(model.parameters()), link, alarm_every=1, **settings), link.rank, steps)
        return snapshot(model)

    return World(workers).run(worker)


@pytest.mark.parametrize(("H", "K_u", "K_v"), [(4, 4, 4), (3, 6, 12), (6, 2, 4)], ids=["local adam", "des-loc", "states first"])
def test_with_adamw_it_is_local_adam_and_des_loc(H: int, K_u: int, K_v: int) -> None:
    ours, theirs = with_us(adam, 3, 24, H=H, K_u=K_u, K_v=K_v), by_hand(adam, 3, 24, H=H, K_u=K_u, K_v=K_v)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 1e-5)


def test_all_weight_on_the_momentum_is_local_adam() -> None:
    def qh(params: Any) -> torch.optim.Optimizer:
        return QHAdam(params, 0.01, betas=0.9, omegas=1.0, weight_decay=0.1)

    for a, b in zip(with_us(qh, 3, 24, H=4), with_us(adam, 3, 24, H=4), strict=True):
        assert_close(a, b, 1e-5)


def test_an_outer_momentum_is_the_papers_nesterov_baseline() -> None:
    def nesterov(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0, momentum=0.7, nesterov=True)

    ours = with_us(adam, 3, 24, H=4, outer_momentum=0.7)
    for a, b in zip(ours, by_hand(adam, 3, 24, H=4, K_u=4, K_v=4, outer=nesterov), strict=True):
        assert_close(a, b, 1e-5)


def test_des_loc_averages_momenta_three_times_and_second_moments_six_times_less_often() -> None:
    opt = MTDAO.des_loc(adam([nn.Parameter(torch.zeros(3))]), SoloLink())
    assert {s.name: next(t for t in range(1, 2000) if s.period.due(t)) for s in opt.states} == {
        "param": 256, "exp_avg": 768, "exp_avg_sq": 1536,
    }  # fmt: skip


# --- Resuming ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"H": 4, "K_u": 6, "K_v": 10},
        {"H": 4, "K_u": 6, "K_v": 10, "codec": Int8()},
        {"H": 4, "K_u": 3, "K_v": 8, "outer_momentum": 0.7},
        {"H": 5, "codec": {"exp_avg": DCT(8) >> TopK(4) >> Float("fp32")}},
    ],
    ids=["dense", "int8", "outer", "mixed"],
)
@pytest.mark.parametrize("cut", first_quick([5, 9]))
def test_it_resumes_bit_for_bit_between_rounds(settings: dict[str, Any], cut: int) -> None:
    total = 25
    saved: dict[int, bytes] = {}

    def fresh(link: Link) -> tuple[nn.Module, MTDAO]:
        model = model_of()
        inner = QHAdam(model.parameters(), 0.01, betas=0.99, omegas=0.9, warmup=7, lr_scale=2.0)
        return model, MTDAO(inner, link, **settings)

    def straight(link: Link) -> tuple[list[Tensor], dict]:
        model, opt = fresh(link)
        train(model, opt, link.rank, cut)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
        saved[link.rank] = file.getvalue()
        train(model, opt, link.rank, total - cut, first=cut + 1)
        return snapshot(model), opt.inner_state()

    def resumed(link: Link) -> tuple[list[Tensor], dict]:
        model, opt = fresh(link)
        checkpoint = torch.load(io.BytesIO(saved[link.rank]), weights_only=True)
        model.load_state_dict(checkpoint["model"])
        opt.load_state_dict(checkpoint["opt"])
        train(model, opt, link.rank, total - cut, first=cut + 1)
        return snapshot(model), opt.inner_state()

    for (a, moments_a), (b, moments_b) in zip(World(3).run(straight), World(3).run(resumed), strict=True):
        assert_same(a, b)
        for key in moments_a:
            assert_same(moments_a[key], moments_b[key], key)


def test_a_worker_that_once_skipped_a_step_can_resume_with_the_others() -> None:
    """A bad gradient is one worker's own affair: its count of inner steps is no setting that all must have alike."""

    def worker(link: Link) -> int:
        model = model_of()
        opt = MTDAO(slow(model.parameters()), link, H=4)
        for step in range(1, 9):
            backward(model, link.rank, step)
            if step == 3 and link.rank == 1:
                next(model.first.parameters()).grad = torch.full_like(model.first.weight, math.nan)
            opt.step()
            opt.zero_grad()
        again = model_of()
        again.load_state_dict(model.state_dict())
        second = MTDAO(slow(again.parameters()), link, H=4)
        second.load_state_dict(opt.state_dict())
        train(again, second, link.rank, 4, first=9)
        return second.steps

    assert World(3).run(worker) == [12, 12, 12]


# --- A worker with invalid state -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "dtype"),
    first_quick(
        [
            ({"H": 4}, torch.float32),
            ({"H": 4, "K_u": 8, "K_v": 12}, torch.float32),
            ({"H": 8, "K_u": 4, "K_v": 6}, torch.float32),
            ({"H": 4, "codec": {"exp_avg": Int8()}}, torch.float32),
            ({"H": 4, "codec": {"exp_avg_sq": Dense("bf16")}}, torch.float32),
            ({"H": 8, "K_u": 4, "K_v": 6, "codec": {"exp_avg_sq": Dense("bf16")}}, torch.float32),
            ({"H": 4, "codec": Dense("bf16")}, torch.bfloat16),
            ({"H": 4, "codec": Int8()}, torch.float32),
            ({"H": 4, "outer_momentum": 0.7}, torch.float32),
        ],
        quick=3,
    ),
    ids=["plain", "slow states", "fast states", "int8 momenta", "bf16 v", "fast bf16 v", "all bf16", "int8", "outer"],
)
def test_a_worker_with_invalid_state_is_resynced_by_the_others(settings: dict[str, Any], dtype: torch.dtype) -> None:
    def worker(link: Link) -> tuple:
        model = model_of(dtype=dtype)
        opt = MTDAO(slow(model.parameters()), link, alarm_every=1, **settings)
        train(model, opt, link.rank, 24)
        if link.rank == 1:
            with torch.no_grad():
                model.first.weight.fill_(math.nan)
                opt.inner_state()["exp_avg"][0].fill_(math.inf)
                opt.inner_state()["exp_avg_sq"][1].fill_(math.nan)
        train(model, opt, link.rank, 48, first=25)
        return snapshot(model), opt.inner_state(), opt.aborted_rounds

    results = World(3).run(worker)
    for params, moments, aborted in results:
        assert aborted >= 1
        assert_same(params, results[0][0])
        assert all(bool(torch.isfinite(t).all()) for t in params)
        assert all(float(t.abs().max()) < 5 for t in params), "and they are where they were"
        for tensors in moments.values():
            assert all(bool(torch.isfinite(t).all()) for t in tensors)
        assert all(float(v.min()) >= 0 for v in moments["exp_avg_sq"])


@pytest.mark.parametrize("codec", [None, {"exp_avg": Int8()}], ids=["dense", "int8 momenta"])
def test_the_next_round_resyncs_all_states_at_once_also_after_a_resume(codec: Any) -> None:
    """Even those that are not due then: a second moment of zeros would make steps huge until it is."""

    def worker(link: Link) -> tuple:
        model = model_of()
        opt = MTDAO(slow(model.parameters()), link, H=4, K_u=8, K_v=1000, codec=codec)
        train(model, opt, link.rank, 7)
        if link.rank == 1:
            model.first.weight.data.fill_(math.nan)
            for tensors in opt.inner_state().values():
                tensors[0].fill_(math.nan)
        train(model, opt, link.rank, 1, first=8)
        assert opt.resync == [1]
        again, state = model_of(seed=3), opt.state_dict()
        resumed = MTDAO(slow(again.parameters()), link, H=4, K_u=8, K_v=1000, codec=codec)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        assert resumed.resync == [1]
        train(again, resumed, link.rank, 4, first=9)
        assert resumed.resync == []
        return snapshot(again), resumed.inner_state()

    results = World(3).run(worker)
    for params, moments in results:
        assert_same(params, results[0][0])
        assert_same(moments["exp_avg_sq"], results[0][1]["exp_avg_sq"])
        for mine, theirs in zip(moments["exp_avg"], results[0][1]["exp_avg"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.02)
            assert bool(mine.any())


def test_the_valid_ones_go_on_as_if_the_invalid_one_were_not_there() -> None:
    """Two of three workers average among themselves in the round that resyncs the third."""

    def run(link: Link, invalid: int) -> list[Tensor]:
        model = model_of()
        opt = MTDAO(QHM(model.parameters(), 0.05, betas=0.9, omegas=0.9), link, H=2)
        for step in range(1, 5):
            backward(model, link.rank, step)
            if step == 2 and link.rank == invalid:
                model.first.weight.data.fill_(math.nan)
            opt.step()
            opt.zero_grad()
        return snapshot(model)

    three = World(3).run(lambda link: run(link, 2))
    reference = [model_of() for _ in range(2)]
    opts = [QHM(m.parameters(), 0.05, betas=0.9, omegas=0.9) for m in reference]
    for step in range(1, 5):
        for rank in range(2):
            backward(reference[rank], rank, step)
            opts[rank].step()
            opts[rank].zero_grad()
    for k, p in enumerate(snapshot(reference[0])):
        mean = (p + snapshot(reference[1])[k]) / 2
        for params in three:
            torch.testing.assert_close(params[k], mean, rtol=1e-5, atol=1e-6)


# --- Compressed --------------------------------------------------------------------------------------------------------------

COMPRESSED: list[Codec] = [Int8(), DCT(16) >> TopK(16) >> Float("fp32"), DCT(16) >> TopK(24) >> Int8(), Dense("bf16")]


SIDE = (24, 24)
CURVATURE = torch.logspace(-1, 0, SIDE[0] * SIDE[1]).view(SIDE)
TARGET = torch.randn(SIDE, generator=torch.Generator().manual_seed(5))


@functools.cache
def on_a_quadratic(codec: Codec | None) -> list[tuple[float, int]]:
    """Loss at the end and length of a message, of three workers."""
    d, h, target, H, steps = SIDE, CURVATURE, TARGET, 8, 480

    def run(link: Link) -> tuple[float, int]:
        p = nn.Parameter(torch.zeros(d))
        opt = MTDAO(QHAdam([p], 0.01, betas=0.99, omegas=0.95), link, H=H, codec=codec, alarm_every=1)
        g = torch.Generator().manual_seed(link.rank)
        tail = []
        for step in range(1, steps + 1):
            p.grad = h * (p.detach() - target) + 0.5 * torch.randn(d, generator=g)
            opt.step()
            if step % H == 0:
                assert "averaged param" in opt.shared_state(), "the alarm compares it in every round"
                assert float(opt.inner_state()["exp_avg_sq"][0].min()) >= 0
                tail.append(float(0.5 * (h * (p.detach() - target) ** 2).sum()))
        return sum(tail[-10:]) / 10, opt.message_nbytes()

    return World(3).run(run)


@pytest.mark.parametrize("codec", first_quick(COMPRESSED), ids=repr)
def test_on_a_lossy_wire_parameters_are_equal_second_moments_positive_and_it_arrives(codec: Codec) -> None:
    dense, full = on_a_quadratic(None)[0]
    ours = on_a_quadratic(codec)
    start = float(0.5 * (CURVATURE * TARGET**2).sum())
    assert all(loss == ours[0][0] for loss, _ in ours), "bit-equal parameters"
    assert dense < 0.05 * start
    assert ours[0][0] < 2 * dense + 0.02 * start, (ours[0][0], dense, start)
    assert ours[0][1] < 0.55 * full


# --- Memory, settings --------------------------------------------------------------------------------------------------------


def held(opt: MTDAO) -> float:
    """Numbers of state per parameter element; a few counts of steps are not."""
    tensors = [t for s in (opt.own_state, opt.inner.state) for entries in s.values() for t in entries.values()]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor) and t.numel() > 3) / 600


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, 2),
        ({"K_u": 96, "K_v": 192, "clip_norm": 1.0, "clip_value": 1.0}, 2),
        ({"codec": {"exp_avg": Int8()}}, 2),
        ({"codec": Dense("bf16")}, 4),
        ({"codec": Int8()}, 4),
        ({"on_abort": "restore"}, 3),
        ({"outer_lr": 0.7}, 3),
        ({"outer_momentum": 0.7}, 4),
        ({"outer_momentum": 0.7, "codec": Int8()}, 5),
    ],
    ids=str,
)
def test_memory_is_adams_unless_more_is_asked_for(settings: dict[str, Any], numbers: int) -> None:
    p = nn.Parameter(torch.zeros(30, 20))
    opt = MTDAO(slow([p]), SoloLink(), H=2, **settings)
    assert held(opt) == numbers
    for _ in range(4):
        p.grad = torch.ones_like(p)
        opt.step()
    assert held(opt) == numbers


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"H": 0}, "H must be a whole number of at least 1, got 0"),
        ({"K_u": 0}, "whole number of at least 1, got 0"),
        ({"K_v": 2.5}, r"whole number of at least 1, got 2\.5"),
        ({"K_u": [4, 4]}, r"K_u names 2 periods, but the momenta are \['exp_avg'\]"),
        ({"clip_norm": -1.0}, r"clip_norm must be at least 0 and finite, got -1\.0"),
        ({"clip_value": math.inf}, "clip_value must be at least 0 and finite, got inf"),
        ({"outer_lr": 0.0}, r"outer_lr must be above zero and finite, got 0\.0"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1\.0"),
        ({"codec": {"momentum": Int8()}}, "codec names 'momentum', but the states are param, exp_avg, exp_avg_sq"),
        ({"codec": {"exp_avg_sq": Int8()}}, "exp_avg_sq must not become negative"),
        ({"codec": "int8"}, "must be a thinwire Codec, got 'int8'"),
        ({"codec": {"exp_avg": "int8"}}, "must be a thinwire Codec, got 'int8'"),
        ({"codec": {"param": "int8"}}, "must be a thinwire Codec, got 'int8'"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MTDAO(slow([nn.Parameter(torch.zeros(3))]), SoloLink(), **bad)


def test_it_wraps_optimizers_only() -> None:
    with pytest.raises(ConfigError, match=r"must be a torch.optim.Optimizer, got list"):
        MTDAO([nn.Parameter(torch.zeros(3))], SoloLink())  # type: ignore[arg-type]
