"""Swaps in pairs in the simulator: clocks that only the two share, and pairings that do not fit."""

from __future__ import annotations

import pytest
import torch

from thinwire.errors import LinkError
from thinwire.links import Link
from thinwire.network import Network
from thinwire.payload import Payload
from thinwire.sim import World


def message(partner: int | None, length: int = 10, *, purpose: str = "round") -> Payload:
    return Payload(torch.zeros(length, dtype=torch.uint8), purpose=purpose, partner=partner)


def swap(link: Link, partner: int | None, length: int = 10) -> list[Payload]:
    return link.post(message(partner, length), "pair").wait()


# --- Clocks ------------------------------------------------------------------------------------------------------------------


def test_a_straggler_delays_its_partner_only() -> None:
    """Posted at 1, 1, 9, 2 and 3 s; 10 bytes at 1 byte a second and half a second of latency; rank 4 meets nobody."""

    def worker(link: Link) -> float:
        link.tick()
        swap(link, {0: 1, 1: 0, 2: 3, 3: 2}.get(link.rank))
        return link.now()

    world = World(5, network=Network(bandwidth=8.0, latency=0.5), step_time=[1.0, 1.0, 9.0, 2.0, 3.0])
    assert world.run(worker) == [11.5, 11.5, 19.5, 19.5, 3.0]


def test_only_the_wires_of_the_two_count() -> None:
    network = Network(bandwidth=(8.0, 80.0, 40.0, 160.0), latency=(9.0, 0.5, 9.0, 0.25), down=(8.0, 80.0, 8.0, 20.0))

    def worker(link: Link) -> float:
        swap(link, {0: 2, 2: 0, 1: 3, 3: 1}[link.rank])
        return link.now()

    # Ranks 0 and 2: rank 0 needs 10 s to send. Ranks 1 and 3: rank 3 needs 80 / 20 = 4 s to receive.
    assert World(4, network=network, step_time=0.0).run(worker) == [19.0, 4.5, 19.0, 4.5]


def test_computing_hides_the_wire() -> None:
    def worker(link: Link) -> tuple[float, float]:
        ticket = link.post(message(1 - link.rank), "pair")
        link.tick()
        before = link.now()
        ticket.wait()
        return before, link.now()

    assert World(2, network=Network(bandwidth=8.0), step_time=[4.0, 12.0]).run(worker) == [(4.0, 10.0), (12.0, 12.0)]


def test_a_pairs_wire_is_its_own_until_all_meet() -> None:
    """Ranks 0 and 1 queue two swaps of 10 s, ranks 2 and 3 two of 5 s; a collective waits for both wires."""

    def worker(link: Link) -> list[float]:
        tickets = [link.post(message(link.rank ^ 1, 10 if link.rank < 2 else 5), "pair") for _ in range(2)]
        tickets.append(link.post(message(None, 1), "gather"))
        seen = []
        for ticket in tickets:
            ticket.wait()
            seen.append(link.now())
        return seen

    results = World(4, network=Network(bandwidth=8.0), step_time=0.0).run(worker)
    assert results == [[10.0, 20.0, 23.0]] * 2 + [[5.0, 10.0, 23.0]] * 2


def test_a_pair_may_run_ahead_of_the_others() -> None:
    """Ranks 0 and 1 meet five times while rank 2 is late by 100 s; rank 1 waits for it only when it meets it."""

    def worker(link: Link) -> tuple[float, float]:
        link.elapse(100.0 if link.rank == 2 else 0.0)
        for _ in range(5):
            swap(link, {0: 1, 1: 0}.get(link.rank))
        before = link.now()
        swap(link, {1: 2, 2: 1}.get(link.rank))
        return before, link.now()

    world = World(3, step_time=1.0)
    assert world.run(worker) == [(0.0, 0.0), (0.0, 100.0), (100.0, 100.0)]
    assert not any(channel.open for channel in world.channels), "nothing is kept of what everybody has collected"


# --- What does not fit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partners", "said"),
    [
        ((1, 2, 1), r"rank 1 has rank 2 for its partner, but rank 0 has rank 1 for its partner"),
        ((None, 0, None), r"rank 1 has rank 0 for its partner, but rank 0 has no partner"),
        ((1, None, None), r"rank 1 has no partner, but rank 0 has rank 1 for its partner"),
        ((2, None, 1), r"rank 2 has rank 1 for its partner, but rank 0 has rank 2 for its partner"),
    ],
)
def test_pairings_that_differ_are_refused_with_both(partners: tuple[int | None, ...], said: str) -> None:
    with pytest.raises(LinkError, match=r"exchange 1: " + said + ": all workers must pair alike"):
        World(3).run(lambda link: swap(link, partners[link.rank]))


def test_messages_of_different_lengths_are_refused() -> None:
    with pytest.raises(
        LinkError, match="cannot pair messages of different lengths or dtypes: 10 bytes of uint8, 11 bytes of uint8"
    ):
        World(3).run(lambda link: swap(link, {0: 1, 1: 0}.get(link.rank), 10 + link.rank))


def test_another_operation_at_the_same_place_is_refused() -> None:
    with pytest.raises(LinkError, match="rank 2, exchange 1: posted gather for 'round' while rank 0 posted pair for 'round'"):
        World(3).run(lambda link: link.post(message({0: 1, 1: 0}.get(link.rank)), "gather" if link.rank == 2 else "pair"))


def test_a_partner_that_ends_early_is_named_and_the_others_go_on() -> None:
    def worker(link: Link) -> tuple[str, tuple[int, ...]] | None:
        swap(link, link.rank ^ 1)
        if link.rank == 3:
            return None
        try:
            swap(link, link.rank ^ 1)
        except LinkError as error:
            return str(error), error.lost
        return None

    assert World(4).run(worker) == [None, None, ("rank 2, exchange 2: rank 3 will never take part", (3,)), None]


def test_two_that_wait_for_each_other_in_another_order_are_found() -> None:
    """Rank 0 swaps and then gathers, rank 1 gathers first: both would wait for ever."""

    def worker(link: Link) -> None:
        if link.rank == 0:
            swap(link, 1)
        link.all_gather(message(None, purpose="alarm"))

    with pytest.raises(LinkError, match="posted gather for 'alarm' while rank 0 posted pair for 'round'"):
        World(2).run(worker)


def test_a_worker_that_fails_is_named_to_its_partner() -> None:
    told = []

    def worker(link: Link) -> None:
        if link.rank == 1:
            raise KeyError("lost data")
        try:
            swap(link, 1)
        except LinkError as error:
            told.append(str(error))
            raise

    with pytest.raises(KeyError):
        World(2).run(worker)
    assert told == ["rank 0, exchange 1: rank 1 failed: KeyError('lost data')"]
