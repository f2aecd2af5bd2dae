"""Loss against bytes for decoupled momentum and its baselines: `python -m benchmarks.evidence` (about two hours on 2 cores).

Every run is one line of benchmarks/records/evidence.jsonl, written when it ends; what is there already is not run again, so the
command can be stopped and started at will, and `--jobs` sets how many run at once. `arms.py` says what is compared.

Bytes are those of all messages that one worker makes (payload, not what a ring or an all-gather makes of it), against 4 bytes
per parameter and step for the gradients of DDP.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from typing import Any

import tyro

from benchmarks import record
from benchmarks.arms import PARTS, SEEDS, Arm, Run, run_of

NAME = "evidence"


def measure(run: Run) -> dict[str, Any]:
    """Train once, in this process, on simulated workers."""
    import torch

    from thinwire import World
    from thinwire.tools.config import RunConfig
    from thinwire.tools.train import Trainer, task_of

    torch.set_num_threads(1)
    config = RunConfig(
        algorithm=run.algorithm,
        task=run.task,
        workers=4,
        steps=run.steps,
        seed=run.seed,
        lr=run.lr,
        batch=run.batch,
        wire=run.wire,
        eval_every=0,
        settings=run.settings,
        **run.run,
    )
    task, started = task_of(config, 4), time.time()
    curve = Curve(run.steps)

    def worker(link: Any) -> dict[str, Any]:
        trainer = Trainer(config, link, task=task)
        progress = trainer.run(curve if link.rank == 0 else lambda _: None)
        numel = sum(p.numel() for p in trainer.model.parameters())
        totals = trainer.link.meter.totals
        return {
            **(progress.validation or {}),
            "payload": totals.payload,
            "fewer": 4 * numel * run.steps / totals.payload,
            "parameters": numel,
        }

    figures = World(4, step_time=0.0).run(worker)[0]
    return {**asdict(run), "command": run.key, **figures, "seconds": round(time.time() - started, 1), "curve": curve.points}


class Curve:
    """Training loss and bytes on the way, in at most 64 points; each stands for the mean of the steps since the last."""

    def __init__(self, steps: int):
        self.every, self.points, self._losses = -(-steps // 64), [], []

    def __call__(self, progress: Any) -> None:
        """Called after every step of worker 0."""
        self._losses.append(progress.loss)
        if progress.step % self.every == 0 or progress.validation:
            loss, self._losses = sum(self._losses) / len(self._losses), []
            point = {"step": progress.step, "loss": round(loss, 4), "sent": progress.sent, "payload": progress.payload}
            self.points.append({**point, "rounds": progress.rounds})


def recorded() -> dict[str, dict[str, Any]]:
    """All runs so far by their command."""
    path = record.RECORDS / f"{NAME}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["command"]: row for row in map(json.loads, lines)}


def finalists(arm: Arm, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The points of the grid with the least loss on seed 0; none while some are missing."""
    points = list(arm.candidates())
    found = [rows.get(run_of(arm, point, SEEDS[0]).key) for point in points]
    if any(row is None for row in found):
        return []
    losses = [row["loss"] if row and math.isfinite(row["loss"]) else math.inf for row in found]
    order = sorted(range(len(points)), key=lambda i: losses[i])
    return [points[i] for i in order[: arm.finalists if len(arm.seeds) > 1 else 1]]


def best_point(arm: Arm, rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The finalist with the least mean loss over all seeds, of those that have them all; None while there is none."""
    means = []
    for point in finalists(arm, rows):
        found = [rows.get(run_of(arm, point, seed).key) for seed in arm.seeds]
        if any(row is None for row in found):
            continue
        means.append((sum(row["loss"] for row in found if row) / len(found), len(means), point))
    return min(means)[2] if means else None


def missing(arms: Sequence[Arm]) -> list[Run]:
    """The runs that can be started now."""
    rows, runs = recorded(), []
    for arm in arms:
        runs += [run_of(arm, point, SEEDS[0]) for point in arm.candidates()]
        runs += [run_of(arm, point, seed) for point in finalists(arm, rows) for seed in arm.seeds]
    return [run for run in {r.key: r for r in runs}.values() if run.key not in rows]


def has_data(arm: Arm) -> bool:
    """Whether the arm's task can be built here; says what is missing where it cannot."""
    from thinwire.errors import ConfigError
    from thinwire.tasks import make_task

    try:
        make_task(arm.task)
    except ConfigError as error:
        print(f"left out: {arm.name} on {arm.task}: {error}", flush=True)
        return False
    return True


def main(part: str = "all", jobs: int = 2) -> None:
    """Run what is missing.

    Args:
        part: one of the parts in arms.py, or "all".
        jobs: how many runs at once, one thread each.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    arms = [arm for name, some in PARTS.items() for arm in some if part in ("all", name)]
    if not arms:
        raise SystemExit(f"part must be one of {', '.join(PARTS)} or all, got {part!r}")
    arms = [arm for arm in arms if has_data(arm)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        under_way: dict[Any, str] = {}
        while True:
            todo = [run for run in missing(arms) if run.key not in under_way.values()]
            for run in todo[: jobs - len(under_way)]:
                under_way[pool.submit(measure, run)] = run.key
            if not under_way:
                break
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                del under_way[future]
                row = future.result()
                record.append(NAME, row)
                print(f"{row['loss']:.4f}  {row['fewer']:7.1f}x  {row['seconds']:5.0f} s  {row['command']}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
