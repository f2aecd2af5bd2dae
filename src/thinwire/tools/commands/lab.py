"""`thinwire lab`: a real thin wire on this machine, to measure what a method costs on it."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.errors import ConfigError
from thinwire.network import parse_bandwidth, parse_duration, show_bytes
from thinwire.tools import namespaces as net
from thinwire.tools.config import new_folder
from thinwire.tools.flags import parse_flags
from thinwire.tools.lab import Lab, LabError, check_command, find, take_down, unwinding
from thinwire.tools.measured import Measured, read_figures, show_measured
from thinwire.tools.subcommands import choose_command

HELP = """\
A real thin wire on this machine: every worker in a network namespace of its own, behind a link
that the kernel shapes to a bandwidth. Needs root and iproute2.

usage: thinwire lab COMMAND [options]

  run           Make a lab, run a command in it as one torchrun job, measure, remove the lab:
                thinwire lab run --bandwidth 10mbit,100mbit,1gbit -- thinwire train --steps 100
  up            Make a lab and leave it in place.
  status        List the labs that are up, with their rates and what has passed.
  down          Remove a lab, and end what runs in it.

rates
  --bandwidth 100mbit                      both ways, of every worker
  --bandwidth 110mbit --down 500mbit       a home link: 110 up, 500 down
  --bandwidth 100mbit:100mbit:10mbit       one per worker, joined by colons (--down as well)
  --bandwidth 10mbit,100mbit,inf           only of run: one job after the other; inf is not shaped

There is no latency to choose: `thinwire sim --latency` computes it.
"""


def main(arguments: list[str]) -> int:
    """Dispatch to up, down, run or status."""
    rest = arguments[1:]
    if _has(rest[: _end_of_flags(rest)], "--latency"):
        raise ConfigError("the lab shapes bandwidth and has no --latency: `thinwire sim --latency 20ms` computes it")
    return choose_command("lab", HELP, {"run": _run, "up": _up, "status": _status, "down": _down}, arguments)


def _end_of_flags(arguments: list[str]) -> int:
    return arguments.index("--") if "--" in arguments else len(arguments)


# --- Rates in words -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """One entry of --bandwidth, with its --down: in words, and in bits per second."""

    words: str
    bandwidth: tuple[float, ...] | float
    down: tuple[float, ...] | float | None = None


def parse_speeds(bandwidth: str, down: str | None) -> list[Speed]:
    """The speeds that the flags list.

    Args:
        bandwidth: speeds joined by commas; each one rate, or rates of all workers joined by colons.
        down: the same downward: one for all speeds, or as many as there are.
    """
    ups = bandwidth.split(",")
    downs: list[str | None] = [None] if down is None else [*down.split(",")]
    if len(downs) not in (1, len(ups)):
        raise ConfigError(f"--down lists {len(downs)} speeds, but --bandwidth {len(ups)}: give one, or one for each")
    downs = downs * len(ups) if len(downs) == 1 else downs
    return [
        Speed(up if back is None else f"{up} up, {back} down", _one_or_each(up), None if back is None else _one_or_each(back))
        for up, back in zip(ups, downs, strict=True)
    ]


def _one_or_each(text: str) -> tuple[float, ...] | float:
    rates = tuple(map(parse_bandwidth, text.split(":")))
    return rates[0] if len(rates) == 1 else rates


# --- up, status, down -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class UpFlags:
    """Make a lab and leave it in place."""

    workers: int = 2
    """How many."""
    bandwidth: str = "100mbit"
    """Of each worker's wire, both ways; one per worker is joined by colons, 100mbit:10mbit; inf is not shaped."""
    down: str | None = None
    """Downward, where it differs, as on home links."""
    name: str = "lab"
    """What to call it; labs of several names may be up at once."""


