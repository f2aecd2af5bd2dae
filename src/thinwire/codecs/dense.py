"""Dense: every value is sent, in a dtype of choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.registry import VALUE_FORMATS
from thinwire.codecs.wire import PART_NBYTES, dense_blocks, in_one_part, part_header, same_part
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload, pack, split

WIRE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
for _number, _dtype in enumerate(WIRE_DTYPES.values(), start=1):
    VALUE_FORMATS.add(_number, _dtype)


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
        """Cast and lay out one after the other; as one part of bytes where they will be gathered."""
        if not self.gather:
            return Payload(pack(tensors, self.wire_dtype, spare))
        room = PART_NBYTES // self.wire_dtype.itemsize  # for the header, which is written where the values are
        header = torch.empty(room, device=tensors[0].device if tensors else "cpu")
        raw = pack([header, *tensors], self.wire_dtype).view(torch.uint8)
        return Payload(in_one_part(raw, blocks=dense_blocks(tensors), values=VALUE_FORMATS.number(self.wire_dtype)))

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:  # noqa: ARG002
        """Views into the payload, or copies in float32 where the wire is narrower."""
        if payload.nbytes != (nbytes := self.nbytes(like)):
            raise WireError(f"a message of {payload.nbytes} bytes, where these shapes and {self!r} make {nbytes}")
        flat = payload.data
        if self.gather:
            number = VALUE_FORMATS.number(self.wire_dtype)
            same_part(part_header(0, dense_blocks(like), nbytes - PART_NBYTES, number), flat[:PART_NBYTES].cpu().numpy())
            flat = flat[PART_NBYTES:]
        flat = flat.view(self.wire_dtype) if flat.numel() else flat.to(self.wire_dtype)
        if flat.element_size() < 4:
            flat = flat.float()
        return split(flat, like)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """Elements times bytes per element, and the header of a part where they will be gathered."""
        return sum(t.numel() for t in like) * self.wire_dtype.itemsize + PART_NBYTES * self.gather
