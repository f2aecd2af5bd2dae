"""The inverse transform of a sparse mean, in torch: what is done where there are no C kernels, or none that know the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from thinwire.codecs.layout import Batch, Piece
from thinwire.codecs.stages import Floats, Stages

HOT = 1 << 18  # entries of a piece that is still in the second-level cache when it is applied
DENSE_ROW = 8  # entries per row from which on a dense product is faster than a sparse one


def first_half(chain: Stages, round: int, batch: Batch, place: NDArray[np.int64], mean: Floats, rows: Tensor) -> Tensor:
    """Q P_w for all blocks of a batch, in the order of the pieces: flat.

    Args:
        chain: the stages.
        round: number of the round.
        batch: the blocks.
        place: where the entries are when the pieces lie one after the other.
        mean: the entries there.
        rows: zeros, at least as many as the batch has entries; they are zeros again afterwards.
    """
    w, total = batch.pieces[0].grid.w, batch.starts[-1]
    P_w = chain.transform.matrix(w, round, rows.device)
    values = torch.from_numpy(mean).to(rows.device)
    if P_w is not None and len(place) <= DENSE_ROW * (total // w):
        if chain.selection.indexed is False:
            order = np.argsort(place, kind="stable")
            place, values = place[order], values[torch.from_numpy(order)]
        row = place // w if w & (w - 1) else place >> (w.bit_length() - 1)
        ends = np.bincount(row, minlength=total // w).cumsum()
        offsets = torch.from_numpy(np.concatenate([[0], ends[:-1]])).to(rows.device)
        col = torch.from_numpy(place - row * w).to(rows.device)
        return embedding_bag(col, P_w, offsets, mode="sum", per_sample_weights=values).view(-1)
    flat = rows[:total]
    at = torch.from_numpy(place).to(rows.device)
    flat.index_copy_(0, at, values)
    out = flat.clone() if P_w is None else torch.mm(flat.view(-1, w), P_w).view(-1)
    flat.index_fill_(0, at, 0.0)
    return out


def second_half(chain: Stages, round: int, batch: Batch, coefficients: Tensor, out: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """P_h^T of it, piece by piece.

    Args:
        chain: the stages.
        round: number of the round.
        batch: the blocks.
        coefficients: what `first_half` gave.
        out: memory for a piece, used again for the next.
    """
    h = batch.pieces[0].grid.h
    P_h = chain.transform.matrix(h, round, coefficients.device)
    for whole, start in zip(batch.pieces, batch.starts, strict=False):
        for piece in whole.split(HOT):
            n = math.prod(piece.shape)
            part = coefficients[start : start + n]
            start += n
            if P_h is not None:
                strips = (piece.y, h, piece.shape[1])
                part = torch.bmm(P_h.T.expand(piece.y, h, h), part.view(strips), out=out[:n].view(strips))
            yield piece, part.view(piece.shape)
