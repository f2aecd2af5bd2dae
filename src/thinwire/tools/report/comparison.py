"""From records to what a table says: arms with their seeds, against a baseline, with mean, spread and p-value."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.tools.records import Record
from thinwire.tools.summary import counted, ddp_bytes
from thinwire.tools.words import changed

# What runs must have in common to be compared; and what says nothing of an arm.
_JOB = ("task", "workers", "steps", "batch", "data", "non_iid")
_NOT_OF_AN_ARM = ("seed", "eval_every", "device")


@dataclass(frozen=True)
class Sample:
    """One figure over the seeds of an arm."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """NaN where there is nothing, or where a run has diverged."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation of the population that the seeds are drawn from; NaN with fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 and self.finite else math.nan

    @property
    def finite(self) -> bool:
        """Whether all values are numbers."""
        return all(map(math.isfinite, self.values))


@dataclass(frozen=True)
class Arm:
    """A method at one point of its settings, with one record per seed."""

    name: str
    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The record of its first seed, for what all have in common."""
        return self.records[0]

    @property
    def loss(self) -> Sample:
        """Validation loss at the end."""
        return Sample(tuple(record.loss for record in self.records))

    def sample(self, name: str) -> Sample | None:
        """A figure of the summaries; None where some record has none."""
        values = [record.figure(name) for record in self.records]
        return None if any(v is None for v in values) else Sample(tuple(v for v in values if v is not None))

    @property
    def fewer(self) -> float | None:
        """How many times fewer bytes a worker sent than it would have in DDP's ring, with as many workers and steps."""
        sent = self.sample("sent")
        known = "parameters" in self.first.figures  # not of a run that was interrupted
        return ddp_bytes(self.first.figures) / sent.mean if known and sent is not None and sent.mean else None

    def fewer_among(self, workers: int) -> float | None:
        """The same with another number of workers, computed from what was sent; None where that does not tell.

        Messages are as long whatever the number of workers. Of a gathered one M - 1 copies leave a worker, of one in a ring
        2 (M - 1) / M: with three or more workers, what was sent and the length of the messages tell how much was which. What
        is swapped in pairs leaves once. What owners average has two messages in each round, which it does not tell apart.
        """
        sent, payload, M = self.sample("sent"), self.sample("payload"), int(self.first.figures["workers"])
        config = self.first.config
        if self.fewer is None or sent is None or payload is None or config.shards > 1 or config.route != "gather":
            return None
        S, P = sent.mean, payload.mean
        if config.algorithm == "noloco":
            there = S
        elif M < 3:
            return None
        else:
            ring = min(P, max(0.0, ((M - 1) * P - S) / ((M - 1) * (1 - 2 / M))))
            there = (P - ring) * (workers - 1) + ring * 2 * (workers - 1) / workers
        return ddp_bytes({**self.first.figures, "workers": workers}) / there if there else None

    @property
    def unfinished(self) -> bool:
        """Whether its run was interrupted or is still running."""
        return self.first.unfinished


@dataclass(frozen=True)
class Comparison:
    """Arms that did the same job.

    Attributes:
        title: the job in words.
        arms: in the order in which they came.
        baseline: the one of them that the others are held against.
        common: settings that are not the defaults, and the same for all.
        varying: what of the job differs between them, where runs of different jobs were asked for together.
    """

    title: str
    arms: tuple[Arm, ...]
    baseline: Arm
    common: dict[str, Any]
    varying: tuple[str, ...] = ()

    def settings_of(self, arm: Arm) -> dict[str, Any]:
        """What is particular to an arm: the period, and what is not the default and not common to all."""
        settings = arm.first.config.settings
        mine = {"H": settings["H"]} if "H" in settings else {}
        job = {name: getattr(arm.first.config, name) for name in self.varying}
        return job | mine | {k: v for k, v in _settings(arm.first).items() if k not in self.common}

    def against(self, arm: Arm) -> float | None:
        """Loss against the baseline's, in percent: the mean over the seeds that both have, if any; else of the means."""
        base = self.baseline.loss.mean
        if arm is self.baseline or arm.unfinished or self.baseline.unfinished or not arm.loss.finite:
            return None  # of unfinished runs: losses of different steps
        if paired := self.differences(arm):
            return statistics.fmean(paired)
        return 100 * (arm.loss.mean / base - 1) if base > 0 else None

    def differences(self, arm: Arm) -> tuple[float, ...]:
        """Loss against the baseline's of the same seed, in percent, for each seed that both have."""
        base = {record.config.seed: record.loss for record in self.baseline.records}
        both = [(record.loss, base[record.config.seed]) for record in arm.records if record.config.seed in base]
        return tuple(100 * (mine / its - 1) for mine, its in both if its > 0 and math.isfinite(mine))

    def error(self, arm: Arm) -> float | None:
        """Standard error of `against`; None with fewer than two seeds that both have."""
        paired = self.differences(arm)
        return None if self.against(arm) is None or len(paired) < 2 else statistics.stdev(paired) / math.sqrt(len(paired))

    def p_value(self, arm: Arm) -> float | None:
        """How likely so large a difference to the baseline is by the choice of seeds alone."""
        if arm is self.baseline:
            return None
        paired = self.differences(arm)
        if len(paired) < 2 or not arm.loss.finite:
            return p_value(arm.loss.values, self.baseline.loss.values)
        return paired_p_value(paired)


