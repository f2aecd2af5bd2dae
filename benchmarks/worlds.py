"""Large worlds: time per step and bytes per worker of each route at 4 to 1,024 workers, with the plan's prediction beside it.

    python -m benchmarks.worlds                              # gpt-pico, a few steps each; about half an hour on 2 cores
    python -m benchmarks.worlds --workers 4,16 --routes gather,two-level --record

The workers are simulated on links of 100 Mbit/s and 20 ms with steps of 0.5 s; inside a site, 10 Gbit/s. Seconds and bytes are
of the simulator's clock and meter, and the same on any machine. `cpu` is what a step of all workers takes of one core, and
`memory` the peak of the process (VmHWM), which has one world and nothing else. Every run has a process of its own and a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

NETWORK = {"bandwidth": 100e6, "latency": 0.02}
INSIDE = {"bandwidth": 10e9}
STEP_TIME, STEPS = 0.5, 3
MEMBERS = 8  # of a site, at most: half of the workers where they are few
WORKERS = (4, 16, 64, 256, 1024)
LIMIT = 1200  # seconds for one run


@dataclass(frozen=True)
class Route:
    """A way for a step's message to reach all workers.

    Attributes:
        name: in the table.
        algorithm: what is run.
        settings: of the algorithm.
        wire: its codec in words; its own by default.
        route: what becomes of messages that the wire cannot average.
        sites: whether workers are grouped into sites of up to `MEMBERS`.
    """

    name: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    wire: str | None = None
    route: Literal["gather", "owners"] = "gather"
    sites: bool = False


DEMO = "DCT(64) >> TopK(128) >> Sign()"  # the same in all rounds, as short runs say nothing of later ones
ROUTES = (
    Route("ddp", "data-parallel"),
    Route("gather", "demo", wire=DEMO),
    Route("owners", "demo", wire=DEMO, route="owners"),
    Route("two-level", "demo", wire=DEMO, sites=True),
)


def members_of(route: Route, workers: int) -> int:
    """How many workers a site has; 1 where there are none."""
    return min(MEMBERS, workers // 2) if route.sites else 1


def run(route: Route, workers: int, task: str) -> dict[str, Any]:
    """One world of this route."""
    import torch

    from thinwire.core.optimizer import Algorithm
    from thinwire.links import Link
    from thinwire.network import Network
    from thinwire.sim import World
    from thinwire.sim.memory import SharedMemory
    from thinwire.tools.build import task_of
    from thinwire.tools.config import RunConfig
    from thinwire.tools.train import Progress, Trainer

    torch.set_num_threads(1)
    members = members_of(route, workers)
    config = RunConfig(algorithm=route.algorithm, task=task, workers=workers, steps=STEPS, batch=1, wire=route.wire)
    config = replace(config, route=route.route)
    config = RunConfig(**{**asdict(config), "settings": dict(route.settings)})
    sites = workers // members if route.sites else None
    world = World(workers, network=Network(**NETWORK), step_time=STEP_TIME, sites=sites, inside=Network(**INSIDE))
    made, memory = task_of(config, workers), SharedMemory(world)
    seen: list[tuple[Progress, float, int]] = []

    def worker(link: Link) -> None:
        trainer = Trainer(config, link, task=made)
        assert isinstance(trainer.optimizer, Algorithm)
        memory.adopt(trainer.optimizer)
        inside = None if link.two_level is None else link.two_level.inside_meter

        def watch(progress: Progress) -> None:
            if link.data_rank == 0:
                seen.append((progress, time.process_time(), 0 if inside is None else inside.totals.sent))

        trainer.run(watch)

    world.run(worker)
    # The first step has the handshake, the last one the evaluation.
    (first, began, inside_before), (last, ended, inside_after) = seen[0], seen[-2]
    steps = last.step - first.step
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {
        "route": route.name,
        "workers": workers,
        "members": members,
        "task": task,
        "seconds": (last.seconds - first.seconds) / steps,
        "sent": (last.sent - first.sent) / steps,
        "inside": (inside_after - inside_before) / steps,
        **prediction(config, made.model(), workers, members),
        "cpu": (ended - began) / steps,
        "memory": int(peak[1]) / 1024 if peak else None,
    }


def prediction(config: Any, model: Any, workers: int, members: int) -> dict[str, float]:
    """What the plan says of a step, without the headers and control messages that a simulated link does not have."""
    from thinwire.network import Network
    from thinwire.tools.plan import Cluster, predict

    wire = {"goodput": 1.0, "control": 0, "network": Network(**NETWORK), "inside": Network(**INSIDE)}
    told = predict(config, model, Cluster(workers=workers // members, members=members, step_time=STEP_TIME, **wire))
    return {"predicted seconds": told.seconds_per_step, "predicted sent": told.bytes_per_step}


def in_a_process(route: Route, workers: int, task: str) -> dict[str, Any]:
    """`run` in a process of its own, so that its peak of memory is that of this world."""
    command = [sys.executable, "-m", "benchmarks.worlds", "--one", route.name, "--workers", str(workers), "--task", task]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    except subprocess.TimeoutExpired:
        return {"route": route.name, "workers": workers, "task": task, "failed": f"more than {LIMIT} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"route": route.name, "workers": workers, "task": task, "failed": last}
    return json.loads(done.stdout.splitlines()[-1])


def line(figures: dict[str, Any]) -> str:
    """A row of the table."""
    if "failed" in figures:
        return f"{figures['route']:10} {figures['workers']:>7}  {figures['failed']}"
    seconds, sent = (f"{figures[f'{name}']:.4g} ({figures[f'predicted {name}']:.4g})" for name in ("seconds", "sent"))
    return (
        f"{figures['route']:10} {figures['workers']:>7} {seconds:>22} {sent:>28} {figures['inside']:>12.4g} "
        f"{figures['cpu']:>9.2f} {figures['memory']:>9.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="how many, separated by commas")
    parser.add_argument("--routes", default=",".join(route.name for route in ROUTES), help="which, separated by commas")
    parser.add_argument("--task", default="gpt-pico", help="the model (default: gpt-pico)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/worlds.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    routes = {route.name: route for route in ROUTES}
    if given.one:
        print(json.dumps(run(routes[given.one], int(given.workers), given.task)))
        return
    columns = f"{'seconds (predicted)':>22} {'sent (predicted)':>28} {'inside':>12} {'cpu s':>9} {'memory MB':>9}"
    print(f"{'route':10} {'workers':>7} {columns}")
    for workers in map(int, given.workers.split(",")):
        for name in given.routes.split(","):
            figures = in_a_process(routes[name], workers, given.task)
            print(line(figures), flush=True)
            if given.record:
                from benchmarks import record

                record.append("worlds", figures)


if __name__ == "__main__":
    main()
