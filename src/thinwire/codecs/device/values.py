"""Value formats for tensors on a device: the bytes of `codecs.values`, and one flag per message for what is not sound in them.

A format reads the same range of several messages at once. `FORMATS` says which stages have one: the exact class of a stage,
since a class that derives from it may write other bytes. Stages without one are written and read on the host.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.device.bits import aligned, bad_padding, number, pack, pack_threes, table, unpack, unpack_threes
from thinwire.codecs.stages import Row, Values

MOST_THREES = 242  # the largest byte that five numbers from 0 to 2 make
_RUN = 1 << 22  # values of all messages that are looked at at once where a format cannot tell their size from its scales
_E3M0 = (0.0, *(2.0 ** (e - 7) for e in range(1, 8)), 0.0, *(-(2.0 ** (e - 7)) for e in range(1, 8)))


class Format(ABC):
    """How the values of one stage are written and read.

    Args:
        stage: the stage, for its settings.
    """

    def __init__(self, stage: Any):
        self.stage = stage

    @abstractmethod
    def write(self, values: Tensor, row: Row) -> tuple[list[Tensor], Tensor]:
        """Pieces of bytes of values [count], float32, and what is read of them."""

    @abstractmethod
    def read(self, raw: Tensor, row: Row, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` in several messages: float32 [messages, stop - start]."""

    @abstractmethod
    def check(self, raw: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """Which messages are not sound, and a number that no value in them is larger than, both [messages]."""


FORMATS: dict[type[Values], type[Format]] = {}


def format_of(stage: Values) -> Format:
    """The format of a stage that has one."""
    return FORMATS[type(stage)](stage)


class Floats(Format):
    """Floating point numbers without a scale."""

    def write(self, values: Tensor, row: Row) -> tuple[list[Tensor], Tensor]:
        """Cast."""
        if not row.count:
            return [], values
        cast = values.to(self.stage.wire_dtype)
        return [cast.view(torch.uint8)], cast.float()

    def read(self, raw: Tensor, row: Row, start: int, stop: int) -> Tensor:  # noqa: ARG002
        """Cast back."""
        size = self.stage.wire_dtype.itemsize
        return aligned(raw[:, start * size : stop * size], self.stage.wire_dtype).float()

    def check(self, raw: Tensor, row: Row) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """NaN passes through the search for the largest."""
        largest = aligned(raw, self.stage.wire_dtype).abs().amax(1).float()
        return ~largest.isfinite(), largest


# --- Groups that share a scale ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """The groups of a row of values that share a scale; none has values of two tensors.

    Attributes:
        count: values in all.
        n: how many groups.
        g: values of the largest.
        borders: the first value of each group, and the end, [n + 1]; None where all groups are of equal size.
    """

    count: int
    n: int
    g: int
    device: torch.device
    borders: Tensor | None

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(row: Row, group: int, device: torch.device) -> Groups:
        """Groups of at most so many values."""
        g = min(group, max(row.lengths))
        even = all(length % g == 0 for length in row.lengths)
        borders = None if even else torch.from_numpy(row.borders(group)).to(device)
        return Groups(row.count, row.groups(group), g, device, borders)

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """How many values each group has, [n], or 0-d where all have the same."""
        return number(self.g, dtype, self.device) if self.borders is None else self.borders.diff().to(dtype)

    def there(self) -> Tensor | None:
        """Which places of `split` hold a value; None where all do."""
        if self.borders is None:
            return None
        return torch.arange(self.g, device=self.device) < self.borders.diff()[:, None]

    def split(self, values: Tensor) -> Tensor:
        """Values [count] group by group, [n, g], filled up with zeros."""
        there = self.there()
        if self.borders is None or there is None:
            return values.view(self.n, self.g)
        at = self.borders[:-1, None] + torch.arange(self.g, device=self.device)
        found = values.index_select(0, at.clamp_max_(self.count - 1).view(-1)).view(self.n, self.g)
        return torch.where(there, found, number(0, values.dtype, self.device))

    def join(self, split: Tensor) -> Tensor:
        """The opposite of `split`."""
        if self.borders is None:
            return split.reshape(-1)
        group = self._group(0, self.count)
        within = torch.arange(self.count, device=self.device) - self.borders.index_select(0, group)
        return split.reshape(-1).index_select(0, group * self.g + within)

    def spread(self, scales: Tensor, start: int, stop: int) -> Tensor:
        """The scale of values `start` to `stop`: scales [messages, n, scales] become [messages, stop - start, scales]."""
        if self.borders is None and not start % self.g and not stop % self.g:
            some = scales[:, start // self.g : stop // self.g, None]
            return some.expand(-1, -1, self.g, -1).reshape(len(scales), stop - start, -1)
        return scales.index_select(1, self._group(start, stop))

    def _group(self, start: int, stop: int) -> Tensor:
        """The group of values `start` to `stop`."""
        at = torch.arange(start, stop, device=self.device)
        if self.borders is None:
            return at.div(self.g, rounding_mode="floor")
        return torch.searchsorted(self.borders, at, right=True) - 1


class Scaled(Format):
    """A scale per group: all scales first, in bfloat16, then all codes."""

    @abstractmethod
    def _quantise(self, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Scales [n, scales] in float32, as they are read back, and codes [n, g].

        Args:
            values: [n, g], filled up with zeros.
            groups: how many values each group has.
        """

    @abstractmethod
    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Values from codes [...] and the scales [..., scales] of their groups."""

    def _groups(self, row: Row, device: torch.device) -> Groups:
        return Groups.of(row, self.stage.group_of(row.k), device)

    def _head(self, row: Row) -> int:
        """Bytes of all scales."""
        return 2 * self.stage.scales * row.groups(self.stage.group_of(row.k))

    def write(self, values: Tensor, row: Row) -> tuple[list[Tensor], Tensor]:
        """Scale, round, pack."""
        if not row.count:
            return [], values
        groups = self._groups(row, values.device)
        scales, codes = self._quantise(groups.split(values), groups)
        flat = groups.join(codes)
        read = self._restore(flat, groups.spread(scales[None], 0, row.count)[0])
        return [scales.bfloat16().view(-1).view(torch.uint8), self._pack(flat)], read

    def read(self, raw: Tensor, row: Row, start: int, stop: int) -> Tensor:
        """Unpack and scale."""
        codes = self._unpack(raw[:, self._head(row) :], row.count, start, stop)
        return self._restore(codes, self._groups(row, raw.device).spread(self._scales(raw, row), start, stop))

    def check(self, raw: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """Scales and padding; no code means more than its scale."""
        scales, codes = self._scales(raw, row).flatten(1), raw[:, self._head(row) :]
        largest = scales.amax(1)
        wrong = [~largest.isfinite(), (scales < 0).any(1), *self._odd_codes(codes, row.count)]
        return torch.stack(wrong).any(0), largest

    def _scales(self, raw: Tensor, row: Row) -> Tensor:
        """[messages, n, scales]."""
        return aligned(raw[:, : self._head(row)], torch.bfloat16).float().view(len(raw), -1, self.stage.scales)

    def _odd_codes(self, codes: Tensor, count: int) -> list[Tensor]:
        """Which messages have codes that no sender writes, or padding that is not zero; none or more of [messages]."""
        found = bad_padding(codes, count, int(self.stage.width))
        return [] if found is None else [found]

    def _pack(self, codes: Tensor) -> Tensor:
        return pack(codes, int(self.stage.width))

    def _unpack(self, packed: Tensor, count: int, start: int, stop: int) -> Tensor:
        return unpack(packed, count, int(self.stage.width), start, stop)


def _bf16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def _mean(values: Tensor, sizes: Tensor) -> Tensor:
    """Mean of each group; summed in float64, since the sum of values that float32 holds may not fit."""
    return (values.sum(1, dtype=torch.float64) / sizes).float()


def _looked_up(values: tuple[float, ...], codes: Tensor) -> Tensor:
    return table(values, torch.float32, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _divisor(scale: Tensor) -> Tensor:
    """[n, 1]: what to divide by, which is not zero."""
    return torch.where(scale > 0, scale, number(1, scale.dtype, scale.device))[:, None]


class WholeNumbers(Scaled):
    """`codecs.Int8`."""

    def _quantise(self, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        scale = _bf16(values.abs().amax(1) / number(127, torch.float32, values.device))
        whole = (values / _divisor(scale)).round_().nan_to_num_().clamp_(-127, 127)
        return scale[:, None], whole.to(torch.int8).view(torch.uint8)

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.contiguous().view(torch.int8) * scales[..., 0]

    def _unpack(self, packed: Tensor, count: int, start: int, stop: int) -> Tensor:  # noqa: ARG002
        return packed[:, start:stop]

    def _pack(self, codes: Tensor) -> Tensor:
        return codes

    def _odd_codes(self, codes: Tensor, count: int) -> list[Tensor]:  # noqa: ARG002
        return [(codes == 128).any(1)]

    def check(self, raw: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """127 times the largest scale; the values themselves are looked at as well, for where that is too large."""
        wrong, scale = super().check(raw, row)
        bound, runs = scale * 127, runs_of(row.count, len(raw))
        most = torch.stack([self.read(raw, row, a, b).abs().amax(1) for a, b in runs]).amax(0)
        largest = torch.where(bound.isfinite(), bound, most)
        return wrong | ~largest.isfinite(), largest


class Powers(Scaled):
    """`codecs.Fp4`."""

    def _quantise(self, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        size = values.abs()
        scale = _bf16(size.amax(1))
        bits = (size / _divisor(scale)).view(torch.int32)  # of floats that are not negative: in the order of the numbers
        exponent = ((bits + (1 << 22) >> 23) - 120).clamp_(1, 7) * (bits >= 120 << 23)
        return scale[:, None], (exponent | values.signbit().int() << 3).to(torch.uint8)

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _looked_up(_E3M0, codes) * scales[..., 0]


class TwoSizes(Scaled):
    """`codecs.TwoBit`."""

    def _quantise(self, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        size, sizes = values.abs(), groups.sizes(torch.float64)
        large = size > _mean(size, sizes)[:, None]
        if (there := groups.there()) is not None:
            large &= there
        many = large.sum(1)
        small = _mean(size.masked_fill(large, 0), (sizes - many).clamp_min_(1))
        return _bf16(torch.stack([small, _mean(size * large, many.clamp_min(1))], 1)), values.signbit() + 2 * large.byte()

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        size = torch.where((codes & 2).bool(), scales[..., 1], scales[..., 0])
        return torch.where((codes & 1).bool(), -size, size)


class Thirds(Scaled):
    """`codecs.Ternary`."""

    def _quantise(self, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        size = values.abs()
        largest = -(-size).sort(1).values  # NaN last, as numpy sorts it
        sums = largest.cumsum(1, dtype=torch.float64)
        many = torch.arange(1, groups.g + 1, dtype=torch.float64, device=values.device)
        best = (sums * sums / many).argmax(1, keepdim=True)
        least, mean = largest.gather(1, best), sums.gather(1, best) / (best + 1)
        kept = (size >= least) & (size > 0)
        return _bf16(mean.float()), kept.byte() * (1 + values.signbit().byte())

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        return _looked_up((0.0, 1.0, -1.0), codes) * scales[..., 0]

    def _odd_codes(self, codes: Tensor, count: int) -> list[Tensor]:
        odd = [(codes > MOST_THREES).any(1)]
        return [*odd, codes[:, -1] >= 3 ** (count % 5)] if count % 5 else odd

    def _pack(self, codes: Tensor) -> Tensor:
        return pack_threes(codes)

    def _unpack(self, packed: Tensor, count: int, start: int, stop: int) -> Tensor:  # noqa: ARG002
        return unpack_threes(packed, start, stop)


class Signs(Scaled):
    """`codecs.Sign`."""

    def _quantise(self, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        return _bf16(_mean(values.abs(), groups.sizes(torch.float64)))[:, None], values.signbit().byte()

    def _restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.where(codes.bool(), -scales[..., 0], scales[..., 0])


def runs_of(count: int, messages: int) -> list[tuple[int, int]]:
    """Ranges of values that are looked at at once, of so many in each of so many messages."""
    step = max(1, _RUN // messages)
    return [(at, min(at + step, count)) for at in range(0, count, step)]
