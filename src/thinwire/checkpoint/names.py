"""Names of a model's tensors in a checkpoint: those of the model itself, without what wrappers put before them.

torch.compile, DistributedDataParallel and activation checkpointing hold the module in an attribute, whose name becomes part of
all names. Without it a checkpoint of a compiled model loads into a plain one and back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from thinwire.errors import CheckpointError

_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module")
_PREFIX = re.compile(rf"(?:^|(?<=[./]))(?:{'|'.join(_WRAPPERS)})\.")

T = TypeVar("T")


def plain_name(name: str) -> str:
    """A name without the attributes of wrappers, at any depth."""
    return _PREFIX.sub("", name)


def plain_names(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """What is named, by plain names; two that become equal are a `CheckpointError`."""
    found: dict[str, tuple[str, T]] = {}
    for name, value in named:
        before, _ = found.setdefault(plain_name(name), (name, value))
        if before != name:
            raise CheckpointError(
                f"{before!r} and {name!r} have the same name without {', '.join(_WRAPPERS)}: rename one of the modules"
            )
    return {name: value for name, (_, value) in found.items()}


def parameters_of(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """The parameters of a model by their plain names."""
    return plain_names(model.named_parameters())


def buffers_of(model: nn.Module) -> Mapping[str, Tensor]:
    """The buffers of a model by their plain names."""
    return plain_names(model.named_buffers())


def unwrapped(model: nn.Module) -> nn.Module:
    """The module within all wrappers."""
    held = next((inner for name in _WRAPPERS if isinstance(inner := getattr(model, name, None), nn.Module)), None)
    return model if held is None else unwrapped(held)
