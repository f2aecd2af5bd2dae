"""Triton kernels for blocks of 64 x 64 entries, one program for each.

Which blocks: a table `places`, int32 [blocks, 4], with the number of a block, the tensor it belongs to, and its row and column
among the blocks of that tensor. Where tensors are: a table of addresses, int64, and one of their rows and columns, so that
one launch serves any number of tensors.

What was kept of a block stands in memory as k entries of two bytes each, in ascending order of their places: the place in the
lower 12 bits, and bit 12 set where the value is negative. All values of a block have the same size, its scale.

A product and a sum are rounded together (`tl.fma`) where torch's operations on lists of tensors do that, and else one by one:
the compiler is told not to fuse any others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bf16_bits(x):
    """Float32 to the bits of bfloat16, to nearest, ties to even, in whole numbers: Triton's interpreter would cut off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def bf16_value(bits):
    """The opposite of `bf16_bits`."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def whitened(g, pointers, inside, clip_ptr, b2, rest, root, eps, CLIP: tl.constexpr):
    """A gradient over the root of its second moment, which is brought up to date: `maths.update_rules.whitened`."""
    if CLIP:
        g = g * tl.load(clip_ptr)
    v = tl.fma(rest * g, g, tl.load(pointers, mask=inside, other=0.0) * b2)
    tl.store(pointers, v, mask=inside)
    return tl.div_rn(g, tl.div_rn(tl.sqrt_rn(v), root) + eps)


@triton.jit
def encode(
    places,
    shapes,
    addresses,
    tensors,
    basis,
    clip_ptr,
    entries,
    scales,
    section,
    low_at,
    scale_at,
    sign_at,
    decay,
    scale,
    b2,
    rest,
    root,
    eps,
    ADD: tl.constexpr,
    KEPT: tl.constexpr,
    STORED: tl.constexpr,
    WHITEN: tl.constexpr,
    CLIP: tl.constexpr,
    DTYPE: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LOW: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Slot <- decay slot + scale P G P^T, the k entries of largest magnitude, and their bytes in a message.

    Args:
        places: see above; numbers are those within the section.
        shapes: int64 [tensors, 2], rows and columns of each tensor.
        addresses: int64 [3, tensors]: slots, tensors that are added, second moments.
        tensors: how many.
        basis: P, float32.
        clip_ptr: multiplies the tensors, float32.
        entries: int16 [blocks, k], written.
        scales: float32 [blocks], written.
        section: the bytes of the section, written: rows of Elias-Fano, low bits, scales, signs.
        low_at: where low bits begin.
        scale_at: where scales begin.
        sign_at: where signs begin.
        decay: see above.
        scale: see above.
        b2: decay of the second moments.
        rest: 1 - b2.
        root: sqrt(1 - b2^step).
        eps: added to the root of the second moment.
        ADD: whether anything is added to the slots.
        KEPT: whether what the slots hold counts.
        STORED: whether slots are written.
        WHITEN: whether tensors are whitened first.
        CLIP: whether they are multiplied first.
        DTYPE: of the tensors.
        K: entries that are kept of a block, a multiple of eight.
        KP: K rounded up to a power of two.
        LOW: low bits of an index.
        ROW: bytes of a row of Elias-Fano.
        TILE: bytes of it that are made at once.
        PRECISION: of the matrix products.
    """
    pid = tl.program_id(0).to(tl.int64)
    number = tl.load(places + 4 * pid).to(tl.int64)
    tensor = tl.load(places + 4 * pid + 1)
    y = tl.load(places + 4 * pid + 2).to(tl.int64) * 64
    x = tl.load(places + 4 * pid + 3).to(tl.int64) * 64
    rows = tl.load(shapes + 2 * tensor)
    cols = tl.load(shapes + 2 * tensor + 1)
    r = tl.arange(0, 64)
    if KEPT or STORED:
        wide = ((cols + 63) // 64 * 64).to(tl.int32)
        slot = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + y * wide + x
        slots = slot + r[:, None] * wide + r[None, :]
    if ADD:
        at = y * cols + x
        offsets = r[:, None] * cols.to(tl.int32) + r[None, :]
        inside = (y + r < rows)[:, None] & (x + r < cols)[None, :]
        given = tl.load(addresses + tensors + tensor).to(tl.pointer_type(DTYPE)) + at
        g = tl.load(given + offsets, mask=inside, other=0.0).to(tl.float32)
        if WHITEN:
            moments = tl.load(addresses + 2 * tensors + tensor).to(tl.pointer_type(tl.float32)) + at
            g = whitened(g, moments + offsets, inside, clip_ptr, b2, rest, root, eps, CLIP)
        P = tl.load(basis + r[:, None] * 64 + r[None, :])
        m = tl.dot(tl.dot(P, g, input_precision=PRECISION), tl.trans(P), input_precision=PRECISION)
        m = tl.fma(m, scale, tl.load(slots) * decay) if KEPT else m * scale
        if STORED:
            tl.store(slots, m)
    else:
        m = tl.load(slots)

    # The k-th largest magnitude, bit by bit: without the sign, bits are in the order of the numbers. NaN counts as largest.
    flat = tl.reshape(m, [4096])
    bits = flat.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    least = 0
    for b in range(31):
        trial = least | (1 << (30 - b))
        least = tl.where(tl.sum((size >= trial).to(tl.int32), 0) >= K, trial, least)
    above = size > least
    equal = (size == least).to(tl.int32)
    spare = K - tl.sum(above.to(tl.int32), 0)
    keep = above | ((equal > 0) & (tl.cumsum(equal, 0) <= spare))  # of equal ones the first
    nth = tl.cumsum(keep.to(tl.int32), 0) - 1  # in ascending order of places
    mine = entries + number * K
    told = tl.arange(0, 4096) | ((bits < 0).to(tl.int32) << 12)
    tl.store(mine + nth, told.to(tl.int16), mask=keep)
    total = tl.sum(tl.where(keep, tl.abs(flat), 0.0).to(tl.float64), 0)
    scale_bits = bf16_bits((total / K).to(tl.float32))
    tl.store(scales + number, bf16_value(scale_bits))
    tl.debug_barrier()  # entries are read back by other threads of this program
    pack(mine, scale_bits, number, section, low_at, scale_at, sign_at, K, KP, LOW, ROW, TILE)


@triton.jit
def pack(
    mine,
    scale_bits,
    number,
    section,
    low_at,
    scale_at,
    sign_at,
    K: tl.constexpr,
    KP: tl.constexpr,
    LOW: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """The bytes of one block: its row of Elias-Fano, low bits, scale and signs."""
    j = tl.arange(0, KP)
    told = tl.load(mine + j, mask=j < K, other=0).to(tl.int32)
    index = told & 0xFFF
    bit = (index >> LOW) + j
    weight = tl.where(j < K, 1 << (bit & 7), 0)
    for first in tl.static_range(0, ROW, TILE):
        byte = first + tl.arange(0, TILE)
        made = tl.sum(tl.where((bit >> 3)[None, :] == byte[:, None], weight[None, :], 0), 1)
        tl.store(section + number * ROW + byte, made.to(tl.uint8), mask=byte < ROW)
    eight = tl.arange(0, 8)
    group = tl.arange(0, KP // 8)
    low = tl.reshape(tl.where(j < K, index & ((1 << LOW) - 1), 0), [KP // 8, 8]).to(tl.int64)
    words = tl.sum(low << (eight * LOW).to(tl.int64)[None, :], 1)
    made = (words[:, None] >> (8 * eight).to(tl.int64)[None, :]) & 0xFF
    where = low_at + number * (K * LOW // 8) + group[:, None] * LOW + eight[None, :]
    tl.store(section + where, made.to(tl.uint8), mask=(group < K // 8)[:, None] & (eight < LOW)[None, :])
    signs = tl.sum(tl.reshape(tl.where(j < K, (told >> 12) & 1, 0), [KP // 8, 8]) << eight[None, :], 1)
    tl.store(section + sign_at + number * (K // 8) + group, signs.to(tl.uint8), mask=group < K // 8)
    pair = tl.arange(0, 2)
    tl.store(section + scale_at + number * 2 + pair, ((scale_bits >> (8 * pair)) & 0xFF).to(tl.uint8))
