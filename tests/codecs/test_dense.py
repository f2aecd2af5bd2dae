"""Dense: nothing is lost but what the wire's dtype loses, and its length is known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codecs import WIRE_DTYPES, Dense
from thinwire.codecs.wire import PART_NBYTES
from thinwire.errors import ConfigError

calm = settings(deadline=None, database=None, derandomize=True)
some_shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=5)
names = st.sampled_from(list(WIRE_DTYPES))


def contribution(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(dtype) for s in ((), (0,), (7,), (3, 5), (2, 0, 3), (2, 1, 3))]


@pytest.mark.parametrize("gather", [False, True], ids=["mean", "gather"])
@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_a_round_trip_loses_what_the_dtype_loses_and_no_more(name: str, gather: bool) -> None:
    tensors = contribution()
    before = [t.clone() for t in tensors]
    codec, eps = Dense(name, gather=gather), torch.finfo(WIRE_DTYPES[name]).eps
    decoded = codec.decode(codec.encode(tensors), tensors)
    for t, b, d in zip(tensors, before, decoded, strict=True):
        assert torch.equal(t, b), "encoding changed its input"
        assert d.shape == t.shape
        assert d.dtype == (torch.float64 if name == "fp64" else torch.float32), "decoded in float32 or wider"
        assert torch.equal(d, t.to(WIRE_DTYPES[name]).to(d.dtype)), "rounded to nearest, once"
        assert bool(((d - t).abs() <= eps / 2 * t.abs() + 1e-7 * (name == "fp16")).all())


@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_what_the_wire_can_hold_survives_bit_for_bit_twice(name: str) -> None:
    """Decoding is a right inverse: what was sent once can be sent again without further loss."""
    codec, tensors = Dense(name), contribution()
    once = codec.decode(codec.encode(tensors), tensors)
    twice = codec.decode(codec.encode(once), tensors)
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@given(shapes=some_shapes, name=names, gather=st.booleans())
@calm
def test_length_is_predicted_exactly(shapes: list[tuple[int, ...]], name: str, gather: bool) -> None:
    tensors = [torch.zeros(s) for s in shapes]
    codec = Dense(name, gather=gather)
    predicted = codec.nbytes([torch.empty(s, device="meta") for s in shapes])
    assert predicted == codec.nbytes(tensors) == codec.encode(tensors).nbytes
    values = sum(math.prod(s) for s in shapes) * {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}[name]
    assert predicted == values + (PART_NBYTES if gather else 0)
    back = codec.decode(codec.encode(tensors), tensors)
    assert [tuple(b.shape) for b in back] == shapes


def test_the_mean_of_messages_decodes_to_the_mean_of_what_they_say() -> None:
    """`linear` is a promise; in float32 it holds bit for bit."""
    codec = Dense("fp32")
    assert codec.linear
    workers = [contribution(seed) for seed in range(3)]
    messages = [codec.encode(w) for w in workers]
    total = messages[0].data + messages[1].data + messages[2].data
    decoded = codec.decode(messages[0].like(total / 3), workers[0])
    for d, *each in zip(decoded, *workers, strict=True):
        assert torch.equal(d, (each[0] + each[1] + each[2]) / 3)


@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_gathered_messages_are_the_bytes_of_the_averaged_ones(name: str) -> None:
    tensors = contribution()
    mean, gather = Dense(name), Dense(name, gather=True)
    assert not gather.linear
    a, b = mean.encode(tensors), gather.encode(tensors)
    assert b.data.dtype == torch.uint8
    assert a.data.dtype == WIRE_DTYPES[name]
    assert a.to_bytes() == b.to_bytes()[PART_NBYTES:]
    assert a.fixed
    assert b.fixed
    for x, y in zip(mean.decode(a, tensors), gather.decode(b, tensors), strict=True):
        assert torch.equal(x, y)


def test_mixed_dtypes_share_one_message() -> None:
    tensors = [torch.ones(2, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.bfloat16), torch.tensor(3.0)]
    decoded = Dense().decode(Dense().encode(tensors), tensors)
    assert [d.tolist() for d in decoded] == [[1, 1], [2, 2, 2], 3]
    assert {d.dtype for d in decoded} == {torch.float32}


def test_a_message_is_a_copy() -> None:
    t = torch.ones(3)
    message = Dense().encode([t])
    message.data.fill_(5)
    assert t.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_a_name_and_its_dtype_are_the_same_codec(name: str) -> None:
    assert Dense(name) == Dense(WIRE_DTYPES[name])
    assert hash(Dense(name)) == hash(Dense(WIRE_DTYPES[name]))
    assert Dense(name).wire_dtype == WIRE_DTYPES[name]
    assert Dense(name) != Dense(name, gather=True)


@pytest.mark.parametrize("bad", ["float32", "int8", "", torch.int32, torch.uint8, None, 16])
def test_an_unknown_dtype_is_shown_with_what_is_allowed(bad: object) -> None:
    with pytest.raises(ConfigError, match="one of fp32, bf16, fp16, fp64, got") as caught:
        Dense(bad)  # type: ignore[arg-type]
    assert str(caught.value).endswith(f"got {bad!r}")


def test_a_codec_has_no_state_to_change() -> None:
    with pytest.raises(AttributeError):
        Dense().gather = True  # type: ignore[misc]
