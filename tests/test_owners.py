"""Messages that owners average: what is dealt to whom, what it costs, and that nothing is lost or half applied."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.owners import counted_reads
from torch import Tensor, nn

import thinwire
from tests.conformance.training import adamw, assert_close, assert_same, snapshot
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import DCT, All, Float, Fp4, Int8, Link, Owners, RandomK, Sign, Striding, Ternary, TopK, TwoBit, World, checkpoint
from thinwire.codecs.chain import Chain
from thinwire.codecs.deal import Deal, deal_of
from thinwire.codecs.wire import HEADER_NBYTES
from thinwire.core.average import average
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.owners import Owned
from thinwire.core.route import owned_nbytes
from thinwire.errors import ConfigError, DamagedRound, NonFiniteRound, WireError
from thinwire.links import LinkDecorator, Ticket, TorchLink
from thinwire.links.base import Done
from thinwire.network import Network, Op
from thinwire.payload import Payload
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import reshard
from thinwire.sim import Churn
from thinwire.tools.plan.messages import NullLink

SHAPES = [(100, 130), (70,), (3, 5), (), (64, 64), (700,), (0, 4), (2, 3, 70)]
CHAINS = [
    Chain.of(DCT(16) >> TopK(8) >> Sign()),
    Chain.of(TopK(8) >> TwoBit()),
    Chain.of(Ternary()),
    Chain.of(Fp4()),
    Chain.of(DCT(16) >> TopK(8)),
    Chain.of(DCT(16) >> Int8()),
    Chain.of(DCT(16) >> Striding(0.2) >> Sign()),
]


def contribution(rank: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(shape, generator=g) for shape in shapes]


def deal(chain: Chain, workers: int, which: Sequence[int] | None = None) -> Deal:
    return deal_of(chain, Owners().back_of(chain), contribution(0), which or range(len(SHAPES)), workers)


def exchange(
    link: Link,
    codec: Any,
    owners: Owners,
    owed: Sequence[Tensor | None] = (),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **how: Any,
) -> tuple[Owned, Arrived]:
    mine = contribution(link.rank, shapes)
    out = Outgoing(mine, codec, want_sent=True, **how)
    owned = Owned(link, out, owners=owners, owed=owed, model=mine, which=range(len(mine)), peers=link.peers(), round=3)
    return owned, owned.wait()


# --- Dealing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 40])
def test_every_entry_has_one_owner_and_owners_have_as_many_blocks_as_each_other(chain: Chain, workers: int) -> None:
    dealt = deal(chain, workers)
    counts = [0] * workers
    for i, shape in enumerate(dealt.plan.layout.slot_shapes()):
        ranges = sorted((start, stop) for _, start, stop in dealt.entries[i])
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1], "one after the other, without a gap"
        assert ends[-1] == torch.Size(shape).numel()
        for owner, *_ in dealt.entries[i]:
            counts[owner] += 1
    sizes = [sum(torch.Size(s).numel() for s in share.slot_shapes()) for share in dealt.shares]
    assert sum(sizes) == sum(torch.Size(s).numel() for s in dealt.plan.layout.slot_shapes())
    assert sum(dealt.up_nbytes) <= 1.2 * dealt.plan.nbytes + 8 * workers, "shares cost some rounding up, no headers"


def test_blocks_go_round_so_that_no_owner_has_two_more_than_another() -> None:
    like = [torch.zeros(64 * n, 64) for n in (3, 1, 5, 2, 1, 1, 9)]
    chain = Chain.of(DCT(64) >> TopK(8) >> Sign())
    for workers in (2, 4, 5, 16):
        dealt = deal_of(chain, chain, like, range(len(like)), workers)
        blocks = [sum(shape[0] // 64 for shape in share.slot_shapes()) for share in dealt.shares]
        assert max(blocks) - min(blocks) <= 1
        some = deal_of(chain, chain, like, [2, 6], workers)
        for whole, part in zip(dealt.shares, some.shares, strict=True):
            assert [whole.slot_shapes()[i] for i in (2, 6)] == list(part.slot_shapes()), "the same owners in any message"


# --- The mean ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_with_everything_sent_back_it_is_the_mean_of_a_gather(chain: Chain) -> None:
    back = Chain(chain.transform, All(), Float("fp32"))

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        mean, sent = average(link, chain, contribution(link.rank), want_sent=True, round=3)
        _, arrived = exchange(link, chain, Owners(back))
        return mean, sent, arrived.mean, arrived.sent

    results = World(3).run(worker)
    for mean, sent, owned, own_sent in results:
        assert_same(owned, results[0][2], "bit-equal on all workers")
        assert_close(owned, mean, 1e-6)
        for read, dealt, given in zip(sent, own_sent, contribution(0), strict=True):
            assert dealt.shape == given.shape == read.shape


@pytest.mark.parametrize("feedback", [1.0, 0.0])
@pytest.mark.parametrize("chain", CHAINS[:3], ids=repr)
def test_what_an_owner_leaves_out_comes_later(chain: Chain, feedback: float) -> None:
    """Over the rounds, all that owners sent and what they still owe is the sum of all means; without feedback it is not."""
    rounds, owners = 4, Owners(feedback=feedback)
    dealt = deal(chain, 3)

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        owed = [torch.zeros(shape) for shape in dealt.shares[link.rank].slot_shapes()]
        told = [torch.zeros(shape) for shape in SHAPES]
        for _ in range(rounds):
            owned, arrived = exchange(link, chain, owners, owed)
            owned.commit()
            torch._foreach_add_(told, arrived.mean)
        mean, _ = average(link, chain, contribution(link.rank), round=3)
        return told, [rounds * m for m in mean], owed

    results = World(3).run(worker)
    told, due, _ = results[0]
    rest = [torch.zeros(torch.Size(shape).numel()) for shape in dealt.plan.layout.slot_shapes()]
    for owner, (_, _, owed) in enumerate(results):
        for i, kept in enumerate(owed):
            for start, stop in ((a, b) for o, a, b in dealt.entries[i] if o == owner):
                rest[i][start:stop] = kept.reshape(-1)
    # An orthonormal transform keeps the squares, and padding is zero in what is decoded.
    missing = sum(float((d - t).square().sum()) for d, t in zip(due, told, strict=True))
    left = sum(float(r.square().sum()) for r in rest)
    assert missing > 1e-3, "something was left out"
    if feedback:
        assert missing <= left * (1 + 1e-4)
        assert missing >= 0.5 * left
    else:
        assert missing > 2 * left


def test_weights_count_and_all_zero_is_refused() -> None:
    back = Chain.of(DCT(16) >> All() >> Float("fp32"))

    def worker(link: Link, weight: float) -> list[Tensor]:
        _, arrived = exchange(link, CHAINS[0], Owners(back), weight=weight)
        return arrived.mean

    means = World(3).run(lambda link: worker(link, float(link.rank == 1)))
    (alone,) = World(1).run(lambda link: average(link, CHAINS[0], contribution(1), round=3)[0])
    assert_close(means[0], alone, 1e-6)
    with pytest.raises(WireError, match="weights of all workers are zero"):
        World(3).run(lambda link: worker(link, 0.0))


# --- What it costs -----------------------------------------------------------------------------------------------------------


def sent_by(codec: Any, workers: int, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Bytes that left each worker in a round, by the meter."""

    def worker(link: Link) -> int:
        metered = thinwire.Metered(link)
        exchange(metered, codec, Owners(), shapes=shapes)
        return metered.meter.totals.sent

    return World(workers).run(worker)


