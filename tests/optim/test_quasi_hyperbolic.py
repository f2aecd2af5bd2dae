"""The quasi-hyperbolic optimizers against their formulas as plain loops in float64, and in the limits that have other names."""

from __future__ import annotations

import copy
import io
import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.processes import LIMIT
from tests.tiers import first_quick
from thinwire.errors import ConfigError
from thinwire.optim import QHADOPT, QHM, QHAdam, QHMuon, QuasiHyperbolic, kernels

KINDS = [QHAdam, QHADOPT, QHM, QHMuon]
every = pytest.mark.parametrize("kind", KINDS)
SEVERAL = {  # momenta of the published configurations, and three
    1: ((0.999,), (0.95,)),
    2: ((0.9, 0.999), (0.05, 0.9)),
    3: ((0.5, 0.9, 0.99), (0.2, 0.3, 0.5)),
}


def newton_schulz(D: Tensor) -> Tensor:
    X = D.double() / (D.double().norm() + 1e-7)
    tall = X.shape[0] > X.shape[1]
    X = X.T if tall else X
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return (X.T if tall else X) * 0.2 * math.sqrt(max(D.shape))


def by_formula(
    kind: type,
    x: Tensor,
    grads: Sequence[Tensor | None],
    *,
    lr: float = 1e-3,
    betas: Sequence[float],
    omegas: Sequence[float],
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    """Sections 1.2 to 1.5 of the paper's algorithms, one tensor, float64; a step without a gradient does not count."""
    x = x.detach().double().clone()
    u = [torch.zeros_like(x) for _ in betas]
    v, t, s = torch.zeros_like(x), 0, 0
    rest = 1 - sum(omegas)
    for grad in grads:
        if grad is None:
            continue
        g, t = grad.double(), t + 1
        if kind is QHADOPT:
            if s == 0:
                v, s = g * g, 1
                continue
            n = (g / v.sqrt().clamp(min=eps)).clamp(-(s**0.25), s**0.25)
            u = [b * m + (1 - b) * n for b, m in zip(betas, u, strict=True)]
            x = x * (1 - lr * weight_decay) - lr * (rest * n + sum(w * m for w, m in zip(omegas, u, strict=True)))
            v, s = beta2 * v + (1 - beta2) * g * g, s + 1
            continue
        x = x * (1 - lr * weight_decay)
        u = [b * m + (1 - b) * g for b, m in zip(betas, u, strict=True)]
        if kind is QHM:
            x = x - lr * (rest * g + sum(w * m for w, m in zip(omegas, u, strict=True)))
        elif kind is QHMuon and x.dim() == 2:
            ahead = [(1 - b) * g + b * m if nesterov else m for b, m in zip(betas, u, strict=True)]
            x = x - lr * newton_schulz(rest * g + sum(w * m for w, m in zip(omegas, ahead, strict=True)))
        else:
            v = beta2 * v + (1 - beta2) * g * g
            direction = rest * g + sum(w * m / (1 - b**t) for w, b, m in zip(omegas, betas, u, strict=True))
            x = x - lr * direction / ((v / (1 - beta2**t)).sqrt() + eps)
    return x


def noise(shape: Sequence[int], steps: int, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=g, dtype=torch.float64) for _ in range(steps)]


def parameter(shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 9) -> nn.Parameter:
    return nn.Parameter(noise(shape, 1, seed)[0].to(dtype))


def drive(opt: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Sequence[Tensor | None]]) -> None:
    """One step per entry of `grads[i]`, the gradients of parameter i."""
    for now in zip(*grads, strict=True):
        for p, g in zip(params, now, strict=True):
            p.grad = None if g is None else g.to(p.dtype, copy=True)
        opt.step()


def settings_of(kind: type, N: int) -> dict[str, Any]:
    betas, omegas = SEVERAL[N]
    both = {"betas": betas, "omegas": omegas}
    return both if kind is QHM else {**both, "beta2": 0.99, "eps": 1e-6}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=tolerance, atol=tolerance)


# --- The formulas ----------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("N", SEVERAL)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_its_formula(kind: type, N: int, weight_decay: float) -> None:
    shapes = [(), (7,), (3, 5), (2, 3, 2), (0,)] if kind is not QHMuon else [(), (7,), (3, 5), (9, 4), (0,)]
    params = [parameter(s, seed=i) for i, s in enumerate(shapes)]
    grads = [noise(s, 25, seed=10 + i) for i, s in enumerate(shapes)]
    chosen = {**settings_of(kind, N), "lr": 0.02, "weight_decay": weight_decay}
    expected = [by_formula(kind, p, g, **chosen) for p, g in zip(params, grads, strict=True)]
    drive(kind(params, **chosen), params, grads)
    for p, e in zip(params, expected, strict=True):
        close(p, e, 1e-4 if kind is QHMuon and p.dim() == 2 else 1e-12)  # Newton-Schulz steps are in float32


