"""Start the workers of a run on this machine as real processes, and see them through to the end.

The launcher holds the job's key-value store, so that any worker may die without taking the store along. When one fails, the
others are given time to say what they saw; then all that is left is ended, and the newest checkpoint is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from thinwire import checkpoint
from thinwire.errors import ThinwireError
from thinwire.links import host_job
from thinwire.tools.processes import EXIT_NOT_SAVED, a_job, see_through


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
        KeyboardInterrupt: on Ctrl-C, after all workers were ended; it says where the run is and how to go on.
    """
    store, places = host_job(processes)
    environment = os.environ | worker_environment(timeout, resume=resume, checkpoint_every=checkpoint_every)
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    with a_job() as workers:
        for place in places:
            command = [sys.executable, "-m", "thinwire.tools.worker", str(folder)]
            workers.append(subprocess.Popen(command, env=environment | place))
        try:
            failure = see_through(workers, patience=timeout + 10)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the run is in {folder}; {_how_to_go_on(folder)}") from None
    del store  # until here it served them
    if failure and failure.code == EXIT_NOT_SAVED:
        raise RunFailed("the run ended, but could not be saved whole: its result and the reason are above")
    if failure:
        raise RunFailed(f"worker {failure.number} {failure.how}; {_how_to_go_on(folder)}")


def worker_environment(timeout: float, *, resume: bool, checkpoint_every: int) -> dict[str, str]:
    """What `python -m thinwire.tools.worker` needs to know besides its run folder; it ends with this process."""
    return {
        "THINWIRE_LAUNCHER": str(os.getpid()),
        "THINWIRE_TIMEOUT": str(timeout),
        "THINWIRE_RESUME": "1" if resume else "0",
        "THINWIRE_CHECKPOINT_EVERY": str(checkpoint_every),
    }


def _how_to_go_on(folder: Path) -> str:
    saved = checkpoint.finished(folder / "checkpoints")
    if not saved:
        return f"there is no checkpoint yet, so this starts again: thinwire train --resume --out {folder}"
    return f"the last checkpoint is of step {checkpoint.step_of(saved[-1])}: thinwire train --resume --out {folder}"
