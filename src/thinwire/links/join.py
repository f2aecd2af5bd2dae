"""`thinwire.join`: take part in a run whose workers come and go, by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.links.elastic import ElasticLink
from thinwire.links.keys import Ed25519, PrivateKey, PublicKey
from thinwire.links.objects import ObjectStore
from thinwire.links.run import Run, SignedRoster, read_run


def join(
    url: str, *, key: str | Path | PrivateKey, owner: str | None = None, outage: float = 600.0, **options: Any
) -> ElasticLink:
    """Take part in the run at an address, as the worker that a key belongs to.

    Args:
        url: `s3://bucket/run`, `gs://bucket/run`, `az://container/run` or `file:///folder`, where `thinwire run create` made
            a run. Credentials come from the environment.
        key: this worker's key, or the file that `thinwire keys new` made.
        owner: the public key of the run's owner; another's run is refused. By default the one that run.json names is believed.
        outage: seconds that the store may be away.
        options: for `ElasticLink`: `patience`, `poll`, `timeout`, ...

    Returns:
        A link for any algorithm: then `opt.join()` before the first batch.

    Raises:
        ConfigError: there is no run, the key is not in its roster, or the store has no conditional put and no keeper is named.
    """
    own = key if isinstance(key, PrivateKey) else PrivateKey.read(key)
    store, run, roster = open_run(url, owner=owner, outage=outage)
    roster.latest()
    id = roster.id_of(own.public)
    if id is None:
        raise ConfigError(
            f"{own.public.text} is not in the roster of {url}, or was revoked: the owner of the run adds a worker with "
            f"`thinwire run add {url} {own.public.text}`"
        )
    if run.keeper is None:
        store.probe(id)
    signer = Ed25519(own, id, roster.keys, context=run.context)
    return ElasticLink(store, signer, roster=roster, **{"quorum": run.quorum, "keeper": run.keeper, **options})


def open_run(url: str, *, owner: str | None = None, outage: float = 600.0) -> tuple[ObjectStore, Run, SignedRoster]:
    """The store of a run, what run.json says, and its rosters.

    Args:
        url: of the run.
        owner: whose it has to be.
        outage: seconds that the store may be away.
    """
    store = ObjectStore(url, outage=outage)
    run = read_run(store, owner=None if owner is None else PublicKey(owner))
    store.conditional = run.keeper is None
    return store, run, SignedRoster(store, run)
