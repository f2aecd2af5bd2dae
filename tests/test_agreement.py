"""How far apart workers are, and running statistics that are averaged along; the other gates are in test_exchange.py."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.training import assert_close, assert_same, model_of, sgd, snapshot, train
from tests.processes import Pool
from thinwire import DCT, Dense, Link, Metered, SoloLink, TopK, World
from thinwire.core.optimizer import Algorithm
from thinwire.core.replicas import drift

# --- Drift -------------------------------------------------------------------------------------------------------------------


def copy_of(rank: int, spread: float = 0.1) -> list[Tensor]:
    common, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(rank)
    shapes = [(5, 3), (7,), ()]
    return [torch.randn(s, generator=common) + spread * torch.randn(s, generator=own) for s in shapes]


def expected_drift(copies: list[list[Tensor]]) -> float:
    rows = torch.stack([torch.cat([t.double().flatten() for t in mine]) for mine in copies])
    mean = rows.mean(0)
    return float((rows - mean).square().sum(1).mean().sqrt() / mean.norm())


def _drift(link: Link, spread: float) -> float:
    return drift(link, copy_of(link.rank, spread))


@pytest.mark.parametrize("spread", [1e-3, 0.1, 10.0])
def test_drift_is_the_root_mean_square_distance_from_the_mean_over_its_norm(spread: float, pool: Pool) -> None:
    for size in (2, 3):
        expected = expected_drift([copy_of(rank, spread) for rank in range(size)])
        for habitat in (World(size).run(lambda link: _drift(link, spread)), pool.run(_drift, size, spread)):
            assert len(set(habitat)) == 1, "all workers are told the same number"
            assert habitat[0] == pytest.approx(expected, rel=1e-5)


def test_drift_by_hand() -> None:
    """1 and 3 and 8: the mean is 4, the distances 3, 1 and 4."""
    apart = World(3).run(lambda link: drift(link, [torch.tensor([(1.0, 3.0, 8.0)[link.rank]])]))
    assert apart == [pytest.approx(math.sqrt((9 + 1 + 16) / 3) / 4)] * 3


@pytest.mark.parametrize("size", [1, 3])
def test_drift_of_equal_copies_is_exactly_zero_and_costs_eight_bytes(size: int, pool: Pool) -> None:
    def worker(link: Link) -> tuple[float, list[int]]:
        metered = Metered(link)
        return drift(metered, copy_of(0)), [e.payload for e in metered.meter.recent]

    assert World(size).run(worker) == [(0.0, [8])] * size
    assert pool.run(_drift, size, 0.0) == [0.0] * size


def test_drift_sees_one_bit() -> None:
    def worker(link: Link) -> float:
        x = torch.ones(1000)
        if link.rank == 1:
            x[7] = torch.nextafter(x[7], torch.tensor(2.0))
        return drift(link, [x])

    for apart in World(2).run(worker):
        assert 0 < apart < 1e-7


def test_drift_of_an_optimizer_is_of_its_agreed_points() -> None:
    """Between rounds parameters go their own ways; what was agreed on does not."""

    def worker(link: Link) -> tuple[float, float, float]:
        model = model_of()
        opt = thinwire.DiLoCo(sgd(model.parameters()), link, H=4)
        train(model, opt, link.rank, 6)
        other = Metered(link)
        return opt.drift(), opt.drift(other), drift(link, opt.params()) if other.meter.recent else math.nan

    for agreed, elsewhere, parameters in World(2).run(worker):
        assert agreed == elsewhere == 0.0
        assert parameters > 0


def _published(link: Link) -> tuple[float, list[Tensor]]:
    model = model_of()
    opt = thinwire.DecoupledDiLoCo(
        sgd(model.parameters()), link, H=2, mode="published", beta=0.9, outer_lr=0.7, codec=DCT(8) >> TopK(5)
    )
    train(model, opt, link.rank, 5)
    return opt.drift(), [t.clone() for t in opt.slot("anchor")]


def test_drift_of_the_published_rule_is_measured_alike_in_the_simulator_and_on_processes(pool: Pool) -> None:
    simulated, real = World(3).run(_published), pool.run(_published, 3)
    expected = expected_drift([anchor for _, anchor in simulated])
    assert expected > 1e-3
    for apart, _ in [*simulated, *real]:
        assert apart == pytest.approx(expected, rel=1e-4)


# --- Running statistics ------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two BatchNorm layers, one of which keeps no statistics, and a buffer that is nobody's statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.second, self.free = nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)
        self.register_buffer("other", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.free(self.second(torch.tanh(self.norm(self.first(x)))))


def normed() -> Normed:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Normed()


def normed_backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * rank + step)) * (rank + 1) + rank
    (model(x) - x[:, :3]).square().mean().backward()


def test_running_statistics_are_the_means_and_variances_and_nothing_else() -> None:
    model = normed()
    found = thinwire.running_statistics(model)
    assert [id(t) for t in found] == [id(model.norm.running_mean), id(model.norm.running_var)]
    assert thinwire.running_statistics(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == []


Make = Callable[..., Algorithm]
SPARSE = DCT(8) >> TopK(5)


def local_sgd(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return thinwire.LocalSGD(sgd(model.parameters()), link, H=3, **policy)


def diloco(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return thinwire.DiLoCo(sgd(model.parameters()), link, H=3, **policy)


def decoupled(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return thinwire.DecoupledDiLoCo(sgd(model.parameters()), link, H=3, mode="consensus", beta=0.9, codec=SPARSE, **policy)


def published(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return thinwire.DecoupledDiLoCo(sgd(model.parameters()), link, H=3, mode="published", beta=0.9, codec=SPARSE, **policy)


def demo(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return thinwire.DeMo(model.parameters(), link, lr=0.02, phi="sgd", whiten=False, codec=SPARSE, **policy)


def demo_delayed(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return demo(model, link, delay=True, **policy)


def data_parallel(model: nn.Module, link: Link, **policy: Any) -> Algorithm:
    return thinwire.DataParallel(sgd(model.parameters()), link, codec=Dense(), **policy)


Seen = list[tuple[list[Tensor], list[Tensor]]]


def statistics_of(make: Make, steps: int, workers: int = 3, **policy: Any) -> list[Seen]:
    """The statistics before and after the optimizer's work of each step, and of finish(): [worker][step]."""

    def worker(link: Link) -> Seen:
        model, seen = normed(), []
        statistics = thinwire.running_statistics(model)
        opt = make(model, link, buffers=statistics, **policy)
        for step in range(1, steps + 2):
            if step <= steps:
                normed_backward(model, link.rank, step)
            before = [t.clone() for t in statistics]
            opt.step() if step <= steps else opt.finish()
            opt.zero_grad()
            seen.append((before, [t.clone() for t in statistics]))
        assert torch.equal(model.get_buffer("other"), torch.arange(3.0))
        return seen

    return World(workers).run(worker)


