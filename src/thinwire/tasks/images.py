"""Classifying small images, with all data on every worker or with a label mixture of its own for each.

The uneven split is the usual one (Li et al. 2021, arXiv:2102.02079): the images of each label are divided among the
workers in proportions drawn from Dirichlet(alpha, ..., alpha). At alpha = 100 all workers look alike, at alpha = 0.1
most of a worker's images have one of a few labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.tasks.image_files import CLASSES, load_images
from thinwire.tasks.image_nets import CNN, ResNet
from thinwire.tasks.task import SeededTask, ValidationPart, device_of, evaluating, part_of, random_stream

EVALUATION_BATCH = 500


def dirichlet_shares(
    labels: np.ndarray,  # [images] int64
    *,
    workers: int,
    alpha: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Divide the images among the workers by label; every image goes to one worker and no worker is left empty.

    Returns:
        Indices into `labels` for each worker.
    """
    if workers > len(labels):
        raise ConfigError(f"workers must be at most the number of images, {len(labels)}, got {workers}")
    shares = [np.empty(0, dtype=np.int64) for _ in range(workers)]
    for label in np.unique(labels):
        images = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(rng.dirichlet(np.full(workers, alpha)))[:-1] * len(images)
        for worker, part in enumerate(np.split(images, cuts.astype(np.int64))):
            shares[worker] = np.concatenate((shares[worker], part))
    for worker in range(workers):
        if len(shares[worker]) == 0:
            # A small alpha leaves workers empty. Every second image of the richest has the same labels as the rest.
            richest = max(range(workers), key=lambda w: len(shares[w]))
            shares[worker], shares[richest] = shares[richest][1::2], shares[richest][::2]
    return shares


class ImageTask(SeededTask):
    """A small classifier on an image set; the name is NET-SET, as in "cnn-digits".

    Images are normalised by the mean and standard deviation of the training set. Batches are drawn with replacement.

    Attributes:
        images: the image set.
        shares: indices of each worker's training images.
    """

    unit = "images"
    metric = "accuracy"

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        workers: int,
        batch: int | None,
        data: str | Path | None,
        non_iid: float | None,
        val_part: ValidationPart = "all",
    ):
        """Read the images and divide them; the default batch is 32 images."""
        super().__init__(name, seed=seed, workers=workers)
        self.net, kind = name.split("-")
        self.batch_items = batch or 32
        if self.net == "resnet" and self.batch_items < 2:
            raise ConfigError(f"batch must be at least 2 for {name}, whose BatchNorm has no variance at 1, got {batch}")
        self.images = load_images(kind, data)
        labels = self.images.train_labels
        if non_iid is None:
            self.shares = [np.arange(len(labels))] * workers
        else:
            rng = random_stream("shares", seed=seed)
            self.shares = dirichlet_shares(labels, workers=workers, alpha=non_iid, rng=rng)
        mean, deviation = self.images.statistics()
        self._test = part_of(self.images.test_images, val_part), part_of(self.images.test_labels, val_part)
        self._mean, self._deviation = mean[:, None, None], deviation[:, None, None]

    def build(self) -> nn.Module:
        """The net for this set's channels."""
        channels = self.images.train_images.shape[1]
        kind = CNN if self.net == "cnn" else ResNet
        return kind(channels=channels, classes=CLASSES)

    def sample(self, worker: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Normalised images [batch, channels, height, width] float32 and labels [batch] int64."""
        share = self.shares[worker]
        chosen = share[rng.integers(0, len(share), self.batch_items)]
        return self._tensors(self.images.train_images[chosen], self.images.train_labels[chosen])

    def _tensors(self, images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        normalised = (images.astype(np.float32) - self._mean) / self._deviation
        return torch.from_numpy(normalised), torch.from_numpy(labels)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per image."""
        images, labels = (part.to(device_of(model)) for part in batch)
        return F.cross_entropy(model(images).float(), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean cross-entropy and share of right answers on the test set, or on the half of it that the task has."""
        test_images, test_labels = self._test
        loss, right, total = 0.0, 0, len(test_labels)
        with evaluating(model) as device:
            for i in range(0, total, EVALUATION_BATCH):
                part = slice(i, i + EVALUATION_BATCH)
                images, labels = self._tensors(test_images[part], test_labels[part])
                scores = model(images.to(device)).float().cpu()  # [N, CLASSES]
                loss += F.cross_entropy(scores, labels, reduction="sum").item()
                right += int((scores.argmax(1) == labels).sum())
        return {"loss": loss / total, "accuracy": right / total}