def values_read(link: Link, codec: Chain, shapes: Sequence[tuple[int, ...]]) -> int:
    """How many values this worker reads in a round."""
    with counted_reads() as reads:
        exchange(link, codec, Owners(), shapes=shapes)
    return reads.total()


@pytest.mark.parametrize("codec", CHAINS, ids=repr)
def test_the_meter_counts_what_the_formula_says(codec: Chain) -> None:
    for workers in (2, 5):
        sent = sent_by(codec, workers, SHAPES)
        halves = owned_nbytes(Owners(), codec, contribution(0), range(len(SHAPES)), workers)
        due = [sum(halves.sent(rank)) + workers - 1 for rank in range(workers)]
        assert sent == due, "with a byte of the vote for each other worker"


def test_neither_bytes_nor_the_values_that_are_read_grow_with_the_workers(pool: Pool) -> None:
    shapes, codec = [(320, 640), (64,)], CHAINS[0]
    read = [max(pool.run(values_read, workers, codec, shapes)) for workers in (2, 4)]
    assert read[0] == (8 + 32) * 800 + 3 * 64, "of two workers its share, and all means, with four times the entries"
    assert max(read) < 1.05 * min(read), "shares differ by a block"
    like = contribution(0, shapes)
    sent = {m: sum(owned_nbytes(Owners(), codec, like, [0, 1], m).most_sent()) for m in (16, 64)}
    gathered = {m: (m - 1) * (HEADER_NBYTES + codec.nbytes(like)) for m in (16, 64)}
    assert sent[16] < gathered[16] / 3
    assert sent[64] < 1.2 * sent[16], "checksums and votes alone grow"


