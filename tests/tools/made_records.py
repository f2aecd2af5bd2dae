"""Records made up for tests: a loss that falls as 1/sqrt(step), bytes and time as a method of such a kind has them."""

from __future__ import annotations

import math
import random
from typing import Any

from thinwire.tools.config import RunConfig
from thinwire.tools.records import Point, Record

PARAMETERS = 820_352
WORKERS = 4


def made_record(
    arm: str,
    *,
    seed: int = 0,
    algorithm: str = "diloco",
    settings: dict[str, Any] | None = None,
    loss: float = 1.7,
    message: int = 4 * PARAMETERS,
    every: int = 1,
    steps: int = 120,
    place: str = "simulated",
    drift: float = 0.0,
    curve: bool = True,
    **config: Any,
) -> Record:
    """A run whose workers all-reduce `message` bytes every so many steps, at 0.05 s of computing per step."""
    noise = random.Random(f"{arm} {seed}")
    end = loss + noise.uniform(-0.01, 0.01)
    points = []
    for step in range(1, steps + 1):
        rounds = step // every
        sent, payload = int(rounds * message * 2 * (WORKERS - 1) / WORKERS), rounds * message
        value = end + 3.8 * (1 / math.sqrt(step) - 1 / math.sqrt(steps))
        evaluated = step % 20 == 0 or step == steps
        points.append(
            Point(
                step=step,
                loss=value + noise.uniform(-0.15, 0.15),
                seconds=0.05 * step + 0.01 * rounds,
                waiting=0.01 * rounds,
                sent=sent,
                payload=payload,
                rounds=rounds,
                val_loss=value if evaluated else None,
                val_drift=drift * step / steps if evaluated else None,
            )
        )
    last = points[-1]
    figures = {name: getattr(last, name) for name in ("step", "seconds", "waiting", "sent", "payload", "rounds")}
    figures |= {"val_loss": end, "val_drift": drift, "workers": WORKERS, "shards": 1, "parameters": PARAMETERS}
    words = f"thinwire sim --algorithm {algorithm} --task gpt-nano --workers {WORKERS} --steps {steps} --seed {seed}"
    return Record(
        arm=arm,
        config=RunConfig(algorithm=algorithm, workers=WORKERS, steps=steps, seed=seed, settings=settings or {}, **config),
        command=words,
        place=place,
        figures=figures,
        curve=tuple(points) if curve else (),
        versions={"thinwire": "0.1.0", "torch": "2.13.0", "platform": "Linux"},
        cores=2,
        date=f"2026-11-16T08:00:{seed:02d}+00:00",
    )


def made_comparison(seeds: int = 3) -> list[Record]:
    """DDP, a method with local steps, one with thin messages and one that drifts."""
    records = []
    for seed in range(seeds):
        records += [
            made_record("ddp", seed=seed, algorithm="ddp", loss=1.72),
            made_record("diloco --H 30", seed=seed, settings={"H": 30}, loss=1.88, every=30),
            made_record("DeMo small", seed=seed, algorithm="demo", loss=1.73, message=20_000),
            made_record(
                "streaming",
                seed=seed,
                algorithm="streaming-diloco",
                settings={"H": 32, "tau": 1},
                loss=1.86,
                every=8,
                message=PARAMETERS,
            ),
            made_record("noloco", seed=seed, algorithm="noloco", settings={"H": 16}, loss=1.95, every=16, drift=0.12),
        ]
    return records
