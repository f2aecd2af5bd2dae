"""A training run on an elastic link in the simulator, for any algorithm, that notes the state of every worker."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.conformance.training import ALGORITHMS, backward, build, model_of, named, snapshot
from thinwire import World
from thinwire.core.hashing import hash_tensors
from thinwire.core.optimizer import Algorithm
from thinwire.links.base import Link
from thinwire.sim import Churn


def can_join(name: str) -> bool:
    """Whether the workers of a method have something in common that one who joins could take."""
    cls = ALGORITHMS[name]
    return not cls.in_pairs and "published" not in name and not name.endswith("-by-owners")  # refused: tests/test_owners.py


def at_once(name: str) -> dict[str, Any]:
    """Settings with which a round is applied before the next step."""
    return {"tau": 0} if "tau" in inspect.signature(ALGORITHMS[name].__init__).parameters else {}


elastic_names = named(can_join)


@dataclass
class Notes:
    """What a run showed.

    Attributes:
        states: hashes of the replicated state, by the number of the round after which they were taken.
        workers: who has seen a round, at its end or in passing.
        results: parameters at the end, of workers that reached it.
        counted: rounds in which each worker was counted.
        ledgers: of each worker, at the end.
        deadlines: seconds after which a round was closed without those who were late, as each worker had it at the end.
        world: the simulator.
    """

    states: dict[int, set[int]] = field(default_factory=dict)
    workers: dict[int, set[int]] = field(default_factory=dict)
    results: list[list[Tensor] | None] = field(default_factory=list)
    counted: dict[int, set[int]] = field(default_factory=dict)
    ledgers: list[dict] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    world: World | None = None


def replicated(opt: Algorithm) -> list[Tensor]:
    return [t for tensors in opt.replicated_state().values() for t in tensors]


def train_elastic(name: str, churn: Churn, *, steps: int, size: int = 3, step_time: Any = 0.1, **settings: Any) -> Notes:
    """Train until the run has counted so many steps; batches are those of the blocks."""
    notes = Notes(world=World(size, step_time=step_time, churn=churn))

    def worker(link: Link) -> list[Tensor]:
        model = model_of()
        opt = build(name, model.parameters(), link, **at_once(name), **settings)
        watch(opt, link.rank, notes)
        opt.join()
        while opt.steps < steps and not opt.ended:
            assert opt.block is not None
            backward(model, opt.block, opt.block_step)
            opt.step()
            opt.zero_grad()
        opt.finish()
        notes.ledgers.append(opt.engine.ledger.to_json())
        notes.deadlines.append(max(link.waits.deadline(), link.waits.long_round()))
        with opt.shared_model():
            return snapshot(model)

    notes.results = notes.world.run(worker)
    return notes


def watch(opt: Algorithm, rank: int, notes: Notes) -> None:
    """Note the state after every round that a worker takes, whether it was there or only follows."""
    take = opt.engine.take

    def noting(decided: Any, exchange: Any) -> bool:
        counted = take(decided, exchange)
        number = opt.rounds
        notes.states.setdefault(number, set()).add(hash_tensors(replicated(opt)))
        notes.workers.setdefault(number, set()).add(rank)
        if decided.mine:
            notes.counted.setdefault(rank, set()).add(decided.manifest.number)
        return counted

    opt.engine.take = noting
