"""thinwire.json: what a checkpoint is of and what is in it. Whatever a file says is checked before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.files import (
    DESCRIPTION,
    SUMS,
    Piece,
    Stored,
    has_step_name,
    is_tensor_file,
    read_sums,
    read_verified_text,
    step_of,
)
from thinwire.core.optimizer import Algorithm
from thinwire.core.slots import WHOSE
from thinwire.core.state_layout import state_layout
from thinwire.errors import CheckpointError

FORMAT = 2


@dataclass(frozen=True)
class Description:
    """What thinwire.json says.

    Attributes:
        run: the id of the run, made at its first checkpoint.
        step: after which it was written.
        workers: that wrote it.
        shards: processes per worker.
        algorithm: name of the optimizer's class.
        inner: name of the inner optimizer's class; None without one.
        finite: whether the parameters of all workers were.
        settings: of the algorithm, for people to read.
        slots: names of the state that the algorithm keeps per parameter.
        groups: the parameter groups with all their settings and the counters.
        tensors: all tensors by key.
    """

    run: str
    step: int
    workers: int
    shards: int
    algorithm: str
    inner: str | None
    finite: bool
    settings: dict[str, Any]
    slots: list[str]
    groups: list[dict[str, Any]]
    tensors: dict[str, Stored]

    @property
    def about(self) -> dict[str, Any]:
        """What every file of the checkpoint must say of itself."""
        return {"run": self.run, "step": self.step}


def describe(
    optimizer: Algorithm, *, run: str, workers: int, shards: int, finite: bool, tensors: dict[str, Stored]
) -> Description:
    """The description of a checkpoint that is being written."""
    return Description(
        run=run,
        step=optimizer.steps,
        workers=workers,
        shards=shards,
        algorithm=type(optimizer).__name__,
        inner=_inner_of(optimizer),
        finite=finite,
        settings={k: v if _is_plain(v) else repr(v) for k, v in optimizer.settings.items()},
        slots=list(state_layout(optimizer).slots),
        groups=[_plain_group(group) for group in optimizer.state_dict()["param_groups"]],
        tensors=tensors,
    )


def write_description(path: Path, description: Description) -> None:
    """Write thinwire.json into a checkpoint."""
    content: dict[str, Any] = {"format": FORMAT, **vars(description)}
    del content["tensors"]
    lines = [f"  {json.dumps(key)}: {json.dumps(_entry(stored))}" for key, stored in description.tensors.items()]
    head = json.dumps(content, indent=1).removesuffix("\n}")
    text = head + ',\n "tensors": {\n' + ",\n".join(lines) + "\n }\n}\n"  # a tensor per line
    (path / DESCRIPTION).write_text(text, encoding="utf-8")


def _entry(stored: Stored) -> dict[str, Any]:
    return {"dtype": str(stored.dtype).removeprefix("torch."), "shape": stored.shape, "pieces": stored.pieces}


def read_description(path: Path) -> tuple[Description, dict[str, str]]:
    """What a checkpoint is of, and the checksums of its files.

    Raises:
        CheckpointError: where it is damaged or of another format.
    """
    if not (path / SUMS).is_file():
        _refuse_other_format(path)
    sums = read_sums(path)
    text = read_verified_text(path, DESCRIPTION, sums)
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {content['format']!r}, this version reads {FORMAT}")
        description = _checked(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise CheckpointError(f"{path} is damaged: {DESCRIPTION}: {type(cause).__name__} {str(cause)[:100]}") from cause
    if has_step_name(path) and step_of(path) != description.step:
        raise CheckpointError(f"{path} is damaged: it holds a checkpoint of step {description.step}")
    return description, sums


def check_fits(description: Description, path: Path, optimizer: Algorithm) -> None:
    """Refuse a checkpoint of another method or inner optimizer."""
    if description.algorithm != type(optimizer).__name__:
        raise CheckpointError(f"{path} was written by {description.algorithm}, not by {type(optimizer).__name__}")
    if description.inner != _inner_of(optimizer):
        inner = _inner_of(optimizer)
        raise CheckpointError(f"{path} was written with the inner optimizer {description.inner}, not with {inner}")
    if len(description.groups) != len(optimizer.param_groups):
        groups = len(description.groups)
        raise CheckpointError(f"{path} has {groups} parameter groups, this optimizer has {len(optimizer.param_groups)}")


def restored_groups(description: Description, optimizer: Algorithm) -> list[dict[str, Any]]:
    """The parameter groups as the live optimizer has them: JSON has no tuples and no tensors."""
    return [
        {key: _restored(key, value, group.get(key)) for key, value in saved.items()}
        for saved, group in zip(description.groups, optimizer.param_groups, strict=True)
    ]


def _restored(key: str, value: Any, live: Any) -> Any:
    """A setting with the type that it has in the live optimizer."""
    number = isinstance(value, int | float)
    if key == "params" or live is None or value is None:
        return value
    if isinstance(live, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(live, Tensor) and number:
        return torch.full_like(live, value)
    if isinstance(live, int | float) and number:
        return value
    if isinstance(live, list) and isinstance(value, list | int):  # a counter of rounds under way is one or several
        return value
    if isinstance(live, int) and isinstance(value, list):
        return value
    if type(live) is type(value):
        return value
    raise CheckpointError(f"the setting {key!r} is {str(value)[:60]!r} in the checkpoint and {str(live)[:60]!r} here")


def _inner_of(optimizer: Algorithm) -> str | None:
    inner = optimizer.settings.get("inner")
    return None if inner is None else str(inner)


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without what JSON cannot hold, and without whose it is: all workers read the first one's."""
    values = {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in group.items() if k not in WHOSE}
    return {k: v for k, v in values.items() if _is_plain(v)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, str | int | float | bool)