@pytest.mark.parametrize("kind", [QHAdam, QHADOPT, QHM])
@pytest.mark.parametrize("N", [1, 2])
def test_large_and_odd_layouts_are_the_formula_too(kind: type, N: int) -> None:
    flat = parameter((70_001,))
    transposed = nn.Parameter(parameter((300, 251)).data.t())
    images = nn.Parameter(parameter((5, 4, 6, 3)).data.to(memory_format=torch.channels_last))
    large = nn.Parameter(parameter((70, 16, 8, 8)).data.to(memory_format=torch.channels_last))
    every_other = nn.Parameter(parameter((20, 8)).data[:, ::2])
    params = [flat, transposed, images, large, every_other]
    assert [p.is_contiguous() for p in params] == [True, False, False, False, False]
    grads = [noise(p.shape, 4, seed=i) for i, p in enumerate(params)]
    chosen = {**settings_of(kind, N), "lr": 0.02}
    expected = [by_formula(kind, p, g, **chosen) for p, g in zip(params, grads, strict=True)]
    drive(kind(params, **chosen), params, grads)
    for p, e in zip(params, expected, strict=True):
        close(p, e)


def test_gradients_may_lie_otherwise_than_their_parameter() -> None:
    """What a backward pass through a channels_last convolution gives is not always what the parameter is."""
    plain, turned = parameter((70, 16, 8, 8)), parameter((70, 16, 8, 8))
    a, b = QHAdam([plain], 0.1), QHAdam([turned], 0.1)
    for g in noise((70, 16, 8, 8), 3):
        plain.grad, turned.grad = g.clone(), g.to(memory_format=torch.channels_last)
        a.step()
        b.step()
    assert torch.equal(plain, turned)


@every
@pytest.mark.parametrize("dtype", first_quick([torch.float32, torch.bfloat16]))
def test_how_tensors_are_cut_changes_no_bit(kind: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(), (1000,), (33, 7), (5, 4, 3, 3), (17,), (64, 4)]

    def run(piece: int) -> list[Tensor]:
        monkeypatch.setattr(kernels, "_PIECE", piece)
        params = [parameter(s, dtype, seed=i) for i, s in enumerate(shapes)]
        params[3].data = params[3].data.to(memory_format=torch.channels_last)
        opt = kind(params, 0.01, betas=(0.9, 0.99), omegas=(0.3, 0.6), weight_decay=0.1)
        drive(opt, params, [noise(s, 6, seed=i) for i, s in enumerate(shapes)])
        moments = [t for p in params for _, t in sorted(opt.state[p].items())]
        return [p.detach().clone() for p in params] + moments

    whole = run(1 << 30)
    for piece in (1, 7, 64, 100, 999, 1000):
        for a, b in zip(run(piece), whole, strict=True):
            assert torch.equal(a, b), f"pieces of {piece}"


