"""What is said once: running statistics that are not averaged, messages wider than parameters. And broadcast of adapters."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import thinwire
from tests.test_agreement import normed, normed_backward
from tests.test_handshake import lora
from thinwire import Dense, Link, Metered, SoloLink, World, checkpoint
from thinwire.codecs.base import Codec
from thinwire.errors import FingerprintMismatch

LEFT_OUT = "the running statistics of BatchNorm1d are not averaged"


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="thinwire")


def _train(link: Link, how: str, folder: Path, *, given: bool = False, frozen: bool = False) -> None:
    model = normed()
    if frozen:
        model.norm.eval()
    if how == "broadcast":
        thinwire.broadcast(link, model)
    buffers = thinwire.running_statistics(model) if given else ()
    opt = thinwire.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), link, H=2, buffers=buffers)
    for number in range(4):
        normed_backward(model, link.rank, number)
        opt.step()
        if how == "shared_model":
            with opt.shared_model(model):
                pass
        if how == "save":
            checkpoint.save(folder, model, opt, link)


@pytest.mark.parametrize("how", ["broadcast", "shared_model", "save"])
def test_batchnorm_without_buffers_is_said_once_on_each_worker(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    World(2).run(lambda link: _train(link, how, tmp_path / "one"))
    assert caplog.text.count(LEFT_OUT) == 2
    assert "buffers=thinwire.running_statistics(model)" in caplog.text
    caplog.clear()
    World(2).run(lambda link: _train(link, how, tmp_path / "two", given=True))
    World(2).run(lambda link: _train(link, how, tmp_path / "three", frozen=True))
    World(1).run(lambda link: _train(link, how, tmp_path / "four"))
    assert caplog.text == "", "given; in eval mode while the model trains; a single worker"


def test_a_model_that_was_broadcast_is_not_taken_for_another(caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link) -> None:
        shown, trained = normed(), nn.Linear(2, 1)
        thinwire.broadcast(link, shown)
        thinwire.broadcast(link, trained)
        opt = thinwire.DiLoCo(torch.optim.SGD(trained.parameters(), lr=0.1), link, H=2)
        trained(torch.ones(1, 2) * (1 + link.rank)).sum().backward()
        opt.step()

    World(2).run(worker)
    assert caplog.text == ""


WIDE = "the parameters are bf16, but messages are fp32: codec=Dense('bf16') makes them half as long"


@pytest.mark.parametrize(
    ("dtype", "codec", "workers", "said"),
    [
        (torch.bfloat16, None, 2, [WIDE]),
        (torch.bfloat16, Dense("bf16"), 2, []),
        (torch.float32, None, 2, []),
        (torch.bfloat16, None, 1, []),
    ],
    ids=["wide", "narrow", "fp32 parameters", "one worker"],
)
def test_bf16_parameters_on_an_fp32_wire_are_said_once(
    dtype: torch.dtype, codec: Codec | None, workers: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def worker(link: Link) -> None:
        x = nn.Parameter(torch.ones(4, dtype=dtype))
        opt = thinwire.DiLoCo(torch.optim.SGD([x], lr=0.1), link, H=2, codec=codec)
        for _ in range(3):
            x.grad = torch.full_like(x, 1.0 + link.rank)
            opt.step()
        opt.load_state_dict(opt.state_dict())  # they shake hands again
        opt.step()

    World(workers).run(worker)
    assert [record.getMessage() for record in caplog.records] == said


# --- broadcast of adapters ---------------------------------------------------------------------------------------------------


def _broadcast_adapters(link: Link, base_seed_of_rank_1: int) -> tuple[int, list[torch.Tensor]]:
    model, _ = lora(SoloLink(), base_seed_of_rank_1 if link.rank == 1 else 5)
    model["tracked"] = nn.BatchNorm1d(2)  # type: ignore[operator]
    model["fixed"] = nn.BatchNorm1d(2).requires_grad_(False)  # type: ignore[operator]
    with torch.no_grad():
        for t in [*(p for p in model.parameters() if p.requires_grad), *thinwire.running_statistics(model)]:
            t.add_(link.rank)
    metered = Metered(link)
    thinwire.broadcast(metered, model, trainable_only=True)
    sent = sum(e.payload for e in metered.meter.recent if e.purpose == "broadcast")
    kept = [p.detach() for p in model.parameters() if p.requires_grad]
    return sent, [*kept, *thinwire.running_statistics(model)]


def test_broadcast_of_what_is_trained_sends_nothing_else() -> None:
    (sent, first), *others = World(3).run(lambda link: _broadcast_adapters(link, 5))
    assert sent == 4 * (12 + 8 + 4 + 2 * 2) + 8, "two adapters, weight, bias and statistics of the trained norm and its counter"
    for rank, (_, tensors) in enumerate(others, start=1):
        *same, mean, var = tensors
        assert all(torch.equal(a, b) for a, b in zip(first, same, strict=False))
        assert mean.eq(rank).all() and var.eq(1 + rank).all(), "those of a norm that is not trained stay"


def test_broadcast_of_what_is_trained_refuses_another_base_model() -> None:
    with pytest.raises(FingerprintMismatch, match=r"the frozen parameters differ: their hash is '.*load the same base model"):
        World(2).run(lambda link: _broadcast_adapters(link, 6))
