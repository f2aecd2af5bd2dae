"""How kept values are written: as floats, int8, fp4, two bits or one. A sender takes off its buffer what receivers read.

Values come as one long row, in groups that share a scale. Scales are bfloat16: the range of float32 in two bytes. The error of
every rounding, that of the scale too, stays with the sender: `encode` returns what `decode` will read.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.codecs.bits import Bytes, pack, packed_nbytes, padding_is_zero, unpack
from thinwire.codecs.dense import WIRE_DTYPES
from thinwire.codecs.stage import Stage
from thinwire.errors import WireError, check_choice, check_whole_number

Floats = NDArray[np.float32]

DENSE_GROUP = 256  # values per scale in tensors that are sent whole
_RUN = 1 << 20  # values that are worked on at once, so that the workspace is bounded


@dataclass(frozen=True, repr=False)
class Values(Stage):
    """Base of the value formats."""

    @abstractmethod
    def nbytes_of(self, count: int, k: int) -> int:
        """Length of `count` values that come k to a block."""

    def bits_of(self, count: int, k: int) -> float:
        """Bits that so many values take among many others: their length without any rounding up, where the format knows."""
        return 8 * self.nbytes_of(count, k)

    @abstractmethod
    def write(self, values: Floats, k: int) -> tuple[Bytes, Floats]:
        """The bytes of `values` [count], and what `read` will make of them."""

    @abstractmethod
    def read(self, raw: Bytes, count: int, k: int, start: int, stop: int, *, check: bool = True) -> Floats:
        """Values `start` to `stop` of `count`; without `check` where they have been checked before.

        Raises:
            WireError: a value or scale that is not finite, a negative scale, or padding that is not zero.
        """

    def check(self, raw: Bytes, count: int, k: int) -> float:
        """A number that no value is larger than in magnitude; all are checked as `read` does, without keeping them.

        Raises:
            WireError: see `read`.
        """
        largest, step = 0.0, k * max(1, _RUN // k)
        for at in range(0, count, step):
            values = self.read(raw, count, k, at, min(at + step, count))
            largest = max(largest, float(values.max()), -float(values.min()))
        return largest


@dataclass(frozen=True, repr=False)
class Float(Values):
    """Floating point numbers without a scale.

    Args:
        dtype: "fp32", "bf16" or "fp16".
    """

    dtype: str = "fp32"

    def __post_init__(self) -> None:
        """Check the name."""
        check_choice("the dtype of Float", self.dtype, ("fp32", "bf16", "fp16"))

    @property
    def wire_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return WIRE_DTYPES[self.dtype]

    def nbytes_of(self, count: int, k: int) -> int:  # noqa: ARG002
        """Two or four bytes each."""
        return count * self.wire_dtype.itemsize

    def write(self, values: Floats, k: int) -> tuple[Bytes, Floats]:  # noqa: ARG002
        """Cast."""
        if not len(values):
            return np.empty(0, np.uint8), values
        cast = torch.from_numpy(values).to(self.wire_dtype)
        return cast.view(torch.uint8).numpy(), cast.float().numpy()

    def read(self, raw: Bytes, count: int, k: int, start: int, stop: int, *, check: bool = True) -> Floats:  # noqa: ARG002
        """Cast back."""
        if stop <= start:
            return np.empty(0, np.float32)
        size = self.wire_dtype.itemsize
        part = raw[start * size : stop * size].copy()  # aligned, and never a view into the message
        values = torch.from_numpy(part).view(self.wire_dtype).float().numpy()
        return _finite("value", values) if check else values


@dataclass(frozen=True, repr=False)
class Scaled(Values):
    """Base of the formats with a scale per group: all scales first, then all codes.

    Args:
        group: values that share a scale; 0 means those of one block, or 256 of a dense tensor.
    """

    group: int = 0
    width = 8  # bits per value
    scales = 1  # scales per group
    within_scale = True  # whether every code means a value that is not larger than its scale

    def __post_init__(self) -> None:
        """Check the group."""
        check_whole_number(f"the group of {type(self).__name__}", self.group, least=0)

    @abstractmethod
    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:
        """Scales [n, scales], already as read back, and codes [n, g].

        Args:
            groups: [n, g], the last one filled up with zeros.
            counts: [n], how many values each really has.
        """

    @abstractmethod
    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        """Values from codes [...] and the scales [..., scales] of their groups."""

    def _check_codes(self, codes: NDArray[np.integer]) -> None:
        """Refuse codes that no sender writes; most formats have none."""

    def _group(self, k: int) -> int:
        return self.group or k

    def _shown(self, first: object) -> list[str]:
        return [repr(first)] if first != type(self).group else []

    def nbytes_of(self, count: int, k: int) -> int:
        """Two bytes per scale, and the packed codes."""
        return 2 * self.scales * -(-count // self._group(k)) + packed_nbytes(count, self.width)

    def bits_of(self, count: int, k: int) -> float:
        """The codes, and their share of the scales."""
        return count * (self.width + 16 * self.scales / self._group(k))

    def write(self, values: Floats, k: int) -> tuple[Bytes, Floats]:
        """Scale, round, pack; in runs of whole groups, so that the workspace is bounded."""
        count = len(values)
        g = min(self._group(k), max(1, count))
        scales = np.empty((-(-count // g), self.scales), np.float32)
        codes, read = np.empty(count, np.uint8), np.empty(count, np.float32)
        run = max(1, _RUN // g)  # groups
        for first in range(0, len(scales), run):
            at = slice(first * g, min((first + run) * g, count))
            scales[first : first + run], codes[at], read[at] = self._write(values[at], g)
        return np.concatenate([_bf16_bytes(scales), pack(codes, self.width)]), read

    def _write(self, values: Floats, g: int) -> tuple[Floats, NDArray[np.integer], Floats]:
        """Scales [groups, scales], codes and what they are read as, of whole groups (the last may be short)."""
        count, n = len(values), -(-len(values) // g)
        groups = np.zeros((n, g), np.float32)
        groups.reshape(-1)[:count] = values
        counts = np.full(n, g, np.float32)
        counts[-1] = count - (n - 1) * g
        with np.errstate(all="ignore"):  # what is not finite is found by the exchange, which looks at what comes back
            scales, codes = self._quantise(groups, counts)
            flat = codes.reshape(-1)[:count]
            return scales, flat, self._scale(flat, scales, 0, g)

    def read(self, raw: Bytes, count: int, k: int, start: int, stop: int, *, check: bool = True) -> Floats:
        """Unpack and scale."""
        if stop <= start:
            return np.empty(0, np.float32)
        g = min(self._group(k), count)
        head = 2 * self.scales * -(-count // g)
        first, last = start // g, -(-stop // g)
        scales = _bf16_floats(raw[2 * self.scales * first : 2 * self.scales * last]).reshape(-1, self.scales)
        if check:
            self._check_scales(scales)
            if stop == count:
                self._check_padding(raw[head:], count)
        codes = unpack(raw[head:], count, self.width, start, stop)
        if check:
            self._check_codes(codes)
        values = self._scale(codes, scales, start - first * g, g)
        return _finite("value", values) if check else values

    def check(self, raw: Bytes, count: int, k: int) -> float:
        """The largest scale where that says enough, without looking at the codes."""
        if not self.within_scale or not count:
            return super().check(raw, count, k)
        head = 2 * self.scales * -(-count // min(self._group(k), count))
        scales = _bf16_floats(raw[:head])
        self._check_scales(scales)
        self._check_padding(raw[head:], count)
        return float(scales.max())

    @staticmethod
    def _check_scales(scales: Floats) -> None:
        if not (_finite("scale", scales) >= 0).all():
            raise WireError(f"a negative scale: {scales.min()}")

    def _check_padding(self, codes: Bytes, count: int) -> None:
        if not padding_is_zero(codes, count, self.width):
            raise WireError("the padding of a value section is not zero")

    def _scale(self, codes: NDArray[np.integer], scales: Floats, start: int, g: int) -> Floats:
        """Values of codes, the first of which is number `start` of its group."""
        with np.errstate(over="ignore"):
            if not start and not len(codes) % g:  # whole groups
                return self._restore(codes.reshape(-1, g), scales[:, None]).reshape(-1)
            return self._restore(codes, np.repeat(scales, g, axis=0)[start : start + len(codes)])


@dataclass(frozen=True, repr=False)
class Int8(Scaled):
    """Whole numbers -127 to 127 times max|x| / 127 of the group."""

    within_scale = False

    def _check_codes(self, codes: NDArray[np.integer]) -> None:
        if (codes == 128).any():
            raise WireError("an int8 code of -128, where -127 to 127 are used")

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

    def _group(self, k: int) -> int:  # noqa: ARG002
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
class Sign(Scaled):
    """The sign alone, times mean |x| of the group, which is the scale of least squared error. The bit is set for minus."""

    width = 1

    def _quantise(self, groups: Floats, counts: Floats) -> tuple[Floats, NDArray[np.integer]]:
        return _bf16(_mean(np.abs(groups), counts))[:, None], np.signbit(groups).astype(np.uint8)

    def _restore(self, codes: NDArray[np.integer], scales: Floats) -> Floats:
        return np.where(codes, -scales[..., 0], scales[..., 0])


def _mean(groups: Floats, counts: NDArray[np.number]) -> Floats:
    """Mean of each group; summed in float64, since the sum of values that float32 holds may not fit."""
    return (groups.sum(axis=1, dtype=np.float64) / counts).astype(np.float32)


def _bf16(values: Floats) -> Floats:
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().float().numpy()


def _bf16_bytes(values: Floats) -> Bytes:
    return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).bfloat16().view(torch.uint8).numpy()


def _bf16_floats(raw: Bytes) -> Floats:
    return torch.from_numpy(raw.copy()).view(torch.bfloat16).float().numpy()


def _finite(what: str, values: Floats) -> Floats:
    if len(values) and not np.isfinite([values.min(), values.max()]).all():
        raise WireError(f"a {what} that is not finite")
    return values
