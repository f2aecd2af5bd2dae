"""Tables and figure of docs/results.md from records/evidence.jsonl: `python -m benchmarks.frontier`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.arms import PARTS, Arm, run_of
from benchmarks.evidence import best_point, recorded
from benchmarks.figures import FIGURES, plt

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


def rows_of(arm: Arm, rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of an arm's best point, one per seed; empty while it is not tuned."""
    point = best_point(arm, rows)
    if point is None:
        return []
    found = [rows.get(run_of(arm, point, seed).key) for seed in arm.seeds]
    return [row for row in found if row is not None]


def mean_of(runs: list[dict[str, Any]], figure: str) -> float:
    """The mean of a figure over the seeds."""
    return statistics.fmean(run[figure] for run in runs)


def table(part: str) -> str:
    """A part's arms as a Markdown table, against AdamW-DDP on the same task in runs of the same length."""
    rows, lines = recorded(), []
    arms = [(arm, runs) for arm in PARTS[part] if (runs := rows_of(arm, rows))]
    dense = [arm for some in (*PARTS.values(), PARTS[part]) for arm in some if arm.name == "AdamW-DDP"]  # the part's own last
    base = {(arm.task, arm.steps): runs for arm in dense if (runs := rows_of(arm, rows))}
    images = any("accuracy" in runs[0] for _, runs in arms)
    warm = any(arm.run.get("warm_start") for arm, _ in arms)
    head = "| arm | best settings | loss, mean (spread) | against AdamW-DDP |"
    bytes_head = " fewer bytes after the warm start |" if warm else " fewer bytes |"
    lines += [head + (" accuracy, points against DDP |" if images else "") + bytes_head + " drift | seeds |"]
    lines += ["|---|---|---:|---:|" + ("---:|" if images else "") + "---:|---:|---:|"]
    for arm, runs in arms:
        loss, spread = mean_of(runs, "loss"), max(r["loss"] for r in runs) - min(r["loss"] for r in runs)
        against, behind, accuracy = base.get((arm.task, arm.steps)), "", ""
        if against:
            behind = f"{100 * (loss / mean_of(against[: len(runs)], 'loss') - 1):+.1f}%"
        if images:
            points = 100 * mean_of(runs, "accuracy") if "accuracy" in runs[0] else None
            less = f" ({points - 100 * mean_of(against[: len(runs)], 'accuracy'):+.2f})" if against and points else ""
            accuracy = f" {points:.2f}%{less} |" if points else " |"
        point = best_point(arm, rows) or {}
        best = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in point.items())
        drift = f"{mean_of(runs, 'drift'):.3f}" if mean_of(runs, "drift") else "0"
        lines.append(
            f"| {arm.name} | {best} | {loss:.3f} ({spread:.3f}) | {behind} |{accuracy} {_times(fewer(arm, runs, against))} |"
            f" {drift} | {len(runs)} |"
        )
    return "\n".join(lines)


def fewer(arm: Arm, runs: list[dict[str, Any]], synchronous: list[dict[str, Any]] | None) -> float:
    """How many times fewer bytes than gradients at every step; after a warm start, of the steps that come then."""
    warm = arm.run.get("warm_start", 0)
    if not warm or not synchronous:
        return mean_of(runs, "fewer")
    steps, parameters = runs[0]["steps"], runs[0]["parameters"]
    local = mean_of(runs, "payload") - warm * synchronous[0]["payload"] / steps  # a synchronous step sends what it always does
    return 4 * parameters * (steps - warm) / local


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 20 else f"{ratio:,.0f}x"


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
            x, losses = mean_of(runs, "fewer"), [run["loss"] for run in runs]
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
        xlabel="how many times fewer payload bytes than fp32 gradients at every step",
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
        xlabel="how many times fewer payload bytes than fp32 gradients, after the warm start",
        ylabel="validation loss (nats per byte)",
        title="gpt-nano, 4 workers, 256 synchronous steps, then 768 of the method; bars: least and largest of the seeds",
    )
    axes.grid(True, which="both", alpha=0.25)
    path = FIGURES / "clocks.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main() -> None:
    """Print all tables and draw the figures."""
    for part in PARTS:
        print(f"\n## {part}\n\n{table(part)}")
    print(f"\n{draw()}\n{draw_clocks()}")


if __name__ == "__main__":
    main()
