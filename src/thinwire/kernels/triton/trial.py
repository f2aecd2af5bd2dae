"""Kernels are tried on numbers before they are used: whatever they cannot do on a device is found out here."""

from __future__ import annotations

import numpy as np
import torch

from thinwire.kernels.calls import BLOCK, cosines
from thinwire.kernels.triton.start import SETTINGS, addresses, launch

_K, _LOW = 32, 6  # as codecs have it for 32 of 4096 entries
_ROW = 12  # bytes of a row of Elias-Fano


def trial(device: torch.device) -> bytes:
    """What the kernels make of given numbers: the mean of a message, which has to be the same on all workers.

    Raises:
        RuntimeError: they compute something else than they should.
    """
    L = BLOCK * BLOCK
    x = torch.from_numpy(np.modf(np.arange(2 * L) * 0.6180339887)[0].astype(np.float32) - 0.5).view(2 * BLOCK, BLOCK)
    given, slot, mean = x.to(device), torch.zeros_like(x, device=device), torch.empty_like(x, device=device)
    P = torch.from_numpy(cosines(BLOCK)).float().to(device)
    places = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 0]], dtype=torch.int32).to(device)
    shapes = torch.tensor([[2 * BLOCK, BLOCK]]).to(device)
    low_at, scale_at = 2 * _ROW, 2 * _ROW + 2 * _K * _LOW // 8
    where = (low_at, scale_at, scale_at + 4)
    raw = torch.zeros(where[-1] + 2 * _K // 8, dtype=torch.uint8, device=device)
    entries, scales = torch.zeros(2, _K, dtype=torch.int16, device=device), torch.zeros(2, device=device)
    read_entries, read_scales = torch.zeros_like(entries), torch.zeros_like(scales)
    wrong = torch.ones(2, dtype=torch.uint8, device=device)
    lists = addresses([[slot], [given], [None]], device)
    launch(
        *("encode", (2,), places, shapes, lists, 1, P, P, entries, scales, raw, *where, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0),
        **{"ADD": True, "KEPT": False, "STORED": True, "WHITEN": False, "CLIP": False, "DTYPE": torch.float32},
        **{"K": _K, "KP": _K, "LOW": _LOW, "ROW": _ROW, "TILE": 16, "PRECISION": SETTINGS["forward"]},
    )
    launch(
        *("read", (2, 1), raw, len(raw), 2, read_entries, read_scales, wrong, *where),
        **{"K": _K, "LOW": _LOW, "BITS": 95, "ROW": _ROW, "BP": 128},
    )
    launch(
        *("combine", (2,), places, shapes, addresses([[mean]], device), P, read_entries, read_scales, P, P, P, 2, 1.0, 0.0),
        **{"MESSAGES": 1, "SENDERS": True, "WEIGHTED": False, "FACTORED": False, "SQUARES": False, "STEP": False},
        **{"SIGN": False, "DTYPE": torch.float32, "K": _K, "KP": _K, "PRECISION": SETTINGS["inverse"]},
    )
    basis, back = cosines(BLOCK), mean.cpu()
    due = basis @ x.double().numpy().reshape(2, BLOCK, BLOCK) @ basis.T
    sent = np.zeros((2, L))
    told = entries.cpu().numpy().astype(np.int64)
    size = scales.cpu().numpy().astype(np.float64)[:, None] * (1 - 2 * (told >> 12))
    np.put_along_axis(sent, told & 0xFFF, size, axis=1)
    due_mean = basis.T @ sent.reshape(2, BLOCK, BLOCK) @ basis
    right = np.allclose(slot.cpu().numpy().reshape(2, BLOCK, BLOCK), due, rtol=0, atol=1e-3)
    right &= np.allclose(back.numpy().reshape(2, BLOCK, BLOCK), due_mean, rtol=0, atol=1e-3)
    right &= torch.equal(entries, read_entries) and torch.equal(scales, read_scales) and not wrong.any()
    kept = np.take_along_axis(np.abs(slot.cpu().numpy()).reshape(2, L), told & 0xFFF, axis=1)
    right &= bool((np.sort(kept, axis=1) == np.sort(np.abs(slot.cpu().numpy()).reshape(2, L), axis=1)[:, -_K:]).all())
    if not right:
        raise RuntimeError("they compute something else than they should")
    # Of the message only what must be equal everywhere: each worker's own coefficients are its own affair.
    return back.numpy().tobytes()
