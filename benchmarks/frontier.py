"""Figures of docs/results.md from records/evidence.jsonl: `python -m benchmarks.frontier`."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl

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


def family(arm: Arm) -> str:
    """Which curve an arm belongs to."""
    published = arm.settings.get("mode") == "published" or arm.settings.get("whiten") is False
    return f"{arm.algorithm} published" if published else arm.algorithm


def draw() -> Path:
    """Loss against bytes, one point per arm with its seeds."""
    rows = recorded()
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    seen = set()
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
            axes.annotate(note, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=6.5, color=color)
    axes.set(
        xscale="log",
        xlabel="how many times fewer bytes a worker sends than in DDP's ring, 4 workers",
        ylabel="validation loss (nats per byte)",
        title="gpt-nano, 4 workers, 384 steps; bars: least and largest of the seeds",
    )
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8, loc="upper left")
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


def draw_clocks() -> Path:
    """Loss against bytes of the methods with several clocks after a warm start."""
    rows = recorded()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    against = rows_of(PARTS["warm-clocks"][0], rows)
    for part, color in (("warm-clocks", "tab:blue"), ("wires", "tab:green")):
        for arm in PARTS[part]:
            if not (runs := rows_of(arm, rows)):
                continue
            x, losses = fewer(arm, runs, against), [run["loss"] for run in runs]
            y = statistics.fmean(losses)
            spread = [[y - min(losses)], [max(losses) - y]]
            axes.errorbar(x, y, yerr=spread, color=color, marker="o", capsize=3, linestyle="none")
            axes.annotate(arm.name, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=7.5, color=color)
    axes.set(
        xscale="log",
        xlabel="how many times fewer bytes a worker sends than in DDP's ring after the warm start, 4 workers",
        ylabel="validation loss (nats per byte)",
        title="gpt-nano, 4 workers, 256 synchronous steps, then 768 of the method; bars: least and largest of the seeds",
    )
    axes.grid(True, which="both", alpha=0.25)
    path = FIGURES / "clocks.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main() -> None:
    """Draw the figures."""
    mpl.rcParams["svg.hashsalt"] = "thinwire"  # the same figure for the same records, byte for byte
    print(f"{draw()}\n{draw_headline()}\n{draw_clocks()}")


if __name__ == "__main__":
    main()
