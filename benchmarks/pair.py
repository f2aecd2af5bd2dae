"""Two or more workers on this machine, one thread each, for the benchmarks."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import time
from collections.abc import Callable
from typing import Any

import torch

from thinwire import Link
from thinwire.links import connect, disconnect, host_job

# The shape of a GPT-2: layers, width, vocabulary, context.
SIZES = {"10M": (6, 384, 256, 256), "50M": (8, 512, 50304, 1024), "124M": (12, 768, 50304, 1024)}


def gpt_shapes(layers: int, width: int, vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """The tensors of a GPT-2 of this size, biases and norms included, input and output embedding tied."""
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    norm = [(width,), (width,)]
    blocks = [shape for _ in range(layers) for shape in [*norm, *attention, *norm, *mlp]]
    return [(vocabulary, width), (context, width), *blocks, *norm]


def run_pair(work: Callable[..., Any], *arguments: Any, limit: float = 3600.0, size: int = 2) -> Any:
    """What `work(link, *arguments)` returns on the first of the gloo workers; fails when one does, or after `limit` s."""
    store, places = host_job(size)
    context = mp.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_worker, args=(place, work, arguments, results), daemon=True) for place in places]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + limit
    try:
        while True:
            try:
                result = results.get(timeout=1)
                break
            except queue.Empty:
                lost = [w.exitcode for w in workers if w.exitcode]
                if lost or time.monotonic() > deadline:
                    raise SystemExit(
                        f"a worker failed with exit code {lost[0]}" if lost else f"no result in {limit:g} s"
                    ) from None
        for worker in workers:
            worker.join(60)
    finally:
        for worker in workers:
            worker.kill()
    del store  # until here it served them
    return result


def _worker(place: dict[str, str], work: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)
    link: Link = connect(backend="gloo", timeout=300)
    result = work(link, *arguments)
    if link.rank == 0:
        results.put(result)
    disconnect()
