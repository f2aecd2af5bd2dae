"""Processes that make up one job: wait until all have ended well, or one has failed; then leave none behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Process = subprocess.Popen[bytes]
SILENT = "does not answer"
EXIT_NOT_SAVED = 4  # of a worker that has trained to the end and told the result, but could not save everything


class Failure(NamedTuple):
    """The process of a job that failed first, by its number in the job, in words how it ended, and its exit code."""

    number: int
    how: str
    code: int | None = None


@contextlib.contextmanager
def a_job() -> Iterator[list[Process]]:
    """A list for the processes of a job; whatever still runs is ended on the way out, also on Ctrl-C and SIGTERM."""
    processes: list[Process] = []
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield processes
    finally:
        _end(processes)
        signal.signal(signal.SIGTERM, before)


def see_through(processes: Sequence[Process], *, patience: float, limit: float = float("inf")) -> Failure | None:
    """Wait until all have ended well, or one has failed and the others have had `patience` seconds to say what they saw.

    Args:
        processes: those of one job.
        patience: seconds from the first failure to the end of waiting.
        limit: seconds that the whole job may take; what still runs then has failed.

    Raises:
        SystemExit: with code 2 where all that failed refused their settings, which the first has said in one line.
    """
    first: int | None = None
    give_up = time.monotonic() + limit
    while any(p.poll() is None for p in processes):
        if first is None:
            first = next((n for n, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if first is not None:
                give_up = min(give_up, time.monotonic() + patience)
        if time.monotonic() > give_up:
            break
        time.sleep(0.05)
    failed = [n for n, p in enumerate(processes) if p.poll() != 0]
    if not failed:
        return None
    if all(processes[n].poll() == 2 for n in failed):
        raise SystemExit(2)
    culprit = failed[0] if first is None else first
    code = processes[culprit].poll()
    return Failure(culprit, _how_it_ended(code), code)


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)  # passes through the clean-up, unlike the default


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return SILENT
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _end(processes: Sequence[Process]) -> None:
    """End whatever still runs: ask first, then insist."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + 5
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
