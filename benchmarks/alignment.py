"""Do workers go the same way between two averages? `python -m benchmarks.alignment` (about 5 minutes on 2 cores).

gpt-nano, 4 simulated workers, 256 synchronous steps of warm start and 256 of the method with averages every 32 steps. Before
each of the last four averages every worker's way since the one before (its pseudo-gradient) is compared, by its cosine, with
the mean way of all, and with the momentum that all agreed on when it set out. MT-DAO's authors report above 0.95 for both, and
about 0.7 for local ADOPT.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import thinwire
from benchmarks import record
from benchmarks.arms import SLOWER, WARM
from thinwire.core.phases import at_work
from thinwire.tools import train
from thinwire.tools.config import RunConfig

STEPS, K, ROUNDS = 512, 32, 4
ARMS: dict[str, dict[str, Any]] = {
    "Local Adam, beta 0.9": {"inner": "qhadam", "qh_betas": (0.9,), "qh_omegas": (1.0,)},
    "MT-DAO, beta 0.99, omega 0.95": SLOWER,
}


def flat(tensors: list[Tensor]) -> Tensor:
    """All of them as one vector, copied."""
    return torch.cat([t.detach().flatten() for t in tensors])


class Watch:
    """Notes where a worker goes between two averages."""

    def __init__(self, optimizer: thinwire.MTDAO):
        """Look in at every round."""
        self.ways: list[tuple[Tensor, Tensor]] = []  # the way since the last average, and the momentum it set out with
        self.optimizer, self.apply = optimizer, optimizer.apply
        self.start, self.momentum = self._now()
        optimizer.apply = self._watched

    def _now(self) -> tuple[Tensor, Tensor]:
        """Parameters, and minus the momentum as the inner optimizer scales it."""
        state = self.optimizer.inner_state()
        return flat(self.optimizer.params()), -flat(state["exp_avg"]) / (flat(state["exp_avg_sq"]).sqrt() + 1e-8)

    def _watched(self, arrived: thinwire.Arrived) -> None:
        self.ways.append((flat(self.optimizer.params()) - self.start, self.momentum))
        self.ways = self.ways[-ROUNDS:]
        self.apply(arrived)
        self.start, self.momentum = self._now()


def measure(arm: dict[str, Any], lr: float) -> dict[str, float]:
    """Mean cosines over workers and rounds."""
    run = {**WARM, **arm}
    config = RunConfig(
        algorithm="mt-dao", task="gpt-nano", workers=4, steps=STEPS, batch=2, lr=lr, eval_every=0, settings={"H": K}, **run
    )
    task = train.task_of(config, 4)

    def worker(link: thinwire.Link) -> list[tuple[Tensor, Tensor]]:
        trainer, watch = train.Trainer(config, link, task=task), None
        for step in range(1, STEPS + 1):
            trainer._one_step(step)
            if step == config.warm_start:
                optimizer = at_work(trainer.optimizer)
                assert isinstance(optimizer, thinwire.MTDAO)
                watch = Watch(optimizer)
        assert watch is not None
        return watch.ways

    ways = thinwire.World(4, step_time=0.0).run(worker)
    to_mean, to_momentum = [], []
    for rounds in zip(*ways, strict=True):
        mean = torch.stack([way for way, _ in rounds]).mean(0)
        to_mean += [float(torch.cosine_similarity(way, mean, 0)) for way, _ in rounds]
        to_momentum += [float(torch.cosine_similarity(way, momentum, 0)) for way, momentum in rounds]
    return {"to the mean way": sum(to_mean) / len(to_mean), "to the agreed momentum": sum(to_momentum) / len(to_momentum)}


def main() -> None:
    """Measure, show, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1.4e-3, help="of both (default: 1.4e-3)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/alignment.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = {name: measure(arm, arguments.lr) for name, arm in ARMS.items()}
    table = Table("cosine of a worker's way", *next(iter(figures.values())))
    for name, found in figures.items():
        table.add_row(name, *(f"{value:.3f}" for value in found.values()))
    Console().print(table)
    if arguments.record:
        record.append("alignment", {"lr": arguments.lr, "cosines": figures})


if __name__ == "__main__":
    main()
