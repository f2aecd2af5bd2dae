"""Pace: slower workers take fewer steps, all arrive together, and each contribution weighs what was put into it."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.conformance.training import adamw, assert_close, assert_same, backward, model_of, sgd, snapshot
from tests.processes import LIMIT, Pool
from thinwire import DecoupledDiLoCo, Dense, Flaky, Identity, Link, Metered, Sign, TopK, TorchLink, World
from thinwire.codecs import Codec
from thinwire.core.pace import Pace
from thinwire.errors import ConfigError
from thinwire.links.base import LinkDecorator
from thinwire.sharding.mesh import make_mesh, shard_model

H = 8
SPARSE = Identity(8) >> TopK(5)


class Counting(torch.optim.SGD):
    """Counts its steps."""

    def __init__(self, params: Any):
        super().__init__(params, lr=0.05)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return super().step(closure)


def paced(model: torch.nn.Module, link: Link, *, inner: Callable = sgd, **settings: Any) -> DecoupledDiLoCo:
    rule: dict[str, Any] = {"H": H, "mode": "consensus", "beta": 0.9, "outer_lr": 1.0, "pace": "speed", "codec": Dense()}
    return DecoupledDiLoCo(inner(model.parameters()), link, **(rule | settings))


def train_to(model: torch.nn.Module, opt: DecoupledDiLoCo, rank: int, steps: int, taken: int = 0) -> int:
    """Train until the counter of steps is there; a worker's n-th batch is its n-th, whatever the counter says."""
    while opt.steps < steps:
        taken += 1
        backward(model, rank, taken)
        opt.step()
        opt.zero_grad()
    return taken


# --- Steps and clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "quotas"),
    [
        ((1.0, 2.0), (8, 4)),
        ((1.0, 1.0, 2.0, 4.0), (8, 8, 4, 2)),
        ((3.0, 1.0), (3, 8)),
        ((0.01, 1.0), (8, 1)),
        ((0.5, 0.5, 0.5), (8, 8, 8)),
    ],
)
def test_after_the_first_round_everyone_takes_what_its_speed_allows(times: tuple[float, ...], quotas: tuple[int, ...]) -> None:
    rounds = 4

    def worker(link: Link) -> tuple[list[int], list[tuple[int, int, int]], list[float]]:
        model, metered = model_of(), Metered(link)
        inner = Counting(model.parameters())
        opt = paced(model, metered, inner=lambda _: inner)
        taken, seen = [], []
        for r in range(1, rounds + 1):
            before = inner.taken
            train_to(model, opt, link.rank, r * H, taken=before)
            taken.append(inner.taken - before)
            seen.append((opt.steps, opt.rounds, opt.pending_steps))
        return taken, seen, [e.seconds for e in metered.meter.recent if e.purpose == "round"]

    arrivals = [q * t for q, t in zip(quotas, times, strict=True)]
    rounding = max(arrivals) - min(arrivals)  # to whole steps; 0 for the first two
    for quota, (taken, seen, waited) in zip(quotas, World(len(times), step_time=times).run(worker), strict=True):
        assert taken == [H, *[quota] * (rounds - 1)]
        assert seen == [(r * H, r, 0) for r in range(1, rounds + 1)], "the counter agrees at every round"
        assert max(waited[1:]) <= rounding + 1e-9, "nobody waits for more than that"


def test_equal_pace_waits_for_the_slowest_where_speed_does_not() -> None:
    def worker(link: Link, pace: str) -> float:
        model, metered = model_of(), Metered(link)
        train_to(model, paced(model, metered, pace=pace), link.rank, 4 * H)
        return sum([e.seconds for e in metered.meter.recent if e.purpose == "round"][1:])

    world = World(2, step_time=(1.0, 2.0))
    assert world.run(lambda link: worker(link, "equal")) == [pytest.approx(3 * H), 0]
    assert world.seconds == pytest.approx(4 * 2 * H)
    assert world.run(lambda link: worker(link, "speed")) == [0, 0]
    assert world.seconds == pytest.approx(2 * H + 3 * H)


