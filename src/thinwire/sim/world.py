"""World: N simulated workers in one process, running ordinary training code, with a clock of their own.

    world = World(8, network=Network(bandwidth=100e6, latency=0.02), step_time=0.1)
    results = world.run(lambda link: train(link))       # the same train() as under torchrun

Results are deterministic: workers run one at a time in a fixed order and reductions go in rank order. Simulated time is
apart from wall time: a local step adds `step_time` to its worker's clock; an exchange ends at

    max over workers of the time they posted it  +  hops * latency  +  bytes / bandwidth

and a worker that waits for it has its clock moved there, so computing between `post()` and `wait()` hides the wire. Of a swap
in pairs, "workers" are the two of a pair: no other worker is waited for, and each pair has a wire of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from thinwire.errors import ConfigError, LinkError, check_whole_number
from thinwire.links.base import Link
from thinwire.links.sim import SimLink
from thinwire.links.two_level import TwoLevel
from thinwire.network import Network, per_worker
from thinwire.sim.baton import Baton, random_state, seed_everything, set_random_state
from thinwire.sim.channel import Channel
from thinwire.sim.churn import Churn, Habitat, Killed

T = TypeVar("T")


class World:
    """N simulated workers joined by a simulated network.

    Args:
        size: number of workers.
        network: bandwidth and latency; unlimited by default.
        step_time: seconds that one local step takes, one number or one per worker (stragglers); None charges the wall
            time that the worker really computed on this machine.
        seed: worker r starts with torch's, numpy's and Python's global generators seeded by seed + r.
        churn: workers come and go: their links are elastic, `run` calls `worker` once for each life of a worker, and what a
            worker returned that is dead for good is None. Exchanges go through a store, not over rings.
        sites: group the workers into so many sites: their links are `TwoLevel` ones, `network` is that between sites, with one
            value for all or one per site, and each worker is a member of a site.
        inside: the network inside a site, the same in all of them; unlimited by default.

    Attributes:
        clocks: simulated seconds of each worker.
        habitat: with `churn`, the store of the run and the deaths that took place.
    """

    def __init__(
        self,
        size: int,
        *,
        network: Network | None = None,
        step_time: float | Sequence[float] | None = None,
        seed: int = 0,
        churn: Churn | None = None,
        sites: int | None = None,
        inside: Network | None = None,
    ):
        """Make the world; nothing runs yet."""
        check_whole_number("size", size)
        if sites is not None:
            check_whole_number("sites", sites)
            if size % sites:
                raise ConfigError(f"{size} workers do not divide into {sites} sites of equal size")
            if churn is not None:
                raise ConfigError("the members of a site cannot come and go: give churn or sites, not both")
        self.sites, self.inside = sites, inside or Network()
        self.network = network or Network()
        self.network.check(size if sites is None else sites)
        self.inside.check(size if sites is None else size // sites)
        self.step_time = None if step_time is None else per_worker("step_time", step_time, size)
        if self.step_time is not None and not all(seconds >= 0 for seconds in self.step_time):
            raise ConfigError(f"step_time must be zero or more seconds, got {step_time!r}")
        self.size, self.seed, self.churn = size, seed, churn
        self.clocks = [0.0] * size
        self.habitat: Habitat | None = None
        self._running = False

    def run(self, worker: Callable[[Link], T]) -> list[T]:
        """Run `worker(link)` on every simulated worker and return what each returned, in rank order.

        If a worker raises, the others are stopped at their next exchange and its exception is raised here, with a note that
        names the rank.
        """
        if self._running:
            raise ConfigError("this World is already running; make another one")
        self._reset()
        results: list[T | None] = [None] * self.size
        threads = [
            threading.Thread(target=self._live, args=(rank, worker, results), name=f"sim-worker-{rank}", daemon=True)
            for rank in range(self.size)
        ]
        caller_random = random_state()
        self._running = True
        try:
            for thread in threads:
                thread.start()
            self._baton.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(timeout=0.5)  # a bounded wait, so that Ctrl-C reaches the main thread
        except KeyboardInterrupt:
            self.failure = (-1, KeyboardInterrupt())  # workers leave at their next exchange
            raise
        finally:
            self._running = False
            set_random_state(caller_random)
        if self.failure is not None:
            rank, error = self.failure
            error.add_note(f"raised by simulated worker {rank} of {self.size}")
            raise error
        return results  # type: ignore[return-value]

    @property
    def seconds(self) -> float:
        """Simulated time so far: the clock of the latest worker."""
        return max(self.clocks)

    # What channels and links ask for.

    def step_taken(self, rank: int, times: float = 1.0) -> None:
        """Charge one local step, or one that took so many times longer."""
        if self.step_time is None:
            self._charge_wall_time(rank)
        else:
            self.clocks[rank] += times * self.step_time[rank]

    def now(self, rank: int) -> float:
        """Worker `rank`'s clock."""
        self._charge_wall_time(rank)
        return self.clocks[rank]

    def elapse(self, rank: int, seconds: float) -> None:
        """Move worker `rank`'s clock forward."""
        self.clocks[rank] += max(0.0, seconds)

    # How it works.

    def _reset(self) -> None:
        self.clocks = [0.0] * self.size
        self._make_channels()
        self.failure: tuple[int, BaseException] | None = None
        self._since = [0.0] * self.size
        self._ready: list[Callable[[], bool] | None] = [None] * self.size
        self._idle: dict[int, Callable[[str], object]] = {}
        self._baton = Baton(self.size, self._can_go_on, seed=self.seed)
        self.habitat = None if self.churn is None else Habitat(self, self.churn)

    def _make_channels(self) -> None:
        """One for all workers, or one inside each site and one for the members with the same number of all sites."""
        if self.sites is None:
            self.channels = [Channel(self, range(self.size), self.network)]
            return
        members = self.size // self.sites
        inside = [Channel(self, range(s * members, (s + 1) * members), self.inside) for s in range(self.sites)]
        between = [Channel(self, range(m, self.size, members), self.network) for m in range(members)]
        self.channels = [*inside, *between]

    def _link(self, rank: int) -> Link:
        if self.sites is None:
            return SimLink(self.channels[0], rank)
        site, member = divmod(rank, self.size // self.sites)
        return TwoLevel(SimLink(self.channels[site], member), SimLink(self.channels[self.sites + member], site))

    def _live(self, rank: int, worker: Callable[[Link], T], results: list[T | None]) -> None:
        self._baton.take(rank)
        self._since[rank] = time.perf_counter()
        try:
            if self.failure is None:
                results[rank] = worker(self._link(rank)) if self.habitat is None else self._lives(self.habitat, rank, worker)
        except BaseException as error:
            if self.failure is None:
                self.failure = (rank, error)
        finally:
            self._charge_wall_time(rank)
            if self.habitat is not None:
                self.habitat.leave(rank)
            self._baton.retire(rank)

    def _lives(self, habitat: Habitat, rank: int, worker: Callable[[Link], T]) -> T | None:
        """One life of a worker after the other, until it returns something or stays dead."""
        first = True
        while habitat.come(rank, first=first):
            try:
                seed_everything(self.seed + rank)
                return worker(habitat.link(rank))
            except Killed:
                first = False
        return None

    def wait(self, rank: int, ready: Callable[[], bool], *, purpose: str = "") -> bool:
        """Let others run until worker `rank` is ready.

        Args:
            rank: which worker waits.
            ready: whether it may go on.
            purpose: of the message that it waits for.

        Returns:
            False where it will never be, since the others wait too, have ended or have failed.
        """
        self._charge_wall_time(rank)
        if not ready():
            if (idle := self._idle.get(rank)) is not None:
                idle(purpose)
            self._ready[rank] = ready
            self._baton.yield_until_ready(rank)
            self._ready[rank] = None
            self._since[rank] = time.perf_counter()
        return ready()

    def when_idle(self, rank: int, call: Callable[[str], object]) -> None:
        """Have worker `rank` call a function, with the purpose of the message it waits for, before others run."""
        self._idle[rank] = call

    def yield_turn(self, rank: int, ready: Callable[[int], bool]) -> None:
        """Let others run until worker `rank` is ready."""
        self.wait(rank, lambda: ready(rank))
        if self.failure is not None:
            culprit, error = self.failure
            raise LinkError(f"rank {rank}: rank {culprit} failed: {error!r}", lost=[culprit])

    def _can_go_on(self, rank: int) -> bool:
        ready = self._ready[rank]
        return self.failure is not None or ready is None or ready()

    def _charge_wall_time(self, rank: int) -> None:
        if self.step_time is None:
            now = time.perf_counter()
            self.clocks[rank] += now - self._since[rank]
            self._since[rank] = now
