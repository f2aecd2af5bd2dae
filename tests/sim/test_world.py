"""World: the same bits from run to run, clocks that follow the formula, and failures that name who and stop the rest."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.clock import Clock
from thinwire.codecs import Dense
from thinwire.core.average import average
from thinwire.errors import ConfigError, LinkError
from thinwire.links import Link
from thinwire.network import Network
from thinwire.payload import Payload
from thinwire.sim import World


def message(value: float = 1.0, length: int = 2, *, purpose: str = "round") -> Payload:
    return Payload(torch.full((length,), float(value)), purpose=purpose)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


# --- Exchanges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_rank_order_on_every_worker(size: int) -> None:
    def worker(link: Link) -> tuple:
        assert link.size == size
        gathered = link.all_gather(Payload(torch.full((link.rank,), float(link.rank)), fixed=False))
        return link.rank, [p.data.tolist() for p in gathered], link.mean(message(link.rank)).data.tolist()

    mean = [(size - 1) / 2] * 2
    assert World(size).run(worker) == [(r, [[float(q)] * q for q in range(size)], mean) for r in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions_go_in_rank_order_bit_for_bit(size: int, dtype: torch.dtype) -> None:
    parts = [(torch.randn(257) * 10.0 ** (r % 3)).to(dtype) for r in range(size)]
    total = parts[0].clone()
    for p in parts[1:]:
        total += p
    total /= size
    backwards = parts[-1].clone()
    for p in reversed(parts[:-1]):
        backwards += p
    backwards /= size
    assert size == 2 or not torch.equal(total, backwards), "the test needs numbers whose sum depends on the order"
    for mean in World(size).run(lambda link: link.mean(Payload(parts[link.rank].clone())).data):
        assert torch.equal(mean, total)


def test_each_worker_owns_its_mean_and_the_posted_message_is_not_reduced_into() -> None:
    def worker(link: Link) -> tuple[list, list]:
        mine = message(link.rank)
        mean = link.mean(mine).data
        mean.fill_(100 + link.rank)
        link.mean(message())  # everyone has written by now
        return mean.tolist(), mine.data.tolist()

    assert World(3).run(worker) == [([100.0 + r] * 2, [float(r)] * 2) for r in range(3)]


def test_several_exchanges_may_be_under_way_and_waited_for_in_any_order() -> None:
    def worker(link: Link) -> list[float]:
        tickets = [link.post(message(10 * i + link.rank), "mean") for i in range(4)]
        order = [2, 0, 3, 1] if link.rank else [0, 1, 2, 3]
        seen = {i: tickets[i].wait()[0].data[0].item() for i in order}
        assert tickets[0].wait()[0].data[0].item() == seen[0], "waiting again changes nothing"
        return [seen[i] for i in range(4)]

    assert World(2).run(worker) == [[0.5, 10.5, 20.5, 30.5]] * 2


def test_control_messages_are_exchanges_like_any_other() -> None:
    def worker(link: Link) -> list[str]:
        return [link.mean(message(purpose=p)).purpose for p in ("handshake", "round", "alarm")]

    assert World(2).run(worker) == [["handshake", "round", "alarm"]] * 2


# --- Determinism -------------------------------------------------------------------------------------------------------------


def _train(link: Link) -> tuple[list[Tensor], list[tuple]]:
    """Uses every global generator, before and after exchanges, and a model that depends on all of them."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    draws = []
    for step in range(5):
        draws += [draw() for _ in range(1 + (link.rank + step) % 3)]
        x = torch.randn(4, 6) * random.random() + float(np.random.randn())
        model.zero_grad()
        model(x).square().mean().backward()
        grads, _ = average(link, Dense(), [p.grad for p in model.parameters()])
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
    return [p.detach().clone() for p in model.parameters()], draws


def test_runs_are_the_same_bit_for_bit_whatever_the_caller_drew_before() -> None:
    runs = []
    for seed in (1, 2, 3):
        seed_all(seed)
        runs.append(World(3, seed=7).run(_train))
    for run in runs[1:]:
        for (params, draws), (first_params, first_draws) in zip(run, runs[0], strict=True):
            assert draws == first_draws
            assert all(torch.equal(a, b) for a, b in zip(params, first_params, strict=True))
    other = World(3, seed=8).run(_train)
    assert other[0][1] != runs[0][0][1], "another seed is another run"


