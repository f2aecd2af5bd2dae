"""What `opt.stats()` says, who is called at rounds, and the loggers on top."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire
from tests.conformance.training import H, adamw, assert_same, backward, build, model_of, named, snapshot, train
from tests.processes import Pool
from thinwire import MTDAO, DataParallel, DiLoCo, Flaky, Link, Metered, SoloLink, StreamingDiLoCo, World
from thinwire.core.stats import Stats
from thinwire.errors import MissingDependency, WireError, how_to_install
from thinwire.log import of_all_workers
from thinwire.payload import Payload

NORMS = ["drift", "update_norm"]
KEYS = ["step", "rounds", "aborted", "pending", "in_flight", "lr", "sent", "received", "waiting", "message_bytes", *NORMS]


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return norm([x - y for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("name", named())
def test_every_algorithm_counts_its_own_traffic_and_asking_changes_nothing(name: str) -> None:
    """On a bare link, with somebody who listens, as a meter around the link counts where nobody does."""

    def watched(link: Link) -> tuple[Stats, list[Tensor]]:
        model, seen = model_of(), list[Stats]()
        opt = build(name, model.parameters(), link)
        opt.on_round(seen.append)
        train(model, opt, link.rank, 2 * H + 1)
        opt.finish()
        assert len(seen) == opt.rounds
        assert seen[-1] == opt.stats(), "finish() ends with a round"
        return opt.stats(), snapshot(model)

    def unwatched(link: Link) -> tuple[Metered, list[Tensor]]:
        model, link = model_of(), Metered(link)
        opt = build(name, model.parameters(), link)
        train(model, opt, link.rank, 2 * H + 1)
        opt.finish()
        assert opt.link is link, "a link that counts is not wrapped again"
        assert all(math.isnan(opt.stats()[key]) for key in NORMS), "not measured before somebody asks"
        return link, snapshot(model)

    runs = [World(2, step_time=0.0).run(watched), World(2, step_time=0.0).run(unwatched)]
    for (stats, params), (link, same) in zip(*runs, strict=True):
        totals = link.meter.totals
        assert list(stats)[: len(KEYS)] == KEYS
        assert all(type(value) in (int, float) for value in stats.values())
        assert (stats["sent"], stats["received"], stats["step"]) == (totals.sent, totals.received, 2 * H + 1)
        assert sum(value for key, value in stats.items() if key.startswith("sent.")) == stats["sent"]
        assert stats["sent.handshake"] == 32
        last = link.meter.last("round")
        assert last is not None and stats["message_bytes"] == last.payload > 0
        assert math.isfinite(stats["drift"]) and stats["update_norm"] > 0
        assert_same(params, same)


def test_norms_are_those_of_the_definition() -> None:
    """DiLoCo: the way from the anchor; MT-DAO: to the mean; DataParallel: none, and the step of the inner optimizer."""

    def diloco(link: Link) -> None:
        model = model_of()
        opt = DiLoCo(adamw(model.parameters()), link, H=3)
        opt.stats()
        train(model, opt, link.rank, 2)
        backward(model, link.rank, 3)
        opt.inner.step()  # what the third step is about to do
        model.zero_grad()
        anchor = [a.clone() for a in opt.slot("anchor")]
        expected = distance(opt.params(), anchor) / norm(anchor)
        opt.step()  # without gradients: the round alone
        stats = opt.stats()
        assert stats["drift"] == pytest.approx(expected, rel=1e-4)
        assert stats["update_norm"] == pytest.approx(distance(opt.slot("anchor"), anchor), rel=1e-4)

    def mt_dao(link: Link) -> tuple[list[Tensor], list[Tensor], Stats]:
        model = model_of()
        opt = MTDAO(torch.optim.SGD(model.parameters(), lr=0.05), link, H=2)
        opt.stats()
        train(model, opt, link.rank, 1)
        backward(model, link.rank, 2)
        opt.inner.step()
        model.zero_grad()
        before = [x.clone() for x in opt.params()]
        opt.step()
        return before, [x.clone() for x in opt.params()], opt.stats()

    def synchronous(link: Link) -> None:
        model = model_of()
        opt = DataParallel(adamw(model.parameters()), link)
        opt.stats()
        before = [x.clone() for x in opt.params()]
        train(model, opt, link.rank, 1)
        stats = opt.stats()
        assert stats["drift"] == 0
        assert stats["update_norm"] == pytest.approx(distance(opt.params(), before), rel=1e-4)

    World(2, step_time=0.0).run(diloco)
    for before, after, stats in World(2, step_time=0.0).run(mt_dao):
        assert stats["drift"] == pytest.approx(distance(before, after) / norm(after), rel=1e-4) and stats["drift"] > 0
    World(2, step_time=0.0).run(synchronous)


def test_refused_rounds_are_told_callbacks_can_be_removed_and_what_they_raise_is_raised() -> None:
    def worker(bare: Link) -> None:
        model, seen = model_of(), list[Stats]()
        opt = DiLoCo(adamw(model.parameters()), Flaky(bare, {2}), H=2)
        handle = opt.on_round(seen.append)
        train(model, opt, bare.rank, 6)
        assert [(s["rounds"], s["aborted"]) for s in seen] == [(1, 0), (2, 1), (3, 1)]
        assert seen[1]["pending"] == 2 and seen[1]["update_norm"] == seen[0]["update_norm"], "a refused round changes nothing"
        handle.remove()
        train(model, opt, bare.rank, 2, first=7)
        assert len(seen) == 3 and opt.rounds == 4

        def fails(stats: Stats) -> None:
            raise RuntimeError(f"round {stats['rounds']}")

        opt.on_round(fails)
        with pytest.raises(RuntimeError, match="round 5"):
            train(model, opt, bare.rank, 2, first=9)

    World(2, step_time=0.0).run(worker)


def test_a_fragment_is_measured_as_a_part_and_zero_parameters_have_no_relative_drift() -> None:
    def worker(link: Link) -> None:
        x = torch.nn.Parameter(torch.zeros(4))
        opt = DiLoCo(torch.optim.SGD([x], lr=1.0), link, H=1)
        opt.stats()
        x.grad = torch.ones(4)
        opt.step()
        assert math.isnan(opt.stats()["drift"]) and opt.stats()["update_norm"] > 0
        model, seen = model_of(), list[Stats]()
        streaming = StreamingDiLoCo(adamw(model.parameters()), link, H=4, fragments=2, tau=1)
        streaming.on_round(seen.append)
        train(model, streaming, link.rank, 8)
        assert len({s["update_norm"] for s in seen}) == len(seen) > 2
        assert seen[-1]["in_flight"] == 0 and streaming.stats()["in_flight"] == len(streaming.engine.queue)

    World(2, step_time=0.0).run(worker)


# --- Loggers -----------------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[Stats]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def test_jsonl_has_a_line_per_round_of_worker_0_and_goes_on_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rounds.jsonl"

    def worker(link: Link, steps: int) -> None:
        model = model_of()
        opt = DiLoCo(adamw(model.parameters()), link, H=2)
        handle = thinwire.log.jsonl(opt, path)
        train(model, opt, link.rank, steps)
        handle.remove()
        train(model, opt, link.rank, 2, first=steps + 1)

    World(2, step_time=0.0).run(lambda link: worker(link, 4))
    found = lines_of(path)
    assert [line["step"] for line in found] == [2, 4]
    assert set(found[0]) == {*KEYS, "sent.handshake", "sent.round", "time"}
    path.write_text(path.read_text() + '{"step": 6, "rou')  # a run that was killed while it wrote
    World(2, step_time=0.0).run(lambda link: worker(link, 2))
    *_, torn, last = path.read_text().splitlines()
    assert torn == '{"step": 6, "rou' and json.loads(last)["step"] == 2


def _of_everybody(link: Link, path: Path) -> float:
    model = model_of()
    opt = DiLoCo(adamw(model.parameters()), link, H=2)
    thinwire.log.jsonl(opt, path, all_workers=True)
    train(model, opt, link.rank, 4)
    return opt.stats()["drift"]


def test_figures_of_all_workers_on_real_processes(tmp_path: Path, pool: Pool) -> None:
    drifts = pool.run(_of_everybody, 2, tmp_path / "rounds.jsonl")
    last = lines_of(tmp_path / "rounds.jsonl")[-1]
    assert [last["worker0/drift"], last["worker1/drift"]] == drifts and drifts[0] != drifts[1]
    assert last["drift"] == last["worker0/drift"] and last["worker1/step"] == 4
    assert last["sent.metrics"] == len(KEYS) * 8, "of the round before: this one's were sent after it was counted"


def test_figures_of_another_length_are_refused() -> None:
    class Short(SoloLink):
        def all_gather(self, payload: Payload) -> list[Payload]:
            return [payload.like(payload.data[:-8])]

    with pytest.raises(WireError, match="rank 0: 8 bytes of figures, where 16 should be"):
        of_all_workers(Short(), {"step": 1, "sent": 2, "sent.round": 3})


def trained_alone(steps: int = 4) -> tuple[DiLoCo, torch.nn.Module]:
    model = model_of()
    return DiLoCo(adamw(model.parameters()), SoloLink(), H=2), model


def test_tensorboard_gets_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install -e '.[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opt, model = trained_alone()
    thinwire.log.tensorboard(opt, tmp_path)
    train(model, opt, 0, 4)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("thinwire/rounds")] == [(2, 1.0), (4, 2.0)]
    assert events.Scalars("thinwire/drift")[-1].value == pytest.approx(opt.stats()["drift"], rel=1e-5)


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[int, Stats]] = []

    def log(self, figures: Stats, step: int) -> None:
        self.logged.append((step, figures))


@pytest.mark.parametrize("logger", [thinwire.log.wandb, thinwire.log.trackio])
def test_a_run_object_is_given_every_round(logger) -> None:
    (opt, model), run = trained_alone(), Run()
    logger(opt, run, prefix="t/")
    opt.on_round(lambda stats: None)
    train(model, opt, 0, 4)
    assert [step for step, _ in run.logged] == [2, 4]
    assert run.logged[-1][1]["t/rounds"] == 2


def test_wandb_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[wandb]'")
    opt, model = trained_alone()
    run = wandb.init(mode="offline", dir=tmp_path, project="thinwire")
    thinwire.log.wandb(opt)
    train(model, opt, 0, 4)
    run.log({"loss": 1.0}, step=5)  # what was logged of a step is written when the next one comes
    assert run.summary["thinwire/rounds"] == 2
    run.finish()


def test_trackio_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: pip install -e '.[trackio]'")
    opt, model = trained_alone()
    trackio.init(project="thinwire", embed=False)
    thinwire.log.trackio(opt)
    train(model, opt, 0, 4)
    trackio.finish()
    assert any(path.is_file() and path.stat().st_size for path in tmp_path.rglob("thinwire*"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_library_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    opt, _ = trained_alone()
    arguments = (tmp_path,) if name == "tensorboard" else ()
    with pytest.raises(MissingDependency, match=re.escape(f"needs {name}: {how_to_install(name)}")):
        getattr(thinwire.log, name)(opt, *arguments)
