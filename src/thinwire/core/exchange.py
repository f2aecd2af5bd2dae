"""Exchange: where codec meets link. One message per worker and round, checked from end to end before anything is applied.

`Outgoing` says what a worker sends: tensors, or a slot in the domain of a transform; with which codec, mean and weight. `post`
puts it on its way and gives an `Exchange`, whose `wait()` returns what `Arrived`. There are two kinds here (a third, whose
messages are averaged by owners, is in `owners`):

* `Reduced`: codecs whose messages may be averaged on the wire. One status number per worker stands behind the values (and the
  weight, where workers have one). A worker whose contribution is invalid sends zeros and raises its number: the mean tells
  everybody who it was, without a second round trip.
* `Gathered`: all others. A message travels in an envelope (`codecs.wire`) that says as much.

A contribution that is invalid (NaN, Inf, or too large) is found before anything is applied, and the round is refused on ALL
workers with the culprit named. The other gates are in `gates` and `replicas`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Messages
from thinwire.codecs.chain import Chain, Encoded, Stage
from thinwire.codecs.decoded_once import DecodedOnce
from thinwire.codecs.decoder import Received
from thinwire.codecs.dense import Dense
from thinwire.codecs.device.envelope import unseal_all
from thinwire.codecs.encoder import Write
from thinwire.codecs.made import Made
from thinwire.codecs.parts import frames_of
from thinwire.codecs.stages import off_host
from thinwire.codecs.wire import PART_NBYTES, Envelope, fingerprint, read_flags, seal, unseal_each
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.errors import NonFiniteRound, WireError, check_whole_number
from thinwire.links.base import Link, Peers
from thinwire.network import Op
from thinwire.payload import Delivery, Payload, all_finite, once, zero_invalid_

# Asked with "is something wrong here?": whether it is so anywhere among the processes that share one worker's model.
AnyShard = Callable[[bool], bool]


def alone(flag: bool) -> bool:
    """The `AnyShard` of a worker that is one process."""
    return flag


def _takes_whole_tensors(codec: Codec) -> bool:
    return codec.linear or not isinstance(codec, Chain | Stage)


class Exchange(ABC):
    """A message in flight.

    Args:
        link: the wire; None to read the messages of others without sending one.
        outgoing: this worker's contribution; not changed, but for its slots.
        peers: who takes part.
        round: number of the round, for codecs that change with it.
        any_shard: where the worker's model is sharded over processes: whether any of them raised its flag.
        purpose: what stands in meters and error messages.
        largest: a value larger than this makes a contribution invalid.
        missing: ask the others for an earlier round that this worker could not read; of gathered messages.
    """

    write: Write | None = None  # what writes a message, where it is not to be read as a whole

    def __init__(
        self,
        link: Link | None,
        outgoing: Outgoing,
        *,
        peers: Peers,
        round: int = 0,
        any_shard: AnyShard = alone,
        purpose: str = "round",
        largest: float = math.inf,
        missing: bool = False,
    ):
        """Encode the message and post it."""
        if not isinstance(round, int) or round < 0:
            check_whole_number("round", round, least=0)
        if outgoing.made is not None and outgoing.slots is None and _takes_whole_tensors(outgoing.codec):
            outgoing = replace(outgoing, tensors=list(outgoing.made), made=None)
        self.by_pieces = outgoing.slots is not None or outgoing.made is not None
        self.peers, self.round, self.any_shard, self.purpose = peers, round, any_shard, purpose
        self.outgoing, self.codec, self.weight, self.missing = outgoing, outgoing.codec, outgoing.weight, missing
        # Shapes only: the tensors may change meanwhile.
        self.like = [torch.empty_like(t, device="meta") for t in outgoing.tensors]
        self.encoded: Encoded | None = None
        self.sent: list[Tensor] = []
        if link is not None:
            body, invalid = self._encoded(largest)
            payload, op = self._message(replace(body, purpose=purpose), any_shard(invalid))
            self.posted, self.ticket = payload, link.post(payload, op)
        elif self.by_pieces:
            self.outgoing, self.codec = replace(outgoing, tensors=self.like), Chain.of(self.codec)

    @abstractmethod
    def _message(self, body: Payload, invalid: bool) -> tuple[Payload, Op]:
        """The message around a body, and what the link does with it."""

    @abstractmethod
    def read(self, payloads: list[Payload]) -> Arrived:
        """What the messages that came say, checked from end to end."""

    def commit(self) -> None:  # noqa: B027 (most exchanges leave nothing behind)
        """Told when all workers are about to apply the round."""

    def wait(self) -> Arrived:
        """What all workers sent, checked from end to end: see `read`."""
        return self.read(self.ticket.wait())

    @property
    def spare(self) -> int:
        """Numbers that are sent behind the values."""
        return 0

    def _encoded(self, largest: float) -> tuple[Payload, bool]:
        """The body, with room behind it, and whether the contribution is invalid."""
        if self.outgoing.slots is not None:
            return self._encode_slots(largest)
        return self._encode(largest) if self.outgoing.made is None else self._encode_made(self.outgoing.made, largest)

    def _encode(self, largest: float) -> tuple[Payload, bool]:
        """Of tensors."""
        codec, tensors, spare = self.codec, self.outgoing.tensors, self.spare
        scaled = [t * self.weight for t in tensors] if spare and self.weight is not None else tensors
        if isinstance(codec, Dense):
            body = codec.encode(scaled, round=self.round, spare=spare)
            values = body.data if codec.linear else body.data[PART_NBYTES:]
            finite = all_finite([values.view(codec.wire_dtype)], largest)
        else:  # a codec may leave a NaN out, or turn it into something finite: look at what goes in
            body, finite = codec.encode_finite(scaled, round=self.round)
            if spare:
                body = body.like(torch.cat([body.data, body.data.new_zeros(spare)]))
            finite = finite and all_finite(tensors, largest)
        if self.outgoing.want_sent and not finite:  # the round will be refused; to decode a NaN would raise here alone
            self.sent = [torch.zeros_like(t) for t in tensors]
        elif self.outgoing.want_sent:  # decoded from a copy: the link reduces into the payload's own buffer
            copy = body.like(body.data[: body.data.numel() - spare].clone())
            self.sent = codec.decode(copy, tensors, round=self.round)
            if spare and self.weight:
                self.sent = [s / self.weight for s in self.sent]
        return body, bool(self.outgoing.invalid) or not finite

    def _encode_made(self, made: Made, largest: float) -> tuple[Payload, bool]:
        """Of tensors that are made piece by piece; what receivers read of them is decoded when it is asked for."""
        chain = Chain.of(self.codec)
        encoded = chain.encode_tensors(made, round=self.round, write=self.write)
        finite = bool(encoded.finite) and all_finite(made.runs(), largest)
        self.outgoing, self.codec, self.encoded = replace(self.outgoing, tensors=self.like), chain, encoded
        return encoded.payload, bool(self.outgoing.invalid) or not finite

    def _encode_slots(self, largest: float) -> tuple[Payload, bool]:
        """Of slots."""
        out, chain = self.outgoing, Chain.of(self.codec)
        assert out.slots is not None and (out.made is None or out.invalid is not None)
        # Without an accumulation it is the slots that may hold something invalid where a selection does not look.
        looked = out.slots if out.scale is None else out.tensors
        invalid = not all_finite(looked, largest) if out.invalid is None else out.invalid
        invalid = self.any_shard(invalid)  # before anything is accumulated: all shards of a worker leave its gradient out
        scale = None if invalid else out.scale  # slots outlive the round: nothing invalid may enter them
        slots, tensors, made = out.slots, out.tensors, None if invalid else out.made  # to make them may change other slots
        if made is not None and _takes_whole_tensors(self.codec):
            tensors, made = list(made), None
        how = {"decay": out.decay, "scale": scale, "made": made, "write": self.write}
        encoded = chain.encode_slots(slots, tensors, round=self.round, **how)
        finite = bool(encoded.finite)  # read once: on a device it waits
        if not finite and scale is not None:  # finite numbers so large that their transform is not: they must not stay
            zero_invalid_(slots)
        # They are in the slots by now: no copy of the model travels along.
        self.outgoing = replace(out, tensors=self.like, made=None)
        self.codec, self.encoded, body = chain, encoded, encoded.payload
        if self.spare:
            data = body.data if self.weight is None else body.data * self.weight
            body = body.like(torch.cat([data, data.new_zeros(self.spare)]))
        return body, invalid or not finite

    def _refusal(self, culprits: list[int]) -> NonFiniteRound:
        named, pair = [r for r in culprits if r >= 0], self.outgoing.pair
        reason = "the sum of all contributions overflowed" if culprits else "another shard of this worker refused it"
        if named:
            reason = f"NaN or Inf in the contribution of {', '.join(f'rank {r}' for r in named)}"
        together = f"on all {self.peers.size} workers" if pair is None else f"by rank {' and rank '.join(map(str, pair))}"
        return NonFiniteRound(f"round {self.round} refused {together}: {reason}", culprits=named)

    def _arrived(self, ids: tuple[int, ...], **result: Any) -> Arrived:
        return Arrived(ids, self.peers.id in ids, self.outgoing, self.sent, _encoded=self.encoded, **result)


class Direct(Exchange):
    """Messages that every worker reads itself, or whose mean it does."""

    @abstractmethod
    def _open(self, payloads: list[Payload]) -> tuple[list[Payload], list[float] | None, list[int]]:
        """The bodies, the workers' weights where they have any, and the ids of those whose contribution is invalid."""

    @abstractmethod
    def _decode(self, bodies: list[Payload], weights: list[float] | None) -> tuple[Arrived, bool]:
        """What arrived, and whether it is finite."""

    def _told_invalid(self, payloads: list[Payload]) -> list[int]:  # noqa: ARG002
        """Of messages that cannot be read as a whole: ids of those who say that their contribution is invalid."""
        return []

    def read(self, payloads: list[Payload]) -> Arrived:
        """What the messages of all workers say, checked from end to end.

        All shards of a worker accept or refuse it together, or half a model would take the step.

        Raises:
            WireError: a message that is not what it should be.
            NonFiniteRound: on every worker that reads them, naming those whose contribution is invalid.
        """
        error, culprits, result = None, [], []
        try:
            bodies, weights, culprits = self._open(payloads)
            if not culprits:
                arrived, finite = self._decode(bodies, weights)
                result, culprits = [arrived], [] if finite else [-1]
        except WireError as found:  # a round that is refused in somebody's name is so also where the rest is damaged
            culprits = self._told_invalid(payloads)
            error = None if culprits else found
        if not self.any_shard(error is not None or bool(culprits)):
            return result[0]
        if self.any_shard(error is not None):
            raise error or WireError("another shard of this worker could not read its messages")
        raise self._refusal(culprits)


