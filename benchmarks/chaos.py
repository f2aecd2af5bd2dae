"""Kill workers at random moments and resume, again and again: `python -m benchmarks.chaos` (make chaos).

A storm is one run of one method on real processes that checkpoints every second step. Workers are killed with SIGKILL while
they train, exchange, evaluate or save: one of them, or all at once; those that are left are either ended at once, or have to
notice by themselves. Then the run is resumed. At the end parameters, losses and bytes must be those of a run that nobody
disturbed, bit for bit. Storms are records: what was done already is not done again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import record

NAME = "chaos"
METHODS: dict[str, dict[str, Any]] = {
    "demo": {},
    "decoupled-diloco": {"H": 4},
    "diloco": {"H": 5},
    "mt-dao": {"H": 4},
    "streaming-diloco": {"H": 8, "fragments": 2, "tau": 2},
    "demo by owners": {},
    "demo in sites": {},  # of two processes each
}
OWNED = "TopK(4) >> Sign()"  # leaves out most of what each owner averages
LIMIT = 600.0  # seconds that a whole attempt may take; one that hangs is a failure
FOREVER = 1 << 30  # a step that no run reaches


@dataclass(frozen=True)
class Storm:
    """One run that is killed and resumed.

    Attributes:
        algorithm: of `METHODS`.
        task: of `thinwire train`.
        kills: how many times somebody is killed.
        workers: real processes.
        steps: of the run.
        seed: of the moments and the victims.
    """

    algorithm: str
    task: str = "quadratic"
    kills: int = 20
    workers: int = 2
    steps: int = 80
    seed: int = 0


def run_storm(storm: Storm, folder: Path) -> dict[str, Any]:
    """Run the storm; returns how many kills there were, how often the run was resumed, and whether it ended bit-equal."""
    chance = random.Random(storm.seed)
    straight = _finish(storm, folder / "straight")
    broken, kills, starts = folder / "broken", 0, 0
    while kills < storm.kills:
        with _Attempt(storm, broken) as attempt:
            starts += 1
            # Somewhere in what is left, so that the kills are spread over the run.
            least = attempt.wait_for(1)
            target = least + chance.randint(0, max(1, 2 * (storm.steps - least) // (storm.kills - kills + 1)))
            attempt.let_go_on(min(target + 2, storm.steps - 1))
            attempt.wait_for(min(target, storm.steps - 1))
            time.sleep(chance.uniform(0, 0.03))  # a moment of a save, an exchange or an evaluation
            victims = range(storm.workers) if chance.random() < 0.3 else [chance.randrange(storm.workers)]
            killed = [attempt.kill(victim) for victim in victims]
            if not any(killed):
                raise SystemExit("chaos: the workers ended before anyone was killed")
            kills += 1
            attempt.let_go_on(FOREVER)
            if chance.random() < 0.25:
                attempt.wait_for_the_others()
    again = _finish(storm, broken)
    return {**asdict(storm), "kills": kills, "starts": starts + 1, "equal": again == straight}


def _finish(storm: Storm, folder: Path) -> list[dict[str, Any]]:
    """Train to the end, from the newest checkpoint if there is one; the results of all workers."""
    with _Attempt(storm, folder) as attempt:
        attempt.let_go_on(FOREVER)
        attempt.wait_for_the_others()
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(storm.workers)]


class _Attempt:
    """The processes of one start of a run."""

    def __init__(self, storm: Storm, folder: Path):
        from thinwire.links import host_job

        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "thinwire.tools.train", "thinwire.algorithms", "thinwire.tasks.quadratic"])
        # Without locks: a worker that is killed would hold them for good.
        self._step, self._last = context.Value("i", 0, lock=False), context.Value("i", 0, lock=False)
        self._store, places = host_job(storm.workers)
        self._deadline = time.monotonic() + LIMIT
        self.processes = [
            context.Process(target=_worker, args=(place, storm, folder, self._step, self._last)) for place in places
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def let_go_on(self, step: int) -> None:
        """Let worker 0 train until it has taken this step, and then wait there: until now it waits after its first step.

        On a busy machine the run would else be over before the kill.
        """
        self._last.value = step

    def wait_for(self, step: int) -> int:
        """Wait until worker 0 has taken this step, or nobody runs any more; the step it has taken."""
        while self._step.value < step and any(p.is_alive() for p in self.processes):
            self._check()
            time.sleep(0.002)
        return self._step.value

    def wait_for_the_others(self) -> None:
        """Wait until all have ended."""
        while any(p.is_alive() for p in self.processes):
            self._check()
            time.sleep(0.01)

    def kill(self, rank: int) -> bool:
        """SIGKILL to a worker; whether it was still running."""
        alive = self.processes[rank].is_alive()
        self.processes[rank].kill()
        return alive

    def _check(self) -> None:
        if time.monotonic() > self._deadline:
            raise SystemExit(f"chaos: the workers neither went on nor ended within {LIMIT:g} s")


def _worker(place: dict[str, str], storm: Storm, folder: Path, step: Any, last: Any) -> None:
    """One worker of one attempt."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from thinwire.errors import LinkError
    from thinwire.links import Link, TorchLink, TwoLevel, connect, disconnect
    from thinwire.tools.config import RunConfig, write_whole
    from thinwire.tools.display import MetricsFile
    from thinwire.tools.train import Progress, Trainer

    os.environ.update(place, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    algorithm, _, how = storm.algorithm.partition(" ")
    config = RunConfig(
        algorithm=algorithm,
        route="owners" if how == "by owners" else "gather",
        wire=OWNED if how == "by owners" else None,
        task=storm.task,
        workers=storm.workers,
        steps=storm.steps,
        eval_every=7,
        batch=1,
        device="cpu",
        lr=0.01,
        settings=METHODS[storm.algorithm],
    )
    try:
        link: Link = connect(backend="gloo", timeout=LIMIT)
        rank = link.rank
        if how == "in sites":
            mesh = init_device_mesh("cpu", (storm.workers // 2, 2), mesh_dim_names=("site", "member"))
            link = TwoLevel(*(TorchLink(mesh[axis], timeout=LIMIT) for axis in ("member", "site")))
        trainer = Trainer(config, link)
        trainer.resume(folder / "checkpoints")
        metrics = MetricsFile(folder / f"metrics{rank}.jsonl", after=trainer.step)

        def watch(progress: Progress) -> None:
            metrics(progress)
            if rank == 0:
                step.value = progress.step
                while step.value >= last.value:
                    time.sleep(0.002)

        trainer.run(watch, checkpoints=folder / "checkpoints", checkpoint_every=2)
    except LinkError:  # another one was killed
        os._exit(3)
    metrics.close()
    digest = hashlib.sha256()
    for p in trainer.model.parameters():
        digest.update(p.detach().numpy().tobytes())
    lines = map(json.loads, (folder / f"metrics{rank}.jsonl").read_text().splitlines())
    result = {"parameters": digest.hexdigest(), "sent": trainer.link.meter.totals.sent}
    write_whole(folder / f"result{rank}.json", json.dumps({**result, "losses": [line["loss"] for line in lines]}))
    disconnect()


def main(kills: int = 120, seed: int = 0) -> None:
    """Storm over all methods until there were this many kills.

    Args:
        kills: in all; over all methods, two and three workers, and four in sites.
        seed: of the moments and victims; another seed is another storm.
    """
    storms = [
        Storm(name, workers=4 if "sites" in name else 2 + number % 2, kills=-(-kills // 5), seed=seed)  # of five, once
        for number, name in enumerate(METHODS)
    ]
    path = record.RECORDS / f"{NAME}.jsonl"
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {json.dumps({k: row[k] for k in asdict(storms[0])}): row for row in known}
    rows = []
    for storm in storms:
        row = done.get(json.dumps(asdict(storm)))
        if row is None:
            with tempfile.TemporaryDirectory() as folder:
                row = run_storm(storm, Path(folder))
            record.append(NAME, row)
        rows.append(row)
        verdict = "bit-equal" if row["equal"] else "NOT EQUAL to the run without kills"
        print(
            f"{row['algorithm']:18} {row['workers']} workers  {row['kills']:3} kills  {row['starts']:3} starts  {verdict}",
            flush=True,
        )
    if not all(row["equal"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
