"""Mean: against a slow loop over dictionaries, and against a liar."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.tiers import examples
from thinwire.codecs import Dense, Mean, Messages
from thinwire.errors import ConfigError

calm = settings(deadline=None, database=None, derandomize=True)
Floats = NDArray[np.float32]


def ones(count: int) -> Floats:
    return np.ones(count, np.float32)


def contributions(workers: int, m: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((workers, m)).astype(np.float32)


def slow_trimmed(values: list[float], trimmed: float) -> float:
    """The mean of the middle ones."""
    cut = math.floor(trimmed * len(values) + 1e-9)
    middle = sorted(values)[cut : len(values) - cut]
    return math.fsum(middle) / len(middle)


def slow_entries(mean: Mean, places: NDArray[np.int64], values: Floats, weights: Floats) -> dict[int, float]:
    """What `Mean.entries` should find, one place at a time."""
    workers = len(places)
    sent: dict[int, list[tuple[float, float]]] = {}
    for row, own, weight in zip(places.tolist(), values.tolist(), weights.tolist(), strict=True):
        for place, value in zip(row, own, strict=True):
            sent.setdefault(place, []).append((value, weight))
    out = {}
    for place, told in sent.items():
        if mean.trimmed:
            rest = [0.0] * (workers - len(told) if mean.over == "workers" else 0)
            out[place] = slow_trimmed([v for v, _ in told] + rest, mean.trimmed)
        else:
            share = math.fsum(weights.tolist() if mean.over == "workers" else [w for _, w in told])
            out[place] = math.fsum(v * w for v, w in told) / share
    return out


# --- Settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"over": "all"}, "over must be one of 'workers', 'senders', got 'all'"),
        ({"clip_norm": 0.0}, "clip_norm must be above zero and finite, got 0.0"),
        ({"clip_norm": -1.0}, "clip_norm must be above zero and finite, got -1.0"),
        ({"clip_norm": math.inf}, "clip_norm must be above zero and finite, got inf"),
        ({"clip_norm": math.nan}, "clip_norm must be above zero and finite, got nan"),
        ({"trimmed": 0.5}, "trimmed must be at least 0 and below 0.5, got 0.5"),
        ({"trimmed": -0.1}, "trimmed must be at least 0 and below 0.5, got -0.1"),
        ({"trimmed": math.nan}, "trimmed must be at least 0 and below 0.5, got nan"),
    ],
)
def test_what_cannot_be_is_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mean(**settings_)
    assert str(caught.value) == message


def test_only_the_plain_mean_can_be_left_to_a_link() -> None:
    assert Mean().plain
    assert Mean(over="senders").plain, "what may be averaged on the wire is sent by all"
    assert not Mean().needs_norms
    for over in ("workers", "senders"):
        for other in (Mean(over, clip_norm=1.0), Mean(over, median_norm=True), Mean(over, trimmed=0.1)):
            assert not other.plain
    assert Mean(clip_norm=1.0).needs_norms
    assert Mean(median_norm=True).needs_norms
    assert not Mean(trimmed=0.1).needs_norms


# --- Norms -----------------------------------------------------------------------------------------------------------------


def test_without_settings_nothing_is_rescaled() -> None:
    assert Mean().factors([1.0, 0.0, 100.0]) == [1.0, 1.0, 1.0]


def test_clipping_leaves_small_norms_alone_and_brings_large_ones_down() -> None:
    norms = [0.5, 2.0, 8.0, 0.0]
    factors = Mean(clip_norm=2.0).factors(norms)
    assert factors == [1.0, 1.0, 0.25, 1.0]
    assert all(f * n <= 2.0 for f, n in zip(factors, norms, strict=True))


def test_the_median_norm_is_everybodys_norm() -> None:
    norms = [1.0, 4.0, 2.0, 1000.0, 0.5]
    assert [f * n for f, n in zip(Mean(median_norm=True).factors(norms), norms, strict=True)] == pytest.approx([2.0] * 5)
    assert Mean(median_norm=True).factors([1e6, 3.0]) == [pytest.approx(3e-6), 1.0], "of two, the smaller: one may lie"
    assert Mean(median_norm=True).factors([3.0, 0.0, 3.0]) == [1.0, 1.0, 1.0], "nothing stays nothing"


def test_the_median_norm_is_clipped_too() -> None:
    norms = [1.0, 4.0, 8.0]
    factors = Mean(median_norm=True, clip_norm=2.0).factors(norms)
    assert [f * n for f, n in zip(factors, norms, strict=True)] == pytest.approx([2.0] * 3)


# --- Entries that all sent -------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 1000))
@calm
def test_columns_are_summed_in_rank_order(workers: int, m: int, seed: int) -> None:
    values = contributions(workers, m, seed)
    total = np.zeros(m, np.float32)
    for row in values:
        total += row
    for over in ("workers", "senders"):
        assert np.array_equal(Mean(over=over).columns(values, ones(workers)), total / np.float32(workers))


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 1000))
@calm
def test_weights_count_as_often_as_they_say(workers: int, m: int, seed: int) -> None:
    values = contributions(workers, m, seed)
    weights = np.random.default_rng(seed).integers(1, 5, workers)
    repeated = np.repeat(values.astype(np.float64), weights, axis=0).mean(axis=0)
    np.testing.assert_allclose(Mean().columns(values, weights.astype(np.float32)), repeated, atol=1e-5)


@given(st.integers(1, 12), st.floats(0, 0.499), st.integers(0, 1000))
@calm
def test_trimmed_columns_are_the_mean_of_the_middle(workers: int, trimmed: float, seed: int) -> None:
    values = contributions(workers, 7, seed)
    by_hand = [slow_trimmed(column, trimmed) for column in values.T.tolist()]
    np.testing.assert_allclose(Mean(trimmed=trimmed).columns(values, ones(workers)), by_hand, atol=1e-5)


@pytest.mark.parametrize(
    ("workers", "trimmed", "left"),
    [(5, 0.2, 3), (10, 0.3, 4), (10, 0.1, 8), (4, 0.2, 4), (3, 0.34, 1), (7, 0.4, 3), (100, 0.29, 42)],
)
def test_how_many_are_left_out(workers: int, trimmed: float, left: int) -> None:
    """0.3 times 10 is three, whatever floats say."""
    values = np.zeros((workers, 1), np.float32)
    cut = (workers - left) // 2
    values[workers - cut :] = 1e6
    values[cut : workers - cut] = 1
    assert Mean(trimmed=trimmed).columns(values, ones(workers)).tolist() == [1.0]


# --- Entries that some sent ------------------------------------------------------------------------------------------------


@given(st.data())
@settings(calm, max_examples=examples(300))
def test_entries_are_those_of_a_slow_loop(data: st.DataObject) -> None:
    workers, m = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    over = data.draw(st.sampled_from(["workers", "senders"]))
    mean = Mean(over=over, trimmed=data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.2, 0.34, 0.49])))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    places = np.stack([rng.permutation(max(m, 12))[:m] for _ in range(workers)])
    values = rng.standard_normal((workers, m)).astype(np.float32)
    values[rng.random((workers, m)) < 0.2] = 0
    weights = ones(workers) if mean.trimmed or data.draw(st.booleans()) else rng.integers(1, 4, workers).astype(np.float32)
    place, found = mean.entries(places.copy(), values.copy(), weights)
    by_hand = slow_entries(mean, places, values, weights)
    assert place.tolist() == sorted(by_hand), "in ascending order, each once"
    np.testing.assert_allclose(found, [by_hand[p] for p in place.tolist()], atol=1e-5)


def test_entries_by_hand() -> None:
    places = np.array([[5, 2], [2, 9]])
    values = np.array([[1.0, 3.0], [5.0, -2.0]], np.float32)
    for mean, by_hand in [(Mean(), [4.0, 0.5, -1.0]), (Mean(over="senders"), [4.0, 1.0, -2.0])]:
        place, found = mean.entries(places, values, ones(2))
        assert place.tolist() == [2, 5, 9]
        assert found.tolist() == by_hand
    weights = np.array([3.0, 1.0], np.float32)
    assert Mean().entries(places, values, weights)[1].tolist() == [14 / 4, 3 / 4, -2 / 4]
    assert Mean(over="senders").entries(places, values, weights)[1].tolist() == [14 / 4, 1.0, -2.0]


def test_an_entry_that_only_workers_without_weight_sent_is_zero() -> None:
    """A weight of zero is allowed; zero over zero must not reach the model."""
    places, values = np.array([[0], [1]]), np.array([[1.0], [2.0]], np.float32)
    for over in ("workers", "senders"):
        place, mean = Mean(over=over).entries(places, values.copy(), np.array([0, 1], np.float32))
        assert dict(zip(place.tolist(), mean.tolist(), strict=True)) == {0: 0.0, 1: 2.0}


def test_entries_that_all_sent_are_columns() -> None:
    values = contributions(5, 30)
    order = np.random.default_rng(0).permutation(30)
    places = np.broadcast_to(order, (5, 30)).copy()
    for mean in (Mean(), Mean(over="senders"), Mean(trimmed=0.2), Mean(over="senders", trimmed=0.3)):
        place, found = mean.entries(places, values, ones(5))
        assert place.tolist() == list(range(30))
        np.testing.assert_allclose(found, mean.columns(values, ones(5))[np.argsort(order)], atol=1e-6)


def test_a_single_worker_is_its_own_mean_bit_for_bit() -> None:
    values = contributions(1, 50)
    places = np.random.default_rng(0).permutation(50)[None]
    for mean in (Mean(), Mean(over="senders"), Mean(trimmed=0.4)):
        assert np.array_equal(mean.entries(places, values.copy(), ones(1))[1], values[0][np.argsort(places[0])])
        assert np.array_equal(mean.columns(values, ones(1)), values[0])


def test_the_same_contributions_give_the_same_bits_whatever_the_order_within_each() -> None:
    """Sums go by rank, not by the order in which a worker lists its entries."""
    values, rng = contributions(7, 40), np.random.default_rng(1)
    places = np.stack([rng.permutation(60)[:40] for _ in range(7)])
    shuffled = np.stack([rng.permutation(40) for _ in range(7)])
    a = Mean().entries(places.copy(), values.copy(), ones(7))
    b = Mean().entries(np.take_along_axis(places, shuffled, 1), np.take_along_axis(values, shuffled, 1), ones(7))
    assert a[0].tobytes() == b[0].tobytes()
    assert a[1].tobytes() == b[1].tobytes()


# --- A liar ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [1e6, -1e6, 3e37])
@pytest.mark.parametrize("rank", [0, 2, 4])
def test_a_trimmed_mean_stays_among_the_honest(lie: float, rank: int) -> None:
    values = contributions(5, 200)
    honest = np.delete(values, rank, axis=0)
    values[rank] = lie
    mean = Mean(trimmed=0.2).columns(values, ones(5))
    assert (mean >= honest.min(axis=0)).all()
    assert (mean <= honest.max(axis=0)).all()
    assert np.abs(Mean().columns(values, ones(5))).min() > 1000, "the plain mean does not"


@pytest.mark.parametrize("over", ["workers", "senders"])
@pytest.mark.parametrize("lie", [1e6, -1e6])
def test_a_liar_cannot_move_an_entry_that_the_others_sent(over: Any, lie: float) -> None:
    values = contributions(5, 40)
    honest = values[1:].copy()
    values[0] = lie
    places = np.broadcast_to(np.arange(40), (5, 40)).copy()
    _, mean = Mean(over=over, trimmed=0.2).entries(places, values, ones(5))
    assert (mean >= honest.min(axis=0) - 1e-6).all()
    assert (mean <= honest.max(axis=0) + 1e-6).all()


@pytest.mark.parametrize("lie", [1e6, -1e6])
def test_over_workers_an_entry_that_only_a_liar_sent_is_nothing(lie: float) -> None:
    """Those who did not send it stand for zeros; over senders the liar would be believed."""
    places = np.array([[7, 8], [1, 2], [1, 2], [1, 2], [1, 2]])
    values = np.array([[lie, lie]] + [[1.0, 1.0]] * 4, np.float32)
    place, mean = Mean(trimmed=0.2).entries(places, values, ones(5))
    assert dict(zip(place.tolist(), mean.tolist(), strict=True)) == {1: 1.0, 2: 1.0, 7: 0.0, 8: 0.0}


def test_by_the_median_norm_a_liar_weighs_no_more_than_the_others() -> None:
    """It moves the mean by a fifth of the median norm in either direction, and no further."""
    values = contributions(5, 1000)
    honest = values[1:]
    values[0] *= 1e8
    norms = [float(np.linalg.norm(v.astype(np.float64))) for v in values]
    mean = Mean(median_norm=True)
    scaled = values * np.array(mean.factors(norms), np.float32)[:, None]
    median = float(np.median(norms))
    assert median < 1.1 * max(np.linalg.norm(honest, axis=1))
    without = mean.columns(np.r_[np.zeros((1, 1000), np.float32), scaled[1:]], ones(5))
    with_liar = mean.columns(scaled, ones(5))
    assert np.linalg.norm(with_liar - without) <= median / 5 * (1 + 1e-5)


# --- Through a codec that is not a chain -----------------------------------------------------------------------------------


def dense_messages(workers: int) -> tuple[Dense, list[Any], list[list[torch.Tensor]]]:
    codec = Dense(gather=True)
    sent = [[torch.randn(6, 5), torch.randn(()), torch.randn(0), torch.randn(4)] for _ in range(workers)]
    return codec, [codec.encode(s) for s in sent], sent


def flat(tensors: list[torch.Tensor]) -> NDArray[np.float64]:
    return torch.cat([t.reshape(-1) for t in tensors]).double().numpy()


@pytest.mark.parametrize(
    "mean",
    [
        Mean(),
        Mean(over="senders"),
        Mean(clip_norm=3.0),
        Mean(median_norm=True),
        Mean(trimmed=0.2),
        Mean(median_norm=True, trimmed=0.3),
    ],
)
def test_dense_messages_are_combined_by_the_same_rules(mean: Mean) -> None:
    codec, messages, sent = dense_messages(5)
    rows = np.stack([flat(s) for s in sent])
    norms = np.linalg.norm(rows, axis=1)
    if mean.median_norm:
        rows *= (sorted(norms)[(len(norms) - 1) // 2] / norms)[:, None]
    if mean.clip_norm:
        rows *= np.minimum(1, mean.clip_norm / norms)[:, None]
        assert (norms > 3).any()
    by_hand = [slow_trimmed(column, mean.trimmed) for column in rows.T.tolist()]
    combined = codec.combine(Messages(messages, sent[0], mean=mean))
    assert [t.shape for t in combined] == [t.shape for t in sent[0]]
    np.testing.assert_allclose(flat(combined), by_hand, atol=1e-5)


def test_dense_messages_are_weighted() -> None:
    codec, messages, sent = dense_messages(3)
    by_hand = (2 * flat(sent[0]) + flat(sent[1]) * 0.5 + 0 * flat(sent[2])) / 2.5
    np.testing.assert_allclose(flat(codec.combine(Messages(messages, sent[0], weights=[2.0, 0.5, 0.0]))), by_hand, atol=1e-5)
