"""The README's tables of bytes, from the records and the codecs: `python -m benchmarks.results` writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.arms import PARTS
from benchmarks.evidence import recorded
from benchmarks.tables import fewer, mean_of, rows_of
from thinwire import parse_codec

README = Path(__file__).parent.parent / "README.md"
WARM = "warm-clocks"  # the part with the synchronous run that a warm start is a part of

# What a row is called, and which arm of which part it is. The first row of a table is what the others are compared with.
SCRATCH_ROWS = {
    "AdamW, every gradient sent": ("gpt", "AdamW-DDP"),
    "`DeMo`, 1-bit": ("gpt", "DeMo 1-bit k=172"),
    "`DeMo`, 1-bit, fewer coefficients": ("gpt", "DeMo 1-bit k=22"),
    "`DiLoCo`, H=8": ("gpt", "DiLoCo H=8"),
    "`DecoupledDiLoCo`, H=8, 1-bit": ("gpt", "decoupled DiLoCo 1-bit k=512"),
    "`DecoupledDiLoCo`, H=8, 1-bit, fewer coefficients": ("gpt", "decoupled DiLoCo 1-bit k=128"),
}
WARM_ROWS = {
    "AdamW, every gradient sent": (WARM, "AdamW-DDP"),
    "Local Adam, averaged every 32 steps": (WARM, "Local Adam"),
    "`MTDAO`, averaged every 32 steps": (WARM, "MT-DAO"),
    "`DeMo`, 1-bit, 172 coefficients per block": ("headline", "DeMo 1-bit k=172"),
    "`DeMo`, 1-bit, 32 coefficients": ("headline", "DeMo 1-bit k=32"),
    "`DeMo`, 1-bit, 8 coefficients": ("headline", "DeMo 1-bit k=8"),
    "`DiLoCo`, H=32, outer momentum 0.9": (WARM, "DiLoCo"),
    "`MTDAO`, averages in 4 bits": ("wires", "MT-DAO fp4, K_u=64, K_v=384"),
    "`DecoupledDiLoCo`, H=8, 1-bit": ("headline", "decoupled DiLoCo H=8 k=128"),
}
HEADS = {
    "scratch": (
        "GPT of 0.8M parameters, 384 steps, {seeds} seeds, {workers} workers | validation loss | fewer bytes sent",
        SCRATCH_ROWS,
    ),
    "warm start": (
        "256 synchronous steps, then 768 of the method at a constant lr, {seeds} seeds, {workers} workers | validation loss "
        "| fewer bytes sent in those 768",
        WARM_ROWS,
    ),
}


def loss_table(name: str) -> str:
    """Loss against bytes, in Markdown."""
    head, rows = HEADS[name]
    records, lines, base = recorded(), [], None
    synchronous = None
    for label, (part, arm_name) in rows.items():
        arm = next(arm for arm in PARTS[part] if arm.name == arm_name)
        runs = rows_of(arm, records)
        loss = mean_of(runs, "loss")
        if base is None:
            base = loss
            synchronous = runs if arm.run.get("warm_start") else None
            head = head.format(seeds=len(runs), workers=runs[0]["workers"])
        behind = "" if loss == base else f" ({100 * (loss / base - 1):+.1f}%)"
        lines.append(f"| {label} | {loss:.3f}{behind} | {show_ratio(fewer(arm, runs, synchronous))} |")
    return "\n".join([f"| {head} |", "|---|---:|---:|", *lines])


def message_table() -> str:
    """The length of one worker's message for the tensors of GPT-2 124M, in Markdown."""
    d = 768
    layer = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    like = [torch.empty(shape, device="meta") for shape in [(50304, d), (1024, d), *(12 * layer), (d,), (d,)]]
    dense = sum(4 * t.numel() for t in like)
    blocks = sum(t.numel() // 64 ** t.dim() for t in like)  # of 64 x 64, of vectors 64
    rows = {
        "all values in fp32": dense,
        "32 DCT coefficients of each 64 x 64 block, int64 index + fp32 value, the usual form": 12 * 32 * blocks,
    }
    for wire in ('DCT(64) >> TopK(32) >> Float("bf16")', "DCT(64) >> TopK(32) >> Sign()"):
        rows[f"`{wire}`"] = parse_codec(wire).nbytes(like)
    shares = {count: "1" if count == dense else f"1/{dense / count:.0f}" for count in rows.values()}
    lines = [f"| {what} | {count:,} | {shares[count]} |" for what, count in rows.items()]
    return "\n".join(["| message | bytes | of dense fp32 |", "|---|---:|---:|", *lines])


TABLES: dict[str, Callable[[], str]] = {**{name: partial(loss_table, name) for name in HEADS}, "message": message_table}


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
