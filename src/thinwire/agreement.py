"""What all workers must agree on: the gates before the first round and between rounds, and a common start.

* `handshake`: before the first round the workers compare what they were started with and refuse a difference by its name;
* `broadcast`: all workers begin with worker 0's weights;
* `compare_replicas`: every few rounds a hash of what must be bit-equal is compared;
* `drift`: how far replicas have gone apart, 0 where they are bit-equal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from thinwire.codecs.dense import Dense
from thinwire.codecs.wire import VERSION
from thinwire.errors import Diverged, FingerprintMismatch
from thinwire.exchange import AnyShard, alone, average
from thinwire.links.base import Link
from thinwire.links.shards import Shards, local
from thinwire.payload import Payload, describe

# --- The handshake -----------------------------------------------------------------------------------------------------


def handshake(link: Link, fingerprint: Mapping[str, object], *, any_shard: AnyShard = alone) -> None:
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


def compare_replicas(link: Link, hashes: Mapping[str, int], *, round: int, any_shard: AnyShard = alone) -> None:
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


def drift(link: Link, tensors: Sequence[Tensor], *, shards: Shards | None = None) -> float:
    """How far the workers' copies are apart: the root mean square distance from their mean, relative to the mean's norm.

    Exactly 0 where all are bit-equal, which takes one hash of 8 bytes to find; else a dense average is made of them.

    Args:
        link: the wire.
        tensors: this worker's copy, or its shards of it.
        shards: the processes that share the copy.
    """
    shards = shards or Shards([])
    mine = torch.tensor([hash_tensors(tensors)])
    hashes = link.all_gather(Payload(mine.view(torch.uint8), purpose="drift"))
    if not shards.any(len({h.to_bytes() for h in hashes}) > 1):
        return 0.0
    mean, _ = average(link, Dense(), tensors, any_shard=shards.any, purpose="drift")
    pairs = list(zip(tensors, mean, strict=True))
    apart, norm = shards.totals(
        [
            sum(float((t.detach().float() - m).square().sum(dtype=torch.float64)) for t, m in pairs),
            sum(float(m.square().sum(dtype=torch.float64)) for m in mean),
        ]
    )
    told = link.all_gather(Payload(torch.tensor([apart], dtype=torch.float64).view(torch.uint8), purpose="drift"))
    squares = [float(p.data.cpu().view(torch.float64)) for p in told]
    return math.sqrt(sum(squares) / len(squares) / norm) if norm else 0.0


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of a model's BatchNorm layers: what `buffers=` of an algorithm is for."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


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
