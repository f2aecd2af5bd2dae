"""Value formats: what a sender takes off is what receivers read, the error is bounded, and the size is known beforehand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.codecs.catalogue import VALUES
from tests.tiers import examples
from thinwire.codecs import Float, Fp4, Int8, Sign, Ternary, TwoBit
from thinwire.codecs.bits import packed_nbytes
from thinwire.codecs.stages import Row
from thinwire.codecs.values import Scaled, Values
from thinwire.errors import ConfigError, WireError

calm = settings(deadline=None, database=None, derandomize=True)
Floats = NDArray[np.float32]

SCALED: list[Scaled] = [f for f in VALUES if isinstance(f, Scaled)]
every_format = pytest.mark.parametrize("values", VALUES, ids=repr)
every_scaled = pytest.mark.parametrize("values", SCALED, ids=repr)
LEVELS = np.array([0.0, *(2.0**-i for i in range(7))])  # of fp4 E3M0, as parts of the largest


def row(count: int, k: int) -> Row:
    """Values of a single tensor."""
    return Row(k, (count,))


def normal(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def bf16(x: NDArray[Any] | float) -> NDArray[np.float64]:
    """Rounded to bfloat16: the upper half of a float32, to the nearest, ties to even."""
    bits = np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32).astype(np.uint64)
    rounded = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)) << np.uint64(16)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def groups_of(values: Scaled, k: int) -> int:
    return values.group or (256 if isinstance(values, Fp4 | Ternary) else k)


def each_group(values: Scaled, x: Floats, k: int) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Pairs of what went in and what is read, a group at a time."""
    raw, _ = values.write(x.copy(), row(len(x), k))
    back, g = values.read(raw, row(len(x), k), 0, len(x)), groups_of(values, k)
    return [(x[i : i + g].astype(np.float64), back[i : i + g].astype(np.float64)) for i in range(0, len(x), g)]


# --- What is taken off is what is read -------------------------------------------------------------------------------------


@every_format
def test_a_check_tells_the_largest_of_what_was_written(values: Values) -> None:
    raw, read = values.write(normal(2000), row(2000, 8))
    largest, told = np.abs(read).max(), values.check(raw, row(2000, 8))
    assert largest == told or (isinstance(values, Int8) and largest <= told < 1.01 * largest)
    assert values.check(values.write(normal(0), row(0, 8))[0], row(0, 8)) == 0


@every_format
@pytest.mark.parametrize(("count", "k"), [(1, 1), (1, 32), (6, 3), (32, 32), (96, 32), (257, 256), (1000, 8), (333, 7)])
def test_the_writer_knows_what_will_be_read_bit_for_bit(values: Values, count: int, k: int) -> None:
    x = normal(count)
    raw, read = values.write(x.copy(), row(len(x), k))
    assert raw.dtype == np.uint8
    assert len(raw) == values.nbytes_of(row(count, k))
    assert read.dtype == np.float32
    assert values.read(raw, row(count, k), 0, count).tobytes() == read.tobytes()


@every_format
def test_any_range_reads_as_from_the_whole(values: Values) -> None:
    count, k = 77, 8
    raw, read = values.write(normal(count), row(count, k))
    for start in range(count):
        for stop in (start + 1, start + 8, start + 13, count):
            if stop <= count:
                assert values.read(raw, row(count, k), start, stop).tobytes() == read[start:stop].tobytes()


@given(
    st.sampled_from(VALUES),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=60),
    st.integers(1, 12),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(calm, max_examples=examples(400))
def test_any_values_at_any_range(values: Values, x: list[float], k: int, at: tuple[float, float]) -> None:
    """Subnormal, tiny and huge values in one group, too."""
    if values == Float("fp16"):
        x = [v for v in x if abs(v) < 65000]
    raw, read = values.write(np.array(x, np.float32), row(len(np.array(x, np.float32)), k))
    assert len(raw) == values.nbytes_of(row(len(x), k))
    assert np.isfinite(read).all()
    start, stop = sorted(int(a * len(x)) for a in at)
    for a, b in ((start, stop), (0, len(x))):
        if a < b:
            assert values.read(raw, row(len(x), k), a, b).tobytes() == read[a:b].tobytes()


@every_format
def test_writing_does_not_change_its_input(values: Values) -> None:
    x = normal(40)
    values.write(x, row(len(x), 8))
    assert np.array_equal(x, normal(40))


