"""What methods lose against AdamW-DDP, for `thinwire plan`: src/thinwire/tools/losses.json, from decayed runs of the records.

`python -m benchmarks.results` writes it. A method without decayed runs has no entry, and the plan does not recommend it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.decayed import arm_of, compared

FILE = Path(__file__).parent.parent / "src" / "thinwire" / "tools" / "losses.json"
RECORDS = "pico"
ARMS = {  # by method of the plan, and by its H or k
    "demo": {32: "DeMo k=32", 128: "DeMo k=128"},
    "local-adam": {32: "Local Adam K=32"},
    "mt-dao": {32: "MT-DAO K=32"},
    "diloco": {32: "DiLoCo H=32"},
    "diloco ternary": {32: "DiLoCo ternary H=32"},
    "decoupled-diloco": {32: "decoupled DiLoCo k=128 H=32"},
}
# Percent of loss that longer periods cost on top of H = 32, as published: 0.8% from H = 30 to 100 (Streaming DiLoCo, table 5),
# 2.9% of the perplexity from 50 to 1000 (DiLoCo, section 3).
PUBLISHED = {"diloco": {100: 0.8, 1000: 1.4}}


def losses() -> dict[str, Any]:
    """What the file has: entries of [H or k, percent], ascending, and where they are from."""
    found = compared(RECORDS)
    measured: dict[str, list[list[float]]] = {"ddp": [[1, 0.0]]}
    for method, arms in ARMS.items():
        entries = [[value, round(_percent(name), 1)] for value, name in arms.items()]
        entries += [[value, round(entries[-1][1] + more, 1)] for value, more in PUBLISHED.get(method, {}).items()]
        measured[method] = entries
    base = found.baseline
    about = f"{found.title}, from scratch, {base.first.config.lr_schedule}, {len(base.records)} seeds, simulated"
    return {"about": about, "losses": measured}


def _percent(name: str) -> float:
    found = compared(RECORDS)
    percent = found.against(arm_of(RECORDS, name))
    if percent is None:
        raise SystemExit(f"{name!r} of the records {RECORDS} diverged, or has no seed of the baseline")
    return percent


def text() -> str:
    """The file as it should be, a method a line."""
    made = losses()
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entries)}" for name, entries in made["losses"].items())
    return f'{{\n  "about": {json.dumps(made["about"])},\n  "losses": {{\n{lines}\n  }}\n}}\n'
