"""Codec: what is sent. A frozen dataclass without state; memory such as error feedback lives in `optimizer.state`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from thinwire.payload import Payload


class Codec(ABC):
    """Turns the tensors of a round into one payload and back.

    `linear` says that the mean of encoded messages decodes to the mean of what they encode, so that a link may average
    them on the way (all-reduce). Messages of other codecs are gathered, decoded one by one and averaged in rank order.
    """

    @property
    @abstractmethod
    def linear(self) -> bool:
        """Whether messages may be averaged while encoded."""

    @abstractmethod
    def encode(self, tensors: Sequence[Tensor], *, round: int = 0) -> Payload:
        """All tensors in one message.

        Args:
            tensors: any shapes, on one device; they are not changed.
            round: number of the round, for codecs whose choice of what to send changes with it.
        """

    @abstractmethod
    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors of a message, in float32 or wider; may be views into the payload.

        Args:
            payload: a message of this codec.
            like: tensors of the shapes that were encoded; their values do not matter.
            round: the number that was given to `encode`.
        """

    @abstractmethod
    def nbytes(self, like: Sequence[Tensor]) -> int:
        """Length in bytes of the message that would hold tensors like these, found without encoding."""
