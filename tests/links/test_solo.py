"""SoloLink: a world of one, in which every exchange gives back one's own message and costs nothing."""

from __future__ import annotations

import time

import pytest
import torch

from tests.clock import Clock
from thinwire.links import SoloLink
from thinwire.payload import Payload


def test_one_worker_with_number_0() -> None:
    assert (SoloLink().rank, SoloLink().size) == (0, 1)


@pytest.mark.parametrize("op", ["mean", "gather"])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_every_exchange_returns_ones_own_message(op, fixed: bool, dtype: torch.dtype) -> None:
    values = torch.arange(5).to(dtype)
    ticket = SoloLink().post(Payload(values.clone(), purpose="alarm", fixed=fixed), op)
    for _ in range(2):  # waiting again changes nothing
        (result,) = ticket.wait()
        assert torch.equal(result.data, values)
        assert result.data.dtype == dtype
        assert (result.purpose, result.fixed) == ("alarm", fixed)


def test_the_short_forms() -> None:
    link = SoloLink()
    assert link.mean(Payload(torch.ones(2))).data.tolist() == [1, 1]
    assert [p.data.tolist() for p in link.all_gather(Payload(torch.ones(2)))] == [[1, 1]]


def test_messages_of_several_posts_are_kept_apart() -> None:
    link = SoloLink()
    tickets = [link.post(Payload(torch.full((2,), float(i))), "mean") for i in range(3)]
    assert [t.wait()[0].data.tolist() for t in reversed(tickets)] == [[2, 2], [1, 1], [0, 0]]


def test_nothing_is_sent() -> None:
    link = SoloLink()
    assert link.traffic("mean", [1000]) == (0, 0)
    assert link.traffic("gather", [1000]) == (0, 0)


def test_rounds_always_become_valid() -> None:
    assert SoloLink().commit() is None
    assert SoloLink().tick() is None


def test_time_is_real_time() -> None:
    link = SoloLink()
    wall = time.perf_counter()
    started = link.now()
    link.elapse(0.02)
    assert link.now() - started >= 0.02
    assert time.perf_counter() - wall >= 0.02


def test_time_does_not_go_back_and_no_time_is_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("thinwire.links.base.time", clock)
    link = SoloLink()
    link.elapse(-5.0)
    link.elapse(0.0)
    assert (link.now(), clock.slept) == (0.0, [])
