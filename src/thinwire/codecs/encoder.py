"""Encoding: tensors, or slots in the domain of a transform, become a message.

A slot is a tensor that lives in the domain of the transform. There, taking off what was sent needs no inverse transform:
`accumulate` adds new tensors to the slots, `encode_slots` makes the message, and `Encoded.take_from` subtracts from the slots
exactly what the receivers will read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.bits import Bytes
from thinwire.codecs.decoder import Received
from thinwire.codecs.layout import BATCH, LONG, Batch, Group, Piece, Shape, in_rows, padded
from thinwire.codecs.made import Made, piece_of
from thinwire.codecs.message_plan import Kept, Message, Plan, narrow, plan_of, rows_of, shapes_of
from thinwire.codecs.stages import Floats, Stages
from thinwire.codecs.wire import PART_NBYTES, with_checksum
from thinwire.errors import ConfigError
from thinwire.kernels import Kernels, Whitening
from thinwire.payload import Payload, describe

_HOT = 1 << 17  # entries that are made, transformed and selected while they are in the second-level cache, by the C kernels

PerTensor = float | Sequence[float]  # one number for all tensors, or one for each


@dataclass(frozen=True)
class Encoded(Message):
    """A message, what receivers will read in it, and how to take that off the slots that were encoded."""

    _chain: Stages
    _plan: Plan
    _round: int

    def take_from(self, slots: Sequence[Tensor], *, scale: PerTensor = 1.0) -> None:
        """Subtract from slots what receivers read: error feedback, of selection and rounding alike.

        Args:
            slots: those that were encoded.
            scale: take off only this part of it (DeMo's alpha); one number, or one per slot.
        """
        scale = per_tensor(scale, len(slots))
        if self._chain.transform.changes:
            for i, part, sent in self.each(slots):
                part.sub_(sent, alpha=scale[i])
            return
        for group, kept in zip(self._plan.layout.groups, self.kept, strict=True):
            fast = self._chain.kernels(group.h, group.w, slots[group.grids[0].index].device)
            if fast is not None and kept.indices is not None:
                for grid in group.grids:
                    here = slice(grid.first, grid.first + grid.blocks)
                    fast.subtract(slots[grid.index], kept.indices[here], kept.values[here], scale[grid.index])
                continue
            for batch in group.batches:
                place = batch.places(_indices(self._chain, group, kept.indices, batch, self._round))
                values = kept.values[batch.start : batch.stop]
                for piece, rows, base in rows_of(batch):
                    part = piece.of_slot(slots[piece.grid.index])
                    at = torch.from_numpy(place[rows].reshape(-1) - base).to(part.device)
                    sent = torch.from_numpy(values[rows].reshape(-1)).to(part.device).mul(-scale[piece.grid.index])
                    if part.is_contiguous():
                        part.view(-1).index_add_(0, at, sent)  # no place twice, so there is no order to it
                    else:
                        part[at // part.shape[1], at % part.shape[1]] += sent
        at = 0
        for i in self._plan.layout.dense:
            n = slots[i].numel()
            slots[i].sub_(self.dense[at : at + n].view(slots[i].shape).to(slots[i].device), alpha=scale[i])
            at += n

    def each(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """Go through tensors and what receivers read in this message side by side: see `Received.each`."""
        received = Received(self._chain, self._plan, Messages([self.payload], tensors, self._round), own=(0, self))
        return received.each(tensors, *others)


class _Workspace:
    """Memory for one batch of a group, allocated once a message where it is needed; and whether the C kernels work on it."""

    def __init__(self, batches: Sequence[Batch], device: torch.device, *, in_kernels: bool = False):
        self._entries, self._device, self.in_kernels = max(b.starts[-1] for b in batches), device, in_kernels

    copy = functools.cached_property(lambda self: self._new())
    first = functools.cached_property(lambda self: self._new())
    second = functools.cached_property(lambda self: self._new())

    def _new(self) -> Tensor:
        return torch.empty(self._entries, device=self._device)


@dataclass(frozen=True)
class _Coefficients:
    """A piece in the domain of the transform: out <- decay * out + scale * transform(x); as it is where x is None."""

    out: Tensor
    x: Tensor | None = None
    decay: float = 0.0
    scale: float = 1.0
    whitening: Whitening | None = None  # of x, by the C kernels


_Source = Callable[[Piece, int, _Workspace], _Coefficients]  # of a piece that begins at this entry of its batch
Chosen = tuple[NDArray[np.integer] | None, Floats]  # of a group: which entries of each block, and their values, [blocks, k]
# Writes what was chosen of each group, and the tensors that are sent whole: the bytes, and what receivers read of each.
Write = Callable[[list[Chosen], Floats], tuple[list[Bytes], list[Floats], Floats]]


# --- Into the domain of the transform ------------------------------------------------------------------------------------


def slot_shapes(chain: Stages, like: Sequence[Tensor]) -> list[Shape]:
    """Shape of each tensor in the domain of the transform; its own where that is another domain in each round."""
    if chain.transform.changes:
        return [tuple(t.shape) for t in like]
    return plan_of(chain, shapes_of(like)).layout.slot_shapes()


def accumulate(
    chain: Stages, slots: Sequence[Tensor], tensors: Sequence[Tensor], *, decay: PerTensor, scale: PerTensor
) -> None:
    """Slots <- decay * slots + scale * transform(tensors), in one pass without a copy of the model."""
    decay, scale = per_tensor(decay, len(tensors)), per_tensor(scale, len(tensors))
    check_slots(slots, slot_shapes(chain, tensors))
    if chain.transform.changes:
        for slot, tensor, d, s in zip(slots, tensors, decay, scale, strict=True):
            _blend(slot, tensor.detach().to(slot.dtype), d, s)
        return
    layout = plan_of(chain, shapes_of(tensors)).layout
    for group in layout.groups:
        device = tensors[group.grids[0].index].device
        fast, work = chain.kernels(group.h, group.w, device), _Workspace(group.batches, device)
        for piece in (piece for batch in group.batches for piece in batch.pieces):
            i = piece.grid.index
            x, out = padded(piece, piece_of(tensors, piece), work.copy), piece.of_slot(slots[i])
            _transform(chain, fast, piece, _Coefficients(out, x, decay[i], scale[i]), 0, work)
    for i in layout.dense:
        _blend(slots[i], tensors[i].detach().to(slots[i].dtype), decay[i], scale[i])


def _transform(chain: Stages, fast: Kernels | None, piece: Piece, c: _Coefficients, round: int, work: _Workspace) -> None:
    """Out <- decay * out + scale * P_h X P_w^T for the blocks X of a piece."""
    if c.x is None:
        return
    if fast is not None:
        fast.accumulate(c.out, c.x, decay=c.decay, scale=c.scale, whitening=c.whitening)
        return
    x, out, h, w, device = c.x, c.out, piece.grid.h, piece.grid.w, c.out.device
    P_h, P_w = chain.transform.matrix(h, round, device), chain.transform.matrix(w, round, device)
    if P_h is not None:
        strips = (piece.y, h, piece.x * w)
        x = torch.bmm(P_h.expand(piece.y, h, h), x.view(strips), out=work.first[: x.numel()].view(strips))
    if P_w is None:
        _blend(out, x.view(out.shape), c.decay, c.scale)
    elif out.is_contiguous():
        out.view(-1, w).addmm_(x.view(-1, w), P_w.T, beta=c.decay, alpha=c.scale)
    else:
        _blend(out, torch.mm(x.view(-1, w), P_w.T).view(out.shape), c.decay, c.scale)


def _blend(out: Tensor, x: Tensor, decay: float, scale: float) -> None:
    """Out <- decay * out + scale * x; what `out` held does not matter where decay is 0."""
    if decay:
        out.mul_(decay).add_(x, alpha=scale)
    else:
        torch.mul(x, scale, out=out)


# --- The message ---------------------------------------------------------------------------------------------------------


def encode_tensors(chain: Stages, tensors: Sequence[Tensor] | Made, *, round: int = 0, write: Write | None = None) -> Encoded:
    """The message of tensors as they are, or as they are made."""
    like = tensors.sources[0] if isinstance(tensors, Made) else tensors

    def source(piece: Piece, start: int, work: _Workspace) -> _Coefficients:
        out = work.second[start : start + math.prod(piece.shape)].view(piece.shape)
        return _Coefficients(out, padded(piece, piece_of(tensors, piece), work.copy))

    return _encode(chain, tensors, plan_of(chain, shapes_of(like)), source, round, write)


def encode_share(chain: Stages, slots: Sequence[Tensor], plan: Plan, *, round: int = 0) -> Encoded:
    """The message of slots as they are, by a plan of their own."""

    def source(piece: Piece, start: int, work: _Workspace) -> _Coefficients:  # noqa: ARG001
        return _Coefficients(piece.of_slot(slots[piece.grid.index]))

    return _encode(chain, slots, plan, source, round)


def encode_slots(
    chain: Stages,
    slots: Sequence[Tensor],
    like: Sequence[Tensor],
    *,
    round: int = 0,
    decay: PerTensor = 1.0,
    scale: PerTensor | None = None,
    made: Made | None = None,
    write: Write | None = None,
) -> Encoded:
    """The message of tensors that live in the domain of the transform, after an accumulation where `scale` is given."""
    tensors = like if made is None else made
    if chain.transform.changes:  # the slots are tensors like any others
        check_slots(slots, slot_shapes(chain, like))
        if scale is not None:
            accumulate(chain, slots, list(tensors), decay=decay, scale=scale)
        return encode_tensors(chain, slots, round=round, write=write)
    plan = plan_of(chain, shapes_of(like))
    check_slots(slots, plan.layout.slot_shapes())
    decay, scale = per_tensor(decay, len(like)), None if scale is None else per_tensor(scale, len(like))

    def source(piece: Piece, start: int, work: _Workspace) -> _Coefficients:  # noqa: ARG001
        i = piece.grid.index
        out = piece.of_slot(slots[i])
        if scale is None:
            return _Coefficients(out)
        x, whitening = None, None
        if work.in_kernels and isinstance(tensors, Made):
            x, whitening = tensors.to_whiten(piece) or (None, None)
        elif work.in_kernels:
            x = in_rows(piece, tensors[i])
        x = padded(piece, piece_of(tensors, piece), work.copy) if x is None else x
        return _Coefficients(out, x, decay[i], scale[i], whitening)

    if scale is not None:
        for i in plan.layout.dense:
            _blend(slots[i], tensors[i].detach().to(slots[i].dtype), decay[i], scale[i])
    once = made is None or made.whitening is not None  # from memory into the slots, without a stop in between
    return _encode(chain, slots, plan, source, round, write, batch=LONG if once else _HOT)


def _encode(
    chain: Stages,
    tensors: Sequence[Tensor] | Made,
    plan: Plan,
    source: _Source,
    round: int,
    write: Write | None = None,
    *,
    batch: int = _HOT,
) -> Encoded:
    device = (tensors.sources[0] if isinstance(tensors, Made) else tensors)[0].device if len(tensors) else torch.device("cpu")
    dense = [tensors[i].detach().reshape(-1).float().cpu() for i in plan.layout.dense]
    whole = torch.cat(dense).numpy() if dense else np.empty(0, np.float32)
    chosen = [_keep(chain, group, source, device, round, batch) for group in plan.layout.groups]
    written, read, sent = (write or functools.partial(_write, chain, plan))(chosen, whole)
    kept = [Kept(indices, back.reshape(values.shape)) for (indices, values), back in zip(chosen, read, strict=True)]
    finite = all(bool(np.isfinite([r.min(), r.max()]).all()) for r in [sent, *(k.values for k in kept)] if r.size)
    body = torch.from_numpy(written[0] if len(written) == 1 else np.concatenate([np.empty(0, np.uint8), *written])).to(device)
    if chain.linear:
        assert chain.values.wire_dtype is not None
        body = body.view(chain.values.wire_dtype) if body.numel() else body.to(chain.values.wire_dtype)
    return Encoded(Payload(body), finite, kept, torch.from_numpy(sent), chain, plan, round)


def _write(chain: Stages, plan: Plan, chosen: list[Chosen], whole: Floats) -> tuple[list[Bytes], list[Floats], Floats]:
    """All parts of a message, one after the other: see `Write`. What was chosen is overwritten by what receivers read."""
    body = np.zeros(plan.nbytes, np.uint8)
    for part in plan.parts:
        for section in part.sections:
            values = whole
            if section.group is not None:
                indices, values = chosen[section.number]
                if section.code is not None and indices is not None:
                    section.code.encode_into(indices[section.first : section.last], body[section.start : section.middle])
            values = values.reshape(-1)[section.offset : section.offset + section.count]
            body[section.middle : section.stop] = chain.values.overwrite(values, section.row)
        if part.header:
            contents = body[part.start + PART_NBYTES : part.stop]
            header = np.frombuffer(with_checksum(part.header, [contents]), np.uint8)
            body[part.start : part.start + PART_NBYTES] = header
    return [body], [values.reshape(-1) for _, values in chosen], whole


def _keep(chain: Stages, group: Group, source: _Source, device: torch.device, round: int, batch: int) -> Chosen:
    """Which entries of each block of a group, and their values; the C kernels work on so many entries at once."""
    k, fast = chain.selection.count(group.L), chain.kernels(group.h, group.w, device)
    batches = group.batches_of(batch if fast else BATCH)
    work = _Workspace(batches, device, in_kernels=fast is not None)
    indices = np.empty((group.blocks, k), narrow(group.L)) if chain.selection.indexed else None
    values = np.empty((group.blocks, k), np.float32)
    for some in batches:
        for piece, _, start in rows_of(some):
            c, at = source(piece, start, work), slice(piece.start, piece.start + piece.blocks)
            if fast is not None and indices is not None and chain.selection.in_kernels:  # all of it while a block is in cache
                how = {"decay": c.decay, "scale": c.scale, "whitening": c.whitening}
                fast.select(c.out, c.x, indices[at], values[at], **how)
                continue
            _transform(chain, fast, piece, c, round, work)
            if indices is not None:
                indices[at], values[at] = chain.selection.choose(c.out, (group.h, group.w))
            else:
                place = Batch((piece,)).places(chain.selection.positions(group.L, round, at.start, at.stop))
                values[at] = torch.take(c.out, torch.from_numpy(place).to(c.out.device)).cpu().numpy()
    return indices, values


def _indices(chain: Stages, group: Group, indices: NDArray[np.integer] | None, batch: Batch, round: int) -> NDArray[np.integer]:
    """Which entries of a batch: as found, or as the round and the seed say."""
    if indices is not None:
        return indices[batch.start : batch.stop]
    return chain.selection.positions(group.L, round, batch.start, batch.stop)


def per_tensor(value: PerTensor, count: int) -> Sequence[float]:
    """One number per tensor."""
    if isinstance(value, int | float):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{len(value)} numbers for {count} tensors")
    return value


def check_slots(slots: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
    """Refuse slots that are not float32 of the shapes that `slot_shapes` tells."""
    if len(slots) != len(shapes):
        raise ConfigError(f"{len(slots)} slots for {len(shapes)} tensors")
    for i, (slot, shape) in enumerate(zip(slots, shapes, strict=True)):
        if tuple(slot.shape) != tuple(shape) or slot.dtype != torch.float32:
            raise ConfigError(f"slot {i} must be float32{list(shape)} (see slot_shapes), got {describe(slot)}")
