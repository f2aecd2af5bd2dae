"""SharedMemory: bit-equal workers hold one copy together, and nothing of what they compute changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conformance.training import ALGORITHMS, backward, build, model_of, named
from thinwire import Link, World
from thinwire.core.optimizer import Algorithm
from thinwire.errors import WireError
from thinwire.payload import Delivery
from thinwire.sim.memory import SharedMemory

STEPS = 9
Ended = tuple[list[Tensor], set[int], int]


def run(name: str, *, share: bool, size: int = 3, nan_at: int = 0, **settings: object) -> list[Ended]:
    """All state of every worker at the end, the memory of its replicated state, and its refused rounds."""
    world = World(size)
    memory = SharedMemory(world)

    def worker(link: Link) -> Ended:
        model = model_of()
        opt = build(name, model.parameters(), link, alarm_every=2, **settings)
        if share:
            memory.adopt(opt)
        for step in range(1, STEPS + 1):
            backward(model, link.rank, step)
            if step == nan_at and link.rank == 1:
                weight = model.first.weight
                weight.data = weight.data.clone()  # of this worker alone
                weight.data[0, 0] = float("nan")
            opt.step()
            opt.zero_grad()
        opt.finish()
        held = {t.data_ptr() for tensors in opt.replicated_state().values() for t in tensors if t.numel()}
        return state_of(opt), held, opt.aborted_rounds

    return world.run(worker)


def state_of(opt: Algorithm) -> list[Tensor]:
    slots = [t for entries in opt.own_state.values() for t in entries.values()]
    inner = [t for tensors in opt.inner_state().values() for t in tensors]
    return [t.clone() for t in [*opt.params(), *slots, *inner]]


def assert_same_bits(a: list[Ended], b: list[Ended]) -> None:
    for rank, (mine, theirs) in enumerate(zip(a, b, strict=True)):
        assert mine[2] == theirs[2]
        assert len(mine[0]) == len(theirs[0])
        for x, y in zip(mine[0], theirs[0], strict=True):
            assert torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8)), rank


@pytest.mark.parametrize("name", named())
def test_results_are_those_of_workers_that_share_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = run(name, share=True)
    monkeypatch.setattr("thinwire.sim.channel.Delivery", list)  # and every worker decodes for itself
    alone = run(name, share=False)
    assert_same_bits(shared, alone)
    if ALGORITHMS[name].replicated and shared[0][1]:
        assert shared[0][1] == shared[1][1] == shared[2][1], "one copy for all"
        assert not (alone[0][1] & alone[1][1])


@pytest.mark.parametrize("name", ["demo", "data-parallel", "diloco"])
def test_a_worker_that_takes_lost_state_from_the_others_writes_into_no_copy_but_its_own(name: str) -> None:
    shared, alone = run(name, share=True, nan_at=5), run(name, share=False, nan_at=5)
    assert_same_bits(shared, alone)
    assert shared[0][2] == 1


def test_gradients_are_freed_while_a_worker_waits_for_a_round() -> None:
    world = World(3)
    memory = SharedMemory(world)
    waiting: list[int] = []

    def worker(link: Link) -> None:
        model = model_of()
        opt = build("demo", model.parameters(), link)
        memory.adopt(opt)
        models.append(model)
        for step in range(1, 3):
            backward(model, link.rank, step)
            if step == 2 and link.rank == 2:
                waiting.extend(sum(p.grad is not None for p in m.parameters()) for m in models)
            opt.step()
            opt.zero_grad()

    models: list[torch.nn.Module] = []
    world.run(worker)
    assert waiting[:2] == [0, 0] and waiting[2] > 0


def test_messages_of_a_gather_are_read_once_per_world(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.core import exchange

    read: list[int] = []
    unseal = exchange.unseal
    monkeypatch.setattr(exchange, "unseal", lambda *a, **k: read.append(1) or unseal(*a, **k))
    run("demo", share=True, size=5)
    assert len(read) == 5 * STEPS
    read.clear()
    monkeypatch.setattr("thinwire.sim.channel.Delivery", list)
    run("demo", share=True, size=5)
    assert len(read) == 5 * 5 * STEPS


def test_what_one_worker_finds_of_messages_the_others_take_and_errors_too() -> None:
    found = Delivery()
    calls: list[int] = []
    assert [found.once("a", lambda: calls.append(1) or 7) for _ in range(3)] == [7, 7, 7]
    assert calls == [1]
    assert found.once("b", lambda: 8) == 8

    def fail() -> int:
        calls.append(2)
        raise WireError("damaged")

    for _ in range(2):
        with pytest.raises(WireError, match="damaged"):
            found.once("c", fail)
    assert calls == [1, 2]
