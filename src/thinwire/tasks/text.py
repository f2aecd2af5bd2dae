"""Text as bytes, and the task of predicting the next one.

A token is a byte: no vocabulary file, no tokenizer, and any file will do (`bpe.py` has longer tokens). The default corpus is
the source of Python's standard library, which every machine has.

About 5% of the text is kept for validation, as whole files chosen by a hash of their names, so that neither the seed
nor the number of workers changes them. When files are too few or too large for that (a single file, say), the
validation text is the last 5% of each file.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from thinwire.errors import ConfigError, MissingData
from thinwire.tasks.gpt import GPT, SIZES
from thinwire.tasks.task import SeededTask, ValidationPart, device_of, evaluating, part_of

VALIDATION_SHARE = 0.05
VALIDATION_WINDOWS = 64
NO_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}  # folders beside the library proper
DEFAULT_BATCH = {"pico": 4, "micro": 4, "nano": 8, "small": 8, "medium": 8, "124m": 4}


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in two parts.

    Attributes:
        source: where it came from, for messages.
        train: all training files one after the other, [bytes] uint8, or [tokens] int32.
        validation: likewise.
        train_files: names of the training files in the order of `train`.
        validation_files: names of the validation files.
        starts: where each training file starts in `train`.
    """

    source: str
    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    starts: tuple[int, ...]

    def shards(self, workers: int) -> list[tuple[int, int]]:
        """One contiguous range (start, end) of `train` per worker: whole files where their sizes allow it."""
        total = len(self.train)
        even = [total * w // workers for w in range(workers + 1)]
        bounds = np.array([*self.starts, total])
        whole = [int(bounds[np.abs(bounds - cut).argmin()]) for cut in even]
        # One file may be larger than a share. Then cutting files is better than leaving a worker without text.
        fair = all(end - start >= total / workers / 2 for start, end in pairwise(whole))
        cuts = whole if fair else even
        return list(pairwise(cuts))


def load_corpus(data: str | Path | None = None) -> Corpus:
    """Read a text once per process: a file, a folder of text files, or (None) Python's standard library.

    Of a folder, all files in it and below count, without hidden ones and those that hold a zero byte near their start,
    which are not text.

    Raises:
        MissingData: there is nothing at `data`, or no text in it.
    """
    return _load(None if data is None else Path(data).expanduser().resolve())


@lru_cache(maxsize=4)
def _load(path: Path | None) -> Corpus:
    source = f"the Python standard library ({sysconfig.get_paths()['stdlib']})" if path is None else str(path)
    if path is not None and not path.exists():
        raise MissingData(f"no text at {source}: data must be a text file or a folder of text files")
    files = {name: text for name, text in (_standard_library() if path is None else _texts(path)) if text}
    if not files:
        raise MissingData(f"no text in {source}: data must be a text file or a folder of text files")
    train, validation = _split(files)
    return Corpus(
        source=source,
        train=_joined(train),
        validation=_joined(validation),
        train_files=tuple(train),
        validation_files=tuple(validation),
        starts=tuple(accumulate((len(text) for text in train.values()), initial=0))[:-1],
    )


def _standard_library() -> Iterator[tuple[str, bytes]]:
    """Name and text of each source file, without tests and without what describes this machine's build."""
    for name, path in _walk(Path(sysconfig.get_paths()["stdlib"]), skip=NO_LIBRARY):
        if name.endswith(".py") and not name.startswith(("_sysconfigdata", "config-")):
            yield name, path.read_bytes()


def _texts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and text of a file, or of each text file in a folder."""
    for name, file in [(path.name, path)] if path.is_file() else _walk(path, skip=set()):
        text = file.read_bytes()
        if b"\0" not in text[:8192]:
            yield name, text


def _walk(root: Path, *, skip: set[str]) -> list[tuple[str, Path]]:
    """Relative name and path of all visible files below `root`, by name: the order is the same on every machine."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    return sorted(found)


def _split(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Training and validation text by file name; see the head of this file."""
    wanted = VALIDATION_SHARE * sum(map(len, files.values()))
    chosen: set[str] = set()
    size = 0
    for name in sorted(files, key=lambda name: (zlib.crc32(name.encode()), name)):
        # Stopping short of the full 5% avoids filling the rest with the smallest files of the corpus.
        if size < 0.9 * wanted and size + len(files[name]) <= wanted:
            chosen.add(name)
            size += len(files[name])
    if size >= 0.5 * wanted:
        train = {name: text for name, text in files.items() if name not in chosen}
        return train, {name: files[name] for name in files if name in chosen}
    cut = {name: len(text) - int(VALIDATION_SHARE * len(text)) for name, text in files.items()}
    return (
        {name: text[: cut[name]] for name, text in files.items()},
        {name: text[cut[name] :] for name, text in files.items()},
    )


def _joined(files: dict[str, bytes]) -> Tensor:
    """All files one after the other, [bytes] uint8."""
    joined = bytearray(b"".join(files.values()))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


class TextTask(SeededTask):
    """A GPT on bytes of text, or on tokens of a byte-pair encoding.

    Without `non_iid` all workers take random windows from the whole training text. With it, a window comes from the
    worker's own part of the files with probability `non_iid`, and otherwise from the whole: at 1.0 no two workers ever
    see the same text. The parts are contiguous runs of files in the order of their names, of about equal size.

    gpt-124m has the vocabulary of GPT-2 and uses 256 entries of it: it is there for its size, not for its language.

    Attributes:
        config: shape of the model.
        sequences: windows in one batch of one worker.
        windows: of validation, evenly spaced over its text, all of them whichever part is evaluated.
        corpus: the text.
        shards: each worker's own range (start, end) of the training text.
    """

    unit = "tokens"

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        workers: int,
        batch: int | None,
        data: str | Path | None,
        non_iid: float | None,
        vocab: int | None = None,
        val_windows: int | None = None,
        val_part: ValidationPart = "all",
    ):
        """Read the text and cut the validation windows; `DEFAULT_BATCH` has the size of a batch where none is given."""
        super().__init__(name, seed=seed, workers=workers)
        if non_iid is not None and not 0 < non_iid <= 1:
            raise ConfigError(f"non_iid must be above 0 and at most 1 for {name} (a probability), got {non_iid!r}")
        size = name.removeprefix("gpt-")
        self.config = SIZES[size] if vocab is None else replace(SIZES[size], vocab=vocab)
        self.windows = val_windows or VALIDATION_WINDOWS
        self.sequences = batch or DEFAULT_BATCH[size]
        self.batch_items = self.sequences * self.config.context
        self.own_share = non_iid or 0.0
        self.corpus, self._token = load_corpus(data), "byte"
        if vocab is not None:
            from thinwire.tasks.bpe import load_bpe_corpus

            self.corpus, self._token = load_bpe_corpus(data, vocab), "token"
        self.shards = self.corpus.shards(workers)
        self._check_sizes()
        starts = np.linspace(0, len(self.corpus.validation) - self.config.context - 1, self.windows)
        self._validation = self._windows(self.corpus.validation, part_of(starts.astype(np.int64), val_part))

    def _check_sizes(self) -> None:
        """Every text that windows are cut from must hold at least one."""
        needed = self.config.context + 1
        sizes = {"training text": len(self.corpus.train), "validation text": len(self.corpus.validation)}
        if self.own_share:
            sizes[f"smallest of {self.workers} workers' parts"] = min(end - start for start, end in self.shards)
        for part, size in sizes.items():
            if size < needed:
                raise MissingData(
                    f"too little text in {self.corpus.source}: the {part} has {size} {self._token}s, "
                    f"one window of {self.name} needs {needed}"
                )

    def _windows(self, text: Tensor, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [len(starts), context] int64: the targets are one token ahead.

        Args:
            text: [tokens].
            starts: [sequences] int64.
        """
        positions = starts[:, None] + np.arange(self.config.context + 1)
        window = text[torch.from_numpy(positions)].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def build(self) -> nn.Module:
        """A GPT."""
        return GPT(self.config)

    def sample(self, worker: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Random windows: inputs and targets, both [sequences, context] int64."""
        own = rng.random(self.sequences) < self.own_share
        first = np.where(own, self.shards[worker][0], 0)
        end = np.where(own, self.shards[worker][1], len(self.corpus.train))
        return self._windows(self.corpus.train, rng.integers(first, end - self.config.context))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per byte, or per token."""
        tokens, targets = (part.to(device_of(model)) for part in batch)  # both [B, T]
        logits = model(tokens)  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean cross-entropy over windows that are evenly spaced over the validation text."""
        size = max(1, 2048 // self.config.context)  # the scores of gpt-124m fill 0.2 GB per sequence
        parts = zip(*(part.split(size) for part in self._validation), strict=True)
        with evaluating(model):
            total = sum(self.loss(model, (x, y)).item() * len(x) for x, y in parts)
        return {"loss": total / len(self._validation[0])}
