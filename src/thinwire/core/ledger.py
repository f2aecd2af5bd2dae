"""Ledger: which samples each worker of an elastic run trains on, as a pure function of the manifests.

A *block* is what one worker trains on between two rounds: a batch is a function of (seed, block, step within the block). After
every round each worker that is expected in the next one takes the next block. What was counted is done; the blocks of a worker
that is gone, or that it was given and has not begun when a message of it is counted, are issued again, before new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from thinwire.errors import WireError

GRACE = 16  # rounds for which a worker that was not counted keeps its blocks: it may be late, and send what it kept


class Ledger:
    """The books of a run; the same on all workers after the same round.

    Attributes:
        cursor: the next block that nobody has had.
        debt: blocks to be issued again, in order.
        held: blocks that each worker works on, or has worked on since it was counted last.
        missing: rounds in a row for which a worker that holds blocks was not expected.
        done: how many blocks were counted.
    """

    def __init__(self) -> None:
        """Nothing was issued."""
        self.cursor = 0
        self.done = 0
        self.debt: list[int] = []
        self.held: dict[int, list[int]] = {}
        self.missing: dict[int, int] = {}

    def settle(
        self, *, counted: Mapping[int, int], hello: Collection[int], bye: Collection[int], expected: Sequence[int]
    ) -> list[int]:
        """Book a round; returns the blocks that were counted in it.

        Args:
            counted: ids of the workers whose messages count, and how many of the blocks that they hold are in them.
            hello: of those who came: whatever they held is not in the model, and will not be.
            bye: of those who left.
            expected: of those who are expected in the next round, in order.
        """
        done: list[int] = []
        for who in sorted(counted):
            held = self.held.pop(who, [])
            done += held[: counted[who]]
            self.debt += held[counted[who] :]
        for who in sorted({*hello, *bye}):
            self.debt += self.held.pop(who, [])
        self.missing = {who: self.missing.get(who, 0) + 1 for who in sorted(self.held) if who not in expected}
        for who in [who for who, rounds in self.missing.items() if rounds > GRACE]:
            self.debt += self.held.pop(who, [])
            del self.missing[who]
        again = {who for who, rounds in self.missing.items() if rounds == 1}  # it may have been late by a moment, and trains on
        for who in sorted({*expected, *again}):
            self.held.setdefault(who, []).append(self._next())
        self.done += len(done)
        return done

    def _next(self) -> int:
        if self.debt:
            return self.debt.pop(0)
        self.cursor += 1
        return self.cursor - 1

    def block_of(self, who: int) -> int | None:
        """What a worker trains on until the next round; None where it has nothing."""
        return self.held[who][-1] if self.held.get(who) else None

    def up_to(self, who: int, block: int | None) -> int:
        """How many of the blocks that a worker holds it has worked on, if `block` was the last one; 0 if it was none."""
        held = self.held.get(who, [])
        return held.index(block) + 1 if block in held else 0

    # --- As part of a checkpoint ------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "cursor": self.cursor,
            "done": self.done,
            "debt": self.debt,
            "held": {str(k): v for k, v in self.held.items()},
            "missing": {str(k): v for k, v in self.missing.items()},
        }

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Ledger:
        """What `to_json` gave; a `WireError` for anything else."""
        found = Ledger()
        try:
            found.cursor, found.done, found.debt = int(told["cursor"]), int(told["done"]), [int(b) for b in told["debt"]]
            found.held = {int(k): [int(b) for b in v] for k, v in told["held"].items()}
            found.missing = {int(k): int(v) for k, v in told["missing"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise WireError(f"not a ledger: {type(cause).__name__} {str(cause)[:80]}") from None
        blocks = [*found.debt, *(b for held in found.held.values() for b in held)]
        if len(set(blocks)) != len(blocks) or len(blocks) + found.done != found.cursor:
            raise WireError("a ledger whose blocks do not add up")
        return found
