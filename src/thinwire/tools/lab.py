"""The lab: real workers on one machine, joined by wires that are really thin. No torch here.

    with Lab(4, bandwidth=100e6) as lab:
        job = lab.run(["python", "train.py"])       # one torchrun job, a process in each namespace
        print(job.seconds, job.counters[0].sent)    # what worker 0's interface sent

The network is made by `thinwire.tools.namespaces` and removed on the way out, also on Ctrl-C, SIGTERM and any error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from thinwire.errors import ConfigError, ThinwireError
from thinwire.tools import namespaces as net
from thinwire.tools.namespaces import Counters, LabError, Rates
from thinwire.tools.processes import SILENT, Process, a_job, see_through

__all__ = ["Counters", "Job", "JobFailed", "Lab", "LabError", "Rates", "check_command", "find", "take_down"]

PORT = "29500"  # of the job's store, in the namespace of worker 0, which no other program uses


class JobFailed(ThinwireError):
    """A process of the job failed; the message names its rank."""


@dataclass(frozen=True)
class Job:
    """A job that has ended well.

    Attributes:
        seconds: from the start of its first process to the end of its last.
        counters: what passed each worker's interface meanwhile.
    """

    seconds: float
    counters: tuple[Counters, ...]


class Lab:
    """Workers in network namespaces of their own, each behind a wire of a certain rate. A context manager.

    Args:
        workers: how many.
        bandwidth: bits per second of each worker's wire, both ways; one number for all, or one per worker. Infinite for a
            wire that is not shaped.
        down: bits per second downward where that differs, as on home links.
        name: of the lab, as `thinwire lab status` shows it; by default one that no other process has.
        queue: seconds that a full queue before a wire takes to drain; what comes then is lost, and sent again by TCP. Workers
            that send to all others at once need room for a few packets to each of them.
    """

    def __init__(
        self,
        workers: int,
        *,
        bandwidth: float | Sequence[float] = float("inf"),
        down: float | Sequence[float] | None = None,
        name: str | None = None,
        queue: float = net.QUEUE,
    ):
        """Check everything; nothing is made yet."""
        if not 0 < queue < float("inf"):
            raise ConfigError(f"queue must be above zero seconds, got {queue!r}")
        self.queue = queue
        self.name = f"run-{os.getpid()}" if name is None else name
        if not re.fullmatch(net.NAMED, self.name):
            raise ConfigError(f"a lab's name has small letters, digits and dashes, at most 40, got {self.name!r}")
        self.rates = net.rates_of(workers, bandwidth, down)
        self._made = False
        self._way_out = contextlib.ExitStack()

    @property
    def workers(self) -> int:
        """How many workers the lab has."""
        return len(self.rates)

    @property
    def namespaces(self) -> list[str]:
        """The namespaces of the workers, in rank order."""
        return [net.home(self.name, rank) for rank in range(self.workers)]

    def __enter__(self) -> Lab:
        """Make the network; from here on it is removed however this process ends, but for SIGKILL."""
        with contextlib.ExitStack() as way_out:
            way_out.enter_context(unwinding())
            way_out.callback(self._remove)
            atexit.register(self._remove)  # for a Ctrl-C between here and the first line of the block
            self.up()
            self._way_out = way_out.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the network, and end whatever still runs in it."""
        self._way_out.close()

    def _remove(self) -> None:
        atexit.unregister(self._remove)
        if self._made:
            take_down(self.name)
            self._made = False

    def up(self) -> None:
        """Make the network and leave it in place; `take_down(name)` removes it. If it fails or is stopped, nothing is left.

        Raises:
            LabError: when this machine cannot, or a lab of this name is up.
        """
        net.check_machine()
        if self.name in net.namespaces():
            raise LabError(f"a lab called {self.name!r} is up already: `thinwire lab down --name {self.name}` removes it")
        first, *rest = net.commands_up(self.name, self.rates, self.queue)
        with unwinding():
            try:
                with _undisturbed():
                    net.call(first)  # who makes the hub has the name: until here there is nothing of ours to remove
                    self._made = True
                    for command in rest:
                        net.call(command)
            except BaseException:
                self._remove()
                raise

    def reshape(self, *, bandwidth: float | Sequence[float], down: float | Sequence[float] | None = None) -> None:
        """Change the rates of a lab that is up; what is under way goes on."""
        self.rates = net.rates_of(self.workers, bandwidth, down)
        for command in net.commands_shape(self.name, self.rates, self.queue):
            net.call(command)

    def counters(self) -> tuple[Counters, ...]:
        """What has passed each worker's interface since the lab was made."""
        return net.read_counters(self.name, self.workers)

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for the process of a worker, so that all of them find each other."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": net.address(0),  # rank 0 holds the job's store
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": net.WIRE,
            "NCCL_SOCKET_IFNAME": net.WIRE,
        }

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 3600.0,
        patience: float = 10.0,
    ) -> Job:
        """Run a command in every namespace, as one torchrun job, and wait for all of them.

        Rank 0's output is shown as it comes. What the others print is dropped; what they say on stderr is shown at the end,
        once where they say the same. `OMP_NUM_THREADS` is a fair share of the cores unless it is set. Call it from the main
        thread, which is the one that signals reach.

        Args:
            command: the program and its arguments.
            env: further environment variables.
            timeout: seconds that the job may take.
            patience: seconds that the others have to say what they saw after one has failed; then they are ended.

        Raises:
            JobFailed: when a process failed or the time is over.
            SystemExit: with code 2 where all that failed refused their settings.
            KeyboardInterrupt: on Ctrl-C, after all processes were ended.
        """
        check_command(command)
        if len(net.namespaces().get(self.name, ())) != self.workers + 1:
            raise LabError(f"the lab {self.name!r} is not up: use it as `with Lab(...) as lab:`, or call up() first")
        common = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.workers)))
        common.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that the addresses of a lab have no names
        common |= env or {}
        others, before = net.processes_in(self.namespaces), self.counters()
        started = time.monotonic()
        processes: list[Process] = []
        with contextlib.ExitStack() as way_out:
            said = [way_out.enter_context(tempfile.TemporaryFile()) for _ in range(self.workers - 1)]
            way_out.callback(_show, said, processes)
            way_out.callback(self._leave_none, others)
            with a_job() as job:
                with _undisturbed():
                    for rank, errors in enumerate([None, *said]):
                        job.append(_start(self.namespaces[rank], command, common | self.environment(rank), errors))
                processes += job
                failure = see_through(job, patience=patience, limit=timeout)
        if failure:
            within = f" within {timeout:g} s" if failure.how == SILENT else ""
            raise JobFailed(f"rank {failure.number} of `{' '.join(command)}` {failure.how}{within}; all ranks were ended")
        seconds, after = time.monotonic() - started, self.counters()
        return Job(seconds, tuple(a - b for a, b in zip(after, before, strict=True)))

    def _leave_none(self, others: set[int]) -> None:
        """End what the processes of a job have started and left behind; not what was in an older lab before."""
        with _undisturbed():
            net.end_processes(net.processes_in(self.namespaces) - others)


