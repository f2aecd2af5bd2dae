"""Received: the messages of a round, checked from end to end, then combined and decoded piece by piece.

The entries of all workers are merged in the domain of the transform, in rank order, so one inverse transform serves all of
them, and its first half is sparse: a row of coefficients is a sum of as many basis vectors as it has entries, most often none
or one or two.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from thinwire.codecs.aggregate import Mean
from thinwire.codecs.bits import Bytes
from thinwire.codecs.indices import IndexCode
from thinwire.codecs.layout import BATCH, Batch, Piece, matrix_of
from thinwire.codecs.values import DENSE_GROUP, Floats
from thinwire.errors import WireError
from thinwire.payload import Payload

if TYPE_CHECKING:
    from thinwire.codecs.chain import Chain, Encoded, Plan, Section

_KEEP = 1 << 25  # bytes to keep from checking to decoding: of indices, and of all that was read; beyond, it is read again
_AT_ONCE = 1 << 12  # blocks whose indices are decoded in one go, of one worker or of several
_HOT = 1 << 18  # entries of a piece that is still in the second-level cache when it is applied
_MERGED = 1 << 17  # entries of all workers that are merged at once: more workers take smaller batches, not more memory
_DENSE_ROW = 8  # entries per row from which on a dense product is faster than a sparse one


def _bytes(payload: Payload) -> Bytes:
    data = payload.data.detach().cpu()
    return data.view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)


class _Kept:
    """What all workers say of a section, as far as it is kept from checking to decoding.

    Attributes:
        indices: [workers, blocks, k], the dearest to read again; None where none are sent or there are too many.
        values: [workers, blocks k]; None where there are too many.
    """

    BYTES = 4 + 4 + 12  # an entry at most: index, value, and the place and the mean that it is merged to

    def __init__(self, section: Section, workers: int, entries: int):
        """Make room.

        Args:
            section: which.
            workers: how many.
            entries: of all sections and workers.
        """
        narrow = np.dtype(np.uint16 if section.group.L <= 1 << 16 else np.uint32)
        indexed = section.code is not None and entries * narrow.itemsize <= _KEEP
        self.indices = np.empty((workers, section.group.blocks, section.k), narrow) if indexed else None
        self.values = np.empty((workers, section.count), np.float32) if entries * self.BYTES <= _KEEP else None


class Received:
    """The messages of all workers in one round, known to be sound.

    Args:
        chain: the codec.
        plan: where everything is in a message.
        payloads: one per worker, in rank order.
        device: where the tensors shall be.
        round: number of the round.
        mean: how they are combined.
        weights: of the workers; equal by default.
        own: this worker's rank and what it sent: where its message came back unchanged it need not be decoded.

    Raises:
        WireError: a message that is not sound; its `rank` says whose.
    """

    def __init__(
        self,
        chain: Chain,
        plan: Plan,
        payloads: Sequence[Payload],
        device: torch.device,
        round: int,
        mean: Mean,
        weights: Sequence[float] | None,
        own: tuple[int, Encoded] | None = None,
    ):
        """Check everything."""
        self.chain, self.plan, self.device, self.round, self.mean = chain, plan, device, round, mean
        self._bodies = [_bytes(p) for p in payloads]
        self._weights = mean.weights(weights, len(payloads))
        self._known = {own[0]: own[1]} if own and self._unchanged(*own) else {}
        entries = sum(section.count for section in plan.sections) * len(payloads)
        self._kept = [_Kept(section, len(payloads), entries) for section in plan.sections]
        self._merged: dict[tuple[int, int], tuple[NDArray[np.int64], Floats]] = {}
        self._largest = 0.0
        squares = self._check()
        self._factors = np.ones(len(payloads), np.float32)
        if mean.needs_norms:
            self._factors = np.asarray(mean.factors([math.sqrt(s) for s in squares]), np.float32)

    @property
    def safe(self) -> bool:
        """Whether no sum of these messages can leave the range of float32, whatever the transform does."""
        longest = max((s.group.L for s in self.plan.sections), default=1)
        heaviest = max(1.0, float(self._weights.max()) * float(self._factors.max()))
        return self._largest * math.sqrt(longest) * len(self._bodies) * heaviest < float(np.finfo(np.float32).max)

    def _unchanged(self, rank: int, encoded: Encoded) -> bool:
        """Whether a worker's message came back as it was sent, and as something that may be sent."""
        return encoded.finite and np.array_equal(self._bodies[rank], _bytes(encoded.payload))

    def _note(self, values: Floats) -> float:
        """Remember the largest of some values; returns the sum of their squares where norms are asked for."""
        if not values.size:
            return 0.0
        self._largest = max(self._largest, float(values.max()), -float(values.min()))
        return float(np.square(values, dtype=np.float64).sum()) if self.mean.needs_norms else 0.0

    def _check(self) -> list[float]:
        """Read all of every message once; returns the squares of their norms."""
        plan, squares = self.plan, [0.0] * len(self._bodies)
        others = [rank for rank in range(len(self._bodies)) if rank not in self._known]
        for rank in others:
            if (found := len(self._bodies[rank])) != plan.nbytes:
                raise WireError(
                    f"a message of {found} bytes, where these shapes and {self.chain!r} make {plan.nbytes}", rank=rank
                )
        for number, section in enumerate(plan.sections):
            kept = self._kept[number]
            self._check_indices(section, others, kept)
            for rank in others:
                values = None if kept.values is None else kept.values[rank]
                raw = self._bodies[rank][section.middle : section.stop]
                squares[rank] += self._check_values(rank, raw, section.count, section.k, values)
            for rank, encoded in self._known.items():
                mine = encoded.kept[number]
                squares[rank] += self._note(mine.values)
                if kept.values is not None:
                    kept.values[rank] = mine.values.reshape(-1)
                if kept.indices is not None and mine.indices is not None:
                    kept.indices[rank] = mine.indices
        for rank in others:
            raw = self._bodies[rank][plan.dense_start :]
            squares[rank] += self._check_values(rank, raw, plan.layout.dense_numel, DENSE_GROUP, None)
        for rank, encoded in self._known.items():
            squares[rank] += self._note(encoded.dense.numpy())
        return squares

    def _check_indices(self, section: Section, others: Sequence[int], kept: _Kept) -> None:
        """Of as many workers together as fit: for small models that is several times faster than one after the other."""
        if section.code is None:
            return
        blocks = section.group.blocks
        together = max(1, _AT_ONCE // blocks)
        for first, at in itertools.product(range(0, len(others), together), range(0, blocks, _AT_ONCE)):
            ranks, stop = others[first : first + together], min(at + _AT_ONCE, blocks)
            codes = [self._bodies[rank][section.start : section.middle] for rank in ranks]
            try:
                some = section.code.decode_all(codes, blocks, at, stop)
            except WireError:
                self._blame(section.code, codes, ranks, blocks, at, stop)
                raise
            if kept.indices is not None:
                kept.indices[ranks, at:stop] = some

    @staticmethod
    def _blame(code: IndexCode, codes: Sequence[Bytes], ranks: Sequence[int], blocks: int, start: int, stop: int) -> None:
        """Raise the error of the worker whose indices are not sound."""
        for rank, raw in zip(ranks, codes, strict=True):
            try:
                code.decode(raw, blocks, start, stop)
            except WireError as error:
                raise WireError(str(error), rank=rank) from None

    def _check_values(self, rank: int, raw: Bytes, count: int, k: int, out: Floats | None) -> float:
        """Check values, note the largest, and keep them where there is room; returns the sum of squares where norms are due."""
        square, step = 0.0, k * max(1, (1 << 20) // k)
        try:
            if out is None and not self.mean.needs_norms:
                self._largest = max(self._largest, self.chain.values.check(raw, count, k))
                return 0.0
            for at in range(0, count, step):
                values = self.chain.values.read(raw, count, k, at, min(at + step, count))
                square += self._note(values)
                if out is not None:
                    out[at : at + step] = values
        except WireError as error:
            raise WireError(str(error), rank=rank) from None
        return square

    # --- Decoding --------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """The mean, piece by piece: the values [y h, x w] with padding, in memory that is used again for the next."""
        for number, section in enumerate(self.plan.sections):
            batches = self._batches(section)
            entries = max(b.starts[-1] for b in batches)
            rows, out = torch.zeros(entries, device=self.device), torch.empty(entries, device=self.device)
            for batch in batches:
                place, mean = self._merge(number, section, batch)
                coefficients = self._first_half(batch, place, mean, rows)
                yield from self._second_half(batch, coefficients, out)

    def _batches(self, section: Section) -> Sequence[Batch]:
        """More workers take smaller batches, not more memory."""
        blocks = max(1, _MERGED // (section.k * len(self._bodies)))
        return section.group.batches_of(min(BATCH, blocks * section.group.L))

    def dense(self) -> Iterator[tuple[int, Tensor]]:
        """The tensors that were sent whole: place in the list and mean, flat."""
        at, whole = 0, self._dense_mean
        for i in self.plan.layout.dense:
            n = math.prod(self.plan.layout.shapes[i])
            flat = torch.empty(n)
            step = max(DENSE_GROUP, (1 << 20) // len(self._bodies))
            for start in range(0, n, step):
                stop = min(start + step, n)
                part = self._mean_of_dense(at + start, at + stop) if whole is None else whole[at + start : at + stop]
                flat[start:stop] = torch.from_numpy(part)
            yield i, flat.to(self.device)
            at += n

    @functools.cached_property
    def _dense_mean(self) -> Floats | None:
        """The mean of all of them, where they are small: many small tensors are read in one go, and once."""
        entries = self.plan.layout.dense_numel
        return self._mean_of_dense(0, entries) if entries and entries * len(self._bodies) * _Kept.BYTES <= _KEEP else None

    def _mean_of_dense(self, start: int, stop: int) -> Floats:
        count = self.plan.layout.dense_numel
        raws = [body[self.plan.dense_start :] for body in self._bodies]
        rows = [self.chain.values.read(raw, count, DENSE_GROUP, start, stop, check=False) for raw in raws]
        return self.mean.columns(np.stack(rows) * self._factors[:, None], self._weights)

    def squares(self) -> list[float]:
        """The sum of squares of the mean of each tensor, without decoding it: an orthonormal transform keeps norms.

        What lies in the padding counts too.
        """
        found = [0.0] * len(self.plan.layout.shapes)
        for number, section in enumerate(self.plan.sections):
            for batch in self._batches(section):
                place, mean = self._merge(number, section, batch)
                ends = np.searchsorted(place, batch.starts) if self.chain.selection.indexed else None
                for nth, piece in enumerate(batch.pieces):
                    if ends is None:
                        inside = mean[(place >= batch.starts[nth]) & (place < batch.starts[nth + 1])]
                    else:
                        inside = mean[ends[nth] : ends[nth + 1]]
                    found[piece.grid.index] += float(np.square(inside, dtype=np.float64).sum())
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

    def each(self, tensors: Sequence[Tensor], *others: Sequence[Tensor | None]) -> Iterator[Any]:
        """Go through tensors and the mean side by side, a piece at a time, without a second copy of the model.

        Args:
            tensors: of the shapes that were encoded; write to the pieces to change them.
            others: more tensors of the same shapes, such as moments that belong to them; None where there is none.

        Yields:
            The tensor's place in the list, a piece of it, the mean of that piece, of the same shape, and the same piece of
            each of the others. The mean may be overwritten, and is valid until the next piece only: its memory is used again.
        """
        for piece, values in self.pieces():
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
                if matrix.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                    tensor.copy_(matrix.view(tensor.shape))  # its memory cannot be seen as a matrix: a copy was changed
        for i, values in self.dense():
            yield i, tensors[i].detach(), values.view(tensors[i].shape), *(group[i] for group in others)

    def _merge(self, number: int, section: Section, batch: Batch) -> tuple[NDArray[np.int64], Floats]:
        """Places in the batch and means, of all entries that anybody sent."""
        if (number, batch.start) in self._merged:
            return self._merged[number, batch.start]
        ranks = range(len(self._bodies))
        values = np.stack([self._values(rank, number, section, batch) for rank in ranks])
        if self.mean.needs_norms:
            values *= self._factors[:, None]
        if section.code is None:
            place = batch.places(self.chain.selection.positions(section.group.L, self.round, batch.start, batch.stop))
            merged = place.reshape(-1), self.mean.columns(values, self._weights)
        else:
            places = np.stack([batch.places(self._indices(rank, number, section, batch)).reshape(-1) for rank in ranks])
            merged = self.mean.entries(places, values, self._weights)
        if self._kept[number].values is not None:
            self._merged[number, batch.start] = merged
        return merged

    def _values(self, rank: int, number: int, section: Section, batch: Batch) -> Floats:
        start, stop = batch.start * section.k, batch.stop * section.k
        if (values := self._kept[number].values) is not None:
            return values[rank, start:stop]
        raw = self._bodies[rank][section.middle : section.stop]
        return self.chain.values.read(raw, section.count, section.k, start, stop, check=False)

    def _indices(self, rank: int, number: int, section: Section, batch: Batch) -> NDArray[np.integer]:
        if (indices := self._kept[number].indices) is not None:
            return indices[rank, batch.start : batch.stop].astype(np.int64)
        assert section.code is not None
        code = self._bodies[rank][section.start : section.middle]
        return section.code.decode(code, section.group.blocks, batch.start, batch.stop)

    def _first_half(self, batch: Batch, place: NDArray[np.int64], mean: Floats, rows: Tensor) -> Tensor:
        """Q P_w for all blocks of a batch, in the order of the pieces: flat."""
        w, total = batch.pieces[0].grid.w, batch.starts[-1]
        P_w = self.chain.transform.matrix(w, self.round, self.device)
        values = torch.from_numpy(mean).to(self.device)
        if P_w is not None and len(place) <= _DENSE_ROW * (total // w):
            if self.chain.selection.indexed is False:
                order = np.argsort(place, kind="stable")
                place, values = place[order], values[torch.from_numpy(order)]
            row = place // w if w & (w - 1) else place >> (w.bit_length() - 1)
            ends = np.bincount(row, minlength=total // w).cumsum()
            offsets = torch.from_numpy(np.concatenate([[0], ends[:-1]])).to(self.device)
            col = torch.from_numpy(place - row * w).to(self.device)
            return embedding_bag(col, P_w, offsets, mode="sum", per_sample_weights=values).view(-1)
        flat = rows[:total]
        at = torch.from_numpy(place).to(self.device)
        flat.index_copy_(0, at, values)
        out = flat.clone() if P_w is None else torch.mm(flat.view(-1, w), P_w).view(-1)
        flat.index_fill_(0, at, 0.0)
        return out

    def _second_half(self, batch: Batch, coefficients: Tensor, out: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """P_h^T of it."""
        h = batch.pieces[0].grid.h
        P_h = self.chain.transform.matrix(h, self.round, self.device)
        for whole, start in zip(batch.pieces, batch.starts, strict=False):
            for piece in whole.split(_HOT):
                n = math.prod(piece.shape)
                part = coefficients[start : start + n]
                start += n
                if P_h is not None:
                    strips = (piece.y, h, piece.shape[1])
                    part = torch.bmm(P_h.T.expand(piece.y, h, h), part.view(strips), out=out[:n].view(strips))
                yield piece, part.view(piece.shape)
