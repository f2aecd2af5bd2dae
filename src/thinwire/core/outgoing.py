"""What a method gives to a round and gets from it: `Outgoing` and `Arrived`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.aggregate import PLAIN, Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.chain import Encoded, PerTensor
from thinwire.codecs.decoder import Received
from thinwire.codecs.device.decoder import DeviceReceived
from thinwire.codecs.made import Made
from thinwire.codecs.parts import framed_nbytes
from thinwire.codecs.wire import HEADER_NBYTES
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Outgoing:
    """What a worker sends in a round; nothing is encoded yet.

    Attributes:
        tensors: this worker's contribution, any shapes, on one device; of slots, what is added to them where `scale` is given.
        codec: what is sent of them.
        mean: how the contributions are combined. Only the plain mean can be left to the wire, so a linear codec takes no other.
        weight: how much this worker's contribution counts; equal by default. Given by all workers or by none.
        want_sent: also keep what the others decode of this worker's own message, for error feedback.
        invalid: whether this worker knows that its contribution is invalid (True) or valid (False); by default it is looked at.
        slots: what is sent instead: state in the domain of the codec's transform, of the shapes `Chain.slot_shapes` tells.
        decay: with `scale`, slots <- decay * slots + scale * transform(tensors) comes first; one number, or one per tensor.
            What is added so stays in the slots whatever becomes of the round; an invalid tensor is not added.
        scale: see `decay`; by default the slots are sent as they are.
        source: what `tensors` were made of, where a message that is sent again is made from that.
        made: what is sent instead of `tensors`, or added to the slots, made piece by piece; `tensors` tell the shapes. Where it
            is added to slots, `invalid` must be said: to look at it would make it twice.
        pair: the ranks of this worker and the one that it exchanges with, in order, or its own alone; None for all workers.
    """

    tensors: list[Tensor]
    codec: Codec
    mean: Mean = PLAIN
    weight: float | None = None
    want_sent: bool = False
    invalid: bool | None = None
    slots: list[Tensor] | None = None
    decay: PerTensor = 1.0
    scale: PerTensor | None = None
    source: list[Tensor] | None = None
    made: Made | None = None
    pair: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what the wire cannot do."""
        codec, weight = self.codec, self.weight
        if codec.linear and self.pair is not None:
            raise ConfigError(
                f"{codec!r} is averaged on the wire, which two workers cannot do: take Dense(gather=True) or the like"
            )
        if codec.linear and self.mean is not PLAIN and not self.mean.plain:
            raise ConfigError(
                f"{codec!r} is averaged on the wire, which can do the plain mean over workers only, not {self.mean!r}"
            )
        if weight is not None and not 0 <= weight <= torch.finfo(torch.float32).max:
            raise ConfigError(f"weight must be finite in float32 and not negative, got {weight!r}")
        if weight is not None and codec.linear and _number_nbytes(codec) < 4:
            raise ConfigError(
                f"{codec!r} adds up weights on the wire, where they would be rounded: use fp32, or a gathered codec"
            )
        if weight is not None and self.mean.trimmed:
            raise ConfigError(f"a trimmed mean takes no weights, got weight={weight!r} with {self.mean!r}")
        if self.scale is None and self.decay != 1.0:
            raise ConfigError(f"decay={self.decay!r} without scale does nothing: give both, or accumulate first")

    def nbytes(self, workers: int, *, gathered: bool = False) -> int:
        """Length in bytes of one worker's message among so many workers, with what tells an invalid contribution.

        Args:
            workers: how many there are.
            gathered: whether messages are never averaged on the wire.
        """
        if gathered or not self.codec.linear:
            return HEADER_NBYTES + framed_nbytes(self.codec, self.tensors)
        return self.codec.nbytes(self.tensors) + _number_nbytes(self.codec) * (workers + (self.weight is not None))


def _number_nbytes(codec: Codec) -> int:
    """Bytes of one number in the messages of a linear codec."""
    return codec.nbytes([torch.empty(1, device="meta")])


