"""Merge rules: RDA keeps the length of differences that point in different directions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.test_sharded import uneven
from tests.conformance.training import assert_close, assert_same, backward, model_of, sgd, snapshot, train
from tests.processes import LIMIT, Pool
from thinwire import Codec, Dense, DiLoCo, Fp4, Int8, Link, Metered, TorchLink, World, average
from thinwire.codecs import Parts
from thinwire.codecs.wire import PART_NBYTES
from thinwire.errors import NonFiniteRound
from thinwire.maths.outer import Merge, norms_of
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import Shards, reshard

RDA, ALONE = Merge("rda"), Shards([])


def merged(differences: list[list[Tensor]], codec: Codec | None = None, weights: list[float] | None = None) -> list[Tensor]:
    """What all workers make of these differences; checked to be the same on all of them."""
    codec = codec or Dense()

    def worker(link: Link) -> list[Tensor]:
        D = differences[link.rank]
        weight = None if weights is None else weights[link.rank]
        mean, _ = average(link, RDA.codec(codec, len(D)), RDA.outgoing(D, ALONE), weight=weight)
        return RDA.merged(mean, ALONE)

    first, *others = World(len(differences)).run(worker)
    for other in others:
        assert_same(first, other)
    return first


def vectors(*seeds: int, n: int = 50) -> list[list[Tensor]]:
    return [[torch.randn(n, generator=torch.Generator().manual_seed(s)), torch.randn(3, 4)] for s in seeds]


@pytest.mark.parametrize("M", [2, 4, 8])
def test_orthogonal_vectors_keep_their_length(M: int) -> None:
    R = 3.0
    (D,) = merged([[R * torch.eye(M)[i]] for i in range(M)])
    assert D.norm().item() == pytest.approx(R, rel=1e-6)
    assert torch.stack([R * torch.eye(M)[i] for i in range(M)]).mean(0).norm().item() == pytest.approx(R / math.sqrt(M))
    torch.testing.assert_close(D, torch.full((M,), R / math.sqrt(M)), msg="in the direction of the mean")


def test_identical_vectors_are_left_alone() -> None:
    one = vectors(0)[0]
    assert_close(merged([one, one, one]), one)


def test_the_length_is_the_mean_of_the_lengths_and_the_direction_the_mean_of_the_directions() -> None:
    """A long vector has no more say about the direction than a short one."""
    x, y = torch.tensor([10.0, 0.0]), torch.tensor([0.0, 2.0])
    (D,) = merged([[x], [y]])
    assert_close([D], [6.0 * torch.tensor([1.0, 1.0]) / math.sqrt(2)])
    (D,) = merged([[x], [y]], weights=[1.0, 3.0])
    assert_close([D], [4.0 * torch.tensor([1.0, 3.0]) / math.sqrt(10)])


@pytest.mark.parametrize("codec", [Dense(), Dense(gather=True), Int8()], ids=repr)
def test_workers_of_weight_0_do_not_change_the_result(codec: Codec) -> None:
    a, b, c = vectors(1, 2, 3)
    without = merged([a, b], codec, weights=[2.0, 1.0])
    assert_close(merged([a, b, c], codec, weights=[2.0, 1.0, 0.0]), without)
    assert_close(merged([c, a, b], codec, weights=[0.0, 2.0, 1.0]), without)


def test_tensors_of_zeros() -> None:
    zero, x = torch.zeros(4), torch.tensor([0.0, 4.0, 0.0, 0.0])
    assert_same(merged([[zero], [zero]]), [zero])
    assert_close(merged([[zero], [x]]), [x / 2])  # half the length, in the only direction there is


def test_vectors_that_cancel_have_no_direction() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (D,) = merged([[x], [-x]])
    assert D.norm() <= 1e-6 * x.norm(), "rounding is not diverged to a step"


def test_tensors_are_merged_one_by_one() -> None:
    a, b = vectors(1, 2)
    whole = merged([a, b])
    for i in range(2):
        assert_close(merged([[a[i]], [b[i]]]), [whole[i]])


@pytest.mark.parametrize("codec", [Dense("bf16"), Int8(), Fp4()], ids=repr)
def test_narrow_codecs_send_norms_in_float32_beside_their_message(codec: Codec) -> None:
    a, b = vectors(1, 2)
    a = [1e6 * t for t in a]
    sent = RDA.codec(codec, 2)
    assert isinstance(sent, Parts)
    headers = PART_NBYTES * (1 + codec.linear)  # of the norms' part, and of the codec's own where it has none by itself
    assert sent.nbytes(RDA.message(a)) == codec.nbytes(a) + 2 * 4 + headers
    for D, *both in zip(merged([a, b], codec), a, b, strict=True):
        assert D.norm().item() == pytest.approx(sum(x.norm().item() for x in both) / 2, rel=1e-6), "the length is exact"


@pytest.mark.parametrize("codec", [Dense(), Dense(gather=True), Dense("fp64")], ids=repr)
def test_wide_dense_codecs_need_no_parts(codec: Codec) -> None:
    assert RDA.codec(codec, 3) is codec
    assert Merge().codec(Int8(), 3) == Int8()
    assert Merge().outgoing(D := vectors(0)[0], ALONE) is D


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_is_named(bad: float) -> None:
    a, b = vectors(1, 2)
    b[0][3] = bad
    with pytest.raises(NonFiniteRound, match="contribution of rank 1"):
        merged([a, b])


# --- In DiLoCo ---------------------------------------------------------------------------------------------------------------


def test_one_worker_with_rda_is_one_with_the_mean() -> None:
    def worker(link: Link, merge: Any) -> list[Tensor]:
        model = model_of()
        opt = DiLoCo(sgd(model.parameters()), link, H=3, merge=merge)
        train(model, opt, link.rank, 9)
        return snapshot(model)

    assert_close(*(World(1).run(lambda link, m=merge: worker(link, m))[0] for merge in ("mean", "rda")))


@pytest.mark.parametrize("codec", [Dense(), Fp4()], ids=repr)
@pytest.mark.parametrize("pace", ["equal", "speed"])
def test_diloco_with_rda_sends_one_norm_per_tensor_more_in_the_same_message(codec: Codec, pace: Any) -> None:
    def worker(link: Link, merge: Any) -> tuple:
        model, metered = model_of(), Metered(link)
        opt = DiLoCo(sgd(model.parameters()), metered, H=3, merge=merge, pace=pace, codec=codec, alarm_every=1)
        train(model, opt, link.rank, 6)
        rounds = [e.payload for e in metered.meter.recent if e.purpose == "round"]
        return rounds, opt.message_nbytes(), len(opt.params()), snapshot(model)

    mean, rda = (World(2, step_time=1.0).run(lambda link, m=merge: worker(link, m)) for merge in ("mean", "rda"))
    for (few, formula, tensors, _), (more, other_formula, _, params) in zip(mean, rda, strict=True):
        assert few == [formula] * 2
        assert more == [other_formula] * 2
        assert other_formula == formula + 4 * tensors + (0 if codec.linear else PART_NBYTES)
        assert_same(params, rda[0][3])


def test_differences_are_weighed_by_work() -> None:
    """A worker half as fast takes half the steps and has half the say, as in decoupled DiLoCo."""

    def worker(link: Link) -> tuple[list[float], float]:
        x = nn.Parameter(torch.zeros(1))
        opt = DiLoCo(sgd([x]), link, H=8, pace="speed", outer_lr=1.0, outer_momentum=0.0)
        seen = []
        while opt.steps < 16:
            x.grad = torch.tensor([-1.0 if link.rank == 0 else 1.0])
            opt.step()
            seen.append(float(x.detach()))
        return seen, float(x.detach())

    (fast, end), (slow, same) = World(2, step_time=(1.0, 2.0)).run(worker)
    assert (len(fast), len(slow)) == (16, 12), "8 of 8 in the first round, then 8 and 4"
    assert fast[7] == 0, "equal work first: the two cancel"
    assert end == same == pytest.approx((8 * 8 * 0.05 - 4 * 4 * 0.05) / 12)


def _sharded(_: Link) -> tuple[int, list[Tensor], list[float]]:
    mesh = make_mesh(workers=2, shards=2)
    link = TorchLink(mesh["replicate"], timeout=LIMIT)
    model = shard_model(uneven(torch.float32), mesh)
    opt = DiLoCo(sgd(model.parameters()), link, H=2, merge="rda", alarm_every=1)
    for step in range(1, 7):
        backward(model, link.rank, step)
        opt.step()
        opt.zero_grad()
    reshard(model)
    return link.rank, [p.detach().full_tensor() for p in model.parameters()], norms_of(opt.slot("momentum"), opt.shards)


def test_norms_are_over_all_shards(pool: Pool) -> None:
    def unsharded(link: Link) -> tuple[list[Tensor], list[float]]:
        model = uneven(torch.float32)
        opt = DiLoCo(sgd(model.parameters()), link, H=2, merge="rda")
        train(model, opt, link.rank, 6)
        return snapshot(model), norms_of(opt.slot("momentum"), opt.shards)

    expected = World(2).run(unsharded)
    for worker, params, norms in pool.run(_sharded, 4):
        assert_close(params, expected[worker][0])
        assert norms == pytest.approx(expected[worker][1], rel=1e-5)
