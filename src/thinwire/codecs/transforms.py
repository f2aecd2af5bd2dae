"""Transforms of blocks: orthonormal, so that they keep norms (Parseval) and their inverse is the transposed matrix.

A block X of h x w entries becomes P_h X P_w^T, with one matrix per block length. A transform spreads each entry over the
whole block, or gathers what is smooth in few coefficients; either way a few large coefficients then say more than a few large
entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.chain import Identity, Stage
from thinwire.codecs.shared_seed import numbers
from thinwire.codecs.stages import Transform
from thinwire.errors import ConfigError, check_whole_number
from thinwire.kernels import cosines

__all__ = ["DCT", "Hadamard", "Identity", "RandomOrthogonal", "Transform"]

_SIGNS = 1  # purpose of the shared random numbers


@dataclass(frozen=True, repr=False)
class DCT(Transform, Stage):
    """Orthonormal DCT-II, the transform of DeMo: P[i, j] = sqrt(2 / n) cos(pi (2 j + 1) i / (2 n)), row 0 over sqrt(2)."""

    in_kernels = True

    def basis(self, length: int, round: int) -> NDArray[np.float64]:  # noqa: ARG002
        """The cosines."""
        return cosines(length)


@dataclass(frozen=True, repr=False)
class Hadamard(Transform, Stage):
    """Walsh-Hadamard: entries +-1 / sqrt(n), P[i, j] negative where i & j has an odd number of bits. n is a power of two."""

    def __post_init__(self) -> None:
        """Check the block."""
        super().__post_init__()
        if self.block & (self.block - 1):
            raise ConfigError(f"the block of {type(self).__name__} must be a power of two, got {self.block}")

    def length(self, n: int) -> int:
        """The next power of two, up to the block."""
        return min(1 << max(0, n - 1).bit_length(), self.block)

    def basis(self, length: int, round: int) -> NDArray[np.float64]:  # noqa: ARG002
        """Products of [[1, 1], [1, -1]]."""
        return _walsh(length) / math.sqrt(length)


@dataclass(frozen=True, repr=False)
class RandomOrthogonal(Hadamard):
    """Another orthogonal matrix in each round, the same on all workers: H D1 H D2 H D3, D with random signs on the diagonal.

    Close to a uniformly random rotation, and exact: up to its scale the matrix holds whole numbers, so every machine computes
    the same bits, which a QR decomposition does not promise.

    Args:
        block: see `Transform`; a power of two.
        seed: shared by all workers.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        """Check the block and the seed."""
        super().__post_init__()
        check_whole_number("the seed of RandomOrthogonal", self.seed, least=0)

    @property
    def changes(self) -> bool:
        """In every round."""
        return True

    def basis(self, length: int, round: int) -> NDArray[np.float64]:
        """Three Hadamard matrices with random signs between them."""
        H = _walsh(length)
        signs = 1.0 - 2.0 * (numbers(self.seed, round, _SIGNS, 3 * length) >> np.uint64(63)).reshape(3, length)
        P = np.eye(length)
        for D in signs[::-1]:
            P = H @ (D[:, None] * P)
        return P / length**1.5


def _walsh(length: int) -> NDArray[np.float64]:
    H = np.ones((1, 1))
    while len(H) < length:
        H = np.block([[H, H], [H, -H]])
    return H
