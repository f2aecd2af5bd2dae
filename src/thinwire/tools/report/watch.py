"""Refresh a report while its runs go on."""

from __future__ import annotations

from collections.abc import Callable, Hashable

PATIENCE = 1800.0  # seconds without a new step of any run after which nobody trains any more


def watch(
    refresh: Callable[[], Hashable | None],
    *,
    every: float,
    sleep: Callable[[float], None],
    patience: float = PATIENCE,
) -> bool:
    """Refresh until all runs have ended, and say whether they have.

    Args:
        refresh: makes the report anew, and returns how far the runs are; None where all have ended.
        every: seconds between two refreshes.
        sleep: waits so many seconds.
        patience: seconds without any progress after which to stop.
    """
    before: Hashable | None = None
    idle = 0.0
    while idle < patience:
        if (now := refresh()) is None:
            return True
        idle = idle + every if now == before else 0.0
        before = now
        sleep(every)
    return False
