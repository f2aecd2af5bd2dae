"""Stores of objects that are written once: a folder here, and real servers where they are installed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks import servers

from tests.processes import LIMIT, until
from thinwire.errors import ConfigError, LinkError, WireError
from thinwire.links import objects
from thinwire.links.manifest import MemoryStore, Store
from thinwire.links.objects import ObjectStore

pytest.importorskip("obstore", reason="needs obstore: pip install 'thinwire[store]'")


def needs(*packages: str) -> Any:
    return pytest.mark.skipif(bool(servers.missing(*packages)), reason=servers.missing(*packages) or "all there")


MOTO, RCLONE = [pytest.mark.slow, needs("moto")], [pytest.mark.slow, needs("rclone")]


@pytest.fixture(scope="module")
def moto() -> Iterator[servers.Server]:
    with servers.moto() as server:
        yield server


@pytest.fixture(params=["memory", "file", pytest.param("moto", marks=MOTO)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "file":
        return ObjectStore(f"file://{tmp_path}/run")
    return on(request.getfixturevalue("moto").port, f"s3://{servers.BUCKET}/{tmp_path.name}")


def on(port: int, url: str = f"s3://{servers.BUCKET}/run", **options: Any) -> ObjectStore:
    return ObjectStore(url, **servers.options(port), **options)


# --- What every store does ------------------------------------------------------------------------------------------------


def test_an_object_is_written_once_and_written_again_only_as_it_is(store: Store) -> None:
    assert store.create("x/1/0", b"abc")
    assert store.create("x/1/0", b"abc"), "the answer to the first may have been lost"
    assert not store.create("x/1/0", b"abd")
    assert not store.create("x/1/0", b"")
    assert not store.create("x/1/0", b"abcd")
    assert store.get("x/1/0", most=3) == b"abc"


def test_the_first_proposal_wins_and_all_read_it(store: Store) -> None:
    assert store.decide("x/1/manifest-0", b"mine") == b"mine"
    assert store.decide("x/1/manifest-0", b"a longer one than that") == b"mine"
    with pytest.raises(WireError, match="has 4 bytes, where at most 3 are allowed"):
        store.decide("x/1/manifest-0", b"own", most=3)


def test_a_size_is_checked_before_anything_is_read(store: Store) -> None:
    store.create("big", bytes(1000))
    with pytest.raises(WireError, match="big has 1000 bytes, where at most 999 are allowed"):
        store.get("big", most=999)
    assert store.get("big", most=1000) == bytes(1000)


def test_what_is_not_there_is_none_and_an_empty_object_is_one(store: Store) -> None:
    assert store.get("none", most=10) is None
    assert store.create("x/2/hello-1", b"")
    assert store.get("x/2/hello-1", most=0) == b""
    assert store.list("x/2/") == {"hello-1": 0}


def test_names_below_a_prefix_with_their_sizes(store: Store) -> None:
    assert store.list("x/3/") == {}
    for name, size in {"0": 5, "manifest-0": 7}.items():
        store.create(f"x/3/{name}", bytes(size))
    store.create("x/31/0", b"another round")
    assert store.list("x/3/") == {"0": 5, "manifest-0": 7}
    store.delete(["x/3/0", "x/3/0", "not there"])
    assert store.list("x/3/") == {"manifest-0": 7}
    assert store.create("x/3/0", b"again")


def test_of_many_who_write_at_once_one_wins(store: Store) -> None:
    proposals = [f"proposal {i}".encode() for i in range(8)]
    for key in ("a", "b", "c"):
        with ThreadPoolExecutor(len(proposals)) as pool:
            found = list(pool.map(partial(store.decide, key), proposals, timeout=LIMIT))
        assert len(set(found)) == 1
        assert found[0] in proposals


# --- Addresses and processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["ftp://host/run", "run", "/run", "s3:bucket"])
def test_another_address_is_refused_with_those_that_are_allowed(url: str) -> None:
    with pytest.raises(ConfigError, match="one of s3://, gs://, az://, file://, got"):
        ObjectStore(url)


def test_the_probe_accepts_a_folder_also_the_second_time(tmp_path: Path) -> None:
    for _ in range(2):
        ObjectStore(f"file://{tmp_path}/run").probe(0)


def test_without_conditional_put_an_object_is_looked_for_first(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/run", conditional=False)
    assert store.create("a", b"1") and store.create("a", b"1") and not store.create("a", b"2")
    assert store.decide("a", b"3") == b"1"
    assert store.decide("b", b"3") == b"3"


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/run")
    with pytest.raises((LinkError, ValueError)):
        store.create("../outside", b"x")
    assert not (tmp_path / "outside").exists()


def test_too_many_names_are_an_error_and_not_a_full_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "MOST_NAMES", 5)
    store = ObjectStore(f"file://{tmp_path}/run")
    for i in range(6):
        store.create(f"x/0/{i}", b"")
    with pytest.raises(LinkError, match="more than 5 objects below 'x/0/'"):
        store.list("x/0/")


def _use_after_fork(store: ObjectStore, pipe: Any) -> None:
    try:
        store.list("x/")
    except LinkError as error:
        pipe.send(str(error))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that a fork may hang is what this is about
def test_a_forked_process_is_told_that_it_cannot_use_the_store(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/run")
    store.list("x/")
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_use_after_fork, args=(store, theirs))
    process.start()
    assert mine.poll(LIMIT)
    assert "do not survive a fork" in mine.recv()
    process.join(LIMIT)


def test_a_store_that_is_away_is_asked_again_until_it_is_given_up() -> None:
    store = on(servers.free_port(), outage=0.3)
    with pytest.raises(LinkError, match="has not answered a GET for"):
        store.get("run.json", most=10)
    assert store.requests["GET"] >= 2
    assert store.errors == store.requests["GET"]


# --- Wires that fail, on a server of our own: quick ------------------------------------------------------------------------


@needs("moto")
@pytest.mark.slow
def test_a_put_whose_answer_is_lost_finds_its_own_object(moto: servers.Server, tmp_path: Path) -> None:
    with servers.Proxy(moto.port) as proxy:
        store = on(proxy.port, f"s3://{servers.BUCKET}/{tmp_path.name}")
        store.list("x/")
        proxy.mode = "lose"
        thread = threading.Thread(
            target=lambda: (until(lambda: proxy.lost >= 2, "answers lost"), setattr(proxy, "mode", "pass"))
        )
        thread.start()
        assert store.create("x/0/1", b"mine")
        thread.join(LIMIT)
        assert store.errors >= 2
        assert not on(moto.port, store.url).create("x/0/1", b"another's")


@needs("moto")
@pytest.mark.slow
def test_a_connection_that_is_reset_is_made_again(moto: servers.Server, tmp_path: Path) -> None:
    with servers.Proxy(moto.port, seconds=0.05) as proxy:
        store = on(proxy.port, f"s3://{servers.BUCKET}/{tmp_path.name}")
        store.create("a", b"1")
        proxy.mode = "reset"
        proxy.cut()
        thread = threading.Thread(target=lambda: (until(lambda: store.errors >= 2, "errors"), setattr(proxy, "mode", "delay")))
        thread.start()
        assert store.get("a", most=1) == b"1"
        thread.join(LIMIT)
        assert store.list("") == {"a": 1}


@needs("moto")
@pytest.mark.slow
def test_a_frozen_server_goes_on_where_it_was(tmp_path: Path) -> None:
    with servers.moto() as server:
        store = on(server.port)
        assert store.create("a", b"1")
        server.freeze()
        answers: list[bytes | None] = []
        thread = threading.Thread(target=lambda: answers.append(store.get("a", most=1)))
        thread.start()
        time.sleep(0.2)
        assert not answers
        server.thaw()
        thread.join(LIMIT)
        assert answers == [b"1"]


@needs("rclone")
@pytest.mark.slow
def test_a_store_that_overwrites_is_refused_and_a_keeper_is_named_as_the_way_out(tmp_path: Path) -> None:
    with servers.rclone(tmp_path) as server:
        with pytest.raises(ConfigError, match=r"has no conditional put.*Name a keeper"):
            on(server.port).probe(0)
        store = on(server.port, conditional=False)
        assert store.create("x/0/0", b"1") and store.create("x/0/0", b"1") and not store.create("x/0/0", b"2")
        server.kill()
        thread = threading.Thread(target=lambda: (until(lambda: store.errors >= 2, "errors"), server.start()))
        thread.start()
        assert store.get("x/0/0", most=1) == b"1"
        thread.join(LIMIT)


@needs("moto")
@pytest.mark.slow
def test_a_bucket_that_is_not_there_and_a_wrong_key_are_named(moto: servers.Server) -> None:
    with pytest.raises(LinkError, match="no such bucket"):
        on(moto.port, "s3://nowhere/run").create("a", b"1")


def test_a_full_disk_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(f"file://{tmp_path}/run", outage=0.2)
    store.list("x/")
    import obstore

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(obstore, "put", full)
    with pytest.raises(LinkError, match="No space left on device"):
        store.create("a", b"1")
    assert store.errors >= 2
    monkeypatch.undo()
    assert store.create("a", b"1"), "there is room again"


def test_a_real_disk_that_is_full_is_waited_for_and_shows_nobody_half_an_object(small_disk: Path) -> None:
    store = ObjectStore(f"file://{small_disk}/run")
    assert store.create("x/0/0", bytes(40_000))
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(store.create("x/0/1", b"1" * 40_000)))
    thread.start()
    until(lambda: store.errors >= 2, "the disk is full")
    assert store.list("x/0/") == {"0": 40_000} and not done
    store.delete(["x/0/0"])
    thread.join(LIMIT)
    assert done == [True] and store.get("x/0/1", most=40_000) == b"1" * 40_000