def test_each_worker_draws_what_it_would_draw_alone() -> None:
    def worker(link: Link) -> list[tuple]:
        draws = []
        for step in range(4):
            draws += [draw() for _ in range(link.rank + step)]
            link.mean(message())
        return draws

    together = World(3, seed=20).run(worker)
    for rank, draws in enumerate(together):
        seed_all(20 + rank)
        assert draws == [draw() for _ in range(len(draws))]


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "raises"])
def test_the_callers_generators_are_as_they_were(fails: bool) -> None:
    def worker(link: Link) -> None:
        draw()
        link.mean(message())
        if fails:
            raise ZeroDivisionError

    seed_all(11)
    expected = draw()
    seed_all(11)
    try:
        World(2).run(worker)
    except ZeroDivisionError:
        assert fails
    seen = dict(zip(("torch", "numpy", "python"), draw(), strict=True))
    assert seen == dict(zip(("torch", "numpy", "python"), expected, strict=True))


def test_a_world_can_run_again_from_scratch() -> None:
    def worker(link: Link) -> tuple:
        link.tick()
        return draw(), link.mean(message(link.rank)).data.tolist(), link.now()

    world = World(3, step_time=1.0, network=Network(latency=0.5))
    first = world.run(worker)
    assert world.run(worker) == first
    assert world.clocks == [first[0][2]] * 3


def test_a_world_can_run_again_after_a_failure() -> None:
    def bad(link: Link) -> None:
        link.mean(message())
        if link.rank == 1:
            raise ZeroDivisionError
        link.mean(message())

    world = World(2)
    with pytest.raises(ZeroDivisionError):
        world.run(bad)
    assert world.run(lambda link: link.mean(message(link.rank)).data.tolist()) == [[0.5, 0.5]] * 2


def test_grad_mode_and_autocast_stay_with_their_worker() -> None:
    def worker(link: Link) -> tuple:
        weight = torch.ones(2, 2, requires_grad=True)
        if link.rank == 0:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                link.mean(message())
                inside = weight @ weight
                link.mean(message())
            return inside.requires_grad, inside.dtype
        link.mean(message())  # worker 0 waits inside its contexts meanwhile
        product = weight @ weight
        link.mean(message())
        return product.requires_grad, product.dtype

    results = World(3).run(worker)
    assert results == [(False, torch.bfloat16), (True, torch.float32), (True, torch.float32)]
    assert torch.is_grad_enabled()


# --- Clocks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["mean", "gather"])
def test_an_exchange_ends_when_the_last_has_posted_plus_what_the_network_takes(op) -> None:
    network = Network(bandwidth=(8.0, 80.0, 40.0), latency=(0.5, 0.0, 0.25))

    def worker(link: Link) -> tuple[float, float]:
        for _ in range(3):
            link.tick()
        before = link.now()
        link.post(message(length=6), op).wait()
        return before, link.now()

    world = World(3, network=network, step_time=[1.0, 4.0, 2.0])
    end = 12.0 + network.seconds(op, [24, 24, 24])
    assert world.run(worker) == [(3.0, end), (12.0, end), (6.0, end)]
    assert world.clocks == [end] * 3
    assert world.seconds == end


def test_messages_of_different_lengths_are_charged_by_their_lengths() -> None:
    network = Network(bandwidth=8.0)

    def worker(link: Link) -> float:
        link.all_gather(Payload(torch.zeros(10 * link.rank, dtype=torch.uint8), fixed=False))
        return link.now()

    assert World(3, network=network, step_time=0.0).run(worker) == [network.seconds("gather", [0, 10, 20])] * 3


def test_computing_hides_the_wire_and_workers_hide_it_each_for_itself() -> None:
    """A wire of 10 s, posted at 0: a worker that computes for 4 s waits 6 s, one that computes for 12 s does not wait."""

    def worker(link: Link) -> tuple[float, float]:
        ticket = link.post(Payload(torch.zeros(10, dtype=torch.uint8)), "gather")
        for _ in range(2):
            link.tick()
        before = link.now()
        ticket.wait()
        return before, link.now()

    assert World(2, network=Network(bandwidth=8.0), step_time=[2.0, 6.0]).run(worker) == [(4.0, 10.0), (12.0, 12.0)]


