"""Throttled: a fast link that behaves like a slow one, for experiments without a slow network."""

from __future__ import annotations

from thinwire.links.base import Link, LinkDecorator, Ticket, members_of, sizes_of
from thinwire.network import Network, Op, Wire
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
        self.wire = Wire(network, link.size)

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Post on the wrapped link, and note when the transfer started."""
        return _ThrottledTicket(self, self.link.post(payload, op), payload, op)


class _ThrottledTicket(Ticket):
    def __init__(self, throttled: Throttled, ticket: Ticket, payload: Payload, op: Op):
        self.throttled, self.ticket = throttled, ticket
        self.op: Op = op
        self.members = members_of(payload, op, throttled.rank, throttled.size)
        self.posted = throttled.now()

    def _finish(self) -> list[Payload]:
        link = self.throttled
        asked = link.now()
        result = self.ticket.wait()
        started = link.now() if link.now() - asked > _BLOCKED else self.posted
        end = link.wire.send(started, self.op, sizes_of(self.op, result, link.size), self.members)
        link.elapse(end - link.now())
        return result
