"""Chunks: how the blocks of a group are worked on together on a device, whatever the number of tensors they come from.

A device takes about as long for a small operation as for a large one, so tensors are not worked on one by one. Pieces with the
same number of blocks in a row are laid one below the other: a chunk is one tall matrix, transformed and inverted by two matrix
products. Chunks are as large as memory allows, so the number of operations depends on the size of a model and on how many
different widths its tensors have, and not on how many tensors there are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.layout import Grid, Group, Piece, cut_grids

ENTRIES = 1 << 24  # of a chunk: 64 MB in float32


@dataclass(frozen=True, eq=False)  # told apart by identity: they are made once
class Chunk:
    """Pieces of equal width of one group, one below the other.

    Attributes:
        pieces: the pieces.
    """

    pieces: tuple[Piece, ...]

    @property
    def h(self) -> int:
        """Rows of a block."""
        return self.pieces[0].grid.h

    @property
    def w(self) -> int:
        """Columns of a block."""
        return self.pieces[0].grid.w

    @property
    def x(self) -> int:
        """Blocks in a row of blocks."""
        return self.pieces[0].x

    @functools.cached_property
    def y(self) -> int:
        """Rows of blocks."""
        return sum(piece.y for piece in self.pieces)

    @property
    def blocks(self) -> int:
        """How many blocks."""
        return self.y * self.x

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.y * self.h, self.x * self.w

    @functools.cached_property
    def whose(self) -> list[int]:
        """The tensor of each piece."""
        return [piece.grid.index for piece in self.pieces]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The matrix of pieces without padding, in float32."""
        if all(part.shape == piece.shape for part, piece in zip(parts, self.pieces, strict=True)):
            return torch.cat(list(parts)).float()
        matrix = torch.zeros(self.shape, device=parts[0].device)
        torch._foreach_copy_(self.inside(matrix, parts), list(parts))
        return matrix

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The pieces of the matrix, padding included; views."""
        return list(matrix.split([piece.shape[0] for piece in self.pieces]))

    def inside(self, matrix: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """The pieces of the matrix without padding, of the shapes of `parts`; views."""
        return [whole[: part.shape[0], : part.shape[1]] for whole, part in zip(self.split(matrix), parts, strict=True)]

    def to_blocks(self, matrix: Tensor) -> Tensor:
        """[blocks, L], in the order of the pieces, row of blocks by row of blocks."""
        return matrix.view(self.y, self.h, self.x, self.w).transpose(1, 2).reshape(self.blocks, self.h * self.w)

    def to_matrix(self, blocks: Tensor) -> Tensor:
        """The opposite of `to_blocks`."""
        return blocks.view(self.y, self.x, self.h, self.w).transpose(1, 2).reshape(self.shape)

    @functools.cached_property
    def _numbers(self) -> NDArray[np.int64]:
        """The number of each block in its group."""
        return np.concatenate([np.arange(piece.start, piece.start + piece.blocks) for piece in self.pieces])

    @functools.cached_property
    def _owners(self) -> NDArray[np.int64]:
        """The tensor of each block."""
        return np.repeat(self.whose, [piece.blocks for piece in self.pieces])

    @functools.cached_property
    def _on(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._on:
            self._on[device] = torch.from_numpy(self._numbers).to(device), torch.from_numpy(self._owners).to(device)
        return self._on[device]

    def of_blocks(self, rows: Tensor, dim: int = 0) -> Tensor:
        """The rows that belong to the blocks of this chunk, out of those of the whole group."""
        first, last = int(self._numbers[0]), int(self._numbers[-1]) + 1
        if last - first == self.blocks:
            return rows.narrow(dim, first, self.blocks)
        return rows.index_select(dim, self._tables(rows.device)[0])

    def of_tensors(self, numbers: Tensor) -> Tensor:
        """The number of each block's tensor, [blocks], out of one per tensor."""
        return numbers.index_select(0, self._tables(numbers.device)[1])


@functools.lru_cache(maxsize=256)
def chunks_of(group: Group, entries: int) -> tuple[Chunk, ...]:
    """The blocks of a group in chunks of at most so many entries (or one block)."""
    room = max(1, entries // group.L)
    wide = [grid for grid in group.grids if room < grid.X]
    found = [[piece] for piece in cut_grids(wide, room)]  # parts of rows of blocks
    for x, places in alike([grid.X for grid in group.grids]):
        if x <= room:
            found += _filled([group.grids[n] for n in places], room // x)
    return tuple(Chunk(tuple(pieces)) for pieces in found)


def _filled(grids: Sequence[Grid], rows: int) -> list[list[Piece]]:
    """Tensors with equally many blocks in a row, one below the other, cut after every so many rows of blocks."""
    found: list[list[Piece]] = []
    free = 0
    for grid in grids:
        y = 0
        while y < grid.Y:
            if not free:
                found.append([])
                free = rows
            take = min(free, grid.Y - y)
            found[-1].append(Piece(grid, y, y + take, 0, grid.X, grid.first + y * grid.X))
            y, free = y + take, free - take
    return found


def in_order(chunks: Sequence[Chunk], rows: Sequence[Tensor]) -> Tensor:
    """Rows of the blocks of all chunks in the order of the group, [blocks, ...]."""
    joined = torch.cat(list(rows))
    order = _order(tuple(chunks), joined.device)
    return joined if order is None else joined.index_select(0, order)


@functools.lru_cache(maxsize=256)
def _order(chunks: tuple[Chunk, ...], device: torch.device) -> Tensor | None:
    numbers = np.concatenate([chunk._numbers for chunk in chunks])
    return None if (np.diff(numbers) == 1).all() else torch.from_numpy(np.argsort(numbers)).to(device)


def alike(settings: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Which tensors have the same settings, by their places: those of each kind are worked on together."""
    found: dict[Any, list[int]] = {}
    for n, setting in enumerate(settings):
        found.setdefault(setting, []).append(n)
    return list(found.items())


# --- Sums per tensor ---------------------------------------------------------------------------------------------------------

_IN_A_ROW = 1024  # numbers that are added at once


def sums_of(numbers: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Sums of the numbers of each tensor, in an order that never changes.

    Args:
        numbers: those of one tensor after the other.
        counts: how many each tensor has, at least one.

    Returns:
        [tensors].
    """
    at, rows = _places(counts, numbers.device)
    table = torch.zeros(rows * _IN_A_ROW, dtype=numbers.dtype, device=numbers.device).index_copy_(0, at, numbers)
    sums = table.view(rows, _IN_A_ROW).sum(1)
    return sums if rows == len(counts) else sums_of(sums, tuple(-(-count // _IN_A_ROW) for count in counts))


@functools.lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Places of the numbers of each tensor in rows that no two tensors share, and how many rows there are."""
    rows = [math.ceil(count / _IN_A_ROW) for count in counts]
    firsts = [0, *itertools.accumulate(rows)]
    places = [np.arange(count) + first * _IN_A_ROW for count, first in zip(counts, firsts, strict=False)]
    return torch.from_numpy(np.concatenate(places)).to(device), firsts[-1]
