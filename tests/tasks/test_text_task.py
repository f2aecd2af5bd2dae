"""Text: what is read, how it is split, and which windows a worker sees."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from thinwire.errors import ConfigError, MissingData
from thinwire.tasks import make_task
from thinwire.tasks.text import TextTask, load_corpus

FILES, SIZE = 40, 1000


@pytest.fixture
def striped(tmp_path: Path) -> Path:
    """A folder whose file number i holds nothing but the byte 40 + i, so that a byte tells its file."""
    for i in range(FILES):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([40 + i]) * SIZE)
    return tmp_path


def text_task(**settings) -> TextTask:
    task = make_task("gpt-nano", **settings)
    assert isinstance(task, TextTask)
    return task


def values(task: TextTask, worker: int, *, steps: int = 20) -> set[int]:
    return {int(v) for step in range(steps) for part in task.batch(worker, step) for v in part.unique()}


def test_standard_library_is_split_by_file():
    corpus = load_corpus()
    train, validation = set(corpus.train_files), set(corpus.validation_files)
    assert train
    assert validation
    assert not train & validation
    assert {"argparse.py", "json/decoder.py"} <= train | validation
    total = len(corpus.train) + len(corpus.validation)
    assert 0.04 < len(corpus.validation) / total < 0.06
    assert total > 5e6
    folders = {folder for name in train | validation for folder in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert list(corpus.train_files) == sorted(corpus.train_files)


def test_corpus_is_read_once():
    assert load_corpus() is load_corpus()


def test_starts_point_at_the_files(tmp_path: Path):
    texts = {f"{i:02}.txt": f"file {i} ".encode() * (50 + i) for i in range(40)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    corpus = load_corpus(tmp_path)
    for name, start in zip(corpus.train_files, corpus.starts, strict=True):
        found = bytes(corpus.train[start : start + len(texts[name])].tolist())
        assert found == texts[name]
    assert bytes(corpus.validation.tolist()) == b"".join(texts[name] for name in corpus.validation_files)


def test_validation_bytes_are_in_no_training_file(striped: Path):
    corpus = load_corpus(striped)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert len(train) + len(validation) == FILES
    assert not train & validation
    assert len(validation) == 2  # 5% of 40 equal files


def test_validation_does_not_depend_on_seed_and_workers():
    a, b = text_task(seed=0, workers=1), text_task(seed=9, workers=4, non_iid=0.5)
    model = a.model()
    assert a.evaluate(model) == b.evaluate(model)


def test_single_file_keeps_its_end_for_validation(tmp_path: Path):
    text = bytes(range(32, 127)) * 100
    (tmp_path / "one.txt").write_bytes(text)
    corpus = load_corpus(tmp_path / "one.txt")
    assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == text
    assert len(corpus.validation) == int(0.05 * len(text))


def test_few_large_files_keep_each_of_their_ends(tmp_path: Path):
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode() * 1000)
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.train.tolist()) == b"a" * 950 + b"b" * 950
    assert bytes(corpus.validation.tolist()) == b"a" * 50 + b"b" * 50


def test_folder_reads_below_and_skips_hidden_and_binary_files(tmp_path: Path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "in.txt").write_bytes(b"x" * 400)
    (tmp_path / ".hidden").write_bytes(b"h" * 400)
    (tmp_path / "picture.bin").write_bytes(b"\0p" * 200)
    (tmp_path / "empty.txt").touch()
    corpus = load_corpus(tmp_path)
    assert corpus.train_files == ("test/in.txt",)
    assert set(corpus.train.tolist()) == {ord("x")}


def test_targets_are_one_byte_ahead_of_inputs():
    task = text_task()
    x, y = task.batch(0, 0)
    assert x.shape == y.shape == (8, 128)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = bytes(task.corpus.train.tolist())
    assert all(bytes([*row.tolist(), int(last)]) in text for row, last in zip(x, y[:, -1], strict=True))


def test_windows_reach_both_ends_of_a_text(tmp_path: Path):
    (tmp_path / "t").write_bytes((bytes(range(1, 251)) * 11)[:2736])  # 2600 and 136 for validation
    task = text_task(data=tmp_path / "t", workers=20, non_iid=1.0, batch=64)
    start, end = task.shards[3]
    assert end - start == 130  # exactly two windows
    both = [task.corpus.train[i : i + 128].long() for i in (start, start + 1)]
    x, y = task.batch(3, 0)
    found = {next(i for i, window in enumerate(both) if torch.equal(row, window)) for row in x}
    assert found == {0, 1}
    assert int(task.corpus.train[end - 1]) in y[:, -1].tolist()


def test_iid_workers_all_see_all_files(striped: Path):
    task = text_task(workers=2, data=striped)
    train = set(task.corpus.train.tolist())
    assert values(task, 0) == values(task, 1) == train


def test_workers_see_only_their_own_files_at_one(striped: Path):
    task = text_task(workers=4, data=striped, non_iid=1.0)
    seen = [values(task, worker) for worker in range(4)]
    assert sum(map(len, seen)) == FILES - 2
    assert set.union(*seen) == set(task.corpus.train.tolist())
    assert all(max(a) < min(b) for a, b in pairwise(seen))  # contiguous, in order


def test_share_of_own_text(striped: Path):
    task = text_task(workers=4, data=striped, non_iid=0.5, batch=64)
    start, end = task.shards[2]
    own = set(task.corpus.train[start:end].tolist())
    x = torch.cat([task.batch(2, step)[0] for step in range(20)])
    share = sum(int(row[0]) in own for row in x) / len(x)
    # 0.5 from its own part, and a quarter of the other half by chance.
    assert share == pytest.approx(0.625, abs=0.06)


def test_shards_cover_the_text_evenly_even_when_one_file_is_huge(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"a" * 20_000)
    (tmp_path / "b").write_bytes(b"b" * 500)
    shards = load_corpus(tmp_path).shards(4)
    assert shards[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(shards))
    sizes = [end - start for start, end in shards]
    assert sum(sizes) == len(load_corpus(tmp_path).train)
    assert max(sizes) - min(sizes) <= 1


def test_shards_of_the_standard_library_are_whole_files():
    corpus = load_corpus()
    assert {start for start, _ in corpus.shards(8)} <= set(corpus.starts)


def test_evaluation_is_the_mean_over_the_validation_windows():
    task = text_task()
    model = task.model()
    ends = torch.linspace(0, len(task.corpus.validation) - 129, 64, dtype=torch.float64).long()
    windows = torch.stack([task.corpus.validation[i : i + 129] for i in ends]).long()
    with torch.no_grad():
        expected = task.loss(model, (windows[:, :-1], windows[:, 1:])).item()
    assert task.evaluate(model)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # trains
def test_a_few_steps_of_adamw_learn():
    task = text_task(batch=4)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = task.evaluate(model)["loss"]
    for step in range(30):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
    assert 5.0 < before < 6.0  # about ln 256 = 5.55, for it knows nothing yet
    assert task.evaluate(model)["loss"] < 3.8


def test_missing_file(tmp_path: Path):
    with pytest.raises(MissingData, match=f"no text at {tmp_path}/nothing: data must be a text file or a folder"):
        make_task("gpt-nano", data=tmp_path / "nothing")


def test_folder_without_text(tmp_path: Path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(MissingData, match=f"no text in {tmp_path}"):
        make_task("gpt-nano", data=str(tmp_path))


@pytest.mark.parametrize(
    ("size", "part"),
    [(10, "training text has 10"), (2000, "validation text has 100"), (2579, "validation text has 128")],
)
def test_too_little_text(tmp_path: Path, size: int, part: str):
    (tmp_path / "t").write_bytes(b"x" * size)
    with pytest.raises(MissingData, match=f"the {part} bytes, one window of gpt-nano needs 129"):
        make_task("gpt-nano", data=tmp_path / "t")


def test_too_little_text_for_so_many_workers(tmp_path: Path):
    (tmp_path / "t").write_bytes(b"x" * 4000)
    assert text_task(data=tmp_path / "t", workers=100).workers == 100
    with pytest.raises(MissingData, match="smallest of 100 workers' parts has 38 bytes"):
        make_task("gpt-nano", data=tmp_path / "t", workers=100, non_iid=1.0)


def test_non_iid_is_a_probability():
    with pytest.raises(ConfigError, match=r"non_iid must be above 0 and at most 1 for gpt-nano .*, got 1.5"):
        make_task("gpt-nano", non_iid=1.5)