def test_numbers_of_several_widths_may_share_a_group() -> None:
    """Each is stepped in its own width: a float64 parameter does not become float32 because its neighbour is."""
    shapes, dtypes = [(3,), (3,), (3,)], [torch.float32, torch.float64, torch.bfloat16]
    params = [parameter(s, d, seed=i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    grads = [[g.to(p.dtype) for g in noise(p.shape, 8, seed=i)] for i, p in enumerate(params)]
    expected = [by_formula(QHAdam, p, g, lr=0.01, betas=[0.9], omegas=[0.7]) for p, g in zip(params, grads, strict=True)]
    opt = QHAdam(params, 0.01, betas=0.9, omegas=0.7)
    drive(opt, params, grads)
    for p, e, tolerance in zip(params, expected, (1e-5, 1e-12, 3e-2), strict=True):
        close(p, e, tolerance)
    assert [opt.state[p]["exp_avg"].dtype for p in params] == [torch.float32, torch.float64, torch.float32]


# --- Limits with other names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_weight_on_one_momentum_is_torchs_adamw(weight_decay: float, dtype: torch.dtype) -> None:
    shapes = [(), (7,), (3, 5)]
    ours, theirs = ([parameter(s, dtype, seed=i) for i, s in enumerate(shapes)] for _ in range(2))
    grads = [noise(s, 100, seed=i) for i, s in enumerate(shapes)]
    drive(QHAdam(ours, 0.01, betas=0.9, omegas=1.0, weight_decay=weight_decay), ours, grads)
    drive(torch.optim.AdamW(theirs, 0.01, betas=(0.9, 0.999), weight_decay=weight_decay), theirs, grads)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-12 if dtype == torch.float64 else 2e-6)


def test_no_weight_on_the_momentum_is_rmsprop_with_bias_correction() -> None:
    a, b = parameter((9,)), parameter((9,))
    grads = noise((9,), 50)
    drive(QHAdam([a], 0.01, betas=0.9, omegas=0.0), [a], [grads])
    drive(torch.optim.Adam([b], 0.01, betas=(0.0, 0.999)), [b], [grads])  # its momentum is the gradient
    close(a, b)


def test_no_weight_on_the_momentum_of_qhm_is_plain_sgd() -> None:
    a, b = parameter((9,)), parameter((9,))
    grads = noise((9,), 20)
    drive(QHM([a], 0.1, betas=0.99, omegas=0.0), [a], [grads])
    drive(torch.optim.SGD([b], 0.1), [b], [grads])
    close(a, b)


def test_all_weight_on_the_momentum_of_qhm_is_damped_sgd() -> None:
    """u <- b u + (1 - b) g from u = 0: torch's momentum with dampening, but for its first step, where torch takes g whole."""
    a, b = parameter((9,)), parameter((9,))
    grads = noise((9,), 20)
    drive(QHM([a], 0.1, betas=0.9, omegas=1.0), [a], [grads])
    theirs = torch.optim.SGD([b], 0.1, momentum=0.9, dampening=0.9)
    theirs.state[b]["momentum_buffer"] = torch.zeros_like(b)
    drive(theirs, [b], [grads])
    close(a, b)


@every
def test_a_momentum_of_no_weight_changes_nothing(kind: type) -> None:
    a, b = parameter((6, 4)), parameter((6, 4))
    grads = noise((6, 4), 10)
    drive(kind([a], 0.01, betas=(0.9, 0.999), omegas=(0.8, 0.0)), [a], [grads])
    drive(kind([b], 0.01, betas=0.9, omegas=0.8), [b], [grads])
    assert torch.equal(a, b)


@every
def test_two_momenta_of_one_beta_are_one(kind: type) -> None:
    a, b = parameter((6, 4)), parameter((6, 4))
    grads = noise((6, 4), 10)
    drive(kind([a], 0.01, betas=(0.9, 0.9), omegas=(0.3, 0.5)), [a], [grads])
    drive(kind([b], 0.01, betas=0.9, omegas=0.8), [b], [grads])
    close(a, b, 1e-5 if kind is QHMuon else 1e-12)


def test_the_first_call_of_adopt_moves_nothing() -> None:
    x = parameter((9,))
    before = x.detach().clone()
    (g,) = noise((9,), 1)
    opt = QHADOPT([x], 0.1)
    drive(opt, [x], [[g]])
    assert torch.equal(x, before)
    assert torch.equal(opt.state[x]["exp_avg_sq"], g * g)
    assert not opt.state[x]["exp_avg"].any()


def test_the_first_call_of_adopt_moves_nothing_with_weight_decay_either() -> None:
    x = parameter((9,))
    before = x.detach().clone()
    drive(QHADOPT([x], 0.1, weight_decay=0.1), [x], [noise((9,), 1)])
    assert torch.equal(x, before)


def test_the_clip_of_adopt_grows_with_the_fourth_root_of_the_step() -> None:
    """After a tiny first gradient, n = g / sqrt(v) is far out and its size is the clip's: s^(1/4)."""
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = QHADOPT([x], 1.0, betas=0.9, omegas=0.0, beta2=0.9999)
    drive(opt, [x], [[torch.tensor([1e-5], dtype=torch.float64)]])
    for s in range(1, 6):
        before = x.item()
        drive(opt, [x], [[torch.full((1,), 10.0**s, dtype=torch.float64)]])
        assert before - x.item() == pytest.approx(s**0.25, rel=1e-12)


def test_muon_folds_what_has_more_than_two_dimensions() -> None:
    folded, kernel = parameter((6, 12)), nn.Parameter(parameter((6, 12)).data.view(6, 3, 2, 2))
    grads = noise((6, 12), 5)
    drive(QHMuon([folded], 0.01), [folded], [grads])
    drive(QHMuon([kernel], 0.01), [kernel], [[g.view(6, 3, 2, 2) for g in grads]])
    close(kernel.view(6, 12), folded, 1e-6)


def test_muon_with_nesterov_looks_ahead() -> None:
    x = parameter((6, 9))
    grads = noise((6, 9), 12)
    chosen: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "omegas": (0.2, 0.7), "nesterov": True}
    expected = by_formula(QHMuon, x, grads, **chosen)
    plain = by_formula(QHMuon, x, grads, **{**chosen, "nesterov": False})
    drive(QHMuon([x], **chosen), [x], [grads])
    close(x, expected, 1e-4)
    assert not torch.allclose(x, plain, rtol=1e-3, atol=1e-3), "the test can tell them apart"