def assert_averaged_at(workers: list[Seen], at: set[int]) -> None:
    """At these steps (from 1; the last one is finish) everyone has the mean, at all others everyone's own is left alone."""
    for step, each in enumerate(zip(*workers, strict=True), start=1):
        before, after = zip(*each, strict=True)
        if step in at:
            mean = [torch.stack(t).mean(0) for t in zip(*before, strict=True)]
            for mine in after:
                assert_close(mine, mean, 1e-5)
                assert_same(mine, after[0], f"step {step}:")
        else:
            assert not torch.equal(before[0][0], before[1][0]), f"step {step}: workers see different data"
            for own, left in zip(before, after, strict=True):
                assert_same(own, left, f"step {step}:")


@pytest.mark.parametrize("make", [local_sgd, diloco, decoupled, published])
def test_after_each_outer_step_and_at_the_end_the_statistics_are_the_mean_over_workers(make: Make) -> None:
    assert_averaged_at(statistics_of(make, steps=7), {3, 6, 8})
    assert_averaged_at(statistics_of(make, steps=7, buffers_every=2), {6, 8})


@pytest.mark.parametrize("make", [demo, demo_delayed, data_parallel])
def test_methods_of_every_step_average_statistics_seldom_and_at_the_end(make: Make) -> None:
    later = make is demo_delayed  # a round is over one step later
    assert_averaged_at(statistics_of(make, steps=5, buffers_every=2), {2 + later, 4 + later, 6})
    assert_averaged_at(statistics_of(make, steps=5), {6})
    workers = statistics_of(make, 33, 2, buffers_every=0)
    assert_same(workers[0][31 + later][1], workers[1][31 + later][1], "every 32nd step by default")
    assert not torch.equal(workers[0][30][1][0], workers[1][30][1][0])


@pytest.mark.parametrize("make", [local_sgd, diloco, decoupled, data_parallel])
def test_without_buffers_each_worker_keeps_its_own_statistics(make: Make) -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        model = normed()
        opt = make(model, link)
        for step in range(1, 7):
            normed_backward(model, link.rank, step)
            opt.step()
            opt.zero_grad()
        opt.finish()
        return snapshot(model), [t.clone() for t in thinwire.running_statistics(model)]

    (params_a, a), (params_b, b) = World(2).run(worker)
    assert_same(params_a, params_b)
    assert not torch.equal(a[0], b[0])
    assert not torch.equal(a[1], b[1])


