"""Triton kernels in place of torch operations, for messages of DCT(64) >> TopK(k) >> Sign() on a GPU.

Groups of 64 x 64 blocks are encoded, read, combined and applied by one launch each, whatever the number of tensors. All else,
such as groups of smaller blocks, goes through torch operations as before, in the same message.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs.device.chunks import Chunk, alike
from thinwire.codecs.device.positions import BY_SIZE
from thinwire.codecs.device.values import FORMATS, Signs
from thinwire.codecs.indices import EliasFano, IndexCode, index_code
from thinwire.codecs.layout import Group, Shape, as_matrix
from thinwire.codecs.made import DeviceWhitening, Made
from thinwire.codecs.message_plan import Plan, Section
from thinwire.codecs.stages import Stages, off_host
from thinwire.kernels import BLOCK, triton

_MOST = 256  # entries of a block that the kernels keep
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# --- What the kernels know ---------------------------------------------------------------------------------------------------


def in_triton(stages: Stages) -> bool:
    """Whether the kernels know the messages of these stages."""
    k = stages.selection.count(BLOCK * BLOCK)
    known = stages.transform.in_kernels and stages.transform.length(BLOCK) == BLOCK and type(stages.selection) in BY_SIZE
    signs = FORMATS.get(type(stages.values)) is Signs and stages.values.group_of(k) == k
    return known and signs and _known_code(index_code(BLOCK * BLOCK, k))


def _known_code(code: IndexCode | None) -> bool:
    return isinstance(code, EliasFano) and 1 <= code.low <= 8 and code.k % 8 == 0 and code.k <= _MOST


def arithmetic(stages: Stages, device: torch.device) -> str:
    """For the handshake: the kernels in use, "off" where torch and numpy do what they know, "" where they know nothing."""
    if not off_host(device):
        length = stages.transform.length(BLOCK)
        return kernels.name() if stages.in_kernels(length, length, device) else ""
    return triton.name(device) if in_triton(stages) and triton.possible(device) else ""


def groups_in_triton(stages: Stages, plan: Plan, device: torch.device) -> frozenset[int]:
    """Groups of a message that the kernels encode and decode on a device."""
    if not in_triton(stages) or not triton.available(device):
        return frozenset()
    sizes = [n for n, group in enumerate(plan.layout.groups) if group.h == group.w == BLOCK]
    return frozenset(n for n in sizes if all(_known_code(section.code) for section in plan.of_group[n]))


@dataclass(frozen=True)
class Code:
    """Where everything is in the bytes of a section, and what kernels are compiled for."""

    k: int
    low: int
    bits: int
    row: int
    at: tuple[int, int, int]  # low bits, scales, signs

    @staticmethod
    def of(section: Section) -> Code:
        """That of a section of a group that the kernels know."""
        code, n = section.code, section.blocks
        assert isinstance(code, EliasFano)
        row, middle = code._row.bits // 8, section.middle - section.start
        return Code(code.k, code.low, code._row.L, row, (n * row, middle, middle + 2 * n))

    @property
    def padded(self) -> int:
        """K rounded up to a power of two, of at least 16."""
        return max(16, power_of_two(self.k))


def power_of_two(n: int) -> int:
    """The next one."""
    return 1 << (n - 1).bit_length()


# --- Tables ------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def places_of(group: Group, first: int, last: int, some: tuple[int, ...], device: torch.device) -> Tensor:
    """Blocks `first` to `last` of a group that belong to some tensors, [blocks, 4]: number, tensor, row, column."""
    found = [_grid_places(grid.first, grid.X, grid.blocks, grid.index) for grid in group.grids if grid.index in some]
    return _moved(_within(np.concatenate([np.empty((0, 4), np.int32), *found]), first, last), device)


@functools.lru_cache(maxsize=256)
def places_in(chunk: Chunk, first: int, last: int, device: torch.device, *, tensors: bool = False) -> Tensor:
    """The same of a chunk's blocks, in its matrix: tensor 0, unless its blocks shall have the numbers of their tensors."""
    table = _grid_places(0, chunk.x, chunk.blocks, 0)
    table[:, 0] = chunk._numbers
    if tensors:
        table[:, 1] = chunk._owners
    return _moved(_within(table, first, last), device)