def queue_transfers(link: Link) -> list[float]:
    """Post 10, 5 and 20 bytes at once, then 10 after 100 idle seconds; the times at which they have arrived."""
    tickets = [link.post(Payload(torch.zeros(n, dtype=torch.uint8)), "gather") for n in (10, 5, 20)]
    seen = []
    for ticket in tickets:
        ticket.wait()
        seen.append(link.now())
    link.elapse(100.0)  # an idle wire saves nothing up
    link.all_gather(Payload(torch.zeros(10, dtype=torch.uint8)))
    return [*seen, link.now()]


def test_queued_exchanges_share_one_wire() -> None:
    assert World(2, network=Network(bandwidth=8.0), step_time=0.0).run(queue_transfers) == [[10.0, 15.0, 35.0, 145.0]] * 2


def test_without_exchanges_clocks_are_independent() -> None:
    def worker(link: Link) -> None:
        for _ in range(5):
            link.tick()
        link.elapse(0.5 * link.rank)
        link.elapse(-3.0)  # time does not go back

    world = World(3, step_time=(1.0, 2.0, 0.0))
    world.run(worker)
    assert world.clocks == [5.0, 10.5, 1.0]
    assert world.seconds == 10.5


def test_simulated_time_is_not_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("thinwire.sim.world.time", clock)
    monkeypatch.setattr("thinwire.links.base.time", clock)

    def worker(link: Link) -> None:
        link.elapse(1e6)
        link.tick()
        link.mean(message())

    world = World(4, step_time=1e6, network=Network(latency=1e6))
    world.run(worker)
    assert world.seconds == 2e6 + 6 * 1e6
    assert (clock.now, clock.slept) == (0.0, [])


