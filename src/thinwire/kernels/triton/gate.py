"""A Triton kernel that gives tensors their old values back where a step or a round is refused; else it reads one byte."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def restore(places, addresses, tensors, nbytes, refused, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Copy a stretch of an old tensor over the new one, where a flag says so.

    Args:
        places: int32 [stretches, 2]: the tensor, and the number of the stretch in it.
        addresses: int64 [2, tensors]: new and old.
        tensors: how many.
        nbytes: int64 [tensors], of each.
        refused: the flag, one byte.
        SIZE: bytes of a stretch.
        STEP: bytes that are copied at once.
    """
    if tl.load(refused) != 0:
        pid = tl.program_id(0)
        tensor = tl.load(places + 2 * pid)
        first = tl.load(places + 2 * pid + 1).to(tl.int64) * SIZE
        end = tl.load(nbytes + tensor)
        old = tl.load(addresses + tensors + tensor).to(tl.pointer_type(tl.uint8))
        new = tl.load(addresses + tensor).to(tl.pointer_type(tl.uint8))
        for step in range(0, SIZE, STEP):
            at = first + step + tl.arange(0, STEP)
            tl.store(new + at, tl.load(old + at, mask=at < end), mask=at < end)
