"""The chunked DCT top-k codec straight from its description: one tensor at a time, int64 indices and float32 values.

It is what public implementations of decoupled momentum do, kept beside the fast path as the measure of it: `DCT(64) >>
TopK(k)` says the same (tests hold it to that), in fewer bytes and in less time (`make bench` tells how much). Nothing else
uses it.

    c(n)  = the largest divisor of n that is at most s                     chunk length along a dimension
    Q     = P_h B P_w^T                                                    for every h x w block B of a tensor
    sent  = the k largest |Q| of each block: their places and values
    mean  = over those who sent a place, in rank order; 0 where nobody did
    back  = P_h^T Q P_w
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.layout import as_matrix
from thinwire.codecs.transforms import DCT


def divisor(n: int, s: int) -> int:
    """The largest divisor of n that is at most s; 1 for a prime above s, which is why the fast path pads instead."""
    return next(c for c in range(min(n, s), 0, -1) if n % c == 0)


@dataclass(frozen=True)
class SimpleTopK:
    """The codec for tensors of one shape.

    Args:
        shape: of the tensors.
        k: entries kept of each block.
        s: longest side of a block.
    """

    shape: tuple[int, ...]
    k: int = 32
    s: int = 64

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, cols = as_matrix(self.shape)
        return divisor(rows, self.s), divisor(cols, self.s)

    @property
    def kept(self) -> tuple[int, int]:
        """Blocks, and entries kept of each."""
        h, w = self.block
        return math.prod(self.shape) // (h * w), min(self.k, h * w)

    @property
    def nbytes(self) -> int:
        """Twelve bytes for each."""
        return 12 * math.prod(self.kept)

    def _bases(self) -> tuple[Tensor, Tensor]:
        h, w = (torch.from_numpy(DCT().basis(n, 0)).float() for n in self.block)
        return h, w

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Places int64 [blocks, k] and values float32 [blocks, k] of the largest coefficients."""
        (h, w), (P_h, P_w) = self.block, self._bases()
        rows, cols = as_matrix(self.shape)
        blocks = x.reshape(rows // h, h, cols // w, w)
        Q = torch.einsum("yhxw,ih,jw->yxij", blocks, P_h, P_w).reshape(-1, h * w)
        places = Q.abs().topk(self.k if self.k < h * w else h * w, dim=1, sorted=False).indices
        return places, Q.gather(1, places)

    def decode(self, messages: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The mean over senders of several messages, as a tensor."""
        (h, w), (P_h, P_w) = self.block, self._bases()
        rows, cols = as_matrix(self.shape)
        Q, senders = torch.zeros(self.kept[0], h * w), torch.zeros(self.kept[0], h * w)
        for places, values in messages:
            Q.scatter_add_(1, places, values)
            senders.scatter_add_(1, places, torch.ones_like(values))
        Q = (Q / senders.clamp(min=1)).view(rows // h, cols // w, h, w)
        return torch.einsum("yxij,ih,jw->yhxw", Q, P_h, P_w).reshape(self.shape)