def test_muons_group_without_matrices_is_qhadam() -> None:
    a, b = parameter((6, 4)), parameter((6, 4))
    grads = noise((6, 4), 10)
    drive(QHMuon([{"params": [a], "matrices": False}], 0.01), [a], [grads])
    drive(QHAdam([b], 0.01), [b], [grads])
    assert torch.equal(a, b)


@pytest.mark.slow  # a process of its own; QHMuon's formulas are tested above
def test_qhmuon_with_all_weight_on_one_momentum_is_torchs_muon() -> None:
    """In bfloat16 as torch does it, so by a tolerance; in a process of its own, where the CPU may have no such matrix product.

    torch's Muon keeps u <- b u + (1 - b) g as well.
    """
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    script = """
        import torch
        from thinwire.optim import QHMuon
        for shape in ((16, 24), (24, 16), (8, 8)):
            torch.manual_seed(0)
            start = torch.randn(shape)
            a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
            ours = QHMuon([a], 0.1, betas=0.9, omegas=1.0)
            theirs = torch.optim.Muon(
                [b], 0.1, momentum=0.9, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
            for _ in range(10):
                g = torch.randn(shape)
                a.grad, b.grad = g.clone(), g.clone()
                ours.step(), theirs.step()
            torch.testing.assert_close(ours.state[a]["exp_avg"], theirs.state[b]["momentum_buffer"])
            moved = (a - start).norm()
            print(float((a - b).norm() / moved))
    """
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    apart = [float(line) for line in done.stdout.split()]
    assert len(apart) == 3
    assert max(apart) < 0.02, apart


# --- An ordinary optimizer -------------------------------------------------------------------------------------------------


@every
def test_a_parameter_without_a_gradient_keeps_its_own_count(kind: type) -> None:
    always, sometimes, never = parameter((5,)), parameter((4, 3)), parameter((2,))
    grads: list[list[Tensor | None]] = [
        [*noise((5,), 9)],
        [g if i in (2, 3, 7) else None for i, g in enumerate(noise((4, 3), 9))],
        [None] * 9,
    ]
    before = never.detach().clone()
    chosen = {**settings_of(kind, 2), "lr": 0.02}
    expected = [by_formula(kind, p, g, **chosen) for p, g in zip((always, sometimes), grads, strict=False)]
    opt = kind([always, sometimes, never], **chosen, weight_decay=0.0)
    drive(opt, [always, sometimes, never], grads)
    close(always, expected[0])
    close(sometimes, expected[1], 1e-4 if kind is QHMuon else 1e-12)
    assert torch.equal(never, before)
    assert [int(opt.state[p]["step"]) for p in (always, sometimes)] == [9, 3]
    assert never not in opt.state or not opt.state[never]


def test_a_lone_parameter_without_gradient_is_no_error() -> None:
    x = parameter((3,))
    opt = QHAdam([x])
    opt.step()
    assert not opt.state[x]


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("through_file", [False, True])
def test_it_resumes_bit_for_bit_and_moments_stay_wide(kind: type, dtype: torch.dtype, through_file: bool) -> None:
    shapes = [(), (6,), (5, 4)]
    grads = [noise(s, 12, seed=i) for i, s in enumerate(shapes)]

    def fresh() -> tuple[list[nn.Parameter], QuasiHyperbolic]:
        params = [parameter(s, dtype, seed=i) for i, s in enumerate(shapes)]
        return params, kind(params, 0.01, betas=(0.9, 0.99), omegas=(0.3, 0.6), warmup=4, lr_scale=2.0)

    straight, opt = fresh()
    drive(opt, straight, grads)
    first, opt = fresh()
    drive(opt, first, [g[:6] for g in grads])
    saved = opt.state_dict()
    if through_file:
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    second, again = fresh()
    for p, q in zip(second, first, strict=True):
        p.data.copy_(q.data)
    again.load_state_dict(saved)
    for p, q in zip(second, first, strict=True):
        for name in ("exp_avg", "exp_avg_2"):
            assert again.state[p][name].dtype == torch.float32
            assert torch.equal(again.state[p][name], opt.state[q][name])
            assert again.state[p][name].data_ptr() != opt.state[q][name].data_ptr(), "a copy, not the other's own"
    drive(again, second, [g[6:] for g in grads])
    for p, q in zip(second, straight, strict=True):
        assert torch.equal(p, q)


