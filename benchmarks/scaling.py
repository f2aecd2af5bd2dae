"""docs/scaling.md from its text in benchmarks/scaling.md, and its figure: `python -m benchmarks.scaling`.

What stands between double braces in the text is filled in from the records.

    {{ bytes }}                    what leaves a worker by each route
    {{ growth }}                   how it grows by owners from 16 to 64 workers
    {{ loss BASE / OTHER }}        two arms at the same seeds, a row for each number of workers and batch
    {{ loss-commands BASE / OTHER }}   what made that table
    {{ arms NAME }}                all arms of a file of matrix/, or that it was not run yet
    {{ command NAME }}             of that file: what stands in its remarks
    {{ apart NAME / ARM / OTHER }}     by how much the loss of one of them is above another's, paired by seed, with its error
    {{ each NAME / ARM / OTHER }}      the same, seed by seed
    {{ interval NAME / ARM / OTHER }}  where that is with 95% confidence
    {{ fewer NAME / ARM }}         how many times fewer bytes than in DDP's ring an arm with one codec sends by owners
    {{ back }}                     what owners send back
    {{ mean }}                     what the mean of many 1-bit messages looks like
    {{ left WORKERS / CODEC }}     of that table: what a codec leaves out
    {{ cpu ROUTE / WORKERS }}      milliseconds of CPU of a round
    {{ cpu-of }}                   whose CPU time that is
    {{ cpu-ratio ROUTE }}          with most workers over with fewest
    {{ entries WORKERS }}          values that a worker reads
    {{ lab }}                      the plan of owners against shaped links
    {{ off ROUTE }}                by how much the plan's bytes of that table are off
    {{ worlds }}                   time and bytes at 4 to 1,024 workers
    {{ world ROUTE / WORKERS / FIELD }}   a figure of that table
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.decayed import MATRIX, arm_of, command_in, difference, interval
from thinwire import Chain, Owners
from thinwire.codecs.text import parse_codec
from thinwire.core.route import owned_nbytes
from thinwire.network import ddp_bytes, show_bytes
from thinwire.tasks import make_task
from thinwire.tools.records import read_records
from thinwire.tools.report.comparison import comparisons

SOURCE = Path(__file__).parent / "scaling.md"
PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
TASKS = ("gpt-pico", "gpt-nano", "gpt-small")
Row = dict[str, Any]


def _rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (record.RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def _newest(what: str) -> Row:
    """The last record of one of the parts of `benchmarks.owners`."""
    return [row for row in _rows("owners") if row["what"] == what][-1]


def table(head: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table whose columns after the first ones are numbers."""
    head = list(head)
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bytes() -> str:
    head = ["model", "workers", "gathered", "owners, mean", "owners, most", "DDP's ring over the mean"]
    return table(
        head,
        (
            [
                row["task"],
                f"{row['workers']}",
                f"{row['gather']:,}",
                f"{row['mean']:,.0f}",
                f"{row['most']:,}",
                f"{row['ddp'] / row['mean']:.0f}x",
            ]
            for row in _newest("bytes")["rows"]
        ),
    )


def growth(task: str, what: str) -> float:
    """By which part of it what leaves a worker grows by owners from 16 to 64 workers: the "mean", or the "most" of one."""
    sent = {row["workers"]: row[what] for row in _newest("bytes")["rows"] if row["task"] == task}
    return sent[64] / sent[16] - 1


def _growth() -> str:
    rows = [[task, *(f"{growth(task, what):+.1%}" for what in ("mean", "most"))] for task in TASKS]
    return table(["16 to 64 workers", "mean over workers", "most that one sends"], rows)


def paired(base: str, other: str) -> dict[tuple[int, int, int], list[tuple[Row, Row]]]:
    """Runs of two arms with the same seeds, by workers, batch and steps; those of files like owners-16.jsonl come first."""
    later = sorted(path.stem for path in record.RECORDS.glob("owners-*.jsonl") if path.stem.removeprefix("owners-").isdecimal())
    pairs: dict[tuple[int, int, int], list[tuple[Row, Row]]] = {}
    for name in ("owners_loss", *later):
        pairs |= _paired_in(name, base, other)
    return dict(sorted(pairs.items()))


