"""A run on a cluster: its store and its founding, and real threads that train on the loopback."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.conformance.elastic import replicated
from tests.conformance.training import backward, build, model_of
from tests.processes import LIMIT, until
from thinwire.core.hashing import hash_tensors
from thinwire.errors import ConfigError, LinkError, WireError
from thinwire.links.bodies import Bodies
from thinwire.links.cluster import ClusterStore
from thinwire.links.cluster_link import ClusterLink
from thinwire.links.host import RunHost
from thinwire.links.register import Register

MESSAGE = "x/00000001/0"


@pytest.fixture
def host() -> Iterator[RunHost]:
    with closing(RunHost(workers=3)) as held:
        yield held


@pytest.fixture
def store_of(host: RunHost) -> Iterator[Callable[[int], ClusterStore]]:
    made: list[ClusterStore] = []

    def make(id: int) -> ClusterStore:
        made.append(ClusterStore(Register(host.host, host.port), id, Bodies(host.host)))
        made[-1].at_hand, made[-1].longest = "x/00000001/", 256
        return made[-1]

    yield make
    for store in made:
        store.bodies.close()


def test_keys_are_written_once(store_of: Callable[[int], ClusterStore]) -> None:
    one, other = store_of(0), store_of(1)
    assert one.create(MESSAGE, bytes(range(256)))
    assert one.create(MESSAGE, bytes(range(256))), "an answer that was lost"
    assert not other.create(MESSAGE, b"another")
    assert other.create("x/00000001/bye-1", b"") and one.get("x/00000001/bye-1", most=0) == b""
    assert other.get(MESSAGE, most=256) == bytes(range(256)) and one.get("x/00000001/2", most=9) is None
    with pytest.raises(WireError, match="has 256 bytes, where at most 255 are allowed"):
        other.get(MESSAGE, most=255)
    assert one.list("x/00000001/") == {"0": 256, "bye-1": 0} and one.list("x/00000002/") == {}
    assert other.decide("settings", b"mine") == one.decide("settings", b"yours") == b"mine"
    one.delete([MESSAGE])
    assert other.list("x/00000001/") == {"bye-1": 0}


def test_a_message_is_with_all_who_fetched_it(store_of: Callable[[int], ClusterStore]) -> None:
    one, two, three = (store_of(id) for id in range(3))
    assert one.create(MESSAGE, b"body") and set(one.holders(MESSAGE)) == {0}
    assert two.list("x/00000001/") == {"0": 4}, "whoever lists the round at hand has its messages"
    one.bodies.close()
    assert three.list("x/00000001/") == {"0": 4} and set(three.holders(MESSAGE)) == {0, 1, 2}
    two.bodies.close()
    assert store_of(0).get(MESSAGE, most=4) == b"body", "a former life's message, from those who have it"
    three.bodies.close()


def test_what_nobody_holds_is_not_listed(store_of: Callable[[int], ClusterStore]) -> None:
    one, two = store_of(0), store_of(1)
    one.create(MESSAGE, b"body")
    one.create("x/00000001/1", bytes(257))
    one.bodies.drop([f"{one.register.life}/0/{MESSAGE}"])
    assert two.list("x/00000001/") == {} and two.get(MESSAGE, most=4) is None, "gone, and too long"


def test_room_is_bounded() -> None:
    with closing(Bodies("127.0.0.1", room=1000)) as bodies:
        for n in range(100):
            bodies.put(str(n), bytes(100))
        assert bodies.get("0") is None and bodies.get("99") is not None
        assert sum(bodies.get(str(n)) is not None for n in range(100)) == 64


def test_one_of_many_creators_wins(store_of: Callable[[int], ClusterStore]) -> None:
    won: list[int] = []

    def create(store: ClusterStore) -> None:
        won.extend(store.id for n in range(8) if store.create(f"x/{n:08}/manifest-0", b"%d" % store.id) and n == 0)

    run_all([threading.Thread(target=create, args=(store_of(id),)) for id in range(8)])
    assert len(won) == 1


def test_a_host_that_is_not_there_is_named(host: RunHost) -> None:
    port = host.port
    other = RunHost(workers=1)
    url = other.url
    other.close()
    with pytest.raises(LinkError, match=f"no run at {url} for 0.2 s .*thinwire run serve"):
        thinwire.join(url, id=0, outage=0.2)
    with pytest.raises(ConfigError, match="has workers 0 to 2, got id=3"):
        thinwire.join(f"tcp://127.0.0.1:{port}", id=3)
    with pytest.raises(ConfigError, match="has a number and no key"):
        thinwire.join(f"tcp://127.0.0.1:{port}", key="some.key")
    with pytest.raises(ConfigError, match="tcp://host:port, got 'tcp://nowhere'"):
        thinwire.join("tcp://nowhere", id=0)


# --- Runs ---------------------------------------------------------------------------------------------------------------------


class Worker(threading.Thread):
    """A worker that trains until it is told to end, or dies with all that it holds."""

    def __init__(self, url: str, id: int, name: str = "diloco", **options: Any):
        super().__init__(daemon=True)
        how = {"first_wait": 60.0, "timeout": LIMIT, "checkpoint_every": 4, **options}
        link = thinwire.join(url, id=id, **how)
        assert isinstance(link, ClusterLink)
        self.link, self.model = link, model_of()  # here: threads share the generator that it is drawn from
        self.algorithm = name
        self.hashes: dict[int, int] = {}  # of the replicated state before each round, on all workers the same
        self.die = self.finish = False
        self.error: BaseException | None = None
        self.began = -1
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._train()
        except BaseException as error:
            self.error = error
        finally:
            self.link.beats.close()
            self.link.bodies.close()

    def _train(self) -> None:
        model = self.model
        opt = build(self.algorithm, model.parameters(), self.link)
        opt.join()
        self.began = self.link.place.number
        while not opt.ended and not self.die and not self.finish:
            backward(model, opt.block, opt.block_step)
            opt.step()
            opt.zero_grad()
            self.hashes[self.link.place.number] = hash_tensors(replicated(opt))
        if not self.die:
            opt.finish()
            self.link.close()

    def reach(self, more: int) -> None:
        """Wait until it is so many rounds further."""
        target = self.link.place.number + more
        until(lambda: self.error or self.link.place.number >= target, f"round {target}")
        assert self.error is None, repr(self.error)


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)


def finish(workers: list[Worker]) -> None:
    """Let all end; wherever two were after the same round, they had the same state."""
    until(lambda: any(w.error for w in workers) or _shared(workers), "a round that two workers know of")
    for worker in workers:
        worker.finish = True
    for worker in workers:
        worker.join(LIMIT)
        assert worker.error is None, repr(worker.error)
    check_equal(workers)


def _shared(workers: list[Worker]) -> list[int]:
    """Rounds that at least two workers were after."""
    counts = Counter(number for worker in workers for number in list(worker.hashes))
    return [number for number, count in counts.items() if count > 1]


def check_equal(workers: list[Worker]) -> None:
    assert _shared(workers), "no round that two workers know of"
    for number in _shared(workers):
        assert len({worker.hashes[number] for worker in workers if number in worker.hashes}) == 1, f"round {number}"


@pytest.mark.parametrize("name", ["diloco", "demo"])
def test_one_who_dies_is_not_waited_for_and_one_who_comes_is_given_the_state(name: str) -> None:
    with closing(RunHost(workers=3)) as host:
        workers = [Worker(host.url, id, name) for id in range(3)]
        workers[0].reach(3)
        workers[2].die = True
        workers[2].join(LIMIT)
        workers[0].reach(3)
        assert 2 not in workers[0].link.place.expected
        workers.append(Worker(host.url, 2, name))
        until(lambda: 2 in workers[0].link.place.expected, "the newcomer is expected")
        workers[0].reach(3)
        finish([workers[0], workers[1], workers[3]])
        assert workers[3].began > 0


def test_a_host_that_comes_back_empty_is_told_by_those_who_are_there(tmp_path: Path) -> None:
    host = RunHost(workers=2, folder=tmp_path)
    workers = [Worker(host.url, id) for id in range(2)]
    workers[0].reach(2)
    port = host.port
    host.close()
    with closing(RunHost(port=port, workers=2, folder=tmp_path)):
        for worker in workers:
            worker.reach(3)
        finish(workers)
    assert min(min(worker.hashes) for worker in workers) <= 2 < max(max(worker.hashes) for worker in workers)


def test_all_die_and_those_who_kept_something_found_the_run_again(tmp_path: Path) -> None:
    with closing(RunHost(workers=3, folder=tmp_path / "host")) as host:
        first = [Worker(host.url, id, keep=tmp_path / str(id), first_wait=1.0) for id in range(2)]
        first[0].reach(7)
        for worker in first:
            worker.die = True
        for worker in first:
            worker.join(LIMIT)
        assert all(worker.error is None for worker in first)
        fresh = Worker(host.url, 2, first_wait=0.0)  # it would not wait for anybody
        back = [Worker(host.url, id, keep=tmp_path / str(id)) for id in range(2)]
        for worker in (*back, fresh):
            worker.reach(3)
        finish([*back, fresh])
        assert min(worker.began for worker in (*back, fresh)) > 4, "nobody began from fresh weights"


def test_a_worker_without_a_state_never_begins_a_run_that_had_begun(tmp_path: Path) -> None:
    host = RunHost(workers=2, folder=tmp_path)
    worker = Worker(host.url, 0, first_wait=0.0)
    worker.reach(2)
    worker.die = True
    worker.join(LIMIT)
    host.close()
    with closing(RunHost(workers=2, folder=tmp_path)) as again:
        fresh = Worker(again.url, 1, first_wait=0.0, timeout=1.0)
        fresh.join(LIMIT)
    assert isinstance(fresh.error, LinkError) and "nobody was there who holds the state of this run" in str(fresh.error)


def test_a_link_that_is_closed_leaves_no_threads() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with closing(RunHost(workers=2)) as host:
        workers = [Worker(host.url, id) for id in range(2)]
        for worker in workers:
            worker.reach(4)
        finish(workers)
    until(lambda: {thread.ident for thread in threading.enumerate()} <= before, "all threads have ended")


def test_folders_of_other_runs_are_refused(tmp_path: Path) -> None:
    with (
        closing(RunHost(workers=2, folder=tmp_path / "one")) as one,
        closing(RunHost(workers=2, folder=tmp_path / "two")) as two,
    ):
        link = thinwire.join(one.url, id=0, keep=tmp_path / "kept")
        link.close()
        with pytest.raises(ConfigError, match="keeps checkpoints of another run"):
            thinwire.join(two.url, id=0, keep=tmp_path / "kept")
    with pytest.raises(ConfigError, match="is that of a run with other settings"):
        RunHost(workers=3, folder=tmp_path / "one")
