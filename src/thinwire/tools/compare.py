"""Several methods side by side: one run per arm and seed, each in a folder of its own, and a record of each that ended.

`python -m thinwire.tools.compare RUN_FOLDER` is what is started for each of several simulated runs at once.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError, ThinwireError
from thinwire.network import show_seconds
from thinwire.tools.config import RunConfig, about_run, check_same_run, read_run_toml, write_run_toml
from thinwire.tools.processes import Process, a_job
from thinwire.tools.records import Record, append_record, read_records, record_of, run_key
from thinwire.tools.runners import Runner, simulated_runner
from thinwire.tools.summary import counted
from thinwire.tools.words import changed, words_of
from thinwire.tools.worker import end_with

RECORDS = "records.jsonl"
ERRORS = "error.txt"


@dataclass(frozen=True)
class Run:
    """One run of a comparison.

    Attributes:
        arm: its name.
        config: its settings, with the seed.
        folder: where it is kept.
        tried: points of its settings that were tried before; 0 where it was not tuned.
    """

    arm: str
    config: RunConfig
    folder: Path
    tried: int = 0

    def __hash__(self) -> int:
        """By its folder, of which there is one for each run; a config has a dict of settings."""
        return hash(self.folder)

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.config.seed}"


@dataclass(frozen=True)
class Failure:
    """A run that did not end well, and in words why."""

    run: Run
    why: str


def run_folders(names: Sequence[str]) -> list[str]:
    """A folder name for each arm: its letters and digits, and a number where two arms have the same."""
    folders: list[str] = []
    for name in names:
        slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "arm"
        numbered = (f"{slug}-{number}" for number in itertools.count(2))
        folders.append(slug if slug not in folders else next(other for other in numbered if other not in folders))
    return folders


# --- What is there already -----------------------------------------------------------------------------------------------


def is_finished(run: Run, runner: Runner) -> bool:
    """Whether the run's folder holds this very run, finished.

    Raises:
        ConfigError: where it holds another one.
    """
    described = run.folder / "run.toml"
    if not described.exists():
        return False
    before = read_run_toml(described)
    check_same_run(run.folder, before, run.config)
    if before != run.config:  # what may change between a run and its continuation: steps, workers, evaluations
        differ = [name for name in ("steps", "workers", "eval_every") if getattr(before, name) != getattr(run.config, name)]
        was, now = (", ".join(f"{name} {getattr(config, name)}" for name in differ) for config in (before, run.config))
        raise ConfigError(f"{run.folder} holds a run of {was}, now it is {now}; choose another --out")
    about = about_run(described)
    if about.get("arm") != run.arm:
        raise ConfigError(f"{run.folder} holds a run of {about.get('arm')!r}, not of {run.arm!r}; choose another --out")
    was = {name: about[name] for name in ("place", "bandwidth", "down", "latency", "step_time") if name in about}
    if was != {"place": runner.name, **runner.about}:
        told = [", ".join(map(str, words.values())) for words in (was, {"place": runner.name, **runner.about})]
        raise ConfigError(f"{run.folder} holds a run that was {told[0]}, now it is {told[1]}; choose another --out")
    return (run.folder / "summary.json").is_file()


# --- Running -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of the runs of a comparison.

    Attributes:
        records: of those that are finished, in the order in which they were asked for.
        failures: the others.
    """

    records: dict[Run, Record]
    failures: list[Failure]


def run_all(
    runs: Sequence[Run], runner: Runner, out: Path, *, jobs: int, console: Console, keep: Path | None = None
) -> Outcome:
    """Make all runs that are not finished; one that fails does not keep the others from running.

    Args:
        runs: what to run, in order.
        runner: makes them.
        out: gets records.jsonl.
        jobs: how many at once; more than one only of simulated runs.
        console: where progress is shown.
        keep: a file of records beside the one in `out`: runs that it has are not made again, and others are added to it.
    """
    kept = [_Kept(path) for path in (out / RECORDS, keep) if path is not None]
    done: dict[Run, Record] = {}
    for run in runs:
        record = record_of(run.folder) if is_finished(run, runner) else kept[-1].find(run, runner) if keep else None
        if record is not None:
            done[run] = record
            for file in kept:  # a kill may have come between a run and its record
                file.add(record)
    todo = [run for run in runs if run not in done]
    there = f", {len(done)} of {len(runs)} are there already" if done else ""
    console.print(Text(f"{counted(len(runs), 'run')} in {out}{there}"), soft_wrap=True)
    progress = _RunsLeft(len(runs), len(done), jobs, console)
    failures = []
    ended = _one_by_one(todo, runner, progress) if jobs == 1 else _side_by_side(todo, runner, jobs, progress)
    for run, why in ended:
        if why is None:
            done[run] = record = record_of(run.folder)
            for file in kept:
                file.add(record)
            if jobs > 1:  # it was not shown
                console.print(Text(f"done: {run}, validation loss {record.loss:.4f}"), soft_wrap=True)
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)  # they were there to go on from
        else:
            failures.append(Failure(run, why))
            console.print(Text(f"failed: {run}: {why}", style="red"), soft_wrap=True)
    return Outcome({run: done[run] for run in runs if run in done}, failures)


