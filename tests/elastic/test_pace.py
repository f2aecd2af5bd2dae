"""Pace on an elastic link: what a worker has done weighs until it is counted, and its seconds are in its message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.elastic import replicated
from tests.conformance.training import backward, build, model_of
from thinwire import Link, SoloLink, World
from thinwire.core.hashing import hash_tensors
from thinwire.core.pace import Pace
from thinwire.errors import WireError
from thinwire.links.manifest import Unsigned
from thinwire.links.signed import Message, open_message, seal_message
from thinwire.sim import Churn

PERIOD = 8


def _rounds(size: int, steps: int, *, step_time: Any, churn: Churn, name: str = "diloco") -> list[dict[str, Any]]:
    """Train with pace=speed; of each worker the steps that it took in each round, and what it found out."""

    def worker(link: Link) -> dict[str, Any]:
        model = model_of()
        opt = build(name, model.parameters(), link, H=PERIOD, pace="speed")
        pace, weights, states = opt.pace, [], {}
        assert pace is not None
        take = opt.engine.take

        def noting(decided: Any, exchange: Any) -> bool:
            weights.append((decided.mine, pace.work))
            included = take(decided, exchange)
            states[decided.manifest.number] = hash_tensors(replicated(opt))
            assert pace.work == (0 if included else weights[-1][1]), "work that was not counted still weighs"
            return included

        opt.engine.take = noting
        opt.join()
        taken, per_round, seen = 0, [], link.place.number
        while opt.steps < steps and not opt.ended:
            backward(model, opt.block, opt.block_step)
            opt.step()
            opt.zero_grad()
            taken += 1
            if link.place.number != seen:
                per_round.append(taken)
                taken, seen = 0, link.place.number
        opt.finish()
        return {"taken": per_round, "quota": pace.quota, "weights": weights, "states": states, "steps": opt.steps}

    return World(size, step_time=step_time, churn=churn).run(worker)


def _assert_bit_equal(workers: list[dict[str, Any]]) -> None:
    for number, state in workers[0]["states"].items():
        assert all(w["states"].get(number, state) == state for w in workers), f"round {number}"


@pytest.mark.parametrize("name", ["diloco", "decoupled-diloco"])
def test_workers_of_different_speed_arrive_together(name: str) -> None:
    churn = Churn(link={"first_wait": 30.0})
    fast, slow = _rounds(2, 5 * PERIOD, step_time=(1.0, 2.0), churn=churn, name=name)
    assert fast["taken"] == [PERIOD] * 5
    assert slow["taken"] == [PERIOD, *[PERIOD // 2] * 4]
    assert all(mine for mine, _ in [*fast["weights"][1:], *slow["weights"][1:]]), "nobody is late, from the first round on"
    assert [work for _, work in slow["weights"][2:]] == [PERIOD // 2] * 4
    _assert_bit_equal([fast, slow])


def test_a_worker_that_was_too_slow_to_be_counted_finds_its_pace_from_those_who_were() -> None:
    churn = Churn(link={"first_wait": 0.1, "patience": 1.0})
    *_, slow = workers = _rounds(3, 12 * PERIOD, step_time=(0.1, 0.1, 0.4), churn=churn)
    counted = [mine for mine, _ in slow["weights"]]
    assert slow["quota"] == PERIOD // 4
    assert all(counted[-4:]), "in the end it is in every round"
    _assert_bit_equal(workers)


def test_work_of_a_message_that_was_lost_weighs_in_the_next_one() -> None:
    workers = _rounds(3, 12 * PERIOD, step_time=0.1, churn=Churn(loss=0.3, seed=1))
    assert {w["steps"] for w in workers} == {12 * PERIOD}
    assert any(mine and work == 2 * PERIOD for w in workers for mine, work in w["weights"]), "two rounds' worth of steps"
    _assert_bit_equal(workers)


def test_a_counter_in_the_middle_of_a_round_still_arrives_at_the_next() -> None:
    pace = Pace(SoloLink(), PERIOD)
    pace.state[0] = 2
    step, steps = 3, []
    while step % PERIOD:
        step = pace.next_step(step)
        steps.append(step)
    assert steps == [4, PERIOD]


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_that_cannot_be_leave_a_message_out(seconds: float) -> None:
    signer, chain = Unsigned(1), bytes(32)
    good, bad = (Message(2, 1, chain, 8, False, False, 0, s, b"x") for s in (0.25, seconds))
    assert open_message(signer, seal_message(signer, good), number=2, sender=1, chain=chain).step_seconds == 0.25
    with pytest.raises(WireError, match="which cannot be"):
        open_message(signer, seal_message(signer, bad), number=2, sender=1, chain=chain)
