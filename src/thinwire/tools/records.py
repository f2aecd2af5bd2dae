"""Records: all that is kept of a run, as one line of JSON. `thinwire compare` writes them, `thinwire report` reads them.

A line has `format`, `arm`, `config`, `command`, `place`, `figures` (those of summary.json), `curve` (metrics.jsonl, thinned),
`versions`, `cores` and `date`. What is not a finite number is null.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.tools.config import RunConfig, config_of, read_run_toml

log = logging.getLogger("thinwire")
Note = Callable[[str], None]

FORMAT = 1
TUNING = "tuning"  # folder of the runs that only choose settings
POINTS = 200  # of a curve, where it has no more evaluations than that


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where worker 0 stood after a step; the totals are from the start of the run.

    Attributes:
        step: steps taken.
        loss: training loss, the mean over the steps since the point before.
        seconds: training time; NaN where it was not recorded.
        waiting: the part of it spent on the wire; likewise.
        sent: bytes sent.
        payload: bytes of its own messages, before a ring or a gather multiplies them.
        rounds: exchanges.
        val_loss: of the shared model, where it was evaluated.
        val_drift: how far the workers' models were apart then.
    """

    step: int
    loss: float
    seconds: float
    waiting: float
    sent: int
    payload: int
    rounds: int
    val_loss: float | None = None
    val_drift: float | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run, finished unless `unfinished` says so.

    Attributes:
        arm: the name under which its seeds are taken together.
        config: its settings, with the seed.
        command: repeats it.
        place: "processes", or "simulated" or "lab", where the network was limited with its bandwidth and latency:
            "lab 100mbit 20ms".
        figures: those of summary.json.
        curve: empty in records from before there were curves.
        versions: of thinwire, torch, numpy, python and platform.
        cores: of the machine.
        date: when it was started.
        tried: points of its settings that were tried before; 0 where it was not tuned.
    """

    arm: str
    config: RunConfig
    command: str
    place: str
    figures: dict[str, Any]
    curve: tuple[Point, ...] = ()
    versions: dict[str, str]
    cores: int
    date: str
    tried: int = 0

    @property
    def loss(self) -> float:
        """Validation loss at the end, NaN where it is not a finite number."""
        value = self.figure("val_loss")
        return math.nan if value is None else value

    @property
    def unfinished(self) -> bool:
        """Whether it was interrupted, or is still running."""
        return bool(self.figures.get("unfinished"))

    @property
    def key(self) -> str:
        """Equal for two records of the same run: they are no two samples."""
        return run_key(self.arm, self.place, self.config)

    def figure(self, name: str) -> float | None:
        """A figure of the summary; None where there is none or it is not finite."""
        value = self.figures.get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else None


def run_key(arm: str, place: str, config: RunConfig) -> str:
    """What tells a run from all others: its name, where it takes place, and its settings."""
    return json.dumps([arm, place, asdict(config)], sort_keys=True, default=str)


# --- From a run folder ---------------------------------------------------------------------------------------------------


def record_of(folder: Path, *, arm: str | None = None, place: str | None = None, unfinished: bool = False) -> Record:
    """The record of the finished run in `folder`.

    Args:
        folder: has run.toml, summary.json and metrics.jsonl.
        arm: by default what run.toml says, or the name of the algorithm.
        place: by default what run.toml says, or "simulated" or "processes" as the summary has it.
        unfinished: take a run that is not finished as far as it went, under a name that says so.

    Raises:
        ConfigError: where the run is not finished, or a file is damaged.
    """
    config = read_run_toml(folder / "run.toml")
    tables = tomllib.loads((folder / "run.toml").read_text(encoding="utf-8"))
    about = tables.get("about", {})
    try:
        figures = _figures(folder, config)
        so_far = "unfinished" in figures
        missing = {"workers", "step", "shards", *(() if so_far else ("parameters",))} - figures.keys()
        lines = _whole_lines(folder / "metrics.jsonl") if figures else []
        curve = thinned([_point(line) for line in lines if line.get("step", math.inf) <= figures.get("step", 0)])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ConfigError(f"{folder} is damaged: {cause}") from cause
    if not figures:
        raise ConfigError(f"{folder} has no step yet")
    if missing:
        raise ConfigError(f"{folder} is damaged: its summary.json has no {', '.join(sorted(missing))}")
    if so_far and not unfinished:
        lost = "" if (folder / "summary.json").is_file() else " and no summary.json"
        raise ConfigError(f"{folder} is not finished: it has {figures['step']} of {config.steps} steps{lost}")
    name = arm or str(about.get("arm", config.algorithm))
    return Record(
        arm=f"{name} (unfinished, step {figures['step']} of {config.steps})" if so_far else name,
        config=config,
        command=f"thinwire {about['command']}" if "command" in about else "",
        place=place or str(about.get("place") or ("simulated" if figures.get("simulated") else "processes")),
        figures=figures,
        curve=curve,
        versions={name: str(version) for name, version in tables.get("versions", {}).items()},
        cores=int(about.get("cores", 0)),
        date=str(about.get("started", "")),
        tried=int(about.get("tried", 0)),
    )


def _figures(folder: Path, config: RunConfig) -> dict[str, Any]:
    """What summary.json has. Of a run that is not finished, or was told to go on since, what its last steps say; {} of none."""
    summary = folder / "summary.json"
    figures = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
    if figures and figures.get("step", config.steps) >= config.steps:
        return figures
    lines = _whole_lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    if not lines or lines[-1].get("step", 0) < figures.get("step", 0):
        return {**figures, "unfinished": True} if figures else {}
    evaluated = next((line for line in reversed(lines) if "val_loss" in line), {})
    validation = {name: value for name, value in evaluated.items() if name.startswith("val_")}
    return {**lines[-1], **validation, "workers": config.workers or 2, "shards": config.shards, "unfinished": True}


def thinned(points: Sequence[Point], *, most: int = POINTS) -> tuple[Point, ...]:
    """At most `most` points, and all that were evaluated; each has the mean of the finite losses of those it stands for."""
    evaluated = {i for i, point in enumerate(points) if point.val_loss is not None}
    count = max(1, min(most - len(evaluated), len(points)))
    even = {round((i + 1) * len(points) / count) - 1 for i in range(count)}
    kept, before = [], -1
    for i in sorted((evaluated | even if len(points) > most else set(range(len(points)))) & set(range(len(points)))):
        stands_for = points[before + 1 : i + 1]
        losses = [point.loss for point in stands_for if math.isfinite(point.loss)]
        loss = sum(losses) / len(losses) if losses else math.nan
        kept.append(Point(**{**asdict(points[i]), "loss": loss}))
        before = i
    return tuple(kept)


def _point(line: dict[str, Any]) -> Point:
    """A point from a line of metrics.jsonl or of a record."""
    values: dict[str, Any] = {f.name: line.get(f.name) for f in fields(Point)}
    values["loss"] = math.nan if values["loss"] is None else float(values["loss"])
    values["payload"] = values["payload"] or 0  # runs from before it was kept
    for name in ("step", "sent", "payload", "rounds"):
        values[name] = int(values[name])
    for name in ("seconds", "waiting"):
        values[name] = float(values[name])
    return Point(**values)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, but for one that was cut short by a kill."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"line {number} of {path.name} is no JSON") from None
    return rows


# --- From and to lines of JSON -------------------------------------------------------------------------------------------


def append_record(path: Path, record: Record) -> None:
    """Add one line to a file of records, which is made where it is not there yet."""
    line = json.dumps({"format": FORMAT, **_finite(asdict(record))}) + "\n"
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"  # the one before was cut short by a kill
        file.write(line.encode())


def _finite(value: Any) -> Any:
    """The same without NaN and Inf, which JSON does not know; a point without an evaluation says nothing of one."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if not (k in ("val_loss", "val_drift") and v is None)}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def record_from(row: dict[str, Any]) -> Record:
    """A record from a line of this format or of the older benchmarks/records/evidence.jsonl.

    Raises:
        ConfigError: where it is neither.
    """
    try:
        if row.get("format", 0) > FORMAT:
            raise ConfigError(f"a record of format {row['format']}, made by a newer thinwire; this one knows up to {FORMAT}")
        return _new_record(row) if "config" in row else _old_record(row)
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        if isinstance(cause, ConfigError):
            raise
        raise ConfigError(f"no record of a run: {type(cause).__name__} {cause}") from cause