def check_command(command: Sequence[str]) -> None:
    """Raise a `ConfigError` where there is nothing that could be run."""
    if not command:
        raise ConfigError("a job needs a command, got none")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r} to run")


def find() -> dict[str, Lab]:
    """The labs that are up on this machine, whoever made them, by name."""
    net.check_machine()
    labs = {}
    for name, parts in net.namespaces().items():
        workers = len(parts) - 1
        if net.hub(name) not in parts or net.home(name, workers - 1) not in parts:
            continue  # half made, or half removed by hand
        lab = Lab(workers, name=name)
        try:
            lab.rates = net.read_rates(name, workers)
        except KeyError:  # likewise: a namespace without its wire
            continue
        labs[name] = lab
    return labs


def take_down(name: str) -> list[str]:
    """Remove a lab, whoever made it, and end whatever still runs in it; says which namespaces it had, none if there is none."""
    with _undisturbed():
        net.check_machine()
        parts = net.namespaces().get(name, [])
        net.end_processes(net.processes_in(parts))
        net.remove(parts)
    return parts


def _start(namespace: str, command: Sequence[str], env: Mapping[str, str], errors: IO[bytes] | None) -> Process:
    """One process of a job. A session of its own keeps Ctrl-C for us, who then end it."""
    return subprocess.Popen(
        [net.tool_path("ip"), "netns", "exec", namespace, *command],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=None if errors is None else subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,
    )


def _show(said: Sequence[IO[bytes]], processes: Sequence[Process]) -> None:
    """Show what the ranks after the first said on stderr, but not where all refused their settings: rank 0 has said it."""
    if processes and all(p.poll() == 2 for p in processes):
        return
    shown = set()
    for rank, file in enumerate(said, 1):
        file.seek(0)
        words = file.read().decode(errors="replace").strip()
        if words and words not in shown:
            shown.add(words)
            print("\n".join(f"[rank {rank}] {line}" for line in words.splitlines()), file=sys.stderr, flush=True)


# --- Signals --------------------------------------------------------------------------------------------------------------

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold signals back that would leave half a network; the first of them gets through at the end."""
    held: list[int] = []
    with _handling(_ENDING, lambda number, _: held.append(number)):
        yield
    if held:
        signal.raise_signal(held[0])


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Have SIGTERM and SIGHUP unwind as Ctrl-C does, so that the way out is taken."""

    def unwind(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    with _handling((signal.SIGTERM, signal.SIGHUP), unwind):
        yield


@contextlib.contextmanager
def _handling(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    """Handle signals for a while, but for those that are ignored, as under nohup; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in numbers}
    for number, was in before.items():
        if was is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, signal.SIG_DFL if was is None else was)
