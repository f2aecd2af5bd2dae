"""A hostile worker: whatever it says in any exchange, all workers end it alike, with a short error or with nothing harmed.

The hostile worker runs the same program as the others; its link puts other bytes into chosen messages. What only a peer can do
that does not use this library at all (other lengths than it announced, a connection that stays open) is gloo's to withstand.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.conformance.training import backward, model_of, sgd, snapshot, train
from tests.processes import Pool
from tests.test_agreement import normed, normed_backward
from tests.tiers import first_quick
from thinwire import DCT, Link, TopK, TwoLevel, World, checkpoint
from thinwire.core.gates import handshake, read_json, tell_all
from thinwire.core.replicas import broadcast, drift
from thinwire.errors import CheckpointError, Diverged, FingerprintMismatch, NonFiniteRound, TrainingDiverged, WireError
from thinwire.links import LinkDecorator, Metered, Ticket
from thinwire.links.ddp import MeteredDDP
from thinwire.links.torch import TorchLink
from thinwire.log import of_all_workers
from thinwire.network import Op
from thinwire.payload import LONGEST, Payload
from thinwire.tools.command_flags import TrainFlags
from thinwire.tools.commands.train import _agree_on_folder
from thinwire.tools.config import RunConfig
from thinwire.tools.doctor import inspect_machine, machine_of, measure, tell_each_other
from thinwire.tools.train import Trainer

Forge = Callable[[Payload], Payload]


class Hostile(LinkDecorator):
    """A link that puts something else into the messages of one purpose: all of them, or the one of this number (from 0)."""

    def __init__(self, link: Link, purpose: str, forge: Forge, only: int | None = None):
        super().__init__(link)
        self.purpose, self.forge, self.only = purpose, forge, only
        self.seen = 0

    def post(self, payload: Payload, op: Op) -> Ticket:
        if payload.purpose == self.purpose:
            self.seen += 1
            if self.only in (None, self.seen - 1):
                payload = self.forge(payload)
        return super().post(payload, op)


def text(raw: bytes) -> Forge:
    return lambda payload: replace(Payload.of_bytes(raw), purpose=payload.purpose)


def number(value: float) -> Forge:
    return lambda payload: payload.like(torch.tensor([value], dtype=torch.float64).view(torch.uint8))


def garbage(payload: Payload) -> Payload:
    return payload.like(torch.full_like(payload.data, 0xA5))


def nan(payload: Payload) -> Payload:
    return payload.like(torch.full_like(payload.data, float("nan")))


def outcome(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        return "ok", str(work())
    except Exception as error:
        return type(error).__name__, str(error)


def assert_ended_alike(everyone: list[tuple[str, str]], *kinds: type[Exception]) -> str:
    """The same error on all workers, fit to be shown."""
    assert len(set(everyone)) == 1, everyone
    kind, said = everyone[0]
    assert kind in {k.__name__ for k in kinds}, everyone[0]
    assert len(said) < 1000 and said.isprintable(), f"{len(said)} characters: {said[:300]!r}"
    return said


# --- The handshake -----------------------------------------------------------------------------------------------------------

SETTINGS = {"algorithm": "DiLoCo", "lr": 0.1, "tensor": ["float32[3]"] * 5}

TEXTS = {
    "nothing": b"",
    "half": b'{"algorithm": "Di',
    "no text": b"\xff\xfe\x00",
    "deep lists": b"[" * 500_000,
    "deep in a dict": b'{"lr": ' + b"[" * 400 + b"]" * 400 + b"}",
    "very deep in a dict": b'{"lr": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep dicts": b'{"lr":' * 100_000 + b"1" + b"}" * 100_000,
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "NaN": b'{"algorithm": "DiLoCo", "lr": NaN}',
    "Infinity": b'{"algorithm": "DiLoCo", "lr": -Infinity}',
    "a key twice": b'{"lr": 1, "lr": 2}',
    "a long value": json.dumps({**SETTINGS, "lr": "x" * 1_000_000}).encode(),
    "a long key": json.dumps({**SETTINGS, "k" * 1_000_000: 1}).encode(),
    "a long number": b'{"lr": ' + b"9" * 1_000_000 + b"}",
    "many keys": json.dumps({f"k{i}": i for i in range(20_000)}).encode(),
    "a long list": json.dumps({**SETTINGS, "tensor": [0] * 300_000}).encode(),
    "other kinds": b'{"wire version": {}, "algorithm": 7, "lr": null, "tensor": "none"}',
    "control characters": b'{"lr": "\\u001b[2J\\r\\n", "\\u001b[31m": 1}',
    "half a surrogate": b'{"lr": "\\ud800"}',
    "the same settings": json.dumps({"wire version": 1, **SETTINGS}).encode(),
}


def _shake(link: Link, attacker: int, raw: bytes) -> tuple[str, str]:
    if link.rank == attacker:
        link = Hostile(Hostile(link, "handshake", garbage, only=0), "handshake", text(raw), only=1)
    return outcome(lambda: handshake(link, SETTINGS))


@pytest.mark.parametrize("attacker", first_quick([1, 0]))
@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_handshake_ends_on_all_workers_with_a_short_message(name: str, attacker: int, pool: Pool) -> None:
    raw = TEXTS[name]
    assert len(raw) <= LONGEST["handshake"], "what is longer is refused by its length"
    simulated = World(3).run(lambda link: _shake(link, attacker, raw))
    said = assert_ended_alike(simulated, FingerprintMismatch, WireError)
    assert f"rank {attacker}" in said or "rank 0" in said
    assert pool.run(_shake, 3, attacker, raw) == simulated


def test_a_handshake_of_ten_megabytes_is_refused_by_its_length() -> None:
    everyone = World(3).run(lambda link: _shake(link, 1, b'{"lr": "' + b"x" * 10_000_000 + b'"}'))
    assert assert_ended_alike(everyone, WireError) == (
        "the message of rank 1: 10000010 bytes for 'handshake', at most 1048576 are allowed"
    )


def test_settings_of_ones_own_are_never_too_long_to_tell_what_differs() -> None:
    """A model of very many tensors, and a setting that is longer than any message may be."""
    names = [f"blocks.{i}.experts.{i}.weight" for i in range(100_000)]

    def worker(link: Link, settings: dict[str, Any]) -> tuple[str, str]:
        return outcome(lambda: handshake(link, settings))

    other = [*names[:54_321], "another", *names[54_322:]]
    said = assert_ended_alike(
        World(2).run(lambda link: worker(link, {"lr": 1, "names": other if link.rank else names})), FingerprintMismatch
    )
    assert "names.hash of entries from 54000 is " in said and "lr" not in said
    long = "x" * 5_000_000
    said = assert_ended_alike(World(2).run(lambda link: worker(link, {"text": long + str(link.rank)})), FingerprintMismatch)
    assert "text is 'xxx" in said
    many = {f"setting {i}": "x" * 900 for i in range(3000)}
    said = assert_ended_alike(World(2).run(lambda link: worker(link, {**many, "lr": link.rank})), FingerprintMismatch)
    assert "too long to tell" in said


# --- Every other exchange ----------------------------------------------------------------------------------------------------


def _words(link: Link, raw: bytes, kind: type) -> tuple[str, str]:
    if link.rank == 0:
        link = Hostile(link, "broadcast metrics", text(raw))
    return outcome(lambda: tell_all(link, {"loss": 1.0}, kind))


BAD_WORDS = ["nothing", "no text", "deep lists", "deep dicts", "a list", "a key twice", "many keys", "control characters"]


@pytest.mark.parametrize(
    "raw", [*(TEXTS[n][:60_000] for n in BAD_WORDS), b'{"loss": "1"}', b'{"loss": [1]}', b'{"loss": true}']
)
def test_hostile_figures_are_refused_on_all_workers(raw: bytes, pool: Pool) -> None:
    simulated = World(3).run(lambda link: _words(link, raw, float))
    assert_ended_alike(simulated, WireError)
    assert pool.run(_words, 3, raw, float) == simulated


CONFIG, AT_HOME = RunConfig(algorithm="diloco", task="quadratic"), "runs/diloco-quadratic-20260102-030405"


@pytest.mark.parametrize(
    ("told", "out"),
    [("/etc", None), ("runs/../x", None), (AT_HOME + "/..", None), (AT_HOME, "mine"), ("x" * 9999, "mine"), ("", None)],
)
def test_worker_0_does_not_decide_where_others_write(told: str, out: str | None) -> None:
    def worker(link: Link) -> tuple[str, str]:
        if link.rank == 0:
            link = Hostile(link, "broadcast metrics", text(json.dumps({"folder": told}).encode()))
            return outcome(lambda: tell_all(link, {}, str))
        return outcome(lambda: _agree_on_folder(CONFIG, TrainFlags(out=out), link))

    _, *others = World(3).run(worker)
    assert "the message of rank 0: the run folder" in assert_ended_alike(others, WireError)


@pytest.mark.parametrize(("told", "out"), [(AT_HOME, None), ("mine", "mine"), ("/data/mine", "/data/mine")])
def test_the_folder_that_all_were_given_is_agreed_on(told: str, out: str | None) -> None:
    def worker(link: Link) -> Path | None:
        if link.rank == 0:
            tell_all(link, {"folder": told}, str)
            return None
        return _agree_on_folder(CONFIG, TrainFlags(out=out), link)

    assert World(2).run(worker) == [None, Path(told)]


def test_honest_figures_arrive_even_if_they_are_not_finite_or_whole() -> None:
    said = {"loss": float("inf"), "count": 7, "drift": 0.5}
    assert World(2).run(lambda link: tell_all(link, said if link.rank == 0 else {}, float)) == [said] * 2


def test_figures_that_are_too_long_are_refused_on_all_workers() -> None:
    raw = json.dumps({f"figure {i}": 1.0 for i in range(10_000)}).encode()
    said = assert_ended_alike(World(2).run(lambda link: _words(link, raw, float)), WireError)
    assert "bytes for 'broadcast metrics', at most 65536 are allowed" in said


def _training(link: Link, purpose: str, forge: Forge, only: int | None, **settings: Any) -> tuple[str, str, list[bool]]:
    if link.rank == 1:
        link = Hostile(link, purpose, forge, only)
    model = model_of()
    opt = thinwire.DiLoCo(sgd(model.parameters()), link, H=2, **settings)
    kind, said = outcome(lambda: train(model, opt, link.rank, 4))
    return kind, said, [bool(torch.isfinite(p).all()) for p in snapshot(model)]


def _alarm(link: Link) -> tuple[str, str]:
    kind, said, finite = _training(link, "alarm", garbage, 0, alarm_every=1)
    assert all(finite)
    return kind, said


def _round(link: Link) -> tuple[str, str]:
    kind, said, finite = _training(link, "round", nan, 0, on_nonfinite="raise")
    assert all(finite), "nothing was applied"
    return kind, said


def _gathered_round(link: Link) -> tuple[str, str]:
    kind, said, finite = _training(link, "round", garbage, 0, codec=DCT(8) >> TopK(5))
    assert all(finite), "nothing was applied"
    return kind, said


def _owned_round(link: Link) -> tuple[str, str]:
    kind, said, finite = _training(link, "round", garbage, 0, codec=DCT(8) >> TopK(5), route="owners")
    assert all(finite), "nothing was applied"
    return kind, said


def _owner(link: Link) -> tuple[str, str]:
    """One that sends noise for the mean of its share."""
    kind, said, finite = _training(link, "back", garbage, 0, codec=DCT(8) >> TopK(5), route="owners")
    assert all(finite), "nothing was applied"
    return kind, said


def _pace(link: Link, value: float) -> tuple[str, str]:
    kind, said, _ = _training(link, "pace", number(value), 0, pace="speed")
    return kind, said


def _buffers(link: Link) -> tuple[str, str]:
    if link.rank == 1:
        link = Hostile(link, "buffers", nan)
    model = normed()
    statistics = thinwire.running_statistics(model)
    opt = thinwire.DiLoCo(sgd(model.parameters()), link, H=1, buffers=statistics)
    for step in (1, 2):
        normed_backward(model, link.rank, step)
        opt.step()
    return "ok", str(all(bool(torch.isfinite(t).all()) for t in [*statistics, *snapshot(model)]))


def _drift(link: Link, forge: Forge, only: int) -> tuple[str, str]:
    if link.rank == 1:
        link = Hostile(link, "drift", forge, only)
    return outcome(lambda: drift(link, [torch.full((5,), float(link.rank))]))


def _bad_hash(link: Link) -> tuple[str, str]:
    return _drift(link, garbage, 0)


def _bad_mean(link: Link) -> tuple[str, str]:
    return _drift(link, nan, 1)


def _bad_square(link: Link, value: float) -> tuple[str, str]:
    return _drift(link, number(value), 2)


def _mean_model(link: Link) -> tuple[str, str]:
    if link.rank == 1:
        link = Hostile(link, "mean model", nan)
    model = model_of()
    opt = thinwire.DiLoCo(sgd(model.parameters()), link, H=2)
    before = snapshot(model)

    def look() -> None:
        with opt.shared_model(mean_over=link):
            raise AssertionError("a mean of NaN was shown")

    ended = outcome(look)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True))
    return ended


def _doctor(link: Link, raw: bytes) -> tuple[str, str]:
    if link.rank == 1:
        link = Hostile(link, "doctor", text(raw))
    return outcome(lambda: tell_each_other(link, {"host": "node7"}, dict))


def _broadcast(link: Link) -> tuple[str, str]:
    """What worker 0 says is what all get, so it may say anything; the others are not heard."""
    if link.rank == 1:
        link = Hostile(link, "broadcast", garbage)
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(link.rank)
    broadcast(link, model)
    return "ok", str(model.weight.sum().item())


# What a hostile worker does in an exchange of each purpose, and what all workers must come to.
def _checkpoint(link: Link) -> tuple[str, str]:
    """More of them, and what is left on disk, are in tests/tools/test_checkpoint_attack.py."""
    model = model_of()
    opt = thinwire.DiLoCo(sgd(model.parameters()), link, H=2)
    used = Hostile(link, "checkpoint", garbage, 1) if link.rank == 1 else link
    with tempfile.TemporaryDirectory() as folder:
        shared = tell_all(link, {"folder": folder}, str)["folder"]
        ended = outcome(lambda: checkpoint.save(Path(shared), model, opt, used))
        link.all_gather(Payload.of_bytes(b"done", purpose="round", fixed=True))  # until here the folder is in use
    return ended


def all_bits(payload: Payload) -> Payload:
    return payload.like(torch.full_like(payload.data, 255))


def _finite(link: Link) -> tuple[str, str]:
    used = Hostile(link, "finite", all_bits) if link.rank == 1 else link
    trainer = Trainer(RunConfig(task="quadratic", steps=4, device="cpu", settings={"H": 2}), used)
    return outcome(lambda: trainer.run(lambda _: None))


def _refusals(link: Link) -> tuple[str, str]:
    used = (
        Hostile(link, "refusals", lambda payload: payload.like(torch.full_like(payload.data, 255))) if link.rank == 1 else link
    )
    model = model_of()
    opt = thinwire.NoLoCo(sgd(model.parameters()), used, H=2, on_nonfinite="raise")
    return outcome(lambda: train(model, opt, link.rank, 4))


def _vote(link: Link) -> tuple[str, str]:
    """One that says again and again that it cannot read the messages."""
    used = Hostile(link, "vote", all_bits) if link.rank == 1 else link
    model = model_of()
    opt = thinwire.DeMo(model.parameters(), used)
    return outcome(lambda: train(model, opt, link.rank, 8))


def _resync(link: Link) -> tuple[str, str]:
    """One that says it has lost its parameters, and gives a false hash: it gets what it has, and training goes on."""
    used = Hostile(link, "resync", lambda payload: payload.like(torch.zeros_like(payload.data))) if link.rank == 1 else link
    model = model_of()
    opt = thinwire.DeMo(model.parameters(), used)
    backward(model, link.rank, 1)
    model.first.weight.grad.fill_(math.nan)
    opt.step()
    opt.zero_grad()
    train(model, opt, link.rank, 2, first=2)
    return outcome(lambda: opt.drift())


def _ask_for_round_2(payload: Payload) -> Payload:
    return payload.like(torch.tensor([2], dtype=torch.int64).view(torch.uint8)) if payload.nbytes == 8 else payload


def _resend(link: Link, forge: Forge) -> tuple[str, str]:
    """One that asks for a round that there never was, or for the same one again and again."""
    used = Hostile(link, "resend", forge) if link.rank == 1 else link
    model = model_of()
    opt = thinwire.DeMo(model.parameters(), used, delay=True)

    def run() -> None:
        train(model, opt, link.rank, 3)
        opt.finish()

    return outcome(run)


def _metrics(link: Link) -> tuple[str, str]:
    """One that sends noise for its figures: loggers leave out what is not finite, and the others' figures stand."""
    used = Hostile(link, "metrics", all_bits) if link.rank == 1 else link
    return outcome(lambda: [name for name, value in of_all_workers(used, {"sent": 1.0}).items() if math.isfinite(value)])


