"""What a chain is made of: the three kinds of stages as encoder and decoder see them, and the rows that values come in."""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.bits import Bytes, cut, joined
from thinwire.codecs.registry import VALUE_FORMATS
from thinwire.errors import ConfigError, WireError, check_whole_number
from thinwire.kernels import Kernels

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

DENSE_GROUP = 256  # values of a block, and so of a scale, in tensors that are sent whole
RUN = 1 << 20  # values that are worked on at once, so that the workspace is bounded


@dataclass(frozen=True, repr=False)
class Transform(ABC):
    """Base of the transforms.

    Args:
        block: entries along each side of a block; a shorter dimension makes a shorter block, a longer one is cut into blocks
            and padded with zeros to a whole number of them.
    """

    block: int = 64

    def __post_init__(self) -> None:
        """Check the block."""
        check_whole_number("the block of a transform", self.block)

    mixes = True  # whether it does anything to the entries of a block
    in_kernels = False  # whether it is the transform that the C kernels know

    @property
    def changes(self) -> bool:
        """Whether the matrix is another one in each round, so that no state can live in its domain."""
        return False

    def length(self, n: int) -> int:
        """Length of the blocks along a dimension of n entries."""
        return max(1, min(n, self.block))

    @abstractmethod
    def basis(self, length: int, round: int) -> NDArray[np.float64] | None:
        """The matrix P [length, length], one basis vector per row; None for the identity."""

    def matrix(self, length: int, round: int, device: torch.device) -> Tensor | None:
        """P in float32 on a device; None where there is nothing to do."""
        return _matrix(self, length, round if self.changes else 0, device)


@functools.lru_cache(maxsize=64)
def _matrix(transform: Transform, length: int, round: int, device: torch.device) -> Tensor | None:
    basis = transform.basis(length, round) if length > 1 else None
    return None if basis is None else torch.from_numpy(basis).to(device=device, dtype=torch.float32)


@dataclass(frozen=True, repr=False)
class Selection(ABC):
    """Base of the selections.

    Args:
        k: entries kept of each block (all, where a block has fewer), or the fraction of a block as a float below one.
    """

    k: int | float = 32

    indexed = False  # whether the indices travel with the values
    everything = False  # whether nothing is left out
    alike = False  # whether all blocks of a size send the same entries in a round, which nothing else decides
    in_kernels = False  # whether it is the selection that the C kernels know

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

    def choose(self, strips: Tensor, block: tuple[int, int]) -> tuple[Indices, Floats]:
        """Of a selection that is `indexed`: which entries of the blocks of a matrix, and their values; see `largest`."""
        raise NotImplementedError(f"{type(self).__name__} is indexed, so it must choose by looking at the entries")


