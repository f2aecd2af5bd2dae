"""Waits: how long an elastic round waits for those who are late, from what was measured."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator

_RECENT = 16  # rounds that count


class Waits:
    """Deadlines of one worker: `patience` times the median of recent waits. All seconds are those of its own clock.

    Args:
        patience: the factor.
        poll: seconds between two looks at the store, to begin with.
        first: seconds to wait for others where nothing was measured yet.
    """

    def __init__(self, patience: float, poll: float, first: float):
        """Nothing was measured."""
        self.patience, self.poll, self.first = patience, poll, first
        self._waits: deque[float] = deque(maxlen=_RECENT)
        self._periods: deque[float] = deque(maxlen=_RECENT)

    @property
    def periods(self) -> list[float]:
        """Seconds between recent manifests, as their proposers measured them; part of a checkpoint."""
        return list(self._periods)

    def waited(self, seconds: float) -> None:
        """This worker's message was there for so long before those of most others were: the slowest do not count."""
        self._waits.append(seconds)

    def took(self, periods: Iterable[float]) -> None:
        """Rounds took so long."""
        self._periods.extend(periods)

    def deadline(self) -> float:
        """Seconds after its own message that a worker waits for others, before it closes the round without them.

        At least a quarter of a round: whoever comes last has hardly waited for anybody, and must not shut out who comes right
        after it.
        """
        if not self._periods:
            return self.first
        least = max(2 * self.poll, statistics.median(self._periods) / 4)
        return max(least, self.patience * statistics.median(self._waits) if self._waits else 0.0)

    def silence(self) -> float:
        """Seconds after which one who has come, and has no message to send, takes it that nobody else is there."""
        return max(self.first, self.patience * statistics.median(self._periods)) if self._periods else self.first

    def pauses(self) -> Iterator[float]:
        """Seconds to sleep between two looks: short ones first, then longer ones, up to an eighth of the deadline."""
        pause, longest = self.poll, max(self.poll, self.deadline() / 8)
        while True:
            yield min(pause, longest)
            pause *= 1.5
