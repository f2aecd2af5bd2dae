"""DecodedOnce: the messages of a round that several workers of one process read, as in the simulator, decoded once for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from thinwire.codecs.decoder import Received
from thinwire.codecs.layout import Piece


class DecodedOnce(Received):
    """`Received`, which keeps what it has decoded; the same pieces and the same bits, at the price of a copy of the model.

    With M workers the work of a round is then that of M messages and not of M times M. A worker may overwrite what it is given.
    """

    _pieces: list[tuple[Piece, Tensor]] | None = None
    _whole: list[tuple[int, Tensor]] | None = None
    _squares: list[float] | None = None

    def step(self, tensors: Sequence[Tensor], rates: Sequence[float], signs: Sequence[bool]) -> None:
        """See `Received`; the same bits by another way."""
        for i, part, mean in self.each(tensors):
            part.sub_(mean.sign_() if signs[i] else mean, alpha=rates[i])

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """The mean, piece by piece, each in memory of its own."""
        if self._pieces is None:
            self._pieces = [(piece, values.clone()) for piece, values in super().pieces()]
        return ((piece, values.clone()) for piece, values in self._pieces)

    def dense(self) -> Iterator[tuple[int, Tensor]]:
        """The tensors that were sent whole: place in the list and mean, flat."""
        if self._whole is None:
            self._whole = [(i, values.clone()) for i, values in super().dense()]
        return ((i, values.clone()) for i, values in self._whole)

    def squares(self) -> list[float]:
        """The sum of squares of the mean of each tensor."""
        if self._squares is None:
            self._squares = [float(square) for square in super().squares()]
        return list(self._squares)
