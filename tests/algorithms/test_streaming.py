"""Streaming DiLoCo: claims S1 to S6 of the paper as far as they are exact or can be seen small, and what happens in between."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.training import adamw, assert_close, assert_same, backward, model_of, sgd, snapshot, train
from tests.processes import Pool
from tests.tiers import first_quick
from thinwire import (
    Codec,
    Dense,
    DiLoCo,
    Flaky,
    Fp4,
    Identity,
    Link,
    Metered,
    Network,
    RandomK,
    SoloLink,
    StreamingDiLoCo,
    World,
)
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES
from thinwire.core.fragments import block_fragments, deal
from thinwire.errors import ConfigError, NonFiniteRound
from thinwire.links.base import LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.payload import Payload
from thinwire.tasks import make_task

H = 6
SEEDED = Identity() >> RandomK(0.5)  # another choice of entries in every round


def streaming(model: nn.Module, link: Link, *, inner: Any = adamw, **settings: Any) -> StreamingDiLoCo:
    return StreamingDiLoCo(inner(model.parameters()), link, **({"H": H, "fragments": 3} | settings))


# --- S1: the limit in which it is DiLoCo -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Dense(), Dense("bf16"), Fp4(), SEEDED], ids=repr)
@pytest.mark.parametrize(("merge", "nesterov"), [("mean", True), ("mean", False), ("rda", True)])
def test_one_fragment_without_delay_is_diloco_bit_for_bit(codec: Codec, merge: str, nesterov: bool) -> None:
    def worker(link: Link, cls: type, **settings: Any) -> tuple:
        model = model_of()
        opt = cls(adamw(model.parameters()), link, H=H, codec=codec, merge=merge, nesterov=nesterov, **settings)
        train(model, opt, link.rank, 3 * H + 2)
        before = snapshot(model)
        opt.finish()
        return before, snapshot(model), opt.slot("anchor"), opt.slot("momentum"), [opt.rounds, opt.pending_steps]

    ours = World(3).run(lambda link: worker(link, StreamingDiLoCo, fragments=1, tau=0))
    diloco = World(3).run(lambda link: worker(link, DiLoCo))
    for mine, theirs in zip(ours, diloco, strict=True):
        for a, b in zip(mine[:-1], theirs[:-1], strict=True):
            assert_same(a, b)
        assert mine[-1] == theirs[-1] == [4, 0]


# --- S2: bytes -------------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Eight equal blocks, and a head smaller than a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(8))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def step_blocks(model: Blocks, opt: torch.optim.Optimizer, rank: int, step: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    (model(x) - x[:, :3]).square().mean().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_h_steps_send_what_a_round_of_diloco_does_and_the_peak_is_the_largest_fragment(tau: int) -> None:
    M, P, H = 4, 4, 8

    def worker(link: Link, stream: bool) -> tuple[list[int], list[int]]:
        model, metered = Blocks(), Metered(link)
        inner = sgd(model.parameters())
        opt = DiLoCo(inner, metered, H=H)
        if stream:
            opt = StreamingDiLoCo(inner, metered, H=H, fragments=block_fragments(model, P), tau=tau)
        for step in range(1, 2 * H + tau + 1):
            step_blocks(model, opt, link.rank, step)
        sizes = [sum(p.numel() for p in some) for some in block_fragments(model, P)]
        return [e.payload for e in metered.meter.recent if e.purpose == "round"], sizes

    (whole, _), (parts, sizes) = (World(M).run(lambda link, s=stream: worker(link, s))[0] for stream in (False, True))
    assert len(whole) == 2
    assert len(parts) == 2 * P
    overhead = 4 * M  # one status number per worker behind each message
    assert sum(parts) == sum(whole) + 2 * (P - 1) * overhead
    assert max(parts) == 4 * max(sizes) + overhead
    assert sum(parts[:P]) == 4 * sum(sizes) + P * overhead
    block, head = 6 * 6 + 6, 3 * 6 + 3
    assert sorted(sizes) == [2 * block] * 3 + [2 * block + head], "two blocks each, the rest in the first of the smallest"


# --- S3: when what happens ---------------------------------------------------------------------------------------------------


class Logging(LinkDecorator):
    """Notes when a round is posted and when it is waited for."""

    def __init__(self, link: Link):
        super().__init__(link)
        self.step, self.seen = 0, []

    def tick(self) -> None:
        self.step += 1
        self.link.tick()

    def post(self, payload: Payload, op: Op) -> Ticket:
        ticket = self.link.post(payload, op)
        return LoggedTicket(self, ticket) if payload.purpose == "round" else ticket


class LoggedTicket(Ticket):
    def __init__(self, link: Logging, ticket: Ticket):
        self.link, self.ticket = link, ticket
        self.number = sum(what == "post" for what, *_ in link.seen)
        link.seen.append(("post", link.step, self.number))

    def _finish(self) -> list[Payload]:
        self.link.seen.append(("wait", self.link.step, self.number))
        return self.ticket.wait()


@pytest.mark.parametrize("tau", range(6))
def test_a_fragment_is_sent_when_due_and_waited_for_tau_steps_later(tau: int) -> None:
    model, link = model_of(), Logging(SoloLink())
    opt = streaming(model, link, tau=tau)
    train(model, opt, 0, 3 * H)
    posts = [(step, n) for what, step, n in link.seen if what == "post"]
    waits = [(step, n) for what, step, n in link.seen if what == "wait"]
    assert [step for step, _ in posts] == list(range(2, 3 * H + 1, 2)), "three fragments, spread evenly over six steps"
    assert waits == [(step + tau, n) for step, n in posts if step + tau <= 3 * H], "in order, none overtakes another"
    assert opt.param_groups[0]["in_flight"] == len(posts) - len(waits)
    for step in {step for _, step, _ in link.seen}:
        at = [what for what, when, _ in link.seen if when == step]
        assert at == sorted(at), "what is due leaves before anything is waited for"


def by_hand(tau: int, alpha: float, M: int, steps: int, P: int) -> tuple[list[list[float]], list[float]]:
    """Algorithm 2 on P numbers, one per fragment, in plain Python: lr 0.1, eta 0.7, mu 0.9."""
    x = [[1.0] * P for _ in range(M)]
    a, m, flying = [1.0] * P, [0.0] * P, []
    for t in range(1, steps + 1):
        for i in range(M):
            for p in range(P):
                x[i][p] -= 0.1 * gradient(x[i][p], i, p, t)
        for p in range(P):
            if (t + p * H // P) % H == 0:
                flying.append((t + tau, p, sum(a[p] - x[i][p] for i in range(M)) / M))
        while flying and flying[0][0] == t:
            _, p, D = flying.pop(0)
            m[p] = 0.9 * m[p] + D
            a[p] -= 0.7 * (D + 0.9 * m[p])
            for i in range(M):
                x[i][p] = alpha * x[i][p] + (1 - alpha) * a[p]
    return x, a


def gradient(x: float, worker: int, p: int, t: int) -> float:
    return x - 0.3 * worker + 0.1 * p + 0.05 * ((7 * t + 3 * worker + p) % 5)


@pytest.mark.parametrize("tau", range(6))
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5])
def test_it_is_algorithm_2_by_hand(tau: int, alpha: float) -> None:
    M, P, steps = 2, 3, 4 * H + 1

    def worker(link: Link) -> tuple[list[float], list[float]]:
        x = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(P)]
        opt = StreamingDiLoCo(
            torch.optim.SGD(x, lr=0.1), link, H=H, fragments=P, layout="strided", tau=tau, alpha=alpha, codec=Dense("fp64")
        )
        for t in range(1, steps + 1):
            for p, value in enumerate(x):
                value.grad = torch.tensor([gradient(float(value.detach()), link.rank, p, t)], dtype=torch.float64)
            opt.step()
        return [float(v.detach()) for v in x], [float(v) for v in opt.slot("anchor")]

    local, anchor = by_hand(tau, alpha, M, steps, P)
    for rank, (mine, agreed) in enumerate(World(M).run(worker)):
        assert mine == pytest.approx(local[rank], rel=1e-12)
        assert agreed == pytest.approx(anchor, rel=1e-12)


@pytest.mark.parametrize(("tau", "waiting"), [(0, 1.25), (1, 0.25), (2, 0.0), (5, 0.0)])
def test_with_enough_tau_the_wire_costs_no_time(tau: int, waiting: float) -> None:
    """A sync of the whole model takes 5 steps, so that of one of 4 fragments takes 1.25: with tau = 2 nobody waits."""
    n, H, P, steps = 1000, 16, 4, 48
    bits = 8 * 4 * (n + 2)  # of a message with two status numbers; on a ring of two it passes once each way
    network = Network(bandwidth=bits / 1.25)

    def worker(link: Link) -> float:
        x = [nn.Parameter(torch.zeros(n)) for _ in range(P)]
        metered = Metered(link)
        opt = StreamingDiLoCo(torch.optim.SGD(x, lr=0.1), metered, H=H, fragments=P, tau=tau, alarm_every=0)
        for _ in range(steps + tau):
            for value in x:
                value.grad = torch.ones(n)
            opt.step()
        return sum(e.seconds for e in metered.meter.recent if e.purpose == "round")

    for waited in World(2, network=network, step_time=1.0).run(worker):
        assert waited == pytest.approx(waiting * P * steps / H, abs=0.02)


# --- S4 to S6, on a noisy quadratic ------------------------------------------------------------------------------------------


def bowl(link: Link, *, steps: int = 240, evaluate: int = 7, **settings: Any) -> tuple[float, float, int]:
    """Mean loss of the shared model and of this worker's own over the last third of a run, and bytes of a period."""
    generator = torch.Generator().manual_seed(link.rank + 1)
    target = [torch.linspace(-1, 1, 40), torch.linspace(1, -1, 60), torch.linspace(0, 2, 40)]
    x = [nn.Parameter(torch.full_like(t, 3.0)) for t in target]
    opt = StreamingDiLoCo(torch.optim.SGD(x, lr=0.05), link, **({"H": 12, "fragments": 3, "outer_lr": 0.4} | settings))

    def loss() -> float:
        return float(sum((v.detach() - t).square().sum() for v, t in zip(x, target, strict=True)))

    shown, own = [], []
    for step in range(1, steps + 1):
        for value, t in zip(x, target, strict=True):
            value.grad = value.detach() - t + torch.randn(t.shape, generator=generator)
        opt.step()
        if step > 2 * steps // 3 and step % evaluate == 0:
            own.append(loss())
            with opt.shared_model():
                shown.append(loss())
    return sum(shown) / len(shown), sum(own) / len(own), opt.message_nbytes()


