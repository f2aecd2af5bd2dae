"""Rounds whose messages owners average: what they send, and what they cost on real processes.

    python -m benchmarks.owners bytes [--record]   # bytes that leave a worker by each route; seconds, nothing is run
    python -m benchmarks.owners cpu [--record]     # CPU seconds of a round with 2 and 8 workers; about 3 minutes
    python -m benchmarks.owners mean [--record]    # what the mean of many 1-bit messages looks like; about 5 minutes
    python -m benchmarks.owners lab [--record]     # the plan against links that the kernel shapes, 8 workers; root, 12 minutes

`cpu` counts the CPU time of a worker's process in a round, the threads of gloo among it, and beside it that of the worker's own
thread; who waits for the others or for cores sleeps, so that does not count. Of several rounds the median. Entries are the
values that a worker has to read by the plans of its messages. `lab` compares seconds per step with what `thinwire plan`
predicts from the time of a step on links without a limit, which is measured before and after each speed.

`mean` trains gpt-pico by owners in the simulator and looks at what owners are about to send in the last rounds: how many
entries of a block anybody sent, and which part of the squares a codec leaves out of the mean, and of it with what is owed.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import record
from benchmarks.pair import SIZES, gpt_shapes, run_pair
from benchmarks.thin_wire import run_in
from thinwire import DCT, Chain, DeMo, Link, Owners, Sign, TopK, World
from thinwire.codecs.bits import Bytes
from thinwire.codecs.deal import ShareReceived
from thinwire.codecs.encoder import encode_share
from thinwire.codecs.message_plan import plan_for
from thinwire.codecs.stages import Floats, Row, Values
from thinwire.codecs.text import parse_codec
from thinwire.codecs.wire import HEADER_NBYTES
from thinwire.core.route import owned_nbytes
from thinwire.network import Network, ddp_bytes, parse_bandwidth
from thinwire.sim.memory import SharedMemory
from thinwire.tasks import make_task
from thinwire.tools.build import task_of
from thinwire.tools.flags import parse_run
from thinwire.tools.lab import Lab
from thinwire.tools.namespaces import call
from thinwire.tools.plan import Cluster, predict
from thinwire.tools.train import Trainer

SIZE, K, ROUNDS = "10M", 32, 12
LAB_TASK, LAB_WORKERS, LAB_STEPS, LAB_RUNS = "gpt-small", 8, 24, 2
QUEUE = 0.5  # seconds before a shaped wire: as in a home router; 20 ms have no room for a few packets to each of 7 others
SPEEDS = ("10mbit", "5mbit", "2mbit")
MEAN_WORKERS, MEAN_STEPS, LOOKS = (8, 16, 64), 32, 4
BACKS = {
    f"{k} in {name}": f"DCT(64) >> TopK({k}) >> {form}()"
    for k in (32, 64, 128, 256)
    for name, form in (("1 bit", "Sign"), ("2 bits", "TwoBit"), ("int8", "Int8"))
}
DEMO = ["--wire", f"DCT(64) >> TopK({K}) >> Sign()", "--route", "owners"]


def rounds(link: Link, route: str, repeats: int) -> dict[str, float]:
    """CPU seconds and entries of a DeMo step."""
    generator = torch.Generator().manual_seed(link.rank)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in gpt_shapes(*SIZES[SIZE])]
    opt = DeMo(params, link, codec=DCT(64) >> TopK(K) >> Sign(), route=route)  # type: ignore[arg-type]
    seconds, own, entries = [], [], 0
    for number in range(repeats + 2):  # the first two make tables and slots; in the first, reads are counted
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        began, began_own = time.process_time(), time.thread_time()
        with counted_reads() if number == 0 else nullcontext(Counter()) as reads:
            opt.step()
        own.append(time.thread_time() - began_own)
        seconds.append(time.process_time() - began)
        entries += reads.total()
    times = {"cpu": statistics.median(seconds[2:]), "thread": statistics.median(own[2:])}
    return {**times, "entries": entries, "sent": opt.meter.totals.sent / (repeats + 2)}


@contextmanager
def counted_reads() -> Iterator[Counter[int]]:
    """How many values each thread reads of messages that owners get or send; gathered messages are read in another way."""
    reads: Counter[int] = Counter()
    read_all = Values.read_all

    def counted(form: Values, raw: Bytes, row: Row) -> Floats:
        values = read_all(form, raw, row)
        reads[threading.get_ident()] += values.size
        return values

    Values.read_all = counted  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        Values.read_all = read_all


def sent() -> dict[str, Any]:
    """Bytes that leave a worker in a DeMo round, votes among them: the formula that a test holds to the meter."""
    figures: dict[str, Any] = {"what": "bytes", "k": K, "rows": []}
    codec = Chain.of(DCT(64) >> TopK(K) >> Sign())
    for task in ("gpt-pico", "gpt-nano", "gpt-small"):
        params = list(make_task(task).model().parameters())
        for workers in (4, 8, 16, 64):
            halves = owned_nbytes(Owners(), codec, params, range(len(params)), workers)
            owners = [sum(halves.sent(rank)) + workers - 1 for rank in range(workers)]
            dense = ddp_bytes(sum(p.numel() for p in params), workers)
            row = {"task": task, "workers": workers, "mean": statistics.mean(owners), "most": max(owners), "ddp": dense}
            row["gather"] = (workers - 1) * (HEADER_NBYTES + codec.nbytes(params) + 1)
            figures["rows"].append(row)
            told = f"owners {row['mean']:,.0f} (most {row['most']:,}), {dense / row['mean']:.0f}x fewer than DDP"
            print(f"{task:9} {workers:3} workers: {told}; gather {row['gather']:,}")
    return figures


def cpu(workers: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Both routes with so many workers."""
    figures: dict[str, Any] = {"what": "cpu", "size": SIZE, "k": K, "rows": []}
    for route in ("gather", "owners"):
        for size in workers:
            row = {"route": route, "workers": size, **run_pair(rounds, route, repeats, limit=900, size=size)}
            figures["rows"].append(row)
            print(f"{route:8} {size:3} workers: {1e3 * row['cpu']:.1f} ms of CPU, {row['entries']:,} entries", flush=True)
    return figures


