"""Plan: where everything is in a message, found from the codec and the shapes alone.

A message is one or more parts, each a range of blocks. Blocks are numbered through: those of all groups in order, then the
tensors that are sent whole, in blocks of 256 values that end with their tensor. A part has a section for each group that it has
blocks of, with all indices before all values, and one for tensors that are sent whole.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.indices import IndexCode, index_code
from thinwire.codecs.layout import Batch, Group, Layout, Piece, Shape
from thinwire.codecs.registry import INDEX_CODES
from thinwire.codecs.stages import DENSE_GROUP, Floats, Row, Stages
from thinwire.codecs.wire import PART_NBYTES, part_header
from thinwire.payload import Payload


@dataclass(frozen=True)
class Section:
    """Consecutive blocks of a group, or of the tensors that are sent whole, in one part: all indices, then all values.

    Attributes:
        number: of the group; -1 for tensors that are sent whole.
        group: the group; None for tensors that are sent whole.
        first: number of the first block within the group, or among those of all tensors that are sent whole.
        blocks: how many.
        offset: number of the first value, counted alike.
        row: the values.
        code: how indices are written; None where none are sent.
        start: where the section begins.
        middle: where its values begin.
        stop: where it ends.
    """

    number: int
    group: Group | None
    first: int
    blocks: int
    offset: int
    row: Row
    code: IndexCode | None
    start: int
    middle: int
    stop: int

    @property
    def k(self) -> int:
        """Values of a block."""
        return self.row.k

    @property
    def count(self) -> int:
        """Values in all."""
        return self.row.count

    @property
    def last(self) -> int:
        """Number of the block after the last."""
        return self.first + self.blocks


@dataclass(frozen=True)
class Part:
    """A range of blocks.

    Attributes:
        first: number of the first block.
        blocks: how many.
        start: where the part begins, with its header.
        stop: where it ends.
        header: its header, without a checksum; empty in a message that is averaged on the wire.
        sections: what is in it.
    """

    first: int
    blocks: int
    start: int
    stop: int
    header: bytes
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Plan:
    """Where everything is in a message of given shapes."""

    layout: Layout
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Length of a message, without its envelope."""
        return self.parts[-1].stop

    @property
    def blocks(self) -> int:
        """Blocks of all groups and of all tensors that are sent whole."""
        return self.parts[-1].first + self.parts[-1].blocks

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """Those of groups, in order."""
        return tuple(s for part in self.parts for s in part.sections if s.group is not None)

    @functools.cached_property
    def whole(self) -> tuple[Section, ...]:
        """Those of tensors that are sent whole, in order."""
        return tuple(s for part in self.parts for s in part.sections if s.group is None)

    @functools.cached_property
    def of_group(self) -> tuple[tuple[Section, ...], ...]:
        """The sections of each group, in order."""
        return tuple(tuple(s for s in self.sections if s.number == n) for n in range(len(self.layout.groups)))


def narrow(L: int) -> type[np.unsignedinteger]:
    """What holds an index of a block of L entries in memory: two bytes, four where there are more than 65536."""
    return np.uint16 if L <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class Kept:
    """What was kept of a group: places within each block [n, k], and the values that receivers read [n, k]."""

    indices: NDArray[np.integer] | None
    values: Floats


@dataclass(frozen=True)
class Message:
    """A message, and what receivers will read in it.

    Attributes:
        payload: the message.
        finite: whether all that it says is finite; a tensor of a message on a device, to read which waits for the device.
        kept: what receivers read, group by group.
        dense: what they read of the tensors that are sent whole, one after the other.
    """

    payload: Payload
    finite: bool | Tensor
    kept: list[Kept]
    dense: Tensor


def rows_of(batch: Batch) -> Iterator[tuple[Piece, slice, int]]:
    """Each piece of a batch, which of the batch's blocks are its own, and where its first entry is."""
    at = 0
    for piece, base in zip(batch.pieces, batch.starts, strict=False):
        yield piece, slice(at, at + piece.blocks), base
        at += piece.blocks


@functools.lru_cache(maxsize=64)
def plan_of(stages: Stages, shapes: tuple[Shape, ...]) -> Plan:
    """The plan of messages of tensors of such shapes."""
    chains = stages.beside or (stages,)
    blocks = Layout.of(shapes, stages.transform, lambda *sizes: all(_is_shorter_whole(chain, *sizes) for chain in chains))
    whole = Layout.of(shapes, stages.transform, lambda *_: True)
    # Rounding up to bytes can make many small sections longer than the whole, which then is sent as it is. Codecs of a
    # schedule decide together, so a message of one of them may be longer.
    longer = all(plan_for(chain, blocks).nbytes > plan_for(chain, whole).nbytes for chain in chains)
    plan = plan_for(stages, layout := whole if longer else blocks)
    return plan if stages.parts == 1 else plan_for(stages, layout, stages.parts)


