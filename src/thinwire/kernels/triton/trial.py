"""All kernels are tried on numbers before they are used: whatever they cannot do on a device is found out here.

What is compiled for other settings (another k, another dtype) is not tried.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.kernels.calls import BLOCK, cosines
from thinwire.kernels.triton.start import SETTINGS, addresses, launch, restore

_K, _LOW = 32, 6  # as codecs have it for 32 of 4096 entries
_ROW = 12  # bytes of a row of Elias-Fano
_GROUPS = (256, 8)  # values of a tensor sent whole
_HEADER, _PART, _INVALID, _KNOWN = 56, 32, 1, 3  # of an envelope
_LANES, _SEGMENT, _TILE = 64, 4096, 128  # of a checksum: bytes of a lane, of a segment, and segments that are joined at once
_FLOAT = {"ADD": True, "KEPT": False, "STORED": True, "CLIP": False, "DTYPE": torch.float32}
_MEAN = {"MESSAGES": 1, "WEIGHTED": False, "FACTORED": False, "SQUARES": False, "STEP": False, "SIGN": False}
_MEAN |= {"DTYPE": torch.float32}


def trial(device: torch.device) -> bytes:
    """What the kernels make of given numbers: the mean of a message, which has to be the same on all workers.

    Raises:
        RuntimeError: they compute something else than they should.
    """
    mean = _blocks(device)
    _rows(device)
    _checksums(device)
    _envelopes(device)
    _restored(device)
    return mean


def _check(right: Any, kernels: str) -> None:
    if not right:
        raise RuntimeError(f"{kernels} computes something else than it should")


def _numbers(count: int) -> NDArray[np.float32]:
    return np.modf(np.arange(count) * 0.6180339887)[0].astype(np.float32) - np.float32(0.5)


def _on(device: torch.device, values: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(values)).to(dtype).to(device)


def _blocks(device: torch.device) -> bytes:
    """Encode two blocks, read the message, combine it, and take it off the slot."""
    L = BLOCK * BLOCK
    x = torch.from_numpy(_numbers(2 * L)).view(2 * BLOCK, BLOCK)
    given, slot, mean = x.to(device), torch.zeros_like(x, device=device), torch.empty_like(x, device=device)
    P = torch.from_numpy(cosines(BLOCK)).float().to(device)
    places, shapes = _on(device, [[0, 0, 0, 0], [1, 0, 1, 0]], torch.int32), _on(device, [[2 * BLOCK, BLOCK]], torch.int64)
    low_at, scale_at = 2 * _ROW, 2 * _ROW + 2 * _K * _LOW // 8
    where = (low_at, scale_at, scale_at + 4)
    raw = torch.zeros(where[-1] + 2 * _K // 8, dtype=torch.uint8, device=device)
    entries, scales = torch.zeros(2, _K, dtype=torch.int16, device=device), torch.zeros(2, device=device)
    read_entries, read_scales = torch.zeros_like(entries), torch.zeros_like(scales)
    wrong = torch.ones(2, dtype=torch.uint8, device=device)
    lists = addresses([[slot], [given], [None]], device)
    launch(
        *("encode", (2,), places, shapes, lists, 1, P, P, entries, scales, raw, *where, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0),
        **{**_FLOAT, "WHITEN": False, "K": _K, "KP": _K, "LOW": _LOW, "ROW": _ROW, "TILE": 16},
        PRECISION=SETTINGS["forward"],
    )
    launch(
        *("read", (2, 1), raw, len(raw), 2, read_entries, read_scales, wrong, *where),
        **{"K": _K, "LOW": _LOW, "BITS": 95, "ROW": _ROW, "BP": 128},
    )
    launch(
        *("combine", (2,), places, shapes, addresses([[mean]], device), P, read_entries, read_scales, P, P, P, 2, 1.0, 0.0),
        **{**_MEAN, "SENDERS": True, "K": _K, "KP": _K, "PRECISION": SETTINGS["inverse"]},
    )
    basis, back, kept = cosines(BLOCK), mean.cpu(), slot.clone().cpu().numpy().reshape(2, L)
    due = basis @ x.double().numpy().reshape(2, BLOCK, BLOCK) @ basis.T
    sent = np.zeros((2, L))
    told = entries.cpu().numpy().astype(np.int64)
    size = scales.cpu().numpy().astype(np.float64)[:, None] * (1 - 2 * (told >> 12))
    np.put_along_axis(sent, told & 0xFFF, size, axis=1)
    due_mean = basis.T @ sent.reshape(2, BLOCK, BLOCK) @ basis
    right = np.allclose(kept.reshape(2, BLOCK, BLOCK), due, rtol=0, atol=1e-3)
    largest = np.take_along_axis(np.abs(kept), told & 0xFFF, axis=1)
    right &= bool((np.sort(largest, axis=1) == np.sort(np.abs(kept), axis=1)[:, -_K:]).all())
    _check(right, "encode")
    _check(torch.equal(entries, read_entries) and torch.equal(scales, read_scales) and not wrong.any(), "read")
    _check(np.allclose(back.numpy().reshape(2, BLOCK, BLOCK), due_mean, rtol=0, atol=1e-3), "combine")
    launch("take", (2,), places, shapes, addresses([[slot]], device), entries, scales, 0.5, K=_K, KP=_K)
    left = slot.cpu().numpy().reshape(2, L)
    _check(np.array_equal(left, kept - (sent * 0.5).astype(np.float32)) and bool((left != kept).any()), "take")
    # Of the message only what must be equal everywhere: each worker's own coefficients are its own affair.
    return back.numpy().tobytes()


def _rows(device: torch.device) -> None:
    """The same of a tensor sent whole, whose gradient is whitened."""
    count, firsts = sum(_GROUPS), np.cumsum([0, *_GROUPS[:-1]])
    x = _numbers(count)
    given, slot, mean = torch.from_numpy(x).to(device), torch.zeros(count, device=device), torch.empty(count, device=device)
    moment = torch.ones(count, device=device)
    groups = _on(
        device, [[n, 0, first, size] for n, (first, size) in enumerate(zip(firsts, _GROUPS, strict=True))], torch.int32
    )
    offsets, many, sign_at = _on(device, firsts, torch.int64), len(_GROUPS), 2 * len(_GROUPS)
    raw = torch.zeros(1, sign_at + count // 8, dtype=torch.uint8, device=device)
    scales, read_scales = torch.zeros(many, device=device), torch.ones(many, device=device)
    wrong = torch.ones(many, dtype=torch.uint8, device=device)
    lists = addresses([[slot], [given], [moment]], device)
    numbers = (0.0, 2.0, 0.5, 0.5, 0.25, 1e-3)  # decay, scale, b2, 1 - b2, root, eps
    launch(
        *("encode_rows", (many,), groups, offsets, lists, 1, given, scales, raw[0], sign_at, *numbers),
        **{**_FLOAT, "WHITEN": True},
    )
    second = 0.5 + 0.5 * x.astype(np.float64) ** 2
    kept, sizes = slot.clone().cpu().numpy(), scales.cpu().numpy()
    right = np.allclose(moment.cpu().numpy(), second, rtol=1e-5)
    right &= np.allclose(kept, 2 * x / (np.sqrt(second) / 0.25 + 1e-3), rtol=1e-5, atol=1e-7)
    means = [np.abs(part).mean() for part in np.split(kept, firsts[1:])]
    _check(right and np.allclose(sizes, means, rtol=2**-8), "encode_rows")
    launch("read_rows", (1, 1), raw, raw.stride(0), many, read_scales, wrong)
    _check(torch.equal(scales, read_scales) and not wrong.any(), "read_rows")
    sent = np.where(np.signbit(kept), -1, 1).astype(np.float32) * np.repeat(sizes, _GROUPS)
    tables = (groups, offsets, addresses([[mean]], device), raw, raw.stride(0))
    launch("combine_rows", (many,), *tables, given, given, given, sign_at, 1.0, 0.0, **_MEAN)
    _check(np.array_equal(mean.cpu().numpy(), sent), "combine_rows")
    launch("take_rows", (many,), groups, offsets, addresses([[slot]], device), raw[0], sign_at, 0.5)
    _check(np.allclose(slot.cpu().numpy(), kept - 0.5 * sent, rtol=1e-5, atol=1e-7) and bool(sizes.all()), "take_rows")


def _checksums(device: torch.device) -> None:
    """Of two messages of two segments each, with four bytes that count as zeros."""
    length, hole = _SEGMENT + 100, 20
    told = (_numbers(2 * length) * 256).astype(np.int64).astype(np.uint8).reshape(2, length)
    zero, bits = bytes(_LANES), [1 << bit for bit in range(32)]
    table = [[_linear(bytes([b]) + zero[: _LANES - 1 - i]) for b in range(256)] for i in range(_LANES)]
    lanes = [[_moved(bit, _LANES * (_LANES - 1 - i)) for bit in bits] for i in range(_LANES)]
    by_segment, tiles = np.array([_moved(bit, _SEGMENT) for bit in bits], np.uint32), [np.array(bits, np.uint32)]
    for _ in range(_TILE):
        chosen = (tiles[-1][:, None] >> np.arange(32, dtype=np.uint32)) & 1
        tiles.append(np.bitwise_xor.reduce(chosen * by_segment, 1).astype(np.uint32))
    raw, out = torch.from_numpy(told).to(device), torch.zeros(2, dtype=torch.int32, device=device)
    states = torch.zeros(2, 2, dtype=torch.int32, device=device)
    tables = [_words(found, device) for found in (table, lanes, tiles[:_TILE][::-1], tiles[_TILE])]
    launch("crc_segments", (2, 2), raw, raw.stride(0), length, hole, 2, tables[0], tables[1], states)
    constant = struct.unpack("<i", struct.pack("<I", zlib.crc32(bytes(length))))[0]
    launch("crc_join", (2,), states, 2, 1, tables[2], tables[3], constant, out, TILE=_TILE)
    told[:, hole : hole + 4] = 0
    due = [zlib.crc32(message.tobytes()) for message in told]
    _check([crc % (1 << 32) for crc in out.tolist()] == due, "crc_segments or crc_join")


def _linear(message: bytes) -> int:
    """The checksum of a message without what depends on its length alone."""
    return zlib.crc32(message) ^ zlib.crc32(bytes(len(message)))


def _moved(state: int, nbytes: int) -> int:
    """A state after so many zeros."""
    return zlib.crc32(bytes(nbytes), state) ^ zlib.crc32(bytes(nbytes), 0)


def _words(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32)).to(device)


def _envelopes(device: torch.device) -> None:
    """A message as it should be, one of another sender that says that it is invalid, and one whose part is damaged."""
    first, mark, number, body, sums = 0x1234, -5, 7, _PART + 8, (11, 12)
    heads = [
        struct.pack("<6qfi", first | flag << 40, mark, number, who, 99, body, 1.5, sums[0])
        for who, flag in ((0, 0), (5, 1), (2, 0))
    ]
    part = [struct.pack("<2qqii8s", 0, 0, 8, 0, crc, b"") for crc in (sums[1], sums[1], 0)]
    told = np.frombuffer(b"".join(head + rest for head, rest in zip(heads, part, strict=True)), np.uint8).reshape(3, -1)
    raw, senders, frames = torch.from_numpy(told.copy()).to(device), _on(device, [0, 1, 2], torch.int64), [[0, body]]
    crcs = _on(device, [[crc] * 3 for crc in sums], torch.int32)
    flags, states = torch.zeros((2, 3), dtype=torch.int64, device=device)
    wrong, invalid = torch.full((2, 3), 9, dtype=torch.uint8, device=device)
    weights = torch.zeros(3, device=device)
    given = (raw, raw.stride(0), senders, _on(device, frames, torch.int64), 1, crcs, first, mark, number, body)
    how = {"HEADER": _HEADER, "PART": _PART, "INVALID": _INVALID, "KNOWN": _KNOWN}
    launch("open_envelopes", (3,), *given, wrong, invalid, flags, weights, states, **how)
    found = [t.tolist() for t in (wrong, invalid, flags, weights, states)]
    _check(found == [[0, 1, 1], [0, 1, 0], [0, 1, 0], [1.5] * 3, [99] * 3], "open_envelopes")


def _restored(device: torch.device) -> None:
    """Tensors are given back where they shall be, and only there."""
    for refused in (False, True):
        old = [torch.arange(5000.0, device=device), torch.ones(3, dtype=torch.bfloat16, device=device)]
        new = [torch.zeros_like(t) for t in old]
        restore(new, old, torch.full((), refused, device=device))
        _check(all(torch.equal(t, o if refused else torch.zeros_like(o)) for t, o in zip(new, old, strict=True)), "restore")
