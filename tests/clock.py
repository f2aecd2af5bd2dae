"""A clock that stands still until a test moves it, in place of the `time` module of the code under test."""

from __future__ import annotations


class Clock:
    """Seconds since the test began; who sleeps moves it on and does not wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def advance(self, seconds: float) -> None:
        """Let time pass, as if something were computed."""
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter
