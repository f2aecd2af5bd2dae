"""`thinwire.join`: take part in a run whose workers come and go, by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.links.cluster_link import ClusterLink
from thinwire.links.elastic import ElasticLink
from thinwire.links.host import read_hosted_run
from thinwire.links.keys import Ed25519, PrivateKey, PublicKey
from thinwire.links.manifest import number_of
from thinwire.links.objects import ObjectStore
from thinwire.links.register import Register
from thinwire.links.run import Run, SignedRoster, read_run

TCP = "tcp://"


def join(
    url: str,
    *,
    key: str | Path | PrivateKey | None = None,
    owner: str | None = None,
    id: int | None = None,
    keep: str | Path | None = None,
    outage: float = 600.0,
    **options: Any,
) -> ElasticLink:
    """Take part in the run at an address, as the worker that a key belongs to; on a cluster, as the one with a number.

    Args:
        url: `s3://bucket/run`, `gs://bucket/run`, `az://container/run` or `file:///folder`, where `thinwire run create` made
            a run. Credentials come from the environment. Or `tcp://host:port`, where `thinwire run serve` holds one for workers
            that reach each other.
        key: this worker's key, or the file that `thinwire keys new` made; on a cluster there are none.
        owner: the public key of the run's owner; another's run is refused. By default the one that run.json names is believed.
        id: this worker's number, on a cluster: no other worker has it, and it has the same when it is started again.
        keep: on a cluster, a folder in which this worker keeps checkpoints for itself: if all workers die, or the host does,
            those who kept some found the run again.
        outage: seconds that the store or the host may be away.
        options: for `ElasticLink`: `patience`, `poll`, `timeout`, ...

    Returns:
        A link for any algorithm: then `opt.join()` before the first batch.

    Raises:
        ConfigError: there is no run, the key is not in its roster, or the store has no conditional put and no keeper is named.
    """
    if url.startswith(TCP):
        if id is None or key is not None or owner is not None:
            raise ConfigError(f"on a cluster a worker has a number and no key: thinwire.join({url!r}, id=0)")
        return _join_cluster(url, id, keep, outage, options)
    if key is None or id is not None or keep is not None:
        raise ConfigError(f"on an object store a worker has a key, and no number or folder: thinwire.join({url!r}, key=file)")
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


def open_cluster(url: str, *, outage: float = 600.0) -> tuple[Register, dict[str, Any]]:
    """The register of a run on a cluster, and what its host says of it.

    Args:
        url: `tcp://host:port`.
        outage: seconds that the host may be away.
    """
    host, port = split_address(url)
    register = Register(host, port, outage=outage)
    return register, read_hosted_run(register)


def split_address(url: str) -> tuple[str, int]:
    """Host and port of a `tcp://` address."""
    host, _, port = url.removeprefix(TCP).rpartition(":")
    number = number_of(port)
    if not url.startswith(TCP) or not host or not 0 <= number < 1 << 16:
        raise ConfigError(f"the address of a cluster is tcp://host:port, got {url!r}")
    return host.strip("[]"), number


def _join_cluster(url: str, id: int, keep: str | Path | None, outage: float, options: dict[str, Any]) -> ClusterLink:
    register, run = open_cluster(url, outage=outage)
    if not 0 <= id < run["workers"]:
        raise ConfigError(f"the run at {url} has workers 0 to {run['workers'] - 1}, got id={id}")
    how = {"quorum": run["quorum"], **options}
    return ClusterLink(register, id, workers=run["workers"], keep=keep, run=run["name"], **how)
