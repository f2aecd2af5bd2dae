"""Which entries of a block were kept: codes for sorted sets of k out of L numbers, of a length that is known beforehand.

Every set of k out of L may be meant, so no code can be shorter than log2 C(L, k) bits in the worst case. For each (L, k) the
shortest of these is taken:

* `Packed`: each index by itself in ceil(log2 L) bits;
* `Bitmap`: one bit per entry, for blocks of which about half is kept;
* `EliasFano`: the low bits of each index as they are, the high parts as gaps in a row of bits; 6 to 12% above the bound;
* `Ranked`: the same low bits; the high parts, a multiset, as one whole number: its rank among all such multisets (the
  combinatorial number system). 2 to 3% above the bound.

All of them have a length that does not depend on the set: an exchange needs no lengths, and the size of a message can be told
from the shapes alone. (Rice codes come as close to the bound, but differ in length from message to message.)
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.bits import Bytes, pack, packed_nbytes, padding_is_zero, unpack
from thinwire.errors import WireError

Indices = NDArray[np.int64]

_LIMB = 52  # bits per limb of a rank: sums of thousands of limbs stay below 2**63, and a limb is exact as a float64
_LARGEST_TABLE = 1 << 20  # entries of a table of binomials, 8 bytes each
_SLACK = 1.03  # a rank whose code is this close to the bound is short enough: more low bits mean smaller numbers to work with


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

    @abstractmethod
    def _read(self, code: Bytes, n: int, start: int, stop: int) -> Indices:
        """Sets `start` to `stop`, not checked for order and range."""

    @abstractmethod
    def _padding(self, code: Bytes, n: int) -> bool:
        """Whether all padding bits are zero."""

    def _read_all(self, codes: Sequence[Bytes], n: int, start: int, stop: int) -> Indices:
        """`_read` of several codes, one after the other."""
        return np.concatenate([self._read(code, n, start, stop) for code in codes])

    def decode(self, code: Bytes, n: int, start: int = 0, stop: int | None = None) -> Indices:
        """Sets `start` to `stop` of n, [stop - start, k] with strictly increasing rows.

        Raises:
            WireError: an index out of range, two equal ones, or padding that is not zero.
        """
        return self.decode_all([code], n, start, stop)[0]

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

    def _read(self, code: Bytes, n: int, start: int, stop: int) -> Indices:
        numbers = unpack(code, n * self.k, self.width, start * self.k, stop * self.k)
        return numbers.astype(np.int64, copy=False).reshape(-1, self.k)

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

    def _read(self, code: Bytes, n: int, start: int, stop: int) -> Indices:
        rows = code.reshape(n, self.bits // 8)[start:stop]
        kept = np.unpackbits(rows, axis=1, bitorder="little", count=self.L)
        if not (kept.sum(axis=1, dtype=np.int64) == self.k).all():
            raise WireError(f"a bitmap does not mark {self.k} entries of a block")
        return np.nonzero(kept)[1].reshape(-1, self.k)

    def _padding(self, code: Bytes, n: int) -> bool:
        spare = self.bits - self.L
        return not spare or not (code.reshape(n, self.bits // 8)[:, -1] >> np.uint8(8 - spare)).any()


@dataclass(frozen=True)
class EliasFano(IndexCode):
    """Low bits packed; of the high parts b_j = index_j >> low, bits b_j + j (j = 0..k-1) are set in a row of B + k - 1 bits.

    B = ceil(L / 2**low). Rows are padded to whole bytes. For sets whose ranks would be too large to compute with.

    Attributes:
        low: low bits that are sent as they are.
    """

    low: int = 0

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
        rows = self._row.encode((indices >> self.low) + np.arange(self.k))
        return np.concatenate([rows, pack((indices & ((1 << self.low) - 1)).astype(np.uint32).reshape(-1), self.low)])

    def _read(self, code: Bytes, n: int, start: int, stop: int) -> Indices:
        high = self._row._read(code[: self._row.nbytes(n)], n, start, stop) - np.arange(self.k)
        low = unpack(code[self._row.nbytes(n) :], n * self.k, self.low, start * self.k, stop * self.k)
        return high << self.low | low.astype(np.int64).reshape(-1, self.k)

    def _padding(self, code: Bytes, n: int) -> bool:
        middle = self._row.nbytes(n)
        return self._row._padding(code[:middle], n) and padding_is_zero(code[middle:], n * self.k, self.low)


@dataclass(frozen=True)
class Ranked(IndexCode):
    """Low bits packed, high parts as one whole number per block.

    With b_j = index_j >> low and B = ceil(L / 2**low), the sums s_j = b_j + j (j = 0..k-1) strictly increase below B + k - 1,
    and the number is sum_j C(s_j, j + 1), below C(B + k - 1, k). Without low bits the indices themselves strictly increase:
    then s_j = index_j, which is the same with b_j = index_j - j and B = L - k + 1.

    Attributes:
        low: low bits that are sent as they are.
    """

    low: int = 0

    @property
    def buckets(self) -> int:
        """B, the number of values of the high part."""
        return -(-self.L // (1 << self.low)) if self.low else self.L - self.k + 1

    @property
    def affordable(self) -> bool:
        """Whether its table of binomials is of a reasonable size."""
        entries = self.k * (self.buckets + 1)
        return entries <= _LARGEST_TABLE and entries * len(self._widths) <= _LARGEST_TABLE

    @functools.cached_property
    def rank_bits(self) -> int:
        """Bits of the largest rank."""
        return max(1, (math.comb(self.buckets + self.k - 1, self.k) - 1).bit_length())

    @property
    def bits(self) -> int:
        """Low bits and rank."""
        return self.k * self.low + self.rank_bits

    @property
    def _widths(self) -> list[int]:
        """Bits of each limb, the least significant first."""
        return [min(_LIMB, self.rank_bits - at) for at in range(0, self.rank_bits, _LIMB)]

    def nbytes(self, n: int) -> int:
        """The packed limbs, then the packed low bits."""
        return sum(packed_nbytes(n, width) for width in self._widths) + packed_nbytes(n * self.k, self.low)

    def encode(self, indices: NDArray[np.integer]) -> Bytes:
        """The limbs of all ranks, the least significant limb first, then all low bits."""
        n = len(indices)
        table = _binomials(self.buckets, self.k)
        step = max(1, (1 << 19) // self.k)  # bounded workspace
        limbs = np.zeros((len(self._widths), n), np.int64)
        for at in range(0, n, step):
            part = indices[at : at + step]
            high = part >> self.low if self.low else part - np.arange(self.k)
            for j, b in enumerate(np.ascontiguousarray(high.T, np.int64)):
                b += table.offsets[j]
                for limb, row in zip(table.limbs[: table.limbs_of(j)], limbs, strict=False):
                    row[at : at + step] += limb.take(b)
        for lower, upper in itertools.pairwise(limbs):
            upper += lower >> _LIMB
            lower &= (1 << _LIMB) - 1
        parts = [pack(limb, width) for limb, width in zip(limbs, self._widths, strict=True)]
        if self.low:
            parts.append(pack((indices & ((1 << self.low) - 1)).astype(np.uint32).reshape(-1), self.low))
        return np.concatenate(parts)

    def _sections(self, code: Bytes, n: int) -> list[Bytes]:
        sizes = [packed_nbytes(n, width) for width in self._widths]
        return np.split(code, np.cumsum(sizes))

    def _read(self, code: Bytes, n: int, start: int, stop: int) -> Indices:
        return self._read_all([code], n, start, stop)

    def _read_all(self, codes: Sequence[Bytes], n: int, start: int, stop: int) -> Indices:
        parts = zip(*(self._sections(code, n) for code in codes), strict=True)
        *limbs, low = (list(of_all) for of_all in parts)
        rest = [
            np.concatenate([unpack(limb, n, width, start, stop).astype(np.int64, copy=False) for limb in of_all])
            for of_all, width in zip(limbs, self._widths, strict=True)
        ]
        high = self._unrank(rest)
        if not self.low:
            return high + np.arange(self.k)
        lows = [unpack(part, n * self.k, self.low, start * self.k, stop * self.k) for part in low]
        return high << self.low | np.concatenate(lows).reshape(-1, self.k)

    def _unrank(self, rest: list[Indices]) -> Indices:
        """The sets b of given ranks, the largest element first: s_j is the largest s with C(s, j + 1) <= what is left."""
        table, k = _binomials(self.buckets, self.k), self.k
        most = self.buckets + k - 2  # the largest s there is
        high = np.empty((k, len(rest[0])), np.int64)
        for j in range(k - 1, -1, -1):
            rest = rest[: table.limbs_of(j)]  # what is left is below C(B + j, j + 1): the limbs above are zero
            about = rest[0].astype(np.float64)
            for i, limb in enumerate(rest[1:], start=1):
                about += limb * 2.0 ** (_LIMB * i)
            about *= 1 + 2.0**-48  # rounding may put the guess one too high, never too low; the exact limbs then tell
            s = table.guess(j, about)
            left = self._minus(rest, s + table.row(j), table.limbs)
            while (over := left[-1] < 0).any():
                s -= over
                left = self._minus(rest, s + table.row(j), table.limbs)
            if j == k - 1 and len(s) and int(s.max()) > most:
                raise WireError(f"index out of range: a rank is beyond the last of {self.k} out of {self.L}")
            rest = left
            high[j] = s - j
        return np.ascontiguousarray(high.T)

    @staticmethod
    def _minus(rest: list[Indices], place: Indices, limbs: list[Indices]) -> list[Indices]:
        """Rest minus a binomial, limb by limb; the last limb is negative where the result is."""
        out = [r - limb.take(place) for r, limb in zip(rest, limbs, strict=False)]
        for lower, upper in itertools.pairwise(out):
            upper += lower >> _LIMB  # an arithmetic shift: -1 where it has to borrow
            lower &= (1 << _LIMB) - 1
        return out

    def _padding(self, code: Bytes, n: int) -> bool:
        *limbs, low = self._sections(code, n)
        whole = all(padding_is_zero(limb, n, width) for limb, width in zip(limbs, self._widths, strict=True))
        return whole and padding_is_zero(low, n * self.k, self.low)


class _Binomials:
    """C(s, j + 1) for j = 0..k-1 and s = j..j+B (one more than is used), in limbs and as floats.

    Row j holds the values from s = j on, since s_j - j is in 0..B-1.

    Attributes:
        limbs: the least significant limb of all values, then the next ...; each [k (B + 1)].
        offsets: [k], where in the limbs b_j = 0 is found.
    """

    _LARGEST = 1 << 20  # entries of the table of first guesses; beyond, a binary search

    def __init__(self, B: int, k: int):
        values = [list(range(B + 1))]
        for _ in range(1, k):  # C(s + 1, j + 1) = C(s, j + 1) + C(s, j)
            values.append([0, *itertools.accumulate(values[-1][1:])])
        bits = max(1, (math.comb(B + k - 1, k) - 1).bit_length())
        count, mask, flat = -(-bits // _LIMB), (1 << _LIMB) - 1, [v for row in values for v in row]
        self.B = B
        self._limbs_of = [max(1, -(-math.comb(B + j, j + 1).bit_length() // _LIMB)) for j in range(k)]
        self.offsets = np.arange(k, dtype=np.int64) * (B + 1)
        self.limbs = [
            np.array([(v >> (_LIMB * i)) & mask if i < count - 1 else v >> (_LIMB * i) for v in flat], np.int64)
            for i in range(count)
        ]
        # Below s = j there is nothing (C = 0 there, and the largest s with C = 0 is meant): -1 keeps a search away from it.
        self._floats = [np.array([-1.0] * j + [float(v) for v in row]) for j, row in enumerate(values)]
        # First guesses: numbers that agree in their exponent and first `_shown` bits have at most two s between them.
        self._shown = (B + k).bit_length()
        cells = (bits + 3) << self._shown
        self._cell_ends = None
        if cells * k <= self._LARGEST:
            ends = (np.arange(1, cells + 1, dtype=np.int64) + (1022 << self._shown)) << (52 - self._shown)
            guesses = (row.searchsorted(ends.view(np.float64), side="right") - 1 for row in self._floats)
            self._cell_ends = [row.astype(np.int32) for row in guesses]

    def limbs_of(self, j: int) -> int:
        """How many limbs C(B + j, j + 1) has, and with it all of row j."""
        return min(len(self.limbs), self._limbs_of[j])

    def row(self, j: int) -> int:
        """What to add to s for its place in the limbs."""
        return int(self.offsets[j]) - j

    def guess(self, j: int, number: NDArray[np.float64]) -> Indices:
        """The largest s with C(s, j + 1) <= number, as far as floats can tell."""
        if self._cell_ends is None:
            return self._floats[j].searchsorted(number, side="right") - 1
        cell = (np.maximum(number, 0.5).view(np.int64) >> (52 - self._shown)) - (1022 << self._shown)
        s = self._cell_ends[j].take(cell, mode="clip").astype(np.int64)
        s -= self._floats[j].take(s) > number
        return s


@functools.lru_cache(maxsize=64)
def _binomials(B: int, k: int) -> _Binomials:
    return _Binomials(B, k)


@functools.lru_cache(maxsize=256)
def index_code(L: int, k: int, n: int = 8) -> IndexCode:
    """The shortest code for n sets of k out of L among those with tables of bounded size.

    Of the ranks, the one with the most low bits (and so the smallest numbers) within 3% of the bound, or else the shortest.
    """
    lows = range((L - 1).bit_length())
    ranks = [r for r in (Ranked(L, k, low) for low in lows) if r.affordable]
    near = [r for r in ranks if r.bits <= _SLACK * Ranked(L, k).bound] or sorted(ranks, key=lambda r: -r.bits)
    codes: list[IndexCode] = [Packed(L, k), Bitmap(L, k), *(EliasFano(L, k, low) for low in lows), *near[-1:]]
    return min(codes, key=lambda c: c.nbytes(n) * (1.01 if isinstance(c, Ranked) else 1))  # a rank must be worth its arithmetic
