"""The round itself: peers, overlap for every method that can, what was not counted, and numbers that would spoil state."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.conformance.training import (
    H,
    adamw,
    assert_close,
    assert_same,
    backward,
    build,
    codec_of,
    model_of,
    named,
    shared,
    snapshot,
    train,
)
from tests.processes import Pool
from tests.tiers import first_quick
from thinwire import (
    DCT,
    DecoupledDiLoCo,
    DeMo,
    Dense,
    DiLoCo,
    Link,
    Mean,
    Metered,
    Peers,
    Sign,
    SoloLink,
    StreamingDiLoCo,
    TopK,
    World,
)
from thinwire.core.exchange import post
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.replicas import resync
from thinwire.errors import ConfigError, DamagedRound, NonFiniteRound, WireError
from thinwire.links.base import LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.payload import LARGEST, Payload, all_finite, zero_invalid_

# --- Peers -----------------------------------------------------------------------------------------------------------------


def _peers(link: Link) -> tuple[Peers, tuple[int, ...], bool]:
    arrived = post(link, Outgoing([torch.ones(2)], Dense(gather=True))).wait()
    return link.peers(), arrived.ids, arrived.included


def test_on_a_link_whose_workers_never_change_all_are_members_expected_and_counted(pool: Pool) -> None:
    everyone = (0, 1, 2)
    for told in (World(3).run(_peers), pool.run(_peers, 3)):
        assert told == [(Peers(rank, everyone, everyone), everyone, True) for rank in range(3)]
    assert _peers(SoloLink()) == (Peers(0, (0,), (0,)), (0,), True)
    assert Metered(SoloLink()).peers() == SoloLink().peers()
    assert [Peers(5, (3, 5, 9), (3, 5)).rank, Peers(5, (3, 5, 9), (3, 5)).size] == [1, 2]


class Counting(LinkDecorator):
    """Counts how often a link is asked who takes part."""

    asked = 0

    def peers(self) -> Peers:
        self.asked += 1
        return super().peers()

    @property
    def size(self) -> int:
        raise AssertionError("the size of a link is asked, where a round has its peers")

    @property
    def rank(self) -> int:
        raise AssertionError("the rank of a link is asked, where a round has its peers")


@pytest.mark.parametrize("name", named(lambda name: name != "noloco"))
def test_a_round_asks_once_who_takes_part_and_never_again(name: str) -> None:
    model, link = model_of(), Counting(Metered(SoloLink()))  # a meter of the wire may ask: it counts for whom a mean was
    opt = build(name, model.parameters(), link, alarm_every=0)
    train(model, opt, 0, 3 * H)
    before, rounds = link.asked, opt.rounds + len(opt.engine.queue)
    train(model, opt, 0, 2 * H, first=3 * H + 1)
    assert link.asked - before == opt.rounds + len(opt.engine.queue) - rounds > 0


class Growing(LinkDecorator):
    """A link of one worker more each time it is asked."""

    members = 0

    def peers(self) -> Peers:
        self.members += 1
        return Peers(0, tuple(range(self.members)), tuple(range(self.members)))


def test_to_ask_how_long_messages_are_does_not_touch_the_round_at_hand() -> None:
    opt = DiLoCo(adamw(model_of().parameters()), Growing(SoloLink()), H=H)
    before = opt.peers, opt.due
    assert opt.message_nbytes() < opt.message_nbytes(), "one number for each worker"
    assert (opt.peers, opt.due) == before


# --- Overlap ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_diloco_with_tau_is_streaming_diloco_of_one_fragment(tau: int, merge: str) -> None:
    def worker(link: Link, cls: type, **settings: Any) -> tuple[list[Tensor], list[Tensor], int]:
        model = model_of()
        opt = cls(adamw(model.parameters()), link, H=H, tau=tau, merge=merge, **settings)
        train(model, opt, link.rank, 3 * H + 1)
        opt.finish()
        return snapshot(model), opt.slot("anchor"), opt.pending_steps

    diloco = World(3).run(lambda link: worker(link, DiLoCo))
    streaming = World(3).run(lambda link: worker(link, StreamingDiLoCo, fragments=1, alpha=0.0))
    for (params, anchor, pending), (theirs, a, _) in zip(diloco, streaming, strict=True):
        assert_same(params, theirs)
        assert_same(anchor, a)
        assert_same(params, diloco[0][0])
        assert pending == 0


class Watched(LinkDecorator):
    """A link that knows which of the messages that it has moved are still kept."""

    def __init__(self, link: Link):
        super().__init__(link)
        self.rounds: list[weakref.ref[Any]] = []

    def post(self, payload: Payload, op: Op) -> Ticket:
        ticket = super().post(payload, op)
        if payload.purpose == "round":
            self.rounds.append(weakref.ref(ticket))
        return ticket


@pytest.mark.parametrize("tau", [0, 1])
@pytest.mark.parametrize("name", ["demo", "diloco", "decoupled-diloco"])
def test_nothing_of_a_round_is_kept_once_it_was_applied(name: str, tau: int) -> None:
    model, link = model_of(), Watched(SoloLink())
    opt = _overlapping(name, link, model.parameters(), tau)
    gradients = []
    for step in range(1, 2 * H + tau + 1):
        backward(model, 0, step)
        opt.step()
        gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
        opt.zero_grad()
    gc.collect()
    in_flight = [ticket for ticket in link.rounds if ticket() is not None]
    assert len(in_flight) == len(opt.engine.queue) == (1 if name == "demo" and tau else 0)
    assert all(gradient() is None for gradient in gradients)
    if name == "demo":
        assert not opt._g
        assert all(t.is_meta for flight in opt.engine.queue for t in flight.exchange.outgoing.tensors)


def _overlapping(name: str, link: Link, params: Any, tau: int) -> Any:
    codec = DCT(4) >> TopK(5) >> Sign()
    if name == "demo":
        return DeMo(params, link, codec=codec, delay=bool(tau))
    cls = {"diloco": DiLoCo, "decoupled-diloco": DecoupledDiLoCo}[name]
    return cls(adamw(params), link, H=H, tau=tau, codec=None if name == "diloco" else codec)


@pytest.mark.parametrize("name", ["demo", "diloco", "decoupled-diloco"])
def test_what_is_in_flight_is_sent_again_after_a_resume_bit_for_bit(name: str) -> None:
    def worker(link: Link, stop: int) -> list[Tensor]:
        model = model_of()
        opt = _overlapping(name, link, model.parameters(), 2)
        train(model, opt, link.rank, stop)
        if stop:
            state, params = opt.state_dict(), snapshot(model)
            model = model_of(seed=5)
            with torch.no_grad():
                for p, saved in zip(model.parameters(), params, strict=True):
                    p.copy_(saved)
            opt = _overlapping(name, link, model.parameters(), 2)
            opt.load_state_dict(state)
        train(model, opt, link.rank, 3 * H - stop, first=stop + 1)
        opt.finish()
        return snapshot(model)

    straight = World(2).run(lambda link: worker(link, 0))
    for stop in (H, H + 1, H + 2, H + 3):  # right after sending, in flight, applied just now, and between rounds
        for mine, expected in zip(World(2).run(lambda link, s=stop: worker(link, s)), straight, strict=True):
            assert_same(mine, expected, f"stopped after step {stop}:")


@pytest.mark.parametrize("name", ["diloco", "decoupled-diloco"])
def test_tau_hides_the_wire_behind_computing(name: str) -> None:
    def worker(link: Link, tau: int) -> float:
        model = model_of()
        opt = _overlapping(name, link, model.parameters(), tau)
        train(model, opt, link.rank, 2 * H)
        return link.now()

    network = thinwire.Network(bandwidth=8e3, latency=0.5)
    waiting, hidden = (World(2, network=network, step_time=1.0).run(lambda link, t=t: worker(link, t))[0] for t in (0, 3))
    assert hidden < waiting - 0.5, "the round at step H is hidden; the one at the end is still in flight"


def test_a_tau_that_makes_no_sense_is_refused() -> None:
    params = list(model_of().parameters())
    with pytest.raises(ConfigError, match="tau must be below H=4, so that a round is applied before the next message is made"):
        DiLoCo(adamw(params), SoloLink(), H=4, tau=4)
    with pytest.raises(ConfigError, match="pace='speed' needs tau=0"):
        DiLoCo(adamw(params), SoloLink(), H=4, tau=1, pace="speed")
    with pytest.raises(ConfigError, match="tau=1 needs a plain number of steps per round"):
        DiLoCo(adamw(params), SoloLink(), H=thinwire.Warmup(3, thinwire.Every(4)), tau=1)
    with pytest.raises(ConfigError, match="the published rule applies each worker's own D_i at once: tau must be 0, got 1"):
        DecoupledDiLoCo(adamw(params), SoloLink(), H=4, tau=1, mode="published")


# --- A message that was not counted ------------------------------------------------------------------------------------------


class InRounds(LinkDecorator):
    """A link on which the tickets of the rounds of these numbers are others."""

    def __init__(self, link: Link, rounds: set[int], ticket: Callable[[Ticket, int], Ticket]):
        super().__init__(link)
        self.rounds, self.ticket, self.seen = rounds, ticket, 0

    def post(self, payload: Payload, op: Op) -> Ticket:
        ticket = super().post(payload, op)
        self.seen += payload.purpose == "round"
        return self.ticket(ticket, self.rank) if payload.purpose == "round" and self.seen in self.rounds else ticket


def left_out_in(link: Link, rounds: set[int]) -> Link:
    """A link on which this worker's own message is not counted in the rounds of these numbers."""
    return InRounds(link, rounds, _LeftTicket)


