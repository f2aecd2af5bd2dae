"""The mean over workers on a device: the bits of `codecs.aggregate.Mean`, without sorting and without atomic additions.

Workers are added one after the other, in rank order, into a table with a place for every entry. No worker sends an entry
twice, so each addition reads, adds and writes places that are all different, and the order of the sum is that of the ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.codecs.aggregate import LARGEST_FACTOR, Floats, Mean
from thinwire.codecs.device.bits import number, numbers, table


def factors(mean: Mean, norms: Tensor) -> Tensor:
    """What to multiply each contribution by, float32 [workers], given their norms in float64."""
    scaled = norms
    if mean.median_norm:
        scaled = norms.sort().values[(len(norms) - 1) // 2].expand(len(norms))
    if mean.clip_norm is not None:
        scaled = scaled.clamp_max(mean.clip_norm)
    return torch.where(norms > 0, (scaled / norms).clamp_max(LARGEST_FACTOR), number(1, norms.dtype, norms.device)).float()


class Merge:
    """The mean of what several workers sent.

    Args:
        mean: how contributions are combined.
        weights: of the workers.
        device: where.
    """

    def __init__(self, mean: Mean, weights: Floats, device: torch.device):
        self.mean, self.workers, self.device = mean, len(weights), device
        self.weights = None if (weights == 1).all() else numbers(weights.tolist(), torch.float32, device)
        self.total = number(float(weights.sum()), torch.float32, device)
        self.one, self.nothing = number(1, torch.float32, device), numbers([-0.0, 0.0], torch.float32, device)

    def columns(self, values: Tensor) -> Tensor:
        """Means [m] of entries that every worker sent, [workers, m]."""
        if cut := self.mean.cut(self.workers):
            return self._middle(values.sort(0).values[cut : self.workers - cut])
        if self.weights is not None:
            values = values * self.weights[:, None]
        total = torch.zeros_like(values[0])
        for row in values:
            total += row
        return total.div_(self.total)

    def entries(self, places: Tensor, values: Tensor, size: int) -> Tensor:
        """Means of entries that some workers sent, [size], with zeros where nobody sent any.

        Args:
            places: [workers, m], below `size`; no place twice in a row.
            values: [workers, m].
            size: entries that there are.
        """
        if self.mean.trimmed:
            return self._trimmed(places, values, size)
        share = self.one.expand(values.shape)
        if self.weights is not None:
            values = values * self.weights[:, None]
            share = self.weights[:, None].expand(values.shape) if self.mean.over == "senders" else share
        # Beside each sum what it is divided by, or how many sent it. To -0 anything can be added without a change.
        sums = self.nothing.repeat(size, 1)  # a copy, of one entry too
        for at, row in zip(places, torch.stack([values, share], 2), strict=True):
            sums.index_copy_(0, at, sums.index_select(0, at).add_(row))
        found, senders = sums.unbind(1)
        return (found / (senders if self.mean.over == "senders" else self.total)).masked_fill_(senders <= 0, 0)

    def _middle(self, rows: Tensor) -> Tensor:
        """The mean of rows, added one after the other."""
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total.div_(number(len(rows), torch.float32, self.device))

    def _trimmed(self, places: Tensor, values: Tensor, size: int) -> Tensor:
        workers, cut = self.workers, self.mean.cut
        absent = 0.0 if self.mean.over == "workers" else math.inf  # who did not send it stands for a zero, or comes last
        rows = torch.full((workers, size), absent, device=self.device).scatter_(1, places, values).sort(0).values
        if self.mean.over == "workers":
            return self._middle(rows[cut(workers) : workers - cut(workers)])
        senders = rows.isfinite().sum(0)
        cuts = table(tuple(cut(count) for count in range(workers + 1)), torch.int64, self.device)[senders]
        total = torch.zeros(size, device=self.device)
        for nth, row in enumerate(rows):
            total += row.masked_fill_((nth < cuts) | (nth >= senders - cuts), 0)
        return (total / (senders - 2 * cuts)).masked_fill_(senders == 0, 0)
