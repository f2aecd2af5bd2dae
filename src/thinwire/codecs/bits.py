"""Whole numbers of any width in bits, packed and unpacked in bulk. The lowest level of the wire format.

N numbers of `width` = 8 q + r bits are written as two parts:

1. the q low bytes of each number, least significant first, N q bytes in all;
2. the r bits above them, eight numbers in r bytes: number i of the eight takes bits i r to i r + r - 1, bit 0 being the least
   significant bit of the first byte. Eight numbers that are not all there are filled up with zeros.

Both parts are byte-aligned for every eighth number, so any range can be read without the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def packed_nbytes(count: int, width: int) -> int:
    """Length of `count` packed numbers."""
    return count * (width // 8) + (-(-count // 8)) * (width % 8)


def pack(numbers: NDArray[np.integer], width: int) -> Bytes:
    """Pack whole numbers below 2**width.

    Args:
        numbers: [N], not negative; any integer dtype that holds them.
        width: bits of each, up to 63.

    Returns:
        uint8 [packed_nbytes(N, width)].
    """
    count, (q, r) = len(numbers), divmod(width, 8)
    if numbers.itemsize < q:
        numbers = numbers.astype(np.uint64)
    out = np.empty(packed_nbytes(count, width), np.uint8)
    if q:
        little = np.ascontiguousarray(numbers).view(np.uint8).reshape(count, numbers.itemsize)
        out[: count * q].reshape(count, q)[:] = little[:, :q]
    if r:
        rest = numbers >> (8 * q)
        eights = np.zeros((-(-count // 8), 8), np.uint8)
        eights.reshape(-1)[:count] = rest
        if 8 % r == 0:  # whole numbers of them in a byte
            several = eights.reshape(-1, 8 // r)
            packed = several[:, 0].copy()
            for i in range(1, 8 // r):
                packed |= several[:, i] << np.uint8(i * r)
            out[count * q :] = packed
            return out
        word = eights[:, 0].astype(np.uint64)
        for i in range(1, 8):
            word |= eights[:, i].astype(np.uint64) << np.uint64(i * r)
        out[count * q :].reshape(-1, r)[:] = word.view(np.uint8).reshape(-1, 8)[:, :r]
    return out


def packed_segments(count: int, width: int) -> tuple[int, ...] | None:
    """Lengths of the two parts of `count` packed numbers; None where the last eight are not all there.

    Rows of `count` numbers that are packed as one have the first parts of all rows, then the second ones: see `cut`.
    """
    q, r = divmod(width, 8)
    return None if r and count % 8 else (count * q, count // 8 * r)


def cut(together: Bytes, lengths: Sequence[int], rows: int) -> Bytes:
    """Rows that were written as one: of parts of these lengths, each part of all rows after the other.

    Returns:
        [rows, sum(lengths)].
    """
    ends = np.cumsum([0, *lengths]) * rows
    parts = [together[a:b].reshape(rows, -1) for a, b in itertools.pairwise(ends) if a < b]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty((rows, 0), np.uint8), *parts], axis=1)


def joined(rows: Bytes, lengths: Sequence[int]) -> Bytes:
    """What `cut` takes apart."""
    if len(rows) == 1:
        return rows[0]
    ends = np.cumsum([0, *lengths])
    return np.concatenate([np.empty(0, np.uint8), *(rows[:, a:b].reshape(-1) for a, b in itertools.pairwise(ends))])


def unpack(packed: Bytes, count: int, width: int, start: int = 0, stop: int | None = None) -> NDArray[np.integer]:
    """Numbers `start` to `stop` of `count` that were packed.

    Args:
        packed: uint8 [packed_nbytes(count, width)].
        count: how many numbers there are in all.
        width: bits of each.
        start: the first to read.
        stop: the first not to read; all by default.

    Returns:
        [stop - start], uint8 where the width allows and int64 elsewhere.
    """
    stop = count if stop is None else stop
    q, r = divmod(width, 8)
    if not q:
        return _unpack_rest(packed, r, start, stop)
    out = np.zeros(stop - start, np.int64)
    out.view(np.uint8).reshape(-1, 8)[:, :q] = packed[start * q : stop * q].reshape(-1, q)
    if r:
        out |= _unpack_rest(packed[count * q :], r, start, stop).astype(np.int64) << (8 * q)
    return out if width > 8 else out.astype(np.uint8)


def unpack_all(several: Sequence[Bytes], count: int, width: int, start: int, stop: int) -> NDArray[np.integer]:
    """`unpack` of several rows of `count` numbers each, [rows, stop - start]: for short ones much faster than one by one."""
    q, r = divmod(width, 8)
    first, last = start // 8, -(-stop // 8)
    if len(several) == 1 or q or not r:
        return np.stack([unpack(packed, count, width, start, stop) for packed in several])
    together = np.concatenate([packed[first * r : last * r] for packed in several])
    numbers = _unpack_rest(together, r, 0, 8 * (last - first) * len(several))
    return numbers.reshape(len(several), -1)[:, start - 8 * first : stop - 8 * first]


def _unpack_rest(packed: Bytes, r: int, start: int, stop: int) -> Bytes:
    """Numbers of r < 8 bits."""
    if not r:
        return np.zeros(stop - start, np.uint8)
    first, last = start // 8, -(-stop // 8)
    part = packed[first * r : last * r]
    if r == 1:
        eights = np.unpackbits(part, bitorder="little")
    elif 8 % r == 0:
        eights = np.empty((len(part), 8 // r), np.uint8)
        for i in range(8 // r):
            eights[:, i] = (part >> np.uint8(i * r)) & np.uint8((1 << r) - 1)
    else:
        word = np.zeros(last - first, np.uint64)
        word.view(np.uint8).reshape(-1, 8)[:, :r] = part.reshape(-1, r)
        eights = np.empty((last - first, 8), np.uint8)
        for i in range(8):
            eights[:, i] = (word >> np.uint64(i * r)) & np.uint64((1 << r) - 1)
    return eights.reshape(-1)[start - 8 * first : stop - 8 * first]


# --- Five numbers from 0 to 2 in a byte ------------------------------------------------------------------------------------

_THREES = np.array([1, 3, 9, 27, 81], np.uint8)
_DIGITS = np.array([[byte // three % 3 for three in (1, 3, 9, 27, 81)] for byte in range(256)], np.uint8)
MOST_THREES = 242  # the largest byte that five such numbers make


def pack_threes(numbers: NDArray[np.integer]) -> Bytes:
    """Pack numbers from 0 to 2: the first of five counts once, the next three times, then 9, 27 and 81 times."""
    fives = np.zeros((-(-len(numbers) // 5), 5), np.uint8)
    fives.reshape(-1)[: len(numbers)] = numbers
    return fives @ _THREES


def unpack_threes(packed: Bytes, start: int, stop: int) -> Bytes:
    """Numbers `start` to `stop`; of bytes up to 242."""
    first = start // 5
    return _DIGITS.take(packed[first : -(-stop // 5)], axis=0).reshape(-1)[start - 5 * first : stop - 5 * first]


def padding_is_zero(packed: Bytes, count: int, width: int) -> bool:
    """Whether the bits that fill up the last eight numbers are zero, as they must be."""
    r = width % 8
    if not r or not count % 8:
        return True
    tail = int.from_bytes(packed[-r:].tobytes(), "little")
    return tail >> (r * (count % 8)) == 0