class _LeftTicket(Ticket):
    def __init__(self, ticket: Ticket, rank: int):
        self.ticket, self.rank = ticket, rank

    def _finish(self) -> list[Payload]:
        return [p for p in self.ticket.wait() if p.sender != self.rank]


def _left_out(name: str, link: Link) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    """One round in which worker 1 is not counted, as worker 1 sees it."""
    model = model_of()
    used = left_out_in(link, {1}) if link.rank == 1 else link
    opt = build(name, model.parameters(), used, codec=codec_of(name, gather=True), alarm_every=0)
    every_step = "param" in opt.replicated
    train(model, opt, link.rank, 0 if every_step else H - 1)
    step = 1 if every_step else H
    backward(model, link.rank, step)
    seen: list[Arrived] = []
    apply = opt.apply
    before = {name: [t.clone() for t in opt.slot(name)] for name in opt._slots}

    def watched(arrived: Arrived) -> None:
        seen.append(arrived)
        before["param"] = snapshot(model)
        apply(arrived)

    opt.apply = watched
    opt.step()
    return opt, seen[0], before, snapshot(model)


@pytest.mark.parametrize("name", ["diloco", "local-sgd"])
def test_dense_methods_keep_the_progress_that_was_not_counted(name: str) -> None:
    """x_i <- a' + (x_i - a)."""

    def worker(link: Link) -> None:
        opt, arrived, before, _ = _left_out(name, link)
        assert arrived.included == (link.rank != 1)
        assert arrived.ids == ((0, 2) if link.rank == 1 else (0, 1, 2))
        trained = [i for i, p in enumerate(opt.param_groups[0]["params"]) if p.requires_grad]
        for i in arrived.which:
            now, old = opt.part("param", (i,))[0], before["param"][trained[i]]
            anchor, was = opt.part("anchor", (i,))[0], before["anchor"][i]
            expected = anchor if link.rank != 1 else anchor + (old - was)
            assert torch.equal(now, expected)

    World(3).run(worker)


