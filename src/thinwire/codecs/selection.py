"""Which entries of each block are sent.

`TopK` looks at the block, so its indices travel with the values. `RandomK` and `Striding` choose from the round and a shared
seed: no index is sent, and where the values are plain floats the messages may be averaged on the wire (all-reduce).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.chain import All, Stage
from thinwire.codecs.device.positions import BY_SIZE, POSITIONS
from thinwire.codecs.shared_seed import key_of, numbers, numbers_on
from thinwire.codecs.stages import Floats, Indices, Selection
from thinwire.errors import check_whole_number

__all__ = ["All", "RandomK", "Selection", "Striding", "TopK", "largest"]

_ORDER, _SHIFT = 2, 3  # purposes of the shared random numbers


@dataclass(frozen=True, repr=False)
class TopK(Selection, Stage):
    """The k entries of largest magnitude of each block. The best k-term approximation, for an index each."""

    indexed = True
    in_kernels = True

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:  # noqa: ARG002
        """Cannot be told without looking."""
        raise TypeError("which entries are largest cannot be told without looking at them")

    def choose(self, strips: Tensor, block: tuple[int, int]) -> tuple[Indices, Floats]:
        """The largest."""
        return largest(strips, block, self.count(block[0] * block[1]))


@dataclass(frozen=True, repr=False)
class RandomK(Selection, Stage):
    """k entries at random, others in each round, the same on all workers; each entry is as likely as any other.

    One random set per round is shifted cyclically by a random distance in each block.

    Args:
        k: see `Selection`.
        seed: shared by all workers.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        """Check k and the seed."""
        super().__post_init__()
        check_whole_number("the seed of RandomK", self.seed, least=0)

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:
        """The set of this round, shifted."""
        k = self.count(L)
        chosen = _random_set(self.seed, round, L, k)
        shift = (numbers(self.seed, round, _SHIFT, stop - start, start) % np.uint64(L)).astype(np.int64)
        wrapped = np.searchsorted(chosen, L - shift)  # from here on the shifted set begins again at the front
        place = wrapped[:, None] + np.arange(k)
        return (chosen[place % k] + shift[:, None]) % L


@functools.lru_cache(maxsize=64)
def _random_set(seed: int, round: int, L: int, k: int) -> Indices:
    """The places of the k smallest of L random numbers, in ascending order."""
    return np.sort(np.argsort(numbers(seed, round, _ORDER, L), kind="stable")[:k])


@dataclass(frozen=True, repr=False)
class Striding(Selection, Stage):
    """Every (L / k)-th entry, beginning one further in each round, so that all entries have their turn.

    The block is cut into k runs of equal length (up to one), and round r sends entry r mod length of each.
    """

    alike = True

    def positions(self, L: int, round: int, start: int, stop: int) -> Indices:
        """The next entry of each run."""
        k = self.count(L)
        borders = np.arange(k + 1) * L // k
        return np.broadcast_to(borders[:-1] + round % np.diff(borders), (stop - start, k))


# --- The same positions on a device ---------------------------------------------------------------------------------------


def _random_positions(chosen: Selection, L: int, round: int, start: int, stop: int, device: torch.device) -> Tensor:
    assert isinstance(chosen, RandomK)
    k = chosen.count(L)
    order = numbers_on(device, 0, L, key_of(chosen.seed, round, _ORDER)) ^ -(1 << 63)  # as int64 in the order of uint64
    places = order.sort(stable=True).indices[:k].sort().values
    bits = numbers_on(device, start, stop - start, key_of(chosen.seed, round, _SHIFT))
    shift = ((((bits >> 1) & ~(-1 << 63)) % L) * 2 + (bits & 1)) % L  # of the bits as uint64
    wrapped = torch.searchsorted(places, L - shift)
    place = (wrapped[:, None] + torch.arange(k, device=device)) % k
    return (places[place] + shift[:, None]) % L


def _striding_positions(chosen: Selection, L: int, round: int, start: int, stop: int, device: torch.device) -> Tensor:
    borders = torch.arange((k := chosen.count(L)) + 1, device=device) * L // k
    return (borders[:-1] + round % borders.diff()).expand(stop - start, k)


BY_SIZE.add(TopK)
POSITIONS[RandomK] = _random_positions
POSITIONS[Striding] = _striding_positions


# --- The largest entries of blocks ---------------------------------------------------------------------------------------


def largest(strips: Tensor, block: tuple[int, int], k: int) -> tuple[Indices, Floats]:
    """The k entries of largest magnitude of each block of a matrix.

    Args:
        strips: [y h, x w], float32.
        block: (h, w).
        k: how many of each block.

    Returns:
        Places within each block in ascending order and the values there, both [y x, k], blocks row by row. NaN counts as
        largest. Which of several equal entries is taken is not specified.
    """
    h, w = block
    rows = _lane_rows(h, w, k)
    if strips.device.type == "cpu" and strips.is_contiguous() and rows:
        return _largest_by_lanes(strips, h, w, rows, k)
    blocks = strips.unflatten(0, (-1, h)).unflatten(2, (-1, w)).permute(0, 2, 1, 3).reshape(-1, h * w)
    if strips.device.type == "cpu":
        flat = blocks.numpy()
        places = _largest_by_partition(flat, k)
        return places, np.take_along_axis(flat, places, axis=1)
    found = blocks.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    return found.cpu().numpy(), blocks.gather(1, found).cpu().numpy()


