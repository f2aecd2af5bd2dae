"""Throttled: a fast link that behaves like a slow one, for experiments without a slow network."""

from __future__ import annotations

from thinwire.links.base import Link, LinkDecorator, Ticket, members_of, sizes_of
from thinwire.network import Network, Op
from thinwire.payload import Payload

_BLOCKED = 1e-3  # seconds; a shorter wait is the cost of asking, not of somebody being late


class Throttled(LinkDecorator):
    """Results arrive no sooner than a network of the given speed would bring them.

    The transfer starts when the last that takes part has posted the exchange and the one before it has ended, so that time
    between `post()` and `wait()` hides the wire, as it would on a real one. When the last worker posted is known from how long
    the fast link made this one wait; if it did not, the others were earlier.
    """

    def __init__(self, link: Link, network: Network):
        """Wrap `link`; `network` gives bandwidth and latency."""
        network.check(link.size)
        super().__init__(link)
        self.network = network
        self._free_at = 0.0

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Pass on, and note when the transfer started."""
        return _ThrottledTicket(self, self.link.post(payload, op), payload, op)


class _ThrottledTicket(Ticket):
    def __init__(self, throttled: Throttled, ticket: Ticket, payload: Payload, op: Op):
        self.throttled, self.ticket = throttled, ticket
        self.op: Op = op
        self.members = members_of(payload, op, throttled.rank, throttled.size)
        self.posted = throttled.now()

    def _finish(self) -> list[Payload]:
        wire = self.throttled
        asked = wire.now()
        result = self.ticket.wait()
        started = wire.now() if wire.now() - asked > _BLOCKED else self.posted
        seconds = wire.network.seconds(self.op, sizes_of(self.op, result, wire.size), self.members)
        wire._free_at = max(started, wire._free_at) + seconds
        wire.elapse(wire._free_at - wire.now())
        return result
