"""`make evidence`: run one row of every table of docs/results.md anew, and say how close it comes to the record.

On 2 cores it takes about 17 minutes. The whole evidence is `make evidence-all`, which takes hours and adds to the
records; this command changes nothing. On the machine and the versions of a record the losses should be the same to the last
digit; elsewhere sums are rounded in another order, and after hundreds of steps losses differ by what another seed makes.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import decayed, record, tables, thin_wire
from benchmarks.arms import PARTS, Arm, Run, run_of
from benchmarks.evidence import best_point, has_data, measure, recorded
from thinwire.errors import MissingData
from thinwire.tools import compare
from thinwire.tools.runners import SimulatedRunner

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
DECAYED = {  # of the tables of decayed runs, by the name of their records
    "pico": "DeMo k=256 until 32, then 32",
    "demo": "k=256 until 32, then 64",
    "start": "DiLoCo ternary H=32 after DDP",
    "coarse": "DiLoCo ternary H=8",
    "coarse-chosen": "ternary H=16",
    "coarse-tried": "2-bit",
    "mt-dao": "MT-DAO, parameters every 2 in three values, lr 4e-3",
    "lordo-pico": "LoRDO, gradient, v, lives",
    "sweep-4": "Local Adam K=16",
    "cnn": "DeMo 6% until 25, then 1%",
    "nano": "AdamW-DDP",
}
TOO_LONG = ("nano-long", "nano-start", "small")  # 4 minutes and more for a run
LAB = ("DeMo k=32", "100mbit")  # of the table of times on shaped links


def arm_of(part: str) -> Arm:
    """The arm of a part that is to be repeated."""
    return next(arm for arm in PARTS[part] if arm.name == ROWS[part])


def chosen(part: str) -> Run | None:
    """The run of a part that is to be repeated: seed 0 of an arm's best settings; None where it has no record or no data."""
    arm, rows = arm_of(part), recorded()
    point = best_point(arm, rows)
    if point is None or run_of(arm, point, 0).key not in rows or not has_data(arm):
        return None
    return run_of(arm, point, 0)


def tolerance_of(arm: Arm) -> float:
    """How far a loss may be from its record: 2%, or as far as the seeds of the arm are apart where that is more; 3% of one."""
    losses = [row["loss"] for row in tables.rows_of(arm, recorded())]
    return max(0.02, max(losses) / min(losses) - 1) if len(losses) > 1 else 0.03


def repeat_decayed(name: str) -> tuple[str, bool]:
    """The first seed of an arm of a table of decayed runs: what came of it in words, and whether it is close to its record."""
    arm = decayed.arm_of(name, DECAYED[name])
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as unseen:
        run = compare.Run(arm.name, arm.first.config, Path(folder))
        try:
            now = compare.run_one(run, SimulatedRunner(step_time="0s"), Console(file=unseen))
        except MissingData as error:
            return f"decayed {name}, {arm.name}: left out: {error}", True
    off, bytes_off = now.loss / arm.first.loss - 1, now.figures["sent"] / arm.first.figures["sent"] - 1
    allowed = max(0.02, max(arm.loss.values) / min(arm.loss.values) - 1)
    told = f"decayed {name}, {arm.name}: {now.loss:.4f}, recorded {arm.first.loss:.4f} ({off:+.2%}, bytes {bytes_off:+.2%})"
    return told, abs(off) <= allowed and abs(bytes_off) <= 0.001


def repeat_in_lab() -> str:
    """One row of the table of times on shaped links, in words."""
    name, speed = LAB
    rows = record.last("thin_wire")["rows"]
    then = next(row for row in rows if (row["way"], row["speed"]) == LAB)
    if (now := thin_wire.repeat(name, speed)) is None:
        return "times on shaped links: left out"
    if now["command"] != then["command"]:
        return f"{name} at {speed}: {now['factor']:.2f} times alone; its record is of another command: {then['command']}"
    return (
        f"{name} at {speed}: {now['factor']:.2f} times alone, recorded {then['factor']:.2f} "
        f"({now['factor'] / then['factor'] - 1:+.0%}); {now['metered']:,} bytes metered, recorded {then['metered']:,}. "
        "A time depends on the machine and on what else it does: it is told, not judged."
    )


def main(parts: tuple[str, ...] = tuple(PARTS), jobs: int = 2, lab: bool = True) -> None:
    """Repeat one row of each table; ends with an error where one is too far from its record (see `tolerance_of`).

    Args:
        parts: which tables; all of them by default.
        jobs: how many runs at once, one thread each.
        lab: also a row of the table of times on shaped links, where there is root and iproute2.
    """
    if wrong := set(parts) - set(ROWS):
        raise SystemExit(f"parts must be among {', '.join(ROWS)}, got {', '.join(sorted(wrong))}")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes of the pool
    rows, console, started = recorded(), Console(), time.monotonic()
    runs = {part: run for part in parts if (run := chosen(part))}
    table = Table("table", "arm", title="One row of each table, run anew", title_justify="left")
    for column in ("recorded loss", "now", "differs by", "bytes differ by"):
        table.add_column(column, justify="right")
    far = []
    recorded_minutes = sum(rows[run.key]["seconds"] for run in runs.values()) / 60 / jobs
    print(f"{len(runs)} runs, the longest first; when they were recorded they took {recorded_minutes:.0f} minutes", flush=True)
    # No max_tasks_per_child here nor in benchmarks/evidence.py: a pool then hangs with tasks left (CPython issue 115634).
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        with_decay = {name: pool.submit(repeat_decayed, name) for name in reversed(DECAYED)}
        longest_first = sorted(runs, key=lambda part: -rows[runs[part].key]["seconds"])  # no core idles at the end
        futures = {pool.submit(measure, runs[part]): part for part in longest_first}
        for done, future in enumerate(as_completed(futures), 1):
            part, now = futures[future], future.result()
            then = rows[runs[part].key]
            off, bytes_off = now["loss"] / then["loss"] - 1, now["sent"] / then["sent"] - 1
            allowed = tolerance_of(arm_of(part))
            far += [part] if not abs(off) <= allowed or abs(bytes_off) > 0.001 else []
            table.add_row(part, now["arm"], f"{then['loss']:.4f}", f"{now['loss']:.4f}", f"{off:+.2%}", f"{bytes_off:+.2%}")
            minutes = (time.monotonic() - started) / 60
            print(f"{done}/{len(runs)}  {minutes:.1f} min  {part}: {now['loss']:.4f}, recorded {then['loss']:.4f}", flush=True)
        for name, future in with_decay.items():
            told, close = future.result()
            print(told)
            far += [] if close else [f"decayed {name}"]
    console.print(table)
    left_out = [part for part in parts if part not in runs]
    if left_out:
        print(f"left out, for lack of a record or of data: {', '.join(left_out)}")
    if lab:
        print(repeat_in_lab())
    print(f"{(time.monotonic() - started) / 60:.0f} minutes")
    if far:
        raise SystemExit(
            "further from the record than its seeds are from each other and than 2% (3% of one seed), or other bytes: "
            + ", ".join(far)
        )
    close = "within 2% of their records (3% of one seed), or within the range of the recorded seeds"
    print(f"all {len(runs) + len(DECAYED)} losses {close}")


if __name__ == "__main__":
    tyro.cli(main)