def test_what_was_not_counted_stays_in_the_feedback() -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        opt, arrived, _, _ = _left_out("demo", link)
        assert arrived.included == (link.rank != 1)
        alone = Outgoing(opt.params(), opt.codec, slots=[m.clone() for m in opt.slot("momentum")])
        return opt.slot("momentum"), post(SoloLink(), alone).wait().mean

    results = World(3).run(worker)
    # Whoever was counted has what was sent taken off; what is left is smaller than the kept momentum of the others.
    norms = [sum(float(m.norm()) for m in momentum) for momentum, _ in results]
    assert norms[1] > 2 * max(norms[0], norms[2])


@pytest.mark.parametrize("name", ["decoupled-diloco", "mt-dao", "lordo"])
def test_a_worker_that_was_not_counted_follows_the_others(name: str) -> None:
    def worker(link: Link) -> tuple[bool, list[Tensor] | None]:
        opt, arrived, _, _ = _left_out(name, link)
        return arrived.included, opt.agreed()

    results = World(3).run(worker)
    assert [included for included, _ in results] == [True, False, True]


# --- Numbers that would spoil state ------------------------------------------------------------------------------------------


def test_a_value_that_would_overflow_when_squared_is_invalid() -> None:
    assert all_finite([torch.tensor([1e17, -1e17])], LARGEST)
    assert not all_finite([torch.tensor([1.0, -2e18])], LARGEST)
    assert not all_finite([torch.tensor([3e38])], LARGEST)
    assert not all_finite([torch.tensor([math.nan])], LARGEST)
    assert all_finite([torch.tensor([3e38]), torch.empty(0)])
    t = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3e38, -2.0])
    zero_invalid_([t])
    assert t.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, -2.0]