@dataclass(frozen=True)
class Row:
    """Values that are written together: tensor by tensor, k to a block.

    Attributes:
        k: values of a block.
        lengths: values of each tensor.
    """

    k: int
    lengths: tuple[int, ...]

    @functools.cached_property
    def count(self) -> int:
        """Values in all."""
        return sum(self.lengths)

    @functools.cached_property
    def whole_blocks(self) -> bool:
        """Whether no block has fewer than k values."""
        return all(n % self.k == 0 for n in self.lengths)

    def times(self, rows: int) -> Row:
        """So many of these rows, as one."""
        return self if rows == 1 else _repeated(self, rows)

    def groups(self, g: int) -> int:
        """How many groups of at most g values there are; none has values of two tensors."""
        return sum(-(-n // g) for n in self.lengths)

    def borders(self, g: int) -> Indices:
        """The first value of each of these groups, and the end of the last, [groups + 1]."""
        if g not in self._borders:
            starts = np.cumsum([0, *self.lengths])
            parts = [np.arange(a, b, min(g, max(b - a, 1))) for a, b in itertools.pairwise(starts)]
            self._borders[g] = np.concatenate([*parts, starts[-1:]])
        return self._borders[g]

    @functools.cached_property
    def _borders(self) -> dict[int, Indices]:
        return {}


@functools.lru_cache(maxsize=256)
def _repeated(row: Row, times: int) -> Row:
    return Row(row.k, row.lengths * times)


@dataclass(frozen=True, repr=False)
class Values(ABC):
    """Base of the value formats."""

    @property
    def format_key(self) -> Hashable:
        """Under what the format stands in `registry.VALUE_FORMATS`."""
        return type(self)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype of a format of plain floats, whose messages may be averaged on the wire."""
        return None

    @property
    def number(self) -> int:
        """The format's number on the wire; 0 for one that has none."""
        return VALUE_FORMATS.number(self.format_key, default=0)

    @abstractmethod
    def nbytes_of(self, row: Row) -> int:
        """Length of a row of values."""

    def bits_of(self, count: int, k: int) -> float:
        """Bits that so many values take among many others: their length without any rounding up, where the format knows."""
        return 8 * self.nbytes_of(Row(k, (count,)))

    def group_of(self, k: int) -> int:  # noqa: ARG002
        """Values of a tensor that are written together, such as those of one scale: no part of a message begins within."""
        return 1

    @abstractmethod
    def write(self, values: Floats, row: Row) -> tuple[Bytes, Floats]:
        """The bytes of `values` [count], and what `read` will make of them."""

    def overwrite(self, values: Floats, row: Row) -> Bytes:
        """`write`, with what `read` will make of the bytes in the place of the values."""
        raw, values[:] = self.write(values, row)
        return raw

    @abstractmethod
    def read(self, raw: Bytes, row: Row, start: int, stop: int, *, check: bool = True) -> Floats:
        """Values `start` to `stop` of a row; without `check` where they have been checked before.

        Raises:
            WireError: a value or scale that is not finite, a negative scale, or padding that is not zero.
        """

    def read_into(self, raw: Bytes, row: Row, start: int, stop: int, out: Floats) -> bool:  # noqa: ARG002
        """`read` of values that have been checked, into `out`, by a C kernel; False where there is none."""
        return False

    def segments(self, row: Row) -> tuple[int, ...] | None:
        """Lengths of the parts of a row's bytes, where several rows that are written as one can be cut: see `bits.cut`."""
        return None if self.wire_dtype is None else (self.nbytes_of(row),)

    def write_all(self, values: Floats, row: Row, rows: int) -> tuple[Bytes, Floats]:
        """`write` of several such rows, one after the other: [rows, nbytes] and what is read, in one go where possible."""
        if rows > 1 and (lengths := self.segments(row)) is not None:
            raw, read = self.write(values, row.times(rows))
            return cut(raw, lengths, rows), read
        each = [self.write(one, row) for one in values.reshape(rows, -1)]
        return np.stack([raw for raw, _ in each]), np.concatenate([read for _, read in each])

    def read_all(self, raw: Bytes, row: Row) -> Floats:
        """`read` of several such rows [rows, nbytes], one after the other, in one go where possible.

        Raises:
            WireError: see `read`; it does not say which of the rows is meant.
        """
        if len(raw) > 1 and (lengths := self.segments(row)) is not None:
            many = row.times(len(raw))
            return self.read(joined(raw, lengths), many, 0, many.count)
        return np.concatenate([self.read(one, row, 0, row.count) for one in raw])

    def check(self, raw: Bytes, row: Row) -> float:
        """A number that no value is larger than in magnitude; all are checked as `read` does, without keeping them.

        Raises:
            WireError: see `read`.
        """
        largest, step = 0.0, row.k * max(1, RUN // row.k)
        for at in range(0, row.count, step):
            values = self.read(raw, row, at, min(at + step, row.count))
            largest = max(largest, float(values.max()), -float(values.min()))
        return largest


def finite(what: str, values: Floats) -> Floats:
    """The values, if all are finite.

    Raises:
        WireError: one is not.
    """
    if len(values) and not np.isfinite([values.min(), values.max()]).all():
        raise WireError(f"a {what} that is not finite")
    return values


@dataclass(frozen=True, repr=False)
class Stages:
    """One stage of each kind, and the number of parts that a message is cut into.

    Attributes:
        beside: all chains of a `CodecSchedule`, which share slots: they send a tensor whole where each of them would alone.
    """

    transform: Transform
    selection: Selection
    values: Values
    parts: int
    beside: tuple[Stages, ...]

    @property
    def linear(self) -> bool:
        """Whether messages may be averaged on the wire: all workers send the same entries, as plain floats."""
        return not self.selection.indexed and self.values.wire_dtype is not None

    def in_kernels(self, h: int, w: int, device: torch.device) -> bool:
        """Whether the C kernels know the transform of blocks of this shape there."""
        return self.transform.in_kernels and h == w == kernels.BLOCK and device.type == "cpu"

    def kernels(self, h: int, w: int, device: torch.device) -> Kernels | None:
        """The C kernels, where they know such blocks and can be had; else torch and numpy do the same."""
        return kernels.library() if self.in_kernels(h, w, device) else None


# --- Where messages are made -------------------------------------------------------------------------------------------------

_everywhere = False


def off_host(device: torch.device) -> bool:
    """Whether numpy cannot look at tensors there, so that messages are made and read by torch operations."""
    return device.type != "cpu" or _everywhere


@contextlib.contextmanager
def torch_everywhere() -> Iterator[None]:
    """Within it, torch operations are used on CPUs too: for tests that compare both ways."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before
