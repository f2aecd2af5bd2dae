"""Decoding on a device: the messages of a round are checked and combined without a look from the host.

All messages are read together. What is not sound in one becomes a flag of its worker on the device; only where a flag is set
are the messages copied to the host and read there once more, by `codecs.decoder`, which says what is wrong and decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from thinwire.codecs.base import Messages
from thinwire.codecs.decoder import Received
from thinwire.codecs.device import chunks as limits
from thinwire.codecs.device.bits import number, table
from thinwire.codecs.device.chunks import Chunk, alike, chunks_of, sums_of
from thinwire.codecs.device.indices import bad_index_padding, read_indices
from thinwire.codecs.device.means import Merge, factors
from thinwire.codecs.device.positions import positions
from thinwire.codecs.device.values import format_of, runs_of
from thinwire.codecs.layout import Group, Piece, matrix_of, write_back
from thinwire.codecs.message_plan import Plan, Section
from thinwire.codecs.stages import Stages
from thinwire.codecs.wire import PART_NBYTES
from thinwire.errors import WireError

_BITS = 1 << 25  # of index codes of all workers that are read at once
_VALUES = 1 << 24  # of all workers that are read at once


class DeviceReceived(Received):
    """The messages of all workers in one round, on a device.

    Args:
        chain: the stages.
        plan: where everything is in a message.
        messages: of all workers, and how they are combined.
        raises: look at `wrong` at once, and raise where it says so; else the caller does, before anything is applied.

    Attributes:
        wrong: which messages are not sound, [workers].

    Raises:
        WireError: a message that is not sound; its `rank` says whose.
    """

    def __init__(self, chain: Stages, plan: Plan, messages: Messages, *, raises: bool = True):
        """Check everything."""
        self.chain, self.plan, self.messages = chain, plan, messages
        self.device, self.round, self.mean = messages.payloads[0].data.device, messages.round, messages.mean
        if any(payload.nbytes != plan.nbytes for payload in messages.payloads):
            self._refuse()
        self._raw = torch.stack([payload.raw() for payload in messages.payloads])
        self._weights = self.mean.weights(messages.weights, len(self._raw))
        self._merge_of = Merge(self.mean, self._weights, self.device)
        self._format = format_of(chain.values)
        wrong = [self._check_headers()]
        self._places = [self._read_places(n, group, wrong) for n, group in enumerate(plan.layout.groups)]
        self._most, squares = self._look_at_values(wrong)
        self._factor = factors(self.mean, squares.sqrt()) if self.mean.needs_norms else None
        self._sent = [self._read_values(n) for n in range(len(plan.layout.groups))]
        self._whole: Tensor | None = None
        self.wrong = torch.stack(wrong).any(0)
        if raises:
            self.raise_if_wrong()

    def raise_if_wrong(self) -> None:
        """Look at the flags of all messages, once."""
        if bool(self.wrong.any()):
            self._refuse()

    def _refuse(self) -> None:
        """Raise what the host says of these messages."""
        on_host = [payload.like(payload.data.cpu()) for payload in self.messages.payloads]
        Received(self.chain, self.plan, replace(self.messages, payloads=on_host))
        raise WireError("a message that is sound on the host and not on the device")

    @property
    def largest(self) -> Tensor:
        """The largest value in any of the messages, or a bound on it, 0-d."""
        return self._most

    @property
    def safe(self) -> Tensor:
        """Whether no sum of these messages can leave the range of float32, whatever the transform does; 0-d."""
        longest = max((group.L for group in self.plan.layout.groups), default=1)
        bound = self._most.double() * math.sqrt(longest) * len(self._raw)
        heaviest = number(float(self._weights.max()), torch.float64, self.device)
        if self._factor is not None:
            heaviest = heaviest * self._factor.max()
        return bound * heaviest.clamp_min(1.0) < float(np.finfo(np.float32).max)

    # --- Checking ----------------------------------------------------------------------------------------------------------

    def _check_headers(self) -> Tensor:
        """Which messages have a part that says something else of itself than it must; checksums are not looked at."""
        due, found = b"", list[Tensor]()
        for part in self.plan.parts:
            if part.header:
                due += part.header[:-4]
                found.append(self._raw[:, part.start : part.start + PART_NBYTES - 4])
        if not found:
            return torch.zeros(len(self._raw), dtype=torch.bool, device=self.device)
        return (torch.cat(found, 1) != table(tuple(due), torch.uint8, self.device)).any(1)

    def _read_places(self, number: int, group: Group, wrong: list[Tensor]) -> Tensor | None:
        """Which entries of each block all workers sent, [workers or 1, blocks, k]; None where all of them."""
        selection, found = self.chain.selection, list[Tensor]()
        if not selection.indexed:
            if selection.everything:
                return None
            return positions(selection, group.L, self.round, 0, group.blocks, self.device)[None]
        kind = torch.int16 if group.L <= 1 << 15 else torch.int32
        for section in self.plan.of_group[number]:
            assert section.code is not None
            step = max(1, _BITS // (section.code.bits * len(self._raw)))
            for start in range(0, section.blocks, step):
                stop = min(start + step, section.blocks)
                code = self._raw[:, section.start : section.middle]
                indices, odd = read_indices(section.code, code, section.blocks, start, stop)
                found.append(indices.to(kind))
                wrong += odd
            wrong += bad_index_padding(section.code, self._raw[:, section.start : section.middle], section.blocks)
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _look_at_values(self, wrong: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The largest value of all, and the squares of the norms of all messages where they are asked for."""
        most, squares = list[Tensor](), torch.zeros(len(self._raw), dtype=torch.float64, device=self.device)
        for section in self._sections_to_check():
            if not section.count:
                continue
            odd, largest = self._format.check(self._part(section), section.row)
            wrong.append(odd)
            if self.mean.needs_norms:
                runs = [self._format.read(self._part(section), section.row, a, b) for a, b in self._runs(section)]
                squares = squares + torch.stack([run.double().square().sum(1) for run in runs]).sum(0)
                largest = torch.stack([run.abs().amax(1) for run in runs]).amax(0)
            most.append(largest.max())
        return torch.stack(most).max() if most else number(0, torch.float32, self.device), squares

    def _sections_to_check(self) -> tuple[Section, ...]:
        """Whose values are looked at."""
        return (*self.plan.sections, *self.plan.whole)

    def _runs(self, section: Section) -> list[tuple[int, int]]:
        return runs_of(section.count, len(self._raw))

    def _part(self, section: Section) -> Tensor:
        """The values of a section in all messages, as bytes."""
        return self._raw[:, section.middle : section.stop]

    # --- Reading -----------------------------------------------------------------------------------------------------------

    def _read_values(self, number: int) -> Tensor:
        """The values of a group in all messages, [workers, blocks, k], with the factors that norms make."""
        workers, blocks = len(self._raw), self.plan.layout.groups[number].blocks
        k = self.plan.of_group[number][0].k
        values, step = torch.empty((workers, blocks * k), device=self.device), k * max(1, _VALUES // (workers * k))
        for section in self.plan.of_group[number]:
            for start in range(0, section.count, step):
                stop = min(start + step, section.count)
                read = self._scaled(self._format.read(self._part(section), section.row, start, stop))
                values[:, section.offset + start : section.offset + stop] = read
        return values.view(workers, blocks, k)

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self._factor is None else values * self._factor[:, None]

    def _mean_blocks(self, number: int, chunk: Chunk) -> Tensor:
        """The mean of the blocks of a chunk in the domain of the transform, [blocks, L]."""
        L, places = chunk.h * chunk.w, self._places[number]
        values = chunk.of_blocks(self._sent[number], 1)
        if places is None:
            return self._merge_of.columns(values.flatten(1)).view(chunk.blocks, L)
        at = chunk.of_blocks(places, 1)
        if not self.chain.selection.indexed:
            means = self._merge_of.columns(values.flatten(1)).view(chunk.blocks, -1)
            return torch.zeros((chunk.blocks, L), device=self.device).scatter_(1, at[0], means)
        at = at + torch.arange(0, chunk.blocks * L, L, device=self.device)[:, None]  # int64
        return self._merge_of.entries(at.flatten(1), values.flatten(1), chunk.blocks * L).view(chunk.blocks, L)

    def _chunks(self, group: Group) -> tuple[Chunk, ...]:
        """A trimmed mean has the values of all workers in memory at once."""
        return chunks_of(group, limits.ENTRIES // (2 * len(self._raw) if self.mean.trimmed else 1))

    # --- Decoding ----------------------------------------------------------------------------------------------------------

    def matrices(self, scale: Tensor | None = None, done: Collection[int] = ()) -> Iterator[tuple[Chunk, Tensor]]:
        """The mean, chunk by chunk: the matrix of its values with padding.

        Args:
            scale: multiplies the mean of each tensor, [tensors].
            done: groups to leave out.
        """
        for n, group in enumerate(self.plan.layout.groups):
            for chunk in self._chunks(group) if n not in done else ():
                yield chunk, self._matrix(n, chunk, scale)

    def _matrix(self, number: int, chunk: Chunk, scale: Tensor | None) -> Tensor:
        """The mean of a chunk of a group, as its matrix."""
        blocks = self._mean_blocks(number, chunk)
        if scale is not None:
            blocks = blocks * chunk.of_tensors(scale)[:, None]
        return self._inverted(chunk, blocks)

    def _inverted(self, chunk: Chunk, blocks: Tensor) -> Tensor:
        """P_h^T Q P_w of all blocks Q of a chunk, as its matrix."""
        h, w, transform = chunk.h, chunk.w, self.chain.transform
        P_h, P_w = transform.matrix(h, self.round, self.device), transform.matrix(w, self.round, self.device)
        if P_w is not None:
            blocks = torch.mm(blocks.view(-1, w), P_w)
        if P_h is not None:
            blocks = torch.bmm(P_h.T.expand(chunk.blocks, h, h), blocks.view(-1, h, w))
        return chunk.to_matrix(blocks)

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """See `Received`."""
        for chunk, matrix in self.matrices():
            yield from zip(chunk.pieces, chunk.split(matrix), strict=True)

    def dense(self) -> Iterator[tuple[int, Tensor]]:
        """See `Received`."""
        means = self._means_of_whole().clone().split(self._lengths_of_whole())  # they may be overwritten
        yield from zip(self.plan.layout.dense, means, strict=True)

    def _lengths_of_whole(self) -> tuple[int, ...]:
        return tuple(math.prod(self.plan.layout.shapes[i]) for i in self.plan.layout.dense)

    def _means_of_whole(self) -> Tensor:
        """The means of all tensors that were sent whole, one after the other."""
        if self._whole is None:
            self._whole = self._read_whole()
        return self._whole

    def _read_whole(self) -> Tensor:
        runs = [(section, a, b) for section in self.plan.whole for a, b in self._runs(section)]
        read = (self._scaled(self._format.read(self._part(s), s.row, a, b)) for s, a, b in runs)
        return torch.cat([torch.empty(0, device=self.device), *(self._merge_of.columns(values) for values in read)])

    def squares(self) -> Tensor:
        """The sum of squares of the mean of each tensor, float64 [tensors]: see `Received`."""
        layout = self.plan.layout
        found = torch.zeros(len(layout.shapes), dtype=torch.float64, device=self.device)
        for n, group in enumerate(layout.groups):
            per_tensor = sums_of(self._squares_of(n, group), tuple(grid.blocks for grid in group.grids))
            found.index_copy_(0, table(tuple(grid.index for grid in group.grids), torch.int64, self.device), per_tensor)
        if layout.dense:
            means = self._means_of_whole().split(self._lengths_of_whole())
            norms = torch.stack(torch._foreach_norm(means, 2, torch.float64))
            found.index_copy_(0, table(layout.dense, torch.int64, self.device), norms.square_())
        return found

    def _squares_of(self, number: int, group: Group) -> Tensor:
        """The sum of squares of the mean of each block of a group, float64 [blocks]."""
        chunks = self._chunks(group)
        norms = [vector_norm(self._mean_blocks(number, chunk), dim=1, dtype=torch.float64) for chunk in chunks]
        return limits.in_order(chunks, norms).square_()

    def tensors(self) -> list[Tensor]:
        """See `Received`."""
        out = [torch.zeros(shape, device=self.device) for shape in self.plan.layout.shapes]
        for _, parts, means in self.together(out):
            torch._foreach_copy_(parts, means)
        return out

    def step(
        self, tensors: Sequence[Tensor], rates: Sequence[float], signs: Sequence[bool], scale: Tensor | None = None
    ) -> None:
        """Take the mean off tensors.

        Args:
            tensors: changed in place.
            rates: what it is multiplied by, for each tensor.
            signs: whether its sign is taken, for each tensor.
            scale: multiplies the mean of each tensor first, [tensors].
        """
        self._step_others(tensors, rates, signs, scale, ())

    def _step_others(
        self,
        tensors: Sequence[Tensor],
        lr: Sequence[float],
        sign: Sequence[bool],
        scale: Tensor | None,
        done: Collection[int],
    ) -> None:
        """`step` but for some groups."""
        for places, parts, means in self.together(tensors, scale=scale, done=done):
            settings = [(sign[i], lr[i], part.dtype) for i, part in zip(places, parts, strict=True)]
            for (signs, rate, _), some in alike(settings):  # lists of one dtype are one launch on a GPU
                update = [means[n] for n in some]
                if signs:
                    torch._foreach_sign_(update)
                torch._foreach_sub_([parts[n] for n in some], update, alpha=rate)

    def together(
        self,
        tensors: Sequence[Tensor],
        *others: Sequence[Tensor | None],
        scale: Tensor | None = None,
        done: Collection[int] = (),
    ) -> Iterator[Any]:
        """`each` for many pieces at once, to be changed by operations on lists of tensors.

        Args:
            tensors: see `each`.
            others: see `each`.
            scale: multiplies the mean of each tensor, [tensors].
            done: groups to leave out; -1 for tensors that were sent whole.

        Yields:
            Lists of the tensors' places, of pieces of them, of the means of those pieces, and of the same pieces of others.
        """
        for chunk, matrix in self.matrices(scale, done):
            (parts, seen), more = _seen(chunk, tensors), [_seen(chunk, some) for some in others]
            yield chunk.whose, parts, chunk.inside(matrix, parts), *(pieces for pieces, _ in more)
            for tensor, as_matrix in itertools.chain(seen, *(pairs for _, pairs in more)):
                write_back(as_matrix, tensor)
        if (whole := self.plan.layout.dense) and -1 not in done:
            parts = [tensors[i].detach() for i in whole]
            means = (self._scaled_whole(scale) if scale is not None else self._means_of_whole().clone()).split(
                self._lengths_of_whole()
            )
            shaped = [mean.view(part.shape) for mean, part in zip(means, parts, strict=True)]
            yield list(whole), parts, shaped, *([some[i] for i in whole] for some in others)

    def _scaled_whole(self, scale: Tensor) -> Tensor:
        """The means of all tensors that were sent whole, each times its number."""
        lengths = self._lengths_of_whole()
        ends = table(tuple(itertools.accumulate(lengths)), torch.int64, self.device)
        whose = torch.searchsorted(ends, torch.arange(sum(lengths), device=self.device), right=True)
        factor = scale.index_select(0, table(self.plan.layout.dense, torch.int64, self.device))
        return self._means_of_whole() * factor.index_select(0, whose)


def _seen(chunk: Chunk, tensors: Sequence[Tensor | None]) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
    """The pieces of a chunk of these tensors, None where there is none; and each tensor with the matrix it is seen as."""
    found = {p.grid.index: (t.detach(), matrix_of(t, p.grid)) for p in chunk.pieces if (t := tensors[p.grid.index]) is not None}
    pieces = [p.of_matrix(found[p.grid.index][1]) if p.grid.index in found else None for p in chunk.pieces]
    return pieces, list(found.values())
