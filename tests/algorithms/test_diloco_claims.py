"""Claims D1 to D7 of the DiLoCo paper: identities exactly, trends on a noisy quadratic where their order can be seen.

The bowl has curvatures between 0.03 and 1; the inner AdamW is slow on it, as in training that is far from done. What it cannot
show is how large the published effects are: its loss has no floor, so "a few percent of the loss" means nothing there.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.training import assert_same, model_of, sgd, train
from tests.processes import Pool
from tests.tiers import first_quick
from thinwire import DataParallel, Dense, DiLoCo, Link, Metered, World
from thinwire.links import TorchLink
from thinwire.links.ddp import MeteredDDP

# --- Identities --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [1, 2, 4])
def test_d1_h_1_with_inner_sgd_and_outer_sgd_of_lr_1_is_synchronous_sgd(M: int) -> None:
    """To the bit, on numbers that float64 holds exactly: small binary fractions and a few steps."""

    def worker(link: Link, synchronous: bool) -> list:
        x = nn.Parameter(torch.arange(-8.0, 8.0, dtype=torch.float64) / 4)
        inner = torch.optim.SGD([x], lr=0.25)
        wide: dict[str, Any] = {"codec": Dense("fp64")}
        opt = DataParallel(inner, link, **wide) if synchronous else None
        opt = opt or DiLoCo(inner, link, H=1, outer_lr=1.0, outer_momentum=0.0, **wide)
        for step in range(8):
            x.grad = x.detach() - (link.rank + step) / 8  # its power of two grows by 4 a step
            opt.step()
        return [x.detach().clone()]

    for ours, theirs in zip(*(World(M).run(lambda link, s=s: worker(link, s)) for s in (False, True)), strict=True):
        assert_same(ours, theirs)


def _sent(link: TorchLink, H: int) -> tuple[int, int, int]:
    """Bytes of H steps of torch's DDP and of DiLoCo, and of the status numbers that ours has behind a message."""
    model, wire = model_of(), Metered(link)
    for frozen in (model.frozen, model.sometimes):
        frozen.requires_grad_(False)
    ddp = MeteredDDP(model, wire)
    for step in range(H):
        ddp.module(torch.ones(2, 5), step).sum().backward()
        ddp.backward_done()
        model.zero_grad()
    theirs, wire = wire.meter.totals.payload, Metered(link)
    opt = DiLoCo(sgd(model.parameters()), wire, H=H)
    train(model, opt, link.rank, H)
    (ours,) = [e.payload for e in wire.meter.recent if e.purpose == "round"]
    return theirs, ours, 4 * link.size


@pytest.mark.parametrize("H", first_quick([5, 1, 32]))
def test_d7_bytes_are_those_of_ddp_divided_by_h(H: int, pool: Pool) -> None:
    for theirs, ours, status in pool.run(_sent, 2, H):
        assert (ours - status) * H == theirs


# --- Trends ------------------------------------------------------------------------------------------------------------------

N, STEPS = 100, 600


class Dropping(DiLoCo):
    """Every second contribution, at random, counts for nothing."""

    def work(self) -> float:
        draw = torch.rand(1, generator=torch.Generator().manual_seed(1000 * self.rounds + self.link.rank))
        return 1.0 if float(draw) < 0.5 else 1e-6


@functools.cache
def final_loss(M: int, H: int, lr: float, cls: type = DiLoCo, *, reset: bool = False, **settings: Any) -> float:
    """Of M workers with AdamW inside; H = 0 for AdamW alone; `reset` forgets its moments after each round."""
    h, target = torch.logspace(-1.5, 0, N), torch.linspace(-1, 1, N)

    def worker(link: Link) -> float:
        x = nn.Parameter(torch.full((N,), 2.0))
        inner = torch.optim.AdamW([x], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        opt = cls(inner, link, H=H, **settings) if H else inner
        noise = torch.Generator().manual_seed(link.rank)
        for _ in range(STEPS):
            x.grad = h * (x.detach() - target) + 0.5 * torch.randn(N, generator=noise)
            opt.step()
            if reset and opt.pending_steps == 0:  # type: ignore[union-attr]
                inner.state.clear()
        return float((h * (x.detach() - target).square()).sum() / 2)

    return World(M).run(worker)[0]


@pytest.mark.slow
def test_d2_keeping_the_inner_moments_is_better_than_resetting_them() -> None:
    assert final_loss(4, 10, 3e-3) < 0.95 * final_loss(4, 10, 3e-3, reset=True)


@pytest.mark.slow  # trains two runs
def test_d3_outer_nesterov_beats_plain_averaging_at_long_h() -> None:
    assert final_loss(4, 50, 1e-3) < 0.5 * final_loss(4, 50, 1e-3, outer_lr=1.0, outer_momentum=0.0)


@pytest.mark.slow
def test_d4_loss_rises_with_h() -> None:
    """That it does, not how little: ten times the H is a tenth of the outer momentum's rounds here."""
    losses = [final_loss(4, H, 1e-3) for H in (10, 50, 100)]
    assert losses[0] < 0.8 * losses[1] < 0.8 * 0.9 * losses[2]


@pytest.mark.slow
def test_d5_one_worker_with_outer_nesterov_beats_its_inner_optimizer_alone() -> None:
    assert final_loss(1, 50, 1e-3) < 0.5 * final_loss(1, 0, 1e-3)


def test_d6_dropping_half_of_the_contributions_costs_little() -> None:
    assert final_loss(4, 50, 1e-3, Dropping) < 1.03 * final_loss(4, 50, 1e-3)