def _up(arguments: list[str]) -> int:
    flags = parse_flags(UpFlags, "lab up", arguments)
    speeds = parse_speeds(flags.bandwidth, flags.down)
    if len(speeds) > 1:
        raise ConfigError(f"a lab that stays up has one speed; rates per worker are joined by colons, got {flags.bandwidth!r}")
    lab = Lab(flags.workers, bandwidth=speeds[0].bandwidth, down=speeds[0].down, name=flags.name)
    lab.up()
    print(f"the lab {lab.name!r} is up:")
    for rank, namespace in enumerate(lab.namespaces):
        print(f"  worker {rank}: namespace {namespace}, {net.WIRE} {net.address(rank)}, {lab.rates[rank]}")
    variables = " ".join(f"{k}={v}" for k, v in lab.environment(0).items())
    print(
        "one torchrun job in it, measured:\n"
        f"  thinwire lab run --name {lab.name} -- thinwire train --steps 100\n"
        "or one process at a time, by hand; for instance rank 0:\n"
        f"  {variables} ip netns exec {lab.namespaces[0]} thinwire train --steps 100\n"
        f"remove it:\n  thinwire lab down --name {lab.name}"
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class StatusFlags:
    """List the labs that are up."""


def _status(arguments: list[str]) -> int:
    parse_flags(StatusFlags, "lab status", arguments)
    labs = find()
    console = Console()
    table = Table("lab", "worker", "namespace", "address", "rate", "sent", "received", "processes")
    rows = [row for lab in labs.values() for row in _rows(lab)]
    for row in rows:
        table.add_row(*row)
    if rows and console.is_terminal:
        console.print(table)
    elif rows:
        for name, worker, namespace, address, rate, sent, received, processes in rows:
            traffic = f"sent {sent}, received {received}, processes {processes}"
            print(f"{name} worker {worker}: {namespace} {address}, {rate}, {traffic}")
    for name in net.namespaces().keys() - labs.keys():
        print(f"{name}: half a lab; `thinwire lab down --name {name}` removes it")
    if not net.namespaces():
        print("no lab is up")
    return 0


def _rows(lab: Lab) -> list[tuple[str, ...]]:
    return [
        (
            lab.name,
            str(rank),
            namespace,
            net.address(rank),
            str(lab.rates[rank]),
            show_bytes(counted.sent),
            show_bytes(counted.received),
            str(len(net.processes_in([namespace]))),
        )
        for rank, (namespace, counted) in enumerate(zip(lab.namespaces, lab.counters(), strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class DownFlags:
    """Remove a lab, and end what runs in it."""

    name: str = "lab"
    """Which one."""
    all: bool = False
    """Every lab on this machine."""


def _down(arguments: list[str]) -> int:
    flags = parse_flags(DownFlags, "lab down", arguments)
    net.check_machine()
    names = sorted(net.namespaces()) if flags.all else [flags.name]
    removed = {name: take_down(name) for name in names}
    for name, parts in removed.items():
        print(f"removed the lab {name!r}: {', '.join(parts)}" if parts else f"no lab called {name!r} is up")
    if not removed:
        print("no lab is up")
    return 0


# --- run ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Run a command in every namespace of a lab as one torchrun job, and measure it.

    The command follows after --. Rank 0's output is shown. `thinwire train` gets a fresh run folder for each speed unless it
    is given --out, and saves no checkpoints unless it is given --checkpoint-every.
    """

    workers: int | None = None
    """How many; by default 2, or those of the lab that --name gives."""
    bandwidth: str | None = None
    """Of each worker's wire, both ways: by default 100mbit. A comma-separated list runs one job after the other, such as
    10mbit,100mbit,1gbit; rates per worker are joined by colons, 100mbit:10mbit; inf is not shaped."""
    down: str | None = None
    """Downward, where it differs, as on home links; one, or one for each speed."""
    name: str | None = None
    """Use the lab of this name that is up, and leave it up; by default one is made for this call and removed after it."""
    out: str | None = None
    """A file to which a line of JSON is added for each speed."""
    timeout: str = "60min"
    """How long one job may take."""


def _run(arguments: list[str]) -> int:
    end = _end_of_flags(arguments)
    command = arguments[end + 1 :]
    flags = parse_flags(RunFlags, "lab run", arguments[:end])
    if not command:
        raise ConfigError(
            "no command given; put it after `--`: thinwire lab run --bandwidth 10mbit -- thinwire train --steps 100"
        )
    timeout = parse_duration(flags.timeout)
    if timeout <= 0:
        raise ConfigError(f"timeout must be above zero, got {flags.timeout!r}")
    lab = Lab(2 if flags.workers is None else flags.workers) if flags.name is None else _lab_called(flags.name, flags.workers)
    speeds = _speeds_of(flags, lab)
    folder = new_folder("lab")
    jobs = [_words(command, number, speed, len(speeds), folder) for number, speed in enumerate(speeds, 1)]
    check_command(jobs[0])
    keep = _record_file(flags.out)
    done: list[Measured] = []
    try:
        with lab if flags.name is None else _borrowed(lab):
            for speed, words in zip(speeds, jobs, strict=True):
                done.append(_measure(lab, speed, words, timeout))
                keep(done[-1])
    finally:
        show_measured(done, Console())
    return 0


def _lab_called(name: str, workers: int | None) -> Lab:
    labs = find()
    if name not in labs:
        up = ", ".join(map(repr, labs)) or "none"
        raise LabError(f"no lab called {name!r} is up (up: {up}): make it with `thinwire lab up --name {name}`")
    if workers not in (None, labs[name].workers):
        raise ConfigError(f"--workers {workers} does not fit the lab {name!r}, which has {labs[name].workers}")
    return labs[name]


@contextlib.contextmanager
def _borrowed(lab: Lab) -> Iterator[None]:
    """Leave a lab as it was found."""
    before = lab.rates
    with unwinding():
        try:
            yield
        finally:
            lab.reshape(bandwidth=[r.up for r in before], down=[r.down for r in before])


def _speeds_of(flags: RunFlags, lab: Lab) -> list[Speed]:
    if flags.bandwidth is None and flags.name is not None:
        if flags.down is not None:
            raise ConfigError(f"--down {flags.down} needs --bandwidth, or neither for the rates that {flags.name!r} has")
        words = str(lab.rates[0]) if len(set(lab.rates)) == 1 else f"the rates of {flags.name}"
        return [Speed(words, tuple(r.up for r in lab.rates), tuple(r.down for r in lab.rates))]
    speeds = parse_speeds(flags.bandwidth or "100mbit", flags.down)
    for speed in speeds:
        net.rates_of(lab.workers, speed.bandwidth, speed.down)  # refuses now what would fail in the middle
    return speeds


def _words(command: list[str], number: int, speed: Speed, speeds: int, folder: str) -> tuple[str, ...]:
    """The command of one job: `thinwire` is run by this interpreter, and a training gets a run folder of its own."""
    if command[0] != "thinwire":
        return tuple(command)
    words = [sys.executable, "-m", *command]
    if command[1:2] != ["train"] or _has(command, "--resume"):
        return tuple(words)
    if not _has(command, "--checkpoint-every"):
        words += ["--checkpoint-every", "0"]  # checkpoints talk over the wire too, and a measurement needs none
    if not _has(command, "--out"):
        words += ["--out", f"{folder}/{number}-{re.sub(r'[^a-z0-9.]+', '-', speed.words.lower())}"]
    elif speeds > 1:
        raise ConfigError(f"--out of the command is one folder for {speeds} speeds: leave it out, and each has its own")
    return tuple(words)


def _has(arguments: list[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in arguments)


def _record_file(path: str | None) -> Callable[[Measured], None]:
    """Adds a measurement to a file, if there is one to be kept."""
    if path is None:
        return lambda _: None
    try:
        Path(path).open("a").close()
    except OSError as cause:
        raise ConfigError(f"cannot write {path}: {cause.strerror or cause}") from cause

    def keep(job: Measured) -> None:
        with Path(path).open("a") as lines:
            lines.write(json.dumps(job.record()) + "\n")

    return keep


def _measure(lab: Lab, speed: Speed, words: tuple[str, ...], timeout: float) -> Measured:
    lab.reshape(bandwidth=speed.bandwidth, down=speed.down)
    print(f"{lab.workers} worker{'s' * (lab.workers > 1)} at {speed.words}", flush=True)
    with tempfile.TemporaryDirectory(prefix="thinwire-lab-") as folder:
        job = lab.run(words, env={"THINWIRE_FIGURES": folder, "THINWIRE_PLACE": f"lab {speed.words}"}, timeout=timeout)
        figures = read_figures(Path(folder), lab.workers)
    return Measured(speed.words, lab.rates, words, job.seconds, job.counters, figures)
