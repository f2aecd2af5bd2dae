"""Image tasks: the nets, the normalisation and the uneven split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples, first_quick

from thinwire.errors import ConfigError
from thinwire.tasks import make_task
from thinwire.tasks.image_nets import CNN, ResNet
from thinwire.tasks.images import ImageTask, dirichlet_shares


def image_task(name: str = "cnn-digits", **settings) -> ImageTask:
    task = make_task(name, **settings)
    assert isinstance(task, ImageTask)
    return task


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize(("net", "low", "high"), [(CNN, 20_000, 60_000), (ResNet, 600_000, 800_000)])
def test_nets_take_all_image_shapes(net: type[CNN] | type[ResNet], low: int, high: int, shape: tuple[int, int, int]):
    model = net(channels=shape[0], classes=10)
    assert model(torch.randn(2, *shape)).shape == (2, 10)
    assert low < sum(p.numel() for p in model.parameters()) < high


def test_resnet_is_resnet_18():
    model = ResNet(channels=3, classes=10, width=64)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) == 17  # and the linear layer is the 18th
    assert sum(p.numel() for p in model.parameters()) == 11_173_962  # the known count with a 3x3 stem
    assert any("running_mean" in name for name, _ in model.named_buffers())


def test_training_images_are_normalised():
    task = image_task(batch=1000)
    x, y = task.batch(0, 0)
    assert x.shape == (1000, 1, 8, 8)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert abs(x.mean().item()) < 0.05
    assert x.std().item() == pytest.approx(1.0, abs=0.05)


def test_images_keep_their_labels():
    task = image_task(batch=16)
    images, labels = task.images.train_images, task.images.train_labels
    mean, deviation = task.images.statistics()
    for x, y in zip(*task.batch(0, 3), strict=True):
        pixels = (x.numpy() * deviation + mean).round().astype(np.uint8)
        matches = np.flatnonzero((images == pixels).all(axis=(1, 2, 3)))
        assert len(matches)
        assert all(labels[matches] == int(y))


def label_shares(task: ImageTask, worker: int) -> np.ndarray:
    labels = torch.cat([task.batch(worker, step)[1] for step in range(40)]).numpy()
    return np.bincount(labels, minlength=10) / len(labels)


def test_iid_workers_have_all_labels_alike():
    task = image_task(workers=2)
    assert all(abs(label_shares(task, worker) - 0.1).max() < 0.05 for worker in range(2))


def test_small_alpha_gives_each_worker_its_own_labels():
    task = image_task(workers=4, non_iid=0.1)
    shares = [label_shares(task, worker) for worker in range(4)]
    distances = [abs(shares[i] - shares[j]).sum() / 2 for i in range(4) for j in range(i)]
    assert min(distances) > 0.3  # total variation; 0 is equal, 1 has no label in common


def test_large_alpha_is_nearly_even():
    task = image_task(workers=4, non_iid=1000.0)
    counts = np.stack([np.bincount(task.images.train_labels[share], minlength=10) for share in task.shares])
    assert counts.min() > 0.75 * counts.mean()
    assert counts.max() < 1.25 * counts.mean()


def test_workers_batches_come_from_their_own_images():
    task = image_task(workers=3, non_iid=0.05)
    for worker in range(3):
        held = set(task.images.train_labels[task.shares[worker]].tolist())
        drawn = {int(y) for step in range(20) for y in task.batch(worker, step)[1]}
        assert drawn <= held


def test_split_depends_on_the_seed():
    a, b, c = (image_task(workers=2, non_iid=0.5, seed=seed).shares for seed in (1, 1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(a[0], c[0])


@settings(max_examples=examples(60), deadline=None)
@given(
    labels=st.lists(st.integers(0, 9), min_size=20, max_size=100),
    workers=st.integers(1, 20),
    alpha=st.sampled_from([1e-6, 0.01, 0.5, 100.0]),
    seed=st.integers(0, 1000),
)
def test_every_image_goes_to_one_worker_and_none_is_empty(labels: list[int], workers: int, alpha: float, seed: int):
    rng = np.random.default_rng(seed)
    shares = dirichlet_shares(np.array(labels), workers=workers, alpha=alpha, rng=rng)
    assert len(shares) == workers
    assert all(len(share) for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(labels)))


def test_more_workers_than_images():
    with pytest.raises(ConfigError, match="workers must be at most the number of images, 1437, got 2000"):
        make_task("cnn-digits", workers=2000, non_iid=1.0)


def test_evaluation_of_a_blind_model():
    task = image_task()
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    result = task.evaluate(model)
    assert result["loss"] == pytest.approx(math.log(10), rel=1e-5)
    assert result["accuracy"] == (task.images.test_labels == 0).mean()  # equal scores: the first label wins


@pytest.mark.parametrize(("name", "steps", "accuracy"), first_quick([("cnn-digits", 60, 0.7), ("resnet-digits", 40, 0.7)]))
def test_a_few_steps_of_adamw_learn(name: str, steps: int, accuracy: float):
    task = image_task(name)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = task.evaluate(model)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
    after = task.evaluate(model)
    assert before["accuracy"] < 0.4
    assert after["accuracy"] > accuracy
    assert after["loss"] < before["loss"]


def test_resnet_needs_two_images():
    with pytest.raises(ConfigError, match=r"batch must be at least 2 for resnet-digits.*got 1"):
        make_task("resnet-digits", batch=1)
    assert make_task("cnn-digits", batch=1).batch(0, 0)[0].shape == (1, 1, 8, 8)
