"""A comparison in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.errors import how_to_install
from thinwire.tools.report.comparison import Comparison, scipy_is_here, show_settings
from thinwire.tools.report.table import headline, table

_TEXTS = {"method": 14, "place": 9}  # with the width that they need at least
_DROPPED = (
    "settings",
    "seeds",
    "waiting",
    "seconds",
    "drift",
    "tried",
    "with 4",
    "with 8",
    "rounds",
    "bytes sent",
)  # first to last


def show(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print a table of each comparison, and below it what it says."""
    for comparison in comparisons:
        console.print()
        console.print(rich_table(comparison, console))
        if verdict := headline(comparison):
            console.print(Text(verdict, style="bold"))


def rich_table(comparison: Comparison, console: Console) -> Table:
    """One row per arm, with as many columns as the console is wide; the page and the records have all of them."""
    endless = console.options.update_width(10_000)  # what a table needs, not what it could be pressed into
    tables = [_with_columns(comparison, without=_DROPPED[:count]) for count in range(1, len(_DROPPED) + 1)]
    return next((t for t in tables if console.measure(t, options=endless).minimum <= console.width), tables[-1])


def _with_columns(comparison: Comparison, *, without: Sequence[str]) -> Table:
    columns, rows = table(comparison)
    places = {arm.first.place for arm in comparison.arms}
    without = (*without, "place") if len(places) == 1 else without  # then the title says it
    shown = [number for number, name in enumerate(columns) if name not in without]
    where = f", {places.pop()}" if len(places) == 1 else ""
    common = f"; all with {show_settings(comparison.common)}" if comparison.common else ""
    drawn = Table(title=Text(f"{comparison.title}{where}{common}"), title_justify="left", caption_justify="left")
    for number in shown:
        name = columns[number]
        whole = max(len(name), *(len(row[number].text) for row in rows))
        if name in _TEXTS:
            drawn.add_column(Text(name), min_width=_TEXTS[name])
        else:
            drawn.add_column(Text(name), justify="right", no_wrap=True, min_width=whole)  # half a number is none
    for row in rows:
        drawn.add_row(*(Text(row[number].text) for number in shown))
    seeds = max(len(arm.records) for arm in comparison.arms)
    if seeds > 1:
        caption = "loss ± standard deviation over seeds; vs baseline: mean over seeds ± standard error; p: paired t-test"
        drawn.caption = Text(caption if scipy_is_here() else f"{caption}, needs scipy: {how_to_install('report')}")
    return drawn
