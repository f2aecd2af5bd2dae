"""One worker process of `thinwire train`: joins the job it is in, trains, and writes the run folder if it is the first.

`python -m thinwire.tools.worker RUN_FOLDER` is what the launcher starts; under torchrun the command line calls `work` itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.logging import RichHandler

from thinwire.errors import CheckpointError, ConfigError, ThinwireError, TrainingDiverged
from thinwire.links import Link, SoloLink, TorchLink, connect, disconnect
from thinwire.links.heartbeat import Heartbeat
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.tools.build import device_of
from thinwire.tools.config import RunConfig, read_run_toml, write_whole
from thinwire.tools.display import Display, MetricsFile
from thinwire.tools.processes import EXIT_NOT_SAVED
from thinwire.tools.summary import NotSaved, keep_result, summarise
from thinwire.tools.train import Progress, Trainer

EXIT_FAILED = 3  # this worker met an error it could name; anything else is a crash


def join(config: RunConfig, *, timeout: float) -> Link:
    """Choose this process's device and join the job."""
    device = device_of(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return connect(backend="nccl" if device.type == "cuda" else "gloo", timeout=timeout)


def work(config: RunConfig, folder: Path, link: Link, *, resume: bool, checkpoint_every: int) -> Progress:
    """Train as one worker of the job; the first process keeps metrics and shows progress.

    Where the environment variable THINWIRE_FIGURES names a folder, every process leaves its figures there at the end, as
    `rank0.json` and so on: what summary.json has, of that process, and its `rank`. The lab reads them.

    Args:
        config: what to run.
        folder: the run folder, shared by all workers.
        link: this worker's end of the wire, over the whole job where nothing is sharded.
        resume: go on from the newest checkpoint.
        checkpoint_every: steps between checkpoints; 0 saves none.
    """
    with link.naming_the_lost() if isinstance(link, TorchLink) else contextlib.nullcontext():
        return _work(config, folder, link, resume, checkpoint_every)


def _work(config: RunConfig, folder: Path, link: Link, resume: bool, checkpoint_every: int) -> Progress:
    rank = link.rank
    first = rank == 0
    shard, part = None, (0, 1)
    if config.shards > 1:
        mesh = make_mesh(workers=link.size // config.shards, shards=config.shards, device=device_of(config).type)
        shard, part = partial(shard_model, mesh=mesh), (mesh["shard"].get_local_rank(), config.shards)
        link = TorchLink(mesh["replicate"], timeout=link.timeout) if isinstance(link, TorchLink) else link
    trainer = Trainer(config, link, shard=shard, part=part)
    notes = trainer.resume(folder / "checkpoints") if resume else []
    title = f"{config.algorithm} {config.task} x{link.size}"
    metrics = MetricsFile(folder / "metrics.jsonl", after=trainer.step) if first else None
    with _watching(title, config, metrics, trainer, notes) if metrics else contextlib.nullcontext(_ignore) as watch:
        progress = trainer.run(watch, checkpoints=folder / "checkpoints", checkpoint_every=checkpoint_every)
    if metrics:
        keep_result(folder, summarise(trainer, progress), [metrics.problem, trainer.unsaved])
    if figures := os.environ.get("THINWIRE_FIGURES"):
        write_whole(Path(figures, f"rank{rank}.json"), json.dumps(summarise(trainer, progress, rank=rank)) + "\n")
    return progress


def _ignore(_: Progress) -> None:
    """Only the first worker reports."""


@contextlib.contextmanager
def _watching(title: str, config: RunConfig, metrics: MetricsFile, trainer: Trainer, notes: list[str]) -> Iterator:
    console = Console()
    for note in notes:
        console.print(f"[dim]{note}", highlight=False)
    logging.getLogger("thinwire").addHandler(RichHandler(console=console, show_path=False, show_time=False))
    with contextlib.closing(metrics), Display(title, config.steps, trainer.task.unit, console=console) as display:
        yield lambda progress: (metrics(progress), display(progress))


def end_with(launcher: int) -> None:
    """End this process when its launcher is gone, however that went: no process would wait for it any more."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="thinwire-launcher-watch", daemon=True).start()


def main() -> None:
    """Entry point of a worker process started by the launcher."""
    end_with(int(os.environ["THINWIRE_LAUNCHER"]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends its workers
    folder = Path(sys.argv[1])
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[logging.NullHandler()])
    if rank != "0":
        handler = logging.StreamHandler()
        handler.addFilter(_only_about_me(int(rank)))
        logging.getLogger("thinwire").addHandler(handler)
    try:
        config = read_run_toml(folder / "run.toml")
        link = join(config, timeout=float(os.environ["THINWIRE_TIMEOUT"]))
        work(
            config,
            folder,
            link,
            resume=os.environ.get("THINWIRE_RESUME") == "1",
            checkpoint_every=int(os.environ["THINWIRE_CHECKPOINT_EVERY"]),
        )
        if not isinstance(link, SoloLink):
            disconnect()
    except ConfigError as error:
        # Leave at once, as below: the threads of a process group that others have left may abort the process at its end,
        # and destroying a broken one could wait for the lost rank.
        if rank == "0":
            _say(f"thinwire: error: {error}")
        Heartbeat.end(error)
        _leave(2)
    except NotSaved as error:
        _say(f"thinwire: error: {error}")
        sys.exit(EXIT_NOT_SAVED)
    except ThinwireError as error:
        if rank == "0" or not isinstance(error, TrainingDiverged | CheckpointError):  # those say the same on all workers
            _say(f"thinwire: {error}")
        Heartbeat.end(error)
        _leave(EXIT_FAILED)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)


def _only_about_me(rank: int) -> logging.Filter:
    """Messages about the whole job are shown by rank 0; a worker adds only what it says of itself."""
    mine = logging.Filter()
    mine.filter = lambda record: record.getMessage().startswith(f"rank {rank}")
    return mine


if __name__ == "__main__":
    main()
