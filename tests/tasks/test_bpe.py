"""Text in tokens: read from its file, refused where it cannot be made, and the same wherever it was made."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from thinwire.errors import ConfigError, MissingDependency
from thinwire.tasks import bpe, make_task
from thinwire.tasks.text import TextTask, load_corpus

VOCAB = 300


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small files, and an empty cache beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # unless a test needs it
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"the number {i} is not the number {i + 1}\n" * (30 + i))
    return folder


def kept_tokens(text: Path, **parts: torch.Tensor) -> Path:
    """A file as an earlier run would have left it."""
    path = bpe.cache_file(load_corpus(text), VOCAB)
    path.parent.mkdir(parents=True, exist_ok=True)
    usual = {"train": torch.arange(4000) % VOCAB, "validation": torch.arange(600) % VOCAB, "starts": torch.tensor([0, 900])}
    usual = {name: t.to(torch.int64 if name == "starts" else torch.int32) for name, t in usual.items()}
    save_file(usual | parts, path)
    return path


def task_on(text: Path, **settings) -> TextTask:
    task = make_task("gpt-pico", data=text, vocab=VOCAB, **settings)
    assert isinstance(task, TextTask)
    return task


def test_tokens_of_an_earlier_run_need_no_package(text: Path):
    kept_tokens(text)
    task = task_on(text)
    x, y = task.batch(0, 0)
    assert x.shape == (4, 64)
    assert torch.equal((x[:, 1:]), y[:, :-1])
    assert torch.equal((x + 1) % VOCAB, y)  # the text counts up
    assert task.model().get_parameter("embed.weight").shape == (VOCAB, 64)
    assert 5.0 < task.evaluate(task.model())["loss"] < 6.4  # about ln 300 = 5.7


def test_without_the_package_the_error_names_the_extra(text: Path):
    with pytest.raises(MissingDependency, match=r"vocab=300 needs tokenizers: .*text"):
        task_on(text)


@pytest.mark.parametrize("vocab", [256, 65537, True, 300.0])
def test_a_vocabulary_that_cannot_be_is_refused(text: Path, vocab):
    with pytest.raises(ConfigError, match=f"vocab must be a whole number from 257 to 65536, got {vocab!r}"):
        make_task("gpt-pico", data=text, vocab=vocab)


@pytest.mark.parametrize(
    "parts",
    [
        {"train": torch.full((4000,), VOCAB, dtype=torch.int32)},
        {"validation": torch.full((600,), -1, dtype=torch.int32)},
        {"train": torch.zeros(4000)},
        {"starts": torch.tensor([0, 5000])},
        {"starts": torch.tensor([0, -1])},
    ],
)
def test_a_damaged_file_is_not_used(text: Path, parts: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture):
    path = kept_tokens(text, **parts)
    with pytest.raises(MissingDependency):  # it would be made again
        task_on(text)
    assert f"{path} is damaged" in caplog.text


def test_too_little_text_is_counted_in_tokens(text: Path):
    kept_tokens(text, validation=torch.zeros(64, dtype=torch.int32))
    with pytest.raises(ConfigError, match="validation text has 64 tokens, one window of gpt-pico needs 65"):
        task_on(text)


def test_it_is_a_setting_of_text_alone():
    with pytest.raises(ConfigError, match="vocab is a setting of gpt tasks, got 2048 for quadratic"):
        make_task("quadratic", vocab=2048)


def test_training_gives_tokens_that_spell_the_text(text: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "tokenizers")
    pytest.importorskip("tokenizers", reason="pip install -e '.[text]'")
    plain, task = load_corpus(text), task_on(text)
    assert bpe.cache_file(plain, VOCAB).is_file()
    assert len(task.corpus.train) < len(plain.train) / 3  # the files say little
    assert len(task.corpus.starts) == len(plain.starts)
    again = bpe._encode(plain, VOCAB)
    assert torch.equal(again["train"], task.corpus.train)


def test_halves_of_the_validation_windows_share_nothing_and_are_the_whole(text: Path):
    model = task_on_bytes(text).model()
    losses = {part: task_on_bytes(text, val_part=part).evaluate(model)["loss"] for part in ("all", "tuning", "claim")}
    assert losses["tuning"] != losses["claim"]
    assert losses["all"] == pytest.approx((losses["tuning"] + losses["claim"]) / 2, rel=1e-6)


def task_on_bytes(text: Path, **settings) -> TextTask:
    task = make_task("gpt-pico", data=text, val_windows=16, **settings)
    assert isinstance(task, TextTask)
    return task


def test_parts_and_windows_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="val_part must be one of 'all', 'tuning', 'claim', got 'half'"):
        make_task("quadratic", val_part="half")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="val_windows must be a whole number of at least 2, got 1"):
        make_task("gpt-pico", val_windows=1)
