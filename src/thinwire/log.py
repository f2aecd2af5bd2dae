"""Figures of training into a logger, at every round: JSON lines, TensorBoard, Weights & Biases, Trackio.

    thinwire.log.jsonl(opt, "runs/a/rounds.jsonl")

Call them on all workers, after the optimizer was made: worker 0 writes, with the training step as the logger's step. What is
written are `opt.stats()`; what is not known yet (NaN) is left out. With `all_workers=True` every round also gathers the figures
of all workers, 96 bytes from each, and worker 0 writes those of worker 3 as "worker3/drift" and so on; then it must be given on
all workers. Every function returns a handle whose `remove()` ends it. For anything else use `opt.on_round(callback)`.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from thinwire.core.optimizer import Algorithm
from thinwire.core.phases import Phases
from thinwire.core.stats import Stats
from thinwire.errors import MissingDependency, WireError, how_to_install
from thinwire.links.base import Link
from thinwire.payload import Payload
from thinwire.sharding.mesh import shard_of

__all__ = ["jsonl", "tensorboard", "trackio", "wandb"]

Write = Callable[[Stats, int], object]


def jsonl(optimizer: Algorithm | Phases, path: str | Path, *, all_workers: bool = False) -> RemovableHandle:
    """Append a line of JSON per round to a file, with the Unix time as "time"; a run that is resumed goes on in the same file.

    Args:
        optimizer: whose rounds are written.
        path: the file; its folder is made where it is missing.
        all_workers: also the figures of the other workers.
    """
    path = Path(path)
    if _writes(optimizer):
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)

    def write(figures: Stats, _: int) -> None:
        line = json.dumps(figures | {"time": round(time.time(), 3)}) + "\n"
        with path.open("ab", buffering=0) as file:  # one write per line, which is never mixed with another's
            file.write(line.encode())

    return _at_rounds(optimizer, write, all_workers=all_workers)


def tensorboard(
    optimizer: Algorithm | Phases, folder: Any, *, prefix: str = "thinwire/", all_workers: bool = False
) -> RemovableHandle:
    """Write a scalar per figure and round for TensorBoard.

    Args:
        optimizer: whose rounds are written.
        folder: of the run, or a `SummaryWriter` of yours.
        prefix: of the names.
        all_workers: also the figures of the other workers.
    """
    writer = folder
    if isinstance(folder, str | Path) and _writes(optimizer):
        _library("tensorboard")
        writer = _library("torch.utils.tensorboard", extra="tensorboard").SummaryWriter(str(folder))

    def write(figures: Stats, step: int) -> None:
        for name, value in figures.items():
            writer.add_scalar(f"{prefix}{name}", value, step)
        writer.flush()

    return _at_rounds(optimizer, write, all_workers=all_workers)


def wandb(
    optimizer: Algorithm | Phases, run: Any = None, *, prefix: str = "thinwire/", all_workers: bool = False
) -> RemovableHandle:
    """Log every round to Weights & Biases; give `step=` in your own calls of `run.log` too, since its steps only go up.

    Args:
        optimizer: whose rounds are written.
        run: what `wandb.init()` returned; by default the run that it has made.
        prefix: of the names.
        all_workers: also the figures of the other workers.
    """
    return _to_run(optimizer, run, "wandb", prefix, all_workers=all_workers)


def trackio(
    optimizer: Algorithm | Phases, run: Any = None, *, prefix: str = "thinwire/", all_workers: bool = False
) -> RemovableHandle:
    """Log every round to Trackio.

    Args:
        optimizer: whose rounds are written.
        run: what `trackio.init()` returned; by default the run that it has made.
        prefix: of the names.
        all_workers: also the figures of the other workers.
    """
    return _to_run(optimizer, run, "trackio", prefix, all_workers=all_workers)


def _to_run(optimizer: Algorithm | Phases, run: Any, library: str, prefix: str, *, all_workers: bool) -> RemovableHandle:
    target: Any = _library(library) if run is None and _writes(optimizer) else run  # a library logs to its current run

    def write(figures: Stats, step: int) -> None:
        target.log({f"{prefix}{name}": value for name, value in figures.items()}, step=step)

    return _at_rounds(optimizer, write, all_workers=all_workers)


def _library(name: str, extra: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = extra or name
        raise MissingDependency(f"thinwire.log.{extra} needs {extra}: {how_to_install(extra)}") from error


def _writes(optimizer: Algorithm | Phases) -> bool:
    """Whether this is the one process that writes."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return optimizer.link.data_rank == 0 and shard_of(params)[0] == 0


def _at_rounds(optimizer: Algorithm | Phases, write: Write, *, all_workers: bool) -> RemovableHandle:
    """Write the figures at every round, in the process that does."""
    writes = _writes(optimizer)
    if not writes and not all_workers:
        return RemovableHandle(OrderedDict())

    def told(stats: Stats) -> None:
        figures = stats | of_all_workers(optimizer.link, stats) if all_workers else stats
        if writes:
            write({name: value for name, value in figures.items() if math.isfinite(value)}, int(stats["step"]))

    return optimizer.on_round(told)


def of_all_workers(link: Link, stats: Stats) -> Stats:
    """The figures of all workers, without those by purpose, as "worker0/sent" and so on; an exchange of all workers.

    Args:
        link: the wire.
        stats: of this worker.

    Raises:
        WireError: where a worker sends something else.
    """
    names = [name for name in stats if "." not in name]
    mine = torch.tensor([stats[name] for name in names], dtype=torch.float64).view(torch.uint8)
    found: Stats = {}
    for rank, told in enumerate(link.all_gather(Payload(mine, purpose="metrics"))):
        if told.nbytes != mine.numel():
            raise WireError(f"{told.nbytes} bytes of figures, where {mine.numel()} should be", rank=rank)
        values = told.data.cpu().clone().view(torch.float64).tolist()
        found |= {f"worker{rank}/{name}": value for name, value in zip(names, values, strict=True)}
    return found


def _end_last_line(path: Path) -> None:
    """End the line that a killed run has left unfinished, so that the next one does not become a part of it."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