@pytest.mark.parametrize("value", first_quick([3e38, -3e38, 1e30, math.inf]))
@pytest.mark.parametrize("name", named())
def test_one_huge_gradient_leaves_nothing_in_any_state_and_training_goes_on(name: str, value: float) -> None:
    def worker(link: Link) -> tuple[list[Tensor], int, dict[str, list[Tensor]]]:
        model = model_of()
        opt = build(name, model.parameters(), link, codec=codec_of(name, gather=True), alarm_every=1)
        for step in range(1, 4 * H + 1):
            backward(model, link.rank, step)
            if link.rank == 1 and step == H + 1:
                model.first.weight.grad[0, 0] = value
                model.second.weight.grad.fill_(value)
            opt.step()
            opt.zero_grad()
        opt.finish()
        for p, entries in [*opt.own_state.items(), *getattr(getattr(opt, "inner", None), "state", {}).items()]:
            for key, t in entries.items():
                if isinstance(t, Tensor):
                    assert all_finite([t], 1e6), f"{key} of {tuple(p.shape)}: {t.abs().max()}"
        return snapshot(model), opt.aborted_rounds, shared(opt)

    results = World(3).run(worker)
    for params, aborted, state in results:
        assert all_finite(params, 1e3)
        assert aborted <= 1, "at most the round of that gradient is refused"
        for key, tensors in state.items():
            assert_same(tensors, results[0][2][key], key)