def _paired_in(name: str, base: str, other: str) -> dict[tuple[int, int, int], list[tuple[Row, Row]]]:
    found: dict[tuple[int, int, int], dict[int, dict[str, Row]]] = {}
    for row in _rows(name):
        config = row["config"]
        if row.get("table") != "owners-back" and row["arm"] in (base, other):
            key = config["workers"], config["batch"], config["steps"]
            found.setdefault(key, {}).setdefault(config["seed"], {})[row["arm"]] = row
    return {
        key: pairs
        for key, seeds in found.items()
        if (pairs := [(arms[base], arms[other]) for _, arms in sorted(seeds.items()) if len(arms) == 2])
    }


def _loss_commands(base: str, other: str) -> str:
    """One for each row of the table."""
    lines = []
    for (workers, batch, steps), pairs in paired(base, other).items():
        seeds = [run["config"]["seed"] for run, _ in pairs]
        told = str(len(seeds)) if seeds == list(range(len(seeds))) else ",".join(map(str, seeds)) + "," * (len(seeds) == 1)
        files = "@benchmarks/matrix/owners-gathered.txt @benchmarks/matrix/owners.txt"
        tuned = all(run.get("tried") for pair in pairs for run in pair)  # by the command that made the runs
        rate = "--tune 2e-3,2.83e-3,4e-3" if tuned else f"--lr {pairs[0][0]['config']['lr']} --val-part claim"
        flags = f"--workers {workers} --batch {batch} --steps {steps} {rate} --seeds {told}"
        lines.append(f"thinwire compare {files} {flags}")
    return "\n".join(lines)


def _each(name: str, arm: str, other: str) -> str:
    """The same, seed by seed."""
    mine, its = ({record.config.seed: record.loss for record in arm_of(name, one).records} for one in (arm, other))
    return ", ".join(f"{100 * (mine[seed] / its[seed] - 1):+.1f}%" for seed in sorted(mine.keys() & its.keys()))


def _fewer(name: str, arm: str) -> str:
    """How many times fewer bytes than in DDP's ring leave a worker by owners, in the mean over all; of an arm of one codec."""
    config = arm_of(name, arm).first.config
    assert config.wire is not None
    assert config.workers is not None
    params, count = list(make_task(config.task).model().parameters()), config.workers
    owners = Owners(None if config.back is None else Chain.of(parse_codec(config.back)))
    halves = owned_nbytes(owners, parse_codec(config.wire), params, range(len(params)), count)
    sent = statistics.mean(sum(halves.sent(rank)) + count - 1 for rank in range(count))
    return f"{ddp_bytes(sum(p.numel() for p in params), count) / sent:.0f}x"


def _arms(name: str) -> str:
    """Loss of all arms against the first one's, paired by seed, and what their first worker sent."""
    path = record.RECORDS / f"{name}.jsonl"
    if not path.is_file():
        return "*Not run yet.*"
    [found] = comparisons(read_records(path))
    rows = []
    for arm in found.arms:
        against, error, sent = found.against(arm), found.error(arm), arm.sample("sent")
        off = "" if against is None else f"{against:+.1f}%" if error is None else f"{against:+.1f} ± {error:.1f}%"
        fewer = "" if arm.fewer is None else f"{arm.fewer:.0f}x"
        row = [arm.name, f"{arm.first.config.lr:g}", str(arm.first.tried or "given"), f"{arm.loss.mean:.3f}", off]
        rows.append([*row, "" if sent is None else show_bytes(sent.mean), fewer, str(len(arm.records))])
    head = ["method", "lr", "points tried", "loss", f"against {found.baseline.name}", "sent by the first worker"]
    return table([*head, "fewer than DDP's ring", "seeds"], rows)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean of some values and its standard error, which is not known of one."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def _loss(base: str, other: str) -> str:
    head = ["workers", "batch", "steps", "learning rates", "seeds", base, other, "difference", "bytes of the first worker"]
    rows = []
    for (workers, batch, steps), pairs in paired(base, other).items():
        losses = [[run["figures"]["val_loss"] for run in pair] for pair in pairs]
        off, error = mean_and_error([100 * (b / a - 1) for a, b in losses])
        means = [f"{statistics.mean(arm):.3f}" for arm in zip(*losses, strict=True)]
        shown = f"{off:+.1f}%" if math.isnan(error) else f"{off:+.1f} ± {error:.1f}%"
        sent = ", ".join(show_bytes(run["figures"]["sent"]) for run in pairs[0])
        rates = ", ".join(f"{run['config']['lr']:g}" for run in pairs[0])
        rows.append([f"{workers}", f"{batch}", f"{steps}", rates, f"{len(pairs)}", *means, shown, sent])
    return table(head, rows, left=0)


