"""`thinwire demo`: the whole idea in two minutes. A small GPT, two real workers, every gradient sent or only a few messages."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from thinwire.errors import MissingDependency
from thinwire.network import parse_bandwidth, show_bytes
from thinwire.tools.config import RunConfig, new_folder, write_run_toml
from thinwire.tools.launch import launch
from thinwire.tools.link_time import seconds_on_link
from thinwire.tools.records import Record, record_of
from thinwire.tools.report import write_report
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.summary import ddp_bytes
from thinwire.tools.words import words_of

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
        command = shlex.join(["train", *words_of(config)])
        write_run_toml(place / "run.toml", config, command=command, arm=title, cores=os.cpu_count() or 0)
        launch(place, flags.workers, timeout=120.0, resume=False, checkpoint_every=0)
        results.append(record_of(place))
    console.print()
    console.print(_table(results, bandwidth, flags.bandwidth))
    console.print(_verdict(results), highlight=False)
    print(f"runs: {folder}")
    try:
        write_report(comparisons(results), folder / "report.html", title="What is lost, what is gained")
        print(f"report: {folder / 'report.html'}")
    except MissingDependency as missing:
        print(f"no report: {missing}, then thinwire report {folder}")
    return 0


def _table(results: list[Record], bandwidth: float, named: str) -> Table:
    table = Table(title="What is lost, what is gained", title_justify="left")
    table.add_column("method", no_wrap=True)
    columns = ("validation loss", "sent per worker", "how much less", "time here", f"at {named}")
    for column in columns:
        table.add_column(column, justify="right")
    for record in results:
        figures, sent = record.figures, record.figures["sent"]
        seconds = seconds_on_link(record.curve, workers=figures["workers"], bandwidth=bandwidth)[-1]
        table.add_row(
            record.arm,
            f"{figures['val_loss']:.3f}",
            show_bytes(sent),
            f"{ddp_bytes(figures) / sent:.0f}x" if sent else "-",
            f"{figures['seconds']:.0f} s",
            f"{seconds:.0f} s",
        )
    table.caption = f"at {named}: time computing here + time the bytes sent would take on such a link"
    return table


def _verdict(results: list[Record]) -> str:
    baseline, figures = (record.figures for record in results)
    if not figures["sent"]:
        return ""
    less = baseline["sent"] / figures["sent"]
    change = 100 * (figures["val_loss"] / baseline["val_loss"] - 1)
    return f"\n{results[1].arm}: {less:.0f} times fewer bytes, validation loss {change:+.1f}%."
