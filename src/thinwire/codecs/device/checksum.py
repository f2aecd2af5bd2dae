"""CRC-32 of messages on a device, as zlib computes it: a tree of table look-ups and exclusive or.

A checksum is linear over GF(2), but for a constant that depends on the length: each byte contributes an entry of a table that
belongs to its distance from the end, and contributions are joined by exclusive or. Zeros in front contribute nothing, so
rows of different lengths are filled up there and go through the tree together.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from thinwire.codecs.device.bits import table
from thinwire.kernels import triton

_BYTES = 64  # bytes that the first level joins
_STATES = 16  # states of four bytes that each further level joins
_SEGMENT, _TILE = 4096, 128  # bytes that a program of the Triton kernel reads, and segments that it joins at once
_POLYNOMIAL = 0xEDB88320

_Words = NDArray[np.uint32]


def crc32(rows: Sequence[Tensor]) -> Tensor:
    """Checksums of several pieces of several messages.

    Args:
        rows: pieces, each [messages, n] of bytes; n may differ from piece to piece.

    Returns:
        int32 [messages, pieces]: the bits of zlib's checksum.
    """
    messages, longest, device = len(rows[0]), max(row.shape[1] for row in rows), rows[0].device
    longest += -longest % _BYTES
    filled = [pad(row, (longest - row.shape[1], 0)) for row in rows]
    state = _joined(torch.stack(filled, 1).view(messages * len(rows), -1, _BYTES), 1)
    covered = _BYTES
    while state.shape[1] > 1:
        if short := -state.shape[1] % _STATES:
            state = pad(state, (short, 0))
        state = _joined(state.view(torch.uint8).view(len(state), -1, 4 * _STATES), covered)
        covered *= _STATES
    constants = tuple(_of_zeros(row.shape[1]) for row in rows)
    return state.view(messages, len(rows)) ^ table(constants, torch.int32, device)


def crc32_around(raw: Tensor, stretches: Sequence[tuple[int, int, int]]) -> Tensor:
    """Checksums of stretches of several messages, each with four bytes that count as zeros: its own checksum.

    Args:
        raw: [messages, nbytes].
        stretches: where each begins, where the four bytes end, and where it ends.

    Returns:
        int32 [messages, stretches].
    """
    if triton.available(raw.device):
        return sums_by_kernels(raw, stretches).T
    zeros = torch.zeros((len(raw), 4), dtype=torch.uint8, device=raw.device)
    return crc32([torch.cat([raw[:, start : at - 4], zeros, raw[:, at:stop]], 1) for start, at, stop in stretches])


def sums_by_kernels(raw: Tensor, stretches: Sequence[tuple[int, int, int]]) -> Tensor:
    """The same by Triton kernels, [stretches, messages], in two launches for each stretch: see `kernels.triton.checksum`."""
    out = torch.empty((len(stretches), len(raw)), dtype=torch.int32, device=raw.device)
    for (start, at, stop), sums in zip(stretches, out, strict=True):
        length, tile, device = stop - start, _TILE, raw.device
        segments = -(-length // _SEGMENT)
        states = torch.empty((len(raw), segments), dtype=torch.int32, device=device)
        given = (raw[:, start:], raw.stride(0), length, at - 4 - start, segments)
        tables = (_contributions(1, device), _images(_BYTES, _SEGMENT // _BYTES, device))
        triton.launch("crc_segments", (segments, len(raw)), *given, *tables, states)
        moves, ahead = _images(_SEGMENT, tile, device), _images(_SEGMENT * tile, 2, device)[0]
        more = (states, segments, -(-segments // tile), moves, ahead, _of_zeros(length), sums)
        triton.launch("crc_join", (len(raw),), *more, TILE=tile)
    return out


@functools.lru_cache(maxsize=64)
def _images(covered: int, count: int, device: torch.device) -> Tensor:
    """int32 [count, 32]: the bits of states, each of which stands for so many bytes, moved to the end of all of them."""
    unit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    found = [_after_zeros(unit, covered * (count - 1 - i)) for i in range(count)]
    return torch.from_numpy(np.stack(found).view(np.int32)).to(device)


def _joined(lanes: Tensor, covered: int) -> Tensor:
    """One state, int32 [rows, n], for each lane of bytes [rows, n, bytes]."""
    entries = lanes.int() + 256 * torch.arange(lanes.shape[2], dtype=torch.int32, device=lanes.device)
    found = _contributions(covered, lanes.device).index_select(0, entries.view(-1)).view(lanes.shape)
    while (width := found.shape[2]) > 1:
        found = found[..., : width // 2] ^ found[..., width // 2 :]
    return found.squeeze(2)


@functools.lru_cache(maxsize=64)
def _contributions(covered: int, device: torch.device) -> Tensor:
    """int32 [lanes x 256]: what each value of each byte contributes, where a state stands for so many bytes."""
    one = _one_byte()
    if covered == 1:
        found = [_after_zeros(one, _BYTES - 1 - i) for i in range(_BYTES)]
    else:
        values = np.arange(256, dtype=np.uint32)
        shifted = [values << np.uint32(8 * b) for b in range(4)]
        found = [_after_zeros(bits, covered * (_STATES - 1 - i)) for i in range(_STATES) for bits in shifted]
    return torch.from_numpy(np.concatenate(found).view(np.int32)).to(device)


@functools.cache
def _one_byte() -> _Words:
    """The state after each value of one byte."""
    state = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        state = np.where(state & 1, (state >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), state >> np.uint32(1))
    return state.astype(np.uint32)


def _after_zeros(states: _Words, count: int) -> _Words:
    """The states after so many zero bytes more: a linear map of 32 bits, by repeated squaring."""
    unit = np.uint32(1) << np.arange(32, dtype=np.uint32)
    step = _one_byte()[unit & np.uint32(255)] ^ (unit >> np.uint32(8))
    while count:
        if count & 1:
            states = _mapped(step, states)
        step, count = _mapped(step, step), count >> 1
    return states


def _mapped(images: _Words, states: _Words) -> _Words:
    """States through the map that takes bit i to images[i]."""
    chosen = (states[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return np.bitwise_xor.reduce(np.where(chosen, images, np.uint32(0)), axis=1)


@functools.lru_cache(maxsize=1024)
def _of_zeros(count: int) -> int:
    """The checksum of so many zero bytes, as a signed number."""
    bits = zlib.crc32(bytes(count))
    return bits - (1 << 32) if bits >> 31 else bits
