"""Start the workers of a run on this machine as real processes, and see them through to the end.

The launcher holds the job's key-value store, so that any worker may die without taking the store along. When one fails, the
others are given time to say what they saw; then all that is left is ended, and the newest checkpoint is named.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from thinwire.errors import ThinwireError
from thinwire.links import host_job
from thinwire.run import checkpoint


class RunFailed(ThinwireError):
    """Some worker failed; the message names it and says how to go on."""


def launch(folder: Path, processes: int, *, timeout: float, resume: bool, checkpoint_every: int) -> None:
    """Run `processes` workers on the run folder until all have ended.

    Args:
        folder: holds run.toml; the workers write the rest into it.
        processes: how many to start: workers times shards.
        timeout: seconds that a worker waits for another before it gives up.
        resume: go on from the newest checkpoint.
        checkpoint_every: steps between checkpoints; 0 saves none.

    Raises:
        RunFailed: when a worker failed.
        KeyboardInterrupt: on Ctrl-C, after all workers were ended.
    """
    store, places = host_job(processes)
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)),
        "THINWIRE_LAUNCHER": str(os.getpid()),
        "THINWIRE_TIMEOUT": str(timeout),
        "THINWIRE_RESUME": "1" if resume else "0",
        "THINWIRE_CHECKPOINT_EVERY": str(checkpoint_every),
    }
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    workers: list[subprocess.Popen[bytes]] = []
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        for place in places:
            command = [sys.executable, "-m", "thinwire.run.worker", str(folder)]
            workers.append(subprocess.Popen(command, env=environment | place))
        _see_through(workers, folder, timeout)
    finally:
        _end(workers)
        del store  # until here it served them
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)  # passes through the clean-up, unlike the default


def _see_through(workers: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Wait until all have ended well, or one has failed and the others have had their say."""
    first_failed: int | None = None
    give_up = float("inf")
    while any(w.poll() is None for w in workers):
        if first_failed is None:
            first_failed = next((r for r, w in enumerate(workers) if w.poll() not in (None, 0)), None)
            if first_failed is not None:
                give_up = time.monotonic() + timeout + 10
        if time.monotonic() > give_up:
            break
        time.sleep(0.05)
    failed = [r for r, w in enumerate(workers) if w.poll() != 0]
    if not failed:
        return
    if all(workers[r].poll() == 2 for r in failed):
        raise SystemExit(2)  # a wrong setting: rank 0 has said which, in one line
    culprit = failed[0] if first_failed is None else first_failed
    raise RunFailed(f"worker {culprit} {_how_it_ended(workers[culprit].poll())}; {_how_to_go_on(folder)}")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "does not answer"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _how_to_go_on(folder: Path) -> str:
    saved = checkpoint.finished(folder / "checkpoints")
    if not saved:
        return "there is no checkpoint yet"
    return f"the last checkpoint is of step {checkpoint.step_of(saved[-1])}: thinwire train --resume --out {folder}"


def _end(workers: list[subprocess.Popen[bytes]]) -> None:
    """End whatever still runs: ask first, then insist."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + 5
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(timeout=max(0.1, deadline - time.monotonic()))
        if worker.poll() is None:
            worker.kill()
            worker.wait()
