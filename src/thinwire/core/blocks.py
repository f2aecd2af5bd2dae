"""Samples by block: what a worker of an elastic run trains on, for torch's DataLoader and for streams.

A run issues blocks (`thinwire.core.ledger`), each of which one worker trains on between two rounds. Here a block becomes
samples. The data are dealt in an order that is drawn anew in every epoch: block b has the places b S to (b + 1) S - 1 of it,
with S = steps x batch_size, and epochs follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from torch.utils.data import Sampler

from thinwire.core.joining import JoiningOptimizer
from thinwire.errors import ConfigError, check_whole_number

T = TypeVar("T")


class BlockSampler(Sampler[list[int]]):
    """The batches of this worker's blocks: `DataLoader(data, batch_sampler=BlockSampler(opt, len(data), ...))`.

    It looks at `opt.block` when a batch is drawn, so a loader must not draw batches ahead: use `num_workers=0`.

    Args:
        opt: of this worker, which has joined.
        samples: how many there are.
        batch_size: samples of a batch.
        steps: local steps of a block: those between two rounds.
        seed: of the order of the samples, the same on all workers.
    """

    def __init__(self, opt: JoiningOptimizer, samples: int, batch_size: int, steps: int, *, seed: int = 0):
        """Check the numbers."""
        for name, value in (("samples", samples), ("batch_size", batch_size), ("steps", steps)):
            check_whole_number(name, value)
        self.opt, self.samples, self.batch_size, self.steps, self.seed = opt, samples, batch_size, steps, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, block: int, step: int) -> list[int]:
        """The samples of one batch: a function of the seed, the block, and the step within it.

        A worker that takes more steps than a block has, since its message was not counted, goes through the block again.
        """
        first = (block * self.steps + step % self.steps) * self.batch_size
        return [self._sample(place) for place in range(first, first + self.batch_size)]

    def _sample(self, place: int) -> int:
        epoch, within = divmod(place, self.samples)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([epoch, self.seed]).permutation(self.samples)
        return int(self._order[within])

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.batch(_block(self.opt), self.opt.block_step)


def block_stream(opt: JoiningOptimizer, read: Callable[[int], Iterable[T]]) -> Iterator[T]:
    """An endless stream of what `read(block)` gives of this worker's blocks, from a new block on where the run goes on.

    Args:
        opt: of this worker, which has joined.
        read: the batches of a block, in order; where there are fewer than steps, they are gone through again.
    """
    block, batches = -1, iter(())
    while True:
        if _block(opt) != block:
            block = _block(opt)
            batches = iter(read(block))
        batch = next(batches, None)
        if batch is None:
            batches = iter(read(block))
            batch = next(batches, None)
        if batch is None:
            raise ConfigError(f"block {block} has no batches")
        yield batch


def _block(opt: JoiningOptimizer) -> int:
    if opt.block is None:
        raise ConfigError("this worker has no block to train on: call opt.join() first, on an elastic link")
    return opt.block
