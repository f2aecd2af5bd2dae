"""The run on an object store: run.json, which its owner signed, and the roster of workers, which only the owner changes.

    run.json                  what is trained and how, the owner's public key, and the first roster
    roster/{revision:08}-{k}  a later roster; each names the one before by its SHA-256. k is 0 unless somebody squats there

Both are written once. Ids are given in order and never given again; a worker that is revoked keeps its id, so that the
messages that it sent before can still be verified. A roster counts from the round on that a manifest says: manifests name
it by a token of its revision and its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import ConfigError, LinkError, WireError
from thinwire.links.keys import SIGNATURE, PrivateKey, PublicKey
from thinwire.links.manifest import Roster, Store

RUN = "run.json"
FORMAT = 1
MOST = 1 << 20  # bytes of run.json and of a roster
MOST_WORKERS = 4096
SQUATS = 8  # keys of a roster that somebody else may have taken before its owner writes it
_CONTEXT = b"thinwire run 1\n"  # before what the owner signs: no message of a worker is taken for it
_MESSAGES = b"thinwire message 1\n"


@dataclass(frozen=True)
class Revision:
    """A roster.

    Attributes:
        number: 0 for that of run.json.
        keys: public keys; the id of a worker is its place.
        revoked: ids that may not take part any more.
        token: what manifests call it.
    """

    number: int
    keys: tuple[PublicKey, ...]
    revoked: frozenset[int]
    token: str

    @property
    def members(self) -> tuple[int, ...]:
        """Ids that may take part, in order."""
        return tuple(i for i in range(len(self.keys)) if i not in self.revoked)


@dataclass(frozen=True)
class Run:
    """What run.json says.

    Attributes:
        owner: who may change the roster.
        train: settings for `thinwire train --join`; empty where users bring their own loop.
        quorum: messages that a round needs at the least.
        keeper: the one worker that writes manifests, where the store has no conditional put.
        first: the roster of the start.
        digest: SHA-256 of run.json.
    """

    owner: PublicKey
    train: dict[str, Any]
    quorum: int
    keeper: int | None
    first: Revision
    digest: bytes = field(repr=False)

    @property
    def context(self) -> bytes:
        """What every signature of a worker is for besides its data: this run."""
        return _MESSAGES + self.digest


def create_run(
    store: Store,
    owner: PrivateKey,
    workers: Sequence[PublicKey],
    *,
    train: dict[str, Any] | None = None,
    quorum: int = 1,
    keeper: int | None = None,
) -> Run:
    """Write run.json.

    Args:
        store: where the run will be.
        owner: signs it, and is who may change the roster; need not be a worker.
        workers: public keys; the first is worker 0.
        train: settings for `thinwire train --join`.
        quorum: messages that a round needs at the least.
        keeper: the one worker that writes manifests, where the store has no conditional put.
    """
    _check_workers(workers, quorum, keeper)
    body = {
        "format": FORMAT,
        "owner": owner.public.text,
        "nonce": secrets.token_hex(16),  # two runs with the same settings and keys are two runs
        "quorum": quorum,
        "keeper": keeper,
        "train": train or {},
        "workers": [key.text for key in workers],
    }
    sealed = _seal(owner, body)
    if not store.create(RUN, sealed):
        raise ConfigError(f"there is a run at this address already: choose another one, or join it ({store!r})")
    return _parse_run(sealed)


def read_run(store: Store, *, owner: PublicKey | None = None) -> Run:
    """The run at an address.

    Args:
        store: where it is.
        owner: whose run it has to be; None takes the owner that run.json names.

    Raises:
        ConfigError: there is none, it is not signed by the owner that it names, or it is another's.
    """
    sealed = store.get(RUN, most=MOST)
    if sealed is None:
        raise ConfigError(f"there is no run at this address: its owner makes one with `thinwire run create` ({store!r})")
    try:
        run = _parse_run(sealed)
    except (WireError, ConfigError) as error:
        raise ConfigError(f"run.json is unsound: {error}") from error
    if owner is not None and run.owner != owner:
        raise ConfigError(f"this run is owned by {run.owner.text}, not by {owner.text}")
    return run


class SignedRoster(Roster):
    """The rosters of a run, read from its store and verified.

    Args:
        store: where the run is.
        run: what run.json says.
    """

    def __init__(self, store: Store, run: Run):
        """Know the first one."""
        self._store, self.run = store, run
        self._known = [run.first]
        self.first = run.first.token
        self.keys = dict(enumerate(run.first.keys))  # of all revisions that are known, for a `Signer`

    def newest(self, token: str) -> str:
        """The token of the newest roster that its owner has written, never an older one than `token`; one GET or more."""
        while self._read(len(self._known)):
            pass
        return max(token, self._known[-1].token)

    def members(self, token: str) -> tuple[int, ...]:
        """The ids that may take part under a roster, in order.

        Raises:
            WireError: the owner has written no such roster.
        """
        return self.revision(token).members

    def revision(self, token: str) -> Revision:
        """The roster of a token, read from the store where it is not known yet."""
        number = token.partition("-")[0]
        wanted = int(number) if len(number) == 8 and number.isdecimal() and number.isascii() else -1
        while wanted >= len(self._known) and self._read(len(self._known)):
            pass
        if not 0 <= wanted < len(self._known) or self._known[wanted].token != token:
            raise WireError(f"the owner of the run has written no roster {token[:100]!r}")
        return self._known[wanted]

    def latest(self) -> Revision:
        """The newest roster."""
        return self.revision(self.newest(self.first))

    def id_of(self, key: PublicKey) -> int | None:
        """The number of a worker in the newest roster that is known, None where it has none or was revoked."""
        newest = self._known[-1]
        found = newest.keys.index(key) if key in newest.keys else None
        return None if found in newest.revoked else found

    def add(self, owner: PrivateKey, key: PublicKey) -> int:
        """Write a roster with one more worker; its id."""
        newest = self.latest()
        if key in newest.keys:
            id = newest.keys.index(key)
            was = "was revoked, and a key that was revoked stays so" if id in newest.revoked else "is in the roster already"
            raise ConfigError(f"{key.text} {was}: it is worker {id}")
        self._write(owner, newest, [*newest.keys, key], newest.revoked)
        return len(newest.keys)

    def revoke(self, owner: PrivateKey, key: PublicKey) -> int:
        """Write a roster in which a worker may not take part any more; its id."""
        newest = self.latest()
        if key not in newest.keys or newest.keys.index(key) in newest.revoked:
            raise ConfigError(f"{key.text} is not in the roster, so that there is nothing to revoke")
        id = newest.keys.index(key)
        if self.run.keeper == id:
            raise ConfigError(f"worker {id} is the keeper, which alone writes manifests: without it the run would stop")
        if len(newest.members) <= self.run.quorum:
            raise ConfigError(f"{len(newest.members)} workers are left and a round needs {self.run.quorum}: add one first")
        self._write(owner, newest, newest.keys, newest.revoked | {id})
        return id

    def _write(self, owner: PrivateKey, before: Revision, keys: Sequence[PublicKey], revoked: frozenset[int]) -> None:
        if owner.public != self.run.owner:
            raise ConfigError(
                f"only {self.run.owner.text} owns the run and changes its roster; this key is {owner.public.text}"
            )
        _check_workers(keys, self.run.quorum, self.run.keeper)
        body = {
            "format": FORMAT,
            "run": self.run.digest.hex(),
            "revision": before.number + 1,
            "before": before.token,
            "workers": [key.text for key in keys],
            "revoked": sorted(revoked),
        }
        sealed = _seal(owner, body)
        if not any(self._store.create(key, sealed) for key in _roster_keys(before.number + 1)):
            raise LinkError(f"all {SQUATS} keys of the next roster are taken by others: remove those below roster/")
        if not self._read(before.number + 1) or self._known[-1].token != _token(before.number + 1, sealed):
            raise ConfigError("the roster was changed from elsewhere at the same moment: see `thinwire run show` and try again")

    def _read(self, number: int) -> bool:
        """Learn of one more revision; whether there is one. What others than the owner wrote in its place is passed over."""
        for key in _roster_keys(number):
            try:
                sealed = self._store.get(key, most=MOST)
                if sealed is None:
                    return False
                revision = _parse_roster(sealed, self.run, self._known[-1])
            except WireError:
                continue
            self._known.append(revision)
            self.keys.update(enumerate(revision.keys))
            return True
        return False


# --- Objects that the owner signs -----------------------------------------------------------------------------------------


def _roster_keys(number: int) -> list[str]:
    return [f"roster/{number:08d}-{k}" for k in range(SQUATS)]


def _token(number: int, sealed: bytes) -> str:
    return f"{number:08d}-{hashlib.sha256(sealed).hexdigest()}"


def _seal(owner: PrivateKey, body: dict[str, Any]) -> bytes:
    """A line of JSON and the owner's signature."""
    text = json.dumps(body, sort_keys=True).encode()
    return _sealed(text, owner.sign(_CONTEXT + text))