def test_a_round_has_three_hops_whatever_the_number_of_workers() -> None:
    def worker(link: Link) -> float:
        exchange(link, CHAINS[0], Owners())
        return link.now()

    world = World(5, network=Network(latency=1.0), step_time=0.0)
    assert set(world.run(worker)) == {3.0}, "to the owners, from them, and the vote"


# --- Methods -----------------------------------------------------------------------------------------------------------------


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30), nn.LayerNorm(30))


def train(model: nn.Module, opt: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    for step in steps:
        g = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, 40, generator=g)
        opt.zero_grad()
        (model(x) - torch.sin(x[:, :30])).square().mean().backward()
        opt.step()


METHODS: dict[str, Callable[..., Any]] = {
    "demo": lambda p, link, **s: thinwire.DeMo(p, link, codec=DCT(16) >> TopK(8) >> Sign(), **s),
    "demo delayed": lambda p, link, **s: thinwire.DeMo(p, link, delay=True, codec=DCT(16) >> TopK(8) >> Sign(), **s),
    "decoupled": lambda p, link, **s: thinwire.DecoupledDiLoCo(adamw(p), link, H=2, **s),
    "coarse": lambda p, link, **s: thinwire.DecoupledDiLoCo.coarse(adamw(p), link, H=2, **s),
    "sparseloco": lambda p, link, **s: thinwire.DecoupledDiLoCo.sparseloco(adamw(p), link, H=2, **s),
    "diloco": lambda p, link, **s: thinwire.DiLoCo(adamw(p), link, H=2, codec=Fp4(), **s),
    "streaming": lambda p, link, **s: thinwire.StreamingDiLoCo(adamw(p), link, H=4, fragments=2, codec=Fp4(), **s),
    "mt-dao": lambda p, link, **s: thinwire.MTDAO(adamw(p), link, H=2, codec=TopK(64) >> Fp4(), **s),
}
methods = pytest.mark.parametrize("name", first_quick(METHODS, 2))


def run(link: Link, name: str, steps: int, folder: Path | None = None, first: int = 1) -> tuple[Any, ...]:
    model = net()
    opt = METHODS[name](model.parameters(), link, route="owners", alarm_every=1)
    notes = checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link).notes if folder and first > 1 else []
    loaded = {slot: [t.clone() for t in opt.slot(slot)] for slot in opt._slots if slot.startswith("owed")}
    train(model, opt, link.rank, range(first, first + steps))
    if folder and first == 1:
        checkpoint.save(folder, model, opt, link)
    owed = {slot: [t.clone() for t in opt.slot(slot)] for slot in loaded}
    return snapshot(model), owed, loaded, notes


