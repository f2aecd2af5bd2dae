"""How a message travels: the links, and decorators that watch or disturb any of them."""

from thinwire.links.base import Done, Link, LinkDecorator, Peers, SoloLink, Ticket
from thinwire.links.cluster_link import ClusterLink
from thinwire.links.decided import Status
from thinwire.links.elastic import ElasticLink
from thinwire.links.flaky import Flaky
from thinwire.links.host import RunHost
from thinwire.links.manifest import FixedRoster, MemoryStore, Roster, Signer, Store, Unsigned
from thinwire.links.metered import Exchange, Meter, Metered, Totals, metered
from thinwire.links.sim import SimLink
from thinwire.links.straggler import Straggler
from thinwire.links.throttled import Throttled
from thinwire.links.torch import TorchLink, connect, disconnect, host_job
from thinwire.links.two_level import TwoLevel

__all__ = [
    "ClusterLink",
    "Done",
    "ElasticLink",
    "Exchange",
    "FixedRoster",
    "Flaky",
    "Link",
    "LinkDecorator",
    "MemoryStore",
    "Meter",
    "Metered",
    "Peers",
    "Roster",
    "RunHost",
    "Signer",
    "SimLink",
    "SoloLink",
    "Status",
    "Store",
    "Straggler",
    "Throttled",
    "Ticket",
    "TorchLink",
    "Totals",
    "TwoLevel",
    "Unsigned",
    "connect",
    "disconnect",
    "host_job",
    "metered",
]
