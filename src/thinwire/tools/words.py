"""From a run back to words: which of its settings are not the defaults, and the flags that give them."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from thinwire.algorithms import found
from thinwire.errors import ConfigError
from thinwire.tools.config import RunConfig, resolve_algorithm
from thinwire.tools.settings import as_dict, settings_class

_ALWAYS = ("algorithm", "task", "workers", "steps", "seed")


def changed(config: RunConfig) -> dict[str, Any]:
    """The settings that are not the defaults: those of the run, then the method's own."""
    mine = {f.name: getattr(config, f.name) for f in fields(RunConfig) if f.name not in (*_ALWAYS, "settings")}
    usual = RunConfig()
    own = _usual_settings(config.algorithm)
    return {
        **{name: value for name, value in mine.items() if value != getattr(usual, name)},
        **{name: value for name, value in config.settings.items() if name not in own or value != own[name]},
    }


def words_of(config: RunConfig) -> list[str]:
    """The flags of `thinwire train` or `thinwire sim` that give this run."""
    always = {name: getattr(config, name) for name in _ALWAYS if getattr(config, name) is not None}
    return [word for name, value in {**always, **changed(config)}.items() for word in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]


@cache
def _usual_settings(algorithm: str) -> dict[str, Any]:
    """What the method's settings are unless given; nothing is usual for a method that is not here any more."""
    try:
        name, fixed = resolve_algorithm(algorithm, found())
    except ConfigError:
        return {}
    return as_dict(settings_class(found()[name], fixed)())
