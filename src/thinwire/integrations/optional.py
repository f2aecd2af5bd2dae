"""Frameworks that are installed only where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from thinwire.errors import MissingDependency, how_to_install


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
        raise MissingDependency(f"thinwire.integrations.{extra} needs {error.name}: {how_to_install(extra)}") from error
