"""The figures of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from thinwire.network import show_bytes
from thinwire.tools.link_time import ran_on, record_on_link
from thinwire.tools.records import Record
from thinwire.tools.report.comparison import Arm, Comparison
from thinwire.tools.report.curves import Clock, curves_of, evaluations, round_sizes, steps
from thinwire.tools.report.drawing import Axes, Drawing, Label, Style, bytes_axis, seconds_axis, write_labels

MOST_LABELS = 12  # more names than that in one figure cannot be read


def colour_numbers(comparison: Comparison) -> dict[str, int]:
    """The number of each arm's colour: the baseline has the first."""
    others = [arm for arm in comparison.arms if arm is not comparison.baseline]
    return {arm.name: number for number, arm in enumerate([comparison.baseline, *others])}


def drawings(comparison: Comparison, *, speeds: Sequence[tuple[str, float]], latency: tuple[str, float]) -> list[Drawing]:
    """The figures that the records have something for.

    Args:
        comparison: what to draw.
        speeds: links of the figure of time, in words and in bits per second.
        latency: of a message there, in words and in seconds.
    """
    with_curve = [arm for arm in comparison.arms if all(len(record.curve) > 1 for record in arm.records)]
    timed = [arm for arm in with_curve if all(math.isfinite(record.curve[-1].seconds) for record in arm.records)]
    found = [_loss_against_bytes(comparison)]
    if with_curve:
        found.append(_loss_against_steps(comparison, with_curve))
    if timed:
        found.append(_loss_against_time(comparison, timed, speeds, latency))
    if with_curve:
        found.append(_bytes_per_round(comparison, with_curve))
    drifting = [arm for arm in with_curve if any((p.val_drift or 0) > 0 for r in arm.records for p in r.curve)]
    if drifting:
        found.append(_drift(comparison, drifting))
    return [drawing for drawing in found if drawing is not None]


# --- The figures ---------------------------------------------------------------------------------------------------------


