"""Metered counts, Throttled delays, Flaky aborts, Straggler lags: each alone, and all in one stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

from tests.clock import Clock
from tests.processes import Pool
from tests.sim.test_world import queue_transfers
from thinwire.errors import ConfigError, RoundAborted
from thinwire.links import Flaky, Link, LinkDecorator, Meter, Metered, SoloLink, Straggler, Throttled
from thinwire.network import Network, ring_traffic
from thinwire.payload import Payload
from thinwire.sim import World

WRAPPERS: dict[str, Callable[[Link], LinkDecorator]] = {
    "Metered": Metered,
    "Throttled": lambda link: Throttled(link, Network()),
    "Flaky": lambda link: Flaky(link, ()),
    "Straggler": lambda link: Straggler(link, 0.0),
}


def message(nbytes: int, value: float = 1.0, *, purpose: str = "round", fixed: bool = True) -> Payload:
    return Payload(torch.full((nbytes // 4,), float(value)), purpose=purpose, fixed=fixed)


# --- What all of them have in common ---------------------------------------------------------------------------------------


class Recorder(SoloLink):
    """Notes what it is asked."""

    rank = 3  # type: ignore[assignment]
    size = 5  # type: ignore[assignment]

    def __init__(self) -> None:
        self.asked: list[str] = []

    def commit(self) -> None:
        self.asked.append("commit")

    def tick(self) -> None:
        self.asked.append("tick")

    def now(self) -> float:
        return 42.0

    def elapse(self, seconds: float) -> None:
        self.asked.append(f"elapse {seconds:g}")

    def traffic(self, op, sizes):
        return ("traffic", op, list(sizes))


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_a_decorator_passes_on_everything_it_does_not_change(name: str) -> None:
    inner = Recorder()
    link = WRAPPERS[name](inner)
    assert (link.rank, link.size, link.now()) == (3, 5, 42.0)
    assert link.traffic("mean", [1, 2]) == ("traffic", "mean", [1, 2])
    link.commit()
    link.elapse(7)
    assert inner.asked == ["commit", "elapse 7"]
    link.tick()
    assert inner.asked[2] == "tick"


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_a_decorated_link_exchanges_the_same_values(name: str) -> None:
    def worker(bare: Link, wrap: bool) -> list:
        link = WRAPPERS[name](bare) if wrap else bare
        first = link.post(message(8, bare.rank), "mean")
        second = link.post(message(4 * bare.rank, bare.rank, fixed=False), "gather")
        return [[p.data.tolist() for p in t.wait()] for t in (second, first)]

    assert World(3).run(lambda link: worker(link, True)) == World(3).run(lambda link: worker(link, False))


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_waiting_twice_is_waiting_once(name: str) -> None:
    """The links themselves allow it; so must what is around them, without counting or charging twice."""

    def worker(bare: Link) -> tuple:
        link = Throttled(bare, Network(bandwidth=8.0)) if name == "Throttled" else WRAPPERS[name](bare)
        ticket = link.post(message(8, bare.rank), "mean")
        seen = []
        for _ in range(2):
            result = ticket.wait()[0].data.tolist()
            seen.append((result, link.now(), asdict(link.meter.totals) if isinstance(link, Metered) else None))
        return tuple(seen)

    for once, again in World(2, step_time=0.0).run(worker):
        assert once == again


# --- Metered ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_counts_what_the_ring_formula_says(size: int) -> None:
    sizes = [4 * (r + 1) for r in range(size)]

    def worker(bare: Link) -> Metered:
        link = Metered(bare)
        link.mean(message(1200))
        link.all_gather(message(sizes[bare.rank], fixed=False))
        return link

    for rank, link in enumerate(World(size).run(worker)):
        mean, gather = link.meter.recent
        assert (mean.op, mean.payload, mean.purpose) == ("mean", 1200, "round")
        assert (mean.sent, mean.received) == (2 * 1200 * (size - 1) // size,) * 2
        assert (gather.op, gather.payload) == ("gather", sizes[rank])
        assert (gather.sent, gather.received) == ring_traffic("gather", sizes, rank)
        totals = link.meter.totals
        assert (totals.rounds, totals.payload) == (2, 1200 + sizes[rank])
        assert (totals.sent, totals.received) == (mean.sent + gather.sent, mean.received + gather.received)


def test_control_messages_count_as_bytes_but_not_as_rounds() -> None:
    def worker(bare: Link) -> Metered:
        link = Metered(bare)
        link.all_gather(message(32, purpose="handshake"))
        link.mean(message(100))
        link.all_gather(message(16, purpose="alarm"))
        return link

    for link in World(2).run(worker):
        assert [e.purpose for e in link.meter.recent] == ["handshake", "round", "alarm"]
        assert link.meter.totals.rounds == 1
        assert link.meter.totals.payload == 148
        assert link.meter.totals.sent == 32 + 100 + 16


def test_nothing_is_counted_before_the_result_is_there() -> None:
    link = Metered(SoloLink())
    ticket = link.post(message(40), "mean")
    assert link.meter.totals.payload == 0
    ticket.wait()
    assert link.meter.totals.payload == 40


def test_waiting_is_time_on_the_links_clock_that_computing_does_not_hide() -> None:
    """A ring of two sends 100 bytes at 1 byte a second: 100 s, of which 30 s are hidden behind steps."""

    def worker(bare: Link) -> Metered:
        link = Metered(bare)
        link.all_gather(message(100))
        ticket = link.post(message(100), "gather")
        for _ in range(3):
            link.tick()
        ticket.wait()
        return link

    for link in World(2, network=Network(bandwidth=8.0), step_time=10.0).run(worker):
        assert [e.seconds for e in link.meter.recent] == [100.0, 70.0]
        assert link.meter.totals.waiting == 170.0


def test_waiting_for_a_slow_worker_is_waiting() -> None:
    def worker(bare: Link) -> float:
        link = Metered(bare)
        link.tick()
        link.mean(message(4))
        return link.meter.totals.waiting

    assert World(3, step_time=[1.0, 5.0, 2.0]).run(worker) == [4.0, 0.0, 3.0]


def test_computing_is_not_waiting_when_wall_time_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With step_time=None the clock is brought up to date late; what was computed meanwhile must not look like waiting."""
    clock = Clock()
    monkeypatch.setattr("thinwire.sim.world.time", clock)

    def worker(bare: Link) -> tuple[float, float]:
        link = Metered(bare)
        ticket = link.post(message(4), "mean")
        clock.advance(0.25)  # stands for computing
        ticket.wait()
        return link.meter.totals.waiting, link.now()

    assert World(2, step_time=None).run(worker) == [(0.0, 0.25)] * 2


