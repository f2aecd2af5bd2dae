"""What all workers must agree on: the gates before the first round and between rounds, and a common start.

* `handshake`: before the first round the workers compare what they were started with and refuse a difference by its name;
* `tell_all`: worker 0 tells the others something, such as figures;
* `broadcast`: all workers begin with worker 0's weights;
* `compare_replicas`: every few rounds a hash of what must be bit-equal is compared;
* `drift`: how far replicas have gone apart, 0 where they are bit-equal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thinwire.codecs.dense import Dense
from thinwire.codecs.shared_seed import numbers_on
from thinwire.codecs.wire import VERSION
from thinwire.core.exchange import AnyShard, alone, average
from thinwire.errors import Diverged, FingerprintMismatch, WireError
from thinwire.links.base import Link
from thinwire.payload import LONGEST, Payload, describe
from thinwire.sharding.shards import Shards, local

log = logging.getLogger("thinwire")

J = TypeVar("J")
V = TypeVar("V")

# --- The handshake -----------------------------------------------------------------------------------------------------


def handshake(link: Link, fingerprint: Mapping[str, object], *, any_shard: AnyShard = alone, buffers: int = 0) -> None:
    """Refuse to begin unless all workers were started with the same settings.

    It is one message of 32 bytes where all is well: 24 of the fingerprint's digest and 8 of a hash of the buffers.

    Args:
        link: the wire.
        fingerprint: names and JSON-able values of all that must agree.
        any_shard: see `Options`.
        buffers: `hash_tensors` of buffers that should start alike on all workers; a difference is a warning on all of them.

    Raises:
        FingerprintMismatch: on every worker, naming what differs, where, and both values.
        WireError: on every worker, naming the one whose message makes no sense.
    """
    told = {"wire version": VERSION, **fingerprint}
    digest = hashlib.sha256(json.dumps(told, default=str, sort_keys=True).encode()).digest()[:_DIGEST]
    mine = digest + buffers.to_bytes(8, "little", signed=True)
    hashes = [p.to_bytes() for p in link.all_gather(Payload.of_bytes(mine, purpose="handshake", fixed=True))]
    odd = [rank for rank, theirs in enumerate(hashes) if theirs[:_DIGEST] != hashes[0][:_DIGEST]]
    if not any_shard(bool(odd)):
        _warn_of_buffers(hashes)
        return
    if not odd:
        raise FingerprintMismatch("workers were started differently: another shard of this worker says in what")
    text = json.dumps(_condensed(told), default=str).encode()
    if len(text) > LONGEST["handshake"]:
        text = json.dumps({"settings": f"{len(text)} bytes, too long to tell, with hash {_sha(text)}"}).encode()
    texts = link.all_gather(Payload.of_bytes(text, purpose="handshake"))
    first, *others = [read_json(t, rank, dict) for rank, t in enumerate(texts)]
    for rank, other in enumerate(others, start=1):
        found = _differences(first, other, rank)
        try:
            differences, rest = [*itertools.islice(found, 3)], sum(1 for _ in found)
        except RecursionError:
            raise WireError("settings that are nested too deep", rank=rank) from None
        if differences:
            more = f" (and {rest} more)" if rest else ""
            hint = next((how for what, how in _HINTS.items() if what in differences[0]), "")
            raise FingerprintMismatch(f"workers were started differently: {'; '.join(differences)}{more}{hint}")
    raise WireError("its settings are said to differ from rank 0's, but are the same", rank=odd[0])


_DIGEST = 24  # bytes of a digest that travel

STARTING, FROZEN = "starting value of ", "frozen parameters"  # names of hashes in a fingerprint
_HINTS = {
    STARTING: ": seed all workers alike before the model is built, or call thinwire.broadcast(link, model)",
    FROZEN: ": load the same base model on all workers, or call thinwire.broadcast(link, model)",
}


def _warn_of_buffers(hashes: Sequence[bytes]) -> None:
    odd = [f"rank {rank}" for rank, theirs in enumerate(hashes) if theirs[_DIGEST:] != hashes[0][_DIGEST:]]
    if odd:
        log.warning(
            "the buffers (those given as buffers=, such as BatchNorm's running statistics) of %s start with other values than "
            "rank 0's: call thinwire.broadcast(link, model) on all workers before the optimizer is made",
            _short(", ".join(odd)),
        )


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def _differences(first: object, other: object, rank: int, name: str = "") -> Iterator[str]:
    """What differs, as sentences, one per leaf."""
    if isinstance(first, dict) and isinstance(other, dict):
        for k in [*first, *(k for k in other if k not in first)]:  # in the order of telling: the method before its details
            yield from _differences(first.get(k, _MISSING), other.get(k, _MISSING), rank, f"{name}.{k}" if name else k)
    elif isinstance(first, list) and isinstance(other, list) and len(first) == len(other):
        for i, (a, b) in enumerate(zip(first, other, strict=True)):
            yield from _differences(a, b, rank, f"{name}[{i}]")
    elif isinstance(first, list) and isinstance(other, list):
        yield f"{_short(name)} has {len(first)} entries on rank 0 and {len(other)} on rank {rank}"
    # As text, so that 1 and True are two things.
    elif json.dumps(first, default=repr) != json.dumps(other, default=repr):
        if name.startswith((STARTING, FROZEN)):  # of them only a hash is known
            name = f"the {name} {'differ: their' if name.startswith(FROZEN) else 'differs: its'} hash"
        yield f"{_short(name)} is {_short(repr(first))} on rank 0 and {_short(repr(other))} on rank {rank}"


def _short(text: str, limit: int = 100) -> str:
    """A text that came from another worker, fit for an error message."""
    cut = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(c if c.isprintable() else "?" for c in cut)


def _condensed(value: object, run: int = 1000) -> object:
    """A fingerprint without what would be too long to tell: of long lists and texts, the length and hashes of the parts."""
    if isinstance(value, Mapping):
        return {k: _condensed(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and len(value) > run:
        parts = [value[i : i + run] for i in range(0, len(value), run)]
        hashes = {f"hash of entries from {i * run}": _sha(json.dumps(p, default=str).encode()) for i, p in enumerate(parts)}
        return {"number of entries": len(value), **hashes}
    if isinstance(value, list | tuple):
        return [_condensed(v) for v in value]
    if isinstance(value, str) and len(value) > run:
        return f"{value[:80]}... ({len(value)} characters with hash {_sha(value.encode())})"
    return value


def _sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


# --- What other workers say --------------------------------------------------------------------------------------------


def read_json(message: Payload, rank: int, kind: type[J] = object) -> J:
    """What another worker says in JSON; whatever is wrong with it is a `WireError` that names the worker.

    Args:
        message: the text.
        rank: whose it is.
        kind: what it must be.
    """
    try:
        told = json.loads(message.to_bytes().decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as cause:
        raise WireError(f"not the JSON text that it should be: {_short(str(cause))}", rank=rank) from None
    if not isinstance(told, kind):
        raise WireError(f"a JSON {type(told).__name__}, where a {kind.__name__} should be", rank=rank)
    return told


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) != len(pairs):
        raise ValueError("a key that stands there twice")
    return told


def read_number(message: Payload, rank: int) -> float:
    """A float64 that another worker says, which must be finite and not negative."""
    number = float(message.data.cpu().clone().view(torch.float64))
    if not 0 <= number < math.inf:
        raise WireError(f"the number {number!r}, where one that is finite and not negative should be", rank=rank)
    return number


def say_number(number: float, purpose: str) -> Payload:
    """The message that `read_number` reads."""
    return Payload(torch.tensor([number], dtype=torch.float64).view(torch.uint8), purpose=purpose)


def tell_all(link: Link, said: dict[str, V], kind: type[V]) -> dict[str, V]:
    """What worker 0 says, on every worker; what the others say is not heard.

    Args:
        link: the wire.
        said: by worker 0; at most 64 KiB as JSON.
        kind: of the values; whole numbers are floats too.

    Raises:
        WireError: on every worker, when it is not that.
    """
    message = Payload.of_bytes(json.dumps(said).encode(), purpose="word of worker 0")
    told: dict[str, V] = read_json(link.all_gather(message)[0], 0, dict)
    for name, value in told.items():
        if not isinstance(value, kind) and not (kind is float and type(value) is int):
            raise WireError(f"{_short(name)} is {_short(repr(value))}, where a {kind.__name__} should be", rank=0)
    return told


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
    told = link.all_gather(say_number(apart, "drift"))
    squares = [read_number(p, rank) for rank, p in enumerate(told)]
    return math.sqrt(sum(squares) / len(squares) / norm) if norm else 0.0


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of a model's BatchNorm layers: what `buffers=` of an algorithm is for."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]


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
            total += int(chunk.to(torch.int64).mul_(numbers_on(chunk.device, place, chunk.numel()) | 1).sum())
            place += chunk.numel()
        place += 1
    return (total + 2**63) % 2**64 - 2**63


def show_hash(tensors: Sequence[Tensor]) -> str:
    """`hash_tensors` for people; only the kinds of tensors whose bits torch does not show, such as quantized ones."""
    try:
        return f"{hash_tensors(tensors) % 2**64:016x}"
    except (RuntimeError, TypeError):
        return ", ".join(describe(t) for t in tensors)