@every_format
def test_reading_does_not_change_the_message_nor_point_into_it(values: Values) -> None:
    raw, _ = values.write(normal(40), row(40, 8))
    raw = raw.copy()
    before = raw.copy()
    values.read(raw, row(40, 8), 0, 40)[:] = 5
    assert np.array_equal(raw, before)


@every_format
def test_zeros_stay_zeros(values: Values) -> None:
    raw, read = values.write(np.zeros(50, np.float32), row(len(np.zeros(50, np.float32)), 8))
    assert not read.any()
    assert not values.read(raw, row(50, 8), 0, 50).any()


@every_scaled
def test_groups_do_not_know_each_other(values: Scaled) -> None:
    g, k = groups_of(values, 8), 8
    x = normal(3 * g)
    before = values.write(x.copy(), row(len(x), k))[1]
    x[g : 2 * g] *= 1e6
    after = values.write(x, row(len(x), k))[1]
    assert np.array_equal(after[:g], before[:g])
    assert np.array_equal(after[2 * g :], before[2 * g :])
    assert not np.array_equal(after[g : 2 * g], before[g : 2 * g])


@every_scaled
def test_the_values_missing_in_the_last_group_do_not_count(values: Scaled) -> None:
    """A last group of three is written as the same three would be by themselves."""
    g, k = groups_of(values, 8), 8
    x = normal(g + min(3, g))
    assert np.array_equal(
        values.write(x.copy(), row(len(x), k))[1][g:], values.write(x[g:].copy(), row(len(x[g:].copy()), k))[1]
    )


@every_scaled
def test_scaling_by_a_power_of_two_scales_what_is_read(values: Scaled) -> None:
    x = normal(100)
    for factor in (2.0**-100, 2.0**-20, 2.0**30, 2.0**100):
        assert np.array_equal(
            values.write(x * np.float32(factor), row(len(x), 8))[1],
            values.write(x.copy(), row(len(x), 8))[1] * np.float32(factor),
        )
    assert np.array_equal(values.write(-x, row(len(x), 8))[1], -values.write(x.copy(), row(len(x), 8))[1])


# --- Sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "count", "k", "nbytes"),
    [
        (Float("fp32"), 5, 1, 20),
        (Float("bf16"), 5, 1, 10),
        (Float("fp16"), 5, 1, 10),
        (Int8(), 64, 32, 64 + 2 * 2),
        (Int8(16), 64, 32, 64 + 4 * 2),
        (Fp4(), 256, 32, 128 + 2),
        (Fp4(), 257, 32, 128 + 4 + 2 * 2),  # half a byte each, eight at a time
        (Fp4(32), 257, 32, 128 + 4 + 9 * 2),
        (TwoBit(), 64, 32, 16 + 2 * 4),
        (Ternary(), 256, 32, 52 + 2),
        (Ternary(), 257, 32, 52 + 2 * 2),
        (Ternary(10), 20, 32, 4 + 2 * 2),
        (TwoBit(), 65, 32, 16 + 2 + 3 * 4),
        (Sign(), 64, 32, 8 + 2 * 2),
        (Sign(), 65, 32, 9 + 3 * 2),
        (Sign(), 0, 32, 0),
    ],
)
def test_sizes_by_hand(values: Values, count: int, k: int, nbytes: int) -> None:
    assert values.nbytes_of(row(count, k)) == nbytes == len(values.write(normal(count), row(count, k))[0])


@every_scaled
def test_scales_come_first_as_bfloat16_and_then_the_codes(values: Scaled) -> None:
    count, k = 50, 8
    raw, read = values.write(normal(count), row(count, k))
    n, g = -(-count // groups_of(values, k)), groups_of(values, k)
    head = 2 * values.scales * n
    codes = -(-count // 5) if isinstance(values, Ternary) else packed_nbytes(count, int(values.width))
    assert len(raw) == head + codes
    raw[:head].view(np.uint16)[: values.scales] += 0x80  # twice the scale: the next exponent of a bfloat16
    assert np.array_equal(values.read(raw, row(count, k), 0, count), np.where(np.arange(count) < g, 2 * read, read))


# --- Floats ----------------------------------------------------------------------------------------------------------------


def test_fp32_is_exact() -> None:
    x = np.r_[normal(100), np.float32(1e-45), np.finfo(np.float32).max, -np.finfo(np.float32).max]
    raw, read = Float().write(x.copy(), row(len(x), 4))
    assert read.tobytes() == x.tobytes()
    assert raw.tobytes() == x.astype("<f4").tobytes()


@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=False), min_size=1, max_size=40))
@calm
def test_bf16_is_the_nearest_and_within_two_to_the_minus_eight(x: list[float]) -> None:
    read = Float("bf16").write(np.array(x, np.float32), row(len(np.array(x, np.float32)), 1))[1].astype(np.float64)
    assert (np.abs(read - x) <= 2.0**-8 * np.abs(x)).all()
    assert np.array_equal(read, bf16(np.array(x, np.float32)))


