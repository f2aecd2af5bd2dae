"""Transforms: orthonormal, equal to their definitions, and for the random one: equal on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import DCT, Hadamard, Identity, RandomOrthogonal
from thinwire.codecs.transforms import Transform
from thinwire.errors import ConfigError

calm = settings(deadline=None, database=None, derandomize=True)
CPU = torch.device("cpu")
KINDS: list[type[Transform]] = [Identity, DCT, Hadamard, RandomOrthogonal]
every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = {
    DCT: [1, 2, 3, 5, 13, 29, 50, 64, 67, 100, 128],
    Hadamard: [1, 2, 4, 8, 64, 128],
    RandomOrthogonal: [1, 2, 4, 8, 64, 256],
}
every_matrix = pytest.mark.parametrize(("kind", "length"), [(kind, n) for kind, ns in LENGTHS.items() for n in ns])


@every_matrix
def test_the_inverse_is_the_transpose(kind: type[Transform], length: int) -> None:
    P = kind().basis(length, 3)
    assert P is not None
    assert P.dtype == np.float64
    np.testing.assert_allclose(P @ P.T, np.eye(length), atol=1e-13)
    np.testing.assert_allclose(P.T @ P, np.eye(length), atol=1e-13)


@every_matrix
def test_norms_are_kept(kind: type[Transform], length: int) -> None:
    """Parseval, for blocks of two sides."""
    P_h, P_w = kind().basis(length, 1), kind().basis(length, 1)
    X = np.random.default_rng(length).standard_normal((length, length))
    assert np.square(P_h @ X @ P_w.T).sum() == pytest.approx(np.square(X).sum(), rel=1e-12)


@every_matrix
def test_the_matrix_in_use_is_the_basis_in_float32(kind: type[Transform], length: int) -> None:
    P = kind().matrix(length, 2, CPU)
    if length == 1:
        assert P is None, "one entry is left as it is"
    else:
        assert P is not None
        assert P.dtype == torch.float32
        assert np.array_equal(P.numpy(), kind().basis(length, 2).astype(np.float32))


def test_the_identity_is_nothing_to_do() -> None:
    assert Identity().basis(64, 0) is None
    assert Identity().matrix(64, 0, CPU) is None


@pytest.mark.parametrize("n", [1, 2, 3, 8, 29, 64, 100])
def test_the_dct_is_its_direct_sum(n: int) -> None:
    """X_i = c_i sum_j x_j cos(pi / n (j + 1/2) i), with c_0 = sqrt(1 / n) and else sqrt(2 / n)."""
    x = np.random.default_rng(n).standard_normal(n)
    direct = []
    for i in range(n):
        c = math.sqrt((1 if i == 0 else 2) / n)
        direct.append(c * math.fsum(x[j] * math.cos(math.pi / n * (j + 0.5) * i) for j in range(n)))
    np.testing.assert_allclose(DCT().basis(n, 0) @ x, direct, atol=1e-12)


def test_the_dct_gathers_a_constant_in_one_coefficient_and_a_cosine_in_another() -> None:
    P = DCT().basis(64, 0)
    np.testing.assert_allclose(P @ np.ones(64), np.r_[8.0, np.zeros(63)], atol=1e-12)
    wave = np.cos(math.pi * (2 * np.arange(64) + 1) * 5 / 128)
    np.testing.assert_allclose(P @ wave, np.where(np.arange(64) == 5, math.sqrt(32), 0), atol=1e-12)


@pytest.mark.parametrize("n", [2, 4, 32, 128])
def test_hadamard_entries_are_signs_of_common_bits(n: int) -> None:
    P = Hadamard(n).basis(n, 0)
    for i in range(n):
        for j in range(n):
            assert P[i, j] == (-1) ** (i & j).bit_count() / math.sqrt(n)


def test_hadamard_by_hand() -> None:
    assert (2 * Hadamard(4).basis(4, 0)).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


# --- Random ----------------------------------------------------------------------------------------------------------------


def test_the_random_matrix_is_the_same_for_the_same_round_and_seed_and_another_for_any_other() -> None:
    some = {(seed, round): RandomOrthogonal(64, seed=seed).basis(64, round) for seed in range(3) for round in range(4)}
    for key, P in some.items():
        for other, Q in some.items():
            overlap = np.abs(P @ Q.T).max()
            assert (overlap > 0.999) == (key == other), "other rounds share no basis vector"
        assert np.array_equal(P, RandomOrthogonal(64, seed=key[0]).basis(64, key[1]))


def test_the_random_matrix_holds_whole_numbers_up_to_its_scale() -> None:
    """So that no machine can round it differently: three products of +-1 matrices."""
    for n in (2, 8, 64, 128):
        whole = RandomOrthogonal(128).basis(n, 9) * n**1.5
        np.testing.assert_allclose(whole, np.rint(whole), atol=1e-9)


def test_the_random_matrix_spreads_every_entry_over_the_block() -> None:
    P = RandomOrthogonal().basis(64, 0)
    assert np.abs(P).max() < 0.75
    assert float((P**4).sum(axis=1).mean()) == pytest.approx(3 / 64, rel=0.2), "as the entries of a random rotation would"


@pytest.mark.parametrize(
    ("seed", "round", "digest"), [(0, 0, "f2524c0785681090"), (0, 1, "a934718e00f462c1"), (12345, 77, "a7a47d58485b136e")]
)
def test_the_random_matrix_is_pinned(seed: int, round: int, digest: str) -> None:
    """Workers of different versions must agree; a change of these numbers is a change of the wire."""
    whole = np.rint(RandomOrthogonal(64, seed=seed).basis(64, round) * 64**1.5).astype("<i4")
    assert hashlib.sha256(whole.tobytes()).hexdigest()[:16] == digest


def test_only_the_random_matrix_changes_and_no_state_can_live_there() -> None:
    assert [kind().changes for kind in KINDS] == [False, False, False, True]
    for kind in (DCT, Hadamard):
        assert kind().matrix(64, 0, CPU) is kind().matrix(64, 5, CPU), "kept, whatever the round"
    P, Q = (RandomOrthogonal().matrix(64, r, CPU) for r in (0, 1))
    assert not torch.equal(P, Q)


# --- Blocks ----------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 100_000), st.integers(1, 512))
@calm
def test_a_short_dimension_makes_a_short_block_and_a_long_one_never_shrinks_it(n: int, block: int) -> None:
    for kind in (Identity, DCT):
        assert kind(block).length(n) == min(n, block)
    power = 1 << (block.bit_length() - 1)
    for kind in (Hadamard, RandomOrthogonal):
        length = kind(power).length(n)
        assert length.bit_count() == 1
        assert length == power if n >= power else n <= length < 2 * n


@every_kind
@pytest.mark.parametrize("bad", [0, -64, 64.0, "64", True, None])
def test_a_block_is_a_whole_number(kind: type[Transform], bad: object) -> None:
    with pytest.raises(ConfigError, match="the block of a transform must be a whole number of at least 1, got"):
        kind(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Hadamard, RandomOrthogonal])
@pytest.mark.parametrize("bad", [3, 48, 65, 100])
def test_hadamard_blocks_are_powers_of_two(kind: type[Transform], bad: int) -> None:
    with pytest.raises(ConfigError, match=f"the block of {kind.__name__} must be a power of two, got {bad}"):
        kind(bad)
