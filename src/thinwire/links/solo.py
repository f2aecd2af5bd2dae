"""SoloLink: a world of one. Single device is the size == 1 case of the same code, not another code path."""

from __future__ import annotations

from thinwire.links.base import Done, Link, Ticket, members_of
from thinwire.network import Op
from thinwire.payload import Payload


class SoloLink(Link):
    """The link of a worker that is alone: every exchange returns its own message."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def post(self, payload: Payload, op: Op) -> Ticket:
        """The mean of one message is the message itself, and so is the list of all; there is no partner."""
        members_of(payload, op, self.rank, self.size)
        return Done([payload.of(self.rank)])
