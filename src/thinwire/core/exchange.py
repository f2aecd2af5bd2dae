"""The one place where codec meets link: `average()`, `swap()` in pairs, and `share()` for state in the domain of a transform.

All pass the finite gate: a contribution with NaN or Inf is found before anything is applied, and the round is refused with the
culprit named on ALL workers that would have read it, so that no worker's shared state has changed. The other gates are in
`agreement`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec, Messages
from thinwire.codecs.chain import Chain, Encoded, PerTensor
from thinwire.codecs.decoder import Received
from thinwire.codecs.dense import Dense
from thinwire.codecs.wire import HEADER_NBYTES, Envelope, fingerprint, seal, unseal
from thinwire.errors import ConfigError, NonFiniteRound, WireError, check_whole_number
from thinwire.links.base import Link, Ticket
from thinwire.network import Op
from thinwire.payload import Payload, all_finite

T = TypeVar("T")

# Asked with "is something wrong here?": whether it is so anywhere among the processes that share one worker's model.
AnyShard = Callable[[bool], bool]


def alone(flag: bool) -> bool:
    """The `AnyShard` of a worker that is one process."""
    return flag


class Options(TypedDict, total=False):
    """Keyword arguments of `average` and `post_average`.

    Attributes:
        round: number of the round, for codecs that change with it.
        want_sent: also return what the others decode of this worker's own message (for error feedback).
        withdraw: this worker knows that it has nothing good to give: refuse the round on all workers in its name. Of `share`,
            False says that the caller has found its tensors finite; by default `share` looks itself.
        any_shard: where the worker's model is sharded over processes, tells whether any of them raised its flag, so that all
            shards of a worker refuse a round together.
        mean: how the contributions are combined; only the plain mean can be left to the wire, so a linear codec takes no other.
        weight: how much this worker's contribution counts; equal by default. Given by all workers or by none.
        purpose: what stands in meters and error messages.
    """

    round: int
    want_sent: bool
    withdraw: bool
    any_shard: AnyShard
    mean: Mean | None
    weight: float | None
    purpose: str


def average(
    link: Link, codec: Codec, tensors: Sequence[Tensor], **options: Unpack[Options]
) -> tuple[list[Tensor], list[Tensor]]:
    """Mean over all workers of what each one's message decodes to. ONE message, whatever the number of tensors.

    Args:
        link: the wire.
        codec: what is sent of the tensors.
        tensors: this worker's contribution: any shapes, on one device; not changed.
        **options: see `Options`.

    Returns:
        The mean, bit-identical on every worker, and what this worker sent (an empty list unless asked for).

    Raises:
        NonFiniteRound: on every worker, when any contribution (or the sum) is not finite.
        WireError: a message that is not what it should be.
    """
    return post_average(link, codec, tensors, **options).wait()


def post_average(
    link: Link,
    codec: Codec,
    tensors: Sequence[Tensor],
    *,
    round: int = 0,
    want_sent: bool = False,
    withdraw: bool = False,
    any_shard: AnyShard = alone,
    mean: Mean | None = None,
    weight: float | None = None,
    purpose: str = "round",
) -> PendingAverage:
    """Start an `average`; compute while it is under way and call `wait()` on the result later."""
    tensors = list(tensors)
    like = [torch.empty_like(t, device="meta") for t in tensors]  # shapes only: the tensors may change meanwhile
    mail = Mail(link, codec, like, round, any_shard, mean or Mean(), weight, purpose)
    scaled = tensors if weight is None or not codec.linear else [t * weight for t in tensors]
    if codec.linear:
        body = codec.encode(scaled, round=round, spare=mail.spare)
        finite = body.finite
    else:
        body, finite = codec.encode_finite(tensors, round=round)
    if not isinstance(codec, Dense):  # it may leave a NaN out, or turn it into something finite: look at what goes in
        finite = finite and all_finite(tensors)
    sent = []
    if want_sent and not finite:  # the round will be refused; to decode a NaN would raise on this worker alone
        sent = [torch.zeros_like(t) for t in tensors]
    elif want_sent:  # decoded from a copy: the link reduces into the payload's own buffer
        sent = codec.decode(mail.strip(body.like(body.data.clone())), tensors, round=round)
        if codec.linear and weight:
            sent = [s / weight for s in sent]
    return PendingAverage(mail, mail.post(body, withdraw or not finite), sent)


def swap(
    link: Link,
    codec: Codec,
    tensors: Sequence[Tensor],
    partner: int | None,
    *,
    round: int = 0,
    withdraw: bool = False,
    any_shard: AnyShard = alone,
    purpose: str = "round",
) -> tuple[list[Tensor], list[Tensor]]:
    """Exchange ONE message with one other worker; the rest of the workers are not waited for.

    Args:
        link: the wire.
        codec: what is sent of the tensors; one whose messages are gathered, such as `Dense(gather=True)`.
        tensors: this worker's contribution: any shapes, on one device; not changed.
        partner: the rank to exchange with, which must name this one; None for a worker that has no partner.
        round: see `Options`.
        withdraw: see `Options`; here the two of a pair refuse together.
        any_shard: see `Options`.
        purpose: see `Options`.

    Returns:
        What this worker's message decodes to and what the partner's does; without a partner, the first in both places. They may
        be views into the messages: read them, do not write to them.

    Raises:
        NonFiniteRound: on both members of the pair, when the contribution of either is not finite.
        WireError: a message that is not what it should be.
    """
    if codec.linear:
        raise ConfigError(
            f"{codec!r} is averaged on the wire, which two workers cannot do: take Dense(gather=True) or the like"
        )
    tensors = list(tensors)
    like = [torch.empty_like(t, device="meta") for t in tensors]
    pair = (link.rank,) if partner is None else (min(link.rank, partner), max(link.rank, partner))
    mail = Mail(link, codec, like, round, any_shard, Mean(), None, purpose, pair)
    body, finite = codec.encode_finite(tensors, round=round)
    if not isinstance(codec, Dense):
        finite = finite and all_finite(tensors)
    read = mail.read(mail.post(body, withdraw or not finite).wait(), mail.decode_each)
    mine = pair.index(link.rank)
    return read[mine], read[-1 - mine]


def message_nbytes(link: Link, codec: Codec, tensors: Sequence[Tensor], *, weighted: bool = False) -> int:
    """Length in bytes of the message that `average` would send, with what it adds to tell a bad contribution."""
    if not codec.linear:
        return HEADER_NBYTES + codec.nbytes(tensors)
    return codec.nbytes(tensors) + _number_nbytes(codec) * (link.size + weighted)


def _number_nbytes(codec: Codec) -> int:
    """Bytes of one number in the messages of a linear codec."""
    return codec.nbytes([torch.empty(1, device="meta")])


@dataclass
class Mail:
    """One exchange of one codec's messages: what is put around a body, and what is checked when the others' come.

    A message that may be averaged on the wire has one status number per worker behind it (and the weight, where workers have
    one). A worker that finds its own message not finite sends zeros and raises its number: the mean then tells everybody who
    it was, without a second round trip. A message that is gathered travels in an envelope (`codecs.wire`) that says as much.
    """

    link: Link
    codec: Codec
    like: list[Tensor]
    round: int
    any_shard: AnyShard
    mean: Mean
    weight: float | None
    purpose: str = "round"
    pair: tuple[int, ...] | None = None  # of a swap: this worker and its partner, in rank order

    def __post_init__(self) -> None:
        """Refuse what the wire cannot do."""
        check_whole_number("round", self.round, least=0)
        if self.codec.linear and not self.mean.plain:
            raise ConfigError(
                f"{self.codec!r} is averaged on the wire, which can do the plain mean over workers only, not {self.mean!r}"
            )
        if self.weight is not None and not 0 <= self.weight <= torch.finfo(torch.float32).max:
            raise ConfigError(f"weight must be finite in float32 and not negative, got {self.weight!r}")
        if self.weight is not None and self.codec.linear and _number_nbytes(self.codec) < 4:
            raise ConfigError(
                f"{self.codec!r} adds up weights on the wire, where they would be rounded: use fp32, or a gathered codec"
            )
        if self.weight is not None and self.mean.trimmed:
            raise ConfigError(f"a trimmed mean takes no weights, got weight={self.weight!r} with {self.mean!r}")

    @property
    def spare(self) -> int:
        """Numbers behind a message that is averaged on the wire."""
        return self.link.size + (self.weight is not None) if self.codec.linear else 0

    def strip(self, payload: Payload) -> Payload:
        """A message without the numbers behind it."""
        return payload.like(payload.data[: payload.data.numel() - self.spare])

    def post(self, body: Payload, bad: bool) -> Ticket:
        """Put a body (with room behind it) on its way."""
        bad = self.any_shard(bad)
        body = replace(body, purpose=self.purpose)
        if not self.codec.linear:
            envelope = Envelope(self.link.rank, 1.0 if self.weight is None else self.weight, invalid=bad)
            op: Op = "gather"
            if self.pair is not None:
                op, body = "pair", replace(body, partner=next((r for r in self.pair if r != self.link.rank), None))
            return self.link.post(seal(body, envelope, fingerprint=self._fingerprint, round=self.round), op)
        if bad:
            body.data.zero_()
        if self.weight is not None:
            body.data[-1] = self.weight
        if bad:
            body.data[body.data.numel() - self.spare + self.link.rank] = 1
        return self.link.post(body, "mean")

    @functools.cached_property
    def _fingerprint(self) -> int:
        return fingerprint(self.codec, self.like)

    def read(self, payloads: list[Payload], decode: Callable[[list[Payload], list[float] | None], tuple[T, bool]]) -> T:
        """Check what came and decode it.

        All shards of a worker accept or refuse it together, or half a model would take the step.

        Args:
            payloads: as the link brought them.
            decode: makes the result of the bodies and the workers' weights (None where they have none), and tells whether it
                is finite.

        Raises:
            WireError: a message that is not what it should be.
            NonFiniteRound: on every worker that reads them, naming those who have nothing good to give.
        """
        error, culprits, result = None, [], []
        try:
            bodies, weights, culprits = self._open(payloads)
            if not culprits:
                decoded, finite = decode(bodies, weights)
                result, culprits = [decoded], [] if finite else [-1]
        except WireError as found:
            error = found
        if not self.any_shard(error is not None or bool(culprits)):
            return result[0]
        if error is not None:
            raise error
        names = ", ".join(f"rank {r}" for r in culprits if r >= 0)
        reason = f"NaN or Inf in the contribution of {names}" if names else "the sum of all contributions overflowed"
        together = (
            f"on all {self.link.size} workers" if self.pair is None else f"by rank {' and rank '.join(map(str, self.pair))}"
        )
        raise NonFiniteRound(
            f"round {self.round} refused {together}: " + (reason if culprits else "another shard of this worker refused it"),
            culprits=[r for r in culprits if r >= 0],
        )

    def _open(self, payloads: list[Payload]) -> tuple[list[Payload], list[float] | None, list[int]]:
        """The bodies, the workers' weights where they have any, and the ranks that have nothing good to give."""
        if self.codec.linear:
            numbers = payloads[0].data[payloads[0].data.numel() - self.spare :].float()
            culprits = numbers[: self.link.size].nonzero().flatten().tolist()
            if not culprits and not payloads[0].finite:
                culprits = [-1]  # every contribution was finite, their sum in the wire's dtype is not
            if self.weight is not None and not culprits and not numbers[-1] > 0:
                raise WireError("the weights of all workers are zero")
            return [self.strip(payloads[0])], None if self.weight is None else [float(numbers[-1])], culprits
        nbytes = self.codec.nbytes(self.like)
        opened = [
            unseal(p, fingerprint=self._fingerprint, round=self.round, sender=rank, nbytes=nbytes)
            for rank, p in zip(self.pair or range(len(payloads)), payloads, strict=True)
        ]
        weights = [e.weight for _, e in opened]
        if self.weight is None and (odd := [e for _, e in opened if e.weight != 1]):
            raise WireError(f"weight {odd[0].weight:g}, where this worker gives no weight", rank=odd[0].sender)
        if not sum(weights) > 0:
            raise WireError("the weights of all workers are zero")
        culprits = [e.sender for _, e in opened if e.invalid]
        return [body for body, _ in opened], None if self.weight is None else weights, culprits

    def decode_each(self, bodies: list[Payload], _: list[float] | None) -> tuple[list[list[Tensor]], bool]:
        """The tensors of each body, for `read`."""
        decoded = [self.codec.decode(body, self.like, round=self.round) for body in bodies]
        for rank, tensors in zip(self.pair or range(len(bodies)), decoded, strict=True):
            if not all_finite(tensors):  # a sender that is honest would have withdrawn
                raise WireError("a value that is not finite", rank=rank)
        return decoded, True


