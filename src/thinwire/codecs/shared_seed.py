"""Numbers that look random and are the same on all workers, from a seed that they share: the mixing of splitmix64.

torch's generators promise nothing between versions and devices. This one is three lines in any language, and a random choice
made with it needs no place in a message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(z: Any) -> Any:
    """splitmix64's mixing of 64-bit numbers: uint64 of numpy, or the bits of int64 of torch, which has no uint64 arithmetic."""
    z = (z ^ _shifted(z, 30)) * _factor(z, _FIRST)
    z = (z ^ _shifted(z, 27)) * _factor(z, _SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Any, n: int) -> Any:
    """To the right, with zeros from the left."""
    return (z >> n) & ((1 << (64 - n)) - 1) if isinstance(z, Tensor) else z >> np.uint64(n)


def _factor(z: object, number: int) -> Any:
    return (number + 2**63) % 2**64 - 2**63 if isinstance(z, Tensor) else np.uint64(number)


def numbers(seed: int, round: int, purpose: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """64-bit numbers `start` to `start + count` of the stream that belongs to (seed, round, purpose).

    The stream's key is mix(mix(mix(seed) + round) + purpose), and its number i is mix(key + (i + 1) * 0x9E3779B97F4A7C15), all
    modulo 2**64.
    """
    at = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
    return _mix(key_of(seed, round, purpose) + at * np.uint64(_STEP))


def key_of(seed: int, round: int, purpose: int) -> NDArray[np.uint64]:
    """The key of a stream, [1]."""
    key = np.zeros(1, np.uint64)
    for part in (seed, round, purpose):
        key = _mix(key + np.uint64(part % (1 << 64)))
    return key


def numbers_on(device: torch.device, start: int, count: int, key: NDArray[np.uint64] | None = None) -> Tensor:
    """Numbers `start` to `start + count` of the stream with this key, or key 0, as the bits of int64 [count] on a device."""
    at = torch.arange(start + 1, start + 1 + count, device=device) * _factor(torch.empty(0), _STEP)
    return _mix(at if key is None else at + int(key.view(np.int64)[0]))
