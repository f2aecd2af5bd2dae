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
from thinwire.tools.arms import alternatives, split_arguments, split_words
from thinwire.tools.command_flags import CompareFlags
from thinwire.tools.commands.report import terminal
from thinwire.tools.compare import RECORDS, Run, run_all, run_folders
from thinwire.tools.config import RunConfig, new_folder
from thinwire.tools.flags import parse_run, peek, wants_help
from thinwire.tools.namespaces import check_machine
from thinwire.tools.records import TUNING
from thinwire.tools.report.comparison import comparisons
from thinwire.tools.report.terminal import show
from thinwire.tools.runners import LabRunner, ProcessRunner, Runner, SimulatedRunner
from thinwire.tools.start import rehearse
from thinwire.tools.tune import Chosen, check_tune_seeds, check_tune_steps, parse_rates, tune

Arms = dict[str, list[RunConfig]]  # by name, each with the alternatives to choose from
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
    _check_tuning(arms, flags)
    for name, configs in arms.items():  # a typo in the last arm costs nothing
        for config in configs:
            _check(name, config, runner)
    if flags.lab:
        check_machine()
    fixed = frozenset(name for name, _, own in map(split_words, words) if peek(own, "--lr") is not None)
    return _compare(arms, fixed, runner, flags, again=arguments)


def _compare(arms: Arms, fixed: frozenset[str], runner: Runner, flags: CompareFlags, *, again: list[str]) -> int:
    out, console = Path(flags.out or new_folder("compare")), terminal()
    keep = None if flags.records is None else Path(flags.records)
    if keep is not None and keep.is_dir():
        raise ConfigError(f"records must be a file such as records.jsonl, {keep} is a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        chosen = {name: Chosen(configs[0], tried=0) for name, configs in arms.items()}
        if flags.tune is not None:
            seeds = parse_seeds(flags.seeds)[: flags.tune_seeds or 1]
            how = {"seeds": seeds, "steps": flags.tune_steps, "jobs": flags.jobs}
            how["keep"] = keep.with_stem(f"{keep.stem}-{TUNING}") if keep else None
            chosen = tune(arms, runner, out, rates=parse_rates(flags.tune), fixed=fixed, console=console, **how)
        runs = _runs(chosen, flags, out)
        outcome = run_all(runs, runner, out, jobs=flags.jobs, console=console, keep=keep)
    except OSError as cause:
        raise ConfigError(f"cannot write the folder of the comparison {out}: {cause.strerror or cause}") from cause
    except KeyboardInterrupt:
        named = [] if flags.out else ["--out", str(out)]
        command = shlex.join(["thinwire", "compare", *again, *named])
        raise KeyboardInterrupt(f"the runs are in {out}; go on with: {command}") from None
    together = len({(run.config.steps, run.config.workers, run.config.batch, run.config.task) for run in runs}) > 1
    if outcome.records:
        show(comparisons(list(outcome.records.values()), together=together), console)
    for failure in outcome.failures:
        console.print(Text(f"failed: {failure.run}: {failure.why}", style="red"), soft_wrap=True)
    hint = f"thinwire report {shlex.quote(str(out))}{' --together' if together else ''}"
    console.print(Text(f"\nrecords: {out / RECORDS}\nfigures: {hint}"), soft_wrap=True)
    return 1 if outcome.failures else 0


# --- From words to runs --------------------------------------------------------------------------------------------------


def parse_arms(words: Sequence[str], common: Sequence[str]) -> tuple[Arms, CompareFlags]:
    """The arms by name, each with the alternatives to choose from, and the flags that all share.

    Args:
        words: one per arm: "diloco --H 32", or with a name, "thin = demo --lr 2e-3"; "diloco --H {8,32}" for alternatives.
        common: flags of all arms; an arm's own come after them and win.
    """
    for flag, instead in (("--algorithm", "the words before all flags name the methods"), ("--seed", "give --seeds")):
        if peek(list(common), flag) is not None:
            raise ConfigError(f"{flag} is not for all methods of a comparison: {instead}")
    configs: Arms = {}
    given: dict[str, CompareFlags] = {}
    for word in words:
        name, algorithm, _ = split_words(word)
        if name in configs:
            raise ConfigError(f"two methods are called {name!r}: give one a name of its own, such as 'other = {algorithm} ...'")
        parsed = [_parse_arm(name, algorithm, split_words(one)[2], common) for one in alternatives(word)]
        configs[name], given[name] = [config for config, _ in parsed], parsed[0][1]
    shared = [flags for name, flags in given.items() if not split_words(words[list(given).index(name)])[2]]
    first = shared[0] if shared else next(iter(given.values()))
    for name, flags in given.items():
        if flags != first:
            raise ConfigError(f"{name!r} has a flag that is for the whole comparison: put it after the methods")
    return configs, first


def _parse_arm(name: str, algorithm: str, own: list[str], common: Sequence[str]) -> tuple[RunConfig, CompareFlags]:
    try:
        config, flags = parse_run("compare", [*common, "--algorithm", algorithm, *own], CompareFlags)
        return replace(config, workers=config.workers or 2), flags
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


def _check_tuning(arms: Arms, flags: CompareFlags) -> None:
    """Refuse wrong flags of a tuning, and alternatives that nothing would choose from."""
    if flags.tune is not None:
        check_tune_seeds(flags.tune_seeds, parse_seeds(flags.seeds))
        check_tune_steps(flags.tune_steps)
        parse_rates(flags.tune)
        return
    for what, given in (
        ("--tune-steps", flags.tune_steps is not None),
        ("--tune-seeds", flags.tune_seeds is not None),
        ("what stands in braces", any(len(configs) > 1 for configs in arms.values())),
    ):
        if given:
            raise ConfigError(f"{what} is for choosing settings: give --tune, such as --tune 1e-3,1.41e-3,2e-3")


def _runs(chosen: dict[str, Chosen], flags: CompareFlags, out: Path) -> list[Run]:
    """All runs, one seed after the other, so that there is something to compare early."""
    runs = []
    for seed in parse_seeds(flags.seeds):
        for (name, point), folder in zip(chosen.items(), run_folders(list(chosen)), strict=True):
            part = point.config.val_part if flags.tune is None else "claim"
            mine = replace(point.config, seed=seed, val_part=part)
            runs.append(Run(name, mine, out / f"{folder}-seed{seed}", point.tried))
    return runs


def _check(name: str, config: RunConfig, runner: Runner) -> None:
    try:
        runner.check(config)
        rehearse(config)
    except ConfigError as error:
        raise ConfigError(f"in {name!r}: {error}") from error