def test_the_outer_parameters_are_better_than_any_replica() -> None:
    """S5. The mean of workers has less noise than each of them."""
    for shown, own, _ in World(4).run(lambda link: bowl(link, alpha=0.5)):
        assert shown < 0.8 * own


@pytest.mark.slow  # six trainings; the mixing is tested above with one
def test_delay_costs_little_and_the_layout_less() -> None:
    """S3 and S6, of the shared model at one mixing: what is left is noise, of which a delay adds some per step."""
    at_once = World(4).run(lambda link: bowl(link, tau=0, alpha=0.5))[0][0]
    late = [World(4).run(lambda link, tau=tau: bowl(link, tau=tau, alpha=0.5))[0][0] for tau in (1, 2, 4)]
    assert at_once < late[0] < late[1] < late[2] < 1.4 * at_once
    for layout in ("strided", "sequential"):
        assert World(4).run(lambda link, how=layout: bowl(link, layout=how, alpha=0.5))[0][0] == pytest.approx(
            late[0], rel=0.06
        )


@pytest.mark.slow  # trains; bytes of fp4 are tested with the codecs
def test_fp4_sends_an_eighth_and_costs_little() -> None:
    """S4: differences in E3M0 with a scale for every 256 values."""
    shown, _, nbytes = World(4).run(bowl)[0]
    narrow, _, fewer = World(4).run(lambda link: bowl(link, codec=Fp4()))[0]
    assert abs(narrow - shown) < 0.25 * shown
    values = 40 + 60 + 40
    headers = 3 * (HEADER_NBYTES + PART_NBYTES)
    assert nbytes == 4 * (values + 3 * 4)
    assert fewer - headers <= values / 2 + 3 * 2 + 3, "half a byte per value, and a scale of two bytes per tensor"


