"""Another codec in later rounds: which one a round has, what it costs, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.conformance.elastic import train_elastic
from thinwire import DCT, Codec, CodecSchedule, DeMo, Dense, Link, Sign, SoloLink, TopK, World, checkpoint
from thinwire.codecs import parse_wire
from thinwire.codecs.chain import Chain
from thinwire.errors import CheckpointError, ConfigError
from thinwire.sim import Churn
from thinwire.tools.build import optimizer_of
from thinwire.tools.config import RunConfig
from thinwire.tools.plan.messages import NullLink, period_of, run_messages

MANY, FEW = DCT(16) >> TopK(24) >> Sign(), DCT(16) >> TopK(8) >> Sign()
SCHEDULE = CodecSchedule(MANY, 3, FEW)


def model_of() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))


def train(
    link: Link, steps: int, make: Callable[..., thinwire.Algorithm], *, folder: Path | None = None, stop: int = 0
) -> tuple[list[Tensor], list[int]]:
    """Parameters at the end and the length of each round's message; with a folder, saved and loaded after `stop` steps."""
    model, lengths = model_of(), list[int]()
    opt = make(model, link)

    def more(first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + link.rank))
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            lengths.extend(e.payload for e in list(opt.meter.recent)[-2:] if e.purpose == "round")

    more(0, stop)
    if folder is not None:
        saved = checkpoint.save(folder, model, opt, link)
        model = model_of()
        opt = make(model, link)
        checkpoint.load(saved, model, opt, link)
    more(stop, steps)
    opt.finish()
    return [p.detach().clone() for p in model.parameters()], lengths


def demo(codec: object, **settings: object) -> Callable[..., thinwire.Algorithm]:
    return lambda model, link: DeMo(model.parameters(), link, lr=0.01, codec=codec, **settings)  # type: ignore[arg-type]


def test_the_number_of_a_round_tells_its_codec():
    assert [repr(SCHEDULE.at(n)) for n in (1, 3, 4, 1000)] == [repr(MANY), repr(MANY), repr(FEW), repr(FEW)]
    three = CodecSchedule(MANY, 2, FEW, 2, Dense(), 5, FEW)
    assert [repr(three.at(n)) for n in (2, 3, 5, 6)] == [repr(MANY), repr(Dense()), repr(Dense()), repr(FEW)], (
        "one that ends where it begins has no round"
    )
    assert three.first_rounds == (1, 3, 3, 6)


