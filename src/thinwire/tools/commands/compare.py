"""`thinwire compare`: several methods with several seeds, and a record of each run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.text import Text

from thinwire.errors import ConfigError, check_whole_number
from thinwire.network import parse_duration
from thinwire.sharding.mesh import worker_count
from thinwire.tools.arms import split_arguments, split_words
from thinwire.tools.command_flags import CompareFlags
from thinwire.tools.commands.report import terminal
from thinwire.tools.compare import RECORDS, Run, run_all, run_folders
from thinwire.tools.config import RunConfig, new_folder
from thinwire.tools.flags import parse_run, peek, wants_help
from thinwire.tools.namespaces import check_machine
from thinwire.tools.records import record_of
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.report.terminal import show
from thinwire.tools.runners import LabRunner, ProcessRunner, Runner, SimulatedRunner
from thinwire.tools.start import rehearse

EXAMPLE = 'thinwire compare ddp demo "diloco --H 32" --task gpt-nano --workers 4 --seeds 3'


def main(arguments: list[str]) -> int:
    """Check all arms, run what is not there yet, and show the table."""
    words, common = split_arguments(arguments)
    if wants_help(common):
        about = f"Methods come first, each in quotes with flags of its own, and with a name where you like: {EXAMPLE}. "
        parse_run("compare", common, CompareFlags, about=about)
    if not words:
        raise ConfigError(f"name the methods to compare before all flags: {EXAMPLE}")
    if worker_count(1) is not None:
        raise ConfigError("compare starts its workers itself: call it without torchrun")
    arms, flags = parse_arms(words, common)
    runner = _runner(flags)
    runs = _runs(arms, flags)
    for run in runs[: len(arms)]:  # the first seed of each: a typo in the last arm costs nothing
        _check(run, runner)
    if flags.lab:
        check_machine()
    return _compare(runs, runner, flags, again=[*words, *common])


def _compare(runs: list[Run], runner: Runner, flags: CompareFlags, *, again: list[str]) -> int:
    out, console = runs[0].folder.parent, terminal()
    try:
        out.mkdir(parents=True, exist_ok=True)
        failures = run_all(runs, runner, out, jobs=flags.jobs, console=console)
    except OSError as cause:
        raise ConfigError(f"cannot write the folder of the comparison {out}: {cause.strerror or cause}") from cause
    except KeyboardInterrupt:
        named = [] if flags.out else ["--out", str(out)]
        command = shlex.join(["thinwire", "compare", *again, *named])
        raise KeyboardInterrupt(f"the runs are in {out}; go on with: {command}") from None
    failed = [failure.run for failure in failures]
    records = [record_of(run.folder) for run in runs if run not in failed]
    together = len({(run.config.steps, run.config.workers, run.config.batch, run.config.task) for run in runs}) > 1
    if records:
        show(comparisons(records, together=together), console)
    for failure in failures:
        console.print(Text(f"failed: {failure.run}: {failure.why}", style="red"), soft_wrap=True)
    hint = f"thinwire report {shlex.quote(str(out))}{' --together' if together else ''}"
    console.print(Text(f"\nrecords: {out / RECORDS}\nfigures: {hint}"), soft_wrap=True)
    return 1 if failures else 0


# --- From words to runs --------------------------------------------------------------------------------------------------


def parse_arms(words: Sequence[str], common: Sequence[str]) -> tuple[dict[str, RunConfig], CompareFlags]:
    """The arms by name, and the flags that all share.

    Args:
        words: one per arm: "diloco --H 32", or with a name, "thin = demo --lr 2e-3".
        common: flags of all arms; an arm's own come after them and win.
    """
    for flag, instead in (("--algorithm", "the words before all flags name the methods"), ("--seed", "give --seeds")):
        if peek(list(common), flag) is not None:
            raise ConfigError(f"{flag} is not for all methods of a comparison: {instead}")
    configs: dict[str, RunConfig] = {}
    given: dict[str, CompareFlags] = {}
    for word in words:
        name, algorithm, own = split_words(word)
        if name in configs:
            raise ConfigError(f"two methods are called {name!r}: give one a name of its own, such as 'other = {algorithm} ...'")
        configs[name], given[name] = _parse_arm(name, algorithm, own, common)
    shared = [flags for name, flags in given.items() if not split_words(words[list(given).index(name)])[2]]
    first = shared[0] if shared else next(iter(given.values()))
    for name, flags in given.items():
        if flags != first:
            raise ConfigError(f"{name!r} has a flag that is for the whole comparison: put it after the methods")
    return configs, first


def _parse_arm(name: str, algorithm: str, own: list[str], common: Sequence[str]) -> tuple[RunConfig, CompareFlags]:
    try:
        return parse_run("compare", [*common, "--algorithm", algorithm, *own], CompareFlags)
    except ConfigError as error:
        raise ConfigError(f"in {name!r}: {error}") from error
    except SystemExit as error:
        if error.code == 2:  # tyro has said what is wrong, but not where
            hint = "a setting of one method is given with it, such as 'diloco --H 32'"
            print(f"thinwire: the error above is in {name!r}: {hint}", file=sys.stderr)
        raise


def parse_seeds(text: str) -> list[int]:
    """The seeds that "3" or "0,5,7" stand for.

    >>> parse_seeds("3"), parse_seeds("0,5,7"), parse_seeds("4,")
    ([0, 1, 2], [0, 5, 7], [4])
    """
    if re.fullmatch(r"[1-9]\d*", text):
        return list(range(int(text)))
    if re.fullmatch(r"\d+(,\d+)*,?", text) and "," in text:
        seeds = [int(part) for part in text.split(",") if part]
        if len(set(seeds)) == len(seeds):
            return seeds
    raise ConfigError(f"seeds must be a number of seeds, such as 3, or different ones, such as 0,5,7, got {text!r}")


def _runner(flags: CompareFlags) -> Runner:
    """The runner that the flags ask for; flags that it would ignore are refused."""
    check_whole_number("jobs", flags.jobs)
    if flags.sim and flags.lab:
        raise ConfigError("choose --sim or --lab, not both")
    used = {"bandwidth", "down", "latency", "step_time"} if flags.sim else {"bandwidth", "down"} if flags.lab else set()
    for name in ("bandwidth", "down", "latency", "step_time"):
        if getattr(flags, name) is not None and name not in used:
            need = "--sim or --lab" if name in ("bandwidth", "down") else "--sim"
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(flags, name)} needs {need}")
    if flags.jobs > 1 and not flags.sim:
        raise ConfigError(f"--jobs {flags.jobs} needs --sim: real processes would take each other's cores and wire")
    if flags.sim:
        usual = {"bandwidth": flags.bandwidth or "inf", "latency": flags.latency or "0ms"}
        return SimulatedRunner(**usual, down=flags.down, step_time=flags.step_time)
    timeout = parse_duration(flags.timeout)
    if timeout <= 0:
        raise ConfigError(f"timeout must be above zero seconds, got {flags.timeout!r}")
    check_whole_number("checkpoint-every", flags.checkpoint_every, least=0)
    if flags.lab:
        if flags.bandwidth is None:
            raise ConfigError("--lab needs the --bandwidth of its wires, such as 100mbit")
        return LabRunner(bandwidth=flags.bandwidth, down=flags.down, checkpoint_every=flags.checkpoint_every, timeout=timeout)
    return ProcessRunner(checkpoint_every=flags.checkpoint_every, timeout=timeout)


def _runs(arms: dict[str, RunConfig], flags: CompareFlags) -> list[Run]:
    """All runs, one seed after the other, so that there is something to compare early."""
    out = Path(flags.out or new_folder("compare"))
    runs = []
    for seed in parse_seeds(flags.seeds):
        for (name, config), folder in zip(arms.items(), run_folders(list(arms)), strict=True):
            mine = replace(config, seed=seed, workers=config.workers or 2)
            runs.append(Run(name, mine, out / f"{folder}-seed{seed}"))
    return runs


def _check(run: Run, runner: Runner) -> None:
    try:
        runner.check(run.config)
        rehearse(run.config)
    except ConfigError as error:
        raise ConfigError(f"in {run.arm!r}: {error}") from error
