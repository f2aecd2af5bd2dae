"""Replicas: what must be bit-equal on all workers is compared, measured, and given to a worker that has lost it.

* `compare_replicas`: every few rounds a hash of what must be bit-equal is compared;
* `resync`: a worker whose replicated state holds NaN or Inf takes it from the others;
* `broadcast`: all workers begin with worker 0's weights;
* `drift`: how far copies have gone apart, 0 where they are bit-equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from thinwire.codecs.dense import Dense
from thinwire.core.average import average
from thinwire.core.buffers import remember_model
from thinwire.core.exchange import AnyShard, alone
from thinwire.core.gates import FROZEN, handshake, read_number, say_number
from thinwire.core.hashing import hash_tensors, show_hash
from thinwire.errors import Diverged
from thinwire.links.base import Link
from thinwire.payload import Payload, all_finite, describe
from thinwire.sharding.shards import Shards, local

_BEHIND = 2  # what a worker says of its replicated state that is neither valid (1) nor invalid (0)


def compare_replicas(link: Link, hashes: Mapping[str, int], *, round: int, any_shard: AnyShard = alone) -> None:
    """Check that what must be bit-equal on all workers is.

    Args:
        link: the wire.
        hashes: `hash_tensors` of each named part of the state; all 0 for a worker that cannot say.
        round: for the message.
        any_shard: see `Exchange`.

    Raises:
        Diverged: on every worker, naming the part and the ranks that differ from the first that can say.
    """
    mine = torch.tensor(list(hashes.values()), dtype=torch.int64, device="cpu")
    gathered = link.all_gather(Payload(mine.view(torch.uint8), purpose="alarm"))
    rows = torch.stack([p.data for p in gathered]).cpu().view(torch.int64)  # [workers, parts]
    known = rows.any(1)  # zeros: a worker that is behind for a while, which is not compared
    first = int(known.int().argmax())
    differs = (rows != rows[first]) & known[:, None]
    if not any_shard(bool(differs.any())):
        return
    parts = [
        f"{name} on rank {', '.join(str(r) for r in differs[:, i].nonzero().flatten().tolist())}"
        for i, name in enumerate(hashes)
        if bool(differs[:, i].any())
    ]
    raise Diverged(f"round {round}: replicas are no longer bit-equal: {'; '.join(parts) or 'on another shard'} vs rank {first}")


def resync(
    link: Link, tensors: Sequence[Tensor], *, invalid: bool = False, behind: bool = False, any_shard: AnyShard = alone
) -> tuple[int, ...]:
    """Give replicated state to the workers that have lost it: those with NaN or Inf in it take that of the majority.

    So do those that differ from a majority, which is looked at only where a worker has NaN or Inf. One byte per worker where
    no worker has lost anything.

    Args:
        link: the wire.
        tensors: this worker's copy of what is bit-equal on all workers, or its shards of it; overwritten where it is invalid.
        invalid: whether this worker knows that its copy is invalid.
        behind: this worker has yet to apply what the others have: its copy is right, but no longer theirs.
        any_shard: see `Exchange`.

    Returns:
        The ranks that took it; empty also where no worker has anything valid to give.
    """
    said = _BEHIND if behind else int(not any_shard(invalid or not all_finite(tensors)))
    told = [p.to_bytes()[0] for p in link.all_gather(Payload.of_bytes(bytes([said]), purpose="resync", fixed=True))]
    good, bad = ([rank for rank, answer in enumerate(told) if answer == wanted] for wanted in (1, 0))
    if not good or not bad:
        return ()
    mine = torch.tensor([hash_tensors(tensors)], device="cpu")
    hashes = [p.to_bytes() for p in link.all_gather(Payload(mine.view(torch.uint8), purpose="resync"))]
    ((majority, count),) = Counter(hashes[rank] for rank in good).most_common(1)
    source = next(rank for rank in good if hashes[rank] == majority)
    if 2 * count > len(good):
        bad += [rank for rank in good if hashes[rank] != majority]
    copy_from(link, tensors, source, keep=link.peers().rank not in bad)
    return tuple(sorted(bad))


def copy_from(link: Link, tensors: Sequence[Tensor], source: int, *, keep: bool = False) -> None:
    """Overwrite tensors with those of one worker, bit for bit; all workers take part.

    Args:
        link: the wire.
        tensors: of the same shapes and dtypes on all workers.
        source: the rank whose tensors all get.
        keep: leave this worker's own as they are.
    """
    for batch in _batches(tensors):
        raw = [t.contiguous().flatten().view(torch.uint8) for t in batch]
        told = link.broadcast(replace(Payload(torch.cat(raw), purpose="broadcast"), source=source)).data
        for t, part in zip(batch, told.split([r.numel() for r in raw]), strict=True):
            if not keep:
                t.copy_(part.clone().view(t.dtype).view(t.shape))  # a copy, because its place in the message may be odd


def broadcast(link: Link, model: nn.Module, *, trainable_only: bool = False) -> None:
    """Overwrite the parameters and buffers of `model` on all workers with worker 0's, bit for bit.

    For workers that cannot be seeded alike, or of which only one has loaded the weights. Call it on all workers before the
    optimizer is made. On a sharded model every process receives its own shard.

    Args:
        link: the wire.
        model: the same architecture on all workers, which is checked first.
        trainable_only: send only parameters that are trained, and the buffers of the modules that hold one: for adapters such
            as LoRA on a base model that every worker has loaded. The frozen parameters are not sent but compared by their
            hash, as the optimizer's own handshake compares those that it was given.

    Raises:
        FingerprintMismatch: on every worker, where the architectures differ, or the frozen parameters that are not sent.
    """
    sent = [*model.parameters(), *model.buffers()]
    compared: dict[str, object] = {}
    if trainable_only:
        sent = _trained(model)
        compared[FROZEN] = show_hash([local(p.detach()) for p in model.parameters() if not p.requires_grad])
    tensors = [local(t.detach()) for t in sent]
    handshake(link, {"tensor": [describe(t) for t in tensors], **compared})
    copy_from(link, tensors, 0)
    remember_model(model)


def _trained(model: nn.Module) -> list[Tensor]:
    """The parameters that are trained, each once, and the buffers of the modules that hold one."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
        found |= {id(t): t for t in [*trained, *(module.buffers(recurse=False) if trained else ())]}
    return list(found.values())


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


def drift(link: Link, tensors: Sequence[Tensor], *, shards: Shards | None = None) -> float:
    """How far the workers' copies are apart: the root mean square distance from their mean, relative to the mean's norm.

    Exactly 0 where all are bit-equal, which takes one hash of 8 bytes to find; else a dense average is made of them.

    Args:
        link: the wire.
        tensors: this worker's copy, or its shards of it.
        shards: the processes that share the copy.
    """
    shards = shards or Shards([])
    mine = torch.tensor([hash_tensors(tensors)], device="cpu")
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
