"""Workers of elastic runs are killed, frozen and started again: `python -m benchmarks.elastic` (part of make chaos).

A storm is one run of one method on a store: a folder, moto's S3 server behind a wire that fails, or rclone's, which overwrites,
with worker 0 as the keeper of manifests. Workers get SIGKILL (one, or all at once) or SIGSTOP for a while at random moments, a
gradient is NaN now and then, the server freezes, is started again, or loses answers; the killed are started again with the same
key. Every worker writes down a hash of the replicated state after every round that it applies, also of those that it only
follows. At the end these are counted, and all must be 0:

    two_hashes     rounds after which two workers had different bits in the replicated state
    fresh          workers that began from fresh weights although a round was there
    invalid        rounds after which the replicated state was not finite
    lost, twice    blocks of data that were lost, or counted twice

Storms are records: what was done already is not done again.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record, servers

NAME = "elastic"
METHODS: dict[str, dict[str, Any]] = {"demo": {}, "decoupled-diloco": {"H": 3}, "diloco": {"H": 3}, "mt-dao": {"H": 3}}
STORES = ("file", "moto", "rclone")
LIMIT = 300.0  # seconds without any progress that are a failure
ZERO = ("two_hashes", "fresh", "invalid", "lost", "twice")


@dataclass(frozen=True)
class Storm:
    """One run that is disturbed.

    Attributes:
        algorithm: of `thinwire train`.
        store: "file", "moto" or "rclone".
        events: how often somebody is killed or frozen; 0 measures the requests of an undisturbed run.
        workers: real processes.
        seed: of the moments, the victims and what happens to them.
    """

    algorithm: str
    store: str = "file"
    events: int = 26
    workers: int = 3
    seed: int = 0


def run_storm(storm: Storm, folder: Path) -> dict[str, Any]:
    """Run the storm; returns what was counted."""
    chance = random.Random(storm.seed)
    with _store(storm, folder) as place, _Workers(storm, folder, place) as workers:
        done = Counter[str]()
        while sum(done.values()) < storm.events:
            workers.wait_for_rounds(chance.randint(1, 6))
            time.sleep(chance.uniform(0, 0.2))  # a moment of a step, a request or a replay
            done[workers.disturb(chance)] += 1
        workers.wait_for_rounds(5 if storm.events else 50)
        workers.end()
    return {**asdict(storm), "done": dict(done), **count(folder, storm.workers)}


# --- The store -----------------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where a run is: its address, what a process needs to reach it, and what can be done to it."""

    url: str
    environment: dict[str, str]
    server: servers.Server | None = None
    proxy: servers.Proxy | None = None


@contextlib.contextmanager
def _store(storm: Storm, folder: Path) -> Iterator[_Place]:
    if storm.store == "file":
        yield _Place(f"file://{folder}/run", {})
        return
    started = servers.moto() if storm.store == "moto" else servers.rclone(folder / "buckets")
    with started as server, servers.Proxy(server.port) as proxy:
        yield _Place(f"s3://{servers.BUCKET}/run", servers.environment(proxy.port), server, proxy)


# --- The workers ---------------------------------------------------------------------------------------------------------


