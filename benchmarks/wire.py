"""What the sparse wire costs and how many bytes it sends, as ratios within one run: `make bench`.

A full DeMo round on GPT-2-shaped lists of tensors: accumulate the momentum, transform, select, pack, exchange, unpack,
decode, apply. Two gloo workers on loopback, one thread each. All ways take turns in the same loop, so that a noisy machine
disturbs them alike; CPU seconds of a process, which say the same on a busy machine but for its caches, stand beside.

* rounds: the fast path against `tests/codecs/simple.py` (tensor by tensor, int64 + float32, two all_gathers each), beside a
  step of AdamW (foreach and fused) and a plain all-reduce of the same parameters. They add gradients as they are, look for no
  NaN and take a step of a sign;
* steps: all that `thinwire.DeMo` does in a step with its defaults (is the gradient finite, whitening, the round, phi = "unit"),
  beside the same step of AdamW and the same all-reduce;
* bytes: one worker's message, and how far its indices are above the entropy bound;
* memory: the most that a round takes beside parameters, gradients and momentum; of the optimizers too, and with 8 workers;
* workers: time to read and apply the messages of 1 to 32 workers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tests.codecs.simple import SimpleTopK
from torch import Tensor

from benchmarks import device, record
from benchmarks.pair import SIZES, gpt_shapes, run_pair
from thinwire import DCT, DecoupledDiLoCo, Float, Int8, Link, Mean, Sign, TopK, kernels, share
from thinwire import DeMo as DeMoOptimizer
from thinwire.codecs import Chain, Made, Messages
from thinwire.payload import Payload

DECAY, LR = 0.999, 1e-3

FAST: dict[str, Chain] = {
    "thinwire k=32 bf16": DCT(64) >> TopK(32) >> Float("bf16"),
    "thinwire k=32 1-bit": DCT(64) >> TopK(32) >> Sign(),
    "thinwire k=8 1-bit": DCT(64) >> TopK(8) >> Sign(),
    "thinwire k=128 1-bit": DCT(64) >> TopK(128) >> Sign(),
}
SIMPLE = {"simple k=32": 32, "simple k=8": 8}
STEPS = (128, 32)  # entries kept of a block: twice what DeMo keeps after its first rounds, and as published


class DeMo:
    """The state of one worker, and a round the simple way and the fast way; they differ in nothing but rounding."""

    def __init__(self, link: Link, shapes: Sequence[tuple[int, ...]]):
        torch.manual_seed(0)
        self.link = link
        self.params = [torch.randn(s).mul_(0.02) for s in shapes]
        torch.manual_seed(1 + link.rank)
        self.grads = [torch.randn(s) for s in shapes]
        self.momenta: dict[str, list[Tensor]] = {}
        self.rounds = 0

    def momentum(self, name: str) -> list[Tensor]:
        """That of one way, made when it is first asked for."""
        if name not in self.momenta:
            shapes = FAST[name].slot_shapes(self.params) if name in FAST else [p.shape for p in self.params]
            self.momenta[name] = [torch.zeros(s) for s in shapes]
        return self.momenta[name]

    def simple(self, name: str) -> None:
        for p, g, m in zip(self.params, self.grads, self.momentum(name), strict=True):
            codec = SimpleTopK(tuple(p.shape), SIMPLE[name])
            m.mul_(DECAY).add_(g)
            places, values = codec.encode(m)
            m.sub_(codec.decode([(places, values)]))
            theirs = [self.link.all_gather(Payload(t.reshape(-1))) for t in (places, values)]
            gathered = [(a.data.view(places.shape), b.data.view(values.shape)) for a, b in zip(*theirs, strict=True)]
            p.add_(codec.decode(gathered).sign_(), alpha=-LR)

    def fast(self, name: str) -> None:
        self.rounds += 1
        m, senders = self.momentum(name), Mean(over="senders")
        got = share(
            self.link, FAST[name], m, self.grads, round=self.rounds, decay=DECAY, scale=1.0, mean=senders, invalid=False
        )
        self.link.commit()
        got.take_from(m)
        got.step(self.params, [LR] * len(m), [True] * len(m))


def take_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Least and median seconds of each way, and the least CPU seconds of this process."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            way()
            if turn:  # the first turn warms up
                times[name].append(time.perf_counter() - started)
                busy[name].append(time.process_time() - worked)
    return {name: {"least": min(t), "median": statistics.median(t), "cpu": min(busy[name])} for name, t in times.items()}


def bench_rounds(link: Link, size: str, repeats: int, k: Sequence[int]) -> dict[str, Any]:
    shapes = gpt_shapes(*SIZES[size])
    demo = DeMo(link, shapes)
    flat = torch.cat([g.flatten() for g in demo.grads])
    params = [torch.nn.Parameter(p) for p in demo.params]
    for p, g in zip(params, demo.grads, strict=True):
        p.grad = g
    ways: dict[str, Callable[[], Any]] = {name: lambda name=name: demo.simple(name) for name in SIMPLE}
    for name in FAST:
        ways[name] = lambda name=name: demo.fast(name)
    ways["all-reduce fp32"] = lambda: dist.all_reduce(flat)
    ways["AdamW foreach"] = torch.optim.AdamW(params, lr=LR, foreach=True).step
    ways["AdamW fused"] = torch.optim.AdamW(params, lr=LR, fused=True).step
    ways = {name: way for name, way in ways.items() if not (found := _k(name)) or found in k}
    return {"parameters": flat.numel(), "tensors": len(shapes), "seconds": take_turns(ways, repeats)}


def bench_steps(link: Link, size: str, repeats: int, k: Sequence[int]) -> dict[str, Any]:
    """Whole steps of an optimizer, of gradients that are there."""
    shapes = gpt_shapes(*SIZES[size])
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).mul_(0.02)) for s in shapes]
    torch.manual_seed(1 + link.rank)
    for p in params:
        p.grad = torch.randn(p.shape)
    flat = torch.cat([p.detach().flatten() for p in params])
    ways: dict[str, Callable[[], Any]] = {}
    for kept in STEPS:
        if kept in k:
            codec = DCT(64) >> TopK(kept) >> Sign()
            ways[f"DeMo k={kept}"] = DeMoOptimizer(params, link, lr=LR, codec=codec, alarm_every=0).step
    # After the others, whose first step compares the parameters of the workers: gradients differ, and here so does the step.
    ways["AdamW fused"] = torch.optim.AdamW(params, lr=LR, fused=True).step
    ways["all-reduce fp32"] = lambda: dist.all_reduce(flat)
    return {"parameters": flat.numel(), "tensors": len(shapes), "seconds": take_turns(ways, repeats)}


def _k(way: str) -> int:
    """The k in the name of a way; 0 where there is none."""
    return next((int(word.removeprefix("k=")) for word in way.split() if word.startswith("k=")), 0)


def bench_memory(link: Link, size: str, k: Sequence[int]) -> dict[str, float]:
    """Peak of the resident memory during a round, above what was resident before it, in MB."""
    demo = DeMo(link, gpt_shapes(*SIZES[size]))
    ways: dict[str, Callable[[], None]] = {name: lambda name=name: demo.fast(name) for name in FAST}
    for name in SIMPLE:
        ways[name] = lambda name=name: demo.simple(name)
    peaks = {}
    for name in (name for name in ways if _k(name) in k):
        demo.momentum(name)
        peaks[name] = _peak(ways[name])
    demo.momenta.clear()
    codec = DCT(64) >> TopK(32) >> Sign()
    for make in (_demo, _decoupled_diloco):
        params = [torch.nn.Parameter(p) for p in demo.params]
        for p, g in zip(params, demo.grads, strict=True):
            p.grad = g
        step = make(params, link, codec)
        step()
        peaks[f"{make.__name__[1:]}, the optimizer, k=32 1-bit"] = _peak(step)
    return peaks


def _demo(params: list[torch.nn.Parameter], link: Link, codec: Chain) -> Callable[[], Any]:
    return DeMoOptimizer(params, link, codec=codec).step


def _decoupled_diloco(params: list[torch.nn.Parameter], link: Link, codec: Chain) -> Callable[[], Any]:
    return DecoupledDiLoCo(torch.optim.SGD(params, lr=1e-6, foreach=False), link, H=1, codec=codec).step


def _peak(way: Callable[[], Any]) -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory back, so that its use counts again
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # begin to measure the peak anew
    way()
    return (_resident("VmHWM") - before) / 1e6


def bench_memory_of_many(size: str, k: int = 128, workers: int = 8) -> dict[str, Any]:
    """The same of a worker's whole round with DeMo's and with DecoupledDiLoCo's steps, the others' messages at hand."""
    shapes, chain, senders = gpt_shapes(*SIZES[size]), DCT(64) >> TopK(k) >> Sign(), Mean(over="senders")
    a, x, m = ([torch.randn(s).mul_(0.02) for s in shapes] for _ in range(3))
    slots = [torch.zeros(s) for s in chain.slot_shapes(x)]
    theirs = [chain.encode([torch.randn(s) for s in shapes])]
    theirs = [Payload(theirs[0].data.clone()) for _ in range(workers - 1)]
    feed = Made((m, a, x), lambda _, m, a, x: torch.mul(m, DECAY).add_(a - x))

    def demo() -> None:
        mine = chain.encode_slots(slots, x, decay=DECAY, scale=1.0, made=Made((x, a), lambda _, x, a: x / (a.abs() + 1)))
        received = chain.receive(Messages([mine.payload, *theirs], x, mean=senders), own=(0, mine))
        mine.take_from(slots)
        rms = received.squares()
        for i, part, Q in received.each(x):
            part.sub_(Q, alpha=LR / max(1e-30, rms[i]) ** 0.5)

    def decoupled() -> None:
        mine = chain.encode_tensors(feed)
        received = chain.receive(Messages([mine.payload, *theirs], x, mean=senders), own=(0, mine))
        feed.replace_first()
        for _, part, sent in mine.each(m):
            part.sub_(sent)
        for _, part, Q in received.each(a):
            part.sub_(Q, alpha=LR)

    demo()
    entries = workers * chain.plan(x).layout.groups[0].blocks * k
    bound = (theirs[0].nbytes + 2 * entries) / 1e6 + 32
    return {"DeMo": _peak(demo), "DecoupledDiLoCo": _peak(decoupled), "own message, 2 bytes an entry, 32 MB": bound}


def _resident(what: str = "VmRSS") -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def bench_bytes() -> dict[str, Any]:
    """Length of one worker's message; nothing is encoded."""
    out = {}
    for size, arguments in SIZES.items():
        like = [torch.empty(s, device="meta") for s in gpt_shapes(*arguments)]
        row: dict[str, Any] = {"dense fp32": 4 * sum(t.numel() for t in like)}
        for k in (32, 8):
            row[f"simple k={k}"] = sum(SimpleTopK(tuple(t.shape), k).nbytes for t in like)
            for values in (Float(), Float("bf16"), Int8(), Sign()):
                row[f"k={k} {values!r}"] = (DCT(64) >> TopK(k) >> values).nbytes(like)
            sections = [s for s in (DCT(64) >> TopK(k) >> Sign()).plan(like).sections if s.code]
            indices = sum(8 * s.code.nbytes(s.blocks) for s in sections if s.code)
            bound = sum(s.blocks * s.code.bound for s in sections if s.code)
            row[f"k={k} indices above the bound"] = indices / bound - 1
        out[size] = row
    return out