@methods
def test_replicas_are_bit_equal_on_processes_as_in_the_simulator(name: str, pool: Pool) -> None:
    def synced(link: Link) -> list[Tensor]:
        return _finished(link, name)

    simulated, real = World(4).run(synced), pool.run(_finished, 4, name)
    for params in (*simulated, *real):
        assert_same(params, simulated[0])


def _finished(link: Link, name: str) -> list[Tensor]:
    model = net()
    opt = METHODS[name](model.parameters(), link, route="owners", alarm_every=1)
    train(model, opt, link.rank, range(1, 7))
    opt.finish()
    return snapshot(model)


@methods
def test_a_resumed_run_ends_as_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = World(3).run(lambda link: run(link, name, 9))
    World(3).run(lambda link: run(link, name, 5, tmp_path))
    resumed = World(3).run(lambda link: run(link, name, 4, tmp_path, first=6))
    for (params, owed, *_), (again, owed_again, *_) in zip(whole, resumed, strict=True):
        assert_same(params, again)
        assert owed.keys() == owed_again.keys()
        for slot in owed:
            assert_same(owed[slot], owed_again[slot], slot)
    assert any(bool(t.any()) for _, owed, *_ in whole for tensors in owed.values() for t in tensors), "something is owed"


@methods
def test_what_owners_owe_is_dealt_to_the_owners_of_another_world(name: str, tmp_path: Path) -> None:
    before = World(3).run(lambda link: run(link, name, 4, tmp_path))
    after = World(5).run(lambda link: run(link, name, 1, tmp_path, first=5))
    for slot in before[0][1]:
        entries = [
            torch.cat([t.reshape(-1) for worker in world for t in worker[part][slot]]).sort().values
            for world, part in ((before, 1), (after, 2))
        ]
        assert torch.equal(entries[0], entries[1]), "every entry of it, once"
        assert bool(entries[0].any())
    assert any("dealt to the owners of today" in note for note in after[0][3])


