"""Real worker processes for tests: a pool that lives as long as the test session, because importing torch takes seconds.

`Pool.run(function, size, *args)` calls `function(link, *args)` on `size` gloo processes, each with a `TorchLink` over them,
and returns what each returned. Functions must be importable (defined at the top of a test module). A function that makes a
process group makes it with `own_group`, so that it is given back: every group holds threads that poll.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.links.base import Link
from thinwire.payload import Payload

# Processes are forked from one that has imported torch, which takes seconds, and nothing else: it has no threads.
WARM = mp.get_context("forkserver")
WARM.set_forkserver_preload(["torch", "torch.distributed.tensor", "pytest", "thinwire.algorithms", "thinwire.sim"])

LIMIT = 600.0  # seconds that any wait may take: nothing here is about time, and the machine may be busy
_GRACE = 60.0  # seconds that the others get to answer too when one has failed already


def start_store() -> dist.TCPStore:
    """A key-value store on a free port of the loopback, held by the caller."""
    from thinwire.links.store import hold_store

    return hold_store("127.0.0.1")


def join_job(rank: int, size: int, port: int, timeout: float = LIMIT) -> None:
    """Make this process rank `rank` of a gloo job whose store the caller's parent holds."""
    from thinwire.links import connect

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(size),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    connect(backend="gloo", timeout=timeout)


@contextlib.contextmanager
def own_group(link: Link, ranks: list[int]) -> Iterator[dist.ProcessGroup]:
    """A process group of some of the ranks of `link`, which is over all processes; destroyed when all have left the block."""
    group = dist.new_group(ranks)
    yield group
    meet(link)
    dist.destroy_process_group(group)


def meet(link: Link) -> None:
    """Wait until every worker of the link is here."""
    link.mean(Payload(torch.zeros(1), purpose="metrics"))


def thread_count(_: Link | None = None) -> int:
    """How many threads this process has, those of libraries included."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads:")]
    return int(line.split()[1])


def tell(event: str) -> None:
    """Let the other workers of this job know of an event; its name must be new in the job."""
    dist.distributed_c10d._get_default_store().set(f"test/{event}", "1")


def hear(*events: str) -> None:
    """Wait until all these events have been told."""
    dist.distributed_c10d._get_default_store().wait([f"test/{event}" for event in events], timedelta(seconds=LIMIT))


@contextlib.contextmanager
def warnings_of_this_process() -> Iterator[list[str]]:
    """What thinwire logs here; for workers of a pool, which `caplog` does not hear."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def until(happened: Callable[[], object], what: str) -> None:
    """Wait for something that can only be asked for, such as a file or the end of somebody else's process."""
    deadline = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < deadline, f"waited {LIMIT:g} s for: {what}"
        time.sleep(0.02)


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    join_job(rank, size, port)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    while True:
        try:
            function, n, args = pipe.recv()
        except EOFError:
            return
        from thinwire.links import TorchLink

        try:
            pipe.send((True, function(TorchLink(groups[n], timeout=LIMIT), *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """`size` worker processes that run functions until `close()`. After a failure new processes take over."""

    def __init__(self, size: int = 4):
        self.size = size
        self._start()

    def _start(self) -> None:
        self._store = start_store()
        self._pipes: list[Connection] = []
        self._processes: list[mp.context.ForkServerProcess] = []
        for rank in range(self.size):
            mine, theirs = WARM.Pipe()
            process = WARM.Process(target=_serve, args=(rank, self.size, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        for pipe in self._pipes[:size]:
            pipe.send((function, size, args))
        answers: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while len(answers) + len(failed) < size:
            missing = {self._pipes[rank]: rank for rank in range(size) if rank not in answers and rank not in failed}
            ready = wait(list(missing), _GRACE if failed else LIMIT)
            for rank in [missing[pipe] for pipe in ready] or missing.values():
                ok, answer = _answer(self._pipes[rank]) if ready else (False, "gave no answer")
                (answers if ok else failed)[rank] = answer
        if failed:
            self.kill()
            self._start()
        assert not failed, "\n".join(f"worker {rank}:\n{said}" for rank, said in sorted(failed.items()))
        return [answers[rank] for rank in range(size)]

    def close(self) -> None:
        """Let all processes end by themselves."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=LIMIT)
        self.kill()

    def kill(self) -> None:
        """End all processes that are still there."""
        for process in self._processes:
            process.kill()
            process.join()


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "ended without an answer"
