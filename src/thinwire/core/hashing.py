"""A hash of the bits of tensors: the same on CPU and GPU, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.shared_seed import numbers_on
from thinwire.payload import describe


def hash_tensors(tensors: Sequence[Tensor]) -> int:
    """A 64-bit hash of the bits of all tensors; the same on CPU and GPU, whatever the number of threads.

    A sum of words times odd weights that are mixed from the place, modulo 2**64: integer addition has no order, and weights
    that were linear in the place would let balanced changes cancel.
    """
    total, place = 0, 0
    for t in tensors:
        raw = t.detach().contiguous().flatten().view(torch.uint8)
        words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
        for chunk in words.split(1 << 20):  # bounded workspace
            total += int(chunk.to(torch.int64).mul_(numbers_on(chunk.device, place, chunk.numel()) | 1).sum())
            place += chunk.numel()
        place += 1
    return (total + 2**63) % 2**64 - 2**63


def show_hash(tensors: Sequence[Tensor]) -> str:
    """`hash_tensors` for people; only the kinds of tensors whose bits torch does not show, such as quantized ones."""
    try:
        return f"{hash_tensors(tensors) % 2**64:016x}"
    except (RuntimeError, TypeError):
        return ", ".join(describe(t) for t in tensors)