def p_value(mine: Sequence[float], base: Sequence[float]) -> float | None:
    """Welch's t-test, two-sided; None with fewer than two values on a side, without any spread, or without scipy."""
    both = (*mine, *base)
    if min(len(mine), len(base)) < 2 or not all(map(math.isfinite, both)) or not scipy_is_here():
        return None
    if statistics.pvariance(mine) == statistics.pvariance(base) == 0:
        return None
    from scipy.stats import ttest_ind

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nearly equal values, which are what they are
        result: Any = ttest_ind(mine, base, equal_var=False)
    return float(result.pvalue)


def paired_p_value(differences: Sequence[float]) -> float | None:
    """The t-test of differences between pairs, two-sided; None without any spread, or without scipy."""
    if statistics.pvariance(differences) == 0 or not scipy_is_here():
        return None
    from scipy.stats import ttest_1samp

    result: Any = ttest_1samp(differences, 0.0)
    return float(result.pvalue)


def scipy_is_here() -> bool:
    """Whether there can be p-values."""
    return importlib.util.find_spec("scipy") is not None


# --- Which runs are compared with which ----------------------------------------------------------------------------------


def comparisons(
    records: Iterable[Record], *, baseline: str | None = None, together: bool = False, best: bool = False
) -> list[Comparison]:
    """Runs of the same job side by side.

    Args:
        records: of any jobs.
        baseline: name of the arm to compare with; by default the first that is data-parallel, else the first of all.
        together: compare all runs on one task, even if steps, workers or batches differ.
        best: of arms with the same name keep the one with the most seeds, then with the least loss.

    Raises:
        ConfigError: when no job has the baseline.
    """
    jobs: dict[str, list[Record]] = {}
    for record in records:
        jobs.setdefault(json.dumps(_job(record, together), default=str), []).append(record)
    found = [_comparison(some, baseline, together, best) for some in jobs.values()]
    if baseline is not None and all(c.baseline.name != baseline for c in found):
        names = ", ".join(repr(arm.name) for c in found for arm in c.arms)
        raise ConfigError(f"no method is called {baseline!r}, to be the baseline: choose from {names}")
    return found


def _comparison(records: list[Record], baseline: str | None, together: bool, best: bool) -> Comparison:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_identity(record), []).append(record)
    samples = list(groups.values())
    if best:
        samples = _best_of_each_name(samples)
    arms = tuple(Arm(name, tuple(some)) for name, some in zip(_names(samples), samples, strict=True))
    ended = [arm for arm in arms if not arm.unfinished] or arms
    dense = [arm for arm in ended if arm.first.config.algorithm in ("ddp", "data-parallel")]
    chosen = next((arm for arm in arms if arm.name == baseline), (dense or ended)[0])
    settings = [_settings(arm.first) for arm in arms]
    common = {k: v for k, v in settings[0].items() if all(k in other and other[k] == v for other in settings)}
    varying = tuple(name for name in _JOB if len({str(getattr(arm.first.config, name)) for arm in arms}) > 1)
    return Comparison(_title(records[0], together), arms, chosen, common if len(arms) > 1 else {}, varying)


def _job(record: Record, together: bool) -> dict[str, Any]:
    config = replace(record.config, workers=int(record.figures["workers"]))
    return {name: getattr(config, name) for name in (("task",) if together else _JOB)}


def _title(record: Record, together: bool) -> str:
    job = _job(record, together)
    words = [str(job["task"])]
    if not together:
        words += [counted(job["workers"], "worker"), counted(job["steps"], "step")]
        words += [f"{name.replace('_', '-')} {job[name]}" for name in ("batch", "data", "non_iid") if job[name] is not None]
    return ", ".join(words)


def _identity(record: Record) -> str:
    config = {k: v for k, v in asdict(record.config).items() if k not in _NOT_OF_AN_ARM}
    return json.dumps([record.arm, record.place, config], sort_keys=True, default=str)


def _settings(record: Record) -> dict[str, Any]:
    """What may tell an arm from another of the same method."""
    return {k: v for k, v in changed(record.config).items() if k not in (*_NOT_OF_AN_ARM, "data", "non_iid", "batch")}


def _names(samples: list[list[Record]]) -> list[str]:
    """The arms' names; where two are alike, with what tells them apart."""
    given = [some[0].arm for some in samples]
    names = []
    for some, name in zip(samples, given, strict=True):
        alike = [_told_apart_by(other[0]) for other, its in zip(samples, given, strict=True) if its == name]
        mine = _told_apart_by(some[0])
        apart = {k: v for k, v in mine.items() if any(other.get(k) != v for other in alike)}
        names.append(name if len(alike) == 1 else f"{name} ({show_settings(apart) or 'as usual'})")
    return names


def _told_apart_by(record: Record) -> dict[str, Any]:
    config = record.config
    return {
        "": record.place,
        **{k: getattr(config, k) for k in ("algorithm", "workers", "steps", "batch")},
        **changed(config),
        **{"lr": config.lr, **config.settings},
    }


def _best_of_each_name(samples: list[list[Record]]) -> list[list[Record]]:
    best: dict[str, tuple[tuple[int, float], list[Record]]] = {}
    for some in samples:
        loss = Sample(tuple(record.loss for record in some)).mean
        rank = (-len(some), loss if math.isfinite(loss) else math.inf)
        if some[0].arm not in best or rank < best[some[0].arm][0]:
            best[some[0].arm] = rank, some
    return [some for _, some in best.values()]


def show_settings(settings: dict[str, Any]) -> str:
    """Settings for people: "H=32, lr=0.002"; what has no name of its own says enough by its value."""
    return ", ".join(f"{name}={_plain(value)}" if name else _plain(value) for name, value in settings.items())


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)
