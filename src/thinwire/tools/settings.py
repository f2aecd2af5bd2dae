"""The command-line flags of an algorithm, read from its constructor: a new method needs no second list of its settings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro

from thinwire.core.optimizer import Algorithm
from thinwire.core.policy import Policy
from thinwire.schedules import Schedule
from thinwire.tools.names import NOT_FLAGS


def settings_class(cls: type[Algorithm], fixed: Mapping[str, Any]) -> type:
    """A dataclass with one field per setting of `cls`, with the docstring's words as help.

    Args:
        cls: the algorithm.
        fixed: settings that a preset decides; they become the defaults.
    """
    types = typing.get_type_hints(cls.__init__)
    described = {**_argument_docs(cls), **_argument_docs(Policy)}
    made: list[Any] = []
    for name, default in _defaults(cls).items():
        kind = _flag_type(types.get(name) or typing.get_type_hints(Policy)[name])
        if kind is not None:
            annotated = Annotated[kind, tyro.conf.arg(help=_for_a_flag(described.get(name, "")))]
            given = fixed.get(name, default)  # of a run.toml lists, which a dataclass refuses as defaults
            made.append((name, annotated, field(default=tuple(given) if isinstance(given, list) else given)))
    rare = {"rare": frozenset({"offload", "moment", *(f.name for f in fields(Policy))})}  # only `--help-all` shows them
    return make_dataclass(f"{cls.__name__}Settings", made, frozen=True, kw_only=True, namespace=rare)


def _for_a_flag(text: str) -> str:
    """The words of a docstring without what only Python can be given."""
    return re.sub(r"or a `Schedule`", 'or several, "4 until 64, 8 until 192, 32"', text)


def as_dict(settings: Any) -> dict[str, Any]:
    """The settings that were chosen, by name; those without a value are left to the algorithm."""
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}  # as run.toml gives it back
    return {k: v for k, v in plain.items() if v is not None}


def _defaults(cls: type[Algorithm]) -> dict[str, Any]:
    """Keyword settings of the class and the policies of all algorithms, with their defaults."""
    own = inspect.signature(cls.__init__).parameters
    base = {f.name: f.default for f in fields(Policy)}
    defaults = {n: p.default for n, p in own.items() if n not in NOT_FLAGS and p.default is not p.empty}
    return defaults | {n: default for n, default in base.items() if n not in defaults}


def _flag_type(kind: Any) -> Any:
    """What the command line takes for a setting: a plain type, or None where it cannot be typed in."""
    if kind in (int, float, bool, str) or get_origin(kind) in (Literal, tuple):
        return kind
    # A schedule is typed in as "4 until 64, 32", which `parse_schedule` reads.
    options = [str if k is Schedule else k for k in get_args(kind) if get_origin(k) is not Sequence]
    plain = [k for k in options if k in (int, float, bool, str, type(None)) or get_origin(k) is Literal]
    if not plain or len(plain) != len(options):
        return None
    return typing.Union[tuple(plain)]  # noqa: UP007 (built from a list)


def _argument_docs(cls: type) -> dict[str, str]:
    """The sentences of an "Args:" or "Attributes:" section of a docstring, by name."""
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?:\n\S|\Z)", inspect.cleandoc(cls.__doc__ or ""), re.S | re.M)
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", section[1] if section else "", re.S | re.M)
    return {name: " ".join(text.split()) for name, text in found}
