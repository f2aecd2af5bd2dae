"""Layout: how the tensors of a round are cut into blocks, and in which order the blocks are worked on.

A tensor is seen as a matrix: 1-D tensors are one row, more than two dimensions are folded into (first, all others). Along a
dimension longer than the block it is cut into blocks and padded with zeros to a whole number of them: 50257, 1000 or a prime
do not shrink the block. A dimension shorter than the block makes the block shorter. Tensors whose blocks have the same shape
form a group; the blocks of a group are numbered through, tensor by tensor, row of blocks by row of blocks.

In the domain of the transform a tensor keeps the shape of its padded matrix, here called its slot.

Work goes in batches that fit a core's cache. A batch is made of pieces: rectangles of blocks of one tensor, so that a piece
of a slot is most often contiguous and matrix products read and write it in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.stages import DENSE_GROUP, Transform

BATCH = 1 << 20  # entries of a batch: 4 MB in float32, large enough that Python costs little, small enough for a cache
LONG = 1 << 22  # those of a batch that the C kernels read from memory block by block, and write back: fewer calls

Shape = tuple[int, ...]


def as_matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is seen as."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


@dataclass(frozen=True)
class Grid:
    """The blocks of one tensor.

    Attributes:
        index: the tensor's place in the list.
        shape: of the tensor.
        h: rows of a block.
        w: columns of a block.
        first: number of its first block in the group.
    """

    index: int
    shape: Shape
    h: int
    w: int
    first: int

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return as_matrix(self.shape)[0]

    @property
    def cols(self) -> int:
        """Columns of the matrix."""
        return as_matrix(self.shape)[1]

    @property
    def Y(self) -> int:
        """Rows of blocks."""
        return -(-self.rows // self.h)

    @property
    def X(self) -> int:
        """Blocks in a row of blocks."""
        return -(-self.cols // self.w)

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return self.Y * self.X

    @property
    def slot(self) -> tuple[int, int]:
        """Shape of the padded matrix."""
        return self.Y * self.h, self.X * self.w

    @property
    def whole(self) -> Piece:
        """All of it as one piece."""
        return Piece(self, 0, self.Y, 0, self.X, self.first)


@dataclass(frozen=True)
class Piece:
    """Blocks (y0..y1) x (x0..x1) of one tensor; whole rows of blocks, or part of a single one.

    Attributes:
        start: number of its first block in the group.
    """

    grid: Grid
    y0: int
    y1: int
    x0: int
    x1: int
    start: int

    @property
    def y(self) -> int:
        """Rows of blocks."""
        return self.y1 - self.y0

    @property
    def x(self) -> int:
        """Blocks in each."""
        return self.x1 - self.x0

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return self.y * self.x

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, padding included."""
        return self.y * self.grid.h, self.x * self.grid.w

    def split(self, entries: int) -> Iterator[Piece]:
        """The piece in parts of whole rows of blocks, of at most so many entries where a row is not longer."""
        step = max(1, entries // (self.grid.h * self.shape[1]))
        for y in range(self.y0, self.y1, step):
            start = self.start + (y - self.y0) * self.x
            yield Piece(self.grid, y, min(y + step, self.y1), self.x0, self.x1, start)

    def of_slot(self, slot: Tensor) -> Tensor:
        """This piece of a slot, [y h, x w]; a view."""
        g = self.grid
        return slot[self.y0 * g.h : self.y1 * g.h, self.x0 * g.w : self.x1 * g.w]

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """This piece of a matrix without padding; a view that may be smaller than `shape`."""
        g = self.grid
        return matrix[self.y0 * g.h : min(self.y1 * g.h, g.rows), self.x0 * g.w : min(self.x1 * g.w, g.cols)]


@dataclass(frozen=True)
class Batch:
    """Consecutive blocks of one group that are worked on together."""

    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """Number of the first block."""
        return self.pieces[0].start

    @functools.cached_property
    def blocks(self) -> int:
        """How many blocks."""
        return sum(p.blocks for p in self.pieces)

    @property
    def stop(self) -> int:
        """Number of the block after the last."""
        return self.start + self.blocks

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first entry of each piece when the pieces lie one after the other, and the end of the last."""
        return [0, *np.cumsum([math.prod(p.shape) for p in self.pieces]).tolist()]

    @functools.cached_property
    def corners(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each block, where its first entry is when the pieces lie one after the other, and the distance of its rows."""
        corner, stride = np.empty(self.blocks, np.int64), np.empty(self.blocks, np.int64)
        at = 0
        for p, base in zip(self.pieces, self.starts, strict=False):
            rows, cols = np.divmod(np.arange(p.blocks), p.x)
            corner[at : at + p.blocks] = base + rows * p.grid.h * p.shape[1] + cols * p.grid.w
            stride[at : at + p.blocks] = p.shape[1]
            at += p.blocks
        return corner, stride

    def places(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Where entries of blocks are when the pieces lie one after the other.

        Args:
            indices: [..., blocks, k], entries within their block.

        Returns:
            [..., blocks, k].
        """
        corner, stride = self.corners
        grid = self.pieces[0].grid
        if len({p.x for p in self.pieces}) == 1:  # all rows equally far apart, as most often
            place = _offsets(grid.h, grid.w, int(stride[0])).take(indices)
        else:
            row, col = np.divmod(indices, grid.w)
            place = row * stride[:, None] + col
        place += corner[:, None]
        return place


@functools.lru_cache(maxsize=256)
def _offsets(h: int, w: int, stride: int) -> NDArray[np.int64]:
    """Where each entry of a block is, seen from its first one, when its rows are `stride` apart."""
    return (np.arange(h)[:, None] * stride + np.arange(w)).reshape(-1)


@dataclass(frozen=True)
class Group:
    """All blocks of one shape.

    Attributes:
        h: rows of a block.
        w: columns of a block.
        grids: the tensors, in order.
    """

    h: int
    w: int
    grids: tuple[Grid, ...]

    @property
    def L(self) -> int:
        """Entries of a block."""
        return self.h * self.w

    @functools.cached_property
    def blocks(self) -> int:
        """How many blocks."""
        return sum(g.blocks for g in self.grids)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The blocks in batches of at most `BATCH` entries (or one block, where that is larger)."""
        return self.batches_of(BATCH)

    def batches_of(self, entries: int) -> tuple[Batch, ...]:
        """The blocks in batches of at most so many entries (or one block)."""
        if entries not in self._batches:
            self._batches[entries] = self._cut(entries)
        return self._batches[entries]

    @functools.cached_property
    def _batches(self) -> dict[int, tuple[Batch, ...]]:
        return {}

    def _cut(self, entries: int) -> tuple[Batch, ...]:
        room = max(1, entries // self.L)
        batches: list[list[Piece]] = [[]]
        free = room
        for piece in cut_grids(self.grids, room):
            if piece.blocks > free:
                batches.append([])
                free = room
            batches[-1].append(piece)
            free -= piece.blocks
        return tuple(Batch(tuple(b)) for b in batches if b)


def cut_grids(grids: Sequence[Grid], room: int) -> Iterator[Piece]:
    """Tensors cut into pieces of at most so many blocks."""
    for g in grids:
        if room >= g.X:
            step = room // g.X
            for y in range(0, g.Y, step):
                yield Piece(g, y, min(y + step, g.Y), 0, g.X, g.first + y * g.X)
        else:
            for y in range(g.Y):
                for x in range(0, g.X, room):
                    yield Piece(g, y, y + 1, x, min(x + room, g.X), g.first + y * g.X + x)


@dataclass(frozen=True)
class Layout:
    """All tensors of a round.

    Attributes:
        shapes: of the tensors.
        groups: those that are cut into blocks, by the shape of their blocks.
        dense: places of those that are sent whole, because their blocks would take more bytes.
    """

    shapes: tuple[Shape, ...]
    groups: tuple[Group, ...]
    dense: tuple[int, ...]

    @functools.cached_property
    def dense_numel(self) -> int:
        """Entries of all tensors that are sent whole."""
        return sum(math.prod(self.shapes[i]) for i in self.dense)

    @functools.cached_property
    def dense_blocks(self) -> int:
        """Blocks of all tensors that are sent whole."""
        return sum(-(-math.prod(self.shapes[i]) // DENSE_GROUP) for i in self.dense)

    def slot_shapes(self) -> list[Shape]:
        """Shape of each tensor in the domain of the transform: its padded matrix, or its own where it is sent whole."""
        shapes = list(self.shapes)
        for group in self.groups:
            for grid in group.grids:
                shapes[grid.index] = grid.slot
        return shapes

    @staticmethod
    def of(shapes: Sequence[Shape], transform: Transform, whole: Callable[[int, int, int], bool]) -> Layout:
        """Lay out tensors of these shapes.

        Args:
            shapes: of the tensors; empty ones take no part.
            transform: gives the length of the blocks.
            whole: told the entries of a tensor, its number of blocks and their entries, whether to send it whole.
        """
        found: dict[tuple[int, int], list[Grid]] = {}
        counts: dict[tuple[int, int], int] = {}
        dense: list[int] = []
        for i, shape in enumerate(shapes):
            rows, cols = as_matrix(shape)
            if not rows * cols:
                continue
            h, w = (1 if rows == 1 else transform.length(rows)), transform.length(cols)
            grid = Grid(i, tuple(shape), h, w, counts.get((h, w), 0))
            if whole(rows * cols, grid.blocks, h * w):
                dense.append(i)
            else:
                found.setdefault((h, w), []).append(grid)
                counts[h, w] = grid.first + grid.blocks
        groups = tuple(Group(h, w, tuple(grids)) for (h, w), grids in found.items())
        return Layout(tuple(map(tuple, shapes)), groups, tuple(dense))


def matrix_of(tensor: Tensor, grid: Grid) -> Tensor:
    """A tensor as the matrix it is seen as; a view where its memory allows."""
    return tensor.detach().reshape(grid.rows, grid.cols)


def write_back(matrix: Tensor, tensor: Tensor) -> None:
    """Copy a matrix that was changed into the tensor it was made of, where that could not be seen as a matrix."""
    if matrix.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        tensor.detach().copy_(matrix.view(tensor.shape))


def in_rows(piece: Piece, tensor: Tensor, *, whole: bool = True) -> Tensor | None:
    """A piece of a tensor, without padding, as the C kernels read and write it in place; None where they cannot.

    Args:
        piece: which part.
        tensor: the whole tensor.
        whole: whether the kernels need all of its rows and columns.
    """
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        return None
    part = piece.of_matrix(matrix := matrix_of(tensor, piece.grid))
    if matrix.data_ptr() != tensor.data_ptr() or part.stride(1) != 1 or (whole and part.shape != piece.shape):
        return None
    return part


def padded(piece: Piece, part: Tensor, out: Tensor | None = None) -> Tensor:
    """A piece of a matrix in float32, contiguous, with zeros for its padding; the memory of the matrix itself where that is so.

    Args:
        piece: which part.
        part: its entries without padding.
        out: memory to use where a copy is needed, at least as large as the piece.
    """
    if part.shape == piece.shape and part.is_contiguous() and part.dtype == torch.float32:
        return part
    n = math.prod(piece.shape)
    copy = (torch.empty(n, device=part.device) if out is None else out[:n]).view(piece.shape)
    if part.shape != piece.shape:
        copy.zero_()
    copy[: part.shape[0], : part.shape[1]] = part
    return copy
