"""Messages that are read, combined and applied by Triton kernels, where these know them: see `fused`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.device.bits import table
from thinwire.codecs.device.chunks import Chunk, alike, sums_of
from thinwire.codecs.device.decoder import DeviceReceived
from thinwire.codecs.device.fused import (
    Code,
    Held,
    Sent,
    basis_of,
    groups_in_triton,
    places_in,
    places_of,
    power_of_two,
    shapes_on,
)
from thinwire.codecs.device.fused_rows import ReceivedRows, rows_in_triton
from thinwire.codecs.layout import Group, Shape
from thinwire.codecs.message_plan import Plan, Section
from thinwire.codecs.stages import DENSE_GROUP, Stages
from thinwire.kernels import triton


def read_on_device(chain: Stages, plan: Plan, messages: Messages, *, raises: bool = True) -> DeviceReceived:
    """The messages of a round on a device, read by kernels as far as they know them; see `DeviceReceived`."""
    plain = not messages.mean.trimmed and not messages.mean.needs_norms
    fast = groups_in_triton(chain, plan, messages.payloads[0].data.device) if plain else frozenset[int]()
    if not fast:
        return DeviceReceived(chain, plan, messages, raises=raises)
    return FusedReceived(chain, plan, messages, fast, raises=raises)


class FusedReceived(DeviceReceived):
    """The messages of all workers in one round, of which Triton kernels read some groups.

    Args:
        chain: the stages.
        plan: where everything is in a message.
        messages: of all workers, and how they are combined; neither trimmed nor with norms.
        fast: groups that the kernels know.
        raises: see `DeviceReceived`.
    """

    def __init__(self, chain: Stages, plan: Plan, messages: Messages, fast: frozenset[int], *, raises: bool = True):
        """Check everything."""
        self._fast, self._of = fast, dict[int, Sent]()
        self._rows: ReceivedRows | None = None
        super().__init__(chain, plan, messages, raises=raises)

    def _read_places(self, number: int, group: Group, wrong: list[Tensor]) -> Tensor | None:
        """Entries and scales in one launch for each section, with what is wrong in each block."""
        if number not in self._fast:
            return super()._read_places(number, group, wrong)
        raw, k, device = self._raw, self.plan.of_group[number][0].k, self.device
        sent = Sent(
            torch.empty((len(raw), group.blocks, k), dtype=torch.int16, device=device),
            torch.empty((len(raw), group.blocks), device=device),
        )
        odd = torch.empty((len(raw), group.blocks), dtype=torch.uint8, device=device)
        for section in self.plan.of_group[number]:
            code, first = Code.of(section), section.first
            out = (sent.entries[0, first:], sent.scales[0, first:], odd[0, first:])
            how = {"K": code.k, "LOW": code.low, "BITS": code.bits, "ROW": code.row, "BP": power_of_two(8 * code.row)}
            given = (raw[0, section.start :], raw.shape[1], group.blocks)
            triton.launch("read", (section.blocks, len(raw)), *given, *out, *code.at, **how)
        self._of[number] = sent
        wrong.append(odd.any(1))
        return None

    def _sections_to_check(self) -> tuple[Section, ...]:
        done = self._fast if self._rows is None else {*self._fast, -1}
        return tuple(section for section in super()._sections_to_check() if section.number not in done)

    def _look_at_values(self, wrong: list[Tensor]) -> tuple[Tensor, Tensor]:
        scales = [sent.scales for sent in self._of.values()]
        if rows_in_triton(self.chain, self.plan, self.device):
            weights, total = self._merge_of.weights, float(self._weights.sum())
            self._rows = rows = ReceivedRows(self.plan, self._raw, weights, total)
            scales += rows.scales
            wrong += [odd.any(1) for odd in rows.wrong]
        most, squares = super()._look_at_values(wrong)
        largest = [scale.max() for scale in scales]
        return torch.stack([most, *largest] if self._sections_to_check() else largest).max(), squares

    def _read_whole(self) -> Tensor:
        return super()._read_whole() if self._rows is None else self._rows.means()

    def _read_values(self, number: int) -> Tensor:
        return self._raw if number in self._fast else super()._read_values(number)

    # --- Decoding ----------------------------------------------------------------------------------------------------------

    def _squares_of(self, number: int, group: Group) -> Tensor:
        if number not in self._fast:
            return super()._squares_of(number, group)
        found = torch.empty(group.blocks, dtype=torch.float64, device=self.device)
        places = places_of(group, 0, group.blocks, tuple(grid.index for grid in group.grids), self.device)
        self._combine(number, places, squares=found)
        return found

    def _matrix(self, number: int, chunk: Chunk, scale: Tensor | None) -> Tensor:
        if number not in self._fast:
            return super()._matrix(number, chunk, scale)
        matrix, blocks = torch.empty(chunk.shape, device=self.device), self.plan.layout.groups[number].blocks
        many = 1 if scale is None else max(chunk.whose) + 1  # to each of its tensors the matrix is the whole of it
        places = places_in(chunk, 0, blocks, self.device, tensors=scale is not None)
        self._combine(number, places, (chunk.shape,) * many, triton.addresses([[matrix] * many], self.device), factors=scale)
        return matrix

    def step(
        self, tensors: Sequence[Tensor], rates: Sequence[float], signs: Sequence[bool], scale: Tensor | None = None
    ) -> None:
        """In one launch for all tensors with the same settings; see `DeviceReceived`."""
        done = {n for n in self._fast if all(tensors[g.index].dtype in _DTYPES for g in self.plan.layout.groups[n].grids)}
        for number in sorted(done):
            group = self.plan.layout.groups[number]
            whole = [grid.index for grid in group.grids]
            held = Held(tensors, whole)
            where = triton.addresses([held.tensors], self.device)
            for (dtype, rate, sign), some in alike([(tensors[i].dtype, float(rates[i]), signs[i]) for i in whole]):
                places = places_of(group, 0, group.blocks, tuple(whole[n] for n in some), self.device)
                shapes = self.plan.layout.shapes
                self._combine(number, places, shapes, where, factors=scale, lr=rate, sign=sign, step=True, dtype=dtype)
            held.write_back()
        if self._rows is not None and all(tensors[i].dtype in _DTYPES for i in self.plan.layout.dense):
            self._rows.step(tensors, rates, signs, scale)
            done.add(-1)
        if len(done) < len(self.plan.layout.groups) + bool(self.plan.layout.dense):
            self._step_others(tensors, rates, signs, scale, done)

    def squares(self) -> Tensor:
        """See `DeviceReceived`; all tensors are summed up together where the kernels know all of them."""
        layout = self.plan.layout
        if self._rows is None or len(self._fast) < len(layout.groups):
            return super().squares()
        found = [self._squares_of(n, group) for n, group in enumerate(layout.groups)]
        counts = [grid.blocks for group in layout.groups for grid in group.grids]
        counts += [-(-math.prod(layout.shapes[i]) // DENSE_GROUP) for i in layout.dense]
        order = [grid.index for group in layout.groups for grid in group.grids] + [*layout.dense]
        sums = sums_of(torch.cat([*found, self._rows.squares()]), tuple(counts))
        out = torch.zeros(len(layout.shapes), dtype=torch.float64, device=self.device)
        return out.index_copy_(0, table(tuple(order), torch.int64, self.device), sums)

    def _combine(
        self,
        number: int,
        places: Tensor,
        shapes: tuple[Shape, ...] = (),
        where: Tensor | None = None,
        *,
        factors: Tensor | None = None,
        squares: Tensor | None = None,
        lr: float = 0.0,
        sign: bool = False,
        step: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Start the kernel that combines what all workers sent of some blocks."""
        sent, basis, weights = self._of[number], basis_of(self.chain, self.device), self._merge_of.weights
        tables = (places, shapes_on(shapes, self.device), places if where is None else where, basis, sent.entries, sent.scales)
        given = [basis if given is None else given for given in (weights, factors, squares)]
        how = {"MESSAGES": len(self._raw), "SENDERS": self.mean.over == "senders", "WEIGHTED": weights is not None}
        how |= {"FACTORED": factors is not None, "SQUARES": squares is not None, "STEP": step, "SIGN": sign}
        how |= {"DTYPE": dtype, "K": sent.k, "KP": max(16, power_of_two(sent.k)), "PRECISION": triton.SETTINGS["inverse"]}
        numbers = (sent.scales.shape[1], float(self._weights.sum()), lr)
        triton.launch("combine", (len(places),), *tables, *given, *numbers, **how)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
