"""The quadratic: every gradient and every optimum is known."""

import pytest
import torch

from thinwire.tasks import make_task
from thinwire.tasks.quadratic import DIMENSION, NOISE, Point, QuadraticTask


def bowl(**settings) -> QuadraticTask:
    task = make_task("quadratic", **settings)
    assert isinstance(task, QuadraticTask)
    return task


def at(point: torch.Tensor) -> Point:
    model = Point()
    torch.nn.utils.vector_to_parameters(point, model.parameters())
    return model


def gradient(task: QuadraticTask, model: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
    grads = torch.autograd.grad(task.loss(model, task.batch(worker, step)), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def test_parameters_have_all_kinds_of_shapes():
    model = bowl().model()
    assert sorted(p.dim() for p in model.parameters()) == [0, 1, 2]
    assert sum(p.numel() for p in model.parameters()) == DIMENSION == 193


def test_gradient_is_exact():
    task = bowl(workers=3, non_iid=2.0, seed=4)
    model = task.model()
    noise, optimum = task.batch(1, 6)
    assert torch.equal(optimum, task.optimum + task.shifts[1])
    expected = task.curvature * (model().detach() - optimum) + noise.mean(0)
    torch.testing.assert_close(gradient(task, model, 1, 6), expected)


def test_curvature_is_well_conditioned():
    curvature = bowl().curvature
    assert curvature.min().item() == pytest.approx(0.1)
    assert curvature.max().item() == pytest.approx(1.0)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_shifts_have_the_asked_length_and_sum_to_zero(workers: int):
    shifts = bowl(workers=workers, non_iid=2.5).shifts
    assert shifts.shape == (workers, DIMENSION)
    torch.testing.assert_close(shifts.norm(dim=1), torch.full((workers,), 2.5))
    torch.testing.assert_close(shifts.sum(0), torch.zeros(DIMENSION), rtol=0, atol=1e-5)
    assert torch.pdist(shifts).min() > 0.5  # each worker has its own


def test_no_shift_when_iid_or_alone():
    assert not bowl(workers=4).shifts.any()
    assert not bowl(workers=1, non_iid=3.0).shifts.any()


def test_common_optimum_is_where_the_workers_gradients_cancel():
    task = bowl(workers=5, non_iid=1.0)
    model = at(task.optimum)
    noise = [task.batch(worker, 0)[0].mean(0) for worker in range(5)]
    clean = [gradient(task, model, worker, 0) - noise[worker] for worker in range(5)]
    assert all(grad.norm() > 0.1 for grad in clean)
    torch.testing.assert_close(torch.stack(clean).sum(0), torch.zeros(DIMENSION), rtol=0, atol=1e-5)


@pytest.mark.parametrize("non_iid", [None, 3.0])
def test_evaluation_has_no_noise_and_no_shift(non_iid: float | None):
    task = bowl(workers=2, non_iid=non_iid)
    assert task.evaluate(at(task.optimum)) == {"loss": 0.0}
    step = torch.zeros(DIMENSION)
    step[0] = 2.0
    assert task.evaluate(at(task.optimum + step))["loss"] == pytest.approx(2.0 * task.curvature[0].item(), rel=1e-5)


def test_noise_shrinks_with_the_batch():
    single, many = (bowl(batch=size).batch(0, 0)[0] for size in (1, 400))
    assert single.shape == (1, DIMENSION)
    assert single.std().item() == pytest.approx(NOISE, rel=0.2)
    assert many.mean(0).std().item() == pytest.approx(NOISE / 20, rel=0.2)


def test_gradient_descent_arrives():
    task = bowl()
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(150):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
    assert task.evaluate(model)["loss"] < 0.1 < task.evaluate(task.model())["loss"]
