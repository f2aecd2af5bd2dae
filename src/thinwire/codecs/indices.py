"""Which entries of a block were kept: codes for sorted sets of k out of L numbers, of a length that is known beforehand.

Every set of k out of L may be meant, so no code can be shorter than log2 C(L, k) bits in the worst case. For each (L, k) the
shortest of these is taken:

* `Packed`: each index by itself in ceil(log2 L) bits;
* `Bitmap`: one bit per entry, for blocks of which about half is kept;
* `EliasFano`: the low bits of each index as they are, the high parts as gaps in a row of bits; 6 to 12% above the bound.

All of them have a length that does not depend on the set: an exchange needs no lengths, and the size of a message can be told
from the shapes alone. (Rice codes come as close to the bound, but differ in length from message to message.)
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.bits import Bytes, cut, joined, pack, packed_nbytes, packed_segments, padding_is_zero, unpack_all
from thinwire.codecs.registry import INDEX_CODES
from thinwire.errors import WireError
from thinwire.kernels import Kernels, library

Indices = NDArray[np.int64]

_AT_ONCE = 1 << 12  # sets that are decoded in one go


@dataclass(frozen=True)
class IndexCode(ABC):
    """A code for n sorted sets of k out of L.

    Attributes:
        L: entries of a block.
        k: entries kept, 1 <= k <= L.
    """

    L: int
    k: int

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits per set."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Length of the code of n sets."""

    @abstractmethod
    def encode(self, indices: NDArray[np.integer]) -> Bytes:
        """The code of `indices` [n, k], each row strictly increasing in [0, L)."""

    def encode_into(self, indices: NDArray[np.integer], out: Bytes) -> None:
        """The same into zeros of its length."""
        out[:] = self.encode(indices)

    @classmethod
    def candidates(cls, L: int, k: int) -> Iterable[Self]:
        """The codes of this kind that may be the shortest."""
        return [cls(L, k)]

    @abstractmethod
    def _read_all(self, codes: Sequence[Bytes], n: int, start: int, stop: int) -> Indices:
        """Sets `start` to `stop` of several codes, [codes (stop - start), k], not checked for order and range."""

    @abstractmethod
    def _padding(self, code: Bytes, n: int) -> bool:
        """Whether all padding bits are zero."""

    def decode(self, code: Bytes, n: int, start: int = 0, stop: int | None = None) -> Indices:
        """Sets `start` to `stop` of n, [stop - start, k] with strictly increasing rows.

        Raises:
            WireError: an index out of range, two equal ones, or padding that is not zero.
        """
        return self.decode_all([code], n, start, stop)[0]

    def read_into(self, code: Bytes, out: NDArray[np.integer]) -> bool:  # noqa: ARG002
        """Read all sets into `out` [n, k] by a C kernel; False where there is none, or the code is not sound.

        `decode` then reads them, or says what is wrong.
        """
        return False

    def decode_all(self, codes: Sequence[Bytes], n: int, start: int = 0, stop: int | None = None) -> Indices:
        """`decode` of several codes at once, [codes, stop - start, k]: for short ones much faster than one by one.

        Raises:
            WireError: see `decode`; it does not say which of the codes is meant.
        """
        stop = n if stop is None else stop
        if stop == n and not all(self._padding(code, n) for code in codes):
            raise WireError("the padding of an index section is not zero")
        indices = self._read_all(codes, n, start, stop)
        if indices.size:
            if int(indices[:, -1].max()) >= self.L:
                raise WireError(f"index out of range: {int(indices.max())} in a block of {self.L}")
            if self.k > 1 and not (indices[:, 1:] > indices[:, :-1]).all():
                raise WireError("duplicate index, or indices out of order, in a block")
        return indices.reshape(len(codes), stop - start, self.k)

    def segments(self, n: int) -> tuple[int, ...] | None:  # noqa: ARG002
        """Lengths of the parts of a code of n sets, where several codes that are written as one can be cut: see `bits.cut`."""
        return None

    def encode_all(self, indices: NDArray[np.integer]) -> Bytes:
        """The codes of several times n sets [rows, n, k], [rows, nbytes(n)]: the bytes of `encode` of each, in one go."""
        rows, n, k = indices.shape
        if (lengths := self.segments(n)) is None:
            return np.stack([self.encode(one) for one in indices])
        return cut(self.encode(indices.reshape(rows * n, k)), lengths, rows)

    def read_all(self, codes: Bytes, out: NDArray[np.integer]) -> None:
        """Read several codes [rows, nbytes(n)] into `out` [rows, n, k], in one go where that is possible.

        Raises:
            WireError: see `decode`; it does not say which of the codes is meant.
        """
        rows, n, k = out.shape
        lengths, together = self.segments(n), max(1, _AT_ONCE // n)
        step = 1 if lengths is None else together
        for first in range(0, rows, step):
            code = codes[first] if lengths is None else joined(codes[first : first + step], lengths)
            here = out[first : first + step].reshape(-1, k)  # a view: `out` is contiguous
            if not self.read_into(code, here):
                for a in range(0, len(here), _AT_ONCE):
                    b = min(a + _AT_ONCE, len(here))
                    here[a:b] = self.decode(code, len(here), a, b)

    @property
    def bound(self) -> float:
        """log2 C(L, k), the fewest bits that tell all sets apart."""
        return math.log2(math.comb(self.L, self.k))


@dataclass(frozen=True)
class Packed(IndexCode):
    """Each index in ceil(log2 L) bits: 12 for blocks of 64 x 64."""

    @property
    def width(self) -> int:
        """Bits per index."""
        return max(1, (self.L - 1).bit_length())

    @property
    def bits(self) -> int:
        """K times the width."""
        return self.k * self.width

    def nbytes(self, n: int) -> int:
        """As packed."""
        return packed_nbytes(n * self.k, self.width)

    def encode(self, indices: NDArray[np.integer]) -> Bytes:
        """One after the other."""
        return pack(np.ascontiguousarray(indices).reshape(-1), self.width)

    def _read_all(self, codes: Sequence[Bytes], n: int, start: int, stop: int) -> Indices:
        numbers = unpack_all(codes, n * self.k, self.width, start * self.k, stop * self.k)
        return numbers.astype(np.int64, copy=False).reshape(-1, self.k)

    def segments(self, n: int) -> tuple[int, ...] | None:
        """See `IndexCode`."""
        return packed_segments(n * self.k, self.width)

    def _padding(self, code: Bytes, n: int) -> bool:
        return padding_is_zero(code, n * self.k, self.width)


@dataclass(frozen=True)
class Bitmap(IndexCode):
    """One bit per entry, rows padded to whole bytes; the first entry is the least significant bit."""

    @property
    def bits(self) -> int:
        """Whole bytes per block."""
        return 8 * -(-self.L // 8)

    def nbytes(self, n: int) -> int:
        """Rows of whole bytes."""
        return n * self.bits // 8

    def encode(self, indices: NDArray[np.integer]) -> Bytes:
        """Set the bits."""
        kept = np.zeros((len(indices), self.L), bool)
        np.put_along_axis(kept, indices.astype(np.int64), True, axis=1)
        return np.packbits(kept, axis=1, bitorder="little").reshape(-1)

    def _read_all(self, codes: Sequence[Bytes], n: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        width = self.bits // 8
        rows = np.concatenate([code[width * start : width * stop] for code in codes])
        found = np.flatnonzero(np.unpackbits(rows, bitorder="little").view(bool))
        first = np.arange(0, 8 * len(rows), self.bits)  # the first bit of each row
        if len(found) != len(first) * self.k:
            raise WireError(f"a bitmap does not mark {self.k} entries of a block")
        found = found.reshape(-1, self.k)
        found -= first[:, None]
        if len(found) and (int(found[:, 0].min()) < 0 or int(found[:, -1].max()) >= self.bits):  # a bit of a neighbour
            raise WireError(f"a bitmap does not mark {self.k} entries of a block")
        return found

    def segments(self, n: int) -> tuple[int, ...] | None:
        """See `IndexCode`."""
        return (self.nbytes(n),)

    def _padding(self, code: Bytes, n: int) -> bool:
        spare = self.bits - self.L
        return not spare or not (code.reshape(n, self.bits // 8)[:, -1] >> np.uint8(8 - spare)).any()


@dataclass(frozen=True)
class EliasFano(IndexCode):
    """Low bits packed; of the high parts b_j = index_j >> low, bits b_j + j (j = 0..k-1) are set in a row of B + k - 1 bits.

    B = ceil(L / 2**low). Rows are padded to whole bytes.

    Attributes:
        low: low bits that are sent as they are.
    """

    low: int = 0

    @classmethod
    def candidates(cls, L: int, k: int) -> Iterable[Self]:
        """One for every number of low bits."""
        return [cls(L, k, low) for low in range((L - 1).bit_length())]

    @property
    def _row(self) -> Bitmap:
        return Bitmap(-(-self.L // (1 << self.low)) + self.k - 1, self.k)

    @property
    def bits(self) -> int:
        """Low bits and the row."""
        return self.k * self.low + self._row.bits

    def nbytes(self, n: int) -> int:
        """All rows, then the packed low bits."""
        return self._row.nbytes(n) + packed_nbytes(n * self.k, self.low)

    def encode(self, indices: NDArray[np.integer]) -> Bytes:
        """All rows, then all low bits."""
        if self._kernels(indices) is not None:
            self.encode_into(indices, code := np.zeros(self.nbytes(len(indices)), np.uint8))
            return code
        rows = self._row.encode((indices >> self.low) + np.arange(self.k))
        return np.concatenate([rows, pack((indices & ((1 << self.low) - 1)).astype(np.uint32).reshape(-1), self.low)])

    def encode_into(self, indices: NDArray[np.integer], out: Bytes) -> None:
        """See `IndexCode`."""
        if (fast := self._kernels(indices)) is None:
            super().encode_into(indices, out)
        else:
            fast.write_sets(np.ascontiguousarray(indices, np.uint16), out, row=self._row.bits // 8, low=self.low)

    def read_into(self, code: Bytes, out: NDArray[np.integer]) -> bool:
        """See `IndexCode`."""
        fast = self._kernels(out)
        if fast is None or not out.flags.c_contiguous or not self._padding(code, len(out)):
            return False
        return fast.read_sets(code, out, row=self._row.bits // 8, low=self.low, limit=self.L)

    @staticmethod
    def _kernels(indices: NDArray[np.integer]) -> Kernels | None:
        """The C kernels, which know indices of two bytes."""
        return library() if indices.dtype == np.uint16 else None

    def _read_all(self, codes: Sequence[Bytes], n: int, start: int, stop: int) -> Indices:
        middle = self._row.nbytes(n)
        indices = self._row._read_all([code[:middle] for code in codes], n, start, stop)
        indices -= np.arange(self.k)
        if self.low:
            indices <<= self.low
            low = unpack_all([code[middle:] for code in codes], n * self.k, self.low, start * self.k, stop * self.k)
            indices |= low.reshape(-1, self.k)
        return indices

    def segments(self, n: int) -> tuple[int, ...] | None:
        """See `IndexCode`."""
        low = packed_segments(n * self.k, self.low)
        return None if low is None else (self._row.nbytes(n), *low)

    def _padding(self, code: Bytes, n: int) -> bool:
        middle = self._row.nbytes(n)
        return self._row._padding(code[:middle], n) and padding_is_zero(code[middle:], n * self.k, self.low)


INDEX_CODES.add(0, Packed)
INDEX_CODES.add(1, Bitmap)
INDEX_CODES.add(2, EliasFano)


@functools.lru_cache(maxsize=256)
def index_code(L: int, k: int, n: int = 8) -> IndexCode:
    """The shortest code for n sets of k out of L; of equals the first, in the order of their numbers."""
    kinds = [kind for _, kind in INDEX_CODES.items() if isinstance(kind, type) and issubclass(kind, IndexCode)]
    return min((code for kind in kinds for code in kind.candidates(L, k)), key=lambda code: code.nbytes(n))
