"""What to train: models, data and losses, under one short name each.

A task is everything of an experiment that has nothing to do with the network. Here stand only the names, so that the
command line can list them without loading torch; the tasks themselves are loaded when `make_task` is called.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.errors import ConfigError, check_choice, check_whole_number

if TYPE_CHECKING:
    from thinwire.tasks.task import Task, ValidationPart

__all__ = ["TASKS", "check_name", "make_task"]

TASKS: dict[str, str] = {
    "gpt-pico": "GPT of 0.1M parameters on bytes of text; needs no download",
    "gpt-micro": "GPT of 0.4M parameters on bytes of text; needs no download",
    "gpt-nano": "GPT of 0.8M parameters on bytes of text; needs no download",
    "gpt-small": "GPT of 3M parameters on bytes of text; needs no download",
    "gpt-medium": "GPT of 11M parameters on bytes of text; needs no download",
    "gpt-124m": "GPT in the shape of GPT-2 small on bytes of text; wants a GPU",
    "cnn-digits": "CNN of 26k parameters on 8x8 digits; needs scikit-learn",
    "resnet-digits": "narrow ResNet-18 with BatchNorm on 8x8 digits; needs scikit-learn",
    "cnn-mnist": "CNN on MNIST; needs --data FOLDER",
    "cnn-fashion": "CNN on Fashion-MNIST; needs --data FOLDER or the Debian package",
    "cnn-cifar": "CNN on CIFAR-10; needs --data FOLDER and Pillow",
    "resnet-cifar": "narrow ResNet-18 with BatchNorm on CIFAR-10; needs --data FOLDER and Pillow",
    "quadratic": "noisy quadratic bowl of 193 parameters, for exact checks in milliseconds",
}


def make_task(
    name: str,
    *,
    seed: int = 0,
    workers: int = 1,
    batch: int | None = None,
    data: str | Path | None = None,
    non_iid: float | None = None,
    vocab: int | None = None,
    val_windows: int | None = None,
    val_part: ValidationPart = "all",
) -> Task:
    """Build the task called `name`.

    Args:
        name: one of `TASKS`.
        seed: initial weights, batches and the non-IID split depend on it; the validation set does not.
        workers: how many workers share the data.
        batch: sequences, images or samples in one batch of one worker; None takes the task's own.
        data: a text file or folder of text (gpt-*), or the folder of an image set.
        non_iid: None gives all workers the same data. Otherwise a number above 0, which means
            gpt-*: the share of sequences that a worker takes from its own part of the files, at most 1;
            images: the alpha of a Dirichlet split by label, smaller is more uneven;
            quadratic: the distance from each worker's optimum to the common one.
        vocab: of gpt-*: so many tokens, of a byte-pair encoding that is trained on the text once and kept in a file; None
            takes bytes.
        val_windows: of gpt-*: windows of validation text; 64 by default.
        val_part: evaluate on all validation samples, or on one half: to choose settings on ("tuning"), or to report ("claim").
            The loss of quadratic is exact, and the same on both.

    Raises:
        ConfigError: a setting is wrong, or data or an optional package is missing.
    """
    _check(name, seed=seed, workers=workers, batch=batch, non_iid=non_iid)
    check_choice("val_part", val_part, ("all", "tuning", "claim"))
    if val_windows is not None:
        check_whole_number("val_windows", val_windows, least=2)
    if data is not None and (name == "quadratic" or name.endswith("-digits")):
        raise ConfigError(f"the task {name} brings its own data and reads no other, got data={str(data)!r}")
    if name.startswith("gpt-"):
        from thinwire.tasks.text import TextTask

        text: dict[str, Any] = {"vocab": vocab, "val_windows": val_windows, "val_part": val_part}
        return TextTask(name, seed=seed, workers=workers, batch=batch, data=data, non_iid=non_iid, **text)
    for setting, value in {"vocab": vocab, "val_windows": val_windows}.items():
        if value is not None:
            raise ConfigError(f"{setting} is a setting of gpt tasks, got {value!r} for {name}")
    if name == "quadratic":
        from thinwire.tasks.quadratic import QuadraticTask

        return QuadraticTask(name, seed=seed, workers=workers, batch=batch, non_iid=non_iid)
    from thinwire.tasks.images import ImageTask

    return ImageTask(name, seed=seed, workers=workers, batch=batch, data=data, non_iid=non_iid, val_part=val_part)


def check_name(name: str) -> None:
    """Raise a `ConfigError` for a name that no task has."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {name!r}{hint}")


def _check(name: str, *, seed: int, workers: int, batch: int | None, non_iid: float | None) -> None:
    """Refuse what no task can take; each task refuses the rest."""
    check_name(name)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}")
    check_whole_number("workers", workers)
    if batch is not None:
        check_whole_number("batch", batch)
    if non_iid is not None and not (math.isfinite(non_iid) and non_iid > 0):
        raise ConfigError(f"non_iid must be None or a number above 0, got {non_iid!r}")
