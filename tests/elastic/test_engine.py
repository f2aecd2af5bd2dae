"""Joining and following with a real optimizer: the door, the state of a run, replicas that differ, schedulers, NaN."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thinwire
from tests import tiers
from tests.conformance.elastic import replicated, train_elastic
from tests.conformance.training import H, assert_same, backward, build, model_of
from tests.tiers import first_quick
from thinwire import SoloLink, World
from thinwire.core import transfer
from thinwire.core.counted import SLICES, slice_hash
from thinwire.core.hashing import hash_tensors
from thinwire.errors import CheckpointError, ConfigError, FingerprintMismatch
from thinwire.links.base import Link
from thinwire.sim import Churn


def _train(opt: Any, model: Any, steps: int, before: Callable[[int], None] = lambda step: None) -> None:
    while opt.steps < steps and not opt.ended:
        before(opt.steps + 1)
        backward(model, opt.block, opt.block_step)
        opt.step()
        opt.zero_grad()


# --- The door ---------------------------------------------------------------------------------------------------------------


def test_a_worker_with_other_settings_is_refused_by_name_and_the_others_go_on() -> None:
    def worker(link: Link) -> str | int:
        model = model_of()
        opt = build("diloco", model.parameters(), link, outer_lr=0.5 if link.rank == 2 else 0.7)
        if link.rank == 2:
            with pytest.raises(FingerprintMismatch) as refusal:
                opt.join()
            return str(refusal.value)
        opt.join()
        _train(opt, model, 2 * H)
        return opt.steps

    first, second, message = World(3, step_time=0.1, churn=Churn(joins={2: 0.1})).run(worker)
    assert first == second == 2 * H
    assert "outer_lr is 0.7 in this run and 0.5 on this worker" in message


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_other_starting_values_are_refused_unless_a_checkpoint_takes_their_place(checkpoint_every: int) -> None:
    def worker(link: Link) -> Any:
        model = model_of(seed=link.rank // 2)
        model.frozen.data.fill_(1.0)
        opt = build("diloco", model.parameters(), link)
        try:
            opt.join()
        except FingerprintMismatch as refusal:
            return str(refusal)
        _train(opt, model, 4 * H)
        return replicated(opt)

    churn = Churn(joins={2: 0.7}, link={"checkpoint_every": checkpoint_every, "first_wait": 0.1})
    first, _, third = World(3, step_time=0.1, churn=churn).run(worker)
    if checkpoint_every:
        assert_same(first, third)
    else:
        assert "the starting value of 'anchor' differs" in third and "seed all workers alike" in third


def test_the_first_step_comes_after_joining() -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = build("diloco", model.parameters(), link)
        backward(model, 0, 1)
        with pytest.raises(ConfigError, match=r"call opt\.join\(\) before the first batch"):
            opt.step()

    World(1, churn=Churn()).run(worker)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("diloco", {"tau": 1}, "needs tau=0"),
        ("demo", {"delay": True}, "needs tau=0"),
    ],
)
def test_what_an_elastic_link_cannot_do_is_refused_with_a_reason(name: str, settings: dict[str, Any], reason: str) -> None:
    def worker(link: Link) -> None:
        with pytest.raises(ConfigError, match=reason):
            build(name, model_of().parameters(), link, **settings)

    World(1, churn=Churn()).run(worker)


def test_joining_is_for_elastic_links() -> None:
    opt = build("diloco", model_of().parameters(), SoloLink())
    assert opt.block is None and not opt.ended
    for call in (opt.join, opt.follow, lambda: opt.block_step):
        with pytest.raises(ConfigError, match="is for an elastic link"):
            call()


# --- The state of a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "diloco", "data-parallel", "mt-dao", "lordo"])
def test_a_packed_state_holds_what_one_who_joins_needs(name: str) -> None:
    model, fresh = model_of(), model_of(seed=1)
    opt, other = build(name, model.parameters(), SoloLink()), build(name, fresh.parameters(), SoloLink())
    for step in range(1, 2 * H + 1):
        backward(model, 0, step)
        opt.step()
        opt.zero_grad()
    raw = transfer.pack(opt, {"round": 7})
    assert len(raw) <= transfer.most_nbytes(opt)
    transfer.unpack(other, raw)
    assert transfer.read_extra(raw) == {"round": 7}
    assert_same(replicated(opt) or opt.params(), replicated(other) or other.params())
    if opt.joiner_copies("inner.exp_avg"):
        for key, tensors in opt.inner_state().items():
            assert_same(tensors, other.inner_state()[key], key)
    assert (other.steps, other.rounds) == (opt.steps, opt.rounds)
    for damaged in (b"", raw[:100], raw[: len(raw) // 2], raw.replace(b'"format\\": 1', b'"format\\": 9'), bytes(8) + raw[8:]):
        before = hash_tensors(replicated(other) or other.params())
        with pytest.raises(CheckpointError):
            transfer.unpack(other, damaged)
        assert hash_tensors(replicated(other) or other.params()) == before, "nothing has changed"


def test_a_state_of_another_method_or_model_is_refused() -> None:
    raw = transfer.pack(build("diloco", model_of().parameters(), SoloLink()), {})
    with pytest.raises(CheckpointError, match="a state of DiLoCo, not of LocalSGD"):
        transfer.unpack(build("local-sgd", model_of().parameters(), SoloLink()), raw)
    other = build("diloco", torch.nn.Linear(3, 3).parameters(), SoloLink())
    with pytest.raises(CheckpointError, match=r"in one of the state and this optimizer only|where this optimizer has"):
        transfer.unpack(other, raw)


def test_one_who_reads_along_is_bit_equal_and_is_never_waited_for() -> None:
    def worker(link: Link) -> tuple[int, int, int]:
        model = model_of()
        opt = build("demo", model.parameters(), link)
        if link.rank == 2:
            while opt.steps < 6:
                opt.follow()
                link.elapse(0.05)
            return opt.steps, hash_tensors(replicated(opt)), 0
        opt.join()
        _train(opt, model, 6)
        return opt.steps, hash_tensors(replicated(opt)), len(link.place.expected)

    world = World(3, step_time=0.1, churn=Churn(joins={2: 0.3}, link={"first_wait": 0.1}))
    first, second, reader = world.run(worker)
    assert first[:2] == second[:2] == reader[:2] and first[2] == 2


def test_a_worker_that_was_frozen_for_long_goes_on_from_a_checkpoint() -> None:
    def worker(link: Link) -> tuple[int, list]:
        model = model_of()
        opt = build("diloco", model.parameters(), link)
        opt.join()

        def freeze(step: int) -> None:
            if link.rank == 1 and step == H + 1 and not frozen:
                frozen.append(step)
                link.elapse(2.5)

        frozen: list[int] = []
        _train(opt, model, 10 * H, freeze)
        return opt.steps, replicated(opt)

    churn = Churn(link={"checkpoint_every": 1, "first_wait": 0.2})
    (steps, state), *others = World(3, step_time=0.1, churn=churn).run(worker)
    for other_steps, other in others:
        assert steps == other_steps >= 10 * H
        assert_same(state, other)


# --- What goes wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "diloco", "mt-dao"])
def test_a_nan_leaves_out_the_worker_that_has_it_and_not_the_round(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link) -> tuple[int, list, bool]:
        model = model_of()
        opt = build(name, model.parameters(), link)
        opt.join()

        def spoil(step: int) -> None:
            if link.rank == 1 and step == 2 * H and opt.engine.joined:
                with torch.no_grad():
                    model.first.weight.fill_(float("nan"))

        _train(opt, model, 5 * H, spoil)
        opt.finish()
        return opt.aborted_rounds, replicated(opt), all(bool(torch.isfinite(p).all()) for p in model.parameters())

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        results = World(3, step_time=0.1, churn=Churn(link={"checkpoint_every": 1})).run(worker)
    for aborted, state, finite in results:
        assert aborted == 0 and finite
        assert_same(state, results[0][1])
    assert "worker 1 is left out: it says that its contribution is not finite" in caplog.text


def test_a_worker_whose_replicated_state_differs_is_left_out_and_takes_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    """The positive control of the alarm: one parameter of one worker is changed, which may have written a checkpoint since."""

    def worker(link: Link) -> list:
        model = model_of()
        opt = build("demo", model.parameters(), link)
        opt.join()

        def spoil(step: int) -> None:
            if link.rank == 1 and step == 5:
                with torch.no_grad():
                    model.second.weight.view(-1)[0].mul_(1.5)

        _train(opt, model, 14, spoil)
        return replicated(opt)

    churn = Churn(link={"checkpoint_every": 3})
    with caplog.at_level(logging.WARNING, logger="thinwire"):
        results = World(3, step_time=0.01, churn=churn).run(worker)
    for state in results:
        assert_same(state, results[0])
    assert "worker 1 is left out: its replicated state is not that of the majority" in caplog.text
    assert "worker 1 takes the newest checkpoint" in caplog.text


def test_two_workers_that_differ_both_take_the_checkpoint() -> None:
    def worker(link: Link) -> list:
        model = model_of()
        opt = build("diloco", model.parameters(), link, alarm_every=1)
        opt.join()

        def spoil(step: int) -> None:
            if link.rank == 1 and step == 3 * H:
                for a in opt.slot("anchor"):
                    a.add_(1.0)

        _train(opt, model, 6 * H, spoil)
        return replicated(opt)

    first, second = World(2, step_time=0.1, churn=Churn(link={"checkpoint_every": 1})).run(worker)
    assert_same(first, second)


def test_without_a_checkpoint_two_workers_that_differ_stop() -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = build("diloco", model.parameters(), link)
        opt.join()
        _train(opt, model, 4 * H, lambda step: [a.add_(link.rank) for a in opt.slot("anchor")] if step == 2 * H else None)

    with pytest.raises(thinwire.errors.LinkError, match="needs a checkpoint of the run to go on from, and there is none"):
        World(2, step_time=0.1, churn=Churn(link={"checkpoint_every": 0})).run(worker)


def test_slices_cover_all_of_the_state() -> None:
    tensors = [torch.arange(77.0).view(7, 11), torch.arange(3.0), torch.arange(200.0)]
    before = [slice_hash(tensors, n) for n in range(SLICES)]
    for t in tensors:
        for i in range(0, t.numel(), 1 if tiers.full else 9):
            t.view(-1)[i] += 1
            changed = [n for n in range(SLICES) if slice_hash(tensors, n) != before[n]]
            t.view(-1)[i] -= 1
            assert len(changed) == 1
    assert slice_hash([torch.zeros(1)], 0) == 1, "never 0, which stands for nothing"


# --- Learning rates and the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lambda", "cosine"])
def test_schedulers_count_the_steps_of_the_run(kind: str) -> None:
    """A joiner's scheduler goes on where the others' are, and rounds are applied with the rate of the manifest."""

    def worker(link: Link) -> tuple[list, dict[int, float]]:
        model, rates = model_of(), {}
        opt = build("demo", model.parameters(), link, lr=0.01)
        if kind == "lambda":
            scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
        opt.join(scheduler)
        while opt.steps < 10 and not opt.ended:
            rates[opt.steps] = opt.param_groups[0]["lr"]
            backward(model, opt.block, opt.block_step)
            opt.step()
            opt.zero_grad()
            scheduler.step()
        return replicated(opt), rates

    (a, rates), (b, _), (c, joined) = World(3, step_time=0.1, churn=Churn(joins={2: 0.35}, link={"first_wait": 0.1})).run(
        worker
    )
    assert_same(a, b)
    assert_same(a, c)
    assert joined and min(joined) > 1
    assert joined == {step: pytest.approx(rates[step]) for step in joined}


def test_a_late_comer_learns_that_the_run_has_ended_and_waits_for_nobody() -> None:
    def worker(link: Link) -> tuple[int, bool, int]:
        model = model_of()
        opt = build("diloco", model.parameters(), link)
        opt.join()
        _train(opt, model, 2 * H + 1)
        opt.finish()
        return opt.steps, opt.ended, hash_tensors(replicated(opt))

    results = World(3, step_time=0.1, churn=Churn(joins={2: 50.0})).run(worker)
    assert results[0] == results[1] == results[2] and results[0][:2] == (2 * H + 1, True)


def test_two_healthy_workers_do_not_shut_each_other_out() -> None:
    """Steps take twice as long now and then; what one keeps and sends at once must not close the round of the other."""
    churn = Churn(tail=0.2, tail_factor=3.0, link={"first_wait": 0.2})
    notes = train_elastic("diloco", churn, steps=30 * H, size=2)
    rounds = max(notes.states)
    assert min(len(notes.counted[0]), len(notes.counted[1])) >= 0.8 * rounds


@pytest.mark.parametrize("name", first_quick(["diloco", "decoupled-diloco", "mt-dao"]))
def test_a_worker_five_times_slower_than_the_deadline_counts_in_a_tenth_of_the_rounds(name: str) -> None:
    """Nobody is left out before one and a half usual rounds are over: its steps take 7.5 times as long, and a little more."""
    churn = Churn(link={"first_wait": 0.2, "checkpoint_every": 8})
    notes = train_elastic(name, churn, steps=24 * H, step_time=[0.1, 0.1, 0.8])
    deadline = max(notes.deadlines)
    assert 5 * deadline <= H * 0.8, "it is as slow as that"
    rounds = max(notes.states)
    assert len(notes.counted[0]) >= 0.9 * rounds, "the others do not wait for it"
    assert 10 * len(notes.counted[2]) >= rounds