def _is_shorter_whole(stages: Stages, numel: int, blocks: int, L: int) -> bool:
    """Whether a tensor of so many entries, or so many blocks of L, takes no more bits if it is not cut into blocks."""
    selection, values = stages.selection, stages.values
    k = selection.count(L)
    indices = blocks * index_code(L, k).bits if selection.indexed else 0
    sparse, dense = indices + values.bits_of(blocks * k, k), values.bits_of(numel, DENSE_GROUP)
    if selection.everything:  # nothing is left out: a transform must not cost bytes for padding or scales
        return not stages.transform.mixes or sparse > dense
    return sparse >= dense


def plan_for(stages: Stages, layout: Layout, parts: int = 1, *, headers: bool = True) -> Plan:
    """A plan with at most so many parts of tensors that are laid out already; their headers can be left out."""
    made, at, headers = [], 0, headers and not stages.linear
    for first, last in itertools.pairwise(_borders(stages, layout, parts)):
        start, at = at, at + PART_NBYTES * headers
        body, sections = at, []
        for section in _sections(stages, layout, first, last, at):
            sections.append(section)
            at = section.stop
        codes = sum({1 << INDEX_CODES.number(type(s.code)) for s in sections if s.code is not None})
        header = part_header(first, last - first, at - body, stages.values.number, codes) if headers else b""
        made.append(Part(first, last - first, start, at, header, tuple(sections)))
    return Plan(layout, tuple(made))


def _sections(stages: Stages, layout: Layout, first: int, last: int, at: int) -> Iterator[Section]:
    """What blocks `first` to `last` make, from place `at` in the message."""
    base = 0
    for number, group in enumerate(layout.groups):
        k = stages.selection.count(group.L)
        a, b = _within(first - base, last - base, group.blocks)
        if a < b:
            inside = (_within(a - g.first, b - g.first, g.blocks) for g in group.grids)
            row = Row(k, tuple((q - p) * k for p, q in inside if p < q))
            code = index_code(group.L, k, b - a) if stages.selection.indexed else None
            middle = at + (code.nbytes(b - a) if code else 0)
            stop = middle + stages.values.nbytes_of(row)
            yield Section(number, group, a, b - a, a * k, row, code, at, middle, stop)
            at = stop
        base += group.blocks
    a, b = _within(first - base, last - base, layout.dense_blocks)
    if a < b:
        offset, row = _whole(layout, a, b)
        yield Section(-1, None, a, b - a, offset, row, None, at, at, at + stages.values.nbytes_of(row))


def _whole(layout: Layout, first: int, last: int) -> tuple[int, Row]:
    """Blocks `first` to `last` of the tensors that are sent whole: number of their first value, and the values."""
    lengths, offset, base, seen = [], 0, 0, 0
    for n in (math.prod(layout.shapes[i]) for i in layout.dense):
        blocks = -(-n // DENSE_GROUP)
        a, b = _within(first - base, last - base, blocks)
        if a < b:
            offset = offset if lengths else seen + a * DENSE_GROUP
            lengths.append(min(b * DENSE_GROUP, n) - a * DENSE_GROUP)
        base, seen = base + blocks, seen + n
    return offset, Row(DENSE_GROUP, tuple(lengths))


def _within(first: int, last: int, blocks: int) -> tuple[int, int]:
    """The blocks out of `first` to `last` that are at least 0 and below `blocks`."""
    return max(first, 0), min(last, blocks)


def _borders(stages: Stages, layout: Layout, parts: int) -> list[int]:
    """The first block of each part, and the end: about equally many blocks each, no group with a common scale cut in two."""
    total = sum(group.blocks for group in layout.groups) + layout.dense_blocks
    if parts == 1 or not total:
        return [0, total]
    sparse = [(stages.selection.count(group.L), g.blocks) for group in layout.groups for g in group.grids]
    whole = [(DENSE_GROUP, -(-math.prod(layout.shapes[i]) // DENSE_GROUP)) for i in layout.dense]
    starts = [0, *itertools.accumulate(blocks for _, blocks in (*sparse, *whole))]
    units = [math.lcm(stages.values.group_of(k), k) // k for k, _ in (*sparse, *whole)]
    cuts = {0, total}
    for at in (total * nth // parts for nth in range(1, parts)):
        tensor = bisect.bisect(starts, at) - 1
        cuts.add(starts[tensor] + (at - starts[tensor]) // units[tensor] * units[tensor])
    return sorted(cuts)


def shapes_of(like: Sequence[Tensor]) -> tuple[Shape, ...]:
    """Their shapes, for `plan_of`."""
    return tuple(tuple(t.shape) for t in like)
