"""The functions of the C library, called with tensors and arrays."""

from __future__ import annotations

import ctypes
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 64  # rows and columns of the blocks that the kernels know
_MOST_NUMBER = 1 << 16  # of sets: a number takes two bytes

Floats = NDArray[np.float32]
Sets = NDArray[np.integer]  # of two bytes, which is asserted

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_matrix = [_pointer, _long]  # first entry, entries from row to row
_grid = [_long, _long]  # rows of blocks, blocks in a row
_SIGNATURES = {
    "thinwire_init": ([_pointer, _pointer], None),
    "thinwire_encode": (
        [*_matrix, *_matrix, *_grid, _float, _float, *_matrix, *([_float] * 4), _int, _pointer, _pointer, _int],
        None,
    ),
    "thinwire_subtract": ([*_matrix, *_grid, _int, _pointer, _pointer, _float], None),
    "thinwire_decode": (
        [
            *(_pointer, _long, _pointer, _long, _pointer, _long, _int, _float),
            *(*_matrix, *_grid, _long, _long, _float, _int, _pointer, _int),
        ],
        None,
    ),
    "thinwire_read_sets": ([_pointer, _long, _int, _int, _int, _int, _pointer], _int),
    "thinwire_write_sets": ([_pointer, _long, _int, _int, _int, _pointer], None),
    "thinwire_read_signs": ([_pointer, _pointer, _long, _long, _int, _pointer], None),
    "thinwire_write_signs": ([_pointer, _long, _int, _pointer, _pointer], _int),
}


