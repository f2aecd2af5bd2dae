"""`thinwire train`: real worker processes, started here or joined under torchrun."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from thinwire.core.gates import tell_all
from thinwire.errors import ConfigError, ThinwireError, WireError
from thinwire.links import Link, disconnect
from thinwire.links.heartbeat import Heartbeat
from thinwire.network import parse_duration
from thinwire.sharding.mesh import worker_count
from thinwire.tools.command_flags import TrainFlags
from thinwire.tools.config import RunConfig
from thinwire.tools.flags import parse_run, peek, saved_config
from thinwire.tools.launch import launch
from thinwire.tools.names import ALONE
from thinwire.tools.start import claim_folder, refuse_what_ddp_ignores, rehearse
from thinwire.tools.summary import show_summary
from thinwire.tools.worker import join, work


def main(arguments: list[str]) -> int:
    """Train with real worker processes; under torchrun join the job."""
    if peek(arguments, "--join") is not None:
        from thinwire.tools import elastic  # needs the extra thinwire[store]

        return elastic.main(arguments)
    saved = saved_config(arguments)
    config, flags = parse_run("train", arguments, TrainFlags, saved)

    timeout = parse_duration(flags.timeout)
    if timeout <= 0:
        raise ConfigError(f"timeout must be above zero seconds, got {flags.timeout!r}")
    if flags.checkpoint_every < 0:
        raise ConfigError(f"checkpoint-every must be at least 0, got {flags.checkpoint_every}")
    in_job = worker_count(config.shards)
    if in_job is not None and config.workers not in (None, in_job) and saved is None:
        raise ConfigError(f"--workers {config.workers} does not fit this torchrun job, which has {in_job} workers")
    config = replace(config, workers=in_job or config.workers or 2)
    refuse_what_ddp_ignores(config)
    if config.algorithm == ALONE:
        flags = replace(flags, checkpoint_every=0)  # a checkpoint holds a model that workers share
    rehearse(config)
    if in_job is not None:
        return _join(config, flags, timeout)
    folder = claim_folder(config, flags)

    assert config.workers is not None
    processes = config.workers * config.shards
    launch(folder, processes, timeout=timeout, resume=flags.resume, checkpoint_every=flags.checkpoint_every)
    show_summary(folder)
    return 0


def _join(config: RunConfig, flags: TrainFlags, timeout: float) -> int:
    """Be one worker of the torchrun job that this process is in."""
    link = join(config, timeout=timeout)
    try:
        folder = _agree_on_folder(config, flags, link)
        work(config, folder, link, resume=flags.resume, checkpoint_every=flags.checkpoint_every)
    except ThinwireError as error:
        Heartbeat.end(error)  # before the command line makes an exit code of it
        raise
    if link.rank == 0:
        show_summary(folder)
    disconnect()
    return 0


def _agree_on_folder(config: RunConfig, flags: TrainFlags, link: Link) -> Path:
    """The first process claims the folder and tells the others, or all of them refuse together."""
    verdict: dict[str, str] = {}
    if link.rank == 0:
        try:
            verdict = {"folder": str(claim_folder(config, flags))}
        except ConfigError as error:
            verdict = {"error": str(error)}
    verdict = tell_all(link, verdict, str)
    if "error" in verdict:
        raise ConfigError(verdict["error"] if link.rank == 0 else "rank 0 refuses the run folder, and says why")
    return Path(_checked(verdict.get("folder", ""), config, flags))


def _checked(folder: str, config: RunConfig, flags: TrainFlags) -> str:
    """The folder that worker 0 names, if it is where this worker was told to write, too."""
    usual = re.escape(f"runs/{config.algorithm}-{config.task}-") + r"\d{8}-\d{6}"
    if folder == flags.out or (flags.out is None and re.fullmatch(usual, folder)):
        return folder
    wanted = flags.out or "runs/ALGORITHM-TASK-TIME"
    raise WireError(f"the run folder {folder[:100]!r}, where this worker writes to {wanted}: give all the same --out", rank=0)
