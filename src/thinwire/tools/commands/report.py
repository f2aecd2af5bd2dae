"""`thinwire report`: turn runs into one page, PNGs and a table in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError
from thinwire.network import parse_bandwidth, parse_duration
from thinwire.tools.command_flags import ReportFlags
from thinwire.tools.flags import parse_flags
from thinwire.tools.records import read_records, without_repeats
from thinwire.tools.report import write_report
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.report.terminal import show


def main(arguments: list[str]) -> int:
    """Read the runs, show the table, write the page."""
    flags = parse_flags(ReportFlags, "report", arguments)
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
