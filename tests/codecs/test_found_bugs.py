"""Bugs that independent tests found, one test each."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.codecs.test_indices import BLOCKS, SIZES, every_code
from tests.codecs.test_values import every_format, normal, row
from thinwire.codecs import (
    DCT,
    All,
    Chain,
    Codec,
    Dense,
    Float,
    Hadamard,
    Identity,
    Int8,
    Mean,
    Messages,
    RandomK,
    RandomOrthogonal,
    Sign,
    Striding,
    TopK,
    TwoBit,
)
from thinwire.codecs.bits import pack
from thinwire.codecs.indices import Bitmap, IndexCode, Packed, index_code
from thinwire.codecs.stages import Row
from thinwire.codecs.transforms import Transform
from thinwire.codecs.values import Values
from thinwire.codecs.wire import PART_NBYTES
from thinwire.core.average import average, share
from thinwire.errors import ConfigError, NonFiniteRound, WireError
from thinwire.links import Link, SoloLink
from thinwire.sim import World


@pytest.mark.parametrize("codec", [Float(), DCT(8) >> RandomK(2), Float("bf16")], ids=repr)
@pytest.mark.parametrize("tensors", [[], [torch.empty(0, 4)]])
def test_nothing_to_send_is_an_empty_message(codec: Codec, tensors: list[Tensor]) -> None:
    message = codec.encode(tensors)
    assert message.nbytes == 0
    assert [t.shape for t in codec.decode(message, tensors)] == [t.shape for t in tensors]
    assert codec.encode(tensors, spare=3).data.tolist() == [0, 0, 0]


def test_an_entry_that_only_workers_without_weight_sent_is_zero() -> None:
    place, mean = Mean(over="senders").entries(
        np.array([[0], [1]]), np.array([[1.0], [2.0]], np.float32), np.array([0, 1], np.float32)
    )
    assert dict(zip(place.tolist(), mean.tolist(), strict=True)) in ({0: 0.0, 1: 2.0}, {1: 2.0})


@pytest.mark.parametrize("transform", [DCT(4), DCT(8), Hadamard(8)], ids=repr)
@pytest.mark.parametrize("values", [Sign(), TwoBit(), Int8()], ids=repr)
def test_all_of_a_transform_takes_no_more_bytes_than_sent_whole(transform: Transform, values: Values) -> None:
    like = [torch.empty(64, 64, device="meta")]
    chain = Chain(transform, values=values)
    assert chain.nbytes(like) <= Chain(values=values).nbytes(like)


@pytest.mark.parametrize("codec", [RandomK(1) >> Sign(), Striding(4) >> TwoBit()], ids=repr)
def test_many_small_tensors_take_no_more_bytes_than_sent_whole(codec: Chain) -> None:
    like = [torch.empty(9, device="meta")] * 100
    assert codec.nbytes(like) <= Chain(values=codec.values).nbytes(like)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Sign(), Float()),
        (Float(), DCT(8)),
        (Float(), TopK(3)),
        (TopK(3), Identity()),
        (DCT(8), Identity()),
        (TopK(3), All()),
        (Identity(), DCT(8)),
    ],
    ids=repr,
)
def test_a_stage_that_does_nothing_is_still_a_stage_in_the_wrong_place(a: Codec, b: Codec) -> None:
    with pytest.raises(ConfigError, match="each at most once and in this order"):
        _ = a >> b  # pyright: ignore


def test_a_tiny_contribution_cannot_make_the_mean_infinite() -> None:
    c, x = DCT(64) >> TopK(4), torch.randn(64, 64)
    ms = [c.encode([v]) for v in (x, x.flip(0), x * 1e-42)]
    assert c.combine(Messages(ms, [x], mean=Mean(median_norm=True)))[0].isfinite().all()


@pytest.mark.parametrize("codec", [TopK(3), RandomK(3), Dense(gather=True)], ids=repr)
@pytest.mark.parametrize("workers", [2, 5])
def test_a_trimmed_mean_refuses_weights(codec: Codec, workers: int) -> None:
    x = [torch.randn(20, 20)]
    with pytest.raises(ConfigError, match="takes no weights"):
        codec.combine(Messages([codec.encode(x)] * workers, x, mean=Mean(trimmed=0.2), weights=[1.0] * (workers - 1) + [3.0]))


@pytest.mark.parametrize("codec", [TopK(3), RandomK(3), Dense(gather=True)], ids=repr)
def test_as_many_weights_as_messages(codec: Codec) -> None:
    x = [torch.randn(20, 20)]
    with pytest.raises(ConfigError, match="1 weights for 2 workers"):
        codec.combine(Messages([codec.encode(x)] * 2, x, weights=[2.0]))


def test_slots_of_a_domain_that_changes_have_the_shapes_of_their_tensors() -> None:
    c, x = RandomOrthogonal(64) >> TopK(100), [torch.randn(60, 64)]
    with pytest.raises(ConfigError, match=r"slot 0 must be float32\[60, 64\]"):
        c.accumulate([torch.zeros(64, 64)], x, decay=0.0)
    with pytest.raises(ConfigError, match=r"slot 0 must be float32\[60, 64\]"):
        c.encode_slots([torch.zeros(64, 64)], x, round=3)


def test_int8_minus_128_is_not_a_code() -> None:
    with pytest.raises(WireError, match="-128"):
        Int8().read(np.array([0x80, 0x3F, 0x80], np.uint8), row(1, 1), 0, 1)


@pytest.mark.parametrize("values", [Sign(), TwoBit()], ids=repr)
def test_large_but_finite_values_stay_finite(values: Values) -> None:
    assert np.isfinite(values.write(np.full(32, 3e37, np.float32), row(32, 32))[1]).all()


@every_code([*SIZES, *BLOCKS])
def test_the_last_sets_survive(code: IndexCode) -> None:
    L, k = code.L, code.k
    sets = [np.arange(L - k, L)]
    if k < L:
        sets += [np.arange(L - k - 1, L - 1), *(np.r_[i, np.arange(L - k + 1, L)] for i in (0, L - k - 1))]
    if k < L - 5:
        sets += [np.r_[np.arange(j), np.arange(L - k + j, L)] for j in range(k)]
    rows = np.stack(sets)
    assert np.array_equal(code.decode(code.encode(rows), len(rows)), rows)


@pytest.mark.parametrize("L", [1, 8, 12])
def test_no_sets_at_all(L: int) -> None:
    assert Bitmap(L, 1).decode(np.empty(0, np.uint8), 0).shape == (0, 1)


@pytest.mark.parametrize("k", [8, 16])
def test_the_chosen_code_of_one_block_is_not_larger_than_packed(k: int) -> None:
    assert index_code(4096, k, 1).nbytes(1) <= Packed(4096, k).nbytes(1)


def test_narrow_dtypes_pack() -> None:
    assert pack(np.array([5], np.uint8), 16).tolist() == [5, 0]
    assert pack(np.array([5], np.uint16), 24).tolist() == [5, 0, 0]


@every_format
def test_an_empty_range_reads_as_nothing(values: Values) -> None:
    raw, _ = values.write(normal(8), row(8, 4))
    assert len(values.read(raw, row(8, 4), 4, 4)) == 0
    assert len(values.read(np.empty(0, np.uint8), row(0, 4), 0, 0)) == 0


@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copied_chain_goes_on_as_the_original(copied) -> None:
    chain = DCT(64) >> TopK(3)
    assert copied(chain) >> Sign() == chain >> Sign()


def test_a_bad_gradient_does_not_enter_slots_that_outlive_the_round() -> None:
    chain, gradient = DCT(4) >> TopK(2), [torch.full((8, 8), float("nan"))]
    slots = [torch.ones(s) for s in chain.slot_shapes(gradient)]
    with pytest.raises(NonFiniteRound):
        share(SoloLink(), chain, slots, gradient, decay=0.5, scale=1.0)
    assert torch.equal(slots[0], torch.ones(8, 8))


@pytest.mark.parametrize("codec", [RandomK(2), Float(), TopK(2), Sign()], ids=repr)
def test_a_worker_whose_shards_are_all_empty_takes_part(codec: Codec) -> None:
    mean, _ = average(SoloLink(), codec, [torch.empty(0, 5)])
    assert [m.shape for m in mean] == [(0, 5)]


@pytest.mark.parametrize("seed", ["a", 1.5, -1, True])
def test_a_seed_is_a_whole_number(seed) -> None:
    with pytest.raises(ConfigError, match="seed of RandomK must be a whole number"):
        RandomK(2, seed=seed)
    with pytest.raises(ConfigError, match="seed of RandomOrthogonal must be a whole number"):
        RandomOrthogonal(64, seed=seed)


def test_a_stage_alone_can_be_shared() -> None:
    x = [torch.arange(16.0).view(4, 4)]
    slots = [torch.zeros(4, 4)]
    got = share(SoloLink(), TopK(2), slots, x, decay=0.0, scale=1.0)
    got.take_from(slots)
    assert slots[0].flatten()[-3:].tolist() == [13.0, 0.0, 0.0]


def test_only_the_ratios_of_weights_matter() -> None:
    codec, x = TopK(1) >> Sign(), torch.full((64,), 1e-10)
    for weights in ([3e38, 3e38], [1e-38, 1e-38], [7.0, 7.0]):
        got = codec.combine(Messages([codec.encode([x])] * 2, [x], weights=weights))[0]
        assert torch.equal(got, codec.decode(codec.encode([x]), [x])[0])
    with pytest.raises(ConfigError, match="zero"):
        codec.combine(Messages([codec.encode([x])] * 2, [x], weights=[0.0, 0.0]))


def test_sums_go_from_left_to_right() -> None:
    tiny = 2.0**-24
    values = np.array([[1.0], [tiny], [tiny]], np.float32)
    _, mean = Mean().entries(np.zeros((3, 1), np.int64), values, np.ones(3, np.float32))
    assert mean[0] == Mean().columns(values, np.ones(3, np.float32))[0] == np.float32(1) / np.float32(3)


@pytest.mark.parametrize("n", range(1, 200))
def test_a_vector_never_takes_more_bytes_than_sent_whole(n: int) -> None:
    like = [torch.empty(n, device="meta")]
    for values in (Sign(), TwoBit(), Int8(), Float("bf16")):
        for k in (1, 2, 8, 32):
            assert (TopK(k) >> values).nbytes(like) - PART_NBYTES <= values.nbytes_of(Row(256, (n,)))


def test_a_large_group_takes_no_more_memory_than_its_values() -> None:
    raw, _ = Int8(10**12).write(normal(10), row(10, 4))
    assert len(raw) == 12


def test_a_weight_that_nobody_asked_for_is_refused() -> None:
    def worker(link: Link) -> str:
        try:
            average(link, TopK(1), [torch.ones(4)], **({"weight": 5.0} if link.rank else {}))
        except WireError as error:
            return str(error)
        return ""

    assert World(2).run(worker)[0] == "the message of rank 1: weight 5, where this worker gives no weight"


@pytest.mark.parametrize("codec", [RandomK(8) >> Float("bf16"), RandomK(8), Striding(8) >> Sign(), TopK(2) >> Sign()], ids=repr)
def test_a_nan_that_is_not_selected_is_found_all_the_same(codec: Chain) -> None:
    x = torch.ones(64, 64)
    for place in range(0, 64, 9):
        x.fill_(1)[place, place] = float("nan")
        with pytest.raises(NonFiniteRound):
            average(SoloLink(), codec, [x])
        with pytest.raises(NonFiniteRound):
            share(SoloLink(), codec, [x.clone()], [x])


def test_a_decay_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay=0\.5 without scale does nothing"):
        share(SoloLink(), TopK(2), [torch.ones(4, 4)], [torch.ones(4, 4)], decay=0.5)


def test_a_negative_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="round must be a whole number of at least 0, got -1"):
        average(SoloLink(), TopK(2), [torch.ones(4)], round=-1)


def test_trimming_always_leaves_something() -> None:
    mean = Mean(trimmed=0.4999999999).columns(np.array([[1.0], [3.0]], np.float32), np.ones(2, np.float32))
    assert mean.tolist() == [2.0]


def test_a_stage_alone_tells_the_shapes_of_its_slots() -> None:
    assert TopK(32).slot_shapes([torch.empty(70, 10)]) == [(128, 10)]
