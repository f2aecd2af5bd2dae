"""DecoupledDiLoCo: both of its rules against their own few lines, and the limits in which it is some other method."""

from __future__ import annotations

import io
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.codecs.simple import SimpleTopK
from tests.conformance.training import adamw, assert_close, assert_same, backward, model_of, sgd, snapshot, train
from thinwire import (
    DCT,
    DecoupledDiLoCo,
    Dense,
    DiLoCo,
    Fp4,
    Identity,
    Int8,
    Link,
    Metered,
    Sign,
    SoloLink,
    TopK,
    TwoBit,
    World,
)
from thinwire.codecs import Codec, Messages
from thinwire.codecs.wire import HEADER_NBYTES
from thinwire.errors import ConfigError, NonFiniteRound

H, ROUNDS, WORKERS = 3, 4, 3
SPARSE = DCT(8) >> TopK(5)  # blocks as large as the model's matrices: no padding


class After(NamedTuple):
    """One worker's state right after a round."""

    x: list[Tensor]
    a: list[Tensor]
    m: list[Tensor]
    drift: float


def trainable(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters() if p.requires_grad]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def rounds_of(workers: int = WORKERS, rounds: int = ROUNDS, **settings: Any) -> list[list[After]]:
    """What DecoupledDiLoCo does: [worker][round]."""

    def worker(link: Link) -> list[After]:
        model, seen = model_of(), []
        opt = DecoupledDiLoCo(sgd(model.parameters()), link, H=H, alarm_every=1, **settings)
        for r in range(rounds):
            train(model, opt, link.rank, H, first=r * H + 1)
            seen.append(After(trainable(model), copies(opt.slot("anchor")), copies(opt.slot("momentum")), opt.drift()))
        return seen

    return World(workers).run(worker)


def params_of(cls: Callable[..., Any], workers: int = WORKERS, *, inner: Callable = sgd, **settings: Any) -> list[list[Tensor]]:
    """Parameters of each worker after some rounds of any method."""

    def worker(link: Link) -> list[Tensor]:
        model = model_of()
        train(model, cls(inner(model.parameters()), link, **settings), link.rank, H * ROUNDS)
        return snapshot(model)

    return World(workers).run(worker)


# --- The rules, written again ------------------------------------------------------------------------------------------------

# Of the buffers of all workers: what each one sends, and the mean of it over senders or workers.
Coder = Callable[[list[list[Tensor]], str], tuple[list[list[Tensor]], list[Tensor]]]


def simple(k: int) -> Coder:
    """By the textbook codec, one tensor at a time."""

    def code(fed: list[list[Tensor]], over: str) -> tuple[list[list[Tensor]], list[Tensor]]:
        codecs = [SimpleTopK(tuple(t.shape), k, s=8) for t in fed[0]]
        told = [[c.encode(t) for c, t in zip(codecs, mine, strict=True)] for mine in fed]
        q = [[c.decode([t]) for c, t in zip(codecs, mine, strict=True)] for mine in told]
        if over == "workers":
            return q, [torch.stack(each).mean(0) for each in zip(*q, strict=True)]
        return q, [c.decode(each) for c, each in zip(codecs, zip(*told, strict=True), strict=True)]

    return code


