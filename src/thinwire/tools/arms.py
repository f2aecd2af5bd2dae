"""How the methods of a comparison are written: "diloco --H 32", or with a name, "thin = demo --lr 2e-3". No torch here.

"@FILE" stands for the lines of a file: methods, flags of all of them (lines that begin with a dash), and remarks (with a #).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.tools.flags import peek


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The methods, which come first, and the flags that all of them share; of files they come first, and later ones win."""
    first_flag = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    words: list[str] = []
    flags: list[str] = []
    for word in arguments[:first_flag]:
        for line in _lines(word[1:]) if word.startswith("@") else [word]:
            if line.startswith("-"):
                flags += shlex.split(line)
            else:
                words.append(line)
    return words, [*flags, *arguments[first_flag:]]


def _lines(name: str) -> list[str]:
    """The lines of a file of methods, without empty ones and remarks."""
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read the methods in {name!r}: {getattr(cause, 'strerror', None) or cause}") from cause
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def alternatives(word: str) -> list[str]:
    """A method once for each combination of what stands in braces in its flags.

    >>> alternatives("d = diloco --H {8,32} --outer-lr 1")
    ['d = diloco --H 8 --outer-lr 1', 'd = diloco --H 32 --outer-lr 1']
    """
    found = re.search(r"\{([^{}]*)\}", word)
    if found is None:
        return [word]
    head, tail = word[: found.start()], word[found.end() :]
    return [whole for one in found[1].split(",") for whole in alternatives(f"{head}{one.strip()}{tail}")]


def split_words(word: str) -> tuple[str, str, list[str]]:
    """Name, algorithm and own flags of a method in a comparison."""
    left, equals, right = word.partition(" = ")
    named = bool(equals) and " -" not in left
    try:
        parts = shlex.split(right if named else word)
    except ValueError as cause:
        raise ConfigError(f"cannot read {word!r}: {cause}") from cause
    if not parts or (named and not left.strip()):
        raise ConfigError(f"name a method with flags of its own, such as 'diloco --H 32' or 'thin = demo', got {word!r}")
    name = " ".join(left.split()) if named else " ".join(word.split())
    for flag in ("--algorithm", "--seed"):
        if peek(parts, flag) is not None:
            raise ConfigError(f"the method comes first, without --algorithm, and seeds are those of --seeds, got {word!r}")
    return name, parts[0], parts[1:]
