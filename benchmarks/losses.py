"""What methods lose against AdamW-DDP, for `thinwire plan`: src/thinwire/tools/losses.json, from decayed runs of the records.

`python -m benchmarks.results` writes it. A method without decayed runs has no entry, and the plan does not recommend it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.decayed import arm_of, compared

FILE = Path(__file__).parent.parent / "src" / "thinwire" / "tools" / "losses.json"
ARMS: dict[str, dict[int, tuple[str, str]]] = {  # by method of the plan and by its H or k: the records, and the arm in them
    "demo": {
        16: ("demo", "k=256 until 32, then 16, lr 2.83e-3"),
        32: ("demo", "k=256 until 32, then 32"),
        64: ("demo", "k=256 until 32, then 64"),
        128: ("demo", "k=256 until 32, then 128"),
    },
    "demo delayed": {32: ("demo", "k=256 until 32, then 32, delayed")},
    "local-adam": {32: ("pico", "Local Adam K=32")},
    "mt-dao": {32: ("pico", "MT-DAO K=32")},
    "diloco": {16: ("coarse", "DiLoCo H=16, mu 0.5"), 32: ("pico", "DiLoCo H=32")},
    "diloco ternary": {16: ("coarse", "DiLoCo ternary H=16, mu 0.5"), 32: ("pico", "DiLoCo ternary H=32")},
    "decoupled-diloco": {32: ("pico", "decoupled DiLoCo k=128 H=32")},
}
# Percent of loss that longer periods cost on top of H = 32, as published: 0.8% from H = 30 to 100 (Streaming DiLoCo, table 5),
# 2.9% of the perplexity from 50 to 1000 (DiLoCo, section 3).
PUBLISHED = {"diloco": {100: 0.8, 1000: 1.4}}


def losses() -> dict[str, Any]:
    """What the file has: entries of [H or k, percent], ascending, and where they are from."""
    measured: dict[str, list[list[float]]] = {"ddp": [[1, 0.0]]}
    for method, arms in ARMS.items():
        entries = [[value, round(_percent(*arm), 1)] for value, arm in arms.items()]
        entries += [[value, round(entries[-1][1] + more, 1)] for value, more in PUBLISHED.get(method, {}).items()]
        measured[method] = entries
    return {"about": _about(), "losses": measured}


def _percent(records: str, name: str) -> float:
    found = compared(records)
    percent = found.against(arm_of(records, name))
    if percent is None:
        raise SystemExit(f"{name!r} of the records {records} diverged, or has no seed of the baseline")
    return percent


def _about() -> str:
    """The runs that all losses are from: they must be of one protocol, with the same baseline."""
    told = set()
    for records in {records for arms in ARMS.values() for records, _ in arms.values()}:
        base = compared(records).baseline
        schedule, rate = base.first.config.lr_schedule, base.first.config.lr
        told.add((compared(records).title, schedule, rate, len(base.records)))
    if len(told) > 1:
        raise SystemExit(f"the losses of the plan must be of one protocol, got {sorted(told)}")
    ((title, schedule, _, seeds),) = told
    return f"{title}, from scratch, {schedule}, {seeds} seeds, simulated"


def text() -> str:
    """The file as it should be, a method a line."""
    made = losses()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entries)}" for name, entries in made["losses"].items())
    return f'{{\n  "about": {json.dumps(made["about"])},\n  "losses": {{\n{lines}\n  }}\n}}\n'