# --- A checkpoint while messages are under way -------------------------------------------------------------------------------


def through_disk(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
    disk = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, disk)
    disk.seek(0)
    return torch.load(disk, weights_only=True)


@pytest.mark.parametrize(
    ("tau", "codec", "merge"), first_quick([(3, SEEDED, "mean"), (1, Dense(), "mean"), (5, Fp4(), "rda")]), ids=repr
)
def test_it_resumes_bit_for_bit_at_every_step(tau: int, codec: Codec, merge: str) -> None:
    steps = 2 * H + 1

    def worker(link: Link) -> tuple[list, list]:
        model = model_of()
        opt = streaming(model, link, tau=tau, codec=codec, merge=merge)
        saved, trail = [], []
        for step in range(1, steps + 1):
            train(model, opt, link.rank, 1, first=step)
            saved.append(through_disk(model, opt))
        opt.finish()
        end = [*snapshot(model), *(t.clone() for t in opt.slot("momentum"))]
        for step in range(1, steps + 1):
            model = model_of(seed=99)
            model.load_state_dict(saved[step - 1]["model"])
            opt = streaming(model, link, tau=tau, codec=codec, merge=merge)
            opt.load_state_dict(saved[step - 1]["opt"])
            train(model, opt, link.rank, steps - step, first=step + 1)
            opt.finish()
            trail.append([*snapshot(model), *opt.slot("momentum")])
        return end, trail

    for end, trail in World(2).run(worker):
        for again in trail:
            assert_same(end, again)


