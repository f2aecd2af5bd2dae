"""Whole numbers of any width in bits, packed and unpacked by torch operations: `codecs.bits` for tensors on a device.

Nothing here looks at a value from the host, and no result has a size that depends on one.
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor
from torch.nn.functional import pad

THREES = (1, 3, 9, 27, 81)


@functools.lru_cache(maxsize=1024)
def table(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers on a device, copied there once."""
    return torch.tensor(values, dtype=dtype).to(device)


def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device, 0-d, without a copy from the host.

    To divide by it is a division; CUDA multiplies by the inverse instead where the divisor is a number of the host.
    """
    return torch.full((), value, dtype=dtype, device=device)


def numbers(values: list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that change from round to round on a device, without a copy from the host."""
    return torch.stack([number(value, dtype, device) for value in values])


def bytes_on(data: bytes, device: torch.device) -> Tensor:
    """Bytes that change from round to round on a device, [n], without a copy from the host; n is a multiple of eight."""
    words = struct.unpack(f"<{len(data) // 8}q", data)
    return torch.stack([number(word, torch.int64, device) for word in words]).view(torch.uint8)


def aligned(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n] as numbers of a dtype; copied, since they may begin anywhere in a message."""
    if not raw.numel():
        return torch.empty((*raw.shape[:-1], 0), dtype=dtype, device=raw.device)
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Pack whole numbers [n] below 2**width into bytes; see `codecs.bits.pack`."""
    count, (q, r) = numbers.numel(), divmod(width, 8)
    parts = []
    if q:
        parts.append(numbers.long().contiguous().view(torch.uint8).view(count, 8)[:, :q].reshape(-1))
    if r:
        parts.append(_pack_rest(numbers >> (8 * q) if q else numbers, r))
    if not parts:
        return torch.empty(0, dtype=torch.uint8, device=numbers.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _pack_rest(numbers: Tensor, r: int) -> Tensor:
    """Numbers of r < 8 bits, eight in r bytes."""
    if short := -numbers.numel() % 8:
        numbers = pad(numbers, (0, short))
    if 8 % r == 0:  # whole numbers of them in a byte
        weights = table(tuple(1 << i for i in range(0, 8, r)), torch.uint8, numbers.device)
        return (numbers.to(torch.uint8).view(-1, 8 // r) * weights).sum(-1, dtype=torch.uint8)
    shifts = table(tuple(range(0, 8 * r, r)), torch.int64, numbers.device)
    words = (numbers.long().view(-1, 8) << shifts).sum(-1)
    return words.view(torch.uint8).view(-1, 8)[:, :r].reshape(-1)


def unpack(packed: Tensor, count: int, width: int, start: int, stop: int) -> Tensor:
    """Numbers `start` to `stop` of `count` that were packed, of several rows [rows, nbytes] alike: [rows, stop - start]."""
    rows, (q, r) = len(packed), divmod(width, 8)
    if not q:
        return _unpack_rest(packed, r, start, stop)
    low = pad(packed[:, start * q : stop * q].reshape(rows, stop - start, q), (0, 8 - q)).view(torch.int64).squeeze(-1)
    if r:
        low = low | _unpack_rest(packed[:, count * q :], r, start, stop).long() << 8 * q
    return low


def _unpack_rest(packed: Tensor, r: int, start: int, stop: int) -> Tensor:
    if not r:
        return torch.zeros((len(packed), stop - start), dtype=torch.uint8, device=packed.device)
    first, last = start // 8, -(-stop // 8)
    part = packed[:, first * r : last * r]
    if 8 % r == 0:
        shifts = table(tuple(range(0, 8, r)), torch.uint8, packed.device)
        eights = (part.unsqueeze(-1) >> shifts) & ((1 << r) - 1)
    else:
        words = pad(part.reshape(len(packed), last - first, r), (0, 8 - r)).view(torch.int64)
        eights = (words >> table(tuple(range(0, 8 * r, r)), torch.int64, packed.device)) & ((1 << r) - 1)
    return eights.reshape(len(packed), -1)[:, start - 8 * first : stop - 8 * first]


def bad_padding(packed: Tensor, count: int, width: int) -> Tensor | None:
    """Of each row [rows, nbytes], whether bits that fill up the last eight numbers are set; None where there are none."""
    r, left = width % 8, count % 8
    if not r or not left:
        return None
    spare = ((1 << 8 * r) - 1 ^ (1 << r * left) - 1).to_bytes(r, "little")
    return (packed[:, -r:] & table(tuple(spare), torch.uint8, packed.device)).ne(0).any(1)


def pack_threes(numbers: Tensor) -> Tensor:
    """Pack numbers from 0 to 2 [n], five in a byte."""
    if short := -numbers.numel() % 5:
        numbers = pad(numbers, (0, short))
    return (numbers.view(-1, 5) * table(THREES, torch.uint8, numbers.device)).sum(-1, dtype=torch.uint8)


def unpack_threes(packed: Tensor, start: int, stop: int) -> Tensor:
    """Numbers `start` to `stop` of each row [rows, nbytes]."""
    first = start // 5
    five = packed[:, first : -(-stop // 5)].unsqueeze(-1)
    digits = five.div(table(THREES, torch.uint8, packed.device), rounding_mode="floor").remainder(3)
    return digits.reshape(len(packed), -1)[:, start - 5 * first : stop - 5 * first]
