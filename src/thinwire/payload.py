"""Payload: everything one worker sends in one round, in ONE contiguous buffer.

One collective per parameter costs one round trip each: 300 tensors at 50 ms are 15 s a step. So a codec writes all
tensors of a round into one buffer, and a link moves that buffer, whatever is inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.errors import ThinwireError

F = TypeVar("F")

# Bytes that a message may have whose length the sender decides, by its purpose: nothing is allocated for more.
LONGEST = {"handshake": 1 << 20, "doctor": 1 << 20, "broadcast metrics": 1 << 16}
LONGEST_OTHERWISE = 1 << 16


@dataclass(frozen=True, eq=False)
class Payload:
    """One worker's message of one round.

    Attributes:
        data: the message, 1-D and contiguous. A payload that may be averaged on the wire has a floating dtype; a payload
            that may only be gathered is uint8.
        purpose: what the message is for: "round", "handshake" or "alarm". It stands in error messages and meters.
        fixed: the message has the same length on all workers, so that no lengths need to be exchanged first.
        limit: of a message that is not `fixed`, the bytes that anybody's may have; None for what `LONGEST` says of its purpose.
        partner: of a message that is swapped in a pair, the rank to swap it with; None for a worker that has no partner.
        sender: of a message that came, the id of the worker whose it is; a link says so, whatever the message itself says.
        source: of a broadcast, the rank whose message all workers get.
        dealt: of a message that is dealt, the length in bytes of its part for each rank, one after the other.
        due: of a message that is dealt or spread, the length in bytes of what comes from each rank.
        of_several: of a message that repeats others, those others, for receivers in the same process, as in the simulator; it
            does not travel.
    """

    data: Tensor
    purpose: str = "round"
    fixed: bool = True
    partner: int | None = None
    limit: int | None = None
    sender: int | None = None
    source: int = 0
    dealt: tuple[int, ...] = ()
    due: tuple[int, ...] = ()
    of_several: Delivery | None = None

    def __post_init__(self) -> None:
        """Refuse anything but a flat contiguous buffer."""
        if self.data.dim() != 1 or not self.data.is_contiguous():
            raise ValueError(f"a payload is 1-D and contiguous, got shape {tuple(self.data.shape)}")

    @property
    def nbytes(self) -> int:
        """Length of the message in bytes."""
        return self.data.numel() * self.data.element_size()

    @property
    def longest(self) -> int:
        """Bytes that a message of this purpose may have where the sender decides on its length."""
        return LONGEST.get(self.purpose, LONGEST_OTHERWISE) if self.limit is None else self.limit

    @property
    def finite(self) -> bool:
        """Whether every value is finite (always so for bytes)."""
        return not self.data.is_floating_point() or all_finite([self.data])

    def like(self, data: Tensor) -> Payload:
        """The same kind of message with other contents."""
        return replace(self, data=data)

    def of(self, sender: int) -> Payload:
        """The same message as that of the worker with this id."""
        return replace(self, sender=sender)

    def in_parts(self, dealt: Sequence[int], due: Sequence[int]) -> Payload:
        """The same message, to be dealt: parts of these lengths go to the ranks, and of those come from them."""
        return replace(self, dealt=tuple(dealt), due=tuple(due))

    @staticmethod
    def of_bytes(raw: bytes, *, purpose: str = "round", fixed: bool = False, limit: int | None = None) -> Payload:
        """A payload of plain bytes on the CPU."""
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
        return Payload(data, purpose=purpose, fixed=fixed, limit=limit)

    def to_bytes(self) -> bytes:
        """The message as plain bytes."""
        return self.raw().cpu().numpy().tobytes()

    def raw(self) -> Tensor:
        """The message as a tensor of bytes, which share its memory."""
        if not self.data.numel():  # torch does not look at an empty tensor in another dtype
            return torch.empty(0, dtype=torch.uint8, device=self.data.device)
        return self.data.view(torch.uint8)


class Delivery(list[Payload]):
    """Messages that several workers of one process get, as in the simulator: what one has found out, the others need not.

    Each worker must find the same in them; whatever else an answer depends on is in the key under which it is kept.
    """

    def __init__(self, payloads: Iterable[Payload] = ()):
        """Nothing has been found out."""
        super().__init__(payloads)
        self._found: dict[Hashable, tuple[Any, Exception | None]] = {}

    def once(self, key: Hashable, find: Callable[[], F]) -> F:
        """What `find` returns, or the error that it raises, of the first worker that asks."""
        if key not in self._found:
            try:
                self._found[key] = find(), None
            except ThinwireError as error:
                self._found[key] = None, error
        value, error = self._found[key]
        if error is not None:
            raise error
        return value


def once(payloads: Sequence[Payload], key: Hashable, find: Callable[[], F]) -> F:
    """What `find` returns; kept for the other workers where these are messages that several of this process get."""
    return payloads.once(key, find) if isinstance(payloads, Delivery) else find()


# A contribution with a larger value than this counts as not finite: its square, summed over a few hundred values or workers,
# would leave the range of float32 and stay in a second moment or in error feedback for good.
LARGEST = 1e18


def all_finite(tensors: Iterable[Tensor], largest: float = math.inf) -> bool:
    """Whether every element of every tensor is finite, and not larger than `largest`; one pass, one look at the result."""
    found = finite_flag(tensors, largest)
    return found is None or bool(found)


def finite_flag(tensors: Iterable[Tensor], largest: float = math.inf) -> Tensor | None:
    """`all_finite` as a 0-d tensor on the tensors' device, which nobody has looked at; None where they have no elements."""
    ends, others = [], []
    for t in tensors:  # which may be made one by one
        if t.numel() and t.device.type == "cpu":
            # NaN passes through aminmax. Ten times faster than isfinite().all() on a CPU, six times faster than the max norm.
            ends.append(torch.stack(torch.aminmax(t)).double())
        elif t.numel():
            others.append(t)
    if others:  # few launches, whatever the number of tensors; NaN passes through this norm too
        size = torch.stack(torch._foreach_norm(others, math.inf))
        size = size.to(torch.promote_types(size.dtype, torch.float32))
    elif ends:
        size = torch.stack(ends).abs()
    else:
        return None
    return (size < math.inf).all() if largest == math.inf else (size <= largest).all()