def test_a_worker_that_becomes_slow_takes_fewer_steps_from_the_next_round_on() -> None:
    def worker(link: Link) -> list[int]:
        model, taken = model_of(), []
        opt = paced(model, link)
        for r in range(1, 5):
            before = sum(taken)
            while opt.steps < r * H:
                if link.rank == 1 and r >= 2:
                    link.elapse(1.0)  # twice as slow: something else runs there
                before = train_one(model, opt, link.rank, before)
            taken.append(before - sum(taken))
        return taken

    assert World(2, step_time=1.0).run(worker) == [[8, 8, 8, 8], [8, 8, 4, 4]]


def train_one(model: torch.nn.Module, opt: DecoupledDiLoCo, rank: int, taken: int) -> int:
    backward(model, rank, taken + 1)
    opt.step()
    opt.zero_grad()
    return taken + 1


@pytest.mark.parametrize("quota", range(1, 9))
def test_the_counter_rises_evenly_and_ends_at_the_round(quota: int) -> None:
    pace = Pace(thinwire.SoloLink(), H)
    pace.state[0] = quota
    step = 3 * H
    counts = [step := pace.next_step(step) for _ in range(2 * quota)]
    assert counts[quota - 1] == 4 * H
    assert counts[-1] == 5 * H
    gaps = [b - a for a, b in zip([3 * H, *counts], counts, strict=False)]
    assert {H // quota, -(-H // quota)} >= set(gaps)
    assert pace.work == 2 * quota
    pace.committed()
    assert pace.work == 0


def test_a_checkpoint_of_another_world_leaves_no_quota_and_means_all_steps() -> None:
    pace = Pace(thinwire.SoloLink(), H)
    pace.state.zero_()
    assert pace.quota == H
    assert [pace.next_step(step) for step in range(H)] == list(range(1, H + 1))


def test_a_wire_that_would_round_the_weights_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"would round weights: use fp32"):
        paced(model_of(), thinwire.SoloLink(), codec=Dense("bf16"))
    paced(model_of(), thinwire.SoloLink(), codec=Dense("bf16", gather=True))


# --- Real processes ----------------------------------------------------------------------------------------------------------


class Clock(LinkDecorator):
    """A step takes as long as we say."""

    def __init__(self, link: Link, seconds: float):
        super().__init__(link)
        self.seconds, self.time = seconds, 0.0

    def tick(self) -> None:
        self.time += self.seconds

    def now(self) -> float:
        return self.time


def _slow_second(link: Link) -> tuple[int, list[int], list[Tensor]]:
    model, steps, taken = model_of(), [], 0
    opt = paced(model, Clock(link, (1.0, 2.0)[link.rank]))
    for r in range(1, 4):
        taken = train_to(model, opt, link.rank, r * H, taken)
        steps.append(opt.steps)
    return taken, steps, snapshot(model)


