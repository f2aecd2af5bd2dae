"""Compute the bytes of all records of the evidence anew, then tables and figures: `python -m benchmarks.recompute`.

The bytes of a run do not depend on its numbers: they are the lengths of its messages, which the codecs tell (`nbytes`). So they
follow a change of the wire format without training again. Losses stay as they were measured. Left out are the handshake and the
alarms, at most 0.1% of the bytes of a run.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from torch import nn

from benchmarks import evidence, record
from thinwire.network import ring_traffic
from thinwire.tasks import make_task
from thinwire.tasks.image_nets import CNN
from thinwire.tasks.images import CLASSES
from thinwire.tools.plan import Message, on_meta, run_messages
from thinwire.tools.records import record_from

HOW = "recomputed: lengths of all messages of the rounds, by thinwire.tools.plan.run_messages"


@cache
def model_of(task: str) -> nn.Module:
    """The shapes of a task's model; those of the CNN without its images."""
    return on_meta(CNN(channels=1, classes=CLASSES) if task == "cnn-fashion" else make_task(task).model())


def recomputed(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the evidence with the bytes that its run sends with today's messages, marked as such, in its curve too."""
    run = record_from(row)
    workers = int(run.figures["workers"])
    messages = run_messages(run.config, model_of(run.config.task), workers=workers)
    kept = {name: value for name, value in row.items() if name not in ("fewer", "payload", "sent", "workers", "bytes")}
    new = kept | {"workers": workers, **totals(messages, workers), "bytes": HOW}
    if "curve" in row:
        new["curve"] = [
            point | totals([m for m in messages if m.needed <= point["step"]], workers, rounds=True) for point in row["curve"]
        ]
    return new


def totals(messages: list[Message], workers: int, *, rounds: bool = False) -> dict[str, int]:
    """Bytes that a worker sends, and those of its own messages."""
    sent = sum(ring_traffic(m.op, [m.nbytes] * workers, 0).sent for m in messages)
    return {"payload": sum(m.nbytes for m in messages), "sent": sent} | ({"rounds": len(messages)} if rounds else {})


def main() -> None:
    """Rewrite the records, then everything that is made of them."""
    from benchmarks import frontier, results

    path = record.RECORDS / f"{evidence.NAME}.jsonl"
    rows = [recomputed(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} records")
    results.main()
    frontier.main()


if __name__ == "__main__":
    main()
