"""Chain: transform >> selection >> values, the codec of the sparse methods.

    DCT(64) >> TopK(32) >> Sign()        DeMo with one bit per value
    TopK(64) >> TwoBit()                 SparseLoCo
    RandomK(0.05) >> Float("bf16")       FlexDeMo's random scheme: no indices, averaged on the wire
    Fp4()                                Streaming DiLoCo's wire

A chain encodes tensors as they are, or slots: tensors that live in the domain of the transform. There, taking off what was
sent needs no inverse transform: `accumulate` adds new tensors to the slots, `encode_slots` makes the message, and
`Encoded.take_from` subtracts from the slots exactly what the receivers will read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.base import Codec
from thinwire.codecs.bits import Bytes
from thinwire.codecs.dense import WIRE_DTYPES, Dense
from thinwire.codecs.indices import IndexCode, index_code
from thinwire.codecs.layout import Batch, Group, Layout, Piece, Shape, matrix_of, padded
from thinwire.codecs.received import Received
from thinwire.codecs.selection import All, Selection
from thinwire.codecs.stage import Stage
from thinwire.codecs.transforms import Identity, Transform
from thinwire.codecs.values import DENSE_GROUP, Float, Floats, Values
from thinwire.errors import ConfigError
from thinwire.payload import Payload, describe

PerTensor = float | Sequence[float]  # one number for all tensors, or one for each


@dataclass(frozen=True)
class Section:
    """A group's part of a message: the indices of all its blocks, then all values.

    Attributes:
        group: the blocks.
        k: entries kept of each.
        code: how indices are written; None where none are sent.
        start: where the section begins.
        middle: where its values begin.
        stop: where it ends.
    """

    group: Group
    k: int
    code: IndexCode | None
    start: int
    middle: int
    stop: int

    @property
    def count(self) -> int:
        """Kept values in all."""
        return self.group.blocks * self.k


@dataclass(frozen=True)
class Plan:
    """Where everything is in a message of given shapes: one section per group, then the tensors that are sent whole."""

    layout: Layout
    sections: tuple[Section, ...]
    nbytes: int

    @property
    def dense_start(self) -> int:
        """Where the tensors that are sent whole begin."""
        return self.sections[-1].stop if self.sections else 0


@dataclass(frozen=True)
class Kept:
    """What was kept of a group: places within each block [n, k], and the values that receivers read [n, k]."""

    indices: NDArray[np.int32] | None
    values: Floats


@dataclass(frozen=True)
class Encoded:
    """A message, and what receivers will read in it.

    Attributes:
        payload: the message.
        finite: whether all that it says is finite.
        kept: what receivers read, section by section.
        dense: what they read of the tensors that are sent whole, one after the other.
    """

    payload: Payload
    finite: bool
    kept: list[Kept]
    dense: Tensor
    _chain: Chain
    _plan: Plan
    _round: int

    def take_from(self, slots: Sequence[Tensor], *, scale: PerTensor = 1.0) -> None:
        """Subtract from slots what receivers read: error feedback, of selection and rounding alike.

        Args:
            slots: those that were encoded.
            scale: take off only this part of it (DeMo's alpha); one number, or one per slot.
        """
        scale = _per_tensor(scale, len(slots))
        if self._chain.transform.changes:
            for i, part, sent in self._chain.receive([self.payload], slots, round=self._round).each(slots):
                part.sub_(sent, alpha=scale[i])
            return
        for section, kept in zip(self._plan.sections, self.kept, strict=True):
            for batch in section.group.batches:
                place = batch.places(self._chain._indices(section, kept.indices, batch, self._round))
                values = kept.values[batch.start : batch.stop]
                for piece, rows, base in _rows(batch):
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


def _rows(batch: Batch) -> Iterator[tuple[Piece, slice, int]]:
    """Each piece of a batch, which of the batch's blocks are its own, and where its first entry is."""
    at = 0
    for piece, base in zip(batch.pieces, batch.starts, strict=False):
        yield piece, slice(at, at + piece.blocks), base
        at += piece.blocks


@dataclass(frozen=True, repr=False)
class Chain(Codec):
    """At most one transform, one selection and one value format, in this order; `a >> b >> c` reads as it works.

    A tensor of which the kept entries with their indices would take more bytes than all entries in the same value format is
    sent whole, without a transform.

    Args:
        transform: `DCT`, `Hadamard`, `RandomOrthogonal` or `Identity`.
        selection: `TopK`, `RandomK`, `Striding` or `All`.
        values: `Float`, `Int8`, `Fp4`, `TwoBit` or `Sign`.
    """

    transform: Transform = Identity()  # noqa: RUF009  (frozen)
    selection: Selection = All()  # noqa: RUF009
    values: Values = Float()  # noqa: RUF009

    @staticmethod
    def of(stage: Codec) -> Chain:
        """The chain of one stage, of a dense format that is averaged on the wire, or a chain itself."""
        if isinstance(stage, Chain):
            return stage
        if isinstance(stage, Dense) and stage.linear and stage.wire_dtype != torch.float64:
            return Chain(values=Float(next(name for name, dtype in WIRE_DTYPES.items() if dtype == stage.wire_dtype)))
        for kind, name in _KINDS.items():
            if isinstance(stage, kind):
                only: dict[str, Any] = {name: stage}
                return Chain(**only)
        raise ConfigError(f"a chain is made of {_ORDER}, got {stage!r}")

    def __rshift__(self, after: Codec) -> Chain:
        check_order(self, after)
        return replace(self, **Chain.of(after).stages())

    def stages(self) -> dict[str, Any]:
        """The stages that do something, in order."""
        return {name: stage for name in _KINDS.values() if (stage := getattr(self, name)) != getattr(Chain, name)}

    def __repr__(self) -> str:
        """Equal chains are written alike."""
        return " >> ".join(map(repr, self.stages().values())) or repr(self.values)

    # --- Sizes ---------------------------------------------------------------------------------------------------------

    @property
    def linear(self) -> bool:
        """Whether messages may be averaged on the wire: all workers send the same entries, as plain floats."""
        return not self.selection.indexed and isinstance(self.values, Float)

    @property
    def sparse(self) -> bool:
        """Whether a selection leaves values out."""
        return not isinstance(self.selection, All)

    def plan(self, like: Sequence[Tensor]) -> Plan:
        """Where everything is in a message of such tensors."""
        return _plan(self, tuple(tuple(t.shape) for t in like))

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """Known from the shapes alone: every code has a length that does not depend on what it says."""
        return self.plan(like).nbytes

    def slot_shapes(self, like: Sequence[Tensor]) -> list[Shape]:
        """Shape of each tensor in the domain of the transform; its own where that is another domain in each round."""
        if self.transform.changes:
            return [tuple(t.shape) for t in like]
        return self.plan(like).layout.slot_shapes()

    # --- Into the domain of the transform --------------------------------------------------------------------------------

    def accumulate(
        self, slots: Sequence[Tensor], tensors: Sequence[Tensor], *, decay: PerTensor, scale: PerTensor = 1.0
    ) -> None:
        """Slots <- decay * slots + scale * transform(tensors), in one pass without a copy of the model.

        Args:
            slots: float32, of the shapes that `slot_shapes` tells.
            tensors: of any floating dtype.
            decay: 0 to overwrite whatever the slots held; one number, or one per tensor.
            scale: multiplies the tensors; likewise.
        """
        decay, scale = _per_tensor(decay, len(tensors)), _per_tensor(scale, len(tensors))
        _check_slots(slots, self.slot_shapes(tensors))
        if self.transform.changes:
            for slot, tensor, d, s in zip(slots, tensors, decay, scale, strict=True):
                _blend(slot, tensor.detach().to(slot.dtype), d, s)
            return
        layout = self.plan(tensors).layout
        for group in layout.groups:
            work = _Workspace(group, tensors[group.grids[0].index].device)
            for batch in group.batches:
                for piece in batch.pieces:
                    matrix = matrix_of(tensors[piece.grid.index], piece.grid)
                    i = piece.grid.index
                    self._forward(piece, matrix, piece.of_slot(slots[i]), decay[i], scale[i], 0, work)
        for i in layout.dense:
            _blend(slots[i], tensors[i].detach().to(slots[i].dtype), decay[i], scale[i])

    def _forward(
        self, piece: Piece, matrix: Tensor, out: Tensor, decay: float, scale: float, round: int, work: _Workspace
    ) -> None:
        """Out <- decay * out + scale * P_h X P_w^T for the blocks X of a piece."""
        h, w, device = piece.grid.h, piece.grid.w, matrix.device
        P_h, P_w = self.transform.matrix(h, round, device), self.transform.matrix(w, round, device)
        x = padded(piece, matrix, work.copy)
        if P_h is not None:
            strips = (piece.y, h, piece.x * w)
            x = torch.bmm(P_h.expand(piece.y, h, h), x.view(strips), out=work.first[: x.numel()].view(strips))
        if P_w is None:
            _blend(out, x.view(out.shape), decay, scale)
        elif out.is_contiguous():
            out.view(-1, w).addmm_(x.view(-1, w), P_w.T, beta=decay, alpha=scale)
        else:
            _blend(out, torch.mm(x.view(-1, w), P_w.T).view(out.shape), decay, scale)

    # --- Encoding --------------------------------------------------------------------------------------------------------

    def encode(self, tensors: Sequence[Tensor], *, round: int = 0, spare: int = 0) -> Payload:
        """All tensors in one message."""
        payload = self.encode_tensors(tensors, round=round).payload
        return payload.like(torch.cat([payload.data, payload.data.new_zeros(spare)])) if spare else payload

    def encode_finite(self, tensors: Sequence[Tensor], *, round: int = 0) -> tuple[Payload, bool]:
        """As `encode`, with whether all that receivers will read is finite."""
        encoded = self.encode_tensors(tensors, round=round)
        return encoded.payload, encoded.finite

    def encode_tensors(self, tensors: Sequence[Tensor], *, round: int = 0) -> Encoded:
        """As `encode`, with what receivers will read."""

        def coefficients(batch: Batch, work: _Workspace) -> list[Tensor]:
            out = []
            for piece, start in zip(batch.pieces, batch.starts, strict=False):
                part = work.second[start : start + math.prod(piece.shape)].view(piece.shape)
                self._forward(piece, matrix_of(tensors[piece.grid.index], piece.grid), part, 0.0, 1.0, round, work)
                out.append(part)
            return out

        return self._encode(tensors, self.plan(tensors), coefficients, round)

    def encode_slots(
        self,
        slots: Sequence[Tensor],
        like: Sequence[Tensor],
        *,
        round: int = 0,
        decay: PerTensor = 1.0,
        scale: PerTensor | None = None,
    ) -> Encoded:
        """The message of tensors that live in the domain of the transform.

        Args:
            slots: see `accumulate`.
            like: tensors of the shapes they stand for.
            round: number of the round.
            decay: see `accumulate`.
            scale: where it is given, `accumulate(slots, like, decay=decay, scale=scale)` comes first, in the same pass;
                else the slots are not changed.
        """
        if self.transform.changes:  # the slots are tensors like any others
            _check_slots(slots, self.slot_shapes(like))
            if scale is not None:
                self.accumulate(slots, like, decay=decay, scale=scale)
            return self.encode_tensors(slots, round=round)
        plan = self.plan(like)
        _check_slots(slots, plan.layout.slot_shapes())
        decay, scale = _per_tensor(decay, len(like)), None if scale is None else _per_tensor(scale, len(like))

        def coefficients(batch: Batch, work: _Workspace) -> list[Tensor]:
            parts = [piece.of_slot(slots[piece.grid.index]) for piece in batch.pieces]
            if scale is not None:
                for piece, part in zip(batch.pieces, parts, strict=True):
                    i = piece.grid.index
                    self._forward(piece, matrix_of(like[i], piece.grid), part, decay[i], scale[i], 0, work)
            return parts

        if scale is not None:
            for i in plan.layout.dense:
                _blend(slots[i], like[i].detach().to(slots[i].dtype), decay[i], scale[i])
        return self._encode(slots, plan, coefficients, round)

    def _encode(
        self, tensors: Sequence[Tensor], plan: Plan, coefficients: Callable[[Batch, _Workspace], list[Tensor]], round: int
    ) -> Encoded:
        parts: list[Bytes] = []
        kept: list[Kept] = []
        for section in plan.sections:
            device = tensors[section.group.grids[0].index].device
            indices, values = self._keep(section, coefficients, _Workspace(section.group, device), round)
            if section.code is not None and indices is not None:
                parts.append(section.code.encode(indices))
            raw, read = self.values.write(values.reshape(-1), section.k)
            parts.append(raw)
            kept.append(Kept(indices, read.reshape(values.shape)))
        dense = [tensors[i].detach().reshape(-1).float().cpu() for i in plan.layout.dense]
        raw, read = self.values.write(torch.cat(dense).numpy() if dense else np.empty(0, np.float32), DENSE_GROUP)
        parts.append(raw)
        finite = all(bool(np.isfinite([r.min(), r.max()]).all()) for r in [read, *(k.values for k in kept)] if r.size)
        body = torch.from_numpy(np.concatenate(parts)).to(tensors[0].device if tensors else "cpu")
        if self.linear:
            assert isinstance(self.values, Float)
            body = body.view(self.values.wire_dtype) if body.numel() else body.to(self.values.wire_dtype)
        return Encoded(Payload(body), finite, kept, torch.from_numpy(read), self, plan, round)

    def _keep(
        self, section: Section, coefficients: Callable[[Batch, _Workspace], list[Tensor]], work: _Workspace, round: int
    ) -> tuple[NDArray[np.int32] | None, Floats]:
        """Which entries of each block of a group, and their values."""
        group, k = section.group, section.k
        indices = np.empty((group.blocks, k), np.int32) if self.selection.indexed else None
        values = np.empty((group.blocks, k), np.float32)
        for batch in group.batches:
            parts = coefficients(batch, work)
            if indices is not None:
                for part, (_, rows, _) in zip(parts, _rows(batch), strict=True):
                    at = slice(batch.start + rows.start, batch.start + rows.stop)
                    indices[at], values[at] = self.selection.choose(part, (group.h, group.w))
                continue
            place = batch.places(self._indices(section, indices, batch, round))
            for part, (_, rows, base) in zip(parts, _rows(batch), strict=True):
                at = torch.from_numpy(place[rows] - base).to(part.device)
                values[batch.start :][rows] = torch.take(part, at).cpu().numpy()
        return indices, values

    def _indices(self, section: Section, indices: NDArray[np.integer] | None, batch: Batch, round: int) -> NDArray[np.integer]:
        """Which entries of a batch: as found, or as the round and the seed say."""
        if indices is not None:
            return indices[batch.start : batch.stop]
        return self.selection.positions(section.group.L, round, batch.start, batch.stop)

    # --- Decoding --------------------------------------------------------------------------------------------------------

    def decode(self, payload: Payload, like: Sequence[Tensor], *, round: int = 0) -> list[Tensor]:
        """The tensors that a message says."""
        return self.combine([payload], like, round=round)

    def combine(
        self,
        payloads: Sequence[Payload],
        like: Sequence[Tensor],
        *,
        round: int = 0,
        mean: Mean | None = None,
        weights: Sequence[float] | None = None,
    ) -> list[Tensor]:
        """The mean of several messages: combined in the domain of the transform, with one inverse for all."""
        return self.receive(payloads, like, round=round, mean=mean, weights=weights).tensors()

    def receive(
        self,
        payloads: Sequence[Payload],
        like: Sequence[Tensor],
        *,
        round: int = 0,
        mean: Mean | None = None,
        weights: Sequence[float] | None = None,
        own: tuple[int, Encoded] | None = None,
    ) -> Received:
        """Check messages from end to end, to be decoded piece by piece later; see `combine`, and `Received` for `own`.

        Raises:
            WireError: before anything is decoded into tensors.
        """
        device = payloads[0].data.device
        return Received(self, self.plan(like), payloads, device, round, mean or Mean(), weights, own)


def check_order(before: Codec, after: Codec) -> None:
    """Refuse two codecs that cannot follow each other in a chain."""
    if isinstance(after, Dense):
        raise ConfigError(f"a chain is made of {_ORDER}, got {after!r}")
    kinds = list(_KINDS)

    def places(codec: Codec) -> list[int]:
        parts = codec.stages().values() if isinstance(codec, Chain) else [codec]
        return [i for part in parts for i, kind in enumerate(kinds) if isinstance(part, kind)]

    first, second = places(before), places(Chain.of(after) if not isinstance(after, Stage) else after)
    if first and second and second[0] <= first[-1]:
        raise ConfigError(f"{before!r} >> {after!r} is not a chain: {_ORDER}, each at most once and in this order")


_KINDS = {Transform: "transform", Selection: "selection", Values: "values"}
_ORDER = "a transform >> a selection >> a value format"


@functools.lru_cache(maxsize=64)
def _plan(chain: Chain, shapes: tuple[Shape, ...]) -> Plan:
    selection, values = chain.selection, chain.values

    def whole(numel: int, blocks: int, L: int) -> bool:
        k = selection.count(L)
        indices = blocks * index_code(L, k).bits if selection.indexed else 0
        sparse, dense = indices + values.bits_of(blocks * k, k), values.bits_of(numel, DENSE_GROUP)
        if isinstance(selection, All):  # nothing is left out: a transform must not cost bytes for padding or scales
            return isinstance(chain.transform, Identity) or sparse > dense
        return sparse >= dense

    plan = _plan_of(chain, Layout.of(shapes, chain.transform, whole))
    dense = _plan_of(chain, Layout.of(shapes, chain.transform, lambda *_: True))
    # Rounding up to bytes can make many small sections longer than the whole: never more bytes than without a selection.
    return plan if plan.nbytes <= dense.nbytes else dense


def _plan_of(chain: Chain, layout: Layout) -> Plan:
    selection, values, sections = chain.selection, chain.values, []
    at = 0
    for group in layout.groups:
        k = selection.count(group.L)
        code = index_code(group.L, k, group.blocks) if selection.indexed else None
        middle = at + (code.nbytes(group.blocks) if code else 0)
        stop = middle + values.nbytes_of(group.blocks * k, k)
        sections.append(Section(group, k, code, at, middle, stop))
        at = stop
    return Plan(layout, tuple(sections), at + values.nbytes_of(layout.dense_numel, DENSE_GROUP))


def _per_tensor(value: PerTensor, count: int) -> Sequence[float]:
    """One number per tensor."""
    if isinstance(value, int | float):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{len(value)} numbers for {count} tensors")
    return value


def _check_slots(slots: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
    if len(slots) != len(shapes):
        raise ConfigError(f"{len(slots)} slots for {len(shapes)} tensors")
    for i, (slot, shape) in enumerate(zip(slots, shapes, strict=True)):
        if tuple(slot.shape) != tuple(shape) or slot.dtype != torch.float32:
            raise ConfigError(f"slot {i} must be float32{list(shape)} (see slot_shapes), got {describe(slot)}")


class _Workspace:
    """Memory for one batch of a group, allocated once a message."""

    def __init__(self, group: Group, device: torch.device):
        n = max(b.starts[-1] for b in group.batches)
        self.copy, self.first, self.second = (torch.empty(n, device=device) for _ in range(3))


def _blend(out: Tensor, x: Tensor, decay: float, scale: float) -> None:
    """Out <- decay * out + scale * x; what `out` held does not matter where decay is 0."""
    if decay:
        out.mul_(decay).add_(x, alpha=scale)
    else:
        torch.mul(x, scale, out=out)
