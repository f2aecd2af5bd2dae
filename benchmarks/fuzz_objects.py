"""Mutated objects in the store of an elastic run: `python -m benchmarks.fuzz_objects` (part of make bench).

Sound objects of every kind are damaged: bits flipped, cut, spliced with others, replaced; headers and JSON are also changed
and then signed again, as a hostile worker with a key could. Whatever a worker reads must be refused with an error that
thinwire raises on purpose, or be as sound as what an honest worker writes. Nothing else may happen, and memory stays bounded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.fuzz import peak_nbytes
from thinwire.errors import ThinwireError
from thinwire.links.elastic import ElasticLink
from thinwire.links.keys import Ed25519, PrivateKey
from thinwire.links.manifest import Manifest, MemoryStore, Terms
from thinwire.links.run import SignedRoster, create_run, read_run
from thinwire.links.signed import Message, open_message, seal_message, seal_text

WORKERS, LONGEST = 4, 512
WRONG = ("crash", "wrongly accepted")
NAMES = ("0", "3", "9", "²", "٣", "01", "-1", "", "x", "1e3", "hello-0", "hello-²", "hello-", "bye-1", "end-2", "end-x")
NAMES += ("manifest-0", "manifest-1", "manifest-x", "manifest-00", "manifest-", "manifest-0/x", "0/0", "hello-0-0", "9" * 200)


@dataclass(frozen=True)
class Judged:
    """What became of one mutated object."""

    kind: str
    outcome: str
    raw: bytes


class Target:
    """A worker of a run of four that is about to read hostile objects."""

    def __init__(self) -> None:
        self.keys = [PrivateKey.new() for _ in range(WORKERS + 1)]  # the last one is the owner's
        self.store = MemoryStore()
        self.run = create_run(self.store, self.keys[-1], [key.public for key in self.keys[:-1]], train={"algorithm": "demo"})
        self.roster = SignedRoster(self.store, self.run)
        self.roster.add(self.keys[-1], PrivateKey.new().public)
        self.links = [self._link(id) for id in range(WORKERS)]
        self.link = self.links[0]
        self.start = dict(self.store.objects)

    def _link(self, id: int) -> ElasticLink:
        signer = Ed25519(self.keys[id], id, self.roster.keys, context=self.run.context)
        link = ElasticLink(self.store, signer, roster=self.roster, timeout=0.0, poll=0.0)
        link.longest = LONGEST
        return link

    def message(self, **changes: Any) -> bytes:
        """A message of worker 1."""
        link = self.links[1]
        told = Message(
            0, 1, link.place.chain, 0, last=False, kept=False, blocks=1, step_seconds=0.0, body=b"what a worker says" * 8
        )
        return seal_message(link.signer, replace(told, **changes))

    def manifest(self, **changes: Any) -> bytes:
        """A manifest by worker 1 that counts its own message."""
        link, counted = self.links[1], {1: hashlib.sha256(self.message()).hexdigest()}
        told = Manifest(0, link.place.chain, 1, counted, (1, 2), (2,), (), Terms(4, lr=(0.1,)), 0.5, self.roster.first)
        return seal_text(link.signer, "manifest", link.place.chain, replace(told, **changes).to_bytes())

    def signed_json(self, told: object) -> bytes:
        """Any JSON as a manifest by worker 1."""
        link = self.links[1]
        return seal_text(
            link.signer, "manifest", link.place.chain, json.dumps(told, separators=(",", ":"), sort_keys=True).encode()
        )


def mutate(raw: bytes, chance: random.Random, others: list[bytes]) -> bytes:
    """Damage an object."""
    kind, at = chance.randrange(7), chance.randrange(len(raw) + 1)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + chance.randbytes(chance.randrange(1, 40)) + raw[at:]
    if kind == 2:
        return chance.randbytes(chance.randrange(600))
    if kind == 3:
        other = chance.choice(others)
        return raw[:at] + other[chance.randrange(len(other)) :]
    changed = bytearray(raw)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(changed)) if kind > 4 else chance.randrange(min(len(changed), 90))  # headers more often
        changed[place] = chance.randrange(256) if chance.random() < 0.3 else changed[place] ^ 1 << chance.randrange(8)
    return bytes(changed)


def odd_value(chance: random.Random, depth: int = 0) -> Any:
    """Something that JSON can say where something else should be."""
    odd: list[Any] = [None, True, -1, 0, 1, 2**62, 2**63, 10**40, 0.5, 1e308, "", "x" * 300, "²", "00", [], {}, [0, 0], [1, 0]]
    if depth < 2 and chance.random() < 0.3:
        return chance.choice([[odd_value(chance, depth + 1)] * 3, {str(odd_value(chance, 2)): odd_value(chance, depth + 1)}])
    return chance.choice(odd)


# --- Readers ----------------------------------------------------------------------------------------------------------------


def read_message(target: Target, raw: bytes, *, signed: bool) -> bool:
    """Whether a wrong message is taken: a signed one may say anything but who and when."""
    message = open_message(target.link.signer, raw, number=0, sender=1, chain=target.link.place.chain)
    return not signed or (message.number, message.sender, message.chain) != (0, 1, target.link.place.chain)


def read_manifest(target: Target, raw: bytes, *, signed: bool) -> bool:
    """Whether a wrong manifest is taken: a signed one that no honest worker could have written."""
    target.store.objects["x/00000000/manifest-0"] = raw
    found = target.link._manifest()
    if found is None:
        return False
    told, members = found[0], set(target.link.members)
    named = {told.by, *told.counted, *told.expected, *told.hello, *told.bye}
    right = told.number == 0 and told.chain == target.link.place.chain and named <= members and told.terms.step >= 0
    return not signed or not right


def read_round(target: Target, raw: bytes, chance: random.Random) -> bool:
    """Whether an object under any name of a round counts as a message or a mark."""
    target.store.objects[f"x/00000000/{chance.choice(NAMES)}"] = raw
    link = target.link
    link.start_over(link.place)
    names = link.store.list("x/00000000/")
    if chance.random() < 0.1:
        names = {name: chance.choice((0, 1 << 70, size)) for name, size in names.items()}
    link._manifest(names)
    link._view.look(names, most=LONGEST)
    return bool(link._view.messages) or any(link._view.marks.values())


def read_run_json(target: Target, raw: bytes) -> bool:
    target.store.objects["run.json"] = raw
    read_run(target.store)
    return True


def read_roster(target: Target, raw: bytes) -> bool:
    target.store.objects["roster/00000001-0"] = raw
    roster = SignedRoster(target.store, target.run)
    return roster.newest(roster.first) != roster.first


def read_checkpoint(target: Target, raw: bytes, chance: random.Random) -> bool:
    target.store.objects[f"ckpt/{chance.choice(('00000003-1', '²-1', '99999999-2', '1-²', '-', '3-77', ''))}"] = raw
    return bool(list(target.link.archive.states(most=1 << 16)))


# --- One after the other ------------------------------------------------------------------------------------------------------


def judge(kind: str, raw: bytes, read: Callable[[], bool]) -> Judged:
    """Let a worker read an object."""
    try:
        wrong = read()
    except ThinwireError:
        return Judged(kind, "refused", raw)
    except Exception as error:
        return Judged(kind, f"crash: {type(error).__name__}", raw)
    return Judged(kind, "wrongly accepted" if wrong else "sound or passed over", raw)


def fuzz(count: int, seed: int) -> Iterator[Judged]:
    """So many mutated objects, one after the other."""
    chance, target = random.Random(seed), Target()
    sound = {
        "message": target.message(),
        "manifest": target.manifest(),
        "run.json": target.start["run.json"],
        "roster": target.start["roster/00000001-0"],
        "mark": seal_text(target.links[1].signer, "hello", target.link.place.chain),
        "checkpoint": seal_text(target.links[1].signer, "ckpt 00000003-1", b"", b"state" * 20),
    }
    others = list(sound.values())
    while count:
        target.store.objects = dict(target.start)
        kind = chance.choice(
            ("message", "manifest", "round", "run.json", "roster", "checkpoint", "signed message", "signed manifest")
        )
        if kind == "signed message":
            raw = target.message(**_changed_header(chance))
        elif kind == "signed manifest":
            raw = target.signed_json(_changed_json(json.loads(target.manifest()[:-64]), chance))
        else:
            whole = sound.get(kind) or chance.choice((sound["message"], sound["mark"]))
            raw = mutate(whole, chance, others)
            if raw in others:
                continue
        readers: dict[str, Callable[[], bool]] = {
            "message": lambda raw=raw: read_message(target, raw, signed=False),
            "signed message": lambda raw=raw: read_message(target, raw, signed=True),
            "manifest": lambda raw=raw: read_manifest(target, raw, signed=False),
            "signed manifest": lambda raw=raw: read_manifest(target, raw, signed=True),
            "round": lambda raw=raw: read_round(target, raw, chance),
            "run.json": lambda raw=raw: read_run_json(target, raw),
            "roster": lambda raw=raw: read_roster(target, raw),
            "checkpoint": lambda raw=raw: read_checkpoint(target, raw, chance),
        }
        count -= 1
        yield judge(kind, raw, readers[kind])


def _changed_header(chance: random.Random) -> dict[str, Any]:
    odd = {
        "number": (1, 2**63),
        "sender": (0, 2, 77, 2**40),
        "chain": (bytes(31) + b"x",),
        "step": (2**62, 2**63, 5),
        "blocks": (0, 7, 2**32 - 1),
        "body": (b"", bytes(LONGEST), bytes(LONGEST + 1)),
    }
    return {name: chance.choice(values) for name, values in odd.items() if chance.random() < 0.4}


def _changed_json(told: dict[str, Any], chance: random.Random) -> Any:
    for _ in range(chance.randrange(1, 3)):
        name = chance.choice([*told, "terms.step", "terms.lr", "counted.id", "more"])
        outer, _, inner = name.partition(".")
        if inner and isinstance(told.get(outer), dict):
            told[outer][inner if outer == "terms" else str(odd_value(chance))] = odd_value(chance)
        else:
            told[outer] = odd_value(chance)
        if chance.random() < 0.05:
            return odd_value(chance)
    return told


def run(count: int, seed: int, console: Console) -> dict[str, Any]:
    for _ in fuzz(2000, seed + 1):  # fills caches
        pass
    before, started, outcomes, wrong = peak_nbytes(), time.perf_counter(), Counter[str](), []
    for judged in fuzz(count, seed):
        outcomes[f"{judged.kind}: {judged.outcome}"] += 1
        if judged.outcome.startswith(WRONG):
            wrong.append(judged)
    seconds = time.perf_counter() - started
    for judged in wrong[:5]:
        console.print(f"{judged.kind}: {judged.outcome}: {judged.raw[:200]!r}", soft_wrap=True, highlight=False, markup=False)
    growth = round((peak_nbytes() - before) / 1e6, 1)
    return {
        "objects": sum(outcomes.values()),
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "crashes": sum(j.outcome.startswith("crash") for j in wrong),
        "wrongly_accepted": sum(j.outcome.startswith("wrongly") for j in wrong),
        "seconds": round(seconds, 1),
        "growth_MB": growth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=100_000, help="how many (default: 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: 0)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/fuzz_objects.jsonl")
    arguments, console = parser.parse_args(), Console()
    figures = run(arguments.objects, arguments.seed, console)
    table = Table("outcome", "objects", title=f"{figures['objects']:,} mutated objects")
    for outcome, number in figures["outcomes"].items():
        table.add_row(outcome, f"{number:,}")
    console.print(table)
    console.print(f"{figures['seconds']} s; memory grew by {figures['growth_MB']} MB")
    if arguments.record:
        record.append("fuzz_objects", figures)
    if figures["crashes"] or figures["wrongly_accepted"] or figures["growth_MB"] > 64:
        sys.exit(1)


if __name__ == "__main__":
    import logging

    logging.getLogger("thinwire").setLevel(logging.ERROR)  # every refusal is a warning there
    main()
