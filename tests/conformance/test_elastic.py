"""Every algorithm on an elastic link: workers join, are left out, die, come back; replicas stay bit-equal all the while."""

from __future__ import annotations

import pytest

import thinwire
from tests.conformance.elastic import at_once, can_join, elastic_names, train_elastic
from tests.conformance.training import (
    NAMES,
    H,
    assert_close,
    assert_same,
    backward,
    build,
    codec_of,
    model_of,
    smooth,
    snapshot,
)
from tests.tiers import first_quick
from thinwire import World
from thinwire.links.base import Link
from thinwire.sim import Churn

every = pytest.mark.parametrize("name", elastic_names)


@every
def test_where_nobody_comes_or_goes_it_is_the_run_of_fixed_workers(name: str) -> None:
    """Bit for bit: the messages, the order of the sums and the steps are the same."""

    def worker(link: Link, gather: bool) -> list:
        model = model_of()
        settings = at_once(name) | smooth(name)
        opt = build(name, model.parameters(), link, codec=codec_of(name, gather), on_abort="restore", **settings)
        if link.elastic:
            opt.join()
        for step in range(1, 2 * H + 2):
            backward(model, link.rank, step)
            opt.step()
            opt.zero_grad()
        opt.finish()
        assert opt.steps == 2 * H + 1
        return snapshot(model)

    for gather in (True, False):
        fixed = World(3).run(lambda link, gather=gather: worker(link, gather))
        elastic = World(3, churn=Churn(), step_time=0.1).run(lambda link, gather=gather: worker(link, gather))
        for rank in range(3):
            if gather:
                assert_same(fixed[rank], elastic[rank], f"{name}: worker {rank}")
            else:
                assert_close(fixed[rank], elastic[rank])


@every
@pytest.mark.parametrize("checkpoint_every", first_quick([2, 0]), ids=["checkpoints", "replay"])
def test_replicas_are_bit_equal_whatever_happens(name: str, checkpoint_every: int) -> None:
    """Worker 3 joins late, worker 1 dies and comes back with nothing, worker 2 has slow steps, a tenth of messages is lost."""
    churn = Churn(
        joins={3: 0.9},
        deaths=[(1.05, 1)],
        restart=0.3,
        loss=0.1,
        tail=0.1,
        seed=5,
        link={"checkpoint_every": checkpoint_every, "first_wait": 0.5},
    )
    notes = train_elastic(name, churn, steps=6 * H if name != "demo" else 4 * H, size=4)
    assert len(notes.states) >= 6
    split = {number: len(states) for number, states in notes.states.items() if len(states) > 1}
    assert not split, f"rounds with two states: {split}"
    assert notes.world.habitat.deaths and notes.world.habitat.deaths[0][1] == 1
    assert all(notes.counted.get(rank) for rank in range(4)), "all of them contributed"
    assert min(notes.counted[3]) > 1, "the joiner came later"
    there = [params for params in notes.results if params is not None]
    assert len(there) == 4
    for params in there:
        assert_same(params, there[0], "all end with the same model")
    issued, done = {(ledger["cursor"], ledger["done"]) for ledger in notes.ledgers}.pop()
    assert 0 < done < issued


@pytest.mark.parametrize("name", [name for name in NAMES if not can_join(name)])
def test_a_method_without_common_state_is_refused_with_a_reason(name: str) -> None:
    def worker(link: Link) -> str:
        with pytest.raises(thinwire.errors.ConfigError) as refusal:
            build(name, model_of().parameters(), link)
        return str(refusal.value)

    (message,) = World(1, churn=Churn()).run(worker)
    assert any(reason in message for reason in ("in pairs", "no state in common", "an owner that dies"))


@every
def test_a_worker_that_is_left_out_keeps_its_work(name: str) -> None:
    """Of two workers one is always late: what it did is sent later, but for a gradient of parameters that are gone."""
    churn = Churn(link={"first_wait": 0.2, "patience": 1.0})
    notes = train_elastic(name, churn, steps=8 * H if name != "demo" else 4 * H, size=3, step_time=[0.1, 0.1, 0.45])
    assert all(len(states) == 1 for states in notes.states.values())
    rounds = max(notes.states)
    assert len(notes.counted[0]) > len(notes.counted.get(2, ())), "the slow one is not waited for"
    if name != "data-parallel":
        assert 10 * len(notes.counted[2]) >= rounds, "and yet counts in a tenth of the rounds, at least"