def test_a_slow_momentum_of_bf16_parameters_is_not_lost() -> None:
    """1 - 0.999 of a gradient added to a momentum of its size is below what bfloat16 can tell."""
    x = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = QHAdam([x], 0.0, betas=0.999, omegas=1.0)
    for _ in range(1000):
        x.grad = torch.ones_like(x)
        opt.step()
    assert opt.state[x]["exp_avg"].tolist() == pytest.approx([1 - 0.999**1000] * 4, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "N", "numbers"), [(QHAdam, 1, 2), (QHADOPT, 1, 2), (QHM, 1, 1), (QHMuon, 1, 1), (QHAdam, 2, 3), (QHAdam, 3, 4)]
)
def test_memory_is_one_number_per_momentum_and_one_for_the_second_moment(kind: type, N: int, numbers: int) -> None:
    x = parameter((30, 20), torch.float32)
    opt = kind([x], betas=[0.9] * N, omegas=[0.1] * N)
    drive(opt, [x], [noise((30, 20), 2)])
    held = [t for name, t in opt.state[x].items() if not name.startswith("step")]
    assert sum(t.numel() for t in held) == numbers * x.numel()
    assert all(t.dtype == torch.float32 for t in held)
    assert sum(t.numel() for t in opt.state[x].values()) == numbers * x.numel() + 2 + numbers, "and counts"


@every
def test_lr_schedulers_drive_it(kind: type) -> None:
    a, b = parameter((4, 3)), parameter((4, 3))
    grads = noise((4, 3), 6)
    opt, constant = kind([a], 0.1), kind([b], 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    for i, g in enumerate(grads):
        drive(opt, [a], [[g]])
        scheduler.step()
        constant.param_groups[0]["lr"] = 0.1 / (1 + i)
        drive(constant, [b], [[g]])
    close(a, b, 1e-6 if kind is QHMuon else 1e-12)


def test_a_closure_is_called_once_with_gradients_on() -> None:
    x = parameter((3,))
    opt = QHAdam([x], 0.01)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss.item()

    expected = x.detach().square().sum().item()
    assert opt.step(closure) == expected
    assert calls == [True]
    assert opt.step() is None


def test_groups_have_their_own_settings_and_may_come_later() -> None:
    a, b, c = (parameter((5,), seed=i) for i in range(3))
    grads = [noise((5,), 10, seed=i) for i in range(3)]
    expected = [
        by_formula(QHAdam, a, grads[0], lr=0.01, betas=[0.99], omegas=[0.9]),
        by_formula(QHAdam, b, grads[1], lr=0.05, betas=[0.5], omegas=[0.2], beta2=0.9),
        by_formula(QHAdam, c, grads[2][4:], lr=0.01, betas=[0.8], omegas=[0.9]),
    ]
    opt = QHAdam(
        [{"params": [a]}, {"params": [b], "lr": 0.05, "betas": 0.5, "omegas": 0.2, "beta2": 0.9}], 0.01, betas=0.99, omegas=0.9
    )
    drive(opt, [a, b], [g[:4] for g in grads[:2]])
    opt.add_param_group({"params": [c], "betas": 0.8})
    assert opt.param_groups[-1]["betas"] == (0.8,)
    drive(opt, [a, b, c], [g[4:] for g in grads])
    for p, e in zip((a, b, c), expected, strict=True):
        close(p, e)


def test_a_group_that_makes_no_sense_is_refused_whole() -> None:
    a, b = parameter((5,)), parameter((5,))
    opt = QHAdam([a])
    with pytest.raises(ConfigError, match="betas"):
        opt.add_param_group({"params": [b], "betas": 1.5})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [b]})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lr": -1.0}, r"lr must be at least 0 and finite, got -1\.0"),
        ({"lr": math.nan}, "lr must be at least 0 and finite, got nan"),
        ({"weight_decay": -0.1}, r"weight_decay must be at least 0 and finite, got -0\.1"),
        ({"lr_scale": math.inf}, "lr_scale must be at least 0 and finite, got inf"),
        ({"betas": 1.0}, r"betas must be from 0 to below 1, got \(1\.0,\)"),
        ({"betas": -0.1}, r"betas must be from 0 to below 1, got \(-0\.1,\)"),
        ({"betas": math.nan}, r"betas must be from 0 to below 1, got \(nan,\)"),
        ({"betas": (0.9, 0.99), "omegas": 0.5}, r"as many as there are momenta, got betas=\(0\.9, 0\.99\), omegas=\(0\.5,\)"),
        ({"betas": (), "omegas": ()}, r"as many as there are momenta, got betas=\(\), omegas=\(\)"),
        ({"omegas": -0.1}, r"omegas must be at least 0 and sum up to at most 1, got \(-0\.1,\)"),
        ({"omegas": 1.1}, r"omegas must be at least 0 and sum up to at most 1, got \(1\.1,\)"),
        ({"omegas": math.nan}, r"omegas must be at least 0 and sum up to at most 1, got \(nan,\)"),
        ({"betas": (0.9, 0.9), "omegas": (0.6, 0.6)}, r"sum up to at most 1, got \(0\.6, 0\.6\)"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0, got -1"),
        ({"warmup": 2.5}, r"warmup must be a whole number of at least 0, got 2\.5"),
        ({"warmup_beta": 1.0}, r"warmup_beta must be from 0 to below 1, got 1\.0"),
    ],
)
@every
def test_bad_settings_show_the_value_and_what_is_allowed(kind: type, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind([parameter((3,))], **bad)


@pytest.mark.parametrize("kind", [QHAdam, QHADOPT, QHMuon])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"beta2": 1.0}, r"beta2 must be from 0 to below 1, got 1\.0"),
        ({"eps": 0.0}, r"eps must be above 0 and finite, got 0\.0"),
        ({"eps": math.inf}, "eps must be above 0 and finite, got inf"),
    ],
)
def test_bad_settings_of_the_second_moment_do_too(kind: type, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind([parameter((3,))], **bad)


def test_weights_that_sum_to_one_but_for_rounding_are_allowed() -> None:
    QHAdam([parameter((3,))], betas=[0.9] * 10, omegas=[0.1] * 10)
    a, b = parameter((5,)), parameter((5,))
    grads = noise((5,), 8)
    drive(QHAdam([a], betas=[0.9] * 3, omegas=[0.1, 0.2, 0.7]), [a], [grads])
    drive(QHAdam([b], betas=0.9, omegas=1.0), [b], [grads])
    close(a, b)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="QHAdam takes dense gradients only"):
        QHAdam(table.parameters()).step()