def _back() -> str:
    rows = [row for row in _rows("owners_loss") if row["table"] == "owners-back"]
    base = next(row for row in rows if row["arm"] == "gathered")["figures"]["val_loss"]
    shown = []
    for row in rows:
        loss = row["figures"]["val_loss"]
        off = "" if row["arm"] == "gathered" else f"{100 * (loss / base - 1):+.1f}%"
        shown.append([row["arm"], f"{loss:.3f}", off, show_bytes(row["figures"]["sent"])])
    return table(["what comes back", "loss", "against gathered", "bytes of the first worker"], shown)


def _left(row: Row, codec: str, of: str = "mean") -> str:
    return f"{100 * row[f'{of} {codec}'][0]:.0f}%"


def _mean() -> str:
    codecs = ["32 in 1 bit", "128 in 1 bit", "128 in 2 bits", "128 in int8", "256 in 1 bit", "256 in 2 bits"]
    rows = [
        [f"{row['workers']}", f"{row['entries']:.0f}", f"{row['alone']:.0%}", *(_left(row, codec) for codec in codecs)]
        for row in _newest("mean")["rows"]
    ]
    return table(["workers", "entries of a block that were sent", "by one worker alone", *codecs], rows, left=0)


def _of_mean(workers: str, codec: str) -> str:
    return _left(next(row for row in _newest("mean")["rows"] if row["workers"] == int(workers)), codec)


def _of_cpu(route: str, workers: str) -> Row:
    return next(row for row in _newest("cpu")["rows"] if (row["route"], row["workers"]) == (route, int(workers)))


def _cpu_of() -> str:
    """Records from before the threads of gloo were counted have one time."""
    all_threads = all("thread" in row for row in _newest("cpu")["rows"])
    return "in all threads of the worker's process" if all_threads else "in the worker's own thread, without those of gloo"


def _cpu_ratio(route: str) -> str:
    rows = sorted((row for row in _newest("cpu")["rows"] if row["route"] == route), key=lambda row: row["workers"])
    return f"{rows[-1]['cpu'] / rows[0]['cpu']:.2f}"


def _lab() -> str:
    """All records in their order."""
    rows = []
    for told in (row for row in _rows("owners") if row["what"] == "lab"):
        for row in told["rows"]:
            off, queue = row["predicted"] / row["seconds"] - 1, f"{1e3 * told.get('queue', 0.02):g} ms"
            times = [f"{row[what]:.2f} s" for what in ("free", "seconds", "predicted")]
            rows.append([row["speed"], queue, *times, f"{off:+.0%}"])
    return table(["links", "queue", "without a limit", "measured", "predicted", "off"], rows)


def _of_worlds() -> dict[tuple[int, str], Row]:
    """The newest record of each number of workers and route."""
    routes = ["ddp", "gather", "owners", "two-level"]
    found = {
        (row["workers"], row["route"]): row for row in _rows("worlds") if row["task"] == "gpt-pico" and "failed" not in row
    }
    return dict(sorted(found.items(), key=lambda item: (item[0][0], routes.index(item[0][1]))))


