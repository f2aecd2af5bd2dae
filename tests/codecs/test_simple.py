"""The simple codec: the measure of the fast one. Both say the same, and its bytes are those that were published."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.codecs.simple import SimpleTopK, divisor
from thinwire.codecs import DCT, Mean, Messages, TopK

SHAPES = [(64, 64), (128, 192), (256, 64), (64, 16, 8), (128, 4, 4, 4)]


def contribution(rank: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    g = torch.Generator().manual_seed(rank)
    common = torch.Generator().manual_seed(99)  # workers agree in part, or no two would send the same entry
    return [torch.randn(s, generator=g) + torch.randn(s, generator=common) for s in shapes]


def simple_mean(workers: list[list[Tensor]], k: int) -> list[Tensor]:
    means = []
    for each in zip(*workers, strict=True):
        codec = SimpleTopK(tuple(each[0].shape), k)
        means.append(codec.decode([codec.encode(x) for x in each]))
    return means


@pytest.mark.parametrize("k", [1, 8, 32, 100])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_fast_and_simple_say_the_same(workers: int, k: int) -> None:
    chain = DCT(64) >> TopK(k)
    sent = [contribution(r) for r in range(workers)]
    fast = chain.combine(Messages([chain.encode(s) for s in sent], sent[0], mean=Mean(over="senders")))
    for a, b in zip(fast, simple_mean(sent, k), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert sum(float(t.abs().sum()) for t in fast) > 0


def test_fast_and_simple_keep_the_same_entries() -> None:
    """Their largest coefficients are the same set of places in every block."""
    x = contribution(0, [(128, 192)])
    places, values = SimpleTopK((128, 192), 32).encode(x[0])
    chain = DCT(64) >> TopK(32)
    slots = [torch.zeros(s) for s in chain.slot_shapes(x)]
    chain.accumulate(slots, x, decay=0.0)
    before = slots[0].clone()
    chain.encode_slots(slots, x).take_from(slots)
    blocks = [s.view(2, 64, 3, 64).permute(0, 2, 1, 3).reshape(6, -1) for s in (before, slots[0])]
    assert torch.equal((blocks[1] == 0).nonzero()[:, 1].view(6, 32), places.sort(dim=1).values)
    torch.testing.assert_close(blocks[0].gather(1, places), values, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shape", [(64,), (128,), (50,), (3, 200), (30, 34), (64, 3, 7, 7), (67, 10), (1, 1)])
def test_with_all_entries_nothing_is_lost_on_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    codec = SimpleTopK(shape, k=4096)
    torch.testing.assert_close(codec.decode([codec.encode(x)]), x, rtol=1e-4, atol=1e-5)


def test_entries_that_nobody_sent_are_zero_and_others_are_means_of_their_senders() -> None:
    codec = SimpleTopK((2, 2), k=1)
    a = torch.full((2, 2), 3.0)  # one coefficient: 6 at place 0
    b = torch.tensor([[1.0, -1.0], [1.0, -1.0]])  # one coefficient: 2 at place 1
    assert codec.encode(a)[0].tolist() == [[0]]
    assert codec.encode(b)[0].tolist() == [[1]]
    torch.testing.assert_close(codec.decode([codec.encode(a), codec.encode(b)]), a + b)
    torch.testing.assert_close(codec.decode([codec.encode(a), codec.encode(a * 3), codec.encode(b)]), 2 * a + b)


# --- Sizes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c"),
    [(768, 64), (50304, 64), (32128, 64), (50257, 29), (1000, 50), (30522, 6), (147, 49), (65, 13), (67, 1), (5, 5), (1, 1)],
)
def test_a_chunk_is_the_largest_divisor(n: int, c: int) -> None:
    assert divisor(n, 64) == c
    assert max(d for d in range(1, 65) if n % d == 0) == c


@pytest.mark.parametrize(
    ("d", "blocks", "k", "nbytes"),
    [
        (1024, 78_112, 32, 29_995_008),
        (1024, 78_112, 16, 14_997_504),
        (1024, 78_112, 8, 7_498_752),
        (2048, 287_296, 32, 110_321_664),
        (2048, 287_296, 16, 55_160_832),
    ],
)
def test_the_bytes_that_were_published_for_olmo(d: int, blocks: int, k: int, nbytes: int) -> None:
    """DeMo's figures for 300M and 1B: an embedding, and in 16 layers qkv, out, and a gated MLP of eight times the width."""
    matrices = [(50_304, d), *[(3 * d, d), (d, d), (8 * d, d), (d, 4 * d)] * 16]
    assert sum(SimpleTopK(s, k).kept[0] for s in matrices) == blocks
    assert sum(SimpleTopK(s, k).nbytes for s in matrices) == nbytes == blocks * k * 12


def test_a_message_is_as_long_as_it_says() -> None:
    for shape in [(128, 192), (64,), (50, 30), (1000, 10), (4, 4, 4)]:
        codec = SimpleTopK(shape, 32)
        places, values = codec.encode(torch.randn(shape))
        assert places.dtype == torch.int64
        assert values.dtype == torch.float32
        assert places.numel() * 8 + values.numel() * 4 == codec.nbytes
        assert codec.kept == tuple(places.shape)


def test_the_fast_message_is_a_fraction_of_the_simple_one() -> None:
    shapes = [(768, 768), (3072, 768)]
    like = [torch.empty(s, device="meta") for s in shapes]
    simple = sum(SimpleTopK(s, 32).nbytes for s in shapes)
    assert (DCT(64) >> TopK(32)).nbytes(like) < 0.43 * simple
