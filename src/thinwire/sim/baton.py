"""Baton: of N worker threads exactly one runs at a time, in a fixed order.

Threads, because grad mode and autocast are thread-local and because any training code can then be simulated unchanged; a
baton, because the order of everything is then the same from run to run. The global random generators belong to whoever
holds the baton: they are swapped at every hand-over.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import torch


class Baton:
    """Hands the right to run from worker to worker.

    Args:
        size: number of workers.
        ready: whether worker r could go on now; asked only while r waits.
        seed: worker r starts with the global generators seeded by seed + r.
    """

    def __init__(self, size: int, ready: Callable[[int], bool], *, seed: int):
        """No worker runs until `start` is called."""
        self.size, self._ready = size, ready
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._waiting = [False] * size
        self._done = [False] * size
        caller = random_state()
        self._random = [_seeded_state(seed + r) for r in range(size)]
        set_random_state(caller)

    def start(self) -> None:
        """Let worker 0 run."""
        self._turn[0].release()

    def take(self, rank: int) -> None:
        """Block until it is the turn of worker `rank`."""
        self._turn[rank].acquire()
        set_random_state(self._random[rank])

    def yield_until_ready(self, rank: int) -> bool:
        """Let others run until worker `rank` is ready.

        Returns:
            False when no worker can run any more: waiting would never end.
        """
        self._waiting[rank] = True
        self._random[rank] = random_state()
        self._hand_on(rank)
        self.take(rank)
        self._waiting[rank] = False
        return self._ready(rank)

    def retire(self, rank: int) -> None:
        """Worker `rank` has ended; another worker may run."""
        self._done[rank] = True
        self._hand_on(rank)

    def _hand_on(self, rank: int) -> None:
        others = ((rank + i) % self.size for i in range(1, self.size + 1))
        waiting = None
        for r in (r for r in others if not self._done[r]):
            if not self._waiting[r] or self._ready(r):  # most often the next one: of 1,024 workers not all are asked
                self._turn[r].release()
                return
            waiting = r if waiting is None else waiting
        if waiting is not None:  # if no worker is able, wake a waiting one: it finds that out
            self._turn[waiting].release()


def random_state() -> tuple:
    """The state of torch's, numpy's and Python's global generators."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_random_state(state: tuple) -> None:
    """Put the three global generators back to a state."""
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def seed_everything(seed: int) -> None:
    """Seed the three global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _seeded_state(seed: int) -> tuple:
    seed_everything(seed)
    return random_state()