def test_real_processes_find_their_pace_as_simulated_ones_do(pool: Pool) -> None:
    (fast, steps, a), (slow, slow_steps, b) = pool.run(_slow_second, 2)
    assert (fast, slow) == (3 * H, H + 2 * H // 2)
    assert steps == slow_steps == [H, 2 * H, 3 * H]
    for mine, simulated in zip((a, b), World(2).run(_slow_second), strict=True):
        assert_same(mine, simulated[2])


def _shards_of_different_speed(whole: Link) -> tuple[int, int, int]:
    assert whole.size == 4
    mesh = make_mesh(workers=2, shards=2)
    shard = mesh["shard"].get_local_rank()
    link = TorchLink(mesh["replicate"], timeout=LIMIT)
    model = shard_model(torch.nn.Linear(4, 4), mesh)
    for p in model.parameters():
        torch.nn.init.ones_(p)
    opt = paced(model, Clock(link, 1.0 if link.rank == 0 else (2.0, 2.8)[shard]))
    for _ in range(H):  # no more: two shards of a worker that part ways would wait for each other
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    assert opt.pace is not None
    return link.rank, shard, opt.pace.quota


def test_the_shards_of_a_worker_keep_one_pace(pool: Pool) -> None:
    quotas = {(worker, shard): quota for worker, shard, quota in pool.run(_shards_of_different_speed, 4)}
    assert quotas[0, 0] == quotas[0, 1] == H
    assert quotas[1, 0] == quotas[1, 1]


# --- Weights -----------------------------------------------------------------------------------------------------------------


def expected(codec: Codec, over: str, works: list[list[int]], *, beta: float) -> list[Tensor]:
    """By hand, codecs without a transform: everyone's message times the steps behind it. `works` is [round][worker]."""
    models = [model_of() for _ in works[0]]
    inners = [sgd(m.parameters()) for m in models]
    anchor = [p.detach().clone() for p in models[0].parameters() if p.requires_grad]
    momenta = [[torch.zeros_like(a) for a in anchor] for _ in models]
    taken = [0] * len(models)
    for round, work in enumerate(works, start=1):
        sent = []
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for _ in range(work[rank]):
                taken[rank] += 1
                backward(model, rank, taken[rank])
                inner.step()
                inner.zero_grad()
            x = [p.detach() for p in model.parameters() if p.requires_grad]
            fed = [beta * m + a - x_ for m, a, x_ in zip(momenta[rank], anchor, x, strict=True)]
            sent.append(codec.decode(codec.encode(fed, round=round), fed, round=round))
            momenta[rank] = [f - q for f, q in zip(fed, sent[-1], strict=True)]
        w = torch.tensor(work, dtype=torch.float32)
        for i, a in enumerate(anchor):
            q = torch.stack([s[i] for s in sent])
            shares = w.view(-1, *[1] * a.dim()).expand_as(q)
            total = torch.where(q != 0, shares, 0).sum(0) if over == "senders" else w.sum()
            a -= torch.nan_to_num((q * shares).sum(0) / total)  # nobody sent it: 0 / 0
        with torch.no_grad():
            for model in models:
                for p, a in zip([p for p in model.parameters() if p.requires_grad], anchor, strict=True):
                    p.copy_(a)
    return snapshot(models[0])


@pytest.mark.parametrize(
    ("codec", "over"),
    [
        (Dense(), "workers"),
        (Dense(gather=True), "workers"),
        (SPARSE, "workers"),
        (SPARSE, "senders"),
        (SPARSE >> Sign(), "senders"),
    ],
    ids=repr,
)
def test_contributions_weigh_the_steps_behind_them(codec: Codec, over: str) -> None:
    def worker(link: Link) -> list[Tensor]:
        model = model_of()
        train_to(model, paced(model, link, codec=codec, over=over), link.rank, 3 * H)
        return snapshot(model)

    a, b = World(2, step_time=(1.0, 2.0)).run(worker)
    assert_same(a, b, "replicas are bit-equal")
    assert_close(a, expected(codec, over, [[8, 8], [8, 4], [8, 4]], beta=0.9), 1e-5)
    unweighted = [[1, 1]] * 3
    assert not torch.allclose(a[0], expected(codec, over, unweighted, beta=0.9)[0], atol=1e-4)


@pytest.mark.parametrize("codec", [Dense(), Dense(gather=True), SPARSE >> Sign()], ids=repr)
@pytest.mark.parametrize(("period", "exact"), [(8, True), (6, False)])
def test_workers_of_equal_speed_are_as_with_equal_pace(codec: Codec, period: int, exact: bool) -> None:
    """Bit for bit where H is a power of two, by which a weight rounds nothing; else to float tolerance."""

    def worker(link: Link, pace: str) -> tuple[int, list[Tensor]]:
        model = model_of()
        opt = paced(model, link, H=period, codec=codec, pace=pace)
        return train_to(model, opt, link.rank, 3 * period), snapshot(model)

    world = World(3, step_time=1.0)
    speed, equal = (world.run(lambda link, pace=pace: worker(link, pace)) for pace in ("speed", "equal"))
    for (taken, a), (_, b) in zip(speed, equal, strict=True):
        assert taken == 3 * period
        assert_same(a, b) if exact else assert_close(a, b, 1e-5)


def test_finish_weighs_the_steps_since_the_last_round_and_does_so_once() -> None:
    def worker(link: Link) -> tuple[int, int, list[Tensor], int]:
        model = model_of()
        opt = paced(model, link)
        taken = train_to(model, opt, link.rank, H + 4)
        work = opt.pace.work if opt.pace else -1
        opt.finish()
        opt.finish()
        return taken, work, snapshot(model), opt.rounds

    (taken_a, work_a, a, rounds), (taken_b, work_b, b, _) = World(2, step_time=(1.0, 2.0)).run(worker)
    assert (taken_a, taken_b, work_a, work_b, rounds) == (12, 10, 4, 2, 2)
    assert_same(a, b)
    assert_close(a, expected(Dense(), "workers", [[8, 8], [4, 2]], beta=0.9), 1e-5)


# --- Rounds that fail --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize(("on_abort", "left"), [("keep", (8, 4)), ("restore", (0, 0))])
def test_the_work_of_a_round_is_forgotten_when_it_counts_or_is_undone(at: str, on_abort: str, left: tuple[int, int]) -> None:
    """Kept with the local progress: the round after next carries the steps of two, and weighs them."""

    def worker(link: Link) -> tuple[list[int], list[Tensor]]:
        model, work, taken = model_of(), [], 0
        opt = paced(model, Flaky(link, {2}, at=at), on_abort=on_abort)
        assert opt.pace is not None
        for r in (1, 2, 3):
            taken = train_to(model, opt, link.rank, r * H, taken)
            work.append(opt.pace.work)
        assert opt.aborted_rounds == 1
        assert opt.steps == 3 * H
        return work, snapshot(model)

    workers = World(2, step_time=(1.0, 2.0)).run(worker)
    for (work, params), aborted in zip(workers, left, strict=True):
        assert work == [0, aborted, 0]
        assert_same(params, workers[0][1])
    if on_abort == "keep":
        assert_close(workers[0][1], expected(Dense(), "workers", [[8, 8], [16, 8]], beta=0.9), 1e-5)


def test_who_was_poisoned_starts_its_count_anew_and_the_others_keep_theirs() -> None:
    def worker(link: Link) -> list[int]:
        model, work = model_of(), []
        opt = paced(model, link)
        assert opt.pace is not None
        taken = train_to(model, opt, link.rank, H)
        if link.rank == 1:
            model.first.weight.data[0, 0] = float("inf")
        taken = train_to(model, opt, link.rank, 2 * H, taken)
        work.append(opt.pace.work)
        train_to(model, opt, link.rank, 3 * H, taken)
        assert opt.aborted_rounds == 1
        return [*work, opt.pace.work]

    assert World(2, step_time=(1.0, 2.0)).run(worker) == [[8, 0], [0, 0]]


def test_finish_after_a_last_round_that_was_aborted_and_undone_has_nothing_to_weigh() -> None:
    def worker(link: Link) -> list[Tensor]:
        model = model_of()
        opt = paced(model, Flaky(link, {2}), on_abort="restore")
        train_to(model, opt, link.rank, 2 * H)
        opt.finish()
        return snapshot(model)

    a, b = World(2, step_time=(1.0, 2.0)).run(worker)
    assert_same(a, b)


# --- Resuming ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [2 * H, 2 * H + 4], ids=["at a round", "mid-interval"])
def test_quota_and_steps_of_the_round_survive_a_checkpoint(stop: int) -> None:
    total, codec = 4 * H, SPARSE >> Sign()

    def straight(link: Link) -> tuple[int, list[Tensor]]:
        model = model_of()
        return train_to(model, paced(model, link, inner=adamw, codec=codec), link.rank, total), snapshot(model)

    def resumed(link: Link) -> tuple[int, list[Tensor]]:
        model, disk = model_of(), io.BytesIO()
        opt = paced(model, link, inner=adamw, codec=codec)
        taken = train_to(model, opt, link.rank, stop)
        assert opt.pace is not None
        state = opt.pace.state.clone()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, disk)
        disk.seek(0)
        saved, model = torch.load(disk, weights_only=True), model_of(seed=99)
        model.load_state_dict(saved["model"])
        opt = paced(model, link, inner=adamw, codec=codec)
        opt.load_state_dict(saved["opt"])
        assert opt.pace is not None
        assert opt.pace.quota == (8, 4)[link.rank]
        assert torch.equal(opt.pace.state, state)
        return train_to(model, opt, link.rank, total, taken), snapshot(model)

    world = World(2, step_time=(1.0, 2.0))
    for (taken, a), (taken_again, b) in zip(world.run(straight), world.run(resumed), strict=True):
        assert taken == taken_again
        assert_same(a, b)


