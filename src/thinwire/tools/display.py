"""What a person sees of a run: a live line on a terminal, a plain line now and then where there is none, and metrics.jsonl."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.text import Text

from thinwire.network import show_bytes
from thinwire.tools.config import write_whole
from thinwire.tools.train import Progress

log = logging.getLogger("thinwire")


class Display:
    """Live progress of a run, to be used as a context manager and called after every step.

    Args:
        title: what is running.
        steps: how many steps there are in all.
        unit: what is counted per second: "tokens", "images" or "samples".
        console: where to draw; a console that is no terminal gets a plain line every `interval` seconds.
        interval: seconds between two plain lines.
    """

    def __init__(self, title: str, steps: int, unit: str, *, console: Console | None = None, interval: float = 5.0):
        """Nothing is drawn yet."""
        self.console = console or Console()
        self.title, self.steps, self.unit, self.interval = title, steps, unit, interval
        columns: list[ProgressColumn] = [
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
        ]
        self._live = _TwoLines(*columns, console=self.console) if self.console.is_terminal else None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()
        self._validation = ""
        self._start: Progress | None = None

    def __enter__(self) -> Display:
        """Start drawing."""
        if self._live is not None:
            self._live.start()
            self._task = self._live.add_task(self.title, total=self.steps, figures="")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Show where the run stands."""
        self._start = self._start or progress
        if progress.validation:
            self._validation = f" val {progress.validation['loss']:.4f}"
        try:
            self._show(progress)
        except BrokenPipeError:  # the reader has gone, for instance `| head`: training goes on unseen
            self.console.file = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
            os.dup2(self.console.file.fileno(), sys.stdout.fileno())

    def _show(self, progress: Progress) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=progress.step, figures=self.figures(progress))
        elif progress.validation or time.monotonic() - self._last_line >= self.interval:
            self._last_line = time.monotonic()
            print(
                f"{self.title}  step {progress.step}/{self.steps}  {self.figures(progress)}", file=self.console.file, flush=True
            )

    def figures(self, progress: Progress) -> str:
        """Loss, speed, bytes and the share of time spent on the wire, on one line."""
        start = self._start or progress
        seconds, items = progress.seconds - start.seconds, progress.items - start.items
        speed = items / seconds if seconds > 0 else math.nan
        waiting = 100 * progress.waiting / progress.seconds if progress.seconds > 0 else 0.0
        rate = f" {speed:,.0f} {self.unit}/s" if items else ""
        return f"loss {progress.loss:.4f}{self._validation}{rate} sent {show_bytes(progress.sent)} waiting {waiting:.0f}%"


class _TwoLines(ProgressBar):
    """A bar, and below it the figures: beside it they would not fit a terminal of 80 columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            yield Text(task.fields["figures"], no_wrap=True, overflow="ellipsis")


class MetricsFile:
    """Appends one JSON line per step to metrics.jsonl; on resume drops the lines after the step it resumes from.

    Where the file cannot be written, as on a full disk, training goes on without it and `problem` says why.

    Args:
        path: the file.
        after: keep lines up to this step.
    """

    def __init__(self, path: Path, *, after: int = 0):
        """Open for appending."""
        self.problem = ""
        self._file: IO[bytes] | None = None
        try:
            if path.exists():
                kept = [line for line in path.read_text().splitlines() if _step_of(line) <= after]
                write_whole(path, "".join(f"{line}\n" for line in kept))
            self._file = path.open("ab", buffering=0)
        except OSError as cause:
            self._give_up(cause)

    def __call__(self, progress: Progress) -> None:
        """Write one line; it is on its way to disk when this returns."""
        if self._file is None:
            return
        line = (json.dumps(progress.record()) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as cause:
            self._give_up(cause)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _give_up(self, cause: OSError) -> None:
        """Training goes on; a line that was cut short is dropped when the file is read or the run resumed."""
        self.close()
        self._file, self.problem = None, f"metrics.jsonl: {cause.strerror or cause}"
        log.warning("cannot write metrics.jsonl any more (%s); training goes on without it", cause.strerror or cause)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # a line cut short by a kill
        return math.inf
