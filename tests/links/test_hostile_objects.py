"""What somebody can do who may write into the store of a run: without a key, with another's, or as a worker."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs obstore: pip install 'thinwire[store]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'thinwire[store]'")

from benchmarks.fuzz_objects import WRONG, fuzz

from tests.links.elastic_rounds import (
    KEYS,
    LONGEST,
    OWNER,
    STRANGER,
    Patient,
    check_equal,
    exchange,
    found,
    link_of,
    make_run,
    run_rounds,
)
from thinwire.errors import LinkError, WireError
from thinwire.links.elastic import ElasticLink
from thinwire.links.manifest import MemoryStore, Store, Terms
from thinwire.links.objects import ObjectStore
from thinwire.links.run import SignedRoster
from thinwire.links.signed import Message, open_message, seal_message, seal_text

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else ObjectStore(f"file://{tmp_path}/run")


def _as(link: ElasticLink, key: object = STRANGER, id: int = 2) -> ElasticLink:
    """Somebody at the same place of the history who says that it is worker `id`."""
    from thinwire.links.keys import Ed25519

    other = object.__new__(ElasticLink)
    other.__dict__.update(link.__dict__)
    other.signer = Ed25519(key, id, link.signer._keys, context=link.signer._context)  # type: ignore[arg-type,attr-defined]
    return other


def _message(link: ElasticLink, text: bytes = b"poison", **changes: object) -> bytes:
    place = link.place
    message = Message(
        place.number, link.rank, place.chain, link.terms.step, last=False, kept=False, blocks=1, step_seconds=0.0, body=text
    )
    return seal_message(link.signer, replace(message, **changes))


def _put(link: ElasticLink, name: str, data: bytes) -> None:
    link.store.create(link.place.key(name), data)


def _proposal(link: ElasticLink, **changes: object) -> bytes:
    from thinwire.links.manifest import Manifest

    place = link.place
    told = Manifest(place.number, place.chain, link.rank, {}, (0, 1), (), (), Terms(place.step), 0.0, place.roster)
    return seal_text(link.signer, "manifest", place.chain, replace(told, **changes).to_bytes())


def _remember(link: ElasticLink, kept: list[bytes]) -> None:
    """Keep what worker 1 sends, and put the message of an earlier round there in the name of worker 2."""
    if kept:
        _put(link, "2", kept[0])
    raw = link.store.get(f"x/{link.place.number - 1:08d}/1", most=1 << 16)
    kept.extend([raw] if raw else [])


# Worker 2 is in the roster and never comes: its place is free for whoever wants to be it.
NO_KEY: dict[str, Callable[[ElasticLink], object]] = {
    "garbage for a message": lambda link: _put(link, "2", random.Random(1).randbytes(200)),
    "an empty message": lambda link: _put(link, "2", b""),
    "a message of another key": lambda link: _put(link, "2", _message(_as(link))),
    "a message that is too long": lambda link: _put(link, "2", bytes(1 << 16)),
    "garbage for a manifest": lambda link: _put(link, "manifest-0", b"garbage"),
    "three squatted manifests": lambda link: [_put(link, f"manifest-{k}", bytes(k)) for k in range(3)],
    "a manifest that is too long": lambda link: _put(link, "manifest-0", bytes(1 << 21)),
    "a manifest of another key": lambda link: _put(link, "manifest-0", _proposal(_as(link))),
    "a manifest with another name": lambda link: [
        _put(link, n, b"") for n in ("manifest-x", "manifest-00", "manifest-", "manifest-9")
    ],
    "a hello of another key": lambda link: _put(link, "hello-2", seal_text(_as(link).signer, "hello", link.place.chain)),
    "an end and a bye of another key": lambda link: [
        _put(link, f"{kind}-{id}", seal_text(_as(link, id=id).signer, kind, link.place.chain))
        for kind in ("end", "bye")
        for id in (0, 1)
    ],
    "a hello of a stranger": lambda link: _put(link, "hello-77", seal_text(_as(link, id=77).signer, "hello", link.place.chain)),
    "names that are no numbers": lambda link: [
        _put(link, n, b"") for n in ("²", "hello-²", "-1", "01", "1e3", "hello--1", "٣")
    ],
    "names below names": lambda link: [_put(link, n, b"") for n in ("a/b", "manifest-0x/c")],
    "a checkpoint of the far future": lambda link: [link.store.create(f"ckpt/9999999{k}-0", b"garbage") for k in range(3)],
    "checkpoints with odd names": lambda link: [link.store.create(f"ckpt/{n}", b"") for n in ("²-0", "0-²", "x", "-", "1-1-1")],
    "garbage for a roster": lambda link: link.store.create("roster/00000001-0", b"garbage"),
}


@pytest.mark.parametrize("name", NO_KEY)
def test_without_a_key_nobody_is_counted_and_the_others_go_on(name: str, store: Store) -> None:
    run = make_run(store, 3)
    links = [link_of(store, run, id) for id in (0, 1)]
    rounds = check_equal(run_rounds(links, 4, NO_KEY[name]))
    assert len(rounds) >= 4
    for one in rounds.values():
        assert {sender for sender, _ in one.messages} <= {0, 1}
    assert sum(len(one.messages) for one in rounds.values()) == 8, "all that the two sent was counted"


def test_a_message_of_an_earlier_round_or_of_another_worker_is_not_taken(store: Store) -> None:
    run, kept = make_run(store, 3), []
    links = [link_of(store, run, id) for id in (0, 1)]
    rounds = check_equal(run_rounds(links, 4, lambda link: _remember(link, kept)))
    assert len(kept) >= 3
    assert all({sender for sender, _ in one.messages} == {0, 1} for one in rounds.values())


# What worker 2, who has a key, may try.
STALLS = "a manifest that counts what never was"
WITH_A_KEY: dict[str, Callable[[ElasticLink], object]] = {
    STALLS: lambda link: _put(link, "manifest-0", _proposal(link, counted={2: hashlib.sha256(b"").hexdigest()})),
    "a manifest with a stranger": lambda link: _put(link, "manifest-0", _proposal(link, expected=(0, 1, 77))),
    "a manifest of another history": lambda link: _put(link, "manifest-0", _proposal(link, chain=bytes(32))),
    "a manifest of another round": lambda link: _put(link, "manifest-0", _proposal(link, number=7)),
    "a manifest by another": lambda link: _put(link, "manifest-0", _proposal(link, by=0)),
    "a manifest with a roster that is not there": lambda link: _put(
        link, "manifest-0", _proposal(link, roster="00000001-" + "0" * 64)
    ),
    "a manifest with an older roster": lambda link: _put(link, "manifest-0", _proposal(link, roster="")),
    "a manifest that goes back": lambda link: _put(link, "manifest-0", _proposal(link, terms=Terms(-1))),
    "a message of another round": lambda link: _put(link, "2", _message(link, number=5)),
    "a message in another's name": lambda link: _put(link, "2", _message(link, sender=1)),
    "a message of another history": lambda link: _put(link, "2", _message(link, chain=bytes(32))),
    "a message that is too long": lambda link: _put(link, "2", _message(link, bytes(LONGEST + 1))),
    "a step that cannot be": lambda link: _put(link, "2", _message(link, step=1 << 63)),
}


@pytest.mark.parametrize("name", [n for n in WITH_A_KEY if n != STALLS])
def test_a_worker_with_a_key_that_sends_what_is_unsound_is_left_out(name: str) -> None:
    store = MemoryStore()
    run = make_run(store, 3)
    links = [link_of(store, run, id) for id in (0, 1)]
    rounds = check_equal(run_rounds(links, 4, lambda link: WITH_A_KEY[name](_as(link, KEYS[2]))))
    for one in rounds.values():
        assert {sender for sender, _ in one.messages} <= {0, 1}
    assert sum(len(one.messages) for one in rounds.values()) == 8


def test_a_worker_that_says_hello_and_does_not_come_costs_the_others_a_deadline() -> None:
    store = MemoryStore()
    run = make_run(store, 3)
    links = [link_of(store, run, id) for id in (0, 1)]
    rounds = check_equal(run_rounds(links, 4, lambda link: _as(link, KEYS[2]).say("hello"), deadlines=True))
    assert len(rounds) >= 4
    assert all({sender for sender, _ in one.messages} <= {0, 1} for one in rounds.values())


def test_an_object_that_is_overwritten_stops_a_reader_and_never_makes_replicas_differ() -> None:
    store = MemoryStore()
    run = make_run(store, 2)
    links = [link_of(store, run, id) for id in (0, 1)]
    seen = run_rounds(links, 2)
    late = link_of(store, run, 1, timeout=0.3)
    number = seen[0][0].number
    store.objects[f"x/{number:08d}/0"] = b"overwritten"
    while late.place.number < number:
        assert late.next_round() is not None
    with pytest.raises(LinkError, match="was not there"):
        late.next_round()


@pytest.mark.parametrize("in_turns", [False, True], ids=["one is always first", "each is first in turns"])
def test_a_twin_with_the_same_key_is_found(in_turns: bool) -> None:
    store = MemoryStore()
    run = make_run(store, 1)
    one = link_of(store, run, 0)
    found(one)
    two = link_of(store, run, 0)
    while two.place.number < one.place.number:
        assert two.next_round() is not None
    with pytest.raises(LinkError, match="another process has the same key"):  # noqa: PT012
        for number in range(10):
            first, second = (two, one) if in_turns and number % 2 else (one, two)
            if number and not in_turns:
                two.next_round()
            exchange(first, b"one")
            exchange(second, b"two")


def test_a_worker_that_is_added_while_the_run_goes_on_takes_part() -> None:
    store = MemoryStore()
    run = make_run(store, 2)
    links = [link_of(store, run, id) for id in (0, 1)]
    owners, done = SignedRoster(store, run), []

    def add(_: ElasticLink) -> None:
        if not done:
            done.append(owners.add(OWNER, KEYS[2].public))

    check_equal(run_rounds(links, 3, add))
    assert done == [2]
    assert links[0].members == (0, 1, 2)
    new = link_of(store, run, 2)
    found(new)
    assert exchange(new, b"new").messages == ((2, b"new"),)


def test_a_new_worker_goes_on_alone_where_the_only_other_one_was_revoked() -> None:
    store = MemoryStore()
    run = make_run(store, 1)
    old = link_of(store, run, 0)
    run_rounds([old], 2)
    owners = SignedRoster(store, run)
    owners.add(OWNER, KEYS[1].public)
    owners.revoke(OWNER, KEYS[0].public)
    new = link_of(store, run, 1)
    found(new)
    exchange(new, b"new")
    assert new.members == (1,)
    while old.next_round() is not None:
        pass
    assert old.place == new.place
    with pytest.raises(LinkError, match="no longer in the roster"):
        exchange(old, b"revoked")


def test_a_clock_that_is_an_hour_off_changes_nothing() -> None:
    class Ahead(Patient):
        def now(self) -> float:
            return super().now() + 3600.0 if self.stopped is None else self.stopped

    store = MemoryStore()
    run = make_run(store, 3)
    links = [link_of(store, run, 0), link_of(store, run, 1, kind=Ahead)]
    rounds = check_equal(run_rounds(links, 4))
    assert [len(one.messages) for one in rounds.values()] == [2] * 4


# --- Mutations --------------------------------------------------------------------------------------------------------------


def test_no_mutated_message_is_accepted() -> None:
    store, chance = MemoryStore(), random.Random(0)
    link = link_of(store, make_run(store, 2), 0)
    sound = _message(link, b"what a worker says")
    where = {"number": 0, "sender": 0, "chain": link.place.chain}
    assert open_message(link.signer, sound, **where).body == b"what a worker says"
    for _ in range(2000):
        raw = bytearray(sound)
        for _ in range(chance.randrange(1, 4)):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        cut = bytes(raw[: chance.randrange(len(raw) + 1)]) if chance.random() < 0.3 else bytes(raw)
        if cut != sound:
            with pytest.raises(WireError):
                open_message(link.signer, cut, **where)


def test_mutated_objects_of_every_kind_are_refused() -> None:
    judged = list(fuzz(2000, seed=3))
    assert {one.kind for one in judged} >= {"message", "manifest", "round", "run.json", "roster", "checkpoint"}
    assert [one for one in judged if one.outcome.startswith(WRONG)] == []