def mean(seeds: int) -> dict[str, Any]:
    """What owners are about to send, with different numbers of workers."""
    figures: dict[str, Any] = {"what": "mean", "k": K, "steps": MEAN_STEPS, "seeds": seeds, "rows": []}
    for workers in MEAN_WORKERS:
        looks = [_look(workers, seed) for seed in range(seeds)]
        row: dict[str, Any] = {"workers": workers, "entries": statistics.mean(look.entries / look.blocks for look in looks)}
        row["alone"] = statistics.mean(look.alone / look.entries for look in looks)
        for name in BACKS:
            for of in ("mean", "owed"):
                left = [look.left[of, name] / look.total[of] for look in looks]
                row[f"{of} {name}"] = [statistics.mean(left), statistics.stdev(left) if seeds > 1 else 0.0]
        figures["rows"].append(row)
        told = ", ".join(f"{name} {100 * row[f'mean {name}'][0]:.1f}%" for name in BACKS)
        print(
            f"{workers:3} workers: {row['entries']:.0f} entries of a block, {row['alone']:.0%} by one; left out: {told}",
            flush=True,
        )
    return figures


@dataclass
class _Look:
    """What was seen of owners' shares: squares in all, squares that codecs leave out, entries, and those that one sent."""

    total: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    left: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    blocks: int = 0
    entries: int = 0
    alone: int = 0

    def at(self, received: ShareReceived, slots: Sequence[Tensor]) -> None:
        """Look at the messages of a share, and at slots that have the mean and what is owed."""
        layout = received.plan.layout
        gathered = [torch.zeros_like(slot) for slot in slots]
        received.add_to(gathered)
        for room, group in zip(received._indices, layout.groups, strict=True):
            assert room is not None
            for block in range(group.blocks):
                _, senders = np.unique(room[:, block], return_counts=True)
                self.blocks, self.entries, self.alone = (
                    self.blocks + 1,
                    self.entries + len(senders),
                    self.alone + (senders == 1).sum(),
                )
        inside = [grid.index for group in layout.groups for grid in group.grids]
        for of, told in (("mean", gathered), ("owed", slots)):
            self.total[of] += _squares(told, inside)
            for name, text in BACKS.items():
                chain, rest = Chain.of(parse_codec(text)), [slot.clone() for slot in told]
                encode_share(chain, told, plan_for(chain, layout, headers=False)).take_from(rest)
                self.left[of, name] += _squares(rest, inside)


def _squares(tensors: Sequence[Tensor], which: Sequence[int]) -> float:
    return sum(float(tensors[i].square().sum(dtype=torch.float64)) for i in which)


