"""Workers of elastic runs are killed, frozen and started again: `python -m benchmarks.elastic` (part of make chaos).

A storm is one run of one method on a store: a folder, moto's S3 server behind a wire that fails, or rclone's, which overwrites,
with worker 0 as the keeper of manifests. Workers get SIGKILL (one, or all at once) or SIGSTOP for a while at random moments, a
gradient is NaN now and then, the server freezes, is started again, or loses answers; the killed are started again with the same
key. An outage is always the same thing, and the next one comes when every worker has been counted again. What the workers did
is written down (`benchmarks.diaries`) and counted at the end, and all of this must be 0:

    two_hashes     rounds after which two workers had different bits in the replicated state
    fresh          workers that began from fresh weights although a round was there
    invalid        rounds after which the replicated state was not finite
    lost, twice    blocks of data that were lost, or are in the model twice
    misbooked      blocks that the books of the run call counted and are not, or the reverse

Storms and outages are records: what was done already is not done again.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record, servers
from benchmarks.diaries import ZERO, Diary, count, keep_manifests, rounds_of

NAME = "elastic"
METHODS: dict[str, dict[str, Any]] = {"demo": {}, "decoupled-diloco": {"H": 3}, "diloco": {"H": 3}, "mt-dao": {"H": 3}}
STORES = ("file", "moto", "rclone")
LIMIT = 300.0  # seconds without any progress that are a failure
OUTAGES = {"kill all": "file", "wire": "moto", "server": "moto", "server and keeper": "rclone"}  # and where


@dataclass(frozen=True)
class Storm:
    """One run that is disturbed.

    Attributes:
        algorithm: of `thinwire train`.
        store: "file", "moto" or "rclone".
        events: how often something happens; 0 measures the requests of an undisturbed run in which all are waited for.
        workers: real processes.
        seed: of the moments, the victims and what happens to them.
        outage: what happens, one of `OUTAGES`; anything where it is empty.
        step: seconds of sleep in every local step: with none, rounds are shorter than requests, and few workers keep up.
    """

    algorithm: str
    store: str = "file"
    events: int = 26
    workers: int = 3
    seed: int = 0
    outage: str = ""
    step: float = 0.05


def run_storm(storm: Storm, folder: Path) -> dict[str, Any]:
    """Run the storm; returns what was counted."""
    chance = random.Random(storm.seed)
    with _store(storm, folder) as place, _Workers(storm, folder, place) as workers:
        done = Counter[str]()
        while sum(done.values()) < storm.events:
            workers.wait_for_rounds(chance.randint(1, 6))
            time.sleep(chance.uniform(0, 0.2))  # a moment of a step, a request or a replay
            done[workers.disturb(chance)] += 1
            if storm.outage:
                workers.wait_until_all_counted()
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
        self._call(_create, storm)
        self.processes = [self._start(id) for id in range(storm.workers)]

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _call(self, function: Any, *arguments: Any) -> None:
        """Let a process of its own do something with the store: its client does not survive a fork."""
        process = self._context.Process(target=function, args=(*arguments, self.folder, self.place.url, self.place.environment))
        process.start()
        process.join(LIMIT)
        assert process.exitcode == 0, f"{function.__name__} ended with {process.exitcode}"

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

    def wait_until_all_counted(self) -> None:
        """Wait until every worker has been counted in a round after the newest one of now."""
        now, missing, deadline = self._round.value, set(range(self.storm.workers)), time.monotonic() + LIMIT
        while missing:
            missing -= {id for id in missing if max(rounds_of(self.folder, id), default=0) > now}
            self._check_lives()
            self._check(deadline, f"a round after {now} that counts workers {sorted(missing)}")
            time.sleep(0.1)

    def _check_lives(self) -> None:
        """A worker that gave up by itself is a failure; one that was killed has been started again already."""
        for id, process in enumerate(self.processes):
            if process.exitcode not in (None, 0):
                told = (self.folder / f"worker{id}.log").read_text()[-4000:]
                raise SystemExit(f"elastic: worker {id} ended with {process.exitcode}:\n{told}")

    def disturb(self, chance: random.Random) -> str:
        """Do something to somebody; what it was."""
        kinds = ["kill"] * 6 + ["freeze"] * 3 + ["kill all"] + (["server"] * 2 + ["wire"] * 2 if self.place.server else [])
        kind, victim = self.storm.outage or chance.choice(kinds), chance.randrange(self.storm.workers)
        seconds = chance.uniform(0.2, 3)
        if kind == "kill":
            self._kill([victim], chance.uniform(0, 1.5))
        elif kind == "kill all":
            self._kill(list(range(self.storm.workers)), chance.uniform(0, 0.5))
        elif kind == "freeze":
            self._pause(self.processes[victim].pid, seconds)
        elif kind == "server":
            self._disturb_server(seconds)
        elif kind == "server and keeper":
            self._disturb_server(seconds)
            self._kill([0], seconds)
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
        self._call(_keep_manifests)

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


def _keep_manifests(folder: Path, url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    keep_manifests(url, folder / "0.key", folder)


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
    hurry = {"first_wait": 2.0, "poll": 0.01}  # so that many are left out
    waits: dict[str, Any] = {"patience": 100.0} if not storm.events else {"first_wait": 2.0} if storm.outage else hurry
    link = thinwire.join(url, key=folder / f"{id}.key", checkpoint_every=8, timeout=LIMIT, **waits)
    trainer = ElasticTrainer(_config(storm), link)
    diary = Diary(folder / f"worker{id}.jsonl", trainer, round)
    trainer.optimizer.join()
    diary.write({"event": "joined", "begun": begun, "round": link.place.number, "step": trainer.step})
    while not stop.value and not link.ended:
        if storm.events and chance.random() < 0.01:
            _poison(trainer)
        diary.step()
        time.sleep(storm.step)
        trainer.one_step()
    trainer.optimizer.finish()
    engine = trainer.optimizer.engine.elastic
    assert engine is not None, "the link is elastic"
    diary.write({"event": "ended", "round": link.place.number, "ledger": engine.ledger.to_json()})


def _poison(trainer: Any) -> None:
    """Let the next gradient be NaN."""
    p = next(iter(trainer.model.parameters()))
    handle = p.register_hook(lambda grad: (handle.remove(), grad * math.nan)[1])


def main(
    events: int = 208,
    seed: int = 0,
    methods: tuple[str, ...] = tuple(METHODS),
    stores: tuple[str, ...] = STORES,
    outages: int = 20,
) -> None:
    """Storm over all methods and stores until there were this many events, then outages.

    Args:
        events: in all.
        seed: of the moments and victims; another seed is another storm.
        methods: which.
        stores: which.
        outages: of each kind, in all.
    """
    each, more = -(-events // (len(methods) * len(stores))), -(-outages // len(methods))
    storms = [Storm(name, store, events=each, seed=seed) for store in stores for name in methods if events]
    storms += [Storm("diloco", store, events=0, workers=4, seed=seed) for store in stores]
    kinds = [(outage, store) for outage, store in OUTAGES.items() if store in stores and outages]
    storms += [Storm(name, store, events=more, seed=seed, outage=outage) for outage, store in kinds for name in methods]
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
        _show(row)
    if failed:
        raise SystemExit(1)


def _show(row: dict[str, Any]) -> None:
    what = f"{row['algorithm']:17} {row['store']:6} {row['outage'] or 'storm':17} {row['events']:3} events"
    verdict = ", ".join(f"{name} {row[name]}" for name in ZERO)
    counted = f"{row['counted']} of {row['workers']} counted"
    print(f"{what} {row['rounds']:4} rounds  {verdict}  {counted}, requests {row['requests']}", flush=True)


def _cli(words: list[str]) -> None:
    """Storms on stores, on a cluster (`cluster`), or a comparison with torchft (`torchft`)."""
    if words[:1] == ["cluster"]:
        from benchmarks import cluster

        tyro.cli(cluster.main, args=words[1:])
    elif words[:1] == ["torchft"]:
        from benchmarks import against_torchft

        tyro.cli(against_torchft.main, args=words[1:])
    else:
        tyro.cli(main, args=words)


if __name__ == "__main__":
    _cli(sys.argv[1:])
