"""Steps and rounds on a device: seconds, memory, and whether the host is ever made to wait.

    python -m benchmarks.wire --device cuda --sizes 124M                                  # one GPU, no messages
    torchrun --nproc-per-node 2 -m benchmarks.wire --device cuda --sizes 124M             # over NCCL

`torch.cuda.set_sync_debug_mode("error")` is on around steps that are not timed: the first call of each method that makes the
host wait is recorded with its line. It does not see what torch.distributed does.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import thinwire
from benchmarks.pair import SIZES, gpt_shapes
from thinwire import DCT, MTDAO, Algorithm, DecoupledDiLoCo, DeMo, DiLoCo, Link, Sign, TopK
from thinwire.links import connect
from thinwire.optim import QHAdam

H = 2  # steps per round, so that a local step and a round are timed in turn
SOURCE = Path(thinwire.__file__).parent

Make = Callable[[list[nn.Parameter], Link], Algorithm]


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


METHODS: dict[str, Make] = {
    "DiLoCo, fused AdamW": lambda p, link: DiLoCo(_adamw(p), link, H=H, alarm_every=0),
    "DiLoCo, foreach AdamW": lambda p, link: DiLoCo(torch.optim.AdamW(p, lr=1e-4, foreach=True), link, H=H, alarm_every=0),
    "MT-DAO, QHAdam": lambda p, link: MTDAO(QHAdam(p, lr=1e-4), link, H=H, clip_norm=1.0, alarm_every=0),
    "DecoupledDiLoCo, k=128": lambda p, link: DecoupledDiLoCo(_adamw(p), link, H=H, alarm_every=0),
    "DeMo, k=128": lambda p, link: DeMo(p, link, lr=1e-4, codec=DCT(64) >> TopK(128) >> Sign(), alarm_every=0),
    "DeMo, k=32": lambda p, link: DeMo(p, link, lr=1e-4, codec=DCT(64) >> TopK(32) >> Sign(), alarm_every=0),
}


def measure(
    device: torch.device, sizes: Sequence[str], repeats: int, methods: Sequence[str] = tuple(METHODS)
) -> dict[str, Any]:
    """The figures of all methods at all sizes, on this process's GPU."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    link, figures = connect(timeout=300), dict[str, Any]()
    for size in sizes:
        shapes = gpt_shapes(*SIZES[size])
        rows = {name: measure_method(METHODS[name], link, shapes, device, repeats) for name in methods}
        figures[size] = {"parameters": sum(map(math.prod, shapes)), "tensors": len(shapes), "methods": rows}
    return {"device": str(device), "workers": link.size, "sizes": figures}


def measure_method(
    make: Make, link: Link, shapes: Sequence[tuple[int, ...]], device: torch.device, repeats: int
) -> dict[str, Any]:
    """Seconds of a local step and of a round, memory, and the first call that makes the host wait."""
    params = _parameters(shapes, device)
    opt = make(params, link)
    _take(opt, params, 2 * H, device)  # what is made once: state, plans, pinned memory
    waits = first_wait(lambda: _take(opt, params, 2 * H, device)) if device.type == "cuda" else None
    if waits is not None:  # it was stopped in the middle
        params = _parameters(shapes, device)
        opt = make(params, link)
        _take(opt, params, 2 * H, device)
    return {"waits": waits, **_timed(opt, repeats, device)}


def _parameters(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device=device).mul_(0.02)) for shape in shapes]


def _take(opt: Algorithm, params: list[nn.Parameter], steps: int, device: torch.device) -> None:
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p) if p.grad is None else p.grad
        opt.step()
    wait_for(device)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        with waits_allowed():
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def waits_allowed() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def first_wait(steps: Callable[[], Any]) -> str | None:
    """Where thinwire first makes the host wait for the GPU in these steps, as file:line; None where it does not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(SOURCE)]
        return f"{Path(frames[-1].filename).relative_to(SOURCE)}:{frames[-1].lineno}" if frames else str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def _timed(opt: Algorithm, repeats: int, device: torch.device) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {"local": [], "round": []}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    for _ in range(repeats * H):
        wait_for(device)
        before, started = opt.rounds, time.perf_counter()
        opt.step()
        asked = time.perf_counter() - started
        wait_for(device)
        times["round" if opt.rounds > before else "local"].append((asked, time.perf_counter() - started))
    found: dict[str, Any] = {}
    for what, pairs in times.items():
        if pairs:  # every step of DeMo is a round
            found[f"{what} s"] = statistics.median(done for _, done in pairs)
            found[f"{what} s of the host"] = statistics.median(asked for asked, _ in pairs)
    peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None
    return found | {"peak MB beside the state": peak if peak is None else peak / 1e6}


def show(figures: dict[str, Any]) -> None:
    """All sizes as tables."""
    console = Console()
    for size, of_size in figures["sizes"].items():
        title = f"{size}, {of_size['tensors']} tensors, {figures['workers']} workers, {figures['device']}"
        table = Table("method", "local s", "round s", "host, round s", "peak MB", "first wait", title=title)
        for name, row in of_size["methods"].items():
            seconds = [f"{row[key]:.4f}" if key in row else "-" for key in ("local s", "round s", "round s of the host")]
            peak = row["peak MB beside the state"]
            waits = row["waits"] or ("none" if peak is not None else "not looked at")
            table.add_row(name, *seconds, "-" if peak is None else f"{peak:.0f}", waits)
        console.print(table)
