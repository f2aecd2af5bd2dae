"""A hash of the bits of tensors: the same on CPU and GPU, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.codecs.shared_seed import numbers_on
from thinwire.payload import describe


def hash_tensors(tensors: Sequence[Tensor]) -> int:
    """A 64-bit hash of the bits of all tensors; the same on CPU and GPU, whatever the number of threads.

    A sum of words times odd weights that are mixed from the place, modulo 2**64: integer addition has no order, and weights
    that were linear in the place would let balanced changes cancel.
    """
    return hash_each({"": tensors})[""]


def hash_each(named: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """`hash_tensors` of each of several lists: summed where the tensors are, and looked at once for all of them."""
    sums = [_sum(tensors) for tensors in named.values()]
    device = next((s.device for s in sums if s.device.type != "cpu"), torch.device("cpu"))
    return dict(zip(named, torch.stack([s.to(device) for s in sums]).tolist(), strict=True)) if sums else {}


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total, place = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu"), 0
    for t in tensors:
        raw = t.detach().contiguous().flatten().view(torch.uint8)
        padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
        for chunk in padded.split(1 << 20):  # bounded workspace
            words = chunk.to(torch.int64).mul_(numbers_on(chunk.device, place, chunk.numel()) | 1)
            total += words.sum().to(total.device)
            place += chunk.numel()
        place += 1
    return total


def show_hash(tensors: Sequence[Tensor]) -> str:
    """`hash_tensors` for people; only the kinds of tensors whose bits torch does not show, such as quantized ones."""
    try:
        return f"{hash_tensors(tensors) % 2**64:016x}"
    except (RuntimeError, TypeError):
        return ", ".join(describe(t) for t in tensors)
