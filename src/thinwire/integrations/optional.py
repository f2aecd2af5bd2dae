"""Frameworks that are installed only where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from thinwire.errors import MissingDependency


def require(module: str, *, extra: str) -> Any:
    """Import a framework, or a part of it.

    Args:
        module: its dotted name.
        extra: the extra of thinwire that installs it.

    Raises:
        MissingDependency: where it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the framework is there and something that it needs is not
        install = f"pip install 'thinwire[{extra}]', or from a clone pip install -e '.[{extra}]'"
        raise MissingDependency(f"thinwire.integrations.{extra} needs {error.name}: {install}") from error
