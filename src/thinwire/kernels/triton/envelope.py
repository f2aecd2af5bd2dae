"""A Triton kernel that opens the envelopes of messages: see docs/wire-format.md."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def word_at(base, NBYTES: tl.constexpr):
    """A number of 8 bytes or fewer, from wherever it begins."""
    i = tl.arange(0, NBYTES)
    return tl.sum(tl.load(base + i).to(tl.int64) << (8 * i).to(tl.int64), 0)


@triton.jit
def open_envelopes(
    raw,
    stride,
    senders,
    frames,
    parts,
    sums,
    first,
    fingerprint,
    round_number,
    nbytes,
    wrong,
    invalid,
    flags,
    weights,
    states,
    HEADER: tl.constexpr,
    PART: tl.constexpr,
    INVALID: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """What the envelope of one message says, and whether it or a part of it is not what it must be.

    Args:
        raw: the first byte of the first message.
        stride: bytes from message to message.
        senders: int64 [messages], whose they should be.
        frames: int64 [parts, 2], where each part begins and ends in the body.
        parts: how many.
        sums: int32 [1 + parts, messages], checksums of the header and of the parts.
        first: the first eight bytes without the flags.
        fingerprint: as int64.
        round_number: as int64.
        nbytes: length of the body.
        wrong: uint8 [messages], written.
        invalid: uint8 [messages], written: an undamaged header of this round says that the contribution is invalid.
        flags: int64 [messages], written.
        weights: float32 [messages], written.
        states: int64 [messages], written.
        HEADER: bytes of the envelope.
        PART: bytes of the header of a part.
        INVALID: the flag of an invalid contribution.
        KNOWN: all flags that there are.
    """
    pid = tl.program_id(0)
    messages = tl.num_programs(0)
    base = raw + pid.to(tl.int64) * stride
    head = word_at(base, 8)
    flag = (head >> 40) & 0xFF
    weight = word_at(base + 48, 4).to(tl.int32)
    size = weight & 0x7FFFFFFF
    this_round = word_at(base + 16, 8) == round_number
    damaged = word_at(base + HEADER - 4, 4).to(tl.int32) != tl.load(sums + pid)
    odd = (head ^ (flag << 40)) != first
    odd = odd | (flag > KNOWN) | (size >= 0x7F800000) | ((weight < 0) & (size > 0)) | damaged
    odd = odd | (word_at(base + 8, 8) != fingerprint) | (this_round == 0) | (word_at(base + 40, 8) != nbytes)
    odd = odd | (word_at(base + 24, 8) != tl.load(senders + pid))
    for part in range(parts):
        start = tl.load(frames + 2 * part)
        body = base + HEADER + start
        odd = odd | (word_at(body + 16, 8) != tl.load(frames + 2 * part + 1) - start - PART)
        odd = odd | (word_at(body + PART - 4, 4).to(tl.int32) != tl.load(sums + (1 + part) * messages + pid))
    said = ((flag & INVALID) != 0) & (damaged == 0) & this_round
    tl.store(wrong + pid, odd.to(tl.uint8))
    tl.store(invalid + pid, said.to(tl.uint8))
    tl.store(flags + pid, flag)
    tl.store(weights + pid, weight.to(tl.float32, bitcast=True))
    tl.store(states + pid, word_at(base + 32, 8))
