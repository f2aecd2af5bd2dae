"""How kept values are written: as floats, int8, fp4, two bits, three values or one bit. A sender takes off what is read.

Values come as one long row, in groups that share a scale; no group has values of two tensors. Scales are bfloat16: the range of
float32 in two bytes. The error of every rounding, that of the scale too, stays with the sender: `encode` returns what `decode`
will read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.bits import (
    MOST_THREES,
    Bytes,
    pack,
    pack_threes,
    packed_nbytes,
    packed_segments,
    padding_is_zero,
    unpack,
    unpack_threes,
)
from thinwire.codecs.chain import Float, Stage
from thinwire.codecs.device import values as on_device
from thinwire.codecs.registry import VALUE_FORMATS
from thinwire.codecs.stages import RUN, Floats, Indices, Row, Values, finite
from thinwire.errors import WireError, check_whole_number
from thinwire.kernels import Kernels, library

__all__ = ["Float", "Floats", "Fp4", "Int8", "Row", "Scaled", "Sign", "Ternary", "TwoBit", "Values"]


@dataclass(frozen=True, repr=False)
class Scaled(Values, Stage):
    """Base of the formats with a scale per group: all scales first, then all codes.

    Args:
        group: values that share a scale; 0 means those of one block, or 256 of a dense tensor.
    """

    group: int = 0
    width: ClassVar[float] = 8  # bits per value
    scales = 1  # scales per group

    def __post_init__(self) -> None:
        """Check the group."""
        check_whole_number(f"the group of {type(self).__name__}", self.group, least=0)

    @abstractmethod
    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:
        """Scales [n, scales], already as read back, and codes [n, g].

        Args:
            groups: [n, g], those with fewer values filled up with zeros.
            counts: [n], how many values each really has.
        """

    @abstractmethod
    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        """Values from codes [...] and the scales [..., scales] of their groups."""

    def _check_codes(self, codes: NDArray[np.integer]) -> None:
        """Refuse codes that no sender writes; most formats have none."""

    def group_of(self, k: int) -> int:
        """Values that share a scale."""
        return self.group or k

    def _shown(self, first: object) -> list[str]:
        return [repr(first)] if first != type(self).group else []

    def nbytes_of(self, row: Row) -> int:
        """Two bytes per scale, and the packed codes."""
        return self._head(row) + self._codes_nbytes(row.count)

    def _head(self, row: Row) -> int:
        """Bytes of all scales."""
        return 2 * self.scales * row.groups(self.group_of(row.k))

    def bits_of(self, count: int, k: int) -> float:
        """The codes, and their share of the scales."""
        return count * (self.width + 16 * self.scales / self.group_of(k))

    def write(self, values: Floats, row: Row) -> tuple[Bytes, Floats]:
        """Scale, round, pack; in runs of whole groups, so that the workspace is bounded."""
        borders = row.borders(self.group_of(row.k))
        scales = np.empty((len(borders) - 1, self.scales), np.float32)
        codes, read = np.empty(row.count, np.uint8), np.empty(row.count, np.float32)
        run = max(1, RUN // max(1, int(np.diff(borders).max(initial=1))))  # groups
        for first in range(0, len(scales), run):
            here = borders[first : first + run + 1]
            at = slice(here[0], here[-1])
            scales[first : first + run], codes[at], read[at] = self._write(values[at], np.diff(here))
        return np.concatenate([_bf16_bytes(scales), self._pack(codes)]), read

    def _write(self, values: Floats, counts: Indices) -> tuple[Floats, NDArray[np.integer], Floats]:
        """Scales [groups, scales], codes and what they are read as, of groups of so many values."""
        g = int(counts.max())
        there = None
        if (counts == g).all():
            groups = values.reshape(-1, g)
        else:
            there = np.arange(g) < counts[:, None]
            groups = np.zeros((len(counts), g), np.float32)
            groups[there] = values
        with np.errstate(all="ignore"):  # what is not finite is found by the exchange, which looks at what comes back
            scales, codes = self._quantise(groups, counts.astype(np.float32))
            codes = codes.reshape(-1) if there is None else codes[there]
            return scales, codes, self._scale(codes, scales, counts)

    def read(self, raw: Bytes, row: Row, start: int, stop: int, *, check: bool = True) -> Floats:
        """Unpack and scale."""
        if stop <= start:
            return np.empty(0, np.float32)
        borders, head = row.borders(self.group_of(row.k)), self._head(row)
        first, last = np.searchsorted(borders, start, "right") - 1, np.searchsorted(borders, stop)
        scales = _bf16_floats(raw[2 * self.scales * first : 2 * self.scales * last]).reshape(-1, self.scales)
        if check:
            self._check_scales(scales)
            if stop == row.count:
                self._check_padding(raw[head:], row.count)
        codes = self._unpack(raw[head:], row.count, start, stop)
        if check:
            self._check_codes(codes)
        values = self._scale(codes, scales, np.diff(borders[first : last + 1].clip(start, stop)))
        return finite("value", values) if check else values

    def check(self, raw: Bytes, row: Row) -> float:
        """The largest scale, without looking at the codes: none means more than its scale."""
        scales = self._checked_scales(raw, row)
        return float(scales.max(initial=0))

    def _checked_scales(self, raw: Bytes, row: Row) -> Floats:
        head = self._head(row)
        scales = _bf16_floats(raw[:head])
        self._check_scales(scales)
        self._check_padding(raw[head:], row.count)
        return scales

    @staticmethod
    def _check_scales(scales: Floats) -> None:
        if not (finite("scale", scales) >= 0).all():
            raise WireError(f"a negative scale: {scales.min()}")

    def _check_padding(self, codes: Bytes, count: int) -> None:
        if not padding_is_zero(codes, count, int(self.width)):
            raise WireError("the padding of a value section is not zero")

    def segments(self, row: Row) -> tuple[int, ...] | None:
        """Scales, and the parts of the codes."""
        codes = self._code_segments(row.count)
        return None if codes is None else (self._head(row), *codes)

    def _code_segments(self, count: int) -> tuple[int, ...] | None:
        return packed_segments(count, int(self.width))

    def _codes_nbytes(self, count: int) -> int:
        return packed_nbytes(count, int(self.width))

    def _pack(self, codes: NDArray[np.integer]) -> Bytes:
        return pack(codes, int(self.width))

    def _unpack(self, packed: Bytes, count: int, start: int, stop: int) -> NDArray[np.integer]:
        return unpack(packed, count, int(self.width), start, stop)

    def _scale(self, codes: NDArray[np.integer], scales: Floats, counts: Indices) -> Floats:
        """Values of codes, in groups of so many."""
        with np.errstate(over="ignore"):
            if (counts == counts[0]).all():
                return self._restore(codes.reshape(-1, int(counts[0])), scales[:, None]).reshape(-1)
            return self._restore(codes, np.repeat(scales, counts, axis=0))


@dataclass(frozen=True, repr=False)
class Int8(Scaled):
    """Whole numbers -127 to 127 times max|x| / 127 of the group."""

    def _check_codes(self, codes: NDArray[np.integer]) -> None:
        if (codes == 128).any():
            raise WireError("an int8 code of -128, where -127 to 127 are used")

    def check(self, raw: Bytes, row: Row) -> float:
        """127 times the largest scale; the values themselves are looked at only where that is too large."""
        scales = self._checked_scales(raw, row)
        self._check_codes(raw[self._head(row) :])
        with np.errstate(over="ignore"):
            largest = float(127 * scales.max(initial=0))
        return largest if np.isfinite(largest) else Values.check(self, raw, row)

    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:  # noqa: ARG002
        scale = _bf16(np.abs(groups).max(axis=1, initial=0) / 127)
        whole = np.rint(groups / np.where(scale > 0, scale, 1)[:, None])
        return scale[:, None], np.clip(np.nan_to_num(whole), -127, 127).astype(np.int8).view(np.uint8)

    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        return codes.astype(np.uint8, copy=False).view(np.int8) * scales[..., 0]


@dataclass(frozen=True, repr=False)
class Fp4(Scaled):
    """fp4 E3M0 (Streaming DiLoCo): a sign and {0, 2^-6, ..., 2^-1, 1} times max|x| of the group.

    Bit 3 of a code is the sign; bits 0 to 2 are e, for 2^(e - 7), or 0 for zero.
    """

    group: int = 256
    width = 4

    def group_of(self, k: int) -> int:  # noqa: ARG002
        """256 in blocks too."""
        return self.group or 256

    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:  # noqa: ARG002
        scale = _bf16(np.abs(groups).max(axis=1, initial=0))
        ratio = np.abs(groups)
        ratio /= np.where(scale > 0, scale, 1)[:, None]
        bits = ratio.view(np.int32)  # of floats that are not negative: they are in the order of the numbers
        e = (bits + (1 << 22)) >> 23  # the exponent of the nearest power of two, plus 127
        e -= 120
        np.clip(e, 1, 7, out=e)
        e *= bits >= (120 << 23)  # below 2^-7, half of 2^-6: zero
        e |= np.signbit(groups).view(np.uint8) << np.uint8(3)
        return scale[:, None], e.astype(np.uint8)

    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        values = _E3M0.take(codes)  # twice as fast as indexing
        values *= scales[..., 0]
        return values


_E3M0 = np.array([0.0, *(2.0 ** (e - 7) for e in range(1, 8)), 0.0, *(-(2.0 ** (e - 7)) for e in range(1, 8))], np.float32)


@dataclass(frozen=True, repr=False)
class TwoBit(Scaled):
    """A sign and one of two sizes per group: the mean |x| of those above the group's mean |x|, and of those below.

    Bit 0 of a code is the sign, bit 1 says that the value is one of the large ones. Scales: small, then large.
    """

    width = 2
    scales = 2

    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:
        size = np.abs(groups)
        there = np.arange(groups.shape[1]) < counts[:, None]
        large = (size > _mean(size, counts)[:, None]) & there
        many = large.sum(axis=1)
        small = _mean(np.where(large, 0, size), np.maximum(counts - many, 1))
        return (
            _bf16(np.stack([small, _mean(size * large, np.maximum(many, 1))], axis=1)),
            (np.signbit(groups) + 2 * large).astype(np.uint8),
        )

    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        size = np.where(codes & 2, scales[..., 1], scales[..., 0])
        return np.where(codes & 1, -size, size)


@dataclass(frozen=True, repr=False)
class Ternary(Scaled):
    """Minus one, zero or one times a scale, five values in a byte: those become zero whose loss costs the least squared error.

    Of a group the j largest |x| are kept and read as their mean c / j, which leaves an error of sum x^2 - c^2 / j: j is that of
    the least. Codes are 0, 1 for plus and 2 for minus.
    """

    group: int = 256
    width = 1.6

    def group_of(self, k: int) -> int:  # noqa: ARG002
        """256 in blocks too."""
        return self.group or 256

    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:  # noqa: ARG002
        size = np.abs(groups)
        largest = -np.sort(-size, axis=1)
        sums = np.cumsum(largest, axis=1, dtype=np.float64)
        many = np.arange(1, size.shape[1] + 1)
        best = np.argmax(sums * sums / many, axis=1)[:, None]  # of those with a NaN its place, so that the scale is NaN
        least, mean = np.take_along_axis(largest, best, 1), np.take_along_axis(sums, best, 1) / (best + 1)
        kept = (size >= least) & (size > 0)
        return _bf16(mean.astype(np.float32)), (kept * (1 + np.signbit(groups))).astype(np.uint8)

    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        return _THREE.take(codes) * scales[..., 0]

    def check(self, raw: Bytes, row: Row) -> float:
        """The largest scale; bytes that no five values make are refused."""
        scales = self._checked_scales(raw, row)
        self._check_bytes(raw[self._head(row) :])
        return float(scales.max(initial=0))

    def _check_padding(self, codes: Bytes, count: int) -> None:
        if count % 5 and codes[-1] >= 3 ** (count % 5):
            raise WireError("the padding of a value section is not zero")

    @staticmethod
    def _check_bytes(codes: Bytes) -> None:
        if (codes > MOST_THREES).any():
            raise WireError(f"a byte of {codes.max()}, where five values of three make at most {MOST_THREES}")

    def _code_segments(self, count: int) -> tuple[int, ...] | None:
        return None if count % 5 else (count // 5,)

    def _codes_nbytes(self, count: int) -> int:
        return -(-count // 5)

    def _pack(self, codes: NDArray[np.integer]) -> Bytes:
        return pack_threes(codes)

    def _unpack(self, packed: Bytes, count: int, start: int, stop: int) -> NDArray[np.integer]:  # noqa: ARG002
        self._check_bytes(packed[start // 5 : -(-stop // 5)])
        return unpack_threes(packed, start, stop)


_THREE = np.array([0.0, 1.0, -1.0], np.float32)


@dataclass(frozen=True, repr=False)
class Sign(Scaled):
    """The sign alone, times mean |x| of the group, which is the scale of least squared error. The bit is set for minus."""

    width = 1

    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:
        return _bf16(_mean(np.abs(groups), counts))[:, None], np.signbit(groups).astype(np.uint8)

    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        return np.where(codes, -scales[..., 0], scales[..., 0])

    def overwrite(self, values: Floats, row: Row) -> Bytes:
        """See `Values`; by a C kernel without a second copy of the values."""
        if row.count and values.flags.c_contiguous and (fast := self._kernels(row)) is not None:
            raw = np.zeros(self.nbytes_of(row), np.uint8)
            if fast.write_signs(values, row.k, raw):
                return raw
        return super().overwrite(values, row)

    def read_into(self, raw: Bytes, row: Row, start: int, stop: int, out: Floats) -> bool:
        """See `Values`."""
        fast = None if start % row.k or stop % row.k else self._kernels(row)
        if fast is None:
            return False
        head = len(raw) - packed_nbytes(row.count, int(self.width))
        fast.read_signs(raw[:head], raw[head:], start // row.k, row.k, out)
        return True

    def _kernels(self, row: Row) -> Kernels | None:
        """The C kernels, which know blocks of k values with a scale each."""
        return library() if self.group_of(row.k) == row.k and row.whole_blocks else None


def _mean(groups: Floats, counts: NDArray[np.number]) -> Floats:
    """Mean of each group; summed in float64, since the sum of values that float32 holds may not fit."""
    return (groups.sum(axis=1, dtype=np.float64) / counts).astype(np.float32)


def _bf16(values: Floats) -> Floats:
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float().numpy()


def _bf16_bytes(values: Floats) -> Bytes:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).bfloat16().view(torch.uint8).numpy()


def _bf16_floats(raw: Bytes) -> Floats:
    if not len(raw):  # torch does not look at an empty array in another dtype
        return np.empty(0, np.float32)
    return torch.from_numpy(raw.copy()).view(torch.bfloat16).float().numpy()


VALUE_FORMATS.add(5, Int8)
VALUE_FORMATS.add(6, Fp4)
VALUE_FORMATS.add(7, TwoBit)
VALUE_FORMATS.add(8, Sign)
VALUE_FORMATS.add(9, Ternary)
on_device.FORMATS |= {
    Int8: on_device.WholeNumbers,
    Fp4: on_device.Powers,
    TwoBit: on_device.TwoSizes,
    Sign: on_device.Signs,
    Ternary: on_device.Thirds,
}
