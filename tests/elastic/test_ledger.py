"""No block of samples is lost or counted twice, whatever workers do."""

from __future__ import annotations

import random

import pytest

from tests.tiers import examples
from thinwire.core.ledger import GRACE, Ledger
from thinwire.errors import WireError


def _run(seed: int, rounds: int = 40, workers: int = 6) -> tuple[list[int], Ledger]:
    """A random run: members die, are late and come in a later round, leave, and come back with nothing."""
    draw, ledger, done = random.Random(seed), Ledger(), []
    alive, late = set(range(4)), set()
    ledger.settle(counted={}, hello=alive, bye=(), expected=sorted(alive))
    expected = sorted(alive)
    for _ in range(rounds):
        alive -= {who for who in alive if draw.random() < 0.05}
        late = {who for who in alive if draw.random() < 0.2}
        counted = {who for who in alive - late if who in expected or draw.random() < 0.7}
        bye = {who for who in alive - counted if draw.random() < 0.02}
        hello = {who for who in range(workers) if who not in alive and draw.random() < 0.1}
        alive = (alive | hello) - bye
        expected = sorted((counted | hello) - bye)
        worked = {who: draw.randint(0, len(ledger.held.get(who, []))) for who in counted}
        done += ledger.settle(counted=worked, hello=hello, bye=bye, expected=expected)
    return done, ledger


def test_no_block_is_lost_or_counted_twice_in_thousands_of_random_runs() -> None:
    total = 0
    for seed in range(examples(6000)):
        done, ledger = _run(seed)
        still = [*ledger.debt, *(block for blocks in ledger.held.values() for block in blocks)]
        assert len(set(done)) == len(done) == ledger.done, "none is counted twice"
        assert sorted(done + still) == list(range(ledger.cursor)), "none is lost"
        total += len(done)
    assert total > 50 * examples(6000)


def test_blocks_of_one_who_is_gone_are_issued_again_before_new_ones() -> None:
    ledger = Ledger()
    ledger.settle(counted={}, hello=(0, 1), bye=(), expected=(0, 1))
    assert (ledger.block_of(0), ledger.block_of(1), ledger.block_of(2)) == (0, 1, None)
    for _ in range(GRACE):  # worker 1 may be late
        ledger.settle(counted={0: 1}, hello=(), bye=(), expected=(0,))
        assert ledger.held[1] == [1, 3], "once it may train on, with a block of its own"
    ledger.settle(counted={0: 1}, hello=(), bye=(), expected=(0,))
    assert ledger.held == {0: [1]} and ledger.debt == [3]


def test_one_who_comes_back_with_nothing_is_not_credited_for_what_it_held() -> None:
    ledger = Ledger()
    ledger.settle(counted={}, hello=(0, 1), bye=(), expected=(0, 1))
    assert ledger.settle(counted={0: 1}, hello=(1,), bye=(), expected=(0, 1)) == [0]
    assert ledger.held == {0: [1], 1: [2]}, "its block went to the next in turn"
    assert ledger.settle(counted={0: 1, 1: 1}, hello=(), bye=(), expected=()) == [1, 2]


@pytest.mark.parametrize(("worked", "done"), [(2, [2, 1, 3]), (1, [2, 1]), (0, [2]), (9, [2, 1, 3])])
def test_one_who_is_late_is_credited_for_what_it_has_worked_on(worked: int, done: list[int]) -> None:
    ledger = Ledger()
    ledger.settle(counted={}, hello=(0, 1), bye=(), expected=(0, 1))
    ledger.settle(counted={0: 1}, hello=(), bye=(), expected=(0,))
    assert ledger.held[1] == [1, 3] and [ledger.up_to(1, block) for block in (1, 3, 2, None)] == [1, 2, 0, 0]
    assert ledger.settle(counted={0: 1, 1: worked}, hello=(), bye=(), expected=(0, 1)) == done
    again = [block for block in (1, 3) if block not in done]
    assert [ledger.block_of(0), ledger.block_of(1)] == [*again, 4, 5][:2], "what it had not begun is issued first"


def test_it_survives_json_and_refuses_what_does_not_add_up() -> None:
    _, ledger = _run(3)
    again = Ledger.from_json(ledger.to_json())
    assert again.to_json() == ledger.to_json()
    for damage in ({"cursor": ledger.cursor + 1}, {"debt": [0, 0]}, {"held": 7}, {"held": {"x": [1]}}):
        with pytest.raises(WireError):
            Ledger.from_json(ledger.to_json() | damage)
