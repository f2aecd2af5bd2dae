"""The one place where codec meets link: `average()`, and the gates that every exchange passes.

Three gates:

* `handshake`: before the first round the workers compare what they were started with and refuse a difference by its name;
* the finite gate inside `average`: a contribution with NaN or Inf is found before anything is averaged, and the round is
  refused on ALL workers with the culprit named, so that no worker's state has changed;
* `compare_replicas`: every few rounds a hash of what must be bit-equal is compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.chain import Chain, Encoded
from thinwire.codecs.dense import Dense
from thinwire.codecs.received import Received
from thinwire.codecs.wire import HEADER_NBYTES, VERSION, Envelope, fingerprint, seal, unseal
from thinwire.errors import ConfigError, Diverged, FingerprintMismatch, NonFiniteRound, WireError, check_whole_number
from thinwire.links.base import Link, Ticket
from thinwire.links.shards import local
from thinwire.payload import Payload, all_finite

T = TypeVar("T")

# Asked with "is something wrong here?": whether it is so anywhere among the processes that share one worker's model.
AnyShard = Callable[[bool], bool]


def _alone(flag: bool) -> bool:
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
    """

    round: int
    want_sent: bool
    withdraw: bool
    any_shard: AnyShard
    mean: Mean | None
    weight: float | None


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
    any_shard: AnyShard = _alone,
    mean: Mean | None = None,
    weight: float | None = None,
) -> PendingAverage:
    """Start an `average`; compute while it is under way and call `wait()` on the result later."""
    tensors = list(tensors)
    like = [torch.empty_like(t, device="meta") for t in tensors]  # shapes only: the tensors may change meanwhile
    mail = Mail(link, codec, like, round, any_shard, mean or Mean(), weight)
    scaled = tensors if weight is None or not codec.linear else [t * weight for t in tensors]
    if codec.linear:
        body = codec.encode(scaled, round=round, spare=mail.spare)
        finite = body.finite
    else:
        body, finite = codec.encode_finite(tensors, round=round)
    if not isinstance(codec, Dense):  # it may leave a NaN out, or turn it into something finite: look at what goes in
        finite = finite and all_finite(tensors)
    sent = []
    if want_sent:  # decoded from a copy: the link reduces into the payload's own buffer
        sent = codec.decode(mail.strip(body.like(body.data.clone())), tensors, round=round)
        if codec.linear and weight:
            sent = [s / weight for s in sent]
    return PendingAverage(mail, mail.post(body, withdraw or not finite), sent)


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
        if not self.codec.linear:
            if bad:
                body = body.like(torch.zeros_like(body.data))
            envelope = Envelope(self.link.rank, 1.0 if self.weight is None else self.weight, withdrawn=bad)
            return self.link.post(seal(body, envelope, fingerprint=self._fingerprint, round=self.round), "gather")
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
            NonFiniteRound: on every worker, naming those who have nothing good to give.
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
        raise NonFiniteRound(
            f"round {self.round} refused on all {self.link.size} workers: "
            + (reason if culprits else "another shard of this worker refused it"),
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
            unseal(p, fingerprint=self._fingerprint, round=self.round, rank=rank, nbytes=nbytes)
            for rank, p in enumerate(payloads)
        ]
        weights = [e.weight for _, e in opened]
        if self.weight is None and (odd := [e for _, e in opened if e.weight != 1]):
            raise WireError(f"weight {odd[0].weight:g}, where this worker gives no weight", rank=odd[0].rank)
        if not sum(weights) > 0:
            raise WireError("the weights of all workers are zero")
        culprits = [e.rank for _, e in opened if e.withdrawn]
        return [body for body, _ in opened], None if self.weight is None else weights, culprits


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
        mean = mail.codec.combine(bodies, mail.like, round=mail.round, mean=mail.mean, weights=weights)
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
        decay: with `scale`, slots <- decay * slots + scale * transform(like) comes first.
        scale: see `decay`; by default the slots are encoded as they are.
    """

    decay: float
    scale: float | None


def post_share(
    link: Link,
    chain: Codec,
    slots: Sequence[Tensor],
    like: Sequence[Tensor],
    *,
    round: int = 0,
    want_sent: bool = True,  # noqa: ARG001  (costs nothing here)
    withdraw: bool | None = None,
    any_shard: AnyShard = _alone,
    mean: Mean | None = None,
    weight: float | None = None,
    decay: float = 1.0,
    scale: float | None = None,
) -> PendingShare:
    """Start a `share`; compute while it is under way and call `wait()` on the result later."""
    chain = Chain.of(chain)
    shapes = [torch.empty_like(t, device="meta") for t in like]
    mail = Mail(link, chain, shapes, round, any_shard, mean or Mean(), weight)
    if scale is None and decay != 1.0:
        raise ConfigError(f"decay={decay!r} without scale does nothing: give both, or accumulate first")
    # Without an accumulation it is the slots that may hold something bad where a selection does not look.
    bad = withdraw if withdraw is not None else not all_finite(slots if scale is None else like)
    if bad:
        scale = None  # slots outlive the round: nothing bad may enter them
    encoded = chain.encode_slots(slots, like, round=round, decay=decay, scale=scale)
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
        received = mail.codec.receive(bodies, mail.like, round=mail.round, mean=mail.mean, weights=weights, own=own)
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

    def take_from(self, slots: Sequence[Tensor], *, scale: float = 1.0) -> None:
        """Subtract from slots exactly what the others read in this worker's message, or a part of it."""
        self.encoded.take_from(slots, scale=scale)

    def each(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Go through tensors and the mean side by side: see `Received.each`."""
        return self.received.each(tensors)

    def tensors(self) -> list[Tensor]:
        """The mean as tensors."""
        return self.received.tensors()


# --- The handshake -----------------------------------------------------------------------------------------------------


def handshake(link: Link, fingerprint: Mapping[str, object], *, any_shard: AnyShard = _alone) -> None:
    """Refuse to begin unless all workers were started with the same settings.

    Args:
        link: the wire.
        fingerprint: names and JSON-able values of all that must agree.
        any_shard: see `Options`.

    Raises:
        FingerprintMismatch: on every worker, naming what differs, where, and both values.
    """
    told = {"wire version": VERSION, **fingerprint}
    text = json.dumps(told, default=str)
    digest = hashlib.sha256(json.dumps(told, default=str, sort_keys=True).encode()).digest()
    digests = link.all_gather(Payload.of_bytes(digest, purpose="handshake", fixed=True))
    differ = len({d.to_bytes() for d in digests}) > 1
    if not any_shard(differ):
        return
    if not differ:
        raise FingerprintMismatch("workers were started differently: another shard of this worker says in what")
    texts = link.all_gather(Payload.of_bytes(text.encode(), purpose="handshake"))
    first, *others = [json.loads(t.to_bytes()) for t in texts]
    for rank, other in enumerate(others, start=1):
        differences = _differences(first, other, rank)
        if differences:
            more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
            hint = _SEED_HINT if differences[0].startswith("starting value") else ""
            raise FingerprintMismatch(f"workers were started differently: {'; '.join(differences[:3])}{more}{hint}")
    raise AssertionError("digests differ, but no setting does")


_SEED_HINT = ": seed all workers alike before the model is built, or call thinwire.broadcast(link, model)"


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _differences(first: object, other: object, rank: int, name: str = "") -> list[str]:
    """What differs, as sentences, one per leaf."""
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [*first, *(k for k in other if k not in first)]  # in the order of telling: the method before its details
        pairs = [(k, first.get(k, _MISSING), other.get(k, _MISSING)) for k in keys]
        return [d for k, a, b in pairs for d in _differences(a, b, rank, f"{name}.{k}" if name else k)]
    if isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        pairs = enumerate(zip(first, other, strict=True))
        return [d for i, (a, b) in pairs for d in _differences(a, b, rank, f"{name}[{i}]")]
    if isinstance(first, list) and isinstance(other, list):
        return [f"{name} has {len(first)} entries on rank 0 and {len(other)} on rank {rank}"]
    if json.dumps(first, default=repr) == json.dumps(other, default=repr):  # as text, so that 1 and True are two things
        return []
    return [f"{name} is {first!r} on rank 0 and {other!r} on rank {rank}"]


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for fingerprints and the people who read them: float32[4, 4]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# --- Starting alike ------------------------------------------------------------------------------------------------------


def broadcast(link: Link, model: nn.Module) -> None:
    """Overwrite the parameters and buffers of `model` on all workers with worker 0's, bit for bit.

    For workers that cannot be seeded alike, or of which only one has loaded the weights. Call it on all workers before the
    optimizer is made. On a sharded model every process receives its own shard.

    Args:
        link: the wire.
        model: the same architecture on all workers, which is checked first.
    """
    tensors = [local(t.detach()) for t in [*model.parameters(), *model.buffers()]]
    handshake(link, {"tensor": [describe(t) for t in tensors]})
    for batch in _batches(tensors):
        raw = [t.contiguous().flatten().view(torch.uint8) for t in batch]
        told = link.broadcast(Payload(torch.cat(raw), purpose="broadcast")).data
        for t, part in zip(batch, told.split([r.numel() for r in raw]), strict=True):
            t.copy_(part.clone().view(t.dtype).view(t.shape))  # a copy, because its place in the message may be odd


def _batches(tensors: Sequence[Tensor], limit: int = 1 << 26) -> Iterator[list[Tensor]]:
    """The tensors in runs of about `limit` bytes: few messages, and no second copy of a large model."""
    batch: list[Tensor] = []
    for t in tensors:
        batch.append(t)
        if sum(b.numel() * b.element_size() for b in batch) >= limit:
            yield batch
            batch = []
    if batch:
        yield batch


# --- The divergence alarm ----------------------------------------------------------------------------------------------


def compare_replicas(link: Link, hashes: Mapping[str, int], *, round: int, any_shard: AnyShard = _alone) -> None:
    """Check that what must be bit-equal on all workers is.

    Args:
        link: the wire.
        hashes: `hash_tensors` of each named part of the state.
        round: for the message.
        any_shard: see `Options`.

    Raises:
        Diverged: on every worker, naming the part and the ranks that differ from rank 0.
    """
    mine = torch.tensor(list(hashes.values()), dtype=torch.int64)
    gathered = link.all_gather(Payload(mine.view(torch.uint8), purpose="alarm"))
    rows = torch.stack([p.data.cpu().view(torch.int64) for p in gathered])  # [workers, parts]
    differs = rows != rows[0]
    if not any_shard(bool(differs.any())):
        return
    parts = [
        f"{name} on rank {', '.join(str(r) for r in differs[:, i].nonzero().flatten().tolist())}"
        for i, name in enumerate(hashes)
        if bool(differs[:, i].any())
    ]
    raise Diverged(f"round {round}: replicas are no longer bit-equal: {'; '.join(parts) or 'on another shard'} vs rank 0")


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers that look random, one per place (the mixing of splitmix64)."""
    z = torch.arange(start + 1, start + 1 + count, device=device).mul_(-7046029254386353131)
    z.bitwise_xor_(z >> 30).mul_(-4658895280553007687)
    z.bitwise_xor_(z >> 27).mul_(-7723592293110705685)
    return z.bitwise_xor_(z >> 31).bitwise_or_(1)


def hash_tensors(tensors: Sequence[Tensor]) -> int:
    """A 64-bit hash of the bits of all tensors; the same on CPU and GPU, whatever the number of threads.

    A sum of words times odd weights that are mixed from the place, modulo 2**64: integer addition has no order, and weights
    that were linear in the place would let balanced changes cancel.
    """
    total, place = 0, 0
    for t in tensors:
        raw = t.detach().contiguous().flatten().view(torch.uint8)
        words = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32)
        for chunk in words.split(1 << 20):  # bounded workspace
            total += int(chunk.to(torch.int64).mul_(_weights(place, chunk.numel(), chunk.device)).sum())
            place += chunk.numel()
        place += 1
    return (total + 2**63) % 2**64 - 2**63