ATTACKS: dict[str, list[tuple[Callable[..., tuple[str, str]], tuple[Any, ...], type[Exception] | str]]] = {
    "round": [(_round, (), NonFiniteRound), (_gathered_round, (), WireError), (_owned_round, (), WireError)],
    "back": [(_owner, (), WireError)],
    "alarm": [(_alarm, (), Diverged)],
    "buffers": [(_buffers, (), "True")],
    "mean model": [(_mean_model, (), NonFiniteRound)],
    "drift": [
        (_bad_mean, (), NonFiniteRound),
        *((_bad_square, (value,), WireError) for value in (float("nan"), float("inf"), -1.0)),
    ],
    "pace": [(_pace, (value,), WireError) for value in (float("nan"), float("inf"), -1.0)],
    "doctor": [(_doctor, (TEXTS[name],), WireError) for name in ("nothing", "no text", "deep lists", "a list", "a key twice")],
    "broadcast": [(_broadcast, (), "0.0")],
    "checkpoint": [(_checkpoint, (), CheckpointError)],
    "finite": [(_finite, (), TrainingDiverged)],
    "resend": [(_resend, (forge,), WireError) for forge in (all_bits, _ask_for_round_2)],
    "vote": [(_vote, (), WireError)],
    "resync": [(_resync, (), "0.0")],
    "refusals": [(_refusals, (), NonFiniteRound)],
    "metrics": [(_metrics, (), "['worker0/sent', 'worker2/sent']")],
}
ELSEWHERE = {
    "handshake": "test_a_hostile_handshake_ends_on_all_workers_with_a_short_message",
    "broadcast metrics": "test_hostile_figures_are_refused_on_all_workers",
    "culprits": "test_a_worker_that_hides_its_nan_from_ddp_stops_all",
    "site result": "test_a_false_result_inside_a_site_is_refused",
    "site flags": "test_a_member_that_lies_costs_its_site_the_round_and_no_more",
    "site mean": "test_a_member_that_lies_costs_its_site_the_round_and_no_more",
}


