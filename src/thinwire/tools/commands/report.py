"""`thinwire report`: turn runs into one page, PNGs and a table in the terminal."""

from __future__ import annotations

import os
from pathlib import Path
from time import sleep

from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError
from thinwire.network import parse_bandwidth, parse_duration
from thinwire.tools.command_flags import ReportFlags
from thinwire.tools.flags import parse_flags
from thinwire.tools.records import Note, Record, read_records, without_repeats
from thinwire.tools.report import write_report
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.report.terminal import show
from thinwire.tools.report.watch import watch


def main(arguments: list[str]) -> int:
    """Read the runs, show the table, write the page; with --watch again and again."""
    flags = parse_flags(ReportFlags, "report", arguments)
    if not flags.runs:
        raise ConfigError("name the runs to report: thinwire report runs/compare-..., or run folders, or a records.jsonl")
    for text in _speeds(flags):
        parse_bandwidth(text)
    parse_duration(flags.latency)
    every = parse_duration(flags.every)
    if not 1 <= every <= 600:
        raise ConfigError(f"every must be from 1s to 10min, got {flags.every!r}")
    console = terminal()
    if flags.watch:
        return _watch(flags, every, console)
    records = _read(flags, note=lambda text: console.print(Text(text, style="dim")))
    if not records:
        raise ConfigError(f"there is no run with any step in {', '.join(flags.runs)}")
    _report(flags, records, console)
    return 0


def _watch(flags: ReportFlags, every: float, console: Console) -> int:
    def refresh() -> tuple[str, ...] | None:
        records = _read(flags, note=lambda _: None)
        going_on = tuple(record.arm for record in records if record.unfinished)
        if console.is_terminal:
            console.clear()
        if records:
            _report(flags, records, console, reload=every if going_on else None)
        else:
            console.print(Text(f"no step yet in {', '.join(flags.runs)}"), soft_wrap=True)
        return None if records and not going_on else going_on

    try:
        ended = watch(refresh, every=every, sleep=sleep)
    except KeyboardInterrupt:
        ended = False
    if not ended and (records := _read(flags, note=lambda _: None)):
        _report(flags, records, console)  # once more: a page that does not reload any more
    return 0


def _read(flags: ReportFlags, *, note: Note) -> list[Record]:
    found = [record for path in map(Path, flags.runs) for record in read_records(path, note=note, unfinished=True)]
    return without_repeats(found, note=note)


def _report(flags: ReportFlags, records: list[Record], console: Console, *, reload: float | None = None) -> None:
    """Show the table and write the page."""
    found = comparisons(records, baseline=flags.baseline, together=flags.together, best=flags.best)
    show(found, console)
    for record in records:
        if record.unfinished:
            text = f"{record.arm}: interrupted or still running; shown as far as it went, and compared with none"
            console.print(Text(text, style="dim"), soft_wrap=True)
    if flags.html:
        first = Path(flags.runs[0])
        out = Path(flags.out) if flags.out else (first if first.is_dir() else Path()) / "report.html"
        look = {"title": flags.title, "bandwidths": _speeds(flags), "latency": flags.latency, "reload": reload}
        folder = write_report(found, out, **look)
        console.print(Text(f"\nreport: {out}\nfigures: {folder}"), soft_wrap=True)


def _speeds(flags: ReportFlags) -> list[str]:
    return [text.strip() for text in flags.bandwidth.split(",")]


def terminal() -> Console:
    """Where tables are shown; a pipe or a file has room for all columns, unless COLUMNS says how many."""
    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else Console(width=140)
