"""Messages that are read, combined and applied by Triton kernels, where these know them: see `fused`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.device.chunks import Chunk, alike
from thinwire.codecs.device.decoder import DeviceReceived
from thinwire.codecs.device.fused import Code, Held, Sent, basis_of, groups_in_triton, places_in, places_of, power_of_two, shapes_on
from thinwire.codecs.layout import Group, Shape
from thinwire.codecs.message_plan import Plan, Section
from thinwire.codecs.stages import Stages
from thinwire.kernels import triton


def read_on_device(chain: Stages, plan: Plan, messages: Messages, *, raises: bool = True) -> DeviceReceived:
    """The messages of a round on a device, read by kernels as far as they know them; see `DeviceReceived`."""
    plain = not messages.mean.trimmed and not messages.mean.needs_norms
    fast = groups_in_triton(chain, plan, messages.payloads[0].data.device) if plain else frozenset[int]()
    return FusedReceived(chain, plan, messages, fast, raises=raises) if fast else DeviceReceived(chain, plan, messages, raises=raises)


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
        return tuple(section for section in super()._sections_to_check() if section.number not in self._fast)

    def _look_at_values(self, wrong: list[Tensor]) -> tuple[Tensor, Tensor]:
        most, squares = super()._look_at_values(wrong)
        return torch.stack([most, *(sent.scales.max() for sent in self._of.values())]).max(), squares

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

    def step(self, tensors: Sequence[Tensor], lr: Sequence[float], sign: Sequence[bool], scale: Tensor | None = None) -> None:
        """In one launch for all tensors with the same settings; see `DeviceReceived`."""
        done = {n for n in self._fast if all(tensors[g.index].dtype in _DTYPES for g in self.plan.layout.groups[n].grids)}
        for number in sorted(done):
            group = self.plan.layout.groups[number]
            whole = [grid.index for grid in group.grids]
            held = Held(tensors, whole)
            where = triton.addresses([held.tensors], self.device)
            for (dtype, rate, signs), some in alike([(tensors[i].dtype, float(lr[i]), sign[i]) for i in whole]):
                places = places_of(group, 0, group.blocks, tuple(whole[n] for n in some), self.device)
                shapes = self.plan.layout.shapes
                self._combine(number, places, shapes, where, factors=scale, lr=rate, sign=signs, step=True, dtype=dtype)
            held.write_back()
        self._step_others(tensors, lr, sign, scale, done)

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