def _lane_rows(h: int, w: int, k: int) -> int:
    """Rows r of a block such that its r w lanes, each h / r entries deep, are many more than k; 0 where that does not pay."""
    r = 1
    while r * w < 8 * k and h % (2 * r) == 0:
        r *= 2
    return r if r * w >= 4 * k and h >= 4 * r and w >= 8 else 0


def _largest_by_lanes(strips: Tensor, h: int, w: int, r: int, k: int) -> tuple[Indices, Floats]:
    """`largest` on a CPU, several times faster than topk where k is far below the size of a block.

    A lane is every r-th row of one column of a block. The k-th largest of the maxima of all lanes is a lower limit of the
    k-th largest entry, so all k largest lie in the lanes that reach it, most often k of them: few entries are left to look
    at.
    """
    y, x, depth, lanes, stride = strips.shape[0] // h, strips.shape[1] // w, h // r, r * w, strips.shape[1]
    n, flat, split = y * x, strips.numpy().reshape(-1), strips.view(y, depth, r, x, w)
    highest = torch.maximum(split.amax(dim=1), -split.amin(dim=1))  # NaN passes through; [y, r, x, w]
    tops = highest.permute(0, 2, 1, 3).reshape(n, lanes).numpy()  # [n, lanes]
    upper = tops.copy()
    upper.partition(lanes - k, axis=1)
    least = upper[:, lanes - k].copy()
    reached = tops >= least[:, None]
    found = np.flatnonzero(reached)
    odd = None
    if len(found) > n * (k + 16) or not np.isfinite(tops.sum()):
        # Odd blocks: NaN, which no comparison finds, and many equal entries, such as the zeros of an empty block.
        odd = np.isnan(tops).any(axis=1) | (np.count_nonzero(reached, axis=1) > 2 * k)
        reached[odd] = False
        found = np.flatnonzero(reached)
    block, lane = _divmod(found, lanes)
    corner = (np.arange(y)[:, None] * (h * stride) + np.arange(x) * w).reshape(-1)
    first = corner[block] + ((np.arange(r)[:, None] * stride + np.arange(w)).reshape(-1))[lane]
    entries = np.empty((depth, len(first)), np.float32)  # those of the lanes that are reached
    for level, row in enumerate(entries):
        np.take(flat[level * r * stride :], first, out=row, mode="clip")
    hit = np.abs(entries) >= least[block]
    level = np.repeat(np.arange(depth), np.count_nonzero(hit, axis=1))
    at = np.flatnonzero(hit)
    which = at - level * len(first)
    block, place, value = _in_order(block[which], level * lanes + lane[which], entries.reshape(-1)[at])
    counts = np.bincount(block, minlength=n)
    if odd is None:
        return _keep_largest(place, value, counts, k)
    places, values = np.empty((n, k), np.int64), np.empty((n, k), np.float32)
    places[~odd], values[~odd] = _keep_largest(place, value, counts[~odd], k)
    dense = strips.view(y, h, x, w).permute(0, 2, 1, 3).reshape(n, h * w)[torch.from_numpy(odd)].numpy()
    places[odd] = _largest_by_partition(dense, k)
    values[odd] = np.take_along_axis(dense, places[odd], axis=1)
    return places, values


def _in_order(block: Indices, place: Indices, value: Floats) -> tuple[Indices, Indices, Floats]:
    """Sorted by block, then by place. One sort of whole numbers, with where they came from in the low bits."""
    low, middle = len(block).bit_length(), int(place.max(initial=1)).bit_length()
    keys = ((block << middle | place) << low) | np.arange(len(block))
    keys.sort()
    order = keys & ((1 << low) - 1)
    keys >>= low
    return keys >> middle, keys & ((1 << middle) - 1), value.take(order)


def _divmod(numbers: Indices, n: int) -> tuple[Indices, Indices]:
    """divmod, ten times faster where n is a power of two."""
    if n & (n - 1):
        return np.divmod(numbers, n)
    return numbers >> (n.bit_length() - 1), numbers & (n - 1)


def _largest_by_partition(blocks: Floats, k: int) -> Indices:
    L = blocks.shape[1]
    if k == L:
        return np.tile(np.arange(L), (len(blocks), 1))
    return np.sort(np.argpartition(np.abs(blocks), L - k, axis=1)[:, L - k :], axis=1)


def _keep_largest(place: Indices, value: Floats, counts: Indices, k: int) -> tuple[Indices, Floats]:
    """Of at least k candidates for each block the k largest, in ascending order of their places.

    Args:
        place: [c], within their block; block by block, in ascending order.
        value: [c].
        counts: [m], how many of them each block has.
        k: how many to keep.

    Returns:
        Places and values, [m, k].
    """
    size, m = np.abs(value), len(counts)
    if m and (widest := int(counts.max())) > k:
        table = np.full((m, widest), -1, np.float32)
        table[np.arange(widest) < counts[:, None]] = size
        table.partition(widest - k, axis=1)
        smallest = np.repeat(table[:, widest - k], counts)
        keep = size >= smallest
        if np.count_nonzero(keep) > m * k:  # several are equal to the smallest that stays: the first ones do
            starts, equal = np.cumsum(counts) - counts, size == smallest
            spare = k - np.add.reduceat((size > smallest).astype(np.int64), starts)
            nth = np.cumsum(equal)
            keep &= ~equal | (nth - np.repeat((nth - equal)[starts], counts) <= np.repeat(spare, counts))
        place, value = place[keep], value[keep]
    return place.reshape(m, k), value.reshape(m, k)
