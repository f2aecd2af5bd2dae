"""Owners: rounds whose bytes do not grow with the number of workers.

Each of M workers owns 1/M of the blocks. With messages of N bytes, and means of N' bytes,

    every worker sends each owner its part of the message                 N (M-1)/M bytes
    the owner averages them, adds what it left out before, encodes        m <- mean_i q_i + f e;  Q <- C'(m);  e <- m - Q
    the owner sends that to all                                           N' (M-1)/M bytes
    all vote: whether they could read it all, and were valid themselves   M - 1 bytes

and all workers, the owner too, apply what the owners' messages say. In a gather it would be N (M-1) bytes, and M messages to
decode; here each worker decodes what is as long as two.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.deal import Deal, deal_of
from thinwire.codecs.decoded_once import DecodedOnce
from thinwire.codecs.decoder import Received
from thinwire.codecs.encoder import Encoded
from thinwire.codecs.wire import fingerprint
from thinwire.core.exchange import Exchange
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.refusals import damaged, refusal
from thinwire.core.route import SUM_NBYTES, WEIGHT_NBYTES, Owners, chains_of, sent_nbytes
from thinwire.errors import ConfigError, WireError
from thinwire.links.base import Link
from thinwire.network import Op
from thinwire.payload import LARGEST, Delivery, Payload, all_finite, once

_WEIGHT = struct.Struct("<f")
_ALL = -1  # whom a mean is for
_UNREAD, _INVALID, _OVERFLOW = 1, 2, 4  # what a worker says in a vote


@dataclass(frozen=True)
class _Dealt:
    """One part of a message: the tensors from `start` to `stop`, by one chain."""

    deal: Deal
    start: int
    stop: int

    @property
    def here(self) -> slice:
        return slice(self.start, self.stop)


class Owned(Exchange):
    """Messages that owners average.

    Args:
        link: the wire.
        outgoing: this worker's contribution.
        owners: the settings.
        owed: what this worker, as an owner, has left out so far of each tensor; empty for none.
        model: tensors of the shapes of the model.
        which: numbers of those that are sent.
        how: see `Exchange`.
    """

    def __init__(
        self,
        link: Link,
        outgoing: Outgoing,
        *,
        owners: Owners,
        owed: Sequence[Tensor | None],
        model: Sequence[Tensor],
        which: Sequence[int],
        **how: Any,
    ):
        """Encode the message and send each owner its part."""
        tensors, workers = outgoing.tensors, how["peers"].size
        if len(which) != len(tensors):
            raise ConfigError(f"owners know messages with one tensor of each parameter, got {len(tensors)} of {len(which)}")
        self.link, self.settings, self.owed = link, owners, list(owed) or [None] * len(tensors)
        self.dealt, start = [], 0
        for chain, count in chains_of(outgoing.codec, tensors):
            here = slice(start, start + count)
            deal = deal_of(chain, owners.back_of(chain), model, which[here], workers)
            self.dealt.append(_Dealt(deal, start, start + count))
            start += count
        self.write = self.dealt[0].deal.write  # of slots, which are of one chain
        self.next_owed: list[tuple[Tensor, Tensor]] = []
        self._overflowed = False
        super().__init__(link, outgoing, **how)

    # --- Sending -----------------------------------------------------------------------------------------------------------

    def _encode(self, largest: float) -> tuple[Payload, bool]:
        """Of tensors, one chain after the other."""
        out = self.outgoing
        encoded = [
            part.deal.chain.encode_tensors(out.tensors[part.here], round=self.round, write=part.deal.write)
            for part in self.dealt
        ]
        finite = all(one.finite for one in encoded) and all_finite(out.tensors, largest)
        if out.want_sent and finite:
            self.sent = [torch.empty_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in out.tensors]
            for part, one in zip(self.dealt, encoded, strict=True):
                for _, piece, sent in one.each(self.sent[part.here]):
                    piece.copy_(sent)
        elif out.want_sent:  # the round will be refused
            self.sent = [torch.zeros_like(t) for t in out.tensors]
        return self._by_owner(encoded), bool(out.invalid) or not finite

    def _by_owner(self, encoded: Sequence[Encoded]) -> Payload:
        """Each owner's parts of the messages of all chains, one owner after the other."""
        raws = [one.payload.raw() for one in encoded]
        if len(raws) == 1:
            return encoded[0].payload.like(raws[0])
        cut = [raw.split(part.deal.up_nbytes) for raw, part in zip(raws, self.dealt, strict=True)]
        return encoded[0].payload.like(torch.cat([piece for owner in zip(*cut, strict=True) for piece in owner]))

    @functools.cached_property
    def _up_nbytes(self) -> list[int]:
        return [sum(lengths) for lengths in zip(*(part.deal.up_nbytes for part in self.dealt), strict=True)]

    @functools.cached_property
    def _back_nbytes(self) -> list[int]:
        return [sum(lengths) for lengths in zip(*(part.deal.back_nbytes for part in self.dealt), strict=True)]

    def _message(self, body: Payload, invalid: bool) -> tuple[Payload, Op]:
        self.invalid, raw = invalid, body.raw()
        if invalid:
            raw = torch.zeros_like(raw)
        weight = b"" if self.weight is None else _WEIGHT.pack(self.weight)
        whole, starts = raw.cpu().numpy().data, itertools.accumulate(self._up_nbytes, initial=0)
        parts = [
            self._framed(whole[at : at + n], self.peers.rank, to, weight)
            for to, (at, n) in enumerate(zip(starts, self._up_nbytes, strict=False))
        ]
        due = sent_nbytes(self._up_nbytes[self.peers.rank], weighted=self.weight is not None)  # from each worker
        framed = Payload.of_bytes(b"".join(parts)).data.to(raw.device)
        return body.like(framed).in_parts([len(p) for p in parts], [due] * self.peers.size), "deal"

    # --- Frames ------------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _seed(self) -> bytes:
        """What all messages of a round have in common; no byte of it travels, but checksums begin with it."""
        told = b"".join(
            struct.pack(
                "<QQ", fingerprint(part.deal.chain, self.like[part.here]), fingerprint(part.deal.back, self.like[part.here])
            )
            for part in self.dealt
        )
        return hashlib.sha256(told).digest()[:8] + struct.pack("<Q", self.round)

    def _sum(self, raw: memoryview, sender: int, to: int, weight: bytes) -> bytes:
        start = zlib.crc32(self._seed + struct.pack("<ii", sender, to) + weight)
        return struct.pack("<I", zlib.crc32(raw, start))

    def _framed(self, raw: memoryview, sender: int, to: int, weight: bytes = b"") -> bytes:
        """A part with its checksum and weight before it; one that says nothing does not travel."""
        return b"".join([self._sum(raw, sender, to, weight), weight, raw]) if raw.nbytes else b""

    def _unframed(self, message: Payload, sender: int, to: int, nbytes: int, *, weighted: bool) -> tuple[Tensor, float]:
        """The body of a part, in memory of its own, since numbers must be aligned, and its weight."""
        size = SUM_NBYTES + WEIGHT_NBYTES * weighted
        if message.nbytes != (due := sent_nbytes(nbytes, weighted=weighted)):
            raise WireError(f"a part of {message.nbytes} bytes, where {due} are due", rank=sender)
        raw = message.raw().cpu().numpy()
        head, body = raw[:size].tobytes(), raw[size:].copy()
        told, weight = head[:SUM_NBYTES], head[SUM_NBYTES:]
        if self._sum(body.data, sender, to, weight) != told:  # in the same words on all workers, whose parts differ
            raise WireError(f"wrong checksum of a part of round {self.round}, so it was damaged on the way", rank=sender)
        value = _WEIGHT.unpack(weight)[0] if weighted else 1.0
        if not 0 <= value < float("inf"):
            raise WireError(f"weight {value!r}, which must be finite and not negative", rank=sender)
        return torch.from_numpy(body).to(message.data.device), value

    # --- Arriving ----------------------------------------------------------------------------------------------------------

    def read(self, payloads: list[Payload]) -> Arrived:
        """Average this worker's share, send it, and read everybody's; all workers accept or refuse the round together.

        Raises:
            NonFiniteRound: on all workers, naming those whose contribution is invalid.
            WireError: on all workers, where none could read the messages.
            DamagedRound: on all workers, where some could.
        """
        error = None
        try:
            means = self._average(payloads)
        except WireError as found:  # others must not be kept waiting
            error, means = found, self._nothing()
        received, overflow = [], False
        try:
            received = self._read_means(self._send_back(means))
            overflow = not all(one.safe for one in received)
        except WireError as found:
            error = error or found
        self._vote(error, overflow=overflow)
        ids = self.peers.expected
        if len(received) == 1:
            return self._arrived(ids, _received=received[0])
        return self._arrived(ids, _mean=[t for one in received for t in one.tensors()])

    def _average(self, payloads: list[Payload]) -> list[bytes]:
        """This worker's share of the mean, encoded, by each chain."""
        me, ids, nbytes = self.peers.rank, self.peers.expected, self._up_nbytes[self.peers.rank]
        if not nbytes:
            return [b""] * len(self.dealt)
        opened = [self._unframed(p, rank, me, nbytes, weighted=self.weight is not None) for rank, p in enumerate(payloads)]
        weights = None if self.weight is None else [weight for _, weight in opened]
        if weights is not None and not sum(weights) > 0:
            raise WireError("the weights of all workers are zero")
        cuts = [part.deal.up_nbytes[me] for part in self.dealt]
        bodies = [body.split(cuts) if len(cuts) > 1 else (body,) for body, _ in opened]
        means, kept = [], []
        for nth, part in enumerate(self.dealt):
            slots, olds = self._slots(part)
            if cuts[nth]:
                mine = [Payload(pieces[nth].clone() if len(cuts) > 1 else pieces[nth]) for pieces in bodies]
                how = Messages(mine, self.like[part.here], self.round, self.outgoing.mean, weights, ids)
                received = part.deal.receive(me, how)
                received.add_to(slots)
            encoded = part.deal.encode_mean(me, slots, round=self.round)
            if not encoded.finite or not all_finite(slots, LARGEST**2):
                self._overflowed = True
            encoded.take_from(slots)
            kept += [(old, new) for old, new in zip(olds, slots, strict=True) if old is not None]
            means.append(encoded.payload.to_bytes())
        self.next_owed = kept
        return means

    def _slots(self, part: _Dealt) -> tuple[list[Tensor], list[Tensor | None]]:
        """Copies of what this owner left out before, zeros where it keeps nothing, and what they are copies of."""
        shapes, device = part.deal.shares[self.peers.rank].slot_shapes(), self.posted.data.device
        olds = [
            old if old is not None and tuple(old.shape) == s else None
            for old, s in zip(self.owed[part.here], shapes, strict=True)
        ]
        news = [
            torch.zeros(shape, device=device) if old is None else old * self.settings.kept
            for old, shape in zip(olds, shapes, strict=True)
        ]
        return news, olds

    def _nothing(self) -> list[bytes]:
        """A mean of zeros, of a share that could not be read."""
        me = self.peers.rank
        empty = [[torch.zeros(shape) for shape in part.deal.shares[me].slot_shapes()] for part in self.dealt]
        found = [part.deal.encode_mean(me, slots, round=self.round) for part, slots in zip(self.dealt, empty, strict=True)]
        return [encoded.payload.to_bytes() for encoded in found]

    def _send_back(self, means: list[bytes]) -> list[Payload]:
        """Send this worker's share to all, and get theirs."""
        raw = self._framed(memoryview(b"".join(means)), self.peers.rank, _ALL)
        framed = Payload.of_bytes(raw).data.to(self.posted.data.device)
        message = Payload(framed, purpose="back", due=tuple(map(sent_nbytes, self._back_nbytes)))
        return self.link.post(message, "spread").wait()

    def _read_means(self, payloads: list[Payload]) -> list[Received]:
        """The means of all owners, by each chain; where several workers of this process get them, decoded once for all."""
        return once(payloads, self._seed, lambda: self._decoded(payloads))

    def _decoded(self, payloads: list[Payload]) -> list[Received]:
        kind = DecodedOnce if isinstance(payloads, Delivery) else Received
        cuts: list[list[Payload]] = [[] for _ in self.dealt]
        for owner, (payload, nbytes) in enumerate(zip(payloads, self._back_nbytes, strict=True)):
            body = self._unframed(payload, owner, _ALL, nbytes, weighted=False)[0] if nbytes else payload.raw()
            pieces = body.split([part.deal.back_nbytes[owner] for part in self.dealt])
            for some, piece in zip(cuts, pieces, strict=True):
                some.append(Payload(piece.clone() if len(cuts) > 1 else piece))
        return [
            part.deal.read(some, self.like[part.here], round=self.round, kind=kind)
            for part, some in zip(self.dealt, cuts, strict=True)
        ]

    def _vote(self, error: WireError | None, *, overflow: bool) -> None:
        """Tell each other whether the round is valid and could be read: what one worker could not, no worker may apply."""
        if (failed := self.any_shard(error is not None)) and error is None:
            error = WireError("another shard of this worker could not read its messages")
        too_large = self.any_shard(overflow or self._overflowed)
        said = _UNREAD * failed | _INVALID * self.invalid | _OVERFLOW * too_large
        ballot = Payload.of_bytes(bytes([said]), purpose="vote", fixed=True)
        told = self.link.post(replace(ballot, due=(1,) * self.peers.size), "spread").wait()  # one hop: a gather goes round
        votes = once(told, "votes", lambda: {p.sender: p.to_bytes()[0] for p in told})
        culprits = [rank for rank, vote in votes.items() if rank is not None and vote & _INVALID]
        if culprits or any(vote & _OVERFLOW for vote in votes.values()):
            raise refusal(self.round, self.peers, culprits or [-1])
        unread = [rank for rank, vote in votes.items() if vote & _UNREAD]
        if unread:
            raise damaged(self.round, unread, len(votes), error)

    def commit(self) -> None:
        """Keep what this owner has left out; told when all workers are about to apply the round."""
        for old, new in self.next_owed:
            old.copy_(new)