@pytest.mark.parametrize(("purpose", "number"), [(p, i) for p, attacks in ATTACKS.items() for i in range(len(attacks))])
def test_a_hostile_message_harms_nobody(purpose: str, number: int, pool: Pool) -> None:
    work, arguments, expected = ATTACKS[purpose][number]
    for everyone in (World(3).run(lambda link: work(link, *arguments)), pool.run(work, 3, *arguments)):
        if isinstance(expected, str):
            assert everyone == [("ok", expected)] * 3
        else:
            said = assert_ended_alike(everyone, expected)
            assert "rank 1" in said or expected is NonFiniteRound or _ask_for_round_2 in arguments


def test_a_false_hash_of_a_replica_costs_an_exchange_and_no_more(pool: Pool) -> None:
    simulated, real = World(3).run(_bad_hash), pool.run(_bad_hash, 3)
    assert {kind for kind, _ in [*simulated, *real]} == {"ok"}
    assert len({said for _, said in simulated}) == len({said for _, said in real}) == 1


def test_every_purpose_in_the_source_is_attacked_here() -> None:
    source = "".join(path.read_text() for path in Path(thinwire.__file__).parent.rglob("*.py"))
    used = set(re.findall(r'purpose(?:: str)? ?= ?"([^"]+)"', source)) | set(
        re.findall(r'say_number\(\w+, "([^"]+)"\)', source)
    )
    assert used == set(ATTACKS) | set(ELSEWHERE)
    assert all(callable(globals()[name]) for name in ELSEWHERE.values())