def test_recent_exchanges_are_bounded_and_totals_are_not() -> None:
    link = Metered(SoloLink())
    for _ in range(5000):
        link.mean(message(4))
    assert link.meter.totals.rounds == 5000
    assert len(link.meter.recent) == 4096


def test_the_totals_survive_a_checkpoint() -> None:
    def worker(bare: Link) -> Meter:
        link = Metered(bare)
        link.mean(message(40))
        saved = json.loads(json.dumps(link.meter.state_dict()))
        link.mean(message(60))
        resumed = Metered(bare)
        resumed.meter.load_state_dict(saved)
        assert asdict(resumed.meter.totals) == saved
        resumed.mean(message(60))
        assert resumed.meter.totals == link.meter.totals
        return resumed.meter

    for meter in World(2, network=Network(latency=0.5), step_time=0.0).run(worker):
        assert meter.state_dict() == {"rounds": 2, "payload": 100, "sent": 100, "received": 100, "waiting": 2.0}


def _count_here(bare: Link) -> tuple:
    link = Metered(bare)
    link.mean(message(1200))
    link.all_gather(message(4 * bare.rank, fixed=False))
    link.all_gather(message(16, purpose="alarm"))
    return [(e.purpose, e.op, e.payload, e.sent, e.received) for e in link.meter.recent], link.meter.totals.rounds


def test_real_and_simulated_links_count_alike(pool: Pool) -> None:
    real, simulated = pool.run(_count_here, 3), World(3).run(_count_here)
    for (ours, rounds), (theirs, as_many) in zip(real, simulated, strict=True):
        mean, gather, alarm = ours
        assert (mean, alarm, rounds) == (theirs[0], theirs[2], as_many)
        # Over torch.distributed messages of 0, 4 and 8 bytes travel padded to the longest, after their lengths of 8 bytes.
        assert gather[3:] == (2 * (8 + 8), 2 * (8 + 8))


# --- Throttled ---------------------------------------------------------------------------------------------------------------

THIN = Network(bandwidth=(8.0, 16.0, 80.0), latency=0.25, down=(80.0, 8.0, 8.0))


