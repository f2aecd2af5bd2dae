"""The README's table of the methods, from the records: `python -m benchmarks.results` writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks import decayed

README = Path(__file__).parent.parent / "README.md"


TOKENS = "nano"  # records of decayed runs on tokens; those on bytes are named beside each arm


class Row(NamedTuple):
    """A method of the README's table: when to take it, and the arms of the records that say what it gives."""

    method: str
    when: str
    records: str
    on_bytes: str
    on_tokens: str


HEAD = (
    "| method | take it when | loss, text as bytes (0.1M) | loss, BPE tokens (1M) | fewer bytes sent | rounds per step |\n"
    "|---|---|---:|---:|---:|---:|"
)
ADAMW, K128, START, DILOCO, TERNARY = (
    "AdamW-DDP",
    "DeMo k=128",
    "DeMo k=256 until 32, then 64",
    "DiLoCo H=32",
    "DiLoCo ternary H=32",
)
METHODS = (
    Row("`DataParallel`", "the link is fast: a round takes much less time than a step", "demo", ADAMW, ADAMW),
    Row("`DeMo`", "the link is thin and workers can exchange at every step", "demo", START.removeprefix("DeMo "), START),
    Row("`DeMo`, k=128 throughout", "the same, in short runs", "demo", K128.removeprefix("DeMo "), K128),
    Row("`DiLoCo`, H=32", "rounds should be rare, messages may be as long as the model", "pico", DILOCO, DILOCO),
    Row("`DecoupledDiLoCo.coarse`, H=32", "rounds should be rare and messages short", "pico", TERNARY, TERNARY),
    Row(
        "`MTDAO`, every 32 steps",
        "Adam inside, rounds rare, each state at its own period",
        "mt-dao",
        "MT-DAO K=32 after DeMo",
        "MT-DAO K=32 after DeMo",
    ),
)


def methods_table() -> str:
    """Each method beside AdamW-DDP, from runs whose learning rate decays to zero, in Markdown."""
    lines = [HEAD]
    for row in METHODS:
        arm = decayed.arm_of(row.records, row.on_bytes)
        rounds = arm.sample("rounds")
        assert rounds is not None and arm.fewer is not None
        rounds_alone = rounds.mean - arm.first.config.warm_start  # a start is one round per step
        period = round((arm.first.config.steps - arm.first.config.warm_start) / rounds_alone)
        often = "1" if period == 1 else f"1/{period}"
        losses = f"{_loss(row.records, row.on_bytes)} | {_loss(TOKENS, row.on_tokens)}"
        lines.append(f"| {row.method} | {row.when} | {losses} | {show_ratio(arm.fewer)} | {often} |")
    return "\n".join(lines)


def _loss(name: str, arm: str) -> str:
    """The baseline's loss, and how far others are from it."""
    base = decayed.compared(name).baseline
    return f"{base.loss.mean:.3f}" if arm == base.name else decayed.difference(name, arm, base.name)


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