@dataclass
class PendingAverage:
    """An average under way."""

    mail: Mail
    ticket: Ticket
    sent: list[Tensor]

    def wait(self) -> tuple[list[Tensor], list[Tensor]]:
        """The mean and what was sent; raises `NonFiniteRound` on every worker alike."""
        return self.mail.read(self.ticket.wait(), self._decode), self.sent

    def _decode(self, bodies: list[Payload], weights: list[float] | None) -> tuple[list[Tensor], bool]:
        mail = self.mail
        if mail.codec.linear:
            mean = mail.codec.decode(bodies[0], mail.like, round=mail.round)
            return ([m / weights[0] for m in mean] if weights else mean), True
        mean = mail.codec.combine(Messages(bodies, mail.like, mail.round, mail.mean, weights))
        finite = all_finite(mean)
        if not finite:  # a sender that is honest would have withdrawn
            for rank, body in enumerate(bodies):
                if not all_finite(mail.codec.decode(body, mail.like, round=mail.round)):
                    raise WireError("a value that is not finite", rank=rank)
        return mean, finite


# --- Tensors that live in the domain of a transform --------------------------------------------------------------------


def share(link: Link, chain: Codec, slots: Sequence[Tensor], like: Sequence[Tensor], **options: Unpack[ShareOptions]) -> Share:
    """Exchange what a chain keeps of slots, without a copy of the model: `average` for state in the domain of a transform.

    Nothing is applied: after `link.commit()` take what was sent off the slots, and go through the mean piece by piece. What
    is accumulated on the way (see `ShareOptions`) stays in the slots whatever becomes of the round, so do not give it again;
    a tensor that is not finite is not.

    Args:
        link: the wire.
        chain: what is sent of the slots.
        slots: float32, of the shapes that `chain.slot_shapes(like)` tells.
        like: tensors of the shapes that the slots stand for.
        **options: see `ShareOptions`.

    Raises:
        NonFiniteRound: on every worker, when any contribution (or the sum) is not finite.
        WireError: a message that is not what it should be.
    """
    return post_share(link, chain, slots, like, **options).wait()


