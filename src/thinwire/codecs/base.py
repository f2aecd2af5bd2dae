"""Codec: what is sent. A frozen dataclass without state; memory such as error feedback lives in `optimizer.state`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.aggregate import PLAIN, Mean
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload, all_finite


@dataclass(frozen=True)
class Messages:
    """The messages of a round, and how they are combined.

    Attributes:
        payloads: one message per worker, in the order of their ids.
        like: tensors of the shapes that were encoded; their values do not matter.
        round: the number that was given to `encode`.
        mean: how they are combined; the mean over all workers by default.
        weights: of the workers; equal by default.
        ids: of the workers, for errors that name whose message is bad; their places by default.
    """

    payloads: Sequence[Payload]
    like: Sequence[Tensor]
    round: int = 0
    mean: Mean = PLAIN
    weights: Sequence[float] | None = None
    ids: Sequence[int] | None = None

    def whose(self, nth: int) -> int:
        """The id of the worker that the nth message comes from."""
        return nth if self.ids is None else self.ids[nth]


class Codec(ABC):
    """Turns the tensors of a round into one payload and back.

    `linear` says that the mean of encoded messages decodes to the mean of what they encode, so that a link may average
    them on the way (all-reduce). Messages of other codecs are gathered, decoded one by one and averaged in rank order.
    """

    @property
    @abstractmethod
    def linear(self) -> bool:
        """Whether messages may be averaged while encoded."""

    @property
    def sparse(self) -> bool:
        """Whether some values are left out of a message."""
        return False

    def arithmetic(self, device: torch.device) -> str:  # noqa: ARG002
        """Which arithmetic decodes messages there, where there are several whose last bits differ; "" where there are not.

        All workers must have the same, which the handshake compares.
        """
        return ""

    def holds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        """Whether every value of this dtype arrives as it was sent."""
        return False

    @abstractmethod
    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """All tensors in one message.

        Args:
            tensors: any shapes, on one device; they are not changed.
            round: number of the round, for codecs whose choice of what to send changes with it.
            spare: of a linear codec, leave room for so many more numbers behind the message.
        """

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """The message, and whether all that receivers will read in it is finite."""
        payload = self.encode(tensors, round=round)
        return payload, all_finite(self.decode(payload, tensors, round=round))

    @abstractmethod
    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors of a message, in float32 or wider; may be views into the payload.

        Args:
            payload: a message of this codec.
            like: tensors of the shapes that were encoded; their values do not matter.
            round: the number that was given to `encode`.
        """

    def combine(self, messages: Messages) -> list[Tensor]:
        """The mean of the messages of all workers, in their order.

        Raises:
            WireError: a message that says something impossible; nothing has been changed.
        """
        mean, payloads = messages.mean, messages.payloads
        shares = mean.weights(messages.weights, len(payloads)).tolist()
        factors = [1.0] * len(payloads)
        if mean.trimmed or mean.needs_norms:  # all of them at once
            read = [self._decode_nth(messages, nth) for nth in range(len(payloads))]
            if mean.needs_norms:
                factors = mean.factors([_norm(tensors) for tensors in read])
            if mean.trimmed:
                return [_trimmed(mean, tensors, factors) for tensors in zip(*read, strict=True)]
        else:
            read = (self._decode_nth(messages, nth) for nth in range(len(payloads)))
        total: list[Tensor] = []
        for values, factor, share in zip(read, factors, shares, strict=True):
            if not total:
                total = [v * (factor * share) for v in values]
            else:
                for t, v in zip(total, values, strict=True):
                    t.add_(v, alpha=factor * share)
        return [t.div_(sum(shares)) for t in total]

    def _decode_nth(self, messages: Messages, nth: int) -> list[Tensor]:
        try:
            return self.decode(messages.payloads[nth], messages.like, round=messages.round)
        except WireError as error:
            raise error if error.rank is not None else WireError(str(error), rank=messages.whose(nth)) from None

    @abstractmethod
    def nbytes(self, like: Sequence[Tensor]) -> int:
        """Length in bytes of the message that would hold tensors like these, found without encoding."""


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _trimmed(mean: Mean, tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    rows = [t.float().cpu().reshape(-1).numpy() * np.float32(f) for t, f in zip(tensors, factors, strict=True)]
    middle = mean.columns(np.stack(rows), np.ones(len(rows), np.float32))
    return torch.from_numpy(middle).view(tensors[0].shape).to(tensors[0].device)


def check_codec(codec: object) -> Codec:
    """Raise a `ConfigError` for what is no codec, such as the text of one."""
    if not isinstance(codec, Codec):
        hint = "thinwire.parse_codec makes one of a text, and some methods take a CodecSchedule"
        raise ConfigError(f"codec must be a thinwire Codec, got {codec!r}; {hint}")
    return codec
