"""Loss against bytes for decoupled momentum and its baselines: `python -m benchmarks.evidence` (about two hours on 2 cores).

Every run is one line of benchmarks/records/evidence.jsonl, written when it ends; what is there already is not run again, so the
command can be stopped and started at will, and `--jobs` sets how many run at once. `arms.py` says what is compared.

Bytes are those that leave a worker: with M workers a gathered message counts M - 1 times, and a ring all-reduce 2 (M - 1) / M
times its length. They are compared with the ring of DDP's gradients on as many workers.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from benchmarks import record
from benchmarks.arms import PARTS, SEEDS, WORKERS, Arm, Run, run_of
from thinwire.network import ddp_bytes
from thinwire.tools.config import RunConfig

NAME = "evidence"


def measure(run: Run) -> dict[str, Any]:
    """Train once, in this process, on simulated workers; the runner is that of `thinwire compare`."""
    import torch

    from thinwire.tools import compare
    from thinwire.tools.records import thinned
    from thinwire.tools.runners import SimulatedRunner

    torch.set_num_threads(1)
    started = time.time()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as unseen:
        described = compare.Run(run.arm, config_of(run), Path(folder))
        done = compare.run_one(described, SimulatedRunner(step_time="0s"), Console(file=unseen))
    figures = {name.removeprefix("val_"): value for name, value in done.figures.items() if name.startswith("val_")}
    figures |= {name: done.figures[name] for name in ("payload", "sent", "parameters", "workers")}
    curve = [
        {"step": p.step, "loss": round(p.loss, 4), "sent": p.sent, "payload": p.payload, "rounds": p.rounds}
        for p in thinned(done.curve, most=64)
    ]
    return {**asdict(run), "command": run.key, **figures, "seconds": round(time.time() - started, 1), "curve": curve}


def config_of(run: Run) -> RunConfig:
    """The settings of a run, as `thinwire sim` has them."""
    return RunConfig(
        algorithm=run.algorithm,
        task=run.task,
        workers=WORKERS,
        steps=run.steps,
        seed=run.seed,
        lr=run.lr,
        batch=run.batch,
        wire=run.wire,
        eval_every=0,
        settings=run.settings,
        **run.run,
    )


def recorded() -> dict[str, dict[str, Any]]:
    """All runs so far by their command."""
    path = record.RECORDS / f"{NAME}.jsonl"
    return dict(_rows(path, path.stat().st_mtime_ns)) if path.exists() else {}


@lru_cache(maxsize=1)
def _rows(path: Path, changed: int) -> dict[str, dict[str, Any]]:
    """What a file has since it was changed; the page of results asks a hundred times."""
    del changed
    return {row["command"]: row for row in map(json.loads, path.read_text().splitlines())}


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
                fewer = ddp_bytes(row["parameters"], row["workers"], row["steps"]) / row["sent"]
                print(f"{row['loss']:.4f}  {fewer:7.1f}x  {row['seconds']:5.0f} s  {row['command']}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
