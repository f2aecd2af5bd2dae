"""`thinwire sim`: the same training loop on simulated workers, with the time that a network of given speed would take."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.links import Link
from thinwire.network import Network
from thinwire.sim import World
from thinwire.tools.build import task_of
from thinwire.tools.config import RunConfig
from thinwire.tools.display import Display, MetricsFile
from thinwire.tools.summary import keep_result, summarise
from thinwire.tools.train import Progress, Trainer


def simulate(
    config: RunConfig,
    folder: Path,
    *,
    network: Network,
    step_time: float | tuple[float, ...] | None,
    console: Console,
) -> dict[str, Any]:
    """Run all workers in this process and return the summary, which is also written into `folder`.

    Args:
        config: what to run.
        folder: gets metrics.jsonl and summary.json.
        network: bandwidth and latency.
        step_time: seconds of one local step, one number or one per worker; None measures what each takes on this machine.
        console: where progress is shown.
    """
    workers = config.workers or 2
    world = World(workers, network=network, step_time=step_time, seed=config.seed)
    task = task_of(config, workers)  # one copy of the data for all
    metrics = MetricsFile(folder / "metrics.jsonl")
    title = f"sim {config.algorithm} {config.task} x{workers}"
    with Display(title, config.steps, task.unit, console=console) as display, contextlib.closing(metrics):

        def worker(link: Link) -> dict[str, Any]:
            trainer = Trainer(config, link, task=task)

            def watch(progress: Progress) -> None:
                if link.rank == 0:
                    metrics(progress)
                    display(progress)

            return summarise(trainer, trainer.run(watch), simulated=True)

        results = world.run(worker)
    summary = results[0] | {"simulated_seconds": max(figures["seconds"] for figures in results)}
    keep_result(folder, summary, [metrics.problem])
    return summary
