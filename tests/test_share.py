"""`share`: state that lives in the domain of a transform, exchanged without a copy of the model."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.codecs.simple import SimpleTopK
from tests.processes import LIMIT, Pool
from thinwire.codecs import (
    DCT,
    Chain,
    Codec,
    Dense,
    Float,
    Hadamard,
    Identity,
    Int8,
    Mean,
    Messages,
    RandomK,
    RandomOrthogonal,
    Sign,
    Striding,
    TopK,
    TwoBit,
)
from thinwire.core.average import average, message_nbytes, share
from thinwire.core.exchange import post
from thinwire.core.outgoing import Outgoing
from thinwire.errors import ConfigError, NonFiniteRound, WireError
from thinwire.links import Link, Metered, SoloLink, TorchLink
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import local
from thinwire.sim import World

SHAPES = [(192, 128), (65, 70), (64,), (3, 5, 5), (), (0, 4)]
DIVISIBLE = [(128, 192), (64, 64), (128,)]
CHAINS = [
    DCT(64) >> TopK(32) >> Sign(),
    DCT(64) >> TopK(8) >> Float("bf16"),
    Hadamard(32) >> TopK(0.05) >> Int8(),
    TopK(64) >> TwoBit(),
    DCT(64) >> RandomK(0.1) >> Float("fp32"),
    Identity(16) >> Striding(0.25) >> Sign(),
]


def gradients(rank: int, step: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(s, generator=g) for s in shapes]


def decoupled_momentum(link: Link, chain: Chain, steps: int, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """A few steps of DeMo: parameters and momenta at the end."""
    params = [torch.zeros(s) for s in SHAPES]
    momenta = [torch.zeros(s) for s in chain.slot_shapes(params)]
    for step in range(1, steps + 1):
        got = share(link, chain, momenta, gradients(link.rank, step), round=step, decay=0.9, scale=1.0, **options)
        link.commit()
        got.take_from(momenta)
        for _, p, q in got.each(params):
            p.add_(q.sign_(), alpha=-0.1)
    return params, momenta


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_parameters_are_bit_equal_on_all_workers_and_momenta_are_not(chain: Chain) -> None:
    (params, momenta), *others = World(3).run(lambda link: decoupled_momentum(link, chain, 4))
    for other, theirs in others:
        assert all(torch.equal(a, b) for a, b in zip(params, other, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(momenta, theirs, strict=True))
    assert all(p.abs().max() > 0 for p in params if p.numel())


@pytest.mark.parametrize("chain", CHAINS[:4], ids=repr)
def test_real_processes_compute_the_same_bits_as_the_simulator(chain: Chain, pool: Pool) -> None:
    simulated = World(3).run(lambda link: decoupled_momentum(link, chain, 3))
    real = pool.run(decoupled_momentum, 3, chain, 3)
    for s, r in zip(simulated, real, strict=True):
        for a, b in zip(s, r, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_it_says_what_average_says_of_the_same_tensors(chain: Chain) -> None:
    """The domain of the transform is a change of basis: state kept there and state kept outside see the same messages.

    Of a padded tensor, a slot also remembers what was sent of the padding, which a tensor forgets: hence no padding here.
    """

    def worker(link: Link) -> float:
        momenta = gradients(link.rank, 0, DIVISIBLE)
        slots = [torch.zeros(s) for s in chain.slot_shapes(momenta)]
        chain.accumulate(slots, momenta, decay=0.0)
        worst = 0.0
        for round in range(1, 4):
            got = share(link, chain, slots, momenta, round=round)
            mean, sent = average(link, chain, momenta, round=round, want_sent=True)
            got.take_from(slots)
            for m, s in zip(momenta, sent, strict=True):
                m.sub_(s)
            pairs = zip(mean, got.mean, strict=True)
            worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs if a.numel()))
        return worst

    # Where rounding makes two entries of a block change places, a whole coefficient differs: none does for these seeds.
    assert max(World(2).run(worker)) < 1e-4


def test_it_is_the_simple_codec_in_other_clothes() -> None:
    """A round of DeMo, tensor by tensor as it is described, and ours: the same parameters and the same residual."""
    chain, codecs = DCT(64) >> TopK(16), [SimpleTopK(s, 16) for s in DIVISIBLE]
    simple = [[torch.zeros(s) for s in DIVISIBLE] for _ in range(3)]
    params = [torch.zeros(s) for s in DIVISIBLE]

    def fast(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        x, m = [torch.zeros(s) for s in DIVISIBLE], [torch.zeros(s) for s in chain.slot_shapes(params)]
        for step in range(3):
            got = share(link, chain, m, gradients(link.rank, step, DIVISIBLE), decay=0.9, scale=1.0, mean=Mean(over="senders"))
            got.take_from(m)
            for _, p, q in got.each(x):
                p.sub_(q)
        return x, m

    for step in range(3):
        for i, codec in enumerate(codecs):
            messages = []
            for rank in range(3):
                m = simple[rank][i]
                m.mul_(0.9).add_(gradients(rank, step, DIVISIBLE)[i])
                messages.append(codec.encode(m))
                m.sub_(codec.decode(messages[-1:]))
            params[i].sub_(codec.decode(messages))
    for rank, (x, m) in enumerate(World(3).run(fast)):
        for got, expected in zip(x, params, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        for slot, momentum in zip(m, simple[rank], strict=True):
            assert math.isclose(float(slot.norm()), float(momentum.norm()), rel_tol=1e-4), "Parseval"


def test_partial_subtraction_leaves_the_rest() -> None:
    chain, x = DCT(64) >> TopK(8) >> Sign(), gradients(0, 0)
    slots = [torch.zeros(s) for s in chain.slot_shapes(x)]
    before = [torch.zeros(s) for s in chain.slot_shapes(x)]
    chain.accumulate(before, x, decay=0.0)
    got = share(SoloLink(), chain, slots, x, decay=0.0, scale=1.0)
    got.take_from(slots, scale=0.2)
    got.take_from(slots, scale=0.8)
    whole = [b.clone() for b in before]
    got.take_from(whole)
    for a, b in zip(slots, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_what_is_sent_is_counted_to_the_byte() -> None:
    def worker(link: Link) -> None:
        for chain in CHAINS:
            metered = Metered(link)
            like = gradients(link.rank, 0)
            share(metered, chain, [torch.zeros(s) for s in chain.slot_shapes(like)], like, scale=1.0)
            assert metered.meter.recent[-1].payload == message_nbytes(link, chain, like)

    World(3).run(worker)


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_a_bad_gradient_refuses_the_round_on_all_workers_and_no_slot_keeps_it(chain: Chain) -> None:
    def worker(link: Link) -> tuple[Exception | None, bool, bool]:
        like = gradients(link.rank, 0)
        slots = [torch.ones(s) for s in chain.slot_shapes(like)]
        if link.rank == 1:
            like[0][7, 7] = math.nan
        try:
            share(link, chain, slots, like, decay=0.5, scale=1.0)
        except NonFiniteRound as error:
            return error, all(bool(s.isfinite().all()) for s in slots), all(bool((s == 1).all()) for s in slots)
        return None, False, False

    for rank, (error, finite, untouched) in enumerate(World(3).run(worker)):
        assert isinstance(error, NonFiniteRound) and error.culprits == (1,)
        assert finite and untouched == (rank == 1)


def test_weights_count_the_work() -> None:
    chain = Identity(4) >> TopK(2)

    def worker(link: Link) -> list[float]:
        like = [torch.tensor([4.0, 0.0, 0.0, 8.0]) if link.rank else torch.tensor([2.0, 1.0, 0.0, 0.0])]
        slots = [torch.zeros(s) for s in chain.slot_shapes(like)]
        weight = 3.0 if link.rank else 1.0
        return share(link, chain, slots, like, decay=0.0, scale=1.0, weight=weight).mean[0].tolist()

    for mean in World(2).run(worker):
        assert mean == [(2 + 3 * 4) / 4, 1 / 4, 0, 3 * 8 / 4]


def test_weights_count_on_the_wire_too() -> None:
    chain = Identity(4) >> Striding(2)

    def worker(link: Link) -> tuple[list[float], list[float]]:
        like = [torch.full((4,), 5.0 if link.rank else 1.0)]
        slots = [torch.zeros(s) for s in chain.slot_shapes(like)]
        got = share(link, chain, slots, like, decay=0.0, scale=1.0, weight=3.0 if link.rank else 1.0)
        got.take_from(slots)
        return got.mean[0].tolist(), slots[0].flatten().tolist()

    for rank, (mean, left) in enumerate(World(2).run(worker)):
        assert mean == [4.0, 0.0, 4.0, 0.0]
        assert left == [0.0, 5.0 if rank else 1.0] * 2, "a worker takes off what it sent, not what it weighs"


@pytest.mark.parametrize("codec", [Float("bf16"), Dense("fp16")], ids=repr)
def test_a_narrow_wire_does_not_add_up_weights(codec: Codec) -> None:
    with pytest.raises(ConfigError, match="use fp32, or a gathered codec"):
        average(SoloLink(), codec, [torch.ones(3)], weight=501.0)
    mean, _ = average(SoloLink(), Dense("fp32"), [torch.ones(3)], weight=501.0)
    assert mean[0].tolist() == [1.0, 1.0, 1.0]


def test_a_worker_with_another_codec_is_found_by_its_fingerprint() -> None:
    def worker(link: Link) -> str:
        chain = DCT(64) >> TopK(32) >> (Sign() if link.rank else Sign(64))
        like = [torch.ones(64, 64)]
        try:
            share(link, chain, [torch.zeros(64, 64)], like, scale=1.0)
        except WireError as error:
            return f"{error.rank}: {error}"
        return ""

    said = World(2).run(worker)
    assert said[0].startswith("1: the message of rank 1: ") and said[1].startswith("0: the message of rank 0: ")


def test_it_hides_behind_computing_and_slots_may_grow_meanwhile() -> None:
    chain, x = DCT(64) >> TopK(8), [torch.randn(64, 64)]
    slots = [torch.zeros(64, 64)]
    pending = post(SoloLink(), Outgoing(x, chain, slots=slots, decay=0.0, scale=1.0))
    kept = slots[0].clone()
    chain.accumulate(slots, x, decay=1.0)
    got = pending.wait()
    got.take_from(slots)
    left = kept.clone()
    got.take_from([left])
    torch.testing.assert_close(slots[0] - kept, left, rtol=1e-5, atol=1e-5)


def test_slots_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"slot 0 must be float32\[60, 128\] \(see slot_shapes\), got float32\[60, 100\]"):
        share(SoloLink(), DCT(64) >> TopK(8), [torch.zeros(60, 100)], [torch.zeros(60, 100)])
    with pytest.raises(ConfigError, match=r"slot 0 must be float32\[60, 64\]"):
        share(SoloLink(), RandomOrthogonal(64) >> TopK(8), [torch.zeros(64, 64)], [torch.zeros(60, 64)])
    two = [torch.zeros(64, 64)] * 2
    with pytest.raises(ConfigError, match="1 numbers for 2 tensors"):
        share(SoloLink(), DCT(64) >> TopK(8), [torch.zeros(64, 64), torch.zeros(64, 64)], two, decay=1.0, scale=[1.0])


# --- Shards ------------------------------------------------------------------------------------------------------------------


class _Matrices(nn.Module):
    """Rows that a mesh of two shards cuts at a border of blocks, and tensors of which one shard holds little or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.zeros(128, 100))
        self.lonely = nn.Parameter(torch.zeros(1, 3))


