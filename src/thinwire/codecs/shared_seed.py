"""Numbers that look random and are the same on all workers, from a seed that they share: the mixing of splitmix64.

torch's generators promise nothing between versions and devices. This one is three lines in any language, and a random choice
made with it needs no place in a message.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def numbers(seed: int, round: int, purpose: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """64-bit numbers `start` to `start + count` of the stream that belongs to (seed, round, purpose).

    The stream's key is mix(mix(mix(seed) + round) + purpose), and its number i is mix(key + (i + 1) * 0x9E3779B97F4A7C15), all
    modulo 2**64.
    """
    key = np.zeros(1, np.uint64)
    for part in (seed, round, purpose):
        key = _mix(key + np.uint64(part % (1 << 64)))
    at = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
    return _mix(key + at * np.uint64(0x9E3779B97F4A7C15))