def zero_invalid_(tensors: Iterable[Tensor], largest: float = LARGEST**2) -> None:
    """Set to zero whatever is NaN, infinite, or larger in magnitude than `largest`."""
    for t in tensors:
        t.masked_fill_(~(t.abs() <= largest), 0.0)


def pack(tensors: Sequence[Tensor], dtype: torch.dtype, spare: int = 0) -> Tensor:
    """Copy all tensors, cast to `dtype`, into one flat buffer: one allocation, one pass.

    Args:
        tensors: any shapes, 0-d and empty ones too, all on one device.
        dtype: of the buffer.
        spare: zeros to add behind them.

    Returns:
        1-D tensor with as many elements as all tensors together, and the spare ones.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    total = sum(t.numel() for t in tensors)
    flat = torch.empty(total + spare, dtype=dtype, device=device)
    for t, part in zip(tensors, split(flat[:total], tensors), strict=True):
        part.copy_(t.detach())
    flat[total:] = 0
    return flat


def split(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Views into `flat` with the shapes of `like`, in order.

    Args:
        flat: 1-D tensor holding the elements of all tensors of `like`.
        like: gives the shapes.

    Returns:
        One view per tensor; writing to it writes to `flat`.
    """
    like = list(like)
    total = sum(t.numel() for t in like)
    if total != flat.numel():
        raise ValueError(f"a buffer of {flat.numel()} elements cannot hold tensors of {total} elements in all")
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in like]), like, strict=True)]


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for fingerprints and the people who read them: float32[4, 4]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
