"""Buffers on an elastic link: they are part of the messages, and of the state that one who joins takes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.elastic import replicated
from tests.conformance.training import H, assert_close, assert_same, build
from thinwire import Link, SoloLink, World, running_statistics
from thinwire.core import transfer
from thinwire.core.hashing import hash_tensors
from thinwire.sim import Churn


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def _backward(model: nn.Module, block: int, step: int) -> None:
    g = torch.Generator().manual_seed(1000 * block + step)
    model(torch.randn(6, 5, generator=g)).square().mean().backward()


def _train(size: int, steps: int, churn: Churn, *, name: str = "diloco", poison: int | None = None, **settings: Any) -> list:
    """Train a model with BatchNorm; of each worker the hashes of state and agreed buffers after each round, and its buffers."""

    def worker(link: Link) -> tuple[dict[int, int], list[torch.Tensor], bool]:
        model = _model()
        buffers = running_statistics(model)
        opt = build(name, model.parameters(), link, buffers=buffers, **settings)
        states, take = {}, opt.engine.take

        def noting(decided: Any, exchange: Any) -> bool:
            included = take(decided, exchange)
            states[decided.manifest.number] = hash_tensors([*replicated(opt), *opt.buffer_average.agreed])
            return included

        opt.engine.take = noting
        opt.join()
        while opt.steps < steps and not opt.ended:
            _backward(model, opt.block, opt.block_step)
            if link.rank == poison and opt.steps == 2:
                buffers[0].fill_(float("nan"))
            opt.step()
            opt.zero_grad()
        opt.finish()
        return states, [b.clone() for b in buffers], opt.buffer_average.averaged

    return World(size, step_time=0.1, churn=churn).run(worker)


def _assert_bit_equal(workers: list) -> None:
    states, buffers, averaged = workers[0]
    assert averaged
    for theirs, b, _ in workers[1:]:
        assert {n: states[n] for n in theirs if n in states} == {n: theirs[n] for n in states if n in theirs}
        assert_same(buffers, b)


@pytest.mark.parametrize("name", ["diloco", "demo", "data-parallel", "mt-dao", "streaming-diloco"])
def test_all_workers_have_the_mean_also_those_who_join_and_those_who_are_left_out(name: str) -> None:
    settings = {"tau": 0} if name == "streaming-diloco" else {}
    churn = Churn(joins={2: 0.5}, loss=0.2, seed=1, link={"first_wait": 0.2, "checkpoint_every": 3})
    _assert_bit_equal(_train(3, 6 * H, churn, name=name, **settings))


def test_the_mean_is_that_of_the_workers_who_count() -> None:
    workers = _train(2, H, Churn())
    _assert_bit_equal(workers)
    means = []
    for block in range(2):
        model = _model()
        opt = build("diloco", model.parameters(), SoloLink())
        for step in range(H):
            _backward(model, block, step)
            opt.step()
            opt.zero_grad()
        means.append(running_statistics(model))
    assert_close(workers[0][1], [(a + b) / 2 for a, b in zip(*means, strict=True)])


def test_what_is_not_finite_is_left_out_of_the_mean_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        workers = _train(3, 3 * H, Churn(), poison=1)
    _assert_bit_equal(workers)
    assert all(b.isfinite().all() for b in workers[0][1])
    assert "buffers: NaN or Inf in those of worker 1; it takes the mean of the others" in caplog.text


def test_those_of_some_rounds_only_and_a_state_that_was_packed_before() -> None:
    workers = _train(2, 4 * H, Churn(), buffers_every=3)
    _assert_bit_equal(workers)
    opts = []
    for _ in range(2):
        model = _model()
        opts.append(build("diloco", model.parameters(), SoloLink(), buffers=running_statistics(model)))
    first, second = opts
    first.buffers[0].fill_(3.0)
    transfer.unpack(second, transfer.pack(first, {}))
    assert not second.buffer_average.averaged and not second.buffers[0].any(), "nothing was agreed on yet"
    first.buffer_average.agree_on([torch.full_like(b, 2.0) for b in first.buffers])
    transfer.unpack(second, transfer.pack(first, {}))
    assert_same(second.buffers, first.buffers)