def reference(
    mode: str,
    code: Coder,
    *,
    eta: float,
    beta: float,
    over: str,
    mu: float = 0.0,
    nesterov: bool = True,
    model_of: Callable[[], nn.Module] = model_of,
    backward: Callable[[nn.Module, int, int], object] = backward,
) -> list[list[After]]:
    """The spec's O1 to O11, or its consensus form with a momentum of what was received: [worker][round]."""
    models = [model_of() for _ in range(WORKERS)]
    inners = [sgd(model.parameters()) for model in models]
    theta = [trainable(model) for model in models]
    delta = [[torch.zeros_like(t) for t in mine] for mine in theta]
    v = [torch.zeros_like(t) for t in theta[0]]
    seen: list[list[After]] = [[] for _ in models]
    for round in range(1, ROUNDS + 1):
        for rank, step in itertools.product(range(WORKERS), range((round - 1) * H + 1, round * H + 1)):
            backward(models[rank], rank, step)
            inners[rank].step()
            inners[rank].zero_grad()
        g = [[t - x for t, x in zip(theta[i], trainable(models[i]), strict=True)] for i in range(WORKERS)]  # O1, O2
        fed = [[beta * d + g_ for d, g_ in zip(delta[i], g[i], strict=True)] for i in range(WORKERS)]  # O3
        q, Q = code(fed, over)  # O4, O6, O7
        delta = [[d - q_ for d, q_ in zip(fed[i], q[i], strict=True)] for i in range(WORKERS)]  # O5
        v = [mu * v_ + Q_ for v_, Q_ in zip(v, Q, strict=True)]
        for i, model in enumerate(models):
            if mode == "published":
                delta[i] = [d + Q_ for d, Q_ in zip(delta[i], Q, strict=True)]  # O8
                u = [g_ + beta * d if nesterov else d for g_, d in zip(g[i], delta[i], strict=True)]  # O9
            else:
                u = [Q_ + mu * v_ if nesterov else v_ for Q_, v_ in zip(Q, v, strict=True)]
            theta[i] = [t - eta * u_ for t, u_ in zip(theta[i], u, strict=True)]  # O10
            with torch.no_grad():
                for x, t in zip((p for p in model.parameters() if p.requires_grad), theta[i], strict=True):
                    x.copy_(t)  # O11
            seen[i].append(After(trainable(model), theta[i], delta[i], 0.0))
    return seen


def assert_equal_states(ours: list[list[After]], theirs: list[list[After]], tolerance: float = 1e-5) -> None:
    for mine, expected in zip(ours, theirs, strict=True):
        for a, b in zip(mine, expected, strict=True):
            assert_close(a.x, b.x, tolerance)
            assert_close(a.a, b.a, tolerance)
            assert_close(a.m, b.m, tolerance)


# --- Published: O1 to O11 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("codec", [Dense(), DCT(4) >> TopK(1), SPARSE >> Sign(), Identity(4) >> TopK(2) >> TwoBit()], ids=repr)
def test_published_with_one_worker_is_diloco_whatever_is_sent(codec: Codec, nesterov: bool) -> None:
    """What is taken off the momentum comes back as the mean of one: delta is plain momentum, with beta for its decay."""
    sent: dict[str, Any] = {"mode": "published", "beta": 0.9, "codec": codec}
    common: dict[str, Any] = {"H": H, "outer_lr": 0.7, "nesterov": nesterov, "inner": adamw}
    (ours,), (diloco,) = params_of(DecoupledDiLoCo, 1, **sent, **common), params_of(DiLoCo, 1, outer_momentum=0.9, **common)
    assert_close(ours, diloco, 1e-5)
    (other,) = params_of(DiLoCo, 1, outer_momentum=0.8, **common)
    assert not torch.allclose(ours[0], other[0], atol=1e-4), "the test would see another momentum"


def test_published_with_everything_sent_shares_the_momentum_but_not_the_outer_point() -> None:
    workers = rounds_of(mode="published", beta=0.9, outer_lr=0.7, codec=Dense())
    for first, *others in zip(*workers, strict=True):
        for other in others:
            assert_close(first.m, other.m, 1e-6)
            assert any(bool((a - b).abs().max() > 1e-3) for a, b in zip(first.a, other.a, strict=True))
            assert_same(other.x, other.a, "each goes on from its own outer point")
        assert first.drift > 1e-3
        assert first.drift == others[0].drift == others[1].drift


