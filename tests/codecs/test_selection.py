"""Selections: the largest are the largest, the random are fair, the striding leave nobody out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.tiers import examples
from thinwire.codecs import All, RandomK, Striding, TopK
from thinwire.codecs.selection import Selection, largest
from thinwire.codecs.shared_seed import numbers
from thinwire.errors import ConfigError

calm = settings(deadline=None, database=None, derandomize=True)


Block = tuple[int, int]
BLOCKS: list[Block] = [
    (64, 64),
    (32, 64),
    (64, 16),
    (60, 64),
    (64, 50),
    (16, 16),
    (8, 8),
    (7, 5),
    (3, 100),
    (1, 64),
    (1, 1000),
    (1, 1),
]
every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: f"{b[0]}x{b[1]}")


def entries_of(n: int, block: Block, seed: int = 0) -> Tensor:
    """Blocks of normal numbers, [n, L]."""
    return torch.randn(n, block[0] * block[1], generator=torch.Generator().manual_seed(seed))


def as_strips(blocks: Tensor, block: Block, x: int) -> Tensor:
    """The blocks side by side, x in a row."""
    return blocks.view(-1, x, *block).permute(0, 2, 1, 3).reshape(len(blocks) // x * block[0], x * block[1])


def assert_largest(blocks: Tensor, block: Block, k: int, x: int = 1) -> NDArray[np.int64]:
    """Ascending places, each once, of the same sizes that topk finds, and the values there with their signs."""
    strips = as_strips(blocks, block, x)
    before = strips.clone()
    places, values = largest(strips, block, k)
    torch.testing.assert_close(strips, before, rtol=0, atol=0, equal_nan=True, msg="the entries were changed")
    n, L = blocks.shape
    assert places.shape == values.shape == (n, k)
    assert values.dtype == np.float32
    assert places.min() >= 0
    assert places.max() < L
    assert (np.diff(places, axis=1) > 0).all(), "strictly ascending"
    assert np.array_equal(values, np.take_along_axis(blocks.numpy(), places, axis=1), equal_nan=True)
    best = blocks.abs().topk(k, dim=1).values.sort(dim=1).values
    mine = torch.from_numpy(values).abs().sort(dim=1).values
    torch.testing.assert_close(mine, best, rtol=0, atol=0, equal_nan=True)
    return places


# --- The largest -----------------------------------------------------------------------------------------------------------


@every_block
@pytest.mark.parametrize("k", [1, 2, 3, 8, 31, 32, 64, 127, 128, 129, 256, 1000])
def test_it_finds_what_topk_finds(block: Block, k: int) -> None:
    if k <= math.prod(block):
        assert_largest(entries_of(12, block), block, k, x=3)
        assert_largest(entries_of(1, block, seed=1), block, k)


@every_block
def test_all_of_a_block_may_be_kept(block: Block) -> None:
    L = math.prod(block)
    assert assert_largest(entries_of(4, block), block, L, x=2).tolist() == [list(range(L))] * 4


@pytest.mark.parametrize("k", [1, 8, 32])
def test_strips_with_gaps_between_their_rows_are_read_where_they_are(k: int) -> None:
    """A part of a wider slot."""
    blocks = entries_of(8, (64, 64))
    strips = as_strips(blocks, (64, 64), 4)
    wide = torch.full((128, 300), 99.0)
    wide[:, 7 : 7 + 256] = strips
    places, values = largest(wide[:, 7 : 7 + 256], (64, 64), k)
    plain = largest(strips, (64, 64), k)
    assert np.array_equal(places, plain[0])
    assert np.array_equal(values, plain[1])


@every_block
@pytest.mark.parametrize("levels", [1, 2, 3, 10, 300])
def test_ties_are_resolved_somehow_but_never_at_the_cost_of_a_larger_one(block: Block, levels: int) -> None:
    """Few levels put hundreds of equal entries at the border."""
    g = torch.Generator().manual_seed(levels)
    L = math.prod(block)
    for k in {1, 8, 32, 128} & set(range(L + 1)):
        assert_largest(torch.randint(1 - levels, levels, (9, L), generator=g).float(), block, k, x=3)


@pytest.mark.parametrize("k", [1, 2, 8, 32, 128])
def test_ties_in_a_few_blocks_do_not_disturb_the_others(k: int) -> None:
    """Near the border some blocks have several equal entries, more than k pass, and blocks differ in how many."""
    blocks = entries_of(40, (64, 64))
    for i in range(0, 40, 3):
        border = blocks[i].abs().topk(k).values[-1]
        blocks[i, torch.randperm(4096)[: 1 + i // 3]] = -border
    assert_largest(blocks, (64, 64), k, x=8)


@pytest.mark.parametrize("k", [1, 8, 32, 128])
def test_empty_blocks_and_blocks_with_less_than_k_entries(k: int) -> None:
    blocks = entries_of(12, (64, 64))
    blocks[0] = 0
    blocks[3] = 0
    blocks[3, 77] = -1
    blocks[7] = 0
    blocks[7, -1] = 2
    blocks[7, : k // 2] = 1
    blocks[11] = -0.0
    places = assert_largest(blocks, (64, 64), k, x=4)
    assert 77 in places[3].tolist()
    assert 4095 in places[7].tolist()
    assert_largest(torch.zeros(6, 4096), (64, 64), k, x=3)


@pytest.mark.parametrize("block", [(64, 64), (1, 1000), (16, 16)])
@pytest.mark.parametrize("k", [1, 8, 32, 128])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_counts_as_largest(bad: float, k: int, block: Block) -> None:
    """So that it is sent, and seen, instead of staying behind for ever."""
    blocks = entries_of(10, block)
    blocks[2, 5] = bad
    blocks[4, : k + 3] = bad
    blocks[6] = bad
    blocks[9, -1] = bad
    blocks[9, 3] = math.inf
    places = assert_largest(blocks, block, k, x=5)
    assert 5 in places[2].tolist()
    assert math.prod(block) - 1 in places[9].tolist() or (k == 1 and not math.isnan(bad))


@pytest.mark.parametrize("k", [1, 32, 128])
@pytest.mark.parametrize("step", [1, 16, 64, 256, 512])
def test_the_largest_may_all_lie_in_one_column_or_in_one_run(k: int, step: int) -> None:
    """The shortcut that looks at the maxima of lanes must not miss what hides behind a larger one."""
    blocks = entries_of(6, (64, 64))
    blocks[:, 3::step][:, :k] -= 100
    assert_largest(blocks, (64, 64), k, x=2)


@given(st.data())
@settings(calm, max_examples=examples(200))
def test_any_blocks(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(BLOCKS))
    L = math.prod(block)
    k, x, y = data.draw(st.integers(1, min(L, 140))), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    levels = data.draw(st.sampled_from([2, 50, 10_000]))
    seed = data.draw(st.integers(0, 10**6))
    blocks = torch.randint(1 - levels, levels, (x * y, L), generator=torch.Generator().manual_seed(seed)).float()
    for at in data.draw(st.lists(st.tuples(st.integers(0, x * y - 1), st.integers(0, L - 1)), max_size=4)):
        blocks[at] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
    assert_largest(blocks, block, k, x)


# --- Random ----------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 500), st.data(), st.integers(0, 1 << 40), st.integers(0, 1 << 20))
@calm
def test_a_random_choice_is_a_sorted_set_in_range_and_any_range_of_blocks_reads_alike(
    L: int, data: st.DataObject, seed: int, round: int
) -> None:
    choice = RandomK(data.draw(st.integers(1, 600)), seed=seed)
    k = choice.count(L)
    assert k == min(choice.k, L)
    places = choice.positions(L, round, 0, 30)
    assert places.shape == (30, k)
    assert places.min() >= 0
    assert places.max() < L
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(choice.positions(L, round, 7, 19), places[7:19])
    assert np.array_equal(RandomK(choice.k, seed=seed).positions(L, round, 0, 30), places)


def test_a_random_choice_differs_between_rounds_seeds_and_blocks() -> None:
    first = RandomK(32).positions(4096, 0, 0, 50)
    for other in (RandomK(32).positions(4096, 1, 0, 50), RandomK(32, seed=1).positions(4096, 0, 0, 50), first[::-1]):
        shared = [len(set(a) & set(b)) for a, b in zip(first.tolist(), other.tolist(), strict=True)]
        assert sum(shared) / 50 < 3, "no more than chance: a quarter of an entry on average"


def test_a_random_choice_is_pinned() -> None:
    """Workers of different versions must agree; a change of these numbers is a change of the wire."""
    assert RandomK(5).positions(4096, 0, 0, 2).tolist() == [[167, 1258, 2359, 3023, 3602], [478, 1057, 1718, 2809, 3910]]
    assert RandomK(0.5, seed=7).positions(8, 3, 10, 12).tolist() == [[1, 2, 5, 6], [0, 1, 4, 5]]


@pytest.mark.parametrize(("L", "k"), [(10, 3), (64, 16), (7, 6)])
def test_each_entry_is_as_likely_as_any_other(L: int, k: int) -> None:
    """Over rounds, and over the blocks of one round; a limit of six deviations of a fair draw."""
    times = 1500
    over_rounds = np.zeros(L)
    for round in range(times):
        over_rounds[RandomK(k).positions(L, round, 3, 4)[0]] += 1
    over_blocks = np.bincount(RandomK(k).positions(L, 5, 0, times).reshape(-1), minlength=L)
    p = k / L
    for counts in (over_rounds, over_blocks):
        assert counts.sum() == times * k
        assert np.abs(counts - times * p).max() < 6 * math.sqrt(times * p * (1 - p))


def test_pairs_are_chosen_together_as_often_as_chance_would_have_it() -> None:
    L, k, times = 8, 3, 2000
    together = np.zeros((L, L))
    for round in range(times):
        a = RandomK(k, seed=2).positions(L, round, 0, 1)[0]
        together[np.ix_(a, a)] += 1
    p = k * (k - 1) / (L * (L - 1))
    pairs = together[~np.eye(L, dtype=bool)]
    assert np.abs(pairs - times * p).max() < 6 * math.sqrt(times * p * (1 - p))


def slow_mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(st.integers(-5, 1 << 64), st.integers(0, 1 << 33), st.integers(0, 5), st.integers(0, 1 << 40))
@calm
def test_shared_numbers_are_splitmix_in_any_language(seed: int, round: int, purpose: int, start: int) -> None:
    key = slow_mix((slow_mix((slow_mix(seed % 2**64) + round) % 2**64) + purpose) % 2**64)
    by_hand = [slow_mix((key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(start, start + 3)]
    assert numbers(seed, round, purpose, 3, start).tolist() == by_hand


# --- Striding --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.data(), st.integers(0, 10_000))
@calm
def test_striding_visits_every_entry_in_turn(L: int, data: st.DataObject, begin: int) -> None:
    """Within ceil(L / k) rounds, from whatever round on, and none twice while that can be helped."""
    stride = Striding(data.draw(st.integers(1, L)))
    k = stride.count(L)
    seen = np.zeros(L, int)
    for round in range(begin, begin + -(-L // k)):
        places = stride.positions(L, round, 0, 3)
        assert places.shape == (3, k)
        assert (np.diff(places, axis=1) > 0).all()
        assert (places == places[0]).all(), "all blocks alike"
        assert places.min() >= 0
        assert places.max() < L
        seen[places[0]] += 1
    assert seen.min() == 1
    assert seen.max() <= 2
    if L % k == 0:
        assert seen.max() == 1


def test_striding_by_hand() -> None:
    assert [Striding(2).positions(8, r, 0, 1)[0].tolist() for r in range(5)] == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4]]
    assert [Striding(2).positions(5, r, 4, 5)[0].tolist() for r in range(4)] == [[0, 2], [1, 3], [0, 4], [1, 2]]


# --- How many --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TopK, RandomK, Striding])
def test_k_is_a_number_or_a_fraction(kind: type[Selection]) -> None:
    assert kind(32).count(4096) == 32
    assert kind(32).count(10) == 10
    assert kind(1).count(1) == 1
    assert kind(0.5).count(64) == 32
    assert kind(0.01).count(4096) == 41
    assert kind(0.001).count(64) == 1, "one at least"
    assert kind(0.999).count(10) == 10
    assert kind().k == 32


@pytest.mark.parametrize("kind", [TopK, RandomK, Striding])
@pytest.mark.parametrize("bad", [0, -3, 1.0, 0.0, -0.5, 2.5, math.nan, True, "32", None])
def test_any_other_k_is_refused(kind: type[Selection], bad: object) -> None:
    with pytest.raises(ConfigError, match=f"the k of {kind.__name__} is a whole number from 1, or a fraction") as caught:
        kind(bad)  # type: ignore[arg-type]
    assert str(caught.value).endswith(f"got {bad!r}")


def test_all_is_all() -> None:
    assert All().count(77) == 77
    assert All().positions(5, 3, 2, 4).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert not All().indexed


def test_only_the_largest_need_indices_on_the_wire() -> None:
    assert TopK().indexed
    assert not RandomK().indexed
    assert not Striding().indexed
    with pytest.raises(TypeError, match="without looking"):
        TopK().positions(64, 0, 0, 1)