@pytest.mark.parametrize("bad", first_quick([0, 1, 2]))
@pytest.mark.parametrize("value", [math.nan, 3e38])
@pytest.mark.parametrize("name", ["demo", "data-parallel"])
def test_a_worker_with_invalid_numbers_in_replicated_parameters_takes_them_from_the_others(
    name: str, value: float, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(link: Link) -> tuple[list[Tensor], int, float]:
        model = model_of()
        opt = build(name, model.parameters(), link, alarm_every=1)
        train(model, opt, link.rank, 3)
        if link.rank == bad:
            with torch.no_grad():
                model.second.weight.fill_(value)
        train(model, opt, link.rank, 5, first=4)
        return snapshot(model), opt.aborted_rounds, opt.drift()

    results = World(3).run(worker)
    for params, aborted, drift in results:
        assert all_finite(params)
        assert_same(params, results[0][0])
        assert (aborted, drift) == (1, 0.0)
    assert f"the replicated state of rank {bad} was invalid: it was taken from the other workers" in caplog.text


def test_replicated_state_is_taken_from_the_majority_and_never_from_or_by_a_worker_that_is_behind() -> None:
    def worker(link: Link, values: list[float], behind: int) -> tuple[float, tuple[int, ...]]:
        state = [torch.full((3,), values[link.rank])]
        took = resync(link, state, behind=link.rank == behind)
        return float(state[0][0]), took

    def after(values: list[float], behind: int = -1) -> tuple[list[float], tuple[int, ...]]:
        results = World(len(values)).run(lambda link: worker(link, values, behind))
        assert len({took for _, took in results}) == 1
        return [value for value, _ in results], results[0][1]

    assert after([2.0, math.nan, 1.0, 1.0]) == ([1.0, 1.0, 1.0, 1.0], (0, 1))
    assert after([2.0, math.nan, 1.0], behind=0) == ([2.0, 1.0, 1.0], (1,))
    assert after([math.inf, 1.0]) == ([1.0, 1.0], (0,))
    assert after([2.0, 1.0, 1.0]) == ([2.0, 1.0, 1.0], ())


def _lost_parameters(link: Link) -> list[Tensor]:
    model = model_of()
    opt = DeMo(model.parameters(), link, alarm_every=1)
    train(model, opt, link.rank, 2)
    if link.rank == 0:
        with torch.no_grad():
            model.first.bias.fill_(math.nan)
    train(model, opt, link.rank, 3, first=3)
    return snapshot(model)


def test_real_processes_take_replicated_parameters_from_each_other_too(pool: Pool) -> None:
    simulated, real = World(2).run(_lost_parameters), pool.run(_lost_parameters, 2)
    for params in real:
        assert_same(params, simulated[0])


# --- Damage that one receiver alone sees -------------------------------------------------------------------------------------


def damaged_in(link: Link, rounds: set[int]) -> Link:
    """A link on which what this worker receives of rank 0 in the rounds of these numbers has a flipped bit."""
    return InRounds(link, rounds, _DamagedTicket)


class _DamagedTicket(Ticket):
    def __init__(self, ticket: Ticket, rank: int):
        self.ticket = ticket

    def _finish(self) -> list[Payload]:
        first, *others = self.ticket.wait()
        data = first.data.clone()
        data[-1] ^= 1
        return [replace(first, data=data), *others]


def _damaged(link: Link, name: str, rounds: set[int]) -> tuple[str, int, list[Tensor], dict[str, list[Tensor]]]:
    model = model_of()
    used = damaged_in(link, rounds) if link.rank == 2 else link
    opt = build(name, model.parameters(), used, codec=codec_of(name, gather=True), alarm_every=1)
    try:
        train(model, opt, link.rank, 4 * H)
        opt.finish()
    except WireError as error:
        return str(error), opt.aborted_rounds, snapshot(model), {}
    return "", opt.aborted_rounds, snapshot(model), shared(opt)


# Of owners tests/test_owners.py damages parts, which can be empty.
GATHERED = named(lambda name: name not in ("noloco", "streaming-diloco") and not name.endswith("-by-owners"))


@pytest.mark.parametrize("name", GATHERED)
def test_a_message_that_one_receiver_cannot_read_is_applied_by_nobody_and_replicas_stay_equal(name: str) -> None:
    results = World(3).run(lambda link: _damaged(link, name, {2}))
    for error, aborted, params, state in results:
        assert error == ""
        assert aborted == 1
        for key, tensors in state.items():
            assert_same(tensors, results[0][3][key], key)
        assert_close(params, results[0][2])


def _overtaken(link: Link, name: str, rounds: set[int], tau: int) -> tuple[list[Tensor], dict[str, list[Tensor]], int, bool]:
    model = model_of()
    used = damaged_in(link, rounds) if link.rank == 2 else link
    if name == "streaming-diloco":
        opt = StreamingDiLoCo(
            adamw(model.parameters()), used, H=H, fragments=2, tau=tau, codec=Dense(gather=True), alarm_every=1
        )
    else:
        opt = _overlapping(name, used, model.parameters(), tau)
    behind = False
    for step in range(1, 6 * H + 1):
        train(model, opt, link.rank, 1, first=step)
        behind = behind or opt.engine.resend.missing
    opt.finish()
    return snapshot(model), shared(opt), opt.aborted_rounds, behind


@pytest.mark.parametrize("rounds", first_quick([{2}, {2, 3}, {3, 6}]), ids=str)
@pytest.mark.parametrize(
    ("name", "tau"), [("demo", 1), ("decoupled-diloco", 2), ("streaming-diloco", 1), ("streaming-diloco", 3)]
)
def test_with_tau_a_round_that_one_worker_cannot_read_is_sent_again(name: str, tau: int, rounds: set[int]) -> None:
    results = World(3).run(lambda link: _overtaken(link, name, rounds, tau))
    assert [behind for *_, behind in results] == [False, False, True]
    for params, state, aborted, _ in results:
        assert aborted == 0
        assert_same(params, results[0][0])
        for key, tensors in state.items():
            assert_same(tensors, results[0][1][key], key)


@pytest.mark.parametrize("rounds", [{2}, {2, 3}, {2, 4}], ids=str)
@pytest.mark.parametrize("name", ["diloco", "decoupled-diloco", "streaming-diloco"])
def test_the_steps_of_a_worker_that_is_behind_are_not_counted_twice(name: str, rounds: set[int]) -> None:
    def worker(link: Link) -> float:
        x = torch.nn.Parameter(torch.zeros(8))
        used = damaged_in(link, rounds) if link.rank == 2 else link
        plain: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": Dense(gather=True), "tau": 1}
        plain |= {"streaming-diloco": {"fragments": 1}, "decoupled-diloco": {"beta": 1.0, "over": "workers"}}.get(name, {})
        opt = build(name, [x], used, inner=lambda params: torch.optim.SGD(params, lr=1.0), **plain)
        for _ in range(5 * H):
            x.grad = torch.full_like(x, -1.0 if link.rank == 2 else 0.0)
            opt.step()
        opt.finish()
        return 3 * float(x.detach()[0])

    first, *others = World(3).run(worker)
    assert others == [first, first]
    # One step in each round is made while it travels, and dropped; the worker that is behind keeps it.
    assert first == pytest.approx(4 * H + (2 if rounds == {2, 4} else 1), abs=1e-4)


def test_parameters_may_be_added_while_a_worker_is_behind() -> None:
    def worker(link: Link) -> list[Tensor]:
        model, added = model_of(), torch.nn.Parameter(torch.ones(4, 4))
        used = damaged_in(link, {3}) if link.rank == 2 else link
        opt = DeMo(model.parameters(), used, codec=DCT(4) >> TopK(5) >> Sign(), delay=True)
        train(model, opt, link.rank, 4)
        assert opt.engine.resend.missing == (link.rank == 2)
        opt.add_param_group({"params": [added]})
        train(model, opt, link.rank, 2, first=5)
        opt.finish()
        return snapshot(model)

    results = World(3).run(worker)
    for params in results:
        assert_same(params, results[0])


def _nothing_finite(model: torch.nn.Module, opt: Any) -> None:
    """Spoil what this worker sends next."""
    with torch.no_grad():
        spoiled = [p.grad for p in model.parameters()] if "param" in opt.replicated else [next(model.parameters())]
        for t in spoiled:
            if t is not None:
                t.fill_(math.nan)


def _damaged_and_refused(
    link: Link, name: str, tau: int, rounds: set[int], steps: int, invalid: set[int]
) -> tuple[dict[str, list[Tensor]], int, int]:
    model = model_of()
    used = damaged_in(link, rounds) if link.rank == 2 else link
    codec = {"demo": DCT(4) >> TopK(5) >> Sign(), "decoupled-diloco": DCT(4) >> TopK(5)}.get(name, Dense(gather=True))
    extra: dict[str, Any] = {"delay": True} if name == "demo" else {"tau": tau}
    extra |= {"fragments": 1} if name == "streaming-diloco" else {}
    opt = build(name, model.parameters(), used, codec=codec, alarm_every=1, **extra)
    for step in range(1, steps + 1):
        backward(model, link.rank, step)
        if step in invalid and link.rank == 0:
            _nothing_finite(model, opt)
        opt.step()
        opt.zero_grad()
    opt.finish()
    return shared(opt), opt.aborted_rounds, opt.pending_steps


OVERTAKEN = [("demo", 1), ("diloco", 2), ("decoupled-diloco", 2), ("streaming-diloco", 2)]


@pytest.mark.parametrize(("name", "tau"), OVERTAKEN)
def test_with_tau_a_refused_round_is_refused_also_where_its_messages_are_damaged(name: str, tau: int) -> None:
    invalid = 3 if name == "demo" else 3 * H - 1
    results = World(3).run(lambda link: _damaged_and_refused(link, name, tau, {3}, 5 * H, {invalid}))
    for state, aborted, _ in results:
        assert aborted == 1
        for key, tensors in state.items():
            assert_same(tensors, results[0][0][key], key)


def test_a_missing_round_is_sent_again_while_other_rounds_are_refused() -> None:
    refused = set(range(4, 16))
    results = World(3).run(lambda link: _damaged_and_refused(link, "demo", 1, {3}, 20, refused))
    for state, aborted, _ in results:
        assert aborted == len(refused)
        assert_same(state["param"], results[0][0]["param"])


@pytest.mark.parametrize("steps", [3 * H + 2, 3 * H + 3])
@pytest.mark.parametrize(("name", "tau"), OVERTAKEN[1:])
def test_all_workers_agree_at_the_end_on_whether_a_last_round_is_due(name: str, tau: int, steps: int) -> None:
    results = World(3).run(lambda link: _damaged_and_refused(link, name, tau, {3}, steps, set()))
    for state, aborted, pending in results:
        assert aborted == pending == 0
        for key, tensors in state.items():
            assert_same(tensors, results[0][0][key], key)


def test_all_rounds_that_are_missing_at_the_end_are_sent_again() -> None:
    def worker(link: Link) -> tuple[int, list[Tensor]]:
        model = torch.nn.ModuleList(torch.nn.Linear(3, 3, bias=False) for _ in range(16))
        used = damaged_in(link, set(range(2, 33))) if link.rank == 1 else link
        for i, p in enumerate(model.parameters()):
            p.data.fill_(i)
        opt = StreamingDiLoCo(adamw(model.parameters()), used, H=16, fragments=16, tau=15, codec=Dense(gather=True))
        for step in range(1, 33):
            for p in model.parameters():
                p.grad = torch.full_like(p, math.sin(step + link.rank))
            opt.step()
        while opt.engine.queue:
            opt.engine._settle()
        missing = len(opt.engine.resend.kept_back)
        opt.finish()
        return missing, snapshot(model)

    (_, expected), (missing, params) = World(2).run(torch.no_grad()(worker))
    assert missing > 8
    assert_same(params, expected)


def test_with_tau_real_processes_send_a_round_again_too(pool: Pool) -> None:
    simulated, real = (run(_overtaken, 3, "demo", {2}, 1) for run in (_simulated, pool.run))
    for (params, *_), (expected, *_) in zip(real, simulated, strict=True):
        assert_same(params, expected)


def _simulated(function: Any, size: int, *arguments: Any) -> list[Any]:
    return World(size).run(lambda link: function(link, *arguments))


def test_the_last_round_and_a_checkpoint_leave_nobody_behind(tmp_path: Path) -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        used = damaged_in(link, {2, H}) if link.rank == 2 else link
        opt = DeMo(model.parameters(), used, codec=DCT(4) >> TopK(5) >> Sign(), delay=True)
        train(model, opt, link.rank, 3)
        assert opt.engine.resend.missing == (link.rank == 2)
        thinwire.checkpoint.save(tmp_path, model, opt, link)
        saved = snapshot(model)
        train(model, opt, link.rank, H - 3, first=4)
        opt.finish()
        return saved, snapshot(model)

    results = World(3).run(worker)
    for saved, params in results:
        assert_same(saved, results[0][0])
        assert_same(params, results[0][1])


def test_damage_in_round_after_round_ends_in_the_same_error_on_all_workers(pool: Pool) -> None:
    rounds = {2, 3, 4}
    for results in (World(3).run(lambda link: _damaged(link, "demo", rounds)), pool.run(_damaged, 3, "demo", rounds)):
        for error, aborted, params, _ in results:
            assert "rank 2 could not read the messages" in error
            assert "in 3 rounds in a row" in error
            assert aborted == 3
            assert_same(params, results[0][2])


def test_a_damaged_round_is_an_aborted_one() -> None:
    assert issubclass(DamagedRound, thinwire.errors.RoundAborted) and not issubclass(DamagedRound, NonFiniteRound)


# --- Means that one bad worker cannot spoil ----------------------------------------------------------------------------------


def test_robust_names_the_protection_of_a_mean() -> None:
    assert Mean.of() == Mean()
    assert Mean.of("senders", "median") == Mean("senders", median_norm=True)
    assert Mean.of("workers", "trimmed=0.25, clip=1.5") == Mean(trimmed=0.25, clip_norm=1.5)
    for wrong in ("best", "trimmed", "clip=x", "median=2", ","):
        with pytest.raises(ConfigError, match="robust must be made of 'median', 'trimmed=FRACTION' and 'clip=NORM'"):
            Mean.of("workers", wrong)
    with pytest.raises(ConfigError, match="trimmed must be at least 0 and below"):
        Mean.of("workers", "trimmed=0.5")


@pytest.mark.parametrize("robust", ["median", "trimmed=0.34", "clip=0.05"])
@pytest.mark.parametrize("name", ["demo", "diloco", "decoupled-diloco"])
def test_one_worker_that_sends_large_numbers_moves_a_robust_mean_little(name: str, robust: str) -> None:
    def worker(link: Link, robust: str, loud: float) -> list[Tensor]:
        model = model_of()
        extra = {"over": "workers", "codec": DCT(4) >> TopK(16), "robust": robust} if name != "diloco" else {"robust": robust}
        settings: dict[str, Any] = {"phi": "sgd", "lr": 0.1, "whiten": False} if name == "demo" else {}
        opt = build(name, model.parameters(), link, **extra, **settings)
        for step in range(1, H + 1):
            backward(model, link.rank, step)
            if link.rank == 2:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(loud)
                if "param" not in opt.replicated and step == H:
                    with torch.no_grad():
                        model.first.weight.mul_(loud)
            opt.step()
            opt.zero_grad()
        return snapshot(model)

    def moved(robust: str) -> float:
        calm, loud = (World(3).run(lambda link, f=factor: worker(link, robust, f))[0] for factor in (1.0, 1e4))
        return sum(float((a - b).norm()) for a, b in zip(calm, loud, strict=True))

    assert moved(robust) < 0.02 * moved("")


def test_a_mean_on_the_wire_cannot_be_robust() -> None:
    params = list(model_of().parameters())
    with pytest.raises(ConfigError, match="robust='median' needs messages that are gathered"):
        DiLoCo(adamw(params), SoloLink(), robust="median", codec=Dense())