def _grid_places(first: int, across: int, blocks: int, tensor: int) -> np.ndarray:
    n = np.arange(blocks, dtype=np.int32)
    return np.stack([n + first, np.full_like(n, tensor), n // across, n % across], 1)


def _within(table: np.ndarray, first: int, last: int) -> np.ndarray:
    table = table[(table[:, 0] >= first) & (table[:, 0] < last)]
    table[:, 0] -= first
    return table


def _moved(table: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(table, np.int32)).to(device)


@functools.lru_cache(maxsize=256)
def shapes_on(shapes: tuple[Shape, ...], device: torch.device) -> Tensor:
    """Rows and columns of the matrices that tensors are seen as, int64 [tensors, 2]."""
    return torch.tensor([as_matrix(shape) for shape in shapes], dtype=torch.int64).view(-1, 2).to(device)


class Held:
    """Some of a list of tensors in contiguous memory; where a tensor has gaps, a copy that is written back.

    Args:
        tensors: all of them.
        some: numbers of those that are needed.
    """

    def __init__(self, tensors: Sequence[Tensor], some: Sequence[int]):
        """Copy those that have gaps."""
        self.tensors: list[Tensor | None] = [None] * len(tensors)
        self._copies: list[tuple[Tensor, Tensor]] = []
        for i in some:
            held = whole = tensors[i].detach()
            if not whole.is_contiguous():
                held = whole.contiguous()
                self._copies.append((whole, held))
            self.tensors[i] = held

    def write_back(self) -> None:
        """After they were changed."""
        for whole, copy in self._copies:
            whole.copy_(copy)


# --- Encoding ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sent:
    """What messages say of the blocks of a group.

    Attributes:
        entries: int16 [(messages,) blocks, k]: see `kernels.triton.blocks`.
        scales: float32 [(messages,) blocks].
    """

    entries: Tensor
    scales: Tensor

    @property
    def k(self) -> int:
        """Entries of a block."""
        return self.entries.shape[-1]

    def take_from(self, group: Group, slots: Sequence[Tensor], shapes: tuple[Shape, ...], scale: Sequence[float]) -> None:
        """Take what this one message says off slots, times a number for each."""
        device, held = self.scales.device, Held(slots, [grid.index for grid in group.grids])
        where = triton.addresses([held.tensors], device)
        for alpha, some in alike([float(scale[grid.index]) for grid in group.grids]):
            places = places_of(group, 0, group.blocks, tuple(group.grids[n].index for n in some), device)
            tables = (places, shapes_on(shapes, device), where)
            how = {"K": self.k, "KP": max(16, power_of_two(self.k))}
            triton.launch("take", (len(places),), *tables, self.entries, self.scales, alpha, **how)
        held.write_back()


@dataclass(frozen=True, eq=False)
class Feed:
    """What enters the blocks of a message.

    Attributes:
        slots: in the domain of the transform; None for tensors as they are.
        tensors: what is transformed and added to the slots; None for slots as they are.
        decay: of each slot.
        scale: of each tensor.
    """

    slots: Sequence[Tensor] | None
    tensors: Sequence[Tensor] | Made | None
    decay: Sequence[float] = ()
    scale: Sequence[float] = ()

    @property
    def known(self) -> bool:
        """Whether kernels can read the tensors themselves; else torch operations have to make them."""
        if isinstance(self.tensors, Made):
            how = self.tensors.on_device
            return how is not None and all(v.dtype == torch.float32 for v in how.v) and _floats(how.g)
        return self.tensors is None or _floats(self.tensors)

    def _sources(self) -> tuple[DeviceWhitening | None, Sequence[Tensor] | None]:
        """How tensors are whitened, where they are, and what is read; None for slots as they are."""
        if isinstance(self.tensors, Made):
            assert self.tensors.on_device is not None
            return self.tensors.on_device, self.tensors.on_device.g
        return None, self.tensors

    def lists(self, some: Sequence[int], count: int, device: torch.device) -> Given:
        """Where some of the slots and tensors are, and second moments where tensors are whitened."""
        how, given = self._sources()
        held = [None if given is None else Held(given, some), None if how is None else Held(how.v, some)]
        nothing: list[Tensor | None] = [None] * count
        lists = [self.slots or nothing, *(nothing if h is None else h.tensors for h in held)]
        return Given(triton.addresses(lists, device), None if how is None else how.clip_on(device), held)

    def launches(self, whole: Sequence[int]) -> Iterator[tuple[tuple[int, ...], list[float], dict[str, Any]]]:
        """Tensors with the same settings, the numbers that kernels are given, and what they are compiled for."""
        numbers = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]  # decay, scale, b2, 1 - b2, root, eps
        kind = {"ADD": False, "KEPT": True, "STORED": False, "WHITEN": False, "CLIP": False, "DTYPE": torch.float32}
        how, given = self._sources()
        if given is None:
            yield tuple(whole), numbers, kind
            return
        settings = [
            (given[i].dtype, self.decay[i] if self.slots is not None else 0.0, self.scale[i], how and how.settings(i))
            for i in whole
        ]
        kind |= {"ADD": True, "STORED": self.slots is not None, "WHITEN": how is not None}
        kind |= {"CLIP": how is not None and how.clips}
        for (dtype, decay, scale, whiten), some in alike(settings):
            numbers[:2] = float(decay), float(scale)
            if whiten is not None:
                b2, eps, step = whiten
                numbers[2:] = b2, 1 - b2, math.sqrt(1 - b2**step), eps
            yield tuple(whole[n] for n in some), list(numbers), kind | {"KEPT": bool(decay), "DTYPE": dtype}


@dataclass(frozen=True, eq=False)
class Given:
    """What kernels are told of the tensors that they read and write.

    Attributes:
        addresses: of slots, tensors and second moments.
        clip: what multiplies the tensors first; None for nothing.
        held: the tensors and the second moments.
    """

    addresses: Tensor
    clip: Tensor | None
    held: list[Held | None]

    def clip_or(self, other: Tensor) -> Tensor:
        """What multiplies the tensors, or something that is not looked at."""
        return other if self.clip is None else self.clip

    def write_back(self) -> None:
        """After second moments were changed."""
        if (moments := self.held[1]) is not None:
            moments.write_back()


def _floats(tensors: Sequence[Tensor]) -> bool:
    return all(t.dtype in _DTYPES for t in tensors)


def encode_group(
    chain: Stages, plan: Plan, number: int, feed: Feed, given: Given, device: torch.device
) -> tuple[Sent, list[Tensor]]:
    """What is kept of a group, and the bytes of its sections in order; slots are changed where anything is added to them."""
    group, made = plan.layout.groups[number], _Encoding(chain, plan, number, device)
    whole, shapes = [grid.index for grid in group.grids], shapes_on(plan.layout.shapes, device)
    for section in plan.of_group[number]:
        for some, numbers, kind in feed.launches(whole):
            places = places_of(group, section.first, section.last, some, device)
            made.launch(section, places, shapes, given, numbers, kind)
    return made.sent, made.written


def encode_chunks(
    chain: Stages, plan: Plan, number: int, matrices: Iterator[tuple[Chunk, Tensor]], device: torch.device
) -> tuple[Sent, list[Tensor]]:
    """The same of tensors that torch operations have made, chunk by chunk."""
    made = _Encoding(chain, plan, number, device)
    for chunk, matrix in matrices:
        feed = Feed(None, [matrix], scale=[1.0])
        given, (launch,) = feed.lists([0], 1, device), feed.launches([0])
        for section in plan.of_group[number]:
            places = places_in(chunk, section.first, section.last, device)
            made.launch(section, places, shapes_on((chunk.shape,), device), given, *launch[1:])
    return made.sent, made.written


class _Encoding:
    """Room for what is kept of a group, and for the bytes of its sections."""

    def __init__(self, chain: Stages, plan: Plan, number: int, device: torch.device):
        blocks, self.sections = plan.layout.groups[number].blocks, plan.of_group[number]
        self.basis, k = basis_of(chain, device), self.sections[0].k
        entries = torch.empty((blocks, k), dtype=torch.int16, device=device)
        self.sent = Sent(entries, torch.empty(blocks, device=device))
        self.written = [torch.empty(s.stop - s.start, dtype=torch.uint8, device=device) for s in self.sections]

    def launch(
        self, section: Section, places: Tensor, shapes: Tensor, given: Given, numbers: list[float], kind: dict[str, Any]
    ) -> None:
        if not len(places):
            return
        code, here, nth = Code.of(section), slice(section.first, section.last), self.sections.index(section)
        tile = min(32, power_of_two(code.row))
        how = {"K": code.k, "KP": power_of_two(code.k), "LOW": code.low, "ROW": code.row, "TILE": tile}
        tables = (places, shapes, given.addresses, given.addresses.shape[1], self.basis, given.clip_or(self.basis))
        out = (self.sent.entries[here], self.sent.scales[here], self.written[nth], *code.at)
        precision = triton.SETTINGS["forward"]
        triton.launch("encode", (len(places),), *tables, *out, *numbers, **kind, **how, PRECISION=precision)


def basis_of(chain: Stages, device: torch.device) -> Tensor:
    """The matrix of the transform."""
    found = chain.transform.matrix(BLOCK, 0, device)
    return torch.eye(BLOCK, device=device) if found is None else found
