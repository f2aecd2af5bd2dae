"""Rounds of this tree against those of an earlier commit, in turns, as ratios within one run.

    git worktree add --detach ../before e2cba8e
    python -m benchmarks.before ../before --sizes 10M 124M --save

Two gloo workers on loopback for each tree, one thread each, gradients in place: a round of DeMo at k = 32 and k = 128, and one
of DiLoCo with a step of AdamW. The two trees take turns round by round, and who is first changes every time, so that a noisy
machine disturbs both alike. Seconds are those of the slower worker; CPU seconds are the sum of both, which other programs
disturb less. Ratios are of medians; below 1 this tree is faster.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any

import torch
import tyro

import thinwire
from benchmarks import record
from benchmarks.pair import SIZES, gpt_shapes
from thinwire import DCT, Sign, TopK
from thinwire.links import connect, disconnect, host_job

NAME = "before"
HERE = Path(__file__).parents[1]
TREES, WAYS = ("now", "before"), ("DeMo k=32", "DeMo k=128", "DiLoCo")


# --- A worker: it imports thinwire of its own tree, and nothing that is newer than the other tree -----------------------------


def make(link: thinwire.Link, size: str, way: str) -> Callable[[], Any]:
    """A round of a method."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in gpt_shapes(*SIZES[size])]
    torch.manual_seed(1 + link.rank)
    for p in params:
        p.grad = torch.randn_like(p)
    if way == "DiLoCo":
        return thinwire.DiLoCo(torch.optim.AdamW(params, lr=1e-4), link, H=1).step
    return thinwire.DeMo(params, link, codec=DCT(64) >> TopK(int(way.removeprefix("DeMo k="))) >> Sign()).step


def work(size: str) -> None:
    """Take a round whenever told to, and tell how long it took."""
    torch.set_num_threads(1)
    link = connect(backend="gloo", timeout=600)
    ways: dict[str, Callable[[], Any]] = {}
    print(json.dumps(str(Path(thinwire.__file__).parents[2])), flush=True)
    for line in sys.stdin:
        way = line.strip()
        if way not in ways:
            ways.clear()  # one method at a time: at 124M parameters each takes 3 GB in every process
            ways[way] = make(link, size, way)
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        ways[way]()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
    disconnect()


# --- The trees in turns ------------------------------------------------------------------------------------------------------


class Pair:
    """Two workers of one tree."""

    def __init__(self, tree: Path, size: str):
        """Start them."""
        self._store, places = host_job(2)
        command = [sys.executable, "-m", "benchmarks.before", str(tree), "--worker", size]
        self._workers = [self._start(command, tree, place) for place in places]
        found = {self._read(worker) for worker in self._workers}
        if found != {str(tree)}:
            raise SystemExit(f"the workers of {tree} imported thinwire from {found}")

    def _start(self, command: list[str], tree: Path, place: dict[str, str]) -> subprocess.Popen[str]:
        env = {**os.environ, **place, "PYTHONPATH": f"{tree / 'src'}:{HERE}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=HERE, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _read(self, worker: subprocess.Popen[str]) -> Any:
        line = _pipe(worker.stdout).readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {worker.wait(60)}")
        return json.loads(line)

    def round(self, way: str) -> tuple[float, float]:
        """Seconds, and CPU seconds, of one round."""
        for worker in self._workers:
            print(way, file=_pipe(worker.stdin), flush=True)
        told = [self._read(worker) for worker in self._workers]
        return max(wall for wall, _ in told), sum(cpu for _, cpu in told)

    def end(self) -> None:
        """End them."""
        for worker in self._workers:
            _pipe(worker.stdin).close()
        for worker in self._workers:
            worker.wait(60)


def _pipe(file: IO[str] | None) -> IO[str]:
    assert file is not None
    return file


def measure(before: Path, size: str, repeats: int) -> dict[str, Any]:
    """Medians of both trees and their ratios."""
    trees = {"now": Pair(HERE, size), "before": Pair(before, size)}
    figures: dict[str, Any] = {
        "size": size,
        "parameters": sum(map(torch.Size.numel, map(torch.Size, gpt_shapes(*SIZES[size])))),
    }
    for way in WAYS:
        taken: dict[str, list[tuple[float, float]]] = {tree: [] for tree in TREES}
        for turn in range(repeats + 2):
            for tree in TREES if turn % 2 else reversed(TREES):
                seconds = trees[tree].round(way)
                if turn >= 2:  # the first ones warm up
                    taken[tree].append(seconds)
        figures[way] = {}
        for place, name in enumerate(("seconds", "cpu seconds")):
            t = {tree: statistics.median(both[place] for both in taken[tree]) for tree in TREES}
            figures[way][name] = t | {"ratio": t["now"] / t["before"]}
            print(
                f"{size} {way}, {name}: {t['now']:.4f} now, {t['before']:.4f} before: {t['now'] / t['before']:.3f}", flush=True
            )
    for pair in trees.values():
        pair.end()
    return figures


def main(
    before: Annotated[Path, tyro.conf.Positional],
    sizes: tuple[str, ...] = ("10M", "124M"),
    repeats: int = 15,
    save: bool = False,
    worker: str | None = None,
) -> None:
    """Compare rounds of this tree with those of another.

    Args:
        before: a worktree of the earlier commit.
        sizes: lists of tensors.
        repeats: rounds of each method.
        save: append the figures to the records.
        worker: be one of its workers instead, with this list of tensors.
    """
    if worker is not None:
        work(worker)
        return
    commit = subprocess.run(
        ["git", "-C", str(before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    for size in sizes:
        figures = {"against": commit.stdout.strip(), **measure(before.resolve(), size, repeats)}
        if save:
            record.append(NAME, figures)


if __name__ == "__main__":
    tyro.cli(main)
