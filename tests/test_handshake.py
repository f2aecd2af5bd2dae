"""What the handshake compares besides settings: frozen parameters, names, starting buffers, gradients; and how it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.processes import Pool, warnings_of_this_process
from tests.test_agreement import normed, normed_backward
from thinwire import Link, Metered, TorchLink, World
from thinwire.core.gates import handshake
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
    model, metered = normed(), Metered(link)
    if other and link.rank == 1:
        model.norm.running_mean.add_(1)
    opt = thinwire.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), metered, H=4, buffers=thinwire.running_statistics(model))
    with warnings_of_this_process() as said:
        for number in range(3):
            normed_backward(model, link.rank, number)
            opt.step()
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


# --- Gradients that are the same on all workers ----------------------------------------------------------------------------

SAME = "have the same gradients, though each should have those of its own data"


def _train(link: TorchLink, wrapped: bool) -> list[str]:
    """The warnings of a worker that trains a small model on its own data, in torch's DDP or as it is."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    forward = nn.parallel.DistributedDataParallel(model, process_group=link.group) if wrapped else model
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters()), link, H=2)
    with warnings_of_this_process() as said:
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * link.rank + step))
            forward(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return said


def test_torchs_ddp_around_the_model_is_a_warning_on_all_workers(pool: Pool) -> None:
    for said in pool.run(_train, 2, True):
        assert len(said) == 1, "once"
        assert said[0].startswith(f"all 2 workers {SAME}")
        assert "DistributedDataParallel around the model" in said[0] and "read the same data" in said[0]
    assert pool.run(_train, 2, False) == [[], []]


def _gradients_of(link: Link, gradient: Callable[[int], list[float] | None], method: str = "diloco") -> None:
    x = nn.Parameter(torch.ones(3))
    made = {
        "diloco": lambda: thinwire.DiLoCo(torch.optim.SGD([x], lr=0.1), link, H=2),
        "dataparallel": lambda: thinwire.DataParallel(torch.optim.SGD([x], lr=0.1), link),
        "demo": lambda: thinwire.DeMo([x], link, lr=0.1),
    }
    opt, given = made[method](), gradient(link.rank)
    x.grad = None if given is None else torch.tensor(given)
    opt.step()


@pytest.mark.parametrize("method", ["diloco", "dataparallel", "demo"])
def test_the_same_data_on_all_workers_is_a_warning(method: str, caplog: pytest.LogCaptureFixture) -> None:
    World(3).run(lambda link: _gradients_of(link, lambda _: [1.0, 2.0, 3.0], method))
    assert [r.getMessage().startswith(f"all 3 workers {SAME}") for r in caplog.records] == [True] * 3
    caplog.clear()
    World(3).run(lambda link: _gradients_of(link, lambda rank: [1.0, 2.0, 3.0 + (rank == 2)], method))
    assert caplog.text == "", "one worker has others"


NAN = float("nan")


@pytest.mark.parametrize(
    ("workers", "gradient"),
    [(1, [1.0, 2.0, 3.0]), (2, None), (2, [0.0, -0.0, 0.0]), (2, [NAN, NAN, NAN]), (2, [float("inf"), 0.0, NAN])],
    ids=["one worker", "none", "zeros", "NaN", "no finite value"],
)
def test_gradients_that_say_nothing_are_no_warning(
    workers: int, gradient: list[float] | None, caplog: pytest.LogCaptureFixture
) -> None:
    World(workers).run(lambda link: _gradients_of(link, lambda _: gradient))
    assert SAME not in caplog.text


def test_an_infinity_of_a_grad_scaler_does_not_hide_them(caplog: pytest.LogCaptureFixture) -> None:
    World(2).run(lambda link: _gradients_of(link, lambda _: [float("inf"), 2.0, 3.0]))
    assert caplog.text.count(SAME) == 2


@pytest.mark.parametrize(
    ("mine", "others", "elsewhere", "warned"),
    [(7, 7, False, True), (7, 8, False, False), (7, 7, True, False), (0, 0, False, False)],
    ids=["equal", "other", "another shard's differ", "nothing on any shard"],
)
def test_all_shards_of_a_worker_see_the_same(
    mine: int, others: int, elsewhere: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`any_shard` is asked twice after the digest: whether gradients differ, and whether there are any."""

    def worker(link: Link) -> int:
        asked: list[bool] = []

        def any_shard(flag: bool) -> bool:
            asked.append(flag)
            return flag or (elsewhere and len(asked) == 2)

        handshake(link, {"same": "on all"}, any_shard=any_shard, gradients=mine if link.rank == 0 else others)
        return len(asked)

    assert World(2).run(worker) == [3, 3], "the same number on every shard, whatever it finds"
    assert (SAME in caplog.text) is warned


def test_a_shard_without_gradients_warns_as_the_others_of_its_worker_do(caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link) -> None:
        answers = iter([False, False, True])  # digests alike, no gradients that differ, gradients on another shard
        handshake(link, {"same": "on all"}, any_shard=lambda flag: flag or next(answers))

    World(2).run(worker)
    assert caplog.text.count(SAME) == 2