def _refuse_other_format(path: Path) -> None:
    """Say what a folder without checksums is."""
    try:
        older = json.loads((path / DESCRIPTION).read_text()).get("format") == 1
    except (OSError, ValueError, AttributeError, RecursionError):
        older = False
    if older:
        raise CheckpointError(
            f"{path} has format 1, which thinwire no longer reads, since it holds a pickle that could run code: "
            "resume it with the version that wrote it, or start the run again"
        )
    raise CheckpointError(f"{path} is not a finished thinwire checkpoint: it has no {SUMS}")


def _checked(content: dict[str, Any]) -> Description:
    """A description whose values are of the kinds they must be; else a TypeError or ValueError."""
    groups = _of(content["groups"], list)
    for group in groups:
        if not isinstance(group, dict) or not all(type(n) is int for n in _of(group["params"], list)):
            raise TypeError("groups")
    return Description(
        run=_of(content["run"], str),
        step=_count(content["step"], 0),
        workers=_count(content["workers"], 1),
        shards=_count(content["shards"], 1),
        algorithm=_of(content["algorithm"], str),
        inner=None if content["inner"] is None else _of(content["inner"], str),
        finite=_of(content["finite"], bool),
        settings=_of(content["settings"], dict),
        slots=_of(content["slots"], list),
        groups=groups,
        tensors={key: _stored(entry) for key, entry in _of(content["tensors"], dict).items()},
    )


def _stored(entry: dict[str, Any]) -> Stored:
    dtype = getattr(torch, _of(entry["dtype"], str), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {entry['dtype']!r}")
    shape = _sizes(entry["shape"])
    pieces = []
    for file, offset, size in entry["pieces"]:
        piece = Piece(_of(file, str), _sizes(offset), _sizes(size))
        inside = [a + n <= m for a, n, m in zip(piece.offset, piece.shape, shape, strict=True)]
        if not is_tensor_file(piece.file) or not all(inside):
            raise ValueError(f"a piece {piece}")
        pieces.append(piece)
    stored = {(p.offset, p.shape): math.prod(p.shape) for p in pieces}
    if sum(stored.values()) != math.prod(shape):  # also: nothing is allocated that no file holds
        raise ValueError(f"pieces of {sum(stored.values())} elements for a tensor of shape {shape}")
    return Stored(dtype, shape, tuple(pieces))


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{str(value)[:60]!r} where a {kind.__name__} must be")
    return value


def _count(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{str(value)[:60]!r} where a whole number of at least {least} must be")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(_count(n, 0) for n in _of(values, list))
