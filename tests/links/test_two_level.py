"""TwoLevel: the members of a site are one worker, bit for bit, whatever happens to one of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.conformance.training import Awkward, assert_same, backward, build, codec_of, model_of
from tests.links.test_torch import _keep_the_contract
from tests.processes import LIMIT, Pool
from thinwire import DCT, ElasticLink, Flaky, SoloLink, TopK, TorchLink, TwoLevel, World
from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError, Diverged, FingerprintMismatch, LinkError, ThinwireError, WireError
from thinwire.links import Done, Link, LinkDecorator, MemoryStore, Ticket, Unsigned
from thinwire.payload import Payload
from thinwire.sharding.mesh import make_mesh

METHODS = ("demo", "demo delayed", "data-parallel", "decoupled-diloco", "diloco", "mt-dao", "streaming-diloco", "noloco")
STEPS = 6


def make(name: str, model: Awkward, link: Link) -> Algorithm:
    name, _, delayed = name.partition(" ")
    settings: dict[str, Any] = {"codec": DCT(4) >> TopK(5)} if name in ("demo", "decoupled-diloco") else {}
    return build(name, model.parameters(), link, alarm_every=1, **settings, **({"delay": True} if delayed else {}))


def state_of(model: Awkward, opt: Algorithm) -> list[Tensor]:
    slots = [t for entries in opt.own_state.values() for t in entries.values()]
    inner = [t for tensors in opt.inner_state().values() for t in tensors]
    return [t.detach().clone() for t in [*model.parameters(), *slots, *inner]]


def train_on(link: Link, name: str, steps: int = STEPS) -> tuple[list[Tensor], int]:
    """What a process of a site has at the end, and what it sent between sites."""
    model = model_of()
    opt = make(name, model, link)
    for step in range(1, steps + 1):
        backward(model, link.data_rank, step)
        opt.step()
        opt.zero_grad()
    return state_of(model, opt), opt.meter.totals.sent


def train_with_mean_gradients(link: Link, name: str, members: int) -> tuple[list[Tensor], int]:
    """The same as one worker that computes the mean gradient of a whole site by itself."""
    model = model_of()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = make(name, model, link)
    for step in range(1, STEPS + 1):
        total: list[Tensor | None] = [None] * len(params)
        for member in range(members):
            backward(model, link.rank * members + member, step)
            for i, p in enumerate(params):
                if p.grad is not None:
                    total[i] = p.grad if total[i] is None else total[i] + p.grad
            opt.zero_grad()
        for p, g in zip(params, total, strict=True):
            p.grad = None if g is None else g / members
        opt.step()
        opt.zero_grad()
    return state_of(model, opt), opt.meter.totals.sent


@pytest.mark.parametrize("name", METHODS)
def test_a_site_is_one_worker_bit_for_bit_and_sends_what_one_sends(name: str) -> None:
    sites = World(4, sites=2).run(lambda link: train_on(link, name))
    workers = World(2).run(lambda link: train_with_mean_gradients(link, name, 2))
    for process, (state, sent) in enumerate(sites):
        site, member = divmod(process, 2)
        assert_same(state, workers[site][0], f"{name}: member {member} of site {site}")
        assert sent == (workers[site][1] if member == 0 else 0)


def test_a_link_of_two_levels_keeps_the_contract_of_a_link() -> None:
    sites, workers = World(4, sites=2).run(_keep_the_contract), World(2).run(_keep_the_contract)
    assert sites == [workers[0], workers[0], workers[1], workers[1]]


def _on_a_mesh(_: Link, name: str) -> tuple[list[Tensor], int]:
    mesh = make_mesh(workers=2, shards=2)
    inside, between = (TorchLink(mesh[axis], timeout=LIMIT) for axis in ("shard", "replicate"))
    return train_on(TwoLevel(inside, between), name)


@pytest.mark.parametrize("name", ["demo", pytest.param("diloco", marks=pytest.mark.slow)])
def test_real_processes_on_a_mesh_have_the_bits_of_the_simulator(pool: Pool, name: str) -> None:
    real, simulated = pool.run(_on_a_mesh, 4, name), World(4, sites=2).run(lambda link: train_on(link, name))
    for (state, sent), (expected, counted) in zip(real, simulated, strict=True):
        assert_same(state, expected, name)
        assert sent == counted


def test_inside_and_between_are_metered_apart() -> None:
    def worker(link: Link) -> tuple[int, int]:
        assert isinstance(link, TwoLevel)
        train_on(link, "demo", steps=2)
        return link.inside_meter.totals.sent, link.inside_meter.purposes["site mean"].rounds

    sent = World(4, sites=2).run(worker)
    gradients = sum(p.numel() for p in model_of().parameters() if p.requires_grad) * 4
    assert all(inside > 2 * gradients and rounds == 0 for inside, rounds in sent)


# --- What goes wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "diloco", "data-parallel"])
def test_a_nan_on_one_member_is_refused_in_the_name_of_its_site_and_the_member_is_named(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(link: Link) -> tuple[list[Tensor], int]:
        model = model_of()
        opt = make(name, model, link)
        for step in range(1, 10):
            loss = backward(model, link.data_rank, step)
            if step == 3 and link.data_rank == 3:
                model.first.weight.grad[0, 0] = float("nan")
            opt.step()
            opt.zero_grad()
            assert torch.isfinite(loss)
        assert all(bool(t.isfinite().all()) for t in state_of(model, opt))
        return state_of(model, opt)[:6], opt.aborted_rounds

    with caplog.at_level(logging.WARNING, "thinwire"):
        first, *others = World(4, sites=2).run(worker)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "site 1, step" in said and "gradients of member 1" in said
    assert {aborted for _, aborted in [first, *others]} == {0 if name == "diloco" else 1}
    assert name == "diloco" or "contribution of rank 1" in said
    assert_same(first[0], others[0][0])
    assert_same(others[1][0], others[2][0])


@pytest.mark.parametrize("at", ["commit", "exchange"])
def test_a_round_that_the_thin_link_aborts_is_aborted_on_all_members(at: str) -> None:
    def worker(link: Link) -> tuple[list[Tensor], int]:
        assert isinstance(link, TwoLevel)
        again = TwoLevel(link.inside, Flaky(link.between, {2}, at=at))
        model = model_of()
        opt = build("demo", model.parameters(), again, alarm_every=1, codec=codec_of("demo", gather=True))
        for step in range(1, 4):
            backward(model, link.data_rank, step)
            opt.step()
            opt.zero_grad()
        return [p.detach() for p in model.parameters()], opt.aborted_rounds

    first, *others = World(4, sites=2).run(worker)
    for state, aborted in others:
        assert aborted == first[1] == 1
        assert_same(state, first[0])


class Broken(LinkDecorator):
    """A thin link that fails."""

    def __init__(self, link: Link, error: Exception):
        super().__init__(link)
        self.error = error

    def commit(self) -> None:
        raise self.error


@pytest.mark.parametrize(("error", "named"), [(LinkError("gone", lost=[1, 2]), (1, 2)), (WireError("odd", rank=2), 2)])
def test_what_the_thin_link_raises_names_the_same_sites_on_all_members(error: ThinwireError, named: object) -> None:
    def worker(link: Link) -> tuple[object, str]:
        assert isinstance(link, TwoLevel)
        again = TwoLevel(link.inside, Broken(link.between, error))
        with pytest.raises(type(error)) as found:
            again.commit()
        told = found.value
        return (told.lost if isinstance(told, LinkError) else getattr(told, "rank", None)), str(told)

    for told, said in World(6, sites=3).run(worker):
        assert told == named and str(error) in said


def test_members_that_were_started_differently_are_refused() -> None:
    def worker(link: Link) -> None:
        model = model_of(seed=int(link.data_rank == 3))
        opt = build("demo", model.parameters(), link)
        backward(model, link.data_rank, 1)
        opt.step()

    with pytest.raises(FingerprintMismatch, match=r"inside site 1, where ranks are its members.* on rank 1"):
        World(4, sites=2).run(worker)


def test_a_member_that_drifts_is_found_by_the_alarm_of_its_site() -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = build("demo", model.parameters(), link, alarm_every=1)
        for step in range(1, 3):
            backward(model, link.data_rank, step)
            if step == 2 and link.data_rank == 1:
                opt.own_state[model.first.weight]["momentum"].view(-1)[0] += 1
            opt.step()
            opt.zero_grad()

    with pytest.raises(Diverged, match=r"inside site 0, where ranks are its members: .*momentum on rank 1"):
        World(4, sites=2).run(worker)


def test_what_cannot_be_two_levels_is_refused() -> None:
    elastic = ElasticLink(MemoryStore(), Unsigned(0), roster=range(2))
    with pytest.raises(ConfigError, match="inside is an elastic link, whose workers come and go"):
        TwoLevel(elastic, SoloLink())
    with pytest.raises(ConfigError, match="between is an elastic link"):
        TwoLevel(SoloLink(), elastic)
    with pytest.raises(ConfigError, match="between is a TwoLevel link itself"):
        TwoLevel(SoloLink(), TwoLevel(SoloLink(), SoloLink()))
    with pytest.raises(ConfigError, match="inside must be a thinwire Link, got int"):
        TwoLevel(3, SoloLink())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'fp32', 'bf16', got 'int8'"):
        TwoLevel(SoloLink(), SoloLink(), wire="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="members of a site take them together"):
        build("diloco", model_of().parameters(), TwoLevel(SoloLink(), SoloLink()), pace="speed")
    with pytest.raises(ConfigError, match="7 workers do not divide into 2 sites"):
        World(7, sites=2)


# --- Checkpoints, and operations that it does not know ------------------------------------------------------------------------


def test_a_run_of_sites_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(link: Link, first: int, last: int, *, resume: bool, save: bool) -> tuple[list[Tensor], float]:
        model = model_of()
        opt = build("diloco", model.parameters(), link, alarm_every=1)
        if resume:
            thinwire.checkpoint.load(thinwire.checkpoint.finished(tmp_path)[-1], model, opt, link)
        for step in range(first, last + 1):
            backward(model, link.data_rank, step)
            opt.step()
            opt.zero_grad()
        drawn = torch.rand(()).item()
        if save:
            thinwire.checkpoint.save(tmp_path, model, opt, link)
        return state_of(model, opt), drawn

    whole = World(4, sites=2).run(lambda link: (run(link, 1, 7, resume=False, save=False)[0], torch.rand(()).item()))
    World(4, sites=2).run(lambda link: run(link, 1, 6, resume=False, save=True))
    assert len(list(thinwire.checkpoint.finished(tmp_path)[-1].glob("worker*"))) == 2, "one file for each site"
    resumed = World(4, sites=2, seed=5).run(lambda link: run(link, 7, 7, resume=True, save=False))
    for (state, _), (expected, _) in zip(resumed, whole, strict=True):
        assert_same(state, expected)
    assert [drawn for _, drawn in resumed] == [second for _, second in whole], "each member has its own random state again"


class _Dealing(Link):
    """A thin link with an operation of its own."""

    rank, size = 0, 1  # type: ignore[assignment]

    def post(self, payload: Payload, op: Any) -> Ticket:
        assert op == "shuffle"
        return Done([Payload.of_bytes(b"abc").of(0), Payload.of_bytes(b"").of(1)])


def test_operations_that_it_does_not_know_are_passed_through() -> None:
    def worker(link: Link) -> list[tuple[bytes, int | None]]:
        two = TwoLevel(link, _Dealing())  # type: ignore[abstract]
        told = two.post(Payload.of_bytes(b"xyz"), "shuffle").wait()  # type: ignore[arg-type]
        return [(p.to_bytes(), p.sender) for p in told]

    assert World(2).run(worker) == [[(b"abc", 0), (b"", 1)]] * 2
