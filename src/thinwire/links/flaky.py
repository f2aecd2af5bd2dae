"""Flaky: a link on which chosen rounds fail, for testing what an algorithm does then."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.errors import RoundAborted, check_choice
from thinwire.links.base import Link, LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.payload import Payload


class Flaky(LinkDecorator):
    """Aborts chosen rounds on every worker alike.

    Args:
        link: the link to wrap.
        rounds: numbers of the rounds to abort, from 1; control messages are not counted. The same set on all workers.
        at: "commit" lets the exchange take place and fails the vote; "exchange" fails the wait for the result.
    """

    def __init__(self, link: Link, rounds: Collection[int], *, at: str = "commit"):
        """Wrap `link`."""
        check_choice("at", at, ("commit", "exchange"))
        super().__init__(link)
        self.rounds, self.at = frozenset(rounds), at
        self._posted = 0
        self._waited = 0

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Post on the wrapped link, and count rounds."""
        ticket = self.link.post(payload, op)
        if payload.purpose != "round":
            return ticket
        self._posted += 1
        return _FlakyTicket(self, ticket, self._posted)

    def commit(self) -> None:
        """Fail the vote of a chosen round."""
        if self.at == "commit" and self._waited in self.rounds:
            raise RoundAborted(f"round {self._waited} was aborted by a Flaky link at commit")
        self.link.commit()


class _FlakyTicket(Ticket):
    def __init__(self, flaky: Flaky, ticket: Ticket, number: int):
        self.flaky, self.ticket, self.number = flaky, ticket, number

    def _finish(self) -> list[Payload]:
        result = self.ticket.wait()
        self.flaky._waited = self.number
        if self.flaky.at == "exchange" and self.number in self.flaky.rounds:
            raise RoundAborted(f"round {self.number} was aborted by a Flaky link in the exchange")
        return result
