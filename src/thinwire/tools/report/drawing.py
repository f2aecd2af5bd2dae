"""How a figure looks and gets onto paper: with names that the page gives colours to for SVG, in light colours for PNG.

A figure is as wide as a phone, so that its words can be read there; the page puts figures side by side where there is room.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from thinwire.errors import MissingDependency, how_to_install
from thinwire.network import show_bytes, show_seconds

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
    from matplotlib.transforms import Bbox
except ImportError as error:
    raise MissingDependency(f"a report needs matplotlib: {how_to_install('report')}") from error

SIZE = (4.4, 3.15)  # inches of a figure
PANEL = (3.9, 2.9)  # and of one of several panels; 72 of their units are one inch
KEYS = 3  # names beside each other under a panel
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))  # arms that share a colour


@dataclass(frozen=True)
class Style:
    """Colours: real ones, or names that the page replaces by its own."""

    ink: str
    faint: str
    grid: str
    arms: tuple[str, ...]

    def of(self, number: int) -> tuple[str, Any]:
        """Colour and dashes of arm number so-and-so."""
        count = len(self.arms)
        return self.arms[number % count], DASHES[number // count % len(DASHES)]


# Each has a contrast of at least 4.5 on the page, in light and in dark. The first is the baseline's.
LIGHT_ARMS = ("#4a5160", "#1d5fd1", "#b4500a", "#12793c", "#8a35c9", "#c21f45", "#0b7480", "#8a5d00", "#b3257f", "#56700f")
DARK_ARMS = ("#b9c1cf", "#74a9ff", "#ff9d5c", "#4fcf80", "#c795ff", "#ff8095", "#43cbd6", "#e6b84a", "#ff86cc", "#b4d255")
LIGHT = Style("#1c2026", "#5b6472", "#e3e6eb", LIGHT_ARMS)
# Colours that stand for names: svg.py puts the names in.
NAMED = Style("#010101", "#010102", "#010103", tuple(f"#0202{i:02x}" for i in range(len(LIGHT_ARMS))))


Panel = tuple[str, Callable[[Axes, Style], None]]


@dataclass(frozen=True)
class Drawing:
    """One figure.

    Attributes:
        name: of its file, without an ending.
        title: above it.
        says: what it shows, for those who cannot see it.
        caption: how it came about.
        panels: each draws into axes in a style, and has a title of its own where there are several.
    """

    name: str
    title: str
    says: str
    caption: str
    panels: tuple[Panel, ...]


def save_png(drawing: Drawing, path: Path, *, names: Sequence[str]) -> None:
    """Draw all panels side by side in light colours, above a key of the arms' names in the order of their colours."""
    _save(drawing.panels, path, LIGHT, form="png", title=drawing.title, names=names)


def save_svg(drawing: Drawing, file: BinaryIO, *, panel: int) -> None:
    """Draw one panel with named colours, on no ground, and without the title and the key that the page has."""
    _save(drawing.panels[panel : panel + 1], file, NAMED, form="svg")


def _save(panels: Sequence[Panel], to: Any, style: Style, *, form: str, title: str = "", names: Sequence[str] = ()) -> None:
    with warnings.catch_warnings(), mpl.rc_context(_looks(style)):
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks; browsers find another
        width, height = SIZE if len(panels) == 1 and not panels[0][0] else PANEL
        key = 0.22 * math.ceil(len(names) / (KEYS * len(panels)))
        figure = Figure(figsize=(width * len(panels), height + key), layout="constrained")
        FigureCanvasAgg(figure)
        if names:  # first, for it takes room
            _add_key(figure, names, style, columns=KEYS * len(panels))
        for number, (panel_title, draw) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), number + 1)
            axes.set_title((panel_title or title) if title else "")
            draw(axes, style)
        figure.savefig(to, format=form, transparent=form == "svg", dpi=200, metadata={"Date": None} if form == "svg" else None)


def _looks(style: Style) -> dict[Any, Any]:
    return {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "thinwire",  # the same figure for the same records, byte for byte
        "text.parse_math": False,  # a dollar in a name is a dollar
        "path.simplify_threshold": 0.3,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": style.faint,
        "axes.labelcolor": style.ink,
        "axes.titlecolor": style.ink,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": style.grid,
        "grid.linewidth": 0.7,
        "text.color": style.ink,
        "xtick.color": style.faint,
        "xtick.labelcolor": style.ink,
        "xtick.labelsize": 8.5,
        "ytick.color": style.faint,
        "ytick.labelcolor": style.ink,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "lines.linewidth": 1.7,
        "lines.markersize": 5,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }


def _add_key(figure: Figure, names: Sequence[str], style: Style, *, columns: int) -> None:
    looks = [style.of(number) for number in range(len(names))]
    lines = [Line2D([], [], color=colour, linestyle=dashes) for colour, dashes in looks]
    figure.legend(lines, [_short(name) for name in names], loc="outside lower left", ncols=min(columns, len(names)))


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def bytes_axis(axis: Any) -> None:
    """Ticks in bytes for people on a logarithmic axis whose limits are set."""
    low, high = sorted(axis.get_view_interval())
    narrow = high < 30 * low  # powers of ten alone would be too few
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=9 if narrow else 7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value) if value >= 1 else ""))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def seconds_axis(axis: Any) -> None:
    """Ticks in units of time on a logarithmic axis whose limits are set."""
    low, high = sorted(axis.get_view_interval())
    within = [[time for time in times if low <= time <= high] for times in (_TIMES[::3], _TIMES)]
    axis.set_major_locator(FixedLocator(within[0] if len(within[0]) > 2 else within[1]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
    axis.set_minor_locator(NullLocator())


# Round times: people read "10 min" faster than "1000 s".
_TIMES = [round(unit * times, 6) for unit in (0.001, 0.01, 0.1, 1) for times in (1, 2, 5)]
_TIMES += [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 5 * 3600, 10 * 3600]
_TIMES += [86400 * days for days in (1, 2, 5, 10, 20, 50, 100)]


@dataclass(frozen=True)
class Label:
    """A name for a dot at (x, y) with a bar from `low` to `high`, in the colour of an arm."""

    name: str
    x: float
    y: float
    low: float
    high: float
    number: int


def write_labels(axes: Axes, labels: Sequence[Label], style: Style, *, avoid: Sequence[tuple[float, float]]) -> None:
    """Write each name beside its dot, at the first place that is free; one that finds none is left out."""
    figure: Any = axes.figure
    figure.draw_without_rendering()  # the layout must be known
    renderer = figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    dots = [axes.transData.transform(dot) for dot in avoid]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in dots]
    for label in sorted(labels, key=lambda label: label.y):
        for at, right, up, side in _PLACES:
            text = axes.annotate(
                _short(label.name),
                (label.x, getattr(label, at)),
                xytext=(right, up),
                textcoords="offset points",
                ha=side,
                va="center",
                color=style.of(label.number)[0],
                fontsize=8.5,
                gid=f"arm-{label.number}",
            )
            text.set_in_layout(False)
            box = text.get_window_extent(renderer).expanded(1.06, 1.0)  # the reader's font may be wider
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if within and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


# Beside the dot first, then above and below its bar; no further, or it would seem to name another.
_PLACES = [("y", 8, 0, "left"), ("y", -8, 0, "right")]
_ASIDE = ((0, "center"), (4, "left"), (-4, "right"))
_PLACES += [(at, x, y, side) for at, y in (("high", 11), ("low", -11)) for x, side in _ASIDE]
