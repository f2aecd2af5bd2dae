"""Figures of docs/results.md from the records of the evidence and of the lab: `python -m benchmarks.frontier`."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

from benchmarks import record
from benchmarks.arms import PARTS, Arm
from benchmarks.evidence import recorded
from benchmarks.figures import FIGURES, plt
from benchmarks.tables import fewer, mean_of, rows_of

FAMILIES = {
    "data-parallel": ("AdamW-DDP", "black", "s"),
    "demo": ("DeMo, ours", "tab:blue", "o"),
    "demo published": ("DeMo as published", "tab:cyan", "v"),
    "diloco": ("DiLoCo", "tab:orange", "D"),
    "decoupled-diloco": ("decoupled DiLoCo, consensus", "tab:green", "o"),
    "decoupled-diloco published": ("decoupled DiLoCo, published rule", "tab:red", "x"),
}
SPEEDS = (
    ("1gbit", "1 Gbit/s", "tab:green", "o"),
    ("100mbit", "100 Mbit/s", "tab:blue", "D"),
    ("10mbit", "10 Mbit/s", "tab:red", "s"),
)


def family(arm: Arm) -> str:
    """Which curve an arm belongs to."""
    published = arm.settings.get("mode") == "published" or arm.settings.get("whiten") is False
    return f"{arm.algorithm} published" if published else arm.algorithm


class Labels:
    """Names beside points, each where it covers neither a point nor a name that is there already.

    Args:
        axes: the axes, with their scales and limits set, drawn once.
        points: all points of the figure.
    """

    def __init__(self, axes: Axes, points: list[tuple[float, float]]) -> None:
        self._axes = axes
        self._taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform(points)]

    def put(self, text: str, point: tuple[float, float], color: str) -> None:
        """Write a name beside a point: to the right if there is room."""
        places = [(8, 4, "left"), (8, -11, "left"), (-8, 4, "right"), (-8, -11, "right"), (8, 14, "left"), (8, -21, "left")]
        for x, y, side in places:
            label = self._axes.annotate(text, point, (x, y), textcoords="offset points", ha=side, fontsize=8.5, color=color)
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in self._taken) or (x, y, side) == places[-1]:
                self._taken.append(box)
                return
            label.remove()


def draw() -> Path:
    """Loss against bytes, one point per arm with its seeds."""
    rows = recorded()
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    seen, labels = set(), []
    for part in PARTS:
        for arm in PARTS[part]:
            runs = rows_of(arm, rows)
            if arm.task != "gpt-nano" or arm.steps or not runs:  # runs of one length
                continue
            label, color, marker = FAMILIES[family(arm)]
            x, losses = fewer(arm, runs, None), [run["loss"] for run in runs]
            y = statistics.fmean(losses)
            axes.errorbar(
                x,
                y,
                yerr=[[y - min(losses)], [max(losses) - y]],
                color=color,
                marker=marker,
                capsize=3,
                linestyle="none",
                label=None if label in seen else label,
            )
            seen.add(label)
            note = arm.name.replace("decoupled DiLoCo ", "").replace("DeMo ", "")
            note += f", drift {mean_of(runs, 'drift'):.2f}" if mean_of(runs, "drift") else ""
            labels.append((note, (x, y), color))
    axes.set(
        xscale="log",
        xlim=(0.7, 1e4),
        xlabel="how many times fewer bytes a worker sends than in DDP's ring, 4 workers",
        ylabel="validation loss (nats per byte)",
        title="gpt-nano, 4 workers, 384 steps; bars: least and largest of the seeds",
    )
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="upper left")
    figure.draw_without_rendering()  # so that points have their places
    _write(labels, axes)
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / "frontier.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def draw_headline() -> Path:
    """Loss against bytes of the arms with three seeds, from scratch: the figure of the README and of the front page."""
    rows = recorded()
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for arm in PARTS["gpt"]:
        runs = rows_of(arm, rows)
        x, losses = fewer(arm, runs, None), [run["loss"] for run in runs]
        y, (_, color, marker) = statistics.fmean(losses), FAMILIES[family(arm)]
        spread = [[y - min(losses)], [max(losses) - y]]
        axes.errorbar(x, y, yerr=spread, color=color, marker=marker, markersize=8, capsize=4, linestyle="none")
        axes.annotate(
            arm.name, (x, y), textcoords="offset points", xytext=(9, 5), fontsize=10, color=color, annotation_clip=False
        )
    axes.set(xscale="log", xlim=(0.7, 1e4), ylabel="validation loss (nats per byte)")
    axes.set_xlabel("times fewer bytes that leave a worker than with DDP's ring, 4 workers (simulated)")
    axes.grid(True, which="both", alpha=0.25)
    path = FIGURES / "loss-bytes.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _write(labels: list[tuple[str, tuple[float, float], str]], axes: Axes) -> None:
    places = Labels(axes, [point for _, point, _ in labels])
    for label in labels:
        places.put(*label)


def draw_clocks() -> Path:
    """Loss against bytes of the methods with several clocks after a warm start."""
    rows = recorded()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    against, labels = rows_of(PARTS["warm-clocks"][0], rows), []
    for part, color in (("warm-clocks", "tab:blue"), ("wires", "tab:green")):
        for arm in PARTS[part]:
            if not (runs := rows_of(arm, rows)):
                continue
            x, losses = fewer(arm, runs, against), [run["loss"] for run in runs]
            y = statistics.fmean(losses)
            spread = [[y - min(losses)], [max(losses) - y]]
            axes.errorbar(x, y, yerr=spread, color=color, marker="o", capsize=3, linestyle="none")
            labels.append((arm.name, (x, y), color))
    axes.set(
        xscale="log",
        xlim=(0.7, 3e3),
        xlabel="how many times fewer bytes a worker sends than in DDP's ring after the warm start, 4 workers",
        ylabel="validation loss (nats per byte)",
        title="gpt-nano, 4 workers, 256 synchronous steps, then 768 of the method; bars: least and largest of the seeds",
    )
    axes.grid(True, which="both", alpha=0.25)
    figure.draw_without_rendering()  # so that points have their places
    _write(labels, axes)
    path = FIGURES / "clocks.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def draw_thin_wire() -> Path:
    """Time per step on shaped links over the same job alone, one row per method."""
    rows = record.last("thin_wire")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))[::-1]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for speed, shown, color, marker in SPEEDS:
        found = [row for row in rows if row["speed"] == speed]
        x, y = [row["factor"] for row in found], [ways.index(row["way"]) for row in found]
        axes.plot(x, y, color=color, marker=marker, linestyle="none", label=shown)
    axes.set(xscale="log", xlabel="time per step, over the same job without communication")
    axes.set_xticks([1, 2, 5, 10, 20, 30], labels=["1", "2", "5", "10", "20", "30"])
    axes.set_yticks(range(len(ways)), labels=ways)
    axes.grid(True, alpha=0.25)
    axes.legend()
    path = FIGURES / "thin-wire.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main() -> None:
    """Draw the figures."""
    mpl.rcParams["svg.hashsalt"] = "thinwire"  # the same figure for the same records, byte for byte
    print(f"{draw()}\n{draw_headline()}\n{draw_clocks()}\n{draw_thin_wire()}")


if __name__ == "__main__":
    main()