def _new_record(row: dict[str, Any]) -> Record:
    return Record(
        arm=str(row["arm"]),
        config=config_of(row["config"]),
        command=str(row["command"]),
        place=str(row["place"]),
        figures=dict(row["figures"]),
        curve=tuple(_point(point) for point in row["curve"]),
        versions=dict(row["versions"]),
        cores=int(row["cores"]),
        date=str(row["date"]),
        tried=int(row.get("tried", 0)),
    )


def _old_record(row: dict[str, Any]) -> Record:
    """A flat row. Its seconds are those of the whole simulation on a busy machine, so they are left out, in its curve too."""
    words = shlex.split(row["command"])
    workers = int(words[words.index("--workers") + 1])
    same = {name: row[name] for name in ("algorithm", "task", "wire", "lr", "settings", "seed", "steps", "batch")}
    given = ("accuracy", "drift", "mean_loss", "mean_accuracy")
    figures = {
        **{name: row[name] for name in ("payload", "sent", "parameters") if name in row},
        **{f"val_{name}": row[name] for name in ("loss", *given) if name in row},
        **{"step": row["steps"], "workers": workers, "shards": 1, "simulated": True},
    }
    return Record(
        arm=row["arm"],
        config=config_of({**same, "workers": workers, "eval_every": 0, **row.get("run", {})}),
        command=row["command"],
        place="simulated",
        figures=figures,
        curve=tuple(_point({"seconds": math.nan, "waiting": math.nan, **point}) for point in row.get("curve", ())),
        versions={name: row[name] for name in ("torch", "python") if name in row},
        cores=row.get("cores", 0),
        date=row.get("date", ""),
    )


