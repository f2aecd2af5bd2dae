"""Keys, run.json and rosters: who may take part, and what somebody without the owner's key can do about it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'thinwire[store]'")

from thinwire.errors import ConfigError, WireError
from thinwire.links.keys import Ed25519, PrivateKey, PublicKey
from thinwire.links.manifest import MemoryStore
from thinwire.links.run import MOST, SQUATS, Run, SignedRoster, create_run, read_run

OWNER, *WORKERS = (PrivateKey.new() for _ in range(6))
PUBLIC = [key.public for key in WORKERS]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore) -> Run:
    return create_run(store, OWNER, PUBLIC[:3], train={"algorithm": "demo"}, quorum=2)


# --- Keys -------------------------------------------------------------------------------------------------------------------


def test_a_key_is_read_as_it_was_written_and_others_cannot_read_it(tmp_path: Path) -> None:
    path = tmp_path / "worker.key"
    OWNER.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert PrivateKey.read(path).public == OWNER.public
    with pytest.raises(ConfigError, match="exists already: a key is never overwritten"):
        OWNER.write(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may read the key .* \(mode 640\): chmod 600"):
        PrivateKey.read(path)


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"cannot read the key .*: No such file"):
        PrivateKey.read(path)
    path.write_bytes(b"-----BEGIN PRIVATE KEY-----\nnonsense\n" + bytes(10_000))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a key that `thinwire keys new` made"):
        PrivateKey.read(path)
    for text in ("", "ed25519:", "ed25519:AAAA", "rsa:" + PUBLIC[0].text[8:], PUBLIC[0].text + "A", PUBLIC[0].text[:-2] + "!!"):
        with pytest.raises(ConfigError, match="a public key is ed25519: and 44 characters"):
            PublicKey(text)
    assert PublicKey(PUBLIC[0].text) == PUBLIC[0] != PUBLIC[1]


def test_a_signature_is_of_one_worker_one_text_and_one_run(run: Run) -> None:
    keys = dict(enumerate(PUBLIC))
    mine, other = (Ed25519(WORKERS[1], 1, keys, context=context) for context in (run.context, b"another run"))
    signature = mine.sign(b"data")
    assert len(signature) == mine.nbytes
    assert mine.verify(1, b"data", signature)
    assert not mine.verify(0, b"data", signature)
    assert not mine.verify(99, b"data", signature)
    assert not mine.verify(1, b"date", signature)
    assert not mine.verify(1, b"data", signature[:-1])
    assert not mine.verify(1, b"data", bytes(64))
    assert not other.verify(1, b"data", signature), "what was signed in one run is worth nothing in another"


# --- run.json ---------------------------------------------------------------------------------------------------------------


def test_a_run_is_read_as_its_owner_wrote_it(store: MemoryStore, run: Run) -> None:
    found = read_run(store, owner=OWNER.public)
    assert found == run
    assert found.train == {"algorithm": "demo"} and found.quorum == 2 and found.keeper is None
    assert found.first.members == (0, 1, 2)
    assert create_run(MemoryStore(), OWNER, PUBLIC[:3], train={"algorithm": "demo"}, quorum=2).digest != run.digest


def test_there_is_one_run_at_an_address(store: MemoryStore, run: Run) -> None:
    with pytest.raises(ConfigError, match="there is a run at this address already"):
        create_run(store, OWNER, PUBLIC[:3])
    with pytest.raises(ConfigError, match="there is no run at this address"):
        read_run(MemoryStore())
    with pytest.raises(ConfigError, match=r"this run is owned by .*, not by"):
        read_run(store, owner=PUBLIC[0])


@pytest.mark.parametrize(
    ("workers", "settings", "why"),
    [
        ([], {}, "a run has from 1 to 4096 workers, got 0"),
        ([PUBLIC[0], PUBLIC[0]], {}, "each worker needs a key of its own"),
        (PUBLIC[:2], {"quorum": 3}, "quorum must be from 1 to 2 with 2 workers, got 3"),
        (PUBLIC[:2], {"quorum": 0}, "quorum must be from 1 to 2"),
        (PUBLIC[:2], {"keeper": 2}, "keeper must be from 0 to 1 with 2 workers, got 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(workers: list[PublicKey], settings: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        create_run(MemoryStore(), OWNER, workers, **settings)


def test_no_change_of_run_json_goes_unnoticed(store: MemoryStore, run: Run) -> None:
    sound, chance = store.objects["run.json"], random.Random(0)
    for _ in range(300):
        store.objects["run.json"] = _mutated(sound, chance)
        with pytest.raises(ConfigError, match=r"run\.json is unsound"):
            read_run(store)
    store.objects["run.json"] = b"[" * MOST
    with pytest.raises(ConfigError, match=r"run\.json is unsound"):
        read_run(store)
    store.objects["run.json"] = bytes(MOST + 1)
    with pytest.raises(WireError, match="at most"):
        read_run(store)


def _mutated(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw) - 1)
    kind = chance.randrange(4)
    if kind == 0:
        return raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at]
    if kind == 2:
        return raw[:at] + chance.randbytes(chance.randrange(1, 9)) + raw[at:]
    return chance.randbytes(chance.randrange(2000))


# --- Rosters ----------------------------------------------------------------------------------------------------------------


def test_workers_are_added_and_revoked_and_ids_never_change(store: MemoryStore, run: Run) -> None:
    roster, reader = SignedRoster(store, run), SignedRoster(store, run)
    assert roster.add(OWNER, PUBLIC[3]) == 3
    assert roster.revoke(OWNER, PUBLIC[1]) == 1
    assert roster.add(OWNER, PUBLIC[4]) == 4
    token = reader.newest(reader.first)
    assert token > reader.first
    assert reader.members(token) == (0, 2, 3, 4)
    assert reader.members(reader.first) == (0, 1, 2), "an old round is read under its own roster"
    assert reader.id_of(PUBLIC[4]) == 4 and reader.id_of(PUBLIC[1]) is None
    assert set(reader.keys) == {0, 1, 2, 3, 4}, "messages from before a revocation can still be verified"
    assert reader.newest(token) == token


def test_a_manifest_can_name_a_roster_only_once_it_is_written(store: MemoryStore, run: Run) -> None:
    roster, reader = SignedRoster(store, run), SignedRoster(store, run)
    for token in ("", "0", "x", "00000001-" + "0" * 64, "00000000-" + "0" * 64, "-0000001-", "99999999-00", "²²²²²²²²-00"):
        with pytest.raises(WireError, match="has written no roster"):
            reader.members(token)
    roster.add(OWNER, PUBLIC[3])
    assert reader.members(roster.newest(roster.first)) == (0, 1, 2, 3), "read from the store when it is first named"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r.add(WORKERS[0], PUBLIC[3]), "owns the run and changes its roster"),
        (lambda r: r.add(OWNER, PUBLIC[0]), "is in the roster already: it is worker 0"),
        (lambda r: r.revoke(OWNER, PUBLIC[4]), "is not in the roster"),
        (lambda r: (r.revoke(OWNER, PUBLIC[0]), r.revoke(OWNER, PUBLIC[1])), "2 workers are left and a round needs 2"),
        (lambda r: (r.revoke(OWNER, PUBLIC[0]), r.add(OWNER, PUBLIC[0])), "a key that was revoked stays so"),
    ],
)
def test_changes_that_cannot_be_are_refused(store: MemoryStore, run: Run, change: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        change(SignedRoster(store, run))  # type: ignore[operator]


def test_a_keeper_is_not_revoked(store: MemoryStore) -> None:
    kept = create_run(store, OWNER, PUBLIC[:3], keeper=1)
    with pytest.raises(ConfigError, match="worker 1 is the keeper"):
        SignedRoster(store, kept).revoke(OWNER, PUBLIC[1])


def test_what_others_write_in_place_of_a_roster_counts_for_nothing(store: MemoryStore, run: Run) -> None:
    elsewhere = MemoryStore()
    other = create_run(elsewhere, OWNER, PUBLIC[:3])
    SignedRoster(elsewhere, other).add(OWNER, PUBLIC[4])
    hostile = SignedRoster(MemoryStore(), run)
    body = {"format": 1, "owner": PUBLIC[4].text, "workers": [PUBLIC[4].text], "revoked": []}
    forged = json.dumps(body).encode()
    squats = [
        b"",
        b"garbage",
        bytes(MOST + 1),
        elsewhere.objects["roster/00000001-0"],  # signed by the owner, for another run
        store.objects["run.json"],  # signed by the owner, not a roster
        forged + b"\n" + WORKERS[4].sign(b"thinwire run 1\n" + forged).hex().encode() + b"\n",
    ]
    for k, squat in enumerate(squats):
        store.objects[f"roster/00000001-{k}"] = squat
    reader = SignedRoster(store, run)
    assert reader.newest(reader.first) == reader.first
    assert hostile.newest(hostile.first) == hostile.first
    assert SignedRoster(store, run).add(OWNER, PUBLIC[3]) == 3, "the owner writes beside them"
    assert reader.members(reader.newest(reader.first)) == (0, 1, 2, 3)
    assert len(squats) < SQUATS


def test_a_roster_that_changes_ids_is_refused_even_from_its_owner(store: MemoryStore, run: Run) -> None:
    roster = SignedRoster(store, run)
    with pytest.raises(ConfigError):
        roster._write(OWNER, run.first, [PUBLIC[1], PUBLIC[0], PUBLIC[2]], frozenset())
    assert SignedRoster(store, run).latest().keys == run.first.keys


def test_two_changes_at_once_do_not_lose_one_of_them_silently(store: MemoryStore, run: Run) -> None:
    one, two = SignedRoster(store, run), SignedRoster(store, run)
    before = two.latest()
    one.add(OWNER, PUBLIC[3])
    with pytest.raises(ConfigError, match="changed from elsewhere at the same moment"):
        two._write(OWNER, before, [*before.keys, PUBLIC[4]], frozenset())
    assert SignedRoster(store, run).latest().keys == tuple(PUBLIC[:4])
