"""`thinwire sim`: the same training loop on simulated workers, with the time that a network of given speed would take."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError
from thinwire.links import ElasticLink, Link
from thinwire.sim import World
from thinwire.sim.memory import SharedMemory
from thinwire.tools.build import task_of
from thinwire.tools.config import RunConfig
from thinwire.tools.display import Display, MetricsFile
from thinwire.tools.elastic import ElasticTrainer
from thinwire.tools.summary import keep_result, summarise
from thinwire.tools.train import Progress, Trainer


def simulate(
    config: RunConfig,
    folder: Path,
    *,
    world: World,
    console: Console,
) -> dict[str, Any]:
    """Run all workers in this process and return the summary, which is also written into `folder`.

    Args:
        config: what to run.
        folder: gets metrics.jsonl and summary.json.
        world: of as many workers as the config has.
        console: where progress is shown.
    """
    task = task_of(config, world.size if world.churn is None else 1)  # one copy of the data for all
    memory = SharedMemory(world)
    metrics = MetricsFile(folder / "metrics.jsonl")
    title = f"sim {config.algorithm} {config.task} x{world.size}"
    with Display(title, config.steps, task.unit, console=console) as display, contextlib.closing(metrics):

        def worker(link: Link) -> dict[str, Any]:
            if isinstance(link, ElasticLink):
                trainer = ElasticTrainer(config, link, task=task)
                trainer.optimizer.join()
            else:
                trainer = Trainer(config, link, task=task)
                if isinstance(trainer.optimizer, Algorithm):  # a warm start changes its optimizer on the way
                    memory.adopt(trainer.optimizer)

            def watch(progress: Progress) -> None:
                if link.data_rank == 0:
                    metrics(progress)
                    display(progress)

            return summarise(trainer, trainer.run(watch), simulated=True)

        results = [figures for figures in world.run(worker) if figures is not None]  # None of a worker that stayed dead
    if not results:
        raise ConfigError(f"all {world.size} workers died before the run of {config.steps} steps ended")
    summary = results[0] | {"simulated_seconds": max(figures["seconds"] for figures in results)}
    keep_result(folder, summary, [metrics.problem])
    return summary
