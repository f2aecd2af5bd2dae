"""Real worker processes for tests: a pool that lives as long as the test session, because importing torch takes seconds.

`Pool.run(function, size, *args)` calls `function(link, *args)` on `size` gloo processes, each with a `TorchLink` over them,
and returns what each returned. Functions must be importable (defined at the top of a test module).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 60.0  # seconds that any wait inside a worker may take


def start_store() -> dist.TCPStore:
    """A key-value store on a free port of the loopback, held by the caller."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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
    """`size` worker processes that run functions until `close()`."""

    def __init__(self, size: int = 4):
        self._store = start_store()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._store.port, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
        for pipe in self._pipes[:size]:
            pipe.send((function, size, args))
        answers = []
        for rank, pipe in enumerate(self._pipes[:size]):
            assert pipe.poll(2 * LIMIT), f"worker {rank} gave no answer within {2 * LIMIT:g} s"
            answers.append(pipe.recv())
        failed = [f"worker {rank}:\n{answer}" for rank, (ok, answer) in enumerate(answers) if not ok]
        assert not failed, "\n".join(failed)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