@pytest.mark.parametrize(("before", "after", "said"), [("gather", "owners", "begins at zero"), ("owners", "gather", "dropped")])
@pytest.mark.parametrize("workers", [3, 4])
def test_a_run_goes_on_by_another_route(
    before: str, after: str, said: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(link: Link) -> None:
        model = net()
        opt = METHODS["demo"](model.parameters(), link, route=before)
        train(model, opt, link.rank, [1, 2])
        checkpoint.save(tmp_path, model, opt, link)

    def go_on(link: Link) -> tuple[list[str], bool, list[Tensor]]:
        model = net()
        opt = METHODS["demo"](model.parameters(), link, route=after, alarm_every=1)
        notes = checkpoint.load(checkpoint.finished(tmp_path)[-1], model, opt, link).notes
        owed = opt.slot("owed") if after == "owners" else []
        zero = not any(bool(t.any()) for t in owed)
        train(model, opt, link.rank, [3, 4])
        return notes, zero, snapshot(model)

    World(3).run(start)
    results = World(workers).run(go_on)
    for notes, zero, params in results:
        assert zero and sum(said in note and "owed" in note for note in notes) == 1
        assert sum("owed" in note for note in notes) == 1, "said once"
        assert_same(params, results[0][2])
    assert any(said in record.getMessage() for record in caplog.records)


def test_a_plain_state_dict_of_another_route_is_loaded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def worker(link: Link) -> list[Tensor]:
        model = net()
        opt = METHODS["demo"](model.parameters(), link, route="gather")
        train(model, opt, link.rank, [1, 2])
        other = METHODS["demo"](model.parameters(), link, route="owners")
        other.load_state_dict(opt.state_dict())
        train(model, other, link.rank, [3])
        assert any(bool(t.any()) for t in other.slot("owed"))
        opt.load_state_dict(other.state_dict())
        train(model, opt, link.rank, [4])
        return snapshot(model)

    results = World(3).run(worker)
    for params in results:
        assert_same(params, results[0])
    told = {record.getMessage().split(",")[0] for record in caplog.records}
    assert {"begins at zero", "dropped"} <= told


# --- Rounds that fail --------------------------------------------------------------------------------------------------------


class Damaged(LinkDecorator):
    """Flips a bit in what comes from worker 1 in the exchange of one purpose with this number: nobody else sees that."""

    def __init__(self, link: Link, purpose: str, number: int):
        super().__init__(link)
        self.purpose, self.number, self.seen = purpose, number, 0

    def post(self, payload: Payload, op: Op) -> Ticket:
        ticket = super().post(payload, op)
        self.seen += payload.purpose == self.purpose
        if payload.purpose != self.purpose or self.seen != self.number:
            return ticket
        came = list(ticket.wait())
        came[1] = came[1].like(came[1].data.clone())
        came[1].data[came[1].nbytes // 2] ^= 4
        return Done(came)


@pytest.mark.parametrize("purpose", ["round", "back"])
def test_damage_that_one_worker_alone_sees_refuses_the_round_on_all_and_touches_nothing(
    purpose: str, caplog: pytest.LogCaptureFixture
) -> None:
    def worker(link: Link) -> tuple[Any, ...]:
        model = net()
        used = Damaged(link, purpose, 3) if link.rank == 2 else link
        opt = METHODS["demo"](model.parameters(), used, route="owners", alarm_every=1)
        train(model, opt, link.rank, [1, 2])
        before, owed = snapshot(model), [t.clone() for t in opt.slot("owed")]
        train(model, opt, link.rank, [3])
        refused = (opt.aborted_rounds, snapshot(model), [t.clone() for t in opt.slot("owed")])
        train(model, opt, link.rank, [4, 5])
        return before, owed, refused, snapshot(model)

    results = World(3).run(worker)
    for before, owed, (aborted, params, owed_after), final in results:
        assert aborted == 1
        assert_same(before, params, "nothing was applied")
        assert_same(owed, owed_after, "nothing was kept")
        assert_same(final, results[0][3], "training goes on, bit-equal")
    assert any("rank 2 could not read the messages" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(("place", "value"), [(0, float("nan")), (3, float("inf")), (4, 1e30)])
def test_an_invalid_contribution_is_named_on_all_workers(place: int, value: float) -> None:
    def worker(link: Link) -> tuple[tuple[int, ...], str]:
        mine = contribution(link.rank)
        if link.rank == 1:
            mine[place].fill_(value)
        out = Outgoing(mine, CHAINS[0])
        how = {"peers": link.peers(), "round": 3, "largest": 1e18}
        owned = Owned(link, out, owners=Owners(), owed=(), model=mine, which=range(len(mine)), **how)
        with pytest.raises(NonFiniteRound) as refused:
            owned.wait()
        return refused.value.culprits, str(refused.value)

    for culprits, said in World(3).run(worker):
        assert culprits == (1,)
        assert "NaN or Inf in the contribution of rank 1" in said


def test_a_part_of_another_round_or_for_another_owner_is_refused() -> None:
    class Swapped(LinkDecorator):
        """Sends two owners each other's parts, whose lengths are equal."""

        def post(self, payload: Payload, op: Op) -> Ticket:
            if payload.purpose == "round":
                parts = list(payload.data.split(list(payload.dealt)))
                parts[0], parts[2] = parts[2], parts[0]
                payload = replace(payload, data=torch.cat(parts))
            return super().post(payload, op)

    def worker(link: Link) -> str:
        mine = [torch.randn(64 * 6, 64, generator=torch.Generator().manual_seed(link.rank))]
        used = Swapped(link) if link.rank == 1 else link
        codec = DCT(64) >> TopK(8) >> Sign()
        owned = Owned(used, Outgoing(mine, codec), owners=Owners(), owed=(), model=mine, which=[0], peers=link.peers(), round=1)
        with pytest.raises(DamagedRound) as refused:
            owned.wait()
        return str(refused.value)

    for said in World(3).run(worker):
        assert "rank 0, rank 2 could not read the messages" in said


class Split(LinkDecorator):
    """Flips bits of this process's message of the second round: one bit, or one in each byte, which no owner can read then."""

    seen, everywhere = 0, False

    def post(self, payload: Payload, op: Op) -> Ticket:
        if payload.purpose == "round":
            self.seen += 1
            if self.seen == 2:
                payload = replace(payload, data=payload.data.clone())
                payload.data[slice(None) if self.everywhere else 5] ^= 1
        return super().post(payload, op)


def _sharded(_: Link, trouble: str) -> tuple[int, int, list[Tensor]]:
    mesh = make_mesh(workers=2, shards=2)
    link: Link = TorchLink(mesh["replicate"], timeout=LIMIT)
    rank, first = link.rank, mesh["shard"].get_local_rank() == 0
    if trouble.startswith("damage") and rank == 1 and first:
        link = Split(link)
        link.everywhere = trouble == "damage everywhere"
    model = shard_model(net(), mesh)
    opt = METHODS["demo"](model.parameters(), link, route="owners", alarm_every=1)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, 40, generator=g)
        opt.zero_grad()
        (model(x) - torch.sin(x[:, :30])).square().mean().backward()
        if trouble == "nan" and step == 2 and rank == 1 and first:
            next(iter(model.parameters())).grad.to_local()[0, 0] = float("nan")
        opt.step()
    reshard(model)
    return rank, opt.aborted_rounds, [p.detach().full_tensor() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["", "nan", "damage"])
def test_on_a_mesh_all_shards_of_all_workers_refuse_or_apply_a_round_together(trouble: str, pool: Pool) -> None:
    results = pool.run(_sharded, 4, trouble)
    for _, aborted, params in results:
        assert aborted == bool(trouble)
        assert_same(params, results[0][2])


def test_sites_of_a_link_of_two_levels_own_shares() -> None:
    def worker(link: Link) -> tuple[int, int, list[Tensor]]:
        model = net()
        opt = METHODS["demo"](model.parameters(), link, route="owners", alarm_every=1)
        train(model, opt, link.data_rank, range(1, 5))
        return link.rank, opt.meter.totals.sent, snapshot(model)

    results = World(6, sites=3).run(worker)
    for nth, (site, sent, params) in enumerate(results):
        assert site == nth // 2
        assert_same(params, results[0][2])
        assert (sent > 0) == (nth % 2 == 0), "one member of each site sends"


def _sharded_error(link: Link) -> str:
    try:
        _sharded(link, "damage everywhere")
    except WireError as error:
        return str(error)
    return "went on"


@pytest.mark.slow
def test_on_a_mesh_messages_that_no_worker_can_read_stop_all_shards(pool: Pool) -> None:
    said = pool.run(_sharded_error, 4)
    assert sum("wrong checksum" in text for text in said) == 2
    assert sum("another shard of this worker could not read its messages" in text for text in said) == 2


# --- Settings ----------------------------------------------------------------------------------------------------------------


def settings_of(link: Link, **settings: Any) -> thinwire.DeMo:
    return thinwire.DeMo(net().parameters(), link, **settings)


def diloco(link: Link, **settings: Any) -> thinwire.DiLoCo:
    return thinwire.DiLoCo(adamw(net().parameters()), link, H=1, codec=Fp4(), **settings)


def test_what_owners_must_not_do_is_a_config_error_with_its_reason() -> None:
    def refused(match: str, make: Callable[[Link], Any], **world: Any) -> None:
        def worker(link: Link) -> None:
            with pytest.raises(ConfigError, match=match):
                make(link)

        World(2, **world).run(worker)

    refused("hostile owner would dictate", lambda link: settings_of(link, route="owners", robust="median"))
    refused("an owner that dies would stall", lambda link: settings_of(link, route="owners"), churn=Churn())
    refused("meet in pairs", lambda link: thinwire.NoLoCo(adamw(net().parameters()), link, route="owners"))
    refused("depends on the numbers of the blocks", lambda link: settings_of(link, route="owners", codec=RandomK(8) >> Sign()))
    other = Owners(DCT(64) >> Striding(0.5) >> Sign())
    refused("the entries that they get", lambda link: settings_of(link, route=other, codec=DCT(64) >> Striding(0.2) >> Sign()))
    refused("the transform of what they get", lambda link: settings_of(link, route=Owners(TopK(8) >> Sign())))
    refused("must be one of 'gather', 'owners', 'auto', got 'ring'", lambda link: settings_of(link, route="ring"))
    refused("from 0 to 1, got 2", lambda link: settings_of(link, route=Owners(feedback=2)))
    refused("an owner that dies", lambda link: thinwire.DiLoCo(adamw(net().parameters()), link, route="owners"), churn=Churn())
    refused("rda' sends norms", lambda link: diloco(link, merge="rda", route="owners"))
    streaming = lambda link: thinwire.StreamingDiLoCo(adamw(net().parameters()), link, codec=Fp4(), merge="rda", route="owners")  # noqa: E731
    refused("rda' sends norms", streaming)
    refused(
        "other shapes than the parameters", lambda link: thinwire.LoRDO(net().parameters(), link, codec=Fp4(), route="owners")
    )
    refused("must be a chain", lambda link: settings_of(link, route=Owners(thinwire.Dense())))


def test_auto_takes_what_sends_fewer_bytes() -> None:
    def chosen(workers: int, codec: Any) -> bool:
        return World(workers).run(lambda link: settings_of(link, route="auto", codec=codec).owners is not None)[0]

    assert not chosen(2, DCT(16) >> TopK(8) >> Sign())
    assert chosen(16, DCT(16) >> TopK(8) >> Sign())
    assert not chosen(16, Float("fp32")), "averaged on the wire"


def test_auto_gathers_what_owners_cannot_average() -> None:
    """Norms beside the differences, with so many workers that owners would send fewer bytes."""

    def worker(link: Link) -> tuple[bool, bool, list[Tensor]]:
        model = net()
        opt = thinwire.DiLoCo(adamw(model.parameters()), link, H=1, codec=Fp4(), merge="rda", route="auto")
        train(model, opt, link.rank, [1])
        return opt.owners is None, diloco(link, route="auto").owners is None, snapshot(model)

    results = World(6).run(worker)
    for gathered, plain, params in results:
        assert (gathered, plain) == (True, False)
        assert_same(params, results[0][2])


def test_states_of_several_codecs_are_averaged_by_owners_where_the_parameters_are_dense() -> None:
    def worker(link: Link) -> tuple[list[Tensor], int]:
        model = net()
        opt = thinwire.MTDAO(adamw(model.parameters()), link, H=2, codec={"exp_avg": Fp4()}, route="owners", alarm_every=1)
        train(model, opt, link.rank, range(1, 5))
        assert [slot for slot in opt._slots if slot.startswith("owed")] == ["owed_exp_avg"]
        return snapshot(model), opt.meter.purposes["back"].sent

    results = World(3).run(worker)
    for params, sent in results:
        assert_same(params, results[0][0])
        assert sent > 0


def _route_of_a_shard(_: Link) -> tuple[bool, bool]:
    """What a shard takes, and what it would take if it went by its own part."""
    mesh = make_mesh(workers=2, shards=2)
    model = shard_model(nn.Sequential(nn.Linear(4096, 3, bias=False)), mesh)  # two rows, and one row, which is sent whole
    opt = thinwire.DeMo(model.parameters(), NullLink(2), route="auto", codec=DCT(16) >> TopK(1) >> Sign())
    opt.shards.totals = list  # type: ignore[method-assign, assignment]
    return opt.owners is not None, opt._are_better(Owners())


def test_shards_of_a_worker_take_the_same_route_though_their_parts_differ(pool: Pool) -> None:
    told = pool.run(_route_of_a_shard, 4)
    assert [taken for taken, _ in told] == [False] * 4
    assert [alone for _, alone in told] == [False, True] * 2


def test_all_workers_must_have_the_same_route() -> None:
    def worker(link: Link) -> None:
        model = net()
        opt = thinwire.DeMo(model.parameters(), link, route="owners" if link.rank else "gather")
        train(model, opt, link.rank, [1])

    with pytest.raises(thinwire.errors.FingerprintMismatch, match="route"):
        World(2).run(worker)


def test_what_goes_back_has_four_times_the_entries_or_what_was_asked_for() -> None:
    chain = Chain.of(DCT(16) >> TopK(8) >> Sign())
    assert Owners().back_of(chain) == Chain.of(DCT(16) >> TopK(32) >> Sign())
    assert Owners().back_of(Chain.of(DCT(16) >> TopK(0.5) >> Sign())) == Chain.of(DCT(16) >> TopK(0.75) >> Sign())
    assert Owners().back_of(Chain.of(Ternary())) == Chain.of(Ternary())
    assert Owners(DCT(16) >> TopK(9) >> Int8()).back_of(chain) == Chain.of(DCT(16) >> TopK(9) >> Int8())
    assert Owners(Int8()).back_of(Chain.of(Float("bf16"))) == Chain.of(Float("bf16")), "what is exact stays so"


def test_codecs_that_change_with_the_rounds_and_what_is_owed_goes_on() -> None:
    many, few = DCT(16) >> TopK(24) >> Sign(), DCT(16) >> TopK(8) >> Sign()
    shapes = [(64, 48), (40,)]

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor], list[int]]:
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        opt = thinwire.DeMo(params, link, lr=0.1, codec=thinwire.CodecSchedule(many, 2, few), route="owners")
        owed, sent = [], [0]
        for step in range(4):
            for p, t in zip(params, contribution(10 * step + link.rank, shapes), strict=True):
                p.grad = t
            opt.step()
            owed.append(torch.cat([opt.own_state[p]["owed"].flatten() for p in params]))
            sent.append(sum(opt.meter.purposes[what].sent for what in ("round", "back")))
        return [p.detach() for p in params], owed, [b - a for a, b in itertools.pairwise(sent)]

    results = World(3).run(worker)
    for rank, (params, owed, sent) in enumerate(results):
        assert_same(params, results[0][0], "bit-equal on all workers")
        assert all(rest.abs().sum() > 0 for rest in owed) and len({rest.shape for rest in owed}) == 1
        like = [torch.zeros(shape) for shape in shapes]
        due = [sum(owned_nbytes(Owners(), Chain.of(c), like, range(2), 3).sent(rank)) for c in (many, many, few, few)]
        assert sent == due


