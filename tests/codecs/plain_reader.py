"""A reader of thinwire's messages that was written from docs/wire-format.md alone: whole numbers, struct and zlib, no arrays.

    read(message, "DCT(8) >> TopK(3) >> Sign()", [(9, 20), (3,)], round=7, rank=1)

gives every tensor as a flat list, or raises `Refused`. It is slow and has no part in the library: it is what the page says,
said a second time.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import math
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Shape = tuple[int, ...]
M64 = (1 << 64) - 1


class Refused(Exception):
    """The message is not what it should be."""


def refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        raise Refused(what)


# --- Envelope --------------------------------------------------------------------------------------------------------------


def fingerprint(codec: str, shapes: Sequence[Shape]) -> int:
    text = codec + "\n" + "".join("x".join(str(d) for d in shape) + "," for shape in shapes)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass
class Header:
    flags: int
    round: int
    rank: int
    weight: float


def open_envelope(message: bytes, *, expected: int, round: int, rank: int, nbytes: int) -> tuple[Header, bytes]:
    refuse_if(len(message) < 48, "short")
    refuse_if(message[0:4] != b"THNW", "magic")
    refuse_if(message[4] != 1, "version")
    (length,) = struct.unpack("<Q", message[32:40])
    refuse_if(length != nbytes, "announced length")
    refuse_if(len(message) != 48 + length, "length")
    (checksum,) = struct.unpack("<I", message[44:48])
    refuse_if(zlib.crc32(message[:44] + bytes(4) + message[48:]) != checksum, "checksum")
    refuse_if(message[5] > 1 or message[6:8] != bytes(2) or message[40:44] != bytes(4), "flags")
    told, number, sender, weight = struct.unpack("<QQIf", message[8:32])
    refuse_if(told != expected, "fingerprint")
    refuse_if(number != round, "round")
    refuse_if(sender != rank, "rank")
    refuse_if(not math.isfinite(weight) or weight < 0, "weight")
    return Header(message[5], number, sender, weight), message[48:]


# --- Codec -----------------------------------------------------------------------------------------------------------------


@dataclass
class Stage:
    name: str
    first: Any
    seed: int = 0


@dataclass
class Codec:
    transform: Stage
    selection: Stage
    values: Stage


def parse(text: str) -> Codec:
    codec = Codec(Stage("Identity", 64), Stage("All", None), Stage("Float", "fp32"))
    for part in text.split(" >> "):
        found = re.fullmatch(r"(\w+)\(([^,]*?)(?:, seed=(-?\d+))?\)", part)
        assert found, part
        name, first, seed = found[1], ast.literal_eval(found[2]) if found[2] else None, int(found[3] or 0)
        if name in ("Identity", "DCT", "Hadamard", "RandomOrthogonal"):
            codec.transform = Stage(name, first, seed)
        elif name in ("All", "TopK", "RandomK", "Striding"):
            codec.selection = Stage(name, first, seed)
        else:
            codec.values = Stage(name, first)
    return codec


# --- From tensors to blocks ----------------------------------------------------------------------------------------------


@dataclass
class Blocks:
    """A tensor in blocks."""

    tensor: int
    rows: int
    cols: int
    h: int
    w: int

    @property
    def Y(self) -> int:
        return math.ceil(Fraction(self.rows, self.h))

    @property
    def X(self) -> int:
        return math.ceil(Fraction(self.cols, self.w))

    @property
    def L(self) -> int:
        return self.h * self.w


def block_length(transform: Stage, n: int) -> int:
    if transform.name in ("Identity", "DCT"):
        return min(n, transform.first)
    power = 1
    while power < n:
        power *= 2
    return min(power, transform.first)


def kept(selection: Stage, L: int) -> int:
    if selection.name == "All":
        return L
    if isinstance(selection.first, int):
        return min(selection.first, L)
    product = Fraction(selection.first * L)
    whole, rest = math.floor(product), product - math.floor(product)
    up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    return max(1, whole + up)


def lay_out(codec: Codec, shapes: Sequence[Shape]) -> tuple[list[list[Blocks]], list[int]]:
    """Groups of tensors in blocks, and the tensors that are sent whole."""
    groups: dict[tuple[int, int], list[Blocks]] = {}
    whole = []
    for t, shape in enumerate(shapes):
        rows, cols = (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))
        if rows * cols == 0:
            continue
        h = 1 if rows == 1 else block_length(codec.transform, rows)
        b = Blocks(t, rows, cols, h, block_length(codec.transform, cols))
        if is_sent_whole(codec, b):
            whole.append(t)
        else:
            groups.setdefault((b.h, b.w), []).append(b)
    everything = [t for t, shape in enumerate(shapes) if math.prod(shape)]
    if laid_out_nbytes(codec, list(groups.values()), whole, shapes) > laid_out_nbytes(codec, [], everything, shapes):
        return [], everything
    return list(groups.values()), whole


def is_sent_whole(codec: Codec, b: Blocks) -> bool:
    blocks, k = b.Y * b.X, kept(codec.selection, b.L)
    indices = blocks * choose_code(b.L, k, 8).bits if codec.selection.name == "TopK" else 0
    in_blocks = indices + values_bits(codec.values, blocks * k, k)
    whole = values_bits(codec.values, b.rows * b.cols, 256)
    if codec.selection.name == "All":
        return codec.transform.name == "Identity" or in_blocks > whole
    return in_blocks >= whole


# --- Packed numbers ------------------------------------------------------------------------------------------------------


def packed_nbytes(count: int, width: int) -> int:
    return count * (width // 8) + (count + 7) // 8 * (width % 8)


def unpack(raw: bytes, count: int, width: int) -> list[int]:
    assert len(raw) == packed_nbytes(count, width)
    q, r = divmod(width, 8)
    low = [int.from_bytes(raw[i * q : (i + 1) * q], "little") for i in range(count)]
    high = []
    for at in range(count * q, len(raw), r or 1):
        eight = int.from_bytes(raw[at : at + r], "little")
        high += [(eight >> (i * r)) & ((1 << r) - 1) for i in range(8)]
    refuse_if(any(high[count:]), "padding")
    return [a | (high[i] << (8 * q) if r else 0) for i, a in enumerate(low)]


# --- Indices -------------------------------------------------------------------------------------------------------------


@dataclass
class Code:
    name: str
    L: int
    k: int
    low: int = 0

    @property
    def width(self) -> int:
        return max(1, (self.L - 1).bit_length())

    @property
    def B(self) -> int:
        return math.ceil(Fraction(self.L, 1 << self.low)) if self.low else self.L - self.k + 1

    @property
    def ranks(self) -> int:
        return math.comb(self.B + self.k - 1, self.k)

    @property
    def rank_bits(self) -> int:
        return max(1, (self.ranks - 1).bit_length())

    @property
    def limbs(self) -> list[int]:
        whole, rest = divmod(self.rank_bits, 52)
        return [52] * whole + [rest] * bool(rest)

    @property
    def R(self) -> int:
        """Bits of a row."""
        return self.L if self.name == "Bitmap" else math.ceil(Fraction(self.L, 1 << self.low)) + self.k - 1

    @property
    def bits(self) -> int:
        if self.name == "Packed":
            return self.k * self.width
        return self.k * self.low + (self.rank_bits if self.name == "Ranked" else 8 * ((self.R + 7) // 8))

    def nbytes(self, n: int) -> int:
        if self.name == "Packed":
            return packed_nbytes(n * self.k, self.width)
        high = sum(packed_nbytes(n, width) for width in self.limbs) if self.name == "Ranked" else n * ((self.R + 7) // 8)
        return high + packed_nbytes(n * self.k, self.low)

    def read(self, raw: bytes, n: int) -> list[list[int]]:
        if self.name == "Packed":
            rows = self.read_packed(raw, n)
        else:
            rows = self.read_ranked(raw, n) if self.name == "Ranked" else self.read_rows(raw, n)
        for row in rows:
            refuse_if(max(row) >= self.L, "index out of range")
            refuse_if(any(a >= b for a, b in itertools.pairwise(row)), "order")
        return rows

    def read_packed(self, raw: bytes, n: int) -> list[list[int]]:
        flat = unpack(raw, n * self.k, self.width)
        return [flat[b * self.k : (b + 1) * self.k] for b in range(n)]

    def read_rows(self, raw: bytes, n: int) -> list[list[int]]:
        size, rows = (self.R + 7) // 8, []
        for b in range(n):
            bits = int.from_bytes(raw[b * size : (b + 1) * size], "little")
            refuse_if(bits >> self.R != 0, "padding")
            rows.append([e for e in range(self.R) if bits >> e & 1])
            refuse_if(len(rows[-1]) != self.k, "bitmap")
        return rows if self.name == "Bitmap" else self.with_low(rows, raw[n * size :])

    def read_ranked(self, raw: bytes, n: int) -> list[list[int]]:
        ranks, at = [0] * n, 0
        for i, width in enumerate(self.limbs):
            size = packed_nbytes(n, width)
            ranks = [rank | limb << (52 * i) for rank, limb in zip(ranks, unpack(raw[at : at + size], n, width), strict=True)]
            at += size
        refuse_if(any(rank >= self.ranks for rank in ranks), "rank")
        rows = [self.unrank(rank) for rank in ranks]
        return self.with_low(rows, raw[at:]) if self.low else rows

    def with_low(self, rows: list[list[int]], raw: bytes) -> list[list[int]]:
        lows = iter(unpack(raw, len(rows) * self.k, self.low))
        return [[((s - j) << self.low) | next(lows) for j, s in enumerate(row)] for row in rows]

    def unrank(self, rank: int) -> list[int]:
        found = []
        s = self.B + self.k - 2
        for j in range(self.k - 1, -1, -1):
            while math.comb(s, j + 1) > rank:
                s -= 1
            rank -= math.comb(s, j + 1)
            found.append(s)
        return found[::-1]


def choose_code(L: int, k: int, n: int) -> Code:
    lows = range((L - 1).bit_length())
    ranked = [c for c in (Code("Ranked", L, k, low) for low in lows) if k * (c.B + 1) * len(c.limbs) <= 1 << 20]
    near = [c for c in ranked if c.bits <= 1.03 * math.log2(math.comb(L, k))]
    fewest = [c for c in ranked if c.bits == min(r.bits for r in ranked)]
    choice = Code("Packed", L, k)
    for other in (Code("Bitmap", L, k), *(Code("EliasFano", L, k, low) for low in lows)):
        if other.nbytes(n) < choice.nbytes(n):
            choice = other
    for other in (near or fewest)[-1:]:
        if other.nbytes(n) * 1.01 < choice.nbytes(n):
            choice = other
    return choice


# --- Values --------------------------------------------------------------------------------------------------------------

WIDTHS = {"Int8": (8, 1), "Fp4": (4, 1), "TwoBit": (2, 2), "Sign": (1, 1)}  # bits of a code, scales of a group
FLOATS = {"fp32": 4, "bf16": 2, "fp16": 2}


def group_of(values: Stage, k: int) -> int:
    return values.first or (256 if values.name == "Fp4" else k)


def values_nbytes(values: Stage, count: int, k: int) -> int:
    if values.name == "Float":
        return count * FLOATS[values.first]
    (width, scales), g = WIDTHS[values.name], group_of(values, k)
    return 2 * scales * ((count + g - 1) // g) + packed_nbytes(count, width)


def values_bits(values: Stage, count: int, k: int) -> float:
    if values.name == "Float":
        return 8 * count * FLOATS[values.first]
    width, scales = WIDTHS[values.name]
    return count * (width + 16 * scales / group_of(values, k))


def bf16(raw: bytes) -> float:
    return struct.unpack("<f", bytes(2) + raw)[0]


def binary32(x: float) -> float:
    """Rounded to binary32; infinite where it does not fit."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.inf


