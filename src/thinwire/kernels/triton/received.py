"""Triton kernels that read what workers sent of blocks, combine it and apply it; see `blocks` for tables and entries."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.triton.blocks import bf16_bits, bf16_value


@triton.jit
def store_rounded(pointers, x, mask, DTYPE: tl.constexpr):
    """Store float32 as another dtype."""
    if tl.bfloat16 == DTYPE:
        tl.store(pointers.to(tl.pointer_type(tl.int16)), bf16_bits(x).to(tl.int16), mask=mask)
    else:
        tl.store(pointers, x.to(DTYPE), mask=mask)


@triton.jit
def packed_number(base, at, mask, LOW: tl.constexpr):
    """Numbers of LOW bits, at most eight, that begin at these bits."""
    byte = base + (at >> 3)
    shift = (at & 7).to(tl.int32)
    first = tl.load(byte, mask=mask, other=0).to(tl.int32)
    second = tl.load(byte + 1, mask=mask & (shift + LOW > 8), other=0).to(tl.int32)
    return ((first | (second << 8)) >> shift) & ((1 << LOW) - 1)


@triton.jit
def read(
    raw,
    stride,
    blocks,
    entries,
    scales,
    wrong,
    low_at,
    scale_at,
    sign_at,
    K: tl.constexpr,
    LOW: tl.constexpr,
    BITS: tl.constexpr,
    ROW: tl.constexpr,
    BP: tl.constexpr,
):
    """Entries and scales of one block in one message, and whether they are what no sender writes.

    Args:
        raw: where the section begins in the first message.
        stride: bytes from message to message.
        blocks: of the group, in `entries`, `scales` and `wrong`, which begin with the section's.
        entries: int16 [messages, blocks, k], written; where something is wrong not all of them are.
        scales: float32 [messages, blocks], written.
        wrong: uint8 [messages, blocks], written.
        low_at: where low bits begin in the section.
        scale_at: where scales begin.
        sign_at: where signs begin.
        K: entries of a block.
        LOW: low bits of an index.
        BITS: of a row of Elias-Fano that may be set.
        ROW: bytes of it.
        BP: bits of it, rounded up to a power of two.
    """
    number = tl.program_id(0).to(tl.int64)
    message = tl.program_id(1).to(tl.int64)
    base = raw + message * stride
    row = base + number * ROW
    p = tl.arange(0, BP)
    before = p - 1
    bit = (tl.load(row + (p >> 3), mask=p < 8 * ROW, other=0).to(tl.int32) >> (p & 7)) & 1
    last = tl.load(row + (before >> 3), mask=(p > 0) & (p < 8 * ROW), other=0).to(tl.int32) >> (before & 7)
    j = tl.cumsum(bit, 0) - 1
    there = (bit == 1) & (j < K)
    at = number * (K * LOW) + j * LOW
    low = packed_number(base + low_at, at, there, LOW)
    same = there & ((last & 1) == 1)  # the high part is that of the one before
    unsorted = same & (low <= packed_number(base + low_at, at - LOW, same, LOW))
    index = ((p - j) << LOW) | low
    many = tl.sum(bit, 0)
    inside = tl.sum(tl.where(p < BITS, bit, 0), 0)
    odd = tl.sum((unsorted | (there & (index > 0xFFF))).to(tl.int32), 0)
    sign = packed_number(base + sign_at, number * K + j, there, 1)
    place = message * blocks + number
    tl.store(entries + place * K + j, ((index & 0xFFF) | (sign << 12)).to(tl.int16), mask=there)
    told = tl.load(base + scale_at + 2 * number).to(tl.int32) | (tl.load(base + scale_at + 2 * number + 1).to(tl.int32) << 8)
    unsound = ((told & 0x7F80) == 0x7F80) | (told > 0x8000)  # not finite, or negative; -0 is accepted
    tl.store(scales + place, bf16_value(told))
    tl.store(wrong + place, ((many != K) | (inside != K) | (odd > 0) | unsound).to(tl.uint8))


@triton.jit
def combine(
    places,
    shapes,
    addresses,
    basis,
    entries,
    scales,
    weights,
    factors,
    squares,
    blocks,
    total,
    lr,
    MESSAGES: tl.constexpr,
    SENDERS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FACTORED: tl.constexpr,
    SQUARES: tl.constexpr,
    STEP: tl.constexpr,
    SIGN: tl.constexpr,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The mean of what several workers sent of a block, transformed back, and taken off a tensor.

    Entries are put in their places by a product of matrices with a single one in each row, which is exact, and there are no
    atomic additions: workers are added one after the other, in rank order.

    Args:
        places: see above; numbers are those within the group.
        shapes: int64 [tensors, 2], rows and columns of each tensor.
        addresses: int64 [tensors]: what is written.
        basis: P, float32.
        entries: int16 [messages, blocks, k].
        scales: float32 [messages, blocks].
        weights: float32 [messages].
        factors: float32 [tensors], multiply the means.
        squares: float64 [blocks], written.
        blocks: of the group.
        total: what sums are divided by.
        lr: the step size.
        MESSAGES: how many.
        SENDERS: whether sums are divided by the weight of those who sent an entry.
        WEIGHTED: whether workers have weights.
        FACTORED: whether there are factors.
        SQUARES: write the sums of squares of the means and nothing else.
        STEP: take lr times the mean off the tensors; else overwrite them with it.
        SIGN: take off lr times its sign.
        DTYPE: of the tensors.
        K: entries of a block.
        KP: K rounded up to a power of two, at least 16.
        PRECISION: of the matrix products with the basis.
    """
    pid = tl.program_id(0).to(tl.int64)
    number = tl.load(places + 4 * pid).to(tl.int64)
    r = tl.arange(0, 64)
    j = tl.arange(0, KP)
    mean = tl.full([64, 64], -0.0, tl.float32)  # anything can be added to -0 without a change
    shared = tl.zeros([64, 64], tl.float32)
    for message in range(MESSAGES):
        place = message * blocks + number
        told = tl.load(entries + place * K + j, mask=j < K, other=0).to(tl.int32)
        index = tl.where(j < K, told & 0xFFF, -1)
        sign = (1 - 2 * ((told >> 12) & 1)).to(tl.float16)
        row = ((index >> 6)[:, None] == r[None, :]).to(tl.float16)
        col = tl.where((index & 63)[:, None] == r[None, :], sign[:, None], 0.0).to(tl.float16)
        signs = tl.dot(tl.trans(row), col)  # -1, 0 or 1
        size = tl.load(scales + place)
        share = 1.0
        if WEIGHTED:
            weight = tl.load(weights + message)
            size = size * weight
            if SENDERS:
                share = weight
        sent = signs != 0
        mean = tl.where(sent, mean + signs * size, mean)
        shared = tl.where(sent, shared + share, shared)
    if SENDERS:
        mean = tl.where(shared > 0, tl.div_rn(mean, tl.where(shared > 0, shared, 1.0)), 0.0)
    else:
        mean = tl.where(shared > 0, tl.div_rn(mean, tl.zeros([64, 64], tl.float32) + total), 0.0)
    if SQUARES:
        wide = mean.to(tl.float64)
        tl.store(squares + number, tl.sum(tl.sum(wide * wide, 1), 0))
    else:
        tensor = tl.load(places + 4 * pid + 1)
        if FACTORED:
            mean = mean * tl.load(factors + tensor)
        P = tl.load(basis + r[:, None] * 64 + r[None, :])
        made = tl.dot(tl.dot(tl.trans(P), mean, input_precision=PRECISION), P, input_precision=PRECISION)
        y = tl.load(places + 4 * pid + 2).to(tl.int64) * 64
        x = tl.load(places + 4 * pid + 3).to(tl.int64) * 64
        rows = tl.load(shapes + 2 * tensor)
        cols = tl.load(shapes + 2 * tensor + 1)
        inside = (y + r < rows)[:, None] & (x + r < cols)[None, :]
        target = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE)) + y * cols + x
        pointers = target + r[:, None] * cols.to(tl.int32) + r[None, :]
        if STEP:
            if SIGN:
                made = tl.where(made > 0, 1.0, tl.where(made < 0, -1.0, 0.0))
            made = tl.fma(made, -lr, tl.load(pointers, mask=inside, other=0.0).to(tl.float32))
        store_rounded(pointers, made, inside, DTYPE)


