"""When something is sent: pure functions of the step, frozen and without state.

Steps are counted from 1: `due(step)` is asked after the step with that number. It answers with the fragments that are due,
and an algorithm that has no fragments just tests whether the answer is empty.

>>> Every(4).due(8)
(0,)
>>> Every(4).due(9)
()
>>> Staggered(4, fragments=2).due(2), Staggered(4, fragments=2).due(4)
((1,), (0,))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from thinwire.errors import ConfigError, check_whole_number


@runtime_checkable
class Schedule(Protocol):
    """Says which fragments are due after a step; the same answer on every worker."""

    @property
    def fragments(self) -> int:
        """How many fragments there are; 1 where the model is sent whole."""
        ...

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that are due after step number `step` (counted from 1)."""
        ...


@dataclass(frozen=True)
class Every:
    """Everything is due every `H` steps.

    Args:
        H: the period; 1 means every step.
        offset: shifts the beat, so that several schedules of one period need not fall together.
    """

    H: int
    offset: int = 0

    def __post_init__(self) -> None:
        """Check the period."""
        check_whole_number("H", self.H)
        if not isinstance(self.offset, int):
            raise ConfigError(f"offset must be a whole number, got {self.offset!r}")

    @property
    def fragments(self) -> int:
        """One: the model is sent whole."""
        return 1

    def due(self, step: int) -> tuple[int, ...]:
        """Fragment 0 when (step - offset) is a multiple of H."""
        return (0,) if (step - self.offset) % self.H == 0 else ()


@dataclass(frozen=True)
class Staggered:
    """Each fragment is due every `H` steps, the fragments spread evenly over those H steps (Streaming DiLoCo).

    Fragment p is due when step = -floor(p * H / fragments) modulo H, so with one fragment this is `Every(H)`.

    Args:
        H: the period of each fragment.
        fragments: how many there are, at most H.
    """

    H: int
    fragments: int

    def __post_init__(self) -> None:
        """Check the period and the number of fragments."""
        check_whole_number("H", self.H)
        check_whole_number("fragments", self.fragments)
        if self.fragments > self.H:
            raise ConfigError(f"fragments must be at most H={self.H}, so that one is due at a time, got {self.fragments}")

    def due(self, step: int) -> tuple[int, ...]:
        """The fragment whose turn it is, if any."""
        return tuple(p for p in range(self.fragments) if (step + p * self.H // self.fragments) % self.H == 0)


@dataclass(frozen=True)
class Warmup:
    """Everything is due at every one of the first `steps` steps, then `then` decides (post-local SGD).

    Args:
        steps: how many steps are synchronous; 0 for none.
        then: the schedule afterwards.
    """

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        """Check the number of steps."""
        check_whole_number("warm-up steps", self.steps, least=0)
        object.__setattr__(self, "then", as_schedule(self.then))

    @property
    def fragments(self) -> int:
        """As many as the schedule that follows has."""
        return self.then.fragments

    def due(self, step: int) -> tuple[int, ...]:
        """All fragments during the warm-up, then as `then` says."""
        return tuple(range(self.fragments)) if step <= self.steps else self.then.due(step)


@dataclass(frozen=True)
class Union:
    """Due when any of several schedules says so.

    Args:
        schedules: all with the same number of fragments.
    """

    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        """Check that the schedules have the same fragments."""
        counts = {s.fragments for s in self.schedules}
        if len(counts) != 1:
            raise ConfigError(f"a union needs schedules with one number of fragments, got {sorted(counts) or 'none'}")

    @property
    def fragments(self) -> int:
        """As many as each of the schedules has."""
        return self.schedules[0].fragments

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments that at least one schedule calls due, in order."""
        return tuple(sorted({p for s in self.schedules for p in s.due(step)}))


@dataclass(frozen=True)
class Periods:
    """Several states, each due by a schedule of its own; a state's number is its place here.

    Args:
        schedules: one per state, all without fragments; a plain number means `Every(number)`.
    """

    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        """Check the schedules."""
        object.__setattr__(self, "schedules", tuple(as_schedule(s) for s in self.schedules))
        if not self.schedules or any(s.fragments > 1 for s in self.schedules):
            raise ConfigError(f"periods need one schedule without fragments for each state, got {self.schedules!r}")

    @property
    def fragments(self) -> int:
        """How many states there are."""
        return len(self.schedules)

    def due(self, step: int) -> tuple[int, ...]:
        """The numbers of the states that are due."""
        return tuple(i for i, s in enumerate(self.schedules) if s.due(step))


def as_schedule(H: int | Schedule) -> Schedule:
    """A plain number means `Every(number)`."""
    return H if isinstance(H, Schedule) and not isinstance(H, type) else Every(H)  # type: ignore[arg-type]
