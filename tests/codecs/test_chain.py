"""Chains: every legal combination against a slow reader that knows nothing but the description of a message."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.tiers import diagonals, examples, first_quick
from thinwire import kernels
from thinwire.codecs import (
    DCT,
    All,
    Chain,
    Dense,
    Float,
    Fp4,
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
from thinwire.codecs import layout as layout_module
from thinwire.codecs.base import Codec
from thinwire.codecs.indices import index_code
from thinwire.codecs.layout import as_matrix
from thinwire.codecs.message_plan import plan_of
from thinwire.codecs.stages import Row
from thinwire.codecs.wire import PART_NBYTES
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload

calm = settings(deadline=None, database=None, derandomize=True)
Shape = tuple[int, ...]
F64 = NDArray[np.float64]

TRANSFORMS = [Identity(), Identity(8), DCT(8), DCT(5), Hadamard(8), RandomOrthogonal(8, seed=3)]
SELECTIONS = [All(), TopK(1), TopK(5), TopK(0.1), TopK(20), RandomK(4), RandomK(0.3, seed=9), Striding(3), Striding(0.2)]
VALUES = [Float(), Float("bf16"), Float("fp16"), Int8(), Fp4(), Fp4(16), TwoBit(), Sign(), Sign(7)]
FIXED = [t for t in TRANSFORMS if not t.changes]

shape = st.lists(st.integers(0, 40), max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 1500)
shapes_ = st.lists(shape, max_size=5).filter(lambda shapes: any(map(math.prod, shapes)))
chains = st.builds(Chain, st.sampled_from(TRANSFORMS), st.sampled_from(SELECTIONS), st.sampled_from(VALUES))
fixed_chains = st.builds(Chain, st.sampled_from(FIXED), st.sampled_from(SELECTIONS), st.sampled_from(VALUES))
linear_chains = st.builds(Chain, st.sampled_from(TRANSFORMS), st.sampled_from([s for s in SELECTIONS if not s.indexed]))
rounds = st.integers(0, 1000)
seeds = st.integers(0, 10**6)


def contribution(shapes: Sequence[Shape], seed: int = 0) -> list[Tensor]:
    """Normal numbers, some of them zero and some much larger."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for s in shapes:
        x = torch.randn(s, generator=g)
        x = x * torch.exp(torch.randn(s, generator=g))
        out.append(torch.where(torch.rand(s, generator=g) < 0.1, torch.zeros(s), x))
    return out


def meta(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(t.shape, device="meta") for t in tensors]


def empty_slots(chain: Chain, like: Sequence[Tensor], fill: float = 0.0) -> list[Tensor]:
    return [torch.full(s, fill) for s in chain.slot_shapes(like)]


def energy(x: F64 | Tensor) -> float:
    return float((torch.as_tensor(x).double() ** 2).sum())


# --- The slow codec --------------------------------------------------------------------------------------------------------


@dataclass
class Slow:
    """A tensor's part of a message: coefficients [blocks, L] (or all entries, flat) and which of them were sent."""

    values: F64
    sent: NDArray[np.bool_]


def sides(chain: Chain, shape: Shape) -> tuple[int, int]:
    rows, cols = as_matrix(shape)
    return (1 if rows == 1 else chain.transform.length(rows)), chain.transform.length(cols)


def bases(chain: Chain, shape: Shape, round: int) -> tuple[F64, F64]:
    made = [chain.transform.basis(n, round) if n > 1 else None for n in sides(chain, shape)]
    h, w = (np.eye(n) if P is None else P for n, P in zip(sides(chain, shape), made, strict=True))
    return h, w


