"""The README's table of the methods, from the records: `python -m benchmarks.results` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.arms import PARTS
from benchmarks.evidence import recorded
from benchmarks.tables import fewer, mean_of, rows_of

README = Path(__file__).parent.parent / "README.md"


class Row(NamedTuple):
    """A method of the README's table: when to take it, and the arm of the records that says what it gives."""

    method: str
    when: str
    part: str
    arm: str


HEAD = "| method | take it when | loss against AdamW-DDP | fewer bytes sent |\n|---|---|---:|---:|"
METHODS = (
    Row("`DataParallel`", "the link is fast: a round takes much less time than a step", "gpt", "AdamW-DDP"),
    Row("`DeMo`, 1-bit", "the link is thin and workers can exchange at every step", "gpt", "DeMo 1-bit k=172"),
    Row("`DiLoCo`, H=8", "rounds should be rare, messages may be as long as the model", "gpt", "DiLoCo H=8"),
    Row("`DecoupledDiLoCo`, H=8, 1-bit", "rounds should be rare and messages short", "gpt", "decoupled DiLoCo 1-bit k=512"),
    Row("`MTDAO`, every 32 steps", "Adam inside, rounds rare, each state at its own period", "clocks", "MT-DAO"),
)


def methods_table() -> str:
    """Each method beside the synchronous baseline of its own protocol, in Markdown."""
    records, lines = recorded(), [HEAD]
    for row in METHODS:
        arm, base = (next(arm for arm in PARTS[row.part] if arm.name == name) for name in (row.arm, "AdamW-DDP"))
        runs, baseline = rows_of(arm, records), rows_of(base, records)
        behind = 100 * (mean_of(runs, "loss") / mean_of(baseline, "loss") - 1)
        shown = f"{mean_of(runs, 'loss'):.3f}" if arm is base else f"{behind:+.1f}%"
        lines.append(f"| {row.method} | {row.when} | {shown} | {show_ratio(fewer(arm, runs, None))} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"methods": methods_table}


def show_ratio(ratio: float) -> str:
    """A ratio for people: 1x, 10.7x, 1,056x."""
    return f"{ratio:,.0f}x" if ratio >= 20 or abs(ratio - round(ratio)) < 0.05 else f"{ratio:.1f}x"


def readme_with_tables(text: str) -> str:
    """The README with its tables as the records have them; a table stands between two comments that name it."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} (python -m benchmarks.results) -->\n", "<!-- end of table -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        if len(re.findall(pattern, text, re.S)) != 1:
            raise SystemExit(f"{README.name} must have the table {name!r} once, between {begin.strip()!r} and {end!r}")
        table = f"{begin}{make()}\n{end}"
        text = re.sub(pattern, lambda _, table=table: table, text, flags=re.S)
    return text
