"""Update rules: each is its formula, in pieces as on the whole, and leaves its input alone where it says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.maths.orthogonalize import orthogonalised
from thinwire.maths.update_rules import RULES, UpdateRule, apply_elementwise, check_group, whitened

GROUP: dict[str, Any] = {
    "lr": 0.1,
    "beta": 0.9,
    "alpha": 1.0,
    "phi": "sgd",
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
}


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Whitening ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [1.0, 0.25])
def test_whitened_is_what_adam_makes_of_a_gradient_without_momentum(clip: float) -> None:
    p, v = nn.Parameter(torch.zeros(5, 3)), torch.zeros(5, 3)
    adam = torch.optim.Adam([p], lr=1.0, betas=(0.0, 0.9), eps=1e-3)
    for step in range(5):
        g, before = some(5, 3, seed=step), p.detach().clone()
        p.grad = g * clip
        adam.step()
        out = whitened(g, v, b2=0.9, eps=1e-3, step=step + 1, clip=clip)
        torch.testing.assert_close(out, before - p.detach(), rtol=1e-5, atol=1e-5)
        assert torch.equal(g, some(5, 3, seed=step)), "gradients are not changed"


def test_the_first_whitened_gradient_is_its_sign() -> None:
    g = torch.tensor([3.0, -1e-3, 50.0])
    out = whitened(g, torch.zeros(3), b2=0.95, eps=1e-8, step=1)
    torch.testing.assert_close(out, g.sign(), rtol=1e-4, atol=1e-4)


def test_a_gradient_is_whitened_in_the_dtype_of_its_second_moment() -> None:
    for g, b2, step in ((some(4), 0.5, 2), (some(4).bfloat16(), 0.75, 3)):
        v = torch.ones(4)
        out = whitened(g, v, b2=b2, eps=0.5, step=step)
        torch.testing.assert_close(v, b2 + (1 - b2) * g.float().square())
        torch.testing.assert_close(out, g.float() / ((v / (1 - b2**step)).sqrt() + 0.5))
        assert out.dtype == torch.float32


# --- Elementwise rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "phi"), [("sgd", lambda M: M), ("unit", lambda M: M), ("sign", torch.sign)])
def test_rules_without_memory_are_their_formula(rule: UpdateRule, phi: Any) -> None:
    x, M = some(4, 5), some(4, 5, seed=1)
    M[0, 0] = 0.0
    expected = x - 0.3 * phi(M)
    apply_elementwise(rule, x, M, lr=0.3)
    torch.testing.assert_close(x, expected)


def test_adam_is_torchs_and_any_piece_of_a_tensor_may_come_by_itself() -> None:
    p = nn.Parameter(some(6, 4))
    torchs = torch.optim.Adam([p], lr=0.1, betas=(0.8, 0.9), eps=1e-4)
    x, m, v = some(6, 4), torch.zeros(6, 4), torch.zeros(6, 4)
    for step in range(1, 6):
        M = some(6, 4, seed=step)
        p.grad = M.clone()
        torchs.step()
        for rows in (slice(0, 1), slice(1, 6)):
            pieces = (m[rows], v[rows])
            apply_elementwise("adam", x[rows], M[rows].clone(), lr=0.1, moments=pieces, betas=(0.8, 0.9), eps=1e-4, step=step)
        torch.testing.assert_close(x, p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["sgd", "unit", "sign", "adam"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_parameter_of_another_dtype_takes_a_float32_update(rule: UpdateRule, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x, expected = some(8).to(dtype), some(8).to(dtype).float()
    moments = torch.zeros(8, dtype=wide), torch.zeros(8, dtype=wide)
    apply_elementwise(rule, x, some(8, seed=1), lr=0.5, moments=moments)
    apply_elementwise(rule, expected, some(8, seed=1), lr=0.5, moments=(torch.zeros(8), torch.zeros(8)))
    assert x.dtype == dtype
    torch.testing.assert_close(x.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


# --- Muon --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (5, 3, 2, 2), (1, 7), (7, 1)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_orthogonalised_has_the_singular_vectors_of_its_input_and_nearly_equal_singular_values(
    shape: tuple[int, ...], size: float
) -> None:
    U, _, Vh = torch.linalg.svd(some(*shape).flatten(1), full_matrices=False)
    M = U @ torch.linspace(0.2, 1.0, U.shape[1]).diag() @ Vh  # well conditioned
    out = orthogonalised((size * M).reshape(shape))
    assert out.shape == shape
    inner = U.T @ out.flatten(1) @ Vh.T / (0.2 * math.sqrt(max(M.shape)))
    assert float(inner.diagonal().min()) > 0.6 and float(inner.diagonal().max()) < 1.3
    assert float((inner - inner.diagonal().diag()).abs().max()) < 1e-3


def test_orthogonalised_entries_have_a_root_mean_square_of_a_fifth_whatever_the_shape() -> None:
    for shape in ((16, 16), (8, 64), (64, 8), (8, 4, 4, 4)):
        assert float(orthogonalised(some(*shape)).square().mean().sqrt()) == pytest.approx(0.2, rel=0.25), shape


def test_orthogonalised_of_nothing_is_nothing_and_its_input_stays() -> None:
    assert not orthogonalised(torch.zeros(4, 6)).any()
    M = some(4, 6)
    orthogonalised(M)
    assert torch.equal(M, some(4, 6))
    narrow = orthogonalised(M.bfloat16())
    assert narrow.dtype == torch.float32, "computed and returned in float32"


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 2, 3)])
def test_orthogonalised_of_an_empty_tensor_is_empty(shape: tuple[int, ...]) -> None:
    assert orthogonalised(torch.zeros(shape)).shape == shape


# --- Settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", RULES)
def test_good_settings_pass_and_only_muon_needs_whole_matrices(phi: str) -> None:
    check_group({**GROUP, "phi": phi, "beta": 1.0, "alpha": 0.0, "lr": 0.0, "betas": [0.0, 0.999]}, sharded=False)
    if phi != "muon":
        check_group({**GROUP, "phi": phi}, sharded=True)
        return
    with pytest.raises(ConfigError, match="phi='muon' needs whole matrices and these parameters are sharded: use sign or adam"):
        check_group({**GROUP, "phi": phi}, sharded=True)


@pytest.mark.parametrize("bad", [0.9, None, (0.9, 0.95, 0.99), (), (0.9, math.nan)])
def test_betas_that_are_not_two_numbers_are_refused_as_a_setting(bad: Any) -> None:
    with pytest.raises(ConfigError, match="betas must be two numbers from 0 to below 1, got "):
        check_group({**GROUP, "betas": bad}, sharded=False)
