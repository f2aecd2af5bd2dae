"""Every algorithm on a 2x2 mesh: FSDP2 on the fast axis, the link on the slow one. It equals 2 unsharded workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import (
    ALGORITHMS,
    H,
    assert_close,
    assert_same,
    backward,
    build,
    codec_of,
    named,
    smooth,
    snapshot,
    train,
)
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import Link, TorchLink, World
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import reshard

pytestmark = pytest.mark.parametrize("name", named(lambda n: not ALGORITHMS[n].needs_whole_tensors))


class Uneven(nn.Module):
    """Rows that do not divide by 2, one tensor that is empty on the second shard, one frozen, one seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(1))  # one row: the second shard holds nothing of it
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.sometimes = nn.Parameter(torch.full((2, 1), 0.1))

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.second(torch.tanh(self.first(x))) * self.gain + self.frozen
        return y + self.sometimes.sum() if step % 2 == 0 else y


def uneven(dtype: torch.dtype) -> Uneven:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Uneven().to(dtype)


def _sharded(_: Link, name: str, dtype: torch.dtype, poison: bool) -> tuple[int, list[Tensor], list[Tensor], int]:
    mesh = make_mesh(workers=2, shards=2)
    link = TorchLink(mesh["replicate"], timeout=LIMIT)
    model = shard_model(uneven(dtype), mesh)
    opt = build(name, model.parameters(), link, codec=codec_of(name, gather=False), alarm_every=1, **smooth(name))
    for step in range(1, 2 * H + 2):
        backward(model, link.rank, step)
        if poison and step == 2 and link.rank == 1:
            # In one row only: the other shard of this worker cannot see it by itself.
            shard = model.first.weight.grad.to_local()
            if mesh["shard"].get_local_rank() == 0:
                shard[0, 0] = float("nan")
        opt.step()
        opt.zero_grad()
    reshard(model)
    with opt.shared_model(model):
        agreed = [p.detach().full_tensor() for p in model.parameters()]
    return link.rank, [p.detach().full_tensor() for p in model.parameters()], agreed, opt.aborted_rounds


def _unsharded(link: Link, name: str, dtype: torch.dtype, poison: bool) -> tuple[list[Tensor], list[Tensor], int]:
    model = uneven(dtype)
    opt = build(name, model.parameters(), link, codec=codec_of(name, gather=False), alarm_every=1, **smooth(name))
    for step in range(1, 2 * H + 2):
        backward(model, link.rank, step)
        if poison and step == 2 and link.rank == 1:
            model.first.weight.grad[0, 0] = float("nan")
        opt.step()
        opt.zero_grad()
    with opt.shared_model():
        agreed = snapshot(model)
    return snapshot(model), agreed, opt.aborted_rounds


@pytest.mark.parametrize("dtype", first_quick([torch.float32, torch.bfloat16]), ids=["fp32", "bf16"])
def test_2x2_equals_2_unsharded_workers(name: str, dtype: torch.dtype, pool: Pool) -> None:
    sharded = pool.run(_sharded, 4, name, dtype, False)
    unsharded = World(2).run(lambda link: _unsharded(link, name, dtype, False))
    for worker, params, agreed, _ in sharded:
        expected, expected_agreed, _ = unsharded[worker]
        assert_close(params, expected, 1e-6 if dtype == torch.float32 else 2e-2)
        assert_close(agreed, expected_agreed, 1e-6 if dtype == torch.float32 else 2e-2)
    assert_same(sharded[0][1], sharded[1][1], "both shards of a worker see one model")


def test_a_nan_in_one_shard_is_refused_by_all_shards_together(name: str, pool: Pool) -> None:
    sharded = pool.run(_sharded, 4, name, torch.float32, True)
    unsharded = World(2).run(lambda link: _unsharded(link, name, torch.float32, True))
    assert len({aborted for *_, aborted in sharded}) == 1
    for worker, params, _, aborted in sharded:
        expected, _, expected_aborted = unsharded[worker]
        assert aborted == expected_aborted
        assert all(bool(torch.isfinite(p).all()) for p in params)
        assert_close(params, expected)


def test_evaluating_between_steps_changes_nothing(name: str, pool: Pool) -> None:
    """A forward pass without backward leaves FSDP2's root gathered; it must not train on with that copy."""
    for worker in pool.run(_with_and_without_evaluation, 4, name):
        assert_same(*worker)


def _with_and_without_evaluation(_: Link, name: str) -> tuple[list[Tensor], list[Tensor]]:
    mesh = make_mesh(workers=2, shards=2)
    results = []
    for evaluate in (True, False):
        link = TorchLink(mesh["replicate"], timeout=LIMIT)
        model = shard_model(uneven(torch.float32), mesh)
        opt = build(name, model.parameters(), link)
        for step in range(1, H + 3):
            train(model, opt, link.rank, 1, first=step)
            if evaluate:
                with opt.shared_model(model), torch.no_grad():
                    model(torch.ones(2, 5), 2)
        reshard(model)
        results.append([p.detach().full_tensor() for p in model.parameters()])
    return results[0], results[1]
