"""Encoding on a device: tensors, or slots in the domain of a transform, become a message without a look from the host.

The same message as `codecs.encoder` makes of the same coefficients, in torch operations on chunks of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.device import chunks as limits
from thinwire.codecs.device.bits import table
from thinwire.codecs.device.checksum import crc32_around
from thinwire.codecs.device.chunks import Chunk, alike, chunks_of, in_order
from thinwire.codecs.device.fused import Feed, Given, Sent, encode_chunks, encode_group, groups_in_triton
from thinwire.codecs.device.fused_decoder import read_on_device
from thinwire.codecs.device.fused_rows import SentRows, encode_rows, rows_in_triton
from thinwire.codecs.device.indices import write_indices
from thinwire.codecs.device.positions import largest, positions
from thinwire.codecs.device.values import format_of
from thinwire.codecs.encoder import Encoded, PerTensor, check_slots, per_tensor, slot_shapes
from thinwire.codecs.layout import Group
from thinwire.codecs.made import Made, piece_of
from thinwire.codecs.message_plan import Plan, plan_of, shapes_of
from thinwire.codecs.stages import Stages
from thinwire.payload import Payload, finite_flag

_Coefficients = Callable[[Chunk], Tensor]  # the matrix of a chunk in the domain of the transform


@dataclass(frozen=True)
class DeviceEncoded(Encoded):
    """A message on a device, what receivers will read in it, and how to take that off the slots that were encoded.

    `finite` is a tensor; to read it waits for the device. `kept` is empty: what was kept is in `sent`.

    Attributes:
        sent: of each group, places within each block [n, k], None for all of them, and the values that receivers read [n, k];
            or both as Triton kernels have them.
        rows: what was sent whole, as Triton kernels have it; None where it is in `dense`.
    """

    sent: list[tuple[Tensor | None, Tensor] | Sent]
    rows: SentRows | None

    def take_from(self, slots: Sequence[Tensor], *, scale: PerTensor = 1.0) -> None:
        """See `Encoded`."""
        scale = per_tensor(scale, len(slots))
        if self._chain.transform.changes:
            for i, part, sent in self.each(slots):
                part.sub_(sent, alpha=scale[i])
            return
        for group, sent in zip(self._plan.layout.groups, self.sent, strict=True):
            if isinstance(sent, Sent):
                sent.take_from(group, slots, self._plan.layout.shapes, scale)
                continue
            places, values = sent
            for chunk in chunks_of(group, limits.ENTRIES):
                blocks = chunk.of_blocks(values)
                if places is not None:
                    blocks = blocks.new_zeros(chunk.blocks, group.L).scatter_(1, chunk.of_blocks(places), blocks)
                taken = torch._foreach_mul(chunk.split(chunk.to_matrix(blocks)), [float(scale[i]) for i in chunk.whose])
                torch._foreach_sub_(_of_slots(chunk, slots), taken)
        if self.rows is not None:
            self.rows.take_from(slots, scale)
            return
        dense = [slots[i] for i in self._plan.layout.dense]
        taken = self.dense.split([slot.numel() for slot in dense]) if dense else ()
        views = [part.view(slot.shape) for part, slot in zip(taken, dense, strict=True)]
        for alpha, some in alike([scale[i] for i in self._plan.layout.dense]):
            torch._foreach_sub_([dense[n] for n in some], [views[n] for n in some], alpha=alpha)

    def each(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """See `Encoded`."""
        messages = Messages([self.payload], tensors, self._round)
        return read_on_device(self._chain, self._plan, messages, raises=False).each(tensors, *others)


# --- Into the domain of the transform ----------------------------------------------------------------------------------------


def accumulate(
    chain: Stages, slots: Sequence[Tensor], tensors: Sequence[Tensor], *, decay: PerTensor, scale: PerTensor
) -> None:
    """See `Chain.accumulate`."""
    decay, scale = per_tensor(decay, len(tensors)), per_tensor(scale, len(tensors))
    check_slots(slots, slot_shapes(chain, tensors))
    if chain.transform.changes:
        _blend(list(slots), [t.detach() for t in tensors], decay, scale)
        return
    layout = plan_of(chain, shapes_of(tensors)).layout
    for chunk in (chunk for group in layout.groups for chunk in chunks_of(group, limits.ENTRIES)):
        _accumulate_chunk(chain, chunk, slots, tensors, decay, scale)
    _accumulate_whole(layout.dense, slots, tensors, decay, scale)


def _accumulate_chunk(
    chain: Stages,
    chunk: Chunk,
    slots: Sequence[Tensor],
    tensors: Sequence[Tensor] | Made,
    decay: Sequence[float],
    scale: Sequence[float],
) -> None:
    """Slots <- decay * slots + scale * transform(tensors), for the pieces of a chunk."""
    made = chunk.split(_transformed(chain, chunk, _joined(chunk, tensors), 0))
    _blend(_of_slots(chunk, slots), made, [decay[i] for i in chunk.whose], [scale[i] for i in chunk.whose])


def _accumulate_whole(
    dense: Sequence[int],
    slots: Sequence[Tensor],
    tensors: Sequence[Tensor] | Made,
    decay: Sequence[float],
    scale: Sequence[float],
) -> None:
    """The same of tensors that are sent whole."""
    whole = _some(tensors, dense)
    _blend([slots[i] for i in dense], whole, [decay[i] for i in dense], [scale[i] for i in dense])


def _joined(chunk: Chunk, tensors: Sequence[Tensor] | Made) -> Tensor:
    """The matrix of a chunk of these tensors."""
    made = isinstance(tensors, Made)
    return chunk.joined(tensors.pieces(chunk.pieces) if made else [piece_of(tensors, piece) for piece in chunk.pieces])


def _some(tensors: Sequence[Tensor] | Made, numbers: Sequence[int]) -> list[Tensor]:
    return tensors.several(numbers) if isinstance(tensors, Made) else [tensors[i].detach() for i in numbers]


def _of_slots(chunk: Chunk, slots: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of a chunk of these slots; views."""
    return [piece.of_slot(slots[piece.grid.index]) for piece in chunk.pieces]


