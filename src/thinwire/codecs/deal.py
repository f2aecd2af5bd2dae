"""Deal: the blocks of a round are dealt to owners, one for each worker.

An owner reads what all workers sent of its blocks, and its mean goes to all workers as a message by a codec of its own.

The n blocks of a tensor are dealt to M owners in ranges of n / M blocks; where that leaves a rest, those of the next tensor
begin with the owner at which it ended. So each owner has as much of every tensor as the others, to a block, also where only
some are sent. It does not depend on which other tensors are in the message: what an owner keeps of one fits all rounds.

For its owner a share is a message of tensors of its own: of each tensor its blocks one below the other, [n h, w], or its
values [n] where the tensor is sent whole. docs/wire-format.md describes what is sent.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.alike import Alike, Range, alike
from thinwire.codecs.base import Messages
from thinwire.codecs.bits import Bytes
from thinwire.codecs.chain import Chain
from thinwire.codecs.decoder import Received
from thinwire.codecs.encoder import Chosen, Encoded, encode_share
from thinwire.codecs.layout import Grid, Group, Layout, Shape
from thinwire.codecs.message_plan import Kept, Message, Plan, narrow, plan_for, plan_of, shapes_of
from thinwire.codecs.stages import DENSE_GROUP, Floats
from thinwire.errors import ConfigError, WireError
from thinwire.payload import Payload


@dataclass(frozen=True)
class Share:
    """What one owner has of a message.

    Attributes:
        groups: numbers of the groups that it has blocks of.
        rows: ranges of blocks of each of them.
        whole: ranges of the values of all tensors that are sent whole.
        layout: of its blocks alone; the shape of a tensor that it has nothing of begins with 0.
        up: the plan of what workers send of it.
        back: the plan of its mean.
    """

    groups: tuple[int, ...]
    rows: tuple[tuple[Range, ...], ...]
    whole: tuple[Range, ...]
    layout: Layout
    up: Plan
    back: Plan

    def slot_shapes(self) -> tuple[Shape, ...]:
        """The shape of each tensor as its owner keeps it, in the domain of the transform."""
        return self.layout.shapes


@dataclass(frozen=True)
class Deal:
    """The shares of all owners in messages of given tensors.

    Attributes:
        chain: what workers send.
        back: what owners send.
        plan: of a message that is not dealt, of which the values are the same.
        shares: of the owners, in rank order.
        entries: of each tensor, who has which of its entries: owner, first entry and the one after the last, with blocks one
            after the other.
    """

    chain: Chain
    back: Chain
    plan: Plan
    shares: tuple[Share, ...]
    entries: tuple[tuple[tuple[int, int, int], ...], ...]

    @functools.cached_property
    def up_nbytes(self) -> tuple[int, ...]:
        """Length in bytes of what a worker sends of each share."""
        return tuple(share.up.nbytes for share in self.shares)

    @functools.cached_property
    def back_nbytes(self) -> tuple[int, ...]:
        """Length in bytes of each owner's mean."""
        return tuple(share.back.nbytes for share in self.shares)

    @functools.cached_property
    def _up(self) -> tuple[Alike, ...]:
        return alike([(share.up, share.groups, share.rows, share.whole) for share in self.shares])

    @functools.cached_property
    def _back(self) -> tuple[Alike, ...]:
        return alike([(share.back, share.groups, share.rows, share.whole) for share in self.shares])

    def write(self, chosen: list[Chosen], whole: Floats) -> tuple[list[Bytes], list[Floats], Floats]:
        """The messages for all owners, one after the other: see `encoder.Write`."""
        out = np.empty(sum(self.up_nbytes), np.uint8)
        read, sent = [np.empty_like(values) for _, values in chosen], np.empty_like(whole)
        for some in self._up:
            indices, values = (None, whole) if some.number < 0 else chosen[some.number]
            some.write(out, self.chain.values, indices, values, sent if some.number < 0 else read[some.number])
        return [out], read, sent

    def receive(self, owner: int, messages: Messages) -> ShareReceived:
        """What all workers sent of an owner's share, checked from end to end."""
        return ShareReceived(self.chain, self.shares[owner].up, messages)

    def encode_mean(self, owner: int, slots: Sequence[Tensor], *, round: int) -> Encoded:
        """The message of an owner's share, which is in slots of the shapes that `Share.slot_shapes` tells."""
        return encode_share(self.back, slots, self.shares[owner].back, round=round)

    def read(
        self, payloads: Sequence[Payload], like: Sequence[Tensor], *, round: int, kind: type[Received] = Received
    ) -> Received:
        """The means of all owners, checked from end to end, as one message.

        Args:
            payloads: of the owners in rank order.
            like: tensors of the shapes of the round.
            round: its number.
            kind: of what is returned.

        Raises:
            WireError: naming the owner whose message is not sound.
        """
        plan = plan_for(self.back, self.plan.layout)
        kept = [Kept(*_room(self.back, group)) for group in plan.layout.groups]
        whole = np.empty(plan.layout.dense_numel, np.float32)
        raws = [payload.raw().cpu().numpy() for payload in payloads]
        try:
            for owner, (raw, nbytes) in enumerate(zip(raws, self.back_nbytes, strict=True)):
                if len(raw) != nbytes:
                    raise WireError(f"a mean of {len(raw)} bytes, where {nbytes} are due", rank=owner)
            together = np.concatenate(raws)
            for some in self._back:
                room = Kept(None, whole) if some.number < 0 else kept[some.number]
                some.read(together, self.back.values, room.indices, room.values)
        except WireError:
            for owner, (share, payload) in enumerate(zip(self.shares, payloads, strict=True)):
                ShareReceived(self.back, share.back, Messages([payload], like, round, ids=[owner]))  # raises in its name
            raise
        device = payloads[0].data.device
        together = Message(Payload(torch.empty(0, dtype=torch.uint8, device=device)), True, kept, torch.from_numpy(whole))
        return kind(self.back, plan, Messages([together.payload], like, round), own=(0, together))

    def take_over(self, i: int, owner: int, before: Deal, kept: Sequence[Tensor]) -> Tensor:
        """What an owner keeps of tensor i, where the blocks were dealt to other workers before.

        Args:
            i: the tensor's place in the message.
            owner: whose share.
            before: how they were dealt.
            kept: what each of the owners had kept of this tensor.
        """
        everything = torch.zeros(max((stop for _, _, stop in self.entries[i]), default=0))
        for other, start, stop in before.entries[i]:
            everything[start:stop] = kept[other].reshape(-1)
        mine = [everything[start:stop] for other, start, stop in self.entries[i] if other == owner]
        return torch.cat([*mine, torch.empty(0)]).view(self.shares[owner].slot_shapes()[i])