class _Workers:
    """The processes of a storm."""

    def __init__(self, storm: Storm, folder: Path, place: _Place):
        self.storm, self.folder, self.place = storm, folder, place
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["torch", "thinwire.tools.elastic", "thinwire.algorithms", "thinwire.tasks.quadratic"]
        )
        # Without locks: a worker that is killed would hold them for good.
        self._round, self._stop = self._context.Value("i", 0, lock=False), self._context.Value("i", 0, lock=False)
        self._setup = self._context.Process(target=_create, args=(storm, folder, place.url, place.environment))
        self._setup.start()
        self._setup.join(LIMIT)
        assert self._setup.exitcode == 0, "the run could not be made"
        self.processes = [self._start(id) for id in range(storm.workers)]

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _start(self, id: int) -> Any:
        arguments = (id, self.storm, self.folder, self.place.url, self.place.environment, self._round, self._stop)
        process = self._context.Process(target=_worker, args=arguments)
        process.start()
        return process

    def wait_for_rounds(self, count: int) -> None:
        """Wait until the run has gone on by so many rounds."""
        target, deadline = self._round.value + count, time.monotonic() + LIMIT
        while self._round.value < target:
            self._check_lives()
            self._check(deadline, f"round {target}")
            time.sleep(0.01)

    def _check_lives(self) -> None:
        """A worker that gave up by itself is a failure; one that was killed has been started again already."""
        for id, process in enumerate(self.processes):
            if process.exitcode not in (None, 0):
                told = (self.folder / f"worker{id}.log").read_text()[-4000:]
                raise SystemExit(f"elastic: worker {id} ended with {process.exitcode}:\n{told}")

    def disturb(self, chance: random.Random) -> str:
        """Do something to somebody; what it was."""
        kinds = ["kill"] * 6 + ["freeze"] * 3 + ["kill all"] + (["server"] * 2 + ["wire"] * 2 if self.place.server else [])
        kind, victim = chance.choice(kinds), chance.randrange(self.storm.workers)
        seconds = chance.uniform(0.2, 3)
        if kind == "kill":
            self._kill([victim], chance.uniform(0, 1.5))
        elif kind == "kill all":
            self._kill(list(range(self.storm.workers)), chance.uniform(0, 0.5))
        elif kind == "freeze":
            self._pause(self.processes[victim].pid, seconds)
        elif kind == "server":
            self._disturb_server(seconds)
        else:
            assert self.place.proxy is not None
            self.place.proxy.mode = chance.choice(("reset", "lose", "delay"))
            time.sleep(seconds)
            self.place.proxy.mode = "pass"
        return kind

    def _disturb_server(self, seconds: float) -> None:
        """Freeze the server; one that keeps its objects on disk is killed and started again."""
        server = self.place.server
        assert server is not None
        on_disk = self.storm.store == "rclone"
        (server.kill if on_disk else server.freeze)()
        time.sleep(seconds)
        (server.start if on_disk else server.thaw)()

    def _kill(self, victims: list[int], seconds: float) -> None:
        for id in victims:
            self.processes[id].kill()
            self.processes[id].join()
        time.sleep(seconds)
        for id in victims:
            self.processes[id] = self._start(id)

    def _pause(self, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """Let one worker end the run, and all others notice."""
        self._stop.value, deadline = 1, time.monotonic() + LIMIT
        while any(process.is_alive() for process in self.processes):
            self._check(deadline, "the end")
            time.sleep(0.02)
        self._check_lives()

    def _check(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise SystemExit(f"elastic: {what} was not reached within {LIMIT:g} s: {self.folder}")


def _config(storm: Storm) -> Any:
    from thinwire.tools.config import RunConfig

    settings = METHODS[storm.algorithm]
    # The steps are so many that only the end of the storm ends the run.
    return RunConfig(
        algorithm=storm.algorithm,
        task="quadratic",
        steps=1 << 20,
        batch=1,
        device="cpu",
        lr=0.01,
        lr_warmup=0,
        settings=settings,
    )


def _create(storm: Storm, folder: Path, url: str, environment: dict[str, str]) -> None:
    """Make keys and the run."""
    from thinwire.links.keys import PrivateKey
    from thinwire.links.objects import ObjectStore
    from thinwire.links.run import create_run

    os.environ.update(environment)
    owner, keys = PrivateKey.new(), [PrivateKey.new() for _ in range(storm.workers)]
    for id, key in enumerate(keys):
        key.write(folder / f"{id}.key")
    keeper = 0 if storm.store == "rclone" else None
    create_run(ObjectStore(url, conditional=keeper is None), owner, [key.public for key in keys], keeper=keeper)


def _worker(id: int, storm: Storm, folder: Path, url: str, environment: dict[str, str], round: Any, stop: Any) -> None:
    """One life of one worker."""
    import logging

    import torch

    import thinwire
    from thinwire.tools.elastic import ElasticTrainer

    os.environ.update(environment)
    log = (folder / f"worker{id}.log").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    begun, chance = round.value, random.Random(f"{storm.seed} {id} {time.time_ns()}")
    link = thinwire.join(url, key=folder / f"{id}.key", first_wait=2.0, poll=0.01, checkpoint_every=8, timeout=LIMIT)
    trainer = ElasticTrainer(_config(storm), link)
    with _Diary(folder / f"worker{id}.jsonl", trainer, round) as diary:
        trainer.optimizer.join()
        diary.write({"event": "joined", "begun": begun, "round": link.place.number, "step": trainer.step})
        while not stop.value and not link.ended:
            if chance.random() < 0.01:
                _poison(trainer)
            trainer.one_step()
        trainer.optimizer.finish()
        engine = trainer.optimizer.engine.elastic
        assert engine is not None, "the link is elastic"
        diary.write({"event": "ended", "round": link.place.number, "ledger": engine.ledger.to_json()})


def _poison(trainer: Any) -> None:
    """Let the next gradient be NaN."""
    p = next(iter(trainer.model.parameters()))
    handle = p.register_hook(lambda grad: (handle.remove(), grad * math.nan)[1])


class _Diary:
    """Writes down what a worker has after every round that it applies."""

    def __init__(self, path: Path, trainer: Any, round: Any):
        self._file, self._trainer, self._round = path.open("a", buffering=1), trainer, round
        self._take = trainer.optimizer.engine.take
        self._requests = Counter[str]()

    def __enter__(self) -> _Diary:
        self._trainer.optimizer.engine.take = self._watched
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def _watched(self, decided: Any, exchange: Any) -> bool:
        from thinwire.core.hashing import hash_tensors
        from thinwire.payload import all_finite

        optimizer, link = self._trainer.optimizer, self._trainer.link.link
        before = optimizer.engine.ledger.to_json()
        included = self._take(decided, exchange)
        number = decided.manifest.number
        if link.place.number != number + 1:  # it took a checkpoint instead
            return included
        state = [t for tensors in optimizer.replicated_state().values() for t in tensors]
        requests = Counter(link.store.requests)
        self.write(
            {
                "round": number,
                "hash": hash_tensors(state),
                "finite": all_finite(state),
                "counted": sorted(decided.manifest.counted),
                "blocks": sorted(b for who in decided.manifest.counted for b in before["held"].get(str(who), [])),
                "mine": decided.mine,
                "requests": dict(requests - self._requests),
            }
        )
        self._requests = requests
        self._round.value = max(self._round.value, number)
        return included


# --- What is counted -----------------------------------------------------------------------------------------------------


def count(folder: Path, workers: int) -> dict[str, Any]:
    """Read the diaries of all workers."""
    lines = [_lines(folder / f"worker{id}.jsonl") for id in range(workers)]
    rounds: dict[int, list[dict[str, Any]]] = {}
    for line in (line for worker in lines for line in worker if "hash" in line):
        rounds.setdefault(line["round"], []).append(line)
    joined = [line for worker in lines for line in worker if line.get("event") == "joined"]
    ended = [line for worker in lines for line in worker if line.get("event") == "ended"]
    done = Counter(block for lines in rounds.values() for block in lines[0]["blocks"])
    ledger = max(ended, key=lambda line: line["round"])["ledger"]
    open_ = [*ledger["debt"], *(block for held in ledger["held"].values() for block in held)]
    # A round may be in no diary: whoever applied it was killed before writing it down, and the others took a later checkpoint.
    unseen = ledger["done"] - sum(done.values())
    alone = [line for worker in lines for line in worker if line.get("mine")]
    return {
        "rounds": len(rounds),
        "starts": len(joined),
        "two_hashes": sum(len({line["hash"] for line in lines}) > 1 for lines in rounds.values()),
        "fresh": sum(line["round"] < line["begun"] for line in joined),
        "invalid": sum(not all(line["finite"] for line in lines) for lines in rounds.values()),
        "lost": len(set(range(ledger["cursor"])) - {*done, *open_}) - unseen,
        "twice": sum((done + Counter(open_)).values()) - len({*done, *open_}),
        "unseen": unseen,
        "counted": round(sum(len(lines[0]["counted"]) for lines in rounds.values()) / max(1, len(rounds)), 2),
        "requests": {
            kind: round(sum(line["requests"].get(kind, 0) for line in alone) / max(1, len(alone)), 2)
            for kind in ("PUT", "GET", "LIST")
        },
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    """What a diary has; a line that a kill cut short is dropped."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def main(events: int = 208, seed: int = 0, methods: tuple[str, ...] = tuple(METHODS), stores: tuple[str, ...] = STORES) -> None:
    """Storm over all methods and stores until there were this many events.

    Args:
        events: in all.
        seed: of the moments and victims; another seed is another storm.
        methods: which.
        stores: which.
    """
    each = -(-events // (len(methods) * len(stores)))
    storms = [Storm(name, store, events=each, seed=seed) for store in stores for name in methods]
    storms += [Storm("diloco", store, events=0, workers=4, seed=seed) for store in stores]
    path = record.RECORDS / f"{NAME}.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {json.dumps({k: row[k] for k in asdict(storms[0])}): row for row in known}
    failed = False
    for storm in storms:
        row = done.get(json.dumps(asdict(storm)))
        if row is None:
            with tempfile.TemporaryDirectory() as folder:
                row = run_storm(storm, Path(folder))
            record.append(NAME, row)
        failed |= any(row[name] for name in ZERO)
        verdict = ", ".join(f"{name} {row[name]}" for name in ZERO)
        what = (
            f"{row['algorithm']:17} {row['store']:6} {row['workers']} workers {row['events']:3} events {row['rounds']:4} rounds"
        )
        print(f"{what}  {verdict}  requests {row['requests']}", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