def _sealed(text: bytes, signature: bytes) -> bytes:
    return text + b"\n" + signature.hex().encode() + b"\n"


def _open(sealed: bytes, owner: PublicKey | None) -> dict[str, Any]:
    """What `_seal` sealed, signed by `owner`, or by the owner that it names.

    Raises:
        WireError: it is damaged or not signed by the owner.
    """
    text, _, signature = sealed.removesuffix(b"\n").rpartition(b"\n")
    try:
        body, raw = json.loads(text), bytes.fromhex(signature.decode())
        signer = owner or PublicKey(body["owner"])
        sound = len(raw) == SIGNATURE and signer.verify(_CONTEXT + text, raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"not an object that the owner of a run writes: {str(error)[:100]}") from error
    if not sound or sealed != _sealed(text, raw):  # written in one way only: the SHA-256 of it names the run
        raise WireError("the signature is not the owner's")
    if body.get("format") != FORMAT:
        raise WireError(f"format {str(body.get('format'))[:20]}, this version of thinwire reads {FORMAT}")
    return body


def _parse_run(sealed: bytes) -> Run:
    body, digest = _open(sealed, None), hashlib.sha256(sealed).digest()
    try:
        keys = [PublicKey(text) for text in body["workers"]]
        train, quorum, keeper = body["train"], body["quorum"], body["keeper"]
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"run.json lacks {error}") from error
    _check_workers(keys, quorum, keeper)
    if not isinstance(train, dict):
        raise WireError(f"train must be a table of settings, got {train!r:.100}")
    first = Revision(0, tuple(keys), frozenset(), _token(0, sealed))
    return Run(PublicKey(body["owner"]), train, quorum, keeper, first, digest)


