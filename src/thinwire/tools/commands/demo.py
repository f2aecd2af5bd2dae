"""`thinwire demo`: the whole idea in three minutes. A small GPT, two real workers, three methods, and a link that is thin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError, check_whole_number
from thinwire.network import parse_bandwidth
from thinwire.tools.config import new_folder
from thinwire.tools.demo import STEPS

if TYPE_CHECKING:
    from thinwire.tools.records import Record


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """Train a small GPT on real workers with three methods and compare loss, bytes on the wire and speed on a thin link."""

    steps: int = STEPS
    """Training steps of each worker; the learning rates were chosen for the default."""
    workers: int = 2
    """How many real processes."""
    bandwidth: str = "100mbit"
    """The link on which a slice of each method is timed: really, where root and iproute2 allow it, else computed."""
    out: str | None = None
    """Folder for the runs; by default runs/demo-TIME."""
    open: bool = True
    """Open the report in a browser where there is a desktop."""


def main(arguments: list[str]) -> int:
    """Train with every method, time a slice of each, print the table and write the report."""
    flags = tyro.cli(DemoFlags, prog="thinwire demo", args=arguments)
    parse_bandwidth(flags.bandwidth)
    check_whole_number("steps", flags.steps)
    check_whole_number("workers", flags.workers, least=2)
    folder = Path(flags.out or new_folder("demo"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: choose another --out")
    finished: list[Record] = []
    try:
        _demo(flags, folder, finished)
    except KeyboardInterrupt:
        print(f"\n{_stopped(folder, finished)}", file=sys.stderr)
        return 130
    return 0


def _demo(flags: DemoFlags, folder: Path, finished: list[Record]) -> None:
    """Show it; what was trained is added to `finished`."""
    console = Console(highlight=False)
    console.print("thinwire demo: starting, torch is being imported ...")
    from thinwire.tools.demo.runs import arms_of, time_on_link, train  # here, since they bring torch
    from thinwire.tools.demo.show import introduction, report, table_of, verdict

    arms = arms_of(flags.steps, flags.workers)
    console.print(Text(introduction(arms, flags.bandwidth)))
    for number, arm in enumerate(arms, 1):
        console.print(f"\n[bold]Training {number} of {len(arms)}")
        finished.append(train(arm, folder, console))
    console.print(f"\n[bold]A slice of each on a link of {flags.bandwidth}")
    timing = time_on_link(arms, finished, flags.bandwidth, folder / "timed", console)
    console.print()
    console.print(table_of(finished, timing, flags.bandwidth))
    console.print(Text(verdict(finished, timing, flags.bandwidth)))
    if flags.steps != STEPS:
        console.print(f"The settings were chosen for {STEPS} steps: after {flags.steps} the losses say little.")
    print(f"runs: {folder}")
    report(finished, folder, desktop=flags.open)


def _stopped(folder: Path, finished: Sequence[Record]) -> str:
    if not finished:
        return "the demo was stopped by Ctrl-C before the first training had ended"
    names = ", ".join(record.arm for record in finished)
    return f"the demo was stopped by Ctrl-C; what was finished ({names}) is in {folder}: thinwire report {folder}"