class ShareReceived(Received):
    """Messages of one share."""

    def _check(self) -> list[float]:
        """Read everything in one go; the messages are of one share, so they are short."""
        plan, bodies = self.plan, self._bodies
        self._read_all: dict[int, Floats] = {}
        try:
            if any(len(body) != plan.nbytes for body in bodies):
                raise WireError("a part of another length")
            together = np.stack(bodies)
            for section in (*plan.sections, *plan.whole):
                if section.code is not None and (room := self._indices[section.number]) is not None:
                    section.code.read_all(together[:, section.start : section.middle], room)
                values = self.chain.values.read_all(together[:, section.middle : section.stop], section.row)
                self._note(values)
                self._read_all[section.number] = values.reshape(len(bodies), -1)
        except WireError:
            super()._check()  # raises in somebody's name
            raise
        return [0.0] * len(bodies)

    def _weighted(self, number: int, start: int, stop: int) -> Floats:
        return self._read_all[number][:, start:stop]

    def add_to(self, slots: Sequence[Tensor]) -> None:
        """Add the mean to slots, in the domain of the transform."""
        for number, group in enumerate(self.plan.layout.groups):
            for batch in self._batches(number, group):
                place, mean = self._merge(number, group, batch)
                order = np.argsort(place, kind="stable") if not self.chain.selection.indexed else slice(None)
                place, mean = place[order], mean[order]
                ends = np.searchsorted(place, batch.starts)
                for nth, piece in enumerate(batch.pieces):
                    here, part = slice(ends[nth], ends[nth + 1]), piece.of_slot(slots[piece.grid.index])
                    at = torch.from_numpy(place[here] - batch.starts[nth]).to(part.device)
                    part.view(-1).index_add_(0, at, torch.from_numpy(mean[here]).to(part.device))  # no place twice
        for i, values in self.dense():
            slots[i].add_(values)


def _room(chain: Chain, group: Group) -> tuple[np.ndarray | None, Floats]:
    shape = (group.blocks, chain.selection.count(group.L))
    return np.empty(shape, narrow(group.L)) if chain.selection.indexed else None, np.empty(shape, np.float32)