@dataclass(frozen=True)
class Arrived:
    """What a round brought; nothing of it has been applied.

    Attributes:
        ids: of the workers whose messages were counted, in order.
        included: whether this worker's own was among them.
        outgoing: what this worker gave.
        sent: what the others read in this worker's message, where that was asked for; empty where `each_sent` decodes it.
        which: numbers of the parameters that the round is about; all of them unless it is a fragment's.
        last: whether this is the round of `finish()`, after which all workers are equal.
        share: the part of the work of this round that is in the mean; where it is below 1, other workers carry the rest, and
            send it in a later round.
        refused: whether the round is refused, as a 0-d tensor that nobody has looked at; None where it is known that it is not.
    """

    ids: tuple[int, ...]
    included: bool
    outgoing: Outgoing
    sent: list[Tensor] = field(default_factory=list)
    which: tuple[int, ...] = ()
    last: bool = False
    share: float = 1.0
    refused: Tensor | None = None
    _mean: list[Tensor] | None = None
    _each: list[list[Tensor]] = field(default_factory=list)
    _received: Received | None = None
    _encoded: Encoded | None = None

    @functools.cached_property
    def mean(self) -> list[Tensor]:
        """The mean of what the messages decode to, bit-identical on every worker."""
        if self._mean is not None:
            return self._mean
        assert self._received is not None, "the messages of a pair have no mean: see `mine` and `theirs`"
        return self._received.tensors()

    @property
    def mine(self) -> list[Tensor]:
        """In a pair: what this worker's own message decodes to. It may be a view into the message: do not write to it."""
        assert self.outgoing.pair is not None
        return self._each[0]

    @property
    def theirs(self) -> list[Tensor]:
        """In a pair: what the partner's message decodes to; this worker's own without a partner. Do not write to it."""
        return self._each[-1]

    def take_from(self, slots: Sequence[Tensor], *, scale: PerTensor = 1.0) -> None:
        """Subtract from slots exactly what the others read in this worker's message, or a part of it.

        A message that was not counted stays in the slots.
        """
        if self.included:
            assert self._encoded is not None
            self._encoded.take_from(slots, scale=scale)

    def each(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """Go through tensors and the mean side by side, without a copy of the model where the codec allows: `Received.each`."""
        if self._received is None:
            return _side_by_side(tensors, self.mean, *others)
        return self._received.each(tensors, *others)

    def step(
        self, tensors: Sequence[Tensor], rates: Sequence[float], signs: Sequence[bool], scale: Tensor | None = None
    ) -> None:
        """Tensors <- tensors - rate * mean, or rate * sign(mean): see `Received.step`; `scale` is of `DeviceReceived.step`."""
        if isinstance(self._received, DeviceReceived):
            self._received.step(tensors, rates, signs, scale)
            return
        assert scale is None
        if self._received is not None:
            self._received.step(tensors, rates, signs)
            return
        for i, part, mean in self.each(tensors):
            part.sub_(mean.sign() if signs[i] else mean, alpha=rates[i])

    def each_sent(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """Likewise tensors and what the others read in this worker's message."""
        if self._encoded is None:
            return _side_by_side(tensors, self.sent, *others)
        return self._encoded.each(tensors, *others)

    @property
    def on_device(self) -> bool:
        """Whether the mean is decoded on a device, where operations on lists of pieces cost less than one on each."""
        return isinstance(self._received, DeviceReceived)

    def together(
        self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None], scale: Tensor | None = None
    ) -> Iterator[Any]:
        """`each` in lists: of many pieces on a device, where `scale` may be given, and of one elsewhere.

        See `DeviceReceived.together`.
        """
        if isinstance(self._received, DeviceReceived):
            return self._received.together(tensors, *others, scale=scale)
        assert scale is None
        return (tuple([part] for part in parts) for parts in self.each(tensors, *others))

    def squares(self) -> list[float] | Tensor:
        """The sum of squares of each tensor's mean: see `Received.squares`; a tensor on a device."""
        assert self._received is not None
        return self._received.squares()


def _side_by_side(tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
    return ((i, *all_of_it) for i, all_of_it in enumerate(zip(tensors, *others, strict=True)))