class _Kept:
    """A file of records, each run once."""

    def __init__(self, path: Path):
        self.path = path
        self._records = {record.key: record for record in (read_records(path) if path.is_file() else [])}

    def find(self, run: Run, runner: Runner) -> Record | None:
        """The record of a run of these very settings; None where there is none.

        A setting that did not exist when the record was made counts as the default, which is to do as before.
        """
        if exact := self._records.get(run_key(run.arm, runner.name, run.config)):
            return exact
        given = changed(run.config)
        for record in self._records.values():
            known = {k: v for k, v in run.config.settings.items() if k in record.config.settings or k in given}
            if (record.arm, record.place) == (run.arm, runner.name) and record.config == replace(run.config, settings=known):
                return record
        return None

    def add(self, record: Record) -> None:
        """Append a record, unless it is there."""
        if record.key not in self._records:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_record(self.path, record)
            self._records[record.key] = record


def _prepare(run: Run, runner: Runner) -> None:
    """Describe the run in its folder; what an earlier attempt left there is gone on from, or overwritten."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / ERRORS).unlink(missing_ok=True)
    command = shlex.join([*runner.command(run.config), *words_of(run.config)])
    about = {"arm": run.arm, "place": runner.name, "command": command, "cores": os.cpu_count() or 0, **runner.about}
    about |= {"tried": run.tried} if run.tried else {}
    write_run_toml(run.folder / "run.toml", run.config, **about)


def _one_by_one(runs: Sequence[Run], runner: Runner, progress: _RunsLeft) -> Iterator[tuple[Run, str | None]]:
    """Make one run after the other, and say of each why it failed, if it did."""
    for run in runs:
        progress.starts(run)
        yield run, _attempt(run, runner, progress.console)
        progress.ended()


def run_one(run: Run, runner: Runner, console: Console) -> Record:
    """Make one run in its folder, and read its record."""
    _prepare(run, runner)
    runner.run(run.folder, console)
    return record_of(run.folder)


def _attempt(run: Run, runner: Runner, console: Console) -> str | None:
    try:
        run_one(run, runner, console)
    except ThinwireError as error:
        return str(error)
    except SystemExit as error:
        if error.code != 2:
            raise
        return "its workers refused the settings"  # and have said so
    except Exception as error:  # whatever it is, the other arms can do without this one
        (run.folder / ERRORS).write_text(traceback.format_exc(), encoding="utf-8")
        return f"{type(error).__name__}: {error} (see {run.folder / ERRORS})"
    return None


def _side_by_side(runs: Sequence[Run], runner: Runner, jobs: int, progress: _RunsLeft) -> Iterator[tuple[Run, str | None]]:
    """Make several simulated runs at once, each in a process with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "THINWIRE_LAUNCHER": str(os.getpid())}
    waiting, under_way = list(runs), dict[Process, Run]()
    with a_job() as processes:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                run = waiting.pop(0)
                _prepare(run, runner)
                progress.starts(run)
                with (run.folder / ERRORS).open("wb") as errors:
                    command = [sys.executable, "-m", "thinwire.tools.compare", str(run.folder)]
                    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
                processes.append(process)
                under_way[process] = run
            for process in [process for process in under_way if process.poll() is not None]:
                yield under_way[process], _why_it_failed(under_way[process], process.returncode)
                del under_way[process]
                progress.ended()
            time.sleep(0.05)


def _why_it_failed(run: Run, code: int) -> str | None:
    said = (run.folder / ERRORS).read_text(encoding="utf-8", errors="replace").strip()
    if code == 0:
        (run.folder / ERRORS).unlink()
        return None
    return f"{said.splitlines()[-1] if said else f'exit code {code}'} (see {run.folder / ERRORS})"


class _RunsLeft:
    """Which run of how many is under way, and how long the rest will take."""

    def __init__(self, total: int, done: int, jobs: int, console: Console):
        self.total, self.started, self.left, self.jobs, self.console = total, done, total - done, jobs, console
        self._begun, self._ended = time.monotonic(), 0

    def starts(self, run: Run) -> None:
        self.started += 1
        left = ""
        if self._ended:
            seconds = (time.monotonic() - self._begun) / self._ended * self.left
            left = f"  about {show_seconds(seconds)} left"
        self.console.print(Text(f"[{self.started}/{self.total}] {run}{left}", style="bold"), soft_wrap=True)

    def ended(self) -> None:
        self._ended, self.left = self._ended + 1, self.left - 1


def main() -> None:
    """Entry point of a process that makes one simulated run."""
    end_with(int(os.environ["THINWIRE_LAUNCHER"]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which ends this process
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    try:
        with open(os.devnull, "w") as devnull:
            simulated_runner(folder).run(folder, Console(file=devnull))
    except ThinwireError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
