"""Error feedback of DiLoCo and Streaming DiLoCo: what a codec leaves out is sent later."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_identities import run
from tests.conformance.elastic import train_elastic
from tests.conformance.training import ALGORITHMS, adamw, assert_same, build, model_of, snapshot, train
from thinwire import Codec, CodecSchedule, DecoupledDiLoCo, Dense, Fp4, Link, Sign, SoloLink, Ternary, World, checkpoint
from thinwire.errors import ConfigError, FingerprintMismatch
from thinwire.sim import Churn
from thinwire.tools.build import optimizer_of
from thinwire.tools.config import RunConfig
from thinwire.tools.settings import settings_class


@pytest.mark.parametrize("codec", [Ternary(), Sign(), CodecSchedule(Fp4(), 1, Sign())], ids=repr)
def test_with_feedback_it_is_decoupled_diloco_of_all_entries(codec: Codec) -> None:
    same: dict[str, Any] = {"H": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "codec": codec, "inner": adamw}
    ours = run("diloco", feedback=0.9, **same)
    theirs = run("decoupled-diloco", beta=0.9, over="workers", **same)
    for mine, its in zip(ours, theirs, strict=True):
        assert_same(mine, its)


def made(name: str, model: torch.nn.Module, link: Link, **settings: Any) -> Any:
    """DiLoCo, or Streaming DiLoCo in three fragments, with a wire that leaves much out."""
    own = {"fragments": 3, "tau": 0} if name == "streaming-diloco" else {}
    return build(name, model.parameters(), link, **{**own, "H": 6, "codec": Ternary(), **settings})


both = pytest.mark.parametrize("name", ["diloco", "streaming-diloco"])


@both
@pytest.mark.parametrize("tau", [0, 2])
def test_what_was_sent_and_what_is_left_is_all_that_was_done(name: str, tau: int) -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        opt = made(name, model, link, feedback=1.0, tau=tau)
        gone, sent = ([torch.zeros_like(p) for p in opt.params()] for _ in range(2))
        apply = opt.apply

        def noted(arrived: Any) -> None:
            before = [r.clone() for r in opt.part("residual", arrived.which)]
            for i, fed, r, q in zip(arrived.which, arrived.outgoing.tensors, before, arrived.sent, strict=True):
                gone[i].add_(fed - r)  # D_i
                sent[i].add_(q)
            apply(arrived)

        opt.apply = noted
        train(model, opt, link.rank, 27)
        opt.finish()
        return gone, [s + r for s, r in zip(sent, opt.slot("residual"), strict=True)]

    for gone, accounted in World(2).run(worker):
        for a, b in zip(gone, accounted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert all(bool(a.any()) for a in gone)


@pytest.mark.parametrize("tau", [0, 2])
def test_one_fragment_is_diloco_with_the_same_feedback(tau: int) -> None:
    def worker(link: Link, name: str, **settings: Any) -> list[Tensor]:
        model = model_of()
        opt = made(name, model, link, feedback=0.5, tau=tau, **settings)
        train(model, opt, link.rank, 20)
        opt.finish()
        return [*snapshot(model), *opt.slot("residual")]

    ours = World(2).run(lambda link: worker(link, "streaming-diloco", fragments=1))
    diloco = World(2).run(lambda link: worker(link, "diloco"))
    for mine, its in zip(ours, diloco, strict=True):
        assert_same(mine, its)


@both
@pytest.mark.parametrize("tau", [0, 3])
@pytest.mark.parametrize("route", ["gather", "owners"])
def test_it_goes_on_bit_for_bit_after_a_resume(name: str, tau: int, route: str, tmp_path: Path) -> None:
    def worker(link: Link, stop: int) -> list[Tensor]:
        model = model_of()
        opt = made(name, model, link, tau=tau, route=route)
        train(model, opt, link.rank, stop or 20)
        if stop:
            saved = checkpoint.save(tmp_path / str(stop), model, opt, link)
            model = model_of()
            opt = made(name, model, link, tau=tau, route=route)
            checkpoint.load(saved, model, opt, link)
            train(model, opt, link.rank, 20 - stop, first=stop + 1)
        opt.finish()
        return [*snapshot(model), *opt.slot("residual")]

    whole = World(2).run(lambda link: worker(link, 0))
    assert any(bool(r.any()) for r in whole[0])
    for stop in (9, 12, 13):  # between rounds, at one, and with one under way
        for mine, its in zip(World(2).run(lambda link, s=stop: worker(link, s)), whole, strict=True):
            assert_same(mine, its)


@both
def test_a_round_that_is_refused_leaves_it_as_it_was(name: str) -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = made(name, model, link)
        train(model, opt, link.rank, 12)
        before = [r.clone() for r in opt.slot("residual")]
        assert any(bool(r.any()) for r in before)
        train(model, opt, link.rank, 1, first=13)
        opt.engine.invalid_next = link.rank == 1
        train(model, opt, link.rank, 5, first=14)
        if name == "diloco":
            assert opt.engine.aborted == 1
            assert_same(before, opt.slot("residual"))
        else:  # of three fragments one was refused, and the others had their rounds
            assert opt.engine.aborted == 1
            same = [torch.equal(a, b) for a, b in zip(before, opt.slot("residual"), strict=True)]
            assert any(same)
            assert not all(same)

    World(2).run(worker)


@both
def test_workers_that_come_and_go_stay_equal(name: str) -> None:
    churn = Churn(loss=0.2, deaths=[(0.9, 1)], restart=0.4, joins={2: 0.5})
    notes = train_elastic(name, churn, steps=24, codec=Ternary())
    assert notes.states
    assert all(len(hashes) == 1 for hashes in notes.states.values())


@both
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0),
        ({"codec": Dense(gather=True)}, 0),
        ({"codec": Dense("bf16")}, 0.9),
        ({"codec": Fp4()}, 0.9),
        ({"codec": Fp4(), "feedback": 0.0}, 0),
        ({"codec": Fp4(), "feedback": 0.5}, 0.5),
        ({"codec": Fp4(), "merge": "rda"}, 0),
        ({"codec": Fp4(), "merge": "rda", "feedback": 0.0}, 0),
    ],
)
def test_by_default_a_wire_that_is_not_exact_has_it(name: str, settings: dict[str, Any], expected: float) -> None:
    opt: Any = build(name, model_of().parameters(), SoloLink(), **settings)
    assert opt.feedback == expected
    assert len(opt.slot("residual")) == (len(opt.params()) if expected else 0)
    assert opt.settings.get("feedback", 0) == expected


def test_by_default_a_schedule_has_it_that_is_not_exact_in_some_round() -> None:
    opt: Any = build("diloco", model_of().parameters(), SoloLink(), codec=CodecSchedule(Dense(gather=True), 4, Sign()))
    assert opt.feedback == 0.9


@both
def test_workers_that_differ_in_it_do_not_begin(name: str) -> None:
    def worker(link: Link) -> None:
        model = model_of()
        train(model, made(name, model, link, feedback=0.9 if link.rank else 0.0), link.rank, 1)

    with pytest.raises(FingerprintMismatch, match="feedback"):
        World(2).run(worker)


@both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feedback": 1.5}, "feedback must be from 0 to 1, got 1.5"),
        ({"feedback": 0.9, "merge": "rda"}, "feedback=0.9 needs merge='mean'.*give 0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, model_of().parameters(), SoloLink(), **settings)


@both
def test_the_command_line_has_it(name: str) -> None:
    known = {f.name: f.default for f in fields(settings_class(ALGORITHMS[name], {}))}
    assert known["feedback"] is None
    run = RunConfig(algorithm=name, workers=2, wire="fp4", settings={"H": 8})
    for config, f in ((run, 0.9), (replace(run, settings={"H": 8, "feedback": 0.0}), 0)):
        opt: Any = optimizer_of(config, model_of(), SoloLink())
        assert opt.feedback == f


def test_the_coarse_form_sends_all_entries_in_three_values() -> None:
    model = model_of()
    opt = DecoupledDiLoCo.coarse(adamw(model.parameters()), SoloLink())
    assert (opt.codec, opt.beta, opt.outer.lr, opt.outer.momentum, opt.mean.over) == (Ternary(), 0.9, 0.9, 0.5, "workers")
    fp32 = 4 * sum(p.numel() for p in opt.params())
    wide = DecoupledDiLoCo.coarse(adamw([torch.nn.Parameter(torch.zeros(512, 512))]), SoloLink())
    assert 4 * 512 * 512 / wide.message_nbytes() > 19
    assert opt.message_nbytes() < fp32 + 200
