"""Error feedback of DiLoCo: what a codec that rounds leaves out is sent later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_identities import run
from tests.conformance.elastic import train_elastic
from tests.conformance.training import adamw, assert_same, build, model_of, snapshot, train
from thinwire import Codec, CodecSchedule, DecoupledDiLoCo, DiLoCo, Fp4, Link, Sign, SoloLink, Ternary, World, checkpoint
from thinwire.errors import ConfigError
from thinwire.sim import Churn


@pytest.mark.parametrize("codec", [Ternary(), Sign(), CodecSchedule(Fp4(), 1, Sign())], ids=repr)
def test_with_feedback_it_is_decoupled_diloco_of_all_entries(codec: Codec) -> None:
    same: dict[str, Any] = {"H": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "codec": codec, "inner": adamw}
    ours = run("diloco", feedback=0.9, **same)
    theirs = run("decoupled-diloco", beta=0.9, over="workers", **same)
    for mine, its in zip(ours, theirs, strict=True):
        assert_same(mine, its)


def test_what_was_sent_and_what_is_left_is_all_that_was_done() -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        opt = build("diloco", model.parameters(), link, H=1, outer_lr=1.0, outer_momentum=0.0, feedback=1.0, codec=Ternary())
        gone = [torch.zeros_like(p) for p in opt.params()]
        sent = [torch.zeros_like(p) for p in opt.params()]
        apply = opt.apply

        def noted(arrived: Any) -> None:
            before = [r.clone() for r in opt.slot("residual")]
            for total, fed, r in zip(gone, arrived.outgoing.tensors, before, strict=True):
                total.add_(fed - r)  # D_i
            for total, s in zip(sent, arrived.sent, strict=True):
                total.add_(s)
            apply(arrived)

        opt.apply = noted
        train(model, opt, link.rank, 6)
        return gone, [s + r for s, r in zip(sent, opt.slot("residual"), strict=True)]

    for gone, accounted in World(2).run(worker):
        for a, b in zip(gone, accounted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert any(bool(a.any()) for a in gone)


@pytest.mark.parametrize("tau", [0, 2])
def test_it_goes_on_bit_for_bit_after_a_resume(tau: int, tmp_path: Path) -> None:
    def worker(link: Link, stop: int) -> list[Tensor]:
        def made() -> tuple[Any, Any]:
            model = model_of()
            return model, build("diloco", model.parameters(), link, feedback=0.9, codec=Ternary(), tau=tau)

        model, opt = made()
        train(model, opt, link.rank, stop or 12)
        if stop:
            saved = checkpoint.save(tmp_path / str(stop), model, opt, link)
            model, opt = made()
            checkpoint.load(saved, model, opt, link)
            train(model, opt, link.rank, 12 - stop, first=stop + 1)
        opt.finish()
        return snapshot(model)

    whole = World(2).run(lambda link: worker(link, 0))
    assert_same(whole[0], whole[1])
    for stop in (4, 5, 6):
        for mine, its in zip(World(2).run(lambda link, s=stop: worker(link, s)), whole, strict=True):
            assert_same(mine, its)


def test_workers_that_come_and_go_stay_equal() -> None:
    notes = train_elastic(
        "diloco", Churn(loss=0.2, deaths=[(0.9, 1)], restart=0.4, joins={2: 0.5}), steps=24, feedback=0.9, codec=Ternary()
    )
    assert notes.states
    assert all(len(hashes) == 1 for hashes in notes.states.values())


def test_the_published_form_keeps_nothing_and_says_nothing_of_it() -> None:
    opt = build("diloco", model_of().parameters(), SoloLink(), codec=Fp4())
    assert not opt.slot("residual")
    assert "feedback" not in opt.settings


def refused(**settings: Any) -> Callable[[], DiLoCo]:
    return lambda: DiLoCo(adamw(model_of().parameters()), SoloLink(), **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (refused(feedback=1.5), "feedback must be from 0 to 1, got 1.5"),
        (refused(feedback=0.9, merge="rda"), "feedback=0.9 needs merge='mean'"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], DiLoCo], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_coarse_form_sends_all_entries_in_three_values() -> None:
    model = model_of()
    opt = DecoupledDiLoCo.coarse(adamw(model.parameters()), SoloLink())
    assert (opt.codec, opt.beta, opt.outer.momentum, opt.mean.over) == (Ternary(), 0.9, 0.9, "workers")
    fp32 = 4 * sum(p.numel() for p in opt.params())
    wide = DecoupledDiLoCo.coarse(adamw([torch.nn.Parameter(torch.zeros(512, 512))]), SoloLink())
    assert 4 * 512 * 512 / wide.message_nbytes() > 19
    assert opt.message_nbytes() < fp32 + 200
