"""What the records of the evidence say: means over seeds, ratios, and the tables of docs/results.md. Reads, never runs."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.arms import PARTS, Arm, run_of
from benchmarks.evidence import best_point, recorded
from thinwire.network import ddp_bytes


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


def synchronous(part: str, rows: dict[str, dict[str, Any]]) -> dict[tuple[str, int | None], list[dict[str, Any]]]:
    """The runs of AdamW-DDP that a part is compared with, by task and steps."""
    dense = [arm for some in (*PARTS.values(), PARTS[part]) for arm in some if arm.name == "AdamW-DDP"]  # the part's own last
    return {(arm.task, arm.steps): runs for arm in dense if (runs := rows_of(arm, rows))}


def table(part: str) -> str:
    """A part's arms as a Markdown table, against AdamW-DDP on the same task in runs of the same length."""
    rows, lines = recorded(), []
    arms = [(arm, runs) for arm in PARTS[part] if (runs := rows_of(arm, rows))]
    base = synchronous(part, rows)
    images = any("accuracy" in runs[0] for _, runs in arms)
    warm = any(arm.run.get("warm_start") for arm, _ in arms)
    head = "| arm | best settings | loss, mean (range over seeds) | against AdamW-DDP |"
    workers = ", ".join(sorted({str(run["workers"]) for _, runs in arms for run in runs}))
    bytes_head = f" fewer bytes sent{' after the warm start' if warm else ''}, {workers} workers |"
    lines += [head + (" accuracy, points against DDP |" if images else "") + bytes_head + " drift | seeds |"]
    lines += ["|---|---|---:|---:|" + ("---:|" if images else "") + "---:|---:|---:|"]
    for arm, runs in arms:
        loss = mean_of(runs, "loss")
        apart = f" ({max(r['loss'] for r in runs) - min(r['loss'] for r in runs):.3f})" if len(runs) > 1 else ""
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
            f"| {arm.name} | {best} | {loss:.3f}{apart} | {behind} |{accuracy} {times(fewer(arm, runs, against))} |"
            f" {drift} | {len(runs)} |"
        )
    return "\n".join(lines)


def fewer(arm: Arm, runs: list[dict[str, Any]], against: list[dict[str, Any]] | None) -> float:
    """How many times fewer bytes a worker sends than in DDP's ring; after a warm start, in the steps that come then."""
    steps, parameters, workers = (runs[0][name] for name in ("steps", "parameters", "workers"))
    sent, warm = mean_of(runs, "sent"), arm.run.get("warm_start", 0) if against else 0
    if against:
        sent -= warm * against[0]["sent"] / steps  # a synchronous step sends what it always does
    return ddp_bytes(parameters, workers, steps - warm) / sent


def times(ratio: float) -> str:
    """A ratio in words."""
    return f"{ratio:.2f}x" if ratio < 20 else f"{ratio:,.0f}x"
