"""States with periods: who is due when, one message for all of them, all or nothing, and nothing lost on a lossy wire."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire import DCT, Codec, Dense, Every, Flaky, Float, Int8, Link, Metered, Periods, RandomK, Sign, TopK, Warmup, World
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES
from thinwire.core.optimizer import Start
from thinwire.core.states import State, StateAveraging, is_second_moment, state_codecs, state_periods
from thinwire.errors import ConfigError
from thinwire.maths.outer import Nesterov
from thinwire.schedules import Schedule, as_schedule

SHAPES: list[tuple[int, ...]] = [(9, 20), (), (7,)]
P = sum(math.prod(s) for s in SHAPES)
LOSSY: list[Codec] = [
    Int8(),
    DCT(8) >> TopK(3) >> Sign(),
    TopK(4) >> Float("fp32"),
    RandomK(0.3, seed=1) >> Float("fp32"),
    Sign(),
]


def noise(*seeds: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(s * 1009**i for i, s in enumerate(seeds)))
    return [torch.randn(s, generator=g) for s in SHAPES]


class Several(StateAveraging):
    """Parameters and two more states, all of which walk at random."""

    name = "several"
    replicated = frozenset({"anchor", "velocity"})

    def __init__(
        self,
        link: Link,
        periods: Sequence[int | Schedule],
        codecs: Sequence[Codec],
        *,
        anchored: bool = False,
        feedback: bool = True,
        outer: Nesterov | None = None,
        **policy: Any,
    ):
        slots: dict[str, Start] = {"u": "zeros", "v": "zeros"}
        if anchored:
            slots |= {"anchor": "param", "residual": "zeros", "velocity": "zeros"}
        policy = {"alarm_every": 1} | policy
        params = [nn.Parameter(t) for t in noise(77)]
        super().__init__(params, link, H=Periods(tuple(periods)), codec=codecs[0], slots=slots, **policy)
        anchor, residual = (functools.partial(self.slot, k) if anchored else None for k in ("anchor", "residual"))
        step = None if outer is None else lambda a, D: outer.step(a, D, self.slot("velocity"), along=True)
        lossy = [feedback and not isinstance(c, Dense) for c in codecs]
        kinds = [as_schedule(p) for p in periods]
        self.states = (
            State("param", self.params, kinds[0], codecs[0], lossy[0] and not anchored, anchor, residual, step),
            State("u", lambda: self.slot("u"), kinds[1], codecs[1], lossy[1]),
            State("v", lambda: self.slot("v"), kinds[2], codecs[2], lossy[2]),
        )
        self.walked = [torch.zeros_like(t, dtype=torch.float64) for t in self.params()]

    def local_step(self) -> None:
        for i, state in enumerate(self.states):
            for j, (t, d) in enumerate(zip(state.tensors(), noise(self.link.rank, self.steps, i), strict=True)):
                before = t.double()
                t.add_(d, alpha=0.1)
                if i == 0:
                    self.walked[j] += t.double() - before


def copies(opt: Several) -> dict[str, list[Tensor]]:
    return {s.name: [t.clone() for t in s.tensors()] for s in opt.states}


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


PERIODS: list[tuple[tuple[int | Schedule, ...], list[Callable[[int], bool]]]] = [
    ((4, 3, 6), [lambda t: t % 4 == 0, lambda t: t % 3 == 0, lambda t: t % 6 == 0]),
    ((4, Every(4, offset=1), Every(4, offset=2)), [lambda t: t % 4 == 0, lambda t: t % 4 == 1, lambda t: t % 4 == 2]),
    ((2, 6, 12), [lambda t: t % 2 == 0, lambda t: t % 6 == 0, lambda t: t % 12 == 0]),
    ((1, 5, Warmup(3, Every(4))), [lambda t: True, lambda t: t % 5 == 0, lambda t: t <= 3 or t % 4 == 0]),
]


# --- When ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(len(PERIODS)))
def test_each_state_is_averaged_at_its_own_beat_and_at_no_other(case: int) -> None:
    periods, rules = PERIODS[case]

    def worker(link: Link) -> list:
        opt = Several(link, periods, [Dense()] * 3)
        seen = []
        for _ in range(13):
            opt.step()
            seen.append((opt.due, copies(opt)))
        return seen

    workers = World(3).run(worker)
    for step, now in enumerate(zip(*workers, strict=True), 1):
        due = tuple(i for i, rule in enumerate(rules) if rule(step))
        for mine, states in now:
            assert mine == due
            for i, name in enumerate(states):
                assert same(states[name], now[0][1][name]) == (i in due) or states is now[0][1], f"{name} at step {step}"


def test_an_average_is_the_mean_of_what_the_workers_had() -> None:
    def worker(link: Link) -> tuple:
        opt = Several(link, (2, 3, 5), [Dense()] * 3)
        opt.step()
        before = copies(opt)
        for state, d in zip(opt.states, (noise(link.rank, 2, i) for i in range(3)), strict=True):
            before[state.name] = [b.add(x, alpha=0.1) for b, x in zip(before[state.name], d, strict=True)]
        opt.step()
        return before, copies(opt)

    results = World(3).run(worker)
    for before, after in results:
        for i, t in enumerate(after["param"]):
            torch.testing.assert_close(t, torch.stack([b["param"][i] for b, _ in results]).mean(0))
        assert same(after["u"], before["u"])
        assert same(after["v"], before["v"])


@pytest.mark.parametrize("case", range(len(PERIODS)))
@pytest.mark.parametrize(
    "codecs", [[Dense()] * 3, [Int8(), DCT(8) >> TopK(3) >> Sign(), Dense("bf16")]], ids=["dense", "mixed"]
)
def test_whatever_is_due_travels_in_one_message(case: int, codecs: list[Codec]) -> None:
    periods, rules = PERIODS[case]

    def worker(link: Link) -> list[tuple[int, int]]:
        metered = Metered(link)
        opt = Several(metered, periods, codecs, alarm_every=0)
        seen = []
        for _ in range(13):
            already = len(metered.meter.recent)
            opt.step()
            rounds = [e.payload for e in list(metered.meter.recent)[already:] if e.purpose == "round"]
            seen.append((len(rounds), sum(rounds)))
        opt.due = (0, 1, 2)
        everything = opt.send()
        assert [t.shape for t in everything.tensors] == [t.shape for state in opt.states for t in state.tensors()]
        envelope = 4 * 3 if codecs[0].linear else HEADER_NBYTES
        assert opt.message_nbytes() == everything.codec.nbytes(everything.tensors) + envelope
        return seen

    for seen in World(3).run(worker):
        for step, (messages, nbytes) in enumerate(seen, 1):
            due = [i for i, rule in enumerate(rules) if rule(step)]
            assert messages == bool(due)
            body = sum(codecs[i].nbytes(noise(0)) for i in due)
            linear = len({codecs[i] for i in due}) == 1 and codecs[due[0]].linear
            # In a message of several codecs each has a part of its own; that of a linear one has no header by itself.
            unframed = PART_NBYTES * sum(codecs[i].linear for i in due) if len({codecs[i] for i in due}) > 1 else 0
            status = codecs[due[0]].nbytes([torch.empty(1)]) * 3 if linear else HEADER_NBYTES + unframed
            assert nbytes == (body + status if due else 0)


def test_finish_averages_all_states() -> None:
    def worker(link: Link) -> dict:
        opt = Several(link, (4, 7, 9), [Dense()] * 3)
        for _ in range(2):
            opt.step()
        opt.finish()
        return copies(opt)

    a, b = World(2).run(worker)
    for name in a:
        assert same(a[name], b[name]), name


# --- All or nothing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize(
    "codecs",
    [[Dense()] * 3, [Int8(), DCT(8) >> TopK(3) >> Sign(), Dense("bf16")], [Sign()] * 3],
    ids=["dense", "mixed", "sign"],
)
def test_an_aborted_round_changes_nothing_of_any_state(at: str, anchored: bool, codecs: list[Codec]) -> None:
    def worker(link: Link) -> int:
        opt = Several(Flaky(link, {2}, at=at), (2, 4, 4), codecs, anchored=anchored, alarm_every=0)
        for _ in range(3):
            opt.step()
        expected = copies(opt)
        for i, state in enumerate(opt.states):
            for t, d in zip(expected[state.name], noise(link.rank, 4, i), strict=True):
                t.add_(d, alpha=0.1)
        slots = {name: [t.clone() for t in opt.slot(name)] for name in opt._slots if name not in ("u", "v")}
        opt.step()  # round 2, in which all are due
        assert opt.aborted_rounds == 1
        for name, tensors in copies(opt).items():
            assert same(tensors, expected[name]), name
        for name, tensors in slots.items():
            assert same(tensors, opt.slot(name)), name
        assert opt.pending_steps == 2
        for _ in range(4):
            opt.step()
        assert opt.pending_steps == 0
        return opt.aborted_rounds

    assert World(3).run(worker) == [1, 1, 1]


def test_a_nan_of_one_state_stops_the_others_of_its_round_too() -> None:
    def worker(link: Link) -> tuple:
        opt = Several(link, (2, 2, 4), [Dense()] * 3)
        opt.step()
        if link.rank == 1:
            opt.slot("u")[0][0, 0] = math.nan
        before = copies(opt)
        opt.step()
        moved = [b.add(d, alpha=0.1) for b, d in zip(before["param"], noise(link.rank, 2, 0), strict=True)]
        assert opt.aborted_rounds == 1
        assert same(copies(opt)["param"], moved), "not averaged though it was sound"
        for _ in range(2):
            opt.step()
        return opt.aborted_rounds, copies(opt)

    results = World(3).run(worker)
    for aborted, states in results:
        assert aborted == 1
        for name, tensors in states.items():
            assert all(bool(torch.isfinite(t).all()) for t in tensors), name
            assert same(tensors, results[0][1][name])


# --- Nothing is lost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_feedback_preserves_the_mean_over_workers(codec: Codec) -> None:
    """s_i <- s_i - q_i + mean q: whatever q is, the sum over workers stays what it was."""

    def worker(link: Link) -> list:
        opt = Several(link, (4, 1, 2), [codec] * 3)
        seen = []
        for _ in range(8):
            opt.step()
            seen.append({name: [t.double() for t in tensors] for name, tensors in copies(opt).items()})
        walked = {s.name: [torch.zeros_like(t, dtype=torch.float64) for t in noise(0)] for s in opt.states}
        for step in range(1, 9):
            for i, s in enumerate(opt.states):
                for t, d in zip(walked[s.name], noise(link.rank, step, i), strict=True):
                    t += 0.1 * d.double()
        return [seen[-1], walked]

    results = World(3).run(worker)
    start = {"param": noise(77), "u": [torch.zeros_like(t) for t in noise(0)], "v": [torch.zeros_like(t) for t in noise(0)]}
    for name, begun in start.items():
        for j, t in enumerate(begun):
            expected = t.double() + sum(walked[name][j] for _, walked in results) / 3
            found = sum(states[name][j] for states, _ in results) / 3
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    moved = results[0][0]["u"][0]
    assert not torch.equal(moved, results[1][0]["u"][0]), "what was left out stays with its worker"


@pytest.mark.parametrize("codec", [c for c in LOSSY if c != LOSSY[2]], ids=repr)
def test_feedback_in_the_end_tells_all(codec: Codec) -> None:
    """Workers that stand still come together, round by round, though each message says only a part.

    Not so of the exact largest entries: once all agree on those, they are sent again and again.
    """

    class Still(Several):
        def local_step(self) -> None:
            pass

    def worker(link: Link) -> list[float]:
        opt = Still(link, (1, 1, 1), [codec] * 3)
        for t, d in zip(opt.slot("u"), noise(link.rank, 5), strict=True):
            t.copy_(d)
        mean = [torch.stack(each).mean(0) for each in zip(*(noise(r, 5) for r in range(3)), strict=True)]

        def apart() -> float:
            return math.sqrt(sum(float((t - m).square().sum()) for t, m in zip(opt.slot("u"), mean, strict=True)))

        first = apart()
        for _ in range(40):
            opt.step()
        return [first, apart()]

    for first, last in World(3).run(worker):
        assert last < 0.5 * first


@pytest.mark.parametrize("codec", [*LOSSY, Dense("bf16", gather=True)], ids=repr)
def test_what_an_anchor_has_not_got_is_in_the_residuals(codec: Codec) -> None:
    """anchor - start + mean of residuals = mean of all that the workers have walked, to rounding, after every round."""

    def worker(link: Link) -> list:
        opt = Several(link, (3, 6, 6), [codec, Dense(), Dense()], anchored=True)
        seen = []
        for _ in range(12):
            opt.step()
            if opt.steps % 3 == 0:
                assert same(opt.params(), opt.slot("anchor"))
                state = [[t.double() for t in opt.slot(name)] for name in ("anchor", "residual")]
                seen.append((*state, [w.clone() for w in opt.walked]))
        return seen

    for now in zip(*World(3).run(worker), strict=True):
        for j, start in enumerate(noise(77)):
            anchor = now[0][0][j]
            assert all(torch.equal(anchor, other[0][j]) for other in now), "replicated"
            left = sum(residual[j] for _, residual, _ in now) / 3
            walked = sum(w[j] for *_, w in now) / 3
            torch.testing.assert_close(anchor - start.double() + left, walked, rtol=1e-5, atol=1e-5)


def test_without_feedback_a_state_takes_what_the_others_read() -> None:
    def worker(link: Link) -> list[Tensor]:
        opt = Several(link, (1, 1, 1), [Dense("bf16", gather=True)] * 3)
        opt.step()
        return [t.clone() for t in opt.slot("v")]

    results = World(2).run(worker)
    for j, t in enumerate(results[0]):
        sent = [(0.1 * noise(r, 1, 2)[j]).bfloat16().float() for r in range(2)]
        torch.testing.assert_close(t, (sent[0] + sent[1]) / 2, rtol=0, atol=1e-7)
        assert torch.equal(t, results[1][j])


# --- The outer step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), [(0.7, 0.9, True), (1.0, 0.7, True), (0.5, 0.9, False), (0.3, 0.0, True)]
)
def test_the_outer_step_is_torchs_sgd_on_the_negative_difference(lr: float, momentum: float, nesterov: bool) -> None:
    ours, theirs = noise(1), [nn.Parameter(t) for t in noise(1)]
    m = [torch.zeros_like(t) for t in ours] if momentum else []
    outer = torch.optim.SGD(theirs, lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    for step in range(6):
        D = noise(2, step)
        kept = [d.clone() for d in D]
        Nesterov(lr, momentum, nesterov).step(ours, D, m, along=True)
        assert same(D, kept), "the difference is not its own to change"
        for p, d in zip(theirs, D, strict=True):
            p.grad = -d
        outer.step()
    assert same(ours, [p.detach() for p in theirs])


def test_an_outer_step_moves_the_anchor_and_everybody_goes_there() -> None:
    def worker(link: Link) -> tuple:
        opt = Several(link, (2, 8, 8), [Dense()] * 3, anchored=True, outer=Nesterov(1.0, 0.7))
        for _ in range(6):
            opt.step()
        return [t.clone() for t in opt.params()], [t.clone() for t in opt.slot("anchor")]

    results = World(2).run(worker)
    reference = [nn.Parameter(t) for t in noise(77)]
    outer = torch.optim.SGD(reference, 1.0, momentum=0.7, nesterov=True)
    for r in range(3):
        for j, p in enumerate(reference):
            steps = [0.1 * (noise(k, 2 * r + 1, 0)[j] + noise(k, 2 * r + 2, 0)[j]) for k in range(2)]
            p.grad = -(steps[0] + steps[1]) / 2
        outer.step()
    for params, anchor in results:
        assert same(params, anchor)
        for a, p in zip(anchor, reference, strict=True):
            torch.testing.assert_close(a, p.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((0.0, 0.9), r"outer_lr must be above zero and finite, got 0\.0"),
        ((-1.0, 0.9), r"outer_lr must be above zero and finite, got -1\.0"),
        ((math.nan, 0.9), "got nan"),
        ((math.inf, 0.9), "got inf"),
        ((1.0, 1.0), r"outer_momentum must be in \[0, 1\), got 1\.0"),
        ((1.0, -0.1), r"got -0\.1"),
    ],
)
def test_a_bad_outer_step_is_refused(bad: tuple[float, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Nesterov(*bad)


# --- Settings --------------------------------------------------------------------------------------------------------------


def test_periods_number_the_states_by_their_place() -> None:
    beats = Periods((2, Every(3), Warmup(1, Every(100))))  # type: ignore[arg-type]
    assert beats.fragments == 3
    assert [beats.due(s) for s in range(1, 7)] == [(2,), (0,), (1,), (0,), (), (0, 1)]
    assert beats == Periods((Every(2), Every(3), Warmup(1, Every(100))))
    assert hash(beats) == hash(Periods((Every(2), Every(3), Warmup(1, Every(100)))))


@pytest.mark.parametrize("bad", [(), (Every(2), 0), (Every(2), 2.5), (Every(2), None)])
def test_periods_are_refused_with_what_was_given(bad: tuple) -> None:
    with pytest.raises(ConfigError, match="got"):
        Periods(bad)


def test_periods_of_fragments_are_refused() -> None:
    from thinwire import Staggered

    with pytest.raises(ConfigError, match="without fragments"):
        Periods((Every(2), Staggered(4, fragments=2)))


def test_states_get_the_period_of_their_kind() -> None:
    keys = ["exp_avg", "exp_avg_2", "exp_avg_sq"]
    same_for_all = state_periods(keys, 32, None, None)
    assert same_for_all == dict.fromkeys(["param", *keys], Every(32))
    assert state_periods(keys, 8, 24, 48) == {
        "param": Every(8), "exp_avg": Every(24), "exp_avg_2": Every(24), "exp_avg_sq": Every(48),
    }  # fmt: skip
    assert state_periods(keys, 8, [16, Every(64, offset=3)], None) == {
        "param": Every(8), "exp_avg": Every(16), "exp_avg_2": Every(64, offset=3), "exp_avg_sq": Every(8),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"K_u names 3 periods, but the momenta are \['exp_avg', 'exp_avg_2'\]"):
        state_periods(keys, 8, [1, 2, 3], None)
    with pytest.raises(ConfigError, match="whole number of at least 1, got 0"):
        state_periods(keys, 8, 0, None)


def test_second_moments_get_a_codec_that_keeps_them_positive() -> None:
    names = ["param", "exp_avg", "exp_avg_sq"]
    assert state_codecs(names, None) == dict.fromkeys(names, Dense())
    assert state_codecs(names, Dense("bf16")) == dict.fromkeys(names, Dense("bf16"))
    assert state_codecs(names, Int8()) == {"param": Int8(), "exp_avg": Int8(), "exp_avg_sq": Dense("bf16")}
    assert state_codecs(names, {"exp_avg": Sign()}) == {"param": Dense(), "exp_avg": Sign(), "exp_avg_sq": Dense()}
    with pytest.raises(ConfigError, match="codec names 'momentum', but the states are param, exp_avg, exp_avg_sq"):
        state_codecs(names, {"momentum": Int8()})
    with pytest.raises(ConfigError, match="exp_avg_sq must not become negative, so it needs a dense codec, got Int8"):
        state_codecs(names, {"exp_avg_sq": Int8()})
    with pytest.raises(ConfigError, match="must be a thinwire Codec, got 'int8'"):
        state_codecs(names, "int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be a thinwire Codec, got 'int8'"):
        state_codecs(names, {"exp_avg": "int8"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (torch.optim.AdamW, {"exp_avg_sq"}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9), {"square_avg"}),
        (torch.optim.Adagrad, {"sum"}),
        (torch.optim.Adadelta, {"square_avg", "acc_delta"}),  # the root of both is taken
        (torch.optim.Adamax, {"exp_inf"}),  # a largest size, which is divided by
        (lambda p: torch.optim.SGD(p, momentum=0.9), set()),
    ],
    ids=["adamw", "amsgrad", "rmsprop", "adagrad", "adadelta", "adamax", "sgd"],
)
def test_what_must_not_become_negative_is_known_for_torchs_optimizers(make: Any, moments: set[str]) -> None:
    p = nn.Parameter(torch.ones(3))
    opt = make([p])
    p.grad = torch.ones(3)
    opt.step()
    keys = {k for k, v in opt.state[p].items() if isinstance(v, Tensor) and v.shape == p.shape}
    assert {k for k in keys if is_second_moment(k)} == moments