def _parse_roster(sealed: bytes, run: Run, before: Revision) -> Revision:
    body = _open(sealed, run.owner)
    expected = {"run": run.digest.hex(), "revision": before.number + 1, "before": before.token}
    if any(body.get(name) != value for name, value in expected.items()):
        raise WireError("a roster of another run, or out of order")
    try:
        keys = tuple(PublicKey(text) for text in body["workers"])
        revoked = frozenset(body["revoked"])
        _check_workers(keys, run.quorum, run.keeper)
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise WireError(f"an unsound roster: {error}") from error
    if keys[: len(before.keys)] != before.keys or not before.revoked <= revoked <= frozenset(range(len(keys))):
        raise WireError("a roster in which ids changed")
    return Revision(before.number + 1, keys, revoked, _token(before.number + 1, sealed))


def _check_workers(keys: Sequence[PublicKey], quorum: object, keeper: object) -> None:
    if not 1 <= len(keys) <= MOST_WORKERS:
        raise ConfigError(f"a run has from 1 to {MOST_WORKERS} workers, got {len(keys)}")
    if len(set(keys)) < len(keys):
        double = next(key for key in keys if list(keys).count(key) > 1)
        raise ConfigError(f"each worker needs a key of its own, {double.text} is there twice")
    for name, value, allowed in (("quorum", quorum, range(1, len(keys) + 1)), ("keeper", keeper, range(len(keys)))):
        if (name, value) != ("keeper", None) and (isinstance(value, bool) or value not in allowed):
            raise ConfigError(f"{name} must be from {allowed[0]} to {allowed[-1]} with {len(keys)} workers, got {value!r}")