class ShareOptions(Options, total=False):
    """Keyword arguments of `share` and `post_share`: those of `average`, and an accumulation in the same pass over memory.

    Attributes:
        decay: with `scale`, slots <- decay * slots + scale * transform(like) comes first; one number, or one per tensor.
        scale: see `decay`; by default the slots are encoded as they are.
    """

    decay: PerTensor
    scale: PerTensor | None


def post_share(
    link: Link,
    chain: Codec,
    slots: Sequence[Tensor],
    like: Sequence[Tensor],
    *,
    round: int = 0,
    want_sent: bool = True,  # noqa: ARG001  (costs nothing here)
    withdraw: bool | None = None,
    any_shard: AnyShard = alone,
    mean: Mean | None = None,
    weight: float | None = None,
    purpose: str = "round",
    decay: PerTensor = 1.0,
    scale: PerTensor | None = None,
) -> PendingShare:
    """Start a `share`; compute while it is under way and call `wait()` on the result later."""
    chain = Chain.of(chain)
    shapes = [torch.empty_like(t, device="meta") for t in like]
    mail = Mail(link, chain, shapes, round, any_shard, mean or Mean(), weight, purpose)
    if scale is None and decay != 1.0:
        raise ConfigError(f"decay={decay!r} without scale does nothing: give both, or accumulate first")
    # Without an accumulation it is the slots that may hold something bad where a selection does not look.
    bad = withdraw if withdraw is not None else not all_finite(slots if scale is None else like)
    bad = any_shard(bad)  # before anything is accumulated: all shards of a worker leave its gradient out together
    if bad:
        scale = None  # slots outlive the round: nothing bad may enter them
    encoded = chain.encode_slots(slots, like, round=round, decay=decay, scale=scale)
    if not encoded.finite and scale is not None:  # finite numbers so large that their transform is not: they must not stay
        for slot in slots:
            slot.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    body = encoded.payload
    if chain.linear:
        data = body.data if weight is None else body.data * weight
        body = body.like(torch.cat([data, data.new_zeros(mail.spare)]))
    return PendingShare(mail, mail.post(body, bad or not encoded.finite), encoded)


