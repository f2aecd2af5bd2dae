"""Layout: every entry of every tensor has exactly one place, and no batch is larger than a cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tiers import examples
from thinwire.codecs import DCT, Hadamard, Identity
from thinwire.codecs import layout as module
from thinwire.codecs.layout import BATCH, Grid, Layout, Piece, as_matrix, matrix_of, padded
from thinwire.codecs.transforms import Transform

calm = settings(deadline=None, database=None, derandomize=True)
Shape = tuple[int, ...]
one_shape = st.lists(st.integers(0, 30), max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 1000)
some_shapes = st.lists(one_shape, max_size=5)
transforms = st.sampled_from([Identity(8), DCT(5), DCT(64), Hadamard(8), Identity(1)])


def lay_out(shapes: list[Shape], transform: Transform = DCT(64)) -> Layout:  # noqa: B008  (frozen)
    return Layout.of(shapes, transform, lambda numel, blocks, L: False)


def pieces_of(layout: Layout) -> list[Piece]:
    return [p for group in layout.groups for batch in group.batches for p in batch.pieces]


def numbered(shapes: list[Shape]) -> list[Tensor]:
    """Tensors in which every entry is another number, from 1 on."""
    out, at = [], 1
    for s in shapes:
        n = math.prod(s)
        out.append(torch.arange(at, at + n, dtype=torch.float32).view(s))
        at += n
    return out


def assert_complete(layout: Layout, tensors: list[Tensor]) -> None:
    """Cut all tensors into pieces, pad them: every entry is there once, and all else is zero."""
    found = [
        padded(p, p.of_matrix(matrix_of(tensors[p.grid.index], p.grid))).reshape(-1)
        for p in pieces_of(layout)
        if tensors[p.grid.index].numel()
    ]
    found += [tensors[i].reshape(-1) for i in layout.dense]
    everything = torch.cat(found) if found else torch.empty(0)
    total = sum(t.numel() for t in tensors)
    there = everything[everything != 0].sort().values
    assert torch.equal(there, torch.arange(1, total + 1, dtype=torch.float32))


# --- Nothing is left out ---------------------------------------------------------------------------------------------------


@given(some_shapes, transforms, st.integers(1, 3))
@calm
def test_every_entry_is_in_exactly_one_place(shapes: list[Shape], transform: Transform, every: int) -> None:
    """Whichever tensors are sent whole; here those whose number of entries is divisible by something."""
    layout = Layout.of(shapes, transform, lambda numel, blocks, L: every > 1 and numel % every == 0)
    assert_complete(layout, numbered(shapes))
    assert layout.shapes == tuple(shapes)
    assert layout.dense_numel == sum(math.prod(shapes[i]) for i in layout.dense)
    placed = sorted([*layout.dense, *(g.index for group in layout.groups for g in group.grids)])
    assert placed == [i for i, s in enumerate(shapes) if math.prod(s)]


@given(some_shapes, transforms, st.sampled_from([1, 20, 64, 300, BATCH]))
@calm
def test_blocks_are_numbered_through_and_batches_are_bounded(shapes: list[Shape], transform: Transform, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH", limit)
        layout = lay_out(shapes, transform)
        assert_complete(layout, numbered(shapes))
        for group in layout.groups:
            number = 0
            for batch in group.batches:
                assert batch.start == number
                assert batch.stop == number + batch.blocks
                assert batch.blocks * group.L <= max(limit, group.L), "a batch's worth, or one block"
                assert batch.starts[-1] == batch.blocks * group.L
                for piece in batch.pieces:
                    assert piece.start == number
                    assert (piece.grid.h, piece.grid.w) == (group.h, group.w)
                    assert piece.y == 1 or (piece.x0, piece.x1) == (0, piece.grid.X), "whole rows of blocks, or part of one"
                    number += piece.blocks
            assert number == group.blocks == sum(g.blocks for g in group.grids)
            assert len({(g.h, g.w) for g in group.grids}) == 1
        assert len({(g.h, g.w) for g in layout.groups}) == len(layout.groups), "one group per shape of block"


@given(some_shapes, transforms, st.sampled_from([20, 300, BATCH]), st.integers(0, 1000))
@settings(calm, max_examples=examples(60))
def test_places_are_those_of_a_slow_loop(shapes: list[Shape], transform: Transform, limit: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH", limit)
        layout = lay_out(shapes, transform)
        slots = numbered(layout.slot_shapes())
        rng = np.random.default_rng(seed)
        for group in layout.groups:
            for batch in group.batches:
                flat = torch.cat([p.of_slot(slots[p.grid.index]).reshape(-1) for p in batch.pieces])
                indices = rng.integers(0, group.L, (batch.blocks, 3))
                read = flat[torch.from_numpy(batch.places(indices))]
                row = 0
                for p in batch.pieces:
                    for y in range(p.y0, p.y1):
                        for x in range(p.x0, p.x1):
                            block = slots[p.grid.index][y * group.h : (y + 1) * group.h, x * group.w : (x + 1) * group.w]
                            assert read[row].tolist() == block.reshape(-1)[torch.from_numpy(indices[row])].tolist()
                            row += 1
                assert row == batch.blocks


def test_places_cover_a_batch_once() -> None:
    layout = lay_out([(130, 200), (64, 64), (70, 300)])
    for group in layout.groups:
        for batch in group.batches:
            places = batch.places(np.broadcast_to(np.arange(group.L), (batch.blocks, group.L)))
            assert np.array_equal(np.sort(places.reshape(-1)), np.arange(batch.starts[-1]))


def test_places_by_hand() -> None:
    """Two rows of three blocks of 2 x 2, side by side: entry 3 of block (1, 2) is row 3, column 5 of 6."""
    ((batch,),) = (group.batches for group in lay_out([(4, 6)], Identity(2)).groups)
    places = batch.places(np.array([[0, 1, 2, 3]] * 6))
    assert places[0].tolist() == [0, 1, 6, 7]
    assert places[1].tolist() == [2, 3, 8, 9]
    assert places[5].tolist() == [16, 17, 22, 23]


# --- Shapes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [
        ((), (1, 1)),
        ((7,), (1, 7)),
        ((0,), (1, 0)),
        ((3, 5), (3, 5)),
        ((8, 4, 3, 2), (8, 24)),
        ((2, 0, 3), (2, 0)),
        ((1, 9), (1, 9)),
    ],
)
def test_a_tensor_is_seen_as_a_matrix(shape: Shape, matrix: tuple[int, int]) -> None:
    assert as_matrix(shape) == matrix


@pytest.mark.parametrize("n", [50257, 1000, 30522, 67, 997, 65, 127])
def test_no_dimension_shrinks_the_block(n: int) -> None:
    """Padded to the next multiple of 64, where a divisor search would end at 29, 50, 6 or 1."""
    layout = lay_out([(n, 128), (128, n), (n,)])
    up = -(-n // 64) * 64
    assert layout.slot_shapes() == [(up, 128), (128, up), (1, up)]
    assert [(g.h, g.w) for g in layout.groups] == [(64, 64), (1, 64)]
    assert up - n < 64


@pytest.mark.parametrize(
    ("shape", "h", "w", "blocks"),
    [
        ((), 1, 1, 1),
        ((5,), 1, 5, 1),
        ((64,), 1, 64, 1),
        ((65,), 1, 64, 2),
        ((3, 200), 3, 64, 4),
        ((200, 3), 64, 3, 4),
        ((1, 200), 1, 64, 4),
        ((200, 1), 64, 1, 4),
        ((63, 65), 63, 64, 2),
        ((64, 3, 7, 7), 64, 64, 3),
        ((50257, 768), 64, 64, 786 * 12),
    ],
)
def test_a_short_dimension_makes_a_short_block(shape: Shape, h: int, w: int, blocks: int) -> None:
    (group,) = lay_out([shape]).groups
    assert (group.h, group.w, group.L, group.blocks) == (h, w, h * w, blocks)


def test_hadamard_blocks_stay_powers_of_two() -> None:
    layout = lay_out([(3, 100), (33, 5)], Hadamard(64))
    assert [(g.h, g.w) for g in layout.groups] == [(4, 64), (64, 8)]
    assert layout.slot_shapes() == [(4, 128), (64, 8)]


def test_empty_tensors_take_no_part() -> None:
    layout = lay_out([(0,), (3, 0), (0, 5), (2,), (2, 0, 2)])
    assert [g.index for group in layout.groups for g in group.grids] == [3]
    assert layout.slot_shapes() == [(0,), (3, 0), (0, 5), (1, 2), (2, 0, 2)]
    assert lay_out([]).groups == ()
    assert lay_out([]).slot_shapes() == []


def test_tensors_that_are_sent_whole_keep_their_shape_and_are_asked_for_with_their_numbers() -> None:
    asked = []

    def whole(numel: int, blocks: int, L: int) -> bool:
        asked.append((numel, blocks, L))
        return numel < 100

    layout = Layout.of([(7,), (100, 130), (), (0,), (4, 5, 2)], DCT(64), whole)
    assert asked == [(7, 1, 7), (13000, 6, 4096), (1, 1, 1), (40, 1, 40)]
    assert layout.dense == (0, 2, 4)
    assert layout.dense_numel == 48
    assert layout.slot_shapes() == [(7,), (128, 192), (), (0,), (4, 5, 2)]


def test_tensors_of_one_kind_of_block_share_a_group_in_order() -> None:
    layout = lay_out([(128, 64), (100,), (64, 64), (3,), (65, 65)])
    first = layout.groups[0]
    assert [g.index for g in first.grids] == [0, 2, 4]
    assert [g.first for g in first.grids] == [0, 2, 3]
    assert first.blocks == 2 + 1 + 4


# --- Batches ---------------------------------------------------------------------------------------------------------------


def test_many_small_tensors_share_a_batch() -> None:
    (group,) = lay_out([(64, 64)] * 100).groups
    assert len(group.batches) == math.ceil(100 * 4096 / BATCH)


@pytest.mark.parametrize("shape", [(64, 64 * 700), (200, 64 * 300 + 3), (5000, 900), (1, 3 * 10**6), (10**7 + 1,), (50257, 64)])
def test_a_large_tensor_is_split_into_bounded_batches(shape: Shape) -> None:
    layout = lay_out([shape])
    (group,) = layout.groups
    assert len(group.batches) >= math.prod(layout.slot_shapes()[0]) // BATCH
    assert all(b.blocks * group.L <= BATCH for b in group.batches)
    covered = torch.zeros(layout.slot_shapes()[0], dtype=torch.int8)
    for piece in pieces_of(layout):
        part = piece.of_slot(covered)
        assert tuple(part.shape) == piece.shape
        part += 1
    assert bool((covered == 1).all())


def test_a_block_larger_than_a_batch_is_a_batch() -> None:
    side = 2 * math.isqrt(BATCH)
    (group,) = lay_out([(side + 9, 2 * side + 9)], Identity(side)).groups
    assert group.L > BATCH
    assert [b.blocks for b in group.batches] == [1] * 6


def test_a_strip_that_is_too_wide_is_split() -> None:
    X = BATCH // 4096 * 3 + 5
    layout = lay_out([(128, 64 * X)])
    assert [(p.y0, p.y1) for p in pieces_of(layout)] == [(0, 1)] * 4 + [(1, 2)] * 4
    assert sum(p.blocks for p in pieces_of(layout)) == 2 * X


# --- Memory ----------------------------------------------------------------------------------------------------------------


def strange_tensors() -> list[Tensor]:
    """Numbered from 1 in the order of their entries, in memory of every kind."""
    base = numbered([(70, 90), (6, 5, 9, 8), (130, 40), (66,), (3, 7, 11)])
    return [
        base[0].t().contiguous().t(),  # transposed in memory
        base[1].to(memory_format=torch.channels_last),
        torch.stack([base[2], torch.zeros_like(base[2])], dim=2)[:, :, 0],  # every other entry
        torch.stack([base[3], torch.zeros_like(base[3])], dim=1)[:, 0],
        base[4].permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ]


@pytest.mark.parametrize("transform", [DCT(64), Identity(16)], ids=repr)
def test_memory_of_any_order_is_read_in_the_order_of_the_entries(transform: Transform) -> None:
    tensors = strange_tensors()
    assert not any(t.is_contiguous() for t in tensors)
    layout = lay_out([tuple(t.shape) for t in tensors], transform)
    assert_complete(layout, tensors)
    for piece in pieces_of(layout):
        t = tensors[piece.grid.index]
        part = padded(piece, piece.of_matrix(matrix_of(t, piece.grid)))
        assert torch.equal(part, padded(piece, piece.of_matrix(matrix_of(t.contiguous(), piece.grid))))


def test_a_piece_that_needs_no_padding_is_read_in_place_and_others_into_the_memory_given() -> None:
    layout = lay_out([(128, 128), (100, 128)])
    whole, short = pieces_of(layout)
    x, y, memory = torch.randn(128, 128), torch.randn(100, 128), torch.full((128 * 128 + 5,), 9.0)
    assert padded(whole, x, memory).data_ptr() == x.data_ptr()
    copy = padded(short, y, memory)
    assert copy.data_ptr() == memory.data_ptr()
    assert torch.equal(copy[:100], y)
    assert not copy[100:].any()
    assert memory[128 * 128 :].tolist() == [9.0] * 5
    assert torch.equal(padded(whole, x.double(), memory), x), "other dtypes are cast"
    assert torch.equal(padded(whole, x.bfloat16()), x.bfloat16().float())


def test_a_piece_of_a_matrix_is_a_view_without_padding() -> None:
    grid = Grid(0, (100, 70), 64, 64, 0)
    matrix = torch.zeros(100, 70)
    Piece(grid, 1, 2, 1, 2, 3).of_matrix(matrix).fill_(1)
    assert int(matrix.sum()) == 36 * 6
    assert bool((matrix[64:, 64:] == 1).all())
