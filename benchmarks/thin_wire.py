"""Time on really thin wires: `python -m benchmarks.thin_wire --save` (root, iproute2; about 30 minutes on a quiet machine).

Four workers as real processes in network namespaces, a GPT of 3M parameters, links shaped by the kernel. For every method and
speed: seconds per step over those of the same job with no communication at all ("alone", in the same run, on the same cores),
bytes as the link meters them and as the interface counts them, and what `thinwire plan` predicts from the time of a step
alone. Each run holds whole periods of its method, so that nothing is left out of the mean.

A machine's speed drifts by a tenth and more within minutes, so `alone` is run before and after each method, and a method's
factors are against the mean of those two.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record
from thinwire.network import Network, parse_bandwidth
from thinwire.run.config import RunConfig
from thinwire.run.flags import parse_run
from thinwire.run.lab import Lab
from thinwire.run.measured import Measured, read_figures
from thinwire.run.plan import Cluster, predict
from thinwire.tasks import make_task

NAME = "thin_wire"
TASK, WORKERS, BATCH = "gpt-small", 4, 8  # about half a second a step on 2 cores: DDP then pays 4 times at 100 Mbit/s
SPEEDS = ("inf", "1gbit", "100mbit", "10mbit")
DEMO = 'demo --wire "DCT(64) >> TopK(32) >> Sign()"'
DECOUPLED = 'decoupled-diloco --H 8 --wire "DCT(64) >> TopK(128) >> Sign()"'
SPARSE = 'decoupled-diloco --H 32 --over workers --beta 0.95 --outer-lr 1.0 --wire "Identity(64) >> TopK(64) >> TwoBit()"'
STREAMING = "streaming-diloco --H 32 --tau {}"
MT_DAO = "mt-dao --H {H} --K-u {u} --K-v {v} --wire fp4 --qh-betas 0.99 --qh-omegas 0.95"


@dataclass(frozen=True)
class Way:
    """A method at the setting that is recommended for each speed.

    Attributes:
        name: in the table.
        command: of `thinwire train`, from the name of the algorithm on.
        steps: whole periods of it.
        slow: other settings and steps where the wire is that slow.
        speeds: at which it is run.
    """

    name: str
    command: str
    steps: int
    slow: dict[str, tuple[str, int]] = field(default_factory=dict)
    speeds: tuple[str, ...] = SPEEDS

    def at(self, speed: str) -> tuple[str, int]:
        """Command and steps at a speed."""
        return self.slow.get(speed, (self.command, self.steps))


ALONE = Way("alone", "alone", 32, speeds=("inf",))
_THREE = ("inf", "100mbit", "10mbit")
WAYS = [
    Way("torch DDP", "ddp", 12, {"10mbit": ("ddp", 5)}),
    Way("DeMo k=32", DEMO, 32),
    Way("decoupled DiLoCo H=8", DECOUPLED, 32),
    Way("MT-DAO fp4", MT_DAO.format(H=32, u=64, v=192), 192, {"10mbit": (MT_DAO.format(H=64, u=128, v=384), 384)}, _THREE),
    Way("DiLoCo H=32", "diloco --H 32", 64, {"10mbit": ("diloco --H 32 --wire fp4", 64)}),
    Way("Streaming DiLoCo H=32", STREAMING.format(2), 64, {"10mbit": (f"{STREAMING.format(5)} --wire fp4", 64)}),
    Way("Local Adam K=32", "local-adam --H 32", 64, speeds=_THREE),
    Way("SparseLoCo H=32", SPARSE, 64, speeds=_THREE),
    Way("LoRDO K=32", "lordo --H 32", 64, speeds=_THREE),
]


def config_of(command: str) -> RunConfig:
    """The run that a command stands for."""
    algorithm, *flags = shlex.split(command)
    return parse_run("train", ["--algorithm", algorithm, "--task", TASK, *flags])[0]


def run_in(lab: Lab, speed: str, command: str, steps: int) -> Measured:
    """Train in the lab at a speed."""
    rate = parse_bandwidth(speed)
    lab.reshape(bandwidth=rate)
    algorithm, *flags = shlex.split(command)
    fixed = ["--task", TASK, "--batch", str(BATCH), "--steps", str(steps), "--timeout", "600s"]
    fixed += ["--eval-every", "0", "--checkpoint-every", "0"]
    with tempfile.TemporaryDirectory() as folder:
        train = ["-m", "thinwire", "train", "--algorithm", algorithm, *fixed, *flags, "--out", f"{folder}/run"]
        job = lab.run([sys.executable, *train], env={"THINWIRE_FIGURES": folder, "OMP_NUM_THREADS": "1"}, timeout=1200)
        return Measured(speed, lab.rates, tuple(train[1:]), job.seconds, job.counters, read_figures(Path(folder), WORKERS))


def row_of(way: Way, speed: str, measured: Measured, alone: float) -> dict[str, Any]:
    """The figures of one run, with what the plan says of it."""
    command, steps = way.at(speed)
    cluster = Cluster(workers=WORKERS, network=Network(bandwidth=parse_bandwidth(speed)), step_time=alone)
    predicted = predict(config_of(command), make_task(TASK).model(), cluster)
    seconds = measured.seconds_per_step
    assert seconds is not None, "the ranks of thinwire train leave their figures"
    return {
        "way": way.name,
        "speed": speed,
        "command": f"thinwire train --algorithm {command} --task {TASK} --batch {BATCH} --steps {steps}",
        "steps": steps,
        "seconds_per_step": seconds,
        "factor": seconds / alone,
        "waiting": measured.waiting,
        "metered": measured.metered,
        "interface": measured.total.sent,
        "interface_over_metered": measured.ratio,
        "framed": measured.total.framed_sent,
        "predicted_seconds_per_step": predicted.seconds_per_step,
        "predicted_bytes": predicted.bytes_per_step * steps * WORKERS,
    }


def main(only: tuple[str, ...] = (), speeds: tuple[str, ...] = SPEEDS, save: bool = False) -> None:
    """Measure all methods at all speeds.

    Args:
        only: methods whose names contain one of these; all by default.
        speeds: of the links.
        save: add the run to benchmarks/records/thin_wire.jsonl.
    """
    ways = [way for way in WAYS if not only or any(part.lower() in way.name.lower() for part in only)]
    if not ways:
        raise SystemExit(f"only must name some of {', '.join(way.name for way in WAYS)}, got {' '.join(only)}")
    table: list[dict[str, Any]] = []
    alone: list[float] = []
    with Lab(WORKERS) as lab:
        alone.append(_alone(lab))
        for way in ways:
            runs = [(speed, run_in(lab, speed, *way.at(speed))) for speed in way.speeds if speed in speeds]
            alone.append(_alone(lab))
            table += [row_of(way, speed, measured, (alone[-2] + alone[-1]) / 2) for speed, measured in runs]
            for row in table[len(table) - len(runs) :]:
                _say(f"{way.name} at {row['speed']}: {row['seconds_per_step']:.3f} s per step, {row['factor']:.2f} times alone")
    for row in table:
        off = row["predicted_seconds_per_step"] / row["seconds_per_step"] - 1
        bytes_off, ratio = row["predicted_bytes"] / row["metered"] - 1, row["interface_over_metered"]
        _say(
            f"{row['way']:24s} {row['speed']:>8s}  {row['seconds_per_step']:.3f} s  {row['factor']:6.2f} times alone  "
            f"plan {off:+.0%}, bytes {bytes_off:+.1%}  interface / metered {ratio:.3f}"
        )
    if save:
        record.append(NAME, {"task": TASK, "workers": WORKERS, "alone": alone, "rows": table})


def _alone(lab: Lab) -> float:
    measured = run_in(lab, "inf", *ALONE.at("inf"))
    assert measured.seconds_per_step is not None
    _say(f"alone: {measured.seconds_per_step:.3f} s per step")
    return measured.seconds_per_step


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