@dataclass
class PendingShare:
    """A share under way."""

    mail: Mail
    ticket: Ticket
    encoded: Encoded

    def wait(self) -> Share:
        """The messages of all workers, checked from end to end."""
        return Share(self.encoded, self.mail.read(self.ticket.wait(), self._receive))

    def _receive(self, bodies: list[Payload], weights: list[float] | None) -> tuple[Received, bool]:
        mail = self.mail
        assert isinstance(mail.codec, Chain)
        if mail.codec.linear and weights:
            bodies, weights = [b.like(b.data / weights[0]) for b in bodies], None
        own = None if mail.codec.linear else (mail.link.rank, self.encoded)
        received = mail.codec.receive(Messages(bodies, mail.like, mail.round, mail.mean, weights), own=own)
        return received, received.safe


@dataclass
class Share:
    """What a round of shared slots brought; nothing of it has been applied.

    Attributes:
        encoded: this worker's own message.
        received: the messages of all.
    """

    encoded: Encoded
    received: Received

    def take_from(self, slots: Sequence[Tensor], *, scale: PerTensor = 1.0) -> None:
        """Subtract from slots exactly what the others read in this worker's message, or a part of it."""
        self.encoded.take_from(slots, scale=scale)

    def each(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """Go through tensors and the mean side by side: see `Received.each`."""
        return self.received.each(tensors, *others)

    def squares(self) -> list[float]:
        """The sum of squares of each tensor's mean: see `Received.squares`."""
        return self.received.squares()

    def tensors(self) -> list[Tensor]:
        """The mean as tensors."""
        return self.received.tensors()