# --- From anything -------------------------------------------------------------------------------------------------------


def read_records(path: Path, *, note: Note = log.warning, unfinished: bool = False) -> list[Record]:
    """All finished runs in a run folder, in a folder of such folders, or in a file of records.

    Args:
        path: the folder or file. Of a folder all run folders below it are read, but for those of a tuning, then its
            records.jsonl for those runs whose folders are gone.
        note: is told what was left out, and why.
        unfinished: take runs that are not finished too, as far as they went.

    Raises:
        ConfigError: where there is no such path.
    """
    if path.is_file():
        return list(_from_lines(path, note))
    if not path.is_dir():
        raise ConfigError(f"no run, folder of runs or file of records at {path}")
    records, kept = [], []
    for folder, below, files in os.walk(path):
        below[:] = sorted(name for name in below if name != TUNING)  # losses of short runs on other validation samples
        kept += [Path(folder) / name for name in files if name == "records.jsonl"]
        if "run.toml" in files:
            below.clear()  # a run folder has no other run in it
            try:
                records.append(record_of(Path(folder), unfinished=unfinished))
            except ConfigError as error:
                note(f"left out: {error}")
    lines = [record for file in kept for record in _from_lines(file, note)]
    ended = {record.key: number for number, record in enumerate(lines)}
    records.sort(key=lambda record: (record.date, ended.get(record.key, len(lines))))  # as they were made, not by name
    return without_repeats([*records, *lines], note=_nothing)


def _from_lines(path: Path, note: Note) -> Iterator[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path} is no file of records: {cause}") from cause
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield record_from(row if isinstance(row, dict) else {})
        except ConfigError as error:
            note(f"left out: line {number} of {path}: {error}")
        except ValueError:
            note(f"left out: line {number} of {path} is no JSON")


def without_repeats(records: Iterable[Record], *, note: Note = log.warning) -> list[Record]:
    """Each run once: the same settings and seed twice are one sample, not two."""
    seen: dict[str, Record] = {}
    for record in records:
        if record.key in seen:
            note(f"left out: {record.arm}, seed {record.config.seed} is there twice; the first counts")
        seen.setdefault(record.key, record)
    return list(seen.values())


def _nothing(_: str) -> None:
    """A compare folder has every run in its folder and in its records.jsonl: that needs no words."""