def test_a_checkpoint_between_steps_that_do_not_coincide_is_taken_up() -> None:
    """With a quota of 3 of 8 the counter goes 2, 5, 8: in mid-interval it is not the same on all workers."""

    def worker(link: Link) -> list[int]:
        model = model_of()
        opt = paced(model, link)
        taken = train_to(model, opt, link.rank, H + 4)
        at, saved = opt.steps, opt.state_dict()
        opt = paced(model, link)
        opt.load_state_dict(saved)
        train_to(model, opt, link.rank, 2 * H, taken)
        return [at, opt.steps, opt.rounds]

    assert World(2, step_time=(1.0, 3.0)).run(worker) == [[12, 16, 2], [13, 16, 2]]


def test_training_can_go_on_after_finish_in_mid_interval() -> None:
    def worker(link: Link) -> list[int]:
        model = model_of()
        opt = paced(model, link)
        taken = train_to(model, opt, link.rank, H + 4)
        opt.finish()
        train_to(model, opt, link.rank, 3 * H, taken)
        return [opt.steps, opt.rounds]

    assert World(2, step_time=(1.0, 3.0)).run(worker) == [[24, 4], [24, 4]]


# --- Bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Dense(), Dense(gather=True), SPARSE >> Sign()], ids=repr)
def test_a_weighted_round_is_as_long_as_it_says(codec: Codec) -> None:
    def worker(link: Link) -> tuple[list[int], int]:
        model, metered = model_of(), Metered(link)
        opt = paced(model, metered, codec=codec)
        train_to(model, opt, link.rank, 2 * H)
        return [e.payload for e in metered.meter.recent if e.purpose == "round"], opt.message_nbytes()

    for payloads, nbytes in World(2, step_time=1.0).run(worker):
        assert payloads == [nbytes] * 2


def test_telling_each_other_the_speed_takes_eight_bytes_a_round_and_is_no_round() -> None:
    def worker(link: Link) -> list[tuple[str, int]]:
        model, metered = model_of(), Metered(link)
        train_to(model, paced(model, metered, alarm_every=0), link.rank, 2 * H)
        return [(e.purpose, e.payload) for e in metered.meter.recent if e.purpose not in ("round", "handshake")]

    assert World(2, step_time=1.0).run(worker) == [[("pace", 8)] * 2] * 2


def test_a_total_that_is_no_multiple_of_the_period_keeps_nobody_waiting() -> None:
    """The slow worker's last jump ends at the round, while the fast one comes to it through finish()."""

    def worker(link: Link) -> tuple[int, int]:
        model = model_of()
        opt = paced(model, link, H=8)
        train_to(model, opt, link.rank, 15)
        opt.finish()
        return opt.rounds, opt.steps

    fast, slow = World(2, step_time=(1.0, 2.0)).run(worker)
    assert fast[0] == slow[0] == 2
    assert (fast[1], slow[1]) == (15, 16)
