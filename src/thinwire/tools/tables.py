"""Networks and churn from files: a line per worker, or per event. No torch here."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from thinwire.errors import ConfigError
from thinwire.network import Network, parse_bandwidth, parse_duration
from thinwire.tools.flags import one_or_each

V = TypeVar("V")

LINK_COLUMNS = ("worker", "up", "down", "latency")
EVENT_COLUMNS = ("seconds", "worker", "event")
OTHERS = "*"  # in the place of a worker's number: all that have no line of their own
_MOST_LINES = 1 << 20


@dataclass(frozen=True)
class _Line:
    """A line of a file: its words by column, and where it stands."""

    place: str
    words: dict[str, str]

    def read(self, column: str, parse: Callable[[str], V]) -> V:
        """A word; what is wrong with it is a `ConfigError` that says where it stands."""
        try:
            return parse(self.words[column])
        except ValueError as error:
            raise ConfigError(f"{self.place}, column {column!r}: {error}") from None


def network_of(bandwidth: str, down: str | None, latency: str, links: str | None, workers: int) -> Network:
    """The network that flags describe, in words or by a file.

    Args:
        bandwidth: of each worker's link, one for all or one each, separated by commas.
        down: downward where it differs.
        latency: of one message.
        links: a file in place of these three.
        workers: how many there are.
    """
    if links is None:
        return Network(
            bandwidth=one_or_each(bandwidth, parse_bandwidth),
            latency=one_or_each(latency, parse_duration),
            down=None if down is None else one_or_each(down, parse_bandwidth),
        )
    if (bandwidth, down) != ("inf", None) or parse_duration(latency):
        raise ConfigError(
            f"--links {links} has bandwidth and latency of every worker: leave out --bandwidth, --down and --latency"
        )
    return read_links(links, workers)


def read_links(path: str | Path, workers: int) -> Network:
    """The network of a file of links: worker,up,down,latency.

    A worker is a number from 0 on, or * for all that have no line of their own. An empty `down` is that of `up`, and an empty
    latency is 0; both columns may be left out.

    Args:
        path: of the file.
        workers: how many there are; each must have a link.

    Raises:
        ConfigError: with the number of the line that is wrong.
    """
    found: dict[int, tuple[float, float, float]] = {}
    others: tuple[float, float, float] | None = None
    for line in _lines(path, LINK_COLUMNS, required=2):
        up = line.read("up", parse_bandwidth)
        down = line.read("down", parse_bandwidth) if line.words["down"] else up
        latency = line.read("latency", parse_duration) if line.words["latency"] else 0.0
        if line.words["worker"] == OTHERS:
            if others is not None:
                raise ConfigError(f"{line.place}: a second line of {OTHERS!r}")
            others = up, down, latency
            continue
        worker = line.read("worker", lambda word: _worker(word, workers))
        if worker in found:
            raise ConfigError(f"{line.place}: a second line of worker {worker}")
        found[worker] = up, down, latency
    missing = [w for w in range(workers) if w not in found]
    if missing and others is None:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigError(f"{path}: no line of worker {missing[0]}{more}; a line of {OTHERS!r} is for all that have none")
    up, down, latency = zip(*(found.get(worker, others or ()) for worker in range(workers)), strict=True)
    return Network(bandwidth=up, latency=latency, down=None if up == down else down)


class Trace(NamedTuple):
    """When workers come and go; its fields are the first arguments of `thinwire.Churn`.

    Attributes:
        joins: seconds at which workers come that are not there from the start.
        deaths: (seconds, worker) of each death.
        returns: (seconds, worker) of each time that a worker comes back.
    """

    joins: dict[int, float]
    deaths: list[tuple[float, int]]
    returns: list[tuple[float, int]]


def read_events(path: str | Path, workers: int) -> Trace:
    """Joins and deaths of a file of events, in any order: seconds,worker,event, where an event is "join" or "death".

    A worker whose first event is a death, or that has none, is there from the start. One that joins after a death comes back.

    Args:
        path: of the file.
        workers: how many there are.

    Raises:
        ConfigError: with the number of the line that is wrong.
    """
    events: dict[int, list[tuple[float, str, str]]] = {}
    for line in _lines(path, EVENT_COLUMNS, required=3):
        seconds, worker = line.read("seconds", parse_duration), line.read("worker", lambda word: _worker(word, workers))
        events.setdefault(worker, []).append((seconds, line.read("event", _event), line.place))
    trace = Trace({}, [], [])
    for worker, happened in events.items():
        before = ""
        for seconds, event, place in sorted(happened):
            if event == before:
                raise ConfigError(f"{place}: worker {worker} has a {event} after a {event}, at {seconds:g} s")
            if event == "death":
                trace.deaths.append((seconds, worker))
            elif before:
                trace.returns.append((seconds, worker))
            else:
                trace.joins[worker] = seconds
            before = event
    return trace


def _lines(path: str | Path, columns: Sequence[str], *, required: int) -> Iterator[_Line]:
    """The lines of a csv file whose first line names its columns; remarks begin with a #."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {str(path)!r}: {getattr(cause, 'strerror', None) or cause}") from cause
    rows = [
        (n, row) for n, row in enumerate(csv.reader(text.splitlines()), start=1) if row and not row[0].lstrip().startswith("#")
    ]
    if len(rows) > _MOST_LINES:
        raise ConfigError(f"{path}: {len(rows)} lines, at most {_MOST_LINES} are read")
    header = [word.strip() for word in rows[0][1]] if rows else []
    if set(header) - set(columns) or set(columns[:required]) - set(header) or len(set(header)) < len(header):
        optional = f"; {', '.join(columns[required:])} may be left out" if columns[required:] else ""
        raise ConfigError(f"{path}: the first line names the columns {','.join(columns)}{optional}, got {','.join(header)!r}")
    for number, row in rows[1:]:
        place = f"{path}, line {number}"
        if len(row) != len(header):
            raise ConfigError(f"{place}: {len(row)} values, where the first line names {len(header)} columns")
        yield _Line(place, dict.fromkeys(columns, "") | dict(zip(header, (word.strip() for word in row), strict=True)))


def _worker(word: str, workers: int) -> int:
    if not (word.isascii() and word.isdigit() and int(word) < workers):
        raise ConfigError(f"a worker is a number from 0 to {workers - 1}, got {word!r}")
    return int(word)


def _event(word: str) -> str:
    if word not in ("join", "death"):
        raise ConfigError(f"an event is join or death, got {word!r}")
    return word
