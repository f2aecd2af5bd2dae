"""`thinwire run`: make a run on an object store and change who may take part in it, or hold one for a cluster."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from thinwire.errors import ConfigError
from thinwire.links.host import RunHost
from thinwire.links.join import open_run, split_address
from thinwire.links.keys import PREFIX, PrivateKey, PublicKey
from thinwire.links.objects import ObjectStore
from thinwire.links.run import Run, SignedRoster, create_run
from thinwire.tools.config import RunConfig
from thinwire.tools.elastic import check_elastic, interrupted_by_sigterm
from thinwire.tools.flags import parse_run
from thinwire.tools.start import rehearse
from thinwire.tools.subcommands import choose_command

HELP = """\
Runs whose workers come and go: on an object store (needs the extra thinwire[store]), or on a cluster.

usage: thinwire run COMMAND URL [options]

  create        Make a run: its settings and the first roster, signed by its owner:
                thinwire run create s3://bucket/run --key owner.key --add ed25519:... --algorithm demo
  add           Let one more worker take part: thinwire run add URL ed25519:... --key owner.key
  revoke        Let a worker take part no longer: thinwire run revoke URL ed25519:... --key owner.key
  show          Print the settings and the roster.
  serve         Hold a run for workers that reach each other and this machine, until Ctrl-C; private networks only:
                thinwire run serve tcp://10.0.0.1:29400 --folder runs/one --members 4 --algorithm demo

URL is s3://bucket/run, gs://bucket/run, az://container/run or file:///folder; for serve it is tcp://host:port.
A worker joins with: thinwire train --join URL --key worker.key
on a cluster with:   thinwire train --join tcp://host:port --id 0 --keep folder
"""


def main(arguments: list[str]) -> int:
    """Dispatch to create, add, revoke, show or serve."""
    commands = {"create": _create, "add": _add, "revoke": _revoke, "show": _show, "serve": _serve}
    return choose_command("run", HELP, commands, arguments)


@dataclass(frozen=True, kw_only=True)
class CreateFlags:
    """Who owns the run and who may take part."""

    key: str = "thinwire.key"
    """The owner's key: a file of `thinwire keys new`."""
    add: tuple[str, ...] = ()
    """Public keys of the workers, or key files of yours; the first is worker 0. By default the owner alone."""
    own_loop: bool = False
    """The workers bring training loops of their own (thinwire.join), so that the run has no settings."""
    quorum: int = 1
    """Messages that a round needs at the least."""
    keeper: int | None = None
    """The one worker that writes manifests, for a store without conditional put; the run waits while it is away."""


def _create(arguments: list[str]) -> int:
    url, rest = _address("create", arguments)
    config, flags = parse_run("run create", rest, CreateFlags)
    train = _settings(config, own_loop=flags.own_loop)
    owner = PrivateKey.read(flags.key)
    workers = [_public(text) for text in flags.add] or [owner.public]
    store = ObjectStore(url, conditional=flags.keeper is None)
    if flags.keeper is None:
        store.probe("owner")
    run = create_run(store, owner, workers, train=train, quorum=flags.quorum, keeper=flags.keeper)
    _print(url, run, SignedRoster(store, run))
    return 0


def _settings(config: RunConfig, *, own_loop: bool) -> dict[str, Any]:
    """What `thinwire train --join` is told, once it is known to work; nothing where users bring their own loop."""
    if own_loop:
        return {}
    check_elastic(config)
    rehearse(config)
    return {name: value for name, value in asdict(config).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """Hold a run for a cluster."""

    folder: str = "thinwire-host"
    """Where this host keeps its settings and a note that the run has begun: give the same when it is started again."""
    members: int = 0
    """How many workers may take part; their ids are from 0 on. Needed."""
    own_loop: bool = False
    """The workers bring training loops of their own (thinwire.join), so that the run has no settings."""
    quorum: int = 1
    """Messages that a round needs at the least."""


def _serve(arguments: list[str]) -> int:
    url, rest = _address("serve", arguments)
    config, flags = parse_run("run serve", rest, ServeFlags)
    host, port = split_address(url)
    if flags.members < 1:
        raise ConfigError(f"say how many workers may take part: thinwire run serve {url} --members 4 ...")
    train = _settings(config, own_loop=flags.own_loop)
    with contextlib.closing(
        RunHost(host, port, workers=flags.members, folder=flags.folder, train=train, quorum=flags.quorum)
    ) as held:
        print(f"serving a run of {flags.members} workers at {held.url}", flush=True)
        with interrupted_by_sigterm(), contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


def _change(command: str, arguments: list[str]) -> tuple[SignedRoster, PrivateKey, PublicKey]:
    url, rest = _address(command, arguments)

    def flags(worker: str, /, *, key: str = "thinwire.key") -> tuple[str, str]:
        """Change the roster of a run; it counts from the next round on.

        Args:
            worker: a public key, or a key file.
            key: the owner's key.
        """
        return worker, key

    worker, key = tyro.cli(flags, prog=f"thinwire run {command} {url}", args=rest)
    owner = PrivateKey.read(key)
    _, _, roster = open_run(url, owner=owner.public.text)
    return roster, owner, _public(worker)


def _add(arguments: list[str]) -> int:
    roster, owner, worker = _change("add", arguments)
    print(f"added worker {roster.add(owner, worker)}: it may take part from the next round on")
    return 0


def _revoke(arguments: list[str]) -> int:
    roster, owner, worker = _change("revoke", arguments)
    print(f"revoked worker {roster.revoke(owner, worker)}: nothing that it sends counts from the next round on")
    return 0


def _show(arguments: list[str]) -> int:
    url, rest = _address("show", arguments)

    def flags(*, owner: str | None = None) -> str | None:
        """Print the settings and the roster of a run.

        Args:
            owner: the public key whose run it has to be.
        """
        return owner

    owner = tyro.cli(flags, prog=f"thinwire run show {url}", args=rest)
    _, run, roster = open_run(url, owner=owner)
    _print(url, run, roster)
    return 0


def _print(url: str, run: Run, roster: SignedRoster) -> None:
    newest = roster.latest()
    print(
        f"run {url}\nowner {run.owner.text}\nquorum {run.quorum}"
        + ("" if run.keeper is None else f"\nkeeper worker {run.keeper}")
    )
    settings = {**run.train, **run.train.get("settings", {})}
    settings.pop("settings", None)
    print("settings " + (", ".join(f"{name}={value}" for name, value in settings.items()) or "of the users' own loops"))
    print(f"roster, revision {newest.number}:")
    for id, key in enumerate(newest.keys):
        print(f"  worker {id}: {key.text}" + (" (revoked)" if id in newest.revoked else ""))


def _address(command: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The address of a run, which comes first, and the other arguments."""
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            return "URL", arguments
        raise ConfigError(f"the address of the run comes first: thinwire run {command} s3://bucket/run ...")
    return arguments[0], arguments[1:]


def _public(text: str) -> PublicKey:
    """A public key, given as itself or as the file of a key."""
    return PublicKey(text) if text.startswith(PREFIX) or not Path(text).is_file() else PrivateKey.read(text).public
