"""Time on really thin wires: `python -m benchmarks.thin_wire --save` (root, iproute2; about 50 minutes on a quiet machine).

Four workers as real processes in network namespaces, a GPT of 3M parameters, links shaped by the kernel. For every method and
speed: seconds per step over those of the same job with no communication at all ("alone", in the same run, on the same cores),
bytes as the link meters them and as the interface counts them, and what `thinwire plan` predicts from the method's own time
of a step on links without a limit: the plan is about the wire, not about how long a machine takes for a codec. Each run holds
whole periods of its method, so that nothing is left out of the mean.

A machine's speed drifts by a tenth and more within minutes, so `alone` is run before and after each method, and of short runs
there are two each: what else a machine does only makes a run slower, so the faster one counts, of `alone` as of the method.

`--bytes` (about 5 minutes) compares what the link meters with what the interface counts, in runs that are long enough for the
start of a job not to count, and with small batches, since a byte is a byte.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record
from thinwire.errors import ThinwireError
from thinwire.network import Network, parse_bandwidth
from thinwire.tasks import make_task
from thinwire.tools.config import RunConfig
from thinwire.tools.flags import parse_run
from thinwire.tools.lab import Lab
from thinwire.tools.measured import Measured, read_figures
from thinwire.tools.plan import Cluster, predict

NAME, BYTES = "thin_wire", "thin_wire_bytes"
BYTE_STEPS = 128  # at least so many in a comparison of bytes
TASK, WORKERS, BATCH = "gpt-small", 4, 8  # about half a second a step on 2 cores: DDP then pays about 4 times at 100 Mbit/s
SPEEDS = ("inf", "1gbit", "100mbit", "10mbit")
DEMO = 'demo --wire "DCT(64) >> TopK({}) >> Sign()"'
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
        steps: whole periods of it; many where the end of a run has a cost of its own, as the last fragments of streaming.
        slow: other settings and steps where the wire is that slow.
        speeds: at which it is run.
        runs: of which the fastest counts.
    """

    name: str
    command: str
    steps: int
    slow: dict[str, tuple[str, int]] = field(default_factory=dict)
    speeds: tuple[str, ...] = SPEEDS
    runs: int = 1

    def at(self, speed: str) -> tuple[str, int]:
        """Command and steps at a speed."""
        return self.slow.get(speed, (self.command, self.steps))


ALONE = Way("alone", "alone", 32, speeds=("inf",))
_THREE = ("inf", "100mbit", "10mbit")
WAYS = [
    Way("torch DDP", "ddp", 12, {"10mbit": ("ddp", 4)}, runs=2),
    Way("DeMo k=32", DEMO.format(32), 32, runs=2),
    Way("DeMo k=8", DEMO.format(8), 32, runs=2),
    Way("decoupled DiLoCo H=8", DECOUPLED, 32, runs=2),
    Way("MT-DAO fp4", MT_DAO.format(H=32, u=32, v=192), 192, {"10mbit": (MT_DAO.format(H=64, u=128, v=384), 384)}, _THREE),
    Way("DiLoCo H=32", "diloco --H 32", 32, {"10mbit": ("diloco --H 32 --wire fp4", 32)}, runs=2),
    Way("Streaming DiLoCo H=32", STREAMING.format(2), 192, {"10mbit": (f"{STREAMING.format(5)} --wire fp4", 192)}),
    Way("Local Adam K=32", "local-adam --H 32", 32, speeds=_THREE, runs=2),
    Way("SparseLoCo H=32", SPARSE, 32, speeds=_THREE, runs=2),
    Way("LoRDO K=32", "lordo --H 32", 32, speeds=_THREE, runs=2),
]


def config_of(command: str) -> RunConfig:
    """The run that a command stands for."""
    algorithm, *flags = shlex.split(command)
    return parse_run("train", ["--algorithm", algorithm, "--task", TASK, *flags])[0]


def fastest(lab: Lab, way: Way, speed: str) -> Measured:
    """The fastest of a method's runs at a speed."""
    return min((run_in(lab, speed, *way.at(speed)) for _ in range(way.runs)), key=_seconds)


def _seconds(measured: Measured) -> float:
    assert measured.seconds_per_step is not None, "the ranks of thinwire train leave their figures"
    return measured.seconds_per_step


def run_in(lab: Lab, speed: str, command: str, steps: int, batch: int = BATCH, task: str = TASK) -> Measured:
    """Train in the lab at a speed."""
    rate = parse_bandwidth(speed)
    lab.reshape(bandwidth=rate)
    algorithm, *flags = shlex.split(command)
    fixed = ["--task", task, "--batch", str(batch), "--steps", str(steps), "--timeout", "600s"]
    fixed += ["--eval-every", "0", "--checkpoint-every", "0"]
    with tempfile.TemporaryDirectory() as folder:
        train = ["-m", "thinwire", "train", "--algorithm", algorithm, *fixed, *flags, "--out", f"{folder}/run"]
        job = lab.run([sys.executable, *train], env={"THINWIRE_FIGURES": folder, "OMP_NUM_THREADS": "1"}, timeout=1200)
        return Measured(speed, lab.rates, tuple(train[1:]), job.seconds, job.counters, read_figures(Path(folder), lab.workers))


