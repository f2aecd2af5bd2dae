"""Counted: the exchange of an elastic round. What is wrong with a message leaves that message out, not the round.

All workers read the same messages, those that the manifest names, and find the same of them sound: the check is a function of
their bytes, and of nothing that one worker has and another has not. So all apply the same, whatever the proposer of the
manifest has looked at.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.chain import Chain
from thinwire.codecs.dense import Dense
from thinwire.codecs.parts import framed, framed_nbytes, unframed
from thinwire.codecs.wire import Envelope, unseal
from thinwire.core.exchange import Gathered
from thinwire.core.hashing import hash_tensors
from thinwire.core.outgoing import Arrived
from thinwire.errors import WireError
from thinwire.network import Op
from thinwire.payload import LARGEST, Payload, all_finite

log = logging.getLogger("thinwire")

BUFFERS = Dense(gather=True)  # the last part of messages in which buffers are averaged
SLICES = 64  # parts of the replicated state, of which each round's messages hold the hash of one


@dataclass
class Verdict:
    """What became of the messages of a round; the same on all workers.

    Attributes:
        arrived: what is applied; None where no message is left.
        left_out: why a message does not count, by the id of its sender.
        invalid: ids of those whose contribution is not finite, or too large.
        majority: the hash that most workers have of their replicated state; 0 where none gives one, None where there is no
            majority.
        buffers: their mean over the messages that are applied; empty where there are none, or none that is finite.
    """

    arrived: Arrived | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    invalid: set[int] = field(default_factory=set)
    majority: int | None = 0
    buffers: list[Tensor] = field(default_factory=list)


class Counted(Gathered):
    """Messages that all workers read, each of which counts or is left out.

    Args:
        arguments: see `Exchange`.
        state_hash: of a slice of this worker's replicated state, as it was before the round; 0 where there is none.
        buffers: that are part of the messages of this round.
        options: see `Exchange`.
    """

    def __init__(self, *arguments: Any, state_hash: int = 0, buffers: Sequence[Tensor] = (), **options: Any):
        """Encode the message and post it, or only prepare to read those of others."""
        self.state_hash, self.buffers = state_hash, buffers
        self._theirs: dict[int, Payload] = {}  # the part of each message that holds buffers
        super().__init__(*arguments, **options)

    def _envelope(self, invalid: bool) -> Envelope:
        weight = 1.0 if self.weight is None else self.weight
        return Envelope(self.peers.id, weight, invalid=invalid, state_hash=self.state_hash)

    def _message(self, body: Payload, invalid: bool) -> tuple[Payload, Op]:
        raw = framed(self.codec, body, self.like)
        if self.buffers:
            raw = torch.cat([raw, BUFFERS.encode(self.buffers).data.to(raw.device)])
        return super()._message(body.like(raw), invalid)

    def judge(self, payloads: Sequence[Payload]) -> Verdict:
        """Read the messages of a round, and leave out those that are not what they should be."""
        verdict, opened = Verdict(), list[tuple[Payload, Envelope]]()
        for payload in payloads:
            assert payload.sender is not None, "a link says whose message it brings"
            try:
                body, envelope = self._open_one(payload, payload.sender)
            except WireError as error:
                verdict.left_out[payload.sender] = str(error)
                continue
            opened.append((body, envelope))
        verdict.majority = _majority([e.state_hash for _, e in opened])
        kept = []
        for body, envelope in opened:
            if envelope.invalid:
                verdict.invalid.add(envelope.sender)
                verdict.left_out[envelope.sender] = "it says that its contribution is not finite"
            elif verdict.majority and envelope.state_hash not in (0, verdict.majority):
                verdict.left_out[envelope.sender] = "its replicated state is not that of the majority"
            elif verdict.majority is not None:
                kept.append((body, envelope))
        self._combine(kept, verdict)
        if self.buffers and verdict.arrived is not None:
            verdict.buffers = self._mean_of_buffers(verdict.arrived.ids)
        return verdict

    def _open_one(self, payload: Payload, sender: int) -> tuple[Payload, Envelope]:
        own = framed_nbytes(self.codec, self.like)
        nbytes = own + buffers_nbytes(self.buffers)
        body, envelope = unseal(payload, fingerprint=self._fingerprint, round=self.round, sender=sender, nbytes=nbytes)
        if self.weight is None and envelope.weight != 1:
            raise WireError(f"weight {envelope.weight:g}, where none is given", rank=sender)
        if envelope.invalid:
            return body, envelope
        if self.buffers:
            self._theirs[sender] = body.like(body.data[own:].clone())  # a copy: numbers must be aligned
            BUFFERS.decode(self._theirs[sender], self.buffers)
        return unframed(self.codec, body.like(body.data[:own]), self.like), envelope

    def _mean_of_buffers(self, ids: Sequence[int]) -> list[Tensor]:
        """The mean of the buffers in these workers' messages, without those that are not finite."""
        sound = [i for i in ids if all_finite(BUFFERS.decode(self._theirs[i], self.buffers), LARGEST)]
        for odd in sorted(set(ids) - set(sound)):
            log.warning("buffers: NaN or Inf in those of worker %d; it takes the mean of the others", odd)
        messages = Messages([self._theirs[i] for i in sound], self.buffers, self.round, ids=sound)
        return BUFFERS.combine(messages) if sound else []

    def _combine(self, kept: list[tuple[Payload, Envelope]], verdict: Verdict) -> None:
        """The mean of the messages, without those that turn out to be unsound."""
        while kept and sum(e.weight for _, e in kept) > 0:
            bodies, weights = [body for body, _ in kept], [e.weight for _, e in kept] if self.weight is not None else None
            try:
                arrived, finite = self._decode(bodies, weights)
                if finite and not self._too_large(arrived, bodies):
                    verdict.arrived = arrived
                    return
                found = {body.sender: "a value that is not finite, or too large" for body in bodies if not self._fine(body)}
                verdict.invalid |= {sender for sender in found if sender is not None}
            except WireError as error:
                found = {error.rank: str(error)}
            if not found.keys() & {body.sender for body in bodies}:
                return  # each is sound by itself, and their sum is not
            verdict.left_out |= {sender: why for sender, why in found.items() if sender is not None}
            kept = [(body, e) for body, e in kept if body.sender not in found]

    def _too_large(self, arrived: Arrived, bodies: Sequence[Payload]) -> bool:
        if arrived._received is not None:
            return bool(arrived._received.largest > LARGEST)
        return not all(self._fine(body) for body in bodies)

    def _fine(self, body: Payload) -> bool:
        """Whether one message by itself is finite and not too large."""
        if isinstance(self.codec, Chain):
            received = self.codec.receive(Messages([body], self.like, self.round))
            return bool(received.safe) and bool(received.largest <= LARGEST)
        return all_finite(self.codec.decode(body, self.like, round=self.round), LARGEST)


def buffers_nbytes(buffers: Sequence[Tensor]) -> int:
    """Bytes that buffers add to a message."""
    return BUFFERS.nbytes(buffers) if buffers else 0


def _majority(hashes: Sequence[int]) -> int | None:
    """What more than half of those say who say anything; 0 where nobody does, None where there is no majority."""
    told = Counter(h for h in hashes if h)
    if not told:
        return 0
    found, count = told.most_common(1)[0]
    return found if 2 * count > told.total() else None


def slice_hash(tensors: Sequence[Tensor], round: int, *, whole: bool = False) -> int:
    """A hash of one of `SLICES` slices of tensors, another in each round, or of all of them; never 0."""
    total = sum(t.numel() for t in tensors)
    start, stop = (0, total) if whole else (total * (round % SLICES + k) // SLICES for k in (0, 1))
    parts, at = [], 0
    for t in tensors:
        first, last = max(start - at, 0), min(stop - at, t.numel())
        if first < last:
            parts.append(t.detach().reshape(-1)[first:last])
        at += t.numel()
    return hash_tensors(parts) % 2**64 or 1
