"""Blocks become samples: none is left out or repeated within an epoch, by a DataLoader or as a stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.conformance.training import H, backward, build, model_of
from thinwire import SoloLink, World
from thinwire.core.blocks import BlockSampler, block_stream
from thinwire.errors import ConfigError
from thinwire.links.base import Link
from thinwire.sim import Churn


def _at(block: int | None, step: int = 0) -> Any:
    return SimpleNamespace(block=block, block_step=step)


def test_an_epoch_of_blocks_has_every_sample_once_and_the_next_one_another_order() -> None:
    sampler = BlockSampler(_at(0), 60, batch_size=5, steps=4, seed=3)
    epochs = [
        [i for block in range(first, first + 3) for step in range(4) for i in sampler.batch(block, step)] for first in (0, 3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(60))
    assert epochs[0] != epochs[1]
    again = BlockSampler(_at(0), 60, batch_size=5, steps=4, seed=3)
    assert again.batch(4, 2) == sampler.batch(4, 2) == sampler.batch(4, 6), "a function of seed, block and step"
    assert BlockSampler(_at(0), 60, 5, 4, seed=4).batch(4, 2) != again.batch(4, 2)


def test_a_loader_and_a_stream_give_the_blocks_of_a_run() -> None:
    """Two workers; all samples of the blocks that the ledger says are done were seen, each by the worker that had it."""
    data = TensorDataset(torch.arange(1000))

    def worker(link: Link) -> tuple[list[int], list[int], int]:
        model = model_of()
        opt = build("diloco", model.parameters(), link)
        opt.join()
        loader = iter(DataLoader(data, batch_sampler=BlockSampler(opt, 1000, batch_size=2, steps=H)))
        stream = block_stream(opt, lambda block: [block] * H)
        seen, blocks = [], []
        while opt.steps < 5 * H:
            (batch,), block = next(loader), next(stream)
            seen += batch.tolist()
            blocks.append(block)
            backward(model, block, opt.block_step)
            opt.step()
            opt.zero_grad()
        return seen, blocks, opt.engine.ledger.done

    (a, blocks_a, done), (b, blocks_b, _) = World(2, step_time=0.1, churn=Churn()).run(worker)
    assert sorted({*blocks_a, *blocks_b}) == list(range(10)) and done == 10
    assert len(set(a + b)) == len(a + b) == 10 * H * 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
        BlockSampler(_at(0), 10, 0, 1)
    fixed = build("diloco", model_of().parameters(), SoloLink())
    with pytest.raises(ConfigError, match="this worker has no block to train on"):
        next(iter(BlockSampler(fixed, 10, 1, 1)))
    with pytest.raises(ConfigError, match="block 7 has no batches"):
        next(block_stream(_at(7), lambda block: []))
