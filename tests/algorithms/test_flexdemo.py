"""FlexDeMo: DeMo on a hybrid-sharded mesh, `fully_shard` on one axis and the link on the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.test_sharded import uneven
from tests.conformance.training import assert_close, assert_same
from tests.conformance.training import backward as backward_uneven
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import DCT, Codec, DeMo, Float, Link, Metered, RandomK, Sign, SoloLink, Striding, TopK, TorchLink, World
from thinwire.links import LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.payload import Payload
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import local, reshard

STEPS = 5
TOPK = DCT(64) >> TopK(32)
Answer = dict[str, Any]


class Borders(nn.Module):
    """Every row shard of 2 ends where a block of 64 does, those of the 1-D tensors too, if it has any."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128, bias=bias)
        self.second = nn.Linear(128, 128, bias=bias)
        self.gain = nn.Parameter(torch.ones(128), requires_grad=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.gain


def borders(bias: bool = True) -> Borders:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Borders(bias)


def backward(model: nn.Module, worker: int, step: int) -> None:
    """All shards of a worker take the same batch, so that FSDP2's mean of their gradients is, exactly, each of them."""
    g = torch.Generator().manual_seed(100 * worker + step)
    x = torch.randn(8, 64, generator=g)
    (model(x) - torch.cat([x.cos(), x * x], 1)).square().mean().backward()


def train(model: nn.Module, opt: torch.optim.Optimizer, worker: int, steps: int = STEPS) -> None:
    for step in range(1, steps + 1):
        backward(model, worker, step)
        opt.step()
        opt.zero_grad()


def whole(model: nn.Module) -> list[Tensor]:
    reshard(model)
    return [(p.detach() if local(p) is p else p.detach().full_tensor()).clone() for p in model.parameters()]


def _on_mesh(_: Link, workers: int, shards: int, settings: dict[str, Any], bias: bool = True) -> Answer:
    mesh = make_mesh(workers=workers, shards=shards)
    link = Metered(TorchLink(mesh["replicate"], timeout=LIMIT))
    model = shard_model(borders(bias), mesh)
    opt = DeMo(model.parameters(), link, alarm_every=1, **settings)
    train(model, opt, link.rank)
    rounds = [e for e in link.meter.recent if e.purpose == "round"]
    return {
        "worker": link.rank,
        "shard": mesh["shard"].get_local_rank(),
        "params": whole(model),
        "momentum": [t.clone() for t in opt.slot("momentum")],
        "bytes": [e.payload for e in rounds],
        "sent": sum(e.sent for e in rounds),
        "ops": {e.op for e in rounds},
        "aborted": opt.aborted_rounds,
    }


def _unsharded(link: Link, settings: dict[str, Any], bias: bool = True) -> Answer:
    link = Metered(link)
    model = borders(bias)
    opt = DeMo(model.parameters(), link, alarm_every=1, **settings)
    train(model, opt, link.rank)
    rounds = [e for e in link.meter.recent if e.purpose == "round"]
    momentum = [t.clone() for t in opt.slot("momentum")]
    sent = sum(e.sent for e in rounds)
    return {"params": whole(model), "momentum": momentum, "bytes": [e.payload for e in rounds], "sent": sent}


# --- Known limits ------------------------------------------------------------------------------------------------------


SETTINGS: list[dict[str, Any]] = [
    {"phi": "sign", "whiten": False, "codec": TOPK},
    {"phi": "sign", "whiten": False, "codec": DCT(64) >> TopK(8) >> Sign(), "inflow": "lr"},
    {"phi": "unit", "whiten": True, "codec": TOPK},
    {"phi": "unit", "whiten": True, "codec": DCT(64) >> TopK(8) >> Sign(), "delay": True},
    {"phi": "adam", "whiten": False, "codec": TOPK, "alpha": 0.2, "inflow": "ema"},
]


def _both(settings: dict[str, Any], pool: Pool, *, bias: bool) -> tuple[list[tuple], list[tuple]]:
    """Pairs of parameters, and pairs of momenta put together from their shards, of 2 x 2 and of 2 unsharded workers."""
    settings = {"lr": 1e-3, **settings}
    sharded = pool.run(_on_mesh, 4, 2, 2, settings, bias)
    expected = World(2).run(lambda link: _unsharded(link, settings, bias))
    params = [(a["params"], expected[a["worker"]]["params"]) for a in sharded]
    momenta = []
    for worker in range(2):
        mine = [a["momentum"] for a in sharded if a["worker"] == worker]
        axes = [0 if len(whole) > 1 else 1 for whole in expected[worker]["momentum"]]  # 1-D tensors are rows, cut in columns
        momenta.append(([torch.cat(s, axis) for axis, *s in zip(axes, *mine, strict=True)], expected[worker]["momentum"]))
    return params, momenta


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s['phi']} {s['codec']}")
def test_2x2_with_shards_that_end_on_block_borders_is_2_unsharded_workers(settings: dict[str, Any], pool: Pool) -> None:
    """Bit for bit, momenta too."""
    params, momenta = _both(settings, pool, bias=False)
    for ours, expected in [*params, *momenta]:
        assert_same(ours, expected)


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, SETTINGS[2] | {"clip_norm": 0.1, "delay": True}],
    ids=lambda s: f"{s['phi']} {s['codec']}{' clipped' * ('clip_norm' in s)}",
)
def test_so_it_is_with_1d_tensors_up_to_rounding(settings: dict[str, Any], pool: Pool) -> None:
    """The product of one row with the DCT's matrix is a product with a vector to BLAS, and rounds otherwise than that of two.

    Likewise the norm of a gradient is a sum in another order. Without the large eps, the first whitened gradient would be +-1
    everywhere, several coefficients could be equally large, and rounding would choose which of them are sent.
    """
    params, momenta = _both({**settings, "eps": 1e-3}, pool, bias=True)
    for ours, expected in params:
        assert_close(ours, expected, 1e-6)
    for ours, expected in momenta:
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


