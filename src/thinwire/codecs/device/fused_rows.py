"""Triton kernels for tensors that are sent whole, in groups of 256 values with a common scale: see `fused`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.device.chunks import alike
from thinwire.codecs.device.fused import Feed, Given, Held, in_triton
from thinwire.codecs.layout import Layout
from thinwire.codecs.message_plan import Plan, Section
from thinwire.codecs.stages import DENSE_GROUP, Stages
from thinwire.kernels import triton


def rows_in_triton(stages: Stages, plan: Plan, device: torch.device) -> bool:
    """Whether the kernels write and read what is sent whole: no byte may hold signs of two groups."""
    known = bool(plan.whole) and in_triton(stages) and stages.values.group_of(DENSE_GROUP) == DENSE_GROUP
    return known and all(n % 8 == 0 for s in plan.whole for n in s.row.lengths) and triton.available(device)


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of a section that belong to some tensors: see `kernels.triton.rows`."""

    table: Tensor
    offsets: Tensor
    many: int  # of the section, and so where signs begin

    @property
    def sign_at(self) -> int:
        """Where signs begin in the section."""
        return 2 * self.many


@functools.lru_cache(maxsize=256)
def groups_of(layout: Layout, section: Section, some: tuple[int, ...] | None, device: torch.device) -> Groups:
    """Groups of a section; those of some tensors, or all."""
    borders, starts = section.row.borders(DENSE_GROUP) + section.offset, [0]
    lengths = [int(np.prod(layout.shapes[i], dtype=np.int64)) for i in layout.dense]
    starts = np.cumsum([0, *lengths])
    which = np.searchsorted(starts, borders[:-1], side="right") - 1
    tensors = np.array(layout.dense)[which]
    table = np.stack([np.arange(len(which)), tensors, borders[:-1] - starts[which], np.diff(borders)], 1)
    kept = slice(None) if some is None else np.isin(tensors, some)
    moved = [torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (table[kept].astype(np.int32), borders[:-1][kept])]
    return Groups(moved[0], moved[1] - section.offset, len(which))


@dataclass(frozen=True, eq=False)
class SentRows:
    """What a message says of tensors that are sent whole.

    Attributes:
        plan: where everything is in a message.
        written: the bytes of each section.
        scales: float32, of all groups.
    """

    plan: Plan
    written: list[Tensor]
    scales: Tensor

    def take_from(self, slots: Sequence[Tensor], scale: Sequence[float]) -> None:
        """Take what this one message says off slots, times a number for each."""
        layout, device = self.plan.layout, self.scales.device
        held = Held(slots, layout.dense)
        where = triton.addresses([held.tensors], device)
        for alpha, some in alike([float(scale[i]) for i in layout.dense]):
            for section, raw in zip(self.plan.whole, self.written, strict=True):
                groups = groups_of(layout, section, tuple(layout.dense[n] for n in some), device)
                if len(groups.table):
                    given = (groups.table, groups.offsets, where, raw, groups.sign_at, alpha)
                    triton.launch("take_rows", (len(groups.table),), *given)
        held.write_back()


def encode_rows(plan: Plan, feed: Feed, given: Given, device: torch.device) -> SentRows:
    """The bytes of tensors that are sent whole; slots are changed where anything is added to them."""
    layout = plan.layout
    written = [torch.empty(s.stop - s.start, dtype=torch.uint8, device=device) for s in plan.whole]
    many = [s.row.groups(DENSE_GROUP) for s in plan.whole]
    scales = torch.empty(sum(many), device=device)
    for section, raw, out in zip(plan.whole, written, scales.split(many), strict=True):
        for some, numbers, kind in feed.launches(layout.dense):
            groups = groups_of(layout, section, some, device)
            if len(groups.table):
                tables = (groups.table, groups.offsets, given.addresses, given.addresses.shape[1], given.clip_or(scales))
                more = (*tables, out, raw, groups.sign_at, *numbers)
                triton.launch("encode_rows", (len(groups.table),), *more, **kind)
    return SentRows(plan, written, scales)


class ReceivedRows:
    """What all messages say of tensors that are sent whole.

    Args:
        plan: where everything is in a message.
        raw: the messages, [messages, nbytes].
        weights: of the workers, None where all are 1.
        total: the sum of the weights.
    """

    def __init__(self, plan: Plan, raw: Tensor, weights: Tensor | None, total: float):
        """Check the scales."""
        self.plan, self.raw, self.weights, self.total = plan, raw, weights, total
        self.many = [s.row.groups(DENSE_GROUP) for s in plan.whole]
        device = raw.device
        self.scales = [torch.empty((len(raw), n), device=device) for n in self.many]
        self.wrong = [torch.empty((len(raw), n), dtype=torch.uint8, device=device) for n in self.many]
        for section, many, scales, wrong in zip(plan.whole, self.many, self.scales, self.wrong, strict=True):
            given = (raw[:, section.start :], raw.stride(0), many, scales, wrong)
            triton.launch("read_rows", (-(-many // 256), len(raw)), *given)

    def means(self) -> Tensor:
        """The means of all tensors, one after the other."""
        layout = self.plan.layout
        out = torch.empty(layout.dense_numel, device=self.raw.device)
        parts = iter(out.split([int(np.prod(layout.shapes[i], dtype=np.int64)) for i in layout.dense]))
        held = [next(parts) if i in layout.dense else None for i in range(len(layout.shapes))]
        self._combine(None, triton.addresses([held], self.raw.device))
        return out

    def squares(self) -> Tensor:
        """The sum of squares of the mean of each group, float64."""
        found = torch.empty(sum(self.many), dtype=torch.float64, device=self.raw.device)
        self._combine(None, None, squares=found)
        return found

    def step(self, tensors: Sequence[Tensor], lr: Sequence[float], sign: Sequence[bool], scale: Tensor | None) -> None:
        """See `DeviceReceived.step`."""
        dense = self.plan.layout.dense
        held = Held(tensors, dense)
        where = triton.addresses([held.tensors], self.raw.device)
        for (dtype, rate, signs), some in alike([(tensors[i].dtype, float(lr[i]), sign[i]) for i in dense]):
            how = {"STEP": True, "SIGN": signs, "DTYPE": dtype}
            self._combine(tuple(dense[n] for n in some), where, factors=scale, lr=rate, **how)
        held.write_back()

    def _combine(
        self,
        some: tuple[int, ...] | None,
        where: Tensor | None,
        *,
        factors: Tensor | None = None,
        squares: Tensor | None = None,
        lr: float = 0.0,
        **how: Any,
    ) -> None:
        given = [self.raw if given is None else given for given in (self.weights, factors)]
        kind = {"STEP": False, "SIGN": False, "DTYPE": torch.float32, "MESSAGES": len(self.raw), **how}
        kind |= {"WEIGHTED": self.weights is not None, "FACTORED": factors is not None, "SQUARES": squares is not None}
        outs = [self.raw] * len(self.many) if squares is None else squares.split(self.many)
        for section, out in zip(self.plan.whole, outs, strict=True):
            groups = groups_of(self.plan.layout, section, some, self.raw.device)
            tables = (groups.table, groups.offsets, groups.table if where is None else where)
            more = (self.raw[:, section.start :], self.raw.stride(0), *given, out, groups.sign_at, self.total, lr)
            if len(groups.table):
                triton.launch("combine_rows", (len(groups.table),), *tables, *more, **kind)
