"""The names of methods, their settings and tasks, read from the source of the methods: what is wrong is refused without torch.

Importing a method brings torch, which takes seconds. What a class says of itself stands in its file, which is only parsed here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import thinwire
from thinwire.errors import ConfigError

ALONE = "alone"

# Names of the command line that stand for a class method of an algorithm: the settings of a paper, or a form of ours.
OF_PAPERS = {
    "coarse-diloco": ("decoupled-diloco", "coarse"),
    "des-loc": ("mt-dao", "des_loc"),
    "demo-v1": ("demo", "v1"),
    "demo-v2": ("demo", "v2"),
    "sparseloco": ("decoupled-diloco", "sparseloco"),
}
# And those that stand for an algorithm with some of its settings fixed; "inner" is its inner optimizer.
FIXED: dict[str, tuple[str, dict[str, object]]] = {
    "ddp": ("data-parallel", {}),
    ALONE: ("data-parallel", {}),  # around a link of one worker
    "local-adam": ("mt-dao", {"inner": "adamw"}),
    "local-adam-nesterov": ("mt-dao", {"inner": "adamw", "outer_momentum": 0.7}),
}

# Arguments of constructors that are not typed in, or that every run has.
NOT_FLAGS = {"self", "inner", "params", "link", "codec", "policy", "defaults", "lr", "weight_decay", "clip_norm"}


@dataclass(frozen=True)
class Described:
    """What the file of a method says of it.

    Attributes:
        name: on the command line.
        summary: the first line of its docstring.
        settings: names of its own settings.
        replicated: states that are equal on all workers at any time.
        synced: states that are equal right after a round.
        papers: the first line of each method's docstring, by name: those of the class methods among them are presets.
    """

    name: str
    summary: str
    settings: tuple[str, ...]
    replicated: tuple[str, ...]
    synced: tuple[str, ...]
    papers: dict[str, str]


@cache
def described() -> dict[str, Described]:
    """All methods by name, sorted."""
    files = sorted((Path(thinwire.__file__).parent / "algorithms").glob("*.py"))
    classes = [cls for file in files for cls in _classes(file)]
    return {d.name: d for d in sorted(filter(None, map(_describe, classes)), key=lambda d: d.name)}


@cache
def policies() -> tuple[str, ...]:
    """The settings that all methods have: what to do when something goes wrong."""
    policy = next(cls for cls in _classes(Path(thinwire.__file__).parent / "core" / "policy.py") if cls.name == "Policy")
    return tuple(_attributes(policy))


def names() -> list[str]:
    """What `--algorithm` takes."""
    return sorted({*described(), *FIXED, *OF_PAPERS})


def check_algorithm(name: str) -> None:
    """Raise a `ConfigError` for a name that no method has."""
    if name not in names():
        raise ConfigError(f"unknown algorithm {name!r}{did_you_mean(name, names())}: choose from {', '.join(names())}")


def behind(name: str) -> Described:
    """The method that a name stands for."""
    check_algorithm(name)
    if name in described():
        return described()[name]
    return described()[(FIXED | OF_PAPERS)[name][0]]


class NoSetting(ConfigError):
    """A method does not have a setting that it was given; the message lists those that it has."""


def check_settings(algorithm: str, flags: Iterable[str], *, command: str, others: Iterable[str] = ()) -> None:
    """Raise a `NoSetting` for a flag that is no setting of the method, with the settings that it has.

    Args:
        algorithm: its name on the command line.
        flags: words that start with two dashes.
        command: whose help has more to say.
        others: what the command has besides the settings of methods, for a word that is spelled nearly like it.
    """
    own = behind(algorithm).settings
    known = {*own, *policies()}
    for word in flags:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if name not in known and name.removeprefix("no_") not in known:
            what = _why_not(algorithm, name) or f"unknown flag {flag}{did_you_mean(flag, map(_as_flag, (*known, *others)))}"
            settings = f"{algorithm} has {', '.join(map(_as_flag, own)) or 'no settings of its own'}"
            raise NoSetting(f"{what}; {settings}: see thinwire {command} --algorithm {algorithm} --help")


def _why_not(algorithm: str, name: str) -> str:
    """Why a method does not have a setting that others have; nothing where none has it."""
    others = [d.name for d in described().values() if name in d.settings]
    if name == "H":
        return f"{algorithm} exchanges {'nothing' if algorithm == ALONE else 'at every step'} and has no --H"
    return f"{_as_flag(name)} is a setting of {', '.join(others)}, not of {algorithm}" if others else ""


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question in brackets where something known looks like the word; else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# --- Reading source ------------------------------------------------------------------------------------------------------


def _classes(file: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def _describe(cls: ast.ClassDef) -> Described | None:
    """None for a class that is no method: it has no name of its own."""
    values = _attributes(cls)
    name = values.get("name")
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return None
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    arguments = methods["__init__"].args if "__init__" in methods else ast.arguments([], [], None, [], [], None, [])
    return Described(
        name=name.value,
        summary=_first_line(cls),
        settings=tuple(a.arg for a in (*arguments.args, *arguments.kwonlyargs) if a.arg not in NOT_FLAGS),
        replicated=_words(values.get("replicated")),
        synced=_words(values.get("synced")),
        papers={name: _first_line(node) for name, node in methods.items()},
    )


def _attributes(cls: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The attributes that a class body sets, with the expression each is set to."""
    found: dict[str, ast.expr | None] = {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def _words(value: ast.expr | None) -> tuple[str, ...]:
    """The words of `frozenset({...})`, sorted."""
    constants = ast.walk(value) if value is not None else ()
    return tuple(sorted(node.value for node in constants if isinstance(node, ast.Constant) and isinstance(node.value, str)))


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]
