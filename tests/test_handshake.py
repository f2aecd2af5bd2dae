"""What the handshake compares besides settings: frozen parameters, the order of names, starting buffers; and how it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.processes import Pool
from tests.test_agreement import normed, normed_backward
from thinwire import Link, Metered, World
from thinwire.core.hashing import show_hash
from thinwire.core.optimizer import Algorithm
from thinwire.errors import FingerprintMismatch


def lora(link: Link, base_seed: int, params: Callable[[nn.Module], Any] = nn.Module.parameters) -> tuple[nn.Module, Algorithm]:
    """A frozen base model and a small trained one beside it, which all workers start alike."""
    torch.manual_seed(base_seed)
    base = nn.Linear(6, 4).requires_grad_(False)
    torch.manual_seed(99)
    model = nn.ModuleDict({"base": base, "down": nn.Linear(6, 2, bias=False), "up": nn.Linear(2, 4, bias=False)})
    return model, thinwire.DiLoCo(torch.optim.SGD(params(model), lr=0.1), link, H=2)


def step(model: nn.Module, opt: Algorithm) -> None:
    x = torch.ones(3, 6)
    (model["base"](x) + model["up"](model["down"](x))).sum().backward()  # type: ignore[index]
    opt.step()


def _fine_tune(link: Link, base_seed_of_rank_1: int) -> str:
    model, opt = lora(link, base_seed_of_rank_1 if link.rank == 1 else 5)
    try:
        step(model, opt)
    except FingerprintMismatch as refusal:
        return str(refusal)
    return "accepted"


def test_adapters_on_another_base_model_are_refused_on_all_workers(pool: Pool) -> None:
    for everyone in (World(3).run(lambda link: _fine_tune(link, 6)), pool.run(_fine_tune, 3, 6)):
        assert len(set(everyone)) == 1
        assert everyone[0].startswith("workers were started differently: the frozen parameters differ: their hash is '")
        assert "' on rank 0 and '" in everyone[0]
        assert everyone[0].endswith(
            "' on rank 1: load the same base model on all workers, or call thinwire.broadcast(link, model)"
        )
    assert World(3).run(lambda link: _fine_tune(link, 5)) == ["accepted"] * 3


def test_a_frozen_model_is_hashed_once_and_not_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def watched(tensors: list[torch.Tensor]) -> str:
        hashed.extend(t.data_ptr() for t in tensors)
        return show_hash(tensors)

    monkeypatch.setattr("thinwire.core.gates.show_hash", watched)

    def worker(link: Link) -> list[int]:
        model, opt = lora(link, 5)
        for _ in range(5):
            step(model, opt)
        return [p.data_ptr() for p in model["base"].parameters()]  # type: ignore[index]

    (frozen,) = World(1).run(worker)
    assert [hashed.count(place) for place in frozen] == [1, 1]


@pytest.mark.parametrize("method", ["diloco", "demo"])
def test_another_order_of_names_is_refused(method: str) -> None:
    """Of the same shape and the same starting values, so that nothing but the names tells."""

    def worker(link: Link) -> None:
        x = [(name, nn.Parameter(torch.ones(3))) for name in ("query", "key", "value")]
        if link.rank == 1:
            x[0], x[1] = x[1], x[0]
        if method == "demo":
            opt: Algorithm = thinwire.DeMo(x, link, lr=0.1)
        else:
            opt = thinwire.DiLoCo(torch.optim.SGD(x, lr=0.1), link, H=2)
        opt.step()

    named = r"group\[0\].param_names\[0\] is 'query' on rank 0 and 'key' on rank 1; group\[0\].param_names\[1\] is 'key'"
    with pytest.raises(FingerprintMismatch, match=named):
        World(2).run(worker)


def _with_statistics(link: Link, other: bool) -> tuple[list[str], list[tuple[str, int]]]:
    """The warnings of one worker, and what crossed its link before the first round."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    model, metered = normed(), Metered(link)
    if other and link.rank == 1:
        model.norm.running_mean.add_(1)
    opt = thinwire.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), metered, H=4, buffers=thinwire.running_statistics(model))
    logging.getLogger("thinwire").addHandler(handler)
    try:
        for number in range(3):
            normed_backward(model, link.rank, number)
            opt.step()
    finally:
        logging.getLogger("thinwire").removeHandler(handler)
    return said, [(e.purpose, e.payload) for e in metered.meter.recent]


def test_other_starting_buffers_are_a_warning_on_all_workers_and_cost_no_message(pool: Pool) -> None:
    warning = (
        "the buffers (those given as buffers=, such as BatchNorm's running statistics) of rank 1 start with other values than "
        "rank 0's: call thinwire.broadcast(link, model) on all workers before the optimizer is made"
    )
    for said, sent in pool.run(_with_statistics, 3, True):
        assert said == [warning], "once"
        assert sent == [("handshake", 32)]
    for said, sent in pool.run(_with_statistics, 3, False):
        assert said == [], "the first batch of each worker has changed them, but they started alike"
        assert sent == [("handshake", 32)]


def test_buffers_that_went_their_own_ways_are_not_compared_after_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link) -> None:
        model = normed()
        opt = thinwire.DiLoCo(
            torch.optim.SGD(model.parameters(), lr=0.1), link, H=4, buffers=thinwire.running_statistics(model)
        )
        for number in range(4):
            normed_backward(model, link.rank, number)
            opt.step()
            if number == 1:
                opt.load_state_dict(opt.state_dict())  # mid-interval: they shake hands again

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        World(2).run(worker)
    assert caplog.text == ""
