"""Packed numbers: nothing lost at any width, any range by itself, and the bytes that the docstring promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from thinwire.codecs.bits import pack, packed_nbytes, padding_is_zero, unpack

calm = settings(deadline=None, database=None, derandomize=True)
widths = pytest.mark.parametrize("width", range(1, 64))


def some_numbers(count: int, width: int, seed: int = 0) -> NDArray[np.int64]:
    """Random numbers of a width, the smallest and the largest among them."""
    numbers = np.random.default_rng(seed).integers(0, 2**width, count, np.int64)
    numbers[: count // 3 : 2], numbers[-1:] = 2**width - 1, 2**width - 1
    numbers[1:2] = 0
    return numbers


def slow_pack(numbers: list[int], width: int) -> bytes:
    """The docstring read aloud: low bytes first, then the bits above them, eight numbers at a time."""
    q, r = divmod(width, 8)
    out = b"".join((n & (256**q - 1)).to_bytes(q, "little") for n in numbers)
    for at in range(0, len(numbers), 8) if r else ():
        out += sum((n >> (8 * q)) << (i * r) for i, n in enumerate(numbers[at : at + 8])).to_bytes(r, "little")
    return out


# --- The format ------------------------------------------------------------------------------------------------------------


def test_single_bits_fill_a_byte_from_its_least_significant_end() -> None:
    assert pack(np.array([1, 0, 0, 0, 0, 0, 0, 0, 0, 1]), 1).tolist() == [0b00000001, 0b00000010]
    assert pack(np.array([1, 1, 0, 1]), 1).tolist() == [0b1011]


def test_three_bits_straddle_bytes() -> None:
    # 1 + 2 << 3 + 3 << 6 + 4 << 9 + 5 << 12 + 6 << 15 + 7 << 18 + 0 << 21 = 0x1F58D1
    assert pack(np.array([1, 2, 3, 4, 5, 6, 7, 0]), 3).tolist() == [0xD1, 0x58, 0x1F]


def test_twelve_bits_are_a_byte_and_then_half_a_byte() -> None:
    # low bytes AB, 56, FF; then the high halves A | 4 << 4, F, in four bytes for up to eight numbers
    assert pack(np.array([0xAAB, 0x456, 0xFFF]), 12).tolist() == [0xAB, 0x56, 0xFF, 0x4A, 0x0F, 0, 0]


def test_whole_bytes_are_the_numbers_themselves() -> None:
    assert pack(np.array([0x0102, 0xFFEE]), 16).tolist() == [0x02, 0x01, 0xEE, 0xFF]
    assert pack(np.array([3, 200, 7]), 8).tolist() == [3, 200, 7]


@widths
def test_the_bytes_are_those_of_a_slow_packer(width: int) -> None:
    for count in (1, 3, 7, 8, 9, 16, 41):
        numbers = some_numbers(count, width)
        assert pack(numbers, width).tobytes() == slow_pack(numbers.tolist(), width)


# --- Round trips -----------------------------------------------------------------------------------------------------------


@widths
def test_a_round_trip_loses_nothing_and_the_size_was_known(width: int) -> None:
    for count in (0, 1, 2, 5, 7, 8, 9, 15, 17, 1001):
        numbers = some_numbers(count, width, seed=count)
        packed = pack(numbers, width)
        assert packed.dtype == np.uint8
        assert len(packed) == packed_nbytes(count, width)
        back = unpack(packed, count, width)
        assert np.array_equal(back, numbers)
        assert padding_is_zero(packed, count, width)


@widths
def test_a_size_is_the_bits_up_to_whole_eights(width: int) -> None:
    assert packed_nbytes(0, width) == 0
    for count in (8, 80, 8000):
        assert packed_nbytes(count, width) == count * width // 8, "no bit is wasted on whole eights"
    for count in (1, 7, 9, 1003):
        whole, spare = count * width / 8, 7 * (width % 8) / 8
        assert whole <= packed_nbytes(count, width) <= whole + spare


@widths
def test_any_range_reads_as_from_the_whole(width: int) -> None:
    count = 27
    numbers = some_numbers(count, width)
    packed = pack(numbers, width)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            assert np.array_equal(unpack(packed, count, width, start, stop), numbers[start:stop])
        assert np.array_equal(unpack(packed, count, width, start), numbers[start:])


@given(st.data(), st.integers(1, 63))
@calm
def test_any_numbers_survive(data: st.DataObject, width: int) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, 2**width - 1), max_size=70)), np.int64)
    packed = pack(numbers, width)
    assert packed.tobytes() == slow_pack(numbers.tolist(), width)
    start = data.draw(st.integers(0, len(numbers)))
    stop = data.draw(st.integers(start, len(numbers)))
    assert np.array_equal(unpack(packed, len(numbers), width, start, stop), numbers[start:stop])


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_the_dtype_of_the_numbers_does_not_matter(dtype: type[np.integer]) -> None:
    numbers = np.array([0, 1, 2, 77, 101, 127, 126, 3, 9, 64, 5])
    for width in (7, 8):
        assert np.array_equal(pack(numbers.astype(dtype), width), pack(numbers, width))


def test_strided_numbers_are_read_where_they_are() -> None:
    numbers = some_numbers(60, 21)
    assert np.array_equal(pack(numbers[::3], 21), pack(numbers[::3].copy(), 21))
    assert np.array_equal(pack(numbers[::-1], 12 + 9), pack(numbers[::-1].copy(), 21))


def test_a_range_is_read_without_the_rest() -> None:
    """Whatever stands elsewhere, the numbers asked for are the same."""
    numbers, width = some_numbers(64, 13), 13
    packed = pack(numbers, width)
    other = pack(some_numbers(64, width, seed=5), width)
    mixed = other.copy()
    mixed[16:32], mixed[64 + 2 * 5 : 64 + 4 * 5] = packed[16:32], packed[64 + 2 * 5 : 64 + 4 * 5]  # numbers 16 to 31
    assert np.array_equal(unpack(mixed, 64, width, 16, 32), numbers[16:32])


# --- Padding ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 13])
@pytest.mark.parametrize("width", [1, 3, 7, 8, 12, 31, 60, 63])
def test_every_padding_bit_is_looked_at_and_no_other(count: int, width: int) -> None:
    """Of all bits of a message, those whose change no reader sees are padding."""
    packed = pack(some_numbers(count, width), width)
    before, spare = unpack(packed, count, width), 0
    for bit in range(8 * len(packed)):
        flipped = packed.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen = not np.array_equal(unpack(flipped, count, width), before)
        assert padding_is_zero(flipped, count, width) == seen
        spare += not seen
    assert spare == 8 * packed_nbytes(count, width) - count * width
