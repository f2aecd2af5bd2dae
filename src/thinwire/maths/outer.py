"""The outer step of the DiLoCo family: `Nesterov`, and `Merge`, what becomes of the differences D_i of all workers before it.

    mean    D = sum_i w_i D_i / sum_i w_i
    rda     D = (sum_i w_i ||D_i|| / sum_i w_i) phi(sum_i w_i phi(D_i) / sum_i w_i)      phi(x) = x / ||x||,  phi(0) = 0

RDA (Decoupled DiLoCo, arXiv 2604.21428) is per tensor. Differences of M workers that point in
different directions have a mean of about 1 / sqrt(M) of their length; RDA keeps the length. Weights w_i are the workers' local
steps where they take different numbers of them, and equal elsewhere.

Directions and lengths travel in one message: phi(D_i) of every tensor, and one vector of their norms in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from thinwire.codecs import Codec, CodecSchedule, Dense, Parts
from thinwire.errors import ConfigError, check_choice
from thinwire.sharding.shards import Shards

MergeRule = Literal["mean", "rda"]

_NO_DIRECTION = 1e-6  # a mean of unit vectors as short as this is rounding, not a direction


@dataclass(frozen=True)
class Nesterov:
    """An outer step a <- a - eta (D + mu m), with m <- mu m + D first; of heavy-ball momentum eta m, without momentum eta D.

    Args:
        lr: eta.
        momentum: mu.
        nesterov: Nesterov's form, or the heavy ball's.
    """

    lr: float
    momentum: float
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"outer_lr must be above zero and finite, got {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer_momentum must be in [0, 1), got {self.momentum!r}")

    @property
    def plain(self) -> bool:
        """Whether the result is simply a + D."""
        return self.lr == 1 and self.momentum == 0

    def step(self, a: list[Tensor], D: list[Tensor], m: list[Tensor], *, along: bool = False) -> None:
        """Move `a` and `m`, against D or along it; `m` may be empty where there is no momentum."""
        step = D
        if self.momentum:
            torch._foreach_mul_(m, self.momentum)
            torch._foreach_add_(m, D)
            step = torch._foreach_add(D, m, alpha=self.momentum) if self.nesterov else m
        torch._foreach_add_(a, step, alpha=self.lr if along else -self.lr)


@dataclass(frozen=True)
class Merge:
    """How the differences of all workers become one.

    Args:
        rule: "mean" or "rda".
    """

    rule: MergeRule = "mean"

    def __post_init__(self) -> None:
        """Check the rule."""
        check_choice("merge", self.rule, get_args(MergeRule))

    def codec(self, codec: Codec, tensors: int) -> Codec:
        """What sends the differences of so many tensors: `codec`, with the norms in float32 beside it where it is narrower."""
        wide = isinstance(codec, Dense) and codec.holds(torch.float32)
        return codec if self.rule == "mean" or wide else Parts(((tensors, codec), (1, Dense())))

    def unowned(self, codec: Codec | CodecSchedule | None) -> str:
        """Why owners cannot average what is sent by a codec, float32 by default; empty where they can, or the wire does."""
        if codec is None or all(self.codec(one, 1) is one for one in CodecSchedule.of(codec).codecs):
            return ""
        return f"merge={self.rule!r} sends norms beside the differences, which have no blocks to own"

    def message(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors shaped like those that are sent of differences of these shapes."""
        return [*like, torch.empty(len(like))] if self.rule == "rda" else list(like)

    def outgoing(self, D: list[Tensor], shards: Shards) -> list[Tensor]:
        """What a worker sends of its differences.

        Args:
            D: one tensor per parameter, or this process's shard of it; not changed.
            shards: the processes that share this worker's model: norms are of whole tensors.
        """
        if self.rule == "mean":
            return D
        norms = norms_of(D, shards)
        directions = torch._foreach_mul(D, [_inverse(n) for n in norms])
        return [*directions, torch.tensor(norms, dtype=torch.float32, device=D[0].device)]

    def merged(self, mean: list[Tensor], shards: Shards) -> list[Tensor]:
        """The difference that all workers apply, of the mean of what they sent."""
        if self.rule == "mean":
            return mean
        *directions, lengths = mean
        norms = norms_of(directions, shards)
        lengths = [n * (_inverse(d) if d > _NO_DIRECTION else 1.0) for n, d in zip(lengths.tolist(), norms, strict=True)]
        return list(torch._foreach_mul(directions, lengths))


def norms_of(tensors: list[Tensor], shards: Shards) -> list[float]:
    """The norm of each tensor over all shards of this worker; the same bits on all workers that hold the same values."""
    if tensors and tensors[0].is_meta:  # a plan asks how long a message is; nothing has a value
        return [0.0] * len(tensors)
    mine = torch.stack(torch._foreach_norm(tensors)).tolist()
    return [math.sqrt(square) for square in shards.totals([n * n for n in mine])]


def _inverse(norm: float) -> float:
    """1 / norm; 0 of a tensor of zeros. That of a NaN or Inf is NaN, so that the round is refused."""
    if norm == 0:
        return 0.0
    return 1 / norm if math.isfinite(norm) else math.nan