# --- The switch after a warm-up --------------------------------------------------------------------------------------------


def warm_then_slow(x: Tensor, grads: Sequence[Tensor], warmup: int, *, beta: float, omega: float, scale: float) -> Tensor:
    """The recipe: Adam(.9), then the momentum zeroed and counted anew, the second moment kept, lr times `scale`."""
    x, u, v = x.detach().double().clone(), torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(grads, 1):
        b, w, lr, age = (0.9, 1.0, 0.01, t) if t <= warmup else (beta, omega, 0.01 * scale, t - warmup)
        if t == warmup + 1:
            u = torch.zeros_like(x)
        u, v = b * u + (1 - b) * g, 0.999 * v + 0.001 * g * g
        x = x - lr * ((1 - w) * g + w * u / (1 - b**age)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return x


def test_the_recipe_of_the_authors_is_one_setting() -> None:
    x = parameter((7,))
    grads = noise((7,), 40)
    expected = warm_then_slow(x, grads, 15, beta=0.99, omega=0.95, scale=2.0)
    opt = QHAdam([x], 0.01, betas=0.99, omegas=0.95, warmup=15, lr_scale=2.0)
    drive(opt, [x], [grads])
    close(x, expected)


def test_the_warm_up_is_plain_adam_whatever_follows() -> None:
    a, b = parameter((7,)), parameter((7,))
    grads = noise((7,), 20)
    drive(QHAdam([a], 0.01, betas=(0.9, 0.999), omegas=(0.1, 0.8), warmup=20, lr_scale=4.0), [a], [grads])
    drive(torch.optim.Adam([b], 0.01), [b], [grads])
    close(a, b)


@every
def test_a_switch_by_hand_is_the_warm_ups_own(kind: type) -> None:
    shapes = [(7,), (4, 6)]
    by_hand, by_itself = ([parameter(s, seed=i) for i, s in enumerate(shapes)] for _ in range(2))
    grads = [noise(s, 30, seed=i) for i, s in enumerate(shapes)]
    drive(kind(by_itself, 0.01, betas=0.99, omegas=0.9, warmup=12, lr_scale=2.0), by_itself, grads)
    opt = kind(by_hand, 0.01, betas=0.9, omegas=1.0)
    drive(opt, by_hand, [g[:12] for g in grads])
    opt.switch(betas=0.99, omegas=0.9, lr_scale=2.0)
    assert not any(opt.state[p]["exp_avg"].any() for p in by_hand)
    drive(opt, by_hand, [g[12:] for g in grads])
    for a, b in zip(by_hand, by_itself, strict=True):
        assert torch.equal(a, b)


def test_a_switch_that_keeps_the_momenta_keeps_their_age() -> None:
    x = parameter((7,))
    opt = QHAdam([x], 0.01, betas=0.9, omegas=1.0)
    drive(opt, [x], [noise((7,), 5)])
    kept, v = opt.state[x]["exp_avg"].clone(), opt.state[x]["exp_avg_sq"].clone()
    opt.switch(omegas=0.5, reset=False)
    assert torch.equal(opt.state[x]["exp_avg"], kept)
    before, (g,) = x.detach().clone(), noise((7,), 1, seed=3)
    drive(opt, [x], [[g]])
    u, v = 0.9 * kept + 0.1 * g, 0.999 * v + 0.001 * g * g
    direction = 0.5 * g + 0.5 * u / (1 - 0.9**6)
    close(x, before - 0.01 * direction / ((v / (1 - 0.999**6)).sqrt() + 1e-8))


@every
def test_a_parameter_that_had_no_gradient_in_the_warm_up_begins_with_its_own_count(kind: type) -> None:
    """Its momentum is as old as the gradients that it has seen: the bias correction must not think it younger or older."""
    always, late = parameter((5,)), parameter((4,))
    here: list[list[Tensor | None]] = [
        [*noise((5,), 40)],
        [None if i < 20 else g for i, g in enumerate(noise((4,), 40, seed=1))],
    ]
    chosen: dict[str, Any] = {"lr": 0.01, "betas": [0.999], "omegas": [0.95]}
    if kind is not QHM:
        chosen |= {"eps": 1e-6, "beta2": 0.9999}
    expected = by_formula(kind, late, here[1], **chosen)
    drive(kind([always, late], **chosen, warmup=20), [always, late], here)
    close(late, expected)


def test_a_switch_refuses_what_makes_no_sense_and_changes_nothing() -> None:
    a, b = parameter((3,)), parameter((4,))
    opt = QHAdam([{"params": [a]}, {"params": [b]}], betas=0.9, omegas=1.0)
    drive(opt, [a, b], [noise((3,), 2), noise((4,), 2)])
    kept = opt.state[a]["exp_avg"].clone()
    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: opt.switch(betas=(0.9, 0.99), omegas=(0.1, 0.2)), "there are 1 momenta, got betas="),
        (lambda: opt.switch(betas=1.0), r"betas must be from 0 to below 1, got \(1\.0,\)"),
        (lambda: opt.switch(omegas=2.0), r"sum up to at most 1, got \(2\.0,\)"),
        (lambda: opt.switch(beta2=1.0), r"beta2 must be from 0 to below 1, got 1\.0"),
        (lambda: opt.switch(lr_scale=-1.0), r"lr_scale must be at least 0 and finite, got -1\.0"),
    ]
    for call, message in refused:
        with pytest.raises(ConfigError, match=message):
            call()
    assert [g["betas"] for g in opt.param_groups] == [(0.9,), (0.9,)]
    assert torch.equal(opt.state[a]["exp_avg"], kept)


