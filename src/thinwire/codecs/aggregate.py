"""Mean: how the contributions of the workers become one, in rank order, so that every worker computes the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError, check_choice

Floats = NDArray[np.float32]
Places = NDArray[np.int64]

LARGEST_FACTOR = 1e30  # what is scaled up to a median norm from next to nothing stays within float32


@dataclass(frozen=True)
class Mean:
    """The mean of all contributions, weighted by the work behind each, with some protection from bad ones.

    Args:
        over: what an entry's sum is divided by: all "workers", or only the "senders" of that entry (DeMo's published code).
            They differ for top-k messages, where an entry that one of 64 workers sent counts in full over senders.
        clip_norm: scale a contribution whose norm is larger down to this norm.
        median_norm: scale every contribution to the (lower) median of all norms (Covenant-72B), so that none can outweigh the
            others.
        trimmed: leave out this fraction of the values at either end of each entry, 0 <= trimmed < 0.5; over senders, of those
            that were sent. Against one liar among few senders it must be at least 1 / senders.
    """

    over: Literal["workers", "senders"] = "workers"
    clip_norm: float | None = None
    median_norm: bool = False
    trimmed: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        check_choice("over", self.over, ("workers", "senders"))
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigError(f"clip_norm must be above zero and finite, got {self.clip_norm!r}")
        if not 0 <= self.trimmed < 0.5:
            raise ConfigError(f"trimmed must be at least 0 and below 0.5, got {self.trimmed!r}")

    @staticmethod
    def of(over: Literal["workers", "senders"] = "workers", robust: str = "") -> Mean:
        """The mean with the protection that a text names: what `robust=` of the algorithms takes.

        Args:
            over: see `Mean`.
            robust: "" for none, or one or more of "median", "trimmed=0.25" and "clip=1.5", joined by commas: `median_norm`,
                `trimmed` and `clip_norm`.
        """
        settings: dict[str, Any] = {}
        for word in robust.split(",") if robust else ():
            name, _, value = word.strip().partition("=")
            try:
                if word.strip() == "median":
                    settings["median_norm"] = True
                else:
                    settings[{"trimmed": "trimmed", "clip": "clip_norm"}[name]] = float(value)
            except (KeyError, ValueError):
                raise ConfigError(
                    f"robust must be made of 'median', 'trimmed=FRACTION' and 'clip=NORM', joined by commas, got {robust!r}"
                ) from None
        return Mean(over, **settings) if settings or over != PLAIN.over else PLAIN

    @property
    def plain(self) -> bool:
        """Whether a link may do it: without any protection, since of what all workers send all are senders too."""
        return not (self.needs_norms or self.trimmed)

    @property
    def needs_norms(self) -> bool:
        """Whether norms are asked for."""
        return self.clip_norm is not None or self.median_norm

    def factors(self, norms: Sequence[float]) -> list[float]:
        """What to multiply each contribution by, given their norms."""
        scaled = list(norms)
        if self.median_norm:
            scaled = [sorted(norms)[(len(norms) - 1) // 2]] * len(scaled)  # of an even number the lower: one of two may lie
        if self.clip_norm is not None:
            scaled = [min(n, self.clip_norm) for n in scaled]
        return [min(s / n, LARGEST_FACTOR) if n else 1.0 for s, n in zip(scaled, norms, strict=True)]

    def weights(self, weights: Sequence[float] | None, workers: int) -> Floats:
        """The weights as an array, ones by default; only their ratios matter, so the largest is brought to 1/2 to 1.

        Raises:
            ConfigError: not one for each worker, all zero, or given for a trimmed mean, which takes none.
        """
        if weights is None:
            return np.ones(workers, np.float32)
        if len(weights) != workers:
            raise ConfigError(f"{len(weights)} weights for {workers} workers")
        if self.trimmed:
            raise ConfigError(f"a trimmed mean takes no weights, got {list(weights)} with {self!r}")
        if not max(weights) > 0:
            raise ConfigError(f"the weights of all {workers} workers are zero")
        unit = 2.0 ** math.frexp(max(weights))[1]  # a power of two rounds nothing
        return (np.asarray(weights, np.float64) / unit).astype(np.float32)

    @np.errstate(over="ignore", invalid="ignore")  # a sum that overflows is found by the exchange, which refuses the round
    def columns(self, values: Floats, weights: Floats) -> Floats:
        """Means of entries that every worker sent.

        Args:
            values: [workers, m].
            weights: [workers].

        Returns:
            [m].
        """
        workers = len(values)
        if cut := self.cut(workers):
            return np.sort(values, axis=0)[cut : workers - cut].sum(axis=0) / np.float32(workers - 2 * cut)
        total = np.zeros(values.shape[1], np.float32)
        for row, weight in zip(values, weights, strict=True):
            total += row if weight == 1 else row * weight
        total /= weights.sum()
        return total

    @np.errstate(over="ignore", invalid="ignore")
    def entries(self, places: Places, values: Floats, weights: Floats) -> tuple[Places, Floats]:
        """Means of entries that some workers sent.

        Args:
            places: [workers, m]; no place twice in a row.
            values: [workers, m].
            weights: [workers].

        Returns:
            The places that anybody sent, in ascending order, and their means.
        """
        workers, m = places.shape
        if self.trimmed:
            return self._trimmed_entries(places, values)
        shift = (workers * m).bit_length()
        keys = places.reshape(-1) << shift
        keys |= np.arange(workers * m)
        keys.sort()  # by place, then by rank
        order = keys & ((1 << shift) - 1)
        keys >>= shift
        found = values.reshape(-1).take(order)
        first = np.empty(len(keys), bool)
        first[:1] = True
        np.not_equal(keys[1:], keys[:-1], out=first[1:])
        starts = np.flatnonzero(first)
        if (weights == 1).all():
            senders = np.diff(starts, append=len(keys)).astype(np.float32)
        else:
            share = weights[order // m]
            found = found * share
            senders = _sums(share, starts)
        sums = _sums(found, starts)
        if self.over == "workers":
            sums /= weights.sum()
        else:
            sums = np.divide(sums, senders, out=np.zeros_like(sums), where=senders > 0)  # senders may weigh nothing
        return keys[starts], sums

    def cut(self, count: int) -> int:
        """How many of so many values a trimmed mean leaves out at either end."""
        return min(int(self.trimmed * count + 1e-9), (count - 1) // 2)

    def _trimmed_entries(self, places: Places, values: Floats) -> tuple[Places, Floats]:
        workers = len(places)
        order = np.lexsort((values.reshape(-1), places.reshape(-1)))
        place, value = places.reshape(-1)[order], values.reshape(-1)[order]
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        counts = np.diff(starts, append=len(place))
        nth = np.arange(len(place)) - np.repeat(starts, counts)
        if self.over == "senders":
            cut = np.array([self.cut(c) for c in range(workers + 1)])[counts]
            keep = (nth >= np.repeat(cut, counts)) & (nth < np.repeat(counts - cut, counts))
            left = counts - 2 * cut
        else:  # those who did not send it stand for zeros, between the negative and the positive values
            nth = nth + np.where(value > 0, workers - np.repeat(counts, counts), 0)
            cut = self.cut(workers)
            keep = (nth >= cut) & (nth < workers - cut)
            left = np.full(len(counts), workers - 2 * cut)
        sums = _sums(np.where(keep, value, np.float32(0)), starts)
        sums /= left.astype(np.float32)
        return place[starts], sums


PLAIN = Mean()


def _sums(values: Floats, starts: Places) -> Floats:
    """Sums of the runs that begin at `starts`, each added from left to right: in rank order, on every machine alike."""
    if len(starts) == len(values):
        return values
    lengths = np.diff(starts, append=len(values))
    sums = values[starts]
    for nth in range(1, int(lengths.max(initial=1))):
        longer = np.flatnonzero(lengths > nth)
        sums[longer] += values[starts[longer] + nth]
    return sums
