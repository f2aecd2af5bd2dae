"""Parts: one message of several codecs, where the tensors of a round are of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec, check_codec
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload


@dataclass(frozen=True)
class Parts(Codec):
    """The first tensors by one codec, the next by another, and so on; the bodies one after the other.

    Args:
        parts: (number of tensors, codec) for each part.
    """

    parts: tuple[tuple[int, Codec], ...]

    def __post_init__(self) -> None:
        """Check the parts."""
        for count, codec in self.parts:
            check_codec(codec)
            if count < 1:
                raise ConfigError(f"a part has at least one tensor, got {count}")
        if not self.parts:
            raise ConfigError("parts must name at least one codec, got none")

    @property
    def linear(self) -> bool:
        """Never: bodies of several formats are gathered."""
        return False

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """Every part by its own codec."""
        assert spare == 0, "only linear codecs leave room behind a message"
        bodies = [codec.encode(some, round=round).raw() for codec, some in self._dealt(tensors)]
        return Payload(torch.cat(bodies))

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """The message, and whether all that receivers will read in it is finite."""
        made = [codec.encode_finite(some, round=round) for codec, some in self._dealt(tensors)]
        return Payload(torch.cat([body.raw() for body, _ in made])), all(finite for _, finite in made)

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors of all parts."""
        found: list[Tensor] = []
        for (codec, some), body in zip(self._dealt(like), self._bodies(payload, like), strict=True):
            found += codec.decode(body, some, round=round)
        return found

    def combine(
        self,
        payloads: Sequence[Payload],
        like: Sequence[Tensor],
        *,
        round: int = 0,
        mean: Mean | None = None,
        weights: Sequence[float] | None = None,
    ) -> list[Tensor]:
        """The mean of the messages of all workers, part by part; norms that `mean` may limit are those of a part."""
        found: list[Tensor] = []
        columns = zip(*(self._bodies(p, like) for p in payloads), strict=True)
        for (codec, some), bodies in zip(self._dealt(like), columns, strict=True):
            found += codec.combine(bodies, some, round=round, mean=mean, weights=weights)
        return found

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """The sum over the parts."""
        return sum(codec.nbytes(some) for codec, some in self._dealt(like))

    def _dealt(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Codec, Sequence[Tensor]]]:
        """Each part's codec with its tensors."""
        needed = sum(count for count, _ in self.parts)
        if needed != len(tensors):
            raise ConfigError(f"{self!r} is for {needed} tensors, got {len(tensors)}")
        start = 0
        for count, codec in self.parts:
            yield codec, tensors[start : start + count]
            start += count

    def _bodies(self, payload: Payload, like: Sequence[Tensor]) -> Iterator[Payload]:
        raw = payload.raw()
        if raw.numel() != self.nbytes(like):
            raise WireError(f"a message of {raw.numel()} bytes, where these shapes and {self!r} make {self.nbytes(like)}")
        start = 0
        for codec, some in self._dealt(like):
            length = codec.nbytes(some)
            yield payload.like(raw[start : start + length].clone())  # a copy, since numbers must be aligned
            start += length
