"""docs/results.md from benchmarks/results.md, the tables of the README, the losses of the plan: `python -m benchmarks.results`.

What stands between double braces in the text is filled in from the records. Some figures of finished tables are typed all the
same: who adds records reads the text again.

    {{ table PART }}                      all arms of a part with their best settings, and how they were run
    {{ loss PART / ARM }}                 mean over the seeds
    {{ against PART / ARM / OTHER }}      by how much an arm's loss is above another's, in percent
    {{ times PART / ARM }}                how many times fewer bytes a worker sends than in DDP's ring
    {{ message PART / ARM / OTHER }}      how many times shorter an arm's messages are than another's
    {{ closed PART / ARM / LOW / HIGH }}  which part of the gap between two others an arm closes
    {{ decayed NAME }}                    all arms of the records NAME of `thinwire compare`, and how they were run
    {{ accuracy cnn / ARM / OTHER }}      points of accuracy between two arms of decayed runs, paired by seed
    {{ swept }}                           arms of the sweep of batches against its baseline
    {{ paired NAME / ARM / OTHER }}       loss of an arm of these against another's, paired by seed, with its standard error
    {{ interval NAME / ARM / OTHER }}     where it is with 95% confidence, by the t distribution
    {{ sends NAME / ARM }}                how many times fewer bytes than DDP's ring
    {{ shorter NAME / ARM / OTHER }}      how many times shorter its messages are than another's
    {{ closes NAME / ARM / LOW / HIGH }}  which part of the gap between two others it closes
    {{ thin-wire }}                       times on shaped links, bytes of the interface, and what the plan had predicted
    {{ factor WAY / SPEED }}              of these: time per step over the same job alone
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import decayed, losses, record
from benchmarks.arms import PARTS, Arm, run_of
from benchmarks.evidence import best_point, recorded
from benchmarks.readme import README, readme_with_tables
from benchmarks.tables import fewer, mean_of, rows_of, synchronous, table, times

SOURCE = Path(__file__).parent / "results.md"
SPEEDS = ("inf", "1gbit", "100mbit", "10mbit")
PAGE = Path(__file__).parent.parent / "docs" / "results.md"
WARM = (
    "*After a warm start, at a constant learning rate; with a decay at the end the gain shrinks "
    "([what it is worth](#after-a-warm-start-as-the-authors-do-it)).*"
)


def _arm(part: str, name: str) -> tuple[Arm, list[dict[str, Any]]]:
    if part not in PARTS:
        raise SystemExit(f"{SOURCE.name} asks for part {part!r}: there are {', '.join(PARTS)}")
    arm = next((arm for arm in PARTS[part] if arm.name == name), None)
    if arm is None:
        raise SystemExit(f"{SOURCE.name} asks for arm {name!r} of {part}: it has {', '.join(a.name for a in PARTS[part])}")
    runs = rows_of(arm, recorded())
    if not runs:
        raise SystemExit(f"{SOURCE.name} asks for arm {name!r} of {part}, which has no finished runs in the records")
    return arm, runs


def _loss(part: str, name: str) -> float:
    return mean_of(_arm(part, name)[1], "loss")


def _against(part: str, name: str, other: str) -> str:
    """Over the seeds that both have."""
    mine, theirs = _arm(part, name)[1], _arm(part, other)[1]
    both = min(len(mine), len(theirs))
    return f"{100 * (mean_of(mine[:both], 'loss') / mean_of(theirs[:both], 'loss') - 1):+.1f}%"


def _shown_table(part: str) -> str:
    """The table, and under it how it came about."""
    rows, runs, commands = recorded(), [], []
    for arm in PARTS[part]:
        found = rows_of(arm, rows)
        runs += found
        point = best_point(arm, rows)
        if found and point is not None:
            commands.append(run_of(arm, point, found[0]["seed"]).key)
    dates = sorted({run["date"] for run in runs})
    machines = sorted({f"{run['cores']} cores, torch {run['torch']}, Python {run['python']}" for run in runs})
    how = f"*Simulated: {runs[0]['workers']} workers in one process; {'; '.join(machines)}; {', '.join(dates)};"
    how += f" `python -m benchmarks.evidence --part {part}`.*"
    details = _commands("The command of each row, for its first seed", commands)
    title = f"Table: {len(commands)} arms, with settings, loss, bytes and seeds"
    warm = any("--warm-start" in command for command in commands)
    return _folded(title, f"{table(part)}\n\n{how}\n\n{details}") + (f"\n\n{WARM}" if warm else "")


def _decayed(name: str) -> str:
    return f"{decayed.table(name)}\n\n{decayed.how(name)}"


def _folded(title: str, text: str) -> str:
    """Markdown that opens on a click, on the site of the docs (by the extension md_in_html) and elsewhere."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>'


def _commands(title: str, commands: list[str]) -> str:
    shown = "\n".join(commands).replace("<", "&lt;").replace(">", "&gt;")
    return f"<details><summary>{title}</summary><pre><code>{shown}</code></pre></details>"