@pytest.mark.parametrize("over", ["senders", "workers"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_published_is_the_authors_rule(over: str, nesterov: bool) -> None:
    settings: dict[str, Any] = {"beta": 0.9, "over": over, "nesterov": nesterov}
    ours = rounds_of(mode="published", outer_lr=0.7, codec=SPARSE, **settings)
    assert_equal_states(ours, reference("published", simple(5), eta=0.7, **settings))
    assert ours[0][-1].drift > 0


@pytest.mark.parametrize(("over", "conserved"), [("workers", True), ("senders", False)])
def test_published_over_senders_gives_everyone_more_than_was_sent(over: Any, conserved: bool) -> None:
    """Spec 1(a): an entry that one worker sent comes back to all at full strength, and stays in everyone's momentum."""

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        opt = DecoupledDiLoCo(sgd(model.parameters()), link, H=100, mode="published", beta=1.0, over=over, codec=SPARSE)
        train(model, opt, link.rank, H)
        D = [a - x for a, x in zip(opt.slot("anchor"), opt.params(), strict=True)]
        opt.finish()  # the round
        return D, copies(opt.slot("momentum"))

    D, m = zip(*World(WORKERS).run(worker), strict=True)
    fed, left = ([torch.stack(each).sum(0) for each in zip(*all_, strict=True)] for all_ in (D, m))
    excess = max(float((a - b).abs().max()) for a, b in zip(left, fed, strict=True))
    assert (excess < 1e-6) if conserved else (excess > 1e-2)


# --- Consensus ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("codec", [Dense(), Dense(gather=True), DCT(8) >> TopK(100)], ids=repr)
def test_consensus_with_everything_sent_is_diloco(codec: Codec, nesterov: bool) -> None:
    common: dict[str, Any] = {"H": H, "outer_lr": 0.7, "outer_momentum": 0.8, "nesterov": nesterov, "inner": adamw}
    ours = params_of(DecoupledDiLoCo, mode="consensus", beta=0.95, codec=codec, **common)
    for a, b in zip(ours, params_of(DiLoCo, **common), strict=True):
        assert_close(a, b, 1e-5)


def test_consensus_with_everything_sent_and_no_momentum_is_local_sgd() -> None:
    """SparseLoCo's limit: with alpha 1, all entries and no rounding it is FedAvg."""
    settings: dict[str, Any] = {"mode": "consensus", "beta": 0.95, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": Dense()}
    ours = params_of(DecoupledDiLoCo, H=H, inner=adamw, **settings)
    for a, b in zip(ours, params_of(thinwire.LocalSGD, H=H, inner=adamw), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("over", ["senders", "workers"])
@pytest.mark.parametrize(("mu", "nesterov"), [(0.0, True), (0.8, True), (0.8, False)])
def test_consensus_is_its_own_equations(over: str, mu: float, nesterov: bool) -> None:
    settings: dict[str, Any] = {"beta": 0.9, "over": over, "nesterov": nesterov}
    ours = rounds_of(mode="consensus", outer_lr=0.7, outer_momentum=mu, codec=SPARSE, **settings)
    assert_equal_states(ours, reference("consensus", simple(5), eta=0.7, mu=mu, **settings))
    for first, *others in zip(*ours, strict=True):
        for other in others:
            assert_same(first.x, other.x, "parameters are bit-equal after a round")
            assert_same(first.a, other.a, "outer points always are")
            assert any(not torch.equal(a, b) for a, b in zip(first.m, other.m, strict=True)), "what is left is one's own"
            assert other.drift == 0.0


@pytest.mark.parametrize("values", [None, Sign(), Int8()], ids=repr)
def test_with_beta_1_nothing_is_lost(values: Codec | None) -> None:
    """On each worker: all that was ever sent, and what is left, is the sum of its differences."""

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        codec = SPARSE >> values if values else SPARSE
        opt = DecoupledDiLoCo(sgd(model.parameters()), link, H=100, mode="consensus", beta=1.0, outer_lr=1.0, codec=codec)
        walked, sent = ([torch.zeros_like(x) for x in opt.params()] for _ in range(2))
        for r in range(ROUNDS):
            train(model, opt, link.rank, H, first=r * H + 1)
            D = [a - x for a, x in zip(opt.slot("anchor"), opt.params(), strict=True)]
            fed = [m + d for m, d in zip(opt.slot("momentum"), D, strict=True)]
            torch._foreach_add_(walked, D)
            torch._foreach_add_(sent, codec.decode(codec.encode(fed, round=r + 1), fed, round=r + 1))
            opt.finish()  # the round
        assert opt.rounds == ROUNDS
        assert max(float(m.abs().max()) for m in opt.slot("momentum")) > 1e-3, "something is left"
        return [s + m for s, m in zip(sent, opt.slot("momentum"), strict=True)], walked

    for kept, walked in World(WORKERS).run(worker):
        assert_close(kept, walked, 1e-5)


@pytest.mark.parametrize("codec", [SPARSE, SPARSE >> Sign(), Identity(8) >> TopK(5) >> TwoBit()], ids=repr)
@pytest.mark.parametrize("over", ["senders", "workers"])
def test_consensus_at_every_step_is_demo(codec: Codec, over: Any) -> None:
    """After one SGD step the difference is lr g, so the buffers differ by the factor lr, which DeMo puts into its update.

    lr is a power of two, or scales that are rounded to bf16 would be rounded otherwise.
    """
    lr, settings = 2**-5, {"beta": 0.9, "over": over, "codec": codec}

    def ours(link: Link) -> list[Tensor]:
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), lr=lr)
        train(model, DecoupledDiLoCo(inner, link, H=1, mode="consensus", outer_lr=1.0, **settings), link.rank, 10)
        return snapshot(model)

    def demo(link: Link) -> list[Tensor]:
        model = model_of()
        rule: dict[str, Any] = {"phi": "sgd", "whiten": False, "inflow": "gradient", "alpha": 1.0}
        train(model, thinwire.DeMo(model.parameters(), link, lr=lr, **rule, **settings), link.rank, 10)
        return snapshot(model)

    for a, b in zip(World(WORKERS).run(ours), World(WORKERS).run(demo), strict=True):
        assert_close(a, b, 1e-5)
        assert not torch.allclose(a[0], snapshot(model_of())[0], atol=1e-2), "they did train"


# --- Rounding is fed back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["consensus", "published"])
@pytest.mark.parametrize("values", [Sign(), TwoBit(), Int8(), Fp4()], ids=repr)
def test_what_is_left_is_what_was_fed_less_what_the_others_read(mode: Any, values: Codec) -> None:
    codec, beta = DCT(4) >> TopK(6) >> values, 0.9

    def worker(link: Link) -> None:
        model = model_of()
        opt = DecoupledDiLoCo(sgd(model.parameters()), link, H=100, mode=mode, beta=beta, outer_lr=0.5, codec=codec)
        for r in range(1, 4):
            train(model, opt, link.rank, H, first=r * H)
            state = zip(opt.slot("momentum"), opt.slot("anchor"), opt.params(), strict=True)
            fed = [m * beta + (a - x) for m, a, x in state]
            message = codec.encode(fed, round=r)
            read = codec.decode(message, fed, round=r)
            others = link.all_gather(message)
            opt.finish()
            left = [f - q for f, q in zip(fed, read, strict=True)]
            if mode == "published":
                Q = codec.combine(Messages(others, fed, round=r, mean=opt.mean))
                left = [t + Q_ for t, Q_ in zip(left, Q, strict=True)]
            assert_same(opt.slot("momentum"), left, f"round {r}:")
            assert not torch.equal(fed[0], read[0])

    World(2).run(worker)


# --- SparseLoCo --------------------------------------------------------------------------------------------------------------


class Tiles(nn.Module):
    """Six tiles of 64 x 64, and a bias too short to be worth an index."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 128, bias=False)


def tiles() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tiles()


def tiles_backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
    assert isinstance(model, Tiles)
    (model.down(torch.tanh(model.up(x))) - x.repeat(1, 2)).square().mean().mul(100).backward()


def two_bits(values: Tensor) -> Tensor:
    """[groups, n]: a sign and one of two sizes, the mean |x| above and below the group's mean |x|, each as a bf16 number."""
    size = values.abs()
    large = size > size.mean(1, keepdim=True, dtype=torch.float64).float()

    def scale(of: Tensor) -> Tensor:
        return ((size * of).sum(1, keepdim=True, dtype=torch.float64) / of.sum(1, keepdim=True)).bfloat16().float()

    return torch.where(large, scale(large), scale(~large)).copysign(values)


def sparseloco_q(t: Tensor) -> Tensor:
    """The 64 largest of each 64 x 64 tile in two bits; a vector whole, in groups of 256."""
    if t.dim() == 1:
        return two_bits(t.view(1, -1)).view(-1)
    rows, cols = t.shape
    flat = t.view(rows // 64, 64, cols // 64, 64).transpose(1, 2).reshape(-1, 4096)
    kept = flat.abs().topk(64).indices.sort(1).values
    flat = torch.zeros_like(flat).scatter(1, kept, two_bits(flat.gather(1, kept)))
    return flat.view(rows // 64, cols // 64, 64, 64).transpose(1, 2).reshape(rows, cols)


def sparseloco(fed: list[list[Tensor]], over: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    assert over == "workers"
    q = [[sparseloco_q(t) for t in mine] for mine in fed]
    return q, [torch.stack(each).mean(0) for each in zip(*q, strict=True)]


def test_sparseloco_is_its_paper() -> None:
    def worker(link: Link) -> list[After]:
        model, seen = tiles(), []
        opt = DecoupledDiLoCo.sparseloco(sgd(model.parameters()), link, H=H, beta=0.95, outer_lr=1.0)
        assert type(opt) is DecoupledDiLoCo
        for step in range(1, ROUNDS * H + 1):
            tiles_backward(model, link.rank, step)
            opt.step()
            opt.zero_grad()
            if step % H == 0:
                seen.append(After(trainable(model), copies(opt.slot("anchor")), copies(opt.slot("momentum")), opt.drift()))
        return seen

    expected = reference("consensus", sparseloco, eta=1.0, beta=0.95, over="workers", model_of=tiles, backward=tiles_backward)
    ours = World(WORKERS).run(worker)
    assert_equal_states(ours, expected)
    assert [after.drift for after in ours[0]] == [0.0] * ROUNDS


def test_sparseloco_takes_two_bits_and_an_index_per_kept_value() -> None:
    opt = DecoupledDiLoCo.sparseloco(sgd([nn.Parameter(torch.zeros(1024, 1024))]), SoloLink())
    assert opt.settings["over"] == "workers"
    assert opt.settings["outer_momentum"] == 0
    kept = 64 * 1024 * 1024 // 4096
    bits = 8 * (opt.message_nbytes() - HEADER_NBYTES) / kept
    assert 2 + 7.36 < bits < 2 + 12, "between the bound of 64 of 4096 and the paper's 12 bits for an index"
    assert 32 * 1024 * 1024 / (bits * kept) > 146


# --- Bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["consensus", "published"])
@pytest.mark.parametrize("codec", [SPARSE, DCT(4) >> TopK(3) >> Sign(), Dense()], ids=repr)
def test_a_round_is_as_long_as_it_says(mode: Any, codec: Codec) -> None:
    def worker(link: Link) -> tuple[list[int], int]:
        model, metered = model_of(), Metered(link)
        opt = DecoupledDiLoCo(sgd(model.parameters()), metered, H=H, mode=mode, beta=0.9, codec=codec)
        train(model, opt, link.rank, 2 * H)
        return [e.payload for e in metered.meter.recent if e.purpose == "round"], opt.message_nbytes()

    for payloads, expected in World(WORKERS).run(worker):
        assert payloads == [expected] * 2


@pytest.mark.parametrize("k", [8, 16, 32])
def test_the_published_wire_is_1365_over_k_smaller_than_dense_and_ours_smaller_still(k: int) -> None:
    shapes = [(128, 192), (64, 64), (256, 64)]
    numel = sum(math.prod(s) for s in shapes)
    published = sum(SimpleTopK(s, k).nbytes for s in shapes)
    assert 4 * numel / published == pytest.approx(4096 / (3 * k)) == pytest.approx(1365.3 / k, rel=1e-4)
    parameters = [nn.Parameter(torch.zeros(s)) for s in shapes]
    opt = DecoupledDiLoCo(sgd(parameters), SoloLink(), H=H, mode="published", beta=0.95, codec=DCT(64) >> TopK(k))
    assert opt.message_nbytes() - HEADER_NBYTES < 0.5 * published


# --- Rounds that fail, and resuming ------------------------------------------------------------------------------------------


def published(model: nn.Module, link: Link, **settings: Any) -> DecoupledDiLoCo:
    rule: dict[str, Any] = {"H": H, "mode": "published", "beta": 0.9, "outer_lr": 0.7, "codec": SPARSE >> Sign()}
    return DecoupledDiLoCo(adamw(model.parameters()), link, **rule, **settings)


@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize("on_abort", ["keep", "restore"])
def test_published_an_aborted_round_changes_nothing_and_the_next_carries_it(at: str, on_abort: Any) -> None:
    def worker(link: Link) -> None:
        model, twin = model_of(), model_of()
        opt = published(model, thinwire.Flaky(link, {2}, at=at), on_abort=on_abort)
        other = DecoupledDiLoCo(
            adamw(twin.parameters()), link, H=100, mode="published", beta=0.9, outer_lr=0.7, codec=SPARSE >> Sign()
        )
        train(model, opt, link.rank, H)
        before = [copies(opt.slot(name)) for name in ("anchor", "momentum")]
        train(model, opt, link.rank, H, first=H + 1)
        assert opt.aborted_rounds == 1
        for name, tensors in zip(("anchor", "momentum"), before, strict=True):
            assert_same(opt.slot(name), tensors, name)
        if on_abort == "restore":
            assert_same(opt.params(), before[0], "back at its own outer point")
            return
        train(model, opt, link.rank, H, first=2 * H + 1)
        train(twin, other, link.rank, H)
        other.finish()
        train(twin, other, link.rank, 2 * H, first=H + 1)  # as if H had been twice as long
        other.finish()
        assert_same(snapshot(model), snapshot(twin), "the next round carried the local progress along")

    World(2).run(worker)


@pytest.mark.parametrize("mode", ["published", "consensus"])
def test_a_poisoned_worker_is_refused_by_name_and_goes_back_to_its_own_outer_point(mode: Any, caplog: Any) -> None:
    def worker(link: Link) -> None:
        model = model_of()
        opt = DecoupledDiLoCo(
            adamw(model.parameters()), link, H=H, mode=mode, beta=0.9, outer_lr=0.7, codec=SPARSE >> Sign(), alarm_every=1
        )
        train(model, opt, link.rank, H)
        before = [copies(opt.slot(name)) for name in ("anchor", "momentum")]
        train(model, opt, link.rank, H - 1, first=H + 1)
        backward(model, link.rank, 2 * H)
        if link.rank == 1:
            model.first.weight.data[2, 3] = float("nan")
        opt.step()
        opt.zero_grad()
        assert opt.aborted_rounds == 1
        for name, tensors in zip(("anchor", "momentum"), before, strict=True):
            assert_same(opt.slot(name), tensors, name)
        if link.rank == 1:
            assert_same(opt.params(), before[0])
        train(model, opt, link.rank, H, first=2 * H + 1)
        assert opt.aborted_rounds == 1
        for tensors in (opt.params(), opt.slot("anchor"), opt.slot("momentum")):
            assert all(bool(torch.isfinite(t).all()) for t in tensors)

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        World(3).run(worker)
    assert any("NaN or Inf in the contribution of rank 1" in r.getMessage() for r in caplog.records)


def test_published_on_nonfinite_raise_names_the_culprit_everywhere_and_changes_nothing() -> None:
    def worker(link: Link) -> tuple[int, ...]:
        model = model_of()
        opt = published(model, link, on_nonfinite="raise")
        train(model, opt, link.rank, H)
        before = [copies(opt.slot(name)) for name in ("anchor", "momentum")]
        train(model, opt, link.rank, H - 1, first=H + 1)
        backward(model, link.rank, 2 * H)
        if link.rank == 1:
            assert model.gain.grad is not None
            model.gain.grad.fill_(float("inf"))
        with pytest.raises(NonFiniteRound) as refusal:
            opt.step()
        for name, tensors in zip(("anchor", "momentum"), before, strict=True):
            assert_same(opt.slot(name), tensors, name)
        return refusal.value.culprits

    assert World(2).run(worker) == [(1,), (1,)]


@pytest.mark.parametrize("stop", [H, H + 1, 2 * H - 1], ids=["at a round", "mid-interval", "just before a round"])
@pytest.mark.parametrize(
    "rule", [{"mode": "published"}, {"mode": "consensus", "outer_momentum": 0.8}], ids=["published", "consensus"]
)
def test_it_resumes_bit_for_bit(stop: int, rule: dict) -> None:
    """Of "published" the conformance tests know nothing; every worker has its own outer point to come back to."""
    settings: dict[str, Any] = {"H": H, "beta": 0.9, "outer_lr": 0.7, "codec": SPARSE >> Sign(), **rule}

    def straight(link: Link) -> list[Tensor]:
        model = model_of()
        train(model, DecoupledDiLoCo(adamw(model.parameters()), link, **settings), link.rank, 3 * H)
        return snapshot(model)

    def resumed(link: Link) -> list[Tensor]:
        model, disk = model_of(), io.BytesIO()
        opt = DecoupledDiLoCo(adamw(model.parameters()), link, **settings)
        train(model, opt, link.rank, stop)
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, disk)
        disk.seek(0)
        saved, model = torch.load(disk, weights_only=True), model_of(seed=99)
        model.load_state_dict(saved["model"])
        opt = DecoupledDiLoCo(adamw(model.parameters()), link, **settings)
        opt.load_state_dict(saved["opt"])
        train(model, opt, link.rank, 3 * H - stop, first=stop + 1)
        return snapshot(model)

    a, b = World(2).run(straight), World(2).run(resumed)
    for x, y in zip(a, b, strict=True):
        assert_same(x, y)
    assert rule["mode"] == "consensus" or not torch.equal(a[0][0], a[1][0])


# --- Settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "code"}, "mode must be one of 'consensus', 'published', got 'code'"),
        ({"over": "everyone"}, "over must be one of 'workers', 'senders', got 'everyone'"),
        ({"pace": "fast"}, "pace must be one of 'equal', 'speed', got 'fast'"),
        ({"outer_lr": 0.0}, "outer_lr must be above zero and finite, got 0.0"),
        ({"outer_lr": -1.0}, "got -1.0"),
        ({"outer_lr": math.nan}, "got nan"),
        ({"outer_lr": math.inf}, "got inf"),
        ({"beta": 1.5}, "beta must be from 0 to 1, got 1.5"),
        ({"beta": -0.1}, "beta must be from 0 to 1, got -0.1"),
        ({"beta": math.nan}, "beta must be from 0 to 1, got nan"),
        ({"outer_momentum": -0.5}, r"outer_momentum must be .* got -0.5"),
        ({"outer_momentum": 2.0}, r"outer_momentum must be .* got 2.0"),
        ({"mode": "published", "outer_momentum": 0.9}, "the published rule .*: outer_momentum must be 0, got 0.9"),
        ({"pace": "speed", "H": thinwire.Staggered(8, 4)}, r"plain number of steps per round, got H=Staggered\(H=8"),
        ({"pace": "speed", "H": thinwire.Warmup(8, thinwire.Every(4))}, r"plain number of steps .* got H=Warmup\(steps=8"),
        ({"pace": "speed", "H": 0}, "H must be a whole number of at least 1, got 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_with_what_is_allowed(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoupledDiLoCo(sgd(model_of().parameters()), SoloLink(), **settings)


def test_a_momentum_of_what_was_received_is_kept_only_where_it_is_asked_for() -> None:
    for mu, slots in ((0.0, 2), (0.5, 3)):
        opt = DecoupledDiLoCo(sgd(model_of().parameters()), SoloLink(), mode="consensus", outer_momentum=mu)
        assert all(len(opt.own_state[p]) == slots for p in opt._active)


def test_workers_that_follow_different_rules_are_refused_by_name() -> None:
    def worker(link: Link) -> None:
        model = model_of()
        rule: Any = ("consensus", "published")[link.rank]
        train(model, DecoupledDiLoCo(sgd(model.parameters()), link, mode=rule, beta=0.9, H=2), link.rank, 2)

    with pytest.raises(thinwire.errors.FingerprintMismatch, match="mode is 'consensus' on rank 0 and 'published' on rank 1"):
        World(2).run(worker)


@pytest.mark.parametrize("mode", ["consensus", "published"])
def test_workers_that_start_from_other_weights_are_refused(mode: Any) -> None:
    def worker(link: Link) -> None:
        model = model_of(seed=link.rank)
        train(model, DecoupledDiLoCo(sgd(model.parameters()), link, mode=mode, beta=0.9, H=2), link.rank, 1)

    with pytest.raises(thinwire.errors.FingerprintMismatch, match=r"the starting value of '\w+' differs: .*: seed all"):
        World(2).run(worker)
