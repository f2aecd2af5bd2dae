"""Churn: simulated workers that come, die, come back, are slow, or lose messages, on the logic of a real elastic run.

The links are `ElasticLink`s on one store in memory. Whoever looks at the store first waits until no other worker has an earlier
clock, so that what is in it at a time is what was written before that time: all is in the order of simulated time, and the
same from run to run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError
from thinwire.links.elastic import ElasticLink
from thinwire.links.manifest import MemoryStore, Store, Unsigned
from thinwire.links.signed import Message
from thinwire.network import per_worker

if TYPE_CHECKING:
    from thinwire.sim.world import World


class Killed(BaseException):
    """Ends a simulated worker in the middle of whatever it does."""


@dataclass(frozen=True)
class Churn:
    """What happens to the workers of an elastic run.

    Args:
        joins: seconds at which workers come that are not there from the start.
        deaths: (seconds, worker) for each death.
        returns: (seconds, worker) at which a worker that has died comes back, with nothing.
        death_rate: further deaths at random: the mean number per worker and second.
        restart: seconds after a death without such a return that a worker comes back, with nothing; None for never.
        loss: part of the messages that never arrive; at least one per round does.
        tail: part of the local steps that take longer.
        tail_factor: how many times longer.
        link: settings of the `ElasticLink`s, such as `quorum` and `patience`.
        seed: of what is random.
    """

    joins: Mapping[int, float] = field(default_factory=dict)
    deaths: Sequence[tuple[float, int]] = ()
    returns: Sequence[tuple[float, int]] = ()
    death_rate: float = 0.0
    restart: float | None = None
    loss: float = 0.0
    tail: float = 0.0
    tail_factor: float = 10.0
    link: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("loss", "tail"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}")
        for name in ("death_rate", "tail_factor"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)!r}")


class Habitat:
    """The store of an elastic world, and what becomes of its workers.

    Args:
        world: whose workers they are.
        churn: what happens to them.

    Attributes:
        store: where the objects of the run are.
        deaths: (seconds, worker) of the deaths that took place.
    """

    def __init__(self, world: World, churn: Churn):
        """Nobody is there yet."""
        self.world, self.churn, self.store = world, churn, MemoryStore()
        self.deaths: list[tuple[float, int]] = []
        self._gone = [False] * world.size
        self._random = [random.Random(f"{churn.seed} {rank}") for rank in range(world.size)]
        self._planned = [sorted(at for at, who in churn.deaths if who == rank) for rank in range(world.size)]
        self._next = [self._next_death(rank, 0.0) for rank in range(world.size)]
        up, latency = world.network.bandwidth, world.network.latency
        self._up, self._latency = per_worker("bandwidth", up, world.size), per_worker("latency", latency, world.size)
        self._down = per_worker("down", up if world.network.down is None else world.network.down, world.size)

    def link(self, rank: int) -> ElasticLink:
        """The link of one life of a worker."""
        return SimElasticLink(self, rank)

    def come(self, rank: int, *, first: bool) -> bool:
        """Set the clock of a worker to where a life of it begins; False where there is none."""
        clocks, churn = self.world.clocks, self.churn
        if first:
            clocks[rank] = max(clocks[rank], float(churn.joins.get(rank, 0.0)))
            return True
        self.deaths.append((clocks[rank], rank))
        planned = [at for at, who in churn.returns if who == rank and at > clocks[rank]]
        if not planned and churn.restart is None:
            return False
        clocks[rank] = min(planned) if planned else clocks[rank] + float(churn.restart or 0.0)
        self._next[rank] = self._next_death(rank, clocks[rank])
        return True

    def leave(self, rank: int) -> None:
        """A worker has ended for good."""
        self._gone[rank] = True

    def _next_death(self, rank: int, now: float) -> float | None:
        planned = [at for at in self._planned[rank] if at > now]
        rate = self.churn.death_rate
        drawn = [now + self._random[rank].expovariate(rate)] if rate else []
        return min([*planned[:1], *drawn], default=None)

    def can_go_on(self, rank: int) -> bool:
        """Whether no other worker has an earlier clock."""
        clocks = self.world.clocks
        return all(self._gone[r] or (clocks[rank], rank) <= (clocks[r], r) for r in range(self.world.size))

    def wait_for_turn(self, rank: int) -> None:
        """Let the workers with earlier clocks run first; here a worker may die."""
        death = self._next[rank]
        if death is not None and self.world.clocks[rank] >= death:
            raise Killed
        self.world.yield_turn(rank, ready=self.can_go_on)

    def spend(self, rank: int, *, up: int = 0, down: int = 0) -> None:
        """Charge one request that moves so many bytes."""
        self.world.clocks[rank] += self._latency[rank] + 8 * up / self._up[rank] + 8 * down / self._down[rank]

    def slower(self, rank: int) -> float:
        """How many times longer the next local step of a worker takes."""
        return self.churn.tail_factor if self.churn.tail and self._random[rank].random() < self.churn.tail else 1.0

    def is_lost(self, number: int, rank: int) -> bool:
        """Whether the message of a worker in a round never arrives."""
        if not self.churn.loss:
            return False
        draw = random.Random(f"{self.churn.seed} round {number}")
        lost = [draw.random() < self.churn.loss for _ in range(self.world.size)]
        return lost[rank] and not (all(lost) and number % self.world.size == rank)


class SimElasticLink(ElasticLink):
    """The end of an elastic run in the simulator; made by `World.run`.

    Args:
        habitat: the world's.
        rank: this worker.
    """

    def __init__(self, habitat: Habitat, rank: int):
        """Join nothing yet."""
        self._habitat, self._rank = habitat, rank
        settings: dict[str, Any] = {"poll": 0.01, "first_wait": 1.0, **habitat.churn.link}
        super().__init__(_SimStore(habitat, rank), Unsigned(rank), roster=range(habitat.world.size), **settings)

    def tick(self) -> None:
        """Charge one local step to this worker's virtual clock."""
        self._habitat.world.step_taken(self._rank, self._habitat.slower(self._rank))

    def now(self) -> float:
        """Seconds on this worker's virtual clock."""
        return self._habitat.world.now(self._rank)

    def elapse(self, seconds: float) -> None:
        """Move this worker's virtual clock forward, and let others run up to there."""
        self._habitat.world.elapse(self._rank, seconds)
        self._habitat.wait_for_turn(self._rank)

    def _send(self, raw: bytes, message: Message) -> bool:
        return not self._habitat.is_lost(message.number, self._rank) and super()._send(raw, message)


class _SimStore(Store):
    """The store as one worker reaches it: in the order of simulated time, over its own wire."""

    def __init__(self, habitat: Habitat, rank: int):
        self._habitat, self._rank = habitat, rank

    def create(self, key: str, data: bytes) -> bool:
        self._habitat.spend(self._rank, up=len(data))
        self._habitat.wait_for_turn(self._rank)
        return self._habitat.store.create(key, data)

    def get(self, key: str, *, most: int) -> bytes | None:
        self._habitat.wait_for_turn(self._rank)
        found = self._habitat.store.get(key, most=most)
        self._habitat.spend(self._rank, down=len(found or b""))
        return found

    def list(self, prefix: str) -> dict[str, int]:
        self._habitat.spend(self._rank)
        self._habitat.wait_for_turn(self._rank)
        return self._habitat.store.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._habitat.spend(self._rank)
        self._habitat.wait_for_turn(self._rank)
        self._habitat.store.delete(keys)