def _fewer(part: str, name: str) -> str:
    arm, runs = _arm(part, name)
    return times(fewer(arm, runs, synchronous(part, recorded()).get((arm.task, arm.steps))))


def _message(part: str, name: str, other: str) -> str:
    mine, theirs = (mean_of(_arm(part, arm)[1], "payload") for arm in (name, other))
    return f"{theirs / mine:.0f}"


def _closed(part: str, name: str, low: str, high: str) -> str:
    worst, best = _loss(part, low), _loss(part, high)
    return f"{100 * (worst - _loss(part, name)) / (worst - best):.0f}%"


def _thin_wire() -> str:
    """Two tables of the lab: time over the same job alone, and how close plan and meter are."""
    run, counted = record.last("thin_wire"), record.last("thin_wire_bytes")
    ratios = {row["way"]: row["interface_over_metered"] for row in counted["rows"]}
    rows = {(row["way"], row["speed"]): row for row in run["rows"]}
    speeds = [s for s in SPEEDS if any(speed == s for _, speed in rows)]
    shown, limited = ["unlimited" if s == "inf" else s for s in speeds], [s for s in speeds if s != "inf"]
    lines = [f"| time per step, over the same job alone | {' | '.join(shown)} |", "|---|" + "---:|" * len(speeds)]
    check = [
        f"| plan, against measured | {' | '.join(limited)} | interface over meter |",
        "|---|" + "---:|" * (len(limited) + 1),
    ]
    for way in dict.fromkeys(way for way, _ in rows):
        factors = [f"{row['factor']:.2f}" if (row := rows.get((way, s))) else "" for s in speeds]
        lines.append(f"| {way} | {' | '.join(factors)} |")
        check.append(f"| {way} | {' | '.join(_plan_off(rows.get((way, s))) for s in limited)} | {ratios[way]:.3f} |")
    commands = [f"{row['speed']}: {row['command']}" for row in run["rows"]]
    commands += [f"bytes: {row['command']}" for row in counted["rows"]]
    alone = [row["alone"] for row in run["rows"]]
    how = (
        f"*Each method in one run with the job alone: {run['workers']} processes in network namespaces on {run['cores']} "
        f"cores, links shaped by the kernel; {run['task']}, 3.2M parameters; torch {run['torch']}, Python {run['python']}; "
        f"{run['date']}; `python -m benchmarks.thin_wire --save`. A step alone took {min(alone):.3f} to {max(alone):.3f} s. "
        f"Bytes: `python -m benchmarks.thin_wire --bytes --save`, {counted['date']}.*"
    )
    tables = "\n".join([*lines, "", *check, "", how, "", _commands("The command of each run", commands)])
    return _folded(f"Tables: {len(ratios)} ways to train at {len(speeds)} speeds, and how close plan and meter are", tables)


def _factor(way: str, speed: str) -> str:
    rows = {(row["way"], row["speed"]): row for row in record.last("thin_wire")["rows"]}
    if (way, speed) not in rows:
        raise SystemExit(f"{SOURCE.name} asks for {way!r} at {speed!r}: measured were {', '.join(map(' at '.join, rows))}")
    return f"{rows[way, speed]['factor']:.2f}"


def _plan_off(row: dict[str, Any] | None) -> str:
    return f"{row['predicted_seconds_per_step'] / row['seconds_per_step'] - 1:+.0%}" if row else ""


FILL: dict[str, Callable[..., str]] = {
    "table": _shown_table,
    "loss": lambda part, name: f"{_loss(part, name):.3f}",
    "against": _against,
    "times": _fewer,
    "message": _message,
    "closed": _closed,
    "decayed": _decayed,
    "swept": decayed.swept,
    "paired": decayed.difference,
    "accuracy": decayed.accuracy,
    "interval": decayed.interval,
    "sends": decayed.fewer,
    "shorter": decayed.shorter,
    "closes": decayed.closed,
    "thin-wire": _thin_wire,
    "factor": _factor,
}


def page() -> str:
    """The page as it should be."""

    def fill(match: re.Match[str]) -> str:
        word, _, rest = match[1].strip().partition(" ")
        if word not in FILL:
            raise SystemExit(f"{SOURCE.name} has {match[0]}: it must begin with one of {', '.join(FILL)}")
        return FILL[word](*(part.strip() for part in rest.split(" / ") if part))

    text = re.sub(r"\{\{(.+?)\}\}", fill, SOURCE.read_text(encoding="utf-8"))
    return f"<!-- Made by `python -m benchmarks.results` from benchmarks/results.md and the records: edit those. -->\n\n{text}"


def main() -> None:
    """Write the page and the README's tables."""
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme_with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    losses.FILE.write_text(losses.text(), encoding="utf-8")
    print(f"{PAGE}\n{README}\n{losses.FILE}")


if __name__ == "__main__":
    main()