# --- Betas that change -------------------------------------------------------------------------------------------------------


def test_a_change_of_betas_that_keeps_the_momenta_keeps_them_unbiased() -> None:
    """Of a constant gradient every momentum corrected for bias is that gradient, whatever betas it has had."""
    x, g = parameter((3,)), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    opt = QHAdam([x], 0.01, betas=0.9, omegas=1.0, beta2=0.95, eps=1e-30)
    for step in range(40):
        if step == 7:
            opt.switch(betas=0.999, beta2=0.999, reset=False)
        before = x.detach().clone()
        drive(opt, [x], [[g]])
        close(x, before - 0.01 * g.sign(), 1e-10)


@pytest.mark.parametrize("lives", [0.1, 1.0, 8.0])
def test_momenta_that_grow_slow_with_the_run_are_unbiased_and_end_at_their_beta(lives: float) -> None:
    x, grads = parameter((3,)), noise((3,), 200)
    opt = QHAdam([x], 0.01, betas=0.97, omegas=1.0, beta2=0.99, lives=lives)
    u, v, seen = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0.0
    reached = 0
    for t, g in enumerate(grads, 1):
        b = min(0.97, 0.5 ** (lives / t))
        reached += b == 0.97
        u, v, seen = b * u + (1 - b) * g, 0.99 * v + 0.01 * g * g, 1 - b * (1 - seen)
        before = x.detach().clone()
        drive(opt, [x], [[g]])
        close(x, before - 0.01 * (u / seen) / ((v / (1 - 0.99**t)).sqrt() + 1e-8), 1e-9)
    assert 0 < reached < 200 or lives < 8, "both regimes were seen"


