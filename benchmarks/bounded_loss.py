"""Bounded loss: what it costs to lose a tenth of all contributions, in the simulator, with paired seeds.

    python -m benchmarks.bounded_loss --seeds 10 --steps 160          # appends to benchmarks/records/bounded_loss.jsonl

Each seed trains twice, with and without loss: the same starting weights, the same blocks for the first round. A message that is
lost is not counted; its sender keeps what it holds (error feedback, progress), and the mean is over those that arrived.
"""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

import torch

from benchmarks.record import append
from thinwire import DecoupledDiLoCo, DeMo, DiLoCo, Link, World
from thinwire.core.optimizer import Algorithm
from thinwire.sim import Churn
from thinwire.tasks import make_task

T95 = {9: 2.262, 4: 2.776, 3: 3.182, 7: 2.365}  # of Student's distribution, by degrees of freedom


def made(method: str, params: Any, link: Link, H: int) -> Algorithm:
    if method == "demo":
        return DeMo(params, link, lr=3e-3)
    kind = {"diloco": DiLoCo, "decoupled-diloco": DecoupledDiLoCo}[method]
    return kind(torch.optim.AdamW(params, lr=3e-3), link, H=H)


def final_loss(method: str, task_name: str, seed: int, loss: float, *, workers: int, steps: int, H: int, batch: int) -> float:
    task = make_task(task_name, seed=seed, workers=1 << 20, batch=batch)

    def worker(link: Link) -> float:
        model = task.model()
        opt = made(method, model.parameters(), link, H)
        opt.join()
        while opt.steps < steps and not opt.ended:
            task.loss(model, task.batch(opt.block or 0, opt.block_step)).backward()
            opt.step()
            opt.zero_grad()
        opt.finish()
        if link.rank:
            return 0.0
        with opt.shared_model():
            return task.evaluate(model)["loss"]

    churn = Churn(loss=loss, seed=seed, link={"checkpoint_every": 0})
    return World(workers, step_time=0.1, seed=seed, churn=churn).run(worker)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", default=["diloco", "decoupled-diloco", "demo"])
    parser.add_argument("--task", default="gpt-nano")
    parser.add_argument("--seeds", type=int, default=10, help="at least 2")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--loss", type=float, default=0.1)
    parser.add_argument("--H", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    how = {"workers": args.workers, "steps": args.steps, "H": args.H, "batch": args.batch}
    for method in args.methods:
        ratios, losses = [], []
        for seed in range(args.seeds):
            whole, lossy = (final_loss(method, args.task, seed, p, **how) for p in (0.0, args.loss))
            ratios.append(lossy / whole - 1)
            losses.append([whole, lossy])
            print(f"{method} seed {seed}: {whole:.4f} without loss, {lossy:.4f} with {args.loss:.0%}", flush=True)
        mean = statistics.mean(ratios)
        half = T95.get(len(ratios) - 1, 1.96) * statistics.stdev(ratios) / math.sqrt(len(ratios))
        print(f"{method}: {mean:+.2%}, 95% interval {mean - half:+.2%} to {mean + half:+.2%}", flush=True)
        figures = {"method": method, "task": args.task, "loss": args.loss, **how, "losses": losses}
        append("bounded_loss", figures | {"mean": mean, "low": mean - half, "high": mean + half})


if __name__ == "__main__":
    main()