def bench_workers(size: str, repeats: int) -> dict[str, Any]:
    """Seconds to check, combine and apply the messages of many workers, in one process on one thread."""
    shapes = gpt_shapes(*SIZES[size])
    params = [torch.zeros(s) for s in shapes]
    out: dict[str, Any] = {}
    for name, chain in FAST.items():
        messages = []
        for rank in range(4):  # reading does not depend on who wrote what, so few different messages will do
            torch.manual_seed(rank)
            messages.append(chain.encode([torch.randn(s) for s in shapes]))
        out[name] = {}
        for workers in (1, 2, 4, 8, 16, 32):
            gathered = [messages[r % 4] for r in range(workers)]
            out[name][workers] = min(_timed(lambda: _apply(chain, gathered, params)) for _ in range(repeats))  # noqa: B023
    return {"parameters": sum(map(math.prod, shapes)), "seconds": out}


def _apply(chain: Chain, gathered: list[Payload], params: list[Tensor]) -> None:
    for _, p, q in chain.receive(Messages(gathered, params, mean=Mean(over="senders"))).each(params):
        p.add_(q.sign_(), alpha=-LR)


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


PARTS = ("rounds", "steps", "memory", "bytes", "workers")


def bench_pair(link: Link, sizes: list[str], repeats: int, k: Sequence[int], parts: Sequence[str]) -> dict[str, Any]:
    rounds = {size: bench_rounds(link, size, repeats, k) for size in sizes if "rounds" in parts}
    steps = {size: bench_steps(link, size, repeats, k) for size in sizes if "steps" in parts}
    memory = {sizes[-1]: bench_memory(link, sizes[-1], k)} if "memory" in parts else {}
    return {"kernels": kernels.name(), "rounds": rounds, "steps": steps, "memory MB": memory}


