"""The figures of a finished run: summary.json, what a person is told of it, and what DDP would have sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from thinwire import network
from thinwire.core.optimizer import Algorithm
from thinwire.errors import ThinwireError
from thinwire.links import Link
from thinwire.network import show_bytes
from thinwire.tasks.task import Task
from thinwire.tools.config import RunConfig, write_whole
from thinwire.tools.names import ALONE
from thinwire.tools.train import Progress
from thinwire.warm_start import WarmStart


class Trained(Protocol):
    """A worker after its last step: a `Trainer`, or an `ElasticTrainer`."""

    @property
    def config(self) -> RunConfig:
        """What it ran."""
        ...

    @property
    def link(self) -> Link:
        """Its end of the wire."""
        ...

    @property
    def model(self) -> nn.Module:
        """What it trained."""
        ...

    @property
    def task(self) -> Task:
        """What on."""
        ...

    @property
    def optimizer(self) -> Algorithm | WarmStart:
        """What with."""
        ...


def summarise(trainer: Trained, progress: Progress, **more: Any) -> dict[str, Any]:
    """The figures of one worker's finished run.

    Args:
        trainer: the worker's trainer, after its last step.
        progress: where it stands.
        **more: further figures.
    """
    config = trainer.config
    return {
        "algorithm": config.algorithm,
        "task": config.task,
        "workers": trainer.link.data_size,
        "shards": config.shards,
        "parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "unit": trainer.task.unit,
        **progress.record(),
        "aborted_rounds": trainer.optimizer.aborted_rounds,
        "evaluated": "worker 0's model" if config.algorithm == ALONE else trainer.optimizer.evaluated,
        **more,
    }


class NotSaved(ThinwireError):
    """The run took place, but not all of it could be saved."""


def keep_result(folder: Path, figures: dict[str, Any], problems: Sequence[str]) -> None:
    """Keep the figures in the run folder; where anything could not be saved, tell the result at once.

    Args:
        folder: the run folder.
        figures: of `summarise`.
        problems: what of the run could not be saved on the way; "" for nothing.

    Raises:
        NotSaved: after the result was told, with everything that could not be saved.
    """
    problems = [problem for problem in problems if problem]
    try:
        write_summary(folder, figures)
    except OSError as cause:
        problems.append(f"summary.json: {cause.strerror or cause}")
    if problems:
        show_figures(figures, folder)
        what = f"the run ended after {counted(figures['step'], 'step')} as shown above, but could not be saved whole"
        raise NotSaved(f"{what}: {'; '.join(problems)}; make room in {folder} and repeat or resume it to have the rest")


def write_summary(folder: Path, figures: dict[str, Any]) -> None:
    """Keep the figures in the run folder."""
    write_whole(folder / "summary.json", json.dumps(figures, indent=1) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """The figures of a finished run."""
    return json.loads((folder / "summary.json").read_text())


def ddp_bytes(figures: dict[str, Any]) -> float:
    """What synchronous training with fp32 gradients would have sent per process: the shards of a worker divide its bytes."""
    return network.ddp_bytes(figures["parameters"], figures["workers"], figures["step"]) / figures["shards"]


def show_summary(folder: Path) -> None:
    """Tell a person how the run in `folder` ended."""
    show_figures(read_summary(folder), folder)


def show_figures(figures: dict[str, Any], folder: Path) -> None:
    """Tell a person how a run ended."""
    sent, seconds = figures["sent"], figures["seconds"]
    less = ddp_bytes(figures) / sent if sent else 0.0
    metric = f", accuracy {figures['val_accuracy']:.4f}" if "val_accuracy" in figures else ""
    done = f"after {counted(figures['step'], 'step')} on {counted(figures['workers'], 'worker')}"
    print(f"validation loss {figures['val_loss']:.4f}{metric} {done}")
    if figures.get("val_drift", 0) > 0:
        print(
            f"evaluated: {figures['evaluated']}; the workers' models are {figures['val_drift']:.3f} apart (relative), ", end=""
        )
        print(f"their mean has a loss of {figures['val_mean_loss']:.4f}")
    if figures["workers"] > 1:
        share = 100 * figures["waiting"] / seconds if seconds else 0.0
        versus = f" ({less:.0f}x fewer bytes than sending every gradient)" if less >= 1.5 else ""
        whom = "worker" if figures["shards"] == 1 else f"process ({figures['shards']} to a worker)"
        rounds = counted(figures["rounds"], "round")
        print(f"sent {show_bytes(sent)} per {whom} in {rounds}{versus}, {share:.0f}% of the time waiting")
    print(f"run folder: {folder}")


def counted(number: int, what: str) -> str:
    """So many of something, in words: 1 step, 2 steps."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
