"""Dense: every value is sent, in a dtype of choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload, pack, split

WIRE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Dense(Codec):
    """All values of all tensors, one after the other, in one dtype.

    Args:
        dtype: "fp32", "bf16", "fp16" ("fp64" for tests), or the torch dtype.
        gather: send to everyone and average in float32 in rank order, instead of a ring all-reduce that adds in `dtype`.
            Exact sums that are bit-equal on every kind of link, for M/2 times the bytes of a ring of M workers.
    """

    dtype: torch.dtype | str = torch.float32
    gather: bool = False

    def __post_init__(self) -> None:
        """Translate the name of the dtype."""
        dtype = WIRE_DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if dtype not in WIRE_DTYPES.values():
            raise ConfigError(f"a dense wire is one of {', '.join(WIRE_DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype)

    @property
    def linear(self) -> bool:
        """Dense values may be averaged on the way, up to rounding in `dtype`."""
        return not self.gather

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype on the wire, for type checkers: `dtype` once its name has been translated."""
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype

    def holds(self, dtype: torch.dtype) -> bool:
        """Where the wire is at least as wide."""
        return torch.promote_types(dtype, self.wire_dtype) == self.wire_dtype

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:  # noqa: ARG002
        """Cast and lay out one after the other; as bytes where they will be gathered."""
        flat = pack(tensors, self.wire_dtype, spare)
        return Payload(flat.view(torch.uint8) if self.gather else flat)

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:  # noqa: ARG002
        """Views into the payload, or copies in float32 where the wire is narrower."""
        if payload.nbytes != self.nbytes(like):
            raise WireError(f"a message of {payload.nbytes} bytes, where these shapes and {self!r} make {self.nbytes(like)}")
        flat = payload.data.view(self.wire_dtype)
        if flat.element_size() < 4:
            flat = flat.float()
        return split(flat, like)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """Elements times bytes per element."""
        return sum(t.numel() for t in like) * self.wire_dtype.itemsize
