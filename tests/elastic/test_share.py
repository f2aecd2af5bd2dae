"""What was lost and carried counts once: the model moves as far as in a run in which nothing is lost."""

from __future__ import annotations

import pytest
import torch

import thinwire
from thinwire import Link, World
from thinwire.sim import Churn

STEPS, LR, H = 48, 0.125, 4
GRADIENTS = [torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, -2.0, 1.0]), torch.tensor([2.0, 5.0, -1.0])]


def trained(name: str, loss: float, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Of each worker, with constant gradients: its parameters, the anchor, its local steps, and rounds that left it out."""

    def worker(link: Link) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        x = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([x], lr=LR)
        if name == "local-sgd":
            opt = thinwire.LocalSGD(inner, link, H=H)
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
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lost_work_counts_once_when_it_comes(name: str, seed: int) -> None:
    ended = trained(name, 0.12, seed)
    assert sum(left_out for *_, left_out in ended) >= 3, "messages were lost"
    assert all(steps == STEPS for _, _, steps, _ in ended), "and nobody was away for a round"
    anchor = ended[0][1]
    for _, own, _, _ in ended:
        torch.testing.assert_close(own, anchor, rtol=0, atol=0)
    carried = sum((x - anchor for x, *_ in ended), torch.zeros(3)) / 3
    worked = -LR * sum((steps * g for (_, _, steps, _), g in zip(ended, GRADIENTS, strict=True)), torch.zeros(3)) / 3
    torch.testing.assert_close(anchor + carried, worked)
