"""Swaps in pairs, on every kind of link: who gets what, what it costs, and that nobody else is waited for."""

from __future__ import annotations

import os
import signal
import uuid
from typing import Any

import pytest
import torch

from tests.links.test_torch import VERY_LONG, Broken, Job
from tests.processes import LIMIT, Pool, hear, own_group, tell
from thinwire.errors import LinkError, RoundAborted
from thinwire.links import Flaky, Link, Metered, SoloLink, Straggler, Throttled, TorchLink
from thinwire.network import Network
from thinwire.payload import Payload
from thinwire.sim import World


def partner(rank: int, size: int, turn: int) -> int | None:
    """A round robin: in turn t the ranks whose sum is t modulo `size` meet; who would meet itself stays alone."""
    other = (turn - rank) % size
    return None if other == rank else other


def message(value: float, other: int | None, length: int = 4, *, purpose: str = "round", fixed: bool = True) -> Payload:
    return Payload(torch.full((length,), float(value)), purpose=purpose, fixed=fixed, partner=other)


# --- The contract of a link --------------------------------------------------------------------------------------------------


def _swap_with_all(link: Link) -> list[Any]:
    rank, size = link.rank, link.size
    seen: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for turn in range(size):
            data = torch.tensor([rank, 7]).to(dtype)
            result = link.post(Payload(data, purpose="swap", partner=partner(rank, size, turn)), "pair").wait()
            assert all((p.data.dtype, p.purpose) == (dtype, "swap") for p in result)
            seen.append([p.data.tolist() for p in result])
    # Several under way, two of them with the same partner, around a collective, and waited for backwards.
    tickets = [link.post(message(rank + 10 * i, partner(rank, size, turn)), "pair") for i, turn in enumerate((0, 1, 1))]
    tickets.append(link.post(message(rank, None), "mean"))
    tickets.append(link.post(message(rank + 50, partner(rank, size, 1)), "pair"))
    late = [[p.data.tolist() for p in ticket.wait()] for ticket in reversed(tickets)]
    assert late == [[p.data.tolist() for p in ticket.wait()] for ticket in reversed(tickets)], "waiting again changes nothing"
    return [*seen, late]


def _expected(rank: int, size: int) -> list[Any]:
    def pair(turn: int) -> list[int]:
        return sorted({rank, rank if (other := partner(rank, size, turn)) is None else other})

    seen: list[Any] = [[[r, 7] for r in pair(turn)] for _ in range(3) for turn in range(size)]
    late = [[[r + 10.0 * i] * 4 for r in pair(turn)] for i, turn in enumerate((0, 1, 1))]
    late += [[[(size - 1) / 2] * 4], [[r + 50.0] * 4 for r in pair(1)]]
    return [*seen, late[::-1]]


def test_alone_one_gets_ones_own() -> None:
    assert _swap_with_all(SoloLink()) == _expected(0, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["sim", "torch"])
def test_both_members_get_the_lower_ranks_message_and_then_the_higher_ranks(kind: str, size: int, pool: Pool) -> None:
    everyone = World(size).run(_swap_with_all) if kind == "sim" else pool.run(_swap_with_all, size)
    for rank, seen in enumerate(everyone):
        assert seen == _expected(rank, size)


def _post_what_cannot_be(link: Link) -> list[str]:
    said = []
    for bad in (message(1, None, fixed=False), message(1, link.rank), message(1, link.size), message(1, -1)):
        with pytest.raises(LinkError) as caught:
            link.post(bad, "pair")
        said.append(str(caught.value))
    link.mean(message(1, None))  # nothing is broken
    return said


def test_pairs_that_cannot_be_are_refused_at_once(pool: Pool) -> None:
    for said in (_post_what_cannot_be(SoloLink()), *World(2).run(_post_what_cannot_be), *pool.run(_post_what_cannot_be, 2)):
        assert "must have a fixed length, got fixed=False" in said[0]
        assert all("cannot be paired with rank" in s for s in said[1:])


# --- Nobody else is waited for -----------------------------------------------------------------------------------------------


def _one_is_late(link: Link, event: str) -> list[float]:
    """Ranks 0 and 1 are a pair, so are 2 and 3; rank 3 posts when the first pair is done and its partner has posted."""
    if link.rank == 3:
        hear(f"{event} 0 done", f"{event} 1 done", f"{event} 2 posted")
    ticket = link.post(message(link.rank, link.rank ^ 1), "pair")
    tell(f"{event} {link.rank} posted")
    result = ticket.wait()
    tell(f"{event} {link.rank} done")
    return [p.data[0].item() for p in result]


def test_a_late_worker_delays_its_partner_only(pool: Pool) -> None:
    assert pool.run(_one_is_late, 4, uuid.uuid4().hex) == [[0, 1], [0, 1], [2, 3], [2, 3]]


# --- What an error says ------------------------------------------------------------------------------------------------------


