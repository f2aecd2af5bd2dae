"""Bounded loss: what it costs to lose a tenth of all contributions, in the simulator, with paired seeds.

    python -m benchmarks.bounded_loss          # appends to benchmarks/records/bounded_loss.jsonl

Each seed trains twice, with and without loss: the same starting weights, the same blocks for the first round, the same learning
rates (a warm-up and a cosine). A message that is lost is not counted; its sender keeps what it holds (error feedback,
progress). The mean is over those that arrived, times their share where the others carry progress (`Arrived.share`). Pairs are
records: what was trained already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.record import RECORDS, append
from thinwire import Link, World
from thinwire.sim import Churn
from thinwire.tools.config import RunConfig
from thinwire.tools.elastic import ElasticTrainer

NAME = "bounded_loss"
CARRIES = ("diloco", "streaming-diloco", "local-sgd")
T95 = {9: 2.262, 4: 2.776, 3: 3.182, 7: 2.365}  # of Student's distribution, by degrees of freedom


def final_loss(config: RunConfig, workers: int, loss: float) -> float:
    """Validation loss at the end of a run in which a part of all messages is lost."""

    def worker(link: Link) -> float:
        trainer = ElasticTrainer(config, link)  # type: ignore[arg-type]
        trainer.optimizer.join()
        while trainer.step < config.steps and not trainer.optimizer.ended:
            trainer.one_step()
        trainer.optimizer.finish()
        return trainer.evaluate()["loss"] if link.rank == 0 else 0.0

    churn = Churn(loss=loss, seed=config.seed, link={"checkpoint_every": 0, "poll": 0.05})
    return World(workers, step_time=0.1, seed=config.seed, churn=churn).run(worker)[0]


def recorded(about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Pairs that were trained with these settings."""
    path = RECORDS / f"{NAME}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        pair = json.loads(line)
        if "seed" in pair and all(pair.get(name) == value for name, value in about.items()):
            yield pair


def train_pair(about: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train a seed with and without loss, unless that was done before."""
    for pair in recorded(about | {"seed": seed}):
        return pair
    names = ("algorithm", "task", "steps", "lr", "batch")
    settings = {} if about["H"] is None else {"H": about["H"]}
    config = RunConfig(**{name: about[name] for name in names}, seed=seed, device="cpu", settings=settings)
    settled = {name: value for name, value in about.items() if name != "carried"}  # makes no difference without loss
    known = [pair["without loss"] for pair in recorded(settled | {"seed": seed})]
    whole = known[0] if known else final_loss(config, about["workers"], 0.0)
    lossy = final_loss(config, about["workers"], about["loss"])
    append(NAME, about | {"seed": seed, "without loss": whole, "with loss": lossy})
    return about | {"seed": seed, "without loss": whole, "with loss": lossy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["diloco", "decoupled-diloco", "demo"])
    parser.add_argument("--task", default="gpt-pico")
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--loss", type=float, default=0.1, help="part of all messages that never arrive")
    parser.add_argument("--H", type=int, default=16, help="local steps, of the methods that have any")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = vars(parser.parse_args())
    torch.set_num_threads(1)
    seeds = args.pop("seeds")
    for algorithm in args.pop("algorithms"):
        about = args | {"algorithm": algorithm, "H": None if algorithm == "demo" else args["H"]}
        about |= {"carried": "counts once"} if algorithm in CARRIES else {}
        ratios = []
        for seed in range(seeds):
            pair = train_pair(about, seed)
            ratios.append(pair["with loss"] / pair["without loss"] - 1)
            print(f"{algorithm} seed {seed}: {pair['without loss']:.4f} without loss, {ratios[-1]:+.2%} with it", flush=True)
        mean = statistics.mean(ratios)
        half = T95.get(len(ratios) - 1, 1.96) * statistics.stdev(ratios) / math.sqrt(len(ratios))
        print(f"{algorithm}: {mean:+.2%}, 95% interval {mean - half:+.2%} to {mean + half:+.2%}", flush=True)


if __name__ == "__main__":
    main()
