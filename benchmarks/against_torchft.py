"""Steps that count while workers are killed, here and in torchft: `python -m benchmarks.elastic torchft`.

DiLoCo on 3 workers, with a step in 20 ms and a round every 10; one of them is killed every 8 seconds, 15 in all, and started
again at once, by the same schedule for both. torchft is 0.2.0 with its own DiLoCo, gloo and a real lighthouse (heartbeats time
out after 1 s, as here). It is no dependency: install torchft==0.2.0, with thinwire and the torch of constraints.txt, in an
environment of its own.

    efficiency     worker-steps in rounds that were committed, against the same run without kills
    rounds         rounds that were committed, likewise
    seconds        from a kill to the next round that another worker committed
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks import record

NAME = "torchft"
H = 10
STEP = 0.02  # seconds
LIMIT = 120.0  # seconds without a round that are a failure


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        engine: "thinwire" or "torchft".
        kills: of one worker each, in `seconds`.
        seconds: that are measured, from when all workers have committed a round.
        workers: real processes.
        width: of the model, a square matrix; a message has 4 width^2 bytes.
        seed: of the victims and moments.
    """

    engine: str
    kills: int
    seconds: float = 120.0
    workers: int = 3
    width: int = 512
    seed: int = 0


def run_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Run it; returns what was committed, and how long after each kill."""
    context = multiprocessing.get_context("forkserver")
    # Importing takes longer than all that is measured. One server forks the workers of both engines.
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "tyro", "thinwire.algorithms", "thinwire.links.join", "torchft.local_sgd"]
    )
    port = context.Value("i", 0, lock=False)
    coordinator = context.Process(target=_coordinate, args=(trial, folder, port))
    coordinator.start()
    _until(lambda: port.value > 0, "the coordinator listens")

    def start(id: int) -> Any:
        process = context.Process(target=_worker, args=(trial, id, folder, port.value))
        process.start()
        return process

    processes = [start(id) for id in range(trial.workers)]
    try:
        _until(lambda: all(len(_commits(folder, id)) > 2 for id in range(trial.workers)), "all workers commit")
        return _measure(trial, folder, processes, start)
    finally:
        for process in (*processes, coordinator):
            process.kill()
            process.join()


def _measure(trial: Trial, folder: Path, processes: list[Any], start: Any) -> dict[str, Any]:
    chance, began, killed = random.Random(trial.seed), time.monotonic(), list[tuple[float, int]]()
    for number in range(trial.kills):
        due = began + (number + chance.uniform(0.2, 0.8)) * trial.seconds / trial.kills
        time.sleep(max(0.0, due - time.monotonic()))
        victim = chance.randrange(trial.workers)
        processes[victim].kill()
        killed.append((time.monotonic(), victim))
        processes[victim].join()
        processes[victim] = start(victim)
    time.sleep(max(0.0, began + trial.seconds - time.monotonic()))
    ended = time.monotonic()
    commits = [(t, id, number) for id in range(trial.workers) for t, number in _commits(folder, id) if began <= t <= ended]
    seconds = sorted(min((t for t, id, _ in commits if t > at and id != victim), default=ended) - at for at, victim in killed)
    return {
        **asdict(trial),
        "worker_steps": H * len(commits),
        "rounds": len({number for _, _, number in commits}),
        "next_commit": {"median": round(statistics.median(seconds), 2), "worst": round(seconds[-1], 2)} if seconds else {},
        "load": round(os.getloadavg()[0], 1),
    }


def _until(happened: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not happened():
        if time.monotonic() > deadline:
            raise SystemExit(f"torchft: waited {LIMIT:g} s until {what}")
        time.sleep(0.05)


def _commits(folder: Path, id: int) -> list[tuple[float, int]]:
    """When a worker committed a round that it took part in, and which."""
    path = folder / f"{id}.commits"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(line[0]), int(line[1])) for line in lines if len(line) == 3]


def _coordinate(trial: Trial, folder: Path, port: Any) -> None:
    """Hold the register of a run, or a lighthouse."""
    if trial.engine == "thinwire":
        from thinwire.links.host import RunHost

        held: Any = RunHost(workers=trial.workers, folder=folder / "host")
        port.value = held.port
    else:
        from torchft.coordination import LighthouseServer  # pyright: ignore[reportMissingImports]

        held = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, heartbeat_timeout_ms=1000)
        port.value = int(held.address().rpartition(":")[2])
    while held is not None:
        time.sleep(1.0)


def _worker(trial: Trial, id: int, folder: Path, port: int) -> None:
    log = (folder / f"{id}.log").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(trial.width, trial.width, bias=False)
    commits = (folder / f"{id}.commits").open("a", buffering=1)

    def committed(number: int) -> None:
        commits.write(f"{time.monotonic()} {number} .\n")

    (_train_thinwire if trial.engine == "thinwire" else _train_torchft)(trial, id, folder, port, model, committed)


def _local_step(model: torch.nn.Module, width: int) -> None:
    time.sleep(STEP)  # what a step takes on an accelerator: the processor is not what is measured
    model(torch.randn(4, width)).square().mean().backward()


def _train_thinwire(trial: Trial, id: int, folder: Path, port: int, model: torch.nn.Module, committed: Any) -> None:
    import thinwire

    link = thinwire.join(f"tcp://127.0.0.1:{port}", id=id, keep=folder / f"kept{id}", first_wait=5.0, checkpoint_every=16)
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), link, H=H)
    opt.join()
    before = link.decided
    while not opt.ended:
        _local_step(model, trial.width)
        opt.step()
        opt.zero_grad()
        if link.decided is not before and link.decided is not None and link.decided.mine:
            committed(link.decided.manifest.number)
        before = link.decided


def _train_torchft(trial: Trial, id: int, folder: Path, port: int, model: torch.nn.Module, committed: Any) -> None:  # noqa: ARG001
    from datetime import timedelta

    from torchft import Manager, ProcessGroupGloo  # pyright: ignore[reportMissingImports]
    from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]

    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    wait = timedelta(seconds=10)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=wait),
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        replica_id=f"worker{id}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        hostname="127.0.0.1",
        connect_timeout=wait,
        quorum_timeout=wait,
        timeout=wait,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=H):
        before = manager.current_step()
        while True:
            inner.zero_grad()
            _local_step(model, trial.width)
            inner.step()
            if manager.current_step() > before and manager.is_participating():
                committed(manager.current_step())
            before = manager.current_step()


def main(
    kills: int = 15,
    seconds: float = 120.0,
    workers: int = 3,
    width: int = 512,
    seed: int = 0,
    engines: tuple[str, ...] = ("thinwire", "torchft"),
) -> None:
    """Measure both, without and with kills.

    Args:
        kills: in this time.
        seconds: of each of the runs.
        workers: real processes.
        width: of the model, a square matrix; a message has 4 width^2 bytes.
        seed: of the schedule.
        engines: which.
    """
    rows = []
    for engine in engines:
        for count in (0, kills):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run_trial(Trial(engine, count, seconds, workers, width, seed), Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    for calm, disturbed in zip(rows[::2], rows[1::2], strict=True):
        steps, rounds = (disturbed[name] / calm[name] for name in ("worker_steps", "rounds"))
        efficiency = {"efficiency": round(steps, 4), "rounds_kept": round(rounds, 4)}
        without = {name: calm[name] for name in ("worker_steps", "rounds", "load")}
        record.append(NAME, {**disturbed, "without_kills": without, **efficiency})
        print(f"{disturbed['engine']:9} {efficiency}  next commit {disturbed['next_commit']} s", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
