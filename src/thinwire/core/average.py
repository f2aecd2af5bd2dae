"""Exchanges by hand, without an optimizer: `average`, `share` for state in the domain of a transform, `swap` in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from torch import Tensor

from thinwire.codecs.aggregate import PLAIN, Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.chain import Chain, PerTensor
from thinwire.core.exchange import AnyShard, post
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.links.base import Link, pair_of


class Options(TypedDict, total=False):
    """Keyword arguments of `average`, `share` and `swap` that belong to the exchange: see `Exchange` and `Outgoing`."""

    round: int
    any_shard: AnyShard
    purpose: str


def average(
    link: Link,
    codec: Codec,
    tensors: Sequence[Tensor],
    *,
    mean: Mean | None = None,
    weight: float | None = None,
    want_sent: bool = False,
    invalid: bool | None = None,
    **options: Unpack[Options],
) -> tuple[list[Tensor], list[Tensor]]:
    """Mean over all workers of what each one's message decodes to. ONE message, whatever the number of tensors.

    Args:
        link: the wire.
        codec: what is sent of the tensors.
        tensors: this worker's contribution: any shapes, on one device; not changed.
        mean: see `Outgoing`, as are the next three.
        weight: of this worker.
        want_sent: also return what this worker sent.
        invalid: refuse the round in this worker's name.
        **options: see `Options`.

    Returns:
        The mean, bit-identical on every worker, and what this worker sent (an empty list unless asked for).

    Raises:
        NonFiniteRound: on every worker, when any contribution (or the sum) is not finite.
        WireError: a message that is not what it should be.
    """
    out = Outgoing(list(tensors), codec, mean or PLAIN, weight, want_sent, invalid)
    arrived = post(link, out, **options).wait()
    return arrived.mean, arrived.sent


def share(
    link: Link,
    chain: Codec,
    slots: Sequence[Tensor],
    like: Sequence[Tensor],
    *,
    mean: Mean | None = None,
    weight: float | None = None,
    decay: PerTensor = 1.0,
    scale: PerTensor | None = None,
    invalid: bool | None = None,
    **options: Unpack[Options],
) -> Arrived:
    """Exchange what a chain keeps of slots, without a copy of the model: `average` for state in the domain of a transform.

    Nothing is applied: after `link.commit()` take what was sent off the slots, and go through the mean piece by piece.

    Args:
        link: the wire.
        chain: what is sent of the slots.
        slots: float32, of the shapes that `chain.slot_shapes(like)` tells.
        like: tensors of the shapes that the slots stand for.
        mean: see `Outgoing`, as are the next four.
        weight: of this worker.
        decay: of what is accumulated first.
        scale: of what is accumulated first.
        invalid: refuse the round in this worker's name.
        **options: see `Options`.

    Raises:
        NonFiniteRound: on every worker, when any contribution (or the sum) is not finite.
        WireError: a message that is not what it should be.
    """
    out = Outgoing(list(like), Chain.of(chain), mean or PLAIN, weight, False, invalid, list(slots), decay, scale)
    return post(link, out, **options).wait()


def swap(
    link: Link,
    codec: Codec,
    tensors: Sequence[Tensor],
    partner: int | None,
    *,
    invalid: bool = False,
    **options: Unpack[Options],
) -> tuple[list[Tensor], list[Tensor]]:
    """Exchange ONE message with one other worker; the rest of the workers are not waited for.

    Args:
        link: the wire.
        codec: what is sent of the tensors; one whose messages are gathered, such as `Dense(gather=True)`.
        tensors: this worker's contribution: any shapes, on one device; not changed.
        partner: the rank to exchange with, which must name this one; None for a worker that has no partner.
        invalid: refuse the round in this worker's name; the two of a pair refuse together.
        **options: see `Options`.

    Returns:
        What this worker's message decodes to and what the partner's does; without a partner, the first in both places. They may
        be views into the messages: read them, do not write to them.

    Raises:
        NonFiniteRound: on both members of the pair, when the contribution of either is not finite.
        WireError: a message that is not what it should be.
    """
    out = Outgoing(list(tensors), codec, invalid=invalid or None, pair=pair_of(link.peers().rank, partner))
    arrived = post(link, out, **options).wait()
    return arrived.mine, arrived.theirs


def message_nbytes(link: Link, codec: Codec, tensors: Sequence[Tensor], *, weighted: bool = False) -> int:
    """Length in bytes of the message that `average` would send, with what it adds to tell an invalid contribution."""
    return Outgoing(list(tensors), codec, weight=1.0 if weighted else None).nbytes(link.peers().size)
