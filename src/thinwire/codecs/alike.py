"""Alike: sections of several short messages that differ in their contents alone, written or read in one go.

Of the messages that are dealt to owners many have one block of a tensor: to write or read them one by one takes as long as the
calls take, whatever is in them. The bytes are those of one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.codecs.bits import Bytes
from thinwire.codecs.indices import IndexCode
from thinwire.codecs.message_plan import Plan, Section
from thinwire.codecs.stages import Floats, Row, Values

Range = tuple[int, int]
Place = tuple[int, Section, Sequence[Range]]  # a section: where its message begins, and which blocks or values are in it


@dataclass(frozen=True)
class Alike:
    """Sections of the same group, row and code, in messages that lie one after the other.

    Attributes:
        number: of the group in the message that is not dealt; -1 for tensors that are sent whole.
        row: the values of one.
        code: how indices are written; None where none are sent.
        rows: blocks of the group, or values of the tensors that are sent whole, of all sections.
        indices: where each byte of their indices is, [sections, nbytes].
        values: where each byte of their values is, [sections, nbytes].
    """

    number: int
    row: Row
    code: IndexCode | None
    rows: NDArray[np.int64]
    indices: NDArray[np.int64]
    values: NDArray[np.int64]

    @property
    def sections(self) -> int:
        """How many there are."""
        return len(self.values)

    def write(self, out: Bytes, form: Values, indices: NDArray[np.integer] | None, values: Floats, read: Floats) -> None:
        """Write what these sections say.

        Args:
            out: all messages.
            form: how values are written.
            indices: of the whole group, [blocks, k]; None where none are sent.
            values: of the whole group, or of all tensors that are sent whole.
            read: gets what receivers will read.
        """
        taken = values[self.rows]
        if self.code is not None and indices is not None:
            out[self.indices] = self.code.encode_all(indices[self.rows].reshape(self.sections, -1, self.row.k))
        raw, back = form.write_all(taken.reshape(-1), self.row, self.sections)
        out[self.values] = raw
        read[self.rows] = back.reshape(taken.shape)

    def read(self, raw: Bytes, form: Values, indices: NDArray[np.integer] | None, values: Floats) -> None:
        """Read what these sections say into arrays of the whole group.

        Raises:
            WireError: one of them is not sound; it does not say which.
        """
        if self.code is not None and indices is not None:
            found = np.empty((self.sections, len(self.rows) // self.sections, self.row.k), indices.dtype)
            self.code.read_all(raw[self.indices], found)
            indices[self.rows] = found.reshape(-1, self.row.k)
        found = form.read_all(raw[self.values], self.row)
        values[self.rows] = found.reshape(-1, *values.shape[1:])


def alike(shares: Sequence[tuple[Plan, Sequence[int], Sequence[Sequence[Range]], Sequence[Range]]]) -> tuple[Alike, ...]:
    """The sections of messages of one part that lie one after the other.

    Args:
        shares: of each message its plan, which group of the whole each of its groups is of, which blocks of it, and which
            values of the tensors that are sent whole.
    """
    found: dict[tuple[int, Row, IndexCode | None], list[Place]] = {}
    start = 0
    for plan, groups, rows, whole in shares:
        for section in plan.parts[0].sections:
            number, ranges = (-1, whole) if section.group is None else (groups[section.number], rows[section.number])
            found.setdefault((number, section.row, section.code), []).append((start, section, ranges))
        start += plan.nbytes
    return tuple(_joined(number, row, code, places) for (number, row, code), places in found.items())


def _joined(number: int, row: Row, code: IndexCode | None, places: Sequence[Place]) -> Alike:
    rows = np.concatenate([np.arange(a, b) for _, _, ranges in places for a, b in ranges])
    section = places[0][1]
    starts = np.array([[start + s.start] for start, s, _ in places])
    middles = np.array([[start + s.middle] for start, s, _ in places])
    indices, values = section.middle - section.start, section.stop - section.middle
    return Alike(number, row, code, rows, starts + np.arange(indices), middles + np.arange(values))