def test_no_step_time_charges_what_each_worker_really_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that the time of the others, who run while this one waits, is not charged to it."""
    clock = Clock()
    monkeypatch.setattr("thinwire.sim.world.time", clock)

    def worker(link: Link) -> tuple[float, float]:
        clock.advance(0.25 + 2.0 * link.rank)
        link.tick()
        stepped = link.now()
        link.mean(message())
        clock.advance(0.5)
        link.tick()
        return stepped, link.now()

    (first, first_end), (second, second_end) = World(2).run(worker)
    assert (first, second) == (0.25, 2.25)
    assert (first_end, second_end) == (2.75, 2.75), "both were moved to the end of the exchange"


# --- Failures ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_exception_reaches_the_caller_with_the_rank_and_the_others_stop(culprit: int) -> None:
    told: dict[int, LinkError] = {}

    def worker(link: Link) -> None:
        link.mean(message())
        if link.rank == culprit:
            raise KeyError("lost data")
        for _ in range(1000):
            try:
                link.mean(message())
            except LinkError as error:
                told[link.rank] = error
                raise

    with pytest.raises(KeyError, match="lost data") as caught:
        World(3).run(worker)
    assert caught.value.__notes__ == [f"raised by simulated worker {culprit} of 3"]
    others = {0, 1, 2} - {culprit}
    assert told.keys() == others
    for rank, error in told.items():
        assert error.lost == (culprit,)
        assert f"rank {rank}, exchange 2: rank {culprit} failed: KeyError('lost data')" in str(error)
    assert not [t for t in threading.enumerate() if t.name.startswith("sim-worker")], "no thread is left behind"


def test_a_worker_that_swallows_the_error_of_another_cannot_go_on() -> None:
    def worker(link: Link) -> None:
        if link.rank == 0:
            raise ZeroDivisionError
        for _ in range(3):
            try:
                link.mean(message())
            except LinkError:
                continue
            raise AssertionError("an exchange without worker 0 came to an end")

    with pytest.raises(ZeroDivisionError):
        World(2).run(worker)


def test_who_has_not_begun_when_another_fails_never_begins() -> None:
    begun = []

    def worker(link: Link) -> None:
        begun.append(link.rank)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        World(3).run(worker)
    assert begun == [0]


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_worker_that_ends_early_is_named_to_those_who_wait_for_it(leaver: int) -> None:
    def worker(link: Link) -> None:
        link.mean(message())
        if link.rank != leaver:
            link.mean(message())

    with pytest.raises(LinkError, match=f"exchange 2: rank {leaver} will never take part") as caught:
        World(3).run(worker)
    assert caught.value.lost == (leaver,)


def test_several_that_end_early_are_all_named() -> None:
    def worker(link: Link) -> None:
        if link.rank == 1:
            link.mean(message())

    with pytest.raises(LinkError, match="rank 1, exchange 1: rank 0, rank 2, rank 3 will never take part") as caught:
        World(4).run(worker)
    assert caught.value.lost == (0, 2, 3)


def test_waiting_in_vain_can_be_survived() -> None:
    """Nobody failed: who catches the error may end in peace."""

    def worker(link: Link) -> tuple[int, ...] | None:
        if link.rank == 1:
            return None
        with pytest.raises(LinkError) as caught:
            link.mean(message())
        return caught.value.lost

    assert World(3).run(worker) == [(1,), None, (1,)]


def test_different_operations_are_refused() -> None:
    def worker(link: Link) -> None:
        link.mean(message())
        link.post(message(), "gather" if link.rank else "mean").wait()

    with pytest.raises(LinkError, match=r"exchange 2: posted (mean|gather) for 'round' while rank") as caught:
        World(2).run(worker)
    assert all(word in str(caught.value) for word in ("mean", "gather", "rank 0", "rank 1"))


def test_different_purposes_are_refused() -> None:
    def worker(link: Link) -> None:
        link.all_gather(message(purpose="alarm" if link.rank == 1 else "round"))

    with pytest.raises(LinkError, match="rank 1, exchange 1: posted gather for 'alarm' while rank 0 posted gather for 'round'"):
        World(2).run(worker)


def test_means_of_different_lengths_are_refused_with_all_lengths() -> None:
    with pytest.raises(LinkError, match=r"lengths or dtypes: 4 bytes of float32, 8 bytes of float32, 4 bytes"):
        World(3).run(lambda link: link.mean(message(length=1 + link.rank % 2)))


def test_gathers_said_to_be_of_one_length_are_held_to_it() -> None:
    """A real link does not exchange lengths for them, so the simulator must not let them pass either."""
    with pytest.raises(LinkError, match="length"):
        World(2).run(lambda link: link.all_gather(message(length=1 + link.rank)))


def test_a_running_world_cannot_be_run() -> None:
    world = World(2)
    with pytest.raises(ConfigError, match="already running"):
        world.run(lambda link: world.run(lambda inner: None))
    assert world.run(lambda link: link.rank) == [0, 1]


# --- Settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "2", None])
def test_what_is_no_size_is_refused_with_its_value(bad: object) -> None:
    with pytest.raises(ConfigError, match="size must be a whole number of at least 1") as caught:
        World(bad)  # type: ignore[arg-type]
    assert str(caught.value).endswith(f"got {bad!r}")


def test_lists_must_have_one_entry_per_worker() -> None:
    with pytest.raises(ConfigError, match="step_time lists 2 workers, but there are 3"):
        World(3, step_time=[1.0, 2.0])
    with pytest.raises(ConfigError, match="bandwidth lists 2 workers, but there are 3"):
        World(3, network=Network(bandwidth=(1.0, 2.0)))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), [1.0, -2.0]])
def test_what_is_no_step_time_is_refused_with_its_value(bad: object) -> None:
    with pytest.raises(ConfigError, match="step_time must be zero or more seconds") as caught:
        World(2, step_time=bad)  # type: ignore[arg-type]
    assert str(caught.value).endswith(f"got {bad!r}")


# --- Many workers ------------------------------------------------------------------------------------------------------------


def test_sixteen_workers_end_fifty_steps_with_the_same_parameters() -> None:
    """A model of 100,000 parameters, averaged at every step. `benchmarks.overhead` says how long that takes."""

    def worker(link: Link) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(100, 500), torch.nn.ReLU(), torch.nn.Linear(500, 100))
        noise = torch.Generator().manual_seed(link.rank)
        for _ in range(50):
            model.zero_grad()
            model(torch.randn(8, 100, generator=noise)).square().mean().backward()
            link.tick()
            grads, _ = average(link, Dense(), [p.grad for p in model.parameters()])
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.01 * g
        return sum(p.numel() for p in model.parameters()), model[0].weight.detach()

    results = World(16, step_time=0.1).run(worker)
    assert results[0][0] >= 100_000
    assert all(torch.equal(weight, results[0][1]) for _, weight in results)