BASE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
}


def _one_worker(_: Link, phi: str, link: str, codec: Codec) -> tuple[list[Tensor], list[Tensor], float]:
    """FlexDeMo with nobody to exchange with, and FSDP2 with the base optimizer; momenta that are left."""
    mesh = make_mesh(workers=1, shards=4) if link == "torch" else make_mesh(workers=2, shards=2)
    alone = TorchLink(mesh["replicate"], timeout=LIMIT) if link == "torch" else SoloLink()
    worker = mesh["replicate"].get_local_rank()
    ours, base = shard_model(borders(), mesh), shard_model(borders(), mesh)
    settings: dict[str, Any] = {"lr": 0.05} if phi == "sgd" else {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    opt = DeMo(ours.parameters(), alone, phi=phi, whiten=False, codec=codec, **settings)  # type: ignore[arg-type]
    train(ours, opt, worker)
    train(base, BASE[phi](base.parameters()), worker)
    return whole(ours), whole(base), max(float(m.abs().max()) for m in opt.slot("momentum"))


@pytest.mark.parametrize("link", ["solo", "torch"])
@pytest.mark.parametrize("phi", ["sgd", "adam"])
def test_one_worker_that_sends_everything_is_fsdp2_with_the_base_optimizer(phi: str, link: str, pool: Pool) -> None:
    for ours, base, left in pool.run(_one_worker, 4, phi, link, Float("fp32")):
        assert_close(ours, base, 1e-6)  # the same formula, in another order of multiplications
        assert left == 0, "all of it was sent"


def test_one_worker_that_sends_all_coefficients_is_fsdp2_up_to_the_transform(pool: Pool) -> None:
    for ours, base, left in pool.run(_one_worker, 4, "sgd", "solo", DCT(64) >> Float("fp32")):
        assert_close(ours, base, 1e-5)
        assert left < 1e-6


@pytest.mark.parametrize("codec", [TOPK >> Sign(), DCT(64) >> RandomK(0.1)], ids=repr)
def test_one_shard_per_worker_is_demo_without_a_mesh(codec: Codec, pool: Pool) -> None:
    settings = {"codec": codec}
    with_mesh, without = pool.run(_on_mesh, 4, 4, 1, settings), pool.run(_unsharded, 4, settings)
    for a, b in zip(with_mesh, without, strict=True):
        assert_same(a["params"], b["params"])
        assert_same(a["momentum"], b["momentum"])
        assert a["bytes"] == b["bytes"]


# --- Who talks to whom -------------------------------------------------------------------------------------------------


class Overheard(LinkDecorator):
    """Keeps what was posted to a round and what came of it."""

    def __init__(self, link: Link):
        super().__init__(link)
        self.said: list[bytes] = []
        self.heard: list[list[bytes]] = []

    def post(self, payload: Payload, op: Op) -> Ticket:
        if payload.purpose == "round":
            self.said.append(payload.to_bytes())
        return _OverheardTicket(self, self.link.post(payload, op), payload.purpose)


class _OverheardTicket(Ticket):
    def __init__(self, link: Overheard, ticket: Ticket, purpose: str):
        self.link, self.ticket, self.purpose = link, ticket, purpose

    def _finish(self) -> list[Payload]:
        result = self.ticket.wait()
        if self.purpose == "round":
            self.link.heard.append([p.to_bytes() for p in result])
        return result


def _overheard(_: Link) -> tuple[int, int, list[bytes], list[list[bytes]]]:
    mesh = make_mesh(workers=2, shards=2)
    link = Overheard(TorchLink(mesh["replicate"], timeout=LIMIT))
    model = shard_model(borders(), mesh)
    train(model, DeMo(model.parameters(), link, codec=TOPK), link.rank)
    return link.rank, mesh["shard"].get_local_rank(), link.said, link.heard


def test_processes_with_the_same_shard_exchange_and_others_do_not(pool: Pool) -> None:
    answers = {(worker, shard): (said, heard) for worker, shard, said, heard in pool.run(_overheard, 4)}
    assert len(answers) == 4
    everything = [message for said, _ in answers.values() for message in said]
    assert len(set(everything)) == 4 * STEPS, "no two messages are alike, so contents tell who sent them"
    for (_, shard), (_, heard) in answers.items():
        assert heard == [list(pair) for pair in zip(answers[0, shard][0], answers[1, shard][0], strict=True)]


@pytest.mark.parametrize("codec", [TOPK, TOPK >> Sign(), DCT(64) >> RandomK(0.1), Float("fp32")], ids=repr)
def test_the_shards_of_a_worker_send_together_what_an_unsharded_worker_sends(codec: Codec, pool: Pool) -> None:
    sharded = pool.run(_on_mesh, 4, 2, 2, {"codec": codec})
    one = World(2).run(lambda link: _unsharded(link, {"codec": codec}))[0]
    for worker in range(2):
        shards = [a for a in sharded if a["worker"] == worker]
        assert len({a["sent"] for a in shards}) == 1, "equal shards, equal shares"
        extra = sum(a["sent"] for a in shards) - one["sent"]
        assert 0 < extra <= 100 * STEPS, "one more header, or status numbers, and codes rounded up to bytes"
    assert all(a["bytes"] == [a["bytes"][0]] * STEPS for a in sharded)


# --- Other schemes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [RandomK(1 / 16, seed=42), Striding(1 / 16), DCT(64) >> RandomK(1 / 16)], ids=repr)
def test_schemes_without_indices_keep_replicas_equal(codec: Codec, pool: Pool) -> None:
    answers = pool.run(_on_mesh, 4, 2, 2, {"codec": codec, "phi": "sign", "whiten": False})
    start = whole(borders())
    for answer in answers:
        assert_same(answer["params"], answers[0]["params"])
        assert any(not torch.equal(a, b) for a, b in zip(answer["params"], start, strict=True))
        assert answer["ops"] == {"mean"}, "averaged on the wire"
        # A sixteenth of this process's half of all entries, 4 bytes each and no index; one status number per worker.
        entries = sum(p.numel() for p in start) // 2
        assert answer["bytes"] == [4 * (entries // 16 + 2)] * STEPS
    for shard in range(2):
        a, b = (x["momentum"] for x in answers if x["shard"] == shard)
        assert all(not torch.equal(x, y) for x, y in zip(a, b, strict=True)), "momenta are each worker's own"


def test_striding_sends_every_entry_of_every_shard_once_in_its_turn(pool: Pool) -> None:
    """With a stride of as many steps as are taken, and sgd: each entry has moved, on both shards."""
    settings = {"codec": Striding(1 / STEPS), "phi": "sgd", "whiten": False, "lr": 0.1}
    for answer in pool.run(_on_mesh, 4, 2, 2, settings):
        for p, start in zip(answer["params"], whole(borders()), strict=True):
            assert float((p != start).float().mean()) > 0.999


# --- Awkward shards ----------------------------------------------------------------------------------------------------


class OneRow(nn.Module):
    """The second shard of 2 holds nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 1)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return torch.tanh(self.first(x)) * torch.ones(3)


def _awkward(_: Link, kind: str, shards: int, settings: dict[str, Any], poison: bool) -> Answer:
    torch.manual_seed(0)
    mesh = make_mesh(workers=4 // shards, shards=shards)
    link = TorchLink(mesh["replicate"], timeout=LIMIT)
    model = shard_model(OneRow() if kind == "one row" else uneven(torch.float32), mesh)
    opt = DeMo(model.parameters(), link, alarm_every=1, **settings)
    empty, unchanged = sum(p.numel() for p in opt.params()) == 0, True
    start, moved = whole(model), [False] * len(list(model.parameters()))
    for step in range(1, STEPS + 1):
        backward_uneven(model, link.rank, step)
        before = [t.clone() for t in [*opt.params(), *opt.slot("momentum"), *opt.slot("own_v")]]
        if poison and step == 2 and link.rank == 1 and mesh["shard"].get_local_rank() == 0:
            local(model.first.weight.grad)[0, 0] = math.nan  # in one row only: the other shard cannot see it by itself
        opt.step()
        if poison and step == 2 and link.rank == 1:
            after = [*opt.params(), *opt.slot("momentum"), *opt.slot("own_v")]
            unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        opt.zero_grad()
        moved = [m or not torch.equal(a, b) for m, a, b in zip(moved, whole(model), start, strict=True)]
    finite = all(bool(torch.isfinite(t).all()) for t in [*opt.params(), *opt.slot("momentum"), *opt.slot("own_v")])
    opt.finish()
    health = (opt.drift(), opt.aborted_rounds, finite)
    return {"params": whole(model), "health": health, "unchanged": unchanged, "empty": empty, "moved": moved}


CODECS = [DCT(4) >> TopK(3), DCT(4) >> TopK(3) >> Sign(), DCT(4) >> RandomK(0.25), Striding(0.25), Float("fp32")]


@pytest.mark.parametrize("codec", first_quick(CODECS, quick=2), ids=repr)
@pytest.mark.parametrize(("kind", "shards"), first_quick([("uneven", 4), ("uneven", 2), ("one row", 2)]))
def test_shards_that_do_not_divide_or_are_empty_train(kind: str, shards: int, codec: Codec, pool: Pool) -> None:
    answers = pool.run(_awkward, 4, kind, shards, {"codec": codec, "clip_norm": 1.0}, False)
    for answer in answers:
        assert_same(answer["params"], answers[0]["params"])
        assert answer["health"] == (0.0, 0, True)
    moved = answers[0]["moved"]  # in some step: steps of one size may lead back to the start
    assert moved == [True] * 2 if kind == "one row" else sum(moved) == 5, "all but the frozen one"
    assert [a["empty"] for a in answers] == ([False, True] * 2 if kind == "one row" else [False] * 4)


@pytest.mark.parametrize("codec", [CODECS[1], CODECS[2]], ids=["gathered", "averaged on the wire"])
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_a_nan_in_one_shard_is_refused_by_all(codec: Codec, delay: bool, pool: Pool) -> None:
    answers = pool.run(_awkward, 4, "uneven", 2, {"codec": codec, "delay": delay}, True)
    for answer in answers:
        assert_same(answer["params"], answers[0]["params"])
        assert answer["health"] == (0.0, 1, True)
        assert answer["unchanged"] or delay, "neither shard of the culprit takes anything over, but for the round before"
