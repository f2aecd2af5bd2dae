"""What comes before a run: where it lives, a folder that no other run has, and a rehearsal that finds wrong settings."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import torch

from thinwire.errors import ConfigError
from thinwire.links import SoloLink
from thinwire.tools.build import check_total, device_of, optimizer_of, task_of
from thinwire.tools.command_flags import TrainFlags
from thinwire.tools.config import RunConfig, about_run, check_same_run, new_folder, now, read_run_toml, write_run_toml


def claim_folder(config: RunConfig, flags: TrainFlags, *, where: str | None = None) -> Path:
    """Make the run folder and its run.toml; refuse one that holds another run.

    Args:
        config: the run.
        flags: say where it is kept.
        where: what a record has as its place, "simulated 100mbit 20ms"; by default what the environment variable
            THINWIRE_PLACE says, "lab 100mbit".
    """
    folder = Path(flags.out or new_folder(f"{config.algorithm}-{config.task}"))
    record = folder / "run.toml"
    if record.exists():
        check_same_run(folder, read_run_toml(record), config, resumed=True)
        if not flags.resume:
            raise ConfigError(f"{folder} already holds this run: add --resume to go on with it, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        command = shlex.join(sys.argv[1:])
        new = {"resumed": now(), "resumed_by": command} if flags.resume else {"command": command, "cores": os.cpu_count() or 0}
        where = where or os.environ.get("THINWIRE_PLACE")
        wire = {"place": where} if where else {}
        write_run_toml(record, config, **{**about_run(record), **new, **wire})
    except OSError as cause:
        raise ConfigError(f"cannot write the run folder {folder}: {cause.strerror or cause}") from cause
    return folder


def refuse_what_ddp_ignores(config: RunConfig) -> None:
    """Raise a `ConfigError` for settings that torch's own DDP would not follow."""
    other_wire = config.wire not in (None, "fp32")
    if config.algorithm == "ddp" and (other_wire or config.shards > 1):
        flag = f"--wire {config.wire}" if other_wire else f"--shards {config.shards}"
        raise ConfigError(f"ddp is torch's DistributedDataParallel, which ignores {flag}: use --algorithm data-parallel")


def rehearse(config: RunConfig) -> None:
    """Build everything small once, so that a wrong setting is one line now and not a crash in every worker later."""
    device_of(config)
    task = task_of(config, config.workers or 2)
    try:
        check_total(optimizer_of(config, torch.nn.Linear(2, 2), SoloLink()), config.steps)
    except ValueError as error:  # torch's own, too
        raise ConfigError(str(error)) from error
    if config.shards > 1:
        if any(p.dim() == 0 for p in task.model().parameters()):
            raise ConfigError(f"the task {config.task} has a 0-d parameter, which FSDP2 does not shard: use --shards 1")
        if len(task.batch(0, 1)[0]) % config.shards:
            raise ConfigError(f"a batch of {len(task.batch(0, 1)[0])} does not divide over {config.shards} shards")
