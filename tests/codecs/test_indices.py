"""Index codes: every set of k out of L survives, in the bits that were promised, and nothing else is read as a set."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.tiers import examples
from thinwire.codecs.bits import pack, unpack
from thinwire.codecs.indices import Bitmap, EliasFano, IndexCode, Packed, index_code
from thinwire.codecs.registry import INDEX_CODES
from thinwire.errors import ConfigError, WireError

calm = settings(deadline=None, database=None, derandomize=True)

SIZES = [(1, 1), (2, 1), (2, 2), (3, 2), (5, 1), (7, 7), (12, 5), (64, 1), (64, 32), (64, 64), (100, 3), (100, 50), (100, 99)]
SIZES += [(1000, 17), (1001, 2), (300, 120)]
BLOCKS = [(4096, 8), (4096, 32), (4096, 64), (4096, 128)]


def all_codes(L: int, k: int) -> list[IndexCode]:
    return [Packed(L, k), Bitmap(L, k), *(EliasFano(L, k, low) for low in range((L - 1).bit_length()))]


def every_code(sizes: list[tuple[int, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("code", [c for L, k in sizes for c in all_codes(L, k)], ids=repr)


def random_sets(L: int, k: int, n: int, seed: int = 0) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).random((n, L)).argsort(axis=1)[:, :k], axis=1)


def extreme_sets(L: int, k: int) -> NDArray[np.int64]:
    """The first, runs at every power of two, spread ones, and a run with one far away."""
    starts = {0, 1, 2, L // 3, *(1 << b for b in range(L.bit_length())), *((1 << b) - k for b in range(L.bit_length()))}
    runs = [np.arange(k) + s for s in sorted(starts) if s == 0 or (0 < s <= L // 2 and s + k < L)]
    spread = [np.arange(k) * (L // k), L - 1 - np.arange(k)[::-1] * (L // k)]
    if 1 < k < L:
        spread.append(np.r_[np.arange(k - 1), L - 1])
    return np.stack([*runs, *spread])


# --- Round trips -----------------------------------------------------------------------------------------------------------


@every_code([*SIZES, *BLOCKS])
def test_random_sets_survive_in_the_size_that_was_told(code: IndexCode) -> None:
    for n in (1, 7, 50):
        sets = random_sets(code.L, code.k, n, seed=n)
        raw = code.encode(sets)
        assert raw.dtype == np.uint8
        assert len(raw) == code.nbytes(n)
        back = code.decode(raw, n)
        assert back.shape == (n, code.k)
        assert np.array_equal(back, sets)


@every_code([*SIZES, *BLOCKS])
def test_extreme_sets_survive(code: IndexCode) -> None:
    sets = extreme_sets(code.L, code.k)
    assert np.array_equal(code.decode(code.encode(sets), len(sets)), sets)


@every_code([*SIZES, *BLOCKS])
def test_the_last_sets_survive(code: IndexCode) -> None:
    L, k = code.L, code.k
    sets = [np.arange(L - k, L)]
    if k < L:
        sets += [np.arange(L - k - 1, L - 1), *(np.r_[i, np.arange(L - k + 1, L)] for i in (0, L - k - 1))]
        sets += [np.r_[np.arange(j), np.arange(L - k + j, L)] for j in range(0, k, 1 + k // 20)]
    rows = np.stack(sets)
    assert np.array_equal(code.decode(code.encode(rows), len(rows)), rows)


@every_code([(100, 3), (100, 50), (300, 120), (4096, 32)])
def test_any_range_of_sets_reads_as_from_the_whole(code: IndexCode) -> None:
    sets = random_sets(code.L, code.k, 19)
    raw = code.encode(sets)
    for start, stop in [(0, 0), (0, 1), (3, 11), (8, 16), (5, 19), (18, 19), (19, 19)]:
        assert np.array_equal(code.decode(raw, 19, start, stop), sets[start:stop])
    assert np.array_equal(code.decode(raw, 19, 9), sets[9:])


@every_code([(100, 3), (100, 50), (300, 120), (4096, 32)])
def test_several_codes_read_together_as_one_by_one(code: IndexCode) -> None:
    sets = [random_sets(code.L, code.k, 11, seed=seed) for seed in range(3)]
    raws = [code.encode(s) for s in sets]
    for start, stop in [(0, 11), (3, 9), (4, 4)]:
        together = code.decode_all(raws, 11, start, stop)
        assert together.shape == (3, stop - start, code.k)
        assert np.array_equal(together, np.stack(sets)[:, start:stop])


@given(st.data(), st.integers(1, 300))
@calm
def test_any_set_survives_every_code(data: st.DataObject, L: int) -> None:
    k = data.draw(st.integers(1, min(L, 40)))
    n = data.draw(st.integers(1, 4))
    some = st.sets(st.integers(0, L - 1), min_size=k, max_size=k).map(sorted)
    sets = np.array(data.draw(st.lists(some, min_size=n, max_size=n)), np.int64).reshape(n, k)
    low = data.draw(st.integers(0, max(0, (L - 1).bit_length() - 1)))
    for code in (Packed(L, k), Bitmap(L, k), EliasFano(L, k, low), index_code(L, k)):
        assert np.array_equal(code.decode(code.encode(sets), n), sets)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_narrow_indices_are_coded_alike(dtype: type[np.integer]) -> None:
    sets = random_sets(4096, 32, 9)
    for code in all_codes(4096, 32):
        assert np.array_equal(code.encode(sets.astype(dtype)), code.encode(sets))


@pytest.mark.parametrize(("L", "k"), [(65537, 5), (1 << 17, 3), (1 << 20, 2)])
def test_blocks_larger_than_sixteen_bits(L: int, k: int) -> None:
    sets = np.array([np.arange(k), np.arange(L - k, L), np.arange(k) * (L // k)])
    for code in (Packed(L, k), Bitmap(L, k), index_code(L, k)):
        assert np.array_equal(code.decode(code.encode(sets), 3), sets)


# --- What the bytes are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("L", "k"), [(1, 1), (4, 2), (7, 3), (8, 8), (9, 4), (10, 5)])
def test_all_sets_have_different_codes_and_all_of_them_survive(L: int, k: int) -> None:
    sets = list(itertools.combinations(range(L), k))
    for code in all_codes(L, k):
        raw = [code.encode(np.array([s])).tobytes() for s in sets]
        assert len(set(raw)) == len(sets)
        together = code.encode(np.array(sets))
        assert code.decode(together, len(sets)).tolist() == [list(s) for s in sets]


@pytest.mark.parametrize(("L", "k", "low"), [(8, 3, 1), (9, 2, 0), (100, 7, 3), (4096, 300, 3)])
def test_elias_fano_sets_bit_b_plus_j_for_the_jth_high_part(L: int, k: int, low: int) -> None:
    sets = random_sets(L, k, 5)
    width = -(-L // 2**low) + k - 1
    rows = np.zeros((5, -(-width // 8) * 8), bool)
    for row, s in zip(rows, sets.tolist(), strict=True):
        row[[(i >> low) + j for j, i in enumerate(s)]] = True
    raw = EliasFano(L, k, low).encode(sets)
    head = rows.size // 8
    assert raw[:head].tobytes() == np.packbits(rows, axis=1, bitorder="little").tobytes()
    assert unpack(raw[head:], 5 * k, low).tolist() == [i % 2**low for s in sets.tolist() for i in s]


def test_a_packed_index_is_a_plain_number_and_a_bitmap_a_row_of_bits() -> None:
    assert Packed(4096, 2).encode(np.array([[0xABC, 0xFED]])).tolist() == [0xBC, 0xED, 0xFA, 0, 0, 0]
    assert Bitmap(12, 3).encode(np.array([[0, 3, 9]])).tolist() == [0b00001001, 0b00000010]


# --- Sizes -----------------------------------------------------------------------------------------------------------------


@every_code([*SIZES, *BLOCKS])
def test_bits_per_set_are_the_bytes_of_eight_sets(code: IndexCode) -> None:
    assert code.nbytes(0) == 0
    assert code.nbytes(8) == code.bits
    assert code.nbytes(8000) == 1000 * code.bits
    assert code.bits >= code.bound - 1e-9, "no code can tell more sets apart than it has codes"
    assert code.bound == pytest.approx(math.log2(math.comb(code.L, code.k)))


@pytest.mark.parametrize("k", [8, 16, 32, 64, 128])
def test_indices_of_a_block_are_within_ten_per_cent_of_the_bound(k: int) -> None:
    code = index_code(4096, k)
    bound = math.log2(math.comb(4096, k))
    assert bound <= code.bits <= 1.1 * bound
    assert code.nbytes(10_000) * 8 <= 1.1 * bound * 10_000
    assert code.bits < 12 * k


@pytest.mark.parametrize("k", [200, 256, 410, 512, 1024, 2048, 4000, 4095])
def test_large_parts_of_a_block_are_coded_not_far_above_the_bound(k: int) -> None:
    code, sets = index_code(4096, k), random_sets(4096, k, 3)
    assert np.array_equal(code.decode(code.encode(sets), 3), sets)
    assert code.bits <= 1.15 * code.bound or code.bits <= 4096


@pytest.mark.parametrize("L", [1, 2, 3, 5, 8, 31, 64, 100, 257, 1000])
def test_the_chosen_code_is_never_larger_than_the_plain_ones(L: int) -> None:
    for k in sorted({1, 2, 3, L // 4, L // 3, L // 2, L - 1, L} & set(range(1, L + 1))):
        code = index_code(L, k)
        assert code.bits <= min(Packed(L, k).bits, Bitmap(L, k).bits)
        assert code.nbytes(1024) <= min(Packed(L, k).nbytes(1024), Bitmap(L, k).nbytes(1024))


def test_a_choice_that_is_none_costs_one_bit_per_entry_at_most() -> None:
    for L in (1, 2, 64, 100):
        assert index_code(L, L).bits <= 8 * -(-L // 8)


def test_a_new_code_joins_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(Packed):
        """Of k = L, where there is no choice."""

        @classmethod
        def candidates(cls, L: int, k: int) -> list[Nothing]:
            return [cls(L, k)] if k == L else []

        def nbytes(self, n: int) -> int:
            return 0 * n

    monkeypatch.setattr(INDEX_CODES, "_numbers", dict(INDEX_CODES._numbers))
    with pytest.raises(ConfigError, match="index code 2 cannot be"):
        INDEX_CODES.add(2, Nothing)
    with pytest.raises(ConfigError, match="is 0 to 15, got 16"):
        INDEX_CODES.add(16, Nothing)
    INDEX_CODES.add(3, Nothing)
    assert INDEX_CODES.number(Nothing) == 3
    choose = index_code.__wrapped__  # without the cache
    assert isinstance(choose(64, 64), Nothing)
    assert isinstance(choose(4096, 32), EliasFano)


# --- Hostile codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [([3, 3], "duplicate"), ([5, 2], "duplicate"), ([0, 100], "out of range: 100"), ([126, 127], "out of range: 127")],
)
def test_packed_indices_that_are_no_set_are_refused(row: list[int], message: str) -> None:
    code = Packed(100, 2)
    raw = pack(np.array([1, 2, *row, 3, 99]), 7)
    with pytest.raises(WireError, match=message):
        code.decode(raw, 3)
    assert code.decode(raw, 3, 2, 3).tolist() == [[3, 99]], "a sound set elsewhere can still be read"


def test_elias_fano_rows_that_are_no_set_are_refused() -> None:
    code = EliasFano(61, 3, 3)  # eight buckets, the last of five entries; a row has 8 + 3 - 1 bits

    def row(bits: list[int], lows: list[int]) -> NDArray[np.uint8]:
        marks = np.isin(np.arange(16), bits)
        return np.concatenate([np.packbits(marks, bitorder="little"), pack(np.array(lows), 3)])

    assert code.decode(row([0, 3, 9], [7, 1, 4]), 1).tolist() == [[7, 17, 60]]
    for bits, lows, message in [
        ([0, 3], [0, 1, 2], "does not mark 3"),
        ([0, 3, 5, 9], [0, 1, 2], "does not mark 3"),
        ([0, 3, 10], [0, 1, 2], "padding"),
        ([0, 3, 9], [0, 1, 5], "out of range: 61 in a block of 61"),
        ([0, 1, 2], [0, 0, 1], "duplicate"),
        ([0, 1, 2], [4, 2, 5], "duplicate"),
    ]:
        with pytest.raises(WireError, match=message):
            code.decode(row(bits, lows), 1)


def test_an_index_out_of_range_hidden_before_a_good_one_is_refused() -> None:
    with pytest.raises(WireError):
        Packed(100, 2).decode(pack(np.array([120, 5]), 7), 1)


@pytest.mark.parametrize("marked", [0, 2, 4, 12])
def test_a_bitmap_with_another_number_of_marks_is_refused(marked: int) -> None:
    raw = np.packbits(np.arange(12) < marked, bitorder="little")
    with pytest.raises(WireError, match="does not mark 3"):
        Bitmap(12, 3).decode(raw, 1)


@pytest.mark.parametrize("code", [Packed(100, 3), Bitmap(100, 3), EliasFano(100, 3, 2), EliasFano(1000, 17, 6)])
def test_padding_that_is_not_zero_is_refused(code: IndexCode) -> None:
    """Whatever bit is flipped, another set is read or the code is refused: no two codes say the same."""
    n = 3
    raw = code.encode(random_sets(code.L, code.k, n))
    before, refused = code.decode(raw, n), []
    for bit in range(8 * len(raw)):
        flipped = raw.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        try:
            assert not np.array_equal(code.decode(flipped, n), before)
        except WireError as error:
            refused.append(str(error))
    padding = [r for r in refused if "padding" in r]
    used = {Bitmap: code.L, EliasFano: code._row.L + code.k * code.low if isinstance(code, EliasFano) else 0}
    spare = 8 * code.nbytes(n) - n * used.get(type(code), code.bits)
    assert len(padding) == spare > 0


@given(st.data())
@settings(calm, max_examples=examples(300))
def test_any_bytes_are_a_set_or_are_refused(data: st.DataObject) -> None:
    L, k = data.draw(st.sampled_from([(5, 2), (64, 4), (100, 30), (61, 2), (4096, 8), (64, 40)]))
    code = data.draw(st.sampled_from(all_codes(L, k)))
    n = data.draw(st.integers(1, 3))
    raw = np.frombuffer(data.draw(st.binary(min_size=code.nbytes(n), max_size=code.nbytes(n))), np.uint8)
    try:
        sets = code.decode(raw, n)
    except WireError:
        return
    assert sets.shape == (n, k)
    assert sets.min() >= 0
    assert sets.max() < L
    assert (np.diff(sets, axis=1) > 0).all()
    assert np.array_equal(code.encode(sets), raw), "one set, one code"
