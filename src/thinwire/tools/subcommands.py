"""Commands below a command: `thinwire lab up`, `thinwire run create`. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from thinwire.errors import ConfigError


def choose_command(name: str, help: str, commands: Mapping[str, Callable[[list[str]], int]], arguments: list[str]) -> int:
    """Run the command that the first argument names, of those below `thinwire NAME`.

    Args:
        name: what they are below.
        help: printed where it is asked for, or nothing was given.
        commands: by name.
        arguments: the words after NAME.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help, end="")
        return 0 if arguments else 2
    word, rest = arguments[0], arguments[1:]
    if word not in commands:
        close = difflib.get_close_matches(word, commands, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"unknown command '{name} {word}'{hint}: choose from {', '.join(commands)}")
    return commands[word](rest)
