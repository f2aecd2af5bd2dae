"""Learning rates of a comparison: every method is tried on the same grid before the runs that count.

The grid is tried on one seed, or goes by the mean of several, in runs a third as long, evaluated on the half of the validation
samples that nothing is reported on. Where the best rate of a method is the least or the largest that was tried, its grid grows
by one more point there, until it is not. A method may have alternatives for other settings; each is tried with every rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.text import Text

from thinwire.errors import ConfigError, check_whole_number
from thinwire.tools.compare import Run, run_all, run_folders
from thinwire.tools.config import RunConfig
from thinwire.tools.records import TUNING
from thinwire.tools.runners import Runner
from thinwire.tools.summary import counted

_MOST_POINTS = 6  # by which a grid may grow
_PART = 3  # a run that tunes is so many times shorter


@dataclass(frozen=True)
class Chosen:
    """What a method is run with.

    Attributes:
        config: the best point that was tried, as it was before it was shortened.
        tried: how many points were.
    """

    config: RunConfig
    tried: int


@dataclass
class _Search:
    """The points of one method.

    Attributes:
        arm: its name.
        alternatives: its settings, without a learning rate.
        rates: that were tried or are to be, in order.
        fixed: whether the method was given one rate, and is not to be tried with others.
        losses: of what was tried, by alternative and rate; infinite where a run failed.
    """

    arm: str
    alternatives: Sequence[RunConfig]
    rates: list[float]
    fixed: bool = False
    losses: dict[tuple[int, float], float] = field(default_factory=dict)

    @property
    def missing(self) -> list[tuple[int, float]]:
        """What is to be tried next."""
        points = [(number, rate) for number in range(len(self.alternatives)) for rate in self.rates]
        return [point for point in points if point not in self.losses]

    @property
    def best(self) -> tuple[int, float]:
        """The point with the least loss; of equals the first."""
        return min(self.losses, key=lambda point: self.losses[point])

    @property
    def at_edge(self) -> bool:
        """Whether the best rate may lie outside of those that were tried."""
        return not self.fixed and self.best[1] in (self.rates[0], self.rates[-1])

    def widen(self, factor: float) -> None:
        """Add a rate beyond the edge that the best is at; below all where every run failed, for they were too large."""
        if self.best[1] == self.rates[0] or math.isinf(self.losses[self.best]):
            self.rates.insert(0, _rounded(self.rates[0] / factor))
        else:
            self.rates.append(_rounded(self.rates[-1] * factor))


def parse_rates(text: str) -> list[float]:
    """The learning rates that "1e-3,1.41e-3,2e-3" stands for: at least two, each a constant factor above the one before.

    Raises:
        ConfigError: they are not.
    """
    wrong = ConfigError(
        f"tune must be two or more learning rates a constant factor apart, such as 1e-3,1.41e-3,2e-3, got {text!r}"
    )
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        raise wrong from None
    if len(rates) < 2 or not all(0 < rate < math.inf for rate in rates):
        raise wrong
    factors = [b / a for a, b in pairwise(rates)]
    if min(factors) <= 1 or max(factors) > 1.05 * min(factors):
        raise wrong
    return rates


def tune(
    arms: Mapping[str, Sequence[RunConfig]],
    runner: Runner,
    out: Path,
    *,
    rates: Sequence[float],
    fixed: frozenset[str],
    seeds: Sequence[int],
    steps: int | None,
    jobs: int,
    console: Console,
    keep: Path | None = None,
) -> dict[str, Chosen]:
    """Find the settings of each method.

    Args:
        arms: the alternatives of each method.
        runner: makes the runs.
        out: folder of the comparison; they are kept in a folder in it.
        rates: of all methods but those in `fixed`.
        fixed: methods that were given a rate.
        seeds: with which each point is tried; the mean loss counts.
        steps: of a run; None takes a third of those of the method.
        jobs: how many runs at once.
        console: where progress is shown.
        keep: a file of records beside that of the folder; see `run_all`.

    Raises:
        ConfigError: all runs of a method failed.
    """
    searches = [
        _Search(arm, configs, [configs[0].lr] if arm in fixed else list(rates), fixed=arm in fixed)
        for arm, configs in arms.items()
    ]
    folders = run_folders([search.arm for search in searches])
    factor = rates[1] / rates[0]
    for left in reversed(range(_MOST_POINTS + 1)):
        runs = {
            (search.arm, point): [_run(search, point, out / TUNING / folder, seed=seed, steps=steps) for seed in seeds]
            for search, folder in zip(searches, folders, strict=True)
            for point in search.missing
        }
        every = [run for some in runs.values() for run in some]
        outcome = run_all(every, runner, out / TUNING, jobs=jobs, console=console, keep=keep)
        for search in searches:
            for point in search.missing:
                records = [outcome.records.get(run) for run in runs[search.arm, point]]
                loss = fmean(math.inf if record is None else record.loss for record in records)
                search.losses[point] = loss if math.isfinite(loss) else math.inf
        at_edges = [search for search in searches if search.at_edge] if left else []
        for search in at_edges:
            search.widen(factor)
        if not at_edges:
            break
    return {search.arm: _chosen(search, console) for search in searches}


def _run(search: _Search, point: tuple[int, float], folder: Path, *, seed: int, steps: int | None) -> Run:
    number, rate = point
    whole = search.alternatives[number]
    short = steps or max(1, whole.steps // _PART)
    start = round(whole.warm_start * short / whole.steps)
    config = replace(whole, lr=rate, seed=seed, steps=short, warm_start=start, val_part="tuning", eval_every=0)
    which = f"-{number}" if len(search.alternatives) > 1 else ""
    return Run(search.arm, config, folder.with_name(f"{folder.name}{which}-lr{rate:g}-seed{seed}"))


def _chosen(search: _Search, console: Console) -> Chosen:
    best, tried = search.best, len(search.losses)
    if math.isinf(search.losses[best]):
        raise ConfigError(
            f"a run failed at each of {counted(tried, 'point')} of {search.arm!r}: give --tune smaller learning rates"
        )
    still = f", at the edge of all ({search.rates[0]:g} to {search.rates[-1]:g})" if search.at_edge else ""
    console.print(Text(f"{search.arm}: lr {best[1]:g}, the best of {counted(tried, 'point')}{still}"), soft_wrap=True)
    return Chosen(replace(search.alternatives[best[0]], lr=best[1]), tried)


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def check_tune_steps(steps: int | None) -> None:
    """Raise a `ConfigError` for a number of steps that no run has."""
    if steps is not None:
        check_whole_number("tune-steps", steps, least=2)


def check_tune_seeds(number: int | None, seeds: Sequence[int]) -> None:
    """Raise a `ConfigError` for more seeds than the comparison has, or none."""
    if number is not None and not 1 <= number <= len(seeds):
        raise ConfigError(f"tune-seeds must be from 1 to {len(seeds)}, the number of --seeds, got {number}")