def _transformed(chain: Stages, chunk: Chunk, matrix: Tensor, round: int) -> Tensor:
    """P_h X P_w^T for the blocks X of a chunk."""
    h, w, device = chunk.h, chunk.w, matrix.device
    P_h, P_w = chain.transform.matrix(h, round, device), chain.transform.matrix(w, round, device)
    if P_h is not None:
        matrix = torch.bmm(P_h.expand(chunk.y, h, h), matrix.view(chunk.y, h, -1))
    if P_w is not None:
        matrix = torch.mm(matrix.view(-1, w), P_w.T)
    return matrix.view(chunk.shape)


def _blend(outs: list[Tensor], parts: list[Tensor], decay: Sequence[float], scale: Sequence[float]) -> None:
    """Out <- decay * out + scale * part; what `out` held does not matter where decay is 0."""
    for (d, s), some in alike(list(zip(decay, scale, strict=True))):
        out, part = [outs[n] for n in some], [parts[n] for n in some]
        if d:
            torch._foreach_mul_(out, d)
            torch._foreach_add_(out, part, alpha=s)
        else:
            torch._foreach_copy_(out, torch._foreach_mul(part, s))


# --- The message -------------------------------------------------------------------------------------------------------------


def encode_tensors(chain: Stages, tensors: Sequence[Tensor] | Made, *, round: int = 0) -> DeviceEncoded:
    """See `Chain.encode_tensors`."""
    like = tensors.sources[0] if isinstance(tensors, Made) else tensors

    def coefficients(chunk: Chunk) -> Tensor:
        return _transformed(chain, chunk, _joined(chunk, tensors), round)

    feed = Feed(None, tensors, scale=[1.0] * len(like))
    return _encode(chain, tensors, plan_of(chain, shapes_of(like)), coefficients, feed, round)


def encode_slots(
    chain: Stages,
    slots: Sequence[Tensor],
    like: Sequence[Tensor],
    *,
    round: int = 0,
    decay: PerTensor = 1.0,
    scale: PerTensor | None = None,
    made: Made | None = None,
) -> DeviceEncoded:
    """See `Chain.encode_slots`."""
    tensors = like if made is None else made
    check_slots(slots, slot_shapes(chain, like))
    if chain.transform.changes:  # the slots are tensors like any others
        if scale is not None:
            accumulate(chain, slots, list(tensors), decay=decay, scale=scale)
        return encode_tensors(chain, slots, round=round)
    plan = plan_of(chain, shapes_of(like))
    decays, scales = per_tensor(decay, len(like)), None if scale is None else per_tensor(scale, len(like))

    def coefficients(chunk: Chunk) -> Tensor:
        if scales is not None:
            _accumulate_chunk(chain, chunk, slots, tensors, decays, scales)
        return chunk.joined(_of_slots(chunk, slots))

    feed = Feed(slots, None if scales is None else tensors, decays, scales or ())
    return _encode(chain, slots, plan, coefficients, feed, round)


