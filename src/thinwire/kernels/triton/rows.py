"""Triton kernels for tensors that are sent whole: one program for each group of up to 256 values with a common scale.

Which values: a table `groups`, int32 [groups, 4], with the number of a group in its section, the tensor it belongs to, its
first value there and how many it has, a multiple of eight; and `offsets`, int64 [groups], its first value among all of the
section.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.triton.blocks import bf16_bits, bf16_value, whitened
from thinwire.kernels.triton.received import store_rounded


@triton.jit
def encode_rows(
    groups,
    offsets,
    addresses,
    tensors,
    clip_ptr,
    scales,
    section,
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
):
    """Slot <- decay slot + scale tensor, and its bytes in a message; see `blocks.encode`.

    Args:
        groups: see above.
        offsets: see above.
        addresses: int64 [3, tensors]: slots, tensors that are added, second moments.
        tensors: how many.
        clip_ptr: multiplies the tensors, float32.
        scales: float32 [groups], written.
        section: the bytes of the section, written: scales, signs.
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
    """
    pid = tl.program_id(0)
    number = tl.load(groups + 4 * pid)
    tensor = tl.load(groups + 4 * pid + 1)
    first = tl.load(groups + 4 * pid + 2)
    count = tl.load(groups + 4 * pid + 3)
    i = tl.arange(0, 256)
    inside = i < count
    if KEPT or STORED:
        slots = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + first + i
    if ADD:
        given = tl.load(addresses + tensors + tensor).to(tl.pointer_type(DTYPE)) + first + i
        m = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        if WHITEN:
            moments = tl.load(addresses + 2 * tensors + tensor).to(tl.pointer_type(tl.float32)) + first + i
            m = whitened(m, moments, inside, clip_ptr, b2, rest, root, eps, CLIP)
        m = tl.fma(m, scale, tl.load(slots, mask=inside, other=0.0) * decay) if KEPT else m * scale
        if STORED:
            tl.store(slots, m, mask=inside)
    else:
        m = tl.load(slots, mask=inside, other=0.0)
    total = tl.sum(tl.where(inside, tl.abs(m), 0.0).to(tl.float64), 0)
    scale_bits = bf16_bits((total / count.to(tl.float64)).to(tl.float32))
    tl.store(scales + number, bf16_value(scale_bits))
    pair = tl.arange(0, 2)
    tl.store(section + 2 * number + pair, ((scale_bits >> (8 * pair)) & 0xFF).to(tl.uint8))
    negative = (inside & (m.to(tl.int32, bitcast=True) < 0)).to(tl.int32)
    signs = tl.sum(tl.reshape(negative, [32, 8]) << tl.arange(0, 8)[None, :], 1)
    byte = tl.arange(0, 32)
    tl.store(section + sign_at + tl.load(offsets + pid) // 8 + byte, signs.to(tl.uint8), mask=byte < count // 8)


@triton.jit
def read_rows(raw, stride, many, scales, wrong):
    """The scales of a section in one message, and whether they are what no sender writes.

    Args:
        raw: where the section begins in the first message.
        stride: bytes from message to message.
        many: groups of the section.
        scales: float32 [messages, groups], written.
        wrong: uint8 [messages, groups], written.
    """
    message = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    base = raw + message * stride + 2 * i
    told = tl.load(base, mask=i < many, other=0).to(tl.int32) | (tl.load(base + 1, mask=i < many, other=0).to(tl.int32) << 8)
    tl.store(scales + message * many + i, bf16_value(told), mask=i < many)
    unsound = ((told & 0x7F80) == 0x7F80) | (told > 0x8000)  # not finite, or negative; -0 is accepted
    tl.store(wrong + message * many + i, unsound.to(tl.uint8), mask=i < many)


@triton.jit
def signed(base, sign_at, number, offset, i, inside):
    """Values of a group in a message whose section begins at `base`."""
    told = tl.load(base + 2 * number).to(tl.int32) | (tl.load(base + 2 * number + 1).to(tl.int32) << 8)
    byte = tl.load(base + sign_at + (offset + i) // 8, mask=inside, other=0).to(tl.int32)
    size = bf16_value(told)
    return tl.where(((byte >> (i & 7)) & 1) == 1, -size, size)


@triton.jit
def combine_rows(
    groups,
    offsets,
    addresses,
    raw,
    stride,
    weights,
    factors,
    squares,
    sign_at,
    total,
    lr,
    MESSAGES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FACTORED: tl.constexpr,
    SQUARES: tl.constexpr,
    STEP: tl.constexpr,
    SIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The mean of what all workers sent of a group, and taken off a tensor; see `received.combine`.

    Args:
        groups: see above.
        offsets: see above.
        addresses: int64 [tensors]: what is written.
        raw: where the section begins in the first message.
        stride: bytes from message to message.
        weights: float32 [messages].
        factors: float32 [tensors], multiply the means.
        squares: float64 [groups], written.
        sign_at: where signs begin in the section.
        total: what sums are divided by.
        lr: the step size.
        MESSAGES: how many.
        WEIGHTED: whether workers have weights.
        FACTORED: whether there are factors.
        SQUARES: write the sums of squares of the means and nothing else.
        STEP: take lr times the mean off the tensors; else overwrite them with it.
        SIGN: take off lr times its sign.
        DTYPE: of the tensors.
    """
    pid = tl.program_id(0)
    number = tl.load(groups + 4 * pid)
    tensor = tl.load(groups + 4 * pid + 1)
    first = tl.load(groups + 4 * pid + 2)
    offset = tl.load(offsets + pid)
    i = tl.arange(0, 256)
    inside = i < tl.load(groups + 4 * pid + 3)
    mean = tl.zeros([256], tl.float32)
    wide_stride = stride.to(tl.int64)
    for message in range(MESSAGES):
        sent = signed(raw + message * wide_stride, sign_at, number, offset, i, inside)
        if WEIGHTED:
            sent = sent * tl.load(weights + message)
        mean += sent
    mean = tl.div_rn(mean, tl.zeros([256], tl.float32) + total)
    if SQUARES:
        wide = tl.where(inside, mean, 0.0).to(tl.float64)
        tl.store(squares + number, tl.sum(wide * wide, 0))
    else:
        pointers = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE)) + first + i
        if FACTORED:
            mean = mean * tl.load(factors + tensor)
        if STEP:
            if SIGN:
                mean = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))
            mean = tl.fma(mean, -lr, tl.load(pointers, mask=inside, other=0.0).to(tl.float32))
        store_rounded(pointers, mean, inside, DTYPE)


@triton.jit
def take_rows(groups, offsets, addresses, section, sign_at, scale):
    """Take `scale` times what was sent of a group off its slot; see `received.take`."""
    pid = tl.program_id(0)
    tensor = tl.load(groups + 4 * pid + 1)
    i = tl.arange(0, 256)
    inside = i < tl.load(groups + 4 * pid + 3)
    sent = signed(section, sign_at, tl.load(groups + 4 * pid), tl.load(offsets + pid), i, inside)
    pointers = tl.load(addresses + tensor).to(tl.pointer_type(tl.float32)) + tl.load(groups + 4 * pid + 2) + i
    tl.store(pointers, tl.fma(sent, -scale, tl.load(pointers, mask=inside, other=0.0)), mask=inside)
