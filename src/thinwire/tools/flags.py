"""From words of a command line to a run: the algorithm decides which settings there are."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from thinwire.errors import ConfigError, check_choice
from thinwire.tasks import check_name
from thinwire.tools.config import RunConfig, read_run_toml, resolve_algorithm
from thinwire.tools.names import check_algorithm, check_settings

F = TypeVar("F")
_ABOUT = {
    "train": "Train with real worker processes: started here, or joined under torchrun.",
    "sim": "Train on simulated workers and report the time that a network of your choice would take.",
    "run create": "Make a run on an object store, whose workers come and go.",
    "run serve": "Hold a run for a cluster, whose workers come and go.",
    "compare": "Run several methods on the same task, with several seeds, and compare loss, bytes and time.",
}


@dataclass(frozen=True, kw_only=True)
class NoFlags:
    """Of a run that is only described."""

    rare: ClassVar[frozenset[str]] = frozenset()


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
    from thinwire.algorithms import found  # here, since it brings torch
    from thinwire.tools.settings import as_dict, settings_class

    base = saved or RunConfig()
    chosen = peek(arguments, "--algorithm") or base.algorithm
    algorithms = found()
    name, fixed = resolve_algorithm(chosen, algorithms)
    types = {
        "run": RunConfig,
        "settings": settings_class(algorithms[name], {**fixed, **(base.settings if chosen == base.algorithm else {})}),
        "place": flags_type,
    }
    defaults = {"run": replace(base, algorithm=chosen, settings={})}
    if wants_help(arguments):
        types, defaults = {group: for_help(cls, arguments) for group, cls in types.items()}, {}
        about += "" if HELP_ALL in arguments else f"`{HELP_ALL}` shows the other flags too. "
        arguments = [f"--algorithm={chosen}", "--help"]
    run, settings, place = tyro.cli(
        _groups(types, defaults),
        prog=f"thinwire {command}",
        description=f"{_ABOUT[command]} {about}Settings of {chosen}: {first_line(algorithms[name])}",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    own = as_dict(settings)
    if run.beta2 is not None and saved is None and "betas" in own and peek(arguments, "--betas") is None:
        own["betas"] = [own["betas"][0], run.beta2]  # of a method with an update rule of its own
    config = replace(run, settings=own, data=_absolute(run.data))
    config.validate()
    return config, place


def _groups(types: dict[str, Any], defaults: dict[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """What tyro is to fill: one argument for each group of flags, an instance of its type."""

    def filled(**groups: Any) -> tuple[Any, ...]:
        return tuple(groups[name] for name in types)

    given = {name: defaults.get(name, cls()) for name, cls in types.items()}
    kinds = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=given[n], annotation=types[n]) for n in types]
    filled.__signature__ = inspect.Signature(kinds)
    filled.__annotations__ = dict(types)
    return filled


def first_look(command: str, arguments: list[str], flags_type: Any) -> tuple[RunConfig, Any]:
    """Refuse what is wrong about a run as far as that can be seen without torch; `parse_run` sees the rest.

    Args:
        command: which command the arguments were given to.
        arguments: the words after it.
        flags_type: a frozen dataclass, as for `parse_run`.

    Returns:
        The run without the settings of its method, and the flags beside it.
    """
    base = saved_config(arguments) or RunConfig()
    chosen = peek(arguments, "--algorithm") or base.algorithm
    check_algorithm(chosen)
    types = {"run": RunConfig, "place": flags_type}
    for f, kind in [(f, kind) for cls in types.values() for f, kind in typing.get_type_hints(cls).items()]:
        _check_choice(f, kind, peek(arguments, f"--{f.replace('_', '-')}"))
    (run, place), rest = tyro.cli(
        _groups(types, {"run": replace(base, algorithm=chosen, settings={})}),
        prog=f"thinwire {command}",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        return_unknown_args=True,
    )
    known = [f.name for cls in types.values() for f in fields(cls)]
    check_settings(chosen, [word for word in rest if word.startswith("--")], command=command, others=known)
    check_name(run.task)
    run.validate()
    return run, place


def _check_choice(name: str, kind: Any, given: str | None) -> None:
    """Raise a `ConfigError` for a word that is none of those to choose from."""
    choices = [word for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is Literal for word in typing.get_args(k)]
    if choices and given is not None:
        check_choice(name, given, choices)


def saved_config(arguments: list[str]) -> RunConfig | None:
    """The config of the run that --resume names; None without it."""
    if "--resume" not in arguments or wants_help(arguments):
        return None
    out = peek(arguments, "--out")
    if out is None:
        raise ConfigError("--resume needs --out FOLDER, the folder of the run to go on with")
    path = Path(out) / "run.toml"
    if not path.is_file():
        raise ConfigError(f"nothing to resume: {path} does not exist")
    return read_run_toml(path)


# --- Help ----------------------------------------------------------------------------------------------------------------

HELP_ALL = "--help-all"


def wants_help(arguments: list[str]) -> bool:
    """Whether help is asked for, of the usual flags or of all."""
    return bool({"-h", "--help", HELP_ALL} & set(arguments))


def parse_flags(cls: type[F], command: str, arguments: list[str]) -> F:
    """The flags of a command that describes no run.

    Args:
        cls: a frozen dataclass of them.
        command: for the help and for errors.
        arguments: the words after it.
    """
    if not wants_help(arguments):
        return tyro.cli(cls, prog=f"thinwire {command}", args=arguments)
    more = f" `{HELP_ALL}` shows the other flags too." if _rare(cls) and HELP_ALL not in arguments else ""
    about = f"{first_line(cls)}{more}"
    return tyro.cli(for_help(cls, arguments), prog=f"thinwire {command}", description=about, args=["--help"])


def for_help(cls: type[F], arguments: list[str]) -> type[F]:
    """The dataclass as its help should show it: plain names of types, defaults that can be read, nothing rare unless asked.

    Args:
        cls: a frozen dataclass of flags.
        arguments: of the command, for whether all flags are asked for.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    hidden = frozenset() if HELP_ALL in arguments else _rare(cls)
    shown: list[Any] = []
    for f in fields(cls):  # type: ignore[arg-type]
        how = tyro.conf.arg(metavar=_plain(hints[f.name]), help_behavior_hint=_default)
        kind = tyro.conf.Suppress[hints[f.name]] if f.name in hidden else Annotated[hints[f.name], how]
        shown.append((f.name, kind, field(default=f.default, default_factory=f.default_factory)))
    return make_dataclass(cls.__name__, shown, bases=(cls,), frozen=True, kw_only=True)


def _rare(cls: type) -> frozenset[str]:
    return getattr(cls, "rare", frozenset())


def _plain(kind: Any) -> str | None:
    """What to type in for a type: INT, FLOAT ..., or the names to choose from; nothing for a switch."""
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{_plain(typing.get_args(kind)[0])} ..."
    options = [_plain(k) for k in typing.get_args(kind) if k is not type(None)]
    if options:
        return "|".join(option for option in options if option)
    return None if kind is bool else kind.__name__.upper()


def _default(label: str) -> str:
    """The default as help has it; what has none says in words what happens then."""
    words = {"None": "", "''": "", "": "", "True": "(default: on)", "False": "(default: off)"}
    return words.get(label, f"(default: {label})")


# --- Words ---------------------------------------------------------------------------------------------------------------


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
