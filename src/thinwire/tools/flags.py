"""From words of a command line to a run: the algorithm decides which settings there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from thinwire.algorithms import found
from thinwire.tools.config import RunConfig, resolve_algorithm
from thinwire.tools.settings import as_dict, settings_class

_ABOUT = {
    "train": "Train with real worker processes: started here, or joined under torchrun.",
    "sim": "Train on simulated workers and report the time that a network of your choice would take.",
    "run create": "Make a run on an object store, whose workers come and go.",
    "compare": "Run several methods on the same task, with several seeds, and compare loss, bytes and time.",
}


@dataclass(frozen=True, kw_only=True)
class NoFlags:
    """Of a run that is only described."""


def parse_run(
    command: str, arguments: list[str], flags_type: Any = NoFlags, saved: RunConfig | None = None, *, about: str = ""
) -> tuple[RunConfig, Any]:
    """The config that the arguments give, and the flags beside it.

    Args:
        command: which command they were given to; for the help and for errors.
        arguments: the words after it.
        flags_type: a frozen dataclass of what does not change the result of a run; its fields are flags too.
        saved: defaults, where not those of `RunConfig`.
        about: more for the help.
    """
    base = saved or RunConfig()
    chosen = peek(arguments, "--algorithm") or base.algorithm
    algorithms = found()
    name, fixed = resolve_algorithm(chosen, algorithms)
    own = settings_class(algorithms[name], {**fixed, **(base.settings if chosen == base.algorithm else {})})

    def flags(
        run: RunConfig = replace(base, algorithm=chosen, settings={}),  # noqa: B008
        settings: own = own(),  # type: ignore[valid-type] # noqa: B008
        place: flags_type = flags_type(),  # type: ignore[valid-type] # noqa: B008
    ) -> tuple[RunConfig, Any, Any]:
        return run, settings, place

    flags.__annotations__ = {"run": RunConfig, "settings": own, "place": flags_type}
    run, settings, place = tyro.cli(
        flags,
        prog=f"thinwire {command}",
        description=f"{_ABOUT[command]} {about}Settings of {chosen}: {first_line(algorithms[name])}",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    config = replace(run, settings=as_dict(settings), data=_absolute(run.data))
    config.validate()
    return config, place


def one_or_each(text: str, parse: Callable[[str], float]) -> float | tuple[float, ...]:
    """A value for all workers, or a comma-separated list with one for each."""
    values = tuple(parse(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


def first_line(cls: type) -> str:
    """What a class says of itself in one line."""
    return (cls.__doc__ or "").splitlines()[0]


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


def peek(arguments: list[str], flag: str) -> str | None:
    """The value of a flag before the real parsing, which needs it."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


def with_json_name(arguments: list[str]) -> list[str]:
    """The arguments with `--json` that has no name given one: - means the screen."""
    found = []
    for i, argument in enumerate(arguments):
        found.append(argument)
        if argument == "--json" and (i + 1 == len(arguments) or arguments[i + 1].startswith("--")):
            found.append("-")
    return found