def _on_a_site(link: Link, purpose: str, forge: Forge, hostile: int, only: int | None) -> tuple[int, list]:
    """A training in which one process of a world of sites is hostile to its own."""
    assert isinstance(link, TwoLevel)
    if link.data_rank == hostile:
        link = TwoLevel(Hostile(link.inside, purpose, forge, only), link.between)
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.0)
    opt = thinwire.DeMo(model.parameters(), link, alarm_every=1)
    for step in range(4):
        model(torch.full((2, 3), 1.0 + link.data_rank + step)).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return opt.aborted_rounds, [model.weight.tolist(), model.bias.tolist()]


@pytest.mark.parametrize("raw", [255, 1, 127])
def test_a_false_result_inside_a_site_is_refused(raw: int) -> None:
    def forge(payload: Payload) -> Payload:
        return payload.like(torch.full_like(payload.data, raw))

    with pytest.raises(WireError, match="the message of rank 0: a result of kind"):
        World(4, sites=2).run(lambda link: _on_a_site(link, "site result", forge, 2, None))


@pytest.mark.parametrize("purpose", ["site flags", "site mean"])
def test_a_member_that_lies_costs_its_site_the_round_and_no_more(purpose: str) -> None:
    def forge(payload: Payload) -> Payload:
        bad = float("nan") if payload.data.is_floating_point() else 7
        return payload.like(torch.full_like(payload.data, bad))

    only = 3 if purpose == "site flags" else 1  # the first flags are those of the handshake
    aborted, states = zip(*World(4, sites=2).run(lambda link: _on_a_site(link, purpose, forge, 3, only)), strict=True)
    assert set(aborted) == {1}
    assert all(state == states[0] for state in states)


