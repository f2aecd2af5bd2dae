"""SimLink: the end of a simulated wire. The exchange itself is in `thinwire.sim.World`."""

from __future__ import annotations

from typing import Protocol

from thinwire.links.base import Link, Ticket
from thinwire.network import Op
from thinwire.payload import Payload


class Switchboard(Protocol):
    """What a simulated link needs of the world it lives in."""

    @property
    def size(self) -> int:
        """How many workers there are."""
        ...

    def post(self, rank: int, payload: Payload, op: Op) -> Ticket:
        """Take a message from worker `rank`."""
        ...

    def step_taken(self, rank: int) -> None:
        """Charge worker `rank` for one local step."""
        ...

    def now(self, rank: int) -> float:
        """Seconds on the virtual clock of worker `rank`."""
        ...

    def elapse(self, rank: int, seconds: float) -> None:
        """Move the virtual clock of worker `rank` forward."""
        ...


class SimLink(Link):
    """One simulated worker's end of the wire; made by `World.run`."""

    def __init__(self, world: Switchboard, rank: int):
        """Join `world` as worker `rank`."""
        self._world, self._rank = world, rank

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._rank

    @property
    def size(self) -> int:
        """How many workers the world has."""
        return self._world.size

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Hand the message to the world; other workers run when this one waits."""
        return self._world.post(self._rank, payload, op)

    def tick(self) -> None:
        """Charge one local step to this worker's virtual clock."""
        self._world.step_taken(self._rank)

    def now(self) -> float:
        """Seconds on this worker's virtual clock."""
        return self._world.now(self._rank)

    def elapse(self, seconds: float) -> None:
        """Move this worker's virtual clock forward without waiting."""
        self._world.elapse(self._rank, seconds)