@pytest.mark.parametrize("op", ["mean", "gather"])
def test_a_simulated_link_is_charged_exactly_the_networks_seconds(op) -> None:
    sizes = [120, 120, 120] if op == "mean" else [40, 8, 120]

    def worker(bare: Link) -> float:
        Throttled(bare, THIN).post(message(sizes[bare.rank], fixed=op == "mean"), op).wait()
        return bare.now()

    assert World(3, step_time=0.0).run(worker) == [THIN.seconds(op, sizes)] * 3


def _timeline(bare: Link, network: Network | None, delays: tuple[float, ...]) -> list[float]:
    """Clock readings after waits with computing in between, as seen by a worker that lags by `delays[rank]`."""
    link = bare if network is None else Throttled(bare, network)
    seen = []
    for steps in (0, 3, 100):
        link.elapse(delays[link.rank])
        ticket = link.post(message(12), "mean")
        for _ in range(steps):
            link.tick()
        ticket.wait()
        seen.append(link.now())
    first, second = (link.post(message(12), "mean") for _ in range(2))
    for ticket in (first, second):
        ticket.wait()
        seen.append(link.now())
    return seen


@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0), (0.0, 7.0, 3.0)], ids=["in step", "one after the other"])
def test_a_throttled_fast_world_is_a_thin_world(delays: tuple[float, ...]) -> None:
    """The identity that says everything: hidden time, queues, and waiting for whoever posts last."""
    network = Network(bandwidth=8.0, latency=0.5)
    throttled = World(3, step_time=1.0).run(lambda link: _timeline(link, network, delays))
    thin = World(3, step_time=1.0, network=network).run(lambda link: _timeline(link, None, delays))
    for a, b in zip(throttled, thin, strict=True):
        assert a == pytest.approx(b)


def test_computing_between_post_and_wait_hides_the_wire() -> None:
    wire = Network(bandwidth=8.0).seconds("gather", [10, 10])
    assert wire == 10.0

    def worker(bare: Link, steps: int) -> float:
        link = Throttled(bare, Network(bandwidth=8.0))
        ticket = link.post(Payload(torch.zeros(10, dtype=torch.uint8)), "gather")
        for _ in range(steps):
            link.tick()
        ticket.wait()
        return link.now()

    for steps, expected in ((0, 10.0), (4, 10.0), (10, 10.0), (25, 25.0)):
        assert World(2, step_time=1.0).run(lambda link, s=steps: worker(link, s)) == [expected] * 2


def test_queued_transfers_go_one_after_the_other() -> None:
    def worker(bare: Link) -> list[float]:
        return queue_transfers(Throttled(bare, Network(bandwidth=8.0)))

    assert World(2, step_time=0.0).run(worker) == [[10.0, 15.0, 35.0, 145.0]] * 2


def _throttled_here(bare: Link) -> tuple[list[float], list[list[float]]]:
    link = Throttled(bare, Network(latency=0.25))  # a mean of two workers: 2 hops
    clock = Clock()
    slept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.links.base.time", clock)
        values = link.mean(message(8, bare.rank)).data.tolist()
        slept.append(clock.slept.copy())
        for computing in (0.375, 0.625):
            ticket = link.post(message(8), "mean")
            clock.advance(computing)
            clock.slept.clear()
            ticket.wait()
            slept.append(clock.slept.copy())
    return values, slept


def test_a_real_link_sleeps_as_long_as_the_wire_takes_unless_hidden(pool: Pool) -> None:
    for values, slept in pool.run(_throttled_here, 2):
        assert values == [0.5, 0.5]
        assert slept == [[0.5], [0.125], []], "what this worker computed while the wire was busy for 0.5 s counts"


def test_a_network_of_another_size_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="bandwidth lists 2 workers, but there are 1"):
        Throttled(SoloLink(), Network(bandwidth=(1.0, 2.0)))


# --- Flaky -----------------------------------------------------------------------------------------------------------------


def outcomes(link: Link, rounds: int) -> list[str]:
    """What happens in each round: "ok", or what the abort says."""
    seen = []
    for _ in range(rounds):
        link.all_gather(message(4, purpose="alarm"))
        try:
            link.mean(message(4))
        except RoundAborted as error:
            seen.append(str(error))
            continue
        link.all_gather(message(4, purpose="handshake"))
        try:
            link.commit()
        except RoundAborted as error:
            seen.append(str(error))
        else:
            seen.append("ok")
    return seen


@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize("size", [1, 3])
def test_chosen_rounds_are_aborted_on_all_and_control_messages_do_not_count(at: str, size: int) -> None:
    seen = World(size).run(lambda link: outcomes(Flaky(link, {1, 3, 4}, at=at), 6))
    where = {"commit": "at commit", "exchange": "in the exchange"}[at]
    aborted = {n: f"round {n} was aborted by a Flaky link {where}" for n in (1, 3, 4)}
    assert seen == [[aborted.get(n, "ok") for n in range(1, 7)]] * size


