"""One receiver and the messages of 8 workers, k = 128: this tree against another checkout, in turns within one run.

    git worktree add --detach ../old e2cba8e
    python -m benchmarks.receive --against ../old --record

What is timed is what a worker with DeMo's defaults does with messages that have arrived: check them, merge them, find the root
mean square of every tensor's mean, transform it back and take a step. Each tree encodes the messages of the same numbers by
itself, since wire formats differ. Seconds are of the CPU, one thread: they say the same on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKERS, K, LR = 8, 128, 1e-3
LIMIT = 1800  # seconds for all turns of one tree


def receiver(size: str) -> None:
    """Runs in either tree: a round for every line that comes in, its seconds in a line that goes out."""
    import torch

    from benchmarks.pair import SIZES, gpt_shapes
    from thinwire import DCT, Mean, Sign, TopK

    torch.set_num_threads(1)
    shapes, senders = gpt_shapes(*SIZES[size]), Mean(over="senders")
    params = [torch.zeros(s) for s in shapes]
    chain = DCT(64) >> TopK(K) >> Sign()
    messages = []
    for rank in range(WORKERS):
        torch.manual_seed(rank)
        messages.append(chain.encode([torch.randn(s) for s in shapes]))
    try:
        from thinwire.codecs import Messages

        receive = lambda: chain.receive(Messages(messages, params, mean=senders))  # noqa: E731
    except ImportError:  # older trees
        receive = lambda: chain.receive(messages, params, mean=senders)  # type: ignore[call-arg]  # noqa: E731
    try:
        from thinwire import kernels

        print(kernels.name(), flush=True)
    except ImportError:  # older trees
        print("none", flush=True)
    for _ in sys.stdin:
        started = time.thread_time()
        received = receive()
        rates = [LR / max(float(square), 1e-30) ** 0.5 for square in received.squares()]
        if hasattr(received, "step"):
            received.step(params, rates, [False] * len(params))
        else:  # older trees
            for i, p, q in received.each(params):
                p.sub_(q, alpha=rates[i])
        print(time.thread_time() - started, flush=True)


class Tree:
    """A process that receives in one tree."""

    def __init__(self, path: Path, size: str, kernels: str):
        paths = os.pathsep.join([str(path / "src"), str(path)])
        environment = {**os.environ, "PYTHONPATH": paths, "THINWIRE_KERNELS": kernels, "OMP_NUM_THREADS": "1"}
        code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['receiver']({size!r})"
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment)
        self.seconds: list[float] = []

    def hear(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("a receiver has ended: its error is above")
        return line

    def turn(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.seconds.append(float(self.hear()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(LIMIT)


def measure(against: Path, size: str, repeats: int) -> dict[str, Any]:
    here = Path(__file__).resolve().parents[1]
    trees, arithmetic = {}, {}
    for name, path, kernels in (("old", against, "off"), ("plain", here, "off"), ("kernels", here, "auto")):
        trees[name] = Tree(path, size, kernels)
        arithmetic[name] = trees[name].hear().strip()  # one after the other: all of them encode first
    for _ in range(repeats):
        for tree in trees.values():
            tree.turn()
    for tree in trees.values():
        tree.close()
    least = {name: min(tree.seconds) for name, tree in trees.items()}
    given = {"size": size, "against": commit(against), "workers": WORKERS, "k": K, "repeats": repeats}
    times = {f"old / {name}": least["old"] / least[name] for name in ("plain", "kernels")}
    return {**given, "kernels": arithmetic["kernels"], "least cpu seconds": least, "times as fast": times}


def commit(tree: Path) -> str:
    """The commit of a checkout, for the record; "unknown" of a folder that is none."""
    done = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="another checkout")
    parser.add_argument("--size", default="124M", help="10M, 50M or 124M (default: 124M)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each tree (default: 3)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/receive.jsonl")
    arguments = parser.parse_args()
    figures = measure(arguments.against.resolve(), arguments.size, arguments.repeats)
    print(json.dumps(figures, indent=1))
    if arguments.record:
        from benchmarks import record  # not in a receiver, which may run in a tree without it

        record.append("receive", figures)


if __name__ == "__main__":
    main()