def test_a_schedule_is_written_as_it_is_read():
    assert parse_wire(repr(SCHEDULE)) == SCHEDULE
    assert parse_wire("fp4 until 8, 1-bit") == CodecSchedule(thinwire.Fp4(), 8, Sign())
    assert parse_wire("fp4") == thinwire.Fp4()
    assert repr(CodecSchedule.of(FEW)) == repr(FEW), "of one codec: the handshake is as it was"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CodecSchedule(MANY, 3), "ends with a codec"),
        (lambda: CodecSchedule(MANY, 0, FEW), "the last round of a codec must be a whole number of at least 1, got 0"),
        (lambda: CodecSchedule(MANY, 5, FEW, 4, MANY), "the last round of a codec must be a whole number of at least 5, got 4"),
        (lambda: CodecSchedule(MANY, 5, "fp4"), "codec must be a thinwire Codec, got 'fp4'"),  # type: ignore[arg-type]
        (lambda: parse_wire("fp4 until 5, five bits"), "'five bits' is no codec"),
        (
            lambda: demo(CodecSchedule(MANY, 5, TopK(4) >> Sign()))(model_of(), SoloLink()),
            "the codecs of a schedule must have the same transform",
        ),
        (
            lambda: thinwire.LocalSGD(torch.optim.SGD(model_of().parameters(), lr=0.1), SoloLink(), codec=SCHEDULE),  # type: ignore[arg-type]
            "codec must be a thinwire Codec, got .* until 3, .*; .*some methods take a CodecSchedule",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_chains_of_a_schedule_cut_the_same_tensors_into_blocks_whatever_each_would_do_alone():
    all_of_them, few = DCT(16) >> TopK(64) >> Sign(), DCT(16) >> TopK(4) >> Sign()
    model = model_of()
    like = [p.detach() for p in model.parameters()]
    assert all_of_them.plan(like).layout.dense != few.plan(like).layout.dense
    schedule = CodecSchedule(all_of_them, 2, few)
    first, then = (codec for codec in schedule.codecs if isinstance(codec, Chain))
    assert first.plan(like).layout.dense == then.plan(like).layout.dense == few.plan(like).layout.dense
    assert then.nbytes(like) == few.nbytes(like), "that of few entries is as it is alone"
    params = World(2).run(lambda link: train(link, 4, demo(schedule)))
    assert all(torch.equal(a, b) for a, b in zip(params[0][0], params[1][0], strict=True)), "replicas are bit-equal"
    assert params[0][1][1] > params[0][1][2], "shorter from the switch on"


def test_a_run_is_that_of_one_codec_until_the_switch_and_messages_are_as_long_as_told():
    scheduled = World(2).run(lambda link: train(link, 6, demo(SCHEDULE)))
    until = World(2).run(lambda link: train(link, 3, demo(MANY)))
    same = World(2).run(lambda link: train(link, 3, demo(SCHEDULE)))
    (params, lengths), (other, _) = scheduled
    assert all(torch.equal(a, b) for a, b in zip(params, other, strict=True)), "replicas are bit-equal"
    assert all(torch.equal(a, b) for a, b in zip(until[0][0], same[0][0], strict=True))
    opt = demo(SCHEDULE)(model_of(), SoloLink())
    told = [opt.message_of((0,), round=n) for n in range(1, 7)]
    assert lengths == [out.nbytes(2) for out in told if out is not None]
    assert lengths[2] > 1.5 * lengths[3]


@pytest.mark.parametrize("settings", [{}, {"delay": True}])
def test_a_run_that_is_resumed_at_the_switch_goes_on_bit_for_bit(settings: dict, tmp_path: Path):
    whole = World(2).run(lambda link: train(link, 7, demo(SCHEDULE, **settings)))
    for stop in (2, 3, 4):
        folder = tmp_path / str(stop)
        again = World(2).run(lambda link, f=folder, s=stop: train(link, 7, demo(SCHEDULE, **settings), folder=f, stop=s))
        for (a, _), (b, _) in zip(whole, again, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_worker_that_joins_replays_each_round_with_its_own_codec():
    codec = CodecSchedule(DCT(4) >> TopK(3) >> Sign(), 6, DCT(4) >> TopK(1) >> Sign())
    notes = train_elastic("demo", Churn(loss=0.1, joins={2: 1.5}), steps=16, codec=codec)
    assert max(notes.states) > 6
    assert all(len(hashes) == 1 for hashes in notes.states.values())
    assert len(notes.workers[2]) == 3, "the one that joined has replayed rounds before the switch"


def test_demo_sends_more_entries_in_its_first_32_rounds_by_default() -> None:
    first, then = (DCT(64) >> TopK(k) >> Sign() for k in (256, 64))

    def steps(link: Link) -> list[int]:
        p = torch.nn.Parameter(torch.zeros(128, 128))
        opt, sent = DeMo([p], link), []
        for _ in range(34):
            p.grad = torch.ones_like(p)
            sent.append(opt.message_nbytes())
            opt.step()
        return sent

    lengths = {
        codec: DeMo([torch.nn.Parameter(torch.zeros(128, 128))], SoloLink(), codec=codec).message_nbytes()
        for codec in (first, then)
    }
    assert lengths[first] > 2 * lengths[then]
    assert World(2).run(steps) == [[lengths[first]] * 32 + [lengths[then]] * 2] * 2


def state_by(codec: Codec | CodecSchedule) -> dict[str, Any]:
    """The state of DeMo after a step; of these tensors one is sent whole with 128 entries of a block and in blocks with 64."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((64, 9), (128, 64))]
    opt = DeMo(params, SoloLink(), codec=codec)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    return opt.state_dict()


def test_a_state_in_other_blocks_is_refused_and_another_codec_of_the_same_blocks_is_told(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    k = {k: DCT(64) >> TopK(k) >> Sign() for k in (64, 32, 128)}

    def load(state: dict[str, Any], codec: Codec) -> DeMo:
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((64, 9), (128, 64))]
        opt = DeMo(params, SoloLink(), codec=codec)
        opt.load_state_dict(state)
        return opt

    with pytest.raises(CheckpointError, match=r"momentum of this state was made by .*TopK\(128\).*, whose blocks are others"):
        load(state_by(k[128]), k[64])
    load(state_by(k[64]), k[64])
    assert not caplog.records
    again = load(state_by(k[64]), k[32])
    assert "the state was made by DCT(64) >> TopK(64) >> Sign(); from here on the codec is" in caplog.text
    assert "TopK(32)" in str(again.state_dict()["param_groups"][0]["_coded_by"]), "what is saved next is of the new codec"
    whole = torch.nn.Linear(64, 64)
    checkpoint.save(tmp_path, whole, DeMo(whole.parameters(), SoloLink(), codec=k[64]), SoloLink())
    resumed = checkpoint.load(
        checkpoint.finished(tmp_path)[-1], whole, DeMo(whole.parameters(), SoloLink(), codec=k[32]), SoloLink()
    )
    assert [note.partition(";")[0] for note in resumed.notes] == ["the state was made by DCT(64) >> TopK(64) >> Sign()"]
    older = state_by(k[64])
    del older["param_groups"][0]["_coded_by"]
    load(older, k[64])
    assert "does not tell by which codec its momentum was made" in caplog.text


@pytest.mark.parametrize("text", ["(" * 5000, f"fp4 until {'9' * 6000}, fp4", "DCT(64) >> " * 3000 + "Sign()", "-" * 990 + "1"])
def test_no_text_of_a_file_is_more_than_a_wrong_codec(text: str):
    with pytest.raises(ConfigError):
        parse_wire(text)
    state = state_by(DCT(64) >> TopK(64) >> Sign())
    state["param_groups"][0]["_coded_by"] = text
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((64, 9), (128, 64))]
    DeMo(params, SoloLink(), codec=DCT(64) >> TopK(64) >> Sign()).load_state_dict(
        state
    )  # told, as of a codec of somebody's own


def test_a_codec_that_leaves_its_schedule_decides_alone_again():
    alone, more = DCT(64) >> TopK(64) >> Sign(), DCT(64) >> TopK(32) >> Sign()
    like = [torch.zeros(20, 30)]
    lengths = {CodecSchedule(codec).codecs[0].nbytes(like) for codec in (alone, CodecSchedule(alone, 2, more).codecs[0])}
    assert lengths == {Chain.of(alone).nbytes(like)}


def test_workers_with_other_schedules_are_refused():
    codecs = [SCHEDULE, CodecSchedule(MANY, 4, FEW)]
    with pytest.raises(ConfigError, match="codec"):
        World(2).run(lambda link: train(link, 2, demo(codecs[link.rank])))


def test_a_plan_counts_every_round_with_its_own_codec():
    config = RunConfig(algorithm="demo", steps=10, workers=4, wire=repr(SCHEDULE))
    messages = run_messages(config, model_of(), workers=4)
    opt = optimizer_of(config, model_of(), NullLink(4))
    each = [opt.message_of((0,), round=n) for n in range(1, 11)]
    assert [m.nbytes for m in messages] == [out.nbytes(4) for out in each if out is not None]
    assert period_of(config, model_of(), workers=4).messages[0].nbytes == messages[-1].nbytes, "what goes on for ever"
    warm = run_messages(RunConfig(**{**vars(config), "warm_start": 2}), model_of(), workers=4)
    assert [m.op for m in warm[:4]] == ["mean", "mean", "gather", "gather"]
    assert [m.nbytes for m in warm[2:]] == [messages[0].nbytes, *[messages[-1].nbytes] * 7], "rounds of the start count"
