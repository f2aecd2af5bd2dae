"""Metered: counts what crosses a link. Bytes are counted here and nowhere else."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field

from thinwire.errors import RoundAborted
from thinwire.links.base import Link, LinkDecorator, Ticket, members_of, sizes_of
from thinwire.network import Op
from thinwire.payload import Payload


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one exchange cost this worker.

    Attributes:
        purpose: "round", or "handshake" and "alarm" for the small control messages.
        op: "mean", "gather", "broadcast", "pair", "deal" or "spread".
        payload: length of this worker's message in bytes.
        sent: bytes that left this worker, as the link's topology has it.
        received: bytes that reached it.
        seconds: time spent waiting for the result, on the link's clock.
    """

    purpose: str
    op: Op
    payload: int
    sent: int
    received: int
    seconds: float


@dataclass
class Totals:
    """Sums over all exchanges so far."""

    rounds: int = 0
    payload: int = 0
    sent: int = 0
    received: int = 0
    waiting: float = 0.0

    def add(self, exchange: Exchange) -> None:
        """Count one more; control messages count as bytes and waiting, not as rounds."""
        self.rounds += exchange.purpose == "round"
        self.payload += exchange.payload
        self.sent += exchange.sent
        self.received += exchange.received
        self.waiting += exchange.seconds


@dataclass
class Meter:
    """The totals, those of each purpose, the newest exchanges one by one, and what a resumed run had to send again.

    Totals go on from those of a checkpoint; purposes are counted since the meter was made.
    """

    totals: Totals = field(default_factory=Totals)
    purposes: dict[str, Totals] = field(default_factory=dict)
    recent: deque[Exchange] = field(default_factory=lambda: deque(maxlen=4096))
    repeated: Totals = field(default_factory=Totals)
    _repeat: bool = False

    def add(self, exchange: Exchange) -> None:
        """Count one exchange."""
        if self._repeat and exchange.purpose == "handshake":
            self._repeat = False
            self.repeated.add(exchange)
        else:
            self.totals.add(exchange)
        self.purposes.setdefault(exchange.purpose, Totals()).add(exchange)
        self.recent.append(exchange)

    def last(self, purpose: str) -> Exchange | None:
        """The newest exchange of a purpose, where it is among the recent ones."""
        return next((exchange for exchange in reversed(self.recent) if exchange.purpose == purpose), None)

    def state_dict(self) -> dict[str, float]:
        """The totals, so that a resumed run goes on counting."""
        return asdict(self.totals)

    def load_state_dict(self, state_dict: dict[str, float], *, handshake_repeats: bool = False) -> None:
        """Go on counting from saved totals.

        Args:
            state_dict: of `state_dict()`.
            handshake_repeats: the saved totals hold the handshake that comes next already. It is then counted in `repeated`, so
                that the totals of a resumed run are those of an uninterrupted one.
        """
        counts = {name: int(state_dict[name]) for name in ("rounds", "payload", "sent", "received")}
        self.totals = Totals(**counts, waiting=float(state_dict["waiting"]))
        self._repeat = handshake_repeats


class Metered(LinkDecorator):
    """A link that keeps a `meter` of everything that crosses it."""

    def __init__(self, link: Link):
        """Wrap `link`."""
        super().__init__(link)
        self.meter = Meter()

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Post on the wrapped link; the cost is counted when the result is there."""
        return _MeteredTicket(self, self.link.post(payload, op), payload, op)


def metered(link: Link) -> tuple[Link, Meter]:
    """A link that is metered, and its meter: the link itself where it, or one that it is around, counts already."""
    inside = link
    while isinstance(inside, LinkDecorator):
        if isinstance(inside, Metered):
            return link, inside.meter
        inside = inside.link
    around = Metered(link)
    return around, around.meter


class _MeteredTicket(Ticket):
    def __init__(self, metered: Metered, ticket: Ticket, payload: Payload, op: Op):
        self.metered, self.ticket = metered, ticket
        self.op: Op = op
        self.purpose, self.nbytes, self.due = payload.purpose, payload.nbytes, payload.due
        self.dealt = payload.dealt or (payload.nbytes,) * len(payload.due)
        self.members = members_of(payload, op, metered.rank, metered.size)

    def _finish(self) -> list[Payload]:
        started = self.metered.link.now()
        try:
            result = self.ticket.wait()
        except RoundAborted:  # it came to nothing, but it did travel
            self._book([self.nbytes] * len(self.members), started)
            raise
        self._book(sizes_of(self.op, result, len(self.members)), started)
        return result

    def _book(self, sizes: list[int], started: float) -> None:
        link = self.metered.link
        seconds = link.now() - started
        straight = link.straight_traffic(self.dealt, self.due) if self.due else None
        sent, received = straight or link.traffic(self.op, sizes)
        self.metered.meter.add(Exchange(self.purpose, self.op, self.nbytes, sent, received, seconds))
