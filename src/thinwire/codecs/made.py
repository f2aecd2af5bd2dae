"""Made: tensors that are made piece by piece while they are encoded, without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.layout import Piece, in_rows, matrix_of, write_back
from thinwire.kernels import Whitening

_RUN = 1 << 18  # entries that fit into a cache


@dataclass(frozen=True)
class DeviceWhitening:
    """How gradients are whitened, for kernels of a device that do it while they read them: see `maths.update_rules.whitened`.

    Attributes:
        g: gradients.
        v: running second moment of each; changed in place.
        b2: decay of each second moment.
        eps: of each.
        steps: how many gradients each has seen, these included.
        clip: multiplies the gradients first; a 0-d tensor where it was found on a device.
    """

    g: Sequence[Tensor]
    v: Sequence[Tensor]
    b2: Sequence[float]
    eps: Sequence[float]
    steps: Sequence[int]
    clip: float | Tensor = 1.0

    def settings(self, i: int) -> tuple[float, float, int]:
        """Decay, eps and step of one of them."""
        return self.b2[i], self.eps[i], self.steps[i]

    @property
    def clips(self) -> bool:
        """Whether gradients are multiplied by anything."""
        return isinstance(self.clip, Tensor) or self.clip != 1

    def clip_on(self, device: torch.device) -> Tensor | None:
        """What multiplies the gradients, on a device; None for nothing."""
        if isinstance(self.clip, Tensor):
            return self.clip.to(device=device, dtype=torch.float32)
        return torch.full((), self.clip, device=device) if self.clips else None


@dataclass(frozen=True)
class Made:
    """Tensors that are made of others, of the same shapes.

    Attributes:
        sources: lists of the tensors that they are made of.
        make: given the number of a tensor and the same piece of it in each of the sources, the piece; every element may depend
            on the same element of the sources alone. It may change them in place.
        make_all: the same for many pieces at once, in operations on lists: given a list of numbers and lists of pieces, a list.
        whitening: where the C kernels can make them of two sources by themselves: given the number of a tensor and a piece of
            the second source, how they make the piece of the first.
        on_device: how the kernels of a device make them by themselves, where they can.
    """

    sources: tuple[Sequence[Tensor], ...]
    make: Callable[..., Tensor]
    make_all: Callable[..., list[Tensor]] | None = None
    whitening: Callable[[int, Tensor], Whitening] | None = None
    on_device: DeviceWhitening | None = None

    def __len__(self) -> int:
        return len(self.sources[0])

    def __getitem__(self, i: int) -> Tensor:
        return self.make(i, *(source[i].detach() for source in self.sources))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def runs(self) -> Iterator[Tensor]:
        """All of them in runs of entries, to look at them without a copy of the model."""
        return (self.make(i, *parts) for i, parts in self._runs())

    def replace_first(self) -> None:
        """Overwrite the tensors of the first source with those that are made of them."""
        for i, parts in self._runs():
            parts[0].copy_(self.make(i, *parts))

    def _runs(self) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        for i, tensors in enumerate(zip(*self.sources, strict=True)):
            whole = tuple(t.detach() for t in tensors)
            if all(t.is_contiguous() and t.device.type == "cpu" for t in whole):
                yield from ((i, parts) for parts in zip(*(t.view(-1).split(_RUN) for t in whole), strict=True))
            else:
                yield i, whole

    def piece(self, piece: Piece) -> Tensor:
        """A piece of one of the tensors, without padding."""
        i = piece.grid.index
        matrices = [matrix_of(source[i], piece.grid) for source in self.sources]
        made = self.make(i, *(piece.of_matrix(m) for m in matrices))
        for source, matrix in zip(self.sources, matrices, strict=True):
            write_back(matrix, source[i])
        return made

    def to_whiten(self, piece: Piece) -> tuple[Tensor, Whitening] | None:
        """A piece of the first source, and how the C kernels whiten it; None where they cannot."""
        if self.whitening is None:
            return None
        i = piece.grid.index
        g, v = (in_rows(piece, source[i]) for source in self.sources)
        return None if g is None or v is None else (g, self.whitening(i, v))

    def pieces(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Pieces of several of the tensors, without padding; made together where it is said how."""
        if self.make_all is None:
            return [self.piece(piece) for piece in pieces]
        grids = {piece.grid.index: piece.grid for piece in pieces}
        matrices = [{i: matrix_of(source[i], grid) for i, grid in grids.items()} for source in self.sources]
        numbers = [piece.grid.index for piece in pieces]
        parts = [[piece.of_matrix(some[piece.grid.index]) for piece in pieces] for some in matrices]
        made = self.make_all(numbers, *parts)
        for source, some in zip(self.sources, matrices, strict=True):
            for i, matrix in some.items():
                write_back(matrix, source[i])
        return made

    def several(self, numbers: Sequence[int]) -> list[Tensor]:
        """Some of the tensors; made together where it is said how."""
        if self.make_all is None:
            return [self[i] for i in numbers]
        return self.make_all(list(numbers), *([source[i].detach() for i in numbers] for source in self.sources))


def piece_of(tensors: Sequence[Tensor] | Made, piece: Piece) -> Tensor:
    """A piece of one of these tensors, without padding; a view where its memory allows."""
    if isinstance(tensors, Made):
        return tensors.piece(piece)
    return piece.of_matrix(matrix_of(tensors[piece.grid.index], piece.grid))
