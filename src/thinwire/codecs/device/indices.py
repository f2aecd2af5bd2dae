"""Index codes for tensors on a device: the bytes of `codecs.indices`, and flags of the messages that are not sound."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.device.bits import bad_padding, pack, table, unpack
from thinwire.codecs.indices import Bitmap, EliasFano, IndexCode, Packed

KNOWN = (Packed, Bitmap, EliasFano)


def write_indices(code: IndexCode, indices: Tensor) -> Tensor:
    """The code of sets [n, k], int64, as bytes."""
    if isinstance(code, Packed):
        return pack(indices.reshape(-1), code.width)
    if isinstance(code, Bitmap):
        return _write_rows(code, indices)
    assert isinstance(code, EliasFano)
    rows = _write_rows(code._row, (indices >> code.low) + torch.arange(code.k, device=indices.device))
    return torch.cat([rows, pack((indices & ((1 << code.low) - 1)).view(-1), code.low)]) if code.low else rows


def read_indices(code: IndexCode, raw: Tensor, n: int, start: int, stop: int) -> tuple[Tensor, list[Tensor]]:
    """Sets `start` to `stop` of n in several messages.

    Args:
        code: which code it is.
        raw: [messages, nbytes].
        n: sets in all.
        start: the first to read.
        stop: the first not to read.

    Returns:
        int32 [messages, stop - start, k], within a block in any case; and flags, [messages] each, any of which tells that a
        message is not sound. `bad_index_padding` tells the rest.
    """
    shape, first, last = (len(raw), stop - start, code.k), start * code.k, stop * code.k
    wrong: list[Tensor] = []
    if isinstance(code, Packed):
        indices = unpack(raw, n * code.k, code.width, first, last).int().view(shape)
    elif isinstance(code, Bitmap):
        indices, odd = _read_rows(code, raw, start, stop)
        wrong.append(odd)
    else:
        assert isinstance(code, EliasFano)
        middle = code._row.nbytes(n)
        indices, odd = _read_rows(code._row, raw[:, :middle], start, stop)
        wrong.append(odd)
        indices -= torch.arange(code.k, dtype=torch.int32, device=raw.device)
        if code.low:
            low = unpack(raw[:, middle:], n * code.k, code.low, first, last).view(shape)
            indices = indices.bitwise_left_shift_(code.low).bitwise_or_(low)
    wrong.append((indices[..., -1] >= code.L).any(1))
    if code.k > 1:
        wrong.append((indices[..., 1:] <= indices[..., :-1]).flatten(1).any(1))
    return indices.clamp_(0, code.L - 1), wrong


def bad_index_padding(code: IndexCode, raw: Tensor, n: int) -> list[Tensor]:
    """Flags of messages [messages, nbytes] whose packed numbers are filled up with something else than zeros, or none."""
    found = None
    if isinstance(code, Packed):
        found = bad_padding(raw, n * code.k, code.width)
    elif isinstance(code, EliasFano):
        found = bad_padding(raw[:, code._row.nbytes(n) :], n * code.k, code.low)
    return [] if found is None else [found]


def _write_rows(code: Bitmap, places: Tensor) -> Tensor:
    """A row of bits for each set, padded to whole bytes."""
    bits = torch.zeros((len(places), code.bits), dtype=torch.uint8, device=places.device).scatter_(1, places, 1)
    weights = table(tuple(1 << i for i in range(8)), torch.uint8, places.device)
    return (bits.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)


def _read_rows(code: Bitmap, raw: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The places of the bits that are set, [messages, stop - start, k]; and messages with a row that has not k of them."""
    messages, width = len(raw), code.bits // 8
    rows = raw[:, start * width : stop * width].unsqueeze(-1)
    bits = (rows >> table(tuple(range(8)), torch.uint8, raw.device)) & 1
    kind = torch.int16 if code.bits < 1 << 15 else torch.int32
    seen = bits.view(messages, stop - start, code.bits).cumsum(2, dtype=kind)
    # A bit in the padding makes the count of the others too low; the last count tells that there are too many.
    wrong = (seen[..., code.L - 1] != code.k) | (seen[..., -1] != code.k)
    nth = torch.arange(1, code.k + 1, dtype=kind, device=raw.device).expand(messages, stop - start, code.k)
    return torch.searchsorted(seen, nth.contiguous(), out_int32=True), wrong.any(1)