def slow_blocks(chain: Chain, x: Tensor, round: int = 0) -> F64:
    """Coefficients [blocks, L] of a tensor, in float64."""
    (rows, cols), (h, w), (P_h, P_w) = (
        as_matrix(tuple(x.shape)),
        sides(chain, tuple(x.shape)),
        bases(chain, tuple(x.shape), round),
    )
    Y, X = -(-rows // h), -(-cols // w)
    full = np.zeros((Y * h, X * w))
    full[:rows, :cols] = x.double().reshape(rows, cols).numpy()
    blocks = full.reshape(Y, h, X, w).transpose(0, 2, 1, 3)
    return (P_h @ blocks @ P_w.T).reshape(Y * X, h * w)


def slow_tensor(chain: Chain, blocks: F64, shape: Shape, round: int = 0) -> F64:
    """The inverse."""
    (rows, cols), (h, w), (P_h, P_w) = as_matrix(shape), sides(chain, shape), bases(chain, shape, round)
    Y, X = -(-rows // h), -(-cols // w)
    back = P_h.T @ blocks.reshape(Y, X, h, w) @ P_w
    return back.transpose(0, 2, 1, 3).reshape(Y * h, X * w)[:rows, :cols].reshape(shape)


def slot_of(chain: Chain, blocks: F64, shape: Shape) -> F64:
    """Blocks side by side, as a slot has them."""
    (rows, cols), (h, w) = as_matrix(shape), sides(chain, shape)
    Y, X = -(-rows // h), -(-cols // w)
    return blocks.reshape(Y, X, h, w).transpose(0, 2, 1, 3).reshape(Y * h, X * w)


def slow_layout(chain: Chain, shapes: Sequence[Shape]) -> tuple[dict[tuple[int, int], list[tuple[int, int]]], list[int]]:
    """Per shape of blocks the tensors and their numbers of blocks; and the tensors that are sent whole."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    whole = []
    for i, s in enumerate(shapes):
        numel = math.prod(s)
        if not numel:
            continue
        (rows, cols), (h, w) = as_matrix(s), sides(chain, s)
        blocks, k = -(-rows // h) * -(-cols // w), chain.selection.count(h * w)
        bits = blocks * index_code(h * w, k).bits if chain.selection.indexed else 0
        bits += chain.values.bits_of(blocks * k, k)
        if isinstance(chain.selection, All):
            dense = isinstance(chain.transform, Identity) or bits > chain.values.bits_of(numel, 256)
        else:
            dense = bits >= chain.values.bits_of(numel, 256)
        if dense:
            whole.append(i)
        else:
            groups.setdefault((h, w), []).append((i, blocks))
    total = chain.values.nbytes_of(whole_row(shapes, whole))
    for (h, w), tensors in groups.items():
        n, k = sum(blocks for _, blocks in tensors), chain.selection.count(h * w)
        total += index_code(h * w, k, n).nbytes(n) if chain.selection.indexed else 0
        total += chain.values.nbytes_of(Row(k, tuple(blocks * k for _, blocks in tensors)))
    if total > chain.values.nbytes_of(whole_row(shapes, range(len(shapes)))):
        return {}, [i for i, s in enumerate(shapes) if math.prod(s)]
    return groups, whole


def whole_row(shapes: Sequence[Shape], whole: Sequence[int]) -> Row:
    return Row(256, tuple(math.prod(shapes[i]) for i in whole))


def slow_read(chain: Chain, payload: Payload, shapes: Sequence[Shape], round: int = 0) -> list[Slow]:
    """A message, section by section: indices of all blocks, values of all blocks; at the end what is sent whole."""
    raw, at = np.frombuffer(payload.to_bytes(), np.uint8), 0 if chain.linear else PART_NBYTES
    out = [Slow(np.zeros(0), np.zeros(0, bool)) for _ in shapes]
    groups, whole = slow_layout(chain, shapes)
    for (h, w), tensors in groups.items():
        n, L = sum(blocks for _, blocks in tensors), h * w
        k = chain.selection.count(L)
        if chain.selection.indexed:
            nbytes = index_code(L, k, n).nbytes(n)
            places = index_code(L, k, n).decode(raw[at : at + nbytes], n)
            at += nbytes
        else:
            places = chain.selection.positions(L, round, 0, n)
        row = Row(k, tuple(blocks * k for _, blocks in tensors))
        nbytes = chain.values.nbytes_of(row)
        values = chain.values.read(raw[at : at + nbytes], row, 0, n * k).reshape(n, k)
        at += nbytes
        dense, sent = np.zeros((n, L)), np.zeros((n, L), bool)
        np.put_along_axis(dense, places, values.astype(np.float64), axis=1)
        np.put_along_axis(sent, places, True, axis=1)
        first = 0
        for i, blocks in tensors:
            out[i] = Slow(dense[first : first + blocks], sent[first : first + blocks])
            first += blocks
    total = sum(math.prod(shapes[i]) for i in whole)
    if total:
        row = whole_row(shapes, whole)
        nbytes = chain.values.nbytes_of(row)
        values = chain.values.read(raw[at : at + nbytes], row, 0, total).astype(np.float64)
        at += nbytes
        for i in whole:
            n = math.prod(shapes[i])
            out[i], values = Slow(values[:n], np.ones(n, bool)), values[n:]
    assert at == len(raw)
    return out


def back_to_tensors(chain: Chain, parts: Sequence[F64], shapes: Sequence[Shape], round: int = 0) -> list[F64]:
    whole = slow_layout(chain, shapes)[1]
    return [
        p.reshape(s) if i in whole or not math.prod(s) else slow_tensor(chain, p, s, round)
        for i, (p, s) in enumerate(zip(parts, shapes, strict=True))
    ]


def assert_same(tensors: Sequence[Tensor], by_hand: Sequence[F64], tolerance: float = 1e-5) -> None:
    for t, b in zip(tensors, by_hand, strict=True):
        assert t.dtype == torch.float32
        assert tuple(t.shape) == b.shape
        size = np.abs(b).max(initial=0)
        np.testing.assert_allclose(t.numpy(), b, rtol=1e-5, atol=tolerance * max(1.0, size))


# --- Every legal combination -----------------------------------------------------------------------------------------------


@given(chains, shapes_, rounds, seeds)
@settings(calm, max_examples=examples(400))
def test_length_is_predicted_exactly_and_the_message_reads_as_described(
    chain: Chain, shapes: list[Shape], round: int, seed: int
) -> None:
    tensors = contribution(shapes, seed)
    before = [t.clone() for t in tensors]
    predicted = chain.nbytes(meta(tensors))
    payload = chain.encode(tensors, round=round)
    assert payload.nbytes == predicted
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True)), "encoding changed its input"
    told = slow_read(chain, payload, shapes, round)
    decoded = chain.decode(payload, meta(tensors), round=round)
    assert_same(decoded, back_to_tensors(chain, [s.values for s in told], shapes, round))


@given(chains, shapes_, rounds, seeds)
@settings(calm, max_examples=examples(400))
def test_the_error_is_what_was_not_selected_and_what_was_rounded(
    chain: Chain, shapes: list[Shape], round: int, seed: int
) -> None:
    tensors = contribution(shapes, seed)
    payload = chain.encode(tensors, round=round)
    decoded = chain.decode(payload, tensors, round=round)
    whole = slow_layout(chain, shapes)[1]
    for i, (x, told, back) in enumerate(zip(tensors, slow_read(chain, payload, shapes, round), decoded, strict=True)):
        if not x.numel():
            continue
        truth = x.double().reshape(-1).numpy() if i in whole else slow_blocks(chain, x, round)
        assert energy(truth) == pytest.approx(energy(x), rel=1e-9), "Parseval"
        left_out = energy(np.where(told.sent, 0, truth))
        rounding = energy(np.where(told.sent, told.values - truth, 0))
        error, slack = energy(back.double() - x.double()), 1e-5 * (energy(x) + energy(back) + 1e-6)
        assert error <= left_out + rounding + slack
        padding = i not in whole and told.values.size > x.numel()
        if not padding:
            assert error >= left_out + rounding - slack, "and no less where there is no padding to hide in"
        if i in whole:
            assert left_out == 0
        else:
            k = chain.selection.count(truth.shape[1])
            assert (told.sent.sum(axis=1) == k).all()
            if chain.selection.indexed:
                best = energy(np.sort(np.abs(truth), axis=1)[:, -k:])
                assert energy(truth) - left_out == pytest.approx(best, rel=1e-5, abs=1e-6), "the k largest of each block"


@given(chains, shapes_, rounds, seeds)
@settings(calm, max_examples=examples(200))
def test_rounding_is_that_of_the_value_format(chain: Chain, shapes: list[Shape], round: int, seed: int) -> None:
    """Kept coefficients against the same values written by themselves: the format sees them in the order of the blocks."""
    tensors = contribution(shapes, seed)
    told = slow_read(chain, chain.encode(tensors, round=round), shapes, round)
    groups, whole = slow_layout(chain, shapes)
    sections = [([i for i, _ in g], chain.selection.count(h * w)) for (h, w), g in groups.items()]
    for members, k in [*sections, (whole, 256)]:
        if not members:
            continue
        truth = [
            tensors[i].double().reshape(-1).numpy() if k == 256 and i in whole else slow_blocks(chain, tensors[i], round)
            for i in members
        ]
        kept = np.concatenate([t[told[i].sent] for t, i in zip(truth, members, strict=True)])
        read = np.concatenate([told[i].values[told[i].sent] for i in members])
        row = Row(k, tuple(int(told[i].sent.sum()) for i in members))
        alone = chain.values.write(kept.astype(np.float32), row)[1].astype(np.float64)
        assert energy(read - kept) <= 1.001 * energy(alone - kept) + 1e-5 * energy(kept) + 1e-9
    if chain.values == Float():
        for x, back in zip(tensors, chain.decode(chain.encode(tensors, round=round), tensors, round=round), strict=True):
            if isinstance(chain.selection, All):
                torch.testing.assert_close(back, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", VALUES, ids=repr)
@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_a_tensor_never_takes_more_bytes_than_sent_whole_in_the_same_format(selection: Any, values: Any) -> None:
    shapes: list[Shape] = [
        (),
        (1,),
        (2,),
        (9,),
        (64,),
        (65,),
        (100,),
        (3, 5),
        (8, 8),
        (9, 9),
        (64, 64),
        (1, 300),
        (300, 1),
        (17, 4, 3),
    ]
    for transform, s in itertools.product(TRANSFORMS, shapes):
        if isinstance(selection, All) and not isinstance(transform, Identity):
            continue
        like = [torch.empty(s, device="meta")]
        chain = Chain(transform, selection, values)
        assert chain.nbytes(like) - (0 if chain.linear else PART_NBYTES) <= values.nbytes_of(Row(256, (math.prod(s),)))


def test_small_tensors_are_sent_whole_and_exactly() -> None:
    """Half of 64 entries with their indices cost more than all of them in one bit; a matrix does not."""
    chain = DCT(64) >> TopK(32) >> Sign()
    small, large = torch.randn(64), torch.randn(128, 128)
    assert chain.nbytes([small]) == PART_NBYTES + 64 // 8 + 2
    assert slow_layout(chain, [(64,), (128, 128)])[1] == [0]
    assert chain.slot_shapes([small, large]) == [(64,), (128, 128)]
    exact = (DCT(64) >> TopK(64)).encode([small])
    assert exact.to_bytes()[PART_NBYTES:] == small.numpy().tobytes()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_chain_of_floats_alone_is_dense(name: str) -> None:
    tensors = contribution([(), (7,), (0,), (3, 50), (2, 3, 4)])
    chain, dense = Float(name), Dense(name)
    assert chain.linear
    assert chain.encode(tensors).to_bytes() == dense.encode(tensors).to_bytes()
    assert all(map(torch.equal, chain.decode(chain.encode(tensors), tensors), dense.decode(dense.encode(tensors), tensors)))


@pytest.mark.parametrize("transform", FIXED[1:], ids=repr)
def test_all_of_a_transform_loses_nothing(transform: Any) -> None:
    tensors = contribution([(40, 80), (16, 8), (8,), (24, 5, 5)])
    for t, d in zip(tensors, transform.decode(transform.encode(tensors), tensors), strict=True):
        torch.testing.assert_close(d, t, rtol=1e-4, atol=1e-5)


@given(st.sampled_from([Identity(3), DCT(3), DCT(2), Hadamard(2)]), st.integers(1, 3), seeds)
@calm
def test_no_other_choice_of_k_entries_leaves_less(transform: Any, k: int, seed: int) -> None:
    """The best k-term approximation: all subsets of a block are tried."""
    chain = transform >> TopK(k)
    side = transform.block
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(seed))
    # Many copies, of which each block is judged by itself: one alone would be sent whole, being so small.
    many = x.repeat(20, 20)
    error = energy(chain.decode(chain.encode([many]), [many])[0] - many) / 400
    (coefficients,) = slow_blocks(chain, x)
    left = [
        energy(np.delete(coefficients, list(chosen)))
        for chosen in itertools.combinations(range(side * side), min(k, side * side))
    ]
    if slow_layout(chain, [tuple(many.shape)])[1]:
        assert error == 0
    else:
        assert error == pytest.approx(min(left), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chain", [DCT(8) >> TopK(4) >> Sign(), TopK(6) >> Float("bf16"), RandomK(3) >> Int8()], ids=repr)
def test_other_dtypes_are_worked_on_in_float32(chain: Chain, dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in contribution([(30, 40), (7,), (64, 64)])]
    assert chain.encode(tensors).to_bytes() == chain.encode([t.float() for t in tensors]).to_bytes()


def strange_tensors(seed: int = 0) -> list[Tensor]:
    """Memory that is transposed, has gaps, is channels_last, permuted."""
    a, b, c, d, e = contribution([(70, 90), (6, 5, 9, 8), (130, 40), (66,), (3, 7, 11)], seed)
    gaps = [torch.stack([x, torch.full_like(x, 7.0)], dim=-1)[..., 0] for x in (c, d)]
    turned = e.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    out = [a.t().contiguous().t(), b.to(memory_format=torch.channels_last), *gaps, turned]
    assert not any(t.is_contiguous() for t in out)
    return out


@pytest.mark.parametrize(
    "chain", [DCT(8) >> TopK(4), Identity(16) >> TopK(6) >> Sign(), Hadamard(8) >> RandomK(3), Sign()], ids=repr
)
def test_memory_of_any_order_is_read_in_the_order_of_the_entries(chain: Codec) -> None:
    tensors = strange_tensors()
    plain = [t.contiguous() for t in tensors]
    payload = chain.encode(tensors)
    assert payload.to_bytes() == chain.encode(plain).to_bytes()
    for a, b in zip(chain.decode(payload, tensors), chain.decode(payload, plain), strict=True):
        assert torch.equal(a, b)


# --- Batches ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[5000, 40_000])
def small_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """One block of 64 x 64 per batch, or a few: strips are split and tensors share batches."""
    monkeypatch.setattr(layout_module, "BATCH", request.param)
    plan_of.cache_clear()
    yield request.param
    plan_of.cache_clear()


LARGE: list[Shape] = [(200, 900), (64, 64), (900, 70), (3000,), (130, 3), (128, 5, 30), (7,)]
BATCHED = [
    DCT(64) >> TopK(32),
    DCT(64) >> TopK(8) >> Sign(),
    Identity(64) >> TopK(20) >> Int8(),
    RandomOrthogonal(64) >> TopK(32) >> Fp4(),
    Hadamard(64) >> RandomK(0.05) >> Float("bf16"),
    DCT(64) >> Striding(9) >> TwoBit(),
    DCT(64).chain,
]


@pytest.mark.parametrize("chain", BATCHED, ids=repr)
def test_batches_do_not_show_in_a_message(chain: Chain, small_batches: int) -> None:
    workers = [contribution(LARGE, seed) for seed in range(3)]
    messages = [chain.encode(w, round=2) for w in workers]
    told = [slow_read(chain, m, LARGE, 2) for m in messages]
    for x, slow in zip(workers[0], told[0], strict=True):
        truth = slow_blocks(chain, x, 2) if slow.values.ndim == 2 else x.double().reshape(-1).numpy()
        if chain.selection.indexed and slow.values.ndim == 2:
            k = chain.selection.count(truth.shape[1])
            best = energy(np.sort(np.abs(truth), axis=1)[:, -k:])
            assert energy(truth[slow.sent]) == pytest.approx(best, rel=1e-5)
        if chain.values == Float():
            np.testing.assert_allclose(slow.values[slow.sent], truth[slow.sent], rtol=1e-4, atol=1e-4)
    for mean in (Mean(), Mean(over="senders")):
        by_hand = [slow_mean(mean, [w[i] for w in told], [1.0] * 3) for i in range(len(LARGE))]
        combined = chain.combine(Messages(messages, workers[0], round=2, mean=mean))
        assert_same(combined, back_to_tensors(chain, by_hand, LARGE, 2))


@pytest.mark.parametrize("chain", [c for c in BATCHED if not c.transform.changes], ids=repr)
def test_slots_in_batches(chain: Chain, small_batches: int) -> None:
    tensors = contribution(LARGE)
    slots = empty_slots(chain, tensors, fill=math.nan)
    chain.accumulate(slots, tensors, decay=0.0)
    before = [s.clone() for s in slots]
    encoded = chain.encode_slots(slots, tensors, round=4)
    assert encoded.payload.to_bytes() == chain.encode(tensors, round=4).to_bytes()
    encoded.take_from(slots)
    told = slow_read(chain, encoded.payload, LARGE, 4)
    for s, b, slow, shape in zip(slots, before, told, LARGE, strict=True):
        values = slot_of(chain, slow.values, shape) if slow.values.ndim == 2 else slow.values.reshape(shape)
        assert torch.equal(s, b - torch.from_numpy(values).float())


# --- Averages on the wire --------------------------------------------------------------------------------------------------


def test_which_chains_are_linear() -> None:
    """All workers send the same entries, as plain floats."""
    for chain in map(Chain, *zip(*itertools.product(TRANSFORMS, SELECTIONS, VALUES), strict=True)):
        assert chain.linear == (not isinstance(chain.selection, TopK) and isinstance(chain.values, Float))
        dtype = chain.encode([torch.ones(3, 3)]).data.dtype
        assert dtype.is_floating_point == chain.linear


@given(linear_chains, shapes_, rounds, st.integers(1, 4))
@settings(calm, max_examples=examples(150))
def test_the_mean_of_messages_decodes_to_the_mean_of_what_they_say(
    chain: Chain, shapes: list[Shape], round: int, workers: int
) -> None:
    all_of_them = [contribution(shapes, seed) for seed in range(workers)]
    messages = [chain.encode(w, round=round) for w in all_of_them]
    mean = messages[0].like(torch.stack([m.data for m in messages]).mean(dim=0))
    singles = [chain.decode(m, all_of_them[0], round=round) for m in messages]
    by_hand = [torch.stack(each).double().mean(dim=0).numpy() for each in zip(*singles, strict=True)]
    assert_same(chain.decode(mean, all_of_them[0], round=round), by_hand)
    assert_same(chain.combine(Messages(messages, all_of_them[0], round=round)), by_hand)


@pytest.mark.parametrize("chain", [Float("bf16"), DCT(8) >> RandomK(3), Striding(0.5) >> Float("fp16")], ids=repr)
def test_spare_numbers_stand_behind_the_message(chain: Codec) -> None:
    tensors = contribution([(40, 40), (3,)])
    plain, spare = chain.encode(tensors, round=1), chain.encode(tensors, round=1, spare=3)
    assert torch.equal(spare.data[:-3], plain.data)
    assert spare.data[-3:].tolist() == [0, 0, 0]
    assert spare.data.dtype == plain.data.dtype


@pytest.mark.parametrize(
    "chain", [DCT(8) >> RandomK(6), Hadamard(8) >> Striding(6), RandomOrthogonal(8) >> RandomK(6)], ids=repr
)
def test_the_round_decides_what_is_sent(chain: Chain) -> None:
    tensors = contribution([(64, 64)])
    first, second = chain.encode(tensors, round=0), chain.encode(tensors, round=1)
    assert first.to_bytes() != second.to_bytes()
    assert chain.encode(tensors, round=1).to_bytes() == second.to_bytes()


def test_striding_sends_everything_in_turn() -> None:
    """With what was sent taken off, nothing is left after L / k rounds."""
    chain, x = DCT(8) >> Striding(16), contribution([(64, 64)])
    slots = empty_slots(chain, x)
    chain.accumulate(slots, x, decay=0.0)
    total = torch.zeros(64, 64)
    for round in range(4):
        encoded = chain.encode_slots(slots, x, round=round)
        encoded.take_from(slots)
        total += chain.decode(encoded.payload, x, round=round)[0]
    assert not slots[0].any()
    torch.testing.assert_close(total, x[0], rtol=1e-4, atol=1e-5)


# --- The domain of the transform -------------------------------------------------------------------------------------------


@given(fixed_chains, shapes_, rounds, seeds)
@settings(calm, max_examples=examples(200))
def test_slots_say_the_same_as_tensors_byte_for_byte(chain: Chain, shapes: list[Shape], round: int, seed: int) -> None:
    tensors = contribution(shapes, seed)
    slots = empty_slots(chain, tensors, fill=math.nan)  # decay = 0 overwrites whatever was there
    chain.accumulate(slots, tensors, decay=0.0)
    before = [s.clone() for s in slots]
    encoded = chain.encode_slots(slots, meta(tensors), round=round)
    assert all(torch.equal(s, b) for s, b in zip(slots, before, strict=True)), "encoding changed the slots"
    assert encoded.payload.to_bytes() == chain.encode(tensors, round=round).to_bytes()
    assert encoded.finite


@given(fixed_chains, shapes_, seeds, st.floats(0, 2), st.floats(-2, 2))
@settings(calm, max_examples=examples(200))
def test_accumulate_is_its_formula(chain: Chain, shapes: list[Shape], seed: int, decay: float, scale: float) -> None:
    """Slots <- decay * slots + scale * transform(tensors)."""
    old, new = contribution(shapes, seed), contribution(shapes, seed + 1)
    slots = empty_slots(chain, old)
    chain.accumulate(slots, old, decay=0.0)
    chain.accumulate(slots, new, decay=decay, scale=scale)
    whole = slow_layout(chain, shapes)[1]
    for i, (slot, a, b) in enumerate(zip(slots, old, new, strict=True)):
        if not a.numel():
            continue
        mix = decay * a.double() + scale * b.double()
        by_hand = mix.numpy() if i in whole else slot_of(chain, slow_blocks(chain, mix), tuple(a.shape))
        assert_same([slot], [by_hand])


@given(fixed_chains, shapes_, seeds, st.sampled_from([0.0, 0.5, 0.999, 1.0]), st.sampled_from([1.0, 0.1, -1.0]))
@settings(calm, max_examples=examples(150))
def test_to_accumulate_and_encode_in_one_pass_is_to_do_it_in_two(
    chain: Chain, shapes: list[Shape], seed: int, decay: float, scale: float
) -> None:
    old, new = contribution(shapes, seed), contribution(shapes, seed + 1)
    slots = empty_slots(chain, old)
    chain.accumulate(slots, old, decay=0.0)
    one_pass = [s.clone() for s in slots]
    chain.accumulate(slots, new, decay=decay, scale=scale)
    two = chain.encode_slots(slots, new, round=3)
    one = chain.encode_slots(one_pass, new, round=3, decay=decay, scale=scale)
    assert one.payload.to_bytes() == two.payload.to_bytes()
    assert all(map(torch.equal, one_pass, slots))


@given(fixed_chains, shapes_, rounds, seeds, st.sampled_from([1.0, 0.2, 0.5]))
@settings(calm, max_examples=examples(200))
def test_taking_off_leaves_exactly_what_receivers_did_not_read(
    chain: Chain, shapes: list[Shape], round: int, seed: int, alpha: float
) -> None:
    tensors = contribution(shapes, seed)
    slots = empty_slots(chain, tensors)
    chain.accumulate(slots, tensors, decay=0.0)
    before = [s.clone() for s in slots]
    encoded = chain.encode_slots(slots, tensors, round=round)
    encoded.take_from(slots, scale=alpha)
    told = slow_read(chain, encoded.payload, shapes, round)
    for s, b, slow, shape in zip(slots, before, told, shapes, strict=True):
        if not s.numel():
            continue
        values = slot_of(chain, slow.values, shape) if slow.values.ndim == 2 else slow.values.reshape(shape)
        sent = torch.from_numpy(np.asarray(values, np.float32))
        if alpha == 1.0:
            assert torch.equal(s, b - sent), "bit for bit"
        else:
            torch.testing.assert_close(s, b - alpha * sent, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "chain",
    [DCT(8) >> TopK(3) >> Sign(), TopK(5) >> TwoBit(), Hadamard(8) >> RandomK(9) >> Fp4(), DCT(8) >> TopK(4) >> Int8()],
    ids=repr,
)
def test_nothing_is_lost_over_many_rounds(chain: Chain) -> None:
    """All that was sent and what is left add up to all that went in, whatever was rounded on the way."""
    shapes: list[Shape] = [(30, 70), (9,), (16, 16)]
    like = contribution(shapes)
    slots = empty_slots(chain, like)
    sent: list[Any] = [0.0] * 3
    went_in = [np.zeros(s) for s in shapes]
    for round in range(10):
        new = contribution(shapes, seed=round)
        encoded = chain.encode_slots(slots, new, round=round, decay=1.0, scale=1.0)
        encoded.take_from(slots)
        told = slow_read(chain, encoded.payload, shapes, round)
        # By hand in the domain: a transform has padding, where a part of what was sent lies.
        for i, slow in enumerate(told):
            sent[i] = sent[i] + (slow.values if slow.values.ndim == 2 else slow.values.reshape(shapes[i]))
            went_in[i] = went_in[i] + new[i].double().numpy()
    for i, s in enumerate(shapes):
        whole = sent[i].shape == s
        left = went_in[i] - sent[i] if whole else slow_blocks(chain, torch.from_numpy(went_in[i])) - sent[i]
        assert_same([slots[i]], [left if whole else slot_of(chain, left, s)])


def test_what_is_taken_off_depends_on_the_round() -> None:
    chain, x = RandomK(4).chain, contribution([(64, 64)])
    slots = empty_slots(chain, x)
    chain.accumulate(slots, x, decay=0.0)
    for round in (0, 7):
        left = [s.clone() for s in slots]
        encoded = chain.encode_slots(left, x, round=round)
        encoded.take_from(left)
        back = chain.decode(encoded.payload, x, round=round)[0]
        assert torch.equal(left[0], x[0] - back)


def test_slots_of_a_domain_that_changes_stay_outside_of_it() -> None:
    chain = RandomOrthogonal(8) >> TopK(3)
    x = [torch.randn(9, 9), torch.randn(5)]
    assert chain.slot_shapes(x) == [(9, 9), (5,)]
    slots, before = [torch.randn(9, 9), torch.randn(5)], []
    for round in (1, 2):
        before = [0.5 * s + 2 * t for s, t in zip(slots, x, strict=True)]
        encoded = chain.encode_slots(slots, x, round=round, decay=0.5, scale=2.0)
        for s, b in zip(slots, before, strict=True):
            torch.testing.assert_close(s, b)
        sent = chain.decode(encoded.payload, x, round=round)
        encoded.take_from(slots, scale=[0.25, 1.0])
        for s, b, q, part in zip(slots, before, sent, (0.25, 1.0), strict=True):
            torch.testing.assert_close(s, b - part * q)
    other = chain.encode_tensors(before, round=7)
    assert not torch.equal(other.payload.data, chain.encode_tensors(before, round=8).payload.data)


# --- Several workers -------------------------------------------------------------------------------------------------------


def slow_mean(mean: Mean, parts: Sequence[Slow], weights: Sequence[float]) -> F64:
    """Of one tensor's parts in all messages, entry by entry."""
    values, sent = np.stack([p.values for p in parts]), np.stack([p.sent for p in parts])
    if not mean.trimmed:
        share = np.array(weights).reshape(-1, *[1] * (values.ndim - 1))
        below = (share * sent).sum(axis=0) if mean.over == "senders" else np.full(values.shape[1:], sum(weights))
        return np.where(sent.any(axis=0), (values * share).sum(axis=0) / np.where(below > 0, below, 1), 0)
    out = np.zeros(values.shape[1:])
    for at in np.ndindex(out.shape):
        column = values[(slice(None), *at)]
        told = sorted(column[sent[(slice(None), *at)]] if mean.over == "senders" else column)
        cut = math.floor(mean.trimmed * len(told) + 1e-9)
        middle = told[cut : len(told) - cut]
        out[at] = math.fsum(middle) / len(middle) if middle else 0.0
    return out


def rescaled(mean: Mean, messages: list[list[Slow]]) -> list[list[Slow]]:
    """Every message with its norm brought to what the mean asks for."""
    norms = [math.sqrt(sum(energy(p.values) for p in m)) for m in messages]
    target = [float(sorted(norms)[(len(norms) - 1) // 2])] * len(norms) if mean.median_norm else norms
    target = [min(t, mean.clip_norm) for t in target] if mean.clip_norm else target
    factors = [t / n if n else 1.0 for t, n in zip(target, norms, strict=True)]
    return [[Slow(p.values * f, p.sent) for p in m] for m, f in zip(messages, factors, strict=True)]


means = st.sampled_from([
    Mean(),
    Mean(over="senders"),
    Mean(clip_norm=3.0),
    Mean(median_norm=True),
    Mean(over="senders", median_norm=True, clip_norm=5.0),
    Mean(trimmed=0.2),
    Mean(trimmed=0.4, over="senders"),
    Mean(trimmed=0.3, median_norm=True),
])  # fmt: skip


@given(chains, shapes_, rounds, st.integers(1, 6), means, st.booleans())
@settings(calm, max_examples=examples(300))
def test_several_messages_are_combined_as_by_a_slow_loop(
    chain: Chain, shapes: list[Shape], round: int, workers: int, mean: Mean, weighted: bool
) -> None:
    all_of_them = [contribution(shapes, seed) for seed in range(workers)]
    messages = [chain.encode(w, round=round) for w in all_of_them]
    weights = [1.0 + r / 2 for r in range(workers)] if weighted and not mean.trimmed else None
    told = rescaled(mean, [slow_read(chain, m, shapes, round) for m in messages])
    by_hand = [slow_mean(mean, [w[i] for w in told], weights or [1.0] * workers) for i in range(len(shapes))]
    combined = chain.combine(Messages(messages, meta(all_of_them[0]), round=round, mean=mean, weights=weights))
    assert_same(combined, back_to_tensors(chain, by_hand, shapes, round))


@given(chains, shapes_, rounds, st.integers(1, 5))
@settings(calm, max_examples=examples(100))
def test_over_workers_the_mean_of_messages_is_the_mean_of_their_decodes(
    chain: Chain, shapes: list[Shape], round: int, workers: int
) -> None:
    all_of_them = [contribution(shapes, seed) for seed in range(workers)]
    messages = [chain.encode(w, round=round) for w in all_of_them]
    singles = [chain.decode(m, all_of_them[0], round=round) for m in messages]
    by_hand = [torch.stack(each).double().mean(dim=0).numpy() for each in zip(*singles, strict=True)]
    assert_same(chain.combine(Messages(messages, all_of_them[0], round=round)), by_hand)


@pytest.mark.parametrize("chain", [DCT(8) >> TopK(4), TopK(4) >> Sign(), RandomK(5) >> Int8(), Sign()], ids=repr)
def test_the_mean_of_equal_messages_is_the_message(chain: Codec) -> None:
    tensors = contribution([(40, 40), (5,)])
    message = chain.encode(tensors)
    once = chain.decode(message, tensors)
    for mean in (Mean(), Mean(over="senders"), Mean(median_norm=True), Mean(trimmed=0.3)):
        for a, b in zip(once, chain.combine(Messages([message] * 4, tensors, mean=mean)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chain", [DCT(8) >> TopK(4), TopK(4) >> Sign(), DCT(8) >> TopK(4) >> Int8()], ids=repr)
@pytest.mark.parametrize("mean", [Mean(trimmed=0.2), Mean(median_norm=True), Mean(clip_norm=30.0)], ids=repr)
def test_one_liar_of_five_cannot_move_the_mean_far(chain: Chain, mean: Mean) -> None:
    """By no more than a few honest contributions, where the plain mean would follow it anywhere."""
    shared = contribution([(64, 64)], seed=50)[0]
    honest = [[shared + contribution([(64, 64)], seed)[0]] for seed in range(4)]
    lie = [1e6 * contribution([(64, 64)], seed=9)[0]]
    norms = [math.sqrt(energy(chain.decode(chain.encode(h), h)[0])) for h in honest]
    messages = [chain.encode(h) for h in (*honest[:2], lie, *honest[2:])]
    moved = chain.combine(Messages(messages, lie, mean=mean))[0]
    assert math.sqrt(energy(moved)) <= 1.01 * max(*norms, 30.0)
    assert math.sqrt(energy(chain.combine(Messages(messages, lie))[0])) > 1000 * max(norms)


@pytest.mark.parametrize("bad", range(4))
def test_of_indices_that_are_read_together_the_bad_worker_is_named(bad: int) -> None:
    chain = Identity(100) >> TopK(3)
    plan = chain.plan([torch.empty(100)])
    (section,) = plan.sections
    messages = [chain.encode(contribution([(100,)], seed)) for seed in range(4)]
    code = messages[bad].data.view(torch.uint8)[section.start : section.middle]
    code[:] = 0xFF  # too many bits, or padding that is not zero
    with pytest.raises(WireError) as caught:
        chain.combine(Messages(messages, [torch.empty(100)]))
    assert caught.value.rank == bad


@pytest.mark.parametrize(
    ("mean", "values"),
    diagonals(
        [Mean(), Mean(over="senders"), Mean(clip_norm=1.0), Mean(trimmed=0.3)],
        [Sign(), Float("bf16"), Int8(), Fp4(), TwoBit()],
    ),
    ids=repr,
)
@pytest.mark.parametrize(("workers", "parts"), [(2, 1), (40, 1), (5, 3)])
def test_every_message_is_read_once(values: Any, mean: Mean, workers: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their number, and though norms of the mean are asked for before it is applied."""
    monkeypatch.setenv(kernels.SETTING, "off")  # which read past what is counted here
    chain = (DCT(8) >> TopK(8) >> values).split(parts)
    like = contribution([(100, 90), (64, 64), (700,), (7,)])
    messages = Messages([chain.encode(contribution([t.shape for t in like], seed)) for seed in range(workers)], like, mean=mean)
    plan = chain.plan(like)
    assert len(plan.parts) == parts
    indices, read = Counter[str](), Counter[str]()
    decode_all, read_values = type(plan.sections[0].code).decode_all, type(values).read

    def counted_indices(self: Any, codes: Sequence[Any], n: int, start: int = 0, stop: int | None = None) -> Any:
        indices["blocks"] += len(codes) * ((n if stop is None else stop) - start)
        return decode_all(self, codes, n, start, stop)

    def counted_values(self: Any, raw: Any, row: Row, start: int, stop: int, *, check: bool = True) -> Any:
        read["values"] += stop - start
        return read_values(self, raw, row, start, stop, check=check)

    monkeypatch.setattr(type(plan.sections[0].code), "decode_all", counted_indices)
    monkeypatch.setattr(type(values), "read", counted_values)
    received = chain.receive(messages)
    assert received.safe
    assert len(received.squares()) == len(like)
    for _, part, q in received.each([t.clone() for t in like]):
        part.add_(q)
    assert indices["blocks"] == workers * sum(group.blocks for group in plan.layout.groups) > 0
    assert read["values"] == workers * sum(s.count for s in (*plan.sections, *plan.whole)) > 0


# --- Side by side ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain",
    [DCT(8) >> TopK(4), Identity(16) >> TopK(6) >> Sign(), Hadamard(16) >> RandomK(3), Float(), DCT(64) >> TopK(32)],
    ids=repr,
)
@pytest.mark.parametrize("make", [strange_tensors, lambda: contribution([(), (5,), (0,), (100, 130), (3, 4, 50), (2000,)])])
def test_going_through_tensors_and_mean_side_by_side_changes_each_entry_once(chain: Codec, make: Any) -> None:
    """Parameters that cannot be seen as a matrix in place are changed all the same."""
    parameters: list[Tensor] = make()
    before = [p.clone() for p in parameters]
    workers = [[p.contiguous() * (r + 1) for p in parameters] for r in range(2)]
    chain = Chain.of(chain)
    received = chain.receive(Messages([chain.encode(w) for w in workers], parameters))
    mean = received.tensors()
    visited = [0] * len(parameters)
    for i, piece, part in received.each(parameters):
        assert piece.shape == part.shape
        piece.sub_(part, alpha=0.5)
        visited[i] += piece.numel()
    assert visited == [p.numel() for p in parameters]
    for p, b, m in zip(parameters, before, mean, strict=True):
        torch.testing.assert_close(p, b - 0.5 * m, rtol=0, atol=1e-6)


def test_the_mean_may_be_overwritten_while_going_through() -> None:
    chain, x = DCT(8) >> TopK(4), contribution([(40, 90), (70, 8), (5,)])
    received = chain.receive(Messages([chain.encode(x)], x))
    first = received.tensors()
    for _, _, part in received.each(x):
        part.fill_(math.nan)
    assert all(map(torch.equal, first, received.tensors()))


def test_parameters_that_require_gradients_are_changed_in_place() -> None:
    chain, p = DCT(8) >> TopK(4), torch.nn.Parameter(torch.randn(32, 32))
    received = chain.receive(Messages([chain.encode([p])], [p]))
    before = p.detach().clone()
    for _, piece, part in received.each([p]):
        piece.add_(part)
    torch.testing.assert_close(p.detach(), before + chain.decode(chain.encode([before]), [before])[0])


# --- What is wrong with a message ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [DCT(8) >> TopK(4) >> Sign(), Chain(), RandomK(3) >> Int8()], ids=repr)
@pytest.mark.parametrize("more", [-1, 1, 4, 1000])
def test_a_message_of_another_length_is_refused_in_its_senders_name(chain: Chain, more: int) -> None:
    like = contribution([(40, 40), (5,)])
    good = chain.encode(like)
    raw = good.to_bytes()
    bad = Payload.of_bytes(raw[:more] if more < 0 else raw + bytes(more))
    with pytest.raises(
        WireError, match=f"the message of rank 1: a message of {len(raw) + more} bytes, where .* {len(raw)}$"
    ) as caught:
        chain.combine(Messages([good, bad], like))
    assert caught.value.rank == 1


@given(
    st.sampled_from(
        [DCT(8) >> TopK(4) >> Sign(), Identity(8) >> TopK(30), TopK(5) >> TwoBit(), RandomK(9) >> Fp4(), Float("bf16").chain]
    ),
    st.data(),
)
@settings(calm, max_examples=examples(200))
def test_any_bytes_decode_to_finite_tensors_or_are_refused(chain: Chain, data: st.DataObject) -> None:
    like = contribution([(17, 19), (5,)])
    raw = bytearray(chain.encode(like).to_bytes())
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=8)):
        raw[at] = data.draw(st.integers(0, 255))
    try:
        received = chain.receive(Messages([Payload.of_bytes(bytes(raw))], like))
    except WireError:
        return
    if received.safe:
        assert all(bool(t.isfinite().all()) for t in received.tensors())


@pytest.mark.parametrize(
    "chain", [DCT(8) >> TopK(4), TopK(4) >> Sign(), DCT(8) >> RandomK(3) >> Int8(), Fp4(), DCT(8) >> Striding(3)], ids=repr
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sender_knows_that_its_message_is_not_finite(chain: Codec, bad: float) -> None:
    tensors = contribution([(40, 40), (3,)])
    payload, finite = chain.encode_finite(tensors)
    assert finite
    assert payload.to_bytes() == chain.encode(tensors).to_bytes()
    tensors[0][17, 5] = bad
    payload, finite = chain.encode_finite(tensors)
    assert not finite
    with pytest.raises(WireError, match="not finite"):
        chain.decode(payload, tensors)


# --- Reading and writing chains --------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Identity, DCT, Hadamard, RandomOrthogonal, All, TopK, RandomK, Striding, Float, Int8, Fp4, TwoBit, Sign)
}


@given(chains)
@calm
def test_a_chain_is_shown_as_it_is_written(chain: Chain) -> None:
    assert Chain.of(eval(repr(chain), NAMES)) == chain
    assert hash(Chain.of(eval(repr(chain), NAMES))) == hash(chain)


@pytest.mark.parametrize("stage", [*TRANSFORMS, *SELECTIONS, *VALUES, Fp4(0), Sign(0), RandomK(7, seed=1), Int8(64)], ids=repr)
def test_a_stage_is_shown_as_it_is_written_and_is_a_codec_by_itself(stage: Any) -> None:
    assert eval(repr(stage), NAMES) == stage
    tensors = contribution([(30, 30), (4,)])
    assert stage.encode(tensors).to_bytes() == stage.chain.encode(tensors).to_bytes()
    assert stage.nbytes(tensors) == stage.chain.nbytes(tensors)
    assert stage.linear == stage.chain.linear
    assert stage.encode_finite(tensors)[1]
    message = stage.encode(tensors, round=2)
    for a, b in zip(stage.decode(message, tensors, round=2), stage.combine(Messages([message], tensors, round=2)), strict=True):
        assert torch.equal(a, b)


def test_chains_by_hand() -> None:
    assert repr(DCT(64) >> TopK(32) >> Sign()) == "DCT(64) >> TopK(32) >> Sign()"
    assert repr(RandomK(0.05, seed=3) >> Float("bf16")) == "RandomK(0.05, seed=3) >> Float('bf16')"
    assert DCT(64) >> TopK(32) >> Sign() == Chain(DCT(64), TopK(32), Sign())
    assert DCT(64) >> (TopK(32) >> Sign()) == (DCT(64) >> TopK(32)) >> Sign()
    assert TopK(32) >> Sign() == Chain(selection=TopK(32), values=Sign())
    assert DCT(8) >> Sign() == Chain(DCT(8), values=Sign())


ILLEGAL = [
    (TopK(3), DCT(8)),
    (Sign(), DCT(8)),
    (Sign(), TopK(3)),
    (DCT(8), Hadamard(8)),
    (TopK(3), TopK(4)),
    (Sign(), Int8()),
    (DCT(8) >> TopK(3), RandomK(4)),
    (DCT(8) >> Sign(), TopK(3)),
    (DCT(8) >> TopK(3), DCT(4) >> Sign()),
]


@pytest.mark.parametrize(("first", "then"), ILLEGAL, ids=repr)
def test_an_order_that_cannot_be_is_refused_with_the_one_that_can(first: Any, then: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        first >> then
    message = str(caught.value)
    assert message.startswith(f"{first!r} >> {then!r} is not a chain")
    assert "a transform >> a selection >> a value format" in message


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a chain is made of a transform >> a selection >> a value format, got Dense"):
        DCT(8) >> Dense()


# --- Threads ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "chain", first_quick([DCT(64) >> TopK(32) >> Sign(), DCT(64) >> RandomK(600) >> Float("bf16")]), ids=repr
)
def test_one_thread_and_two_decode_the_same_bits(chain: Chain, threads: Any) -> None:
    """Thousands of blocks, so that torch does use both; the second chain takes the dense way through the transform."""
    like = [torch.randn(s) for s in [(1000, 4096), (4096, 1100), (64, 50_000), (90_000,)]]
    messages = [chain.encode([t * (r + 1) + r for t in like]) for r in range(2)]
    results = []
    for count in (1, 2, 1):
        threads(count)
        assert torch.get_num_threads() == count
        results.append(chain.combine(Messages(messages, like)))
    for one, two, again in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, again)