def test_an_abort_at_commit_lets_the_exchange_take_place() -> None:
    link = Metered(SoloLink())
    flaky = Flaky(link, {1})
    assert flaky.mean(message(4, 7.0)).data.tolist() == [7]
    with pytest.raises(RoundAborted, match="round 1 was aborted by a Flaky link at commit"):
        flaky.commit()
    assert link.meter.totals.rounds == 1


def test_the_round_that_was_waited_for_is_the_one_that_commits() -> None:
    """Two rounds under way: the vote is on the one that has arrived, not on the one posted last."""
    flaky = Flaky(SoloLink(), {2})
    first, second = (flaky.post(message(4), "mean") for _ in range(2))
    first.wait()
    flaky.commit()
    second.wait()
    with pytest.raises(RoundAborted, match="round 2"):
        flaky.commit()


def test_a_round_that_nobody_waits_for_keeps_its_number() -> None:
    flaky = Flaky(SoloLink(), {2})
    _, second = (flaky.post(message(4), "mean") for _ in range(2))
    second.wait()
    with pytest.raises(RoundAborted, match="round 2"):
        flaky.commit()


def test_an_abort_in_the_exchange_comes_with_the_wait_of_that_round() -> None:
    flaky = Flaky(SoloLink(), {1}, at="exchange")
    first, second = (flaky.post(message(4, v), "mean") for v in (1.0, 2.0))
    assert second.wait()[0].data.tolist() == [2]
    with pytest.raises(RoundAborted, match="round 1 was aborted by a Flaky link in the exchange"):
        first.wait()


def test_a_commit_without_any_round_is_none_of_its_business() -> None:
    Flaky(SoloLink(), {1}).commit()


def test_the_place_of_the_abort_is_checked() -> None:
    with pytest.raises(ConfigError, match="at must be one of 'commit', 'exchange', got 'post'"):
        Flaky(SoloLink(), {1}, at="post")


# --- Straggler ---------------------------------------------------------------------------------------------------------------


def test_a_straggler_moves_its_own_clock_and_everyone_meets_it_at_the_next_exchange() -> None:
    def worker(bare: Link) -> tuple[float, float]:
        link = Straggler(bare, 2.0) if bare.rank == 1 else bare
        for _ in range(3):
            link.tick()
        before = link.now()
        link.mean(message(4))
        return before, link.now()

    assert World(3, step_time=1.0).run(worker) == [(3.0, 9.0), (9.0, 9.0), (3.0, 9.0)]


def test_no_delay_is_no_difference() -> None:
    def worker(bare: Link) -> float:
        link = Straggler(bare, 0.0)
        link.tick()
        return link.now()

    assert World(2, step_time=1.5).run(worker) == [1.5, 1.5]


def test_on_a_real_link_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("thinwire.links.base.time", clock)
    link = Straggler(SoloLink(), 0.02)
    link.tick()
    link.tick()
    assert clock.slept == [0.02, 0.02]


@pytest.mark.parametrize("bad", [-1.0, float("nan")])
def test_what_is_no_delay_is_refused_with_its_value(bad: float) -> None:
    with pytest.raises(ConfigError, match=f"delay .* got {bad}"):
        Straggler(SoloLink(), bad)


# --- All together ------------------------------------------------------------------------------------------------------------


def test_decorators_compose() -> None:
    """Metered sees the throttle's seconds, the flaky round is thrown away on all, and stragglers reach the clock."""
    network = Network(bandwidth=8.0, latency=0.25)
    wire = network.seconds("mean", [40, 40])

    def worker(bare: Link) -> tuple:
        flaky = Flaky(Straggler(bare, 3.0), {2}, at="commit")
        link = Metered(Throttled(flaky, network))
        seen = []
        for _ in range(3):
            link.tick()
            result = link.mean(message(40, 10.0 * bare.rank)).data[0].item()
            try:
                link.commit()
            except RoundAborted:
                result = None
            seen.append(result)
        return seen, link.meter.totals, link.now()

    for seen, totals, clock in World(2, step_time=1.0).run(worker):
        assert seen == [5.0, None, 5.0]
        assert (totals.rounds, totals.payload, totals.sent) == (3, 120, 120)
        assert clock == pytest.approx(3 * (1.0 + 3.0 + wire))
        assert totals.waiting == pytest.approx(3 * wire)