def _hidden_nan(link: TorchLink) -> tuple[str, str]:
    metered = Metered(link)
    ddp = MeteredDDP(nn.Linear(3, 1), metered)
    x = torch.ones(2, 3)
    ddp.module(x * (float("nan") if link.rank == 1 else 1)).sum().backward()
    if link.rank == 1:
        metered.link = Hostile(link, "culprits", lambda payload: payload.like(torch.zeros_like(payload.data)))  # type: ignore[assignment]
    return outcome(ddp.backward_done)


def test_a_worker_that_hides_its_nan_from_ddp_stops_all(pool: Pool) -> None:
    said = assert_ended_alike(pool.run(_hidden_nan, 2), WireError)
    assert said == "the averaged gradient is not finite, although every worker says that its own was"


@pytest.mark.parametrize(
    "change", [{"host": 7}, {"cores": "x"}, {"interfaces": []}, {"versions": {}}, {"extra": 1}, {"free": None}]
)
def test_a_machine_that_a_rank_makes_up_is_refused(change: dict[str, Any]) -> None:
    mine = inspect_machine()
    told = json.loads(json.dumps(vars(mine)))
    assert machine_of(told, 2, mine) == mine
    with pytest.raises(WireError, match="the message of rank 2: not the description of a machine"):
        machine_of(told | change, 2, mine)


def _measured(link: Link, raw: bytes) -> tuple[str, str]:
    hostile = Hostile(link, "doctor", lambda p: p if p.fixed else text(raw)(p)) if link.rank == 1 else link
    return outcome(lambda: measure(hostile))


@pytest.mark.parametrize(
    "raw", [b"[]", b"{}", b'{"0": [1, 2]}', b'{"0": [1, 2, "x"]}', b'{"0": [1, NaN, 1]}', b'{"0": [1, -1, 1]}']
)
def test_measurements_that_a_rank_makes_up_are_refused(raw: bytes) -> None:
    assert_ended_alike(World(2, step_time=0.0).run(lambda link: _measured(link, raw)), WireError)


def test_an_error_of_a_reader_is_short() -> None:
    with pytest.raises(WireError) as caught:
        read_json(Payload.of_bytes(b'{"' + b"x" * 100_000 + b'": }'), 3)
    assert len(str(caught.value)) < 300