class Reduced(Direct):
    """Messages that are averaged on the wire."""

    @property
    def spare(self) -> int:
        """One status number per worker, and the weight."""
        return self.peers.size + (self.weight is not None)

    def _message(self, body: Payload, invalid: bool) -> tuple[Payload, Op]:
        if invalid:
            body.data.zero_()
        if self.weight is not None:
            body.data[-1] = self.weight
        if invalid:
            body.data[body.data.numel() - self.spare + self.peers.rank] = 1
        return body, "mean"

    def _open(self, payloads: list[Payload]) -> tuple[list[Payload], list[float] | None, list[int]]:
        data = payloads[0].data
        values, numbers = data[: data.numel() - self.spare], data[data.numel() - self.spare :].float()
        culprits = [self.peers.expected[place] for place in numbers[: self.peers.size].nonzero().flatten().tolist()]
        if not culprits and not payloads[0].finite:
            culprits = [-1]  # every contribution was finite, their sum in the wire's dtype is not
        if self.weight is not None and not culprits and not numbers[-1] > 0:
            raise WireError("the weights of all workers are zero")
        return [payloads[0].like(values)], None if self.weight is None else [float(numbers[-1])], culprits

    def _decode(self, bodies: list[Payload], weights: list[float] | None) -> tuple[Arrived, bool]:
        (body,), ids = bodies, self.peers.expected
        if self.encoded is None:
            mean = self.codec.decode(body, self.like, round=self.round)
            return self._arrived(ids, _mean=[m / weights[0] for m in mean] if weights else mean), True
        assert isinstance(self.codec, Chain)
        body = body.like(body.data / weights[0]) if weights else body
        received = self.codec.receive(Messages([body], self.like, self.round, self.outgoing.mean))
        return self._arrived(ids, _received=received), bool(received.safe)


