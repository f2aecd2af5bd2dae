"""`thinwire keys`: the keys of workers and owners of runs on an object store."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from thinwire.links.keys import PrivateKey
from thinwire.tools.subcommands import choose_command

HELP = """\
Keys of workers, and of owners of runs on an object store. Needs the extra thinwire[store].

usage: thinwire keys COMMAND [options]

  new           Make a key: a file that only you can read. Prints its public half, which the owner
                of a run adds to the roster: thinwire keys new --out worker.key
  show          Print the public half of a key: thinwire keys show worker.key
"""


@dataclass(frozen=True, kw_only=True)
class NewFlags:
    """Make a key and print its public half."""

    out: str = "thinwire.key"
    """The file; never overwritten."""


def main(arguments: list[str]) -> int:
    """Dispatch to new or show."""
    return choose_command("keys", HELP, {"new": _new, "show": _show}, arguments)


def _new(arguments: list[str]) -> int:
    flags = tyro.cli(NewFlags, prog="thinwire keys new", args=arguments)
    key = PrivateKey.new()
    key.write(flags.out)
    print(key.public.text)
    return 0


def _show(arguments: list[str]) -> int:
    def flags(file: str, /) -> str:
        """Print the public half of a key.

        Args:
            file: that `thinwire keys new` made.
        """
        return file

    print(PrivateKey.read(tyro.cli(flags, prog="thinwire keys show", args=arguments)).public.text)
    return 0
