"""Resend: with tau > 0, a round that one worker could not read is sent once more, and the worker catches up.

The others have applied the round by the time they learn of it, so it can no longer be refused. The worker that could not
read it keeps it and all later ones back, asks in its next message (`Envelope.missing`), and when that message arrives all
workers gather the messages of the missing round once more. Then it applies what it kept back, in order. Until then its
replicated state is behind that of the others, and it takes no part in the divergence alarm.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.core.exchange import Exchange, Gathered
from thinwire.core.outgoing import Arrived
from thinwire.errors import NonFiniteRound, RoundAborted, WireError
from thinwire.payload import Payload

if TYPE_CHECKING:
    from thinwire.core.rounds import InFlight, RoundEngine

log = logging.getLogger("thinwire")

MOST_REQUESTS = 64  # at once: a worker has a few rounds to catch up with, and a few tries for each
MOST_TRIES = 3  # times that a round is asked for: what is damaged so often was wrong when it was sent


class Resend:
    """The rounds that this worker keeps back, and its own messages that others may ask for.

    Args:
        engine: whose rounds they are.
    """

    def __init__(self, engine: RoundEngine):
        """Nothing is missing."""
        self.engine = engine
        self.kept_back: deque[tuple[InFlight, Arrived | None]] = deque()
        self._sent: dict[int, Payload] = {}
        self._tries = 0
        self.active = False  # whether there are messages that may be asked for; the same on all workers

    @property
    def missing(self) -> bool:
        """Whether this worker waits for a round that it could not read."""
        return bool(self.kept_back)

    def watches(self, exchange: Exchange) -> bool:
        """Whether a message of this exchange may be asked for again."""
        engine = self.engine
        return isinstance(exchange, Gathered) and engine.tau > 0 and exchange.peers.size > 1 and not engine.opt.in_pairs

    def remember(self, number: int, exchange: Exchange) -> None:
        """Keep this worker's message of a round as long as somebody may ask for it."""
        if self.watches(exchange):
            self._sent[number], self.active = exchange.posted, True
            for old in [n for n in self._sent if n < number - 2 * self.engine.tau - 4]:
                del self._sent[old]

    def receive(self, flight: InFlight) -> Arrived | None:
        """Wait for a round; None where it is kept back, because it or an earlier one could not be read."""
        exchange, arrived, refusal = flight.exchange, None, None
        assert isinstance(exchange, Gathered)
        messages = exchange.ticket.wait()
        try:
            try:
                arrived = exchange.read(messages)
            except WireError as error:
                log.warning("round %d could not be read and is asked for again: %s", flight.number, error)
            self.engine.opt.link.commit()
        except RoundAborted as found:  # on all workers
            refusal = found
        if refusal is None and (arrived is None or self.kept_back):
            self.kept_back.append((flight, arrived))
            arrived = None
        if exchange.asked:  # also in a refused round, or nobody might keep the messages long enough
            self.exchange_missing()
            self.engine.begin(flight)
        if refusal is not None:
            raise refusal
        return arrived

    def exchange_missing(self) -> bool:
        """Send the rounds once more that somebody asks for; all workers take part. Whether there were any.

        Raises:
            WireError: on all workers, where a round is asked for that no worker keeps; on the one that asks, where it cannot
                read the round the last time either.
        """
        link, wanted = self.engine.opt.link, self.kept_back[0][0].number if self.kept_back else 0
        told = link.all_gather(Payload.of_bytes(wanted.to_bytes(8, "little"), purpose="resend", fixed=True))
        asked = {int.from_bytes(p.to_bytes(), "little"): p.sender for p in told}
        for number in sorted(asked.keys() - {0}):
            if number not in self._sent:
                raise WireError(f"round {number} is asked for, of which nothing is kept", rank=asked[number])
            mine = self._sent[number]
            messages = link.all_gather(Payload(mine.raw().clone(), purpose="resend"))
            if number == wanted:
                self._read_again(messages)
        self._catch_up()
        return bool(asked.keys() - {0})

    def _read_again(self, messages: list[Payload]) -> None:
        flight, _ = self.kept_back[0]
        assert flight.exchange is not None
        try:
            self.kept_back[0] = (flight, flight.exchange.read(messages))
            self._tries = 0
        except NonFiniteRound as refusal:  # the others, who could read it, have refused it
            log.warning("%s", refusal)
            self.kept_back.popleft()
            self.engine.aborted += 1
        except WireError:
            self._tries += 1
            if self._tries >= MOST_TRIES:
                raise

    def _catch_up(self) -> None:
        """Apply what was kept back, up to the next round that is missing."""
        while self.kept_back and (arrived := self.kept_back[0][1]) is not None:
            flight, _ = self.kept_back.popleft()
            self.engine.apply(flight, arrived)
            self.progress_lost(flight.which)

    def progress_lost(self, which: Sequence[int] | None = None) -> None:
        """Parameters, all or those with these numbers, were set to what all agree on: told to the rounds kept back."""
        for later, _ in self.kept_back:
            later.in_params &= which is not None and set(which).isdisjoint(later.which)

    def settle(self) -> None:
        """At the end of training and before a checkpoint: no worker may stay behind. All workers take part."""
        for _ in range(MOST_REQUESTS):
            if not self.exchange_missing():
                return
        raise WireError(f"rounds were asked for {MOST_REQUESTS} times one after the other, which no honest worker does")

    def reset(self) -> None:
        """Forget all of it."""
        self.kept_back.clear()
        self._sent.clear()
        self._tries, self.active = 0, False
