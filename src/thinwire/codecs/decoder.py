"""Received: the messages of a round, checked from end to end, then combined and decoded piece by piece.

The entries of all workers are merged in the domain of the transform, in rank order, so one inverse transform serves all of
them, and its first half is sparse: a row of coefficients is a sum of as many basis vectors as it has entries, most often none
or one or two.

Every message is read once. Indices are decoded when they are checked, since nothing else can check them, and kept in two bytes
each (four in blocks of more than 65536 entries). Values are checked without decoding them, where the format can do that, and
decoded when they are merged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.codecs.base import Messages
from thinwire.codecs.bits import Bytes
from thinwire.codecs.indices import IndexCode
from thinwire.codecs.inverse import HOT, first_half, second_half
from thinwire.codecs.layout import BATCH, LONG, Batch, Group, Piece, in_rows, matrix_of, write_back
from thinwire.codecs.message_plan import Message, Plan, Section, narrow
from thinwire.codecs.stages import DENSE_GROUP, Floats, Stages
from thinwire.codecs.wire import same_part
from thinwire.errors import WireError
from thinwire.kernels import Entries, Kernels
from thinwire.payload import Payload

_AT_ONCE = 1 << 12  # blocks whose indices are decoded in one go, of one worker or of several
_MERGED = 1 << 17  # entries of all workers that are merged at once: more workers take smaller batches, not more memory
_TOGETHER = 1 << 21  # values of all workers up to which all tensors that are sent whole are read in one go


def _bytes(payload: Payload) -> Bytes:
    data = payload.data.detach().cpu()
    return data.view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)


class Received:
    """The messages of all workers in one round, known to be sound.

    Args:
        chain: the stages.
        plan: where everything is in a message.
        messages: of all workers, and how they are combined.
        own: place of this worker's message, and what it sent: where it came back unchanged it need not be decoded.

    Raises:
        WireError: a message that is not sound; its `rank` says whose.
    """

    def __init__(self, chain: Stages, plan: Plan, messages: Messages, own: tuple[int, Message] | None = None):
        """Check everything."""
        self.chain, self.plan, self.messages = chain, plan, messages
        self.device, self.round, self.mean = messages.payloads[0].data.device, messages.round, messages.mean
        self._bodies = [_bytes(p) for p in messages.payloads]
        self._weights = self.mean.weights(messages.weights, len(self._bodies))
        self._known = {own[0]: own[1]} if own and self._unchanged(*own) else {}
        self._largest = 0.0
        self._indices = [self._room(number, group) for number, group in enumerate(plan.layout.groups)]
        self._read: dict[tuple[int, int, int], Floats] = {}  # values that norms were taken of: worker, group, first value
        self._merged: dict[tuple[int, int], tuple[NDArray[np.integer], Floats]] = {}  # group and first block of a batch
        self._dense: Floats | None = None
        squares = self._check()
        self._factors = np.ones(len(self._bodies), np.float32)
        if self.mean.needs_norms:
            self._factors = np.asarray(self.mean.factors([math.sqrt(s) for s in squares]), np.float32)

    @property
    def largest(self) -> float | Tensor:
        """The largest value in any of the messages, or a bound on it."""
        return self._largest

    @property
    def safe(self) -> bool | Tensor:
        """Whether no sum of these messages can leave the range of float32, whatever the transform does."""
        longest = max((group.L for group in self.plan.layout.groups), default=1)
        heaviest = max(1.0, float(self._weights.max()) * float(self._factors.max()))
        return self._largest * math.sqrt(longest) * len(self._bodies) * heaviest < float(np.finfo(np.float32).max)

    # --- Checking ----------------------------------------------------------------------------------------------------------

    def _unchanged(self, nth: int, sent: Message) -> bool:
        """Whether a worker's message came back as it was sent, and as something that may be sent."""
        return bool(sent.finite) and self._bodies[nth].data == _bytes(sent.payload).data  # without a copy

    def _room(self, number: int, group: Group) -> NDArray[np.integer] | None:
        """Room for the indices of a group in all messages, [workers, blocks, k]; None where none are sent."""
        if not self.chain.selection.indexed:
            return None
        if len(self._bodies) == len(self._known):  # of a worker's own message alone they are there
            (sent,) = self._known.values()
            indices = sent.kept[number].indices
            assert indices is not None
            return indices[None]
        return np.empty((len(self._bodies), group.blocks, self.plan.of_group[number][0].k), narrow(group.L))

    def _check(self) -> list[float]:
        """Check all of every message; returns the squares of their norms where they are asked for."""
        plan, squares = self.plan, [0.0] * len(self._bodies)
        others = [nth for nth in range(len(self._bodies)) if nth not in self._known]
        for nth in others:
            self._check_frame(nth)
        for section in plan.sections:
            self._check_indices(section, others)
        for section in (*plan.sections, *plan.whole):
            for nth in others:
                squares[nth] += self._check_values(nth, section)
        for nth, sent in self._known.items():
            for kept, room in zip(sent.kept, self._indices, strict=True):
                squares[nth] += self._note(kept.values)
                if room is not None and kept.indices is not None and len(room) > 1:
                    room[nth] = kept.indices
            squares[nth] += self._note(sent.dense.numpy())
        return squares

    def _check_frame(self, nth: int) -> None:
        body, plan = self._bodies[nth], self.plan
        if len(body) != plan.nbytes:
            told = f"a message of {len(body)} bytes, where these shapes and {self.chain!r} make {plan.nbytes}"
            raise WireError(told, rank=self.messages.whose(nth))
        try:
            for part in plan.parts:
                if part.header:
                    same_part(part.header, body[part.start :])
        except WireError as error:
            raise WireError(str(error), rank=self.messages.whose(nth)) from None

    def _check_indices(self, section: Section, others: Sequence[int]) -> None:
        """Of as many workers together as fit: for small models that is several times faster than one after the other."""
        room = self._indices[section.number]
        if section.code is None or room is None:
            return
        here = slice(section.first, section.last)
        others = [nth for nth in others if not section.code.read_into(self._code(nth, section), room[nth, here])]
        together = max(1, _AT_ONCE // section.blocks)
        ranges = itertools.product(range(0, len(others), together), range(0, section.blocks, _AT_ONCE))
        for first, start in ranges:
            some, stop = others[first : first + together], min(start + _AT_ONCE, section.blocks)
            codes = [self._code(nth, section) for nth in some]
            try:
                read = section.code.decode_all(codes, section.blocks, start, stop)
            except WireError:
                self._blame(section.code, codes, some, section.blocks, start, stop)
                raise
            for nth, indices in zip(some, read, strict=True):
                room[nth, section.first + start : section.first + stop] = indices

    def _code(self, nth: int, section: Section) -> Bytes:
        return self._bodies[nth][section.start : section.middle]

    def _blame(self, code: IndexCode, codes: Sequence[Bytes], some: Sequence[int], blocks: int, start: int, stop: int) -> None:
        """Raise the error of the worker whose indices are not sound."""
        for nth, raw in zip(some, codes, strict=True):
            try:
                code.decode(raw, blocks, start, stop)
            except WireError as error:
                raise WireError(str(error), rank=self.messages.whose(nth)) from None

    def _check_values(self, nth: int, section: Section) -> float:
        """Check values and note the largest; where norms are asked for, read and keep them and return the sum of squares."""
        raw, row = self._bodies[nth][section.middle : section.stop], section.row
        try:
            if not self.mean.needs_norms:
                self._largest = max(self._largest, self.chain.values.check(raw, row))
                return 0.0
            values = self.chain.values.read(raw, row, 0, row.count)
        except WireError as error:
            raise WireError(str(error), rank=self.messages.whose(nth)) from None
        self._read[nth, section.number, section.offset] = values
        return self._note(values)

    def _note(self, values: Floats) -> float:
        """Remember the largest of some values; returns the sum of their squares where norms are asked for."""
        if not values.size:
            return 0.0
        self._largest = max(self._largest, float(values.max()), -float(values.min()))
        return float(np.square(values, dtype=np.float64).sum()) if self.mean.needs_norms else 0.0

    # --- Reading -----------------------------------------------------------------------------------------------------------

    def _values(self, nth: int, number: int, start: int, stop: int) -> Floats:
        """Values `start` to `stop` of a group, or of the tensors that are sent whole, in one message."""
        if nth in self._known:
            sent = self._known[nth]
            return sent.dense.numpy()[start:stop] if number < 0 else sent.kept[number].values.reshape(-1)[start:stop]
        found = []
        for section in self.plan.whole if number < 0 else self.plan.of_group[number]:
            a, b = max(start - section.offset, 0), min(stop - section.offset, section.count)
            if a >= b:
                continue
            if (read := self._read.get((nth, number, section.offset))) is None:
                raw = self._bodies[nth][section.middle : section.stop]
                found.append(self.chain.values.read(raw, section.row, a, b, check=False))
            else:
                found.append(read[a:b])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _read_into(self, nth: int, number: int, start: int, stop: int, out: Floats) -> bool:
        """The same of a group in a message of one part, by a C kernel; False where there is none."""
        if nth in self._known or self._read or number < 0 or len(self.plan.of_group[number]) > 1:
            return False
        (section,) = self.plan.of_group[number]
        return self.chain.values.read_into(self._bodies[nth][section.middle : section.stop], section.row, start, stop, out)

    def _weighted(self, number: int, start: int, stop: int) -> Floats:
        """These values in all messages, [workers, stop - start], with the factors that norms make."""
        values = np.empty((len(self._bodies), stop - start), np.float32)
        for nth, out in enumerate(values):
            if not self._read_into(nth, number, start, stop, out):
                out[:] = self._values(nth, number, start, stop)
        if self.mean.needs_norms:
            values *= self._factors[:, None]
        return values

    def _merge(self, number: int, group: Group, batch: Batch) -> tuple[NDArray[np.int64], Floats]:
        """Places in the batch and means, of all entries that anybody sent."""
        if found := self._merged.get((number, batch.start)):
            return found[0].astype(np.int64), found[1]
        k, room = self.plan.of_group[number][0].k, self._indices[number]
        values = self._weighted(number, batch.start * k, batch.stop * k)
        if room is None:
            place = batch.places(self.chain.selection.positions(group.L, self.round, batch.start, batch.stop))
            return place.reshape(-1), self.mean.columns(values, self._weights)
        indices = room[:, batch.start : batch.stop]
        places = batch.places(indices.astype(np.int64)).reshape(len(indices), -1)
        return self.mean.entries(places, values, self._weights)

    def _batches(self, number: int, group: Group) -> Sequence[Batch]:
        """More workers take smaller batches, not more memory."""
        blocks = max(1, _MERGED // (self.plan.of_group[number][0].k * len(self._bodies)))
        return group.batches_of(min(BATCH, blocks * group.L))

    # --- Decoding --------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """The mean, piece by piece: the values [y h, x w] with padding, in memory that is used again for the next."""
        return self._pieces_of(range(len(self.plan.layout.groups)))

    def _pieces_of(self, numbers: Iterable[int]) -> Iterator[tuple[Piece, Tensor]]:
        """Those of some groups."""
        for number in numbers:
            group = self.plan.layout.groups[number]
            if fast := self._kernels(group):
                yield from self._fast_pieces(fast, number, group)
                continue
            batches = self._batches(number, group)
            entries = max(b.starts[-1] for b in batches)
            rows, out = torch.zeros(entries, device=self.device), torch.empty(entries, device=self.device)
            for batch in batches:
                place, mean = self._merge(number, group, batch)
                coefficients = first_half(self.chain, self.round, batch, place, mean, rows)
                yield from second_half(self.chain, self.round, batch, coefficients, out)

    def _kernels(self, group: Group) -> Kernels | None:
        """The C kernels, where they know these blocks and this mean."""
        known = self.chain.selection.indexed and not self.mean.trimmed
        return self.chain.kernels(group.h, group.w, self.device) if known else None

    def _entries(self, number: int, group: Group, most: int = HOT) -> Iterator[tuple[Piece, Entries]]:
        """What all workers sent, in pieces of so many entries, for the kernels."""
        k, room = self.plan.of_group[number][0].k, self._indices[number]
        assert room is not None
        weights = None if (self._weights == 1).all() else self._weights
        total = float(self._weights.sum()) if self.mean.over == "workers" else 0.0
        blocks = max(1, 2 * _MERGED // (k * len(self._bodies)))  # there is no copy of the entries to make room for
        for batch in group.batches_of(min(max(BATCH, most), blocks * group.L)):
            values = self._weighted(number, batch.start * k, batch.stop * k)
            for piece in (part for whole in batch.pieces for part in whole.split(most)):
                first, last = piece.start, piece.start + piece.blocks
                here = values[:, (first - batch.start) * k : (last - batch.start) * k]
                yield piece, Entries(room[:, first:last], here, weights, total)

    def _fast_pieces(self, fast: Kernels, number: int, group: Group) -> Iterator[tuple[Piece, Tensor]]:
        """`pieces` of a group: mean and inverse of each block while it is in cache."""
        memory = torch.empty(0)
        for piece, entries in self._entries(number, group):
            if memory.numel() < (n := math.prod(piece.shape)):
                memory = torch.empty(n)
            fast.mean(entries, out := memory[:n].view(piece.shape))
            yield piece, out

    def dense(self) -> Iterator[tuple[int, Tensor]]:
        """The tensors that were sent whole: place in the list and mean, flat."""
        at, total = 0, self.plan.layout.dense_numel
        if self._dense is None and 0 < total * len(self._bodies) <= _TOGETHER:
            self._dense = self._mean_of_dense(0, total)  # many small tensors are read in one go
        for i in self.plan.layout.dense:
            n = math.prod(self.plan.layout.shapes[i])
            flat = self._mean_of_dense(at, at + n) if self._dense is None else self._dense[at : at + n].copy()
            yield i, torch.from_numpy(flat).to(self.device)
            at += n

    def _mean_of_dense(self, start: int, stop: int) -> Floats:
        """The mean of values `start` to `stop` of all tensors that are sent whole; the workspace is bounded."""
        step = max(DENSE_GROUP, _MERGED // len(self._bodies))
        runs = ((at, min(at + step, stop)) for at in range(start, stop, step))
        means = [self.mean.columns(self._weighted(-1, a, b), self._weights) for a, b in runs]
        return means[0] if len(means) == 1 else np.concatenate(means)

    def squares(self) -> list[float] | Tensor:
        """The sum of squares of the mean of each tensor, without decoding it: an orthonormal transform keeps norms.

        What lies in the padding counts too. Without the C kernels the means are kept for `each`.
        """
        found = [0.0] * len(self.plan.layout.shapes)
        for number, group in enumerate(self.plan.layout.groups):
            if fast := self._kernels(group):  # merged twice: that takes less than to keep the means
                blocks = np.concatenate([fast.squares(entries) for _, entries in self._entries(number, group, LONG)])
                for grid in group.grids:  # exact sums, whatever the order
                    found[grid.index] = math.fsum(blocks[grid.first : grid.first + grid.blocks])
                continue
            for batch in self._batches(number, group):
                place, mean = self._merge(number, group, batch)
                self._merged[number, batch.start] = place.astype(np.int32 if batch.starts[-1] < 1 << 31 else np.int64), mean
                ends = np.searchsorted(place, batch.starts) if self.chain.selection.indexed else None
                for nth, piece in enumerate(batch.pieces):
                    if ends is None:
                        inside = mean[(place >= batch.starts[nth]) & (place < batch.starts[nth + 1])]
                    else:
                        inside = mean[ends[nth] : ends[nth + 1]]
                    found[piece.grid.index] += float(np.square(inside, dtype=np.float64).sum())
        if self._dense is None and self.plan.layout.dense_numel:
            self._dense = self._mean_of_dense(0, self.plan.layout.dense_numel)
        for i, values in self.dense():
            found[i] = float(values.square().sum(dtype=torch.float64))
        return found

    def tensors(self) -> list[Tensor]:
        """The mean as tensors, float32."""
        shapes = self.plan.layout.shapes
        out = [torch.zeros(shape, device=self.device) for shape in shapes]
        for piece, values in self.pieces():
            part = piece.of_matrix(matrix_of(out[piece.grid.index], piece.grid))
            part.copy_(values[: part.shape[0], : part.shape[1]])
        for i, values in self.dense():
            out[i].copy_(values.view(shapes[i]))
        return out

    def step(self, tensors: Sequence[Tensor], rates: Sequence[float], signs: Sequence[bool]) -> None:
        """Tensors <- tensors - rate * mean, or rate * sign(mean): by the C kernels while a block is in cache, where they can.

        Args:
            tensors: of the shapes that were encoded; changed in place.
            rates: of each tensor.
            signs: whether to take the sign of the mean of each tensor.
        """
        rest = []
        for number, group in enumerate(self.plan.layout.groups):
            fast = self._kernels(group)
            if fast is None or any(in_rows(g.whole, tensors[g.index], whole=False) is None for g in group.grids):
                rest.append(number)
                continue
            for piece, entries in self._entries(number, group, LONG):
                i = piece.grid.index
                part = in_rows(piece, tensors[i].detach(), whole=False)
                assert part is not None
                fast.step(entries, part, rate=rates[i], sign=signs[i])
        for i, part, mean in self._beside(self._pieces_of(rest), tensors):
            part.sub_(mean.sign_() if signs[i] else mean, alpha=rates[i])

    def each(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """Go through tensors and the mean side by side, a piece at a time, without a second copy of the model.

        Args:
            tensors: of the shapes that were encoded; write to the pieces to change them.
            others: more tensors of the same shapes, such as moments that belong to them; None where there is none.

        Yields:
            The tensor's place in the list, a piece of it, the mean of that piece, of the same shape, and the same piece of
            each of the others. The mean may be overwritten, and is valid until the next piece only: its memory is used again.
        """
        return self._beside(self.pieces(), tensors, *others)

    def _beside(
        self, pieces: Iterable[tuple[Piece, Tensor]], tensors: Sequence[Tensor], *others: Sequence[Tensor | None]
    ) -> Iterator[Any]:
        for piece, values in pieces:
            i = piece.grid.index
            here = [t.detach() for group in (tensors, *others) if (t := group[i]) is not None]
            matrices = [matrix_of(t, piece.grid) for t in here]
            part, *more = [piece.of_matrix(m) for m in matrices]
            present = iter(more)
            yield (
                i,
                part,
                values[: part.shape[0], : part.shape[1]],
                *(None if group[i] is None else next(present) for group in others),
            )
            for tensor, matrix in zip(here, matrices, strict=True):
                write_back(matrix, tensor)
        for i, values in self.dense():
            yield i, tensors[i].detach(), values.view(tensors[i].shape), *(group[i] for group in others)
