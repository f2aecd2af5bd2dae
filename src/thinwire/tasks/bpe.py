"""Text in tokens of several bytes: a byte-pair encoding that is trained once on a training text, and kept in a file.

The file holds the text in tokens, so that only the first run needs the package `tokenizers`, and all later ones read the same
tokens whatever version of it they have. It is named after the text and the size of the vocabulary, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.errors import ConfigError, MissingDependency, how_to_install
from thinwire.tasks.text import Corpus, load_corpus

log = logging.getLogger("thinwire")

_LEAST, _MOST = 257, 65536  # the 256 bytes and one pair; what two bytes per token can count


def load_bpe_corpus(data: str | Path | None, vocab: int) -> Corpus:
    """A text as `load_corpus` reads it, in tokens: `train` and `validation` are int32.

    Args:
        data: a file, a folder of text files, or None for Python's standard library.
        vocab: how many different tokens there are.

    Raises:
        ConfigError: the size of the vocabulary is not from 257 to 65536.
        MissingDependency: there is no file yet, and no package `tokenizers`.
    """
    if isinstance(vocab, bool) or not isinstance(vocab, int) or not _LEAST <= vocab <= _MOST:
        raise ConfigError(f"vocab must be a whole number from {_LEAST} to {_MOST}, got {vocab!r}")
    return _in_tokens(load_corpus(data), vocab)


@lru_cache(maxsize=4)
def _in_tokens(corpus: Corpus, vocab: int) -> Corpus:
    path = cache_file(corpus, vocab)
    parts = _read(path, vocab)
    if parts is None:
        parts = _encode(corpus, vocab)
        _keep(path, parts)
    return Corpus(
        source=corpus.source,
        train=parts["train"],
        validation=parts["validation"],
        train_files=corpus.train_files,
        validation_files=corpus.validation_files,
        starts=tuple(parts["starts"].tolist()),
    )


def cache_file(corpus: Corpus, vocab: int) -> Path:
    """Where a text is kept in tokens: $XDG_CACHE_HOME/thinwire, or ~/.cache/thinwire."""
    text = hashlib.sha256()
    for part in (corpus.train, corpus.validation):
        text.update(len(part).to_bytes(8, "little") + part.numpy().tobytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "thinwire")
    return folder / f"bpe-{vocab}-{text.hexdigest()[:16]}.safetensors"


def _read(path: Path, vocab: int) -> dict[str, Tensor] | None:
    """What the file holds; None where there is none, or it is damaged."""
    if not path.is_file():
        return None
    try:
        parts = load_file(path)
        tokens = [parts["train"], parts["validation"]]
        sound = all(t.dtype == torch.int32 and t.dim() == 1 and int(t.min()) >= 0 and int(t.max()) < vocab for t in tokens)
        starts = [0, *parts["starts"].tolist(), len(parts["train"])]
    except (OSError, SafetensorError, KeyError, RuntimeError):
        sound, starts, parts = False, [], {}
    if sound and all(a <= b for a, b in pairwise(starts)):
        return parts
    log.warning("%s is damaged: the text is read and divided into tokens again", path)
    return None


def _keep(path: Path, parts: dict[str, Tensor]) -> None:
    """Write the file whole or not at all; several runs may do so at the same time, all with the same contents."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(parts, aside)
        aside.rename(path)
    except (OSError, SafetensorError) as cause:
        aside.unlink(missing_ok=True)
        log.warning("cannot keep the tokens in %s, so that every run divides the text anew: %s", path, cause)


def _encode(corpus: Corpus, vocab: int) -> dict[str, Tensor]:
    """Train the encoding on the training text, and divide both texts into tokens; no token reaches over two training files."""
    log.warning("training a byte-pair encoding of %d tokens on %s, once", vocab, corpus.source)
    bounds = [*corpus.starts, len(corpus.train)]
    files = [_words(corpus.train[start:end]) for start, end in pairwise(bounds)]
    tokenizer = _trained(files, vocab)
    train = [torch.tensor(encoded.ids, dtype=torch.int32) for encoded in tokenizer.encode_batch(files)]
    starts = list(accumulate((len(tokens) for tokens in train), initial=0))[:-1]
    validation = torch.tensor(tokenizer.encode(_words(corpus.validation)).ids, dtype=torch.int32)
    return {"train": torch.cat(train), "validation": validation, "starts": torch.tensor(starts)}


def _words(text: Tensor) -> str:
    return text.numpy().tobytes().decode("utf-8", errors="replace")


def _trained(files: list[str], vocab: int) -> Any:
    """A byte-level encoding as of GPT-2; "tokenizers" has no types that pyright could know without it."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingDependency(f"vocab={vocab} needs tokenizers: {how_to_install('text')}") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(files, trainer)
    return tokenizer