def _draw_loss(axes: Axes, arms: Sequence[Arm], numbers: dict[str, int], style: Style, clock: Clock) -> None:
    """A line and a band per arm, and its evaluations as dots; what was lost in the first steps is above the figure."""
    tops, bottoms = [], []
    for arm in arms:
        number = numbers[arm.name]
        colour, dashes = style.of(number)
        curves = curves_of(arm, clock)
        x, y = evaluations(arm, clock)
        axes.plot(curves.x, curves.mean, color=colour, linestyle=dashes, gid=f"arm-{number}", zorder=2)
        if len(arm.records) > 1:
            axes.fill_between(
                curves.x, curves.low, curves.high, color=colour, alpha=0.11, linewidth=0, gid=f"arm-{number}", zorder=1
            )
        axes.plot(x, y, "o", color=colour, markersize=3.6, gid=f"arm-{number}", zorder=3)
        tops.append(np.nanmax(curves.mean[len(curves.mean) // 12 :]) if np.isfinite(curves.mean).any() else math.nan)
        bottoms += [*y, np.nanmin(curves.low) if np.isfinite(curves.low).any() else math.nan]
    low, high = _finite_range(bottoms), _finite_range(tops)
    if low and high and high[1] > low[0]:
        # An arm that diverged must not press the others together.
        top = min(high[1], 2.5 * float(np.median([t for t in tops if math.isfinite(t)])))
        room = 0.06 * (top - low[0])
        axes.set_ylim(low[0] - room, top + room)
    axes.locator_params(axis="y", nbins=6)
    axes.set_ylabel("loss")


def _finite_range(values: Sequence[float]) -> tuple[float, float] | None:
    finite = [float(value) for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def _loss_against_bytes(comparison: Comparison) -> Drawing | None:
    numbers = colour_numbers(comparison)
    points = []
    for arm in comparison.arms:
        sent = arm.sample("sent")
        if sent is not None and sent.mean > 0 and arm.loss.finite:
            points.append((arm, sent.mean))
    if not points:
        return None

    def draw(axes: Axes, style: Style) -> None:
        axes.set_xscale("log")
        for arm, x in points:
            number, loss = numbers[arm.name], arm.loss
            colour, _ = style.of(number)
            axes.vlines(x, min(loss.values), max(loss.values), color=colour, alpha=0.5, linewidth=2, gid=f"arm-{number}")
            marker = "s" if arm is comparison.baseline else "o"
            axes.plot([x], [loss.mean], marker, color=colour, markersize=6.5, gid=f"arm-{number}")
        least, most = min(x for _, x in points), max(x for _, x in points)
        room = max(1.5, (most / least) ** 0.16)
        axes.set_xlim(least / room, most * room)
        axes.margins(y=0.14)
        axes.set_xlabel("bytes sent per worker")
        axes.set_ylabel("validation loss at the end")
        axes.locator_params(axis="y", nbins=6)
        bytes_axis(axes.xaxis)
        named = points if len(points) <= MOST_LABELS else [(arm, x) for arm, x in points if _on_front(arm, x, points)]
        bars = {arm.name: (min(arm.loss.values), max(arm.loss.values)) for arm, _ in points}
        dots = [(x, y) for arm, x in points for y in np.linspace(*bars[arm.name], 20)]
        labels = [Label(arm.name, x, arm.loss.mean, *bars[arm.name], numbers[arm.name]) for arm, x in named]
        write_labels(axes, labels, style, avoid=dots)

    said = ", ".join(f"{arm.name} {arm.loss.mean:.3f} with {show_bytes(x)}" for arm, x in points)
    many = "" if len(points) <= MOST_LABELS else " Named, where there is room, are those that no other beats in both."
    return Drawing(
        "loss-bytes",
        "Loss against bytes",
        f"Validation loss at the end against bytes: {said}.",
        f"Lower and further left is better. Bytes sent by one worker, as a ring has it. Dots are means over seeds, "
        f"bars reach from the least to the largest.{many}",
        (("", draw),),
    )


def _on_front(arm: Arm, x: float, points: Sequence[tuple[Arm, float]]) -> bool:
    mine = arm.loss.mean
    return not any(its <= x and other.loss.mean <= mine and (its, other.loss.mean) != (x, mine) for other, its in points)


def _loss_against_steps(comparison: Comparison, arms: Sequence[Arm]) -> Drawing:
    numbers = colour_numbers(comparison)

    def draw(axes: Axes, style: Style) -> None:
        _draw_loss(axes, arms, numbers, style, steps)
        axes.set_xlim(left=0)
        axes.set_xlabel("steps of each worker")

    band = "; bands reach from the least to the largest of the seeds" if any(len(arm.records) > 1 for arm in arms) else ""
    return Drawing(
        "loss-steps",
        "Loss against steps",
        f"Training loss over the steps of {_listed(arms)}, with evaluations.",
        f"Lines: training loss of worker 0, smoothed{band}. Dots: validation loss. The first steps are above the figure.",
        (("", draw),),
    )


def _loss_against_time(
    comparison: Comparison, arms: Sequence[Arm], speeds: Sequence[tuple[str, float]], latency: tuple[str, float]
) -> Drawing:
    numbers, delay = colour_numbers(comparison), latency[1]

    def on(bandwidth: float) -> Callable[[Record], list[float]]:
        return lambda record: record_on_link(record, bandwidth=bandwidth, latency=delay)

    ends = [on(speed)(record)[i] for _, speed in speeds for arm in arms for record in arm.records for i in (0, -1)]
    positive = [seconds for seconds in ends if seconds > 0]
    low, high = (min(positive), max(positive)) if positive else (1.0, 10.0)

    def panel(bandwidth: float) -> Callable[[Axes, Style], None]:
        def draw(axes: Axes, style: Style) -> None:
            axes.set_xscale("log")
            _draw_loss(axes, arms, numbers, style, on(bandwidth))
            axes.set_xlim(max(low, high / 3000) * 0.9, high * 1.15)
            seconds_axis(axes.xaxis)
            axes.set_xlabel("time")

        return draw

    same = {named for named, speed in speeds for arm in arms if ran_on(arm.first, bandwidth=speed, latency=delay)}
    as_run = f" Runs that were made on such a link are shown as they were ({', '.join(sorted(same))})." if same else ""
    slow = f" and {latency[0]} per message" if delay else ""
    return Drawing(
        "loss-time",
        f"Loss against time at {_words([named for named, _ in speeds])}",
        f"Loss against time of {_listed(arms)} on links of {_words([named for named, _ in speeds])}.",
        "Computing as it was recorded (in simulated runs, of one worker that has the machine to itself, or as was asked for), "
        f"plus the time that the recorded bytes and rounds take on such a link{slow}. What a method sends tau steps ahead is "
        f"hidden behind these steps; nothing else is.{as_run}",
        tuple((f"at {named}", panel(speed)) for named, speed in speeds),
    )


def _bytes_per_round(comparison: Comparison, arms: Sequence[Arm]) -> Drawing | None:
    numbers = colour_numbers(comparison)
    rounds = {arm.name: round_sizes(arm.first) for arm in arms}
    if not any(sizes for sizes in rounds.values()):
        return None

    def draw(axes: Axes, style: Style) -> None:
        axes.set_yscale("log")
        for arm in sorted(arms, key=lambda arm: -len(rounds[arm.name])):  # the rare ones on top
            number = numbers[arm.name]
            colour, dashes = style.of(number)
            sizes = rounds[arm.name]
            if not sizes:
                continue
            axes.plot(*zip(*sizes, strict=True), "o", color=colour, markersize=2.6, gid=f"arm-{number}", zorder=3)
            end = arm.first.curve[-1]
            mean = end.sent / end.step
            axes.plot([0, end.step], [mean, mean], color=colour, linestyle=dashes, linewidth=1.3, gid=f"arm-{number}", zorder=2)
        axes.margins(y=0.1)
        axes.set_xlim(left=0)
        axes.set_xlabel("steps of each worker")
        axes.set_ylabel("bytes sent per worker")
        bytes_axis(axes.yaxis)

    return Drawing(
        "bytes-rounds",
        "Bytes per round",
        "Bytes that a worker sends per round over the steps: "
        + ", ".join(f"{arm.name} {show_bytes(s[-1][1])}" for arm in arms if (s := rounds[arm.name]))
        + ".",
        "Dots: bytes sent in a round, at the step after which it ended. Lines: mean over all steps, with or without a round.",
        (("", draw),),
    )


def _drift(comparison: Comparison, arms: Sequence[Arm]) -> Drawing:
    numbers = colour_numbers(comparison)

    def draw(axes: Axes, style: Style) -> None:
        for arm in arms:
            number = numbers[arm.name]
            colour, dashes = style.of(number)
            x, y = evaluations(arm, steps, figure="val_drift")
            axes.plot(x, y, color=colour, linestyle=dashes, marker="o", markersize=4, gid=f"arm-{number}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("steps of each worker")
        axes.set_ylabel("relative distance")

    return Drawing(
        "drift",
        "Drift between workers",
        f"How far the workers' models are apart at the evaluations of {_listed(arms)}.",
        "Root mean square distance of the workers' models from their mean at the evaluations, relative to the mean's norm. "
        "Arms that are not here had none.",
        (("", draw),),
    )


def _listed(arms: Sequence[Arm]) -> str:
    return _words([arm.name for arm in arms])


def _words(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
