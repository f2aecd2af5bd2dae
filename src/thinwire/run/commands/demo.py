"""`thinwire demo`: the whole idea in two minutes. A small GPT, two real workers, every gradient sent or only a few messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from thinwire.network import Network, parse_bandwidth, show_bytes
from thinwire.run.config import RunConfig, new_folder, write_run_toml
from thinwire.run.launch import launch
from thinwire.run.summary import ddp_bytes, read_summary

# The baseline first, then the best method so far. Both with the learning rate that was best for them in a small search
# (LOG.md), both from the same weights, on the same batches.
DILOCO = {"H": 30, "outer_lr": 0.9, "outer_momentum": 0.5}
EVAL_EVERY = 90  # a multiple of H: right after a round
ARMS = (
    ("torch DDP", RunConfig(algorithm="ddp", clip_norm=0.0)),  # the learning rates were chosen without clipping
    ("DiLoCo, H=30", RunConfig(algorithm="diloco", settings=DILOCO, clip_norm=0.0)),
)


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """Train a small GPT on real workers twice and compare loss and bytes."""

    steps: int = 450
    """Training steps of each worker."""
    workers: int = 2
    """How many real processes."""
    bandwidth: str = "100mbit"
    """The link for which the last column is computed."""
    out: str | None = None
    """Folder for the two runs; by default runs/demo-TIME."""


def main(arguments: list[str]) -> int:
    """Run both arms and print the table."""
    flags = tyro.cli(DemoFlags, prog="thinwire demo", args=arguments)
    bandwidth = parse_bandwidth(flags.bandwidth)
    console = Console()
    folder = Path(flags.out or new_folder("demo"))
    console.print(
        "Training a GPT of 0.8 million parameters on the source of the Python library:\n"
        f"{flags.workers} workers as real processes, {flags.steps} steps each, twice. First torch's\n"
        "DistributedDataParallel sends every gradient, then DiLoCo sends one message\n"
        f"every {DILOCO['H']} steps.\n",
        highlight=False,
    )
    results = []
    for title, arm in ARMS:
        config = replace(arm, task="gpt-nano", steps=flags.steps, workers=flags.workers, eval_every=EVAL_EVERY)
        config.validate()
        place = folder / config.algorithm
        place.mkdir(parents=True, exist_ok=True)
        write_run_toml(place / "run.toml", config, command="demo")
        launch(place, flags.workers, timeout=120.0, resume=False, checkpoint_every=0)
        results.append((title, read_summary(place)))
    console.print()
    console.print(_table(results, bandwidth, flags.bandwidth))
    console.print(_verdict(results), highlight=False)
    console.print(f"runs: {folder}", highlight=False)
    return 0


def _table(results: list[tuple[str, dict[str, Any]]], bandwidth: float, named: str) -> Table:
    table = Table(title="What is lost, what is gained", title_justify="left")
    table.add_column("method", no_wrap=True)
    columns = ("validation loss", "sent per worker", "how much less", "time here", f"at {named}")
    for column in columns:
        table.add_column(column, justify="right")
    for title, figures in results:
        sent = figures["sent"]
        table.add_row(
            title,
            f"{figures['val_loss']:.3f}",
            show_bytes(sent),
            f"{ddp_bytes(figures) / sent:.0f}x" if sent else "-",
            f"{figures['seconds']:.0f} s",
            f"{_seconds_on_link(figures, bandwidth):.0f} s",
        )
    table.caption = f"at {named}: time computing here + time the bytes sent would take on such a link"
    return table


def _seconds_on_link(figures: dict[str, Any], bandwidth: float) -> float:
    """Computing time as measured, and the wire's time as a ring on such a link takes it."""
    computing = figures["seconds"] - figures["waiting"]
    workers, rounds = figures["workers"], max(1, figures["rounds"])
    message = figures["sent"] / rounds * workers / (2 * (workers - 1)) if workers > 1 else 0.0
    return computing + rounds * Network(bandwidth=bandwidth).seconds("mean", [int(message)] * workers)


def _verdict(results: list[tuple[str, dict[str, Any]]]) -> str:
    (_, baseline), (title, figures) = results
    if not figures["sent"]:
        return ""
    less = baseline["sent"] / figures["sent"]
    change = 100 * (figures["val_loss"] / baseline["val_loss"] - 1)
    return f"\n{title}: {less:.0f} times fewer bytes, validation loss {change:+.1f}%."
