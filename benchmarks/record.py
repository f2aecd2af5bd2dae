"""Records of what was measured: one line of JSON per run in benchmarks/records/."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

RECORDS = Path(__file__).parent / "records"


def append(name: str, figures: dict[str, Any]) -> None:
    """Add a run to records/NAME.jsonl, with the day, the machine's software and its processor."""
    RECORDS.mkdir(exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    about |= {"processor": processor(), "vectors": torch.backends.cpu.get_cpu_capability()}
    with (RECORDS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({"date": time.strftime("%Y-%m-%d"), **about, **figures}) + "\n")


def processor() -> str:
    """The name of this machine's CPU; empty where the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def last(name: str) -> dict[str, Any]:
    """The newest run of records/NAME.jsonl."""
    return json.loads((RECORDS / f"{name}.jsonl").read_text().splitlines()[-1])