def test_codecs_whose_owners_would_keep_the_rest_in_different_domains_are_refused() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="must have the same transform"):
        thinwire.DiLoCo(
            adamw(model.parameters()),
            NullLink(3),
            codec=thinwire.CodecSchedule(DCT(4) >> TopK(2) >> Sign(), 2, Fp4()),
            route="owners",
        )


def test_what_owners_forget_is_the_methods_own_unless_it_is_said() -> None:
    def kept(link: Link, method: type[thinwire.Algorithm], route: Any) -> float:
        params = [torch.nn.Parameter(torch.zeros(64, 64))]
        if method is thinwire.DeMo:
            opt: Any = thinwire.DeMo(params, link, route=route)
        else:
            opt = thinwire.DiLoCo(torch.optim.SGD(params, lr=0.1), link, codec=thinwire.parse_codec("ternary"), route=route)
        return opt.owners.kept

    for method, route, due in (
        (thinwire.DeMo, "owners", 0.9),
        (thinwire.DeMo, Owners(feedback=0.5), 0.5),
        (thinwire.DeMo, Owners(feedback=1.0), 1.0),
        (thinwire.DiLoCo, "owners", 1.0),
    ):
        assert World(2).run(lambda link, m=method, r=route: kept(link, m, r)) == [due, due]
