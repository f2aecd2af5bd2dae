"""Every error that thinwire raises on purpose.

`ConfigError` and its subclasses report wrong settings before anything runs: the command line prints one line and exits with 2.
`LinkError` comes from the wire and names the rank and the round; `WireError` comes from a message and names its sender.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path


class ThinwireError(Exception):
    """Base of all errors that thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """A setting is wrong; the message shows the bad value and what is allowed."""


def how_to_install(extra: str) -> str:
    """The command that installs an optional part: in a clone of the repository, or wherever thinwire was installed.

    Args:
        extra: its name in pyproject.toml.
    """
    clone = Path(__file__).parents[2]
    in_clone = Path(__file__).parents[1].name == "src" and (clone / "pyproject.toml").is_file()
    return f"pip install -e '.[{extra}]'" if in_clone else f"pip install 'thinwire[{extra}]'"


class MissingDependency(ConfigError):
    """An optional package is not installed; the message says how to get it."""


class MissingData(ConfigError):
    """A data set or file is not there; the message says how to get it."""


class CheckpointError(ThinwireError):
    """A checkpoint cannot be read or does not fit; nothing has been changed."""


class LinkError(ThinwireError, RuntimeError):
    """The wire failed: the message names the rank that reports and the round."""

    def __init__(self, message: str, *, lost: Sequence[int] = ()):
        """Keep the ranks that were found to be gone in `lost`."""
        super().__init__(message)
        self.lost = tuple(lost)


class WireError(ThinwireError, ValueError):
    """A message is not what it should be: damaged, of another codec or round, or hostile. Nothing was applied."""

    def __init__(self, message: str, *, rank: int | None = None):
        """Say whose message it is where that is known."""
        super().__init__(message if rank is None else f"the message of rank {rank}: {message}")
        self.rank = rank


class FingerprintMismatch(ConfigError):
    """The workers were not started with the same algorithm, settings or shapes."""


class Diverged(ThinwireError, RuntimeError):
    """State that must be bit-equal on all workers is not."""


class RoundAborted(ThinwireError):
    """This round did not take place, on any worker. Shared state is as it was before it."""


class NonFiniteRound(RoundAborted):
    """A worker's contribution held NaN or Inf, so the round was refused on all workers."""

    def __init__(self, message: str, *, culprits: Sequence[int]):
        """Keep the ranks whose contribution was not finite in `culprits`."""
        super().__init__(message)
        self.culprits = tuple(culprits)


class DamagedRound(RoundAborted):
    """Messages of a round could not be read by some worker, so the round was refused on all workers."""


class TrainingDiverged(ThinwireError, RuntimeError):
    """Training has diverged, raised on all workers: their parameters are invalid, or too many rounds in a row were refused."""

    def __init__(self, message: str, *, since: int):
        """Keep the step at which it was first seen in `since`."""
        super().__init__(message)
        self.since = since


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise a `ConfigError` that shows `value` and `allowed` unless `value` is one of them."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_whole_number(name: str, value: object, *, least: int = 1) -> None:
    """Raise a `ConfigError` unless `value` is an int of at least `least` (bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """Raise a `ConfigError` unless `value` is at least 0 and finite."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be at least 0 and finite, got {value!r}")