def _gigabytes(mebibytes: float) -> str:
    return f"{mebibytes * 2**20 / 1e9:.2g} GB"


def _worlds() -> str:
    rows = []
    for (workers, route), row in _of_worlds().items():
        name = f"{route}, {workers // row['members']} sites" if row["members"] > 1 else route
        inside = show_bytes(row["inside"]) if row["inside"] else "-"
        sent, cpu, memory = show_bytes(row["sent"]), f"{row['cpu']:.2g} s", _gigabytes(row["memory"])
        seconds = [f"{row[what]:.3g} s" for what in ("seconds", "predicted seconds")]
        rows.append([f"{workers:,}", name, *seconds, sent, show_bytes(row["predicted sent"]), inside, cpu, memory])
    head = ["workers", "route", "seconds", "predicted", "sent", "predicted", "inside", "CPU", "memory"]
    return table(head, rows, left=2)


def _off(route: str) -> tuple[float, float]:
    """By how much of it the plan's bytes are off, in percent: at least and at most."""
    rows = [row for (_, name), row in _of_worlds().items() if name == route]
    off = [100 * abs(row["predicted sent"] / row["sent"] - 1) for row in rows]
    return min(off), max(off)


def _world(route: str, workers: str, field: str) -> str:
    row = _of_worlds()[int(workers), route]
    shown: dict[str, Callable[[float], str]] = {
        "seconds": lambda n: f"{n:.3g} s",
        "cpu": lambda n: f"{n:.2g} s",
        "memory": _gigabytes,
    }
    return shown.get(field, show_bytes)(row[field])


def draw() -> Path:
    """Time and bytes of a step against the number of workers, by each route."""
    from benchmarks.figures import FIGURES, mpl, plt

    mpl.rcParams["svg.hashsalt"] = "thinwire"  # the same figure for the same records, byte for byte
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    styles = {"ddp": "ks--", "gather": "C3o-", "owners": "C0o-", "two-level": "C2o-"}
    for route, style in styles.items():
        rows = [(workers, row) for (workers, name), row in _of_worlds().items() if name == route]
        for axes, what in ((left, "seconds"), (right, "sent")):
            axes.plot([workers for workers, _ in rows], [row[what] for _, row in rows], style, label=route)
    left.set(title="seconds of a step, 0.5 of them computing", ylabel="seconds")
    right.set(title="bytes that leave the first worker", ylabel="bytes per step")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="workers (gpt-pico, 100 Mbit/s, 20 ms, simulated)")
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / "scaling.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


FILL: dict[str, Callable[..., str]] = {
    "bytes": _bytes,
    "growth": _growth,
    "off": lambda route: " to ".join(f"{off:.2g}%" for off in _off(route)),
    "loss": _loss,
    "loss-commands": _loss_commands,
    "arms": _arms,
    "command": lambda name: command_in(MATRIX / f"{name}.txt"),
    "apart": difference,
    "fewer": _fewer,
    "interval": interval,
    "each": _each,
    "back": _back,
    "mean": _mean,
    "left": _of_mean,
    "cpu": lambda route, workers: f"{1e3 * _of_cpu(route, workers)['cpu']:.0f} ms",
    "cpu-of": _cpu_of,
    "cpu-ratio": _cpu_ratio,
    "entries": lambda workers: f"{_of_cpu('owners', workers)['entries']:,}",
    "lab": _lab,
    "worlds": _worlds,
    "world": _world,
}


def page() -> str:
    """The page as it should be."""

    def fill(match: re.Match[str]) -> str:
        word, _, rest = match[1].strip().partition(" ")
        if word not in FILL:
            raise SystemExit(f"{SOURCE.name} has {match[0]}: it must begin with one of {', '.join(FILL)}")
        return FILL[word](*(part.strip() for part in rest.split(" / ") if part))

    text = re.sub(r"\{\{(.+?)\}\}", fill, SOURCE.read_text(encoding="utf-8"))
    return f"<!-- Made by `python -m benchmarks.scaling` from benchmarks/scaling.md and the records: edit those. -->\n\n{text}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    print(draw())
