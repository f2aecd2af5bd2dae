"""An arm's curves over its seeds, at common places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.tools.records import Record
from thinwire.tools.report.comparison import Arm

GRID = 160  # steps at which the seeds of an arm are averaged
Clock = Callable[[Record], Sequence[float]]  # what is on the x axis at each point of a record's curve


@dataclass(frozen=True, eq=False)
class Curves:
    """An arm's loss over its seeds, at common places: [GRID] each."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curves_of(arm: Arm, clock: Clock) -> Curves:
    """Smoothed training loss, averaged over seeds at equal steps; x is the mean of the seeds' clocks there.

    Args:
        arm: all its records have curves.
        clock: what is on the x axis at each point of a record's curve.
    """
    last = min(record.curve[-1].step for record in arm.records)
    first = max(record.curve[0].step for record in arm.records)
    at = np.linspace(first, last, min(GRID, max(2, last - first + 1)))
    losses, clocks = [], []
    for record in arm.records:
        steps = [point.step for point in record.curve]
        losses.append(np.interp(at, steps, smoothed([point.loss for point in record.curve])))
        clocks.append(np.interp(at, steps, clock(record)))
    seeds = np.stack(losses)  # [seeds, GRID]
    return Curves(np.mean(clocks, axis=0), seeds.mean(axis=0), seeds.min(axis=0), seeds.max(axis=0))


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Mean over a window of a 20th of the curve around each point.

    At the start, where a loss falls fast, the window reaches as far to one side as to the other; at the end, where it is flat,
    it keeps its left half. A loss that is not finite takes no part: the round was refused, and training went on.
    """
    values = np.asarray(losses, dtype=float)
    finite = np.isfinite(values)
    half = len(values) // 40
    where = np.arange(len(values))
    left = np.minimum(where, half)
    right = np.minimum(len(values) - 1 - where, left)

    def over_window(summands: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(summands)])
        return sums[where + right + 1] - sums[where - left]

    counts = over_window(finite)
    return np.divide(over_window(np.where(finite, values, 0.0)), counts, out=np.full(len(values), np.nan), where=counts > 0)


def evaluations(arm: Arm, clock: Clock, *, figure: str = "val_loss") -> tuple[list[float], list[float]]:
    """Where the arm was evaluated, and the mean of a figure over its seeds there; only where all seeds were."""
    found: dict[int, list[tuple[float, float]]] = {}
    for record in arm.records:
        for point, x in zip(record.curve, clock(record), strict=True):
            value = getattr(point, figure)
            if value is not None and math.isfinite(value):
                found.setdefault(point.step, []).append((x, value))
    means = [np.mean(pairs, axis=0) for pairs in found.values() if len(pairs) == len(arm.records)]  # (x, figure) each
    return [float(mean[0]) for mean in means], [float(mean[1]) for mean in means]


def steps(record: Record) -> list[float]:
    """The clock that counts steps."""
    return [float(point.step) for point in record.curve]


def round_sizes(record: Record) -> list[tuple[int, float]]:
    """Step and bytes of the rounds of a record; where a point of its curve stands for several, their mean."""
    sizes, sent, rounds = [], 0, 0
    for point in record.curve:
        if point.rounds > rounds and point.sent > sent:
            sizes.append((point.step, (point.sent - sent) / (point.rounds - rounds)))
        sent, rounds = point.sent, point.rounds
    return sizes
