"""A reader of thinwire's messages that was written from docs/wire-format.md alone: whole numbers, struct and zlib, no arrays.

    read(message, "DCT(8) >> TopK(3) >> Sign()", [(9, 20), (3,)], round=7, sender=1)

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
    sender: int
    state_hash: int
    weight: float


@dataclass
class Part:
    first: int
    blocks: int
    values: int
    codes: int
    rest: bytes


def open_envelope(message: bytes, *, expected: int, round: int, sender: int, nbytes: int) -> tuple[Header, list[Part]]:
    refuse_if(len(message) < 56, "short")
    refuse_if(message[0:4] != b"THNW", "magic")
    refuse_if(message[4] != 2, "version")
    (checksum,) = struct.unpack("<I", message[52:56])
    refuse_if(zlib.crc32(message[:52] + bytes(4)) != checksum, "checksum")
    (length,) = struct.unpack("<Q", message[40:48])
    refuse_if(length != nbytes, "announced length")
    refuse_if(len(message) != 56 + length, "length")
    refuse_if(message[5] > 3, "flags")
    (count,) = struct.unpack("<H", message[6:8])
    told, number, name, state = struct.unpack("<QQQQ", message[8:40])
    (weight,) = struct.unpack("<f", message[48:52])
    refuse_if(told != expected, "fingerprint")
    refuse_if(number != round, "round")
    refuse_if(name != sender, "sender")
    refuse_if(not math.isfinite(weight) or weight < 0, "weight")
    parts = open_parts(message[56:])
    refuse_if(len(parts) != count, "number of parts")
    return Header(message[5], number, name, state, weight), parts


def open_parts(body: bytes) -> list[Part]:
    parts, at = [], 0
    while at < len(body):
        refuse_if(len(body) - at < 32, "short part")
        first, blocks, length, values, codes, checksum = struct.unpack("<QQQHHI", body[at : at + 32])
        refuse_if(length > len(body) - at - 32, "length of a part")
        rest = body[at + 32 : at + 32 + length]
        refuse_if(zlib.crc32(body[at : at + 28] + bytes(4) + rest) != checksum, "checksum of a part")
        parts.append(Part(first, blocks, values, codes, rest))
        at += 32 + length
    return parts


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
    parts: int = 1

    @property
    def linear(self) -> bool:
        return self.selection.name != "TopK" and self.values.name == "Float"


def parse(text: str) -> Codec:
    found = re.fullmatch(r"\((.*)\)\.split\((\d+)\)", text)
    if found:
        codec = parse(found[1])
        codec.parts = int(found[2])
        return codec
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
    def R(self) -> int:
        """Bits of a row."""
        return self.L if self.name == "Bitmap" else math.ceil(Fraction(self.L, 1 << self.low)) + self.k - 1

    @property
    def bits(self) -> int:
        if self.name == "Packed":
            return self.k * self.width
        return self.k * self.low + 8 * ((self.R + 7) // 8)

    def nbytes(self, n: int) -> int:
        if self.name == "Packed":
            return packed_nbytes(n * self.k, self.width)
        return n * ((self.R + 7) // 8) + packed_nbytes(n * self.k, self.low)

    def read(self, raw: bytes, n: int) -> list[list[int]]:
        rows = self.read_packed(raw, n) if self.name == "Packed" else self.read_rows(raw, n)
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

    def with_low(self, rows: list[list[int]], raw: bytes) -> list[list[int]]:
        lows = iter(unpack(raw, len(rows) * self.k, self.low))
        return [[((s - j) << self.low) | next(lows) for j, s in enumerate(row)] for row in rows]


def choose_code(L: int, k: int, n: int) -> Code:
    choice = Code("Packed", L, k)
    for other in (Code("Bitmap", L, k), *(Code("EliasFano", L, k, low) for low in range((L - 1).bit_length()))):
        if other.nbytes(n) < choice.nbytes(n):
            choice = other
    return choice


CODE_NUMBERS = {"Packed": 0, "Bitmap": 1, "EliasFano": 2}

# --- Values --------------------------------------------------------------------------------------------------------------

WIDTHS = {
    "Int8": (8, 1),
    "Fp4": (4, 1),
    "TwoBit": (2, 2),
    "Sign": (1, 1),
    "Ternary": (1.6, 1),
}  # bits of a code, scales of a group
FLOATS = {"fp32": 4, "bf16": 2, "fp16": 2}


def group_of(values: Stage, k: int) -> int:
    return values.first or (256 if values.name in ("Fp4", "Ternary") else k)


FORMAT_NUMBERS = {"fp32": 1, "bf16": 2, "fp16": 3, "fp64": 4, "Int8": 5, "Fp4": 6, "TwoBit": 7, "Sign": 8, "Ternary": 9}


def values_nbytes(values: Stage, lengths: Sequence[int], k: int) -> int:
    """Of a row with so many values of each tensor."""
    if values.name == "Float":
        return sum(lengths) * FLOATS[values.first]
    (width, scales), g = WIDTHS[values.name], group_of(values, k)
    codes = (sum(lengths) + 4) // 5 if values.name == "Ternary" else packed_nbytes(sum(lengths), width)
    return 2 * scales * sum((n + g - 1) // g for n in lengths) + codes


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


def read_values(values: Stage, raw: bytes, lengths: Sequence[int], k: int) -> list[float]:
    assert len(raw) == values_nbytes(values, lengths, k)
    out = read_floats(values.first, raw) if values.name == "Float" else read_scaled(values, raw, lengths, group_of(values, k))
    refuse_if(not all(math.isfinite(v) for v in out), "value")
    return out


def read_floats(dtype: str, raw: bytes) -> list[float]:
    size = FLOATS[dtype]
    each = [raw[at : at + size] for at in range(0, len(raw), size)]
    return [bf16(v) if dtype == "bf16" else struct.unpack("<f" if dtype == "fp32" else "<e", v)[0] for v in each]


def read_scaled(values: Stage, raw: bytes, lengths: Sequence[int], g: int) -> list[float]:
    width, scales = WIDTHS[values.name]
    groups = [number for number, size in enumerate(group_sizes(lengths, g)) for _ in range(size)]  # of each value
    head = 2 * scales * len(group_sizes(lengths, g))
    told = [bf16(raw[at : at + 2]) for at in range(0, head, 2)]
    refuse_if(not all(math.isfinite(s) for s in told), "scale")
    refuse_if(any(s < 0 for s in told), "negative scale")
    codes = threes(raw[head:], len(groups)) if values.name == "Ternary" else unpack(raw[head:], len(groups), width)
    refuse_if(values.name == "Int8" and 128 in codes, "an int8 code of -128")
    return [
        binary32(meaning(values.name, c, told[group * scales : group * scales + scales]))
        for group, c in zip(groups, codes, strict=True)
    ]


def threes(raw: bytes, count: int) -> list[int]:
    refuse_if(any(byte > 242 for byte in raw), "a byte of")
    digits = [byte // three % 3 for byte in raw for three in (1, 3, 9, 27, 81)]
    refuse_if(any(digits[count:]), "padding")
    return digits[:count]


def group_sizes(lengths: Sequence[int], g: int) -> list[int]:
    return [min(g, n - at) for n in lengths for at in range(0, n, g)]


def meaning(name: str, c: int, scales: list[float]) -> float:
    if name == "Int8":
        return (c - 256 if c >= 128 else c) * scales[0]
    if name == "Fp4":
        e = c & 7
        return (-1 if c & 8 else 1) * (2.0 ** (e - 7) if e else 0.0) * scales[0]
    if name == "Ternary":
        return (0, 1, -1)[c] * scales[0]
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


@dataclass
class Section:
    """Blocks of one group, or of the tensors that are sent whole: (tensor, its first block here, how many)."""

    group: list[Blocks] | None
    number: int
    runs: list[tuple[int, int, int]]
    k: int
    lengths: list[int]
    code: Code | None

    @property
    def n(self) -> int:
        return sum(blocks for _, _, blocks in self.runs)

    def nbytes(self, codec: Codec) -> int:
        return (self.code.nbytes(self.n) if self.code else 0) + values_nbytes(codec.values, self.lengths, self.k)


def sections_of(
    codec: Codec, groups: list[list[Blocks]], whole: list[int], shapes: Sequence[Shape], first: int, last: int
) -> list[Section]:
    """What blocks `first` to `last` of a message make."""
    out, base = [], 0
    for group in groups:
        k, runs, begin, number = kept(codec.selection, group[0].L), [], base, 0
        for b in group:
            lo, hi = max(first - base, 0), min(last - base, b.Y * b.X)
            if lo < hi:
                number = number if runs else base - begin + lo
                runs.append((b.tensor, lo, hi - lo))
            base += b.Y * b.X
        if runs:
            n = sum(blocks for _, _, blocks in runs)
            code = choose_code(group[0].L, k, n) if codec.selection.name == "TopK" else None
            out.append(Section(group, number, runs, k, [blocks * k for _, _, blocks in runs], code))
    runs, lengths = [], []
    for t in whole:
        n = math.prod(shapes[t])
        blocks = (n + 255) // 256
        lo, hi = max(first - base, 0), min(last - base, blocks)
        if lo < hi:
            runs.append((t, lo, hi - lo))
            lengths.append(min(hi * 256, n) - lo * 256)
        base += blocks
    if runs:
        out.append(Section(None, 0, runs, 256, lengths, None))
    return out


def borders(codec: Codec, groups: list[list[Blocks]], whole: list[int], shapes: Sequence[Shape]) -> list[int]:
    """The first block of each part, and the end."""
    tensors = [(b.Y * b.X, kept(codec.selection, b.L)) for group in groups for b in group]
    tensors += [((math.prod(shapes[t]) + 255) // 256, 256) for t in whole]
    total = sum(blocks for blocks, _ in tensors)
    cuts = {0}
    for i in range(1, codec.parts):
        at, base = total * i // codec.parts, 0
        for blocks, k in tensors:
            if base <= at < base + blocks:
                g = 1 if codec.values.name == "Float" else group_of(codec.values, k)
                unit = math.lcm(g, k) // k
                cuts.add(base + (at - base) // unit * unit)
            base += blocks
    return [*sorted(cuts - {total}), total] if total else [0, 0]


def body_nbytes(text: str, shapes: Sequence[Shape]) -> int:
    codec = parse(text)
    groups, whole = lay_out(codec, shapes)
    cuts = borders(codec, groups, whole, shapes)
    total = sum(s.nbytes(codec) for a, b in itertools.pairwise(cuts) for s in sections_of(codec, groups, whole, shapes, a, b))
    return total + (0 if codec.linear else 32 * (len(cuts) - 1))


def laid_out_nbytes(codec: Codec, groups: list[list[Blocks]], whole: list[int], shapes: Sequence[Shape]) -> int:
    return sum(s.nbytes(codec) for s in sections_of(codec, groups, whole, shapes, 0, 1 << 62))


def read(message: bytes, text: str, shapes: Sequence[Shape], *, round: int, sender: int) -> list[list[float]]:
    """Every tensor of a message, flat; raises `Refused`."""
    expected, nbytes = fingerprint(text, shapes), body_nbytes(text, shapes)
    header, parts = open_envelope(message, expected=expected, round=round, sender=sender, nbytes=nbytes)
    refuse_if(bool(header.flags & 1), "invalid")
    return read_parts(parts, text, shapes, round=round)


def read_parts(parts: Sequence[Part], text: str, shapes: Sequence[Shape], *, round: int) -> list[list[float]]:
    """Every tensor of some parts of a message, flat, with zeros where no part has it; raises `Refused`."""
    codec = parse(text)
    groups, whole = lay_out(codec, shapes)
    cuts = borders(codec, groups, whole, shapes)
    tensors = [[0.0] * math.prod(shape) for shape in shapes]
    for part in parts:
        refuse_if(part.first not in cuts[:-1], "first block")
        last = cuts[cuts.index(part.first) + 1]
        refuse_if(part.blocks != last - part.first, "number of blocks")
        sections = sections_of(codec, groups, whole, shapes, part.first, last)
        refuse_if(len(part.rest) != sum(s.nbytes(codec) for s in sections), "length of a part")
        name = codec.values.first if codec.values.name == "Float" else codec.values.name
        refuse_if(part.values != FORMAT_NUMBERS[name], "value format")
        refuse_if(part.codes != sum({1 << CODE_NUMBERS[s.code.name] for s in sections if s.code}), "index codes")
        read_sections(part.rest, codec, sections, tensors, round)
    return tensors


def read_body(body: bytes, text: str, shapes: Sequence[Shape], *, round: int) -> list[list[float]]:
    """Every tensor of the body of a linear codec, which has no parts; raises `Refused`."""
    codec = parse(text)
    tensors = [[0.0] * math.prod(shape) for shape in shapes]
    groups, whole = lay_out(codec, shapes)
    read_sections(body, codec, sections_of(codec, groups, whole, shapes, 0, 1 << 62), tensors, round)
    return tensors


def read_sections(raw: bytes, codec: Codec, sections: Sequence[Section], tensors: list[list[float]], round: int) -> None:
    at = 0
    for s in sections:
        indices = []
        if s.code:
            indices = s.code.read(raw[at : at + s.code.nbytes(s.n)], s.n)
            at += s.code.nbytes(s.n)
        elif s.group:
            indices = [places(codec.selection, s.group[0].L, round, s.number + i) for i in range(s.n)]
        size = values_nbytes(codec.values, s.lengths, s.k)
        values = read_values(codec.values, raw[at : at + size], s.lengths, s.k)
        at += size
        if s.group is None:
            for (t, first, _), n in zip(s.runs, s.lengths, strict=True):
                tensors[t][first * 256 : first * 256 + n] = values[:n]
                values = values[n:]
            continue
        number = 0
        for t, first, blocks in s.runs:
            b = next(b for b in s.group if b.tensor == t)
            for block in range(first, first + blocks):
                Q = [[0.0] * b.w for _ in range(b.h)]
                for i, e in enumerate(indices[number]):
                    Q[e // b.w][e % b.w] = values[number * s.k + i]
                put(tensors[t], b, block // b.X, block % b.X, back(codec.transform, Q, round))
                number += 1
    assert at == len(raw)


def put(tensor: list[float], b: Blocks, y: int, x: int, block: Matrix) -> None:
    """A block to its place; what lies in the padding is dropped."""
    for r, row in enumerate(block):
        for c, value in enumerate(row):
            if y * b.h + r < b.rows and x * b.w + c < b.cols:
                tensor[(y * b.h + r) * b.cols + x * b.w + c] = value