def _deserted(link: Link) -> tuple[str, tuple[int, ...]] | None:
    """Rank 1 leaves rank 0 alone with the second swap; ranks 2 and 3 do not mind."""
    with own_group(link, [0, 1, 2, 3]) as group:
        TorchLink(group, timeout=LIMIT).post(message(1, link.rank ^ 1), "pair").wait()
        if link.rank == 1:
            return None
        mine = TorchLink(group, timeout=1.0 if link.rank == 0 else LIMIT)
        try:
            mine.post(message(1, link.rank ^ 1, 1000), "pair").wait()
        except LinkError as error:
            with pytest.raises(LinkError, match="this link is broken since"):
                mine.post(message(1, link.rank ^ 1), "pair")
            return str(error), error.lost
        return None


def test_a_partner_that_does_not_answer_is_named_after_the_timeout(pool: Pool) -> None:
    told, *others = pool.run(_deserted, 4)
    assert told is not None
    assert told[0].startswith("rank 0, round 1 (swap with rank 1 of 4 kB): no answer within 1 s although every rank is alive")
    assert told[1] == ()
    assert others == [None] * 3


def _killed(rank: int) -> tuple[str, tuple[int, ...]]:
    link = TorchLink(timeout=VERY_LONG)
    link.post(message(1, rank ^ 1), "pair").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LinkError) as caught:
        link.post(message(1, rank ^ 1, 1000), "pair").wait()
    return str(caught.value), caught.value.lost


def test_a_partner_that_is_killed_is_named_long_before_the_timeout() -> None:
    job = Job(2)
    try:
        job.tell(_killed)
        said, lost = job.answer(0)
    finally:
        job.end()
    assert said.startswith("rank 0, round 2 (swap with rank 1 of 4 kB): lost rank 1 (no heartbeat)")
    assert lost == (1,)


def _broken(link: Link) -> str:
    ticket = link.post(message(1, link.rank ^ 1, 1000, purpose="alarm"), "pair")
    works, ticket.work = ticket.work, Broken()  # type: ignore[attr-defined]
    with pytest.raises(LinkError) as caught:
        ticket.wait()
    del works
    return str(caught.value)


def test_control_messages_are_named_as_such(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(_broken, 2)):
        assert said.startswith(f"rank {rank}, the alarm after round 0 (swap with rank {rank ^ 1} of 4 kB)")
        assert said.endswith("[Connection closed by peer]")


# --- What it costs -----------------------------------------------------------------------------------------------------------


def _metered(bare: Link) -> list[tuple]:
    link = Metered(bare)
    for turn in range(bare.size):
        link.post(message(1, partner(bare.rank, bare.size, turn), 300), "pair").wait()
    return [(e.op, e.payload, e.sent, e.received) for e in link.meter.recent] + [link.meter.totals.rounds]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_worker_sends_and_receives_its_message_once_whatever_the_number_of_workers(size: int, pool: Pool) -> None:
    for everyone in (World(size).run(_metered), pool.run(_metered, size)):
        for rank, seen in enumerate(everyone):
            met = [partner(rank, size, turn) is not None for turn in range(size)]
            assert seen == [("pair", 1200, 1200 * there, 1200 * there) for there in met] + [size]


def test_a_swap_that_comes_to_nothing_has_travelled_all_the_same() -> None:
    def worker(bare: Link) -> tuple[int, int]:
        link = Metered(Flaky(bare, {1}, at="exchange"))
        with pytest.raises(RoundAborted):
            link.post(message(1, partner(bare.rank, 3, 0), 300), "pair").wait()
        return link.meter.totals.sent, link.meter.totals.received

    assert World(3).run(worker) == [(0, 0), (1200, 1200), (1200, 1200)]  # ranks 1 and 2 meet


@pytest.mark.parametrize(
    "wrap", [Metered, lambda link: Throttled(link, Network()), lambda link: Flaky(link, ()), lambda link: Straggler(link, 0.0)]
)
def test_decorators_pass_the_partner_on(wrap: Any) -> None:
    assert World(3).run(lambda link: _swap_with_all(wrap(link))) == [_expected(rank, 3) for rank in range(3)]


THIN = Network(bandwidth=(8.0, 16.0, 80.0, 40.0), latency=(0.5, 0.25, 1.0, 0.0), down=(80.0, 8.0, 8.0, 4.0))


def _timeline(bare: Link, network: Network | None) -> list[float]:
    link = bare if network is None else Throttled(bare, network)
    seen = []
    for turn in range(4):
        link.elapse((0.0, 7.0, 3.0, 1.0)[link.rank])
        ticket = link.post(message(1, partner(link.rank, 4, turn)), "pair")
        for _ in range(turn):
            link.tick()
        ticket.wait()
        seen.append(link.now())
    return seen


def test_a_throttled_fast_world_is_a_thin_world_for_pairs_too() -> None:
    throttled = World(4, step_time=1.0).run(lambda link: _timeline(link, THIN))
    thin = World(4, step_time=1.0, network=THIN).run(lambda link: _timeline(link, None))
    for a, b in zip(throttled, thin, strict=True):
        assert a == pytest.approx(b)
