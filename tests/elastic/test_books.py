"""What the books of a run say was trained on is what the workers have trained on: no block is lost, none counts twice.

`test_ledger` shows that the books add up. Here they are compared with what happens: which blocks each worker has taken steps
on, and which of its messages were counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conformance.elastic import at_once
from tests.conformance.training import H, backward, build, model_of
from tests.tiers import first_quick
from thinwire import World
from thinwire.links.base import Link
from thinwire.sim import Churn


@dataclass
class Truth:
    """What the workers of a run did.

    Attributes:
        sent: blocks whose steps are in a message, by its round and sender.
        counted: ids of the messages that counted, by round.
        ledgers: at the end.
    """

    sent: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)
    counted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ledgers: list[dict[str, Any]] = field(default_factory=list)

    def watch(self, opt: Any, link: Any) -> set[int]:
        """Note what a worker sends and what a round counts; returns the blocks that it has worked on since, to be added to."""
        work: set[int] = set()
        send, take, begin = link._send, opt.engine.take, opt.engine.history._begin_with

        def noted_send(raw: bytes, message: Any) -> bool:
            posted = send(raw, message)
            if posted:
                self.sent[message.number, link.rank] = frozenset(work)
            return posted

        def noted_take(decided: Any, exchange: Any) -> bool:
            self.counted[decided.manifest.number] = tuple(decided.manifest.counted)
            counted = take(decided, exchange)
            if decided.mine:
                work.clear()
            return counted

        def noted_begin(state: bytes) -> None:
            begin(state)
            work.clear()

        link._send, opt.engine.take, opt.engine.history._begin_with = noted_send, noted_take, noted_begin
        return work

    def faults(self) -> dict[str, set[int]]:
        """Blocks that were lost, and blocks that are in the model twice or will be."""
        times = Counter(b for number, ids in self.counted.items() for who in ids for b in self.sent[number, who])
        ledger = max(self.ledgers, key=lambda ledger: ledger["done"])
        still = {*ledger["debt"], *(b for held in ledger["held"].values() for b in held)}
        return {
            "lost": set(range(ledger["cursor"])) - set(times) - still,
            "twice": {b for b, n in times.items() if n > 1} | (set(times) & still),
        }


def train(name: str, churn: Churn, steps: int, size: int = 3, step_time: Any = 0.1) -> tuple[Truth, World]:
    """Train in the simulator, and note what happens."""
    truth, world = Truth(), World(size, step_time=step_time, churn=churn)

    def worker(link: Link) -> None:
        model = model_of()
        opt = build(name, model.parameters(), link, **at_once(name))
        work = truth.watch(opt, link)
        opt.join()
        while opt.steps < steps and not opt.ended:
            work.add(opt.block)
            backward(model, opt.block, opt.block_step)
            opt.step()
            opt.zero_grad()
        opt.finish()
        truth.ledgers.append(opt.engine.ledger.to_json())

    world.run(worker)
    return truth, world


METHODS = first_quick(["diloco", "demo", "decoupled-diloco", "mt-dao"])


@pytest.mark.parametrize("name", METHODS)
def test_a_worker_that_sends_what_it_kept_is_not_credited_for_a_block_that_it_has_not_begun(name: str) -> None:
    """It was late, has been given another block meanwhile, and sends at once what it has of the first."""
    churn = Churn(link={"first_wait": 0.2, "patience": 1.0})
    truth, _ = train(name, churn, steps=24 * (H if name != "demo" else 2), step_time=[0.1, 0.1, 0.55])
    assert any(2 in ids for ids in truth.counted.values())
    assert truth.faults() == {"lost": set(), "twice": set()}


@pytest.mark.parametrize("name", METHODS)
def test_what_was_issued_to_others_is_not_sent_any_more(name: str) -> None:
    """A worker is frozen for more rounds than its blocks are kept for it."""
    frozen, steps = list[int](), 1 if name == "demo" else H  # of a round
    truth, world = Truth(), World(3, step_time=0.1, churn=Churn(link={"first_wait": 0.2, "checkpoint_every": 0}))

    def worker(link: Link) -> None:
        model = model_of()
        opt = build(name, model.parameters(), link, **at_once(name))
        work = truth.watch(opt, link)
        opt.join()
        while opt.steps < 60 * steps and not opt.ended:
            work.add(opt.block)
            backward(model, opt.block, opt.block_step)
            if link.rank == 2 and opt.rounds == 4 and not frozen:
                frozen.append(1)
                link.elapse(0.1 * 25 * steps)
            opt.step()
            opt.zero_grad()
        opt.finish()
        truth.ledgers.append(opt.engine.ledger.to_json())

    world.run(worker)
    assert frozen and any(2 in ids for number, ids in truth.counted.items() if number > 30), "it comes back"
    assert truth.faults() == {"lost": set(), "twice": set()}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", first_quick(range(3)))
def test_no_block_is_lost_or_counted_twice_in_a_storm(name: str, seed: int) -> None:
    churn = Churn(death_rate=0.15, restart=0.4, loss=0.1, tail=0.1, seed=seed, link={"checkpoint_every": 4, "first_wait": 0.5})
    truth, world = train(name, churn, steps=30 * (H if name != "demo" else 1), size=4)
    assert world.habitat.deaths
    assert truth.faults() == {"lost": set(), "twice": set()}