def measure(sizes: list[str], repeats: int, k: Sequence[int], parts: Sequence[str]) -> dict[str, Any]:
    figures = run_pair(bench_pair, sizes, repeats, k, parts)
    torch.set_num_threads(1)
    figures["memory MB, 8 workers, k=128"] = {sizes[-1]: bench_memory_of_many(sizes[-1])} if "memory" in parts else {}
    figures["bytes"] = bench_bytes() if "bytes" in parts else {}
    figures["workers"] = bench_workers(sizes[0], max(2, repeats // 2)) if "workers" in parts else {}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="lists of tensors (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each way (default: 5)")
    parser.add_argument("--k", type=int, nargs="+", default=[32, 8, 128], help="entries kept of a block (default: 32 8 128)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all of it)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/wire.jsonl")
    parser.add_argument("--device", default="cpu", help="cuda: steps and rounds of whole optimizers there (default: cpu)")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        on_a_device(arguments)
        return
    figures = measure(arguments.sizes, arguments.repeats, arguments.k, arguments.parts)
    show(figures)
    if arguments.record:
        record.append("wire", figures)


def on_a_device(arguments: argparse.Namespace) -> None:
    """The part of `benchmarks.device`; every process of a torchrun job measures, the first one tells."""
    if not torch.cuda.is_available():
        raise SystemExit(f"--device {arguments.device}: torch finds no GPU on this machine")
    figures = device.measure(torch.device(arguments.device), arguments.sizes, arguments.repeats)
    if os.environ.get("RANK", "0") == "0":
        device.show(figures)
        if arguments.record:
            record.append("wire_gpu", figures)


def show(figures: dict[str, Any]) -> None:
    console = Console()
    for row in figures["rounds"].values():
        title = f"a round of {row['parameters']:,} parameters, 2 workers"
        table = Table("way", "least s", "median s", "CPU s", "simple / way", "of CPU s", title=title)
        for way, t in row["seconds"].items():
            simple = row["seconds"].get(f"simple k={_k(way) or 32}", row["seconds"].get("simple k=32", t))
            ratios = (simple["median"] / t["median"], simple["cpu"] / t["cpu"])
            table.add_row(way, *(f"{t[what]:.3f}" for what in ("least", "median", "cpu")), *(f"{r:.2f}" for r in ratios))
        console.print(table)
    for row in figures["steps"].values():
        title = f"a whole step of {row['parameters']:,} parameters, 2 workers"
        table, fused = (
            Table("way", "least s", "median s", "CPU s", "of AdamW's CPU s", title=title),
            row["seconds"]["AdamW fused"],
        )
        for way, t in row["seconds"].items():
            seconds = [f"{t[what]:.3f}" for what in ("least", "median", "cpu")]
            table.add_row(way, *seconds, f"{t['cpu'] / fused['cpu']:.2f}")
        console.print(table)
    console.print(f"kernels: {figures['kernels']}", figures["memory MB, 8 workers, k=128"])
    for size, row in figures["memory MB"].items():
        table = Table("way", "MB", title=f"peak memory of a round at {size}, beside parameters, gradients and momentum")
        for way, peak in row.items():
            table.add_row(way, f"{peak:.0f}")
        console.print(table)
    for size, row in figures["bytes"].items():
        table = Table("message", "bytes", "of dense fp32", title=f"one worker's message at {size}")
        for what, number in row.items():
            if "bound" in what:
                table.add_row(what, f"{number:.1%}", "")
            else:
                table.add_row(what, f"{number:,}", f"1/{row['dense fp32'] / number:.0f}")
        console.print(table)
    if not figures["workers"]:
        return
    table = Table("workers", *FAST, title=f"s to read and apply, {figures['workers']['parameters']:,} parameters, 1 thread")
    for workers in next(iter(figures["workers"]["seconds"].values())):
        table.add_row(str(workers), *(f"{row[workers]:.3f}" for row in figures["workers"]["seconds"].values()))
    console.print(table)


if __name__ == "__main__":
    main()
