"""What was lost and carried counts once: the model moves as far as in a run in which nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thinwire
from thinwire import Link, World
from thinwire.core.counted import Verdict
from thinwire.core.elastic import _share
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.links.decided import Decided
from thinwire.links.manifest import Manifest, Terms
from thinwire.sim import Churn

STEPS, LR, H = 48, 0.125, 4
GRADIENTS = [torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, -2.0, 1.0]), torch.tensor([2.0, 5.0, -1.0])]


def trained(name: str, loss: float, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Of each worker, with constant gradients: its parameters, the anchor, its local steps, and rounds that left it out."""

    def worker(link: Link) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        x = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([x], lr=LR)
        if name == "local-sgd":
            opt = thinwire.LocalSGD(inner, link, H=H, codec=thinwire.Dense(torch.float64))  # wider than the parameters
        else:
            opt = thinwire.DiLoCo(inner, link, H=H, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
        elastic = link.elastic
        assert elastic is not None
        opt.join()
        steps = left_out = 0
        while opt.steps < STEPS and not opt.ended:
            x.grad, before = GRADIENTS[link.rank].clone(), elastic.decided
            opt.step()
            steps += 1
            left_out += elastic.decided is not before and elastic.decided is not None and not elastic.decided.mine
        return x.detach().clone(), opt.slot("anchor")[0].clone(), steps, left_out

    churn = Churn(loss=loss, seed=seed, link={"first_wait": 0.5, "checkpoint_every": 0})
    return World(3, step_time=0.1, churn=churn).run(worker)


@pytest.mark.parametrize("name", ["diloco", "local-sgd"])
@pytest.mark.parametrize("seed", [0, 2, 8])  # 0 and 8 lose messages of one worker twice in a row
def test_lost_work_counts_once_when_it_comes(name: str, seed: int) -> None:
    ended = trained(name, 0.12, seed)
    assert sum(left_out for *_, left_out in ended) >= 3, "messages were lost"
    anchor = ended[0][1]
    for _, own, _, _ in ended:
        torch.testing.assert_close(own, anchor, rtol=0, atol=0)
    carried = sum((x - anchor for x, *_ in ended), torch.zeros(3)) / 3
    worked = -LR * sum((steps * g for (_, _, steps, _), g in zip(ended, GRADIENTS, strict=True)), torch.zeros(3)) / 3
    torch.testing.assert_close(anchor + carried, worked)


@pytest.mark.parametrize(
    ("told", "expected", "share"),
    [
        ({}, (0, 1), 1.0),
        ({}, (0, 1, 2), 2 / 3),
        ({}, (0, 1, 2, 3), 2 / 4),
        ({"hello": (2,)}, (0, 1, 2), 1.0),
        ({"bye": (2,)}, (0, 1, 2), 1.0),
        ({"here": (2,)}, (0, 1), 2 / 3),
        ({"here": (2,)}, (0, 1, 2), 2 / 3),
        ({"terms": Terms(8, last=True)}, (0, 1, 2), 1.0),
        ({"invalid": {2}}, (0, 1, 2), 1.0),
    ],
)
def test_only_those_who_have_work_and_can_send_it_later_are_missing(
    told: dict[str, Any], expected: tuple[int, ...], share: float
) -> None:
    settled = {"hello": (), "bye": (), "terms": Terms(8)} | {k: v for k, v in told.items() if k != "invalid"}
    manifest = Manifest(3, bytes(32), 0, {0: "ab" * 32, 1: "cd" * 32}, (0, 1), seconds=0.5, roster="0", **settled)
    arrived = Arrived((0, 1), True, Outgoing([], thinwire.Dense()))
    verdict = Verdict(arrived, invalid=told.get("invalid", set()))
    assert _share(Decided(manifest, (), {}, True, expected), verdict) == share
