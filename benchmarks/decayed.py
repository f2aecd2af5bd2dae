"""Tables and figures of runs whose learning rate decays to zero, from records of `thinwire compare --records`.

`python -m benchmarks.decayed` draws loss against bytes and against rounds; benchmarks/results.py puts the tables on the page.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from benchmarks.record import RECORDS
from thinwire.network import show_bytes
from thinwire.tools.records import read_records
from thinwire.tools.report.comparison import Arm, Comparison, comparisons

MATRIX = Path(__file__).parent / "matrix"
SWEEP = (4, 16, 64)  # sequences per worker and step: records sweep-4 and so on, all of matrix/sweep.txt


_SWEPT = [f"sweep-{batch}" for batch in SWEEP]


def compared(name: str) -> Comparison:
    """The runs of a file of records side by side; they are of one job."""
    path = RECORDS / f"{name}.jsonl"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECORDS.glob("*.jsonl")))
        raise SystemExit(f"there are no records {path.name}: there are {known}")
    return _compared(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _compared(path: Path, changed: int) -> Comparison:
    del changed
    [found] = comparisons(read_records(path))
    return found


def arm_of(name: str, arm: str) -> Arm:
    """An arm of a file of records by its name."""
    found = {one.name: one for one in compared(name).arms}
    if arm not in found:
        raise SystemExit(f"records {name} have no arm {arm!r}: there are {', '.join(found)}")
    return found[arm]


def table(name: str) -> str:
    """All arms: loss, its difference to the baseline's paired by seed, rounds, bytes."""
    found = compared(name)
    names = ["method", "lr", "points tried", "loss", f"against {found.baseline.name}", "95% interval", "p", "rounds", "sent"]
    names += ["fewer, 4 workers", "fewer, 8 workers", "seeds"]
    lines = [f"| {' | '.join(names)} |", f"|---{'|---:' * (len(names) - 1)}|"]
    for arm in found.arms:
        p, rounds, sent = found.p_value(arm), arm.sample("rounds"), arm.sample("sent")
        cells = [
            arm.name,
            f"{arm.first.config.lr:g}",
            str(arm.first.tried or "given"),  # by whoever wrote the file of methods
            f"{arm.loss.mean:.3f}",
            "" if arm is found.baseline else difference(name, arm.name, found.baseline.name),
            "" if arm is found.baseline else interval(name, arm.name, found.baseline.name),
            "" if p is None else f"{p:.2g}",
            "" if rounds is None else f"{rounds.mean:.0f}",
            "" if sent is None else show_bytes(sent.mean),
            _times(arm.fewer),
            _times(arm.fewer_among(8)),
            str(len(arm.records)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def how(name: str) -> str:
    """Where the table comes from, and the command that makes it again."""
    records = [record for arm in compared(name).arms for record in arm.records]
    machines = sorted({f"{r.cores} cores, torch {r.versions['torch']}, Python {r.versions['python']}" for r in records})
    dates = sorted({record.date[:10] for record in records})
    return (
        f"*Simulated: {records[0].figures['workers']} workers in one process; {'; '.join(machines)}; {', '.join(dates)}; "
        f"`{command(name)}`.*"
    )


def command(name: str) -> str:
    """Makes what is missing of the records."""
    file, _, batch = name.partition("-") if name in _SWEPT else (name, "", "")
    words = ["thinwire", "compare", f"@benchmarks/matrix/{file}.txt", *(["--batch", batch] if batch else [])]
    return shlex.join([*words, "--records", f"benchmarks/records/{name}.jsonl"])


def command_in(path: Path) -> str:
    """The command that stands in the remarks of a file of methods."""
    lines = [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", "")
    found = next((line for line in text.splitlines() if line.startswith("thinwire compare")), None)
    if found is None:
        raise SystemExit(f"{path} has no remark with a `thinwire compare`")
    return found


def swept() -> str:
    """Loss of each arm of the sweep against the better baseline, batch by batch, with the rate of each; rounds and bytes."""
    heads = ["method", *(f"{batch} sequences" for batch in SWEEP), "rounds", "fewer, 4 workers", "fewer, 8 workers"]
    lines = [f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    baselines = [_better_baseline(name) for name in _SWEPT]
    for nth, arm in enumerate([baselines[0].name.partition(",")[0], *_others()]):
        found = [arm_of(name, arm) if nth else baseline for name, baseline in zip(_SWEPT, baselines, strict=True)]
        losses = [
            difference(name, arm, baseline.name) if nth else f"{baseline.loss.mean:.3f}"
            for name, baseline in zip(_SWEPT, baselines, strict=True)
        ]
        rates = [f"{one} (lr {of.first.config.lr:g})" for one, of in zip(losses, found, strict=True)]
        rounds = found[0].sample("rounds")
        sent = [_times(found[0].fewer), _times(found[0].fewer_among(8))]
        lines.append(f"| {' | '.join([arm, *rates, '' if rounds is None else f'{rounds.mean:.0f}', *sent])} |")
    commands = "; ".join(f"`{command(name)}`" for name in _SWEPT)
    seeds = sorted({len(arm.records) for arm in baselines})
    told = " or ".join(map(str, seeds))
    return "\n".join(lines) + f"\n\n*Simulated: 4 workers in one process; {told} seeds each; {commands}.*"


def _better_baseline(name: str) -> Arm:
    """Of the synchronous arms of a file of records that with the least mean loss."""
    algorithm = compared(name).baseline.first.config.algorithm
    return min((arm for arm in compared(name).arms if arm.first.config.algorithm == algorithm), key=lambda arm: arm.loss.mean)


def _others() -> list[str]:
    """Names of the arms of the sweep that are no baseline."""
    found = compared(_SWEPT[0])
    return [arm.name for arm in found.arms if arm.first.config.algorithm != found.baseline.first.config.algorithm]


def difference(name: str, arm: str, other: str) -> str:
    """Loss of an arm against another's, paired by seed: mean and standard error."""
    found = replace(compared(name), baseline=arm_of(name, other))
    against, error = found.against(arm_of(name, arm)), found.error(arm_of(name, arm))
    if against is None:
        raise SystemExit(f"records {name}: {arm!r} and {other!r} have no seed in common, or a run diverged")
    return f"{against:+.1f}%" if error is None else f"{against:+.1f} ± {error:.1f}%"


def interval(name: str, arm: str, other: str) -> str:
    """Where that difference is in 95 of 100 such comparisons, by the t distribution; nothing of fewer than two seeds."""
    found = replace(compared(name), baseline=arm_of(name, other))
    paired, error = found.differences(arm_of(name, arm)), found.error(arm_of(name, arm))
    if error is None:
        return ""
    from scipy.stats import t

    middle, half = statistics.fmean(paired), float(t.ppf(0.975, len(paired) - 1)) * error
    return f"{middle - half:+.1f} to {middle + half:+.1f}%"


def accuracy(name: str, arm: str, other: str) -> str:
    """By how many points the accuracy of an arm is above another's, paired by seed: mean and standard error."""
    mine, its = ({r.config.seed: r.figures["val_accuracy"] for r in arm_of(name, one).records} for one in (arm, other))
    points = [100 * (mine[seed] - its[seed]) for seed in sorted(mine.keys() & its.keys())]
    if len(points) < 2:
        raise SystemExit(f"records {name}: {arm!r} and {other!r} have {len(points)} seeds in common, and an error needs two")
    return f"{statistics.mean(points):+.1f} ± {statistics.stdev(points) / math.sqrt(len(points)):.1f} points"


def closed(name: str, arm: str, low: str, high: str) -> str:
    """Which part of the gap between two others an arm closes, of means over the seeds that all three have."""
    losses = [{record.config.seed: record.loss for record in arm_of(name, one).records} for one in (arm, low, high)]
    seeds = set.intersection(*(set(of) for of in losses))
    if not seeds:
        raise SystemExit(f"records {name}: {arm!r}, {low!r} and {high!r} have no seed in common")
    mine, worst, best = (statistics.fmean(of[seed] for seed in sorted(seeds)) for of in losses)
    return f"{100 * (worst - mine) / (worst - best):.0f}%"


def fewer(name: str, arm: str) -> str:
    """How many times fewer bytes leave a worker than in DDP's ring."""
    return _times(arm_of(name, arm).fewer)


def shorter(name: str, arm: str, other: str) -> str:
    """How many times shorter the messages of an arm are than another's."""
    mine, its = (arm_of(name, one).sample("payload") for one in (arm, other))
    return f"{its.mean / mine.mean:.0f}" if mine and its else ""


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}x" if value >= 20 else f"{value:.1f}x"


# --- Figures -----------------------------------------------------------------------------------------------------------------


def draw(name: str, *, show: Callable[[Arm], float | None], label: str, file: str) -> Path:
    """Loss against something, a point for each arm with its seeds."""
    from benchmarks.figures import FIGURES, plt
    from benchmarks.frontier import FAMILIES, Labels

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axes.set(xscale="log", xlabel=label, ylabel="validation loss")
    points = []
    for arm in compared(name).arms:
        x, losses = show(arm), arm.loss.values
        at_other_rate = arm.name.startswith(f"{compared(name).baseline.name}, ")
        if x is None or not arm.loss.finite or at_other_rate:
            continue
        _, color, marker = FAMILIES.get(arm.first.config.algorithm, ("", "tab:purple", "^"))
        low, high = arm.loss.mean - min(losses), max(losses) - arm.loss.mean
        axes.errorbar(x, arm.loss.mean, yerr=[[low], [high]], color=color, marker=marker, capsize=3, linestyle="none")
        points.append((arm.name, (x, arm.loss.mean), color))
    axes.grid(True, which="both", alpha=0.25)
    axes.margins(x=0.12, y=0.08)
    figure.canvas.draw()
    labels = Labels(axes, [point for _, point, _ in points])
    for text, point, color in points:
        labels.put(text, point, color)
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / file
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def draw_sweep() -> Path:
    """What methods lose against the baseline, over the batch of a worker."""
    from benchmarks.figures import FIGURES, plt
    from benchmarks.frontier import FAMILIES

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    here = [replace(compared(name), baseline=_better_baseline(name)) for name in _SWEPT]
    for name in _others():
        found = [arm_of(records, name) for records in _SWEPT]
        _, color, marker = FAMILIES.get(found[0].first.config.algorithm, ("", "tab:purple", "^"))
        losses = [math.nan if (percent := at.against(one)) is None else percent for at, one in zip(here, found, strict=True)]
        errors = [at.error(one) or 0.0 for at, one in zip(here, found, strict=True)]
        line = "--" if found[0].first.config.algorithm == "local-adam" else "-"  # of the family and colour of MT-DAO
        axes.errorbar(SWEEP, losses, yerr=errors, color=color, marker=marker, linestyle=line, capsize=3, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xscale="log", ylabel=f"loss against {here[0].baseline.name.partition(',')[0]}, %")
    axes.set_xlabel(f"sequences of 64 bytes per worker and step ({here[0].title.split(',')[0]}, 256 steps, simulated)")
    axes.set_xticks(SWEEP, [str(batch) for batch in SWEEP])
    axes.minorticks_off()
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=8)
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / "decayed-sweep.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _rounds(arm: Arm) -> float | None:
    rounds = arm.sample("rounds")
    return None if rounds is None or not math.isfinite(rounds.mean) else rounds.mean


def main() -> None:
    """Draw loss against bytes and rounds from the records of pico, and the sweep of batches."""
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "thinwire"
    title = compared("pico").title
    print(
        draw(
            "pico",
            show=lambda arm: arm.fewer,
            label=f"times fewer bytes sent than DDP's ring ({title}, simulated)",
            file="decayed-bytes.svg",
        )
    )
    print(draw("pico", show=_rounds, label=f"rounds ({title}, simulated)", file="decayed-rounds.svg"))
    if all((RECORDS / f"{name}.jsonl").is_file() for name in _SWEPT):
        print(draw_sweep())


if __name__ == "__main__":
    main()
