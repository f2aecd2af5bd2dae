"""How the methods of a comparison are written: "diloco --H 32", or with a name, "thin = demo --lr 2e-3". No torch here."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from thinwire.errors import ConfigError
from thinwire.tools.flags import peek


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The methods, which come first, and the flags that all of them share."""
    first_flag = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return list(arguments[:first_flag]), list(arguments[first_flag:])


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