def _finish_halfway_and_resume(link: Link) -> tuple[list, list]:
    model = model_of()
    opt = streaming(model, link, tau=4)
    train(model, opt, link.rank, H + 1)
    opt.finish()
    train(model, opt, link.rank, 1, first=H + 2)
    saved = through_disk(model, opt)
    train(model, opt, link.rank, H, first=H + 3)
    other = model_of(seed=99)
    other.load_state_dict(saved["model"])
    resumed = streaming(other, link, tau=4)
    resumed.load_state_dict(saved["opt"])
    train(other, resumed, link.rank, H, first=H + 3)
    return snapshot(model), snapshot(other)


def test_what_finish_has_applied_is_not_sent_again(pool: Pool) -> None:
    for workers in (World(2).run(_finish_halfway_and_resume), pool.run(_finish_halfway_and_resume, 2)):
        for straight, again in workers:
            assert_same(straight, again)


def test_a_message_that_was_invalid_is_invalid_again_after_a_resume() -> None:
    def worker(link: Link) -> list[tuple[int, ...]]:
        model, told = model_of(), []
        opt = streaming(model, link, tau=3, on_nonfinite="raise")
        backward(model, link.rank, 1)
        if link.rank == 1:
            model.first.weight.grad[0, 0] = float("nan")
        opt.step()
        opt.zero_grad()
        train(model, opt, link.rank, 1, first=2)  # sends the first fragment
        saved = through_disk(model, opt)
        model = model_of(seed=99)
        model.load_state_dict(saved["model"])
        opt = streaming(model, link, tau=3, on_nonfinite="raise")
        opt.load_state_dict(saved["opt"])
        for step in range(3, 2 * H):
            try:
                train(model, opt, link.rank, 1, first=step)
            except NonFiniteRound as refusal:
                told.append((step, *refusal.culprits))
                opt.zero_grad()
        return told

    assert World(2).run(worker) == [[(5, 1)], [(5, 1)]]


def test_another_tau_leaves_out_what_was_under_way(caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link, tau: int) -> list:
        model = model_of()
        opt = streaming(model, link, tau=4)
        train(model, opt, link.rank, H + 1)
        assert opt.param_groups[0]["in_flight"] == 2
        saved = opt.state_dict()
        other = streaming(model, link, tau=tau)
        other.load_state_dict(saved)
        assert other.param_groups[0]["in_flight"] == 0
        train(model, other, link.rank, H, first=H + 2)
        other.finish()
        return snapshot(model)

    for tau in (0, 1):
        with caplog.at_level(logging.WARNING, logger="thinwire"):
            a, b = World(2).run(lambda link, tau=tau: worker(link, tau))
        assert_same(a, b)
        assert "2 messages were in flight with another tau" in caplog.text


