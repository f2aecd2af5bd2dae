"""What every task promises: weights by seed, batches by (seed, worker, step), and no trace left behind."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.tasks import make_task
from thinwire.tasks.task import evaluating, random_stream

NAMES = ["gpt-nano", "cnn-digits", "resnet-digits", "quadratic"]


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("non_iid", [None, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_a_function_of_seed_worker_and_step(name: str, non_iid: float | None):
    first = make_task(name, seed=3, workers=2, batch=4, non_iid=non_iid)
    again = make_task(name, seed=3, workers=2, batch=4, non_iid=non_iid)
    later = first.batch(1, 7)
    first.batch(0, 0)  # asking for another batch in between changes nothing
    assert same(later, first.batch(1, 7))
    assert same(later, again.batch(1, 7))


@pytest.mark.parametrize("name", NAMES)
def test_worker_step_and_seed_each_change_the_batch(name: str):
    batches = [
        make_task(name, seed=seed, workers=2, batch=4).batch(worker, step)[0]
        for seed, worker, step in itertools.product((0, 1), (0, 1), (0, 1))
    ]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(batches, 2))


@pytest.mark.parametrize("name", NAMES)
def test_batches_do_not_depend_on_the_number_of_workers_when_iid(name: str):
    assert same(make_task(name, workers=1).batch(0, 5), make_task(name, workers=8).batch(0, 5))


def test_streams_of_neighbouring_numbers_are_all_different():
    # numpy pads short seeds with zeros, so [1, 2] and [1, 2, 0] are the same stream there; ours must not be.
    small = (0, 1, 2, 3)
    keys = itertools.product(("batch", "shares"), (*small, 2**32, 2**32 + 1), small, small)
    draws = [int(random_stream(p, seed=s, worker=w, step=t).integers(2**63)) for p, s, w, t in keys]
    assert len(set(draws)) == len(draws) == 2 * 6 * 4 * 4


@pytest.mark.parametrize("name", NAMES)
def test_weights_depend_on_the_seed_only_and_random_state_is_left_alone(name: str):
    torch.manual_seed(11)
    np.random.seed(11)
    before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]
    weights = make_task(name, seed=5).model().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy_before)
    torch.manual_seed(99)
    again = make_task(name, seed=5, workers=3, batch=2).model().state_dict()
    other = make_task(name, seed=6).model().state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert any(not torch.equal(weights[key], other[key]) for key in weights)


def test_weights_do_not_depend_on_the_default_device():
    task = make_task("quadratic")
    expected = task.model()()
    with torch.device("meta"):  # stands for a GPU, whose generator the seed would not reach
        model = task.model()
    assert torch.equal(model(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_model_calls_return_separate_models(name: str):
    task = make_task(name)
    first, second = task.model(), task.model()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert any(parameter.any() for parameter in second.parameters())


@pytest.mark.parametrize(("worker", "step", "shown"), [(2, 0, "from 0 to 1, got 2"), (-1, 0, "got -1"), (0, -3, "-3")])
@pytest.mark.parametrize("name", NAMES)
def test_worker_and_step_out_of_range(name: str, worker: int, step: int, shown: str):
    with pytest.raises(ValueError, match=shown):
        make_task(name, workers=2).batch(worker, step)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_a_scalar_that_reaches_every_parameter(name: str):
    task = make_task(name)
    model = task.model()
    loss = task.loss(model, task.batch(0, 0))
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_changes_nothing_and_repeats(name: str):
    task = make_task(name)
    model = task.model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first, second = task.evaluate(model), make_task(name, workers=4).evaluate(model)
    assert first == second
    assert set(first) == {"loss"} | ({task.metric} if task.metric else set())
    assert all(isinstance(value, float) for value in first.values())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_evaluating_restores_each_submodule_even_after_an_error():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()  # frozen by the user

    def fails_halfway():
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails_halfway()
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
