"""What the demo says: what it is about to do, the table of what came out, and the page of the report."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from thinwire.errors import MissingDependency
from thinwire.network import show_bytes, show_seconds
from thinwire.tools.demo import SLICE, STEPS
from thinwire.tools.demo.runs import Arm, Timing, seconds_per_step
from thinwire.tools.records import Record
from thinwire.tools.report import write_report
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.summary import counted

TITLE = "What is lost, what is gained"


def introduction(arms: Sequence[Arm], bandwidth: str) -> str:
    """What is about to happen."""
    steps, workers = arms[0].config.steps, arms[0].config.workers or 1
    width = max(len(arm.title) for arm in arms)
    each = "".join(f"  {arm.title:{width}}  {arm.sends}\n" for arm in arms)
    time = " About 3 minutes on 2 idle cores." if (steps, workers) == (STEPS, 2) else ""
    return (
        "A GPT of 0.4 million parameters learns the source of Python's own library:\n"
        f"{counted(steps, 'step')} on {counted(workers, 'worker')} of this machine, {len(arms)} times, from the same weights\n"
        f"and on the same text. What a worker sends:\n{each}"
        f"Then {counted(min(SLICE, steps), 'step')} of each on a link of {bandwidth}.{time}"
    )


def table_of(trained: Sequence[Record], timing: Timing, bandwidth: str) -> Table:
    """One row per method; the first is what the others are held against."""
    table = Table(title=TITLE, title_justify="left", caption_justify="left")
    table.add_column("method", no_wrap=True)
    how = "computed" if timing.computed else "measured"
    columns = ("validation\nloss", "sent per\nworker", "fewer\nbytes", "step\nhere", f"step at\n{bandwidth},\n{how}")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    base = trained[0].figures
    for record, seconds in zip(trained, timing.seconds, strict=True):
        figures = record.figures
        table.add_row(
            record.arm,
            f"{figures['val_loss']:.3f}" + ("" if figures is base else f" ({_change(figures, base):+.1f}%)"),
            show_bytes(figures["sent"]),
            _times(base["sent"], figures["sent"]),
            show_seconds(seconds_per_step(record.curve)),
            show_seconds(seconds),
        )
    table.caption = Text(_how_timed(timing, bandwidth))
    return table


def _how_timed(timing: Timing, bandwidth: str) -> str:
    if timing.computed:
        how = "Computed: the time of a step here, and the time that its bytes would take on such a link."
        return f"{how} It could not be measured: {timing.computed}."
    return f"Measured: processes in network namespaces, behind links that the kernel holds to {bandwidth}."


def verdict(trained: Sequence[Record], timing: Timing, bandwidth: str) -> str:
    """What each method gains and loses against the first, one line each."""
    base, lines = trained[0], []
    for record, seconds in list(zip(trained, timing.seconds, strict=True))[1:]:
        fewer = _times(base.figures["sent"], record.figures["sent"])
        loss = f"validation loss {_change(record.figures, base.figures):+.1f}%"
        speed = f"{timing.seconds[0] / seconds:.1f}x as fast at {bandwidth}"
        lines.append(f"{record.arm} against {base.arm}: {fewer} fewer bytes, {loss}, {speed}.")
    return "\n".join(lines)


def _change(figures: dict[str, Any], base: dict[str, Any]) -> float:
    return 100 * (figures["val_loss"] / base["val_loss"] - 1)


def _times(base: float, mine: float) -> str:
    return f"{base / mine:.0f}x"


def report(trained: Sequence[Record], folder: Path, *, desktop: bool) -> None:
    """Write the page, say where it is, and open it where there is a desktop."""
    page = folder / "report.html"
    try:
        write_report(comparisons(trained), page, title=TITLE)
    except MissingDependency as missing:
        print(f"no report: {missing}, then thinwire report {folder}")
        return
    print(f"report: {page}")
    if desktop and has_desktop():
        webbrowser.open(page.resolve().as_uri())


def has_desktop() -> bool:
    """Whether a person sits before a screen on which a page can be opened."""
    screen = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return screen and sys.stdout.isatty()
