"""The door of an elastic run: whoever joins is compared with what the run was begun with, and refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from thinwire.codecs.wire import VERSION
from thinwire.core import gates
from thinwire.links.elastic import ElasticLink

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

_COUNTERS = ("steps so far", "rounds so far")


def started_with(link: ElasticLink, opt: Algorithm) -> dict[str, Any]:
    """What a worker was started with, for the door; before anything changes it, such as a schedule of the learning rate.

    Args:
        link: this worker's end of the run.
        opt: this worker's optimizer, as it was made.
    """
    told = {"wire version": VERSION, **opt.fingerprint()}
    values = {name: value for name, value in told.items() if name.startswith(gates.STARTING)}
    settings = {name: value for name, value in told.items() if name not in values and name not in _COUNTERS}
    settings |= {"checkpoint_every": link.checkpoint_every, "quorum": link.quorum, "keeper": link.keeper}
    return json.loads(json.dumps({"settings": gates.condensed(settings), "values": values}, default=str))


def check_door(link: ElasticLink, mine: dict[str, Any], *, compare_values: bool) -> None:
    """Refuse to join a run with other settings; the first worker's are those of the run.

    Args:
        link: this worker's end of the run.
        mine: see `started_with`.
        compare_values: whether starting values count too: not for one who takes a checkpoint.

    Raises:
        FingerprintMismatch: naming what differs, and both values.
    """
    theirs = link.archive.settle_settings(mine)
    where = ("in this run", "on this worker")
    gates.compare_settings(theirs.get("settings"), mine["settings"], where)
    if compare_values:
        gates.compare_settings(theirs.get("values"), mine["values"], where)
