"""What workers of a disturbed run write down, and what is counted from it: for `benchmarks.elastic`.

Before it sends a message, a worker writes down its SHA-256 and the blocks that it has taken steps on since it was counted last;
after every round that it applies, also of those that it only follows, a hash of the replicated state. What a round was is read
from the manifests in the store, which outlive every worker. So a block is in the model if a manifest counts a message that has
it, whatever the books of the run say; these are then compared with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

ZERO = ("two_hashes", "fresh", "invalid", "lost", "twice", "misbooked")
MANIFESTS = "manifests.jsonl"


class Diary:
    """Writes down what a worker does, and what it has after every round that it applies.

    Args:
        path: the diary of all lives of this worker.
        trainer: the worker.
        round: the newest round that any worker has written down, shared by all.
    """

    def __init__(self, path: Path, trainer: Any, round: Any):
        """Watch the worker."""
        from thinwire.core.counted import Counted

        engine, self._link = trainer.optimizer.engine, trainer.link.link
        self._file, self._optimizer, self._round = path.open("a", buffering=1), trainer.optimizer, round
        self._file.write("\n")  # a former life may have been killed in the middle of a line
        self._requests, self._work, self._verdict = Counter[str](), set[int](), None
        self._take, self._send, self._begin, self._judge = (
            engine.take,
            self._link._send,
            engine.history._begin_with,
            Counted.judge,
        )
        engine.take, self._link._send, engine.history._begin_with = self._noted_take, self._noted_send, self._noted_begin
        setattr(Counted, "judge", lambda exchange, payloads: self._noted_judge(exchange, payloads))  # noqa: B010

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps(line) + "\n")

    def step(self) -> None:
        """A step on the block that the worker has is about to be taken."""
        self._work.add(self._optimizer.block)

    def _noted_begin(self, state: bytes) -> None:
        self._begin(state)
        self._work.clear()

    def _noted_send(self, raw: bytes, message: Any) -> bool:
        self.write({"sent": message.number, "digest": hashlib.sha256(raw).hexdigest(), "blocks": sorted(self._work)})
        return self._send(raw, message)

    def _noted_judge(self, exchange: Any, payloads: Any) -> Any:
        self._verdict = self._judge(exchange, payloads)
        return self._verdict

    def _noted_take(self, decided: Any, exchange: Any) -> bool:
        from thinwire.core.hashing import hash_tensors
        from thinwire.payload import all_finite

        self._verdict = None
        self._note_manifest(decided.manifest)
        included = self._take(decided, exchange)
        number, verdict = decided.manifest.number, self._verdict
        if self._link.place.number != number + 1:  # it took a checkpoint instead
            return included
        nan = sorted(verdict.invalid) if verdict is not None else []
        left_out = sorted(set(decided.manifest.counted) - _applied(decided, verdict) - set(nan))
        if decided.mine and self._link.rank not in left_out:
            self._work.clear()
        state = [t for tensors in self._optimizer.replicated_state().values() for t in tensors]
        requests = Counter[str](getattr(self._link.store, "requests", {}))
        line = {"round": number, "hash": hash_tensors(state), "finite": all_finite(state), "mine": decided.mine}
        line["chain"] = self._link.place.chain.hex()
        more = {"counted": sorted(decided.manifest.counted), "nan": nan, "left_out": left_out}
        self.write(line | more | {"requests": dict(requests - self._requests)})
        self._requests = requests
        self._round.value = max(self._round.value, number)
        return included

    def _note_manifest(self, manifest: Any) -> None:
        """Where manifests are lost with their host: what this one was."""
        if not hasattr(self._link.store, "requests"):
            counted = {str(id): digest for id, digest in manifest.counted.items()}
            told = {"before": manifest.chain.hex(), "chain": self._link.place.chain.hex(), "digests": counted}
            self.write({"decided": manifest.number, **told})


def _applied(decided: Any, verdict: Any) -> set[int]:
    if verdict is None or verdict.arrived is None:
        return set()
    return {payload.sender for payload in decided.messages} - set(verdict.left_out)


def keep_manifests(url: str, key: Path, folder: Path) -> None:
    """Write down what all rounds of a run were, as its manifests in the store say."""
    import thinwire
    from thinwire.links.view import Place

    link = thinwire.join(url, key=key)
    with (folder / MANIFESTS).open("w") as file:
        while (found := link._manifest()) is not None:
            manifest, raw = found
            file.write(json.dumps({"round": manifest.number, "counted": dict(manifest.counted)}) + "\n")
            told = (manifest.expected, manifest.terms.step, manifest.roster)
            link.start_over(Place(manifest.number + 1, hashlib.sha256(raw).digest(), *told))


def lines_of(folder: Path, worker: int) -> list[dict[str, Any]]:
    """What a worker has written down; a line that a kill cut short is dropped."""
    path, found = folder / f"worker{worker}.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def rounds_of(folder: Path, worker: int) -> list[int]:
    """The rounds in which a worker was counted, by its diary."""
    return [line["round"] for line in lines_of(folder, worker) if line.get("mine")]


def count(folder: Path, workers: int) -> dict[str, Any]:
    """Read the diaries of all workers, and the manifests."""
    lines = [line for id in range(workers) for line in lines_of(folder, id)]
    rounds: dict[int, list[dict[str, Any]]] = {}
    for line in (line for line in lines if "hash" in line):
        rounds.setdefault(line["round"], []).append(line)
    joined = [line for line in lines if line.get("event") == "joined"]
    manifests = [json.loads(line) for line in (folder / MANIFESTS).read_text().splitlines()]
    mine = [line for line in lines if line.get("mine")]
    return {
        "rounds": len(manifests),
        "starts": len(joined),
        "two_hashes": sum(len({line["hash"] for line in seen}) > 1 for seen in rounds.values()),
        "fresh": sum(line["round"] < line["begun"] for line in joined),
        "invalid": sum(not all(line["finite"] for line in seen) for seen in rounds.values()),
        **count_blocks(manifests, rounds, lines),
        # Whoever applied such a round was killed before writing it down, and the others took a later checkpoint.
        "unseen": sum(manifest["round"] not in rounds for manifest in manifests),
        "counted": round(sum(len(m["counted"]) for m in manifests) / max(1, len(manifests)), 2),
        "requests": {
            kind: round(sum(line["requests"].get(kind, 0) for line in mine) / max(1, len(mine)), 2)
            for kind in ("PUT", "GET", "LIST")
        },
    }


def count_blocks(
    manifests: list[dict[str, Any]], rounds: dict[int, list[dict[str, Any]]], lines: list[dict[str, Any]]
) -> dict[str, int]:
    """What became of the blocks: by what workers have done, compared with the books of the run.

    Returns:
        lost: blocks that were issued, that no message that counts has, and that will not be issued again.
        twice: blocks that two messages that count have, or one, and that will be issued again.
        misbooked: how far the number of counted blocks in the books is from the truth.
        nan: blocks that gave NaN or Inf: the books call them counted, so that nobody tries them again.
    """
    sent = {line["digest"]: line["blocks"] for line in lines if "digest" in line}
    ledger = max((line for line in lines if line.get("event") == "ended"), key=lambda line: line["round"])["ledger"]
    times, nan = Counter[int](), set[int]()
    for manifest in manifests:
        seen = rounds.get(manifest["round"], [{"nan": [], "left_out": []}])[0]
        for id, digest in manifest["counted"].items():
            if int(id) in seen["nan"]:
                nan |= set(sent[digest])
            elif int(id) not in seen["left_out"]:
                times.update(sent[digest])
    still = {*ledger["debt"], *(block for held in ledger["held"].values() for block in held)}
    return {
        "lost": len(set(range(ledger["cursor"])) - set(times) - nan - still),
        "twice": sum(number > 1 or block in still for block, number in times.items()),
        "misbooked": abs(ledger["done"] - len(set(times) | nan)),
        "nan": len(nan),
    }
