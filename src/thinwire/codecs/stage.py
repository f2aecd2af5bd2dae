"""Stage: one step of a chain such as `DCT(64) >> TopK(32) >> Sign()`.

A chain has at most one stage of each kind, in this order: a transform, a selection, and how the values are written. Each
stage is a codec by itself too: the chain in which the others do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from torch import Tensor

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec
from thinwire.payload import Payload

if TYPE_CHECKING:
    from thinwire.codecs.chain import Chain


class Stage(Codec):
    """Base of transforms, selections and value formats; `a >> b` makes a chain of them."""

    @property
    def chain(self) -> Chain:
        """The chain of this stage alone."""
        from thinwire.codecs.chain import Chain  # a chain is made of stages, and a stage can stand for a chain

        return Chain.of(self)

    def __rshift__(self, after: Codec) -> Chain:
        from thinwire.codecs.chain import check_order

        check_order(self, after)
        return self.chain >> after

    def __repr__(self) -> str:
        """As it would be written: the first setting always, the others where they differ from the default."""
        first, *others = fields(self)  # pyright: ignore[reportArgumentType]
        told = [f"{f.name}={getattr(self, f.name)!r}" for f in others if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join([*self._shown(getattr(self, first.name)), *told])})"

    def _shown(self, first: object) -> list[str]:
        return [repr(first)]

    @property
    def linear(self) -> bool:
        """See `Chain`."""
        return self.chain.linear

    @property
    def sparse(self) -> bool:
        """See `Chain`."""
        return self.chain.sparse

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """See `Chain`."""
        return self.chain.encode(tensors, round=round, spare=spare)

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """See `Chain`."""
        return self.chain.encode_finite(tensors, round=round)

    def combine(
        self,
        payloads: Sequence[Payload],
        like: Sequence[Tensor],
        *,
        round: int = 0,
        mean: Mean | None = None,
        weights: Sequence[float] | None = None,
    ) -> list[Tensor]:
        """See `Chain`."""
        return self.chain.combine(payloads, like, round=round, mean=mean, weights=weights)

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """See `Chain`."""
        return self.chain.decode(payload, like, round=round)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See `Chain`."""
        return self.chain.nbytes(like)

    def slot_shapes(self, like: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """See `Chain`."""
        return self.chain.slot_shapes(like)
