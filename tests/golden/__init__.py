"""Golden hashes: what the first 64 steps of every method give, so that a change that should change nothing can show it.

Two sets, each a JSON file beside this one:

* `arms`: the first 64 steps of each distinct arm of `benchmarks/arms.py` in the simulator, at the first point of its grid. A
  warm start is cut to 16 steps, since the arms have 128 and 256 and the method would not be seen at all.
* `conformance`: 64 steps of every algorithm as the conformance tests set it up, with gathered and with averaged messages, in
  the simulator and on 2 real gloo processes.

An entry holds hashes of the parameters and of the training losses of all workers, the last loss itself, and the bytes sent.
Floating-point results are those of one kind of CPU. `control` is the hash of an AdamW run without any code of thinwire: where
it differs, this machine computes otherwise, hashes cannot be compared, and losses are compared up to rounding instead.

    python -m tests.golden --write          # make the files anew: only where results are meant to change, and say why
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from benchmarks.arms import PARTS, Run, run_of
from torch import Tensor

from tests.conformance.training import NAMES, SOURCES, backward, build, codec_of, model_of
from thinwire import Link, Metered, World
from thinwire.tools.config import RunConfig
from thinwire.tools.train import Trainer, task_of

HERE = Path(__file__).parent
STEPS = 64
WARM = 16

Entry = dict[str, Any]


def hash_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bits, shortened: these are to be compared, not defended."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:20]


def control() -> str:
    """The hash of AdamW's parameters after 8 steps on a small GPT: the machine's arithmetic, none of our code in the step."""
    torch.set_num_threads(1)
    config = RunConfig(algorithm="data-parallel", task="gpt-nano", workers=1, steps=8, batch=2)
    task = task_of(config, 1)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 9):
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of(model.parameters())


def read(name: str) -> dict[str, Any]:
    """One set of golden entries."""
    return json.loads((HERE / f"{name}.json").read_text())


def write(name: str, entries: dict[str, Entry]) -> None:
    """Replace one set of golden entries."""
    (HERE / f"{name}.json").write_text(json.dumps({"control": control(), "entries": entries}, indent=1) + "\n")


def differences(expected: Entry, found: Entry, *, same_arithmetic: bool) -> list[str]:
    """What of an entry is not as it was."""
    exact = expected.keys() if same_arithmetic else {"sent", "payload"}
    told = [f"{key}: {expected[key]!r} became {found[key]!r}" for key in sorted(exact) if expected[key] != found[key]]
    if not same_arithmetic and abs(found["loss"] / expected["loss"] - 1) > 0.05:  # 2.2% were seen between two kinds of CPU
        told.append(f"loss: {expected['loss']} became {found['loss']}")
    return told


# --- The arms of the records ---------------------------------------------------------------------------------------------


def arms() -> dict[str, Run]:
    """Every distinct arm, named by its part and its name; arms that come to the same first 64 steps are there once."""
    named, seen = {}, set()
    for part, some in PARTS.items():
        for arm in some:
            run = run_of(arm, next(arm.candidates()), seed=0)
            same = json.dumps(
                [run.task, run.algorithm, run.wire, run.lr, run.settings, run.batch, run.steps, run.run], sort_keys=True
            )
            if same not in seen:
                seen.add(same)
                named[f"{part}: {arm.name}"] = run
    return named


def measure_arm(run: Run) -> Entry:
    """64 steps of an arm on 4 simulated workers."""
    torch.set_num_threads(1)
    own = dict(run.run)
    if own.get("warm_start"):
        own["warm_start"] = WARM
    config = RunConfig(
        algorithm=run.algorithm,
        task=run.task,
        workers=4,
        steps=run.steps,
        seed=run.seed,
        lr=run.lr,
        batch=run.batch,
        wire=run.wire,
        eval_every=0,
        settings=run.settings,
        **own,
    )
    task = task_of(config, 4)

    def worker(link: Link) -> tuple[list[Tensor], list[float], int, int]:
        trainer, losses = Trainer(config, link, task=task), []
        for step in range(1, STEPS + 1):
            losses.append(float(trainer._one_step(step)))
        totals = trainer.link.meter.totals
        return [p.detach().clone() for p in trainer.model.parameters()], losses, totals.sent, totals.payload

    return _entry(World(4, step_time=0.0).run(worker))


# --- The conformance set-ups ---------------------------------------------------------------------------------------------


def set_ups() -> list[tuple[str, str, int, bool]]:
    """Place, algorithm, number of workers, and whether messages are gathered."""
    return [
        (place, name, size, gather)
        for name in NAMES
        if not name.endswith("-by-owners")  # of which tests/test_owners.py has the identities
        and name not in SOURCES
        and name != "coarse-diloco"  # all entries in float32 are those of decoupled-diloco, but for two numbers
        for gather in (True, False)
        for place, size in (("sim", 2), ("sim", 3), ("gloo", 2))
    ]


def train_set_up(link: Link, name: str, gather: bool) -> tuple[list[Tensor], list[float], int, int]:
    """64 steps of one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(link.rank)
    model, metered, losses = model_of(), Metered(link), []
    opt = build(name, model.parameters(), metered, codec=codec_of(name, gather))
    for step in range(1, STEPS + 1):
        losses.append(float(backward(model, link.rank, step)))
        opt.step()
        opt.zero_grad()
    opt.finish()
    return [p.detach().clone() for p in model.parameters()], losses, metered.meter.totals.sent, metered.meter.totals.payload


def measure_set_up(place: str, name: str, size: int, gather: bool, pool: Any) -> Entry:
    """One entry; `pool` runs functions on real processes."""
    if place == "gloo":
        return _entry(pool.run(train_set_up, size, name, gather))
    return _entry(World(size).run(lambda link: train_set_up(link, name, gather)))


def _entry(workers: list[tuple[list[Tensor], list[float], int, int]]) -> Entry:
    parameters = [p for params, *_ in workers for p in params]
    losses = torch.tensor([losses for _, losses, *_ in workers], dtype=torch.float64)
    return {
        "parameters": hash_of(parameters),
        "losses": hash_of([losses]),
        "loss": float(losses[:, -1].mean()),
        "sent": [sent for *_, sent, _ in workers],
        "payload": [payload for *_, payload in workers],
    }
