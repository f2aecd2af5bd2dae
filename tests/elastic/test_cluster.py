"""The store of a cluster: a TCPStore on the loopback, as a store and under a run of real threads."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.conformance.elastic import replicated
from tests.conformance.training import H, backward, build, model_of
from tests.processes import LIMIT
from thinwire.core.hashing import hash_tensors
from thinwire.errors import LinkError, WireError
from thinwire.links.cluster import ClusterStore
from thinwire.links.elastic import ElasticLink
from thinwire.links.manifest import Unsigned


def test_it_is_a_store_whose_keys_are_written_once() -> None:
    held = ClusterStore("127.0.0.1", 0, hold=True)
    other = ClusterStore("127.0.0.1", held.port)
    assert held.create("x/00000001/0", bytes(range(256)))
    assert held.create("x/00000001/0", bytes(range(256))), "an answer that was lost"
    assert not other.create("x/00000001/0", b"another")
    assert other.create("x/00000001/1", b"")
    assert other.get("x/00000001/0", most=256) == bytes(range(256))
    assert held.get("x/00000001/1", most=0) == b"" and held.get("x/00000001/2", most=9) is None
    with pytest.raises(WireError, match="has 256 bytes, where at most 255 are allowed"):
        other.get("x/00000001/0", most=255)
    assert held.list("x/00000001/") == {"0": 256, "1": 0} and held.list("x/00000002/") == {}
    assert other.decide("settings", b"mine") == held.decide("settings", b"yours") == b"mine"
    held.delete(["x/00000001/0"])
    assert other.list("x/00000001/") == {"1": 0} and other.get("x/00000001/0", most=256) is None


def test_one_of_many_creators_wins() -> None:
    held = ClusterStore("127.0.0.1", 0, hold=True)
    won: list[int] = []

    def create(id: int) -> None:
        store = ClusterStore("127.0.0.1", held.port)
        won.extend(id for n in range(8) if store.create(f"x/{n:08}/manifest-0", b"%d" % id) and n == 0)

    threads = [threading.Thread(target=create, args=(id,)) for id in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert len(won) == 1


def test_a_store_that_is_not_there_is_named() -> None:
    held = ClusterStore("127.0.0.1", 0, hold=True)
    port = held.port
    del held
    with pytest.raises(LinkError, match=f"no store of a run at 127.0.0.1:{port}"):
        ClusterStore("127.0.0.1", port, timeout=0.5)


def test_workers_train_on_it_and_stay_bit_equal() -> None:
    held, ends, errors = ClusterStore("127.0.0.1", 0, hold=True), [], []

    def work(id: int) -> None:
        try:
            torch.set_num_threads(1)
            store = held if id == 0 else ClusterStore("127.0.0.1", held.port)
            link = ElasticLink(store, Unsigned(id), roster=(0, 1), poll=0.005, first_wait=60.0, timeout=LIMIT)
            model = model_of()
            opt = build("diloco", model.parameters(), link)
            opt.join()
            while opt.steps < 3 * H and not opt.ended:
                backward(model, opt.block, opt.block_step)
                opt.step()
                opt.zero_grad()
            opt.finish()
            ends.append((opt.steps, hash_tensors(replicated(opt))))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(id,)) for id in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not errors and len(ends) == 2 and ends[0] == ends[1]
