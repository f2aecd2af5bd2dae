"""What the foundation costs beside its peers, as ratios within one run: `make bench`.

Two gloo workers on loopback, one thread each, a GPT-2-shaped list of tensors. Every figure is a median over repeated rounds,
and the peers take turns with ours in the same loop, so that a noisy machine disturbs both alike.

* exchange: `average()` with its finite gate against a bare all_reduce of the same flat buffer, and against one per tensor;
* step: `DataParallel` around AdamW against torch's DistributedDataParallel with AdamW, on gpt-small;
* simulator: 16 workers x 50 steps of a 100,000-parameter model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks import record
from benchmarks.pair import gpt_shapes, run_pair
from thinwire.core.average import average
from thinwire.links import TorchLink
from thinwire.tasks import make_task


def median_seconds(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            dist.barrier()
            started = time.perf_counter()
            way()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def bench_exchange(link: TorchLink, repeats: int) -> dict[str, Any]:
    tensors = [torch.randn(shape) for shape in gpt_shapes(12, 256, 4096, 256)]
    flat = torch.cat([t.flatten() for t in tensors])
    ways = {
        "bare all_reduce, flat": lambda: dist.all_reduce(flat),
        "bare all_reduce, per tensor": lambda: [dist.all_reduce(t) for t in tensors],
        "thinwire average(), fp32": lambda: average(link, thinwire.Dense("fp32"), tensors),
        "thinwire average(), bf16": lambda: average(link, thinwire.Dense("bf16"), tensors),
    }
    return {"parameters": flat.numel(), "tensors": len(tensors), "seconds": median_seconds(ways, repeats)}


def bench_step(link: TorchLink, repeats: int) -> dict[str, Any]:
    task = make_task("gpt-small", workers=link.size)
    ours, theirs = task.model(), task.model()
    ddp, inner = DistributedDataParallel(theirs), torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    opt = thinwire.DataParallel(torch.optim.AdamW(ours.parameters(), lr=1e-3), link)
    diloco_model = task.model()
    diloco = thinwire.DiLoCo(torch.optim.AdamW(diloco_model.parameters(), lr=1e-3), link, H=32)
    alone_model = task.model()
    alone = torch.optim.AdamW(alone_model.parameters(), lr=1e-3)
    batch = task.batch(link.rank, 1)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    ways = {
        "no exchange at all": step(alone_model, alone),
        "torch DDP": step(ddp, inner),
        "thinwire DataParallel": step(ours, opt),
        "thinwire DiLoCo, a step between rounds": step(diloco_model, diloco),
    }
    return {"parameters": sum(p.numel() for p in ours.parameters()), "seconds": median_seconds(ways, min(repeats, 15))}


def bench_simulator() -> dict[str, Any]:
    def worker(link: thinwire.Link) -> float:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(100, 500), torch.nn.Tanh(), torch.nn.Linear(500, 100))
        opt = thinwire.DataParallel(torch.optim.AdamW(model.parameters(), lr=1e-3), link)
        loss = torch.tensor(0.0)
        for step in range(50):
            x = torch.randn(8, 100, generator=torch.Generator().manual_seed(1000 * link.rank + step))
            loss = (model(x) - x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        return loss.item()

    started = time.perf_counter()
    thinwire.World(16).run(worker)
    return {"workers": 16, "steps": 50, "parameters": 100_600, "seconds": time.perf_counter() - started}


def bench_pair(link: TorchLink, repeats: int) -> dict[str, Any]:
    return {"exchange": bench_exchange(link, repeats), "step": bench_step(link, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="rounds of each way (default: 20)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/overhead.jsonl")
    arguments = parser.parse_args()
    figures = run_pair(bench_pair, arguments.repeats, limit=600)
    torch.set_num_threads(1)
    figures["simulator"] = bench_simulator()
    show(figures)
    if arguments.record:
        record.append("overhead", figures)


def show(figures: dict[str, Any]) -> None:
    console = Console()
    peers = {"exchange": "bare all_reduce, flat", "step": "torch DDP"}
    for name, peer in peers.items():
        seconds = figures[name]["seconds"]
        table = Table("way", "ms", f"ratio to {peer}", title=f"{name}: {figures[name]['parameters']:,} parameters, 2 workers")
        for way, value in seconds.items():
            table.add_row(way, f"{1000 * value:.1f}", f"{value / seconds[peer]:.2f}")
        console.print(table)
    simulator = figures["simulator"]
    console.print(f"simulator: 16 workers x 50 steps of 100,600 parameters in {simulator['seconds']:.1f} s (bar: 10 s)")


if __name__ == "__main__":
    main()