# --- Rounds that fail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize("tau", [0, 2])
def test_an_aborted_round_leaves_its_fragment_and_nothing_else_behind(at: str, tau: int) -> None:
    """The second of three fragments fails: its anchor and momentum stay, and the local values go on or back."""

    def worker(link: Link, on_abort: str) -> tuple:
        model = model_of()
        flaky = Flaky(link, {2}, at=at)
        opt = streaming(model, flaky, tau=tau, on_abort=on_abort, layout="strided")
        train(model, opt, link.rank, 4 + tau - 1)  # fragments are due at 2, 4 and 6: the next step brings the second round
        which = opt.which(opt.schedule.due(4))
        others = [i for i in range(len(opt.params())) if i not in which]
        shared = [t.clone() for name in ("anchor", "momentum") for t in opt.slot(name)]
        twin = model_of()
        twin.load_state_dict(model.state_dict())
        inner = adamw(twin.parameters())
        inner.load_state_dict(copy.deepcopy(opt.inner.state_dict()))
        step = 4 + tau
        train(model, opt, link.rank, 1, first=step)
        backward(twin, link.rank, step)
        inner.step()
        assert opt.aborted_rounds == 1
        assert_same(shared, [*opt.slot("anchor"), *opt.slot("momentum")], "nothing shared has changed")
        alone = [p.detach() for p in twin.parameters() if p.requires_grad]
        assert others and which
        expected = [opt.slot("anchor")[i] if i in which and on_abort == "restore" else x for i, x in enumerate(alone)]
        assert_same(opt.params(), expected)
        train(model, opt, link.rank, 2 * H, first=step + 1)
        opt.finish()
        return snapshot(model)

    for on_abort in ("keep", "restore"):
        a, b = World(2).run(lambda link, p=on_abort: worker(link, p))
        assert_same(a, b)


def test_a_worker_with_bad_numbers_goes_back_as_a_whole_and_the_others_go_on() -> None:
    def worker(link: Link) -> tuple:
        model = model_of()
        opt = streaming(model, link, tau=1, alpha=0.5)  # with 0 the value that is agreed on would cover the bad one
        train(model, opt, link.rank, H)
        if link.rank == 1:
            with torch.no_grad():
                model.first.weight.fill_(float("nan"))
        before = opt.aborted_rounds
        for _ in range(2 * H):
            train(model, opt, link.rank, 1, first=opt.steps + 1)
            if opt.aborted_rounds > before:
                break
        back = all(torch.equal(x, a) for x, a in zip(opt.params(), opt.slot("anchor"), strict=True))
        opt.finish()
        return back, snapshot(model), opt.aborted_rounds

    results = World(3).run(worker)
    assert [back for back, *_ in results] == [False, True, False]
    for _, params, aborted in results:
        assert aborted == 1
        assert all(bool(torch.isfinite(p).all()) for p in params)
        assert_same(params, results[0][1])


def test_buffers_are_averaged_when_a_round_arrives() -> None:
    def worker(link: Link) -> float:
        x, running = nn.Parameter(torch.zeros(3)), torch.full((2,), float(link.rank))
        opt = StreamingDiLoCo(sgd([x]), link, H=4, fragments=1, tau=2, buffers=[running])
        for step in range(1, 7):
            x.grad = torch.ones(3)
            opt.step()
            assert float(running[0]) == (float(link.rank) if step < 6 else 0.5), step
        return float(running[0])

    assert World(2).run(worker) == [0.5, 0.5]


# --- Fragments ---------------------------------------------------------------------------------------------------------------


def test_layouts() -> None:
    sizes = [8, 1, 1, 4, 2, 4]
    assert deal(sizes, 2, "strided") == [0, 1, 0, 1, 0, 1]
    assert deal(sizes, 2, "sequential") == [0, 0, 0, 1, 1, 1]
    balanced = deal(sizes, 2, "balanced")
    assert [sum(s for s, p in zip(sizes, balanced, strict=True) if p == q) for q in (0, 1)] == [10, 10]
    assert deal(sizes, 1, "balanced") == deal(sizes, 1, "sequential") == [0] * 6
    assert deal([5], 3, "balanced", loads=[2, 1, 7]) == [1]
    assert deal([], 3, "sequential") == []


@pytest.mark.parametrize("layout", ["balanced", "strided", "sequential"])
def test_a_group_that_is_added_does_not_move_the_others(layout: str) -> None:
    model = model_of()
    first, second = list(model.first.parameters()), [model.gain, model.second.weight]
    opt = StreamingDiLoCo(sgd([{"params": first}]), SoloLink(), H=H, fragments=3, layout=layout)  # type: ignore[arg-type]
    before = list(opt.fragment_of())
    opt.add_param_group({"params": second})
    together = StreamingDiLoCo(sgd([{"params": first}, {"params": second}]), SoloLink(), H=H, fragments=3, layout=layout)  # type: ignore[arg-type]
    assert opt.fragment_of()[:2] == before
    assert opt.fragment_of() == together.fragment_of(), "so that a resumed run deals alike"


