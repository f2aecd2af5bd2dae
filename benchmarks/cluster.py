"""Storms over runs on a cluster: `python -m benchmarks.elastic cluster` (part of make chaos).

As `benchmarks.elastic`, with workers that move messages between themselves. Somebody is killed or frozen, all are killed at
once, or the host of the run is killed and started again, empty. Then the run is founded again from what survivors have, or
from the checkpoints that workers kept for themselves every 8 rounds. Rounds that nobody who was left had are gone then
(`abandoned`); a round that was not so lost and that two workers saw differently is counted as one with two hashes.

`seconds` are those from a kill of one worker to the next round that the others took part in, on a machine with this `load`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record, servers
from benchmarks.diaries import ZERO, Diary, count_blocks, lines_of
from benchmarks.elastic import METHODS, _config, _Place, _poison, _Workers
from benchmarks.elastic import Storm as StoreStorm

NAME = "cluster"
LIMIT = 300.0  # seconds without any progress that are a failure
KEPT_EVERY = 8  # rounds
OUTAGES = ("kill all", "host")


@dataclass(frozen=True)
class Storm(StoreStorm):
    """One run on a cluster that is disturbed.

    Attributes:
        store: "cluster".
        outage: what happens, one of `OUTAGES`; anything where it is empty.
    """

    store: str = "cluster"
    events: int = 25


class _Cluster(_Workers):
    """The processes of a storm on a cluster, its host among them."""

    def __init__(self, storm: Storm, folder: Path):
        self.seconds: list[float] = []  # from each kill of one worker to the next round of the others
        self._port, self._host = servers.free_port(), None
        super().__init__(storm, folder, _Place(f"tcp://127.0.0.1:{self._port}", {}))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._kill_host()

    def _start_host(self) -> None:
        self._host = self._context.Process(target=_host, args=(self._port, self.folder, self.storm.workers))
        self._host.start()

    def _kill_host(self) -> None:
        assert self._host is not None
        self._host.kill()
        self._host.join()

    def _call(self, function: Any, *arguments: Any) -> None:
        """Nothing: there are no keys to be made, and no manifests that would outlive the host."""

    def _start(self, id: int) -> Any:
        if self._host is None:
            self._start_host()
        arguments = (id, self.storm, self.folder, self.place.url, self._round, self._stop)
        process = self._context.Process(target=_worker, args=arguments)
        process.start()
        return process

    def disturb(self, chance: random.Random) -> str:
        """Do something to somebody; what it was."""
        kinds = ["kill"] * 6 + ["freeze"] * 3 + ["kill all", "host"]
        kind, victim = self.storm.outage or chance.choice(kinds), chance.randrange(self.storm.workers)
        if kind == "kill":
            self._kill_one(victim, chance.uniform(0, 1.5))
        elif kind == "freeze":
            self._pause(self.processes[victim].pid, chance.uniform(0.2, 3))
        elif kind == "kill all":
            self._kill(list(range(self.storm.workers)), chance.uniform(0, 0.5))
        else:
            self._kill_host()
            time.sleep(chance.uniform(0, 2))
            self._start_host()
        return kind

    def _kill_one(self, victim: int, pause: float) -> None:
        """Kill one, time the others' next round, and start it again."""
        self.processes[victim].kill()
        killed, before, committed, restarted = time.monotonic(), self._round.value, None, False
        self.processes[victim].join()
        while committed is None or not restarted:
            now = time.monotonic() - killed
            if committed is None and self._round.value > before:
                committed = now
            if not restarted and now >= pause:
                self.processes[victim], restarted = self._start(victim), True
            self._check(killed + LIMIT, "the next round")
            time.sleep(0.005)
        self.seconds.append(committed)


def run_storm(storm: Storm, folder: Path) -> dict[str, Any]:
    """Run the storm; returns what was counted."""
    chance = random.Random(storm.seed)
    workers = _Cluster(storm, folder)
    with workers:
        done = Counter[str]()
        while sum(done.values()) < storm.events:
            workers.wait_for_rounds(chance.randint(1, 6))
            time.sleep(chance.uniform(0, 0.2))  # a moment of a step, a request or a replay
            done[workers.disturb(chance)] += 1
            if storm.outage:
                workers.wait_until_all_counted()
        workers.wait_until_all_counted()
        workers.end()
        seconds = sorted(round(s, 2) for s in workers.seconds)
    times = {"median": statistics.median(seconds), "worst": seconds[-1]} if seconds else {}
    load = round(os.getloadavg()[0], 1)
    return {**asdict(storm), "done": dict(done), **count(folder, storm.workers), "seconds": times, "load": load}


def _host(port: int, folder: Path, workers: int) -> None:
    from thinwire.links.host import RunHost

    host = RunHost(port=port, workers=workers, folder=folder / "host")
    threading.Event().wait()
    host.close()


