"""One worker of `test_lab_elastic.py`, in a namespace of its own: `python -m tests.tools.lab_straggler FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.straggler import hosted

from tests.conformance.elastic import replicated
from tests.conformance.training import H, backward, build, model_of
from tests.processes import until
from thinwire.core.hashing import hash_tensors
from thinwire.links import ElasticLink

ROUND = 4  # which the others have decided before the straggler takes its second step
MOST = 2000  # rounds that the others go on for until they see it counted


def main(folder: str) -> None:
    """Train until worker 2, which stays in its first steps until the others are far ahead, was counted after all."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with hosted(rank, size) as link:
        told = train(link)
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def train(link: ElasticLink) -> dict[str, Any]:
    model, rank = model_of(), link.rank
    opt = build("diloco", model.parameters(), link)
    states, counted, take = {}, {}, opt.engine.take

    def noting(decided: Any, exchange: Any) -> bool:
        included = take(decided, exchange)
        number = decided.manifest.number
        states[number], counted[number] = hash_tensors(replicated(opt)), sorted(decided.manifest.counted)
        return included

    opt.engine.take = noting
    opt.join()
    done = False
    for _ in range(MOST * H):
        done = done or any(2 in ids for number, ids in counted.items() if number > ROUND)
        if opt.ended or (rank == 0 and done):
            break
        backward(model, opt.block, opt.block_step)
        if rank == 2 and opt.block_step == 1 and link.place.number <= ROUND:
            until(lambda: "manifest-0" in link.store.list(f"x/{ROUND:08d}/"), "a round without the straggler")
        opt.step()
        opt.zero_grad()
        time.sleep(0.01)
    opt.finish()
    return {"states": states, "counted": counted}


if __name__ == "__main__":
    main(sys.argv[1])
