"""The README's table of the methods, from the records: `python -m benchmarks.results` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import decayed

README = Path(__file__).parent.parent / "README.md"


RECORDS = "pico"


class Row(NamedTuple):
    """A method of the README's table: when to take it, and the arm of the records that says what it gives."""

    method: str
    when: str
    arm: str


HEAD = "| method | take it when | loss against AdamW-DDP | fewer bytes sent | rounds |\n|---|---|---:|---:|---:|"
METHODS = (
    Row("`DataParallel`", "the link is fast: a round takes much less time than a step", "AdamW-DDP"),
    Row("`DeMo`, 1-bit", "the link is thin and workers can exchange at every step", "DeMo k=256 until 32, then 32"),
    Row("`DiLoCo`, H=32", "rounds should be rare, messages may be as long as the model", "DiLoCo H=32"),
    Row("`DecoupledDiLoCo`, H=32, three values", "rounds should be rare and messages short", "DiLoCo ternary H=32"),
    Row("`MTDAO`, every 32 steps", "Adam inside, rounds rare, each state at its own period", "MT-DAO K=32"),
)


def methods_table() -> str:
    """Each method beside AdamW-DDP, from runs whose learning rate decays to zero, in Markdown."""
    base, lines = decayed.compared(RECORDS).baseline, [HEAD]
    for row in METHODS:
        arm = decayed.arm_of(RECORDS, row.arm)
        loss = f"{arm.loss.mean:.3f}" if arm is base else decayed.difference(RECORDS, row.arm, base.name)
        rounds = arm.sample("rounds")
        assert rounds is not None and arm.fewer is not None
        lines.append(f"| {row.method} | {row.when} | {loss} | {show_ratio(arm.fewer)} | {rounds.mean:.0f} |")
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