def test_blocks_of_a_transformer_are_dealt_in_turn() -> None:
    model = make_task("gpt-nano").model()
    fragments = block_fragments(model, 2)
    names = {id(p): n for n, p in model.named_parameters()}
    blocks = [sorted({n.split(".")[1] for n in (names[id(p)] for p in some) if n.startswith("blocks.")}) for some in fragments]
    count = len(model.blocks)  # type: ignore[arg-type]
    assert blocks == [[str(i) for i in range(count) if i % 2 == p] for p in (0, 1)]
    assert sorted(names[id(p)] for some in fragments for p in some) == sorted(names.values()), "each parameter once"
    opt = StreamingDiLoCo(sgd(model.parameters()), SoloLink(), H=H, fragments=fragments)
    assert sum(opt.message_sizes()) == 4 * (sum(p.numel() for p in model.parameters()) + 2)
    with pytest.raises(ConfigError, match="P must be at most the number of blocks"):
        block_fragments(model, count + 1)
    with pytest.raises(ConfigError, match="Linear has no list of blocks"):
        block_fragments(nn.Linear(2, 2), 1)


def test_fragments_without_parameters_send_nothing() -> None:
    def worker(link: Link) -> tuple[int, list]:
        x, metered = nn.Parameter(torch.ones(5)), Metered(link)
        opt = StreamingDiLoCo(sgd([x]), metered, H=4, fragments=4, alpha=0.5)
        for _ in range(9):
            x.grad = torch.full((5,), float(link.rank))
            opt.step()
        return metered.meter.totals.rounds, [x.detach().clone()]

    (rounds, a), (_, b) = World(2).run(worker)
    assert rounds == 2
    assert not torch.equal(a[0], b[0]), "alpha = 0.5: the local steps since then differ"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": -1}, "tau must be a whole number of at least 0, got -1"),
        ({"tau": H}, rf"tau must be below H={H}, so that a round is applied before the next message is made, got {H}"),
        ({"alpha": 1.0}, r"alpha must be in \[0, 1\), since workers with alpha=1 would never meet, got 1.0"),
        ({"alpha": -0.1}, "got -0.1"),
        ({"fragments": 0}, "fragments must be a whole number of at least 1, got 0"),
        ({"fragments": H + 1}, f"fragments must be at most H={H}, so that one is due at a time, got {H + 1}"),
        ({"layout": "random"}, "layout must be one of 'balanced', 'strided', 'sequential', got 'random'"),
        ({"merge": "median"}, "merge must be one of 'mean', 'rda', got 'median'"),
        ({"outer_lr": 0.0}, "outer_lr must be above zero and finite, got 0.0"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        streaming(model_of(), SoloLink(), **settings)


def test_fragments_by_hand_must_name_every_parameter_once() -> None:
    model = model_of()
    rest = [p for n, p in model.named_parameters() if p.requires_grad and n != "gain"]
    StreamingDiLoCo(sgd(model.parameters()), SoloLink(), H=H, fragments=[rest, [model.gain]])
    with pytest.raises(ConfigError, match=r"no fragment names the parameter of shape \(\) \(1 missing in all\)"):
        StreamingDiLoCo(sgd(model.parameters()), SoloLink(), H=H, fragments=[rest[:2], rest[2:]])
    with pytest.raises(ConfigError, match="a parameter is in two fragments"):
        StreamingDiLoCo(sgd(model.parameters()), SoloLink(), H=H, fragments=[rest, [model.gain, rest[0]]])
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3,\) that the optimizer does not train"):
        StreamingDiLoCo(sgd(model.parameters()), SoloLink(), H=H, fragments=[rest, [model.gain, model.frozen]])


def test_workers_with_other_fragments_are_refused() -> None:
    def worker(link: Link) -> None:
        model = model_of()
        train(model, streaming(model, link, layout="strided" if link.rank else "balanced"), link.rank, 1)

    with pytest.raises(thinwire.errors.FingerprintMismatch, match="layout is 'balanced' on rank 0 and 'strided' on rank 1"):
        World(2).run(worker)


def test_bf16_parameters_are_mixed_in_float32() -> None:
    x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    opt = StreamingDiLoCo(sgd([x]), SoloLink(), H=2, fragments=1, tau=1, alpha=0.25)
    for _ in range(3):
        x.grad = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
        if opt.steps == 2:
            before = x.detach().float() - 0.05 * x.grad.float()
        opt.step()
    (a,) = opt.slot("anchor")
    assert_close([x.detach().float()], [(0.25 * before.bfloat16().float() + 0.75 * a).bfloat16().float()], 1e-2)
    assert a.dtype == torch.float32
