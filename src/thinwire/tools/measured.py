"""What a job in the lab cost: time per step, time waiting, and the bytes that the links meter and the interfaces count."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from thinwire.network import show_bytes
from thinwire.tools.config import now, versions
from thinwire.tools.namespaces import Counters, Rates

_NONE = "-"


@dataclass(frozen=True)
class Measured:
    """One job at one speed.

    Args:
        speed: in the words of the command line.
        rates: of each worker.
        command: what was run.
        seconds: from its first process to the end of its last.
        counters: what passed each worker's interface.
        figures: what each rank of `thinwire train` says of itself; empty for any other command.
    """

    speed: str
    rates: tuple[Rates, ...]
    command: tuple[str, ...]
    seconds: float
    counters: tuple[Counters, ...]
    figures: tuple[dict[str, Any], ...] = ()

    @property
    def seconds_per_step(self) -> float | None:
        """Of the slowest rank, without evaluations and checkpoints; None where nothing was trained."""
        return max((f["seconds"] / f["step"] for f in self.figures), default=None)

    @property
    def waiting(self) -> float | None:
        """The share of the training time that was spent waiting on the wire, over all ranks."""
        seconds = sum(f["seconds"] for f in self.figures)
        return sum(f["waiting"] for f in self.figures) / seconds if seconds else None

    @property
    def utilisation(self) -> float | None:
        """The share of the training time that was spent computing."""
        return None if self.waiting is None else 1 - self.waiting

    @property
    def metered(self) -> int | None:
        """Bytes that the links of all ranks say they sent."""
        return sum(f["sent"] for f in self.figures) if self.figures else None

    @property
    def total(self) -> Counters:
        """What passed the interfaces of all workers."""
        return sum(self.counters, Counters())

    @property
    def ratio(self) -> float | None:
        """Bytes that the interfaces sent, without headers, over those that the links metered: 1 where both agree."""
        return self.total.payload_sent / self.metered if self.metered else None

    def record(self) -> dict[str, Any]:
        """A line for a file of measurements."""
        total = self.total
        return {
            "time": now(),
            "speed": self.speed,
            "workers": len(self.rates),
            "up": [_finite(r.up) for r in self.rates],
            "down": [_finite(r.down) for r in self.rates],
            "command": list(self.command),
            "seconds": self.seconds,
            "seconds_per_step": self.seconds_per_step,
            "waiting": self.waiting,
            "utilisation": self.utilisation,
            "metered_sent": self.metered,
            "interface_sent": total.sent,
            "payload_sent": total.payload_sent,
            "framed_sent": total.framed_sent,
            "payload_over_metered": self.ratio,
            "counters": [asdict(c) for c in self.counters],
            "figures": list(self.figures),
            "versions": versions(),
        }


def _finite(rate: float) -> float | None:
    return None if rate == math.inf else rate


def read_figures(folder: Path, workers: int) -> tuple[dict[str, Any], ...]:
    """What the ranks of a job left in the folder that THINWIRE_FIGURES named; empty unless all of them did."""
    files = [folder / f"rank{rank}.json" for rank in range(workers)]
    return tuple(json.loads(f.read_text()) for f in files) if all(f.is_file() for f in files) else ()


COLUMNS = ("job s", "s/step", "waiting", "computing", "metered", "interface", "headers", "ratio")


def cells(job: Measured) -> tuple[str, ...]:
    """The cells of a job's row, one for each of `COLUMNS`."""
    step, waiting, computing, ratio, total = job.seconds_per_step, job.waiting, job.utilisation, job.ratio, job.total
    return (
        f"{job.seconds:.1f}",
        _NONE if step is None else f"{step:.3g}",
        _NONE if waiting is None else f"{waiting:.0%}",
        _NONE if computing is None else f"{computing:.0%}",
        _NONE if job.metered is None else show_bytes(job.metered),
        show_bytes(total.sent),
        f"{1 - total.payload_sent / total.sent:.1%}" if total.sent else _NONE,
        _NONE if ratio is None else f"{ratio:.3f}",
    )


def in_words(job: Measured) -> str:
    """What a job took and sent, in one sentence."""
    seconds, step, waiting, computing, metered, interface, headers, ratio = cells(job)
    time = f"the job took {seconds} s"
    if step != _NONE:
        time += f", a training step {step} s, of which {computing} computing and {waiting} waiting for messages"
    sent = f"the workers' interfaces sent {interface}, of which {headers} headers"
    if metered != _NONE:
        sent += f"; the workers metered {metered} of messages, and without headers the interfaces sent {ratio} times that"
    return f"{time}; {sent}"


def show_measured(jobs: list[Measured], console: Console) -> None:
    """Print all jobs: as a table, or line by line where there is no terminal."""
    if not jobs:
        return
    if not console.is_terminal:
        for job in jobs:
            print(f"{job.speed}: {in_words(job)}")
        return
    table = Table(title=f"{len(jobs[0].rates)} workers in the lab", title_justify="left")
    table.add_column("speed", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for job in jobs:
        table.add_row(job.speed, *cells(job))
    table.caption = (
        "Bytes that all workers sent. Ratio: interface without headers over metered; above 1 by what no link "
        "meters, such as the start of the job, heartbeats and evaluations."
    )
    console.print(table)