def _look(workers: int, seed: int) -> _Look:
    """Train for some steps and look at the last rounds."""
    flags = ["--algorithm", "demo", "--task", "gpt-pico", *DEMO, "--workers", str(workers), "--seed", str(seed)]
    config = parse_run("sim", [*flags, "--steps", str(MEAN_STEPS), "--lr", "2.83e-3", "--batch", "1", "--eval-every", "0"])[0]
    look, task, add_to = _Look(), task_of(config, workers), ShareReceived.add_to
    world = World(workers, step_time=0.0)
    memory = SharedMemory(world)

    def watched(received: ShareReceived, slots: Sequence[Tensor]) -> None:
        add_to(received, slots)
        if received.round > MEAN_STEPS - LOOKS:
            ShareReceived.add_to = add_to
            look.at(received, slots)
            ShareReceived.add_to = watched  # type: ignore[method-assign]

    def worker(link: Link) -> None:
        trainer = Trainer(config, link, task=task)
        assert isinstance(trainer.optimizer, DeMo)
        memory.adopt(trainer.optimizer)
        trainer.run(lambda _: None)

    ShareReceived.add_to = watched  # type: ignore[method-assign]
    try:
        world.run(worker)
    finally:
        ShareReceived.add_to = add_to
    return look


def lab(speeds: Sequence[str], queue: float, repeats: int) -> dict[str, Any]:
    """What the plan says, and what was measured, at some speeds; of several runs the fastest, as in `thin_wire`."""
    config = parse_run("train", ["--algorithm", "demo", "--task", LAB_TASK, *DEMO])[0]
    model = make_task(LAB_TASK).model()
    figures: dict[str, Any] = {"what": "lab", "task": LAB_TASK, "workers": LAB_WORKERS, "queue": queue, "rows": []}
    command = f"demo --wire '{DEMO[1]}' --route owners"
    with Lab(LAB_WORKERS, queue=queue) as place:
        around = [_run(place, "inf", command)]
        for speed in speeds:
            runs = [_run(place, speed, command) for _ in range(repeats)]
            around.append(_run(place, "inf", command))
            free = min(run["seconds"] for run in around[-2:])
            cluster = Cluster(workers=LAB_WORKERS, network=Network(bandwidth=parse_bandwidth(speed)), step_time=free)
            best, predicted = min(runs, key=lambda run: run["seconds"]), predict(config, model, cluster).seconds_per_step
            figures["rows"].append({"speed": speed, **best, "predicted": predicted, "free": free})
            off = predicted / best["seconds"] - 1
            lost = f"{best['resent']:.1f} packets sent again per worker and step"
            print(f"{speed:>8}: {best['seconds']:.3f} s per step, predicted {predicted:.3f} ({off:+.0%}), {lost}", flush=True)
    return figures


def _run(place: Lab, speed: str, command: str) -> dict[str, float]:
    """Seconds per step, and what a worker's interface sent in it and TCP sent again."""
    before = _resent(place)
    measured = run_in(place, speed, command, LAB_STEPS, batch=1, task=LAB_TASK)
    assert measured.seconds_per_step is not None
    each = LAB_STEPS * place.workers
    told = {"framed": measured.total.framed_sent / each, "metered": (measured.metered or 0) / each}
    return {"seconds": measured.seconds_per_step, "resent": (_resent(place) - before) / each, **told}


def _resent(place: Lab) -> int:
    """Packets that TCP has sent again in all namespaces of a lab so far."""
    told = [call(["ip", "netns", "exec", name, "cat", "/proc/net/snmp"]) for name in place.namespaces]
    tables = [[line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")] for text in told]
    return sum(int(values[names.index("RetransSegs")]) for names, values in tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "cpu", "mean", "lab"])
    parser.add_argument("--workers", default="2,8", help="of `cpu`, separated by commas (default: 2,8)")
    parser.add_argument("--repeats", type=int, default=ROUNDS, help=f"rounds of `cpu` (default: {ROUNDS})")
    parser.add_argument("--seeds", type=int, default=3, help="of `mean` (default: 3)")
    parser.add_argument("--speeds", default=",".join(SPEEDS), help=f"of `lab` (default: {','.join(SPEEDS)})")
    parser.add_argument("--runs", type=int, default=LAB_RUNS, help=f"of `lab`, at each speed (default: {LAB_RUNS})")
    parser.add_argument("--queue", type=float, default=QUEUE, help=f"of `lab`, seconds (default: {QUEUE})")
    parser.add_argument("--record", action="store_true", help="append the figures to records/owners.jsonl")
    given = parser.parse_args()
    if given.what == "cpu":
        figures = cpu(tuple(map(int, given.workers.split(","))), given.repeats)
    elif given.what == "mean":
        figures = mean(given.seeds)
    else:
        figures = sent() if given.what == "bytes" else lab(given.speeds.split(","), given.queue, given.runs)
    if given.record:
        record.append("owners", figures)


if __name__ == "__main__":
    main()
