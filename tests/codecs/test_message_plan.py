"""Parts and blocks of a message: however it is cut, it says the same, each part by itself; scales end at tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.codecs import plain_reader
from tests.codecs.catalogue import EVERY, SELECTIONS, TRANSFORMS, VALUES
from tests.tiers import examples
from thinwire.codecs import DCT, Chain, Codec, Dense, Float, Identity, Messages, Parts, Sign, Stage, TopK, TwoBit, parse_codec
from thinwire.codecs.registry import VALUE_FORMATS
from thinwire.codecs.stages import Row
from thinwire.codecs.values import Scaled, Values
from thinwire.codecs.wire import HEADER_NBYTES, Envelope, fingerprint, seal, unseal
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload

calm = settings(deadline=None, database=None, derandomize=True)
Shape = tuple[int, ...]

shape = st.lists(st.integers(0, 40), max_size=3).map(tuple).filter(lambda s: math.prod(s) <= 1500)
shapes_ = st.lists(shape, min_size=1, max_size=5)
chains = st.builds(Chain, st.sampled_from(TRANSFORMS), st.sampled_from(SELECTIONS), st.sampled_from(VALUES))
gathered = chains.filter(lambda chain: not chain.linear)


def some(shapes: Sequence[Shape], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) for s in shapes]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- Parts -----------------------------------------------------------------------------------------------------------------


@given(gathered, shapes_, st.integers(1, 9), st.integers(0, 99))
@settings(calm, max_examples=examples(300))
def test_a_message_in_parts_says_the_same(chain: Chain, shapes: list[Shape], parts: int, seed: int) -> None:
    tensors, split = some(shapes, seed), chain.split(parts)
    payload = split.encode(tensors, round=3)
    assert payload.nbytes == split.nbytes([t.to("meta") for t in tensors])
    whole = chain.decode(chain.encode(tensors, round=3), tensors, round=3)
    assert same(split.decode(payload, tensors, round=3), whole)
    plan = split.plan(tensors)
    assert 1 <= len(plan.parts) <= parts
    assert plan.blocks == chain.plan(tensors).blocks
    assert [p.first for p in plan.parts[1:]] == [p.first + p.blocks for p in plan.parts[:-1]], "no block twice, none left out"


@given(gathered, shapes_, st.integers(2, 5), st.integers(0, 99))
@settings(calm, max_examples=examples(100))
def test_a_part_is_read_by_itself(chain: Chain, shapes: list[Shape], parts: int, seed: int) -> None:
    tensors, split = some(shapes, seed), chain.split(parts)
    payload = split.encode(tensors, round=3)
    total = [torch.zeros_like(t) for t in tensors]
    for part in split.plan(tensors).parts:
        alone = split.decode_part(payload.like(payload.data[part.start : part.stop].clone()), tensors, round=3)
        for t, a in zip(total, alone, strict=True):
            t.add_(a)
    whole = chain.decode(chain.encode(tensors, round=3), tensors, round=3)
    for t, w in zip(total, whole, strict=True):
        torch.testing.assert_close(t, w, rtol=0, atol=1e-5 * max(1.0, float(w.abs().amax()) if w.numel() else 0.0))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("values", [Float("bf16"), *(v for v in VALUES if isinstance(v, Scaled))], ids=repr)
def test_the_plain_reader_reads_messages_in_parts(values: Values, parts: int) -> None:
    shapes: list[Shape] = [(9, 20), (3,), (600,), (16, 40), (1, 33)]
    chain, tensors = Chain(Identity(8), TopK(3), values).split(parts), some(shapes)
    assert len(chain.plan(tensors).parts) >= min(parts, 2)
    body = chain.encode(tensors, round=7)
    message = seal(body, Envelope(5), fingerprint=fingerprint(chain, tensors), round=7).to_bytes()
    told = plain_reader.read(message, repr(chain), shapes, round=7, sender=5)
    assert same([torch.tensor(t).view(s) for t, s in zip(told, shapes, strict=True)], chain.decode(body, tensors, round=7))
    nth = plain_reader.open_parts(body.to_bytes())[-1]
    alone = plain_reader.read_parts([nth], repr(chain), shapes, round=7)
    last = chain.plan(tensors).parts[-1]
    ours = chain.decode_part(body.like(body.data[last.start :].clone()), tensors, round=7)
    assert same([torch.tensor(t).view(s) for t, s in zip(alone, shapes, strict=True)], ours)


def test_a_part_of_something_else_or_a_damaged_one_is_refused() -> None:
    chain, tensors = (DCT(8) >> TopK(3) >> Sign()).split(2), some([(40, 40), (9,)])
    body = chain.encode(tensors)
    part = chain.plan(tensors).parts[1]
    raw = body.data[part.start : part.stop].clone()
    for bad, says in ((raw[:10], "its header has 32"), (raw[:-1], "where these shapes and"), (raw.flip(0), "a part whose")):
        with pytest.raises(WireError, match=says):
            chain.decode_part(Payload(bad.contiguous()), tensors)
    raw[-1] ^= 1
    with pytest.raises(WireError, match="part 1 of 2: wrong checksum"):
        chain.decode_part(Payload(raw), tensors)


def test_parts_have_about_equally_many_blocks() -> None:
    plan = (TopK(4) >> Sign()).split(4).plan([torch.empty(640, 640)])
    assert [p.blocks for p in plan.parts] == [25] * 4


def test_how_a_codec_with_parts_is_written() -> None:
    chain = (DCT(8) >> TopK(3) >> Sign()).split(4)
    assert repr(chain) == "(DCT(8) >> TopK(3) >> Sign()).split(4)"
    assert parse_codec(repr(chain)) == chain
    assert repr(chain.split(1)) == "DCT(8) >> TopK(3) >> Sign()"
    for bad in (0, 2.0, True, 1 << 16):
        with pytest.raises(ConfigError, match="parts"):
            chain.split(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="averaged on the wire"):
        Float("bf16").chain.split(2)


@given(st.data())
@settings(calm, max_examples=examples(100))
def test_a_message_of_several_codecs_is_one_of_their_parts(data: st.DataObject) -> None:
    dealt = data.draw(st.lists(st.tuples(st.integers(1, 2), st.sampled_from(EVERY)), min_size=1, max_size=3))
    codec, tensors = Parts(tuple(dealt)), some([(9, 20)] * sum(n for n, _ in dealt))
    body, told = codec.encode(tensors), fingerprint(codec, tensors)
    message = seal(body, Envelope(3), fingerprint=told, round=0)
    opened, _ = unseal(message, fingerprint=told, round=0, sender=3, nbytes=codec.nbytes(tensors))
    assert torch.equal(opened.data, body.data)
    assert len(plain_reader.open_parts(body.to_bytes())) == int.from_bytes(message.to_bytes()[6:8], "little") >= len(dealt)


def test_a_dense_message_is_one_part() -> None:
    codec, tensors = Dense("fp64", gather=True), some([(9, 60), (3,), ()])
    (part,) = plain_reader.open_parts(codec.encode(tensors).to_bytes())
    assert (part.first, part.blocks, part.values, part.codes) == (0, 3 + 1 + 1, 4, 0)
    assert len(part.rest) == 8 * (540 + 3 + 1)


# --- Envelope --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("envelope", [Envelope(0), Envelope(2**64 - 1, 0.5, state_hash=2**64 - 1), Envelope(7, invalid=True)])
def test_an_envelope_comes_back(envelope: Envelope) -> None:
    codec, tensors = TopK(2) >> Sign(), some([(9, 20)])
    sealed = seal(codec.encode(tensors), envelope, fingerprint=1, round=2)
    assert sealed.nbytes == HEADER_NBYTES + codec.nbytes(tensors)
    assert unseal(sealed, fingerprint=1, round=2, sender=envelope.sender, nbytes=codec.nbytes(tensors))[1] == envelope


def test_the_ids_of_senders_are_named() -> None:
    for codec in (TopK(2) >> Float("bf16"), Dense("bf16", gather=True), Parts(((1, Sign()),))):
        tensors = some([(9, 20)])
        good = codec.encode(tensors)
        bad = good.like(good.data[:-1].clone())
        with pytest.raises(WireError, match="the message of rank 77: a message of") as caught:
            codec.combine(Messages([good, bad], tensors, ids=[3, 77]))
        assert caught.value.rank == 77


def test_a_fingerprint_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, tensors = TopK(2) >> Sign(), some([(9, 21), (5,)])
    first = fingerprint(codec, tensors)
    monkeypatch.setattr("thinwire.codecs.wire.hashlib", None)
    assert fingerprint(TopK(2) >> Sign(), some([(9, 21), (5,)], seed=1)) == first


# --- Scales end at tensors -------------------------------------------------------------------------------------------------


@given(st.one_of(chains, st.sampled_from(EVERY)), shapes_, st.data())
@settings(calm, max_examples=examples(400))
def test_a_tensor_of_zeros_stays_zero(codec: Codec, shapes: list[Shape], data: st.DataObject) -> None:
    """Whatever its neighbours are: nobody has a gradient for it, so nobody may move it."""
    tensors = some(shapes)
    zero = data.draw(st.sets(st.integers(0, len(shapes) - 1), min_size=1))
    for i in zero:
        tensors[i].zero_()
    decoded = codec.decode(codec.encode(tensors, round=1), tensors, round=1)
    assert all(not decoded[i].any() for i in zero)


@given(chains, shapes_, st.data())
@settings(calm, max_examples=examples(200))
def test_tensors_do_not_know_each_other(chain: Chain, shapes: list[Shape], data: st.DataObject) -> None:
    """One of them grows a thousand times; the others are read as before."""
    tensors, grown = some(shapes), data.draw(st.integers(0, len(shapes) - 1))
    before = chain.decode(chain.encode(tensors, round=1), tensors, round=1)
    tensors[grown] *= 1000
    after = chain.decode(chain.encode(tensors, round=1), tensors, round=1)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        assert i == grown or torch.equal(a, b)


def test_a_bias_without_a_gradient_does_not_move() -> None:
    """Small tensors that are sent whole shared a scale with their neighbours, in one and in two bits."""
    for values in (Sign(), TwoBit()):
        chain, tensors = (
            DCT(64) >> TopK(32) >> values,
            [torch.randn(128, 128), torch.zeros(10), torch.randn(7), torch.zeros(300)],
        )
        assert chain.plan(tensors).layout.dense == (1, 2, 3)
        decoded = chain.decode(chain.encode(tensors), tensors)
        assert not decoded[1].any()
        assert not decoded[3].any()
        assert decoded[2].any()


@pytest.mark.parametrize("g", [1, 3, 8, 256])
def test_the_groups_of_a_row_end_with_its_tensors(g: int) -> None:
    row = Row(8, (16, 5, 0, 300, 1))
    borders = row.borders(g).tolist()
    assert len(borders) == row.groups(g) + 1
    assert {0, 16, 21, 321, 322} <= set(borders)
    assert max(np.diff(borders)) <= g
    assert sum(np.diff(borders) < g) <= 4


# --- The registry ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Ternary(Scaled):
    """A toy: -1, 0 or 1 times the largest, in two bits."""

    width = 2

    def _quantise(self, groups: Any, counts: Any) -> Any:
        scale = torch.from_numpy(np.abs(groups).max(axis=1)).bfloat16().float().numpy()
        return scale[:, None], (np.rint(groups / np.where(scale > 0, scale, 1)[:, None]).clip(-1, 1) % 3).astype(np.uint8)

    def _restore(self, codes: Any, scales: Any) -> Any:
        return np.array([0, 1, -1, 0], np.float32).take(codes) * scales[..., 0]


def test_a_new_value_format_joins_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VALUE_FORMATS, "_numbers", dict(VALUE_FORMATS._numbers))
    with pytest.raises(ConfigError, match=r"value format 8 cannot be .*Ternary.*Sign"):
        VALUE_FORMATS.add(8, Ternary)
    VALUE_FORMATS.add(100, Ternary)
    chain, tensors = DCT(8) >> TopK(5) >> Ternary(), some([(40, 40), (7,), (300,)])
    body = chain.split(2).encode(tensors)
    assert {part.values for part in plain_reader.open_parts(body.to_bytes())} == {100}
    assert same(chain.split(2).decode(body, tensors), chain.decode(chain.encode(tensors), tensors))
    assert isinstance(Ternary(), Stage)


def test_a_format_without_a_number_is_format_zero() -> None:
    @dataclass(frozen=True, repr=False)
    class Private(Ternary):
        pass

    chain, tensors = TopK(5) >> Private(), some([(40, 40)])
    body = chain.encode(tensors)
    assert plain_reader.open_parts(body.to_bytes())[0].values == 0
    assert chain.decode(body, tensors)[0].any()


def test_the_numbers_of_the_page() -> None:
    numbers = {getattr(item, "__name__", str(item)): number for number, item in VALUE_FORMATS.items()}
    dtypes = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float64": "fp64"}
    assert {dtypes.get(name, name): n for name, n in numbers.items()} == plain_reader.FORMAT_NUMBERS