@pytest.mark.parametrize("make", [diloco, decoupled, data_parallel])
def test_a_worker_with_nan_in_its_statistics_takes_the_mean_of_the_others_and_averaging_goes_on(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(link: Link) -> tuple[int, list[list[Tensor]], list[Tensor], list[Tensor]]:
        model, seen = normed(), []
        statistics = thinwire.running_statistics(model)
        opt = make(model, link, buffers=statistics, buffers_every=1, alarm_every=1)
        for step in range(1, 10):
            normed_backward(model, link.rank, step)
            if link.rank == 1 and step == 6:
                statistics[0][2] = float("nan")
            before = [t.clone() for t in statistics]
            opt.step()
            opt.zero_grad()
            if step == 6:
                seen = [before, [t.clone() for t in statistics]]
        return opt.aborted_rounds, seen, [t.clone() for t in statistics], snapshot(model)

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        workers = World(3).run(worker)
    others = [torch.stack([workers[rank][1][0][i] for rank in (0, 2)]).mean(0) for i in range(2)]
    for aborted, (_, after), statistics, params in workers:
        assert aborted == 0, "the round itself took place"
        assert_close(after, others, 1e-6)
        assert_same(after, workers[0][1][1])
        assert_same(statistics, workers[0][2], "averaged in the next rounds too")
        assert all(bool(torch.isfinite(t).all()) for t in [*statistics, *params])
        assert_same(params, workers[0][3])
    warnings = [r.getMessage() for r in caplog.records if r.getMessage().startswith("buffers:")]
    assert len(warnings) == 3, "one on each worker"
    assert all("NaN or Inf in the contribution of rank 1" in w and "takes the mean of the others" in w for w in warnings)


def test_statistics_that_are_nan_on_all_workers_go_back_to_what_was_agreed_last() -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model = normed()
        statistics = thinwire.running_statistics(model)
        opt = diloco(model, link, buffers=statistics)
        for step in range(1, 7):
            normed_backward(model, link.rank, step)
            if step == 6:
                statistics[0].fill_(math.nan)
            opt.step()
            opt.zero_grad()
            if step == 3:
                agreed = [t.clone() for t in statistics]
        after = [t.clone() for t in statistics]
        normed_backward(model, link.rank, 7)
        opt.step()
        opt.finish()
        return agreed, after, [t.clone() for t in statistics]

    for agreed, after, statistics in World(2).run(worker):
        assert_same(agreed, after)
        assert all(bool(torch.isfinite(t).all()) for t in statistics)


def test_statistics_of_other_shapes_are_refused_before_the_first_step() -> None:
    def worker(link: Link) -> None:
        model = normed()
        buffers = [torch.zeros(3 + link.rank)]
        opt = diloco(model, link, buffers=buffers)
        normed_backward(model, link.rank, 1)
        opt.step()

    with pytest.raises(
        thinwire.errors.FingerprintMismatch, match=r"buffers\[0\] is 'float32\[3\]' on rank 0 and 'float32\[4\]'"
    ):
        World(2).run(worker)


def test_whole_numbers_among_the_buffers_are_left_alone() -> None:
    model = normed()
    opt = diloco(model, SoloLink(), buffers=model.norm.buffers())
    assert [id(b) for b in opt.buffers] == [id(b) for b in thinwire.running_statistics(model)]
    with pytest.raises(ValueError, match="buffers_every must be a whole number of at least 0, got -1"):
        diloco(model, SoloLink(), buffers_every=-1)


def test_statistics_travel_as_a_message_of_their_own_that_is_no_round() -> None:
    def worker(link: Link) -> list[tuple[str, int]]:
        model, metered = normed(), Metered(link)
        opt = diloco(model, metered, buffers=thinwire.running_statistics(model))
        for step in range(1, 4):
            normed_backward(model, link.rank, step)
            opt.step()
            opt.zero_grad()
        return [(e.purpose, e.payload) for e in metered.meter.recent if e.purpose != "handshake"]

    P, M = sum(p.numel() for p in normed().parameters()), 2
    assert World(M).run(worker) == [[("round", 4 * (P + M)), ("buffers", 4 * (4 + 4 + M))]] * M


def test_the_shared_model_has_the_statistics_that_belong_to_it() -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        model = normed()
        statistics = thinwire.running_statistics(model)
        opt = thinwire.LocalSGD(sgd(model.parameters()), link, H=2, buffers=statistics)
        seen = []
        for step in range(1, 4):
            normed_backward(model, link.rank, step)
            opt.step()
            opt.zero_grad()
            seen.append([b.clone() for b in statistics])
        with opt.shared_model():
            shown = [b.clone() for b in statistics]
        return seen[1], seen[2], shown, [b.clone() for b in statistics]

    for agreed, later, shown, after in World(2).run(worker):
        assert_same(shown, agreed, "those of the last round")
        assert_same(after, later, "and one's own afterwards")
        assert not torch.equal(agreed[0], later[0]), "the third step moved them"
