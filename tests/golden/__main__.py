"""Make the golden files: `python -m tests.golden --write [--only arms|conformance]` (about 10 minutes on 2 cores)."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests import golden
from tests.processes import Pool


def main() -> None:
    """Measure, and write where told to; else say what differs."""
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    made = {}
    if only in ("", "conformance"):
        pool = Pool(2)
        made["conformance"] = {repr(key): golden.measure_set_up(*key, pool) for key in golden.set_ups()}
        pool.close()
    if only in ("", "arms"):
        runs = golden.arms()
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as workers:
            entries = {}
            under_way = {workers.submit(golden.measure_arm, run): name for name, run in runs.items()}
            for done in as_completed(under_way):
                name = under_way[done]
                if problem := done.exception():
                    print(f"left out: {name}: {problem}", flush=True)
                    continue
                entries[name] = done.result()
                print(f"{len(entries)}/{len(runs)} {name} {entries[name]['loss']:.4f}", flush=True)
        made["arms"] = {name: entries[name] for name in runs if name in entries}
    for name, entries in made.items():
        if "--write" in sys.argv:
            golden.write(name, entries)
            continue
        before = golden.read(name)
        same = before["control"] == golden.control()
        for key, entry in entries.items():
            for line in golden.differences(before["entries"][key], entry, same_arithmetic=same):
                print(f"{name}: {key}: {line}")


if __name__ == "__main__":
    main()
