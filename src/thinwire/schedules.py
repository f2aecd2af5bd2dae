"""When something is sent: pure functions of the step, frozen and without state.

Steps are counted from 1: `due(step)` is asked after the step with that number. It answers with the fragments that are due,
and an algorithm that has no fragments just tests whether the answer is empty.

>>> Every(4).due(8)
(0,)
>>> Every(4).due(9)
()
>>> Staggered(4, fragments=2).due(2), Staggered(4, fragments=2).due(4)
((1,), (0,))
>>> tuple(step for step in range(1, 17) if Stages(2, 6, 4).due(step))
(2, 4, 6, 8, 12, 16)
"""

from __future__ import annotations

import re
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


@dataclass(frozen=True, init=False, repr=False)
class Stages:
    """Schedules one after the other, each until a step: exchanges that become rarer as training goes on.

    >>> Stages(4, 64, 8, 192, 32)
    4 until 64, 8 until 192, 32

    Attributes:
        schedules: in their order; all are asked for the steps of the run, so that with periods of 4 and 32 the beat stays.
        until: the last step of each but the last one. Steps of a warm start count.
    """

    schedules: tuple[Schedule, ...]
    until: tuple[int, ...]

    def __init__(self, *parts: int | Schedule):
        """Check schedules and steps.

        Args:
            parts: a schedule or a period, its last step, the next one, and so on; the last one has no end.
        """
        if len(parts) % 2 == 0:
            raise ConfigError(f"stages are a period, its last step, the next period ... and end with a period, got {parts!r}")
        steps = parts[1::2]
        for least, step in zip([0, *steps], steps, strict=False):
            check_whole_number("the last step of a stage", step, least=least + 1 if isinstance(least, int) else 1)
        object.__setattr__(self, "schedules", tuple(as_schedule(part) for part in parts[::2]))
        object.__setattr__(self, "until", steps)
        _same_fragments("a sequence of stages", self.schedules)

    @property
    def fragments(self) -> int:
        """As many as each of the schedules has."""
        return self.schedules[0].fragments

    def due(self, step: int) -> tuple[int, ...]:
        """As the schedule whose turn it is says."""
        return self.schedules[sum(step > last for last in self.until)].due(step)

    def __repr__(self) -> str:
        """As `parse_schedule` reads it, where all are plain periods."""
        shown = [str(s.H) if isinstance(s, Every) and not s.offset else repr(s) for s in self.schedules]
        ends = [f" until {step}, " for step in self.until]
        return "".join(f"{one}{end}" for one, end in zip(shown, [*ends, ""], strict=True))


@dataclass(frozen=True)
class Union:
    """Due when any of several schedules says so.

    Args:
        schedules: all with the same number of fragments.
    """

    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        """Check that the schedules have the same fragments."""
        _same_fragments("a union", self.schedules)

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


def _same_fragments(what: str, schedules: tuple[Schedule, ...]) -> None:
    counts = {s.fragments for s in schedules}
    if len(counts) != 1:
        raise ConfigError(f"{what} needs schedules with one number of fragments, got {sorted(counts) or 'none'}")


def parse_schedule(text: str) -> int | Schedule:
    """What a text means on a command line: a period, or several, each until a step.

    >>> parse_schedule("32"), parse_schedule("4 until 64, 32")
    (32, 4 until 64, 32)

    Raises:
        ConfigError: showing what is not understood, and what would be.
    """
    if not re.fullmatch(r"\d+(\s+until\s+\d+\s*,\s*\d+)*", text.strip()):
        raise ConfigError(f"a period is a number of steps, or several such as '4 until 64, 8 until 192, 32', got {text!r}")
    numbers = [int(word) for word in re.findall(r"\d+", text)]
    return numbers[0] if len(numbers) == 1 else Stages(*numbers)


def as_schedule(H: int | Schedule) -> Schedule:
    """A plain number means `Every(number)`."""
    return H if isinstance(H, Schedule) and not isinstance(H, type) else Every(H)  # type: ignore[arg-type]
