"""How much of the time is computing, where the wire is slow: `python -m benchmarks.overlap`.

Two gloo workers on loopback, one thread each, train gpt-nano behind a `Throttled` link. Its bandwidth is set from measured
steps, so that a blocking sync of the whole model takes as long as 5 steps; it follows the median of the last 16 of them, since
a machine that is busy with something else would change the ratio otherwise. DiLoCo waits for that sync every H steps;
StreamingDiLoCo sends a fragment at a time and waits tau steps later, if it still has to.

Utilisation is compute / total: compute is forward, backward and the inner optimizer's step; the rest is packing, posting,
waiting and the outer step. Bar: 95% for StreamingDiLoCo with enough tau.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import thinwire
from benchmarks import record
from benchmarks.pair import run_pair
from thinwire.links import Link, Throttled, TorchLink
from thinwire.links.base import LinkDecorator, Ticket
from thinwire.network import Network, Op, ring_traffic
from thinwire.payload import Payload
from thinwire.tasks import make_task

H, P, SYNC_STEPS, BAR = 32, 4, 5, 0.95
BUDGET = 150.0  # seconds that all ways together shall take


@dataclass
class Step:
    """Seconds of one step, by what they were spent on."""

    compute: float = 0.0
    post: float = 0.0
    wait: float = 0.0
    total: float = 0.0


@dataclass
class Timeline:
    """The steps of a run, the newest last."""

    steps: list[Step] = field(default_factory=lambda: [Step()])

    def book(self, what: str, started: float) -> None:
        setattr(self.steps[-1], what, getattr(self.steps[-1], what) + time.perf_counter() - started)


class Timed(LinkDecorator):
    """Books the seconds that posts and waits take."""

    def __init__(self, link: Link, timeline: Timeline):
        super().__init__(link)
        self.timeline = timeline

    def post(self, payload: Payload, op: Op) -> Ticket:
        started = time.perf_counter()
        ticket = self.link.post(payload, op)
        self.timeline.book("post", started)
        return TimedTicket(self.timeline, ticket)


class TimedTicket(Ticket):
    def __init__(self, timeline: Timeline, ticket: Ticket):
        self.timeline, self.ticket = timeline, ticket

    def _finish(self) -> list[Payload]:
        started = time.perf_counter()
        result = self.ticket.wait()
        self.timeline.book("wait", started)
        return result


class TimedAdamW(torch.optim.AdamW):
    """Books its steps as compute."""

    def __init__(self, params: Any, timeline: Timeline):
        super().__init__(params, lr=1e-3)
        self.timeline = timeline

    def step(self, closure: Any = None) -> Any:
        started = time.perf_counter()
        super().step(closure)
        self.timeline.book("compute", started)


def run(link: Link, task: Any, steps: int, make: Any, *, nbytes: int = 0) -> list[Step]:
    """Train, and return the timeline without the first step, which greets the others and fills caches.

    Args:
        link: the fast link.
        task: what to train.
        steps: how many steps to time.
        make: the optimizer, of an inner one and a link.
        nbytes: what SYNC_STEPS steps shall move over the wire; 0 for a wire without limit.
    """
    timeline, model = Timeline(), task.model()
    wire = Throttled(link, Network())
    opt = make(TimedAdamW(model.parameters(), timeline), Timed(wire, timeline))
    dist.barrier()
    for step in range(1, steps + 2):
        if nbytes and step > 1:
            usual = statistics.median(s.compute for s in timeline.steps[-17:-1])
            wire.wire.network = Network(bandwidth=8 * nbytes / (SYNC_STEPS * usual))
        started = time.perf_counter()
        task.loss(model, task.batch(link.rank, step)).backward()
        timeline.book("compute", started)
        opt.step()
        opt.zero_grad()
        timeline.book("total", started)
        timeline.steps.append(Step())
    wire.wire.network = Network()
    opt.finish()
    return timeline.steps[1 : steps + 1]


def bench(link: TorchLink, budget: float) -> dict[str, Any]:
    before, task = os.getloadavg()[0], make_task("gpt-nano", workers=link.size)
    count = sum(p.numel() for p in task.model().parameters())
    ways: dict[str, Any] = {"DiLoCo": lambda inner, wire: thinwire.DiLoCo(inner, wire, H=H)}
    for tau in range(6):
        ways[f"StreamingDiLoCo tau={tau}"] = lambda inner, wire, tau=tau: thinwire.StreamingDiLoCo(
            inner, wire, H=H, fragments=P, tau=tau
        )
    free = run(link, task, H, lambda inner, _: thinwire.DiLoCo(inner, thinwire.SoloLink(), H=10 * H))
    mine = torch.tensor([statistics.median(s.total for s in free)])
    dist.all_reduce(mine)
    step = float(mine) / link.size
    steps = H * max(1, min(4, int(budget / (len(ways) * H * step))))
    nbytes = ring_traffic("mean", [4 * (count + link.size)] * link.size, 0).sent
    found = {name: summary(run(link, task, steps, make, nbytes=nbytes)) for name, make in ways.items()}
    about = {"task": "gpt-nano", "parameters": count, "H": H, "fragments": P, "steps": steps, "sync_steps": SYNC_STEPS}
    return {**about, "step_seconds": step, "load": [before, os.getloadavg()[0]], "ways": found}


def summary(steps: list[Step]) -> dict[str, Any]:
    """Utilisation, and the timeline of the last H steps in milliseconds."""
    total = sum(s.total for s in steps)
    shares = {what: sum(getattr(s, what) for s in steps) / total for what in ("compute", "post", "wait")}
    last = {what: [round(1000 * getattr(s, what), 1) for s in steps[-H:]] for what in ("compute", "post", "wait")}
    return {"utilisation": shares.pop("compute"), **shares, "seconds": total, "timeline_ms": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds for all ways (default: {BUDGET:g})")
    parser.add_argument("--record", action="store_true", help="append the figures to records/overlap.jsonl")
    arguments = parser.parse_args()
    figures = run_pair(bench, arguments.budget, limit=1200)
    show(figures)
    if arguments.record:
        record.append("overlap", figures)


def show(figures: dict[str, Any]) -> None:
    sync = f"a sync of the whole model takes {figures['sync_steps']} steps"
    title = f"{figures['task']}, H={H}, {P} fragments, {1000 * figures['step_seconds']:.0f} ms per step, {sync}"
    table = Table("way", "compute / total", "posting", "waiting", "ms per step", title=title)
    for way, found in figures["ways"].items():
        shares = [f"{100 * found[key]:.1f}%" for key in ("utilisation", "post", "wait")]
        table.add_row(way, *shares, f"{1000 * found['seconds'] / figures['steps']:.1f}")
    console = Console()
    console.print(table)
    there = [way for way, found in figures["ways"].items() if found["utilisation"] >= BAR]
    console.print(f"at the bar of {100 * BAR:.0f}%: {', '.join(there) or 'none'}")
    if max(figures["load"]) > 3:  # ours are two of them
        console.print(f"the machine was busy with something else (load {figures['load']}): do not trust single rows")


if __name__ == "__main__":
    main()
