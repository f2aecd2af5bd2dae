"""Rounds of elastic links in threads of one process: what every worker saw of each, while somebody disturbs the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from tests.processes import LIMIT
from thinwire.links.elastic import ElasticLink
from thinwire.links.keys import Ed25519, PrivateKey
from thinwire.links.manifest import Store
from thinwire.links.run import Run, SignedRoster, create_run
from thinwire.payload import Payload

OWNER, STRANGER = PrivateKey.new(), PrivateKey.new()
KEYS = [PrivateKey.new() for _ in range(6)]
LONGEST = 64  # bytes of a message here


@dataclass(frozen=True)
class Seen:
    """What a worker saw of one round."""

    number: int
    chain: bytes
    messages: tuple[tuple[int, bytes], ...]


Attack = Callable[[ElasticLink], Any]


class Patient(ElasticLink):
    """A link whose clock stands still once the run is founded: nobody is left out for being late on a busy machine."""

    stopped: float | None = None
    others_failed: Event = Event()

    def elapse(self, seconds: float) -> None:
        assert not self.others_failed.is_set(), "another worker failed"
        super().elapse(seconds)

    def now(self) -> float:
        return super().now() if self.stopped is None else self.stopped


def make_run(store: Store, workers: int, **settings: Any) -> Run:
    return create_run(store, OWNER, [key.public for key in KEYS[:workers]], **settings)


def link_of(store: Store, run: Run, id: int, kind: type[Patient] = Patient, **options: Any) -> Patient:
    """The link of a worker."""
    roster = SignedRoster(store, run)
    signer = Ed25519(KEYS[id], id, roster.keys, context=run.context)
    how = {"poll": 0.002, "first_wait": 0.02, "timeout": LIMIT, "quorum": run.quorum, "keeper": run.keeper}
    link = kind(store, signer, roster=roster, **{**how, **options})
    link.longest = LONGEST
    return link


def found(link: ElasticLink) -> None:
    """Say hello and wait until the round begins in which this worker is expected."""
    while link.next_round() is not None:
        pass
    while link.rank not in link.place.expected:
        link.say("hello")
        assert link.wait_as_guest() is not None


def exchange(link: ElasticLink, text: bytes) -> Seen:
    """One round with a message."""
    link.post(Payload.of_bytes(text, purpose="round"), "gather").wait()
    assert link.decided is not None
    return seen_of(link)


def seen_of(link: ElasticLink) -> Seen:
    """What a worker saw of the round before."""
    decided = link.decided
    assert decided is not None
    return Seen(decided.manifest.number, link.place.chain, tuple((p.sender, p.to_bytes()) for p in decided.messages))


def run_rounds(
    links: Sequence[Patient], rounds: int, attack: Attack = lambda _: None, *, deadlines: bool = False
) -> list[list[Seen]]:
    """Let workers found a run and exchange messages.

    Args:
        links: of the workers.
        rounds: with a message of each.
        attack: called by worker 0 before it sends each of its messages.
        deadlines: whether a round is closed without those who are late.
    """

    failed = Event()

    def work(link: Patient) -> list[Seen]:
        link.others_failed = failed
        try:
            return take_part(link)
        except BaseException:
            failed.set()
            raise

    def take_part(link: Patient) -> list[Seen]:
        found(link)
        link.stopped = None if deadlines else link.now()
        seen = []
        for number in range(rounds):
            if link is links[0]:
                attack(link)
            seen.append(exchange(link, f"message {number} of {link.rank}".encode()))
        return seen

    for link in links:  # all are there before the first of them looks for others
        link.say("hello")
    with ThreadPoolExecutor(len(links)) as pool:
        return [future.result(LIMIT) for future in [pool.submit(work, link) for link in links]]


def check_equal(seen: list[list[Seen]]) -> dict[int, Seen]:
    """All that saw a round saw the same; the rounds by their numbers."""
    rounds: dict[int, Seen] = {}
    for worker in seen:
        for one in worker:
            assert rounds.setdefault(one.number, one) == one
    return rounds
