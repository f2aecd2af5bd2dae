"""docs/performance.md from its text in benchmarks/performance.md, and its figure: `python -m benchmarks.performance`.

What stands between double braces in the text is filled in from the last record that has it.

    {{ about NAME / PART }}                 when and on what a part of records/NAME.jsonl was measured; PART may be left out
    {{ rounds }}                            of `benchmarks.wire`: CPU seconds of a round, and ratios at the largest size
    {{ steps }}                             whole steps of an optimizer beside AdamW
    {{ ratio PART / SIZE / WAY / OTHER / FIELD }}  of these, WAY over OTHER: of the least, median or cpu seconds
    {{ pays SIZE / WAY }}                   below which bandwidth the way is faster than a ring of float32
    {{ plain WAY / OTHER }}                 the ratio of median seconds of the last record without kernels, at 124M
    {{ about-plain }}                       when and on what that was measured
    {{ memory }}                            peaks of a round and of the optimizers
    {{ memory-of-many }}                    with 8 workers, beside the bar
    {{ bytes }}                             lengths of one worker's message
    {{ above K }}                           how far its indices are above the entropy bound
    {{ reading WAY / WORKERS }}             time to read and apply the messages of so many workers
    {{ receive }}                           one receiver, against another commit
    {{ before }}                            rounds against another commit
    {{ triton }}                            registers and spills
    {{ fuzz }}                              outcomes of damaged messages
    {{ optimizers }}, {{ overlap }}         their tables

A part that no record has is said to be missing, with the command that measures it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.scaling import table

SOURCE = Path(__file__).parent / "performance.md"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
LARGEST = "124M"
Row = dict[str, Any]

NAMES = {
    "simple k=32": "simple, k = 32",
    "simple k=8": "simple, k = 8",
    "thinwire k=32 bf16": '**`DCT(64) >> TopK(32) >> Float("bf16")`**',
    "thinwire k=32 1-bit": "**`DCT(64) >> TopK(32) >> Sign()`**",
    "thinwire k=8 1-bit": "**`DCT(64) >> TopK(8) >> Sign()`**",
    "thinwire k=128 1-bit": "**`DCT(64) >> TopK(128) >> Sign()`**",
    "AdamW foreach": "AdamW, foreach",
    "AdamW fused": "AdamW, fused",
    "all-reduce fp32": "all-reduce of all parameters, fp32",
    "DeMo k=128": "**`DeMo`, k = 128**",
    "DeMo k=32": "**`DeMo`, k = 32**",
}
COMMANDS = {
    "wire": "python -m benchmarks.wire --repeats 7 --record",
    "receive": "python -m benchmarks.receive --against ../before --record",
}


class _MissingError(Exception):
    """No record has it: the command that measures it."""


def newest(name: str, part: str = "", *, kernels: bool | None = None) -> Row:
    """The last record of records/NAME.jsonl in which a part is not empty, with or without kernels."""
    path = record.RECORDS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    found = [row for row in rows if not part or row.get(part)]
    if kernels is not None:
        found = [row for row in found if (row.get("kernels", "off") != "off") == kernels]
    if not found:
        raise _MissingError(COMMANDS.get(name, f"python -m benchmarks.{name} --record"))
    return found[-1]


def wire(part: str) -> Row:
    """A part of the last record of `benchmarks.wire` with kernels."""
    return newest("wire", part, kernels=True)[part]


def _describe(row: Row) -> str:
    vectors = {"AVX2": " (AVX2)", "AVX512": " (AVX-512)"}.get(row.get("vectors", ""), "")
    processor = f"{row['processor']}{vectors}" if "processor" in row else "an x86 CPU that the record does not name"
    return f"{processor}, {row['cores']} cores, torch {row['torch']}, {row['date']}"


def _about_plain() -> str:
    row = newest("wire", "rounds", kernels=False)
    return _describe(row) + ("" if "kernels" in row else ", wire format 1")


def _about(name: str, part: str = "") -> str:
    return _describe(newest(name, part, kernels=True if name == "wire" else None))


def _seconds(part: str, size: str, way: str, field: str) -> float:
    return wire(part)[size]["seconds"][way][field]


def _ratio(part: str, size: str, way: str, other: str, field: str) -> float:
    return _seconds(part, size, way, field) / _seconds(part, size, other, field)


def _plain(way: str, other: str) -> str:
    seconds = newest("wire", "rounds", kernels=False)["rounds"][LARGEST]["seconds"]
    return f"{seconds[way]['median'] / seconds[other]['median']:.1f}"


def _ways(rows: Row) -> list[str]:
    return [way for way in NAMES if all(way in row["seconds"] for row in rows.values())]


def _rounds() -> str:
    rows, shown = wire("rounds"), []
    for way in _ways(rows):
        kept = next((word for word in way.split() if word.startswith("k=")), "")
        simple = f"simple {kept}" if f"simple {kept}" in rows[LARGEST]["seconds"] else "simple k=32"
        mine = way.startswith("thinwire")
        faster = [f"{_ratio('rounds', LARGEST, simple, way, field):.1f}" if mine else "" for field in ("cpu", "median")]
        fused = f"{_ratio('rounds', LARGEST, way, 'AdamW fused', 'cpu'):.1f}"
        cpu = [f"{row['seconds'][way]['cpu']:.3f}" for row in rows.values()]
        shown.append([NAMES[way], *cpu, f"{_seconds('rounds', LARGEST, way, 'median'):.3f}", *faster, fused])
    sizes = [f"CPU s, {size}" for size in rows]
    return table(["", *sizes, "s, 124M", "simple / it, CPU", "simple / it, s", "of fused AdamW, CPU"], shown)


def _steps() -> str:
    rows, shown = wire("steps"), []
    for way in _ways(rows):
        for size, row in rows.items():
            seconds = [f"{row['seconds'][way][field]:.3f}" for field in ("cpu", "least", "median")]
            ratios = [f"{_ratio('steps', size, way, 'AdamW fused', field):.1f}" for field in ("cpu", "least")]
            shown.append([NAMES[way], size, *seconds, *ratios])
    return table(["", "model", "CPU s", "s, least", "s, median", "of fused AdamW, CPU", "least"], shown, left=2)


def _pays(size: str, way: str) -> str:
    row = wire("rounds")[size]
    many = 2 * 8 * 4 * row["parameters"] / row["seconds"][way]["median"] / 1e9
    return f"{many / 2:.0f} Gbit/s with 2 workers and {many:.0f} Gbit/s with many"


def _memory() -> str:
    names = {"demo": "a step of `DeMo`", "decoupled_diloco": "a round of `DecoupledDiLoCo`"}
    rows = []
    for way, peak in wire("memory MB")[LARGEST].items():
        name, _, rest = way.partition(", the optimizer, ")
        rows.append([f"{names[name]}, {rest}" if rest else NAMES[name], f"{peak:.0f}"])
    return table(["", "MB"], rows)


def _memory_of_many() -> str:
    *optimizers, (_, bar) = wire("memory MB, 8 workers, k=128")[LARGEST].items()
    rows = [[f"`{name}`", f"{peak:.0f}", f"{bar:.0f}"] for name, peak in optimizers]
    return table(["8 workers, k = 128", "MB", "own message, 2 bytes per received entry, 32 MB"], rows)


def _bytes() -> str:
    told, rows = wire("bytes")[LARGEST], []
    dense = told["dense fp32"]
    for what, number in told.items():
        k, _, values = what.partition(" ")
        if what.startswith("simple"):
            name = NAMES[what]
        elif values.partition("(")[0] in ("Float", "Int8", "Sign"):
            name = f"`DCT(64) >> TopK({k.removeprefix('k=')}) >> {values}`".replace("'", '"')
        else:
            continue
        rows.append([name, f"{number:,}", f"1/{dense / number:.0f}"])
    return table(["", "bytes", "of dense"], rows)


def _receive() -> str:
    row = newest("receive", "times as fast")
    least, faster = row["least cpu seconds"], row["times as fast"]
    rows = [
        [f"commit {row['against']}", f"{least['old']:.3f}", ""],
        ["without kernels", f"{least['plain']:.3f}", f"{faster['old / plain']:.1f}"],
        ["with kernels", f"{least['kernels']:.3f}", f"**{faster['old / kernels']:.1f}**"],
    ]
    head = f"{row['size']}, messages of {row['workers']} workers, k = {row['k']}"
    return table([head, "CPU seconds, least", f"{row['against']} / it"], rows)


def _before() -> str:
    told = newest("before")
    rows = [
        [
            name,
            *(f"{row['cpu seconds'][which]:{form}}" for which, form in (("now", ".3f"), ("before", ".3f"), ("ratio", ".2f"))),
        ]
        for name, row in told.items()
        if isinstance(row, dict)
    ]
    return table([f"a round of, at {told['size']}", "CPU seconds, now", f"{told['against']}", "ratio"], rows)


def _triton() -> str:
    kernels = {(k["kernel"], k["sm"]): k for k in newest("triton")["kernels"] if k["k"] in (0, 128)}
    rows = []
    for name in dict.fromkeys(kernel for kernel, _ in kernels):
        cards = [kernels[name, sm] for sm in (80, 90)]
        figures = [f"{k['registers']}, {k['spilled B']}" for k in cards]
        rows.append([f"`{name}`", f"{32 * cards[0]['warps']}", *figures, f"{cards[0]['shared B'] / 1024:.0f} kB"])
    return table(["", "threads", "sm_80: registers, bytes spilled", "sm_90: registers, bytes spilled", "shared memory"], rows)


def _fuzz() -> str:
    told = newest("fuzz")
    rows = [[outcome, f"{count:,}"] for outcome, count in told["outcomes"].items()]
    about = f"{told['messages']:,} messages of {told['codecs']} codecs, {told['seconds']:.0f} s on one core, {told['date']}:"
    growth = f"{told['wrong']} wrong outcomes; the memory of the process grew by {told['growth_MB']:.0f} MB."
    return f"{about} {growth}\n\n{table(['outcome', 'messages'], rows)}"


def _optimizers() -> str:
    runs = newest("optimizers")["runs"]
    names, base = list(runs[0]["seconds"]), "torch AdamW, foreach"
    rows = []
    for name in names:
        times = [(run["seconds"][name], run["seconds"][name] / run["seconds"][base]) for run in runs]
        rows.append([name, *(cell for time, ratio in times for cell in (f"{1e3 * time:.0f}", f"{ratio:.2f}"))])
    heads = [f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}" for run in runs]
    return table(["", *(cell for head in heads for cell in (f"ms, {head}", "ratio"))], rows)


def _overlap() -> str:
    ways = newest("overlap")["ways"]
    rows = [[name, f"{way['utilisation']:.1%}", f"{way['wait']:.1%}"] for name, way in ways.items()]
    return table(["", "computing, of the time", "waiting"], rows)


FILL: dict[str, Callable[..., str]] = {
    "about": _about,
    "about-plain": _about_plain,
    "rounds": _rounds,
    "steps": _steps,
    "ratio": lambda *where: f"{_ratio(*where):.1f}",
    "pays": _pays,
    "plain": _plain,
    "memory": _memory,
    "memory-of-many": _memory_of_many,
    "bytes": _bytes,
    "above": lambda k: f"{wire('bytes')[LARGEST][f'k={k} indices above the bound']:.0%}",
    "reading": lambda way, workers: f"{1e3 * wire('workers')['seconds'][way][workers]:.0f} ms",
    "receive": _receive,
    "before": _before,
    "triton": _triton,
    "fuzz": _fuzz,
    "optimizers": _optimizers,
    "overlap": _overlap,
}


def page() -> str:
    """The page as it should be."""

    def fill(match: re.Match[str]) -> str:
        word, _, rest = match[1].strip().partition(" ")
        if word not in FILL:
            raise SystemExit(f"{SOURCE.name} has {match[0]}: it must begin with one of {', '.join(FILL)}")
        try:
            return FILL[word](*(part.strip() for part in rest.split(" / ") if part))
        except _MissingError as command:
            return f"*(not recorded yet: `{command}`)*"

    text = re.sub(r"\{\{(.+?)\}\}", fill, SOURCE.read_text(encoding="utf-8"))
    made = "Made by `python -m benchmarks.performance` from benchmarks/performance.md and the records: edit those."
    return f"<!-- {made} -->\n\n{text}"


def main(draw: Iterable[Callable[[], Path]] = ()) -> None:
    """Write the page, and draw its figure."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE, *(one() for one in draw), sep="\n")


if __name__ == "__main__":
    from benchmarks.figures import draw_wire  # matplotlib is in an extra

    main([draw_wire])