def read_values(values: Stage, raw: bytes, count: int, k: int) -> list[float]:
    assert len(raw) == values_nbytes(values, count, k)
    out = read_floats(values.first, raw) if values.name == "Float" else read_scaled(values, raw, count, group_of(values, k))
    refuse_if(not all(math.isfinite(v) for v in out), "value")
    return out


def read_floats(dtype: str, raw: bytes) -> list[float]:
    size = FLOATS[dtype]
    each = [raw[at : at + size] for at in range(0, len(raw), size)]
    return [bf16(v) if dtype == "bf16" else struct.unpack("<f" if dtype == "fp32" else "<e", v)[0] for v in each]


def read_scaled(values: Stage, raw: bytes, count: int, g: int) -> list[float]:
    width, scales = WIDTHS[values.name]
    head = 2 * scales * ((count + g - 1) // g)
    told = [bf16(raw[at : at + 2]) for at in range(0, head, 2)]
    refuse_if(not all(math.isfinite(s) for s in told), "scale")
    refuse_if(any(s < 0 for s in told), "negative scale")
    codes = unpack(raw[head:], count, width)
    refuse_if(values.name == "Int8" and 128 in codes, "an int8 code of -128")
    return [binary32(meaning(values.name, c, told[i // g * scales : i // g * scales + scales])) for i, c in enumerate(codes)]


def meaning(name: str, c: int, scales: list[float]) -> float:
    if name == "Int8":
        return (c - 256 if c >= 128 else c) * scales[0]
    if name == "Fp4":
        e = c & 7
        return (-1 if c & 8 else 1) * (2.0 ** (e - 7) if e else 0.0) * scales[0]
    if name == "TwoBit":
        return (-1 if c & 1 else 1) * scales[c >> 1]
    return -scales[0] if c else scales[0]


# --- Shared seed -----------------------------------------------------------------------------------------------------------


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def u(seed: int, round: int, purpose: int, i: int) -> int:
    key = mix((mix((mix(seed & M64) + round) & M64) + purpose) & M64)
    return mix((key + (i + 1) * 0x9E3779B97F4A7C15) & M64)


def places(selection: Stage, L: int, round: int, block: int) -> list[int]:
    k = kept(selection, L)
    if selection.name == "All":
        return list(range(L))
    if selection.name == "Striding":
        a = [i * L // k for i in range(k + 1)]
        return [a[i] + round % (a[i + 1] - a[i]) for i in range(k)]
    order = sorted(range(L), key=lambda i: (u(selection.seed, round, 2, i), i))
    d = u(selection.seed, round, 3, block) % L
    return sorted((i + d) % L for i in order[:k])


# --- Transforms ------------------------------------------------------------------------------------------------------------

Matrix = list[list[float]]


def matrix(transform: Stage, n: int, round: int) -> Matrix:
    if transform.name == "DCT":
        return [
            [math.sqrt((2 if i else 1) / n) * math.cos(math.pi * (2 * j + 1) * i / (2 * n)) for j in range(n)] for i in range(n)
        ]
    H = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(n)] for i in range(n)]
    if transform.name == "Hadamard":
        return [[x / math.sqrt(n) for x in row] for row in H]
    assert transform.name == "RandomOrthogonal"
    P = [[float(i == j) for j in range(n)] for i in range(n)]
    for d in (1, 2, 3):
        D = [-1.0 if u(transform.seed, round, 1, (d - 1) * n + m) >> 63 else 1.0 for m in range(n)]
        P = times(times(P, H), [[D[i] * (i == j) for j in range(n)] for i in range(n)])
    return [[x * n**-1.5 for x in row] for row in P]


def times(A: Matrix, B: Matrix) -> Matrix:
    return [[math.fsum(a * b for a, b in zip(row, col, strict=True)) for col in zip(*B, strict=True)] for row in A]


def back(transform: Stage, Q: Matrix, round: int) -> Matrix:
    if transform.name == "Identity":
        return Q
    P_h, P_w = matrix(transform, len(Q), round), matrix(transform, len(Q[0]), round)
    return times([list(row) for row in zip(*P_h, strict=True)], times(Q, P_w))


# --- All of it -----------------------------------------------------------------------------------------------------------


def body_nbytes(text: str, shapes: Sequence[Shape]) -> int:
    codec = parse(text)
    return laid_out_nbytes(codec, *lay_out(codec, shapes), shapes)


def laid_out_nbytes(codec: Codec, groups: list[list[Blocks]], whole: list[int], shapes: Sequence[Shape]) -> int:
    total = 0
    for group in groups:
        n, L = sum(b.Y * b.X for b in group), group[0].L
        k = kept(codec.selection, L)
        total += choose_code(L, k, n).nbytes(n) if codec.selection.name == "TopK" else 0
        total += values_nbytes(codec.values, n * k, k)
    return total + values_nbytes(codec.values, sum(math.prod(shapes[t]) for t in whole), 256)


def read(message: bytes, text: str, shapes: Sequence[Shape], *, round: int, rank: int) -> list[list[float]]:
    """Every tensor of a message, flat; raises `Refused`."""
    expected, nbytes = fingerprint(text, shapes), body_nbytes(text, shapes)
    header, body = open_envelope(message, expected=expected, round=round, rank=rank, nbytes=nbytes)
    refuse_if(bool(header.flags & 1), "withdrawn")
    return read_body(body, text, shapes, round=round)


def read_body(body: bytes, text: str, shapes: Sequence[Shape], *, round: int) -> list[list[float]]:
    """Every tensor of a body, flat; raises `Refused`."""
    codec, at = parse(text), 0
    groups, whole = lay_out(codec, shapes)
    tensors = [[0.0] * math.prod(shape) for shape in shapes]

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        return body[at - n : at]

    for group in groups:
        n, L = sum(b.Y * b.X for b in group), group[0].L
        k = kept(codec.selection, L)
        if codec.selection.name == "TopK":
            code = choose_code(L, k, n)
            indices = code.read(take(code.nbytes(n)), n)
        else:
            indices = [places(codec.selection, L, round, b) for b in range(n)]
        values = read_values(codec.values, take(values_nbytes(codec.values, n * k, k)), n * k, k)
        number = 0
        for b in group:
            for y in range(b.Y):
                for x in range(b.X):
                    Q = [[0.0] * b.w for _ in range(b.h)]
                    for i, e in enumerate(indices[number]):
                        Q[e // b.w][e % b.w] = values[number * k + i]
                    put(tensors[b.tensor], b, y, x, back(codec.transform, Q, round))
                    number += 1
    count = sum(len(tensors[t]) for t in whole)
    rest = read_values(codec.values, take(values_nbytes(codec.values, count, 256)), count, 256)
    for t in whole:
        tensors[t], rest = rest[: len(tensors[t])], rest[len(tensors[t]) :]
    assert at == len(body)
    assert not rest
    return tensors


def put(tensor: list[float], b: Blocks, y: int, x: int, block: Matrix) -> None:
    """A block to its place; what lies in the padding is dropped."""
    for r, row in enumerate(block):
        for c, value in enumerate(row):
            if y * b.h + r < b.rows and x * b.w + c < b.cols:
                tensor[(y * b.h + r) * b.cols + x * b.w + c] = value
