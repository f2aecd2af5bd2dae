"""Draw the figures of docs/performance.md from the last records: `python -m benchmarks.figures`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from benchmarks.performance import newest

mpl.use("svg")
from matplotlib import pyplot as plt  # after the choice of what to draw with

FIGURES = Path(__file__).parent.parent / "docs" / "figures"

STYLES = {
    "simple k=32": ("tab:red", "o-"),
    "simple k=8": ("tab:pink", "o-"),
    "thinwire k=32 bf16": ("tab:blue", "o-"),
    "thinwire k=32 1-bit": ("tab:cyan", "o-"),
    "thinwire k=8 1-bit": ("tab:green", "o-"),
    "thinwire k=128 1-bit": ("tab:purple", "o-"),
    "AdamW foreach": ("tab:gray", "s--"),
    "AdamW fused": ("black", "s--"),
    "all-reduce fp32": ("tab:orange", "s--"),
}


def draw_wire() -> Path:
    """Cost of a round against the size of the model, and of reading against the number of workers."""
    mpl.rcParams["svg.hashsalt"] = "thinwire"  # the same figure for the same record, byte for byte
    measured = {part: newest("wire", part, kernels=True)[part] for part in ("rounds", "workers")}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    rows = sorted(measured["rounds"].values(), key=lambda row: row["parameters"])
    sizes = [row["parameters"] / 1e6 for row in rows]
    for way, (color, style) in STYLES.items():
        left.plot(sizes, [row["seconds"][way]["median"] for row in rows], style, color=color, label=way)
    left.set(title="a round with 2 workers on loopback, 1 thread each", xlabel="million parameters", ylabel="seconds (median)")
    workers = measured["workers"]
    for way, times in workers["seconds"].items():
        right.plot([int(w) for w in times], list(times.values()), STYLES[way][1], color=STYLES[way][0], label=way)
    same = next(row for row in rows if row["parameters"] == workers["parameters"])
    for way, (color, style) in STYLES.items():
        if "--" in style:  # what does not depend on the messages: a line for reference
            right.axhline(same["seconds"][way]["median"], linestyle="--", color=color, label=f"{way} (2 workers)")
    right.set(
        title=f"reading and applying all messages, {workers['parameters'] / 1e6:.0f}M parameters",
        xlabel="workers",
        ylabel="seconds (least)",
    )
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    ticks = [1, 2, 4, 8, 16, 32]
    right.set_xticks(ticks, [str(t) for t in ticks], minor=False)
    right.set_xticks([], minor=True)
    left.set_xticks(sizes, [f"{s:.0f}" for s in sizes])
    left.set_xticks([], minor=True)
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / "wire-cost.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


if __name__ == "__main__":
    print(draw_wire())
