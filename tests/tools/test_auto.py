"""thinwire.auto: the planner's choice as an optimizer, the same on all workers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import thinwire
from thinwire import DataParallel, DeMo, DiLoCo, Link, Network, SoloLink, WarmStart, World
from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError
from thinwire.optim import QHAdam
from thinwire.tools.auto import _methods, _seconds_of
from thinwire.tools.doctor.links import measure_ring


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))


def step(model: nn.Module, rank: int) -> None:
    model(torch.randn(4, 96, generator=torch.Generator().manual_seed(rank))).square().sum().backward()


def chosen_on(network: Network) -> list[Algorithm | WarmStart]:
    def worker(link: Link) -> Algorithm | WarmStart:
        model = small()
        opt = thinwire.auto(model, torch.optim.AdamW(model.parameters(), lr=1e-3), link, step_time=0.1)
        for _ in range(3):  # with the handshake: all workers have made the same
            step(model, link.rank)
            opt.step()
            opt.zero_grad()
        return opt

    return World(2, network=network, step_time=0.1).run(worker)


def test_a_fast_link_gets_data_parallel_and_a_thin_one_a_method_that_sends_less(caplog: pytest.LogCaptureFixture) -> None:
    """Measured on the simulated link, and what is measured is what it has."""
    with caplog.at_level(logging.INFO, "thinwire"):
        fast, thin = (chosen_on(Network(bandwidth=b, latency=1e-4)) for b in (1e11, 1e6))
    for opt in fast:
        assert isinstance(opt, DataParallel) and opt.chosen.startswith("Take data-parallel: ")
        assert len(opt.buffers) == 2, "BatchNorm statistics are averaged"
    for opt in thin:
        assert isinstance(opt, DiLoCo | DeMo) and "ddp would compute" in opt.chosen
    assert fast[0].chosen == fast[1].chosen and thin[0].chosen == thin[1].chosen
    assert [r.getMessage() for r in caplog.records].count(thin[0].chosen) == 1, "said once, by worker 0"


def test_the_figures_of_worker_0_hold_for_all() -> None:
    def worker(link: Link) -> tuple[type, str]:
        model, told = small(), {"bandwidth": "1mbit", "latency": "1ms"} if link.rank == 0 else {}
        inner = torch.optim.AdamW(model.parameters())
        opt = thinwire.auto(list(model.parameters()), inner, link, step_time=["100ms", 7.0][link.rank], warm_start=2, **told)
        for _ in range(3):
            step(model, link.rank)
            opt.step()
        assert isinstance(opt, WarmStart) and opt.steps == 3 and not opt.starting
        return type(opt.at_work), opt.chosen

    first, second = World(2, step_time=0.1).run(worker)
    assert first == second and first[1]


def test_measuring_a_ring_finds_what_the_network_has() -> None:
    network = Network(bandwidth=5e7, latency=2e-3)
    for measured in World(3, network=network, step_time=0.0).run(measure_ring):
        assert measured.bandwidth == pytest.approx(5e7, rel=0.02)
        assert measured.hop == pytest.approx(2e-3, rel=0.02)
    assert measure_ring(SoloLink()).bandwidth == float("inf")


def test_a_step_is_timed_by_a_function_and_a_time_of_zero_is_refused() -> None:
    def worker(link: Link) -> int:
        model, calls = small(), list[None]()

        def passes() -> None:
            calls.append(step(model, link.rank))
            link.elapse(len(calls) * 0.25)

        inner = torch.optim.AdamW(model.parameters())
        assert _seconds_of(passes, inner, link) == pytest.approx(0.75), "the median of the last three"
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(ConfigError, match=r"step-time must be above zero seconds, got 0\.0"):
            thinwire.auto(model, inner, link, bandwidth=1e12, latency=0, step_time=lambda: None)
        return len(calls)

    assert World(2, step_time=0.0).run(worker) == [4, 4]


def test_methods_fit_the_inner_optimizer() -> None:
    params = list(small().parameters())
    plain = {m.name for m in _methods(torch.optim.AdamW(params))}
    slow = {m.name for m in _methods(QHAdam(params, 1e-3, betas=0.99, omegas=0.9))}
    assert "local-adam" in plain and not any(name.startswith("mt-dao") for name in plain)
    assert {"mt-dao", "demo", "diloco"} <= slow and "local-adam" not in slow


def test_with_many_workers_owners_average_what_would_be_gathered_as_the_plan_says() -> None:
    def worker(link: Link) -> tuple[bool, str]:
        model = nn.Linear(256, 256)
        told = {"bandwidth": "1mbit", "latency": "1ms", "step_time": 0.1}
        opt = thinwire.auto(model, torch.optim.AdamW(model.parameters()), link, **told)
        assert isinstance(opt, Algorithm)
        return opt.owners is not None, opt.chosen

    for owned, said in World(16).run(worker):
        assert owned and "Owners average its messages" in said
