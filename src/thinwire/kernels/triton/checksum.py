"""CRC-32 of several messages in two launches, whatever their length.

As in `codecs.device.checksum`, a checksum is linear over GF(2): what a byte contributes depends on its distance from the end. A
program looks up the bytes of a segment, 64 lanes of 64 bytes; another one joins the states of all segments. To move a state
by so many bytes is a matrix of 32 x 32 bits, given as the images of its 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def xor_along(x, AXIS: tl.constexpr):
    """Exclusive or of at most 255 numbers: of the counts of every eighth bit, each in a byte of its own, the last bits.

    `tl.xor_sum` says the same, and takes a second in Triton's interpreter.
    """
    found = tl.sum(x & 0x01010101, AXIS) & 0x01010101
    for shift in tl.static_range(1, 8):
        found |= (tl.sum((x >> shift) & 0x01010101, AXIS) & 0x01010101) << shift
    return found


@triton.jit
def moved(states, images, bit):
    """Exclusive or of at most 255 states, each moved by its matrix [n, 32]."""
    chosen = tl.where(((states[:, None] >> bit[None, :]) & 1) == 1, images, 0)
    return xor_along(xor_along(chosen, 1), 0)


@triton.jit
def crc_segments(raw, stride, length, hole, segments, table, images, states):
    """The state after each segment of a message; segments are counted from its end.

    Args:
        raw: the first byte of the first message.
        stride: bytes from message to message.
        length: of a message.
        hole: four bytes from here on count as zeros: the checksum itself.
        segments: of a message.
        table: int32 [64, 256], what each byte of a lane contributes to it.
        images: int32 [64, 32], how the state of each lane is moved to the end of the segment.
        states: int32 [messages, segments], written.
    """
    segment = tl.program_id(0)
    message = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, 64)
    bit = tl.arange(0, 32)
    at = length - (segments - segment) * 4096 + lane[:, None] * 64 + lane[None, :]
    there = (at >= 0) & ((at < hole) | (at >= hole + 4))
    value = tl.load(raw + message * stride + at, mask=there, other=0).to(tl.int32)
    lanes = xor_along(tl.load(table + lane[None, :] * 256 + value), 1)
    state = moved(lanes, tl.load(images + lane[:, None] * 32 + bit[None, :]), bit)
    tl.store(states + message * segments + segment, state)


@triton.jit
def crc_join(states, segments, tiles, images, ahead, constant, out, TILE: tl.constexpr):
    """The checksum of a message from the states of its segments.

    Args:
        states: int32 [messages, segments].
        segments: how many.
        tiles: of TILE segments each, the first one filled up with zeros in front.
        images: int32 [TILE, 32], how the state of each segment is moved to the end of its tile.
        ahead: int32 [32], how a state is moved by a whole tile.
        constant: the checksum of as many zeros as a message has bytes.
        out: int32 [messages], written.
        TILE: segments that are joined at once.
    """
    message = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    bit = tl.arange(0, 32)
    moves = tl.load(images + i[:, None] * 32 + bit[None, :])
    further = tl.load(ahead + bit)
    state = tl.zeros([], tl.int32)
    for tile in range(tiles):
        at = segments - (tiles - tile) * TILE + i
        found = tl.load(states + message * segments + at, mask=at >= 0, other=0)
        before = xor_along(tl.where(((state >> bit) & 1) == 1, further, 0), 0)
        state = before ^ moved(found, moves, bit)
    tl.store(out + message, state ^ constant)
