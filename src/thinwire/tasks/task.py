"""The interface of a task, and the two guarantees that every task keeps.

Initial weights depend on the seed alone, so all workers start at the same point without sending anything. A batch is a
pure function of (seed, worker, step), so a loader has no state: to resume at step 1000 is to ask for step 1000.

`Task` is what the rest of thinwire sees. `SeededTask` keeps the guarantees by construction: a subclass never sees a
seed, only a random generator that was made for it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

ValidationPart = Literal["all", "tuning", "claim"]


class Task(ABC):
    """One model, its data and its loss; everything a pure function of (seed, worker, step).

    Attributes:
        name: as in `thinwire.tasks.TASKS`.
        seed: of the initial weights and of the batches.
        workers: how many workers share the data.
        unit: what `batch_items` counts: "tokens", "images" or "samples".
        batch_items: items of `unit` in one batch of one worker.
        metric: a further figure that `evaluate` returns beside the loss, or None.
    """

    name: str
    seed: int
    workers: int
    unit: str
    batch_items: int
    metric: str | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU, the same on every call; the caller's random state is left alone."""

    @abstractmethod
    def batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """The training batch of one worker at one step, on the CPU."""

    @abstractmethod
    def block(self, block: int, step: int) -> tuple[Tensor, Tensor]:
        """The training batch of one step of a block, on the CPU: what a worker of a run trains on where workers come and go."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Training loss, a 0-d tensor on the model's device, wherever the batch is."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss, and `metric` if there is one, on a validation set that is the same for every seed."""


class SeededTask(Task):
    """A task that draws everything random from generators it is handed; see the head of this file."""

    def __init__(self, name: str, *, seed: int, workers: int):
        """Keep what every task has; a subclass sets `unit` and `batch_items`."""
        self.name = name
        self.seed = seed
        self.workers = workers

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the model with torch's global CPU generator, which is seeded here and restored afterwards."""

    @abstractmethod
    def sample(self, worker: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw one batch of `worker` from `rng` alone."""

    def model(self) -> nn.Module:
        """A new model on the CPU, the same on every call; the caller's random state is left alone."""
        # Neither torch.manual_seed, which would also reseed the GPUs, nor the caller's default device, whose own
        # generator is not the one seeded here.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(self.seed)
            return self.build()

    def batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """The training batch of one worker at one step, on the CPU."""
        if not 0 <= worker < self.workers:
            raise ValueError(f"worker must be from 0 to {self.workers - 1}, got {worker}")
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        return self.sample(worker, random_stream("batch", seed=self.seed, worker=worker, step=step))

    def block(self, block: int, step: int) -> tuple[Tensor, Tensor]:
        """The training batch of one step of a block, on the CPU; the same whichever worker has the block."""
        return self.sample(0, random_stream("block", seed=self.seed, worker=block, step=step))


def part_of(samples: Any, part: ValidationPart) -> Any:
    """The validation samples of a part: those to tune on and those to report on alternate, so that none is in both."""
    return samples if part == "all" else samples[part == "claim" :: 2]


def random_stream(purpose: str, *, seed: int, worker: int = 0, step: int = 0) -> np.random.Generator:
    """A generator of its own for every (purpose, seed, worker, step), even for neighbouring numbers."""
    # The seed comes last: it alone may fill more than one 32-bit word, which would shift what follows it.
    return np.random.default_rng([zlib.crc32(purpose.encode()), worker, step, seed])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Eval mode without gradients; yields the model's device and then restores the mode of every submodule."""
    # One by one: a submodule frozen in eval mode (BatchNorm while fine-tuning) must not come back in training mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield device_of(model)
    finally:
        for module, training in modes:
            module.training = training


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters are."""
    return next(model.parameters()).device
