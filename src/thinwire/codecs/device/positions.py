"""Which entries of blocks a selection takes, on a device: the largest, or those that the round and a shared seed say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs.stages import Selection

# Of selections that choose without looking at the entries: the positions of blocks `start` to `stop` made on a device. By the
# exact class: one that derives from it may choose others. The positions of any other selection are copied there.
Positions = Callable[[Selection, int, int, int, int, torch.device], Tensor]
POSITIONS: dict[type[Selection], Positions] = {}
BY_SIZE: set[type[Selection]] = set()  # selections that look at the entries, and take the largest


def positions(selection: Selection, L: int, round: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Which entries of blocks `start` to `stop` of L entries, int64 [stop - start, k] in ascending order."""
    if made := POSITIONS.get(type(selection)):
        return made(selection, L, round, start, stop, device)
    return torch.from_numpy(selection.positions(L, round, start, stop).copy()).to(device)


def largest(blocks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places of the k entries of largest magnitude of each block [n, L], in ascending order, and their values, both [n, k].

    NaN counts as largest. Of several equal entries the first is taken, as the C kernels do.
    """
    keys = blocks.abs().view(torch.int32).long()  # of floats that are not negative: in the order of the numbers
    keys = keys.bitwise_left_shift_(32).sub_(torch.arange(blocks.shape[1], device=blocks.device))
    found = (-keys.topk(k, dim=1, sorted=False).values).bitwise_and_(0xFFFFFFFF).sort(dim=1).values
    return found, blocks.gather(1, found)
