"""NoLoCo: the pairing, the outer step by hand, its limits, and that what happens in one pair is no business of the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import assert_close, assert_same, backward, model_of, sgd, snapshot, train
from tests.processes import Pool
from tests.tiers import first_quick
from thinwire import DataParallel, DiLoCo, Flaky, Int8, Link, LocalSGD, Metered, Network, NoLoCo, SoloLink, World
from thinwire.algorithms.noloco import partner_of
from thinwire.codecs import Dense
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES
from thinwire.errors import ConfigError, LinkError, NonFiniteRound, TrainingDiverged
from thinwire.tools.config import RunConfig
from thinwire.tools.train import Trainer

H = 4


def made(model: nn.Module, link: Link, **settings: Any) -> NoLoCo:
    return NoLoCo(sgd(model.parameters()), link, **({"H": H} | settings))


# --- The pairing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 33])
def test_everybody_is_paired_once_and_pairs_agree(workers: int) -> None:
    for round in range(50):
        partners = [partner_of(rank, workers, round) for rank in range(workers)]
        assert partners.count(None) == workers % 2
        for rank, other in enumerate(partners):
            assert other != rank
            assert other is None or partners[other] == rank


def test_pairs_change_from_round_to_round_and_all_are_equally_likely() -> None:
    rounds = range(1, 3001)
    met = Counter(partner_of(0, 6, r) for r in rounds)
    assert set(met) == {1, 2, 3, 4, 5}
    assert all(abs(count - 600) < 5 * (3000 * 0.2 * 0.8) ** 0.5 for count in met.values())
    alone = Counter(next(rank for rank in range(5) if partner_of(rank, 5, r) is None) for r in rounds)
    assert all(abs(alone[rank] - 600) < 5 * (3000 * 0.2 * 0.8) ** 0.5 for rank in range(5))


def test_the_pairing_is_the_same_on_every_machine() -> None:
    """Fixed for good: a worker of another version must meet the same partners."""
    assert [[partner_of(rank, 5, round) for rank in range(5)] for round in (1, 2, 3)] == [
        [2, 4, 0, None, 1],
        [None, 4, 3, 2, 1],
        [3, 2, 1, 0, None],
    ]


# --- The outer step ----------------------------------------------------------------------------------------------------------


def _by_hand(thetas: list[list[Tensor]], eta: float, mu: float, gamma: float, start: list[Tensor]) -> list[Tensor]:
    """Two workers whose local steps lead from phi to phi + theta[round], by the formula as it is printed."""
    phi, m = [s.clone() for s in start], [torch.zeros_like(s) for s in start]
    for moves in thetas:
        theta = [p + d for p, d in zip(phi, moves, strict=True)]
        mean_move = sum(t - p for t, p in zip(theta, phi, strict=True)) / 2
        mean_phi = sum(phi) / 2
        m = [mu * m_i + eta * mean_move + gamma * (mean_phi - p) for m_i, p in zip(m, phi, strict=True)]
        phi = [p + m_i for p, m_i in zip(phi, m, strict=True)]
    return phi


@pytest.mark.parametrize(("eta", "mu", "gamma"), [(0.7, 0.3, None), (0.7, 0.3, 0.2), (1.0, 0.0, 0.0), (0.5, 0.9, 1.1)])
def test_two_workers_follow_the_printed_formula(eta: float, mu: float, gamma: float | None) -> None:
    """From points that are apart, so that the last term counts; local steps are SGD with given gradients."""
    g = torch.Generator().manual_seed(1)
    start = [torch.randn(7, generator=g) for _ in range(2)]
    moves = [[torch.randn(7, generator=g) for _ in range(2)] for _ in range(3)]

    def worker(link: Link) -> tuple[Tensor, Tensor]:
        x = nn.Parameter(torch.zeros(7))
        opt = NoLoCo(torch.optim.SGD([x], lr=1.0), link, H=2, outer_lr=eta, outer_momentum=mu, gamma=gamma)
        x.grad = torch.zeros(7)
        opt.step()  # the handshake, which wants all workers to start alike
        with torch.no_grad():
            x.copy_(start[link.rank])
            opt.slot("anchor")[0].copy_(start[link.rank])
        for round, move in enumerate(moves):
            for _ in range(1 if round == 0 else 2):
                x.grad = -move[link.rank] / (1 if round == 0 else 2)
                opt.step()
        return x.detach().clone(), opt.slot("anchor")[0].clone()

    expected = _by_hand(moves, eta, mu, eta if gamma is None else gamma, start)
    for (x, phi), by_hand in zip(World(2).run(worker), expected, strict=True):
        assert_same([x], [phi])
        assert_close([phi], [by_hand], 1e-5)


def _trained(link: Link, make: Any, **settings: Any) -> list[Tensor]:
    model = model_of()
    opt = make(sgd(model.parameters()), link, H=H, **settings)
    train(model, opt, link.rank, 3 * H)
    return snapshot(model)


def test_two_workers_are_diloco_with_heavy_ball_momentum_and_bit_equal() -> None:
    diloco = World(2).run(lambda link: _trained(link, DiLoCo, outer_lr=0.7, outer_momentum=0.3, nesterov=False))
    for gamma in (None, 0.0, 0.3):  # points that are equal need not be drawn together
        noloco = World(2).run(lambda link, gamma=gamma: _trained(link, NoLoCo, gamma=gamma))
        assert_same(noloco[0], noloco[1])
        assert_close(noloco[0], diloco[0])


def test_without_outer_settings_two_workers_are_local_sgd_and_one_is_its_inner_optimizer() -> None:
    neutral = {"outer_lr": 1.0, "outer_momentum": 0.0}
    for a, b in zip(
        World(2).run(lambda link: _trained(link, NoLoCo, **neutral)),
        World(2).run(lambda link: _trained(link, LocalSGD)),
        strict=True,
    ):
        assert_close(a, b)
    alone = model_of()
    inner = sgd(alone.parameters())
    for step in range(1, 3 * H + 1):
        backward(alone, 0, step)
        inner.step()
        inner.zero_grad()
    assert_close(_trained(SoloLink(), NoLoCo, **neutral), snapshot(alone))


def test_a_worker_without_a_partner_takes_its_outer_step_alone() -> None:
    """Of three workers with nothing to learn but on one: when that one is alone, the others do not move."""
    lonely = next(rank for rank in range(3) if partner_of(rank, 3, 1) is None)

    def worker(link: Link) -> Tensor:
        x = nn.Parameter(torch.zeros(2))
        opt = NoLoCo(torch.optim.SGD([x], lr=1.0), link, H=1, outer_lr=0.7)
        x.grad = torch.full((2,), -1.0 if link.rank == lonely else 0.0)
        opt.step()
        return x.detach().clone()

    for rank, x in enumerate(World(3).run(worker)):
        assert_close([x], [torch.full((2,), 0.7 if rank == lonely else 0.0)])


@pytest.mark.parametrize(("workers", "dtype"), first_quick([(5, "bf16"), (4, "fp32"), (5, "fp32")]))
def test_pairs_are_drawn_together_and_their_mean_stays(workers: int, dtype: str) -> None:
    """With zero gradients only the last term acts: drift falls to rounding, and the mean of all points is where it was."""

    def worker(link: Link) -> tuple[list[float], Tensor, Tensor]:
        x = nn.Parameter(torch.ones(50))
        opt = NoLoCo(torch.optim.SGD([x], lr=0.0), link, H=1, codec=Dense(dtype))
        x.grad = torch.zeros(50)
        opt.step()
        with torch.no_grad():
            x.add_(torch.randn(50, generator=torch.Generator().manual_seed(link.rank)))
            opt.slot("anchor")[0].copy_(x)
        start = x.detach().clone()
        drifts = [opt.drift()]
        for _ in range(60):
            opt.step()
            drifts.append(opt.drift())
        return drifts, start, x.detach().clone()

    results = World(workers).run(worker)
    drifts = results[0][0]
    assert drifts[20] < 0.2 * drifts[0]
    assert drifts[-1] < (1e-3 if dtype == "fp32" else 1e-2) * drifts[0]
    start, end = (torch.stack([r[i] for r in results]).double().mean(0) for i in (1, 2))
    assert_close([start], [end], 1e-5)  # whatever the wire has rounded off


def test_without_the_last_term_points_stay_apart() -> None:
    def worker(link: Link) -> float:
        x = nn.Parameter(torch.ones(50))
        opt = NoLoCo(torch.optim.SGD([x], lr=0.0), link, H=1, gamma=0.0)
        x.grad = torch.zeros(50)
        opt.step()
        with torch.no_grad():
            x.add_(float(link.rank))
            opt.slot("anchor")[0].copy_(x)
        before = opt.drift()
        for _ in range(20):
            opt.step()
        return opt.drift() / before

    assert World(4).run(worker) == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("workers", first_quick([4, 5]))
def test_it_learns_the_noisy_quadratic(workers: int) -> None:
    config = RunConfig(
        algorithm="noloco", task="quadratic", workers=workers, steps=200, lr=0.1, inner="sgd", clip_norm=0.0, eval_every=0,
        settings={"H": 8},
    )  # fmt: skip
    first, *others = World(workers, step_time=0.0).run(lambda link: Trainer(config, link).run(lambda _: None).validation)
    start = Trainer(RunConfig(algorithm="noloco", task="quadratic", workers=1), SoloLink()).evaluate()["loss"]
    assert all(other == first for other in others), "worker 0 tells all"
    assert first["loss"] < 0.02 * start
    assert first["mean_loss"] < 0.02 * start
    assert 0 < first["drift"] < 0.1


# --- Bytes and time ----------------------------------------------------------------------------------------------------------


def _bytes_of_rounds(bare: Link) -> tuple:
    model, link = model_of(), Metered(bare)
    opt = made(model, link)
    train(model, opt, link.rank, 2 * H)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rounds = [(e.op, e.payload, e.sent, e.received) for e in link.meter.recent if e.purpose == "round"]
    others = [(e.purpose, e.op) for e in link.meter.recent if e.purpose != "round"]
    return rounds, others, HEADER_NBYTES + PART_NBYTES + 4 * parameters, opt.message_nbytes()


@pytest.mark.parametrize("workers", [2, 4, 8, 3])
def test_a_worker_sends_one_message_a_round_whatever_the_number_of_workers(workers: int, pool: Pool) -> None:
    habitats = [World(workers).run(_bytes_of_rounds)] + ([pool.run(_bytes_of_rounds, workers)] if workers <= 4 else [])
    for everyone in habitats:
        for rank, (rounds, others, N, told) in enumerate(everyone):
            assert told == N
            met = [partner_of(rank, workers, r) is not None for r in (1, 2)]
            assert rounds == [("pair", N, N * there, N * there) for there in met]
            assert others == [("handshake", "gather")], "no collective but the handshake"


def test_a_straggler_delays_its_partners_only() -> None:
    """One round of four workers, one of which needs 9 s a step: the pair without it does not notice."""
    slow = 2
    friend = partner_of(slow, 4, 1)

    def worker(link: Link) -> float:
        model = model_of()
        opt = made(model, link)
        train(model, opt, link.rank, H)
        link_time = link.now()
        assert opt.rounds == 1
        return link_time

    steps = [9.0 if rank == slow else 1.0 for rank in range(4)]
    network = Network(latency=0.5)
    # The handshake is a gather of all: 3 hops, before the first step.
    times = World(4, step_time=steps, network=network).run(worker)
    for rank, seconds in enumerate(times):
        assert seconds == 1.5 + H * (9.0 if rank in (slow, friend) else 1.0) + 0.5


# --- Rounds that fail --------------------------------------------------------------------------------------------------------


def _state(opt: NoLoCo) -> list[Tensor]:
    return [t.clone() for name in ("anchor", "momentum") for t in opt.slot(name)]


@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize("on_abort", ["keep", "restore"])
def test_an_aborted_round_touches_nothing(at: str, on_abort: str) -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = made(model, Flaky(link, {2}, at=at), on_abort=on_abort)
        train(model, opt, link.rank, H)
        before, agreed = _state(opt), snapshot(model)
        train(model, opt, link.rank, H, first=H + 1)
        assert opt.aborted_rounds == 1
        assert_same(before, _state(opt))
        assert all(torch.equal(a, b) for a, b in zip(agreed, snapshot(model), strict=True)) == (on_abort == "restore")
        train(model, opt, link.rank, H, first=2 * H + 1)
        assert opt.aborted_rounds == 1
        assert not all(torch.equal(a, b) for a, b in zip(before, _state(opt), strict=True))

    World(5).run(worker)


def test_a_nan_is_refused_in_its_pair_only_and_the_worker_heals() -> None:
    bad = 1
    friend = partner_of(bad, 4, 2)

    def worker(link: Link, poison: bool) -> tuple:
        model = model_of()
        opt = made(model, link)
        train(model, opt, link.rank, 2 * H - 1)
        before = _state(opt)
        if poison and link.rank == bad:
            with torch.no_grad():
                model.first.weight[0, 0] = float("nan")
        backward(model, link.rank, 2 * H)
        opt.step()
        opt.zero_grad()
        untouched = all(torch.equal(a, b) for a, b in zip(before, _state(opt), strict=True))
        after, point = snapshot(model), _state(opt)
        train(model, opt, link.rank, 4 * H, first=2 * H + 1)
        opt.finish()
        return opt.aborted_rounds, untouched, after, point, snapshot(model), opt.rounds

    poisoned = World(4).run(lambda link: worker(link, True))
    healthy = World(4).run(lambda link: worker(link, False))
    for rank, (aborted, untouched, after, point, final, rounds) in enumerate(poisoned):
        involved = rank in (bad, friend)
        assert aborted == involved
        assert untouched == involved
        assert all(bool(torch.isfinite(t).all()) for t in (*point, *final))
        assert rounds == 6
        if not involved:
            assert_same(after, healthy[rank][2], "the other pair has not noticed")
    trained = [p for p in model_of().parameters() if p.requires_grad]
    frozen = [i for i, p in enumerate(model_of().parameters()) if not p.requires_grad]
    restored = [t for i, t in enumerate(poisoned[bad][2]) if i not in frozen]
    assert_same(restored, poisoned[bad][3][: len(trained)], "that worker is back at its own outer point")


def test_finish_does_the_same_on_all_workers_after_one_pair_has_refused_the_last_round() -> None:
    """Whether there is something left to exchange must not depend on what happened in one pair: the others would not come."""

    def worker(link: Link) -> tuple[int, int, int]:
        model = model_of()
        opt = made(model, link)
        train(model, opt, link.rank, H - 1)
        backward(model, link.rank, H)
        if link.rank == 0:
            with torch.no_grad():
                model.first.weight[0, 0] = float("nan")
        opt.step()
        opt.finish()
        return opt.aborted_rounds, opt.pending_steps, opt.rounds

    results = World(4).run(worker)
    assert sum(aborted for aborted, *_ in results) == 2
    assert {(pending, rounds) for _, pending, rounds in results} == {(0, 1)}


def test_on_nonfinite_raise_raises_on_all_workers_and_names_the_pair() -> None:
    def worker(link: Link) -> tuple[str, tuple[int, ...]] | None:
        model = model_of()
        opt = made(model, link, H=1, on_nonfinite="raise")
        backward(model, link.rank, 1)
        if link.rank == 0:
            model.first.weight.grad[0, 0] = float("nan")
        try:
            opt.step()
        except NonFiniteRound as refusal:
            return str(refusal), refusal.culprits
        return None

    pair = ", rank ".join(map(str, sorted([0, partner_of(0, 4, 1)])))
    message = f"round 1 refused by rank {pair}: NaN or Inf in the contribution of rank 0; all 4 workers stop"
    assert World(4).run(worker) == [(message, (0,))] * 4


@pytest.mark.parametrize(("on_nonfinite", "extra"), [("skip", 0), ("raise", 1)])
def test_only_on_nonfinite_raise_tells_all_workers_of_each_round(on_nonfinite: str, extra: int) -> None:
    def worker(link: Link) -> list[tuple[str, int]]:
        model, metered = model_of(), Metered(link)
        opt = made(model, metered, H=1, on_nonfinite=on_nonfinite)
        train(model, opt, link.rank, 2)
        return [(exchange.purpose, exchange.payload) for exchange in metered.meter.recent]

    for exchanges in World(4).run(worker):
        control = [(purpose, nbytes) for purpose, nbytes in exchanges if purpose != "round"]
        assert control == [("handshake", 32)] + [("refusals", 1)] * 2 * extra


def test_a_worker_that_is_to_blame_again_and_again_gives_up_and_its_partners_do_not() -> None:
    def worker(link: Link) -> tuple[str, int]:
        model = model_of()
        opt = made(model, link, H=1, give_up_after=3)
        for step in range(1, 6):
            backward(model, link.rank, step)
            if link.rank == 0 and step > 1:  # not before the handshake has compared starting values
                with torch.no_grad():
                    model.first.weight[0, 0] = float("nan")
            try:
                opt.step()
            except (TrainingDiverged, LinkError) as error:  # the second: one who was left alone
                return str(error), opt.rounds
            opt.zero_grad()
        return "went on", opt.rounds

    mine, *others = World(4).run(worker)
    assert mine[1] == 4
    assert "training has diverged at step 2: 3 rounds in a row were refused (round 4 refused by rank" in mine[0]
    assert all(not said.startswith("training") for said, _ in others)


def test_two_workers_that_both_lose_their_numbers_stop_at_once() -> None:
    def worker(link: Link) -> str:
        model = model_of()
        opt = made(model, link, H=1)
        backward(model, link.rank, 1)
        with torch.no_grad():
            model.first.weight.fill_(float("inf"))
        with pytest.raises(TrainingDiverged) as error:
            opt.step()
        return str(error.value)

    for message in World(2).run(worker):
        assert "the parameters of all 2 workers have become invalid since the round before (round 1 refused" in message


def test_running_statistics_stay_each_workers_own_until_the_end() -> None:
    """To average them after a round would be a collective in which a pair that has refused the round is missing."""

    def worker(link: Link) -> tuple:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        metered = Metered(link)
        opt = NoLoCo(sgd(model.parameters()), metered, H=1, buffers=[model[1].running_mean])
        for step in range(3):
            model(
                torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * link.rank + step)) + link.rank
            ).sum().backward()
            if step == 1 and link.rank == 0:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            opt.step()
            opt.zero_grad()
            if step == 1 and link.rank == 0:
                model[1].running_mean.zero_()  # not finite either, after that forward pass
        during = [e.purpose for e in metered.meter.recent]
        own = model[1].running_mean.clone()
        opt.finish()
        return during, own, model[1].running_mean.clone()

    results = World(4).run(worker)
    assert all(during == ["handshake", "round", "round", "round"] for during, *_ in results)
    mean = torch.stack([own for _, own, _ in results]).mean(0)
    for _, own, after in results:
        assert not torch.equal(own, after)
        assert_close([after], [mean])


# --- Settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"outer_lr": 0.0}, "outer_lr must be above zero and finite, got 0.0"),
        ({"outer_lr": float("inf")}, "outer_lr must be above zero and finite, got inf"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"gamma": -0.1}, "gamma must be at least 0 and finite, got -0.1"),
        ({"codec": Int8()}, "sends parameters themselves, of which nothing can be left out"),
        ({"codec": "fp32"}, "codec must be a thinwire Codec, got 'fp32'"),
    ],
)
def test_bad_settings_are_refused_with_their_value(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(model_of(), SoloLink(), **wrong)


def test_it_says_that_there_is_no_common_model() -> None:
    opt = made(model_of(), SoloLink(), codec=Dense("bf16"))
    assert not opt.replicated | opt.synced
    assert "no model in common" in opt.evaluated
    assert opt.codec == Dense("bf16", gather=True)
    assert opt.settings["gamma"] == opt.outer_lr == 0.7


def test_bf16_parameters_are_sent_as_bf16_where_that_is_exact() -> None:
    def train_bf16(link: Link, codec: Dense | None) -> tuple[Tensor, int]:
        x = nn.Parameter(torch.linspace(-3, 5, 40).bfloat16())
        torch.manual_seed(link.rank)
        opt = NoLoCo(torch.optim.SGD([x], lr=0.1), link, H=1, codec=codec)
        for _ in range(3):
            x.grad = torch.randn(40).bfloat16()
            opt.step()
        return x.detach(), opt.message_nbytes()

    ours, wide = (World(2).run(lambda link, codec=codec: train_bf16(link, codec)) for codec in (None, Dense(gather=True)))
    for (a, short), (b, long) in zip(ours, wide, strict=True):
        assert torch.equal(a, b) and long - short == 40 * 2
    inner = torch.optim.SGD([nn.Parameter(torch.ones(3).bfloat16())], lr=0.1)
    assert NoLoCo(inner, SoloLink(), gamma=0.9).codec == Dense(gather=True), "phi is in it, in float32"
    coming = type("Coming", (SoloLink,), {"elastic": object()})()
    for kind in (LocalSGD, DataParallel):
        assert kind._exact_codec(inner, coming) == Dense("bf16")
        assert kind._exact_codec(inner, SoloLink()) is None, "a ring adds up in the dtype of the wire"
    assert DiLoCo._exact_codec(inner, coming) is None, "the anchor is float32, so differences are"
    both = torch.optim.SGD([nn.Parameter(torch.ones(3).bfloat16()), nn.Parameter(torch.ones(3))], lr=0.1)
    assert LocalSGD._exact_codec(both, coming) is None
