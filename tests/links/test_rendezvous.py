"""Joining a job: a rank that does not come is named, and nobody waits longer than the timeout."""

from __future__ import annotations

import socket

import pytest

from thinwire.errors import ConfigError, LinkError
from thinwire.links import SoloLink, connect
from thinwire.links.rendezvous import backends, in_job


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a job of three, whose rank 0 would hold the store on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return monkeypatch


def test_the_missing_are_named_after_the_timeout(job: pytest.MonkeyPatch) -> None:
    with pytest.raises(LinkError, match=r"rank 0 of 3: no sign of rank 1, rank 2 within 0.5 s; they were not started") as told:
        connect(timeout=0.5)
    assert told.value.lost == (1, 2)


def test_without_rank_0_there_is_no_store(job: pytest.MonkeyPatch) -> None:
    job.setenv("RANK", "1")
    with pytest.raises(LinkError, match=r"rank 1: the job's store at 127.0.0.1:\d+ does not answer within 0.5 s") as told:
        connect(timeout=0.5)
    assert told.value.lost == (0,)


def test_a_port_that_is_taken_is_told(job: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(LinkError, match=r"rank 0: the job's store at 127.0.0.1:\d+ cannot be opened"):
            connect(timeout=0.5)


def test_half_an_environment_is_a_mistake(job: pytest.MonkeyPatch) -> None:
    job.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="WORLD_SIZE is set, but MASTER_ADDR is not: start all ranks with torchrun"):
        connect(timeout=0.5)


def test_outside_of_a_job_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not in_job()
    assert isinstance(connect(), SoloLink)


def test_gloo_is_there_since_all_other_tests_need_it() -> None:
    assert backends()["gloo"]
    assert set(backends()) == {"gloo", "nccl", "mpi"}