class Gathered(Direct):
    """Messages that all workers, or both of a pair, send to each other."""

    @functools.cached_property
    def _fingerprint(self) -> int:
        return fingerprint(self.codec, self.like)

    @functools.cached_property
    def _frames(self) -> list[tuple[int, int]] | None:
        """Of messages on a device: where their parts are, so that nobody has to look."""
        return frames_of(self.codec, self.like)

    def _message(self, body: Payload, invalid: bool) -> tuple[Payload, Op]:
        if self.outgoing.pair is not None:
            body = replace(body, partner=next((r for r in self.outgoing.pair if r != self.peers.rank), None))
        parts = len(self._frames) if off_host(body.data.device) and self._frames is not None else None
        sealed = seal(body, self._envelope(invalid), fingerprint=self._fingerprint, round=self.round, parts=parts)
        return sealed, "gather" if self.outgoing.pair is None else "pair"

    def _envelope(self, invalid: bool) -> Envelope:
        return Envelope(self.peers.id, 1.0 if self.weight is None else self.weight, invalid=invalid, missing=self.missing)

    def _open(self, payloads: list[Payload]) -> tuple[list[Payload], list[float] | None, list[int]]:
        return once(payloads, ("open", self._fingerprint, self.round, self.weight is None), lambda: self._unsealed(payloads))

    def _unsealed(self, payloads: list[Payload]) -> tuple[list[Payload], list[float] | None, list[int]]:
        how = {"fingerprint": self._fingerprint, "round": self.round, "nbytes": self.codec.nbytes(self.like)}
        if off_host(payloads[0].data.device):
            opened = unseal_all(payloads, frames=self._frames, **how)
        else:
            opened = unseal_each(payloads, **how)
        weights = [e.weight for _, e in opened]
        if self.weight is None and (odd := [e for _, e in opened if e.weight != 1]):
            raise WireError(f"weight {odd[0].weight:g}, where this worker gives no weight", rank=odd[0].sender)
        if not sum(weights) > 0:
            raise WireError("the weights of all workers are zero")
        culprits = [e.sender for _, e in opened if e.invalid]
        bodies = [body for body, _ in opened]
        bodies = Delivery(bodies) if isinstance(payloads, Delivery) else bodies
        return bodies, None if self.weight is None else weights, culprits

    def _decode(self, bodies: list[Payload], weights: list[float] | None) -> tuple[Arrived, bool]:
        ids = tuple(body.sender for body in bodies if body.sender is not None)
        if self.outgoing.pair is not None:
            each = self._decode_each(bodies)
            mine = ids.index(self.peers.id)
            return self._arrived(ids, _each=[each[mine], each[-1 - mine]]), True
        messages = Messages(bodies, self.like, self.round, self.outgoing.mean, weights, ids)
        if self.by_pieces:
            assert isinstance(self.codec, Chain)
            received = self._received(self.codec, messages)
            return self._arrived(ids, _received=received), bool(received.safe)
        combined = self._combined(messages)
        finite = all_finite(combined)
        if not finite:  # an honest sender would have said that its contribution is invalid
            self._decode_each(bodies)
        return self._arrived(ids, _mean=combined), finite

    def _received(self, chain: Chain, messages: Messages) -> Received:
        """The messages, checked; where several workers of this process get them, decoded once for all."""
        bodies, ids = messages.payloads, messages.ids or ()
        if isinstance(bodies, Delivery) and not off_host(bodies[0].data.device):
            return bodies.once(self._how(messages), lambda: DecodedOnce(chain, chain.plan(messages.like), messages))
        own = (ids.index(self.peers.id), self.encoded) if self.encoded and self.peers.id in ids else None
        return chain.receive(messages, own=own)

    def _combined(self, messages: Messages) -> list[Tensor]:
        """The mean of the messages; made once where several workers of this process get them, each of which owns its own."""
        if not isinstance(messages.payloads, Delivery):
            return self.codec.combine(messages)
        made = messages.payloads.once(self._how(messages), lambda: self.codec.combine(messages))
        return [t.clone() for t in made]

    def _how(self, messages: Messages) -> tuple[object, ...]:
        """All that the mean of given messages depends on."""
        return self._fingerprint, self.round, repr(messages.mean), messages.weights is None

    @property
    def asked(self) -> bool:
        """Whether a worker asks for an earlier round again, once the messages are there."""
        told = self.ticket.wait()
        return once(told, ("asked", self.round), lambda: any(read_flags(p, round=self.round)[1] for p in told))

    def _told_invalid(self, payloads: list[Payload]) -> list[int]:
        return [p.sender for p in payloads if p.sender is not None and read_flags(p, round=self.round)[0]]

    def _decode_each(self, bodies: list[Payload]) -> list[list[Tensor]]:
        """The tensors of each message; one with a value that is not finite is refused in its sender's name."""
        decoded = [self.codec.decode(body, self.like, round=self.round) for body in bodies]
        for body, tensors in zip(bodies, decoded, strict=True):
            if not all_finite(tensors):
                raise WireError("a value that is not finite", rank=body.sender)
        return decoded


def post(
    link: Link,
    outgoing: Outgoing,
    *,
    peers: Peers | None = None,
    round: int = 0,
    any_shard: AnyShard = alone,
    purpose: str = "round",
    largest: float = math.inf,
    missing: bool = False,
) -> Exchange:
    """Put a message on its way; compute meanwhile and call `wait()` on the result later. See `Exchange`."""
    kind = Reduced if outgoing.codec.linear else Gathered
    peers = peers or link.peers()
    return kind(
        link, outgoing, peers=peers, round=round, any_shard=any_shard, purpose=purpose, largest=largest, missing=missing
    )