def _worker(id: int, storm: Storm, folder: Path, url: str, round: Any, stop: Any) -> None:
    """One life of one worker."""
    import logging

    import torch

    import thinwire
    from thinwire.errors import LinkError
    from thinwire.links.cluster_link import ClusterLink
    from thinwire.tools.elastic import ElasticTrainer

    log = (folder / f"worker{id}.log").open("a", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    begun, chance = round.value, random.Random(f"{storm.seed} {id} {time.time_ns()}")
    how = {"keep": folder / f"kept{id}", "checkpoint_every": KEPT_EVERY, "first_wait": 5.0, "timeout": LIMIT}
    link = thinwire.join(url, id=id, **how)
    assert isinstance(link, ClusterLink)
    trainer = ElasticTrainer(_config(storm), link)
    diary, settle = Diary(folder / f"worker{id}.jsonl", trainer, round), link.settle

    def noted_settle(place: Any) -> Any:
        era = settle(place)
        diary.write({"event": "founded", "era": era.index, "number": era.number, "chain": era.chain.hex()})
        return era

    link.settle = noted_settle
    try:
        trainer.optimizer.join()
    except LinkError as error:
        if stop.value and "this run has ended" in str(error):
            return
        raise
    diary.write({"event": "joined", "begun": begun, "round": link.place.number, "step": trainer.step})
    while not stop.value and not link.ended:
        if chance.random() < 0.01:
            _poison(trainer)
        diary.step()
        faulthandler.dump_traceback_later(10)  # the log says what a worker waits for
        time.sleep(storm.step)
        trainer.one_step()
    trainer.optimizer.finish()
    engine = trainer.optimizer.engine.elastic
    assert engine is not None, "the link is elastic"
    told = {"round": link.place.number, "chain": link.place.chain.hex(), "ledger": engine.ledger.to_json()}
    diary.write({"event": "ended", **told})
    link.close()


# --- What is counted -----------------------------------------------------------------------------------------------------


def count(folder: Path, workers: int) -> dict[str, Any]:
    """Read the diaries of all workers."""
    lines = [line for id in range(workers) for line in lines_of(folder, id)]
    seen: dict[str, list[dict[str, Any]]] = {}  # by the chain after a round
    for line in (line for line in lines if "hash" in line):
        seen.setdefault(line["chain"], []).append(line)
    end = max((line for line in lines if line.get("event") == "ended"), key=lambda line: line["round"])
    decided = {line["chain"]: line for line in lines if "decided" in line}
    history = _walk_back(end, decided)
    founded = [line["number"] for line in lines if line.get("event") == "founded"]
    left = [line["decided"] for chain, line in decided.items() if chain not in history]
    joined = [line for line in lines if line.get("event") == "joined"]
    rounds = {found[0]["round"]: found for chain, found in seen.items() if chain in history}
    manifests = [{"round": line["decided"], "counted": line["digests"]} for line in history.values()]
    split = sum(not any(0 < number <= round for number in founded) for round in left)
    return {
        "rounds": len(history),
        "starts": len(joined),
        "two_hashes": sum(len({line["hash"] for line in found}) > 1 for found in seen.values()) + split,
        "fresh": sum(line["round"] <= 1 and line["begun"] > 1 + KEPT_EVERY for line in joined),
        "invalid": sum(not all(line["finite"] for line in found) for found in seen.values()),
        **count_blocks(manifests, rounds, lines),
        "unseen": end["round"] - len(history),
        "abandoned": len(set(left)),
        "founded": len({(line["number"], line["chain"]) for line in lines if line.get("event") == "founded"}),
        "counted": round(sum(len(m["counted"]) for m in manifests) / max(1, len(manifests)), 2),
    }


def _walk_back(end: dict[str, Any], decided: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The manifests of the run's history, by the chain after each, from its end to its beginning."""
    at, history = end["chain"], dict[str, dict[str, Any]]()
    while at in decided:
        history[at] = decided[at]
        at = decided[at]["before"]
    return history


def main(
    events: int = 100, seed: int = 0, methods: tuple[str, ...] = tuple(METHODS), outages: int = 20, keep: str | None = None
) -> None:
    """Storm over all methods on a cluster until there were this many events, then outages.

    Args:
        events: in all.
        seed: of the moments and victims; another seed is another storm.
        methods: which.
        outages: of each kind, in all: all workers killed at once, and the host killed and started again.
        keep: a folder for the diaries and logs; by default they are deleted.
    """
    each, more = -(-events // len(methods)), -(-outages // len(methods))
    storms = [Storm(name, events=each, seed=seed) for name in methods if events]
    storms += [Storm(name, events=more, seed=seed, outage=kind) for kind in OUTAGES for name in methods if outages]
    path = record.RECORDS / f"{NAME}.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = [row for row in known if "algorithm" in row]
    done = {json.dumps({name: row[name] for name in asdict(storms[0])}): row for row in known}
    failed = False
    for storm in storms:
        row = done.get(json.dumps(asdict(storm)))
        if row is None:
            row = _recorded(storm, keep)
        failed |= any(row[name] for name in ZERO)
        verdict = ", ".join(f"{name} {row[name]}" for name in ZERO)
        what = f"{row['algorithm']:17} {row['workers']} workers {row['events']:3} {row['outage'] or 'events'}"
        print(f"{what} {row['rounds']:4} rounds  {verdict}  abandoned {row['abandoned']}  {row['seconds']}", flush=True)
    if failed:
        raise SystemExit(1)


def _recorded(storm: Storm, keep: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if keep is not None:
            place = Path(keep) / f"{storm.algorithm}-{storm.outage.replace(' ', '-') or 'storm'}-{storm.seed}"
            place.mkdir(parents=True)
        row = run_storm(storm, place)
    record.append(NAME, row)
    return row


if __name__ == "__main__":
    tyro.cli(main)
