"""One buffer for everything: packing loses nothing but what the dtype loses, and the finite check misses nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.payload import Payload, all_finite, pack, split

calm = settings(deadline=None, database=None, derandomize=True)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
some_shapes = st.lists(shapes, max_size=6)


def tensors_of(shapes_: list[tuple[int, ...]], dtypes: list[torch.dtype], seed: int = 0) -> list[Tensor]:
    """Small whole numbers, which every dtype holds exactly."""
    g = torch.Generator().manual_seed(seed)
    pairs = zip(shapes_, dtypes, strict=True)
    return [torch.randint(-128, 128, shape, generator=g).to(dtype) for shape, dtype in pairs]


# --- Packing -------------------------------------------------------------------------------------------------------------


@given(data=st.data(), some=some_shapes, wire=st.sampled_from(FLOATS))
@calm
def test_pack_and_split_are_inverse_for_any_shapes_and_mixed_dtypes(
    data: st.DataObject, some: list[tuple[int, ...]], wire: torch.dtype
) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(FLOATS), min_size=len(some), max_size=len(some)))
    tensors = tensors_of(some, dtypes)
    flat = pack(tensors, wire)
    assert flat.dtype == wire
    assert flat.shape == (sum(math.prod(s) for s in some),)
    back = split(flat, tensors)
    assert len(back) == len(tensors)
    for t, b in zip(tensors, back, strict=True):
        assert b.shape == t.shape
        assert torch.equal(b, t.to(wire))


def test_the_order_is_that_of_the_tensors() -> None:
    flat = pack([torch.tensor(1.0), torch.empty(0, 3), torch.tensor([[2.0, 3.0], [4.0, 5.0]])], torch.float32)
    assert flat.tolist() == [1, 2, 3, 4, 5]


def test_what_is_not_contiguous_is_packed_by_its_elements() -> None:
    t = torch.arange(6.0).reshape(2, 3)
    assert pack([t.T, t[:, ::2]], torch.float32).tolist() == [0, 3, 1, 4, 2, 5, 0, 2, 3, 5]


def test_packing_copies_and_splitting_does_not() -> None:
    t = torch.ones(3)
    flat = pack([t], torch.float32)
    (view,) = split(flat, [t])
    view.fill_(7)
    assert flat.tolist() == [7, 7, 7]
    assert t.tolist() == [1, 1, 1]


def test_nothing_packs_to_nothing() -> None:
    assert pack([], torch.bfloat16).shape == (0,)
    assert split(torch.empty(0), []) == []


@pytest.mark.parametrize("elements", [0, 5, 7])
def test_a_buffer_of_another_length_is_refused_with_both_lengths(elements: int) -> None:
    with pytest.raises(ValueError, match=f"a buffer of {elements} elements cannot hold tensors of 6 elements in all"):
        split(torch.zeros(elements), [torch.empty(2), torch.empty(2, 2)])


# --- The finite check ----------------------------------------------------------------------------------------------------


@given(
    dtype=st.sampled_from(FLOATS),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    place=st.integers(0, 10**6),
)
@calm
def test_one_bad_value_is_found_wherever_it_is(dtype: torch.dtype, bad: float, lengths: list[int], place: int) -> None:
    tensors = [torch.linspace(-1, 1, n).to(dtype) for n in lengths]
    assert all_finite(tensors)
    place %= sum(lengths)
    for t in tensors:
        if place < t.numel():
            t[place] = bad
            break
        place -= t.numel()
    assert not all_finite(tensors)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_of_a_dtype_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert all_finite([torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal, 0.0], dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_whole_numbers_are_finite(dtype: torch.dtype) -> None:
    assert all_finite([torch.tensor([0, 1, 1], dtype=dtype)])


def test_nothing_is_finite_and_emptiness_hides_nothing() -> None:
    assert all_finite([])
    assert all_finite([torch.empty(0), torch.empty(3, 0)])
    assert not all_finite([torch.empty(0), torch.tensor(math.nan)])
    assert not all_finite([torch.tensor([1.0]), torch.tensor([[1.0, math.inf]], dtype=torch.float16), torch.empty(0)])


def test_what_is_not_contiguous_is_looked_at_whole() -> None:
    t = torch.zeros(4, 5)
    t[2, 3] = math.nan
    assert not all_finite([t.T])
    assert all_finite([t[:, ::2]]), "the NaN is not in this view"


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_payload_knows_whether_it_is_finite(dtype: torch.dtype) -> None:
    data = torch.ones(5, dtype=dtype)
    assert Payload(data).finite
    data[4] = math.nan
    assert not Payload(data).finite
    assert Payload(data.view(torch.uint8)).finite, "bytes are just bytes"


# --- Messages --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(0, 2), torch.zeros(6)[::2]],
    ids=["0-d", "2-d", "2-d empty", "strided"],
)
def test_only_flat_contiguous_data_is_a_message(data: Tensor) -> None:
    with pytest.raises(ValueError, match="1-D and contiguous") as caught:
        Payload(data)
    assert str(tuple(data.shape)) in str(caught.value)


@given(raw=st.binary(min_size=1, max_size=64))
@calm
def test_bytes_come_back(raw: bytes) -> None:
    payload = Payload.of_bytes(raw, purpose="handshake", fixed=True)
    assert payload.to_bytes() == raw
    assert payload.nbytes == len(raw)
    assert (payload.purpose, payload.fixed) == ("handshake", True)


def test_no_bytes_are_a_message_too() -> None:
    payload = Payload.of_bytes(b"")
    assert payload.nbytes == 0
    assert payload.to_bytes() == b""
    assert payload.finite


def test_bytes_may_differ_in_length_unless_said_otherwise() -> None:
    assert not Payload.of_bytes(b"a").fixed
    assert Payload(torch.zeros(1)).fixed


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
def test_length_in_bytes_is_that_of_the_bytes(dtype: torch.dtype) -> None:
    payload = Payload(torch.arange(7).to(dtype))
    assert payload.nbytes == 7 * dtype.itemsize == len(payload.to_bytes())
    assert torch.frombuffer(bytearray(payload.to_bytes()), dtype=dtype).tolist() == list(range(7))


def test_another_of_the_same_kind() -> None:
    payload = Payload(torch.zeros(3), purpose="alarm", fixed=False)
    other = payload.like(torch.ones(2, dtype=torch.float64))
    assert (other.purpose, other.fixed) == ("alarm", False)
    assert other.data.tolist() == [1, 1]
