"""`make evidence`: run one row of every table of docs/results.md anew, and say how close it comes to the record.

The recorded runs add up to 12 minutes on 2 cores. The whole evidence is `make evidence-all`, which takes hours and adds to the
records; this command changes nothing. On the machine and the versions of a record the losses should be the same to the last
digit; elsewhere sums are rounded in another order, and after hundreds of steps losses differ by what another seed makes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.arms import PARTS, Run, run_of
from benchmarks.evidence import best_point, has_data, measure, recorded

# The arm of each part that says most for its time.
ROWS = {
    "gpt": "DeMo 1-bit k=172",
    "cnn": "DeMo 1-bit 3%",
    "cnn-headline": "MT-DAO H=8",
    "frontier": "SparseLoCo H=8",
    "reference": "DeMo as published (v1) k=32 bf16",
    "orderings": "k=32",
    "clocks": "MT-DAO",
    "warm-clocks": "MT-DAO",
    "wires": "MT-DAO fp4, K_u=64, K_v=384",
    "lordo": "LoRDO",
    "warm-lordo": "LoRDO",
    "streaming": "Streaming DiLoCo tau=1",
    "warm-streaming": "Streaming DiLoCo tau=1",
    "headline": "decoupled DiLoCo H=8 k=128",
    "larger": "MT-DAO",
}


def chosen(part: str) -> Run | None:
    """The run of a part that is to be repeated: seed 0 of an arm's best settings; None where it has no record or no data."""
    arm = next(arm for arm in PARTS[part] if arm.name == ROWS[part])
    rows = recorded()
    point = best_point(arm, rows)
    if point is None or run_of(arm, point, 0).key not in rows or not has_data(arm):
        return None
    return run_of(arm, point, 0)


def main(parts: tuple[str, ...] = tuple(PARTS), jobs: int = 2, tolerance: float = 0.02) -> None:
    """Repeat one row of each table.

    Args:
        parts: which tables; all of them by default.
        jobs: how many runs at once, one thread each.
        tolerance: a loss that is further from its record than this part of it ends the command with an error.
    """
    if wrong := set(parts) - set(ROWS):
        raise SystemExit(f"parts must be among {', '.join(ROWS)}, got {', '.join(sorted(wrong))}")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, console, started = recorded(), Console(), time.monotonic()
    runs = {part: run for part in parts if (run := chosen(part))}
    table = Table("table", "arm", title="One row of each table, run anew", title_justify="left")
    for column in ("recorded loss", "now", "differs by", "bytes differ by"):
        table.add_column(column, justify="right")
    far = []
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=4) as pool:
        futures = {pool.submit(measure, run): part for part, run in runs.items()}
        for done, future in enumerate(as_completed(futures), 1):
            part, now = futures[future], future.result()
            then = rows[runs[part].key]
            off, bytes_off = now["loss"] / then["loss"] - 1, now["payload"] / then["payload"] - 1
            far += [part] if not abs(off) <= tolerance or abs(bytes_off) > 0.001 else []
            table.add_row(part, now["arm"], f"{then['loss']:.4f}", f"{now['loss']:.4f}", f"{off:+.2%}", f"{bytes_off:+.2%}")
            minutes = (time.monotonic() - started) / 60
            print(f"{done}/{len(runs)}  {minutes:.1f} min  {part}: {now['loss']:.4f}, recorded {then['loss']:.4f}", flush=True)
    console.print(table)
    left_out = [part for part in parts if part not in runs]
    if left_out:
        print(f"left out, for lack of a record or of data: {', '.join(left_out)}")
    if far:
        raise SystemExit(f"further than {tolerance:.0%} from the record, or other bytes: {', '.join(far)}")
    print(f"all {len(runs)} within {tolerance:.0%} of their records, in {(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    tyro.cli(main)
