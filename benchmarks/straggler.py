"""A worker that is now and then ten times slower, and a link of 1 Mbit/s: real processes in the lab, on an elastic link.

    python -m benchmarks.straggler                       # root, iproute2; about 6 minutes; --save appends to the records

Four workers in network namespaces train gpt-pico. A local step takes `step_seconds`, by sleeping for what the computing leaves
of it; on the last worker a part of the steps (`tail`) takes ten times as long. "waits for all" is the same method on a gloo
link of fixed workers, "elastic" a run on a cluster whose host is beside worker 0. Of both: seconds from round to round on
worker 0, and how many messages a second were counted. The last runs have no straggler, but wires of 1 Mbit/s.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

import thinwire
from benchmarks import record
from thinwire.links import ElasticLink, Link
from thinwire.links.host import RunHost
from thinwire.tools.build import optimizer_of, task_of
from thinwire.tools.config import RunConfig
from thinwire.tools.lab import Lab

NAME = "straggler"
TIMES = 10  # longer, a slow step of the straggler
LIMIT = 300.0  # seconds that a worker waits for another


@dataclass(frozen=True)
class Job:
    """What all workers of one measurement do.

    Attributes:
        way: "elastic" or "waits for all".
        algorithm: of `thinwire train`.
        H: local steps of a round; 0 for a method that has none.
        rounds: how many.
        wire: what is sent, if not the method's own choice.
        step_seconds: of a local step, at least.
        tail: part of the straggler's steps that are slow.
        workers: real processes.
        bandwidth: bits per second of each worker's wire.
    """

    way: str
    algorithm: str
    H: int = 8
    rounds: int = 20
    wire: str | None = None
    step_seconds: float = 0.2
    tail: float = 0.1
    workers: int = 4
    bandwidth: float = float("inf")

    @property
    def steps(self) -> int:
        """That the run counts."""
        return self.rounds * max(1, self.H)


# --- One worker, in a namespace of its own ----------------------------------------------------------------------------------


def work(job: Job) -> dict[str, Any]:
    """Train as one worker of a lab; what it saw."""
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if job.way != "elastic":
        return train(job, thinwire.connect(timeout=LIMIT))
    with hosted(rank, size) as link:
        return train(job, link)


def train(job: Job, link: Link) -> dict[str, Any]:
    """Train on a link; seconds from round to round, and what was counted."""
    rank, size = link.rank, job.workers
    settings = {"H": job.H} if job.H else {}
    config = RunConfig(algorithm=job.algorithm, task="gpt-pico", steps=job.steps, wire=job.wire, settings=settings)
    task = task_of(config, size)
    model = task.model()
    opt, run = optimizer_of(config, model, link), link.elastic
    if run is not None:
        opt.join()
    slow, times, counted, rounds = random.Random(rank), [], [], opt.rounds
    while opt.steps < job.steps and not opt.ended:
        started = time.monotonic()
        batch = task.batch(rank, opt.steps) if opt.block is None else task.block(opt.block, opt.block_step)
        task.loss(model, batch).backward()
        factor = TIMES if rank == size - 1 and slow.random() < job.tail else 1
        time.sleep(max(0.0, factor * job.step_seconds - (time.monotonic() - started)))
        opt.step()
        opt.zero_grad()
        if opt.rounds != rounds:
            rounds = opt.rounds
            times.append(time.monotonic())
            counted.append(list(range(size)) if run is None else list(run.status.counted))
    opt.finish()
    seconds = (times[-1] - times[0]) / max(1, len(times) - 1)
    straggler = sum(size - 1 in ids for ids in counted) / len(counted)
    messages = sum(map(len, counted[1:])) / (times[-1] - times[0])
    return {"seconds per round": seconds, "messages per second": messages, "straggler counted": straggler}


@contextlib.contextmanager
def hosted(rank: int, size: int) -> Iterator[ElasticLink]:
    """An elastic link on a cluster, whose host is in the process of worker 0, until all have left."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with contextlib.ExitStack() as way_out:
        if rank == 0:
            way_out.enter_context(contextlib.closing(RunHost(address, port, workers=size)))
        link = thinwire.join(f"tcp://{address}:{port}", id=rank, outage=LIMIT, timeout=LIMIT, first_wait=60.0)
        yield link
        link.store.create(f"done/{rank}", b"done")
        until = time.monotonic() + LIMIT
        while rank == 0 and len(link.store.list("done/")) < size and time.monotonic() < until:
            time.sleep(0.05)
        # Not link.close(): it asks the host, which by then may be gone, and the run has ended for all.


# --- The lab -----------------------------------------------------------------------------------------------------------------


def measure(lab: Lab, job: Job) -> dict[str, Any]:
    """Run a job in a lab; the figures of worker 0, and the bytes that its interface sent."""
    lab.reshape(bandwidth=job.bandwidth)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        told = json.dumps(asdict(job))
        command = [sys.executable, "-m", "benchmarks.straggler", "--job", told, "--out", str(out)]
        ended = lab.run(command, env={"OMP_NUM_THREADS": "1"}, timeout=1200)
        sent = [c.sent for c in ended.counters]
        return asdict(job) | json.loads(out.read_text()) | {"sent": sent, "seconds": ended.seconds}


def main(
    job: str | None = None,
    out: str | None = None,
    methods: tuple[str, ...] = ("diloco", "demo", "thin"),
    rounds: int = 20,
    H: int = 8,
    step_seconds: float = 0.2,
    tail: float = 0.1,
    save: bool = False,
) -> None:
    """Measure in the lab.

    Args:
        job: be one worker of it instead.
        out: where worker 0 writes its figures.
        methods: with a straggler, and "thin" for the runs on links of 1 Mbit/s.
        rounds: of DiLoCo; DeMo takes as many steps.
        H: local steps of DiLoCo.
        step_seconds: of a local step; long ones where the machine is busy.
        tail: part of the straggler's steps that are slow.
        save: append the figures to the records.
    """
    if job is not None:
        figures = work(Job(**json.loads(job)))
        if os.environ["RANK"] == "0" and out is not None:
            Path(out).write_text(json.dumps(figures))
        return

    slow: dict[str, Any] = {"step_seconds": step_seconds, "tail": tail}
    thin: dict[str, Any] = {"way": "elastic", "tail": 0.0, "bandwidth": 1e6, "rounds": max(2, rounds // 2)}
    jobs = {
        "diloco": [Job(way, "diloco", H=H, rounds=rounds, **slow) for way in ("waits for all", "elastic")],
        "demo": [Job(way, "demo", H=0, rounds=H * rounds, **slow) for way in ("waits for all", "elastic")],
        "thin": [
            Job(algorithm="demo", H=0, wire="DCT(64) >> TopK(128) >> Sign()", **thin),  # the same in these few rounds
            Job(algorithm="diloco", **thin),
            Job(algorithm="diloco", wire="fp4", **thin),
        ],
    }
    with Lab(jobs["diloco"][0].workers) as lab:
        for one in (one for method in methods for one in jobs[method]):
            figures = measure(lab, one)
            show(figures)
            if save:
                record.append(NAME, figures)


def show(figures: dict[str, Any]) -> None:
    """One line."""
    seen = [f"{name} {figures[name]:.3g}" for name in ("seconds per round", "messages per second", "straggler counted")]
    wire = f"{figures['wire'] or 'its own wire'} at {figures['bandwidth']:.3g} bit/s"
    print(f"{figures['algorithm']}, {wire}, {figures['way']}: {', '.join(seen)}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