def _step_on_a_mesh(_: Link, chain: Chain) -> tuple[int, list[Tensor], list[int]]:
    """One step on row shards: each process encodes its own part, and talks to its twin on the other worker only."""
    mesh = make_mesh(workers=2, shards=2)
    link = Metered(TorchLink(mesh["replicate"], timeout=LIMIT))
    model = shard_model(_Matrices(), mesh)
    params = [local(p.detach()) for p in model.parameters()]
    rows = slice(64 * mesh["shard"].get_local_rank(), 64 * (mesh["shard"].get_local_rank() + 1))
    whole = gradients(link.rank, 0, [(128, 100), (1, 3)])
    grads = [whole[0][rows], whole[1][rows]]
    assert [g.shape for g in grads] == [p.shape for p in params]
    slots = [torch.zeros(s) for s in chain.slot_shapes(params)]
    got = share(link, chain, slots, grads, decay=0.0, scale=1.0)
    for _, p, q in got.each(params):
        p.sub_(q)
    return link.rank, [p.detach().full_tensor() for p in model.parameters()], [e.payload for e in link.meter.recent]


@pytest.mark.parametrize("chain", [DCT(64) >> TopK(16) >> Sign(), TopK(8) >> Float("bf16")], ids=repr)
def test_row_shards_say_what_the_whole_matrix_says(chain: Chain, pool: Pool) -> None:
    def whole(link: Link) -> list[Tensor]:
        grads = gradients(link.rank, 0, [(128, 100), (1, 3)])
        mean, _ = average(link, chain, grads)
        return [-m for m in mean]

    expected = World(2).run(whole)[0]
    for _, params, payloads in pool.run(_step_on_a_mesh, 4, chain):
        assert len(payloads) == 1, "one message a round"
        torch.testing.assert_close(params[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(params[1], expected[1], rtol=1e-5, atol=1e-6)


# --- Memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 8, 64])
def test_more_workers_take_no_more_workspace(workers: int) -> None:
    """Beside their messages, and the indices that are kept up to a limit."""
    chain, like = DCT(64) >> TopK(32) >> Float("bf16"), [torch.zeros(1024, 1024), *[torch.zeros(768) for _ in range(60)]]
    messages = [chain.encode([torch.randn(t.shape) for t in like])] * workers
    received = chain.receive(Messages(messages, like))
    tracemalloc.start()
    try:
        for _ in received.each(like):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12e6, f"{peak / 1e6:.1f} MB for the messages of {workers} workers, {messages[0].nbytes / 1e6:.2f} MB each"
