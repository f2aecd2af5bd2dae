"""Waits: how long an elastic round waits for those who are late, from what was measured."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator

_RECENT = 16  # rounds that count
_LONG = 1.5  # times the median round: who is not there by then is late
_LEAST_POLLS = 10  # that a deadline has: a machine may be busy for a moment


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
        """Rounds took so long until most messages were there; 0 where that was not measured."""
        self._periods.extend(seconds for seconds in periods if seconds > 0)

    def deadline(self) -> float:
        """Seconds after its own message that a worker waits for others, at least."""
        if not self._periods:
            return self.first
        return max(_LEAST_POLLS * self.poll, self.patience * statistics.median(self._waits) if self._waits else 0.0)

    def long_round(self) -> float:
        """Seconds after the manifest before that a worker waits for others, at least; 0 where nothing was measured.

        Whoever sends at once what was left out before must not close the round while the others are still at their steps.
        """
        return _LONG * statistics.median(self._periods) if self._periods else 0.0

    def silence(self) -> float:
        """Seconds after which one who has come, and has no message to send, takes it that nobody else is there."""
        return max(self.first, self.patience * statistics.median(self._periods)) if self._periods else self.first

    def pauses(self) -> Iterator[float]:
        """Seconds to sleep between two looks: short ones first, then longer ones, up to an eighth of the deadline."""
        pause, longest = self.poll, max(self.poll, self.deadline() / 8)
        while True:
            yield min(pause, longest)
            pause *= 1.5