def test_a_switch_may_keep_the_momenta_and_let_betas_grow_from_that_of_the_warm_up() -> None:
    x, grads = parameter((3,)), noise((3,), 120)
    opt = QHAdam([x], 0.01, betas=0.99, omegas=0.95, beta2=0.99, lives=4.0, warmup=20, reset="age")
    u, v, seen = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), 0.0
    betas = []
    for t, g in enumerate(grads, 1):
        age = t - 20 + 26  # 26 = 4 x 6.58, the half-life of 0.9
        betas.append(0.9 if t <= 20 else min(0.99, 0.5 ** (4.0 / age)))
        b, w = betas[-1], 1.0 if t <= 20 else 0.95
        u, v, seen = b * u + (1 - b) * g, 0.99 * v + 0.01 * g * g, 1 - b * (1 - seen)
        before = x.detach().clone()
        drive(opt, [x], [[g]])
        close(x, before - 0.01 * (w * u / seen + (1 - w) * g) / ((v / (1 - 0.99**t)).sqrt() + 1e-8), 1e-9)
    assert betas[20] == pytest.approx(0.9, abs=0.005), "no jump"
    assert sorted(betas) == betas
    with pytest.raises(ConfigError, match="reset='age' lets betas grow by `lives`"):
        QHAdam([x], 0.01, warmup=20, reset="age")
    with pytest.raises(ConfigError, match="reset must be one of True, False, 'age', got 'keep'"):
        QHAdam([x], 0.01, reset="keep")  # type: ignore[typeddict-item]


def test_counts_of_narrow_parameters_survive_a_state_dict() -> None:
    """2,049 is no bfloat16: torch casts all state but the key "step" to the parameters' dtype."""
    x = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    opt = QHAdam([x], 1e-6)
    drive(opt, [x], [[torch.ones(3, dtype=torch.bfloat16)] * 2049])
    opt.switch(reset=True)
    again = QHAdam([x], 1e-6)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for key in ("step", "step_of_reset", "step_seen"):
        assert torch.equal(again.state[x][key], opt.state[x][key]), key
        assert again.state[x][key].dtype == opt.state[x][key].dtype


def test_a_switch_keeps_the_scale_of_the_lr_and_is_refused_as_a_whole() -> None:
    a, b = parameter((3,)), parameter((2,))
    opt = QHAdam([{"params": [a]}, {"params": [b], "omegas": (0.5,)}], 0.01, lr_scale=2.0)
    opt.switch(betas=0.9)
    assert [g["lr_scale"] for g in opt.param_groups] == [2.0, 2.0]
    assert [g["omegas"] for g in opt.param_groups] == [(0.95,), (0.5,)]
    with pytest.raises(ConfigError, match="there are 1 momenta"):
        opt.switch(betas=(0.9, 0.99))
    assert [g["betas"] for g in opt.param_groups] == [(0.9,), (0.9,)]


@pytest.mark.parametrize(
    ("kind", "other"), [(QHM, "beta2"), (QHM, "eps"), (QHAdam, "nesterov"), (QHADOPT, "matrices"), (QHMuon, "momentum")]
)
def test_a_setting_of_another_optimizer_is_no_argument(kind: type, other: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no argument '{other}'"):
        kind([parameter((3,))], **{other: 0.5})


@pytest.mark.parametrize(
    ("kind", "usual"),
    [
        (QHM, {"lr": 0.1, "betas": (0.999,), "omegas": (0.7,)}),
        (QHAdam, {"lr": 1e-3, "betas": (0.999,), "omegas": (0.95,), "beta2": 0.999, "eps": 1e-8}),
        (QHADOPT, {"lr": 1e-3, "betas": (0.999,), "omegas": (0.95,), "beta2": 0.9999, "eps": 1e-6}),
        (QHMuon, {"lr": 1e-3, "betas": (0.999,), "omegas": (0.95,), "beta2": 0.999, "nesterov": False, "matrices": True}),
    ],
)
def test_the_defaults_are_those_of_the_docs(kind: type, usual: dict[str, Any]) -> None:
    (group,) = kind([parameter((3,))]).param_groups
    assert {name: group[name] for name in usual} == usual
    assert ("beta2" in group) == (kind is not QHM)