def test_fp16_is_within_two_to_the_minus_eleven() -> None:
    x = normal(1000)
    read = Float("fp16").write(x.copy(), row(len(x), 1))[1]
    assert (np.abs(read - x) <= 2.0**-11 * np.abs(x) + 2.0**-25).all()
    assert np.array_equal(read, x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    values = Float(name)
    for at in (0, 3, 9):
        x = normal(10)
        x[at] = bad
        raw, read = values.write(x, row(len(x), 2))
        assert not np.isfinite(read[at]), "the sender sees it too"
        with pytest.raises(WireError, match="value that is not finite"):
            values.read(raw, row(10, 2), 0, 10)
        assert np.isfinite(values.read(raw, row(10, 2), at + 1, 10)).all(), "what is not read is not refused"


def test_an_unknown_float_is_shown_with_what_is_allowed() -> None:
    for bad in ("fp64", "float32", "", None, torch.float32):
        with pytest.raises(ConfigError, match="one of 'fp32', 'bf16', 'fp16', got"):
            Float(bad)  # type: ignore[arg-type]


# --- Int8 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 8, 32, 100])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_is_within_half_a_step(k: int, size: float) -> None:
    """The step is rounded to bfloat16; where that makes it smaller, the largest are clipped at 127 steps."""
    for x, read in each_group(Int8(), normal(500) * np.float32(size), k):
        step = float(bf16(np.abs(x).max() / 127)[0])
        clipped = np.clip(x, -127 * step, 127 * step)
        assert (np.abs(read - clipped) <= step * (0.5 + 1e-5)).all()
        assert (np.abs(read - x) <= step * 0.5 + 2.0**-8 * np.abs(x)).all()
        whole = read / step
        np.testing.assert_allclose(whole, np.rint(whole), atol=1e-4)
        assert np.abs(whole).max() <= 127 + 1e-4


def test_int8_by_hand() -> None:
    x = np.array([127.0, -127.0, 1.4, -1.6, 0.4, 0.0], np.float32)
    raw, read = Int8().write(x, row(len(x), 6))
    assert read.tolist() == [127, -127, 1, -2, 0, 0]
    assert raw.tolist() == [0x80, 0x3F, 127, 256 - 127, 1, 254, 0, 0]  # the scale 1.0 in bfloat16 is 3F80


# --- Fp4 -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [Fp4(), Fp4(16), Fp4(1)], ids=repr)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_fp4_is_the_nearest_level_by_brute_force(values: Fp4, size: float) -> None:
    x = normal(600) * np.exp(3 * normal(600, seed=1)) * np.float32(size)
    for part, read in each_group(values, x, 32):
        scale = float(bf16(np.abs(part).max())[0])
        nearest = np.abs(np.abs(part)[:, None] - scale * LEVELS).min(axis=1)
        error = np.abs(read - part)
        np.testing.assert_allclose(error, nearest, rtol=1e-5, atol=1e-6 * scale)
        assert np.isin((np.abs(read) / scale).round(9), LEVELS).all()


def test_fp4_is_within_a_third_above_its_smallest_level() -> None:
    """Between 2^-6 and 1 levels are a factor of two apart: the worst is 1.5 of the lower one."""
    for x, read in each_group(Fp4(), normal(5000), 32):
        top = np.abs(x).max()
        above = np.abs(x) >= 2.0**-6 * 1.01 * top
        assert above.mean() > 0.9
        assert (np.abs(read - x)[above] <= (1 / 3 + 2.0**-8) * np.abs(x)[above]).all()
        assert (np.abs(read - x)[~above] <= 2.0**-7 * 1.01 * top).all()


def test_fp4_by_hand() -> None:
    """Codes are 0 for zero and e for 2^(e - 7), with 8 for minus, two to a byte, the first one low."""
    x = np.array([1.0, -0.5, 0.25, -(2.0**-6), 2.0**-7 * 1.01, 2.0**-7 * 0.99, 0.76, -0.74, 0.0], np.float32)
    raw, read = Fp4().write(x, row(len(x), 32))
    assert read.tolist() == [1, -0.5, 0.25, -(2.0**-6), 2.0**-6, 0, 1, -0.5, 0]
    assert raw[:2].tolist() == [0x80, 0x3F]
    assert raw[2:6].tolist() == [0x7 | (0x8 | 0x6) << 4, 0x5 | (0x8 | 0x1) << 4, 0x1 | 0x0 << 4, 0x7 | (0x8 | 0x6) << 4]


# --- Two bits and one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [TwoBit(), TwoBit(5), TwoBit(64)], ids=repr)
def test_two_bits_are_the_means_of_the_large_and_of_the_small(values: TwoBit) -> None:
    for x, read in each_group(values, normal(333), 32):
        size = np.abs(x)
        large = size > size.mean()
        upper = bf16(size[large].mean())[0] if large.any() else 0.0
        lower = bf16(size[~large].mean())[0] if not large.all() else 0.0
        np.testing.assert_allclose(np.abs(read), np.where(large, upper, lower), rtol=2.0**-7)
        assert np.array_equal(np.signbit(read), np.signbit(x))
        assert len(set(np.abs(read))) <= 2


def test_two_bits_by_hand() -> None:
    x = np.array([4.0, -2.0, 0.5, -0.5, 0.5], np.float32)  # the mean size is 1.5: large ones 4 and 2, small ones a half
    raw, read = TwoBit().write(x, row(len(x), 5))
    assert read.tolist() == [3, -3, 0.5, -0.5, 0.5]
    assert raw.tolist() == [0x00, 0x3F, 0x40, 0x40, 0b01_00_11_10, 0b00]


@pytest.mark.parametrize("values", [Ternary(), Ternary(7), Ternary(1)], ids=repr)
def test_three_values_have_the_least_error_of_all_choices(values: Ternary) -> None:
    for x, read in each_group(values, normal(333), 32):
        size = np.sort(np.abs(x))[::-1]
        errors = [np.square(size[:j] - size[:j].mean()).sum() + np.square(size[j:]).sum() for j in range(1, len(x) + 1)]
        kept = read != 0
        assert len(set(np.abs(read[kept]))) == 1
        assert np.array_equal(np.signbit(read[kept]), np.signbit(x[kept]))
        rounding = len(x) * (2.0**-8 * np.abs(read).max()) ** 2  # of the scale to bfloat16
        assert np.square(read - x).sum() <= min(errors) + rounding + 1e-6


def test_three_values_by_hand() -> None:
    # The j largest sizes 3, 2, 2, 1, 0.5 add up to c = 3, 5, 7, 8, 8.5, and c^2 / j = 9, 12.5, 16.3, 16, 14.5: three are kept.
    x = np.array([3.0, -0.5, 2.0, -2.0, 0.0, 1.0], np.float32)
    raw, read = Ternary().write(x, row(len(x), 6))
    assert read.tolist() == [2.328125, 0, 2.328125, -2.328125, 0, 0], "7 / 3 in bfloat16"
    assert raw.tolist() == [0x15, 0x40, 1 + 1 * 9 + 2 * 27, 0]


@pytest.mark.parametrize("values", [Sign(), Sign(1), Sign(50)], ids=repr)
def test_a_sign_stands_for_the_mean_size(values: Sign) -> None:
    for x, read in each_group(values, normal(333), 32):
        np.testing.assert_allclose(np.abs(read), bf16(np.abs(x).mean())[0], rtol=2.0**-7)
        assert np.array_equal(np.signbit(read), np.signbit(x))
        best = np.square(np.abs(x) - np.abs(x).mean()).sum()
        assert np.square(read - x).sum() <= best + len(x) * (2.0**-8 * np.abs(x).mean()) ** 2 * 1.01


def test_signs_by_hand() -> None:
    raw, read = Sign().write(
        np.array([3.0, -1.0, 2.0, -2.0, -2.0], np.float32), row(len(np.array([3.0, -1.0, 2.0, -2.0, -2.0], np.float32)), 5)
    )
    assert read.tolist() == [2, -2, 2, -2, -2]
    assert raw.tolist() == [0x00, 0x40, 0b11010]


@pytest.mark.parametrize("values", [Int8(), Fp4(), TwoBit(), Ternary(), Sign()], ids=repr)
def test_what_is_all_of_one_size_is_exact(values: Scaled) -> None:
    x = np.float32(0.75) * np.where(np.arange(64) % 3, 1, -1).astype(np.float32)
    np.testing.assert_allclose(values.write(x.copy(), row(len(x), 32))[1], x, rtol=2.0**-8)


def test_more_bits_mean_less_error() -> None:
    x = normal(4096)
    error = [
        float(np.square(v.write(x.copy(), row(len(x), 32))[1] - x).sum())
        for v in (Float(), Float("bf16"), Int8(), TwoBit(), Ternary(), Sign())
    ]
    assert error == sorted(error)
    assert error[-1] < float(np.square(x).sum()) / 2


# --- What is not finite, and what is hostile -------------------------------------------------------------------------------


@every_scaled
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_sender_sees_that_a_value_is_not_finite(values: Scaled, bad: float) -> None:
    x = normal(40)
    x[17] = bad
    raw, read = values.write(x, row(len(x), 8))
    assert not np.isfinite(read).all()
    with pytest.raises(WireError, match="scale that is not finite"):
        values.read(raw, row(40, 8), 0, 40)


@every_scaled
@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (0x7FC0, "not finite"),
        (0x7F80, "not finite"),
        (0xFF80, "not finite"),
        (0xFFFF, "not finite"),
        (0xBF80, "negative scale"),
    ],
)
def test_hostile_scales_are_refused(values: Scaled, pattern: int, message: str) -> None:
    count, k = 40, 8
    raw = values.write(normal(count), row(count, k))[0].copy()
    groups = -(-count // groups_of(values, k))
    for at in (0, values.scales * groups - 1):
        hostile = raw.copy()
        hostile[2 * at : 2 * at + 2] = [pattern & 255, pattern >> 8]
        with pytest.raises(WireError, match=message):
            values.read(hostile, row(count, k), 0, count)


def test_a_scale_that_makes_values_overflow_is_refused() -> None:
    raw = Int8().write(np.full(4, 127, np.float32), row(len(np.full(4, 127, np.float32)), 4))[0].copy()
    raw[:2] = [0x7F, 0x7F]  # the largest bfloat16
    with pytest.raises(WireError, match="value that is not finite"):
        Int8().read(raw, row(4, 4), 0, 4)


@pytest.mark.parametrize("values", [Fp4(), TwoBit(), Ternary(), Sign()], ids=repr)
def test_padding_that_is_not_zero_is_refused(values: Scaled) -> None:
    raw = values.write(normal(13), row(13, 32))[0].copy()
    raw[-1] |= 0x80
    with pytest.raises(WireError, match="padding"):
        values.read(raw, row(13, 32), 0, 13)
    with pytest.raises(WireError, match="padding"):
        values.read(raw, row(13, 32), 12, 13)


@given(st.sampled_from(VALUES), st.data())
@settings(calm, max_examples=examples(300))
def test_any_bytes_are_finite_values_or_are_refused(values: Values, data: st.DataObject) -> None:
    count, k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    nbytes = values.nbytes_of(row(count, k))
    raw = np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
    try:
        read = values.read(raw, row(count, k), 0, count)
    except WireError:
        with pytest.raises(WireError):
            values.check(raw, row(count, k))
        return
    assert read.shape == (count,)
    assert np.isfinite(read).all()
    assert np.abs(read).max() <= values.check(raw, row(count, k)) < math.inf


@pytest.mark.parametrize("kind", [Int8, Fp4, TwoBit, Ternary, Sign])
@pytest.mark.parametrize("bad", [-1, 2.0, "8", True, None])
def test_a_group_is_a_whole_number(kind: type[Scaled], bad: object) -> None:
    with pytest.raises(ConfigError, match=f"group of {kind.__name__} must be a whole number of at least 0, got"):
        kind(bad)  # type: ignore[arg-type]