def row_of(way: Way, speed: str, measured: Measured, *, alone: float, free: float) -> dict[str, Any]:
    """The figures of one run, with what the plan says of it.

    Args:
        way: the method.
        speed: of the links.
        measured: what the lab says.
        alone: seconds per step without any communication.
        free: seconds per step of the method on links without a limit.
    """
    command, steps = way.at(speed)
    cluster = Cluster(workers=WORKERS, network=Network(bandwidth=parse_bandwidth(speed)), step_time=free)
    predicted = predict(config_of(command), make_task(TASK).model(), cluster)
    seconds = _seconds(measured)
    return {
        "way": way.name,
        "speed": speed,
        "command": f"thinwire train --algorithm {command} --task {TASK} --batch {BATCH} --steps {steps}",
        "steps": steps,
        "seconds_per_step": seconds,
        "factor": seconds / alone,
        "alone": alone,
        "date": time.strftime("%Y-%m-%d"),
        "waiting": measured.waiting,
        "metered": measured.metered,
        "interface": measured.total.sent,
        "interface_over_metered": measured.ratio,
        "framed": measured.total.framed_sent,
        "predicted_seconds_per_step": predicted.seconds_per_step,
        "predicted_bytes": predicted.bytes_per_step * steps * WORKERS,
    }


def rows_of(lab: Lab, way: Way, speeds: Sequence[str], alone: list[float]) -> list[dict[str, Any]]:
    """Measure a method at some speeds.

    Args:
        lab: where.
        way: the method.
        speeds: of those at which it is run.
        alone: seconds per step alone so far, the last just before; one more is added.
    """
    runs = {speed: fastest(lab, way, speed) for speed in way.speeds if speed in speeds}
    alone.append(_alone(lab))
    around = min(alone[-2:])
    free = _seconds(runs["inf"]) if "inf" in runs else around
    rows = [row_of(way, speed, measured, alone=around, free=free) for speed, measured in runs.items()]
    for row in rows:
        _say(f"{way.name} at {row['speed']}: {row['seconds_per_step']:.3f} s per step, {row['factor']:.2f} times alone")
    return rows


def repeat(name: str, speed: str) -> dict[str, Any] | None:
    """One method at one speed anew; None, and a word why, where there can be no lab here or the job fails.

    Args:
        name: of the method, as in `WAYS`.
        speed: of the links.
    """
    way = next(way for way in WAYS if way.name == name)
    try:
        with Lab(WORKERS) as lab:
            return rows_of(lab, way, (speed,), [_alone(lab)])[0]
    except ThinwireError as error:
        _say(f"left out: {name} at {speed} in the lab: {error}")
        return None


def bytes_of(lab: Lab, way: Way) -> dict[str, Any]:
    """What the link meters and what the interface counts of a method, in a run of some megabytes."""
    periods = -(-BYTE_STEPS // way.steps)
    measured = run_in(lab, "inf", way.command, steps := periods * way.steps, batch=1)
    row = {
        "way": way.name,
        "command": f"thinwire train --algorithm {way.command} --task {TASK} --batch 1 --steps {steps}",
        "metered": measured.metered,
        "interface": measured.total.sent,
        "framed": measured.total.framed_sent,
        "interface_over_metered": measured.ratio,
    }
    _say(f"{way.name}: {measured.metered:,} bytes metered, the interface counts {measured.ratio:.3f} times as many")
    return row


def main(only: tuple[str, ...] = (), speeds: tuple[str, ...] = SPEEDS, bytes: bool = False, save: bool = False) -> None:
    """Measure all methods at all speeds.

    Args:
        only: methods whose names contain one of these; all by default.
        speeds: of the links.
        bytes: compare meter and interface instead.
        save: add the run to benchmarks/records/thin_wire.jsonl, or thin_wire_bytes.jsonl. With `only`, methods that were not
            measured are taken over from the last record: each was measured together with the job alone.
    """
    if save and set(speeds) != set(SPEEDS):
        raise SystemExit("a record has all speeds of a method: leave out --speeds, or --save")
    ways = [way for way in WAYS if not only or any(part.lower() in way.name.lower() for part in only)]
    if not ways:
        raise SystemExit(f"only must name some of {', '.join(way.name for way in WAYS)}, got {' '.join(only)}")
    table: list[dict[str, Any]] = []
    if bytes:
        with Lab(WORKERS) as lab:
            table = [bytes_of(lab, way) for way in ways]
        if save:
            record.append(BYTES, {"task": TASK, "workers": WORKERS, "rows": _with_last(BYTES, table)})
        return
    with Lab(WORKERS) as lab:
        alone = [_alone(lab)]
        for way in ways:
            table += rows_of(lab, way, speeds, alone)
    for row in table:
        off = row["predicted_seconds_per_step"] / row["seconds_per_step"] - 1
        bytes_off, ratio = row["predicted_bytes"] / row["metered"] - 1, row["interface_over_metered"]
        _say(
            f"{row['way']:24s} {row['speed']:>8s}  {row['seconds_per_step']:.3f} s  {row['factor']:6.2f} times alone  "
            f"plan {off:+.0%}, bytes {bytes_off:+.1%}  interface / metered {ratio:.3f}"
        )
    if save:
        record.append(NAME, {"task": TASK, "workers": WORKERS, "rows": _with_last(NAME, table)})


def _with_last(name: str, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with those of the last record for all other methods, in the order of `WAYS`."""
    path = record.RECORDS / f"{name}.jsonl"
    before = record.last(name)["rows"] if path.exists() else []
    new = {row["way"] for row in table}
    order = [way.name for way in WAYS]
    rows = [*(row for row in before if row["way"] not in new and row["way"] in order), *table]
    return sorted(rows, key=lambda row: order.index(row["way"]))


def _alone(lab: Lab) -> float:
    seconds = _seconds(fastest(lab, ALONE, "inf"))
    _say(f"alone: {seconds:.3f} s per step")
    return seconds


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    tyro.cli(main)
