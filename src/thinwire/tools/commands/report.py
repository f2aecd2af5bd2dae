"""`thinwire report`: turn runs into one page, PNGs and a table in the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError
from thinwire.network import parse_bandwidth, parse_duration
from thinwire.tools.records import read_records, without_repeats
from thinwire.tools.report import SPEEDS, write_report
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.report.terminal import show


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Put runs side by side: loss against bytes, steps and time, and a table with p-values. One HTML file and PNGs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run folders, folders of runs such as that of `thinwire compare`, or files of records (.jsonl)."""
    out: str | None = None
    """The HTML file; by default report.html in the first folder, or here where a file of records comes first."""
    baseline: str | None = None
    """The arm that the others are held against; by default the first that is ddp or data-parallel, else the first."""
    bandwidth: str = ",".join(SPEEDS)
    """Links of the figure of loss against time, separated by commas."""
    latency: str = "0ms"
    """Of one message on those links."""
    title: str | None = None
    """Of the page; by default the job in words."""
    together: bool = False
    """Compare all runs on one task, even if their steps, workers or batches differ; else these are sections of their own."""
    best: bool = False
    """Of arms with the same name and different settings keep the one with the most seeds, then with the least loss."""
    html: bool = True
    """Write the page and the PNGs; without them there is only the table in the terminal."""


def main(arguments: list[str]) -> int:
    """Read the runs, show the table, write the page."""
    flags = tyro.cli(ReportFlags, prog="thinwire report", args=arguments)
    if not flags.runs:
        raise ConfigError("name the runs to report: thinwire report runs/compare-..., or run folders, or a records.jsonl")
    speeds = [text.strip() for text in flags.bandwidth.split(",")]
    for text in speeds:
        parse_bandwidth(text)
    parse_duration(flags.latency)
    console = terminal()

    def note(text: str) -> None:
        console.print(Text(text, style="dim"))

    paths = [Path(text) for text in flags.runs]
    records = without_repeats([record for path in paths for record in read_records(path, note=note)], note=note)
    if not records:
        raise ConfigError(f"there is no finished run in {', '.join(flags.runs)}")
    found = comparisons(records, baseline=flags.baseline, together=flags.together, best=flags.best)
    show(found, console)
    if flags.html:
        out = Path(flags.out) if flags.out else (paths[0] if paths[0].is_dir() else Path()) / "report.html"
        folder = write_report(found, out, title=flags.title, bandwidths=speeds, latency=flags.latency)
        console.print(Text(f"\nreport: {out}\nfigures: {folder}"), soft_wrap=True)
    return 0


def terminal() -> Console:
    """Where tables are shown; a pipe or a file has room for all columns."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