def check_dealt(chain: Chain, back: Chain) -> None:
    """Raise a `ConfigError` for codecs whose messages cannot be dealt to owners."""
    for one in (chain, back):
        if not (one.selection.indexed or one.selection.everything or one.selection.alike):
            raise ConfigError(f"owners cannot average {one!r}: which entries it sends depends on the numbers of the blocks")
        if one.transform.changes:
            raise ConfigError(f"owners cannot keep what {one!r} leaves out: its transform is another one in each round")
    if chain.selection.alike and back.selection.alike and back.selection != chain.selection:
        raise ConfigError(
            f"what owners send back must be the entries that they get, got {back!r} for {chain!r}: give the same k"
        )
    if back.transform != chain.transform:
        raise ConfigError(f"what owners send back must have the transform of what they get, got {back!r} for {chain!r}")


def deal_of(chain: Chain, back: Chain, model: Sequence[Tensor], which: Sequence[int], workers: int) -> Deal:
    """The shares of messages of some of a model's tensors.

    Args:
        chain: what workers send.
        back: what owners send.
        model: tensors of the shapes of the model.
        which: numbers of those in the message.
        workers: how many there are.
    """
    return _deal(chain, back, shapes_of(model), tuple(which), workers)


@functools.lru_cache(maxsize=64)
def _first_owners(chain: Chain, shapes: tuple[Shape, ...]) -> tuple[int, ...]:
    """The owner that each tensor's blocks begin with, modulo the number of workers: how many blocks come before."""
    layout, blocks = plan_of(chain, shapes).layout, [0] * len(shapes)
    for grid in (grid for group in layout.groups for grid in group.grids):
        blocks[grid.index] = grid.blocks
    for i in layout.dense:
        blocks[i] = -(-math.prod(shapes[i]) // DENSE_GROUP)
    return (0, *itertools.accumulate(blocks))


@functools.lru_cache(maxsize=64)
def _deal(chain: Chain, back: Chain, model: tuple[Shape, ...], which: tuple[int, ...], workers: int) -> Deal:
    check_dealt(chain, back)
    shapes, before = tuple(model[i] for i in which), _first_owners(chain.split(1), model)
    plan, first = plan_of(chain.split(1), shapes), [before[i] for i in which]
    rows: list[dict[int, list[Range]]] = [{} for _ in range(workers)]
    whole: list[list[Range]] = [[] for _ in range(workers)]
    entries: list[list[tuple[int, int, int]]] = [[] for _ in shapes]
    mine: list[list[Shape]] = [[(0,)] * len(shapes) for _ in range(workers)]
    for number, group in enumerate(plan.layout.groups):
        for grid in group.grids:
            for owner, a, b in _ranges(grid.blocks, first[grid.index], workers):
                rows[owner].setdefault(number, []).append((grid.first + a, grid.first + b))
                mine[owner][grid.index] = ((b - a) * group.h, group.w)
                entries[grid.index].append((owner, a * group.L, b * group.L))
    start = 0
    for i in plan.layout.dense:
        n = math.prod(shapes[i])
        for owner, a, b in _ranges(-(-n // DENSE_GROUP), first[i], workers):
            a, b = a * DENSE_GROUP, min(b * DENSE_GROUP, n)
            whole[owner].append((start + a, start + b))
            mine[owner][i] = (b - a,)
            entries[i].append((owner, a, b))
        start += n
    shares = []
    for has, values, own in zip(rows, whole, mine, strict=True):
        layout = Layout(tuple(own), tuple(_cut(plan.layout.groups[n], own) for n in has), _dense(plan.layout, own))
        plans = (plan_for(one, layout, headers=False) for one in (chain.split(1), back.split(1)))
        shares.append(Share(tuple(has), tuple(map(tuple, has.values())), tuple(values), layout, *plans))
    return Deal(chain.split(1), back.split(1), plan, tuple(shares), tuple(map(tuple, entries)))


def _ranges(blocks: int, first: int, workers: int) -> Iterator[tuple[int, int, int]]:
    """Who has which blocks of a tensor: owner, first block and the one after the last."""
    each, rest = divmod(blocks, workers)
    at = 0
    for nth in range(min(blocks, workers)):
        size = each + (nth < rest)
        yield (first + nth) % workers, at, at + size
        at += size


def _cut(group: Group, shapes: Sequence[Shape]) -> Group:
    """The blocks of a group that an owner has, those of each tensor one below the other."""
    grids, first = [], 0
    for grid in group.grids:
        if blocks := shapes[grid.index][0] // group.h:
            grids.append(Grid(grid.index, shapes[grid.index], group.h, group.w, first))
            first += blocks
    return Group(group.h, group.w, tuple(grids))


def _dense(layout: Layout, shapes: Sequence[Shape]) -> tuple[int, ...]:
    return tuple(i for i in layout.dense if shapes[i][0])
