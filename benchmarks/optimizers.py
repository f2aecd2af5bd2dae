"""What a step of the optimizers costs beside torch's own, as ratios within one run: `python -m benchmarks.optimizers`.

A GPT-2-shaped list of 50 million parameters, gradients in place, one process; the ways take turns in the same loop, and figures
are medians. `MTDAO` is measured between two averages: with its look for NaN in the gradients, and without the network.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import thinwire
from benchmarks import record
from benchmarks.pair import SIZES, gpt_shapes
from thinwire.optim import QHADOPT, QHM, QHAdam

PEER = "torch AdamW, foreach"


def bench(threads: int, repeats: int, size: str) -> dict[str, Any]:
    """Median seconds of a step of each optimizer."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in gpt_shapes(*SIZES[size])]
    for p in params:
        p.grad = torch.randn_like(p)
    never = 10**9
    ways: dict[str, torch.optim.Optimizer] = {
        PEER: torch.optim.AdamW(params, foreach=True),
        "torch AdamW, fused": torch.optim.AdamW(params, fused=True),
        "QHAdam": QHAdam(params),
        "MTDAO around QHAdam": thinwire.MTDAO(QHAdam(params), thinwire.SoloLink(), H=never),
        "MTDAO around QHAdam, N = 2": thinwire.MTDAO(
            QHAdam(params, betas=(0.9, 0.999), omegas=(0.05, 0.9)), thinwire.SoloLink(), H=never
        ),
        "MTDAO around QHADOPT": thinwire.MTDAO(QHADOPT(params), thinwire.SoloLink(), H=never),
        "MTDAO around QHM": thinwire.MTDAO(QHM(params), thinwire.SoloLink(), H=never),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, optimizer in ways.items():
            started = time.perf_counter()
            optimizer.step()
            if turn:  # the first turn makes state and warms up
                times[name].append(time.perf_counter() - started)
    return {
        "parameters": sum(p.numel() for p in params),
        "threads": threads,
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
    }


def main() -> None:
    """Measure, show, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="turns of each optimizer (default: 9)")
    parser.add_argument("--size", choices=list(SIZES), default="50M", help="of the model (default: 50M)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/optimizers.jsonl")
    arguments = parser.parse_args()
    runs = [bench(threads, arguments.repeats, arguments.size) for threads in (1, 2)]
    for run in runs:
        title = f"one step, {run['parameters']:,} parameters, threads: {run['threads']}"
        table = Table("optimizer", "ms", f"ratio to {PEER}", title=title)
        for name, seconds in run["seconds"].items():
            table.add_row(name, f"{1000 * seconds:.0f}", f"{seconds / run['seconds'][PEER]:.2f}")
        Console().print(table)
    if arguments.record:
        record.append("optimizers", {"runs": runs})


if __name__ == "__main__":
    main()