@triton.jit
def take(places, shapes, addresses, entries, scales, scale, K: tl.constexpr, KP: tl.constexpr):
    """Take `scale` times what was sent of a block off its slot.

    Args:
        places: see above; numbers are those within the group.
        shapes: int64 [tensors, 2], rows and columns of each tensor.
        addresses: int64 [tensors]: the slots.
        entries: int16 [blocks, k].
        scales: float32 [blocks].
        scale: see above.
        K: entries of a block.
        KP: K rounded up to a power of two.
    """
    pid = tl.program_id(0).to(tl.int64)
    number = tl.load(places + 4 * pid).to(tl.int64)
    tensor = tl.load(places + 4 * pid + 1)
    y = tl.load(places + 4 * pid + 2).to(tl.int64) * 64
    x = tl.load(places + 4 * pid + 3).to(tl.int64) * 64
    wide = (tl.load(shapes + 2 * tensor + 1) + 63) // 64 * 64
    j = tl.arange(0, KP)
    told = tl.load(entries + number * K + j, mask=j < K, other=0).to(tl.int32)
    index = told & 0xFFF
    pointers = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + (y + (index >> 6)) * wide + x + (index & 63)
    size = tl.load(scales + number) * scale
    sent = tl.where(((told >> 12) & 1) == 1, -size, size)
    tl.store(pointers, tl.load(pointers, mask=j < K, other=0.0) - sent, mask=j < K)