def cosines(length: int) -> NDArray[np.float64]:
    """The orthonormal DCT-II: P[i, j] = sqrt(2 / n) cos(pi (2 j + 1) i / (2 n)), row 0 over sqrt(2)."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    P = np.sqrt(2 / length) * np.cos(math.pi * (2 * j + 1) * i / (2 * length))
    P[0] /= math.sqrt(2)
    return P


@dataclass(frozen=True)
class Entries:
    """What all workers sent of consecutive blocks.

    Attributes:
        indices: [workers, blocks, k], entries within their block, each below BLOCK * BLOCK; of each worker contiguous.
        values: [workers, blocks * k]; of each worker contiguous.
        weights: [workers], None where all are 1.
        total: what sums are divided by; 0 to divide each by the weight of those who sent it.
    """

    indices: Sets
    values: Floats
    weights: Floats | None
    total: float


@dataclass(frozen=True)
class Whitening:
    """How entries are divided by the root of their running second moment v: g / (sqrt(v) fade + eps).

    Attributes:
        v: of the shape of what is whitened; v <- b2 v + (1 - b2) g^2 comes first.
        b2: see above.
        fade: 1 / sqrt(1 - b2**step), which corrects for a v that began at zero.
        eps: see above.
        clip: multiplies g before all else.
    """

    v: Tensor
    b2: float
    fade: float
    eps: float
    clip: float


class Kernels:
    """A compiled library, tried on numbers.

    Args:
        path: of the library.

    Raises:
        OSError: it cannot be loaded, or computes something else than it should.
    """

    def __init__(self, path: Path):
        """Load it."""
        self._library = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, result
        self._basis = cosines(BLOCK)
        # Named: they must live until the library has copied them.
        narrow, table = self._basis / math.sqrt(BLOCK / 2), np.cos(math.pi * np.arange(4 * BLOCK) / (2 * BLOCK))
        narrow, table = narrow.astype(np.float32), table.astype(np.float32)
        self._library.thinwire_init(narrow.ctypes.data, table.ctypes.data)
        self.name = self._tried()

    # --- Blocks ------------------------------------------------------------------------------------------------------------

    def accumulate(self, out: Tensor, x: Tensor, *, decay: float, scale: float, whitening: Whitening | None = None) -> None:
        """Out <- decay * out + scale * P X P^T for the blocks X of a matrix.

        Args:
            out: [64 Y, 64 X], float32, rows contiguous; what it held does not matter where `decay` is 0.
            x: the same.
            decay: see above.
            scale: see above.
            whitening: of `x`, which itself is not changed.
        """
        self._encode(out, x, decay, scale, whitening, None, None)

    def select(
        self,
        out: Tensor,
        x: Tensor | None,
        indices: Sets,
        values: Floats,
        *,
        decay: float,
        scale: float,
        whitening: Whitening | None = None,
    ) -> None:
        """The entries of largest magnitude of each block of `out`, after `accumulate` where `x` is given.

        Args:
            out: see `accumulate`.
            x: see `accumulate`.
            indices: [Y X, k], contiguous; places within each block in ascending order are written to it. Of equal entries the
                first are taken; NaN counts as largest.
            values: [Y X, k], contiguous; the entries there.
            decay: see `accumulate`.
            scale: see `accumulate`.
            whitening: see `accumulate`.
        """
        self._encode(out, x, decay, scale, whitening, indices, values)

    def _encode(
        self,
        out: Tensor,
        x: Tensor | None,
        decay: float,
        scale: float,
        whitening: Whitening | None,
        indices: Sets | None,
        values: Floats | None,
    ) -> None:
        given = (None, 0) if x is None else _rows(x, out.shape)
        k = 0 if indices is None or values is None else _entries(indices, values, _blocks(out))
        where = (None, None) if indices is None or values is None else (indices.ctypes.data, values.ctypes.data)
        w, grid, threads = whitening, _grid_of(out), torch.get_num_threads()
        divided = (None, 0, 1, 0, 1, 0) if w is None else (*_rows(w.v, out.shape), w.clip, w.b2, w.fade, w.eps)
        self._library.thinwire_encode(*given, *_rows(out, out.shape), *grid, decay, scale, *divided, k, *where, threads)

    def subtract(self, slot: Tensor, indices: Sets, values: Floats, scale: float) -> None:
        """Take `scale` times values [blocks, k] off the entries of the blocks of a slot."""
        k = _entries(indices, values, _blocks(slot))
        where = (indices.ctypes.data, values.ctypes.data)
        self._library.thinwire_subtract(*_rows(slot, slot.shape), *_grid_of(slot), k, *where, scale)

    def mean(self, entries: Entries, out: Tensor) -> None:
        """Out [64 Y, 64 X] <- P^T Q P for the mean Q of what all workers sent, added in their order."""
        self._decode(entries, _rows(out, out.shape), _grid_of(out))

    def step(self, entries: Entries, x: Tensor, *, rate: float, sign: bool) -> None:
        """X <- x - rate * P^T Q P, or the sign of it; x may lack the last rows and columns of the blocks.

        Args:
            entries: see `mean`.
            x: float32, rows contiguous.
            rate: see above.
            sign: take the sign.
        """
        rows, columns = x.shape
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        self._decode(entries, _rows(x, x.shape), grid, (rows, columns, rate, sign))

    def squares(self, entries: Entries) -> NDArray[np.float64]:
        """The sum of squares of each block's mean, [blocks]."""
        found = np.empty(entries.indices.shape[1], np.float64)
        self._decode(entries, (None, 0), (1, len(found)), squares=found.ctypes.data)
        return found

    def _decode(
        self,
        entries: Entries,
        out: tuple[int | None, int],
        grid: tuple[int, int],
        step: tuple[int, int, float, bool] = (0, 0, 0.0, False),
        squares: int | None = None,
    ) -> None:
        indices, values, weights = entries.indices, entries.values, entries.weights
        workers, blocks, k = indices.shape
        assert grid[0] * grid[1] == blocks and values.shape == (workers, blocks * k) and values.strides[1] == 4
        assert indices.dtype == np.uint16 and values.dtype == np.float32 and indices[0].flags.c_contiguous
        assert weights is None or (weights.dtype == np.float32 and weights.shape == (workers,))
        self._library.thinwire_decode(
            *(indices.ctypes.data, indices.strides[0] // 2, values.ctypes.data, values.strides[0] // 4),
            *(None if weights is None else weights.ctypes.data, workers, k, entries.total),
            *(*out, *grid, *step, squares, torch.get_num_threads()),
        )

    # --- Messages ----------------------------------------------------------------------------------------------------------

    def read_sets(self, code: NDArray[np.uint8], out: Sets, *, row: int, low: int, limit: int) -> bool:
        """Read sorted sets [n, k] from an Elias-Fano code; False where it is none of numbers below `limit`.

        Args:
            code: n rows of bits, then packed low bits; its length was checked.
            out: [n, k], contiguous.
            row: bytes of a row.
            low: bits of a number that are packed; below 16.
            limit: at most 65536.
        """
        n, k = out.shape
        assert out.dtype == np.uint16 and out.flags.c_contiguous and code.flags.c_contiguous and limit <= _MOST_NUMBER
        return not self._library.thinwire_read_sets(code.ctypes.data, n, k, row, low, limit, out.ctypes.data)

    def write_sets(self, sets: Sets, code: NDArray[np.uint8], *, row: int, low: int) -> None:
        """Write the Elias-Fano code of sorted sets [n, k]; `code` holds zeros, and has the length of it."""
        n, k = sets.shape
        assert sets.dtype == np.uint16 and sets.flags.c_contiguous and code.flags.c_contiguous
        self._library.thinwire_write_sets(sets.ctypes.data, n, k, row, low, code.ctypes.data)

    def read_signs(self, scales: NDArray[np.uint8], signs: NDArray[np.uint8], first: int, k: int, out: Floats) -> None:
        """Values of blocks from `first` on, k to a block: their scale, negative where the value's bit is set.

        Args:
            scales: of all blocks, bfloat16.
            signs: one bit for each value of all blocks.
            first: the first block to read.
            k: values of a block.
            out: [blocks k], contiguous.
        """
        blocks, rest = divmod(len(out), k)
        assert not rest and out.dtype == np.float32 and out.flags.c_contiguous and 2 * (first + blocks) <= len(scales)
        assert scales.flags.c_contiguous and signs.flags.c_contiguous and (first + blocks) * k <= 8 * len(signs)
        self._library.thinwire_read_signs(scales.ctypes.data, signs.ctypes.data, first, blocks, k, out.ctypes.data)

    def write_signs(self, values: Floats, k: int, raw: NDArray[np.uint8]) -> bool:
        """Write blocks of k values each: all scales, the mean magnitude of a block, then one bit for each value.

        Args:
            values: [blocks k], contiguous; overwritten by what `read_signs` makes of it.
            k: values of a block.
            raw: zeros, of the length of it.

        Returns:
            False where the last bit of a mean could be another in another order of additions: no value was changed.
        """
        blocks, rest = divmod(len(values), k)
        assert not rest and len(raw) == 2 * blocks + -(-len(values) // 8)
        assert values.dtype == np.float32 and values.flags.c_contiguous and raw.flags.c_contiguous
        where = (values.ctypes.data, blocks, k, raw.ctypes.data, raw.ctypes.data + 2 * blocks)
        return not self._library.thinwire_write_signs(*where)

    # --- The trial ---------------------------------------------------------------------------------------------------------

    def _tried(self) -> str:
        """Transform known numbers there and back: a hash of the results, which is equal where the arithmetic is."""
        L, k = BLOCK * BLOCK, (8, 224, 1024)  # of few entries and of many: three ways to the inverse
        numbers = (np.arange(2 * L, dtype=np.int64) * 7919 % 10007 - 5003).astype(np.float32)
        x, out, back = torch.from_numpy(numbers).view(2 * BLOCK, BLOCK), torch.empty(2 * BLOCK, BLOCK), []
        self.accumulate(out, x, decay=0.0, scale=0.5)
        P, blocks = self._basis, numbers.reshape(2, BLOCK, BLOCK).astype(np.float64)
        wrong = not np.allclose(out.numpy().reshape(2, BLOCK, BLOCK), 0.5 * P @ blocks @ P.T, rtol=0, atol=0.1)
        for many in k:
            indices, values = np.empty((2, many), np.uint16), np.empty((2, many), np.float32)
            self.select(out, x, indices, values, decay=0.5, scale=0.25)
            sent = np.zeros((2, L))
            np.put_along_axis(sent, indices.astype(np.int64), values.astype(np.float64), axis=1)
            mean = torch.empty(2 * BLOCK, BLOCK)
            entries = Entries(indices[None], values.reshape(1, -1), None, 1.0)
            self.mean(entries, mean)
            self.step(entries, stepped := torch.ones(2 * BLOCK - 9, BLOCK - 3), rate=0.3, sign=False)
            due = P.T @ sent.reshape(2, BLOCK, BLOCK) @ P
            wrong |= not np.allclose(mean.numpy().reshape(2, BLOCK, BLOCK), due, rtol=0, atol=0.1)
            back += [indices.tobytes(), mean.numpy().tobytes(), stepped.numpy().tobytes()]
        if wrong:
            raise OSError("the library computes something else than it should: look at the compiler")
        return f"c-{hashlib.sha256(b''.join([out.numpy().tobytes(), *back])).hexdigest()[:16]}"


def _rows(matrix: Tensor, shape: torch.Size) -> tuple[int, int]:
    """Where a matrix of this shape begins, and how far its rows are apart."""
    assert matrix.dtype == torch.float32 and matrix.device.type == "cpu" and matrix.stride(1) == 1 and matrix.shape == shape
    return matrix.data_ptr(), matrix.stride(0)


def _grid_of(matrix: Tensor) -> tuple[int, int]:
    (Y, y), (X, x) = (divmod(n, BLOCK) for n in matrix.shape)
    assert not y and not x
    return Y, X


def _blocks(matrix: Tensor) -> int:
    return matrix.numel() // (BLOCK * BLOCK)


def _entries(indices: Sets, values: Floats, blocks: int) -> int:
    """K of indices and values of so many blocks."""
    assert (
        indices.dtype == np.uint16
        and values.dtype == np.float32
        and indices.shape == values.shape == (blocks, indices.shape[1])
    )
    assert indices.flags.c_contiguous and values.flags.c_contiguous and 0 < indices.shape[1] <= BLOCK * BLOCK
    return indices.shape[1]
