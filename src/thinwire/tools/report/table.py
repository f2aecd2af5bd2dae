"""The table of a comparison, for the terminal and for the page; and what it says in one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.network import show_bytes
from thinwire.tools.report.comparison import Arm, Comparison, Sample, show_settings


@dataclass(frozen=True)
class Cell:
    """What a table shows, and by what it is sorted: a number, or nothing for a text."""

    text: str
    value: float | None = None


NONE = Cell("-")
OTHER_WORKERS = (4, 8)  # for which a table says how many times fewer bytes there would be


def table(comparison: Comparison) -> tuple[list[str], list[list[Cell]]]:
    """Column names and one row per arm. Columns in which no arm has anything are left out."""
    rows = [_row(comparison, arm) for arm in comparison.arms]
    shown = [name for name in rows[0] if name in ("method", "loss") or any(row[name] != NONE for row in rows)]
    return shown, [[row[name] for name in shown] for row in rows]


def _row(comparison: Comparison, arm: Arm) -> dict[str, Cell]:
    sent, fewer = arm.sample("sent"), arm.fewer
    seconds, waiting, drift = arm.sample("seconds"), arm.sample("waiting"), arm.sample("val_drift")
    accuracy, against, p = arm.sample("val_accuracy"), comparison.against(arm), comparison.p_value(arm)
    rounds, tried = arm.sample("rounds"), arm.first.tried
    share = 100 * waiting.mean / seconds.mean if waiting and seconds and seconds.mean > 0 else None
    return {
        "method": Cell(arm.name),
        "loss": NONE if arm.unfinished and arm.sample("val_loss") is None else _show_loss(arm.loss),
        "vs baseline": Cell("baseline", 0.0) if arm is comparison.baseline else _difference(against, comparison.error(arm)),
        "p": NONE if p is None else Cell(show_p(p), p),
        "accuracy": _cell(accuracy and 100 * accuracy.mean, "{:.2f}%"),
        "bytes sent": NONE if sent is None else Cell(show_bytes(sent.mean), sent.mean),
        "fewer": NONE if fewer is None else Cell(show_times(fewer), fewer),
        **{f"with {workers}": _elsewhere(arm, workers) for workers in OTHER_WORKERS},
        "rounds": _cell(rounds and rounds.mean, "{:,.0f}"),
        "seconds": _cell(seconds and seconds.mean, "{:.3g}" if seconds and seconds.mean < 100 else "{:,.0f}"),
        "waiting": _cell(share, "{:.0f}%"),
        "drift": NONE if drift is None else Cell(f"{drift.mean:.3f}" if drift.mean else "0", drift.mean),
        "seeds": Cell(str(len(arm.records)), len(arm.records)),
        "tried": Cell(str(tried), tried) if tried else NONE,
        "place": Cell(arm.first.place),
        "settings": Cell(show_settings(comparison.settings_of(arm))) if comparison.settings_of(arm) else NONE,
    }


def _elsewhere(arm: Arm, workers: int) -> Cell:
    """How many times fewer bytes with another number of workers than the run had."""
    fewer = None if workers == arm.first.figures["workers"] else arm.fewer_among(workers)
    return NONE if fewer is None else Cell(show_times(fewer), fewer)


def _difference(against: float | None, error: float | None) -> Cell:
    """A difference in percent, and its standard error where there is one."""
    cell = _cell(against, "{:+.1f}%" if abs(against or 0.0) < 99.95 else "{:+,.0f}%")
    return cell if cell is NONE or error is None else Cell(f"{cell.text} ±{error:.1f}", cell.value)


def _cell(value: float | None, form: str) -> Cell:
    return NONE if value is None or not math.isfinite(value) else Cell(form.format(value), value)


def _show_loss(loss: Sample) -> Cell:
    if not loss.finite:
        lost = sum(not math.isfinite(value) for value in loss.values)
        return Cell("diverged" if lost == len(loss.values) else f"diverged in {lost} of {len(loss.values)}", math.inf)
    spread = f" ±{loss.spread:.3f}" if len(loss.values) > 1 else ""
    return Cell(f"{loss.mean:.4f}{spread}" if loss.mean < 0.1 else f"{loss.mean:.3f}{spread}", loss.mean)


def show_times(ratio: float) -> str:
    """A ratio for people: 8.0x, 104x, 1,056x."""
    return f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:,.0f}x"


def show_p(p: float) -> str:
    """A p-value for people: <0.001, 0.0042, 0.35."""
    return "<0.001" if p < 0.001 else f"{p:.2g}" if p < 0.01 else f"{p:.2f}"


def headline(comparison: Comparison, *, within: float = 1.0) -> str:
    """What is gained and what is lost: the arm with the fewest bytes of those within so many percent of the baseline."""
    base = comparison.baseline
    dense = base.sample("sent")
    thin: list[tuple[str, float, float]] = []
    for arm in comparison.arms:
        against, sent = comparison.against(arm), arm.sample("sent")
        if against is not None and dense and sent and 0 < sent.mean < dense.mean:
            thin.append((arm.name, against, dense.mean / sent.mean))
    if not thin:
        return ""
    near = [row for row in thin if row[1] <= within]
    if near:
        name, against, times = max(near, key=lambda row: row[2])
        return f"{name}: {_plain_times(times)} times fewer bytes than {base.name}, validation loss {against:+.1f}%."
    name, against, times = min(thin, key=lambda row: row[1])
    closest = f"The closest is {name}, {against:+.1f}% with {_plain_times(times)} times fewer bytes."
    return f"No method ended within {within:g}% of {base.name}. {closest}"


def _plain_times(ratio: float) -> str:
    return show_times(ratio).removesuffix("x")
