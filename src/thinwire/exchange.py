"""The one place where codec meets link: `average()`, and the gates that every exchange passes.

Three gates:

* `handshake`: before the first round the workers compare what they were started with and refuse a difference by its name;
* the finite gate inside `average`: a contribution with NaN or Inf is found before anything is averaged, and the round is
  refused on ALL workers with the culprit named, so that no worker's state has changed;
* `compare_replicas`: every few rounds a hash of what must be bit-equal is compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from thinwire.codecs.base import Codec
from thinwire.errors import Diverged, FingerprintMismatch, NonFiniteRound
from thinwire.links.base import Link, Ticket
from thinwire.links.shards import local
from thinwire.payload import Payload, all_finite

WIRE_VERSION = 1

# Asked with "is something wrong here?": whether it is so anywhere among the processes that share one worker's model.
AnyShard = Callable[[bool], bool]


def _alone(flag: bool) -> bool:
    return flag


class Options(TypedDict, total=False):
    """Keyword arguments of `average` and `post_average`.

    Attributes:
        round: number of the round, for codecs that change with it.
        want_sent: also return what the others decode of this worker's own message (for error feedback).
        withdraw: this worker knows that it has nothing good to give: refuse the round on all workers in its name.
        any_shard: where the worker's model is sharded over processes, tells whether any of them raised its flag, so that all
            shards of a worker refuse a round together.
    """

    round: int
    want_sent: bool
    withdraw: bool
    any_shard: AnyShard


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
) -> PendingAverage:
    """Start an `average`; compute while it is under way and call `wait()` on the result later."""
    tensors = list(tensors)
    if codec.linear:
        payload, sent = _with_status_vector(link, codec, tensors, round, want_sent, withdraw, any_shard)
    else:  # a codec that is not linear might turn a NaN into something finite: look at what goes in
        payload, sent = _with_status_byte(codec, tensors, round, want_sent, withdraw or not all_finite(tensors), any_shard)
    ticket = link.post(payload, "mean" if codec.linear else "gather")
    like = [torch.empty_like(t, device="meta") for t in tensors]  # shapes only: the tensors may change meanwhile
    return PendingAverage(link, codec, like, round, ticket, sent, any_shard)


def message_nbytes(link: Link, codec: Codec, tensors: Sequence[Tensor]) -> int:
    """Length in bytes of the message that `average` would send, with what it adds to tell a bad contribution."""
    return codec.nbytes([*tensors, _status(link, "meta")]) if codec.linear else codec.nbytes(tensors) + 1


@dataclass
class PendingAverage:
    """An average under way."""

    link: Link
    codec: Codec
    like: list[Tensor]
    round: int
    ticket: Ticket
    sent: list[Tensor]
    any_shard: AnyShard

    def wait(self) -> tuple[list[Tensor], list[Tensor]]:
        """The mean and what was sent; raises `NonFiniteRound` on every worker alike."""
        payloads = self.ticket.wait()
        mean, culprits = self._mean_on_the_wire(payloads[0]) if self.codec.linear else self._mean_of_all(payloads)
        # The decision must be the same on all shards of all workers, or half a model would take the step.
        if self.any_shard(bool(culprits)):
            names = ", ".join(f"rank {r}" for r in culprits if r >= 0)
            reason = f"NaN or Inf in the contribution of {names}" if names else "the sum of all contributions overflowed"
            raise NonFiniteRound(
                f"round {self.round} refused on all {self.link.size} workers: {reason}",
                culprits=[r for r in culprits if r >= 0],
            )
        return mean, self.sent

    def _mean_on_the_wire(self, payload: Payload) -> tuple[list[Tensor], list[int]]:
        *mean, status = self.codec.decode(payload, [*self.like, _status(self.link, "meta")], round=self.round)
        culprits = status.nonzero().flatten().tolist()
        if not culprits and not payload.finite:
            culprits = [-1]  # every contribution was finite, their sum in the wire's dtype is not
        return mean, culprits

    def _mean_of_all(self, payloads: list[Payload]) -> tuple[list[Tensor], list[int]]:
        total: list[Tensor] = []
        culprits = []
        for rank, payload in enumerate(payloads):
            body = payload.like(payload.data[: payload.data.numel() - 1])
            values = self.codec.decode(body, self.like, round=self.round)
            if bool(payload.data[-1]) or not all_finite(values):
                culprits.append(rank)
            elif not total:
                total = [v.clone() for v in values]
            else:
                for t, v in zip(total, values, strict=True):
                    t.add_(v)
        mean = [t.div_(self.link.size) for t in total]
        if not culprits and not all_finite(mean):
            culprits = [-1]
        return mean, culprits


def _status(link: Link, device: torch.device | str) -> Tensor:
    """One number per worker: 0 where its contribution was finite."""
    return torch.zeros(link.size, device=device)


def _with_status_vector(
    link: Link, codec: Codec, tensors: list[Tensor], round: int, want_sent: bool, bad: bool, any_shard: AnyShard
) -> tuple[Payload, list[Tensor]]:
    """A message that may be averaged, with one status number per worker behind the tensors.

    A worker that finds its own message not finite sends zeros and raises its number: the mean then tells everybody who it
    was, without a second round trip.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    status = _status(link, device)
    payload = codec.encode([*tensors, status], round=round)
    if any_shard(bad or not payload.finite):
        status[link.rank] = 1
        payload = codec.encode([*(torch.zeros_like(t) for t in tensors), status], round=round)
    # Decoded from a copy: the link reduces into the payload's own buffer.
    sent = codec.decode(payload.like(payload.data.clone()), [*tensors, status], round=round)[:-1] if want_sent else []
    return payload, sent


def _with_status_byte(
    codec: Codec, tensors: list[Tensor], round: int, want_sent: bool, bad: bool, any_shard: AnyShard
) -> tuple[Payload, list[Tensor]]:
    """A message that is gathered, with one status byte behind it."""
    body = codec.encode(tensors, round=round)
    sent = codec.decode(body, tensors, round=round)
    status = torch.tensor([any_shard(bad or not all_finite(sent))], dtype=torch.uint8, device=body.data.device)
    return body.like(torch.cat([body.data, status])), sent if want_sent else []


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
    told = {"wire version": WIRE_VERSION, **fingerprint}
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
