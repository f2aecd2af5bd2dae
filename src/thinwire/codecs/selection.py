"""Which entries of each block are sent.

`TopK` looks at the block, so its indices travel with the values. `RandomK` and `Striding` choose from the round and a shared
seed: no index is sent, and where the values are plain floats the messages may be averaged on the wire (all-reduce).
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.shared_seed import numbers
from thinwire.codecs.stage import Stage
from thinwire.errors import ConfigError

Indices = NDArray[np.int64]

_ORDER, _SHIFT = 2, 3  # purposes of the shared random numbers


@dataclass(frozen=True, repr=False)
class Selection(Stage):
    """Base of the selections.

    Args:
        k: entries kept of each block (all, where a block has fewer), or the fraction of a block as a float below one.
    """

    k: int | float = 32

    indexed = False  # whether the indices travel with the values

    def __post_init__(self) -> None:
        """Check k."""
        whole = isinstance(self.k, int) and not isinstance(self.k, bool) and self.k >= 1
        if not whole and not (isinstance(self.k, float) and 0 < self.k < 1):
            raise ConfigError(
                f"the k of {type(self).__name__} is a whole number from 1, or a fraction below 1.0, got {self.k!r}"
            )

    def count(self, L: int) -> int:
        """Entries kept of a block of L."""
        return min(self.k, L) if isinstance(self.k, int) else max(1, round(self.k * L))

    @abstractmethod
    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:
        """Which entries of blocks `start` to `stop`, [stop - start, count(L)] in ascending order, without looking at them."""


@dataclass(frozen=True, repr=False)
class All(Selection):
    """Everything is sent: what a chain without a selection does."""

    k: int | float = 1  # of no use here

    def _shown(self, first: object) -> list[str]:  # noqa: ARG002
        return []

    def count(self, L: int) -> int:
        """All of them."""
        return L

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """All of them."""
        return np.broadcast_to(np.arange(L), (stop - start, L))


@dataclass(frozen=True, repr=False)
class TopK(Selection):
    """The k entries of largest magnitude of each block. The best k-term approximation, for an index each."""

    indexed = True

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """Cannot be told without looking."""
        raise TypeError("which entries are largest cannot be told without looking at them")


@dataclass(frozen=True, repr=False)
class RandomK(Selection):
    """k entries at random, others in each round, the same on all workers; each entry is as likely as any other.

    One random set per round is shifted cyclically by a random distance in each block.

    Args:
        k: see `Selection`.
        seed: shared by all workers.
    """

    seed: int = 0

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:
        """The set of this round, shifted."""
        k = self.count(L)
        chosen = _random_set(self.seed, round, L, k)
        shift = (numbers(self.seed, round, _SHIFT, stop - start, start) % np.uint64(L)).astype(np.int64)
        wrapped = np.searchsorted(chosen, L - shift)  # from here on the shifted set begins anew at the front
        place = wrapped[:, None] + np.arange(k)
        return (chosen[place % k] + shift[:, None]) % L


@functools.lru_cache(maxsize=64)
def _random_set(seed: int, round: int, L: int, k: int) -> Indices:
    """The places of the k smallest of L random numbers, in ascending order."""
    return np.sort(np.argsort(numbers(seed, round, _ORDER, L), kind="stable")[:k])


@dataclass(frozen=True, repr=False)
class Striding(Selection):
    """Every (L / k)-th entry, beginning one further in each round, so that all entries have their turn.

    The block is cut into k runs of equal length (up to one), and round r sends entry r mod length of each.
    """

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:
        """The next entry of each run."""
        k = self.count(L)
        borders = np.arange(k + 1) * L // k
        return np.broadcast_to(borders[:-1] + round % np.diff(borders), (stop - start, k))


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """The places of the k largest of each row, in ascending order.

    Args:
        magnitudes: [n, L], not negative; NaN counts as largest. May be overwritten.
        k: how many.

    Returns:
        int64 [n, k]. Which of several equal entries is taken is not specified.
    """
    if magnitudes.device.type != "cpu":
        return magnitudes.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    return torch.from_numpy(_largest(magnitudes, k))


_LANES = 256


def _largest(magnitudes: Tensor, k: int) -> Indices:
    """`largest` on a CPU, several times faster than topk where k is far below L.

    The k-th largest of the maxima of many lanes is a lower limit of the k-th largest entry: k entries at least are not below
    it, and few more. One comparison finds them in ascending order, and the few too many are dropped.
    """
    n, L = magnitudes.shape
    rows = magnitudes.numpy()
    if L % _LANES or L < 2 * _LANES or k > _LANES // 2:
        return _largest_by_partition(rows, k)
    lanes = torch.amax(magnitudes.view(n, L // _LANES, _LANES), dim=1).numpy()
    lanes.partition(_LANES - k, axis=1)
    found = np.flatnonzero(rows >= lanes[:, _LANES - k, None])
    borders = np.searchsorted(found, np.arange(n + 1) * L)
    counts = np.diff(borders)
    # Odd rows: NaN, which no comparison finds, or many equal entries such as the zeros of an empty block.
    odd = (counts > 2 * k + 16) | np.isnan(lanes[:, _LANES - k :].max(axis=1))
    if odd.any():
        out = np.empty((n, k), np.int64)
        out[odd] = _largest_by_partition(rows[odd], k)
        found = found[np.repeat(~odd, counts)]
        out[~odd] = _drop_smallest(rows, found, np.flatnonzero(~odd), counts[~odd], k)
        return out
    return _drop_smallest(rows, found, np.arange(n), counts, k)


def _largest_by_partition(rows: NDArray[np.float32], k: int) -> Indices:
    L = rows.shape[1]
    if k == L:
        return np.tile(np.arange(L), (len(rows), 1))
    return np.sort(np.argpartition(rows, L - k, axis=1)[:, L - k :], axis=1)


def _drop_smallest(rows: NDArray[np.float32], found: Indices, at: Indices, counts: Indices, k: int) -> Indices:
    """Keep the k largest of the `counts[i]` >= k places `found` in row at[i].

    Args:
        rows: [n, L].
        found: places row * L + column in ascending order.
        at: [m], the rows they lie in.
        counts: [m], how many lie in each.
        k: how many to keep.

    Returns:
        Columns, [m, k] in ascending order.
    """
    L, m = rows.shape[1], len(at)
    column = found - np.repeat(at * L, counts)
    if not m or int(counts.max()) == k:
        return column.reshape(m, k)
    widest = int(counts.max())
    size = rows.reshape(-1)[found]
    table = np.full((m, widest), -1, np.float32)
    there = np.arange(widest) < counts[:, None]
    table[there] = size
    table.partition(widest - k, axis=1)
    keep = size >= np.repeat(table[:, widest - k], counts)
    if np.count_nonzero(keep) > m * k:  # several are equal to the smallest that stays: the first ones do
        smallest = np.repeat(table[:, widest - k], counts)
        spare = k - np.add.reduceat((size > smallest).astype(np.int64), np.cumsum(counts) - counts)
        equal = size == smallest
        nth = np.cumsum(equal)
        before = (nth - equal)[np.cumsum(counts) - counts]
        keep &= ~equal | (nth - np.repeat(before, counts) <= np.repeat(spare, counts))
    return column[keep].reshape(m, k)