def _encode(
    chain: Stages, tensors: Sequence[Tensor] | Made, plan: Plan, coefficients: _Coefficients, feed: Feed, round: int
) -> DeviceEncoded:
    device = (tensors.sources[0] if isinstance(tensors, Made) else tensors)[0].device
    whole = feed.slots is None or all(slot.is_contiguous() for slot in feed.slots)
    fast, packed = groups_in_triton(chain, plan, device) if whole else frozenset[int](), dict[int, list[Tensor]]()
    by_rows = whole and feed.known and rows_in_triton(chain, plan, device)
    numbers = [grid.index for n in sorted(fast) for grid in plan.layout.groups[n].grids] + [*plan.layout.dense] * by_rows
    given = feed.lists(numbers, len(plan.layout.shapes), device) if feed.known and numbers else None
    kept: list[tuple[Tensor | None, Tensor] | Sent] = []
    for number, group in enumerate(plan.layout.groups):
        if number in fast:
            found, packed[number] = _keep_fused(chain, plan, number, coefficients, feed, given, device)
            kept.append(found)
        else:
            kept.append(_keep(chain, group, coefficients, round, device))
    rows = encode_rows(plan, feed, given, device) if by_rows and given is not None else None
    if given is not None:
        given.write_back()
    if rows is None and feed.slots is not None and feed.tensors is not None:
        _accumulate_whole(plan.layout.dense, feed.slots, feed.tensors, feed.decay, feed.scale)
    dense = [t.reshape(-1) for t in _some(tensors, plan.layout.dense)] if plan.layout.dense and rows is None else []
    whole = torch.cat(dense).float() if dense else torch.empty(0, device=device)
    if rows is not None:
        packed[-1] = rows.written
    written, read = _written(chain, plan, kept, packed, whole)
    body = torch.cat(written) if written else torch.empty(0, dtype=torch.uint8, device=device)
    if headers := [part for part in plan.parts if part.header]:
        places = [(part.start, part.start + len(part.header), part.stop) for part in headers]
        checksums = crc32_around(body[None], places).view(torch.uint8).view(-1, 4)
        for part, checksum in zip(headers, checksums, strict=True):
            at = part.start + len(part.header)
            body[at - 4 : at] = checksum
    if chain.linear:
        assert chain.values.wire_dtype is not None
        body = body.view(chain.values.wire_dtype) if body.numel() else body.to(chain.values.wire_dtype)
    finite = finite_flag([*read.values(), *(s.scales for s in (*kept, rows) if isinstance(s, Sent | SentRows))])
    finite = torch.ones((), dtype=torch.bool, device=device) if finite is None else finite
    sent = [k if isinstance(k, Sent) else (k[0], read[number].view(k[1].shape)) for number, k in enumerate(kept)]
    return DeviceEncoded(Payload(body), finite, [], read[-1], chain, plan, round, sent, rows)


def _keep(
    chain: Stages, group: Group, coefficients: _Coefficients, round: int, device: torch.device
) -> tuple[Tensor | None, Tensor]:
    """Which entries of each block of a group, None for all of them, and their values."""
    chunks, selection = chunks_of(group, limits.ENTRIES), chain.selection
    blocks = (chunk.to_blocks(coefficients(chunk)) for chunk in chunks)
    if selection.everything:
        return None, in_order(chunks, list(blocks))
    if selection.indexed:
        found = [largest(some, selection.count(group.L)) for some in blocks]
        return in_order(chunks, [places for places, _ in found]), in_order(chunks, [values for _, values in found])
    places = positions(selection, group.L, round, 0, group.blocks, device)
    return places, in_order(chunks, [b.gather(1, c.of_blocks(places)) for c, b in zip(chunks, blocks, strict=True)])


def _keep_fused(
    chain: Stages,
    plan: Plan,
    number: int,
    coefficients: _Coefficients,
    feed: Feed,
    given: Given | None,
    device: torch.device,
) -> tuple[Sent, list[Tensor]]:
    """The same of a group that the Triton kernels know, and the bytes of its sections."""
    if given is not None:
        return encode_group(chain, plan, number, feed, given, device)
    chunks = chunks_of(plan.layout.groups[number], limits.ENTRIES)
    if feed.slots is None:
        made = ((chunk, _joined(chunk, feed.tensors or [])) for chunk in chunks)
        return encode_chunks(chain, plan, number, made, device)
    for chunk in chunks:
        coefficients(chunk)  # which adds to the slots
    added = Feed(feed.slots, None)
    return encode_group(chain, plan, number, added, added.lists([], len(plan.layout.shapes), device), device)


def _written(
    chain: Stages,
    plan: Plan,
    kept: Sequence[tuple[Tensor | None, Tensor] | Sent],
    packed: dict[int, list[Tensor]],
    whole: Tensor,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """All bytes of a message, with zeros for checksums; and what receivers read of each group, and of whole tensors at -1."""
    values_format, written = format_of(chain.values), list[Tensor]()
    read: dict[int, list[Tensor]] = {number: [] for number in range(-1, len(kept))}
    for part in plan.parts:
        if part.header:
            written.append(table(tuple(part.header), torch.uint8, whole.device))
        for section in part.sections:
            values = whole
            if section.number in packed:
                sections = plan.whole if section.number < 0 else plan.of_group[section.number]
                written.append(packed[section.number][sections.index(section)])
                continue
            if section.group is not None:
                found = kept[section.number]
                assert not isinstance(found, Sent)
                places, values = found
                if section.code is not None and places is not None:
                    written.append(write_indices(section.code, places[section.first : section.last]))
            values = values.reshape(-1)[section.offset : section.offset + section.count]
            raw, back = values_format.write(values, section.row)
            written += raw
            read[section.number].append(back)
    return written, {number: _cat(parts, whole) for number, parts in read.items()}


def _cat(parts: list[Tensor], like: Tensor) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else like[:0]
