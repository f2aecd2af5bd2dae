"""How a message travels: the links, and decorators that watch or disturb any of them."""

from thinwire.links.base import Done, Link, LinkDecorator, Peers, Ticket
from thinwire.links.flaky import Flaky
from thinwire.links.metered import Exchange, Meter, Metered, Totals, metered
from thinwire.links.sim import SimLink
from thinwire.links.solo import SoloLink
from thinwire.links.straggler import Straggler
from thinwire.links.throttled import Throttled
from thinwire.links.torch import TorchLink, connect, disconnect, host_job

__all__ = [
    "Done",
    "Exchange",
    "Flaky",
    "Link",
    "LinkDecorator",
    "Meter",
    "Metered",
    "Peers",
    "SimLink",
    "SoloLink",
    "Straggler",
    "Throttled",
    "Ticket",
    "TorchLink",
    "Totals",
    "connect",
    "disconnect",
    "host_job",
    "metered",
]
