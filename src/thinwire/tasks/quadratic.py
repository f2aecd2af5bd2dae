"""A noisy quadratic bowl: the task whose every answer is known.

With a point x in R^193, curvatures h between 0.1 and 1 and an optimum x*, worker w minimises

    L_w(x) = 1/2 sum_i h_i (x_i - x*_i - d_wi)^2 + <noise, x>

so its gradient is exactly h (x - x* - d_w) + noise. The shifts d_w are zero when all workers have the same data, and
sum to zero otherwise: the best common point is x* in both cases, and the loss there is 0.

The point is held as a vector, a matrix and a single number, because algorithms treat these shapes differently.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.tasks.task import SeededTask, device_of, evaluating, random_stream

VECTOR, MATRIX = 64, (8, 16)
DIMENSION = VECTOR + math.prod(MATRIX) + 1
NOISE = 0.1  # standard deviation of one sample's gradient noise, in every coordinate


class Point(nn.Module):
    """A point of the bowl in three parameters: 1-d, 2-d and 0-d."""

    def __init__(self) -> None:
        """Start at a random point."""
        super().__init__()
        self.vector = nn.Parameter(torch.randn(VECTOR))
        self.matrix = nn.Parameter(torch.randn(MATRIX))
        self.scalar = nn.Parameter(torch.randn(()))

    def forward(self) -> Tensor:
        """The point as one vector [DIMENSION]."""
        return torch.cat((self.vector, self.matrix.flatten(), self.scalar.view(1)))


class QuadraticTask(SeededTask):
    """See the head of this file.

    Attributes:
        curvature: h, [DIMENSION].
        optimum: x*, [DIMENSION].
        shifts: d_w, [workers, DIMENSION].
    """

    unit = "samples"

    def __init__(self, name: str, *, seed: int, workers: int, batch: int | None, non_iid: float | None):
        """Draw the bowl; the noise of a batch is the mean over `batch` samples (default 8)."""
        super().__init__(name, seed=seed, workers=workers)
        self.batch_items = batch or 8
        rng = random_stream("bowl", seed=seed)
        self.curvature = torch.from_numpy(rng.permutation(np.geomspace(0.1, 1.0, DIMENSION))).float()
        self.optimum = torch.from_numpy(rng.standard_normal(DIMENSION)).float()
        self.shifts = torch.from_numpy((non_iid or 0.0) * _directions(workers, rng)).float()

    def build(self) -> nn.Module:
        """A random point."""
        return Point()

    def sample(self, worker: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Gradient noise [batch, DIMENSION] and this worker's optimum [DIMENSION]."""
        noise = NOISE * rng.standard_normal((self.batch_items, DIMENSION), dtype=np.float32)
        return torch.from_numpy(noise), self.optimum + self.shifts[worker]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """L_w at the model's point, with the batch's mean noise."""
        noise, optimum = (part.to(device_of(model)) for part in batch)
        point = model()
        return self._bowl(point, optimum) + noise.mean(0) @ point

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss without noise and shifts, which is 0 at the optimum."""
        with evaluating(model) as device:
            return {"loss": self._bowl(model(), self.optimum.to(device)).item()}

    def _bowl(self, point: Tensor, optimum: Tensor) -> Tensor:  # both [DIMENSION]
        return 0.5 * (self.curvature.to(point.device) * (point - optimum).square()).sum()


def _directions(workers: int, rng: np.random.Generator) -> np.ndarray:
    """Unit vectors that sum to zero, [workers, DIMENSION]; zero for one worker, who is the mean of all.

    They are the corners of a regular polygon in a random plane.
    """
    plane, _ = np.linalg.qr(rng.standard_normal((DIMENSION, 2)))  # two orthonormal columns
    if workers == 1:
        return np.zeros((1, DIMENSION))
    angle = 2 * np.pi * np.arange(workers) / workers
    return np.stack((np.cos(angle), np.sin(angle)), axis=1) @ plane.T
