"""The runs of the demo: each method trained to the end on real workers, and a slice of it timed on a thin link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError
from thinwire.network import parse_bandwidth
from thinwire.tools.compare import Run, run_folders, run_one
from thinwire.tools.config import RunConfig
from thinwire.tools.demo import PERIOD, SLICE
from thinwire.tools.lab import JobFailed
from thinwire.tools.link_time import seconds_on_link
from thinwire.tools.namespaces import check_machine
from thinwire.tools.records import Point, Record
from thinwire.tools.runners import LabRunner, ProcessRunner, Runner

TIMEOUT = 120.0  # seconds that a worker waits for another


@dataclass(frozen=True)
class Arm:
    """One method of the demo.

    Attributes:
        title: its name in the table.
        sends: what leaves a worker, in words.
        config: its settings.
    """

    title: str
    sends: str
    config: RunConfig


@dataclass(frozen=True)
class Timing:
    """Seconds per step of each arm on the thin link.

    Attributes:
        seconds: in the order of the arms.
        computed: why they were computed and not measured; empty where they were measured.
    """

    seconds: tuple[float, ...]
    computed: str = ""


def arms_of(steps: int, workers: int) -> list[Arm]:
    """The baseline, then the methods: the same model, weights, batches and decay, each with the learning rate that suits it."""
    H = min(PERIOD, steps)
    often = f"every {H} steps" if steps > H else "once, at the end"
    job = RunConfig(
        task="gpt-micro", workers=workers, steps=steps, batch=2, lr_warmup=steps // 20, lr_final=0.0, eval_every=4 * PERIOD
    )
    return [
        Arm("torch DDP", "every gradient, at every step", replace(job, algorithm="ddp", lr=2e-3)),
        Arm(
            "DeMo, 1-bit",
            "the fast part of its momentum, at every step",
            replace(job, algorithm="demo", lr=2e-3),
        ),
        Arm(
            f"DiLoCo, ternary, H={H}",
            f"its weights' change, coarsely, {often}",
            replace(job, algorithm="coarse-diloco", lr=1.4e-3, settings={"H": H}),
        ),
    ]


def train(arm: Arm, folder: Path, console: Console) -> Record:
    """Train to the end on processes of this machine."""
    return _run([arm], folder, ProcessRunner(checkpoint_every=0, timeout=TIMEOUT), console)[0]


def time_on_link(arms: Sequence[Arm], trained: Sequence[Record], bandwidth: str, folder: Path, console: Console) -> Timing:
    """Run a slice of each arm behind links of that bandwidth; where this machine has none, compute what they would take.

    Args:
        arms: what to time.
        trained: the whole training of each, to compute from.
        bandwidth: in words.
        folder: for the runs of the slices.
        console: where progress is shown.
    """
    slices = [replace(arm, config=replace(arm.config, steps=min(SLICE, arm.config.steps), eval_every=0)) for arm in arms]
    runner = LabRunner(bandwidth=bandwidth, down=None, checkpoint_every=0, timeout=TIMEOUT)
    try:
        check_machine()
        return Timing(tuple(seconds_per_step(record.curve) for record in _run(slices, folder, runner, console)))
    except (ConfigError, JobFailed) as error:
        return Timing(tuple(_computed(record, parse_bandwidth(bandwidth)) for record in trained), computed=str(error))


def seconds_per_step(curve: Sequence[Point]) -> float:
    """Without the first step, which is slower than any other; of a single step there is nothing else."""
    first, last = curve[0], curve[-1]
    if last.step == first.step:
        return last.seconds / last.step
    return (last.seconds - first.seconds) / (last.step - first.step)


def _computed(record: Record, bandwidth: float) -> float:
    """Time computing here, and the time that the bytes sent would take on such a link."""
    last = seconds_on_link(record.curve, workers=record.figures["workers"], bandwidth=bandwidth)[-1]
    return last / record.figures["step"]


def _run(arms: Sequence[Arm], folder: Path, runner: Runner, console: Console) -> list[Record]:
    records = []
    for arm, name in zip(arms, run_folders([arm.title for arm in arms]), strict=True):
        runner.check(arm.config)
        console.print(Text(f"{arm.title}: starting {arm.config.workers} workers ..."))
        records.append(run_one(Run(arm.title, arm.config, folder / name), runner, console))
    return records
