"""Fail the docs build on a public name that has no docstring or is not in the API reference, and on examples that have changed.

The public names are the `__all__` of the packages, and the public classes and functions of the modules, listed below. A name
counts as shown when the HTML of a page under api/ has an anchor for it, under any of the names it can be imported by: that is
what a `::: dotted.name` block, or the block of its module, leaves behind. Constants cannot carry a docstring, so they only have
to be shown.

A code block with the title of a file must be a part of that file, word for word, so that what the pages show can be run.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

PACKAGES = (
    "thinwire",
    "thinwire.links",
    "thinwire.checkpoint",
    "thinwire.codecs",
    "thinwire.sim",
    "thinwire.algorithms",
    "thinwire.tasks",
    "thinwire.optim",
    "thinwire.log",
)
MODULES = (
    "thinwire.core.gates",
    "thinwire.core.optimizer",
    "thinwire.codecs.selection",
    "thinwire.codecs.shared_seed",
    "thinwire.codecs.chain",
    "thinwire.codecs.transforms",
    "thinwire.codecs.values",
    "thinwire.codecs.wire",
    "thinwire.errors",
    "thinwire.core.exchange",
    "thinwire.core.average",
    "thinwire.core.buffers",
    "thinwire.core.policy",
    "thinwire.core.replicas",
    "thinwire.core.rounds",
    "thinwire.sharding.mesh",
    "thinwire.maths.orthogonalize",
    "thinwire.maths.outer",
    "thinwire.network",
    "thinwire.core.pace",
    "thinwire.payload",
    "thinwire.maths.update_rules",
    "thinwire.schedules",
    "thinwire.core.states",
    "thinwire.core.fragments",
    "thinwire.tasks.task",
    "thinwire.core.wrapper",
    "thinwire.core.stats",
    "thinwire.core.phases",
)
REFERENCE = "api/"

_shown: set[str] = set()


def on_config(config: MkDocsConfig) -> None:
    """Import the library from this checkout, and check the docstrings before anything is rendered."""
    # `--quiet` hides warnings from `--strict` too, and broken links are warnings: only what is below a warning may be hidden.
    log = logging.getLogger("mkdocs")
    log.setLevel(min(log.level, logging.WARNING))
    sys.path.insert(0, str(Path(config.config_file_path).parent / "src"))
    _shown.clear()
    silent = sorted(_undocumented())
    if silent:
        raise PluginError(f"{len(silent)} public names have no docstring: {', '.join(silent)}")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> None:
    """Compare code blocks that name a file with the file."""
    root = Path(config.config_file_path).parent
    for path, code in re.findall(r'^```python title="([^"]+)".*\n((?:.*\n)*?)```$', markdown, re.M):
        if not (root / path).is_file() or code.strip("\n") not in (root / path).read_text():
            raise PluginError(f"{page.file.src_uri} shows code that is not in {path}")


def on_page_content(html: str, page: Page, **_: object) -> None:
    """Note which names a page of the reference has anchors for."""
    if page.file.src_uri.startswith(REFERENCE):
        _shown.update(re.findall(r'id="(thinwire[\w.]*)"', html))


def on_post_build(**_: object) -> None:
    """Check that every public name was shown."""
    hidden = sorted(min(names, key=len) for names in _public().values() if not names & _shown)
    if hidden:
        raise PluginError(f"{len(hidden)} public names are on no page of {REFERENCE}: {', '.join(hidden)}")


def _public() -> dict[object, set[str]]:
    """Every public object with all dotted names it goes by. Constants, which may be equal by chance, are told apart by name."""
    found: dict[object, set[str]] = {}
    for package in PACKAGES:
        module = _load(package)
        for name in module.__all__:
            thing = getattr(module, name)
            key = thing if _has_docstring_of_its_own(thing) else f"{package}.{name}"
            found.setdefault(key, set()).add(f"{package}.{name}")
    for path in MODULES:
        for name, thing in vars(_load(path)).items():
            if not name.startswith("_") and _has_docstring_of_its_own(thing) and thing.__module__ == path:
                found.setdefault(thing, set()).add(f"{path}.{name}")
    for thing, names in found.items():
        if not isinstance(thing, str):
            names.add(f"{thing.__module__}.{thing.__qualname__}")
    return found


def _undocumented() -> set[str]:
    """Modules, classes, functions, methods and properties without a docstring."""
    silent = {path for path in (*PACKAGES, *MODULES) if not _load(path).__doc__}
    for thing, names in _public().items():
        name = min(names, key=len)
        if isinstance(thing, str):
            continue
        if not _documented(thing):
            silent.add(name)
        if isinstance(thing, type):
            members = {member: value for member, value in vars(thing).items() if not member.startswith("_")}
            silent |= {f"{name}.{member}" for member, value in members.items() if _is_code(value) and not value.__doc__}
    return silent


def _load(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ImportError as cause:
        raise PluginError(f"cannot import {path}, whose names must be documented: {cause}") from cause


def _has_docstring_of_its_own(thing: object) -> bool:
    return isinstance(thing, type) or inspect.isfunction(thing)


def _documented(thing: object) -> bool:
    made_up = dataclasses.is_dataclass(thing) and (thing.__doc__ or "").startswith(f"{thing.__name__}(")
    return bool(thing.__doc__) and not made_up  # a dataclass without a docstring gets its signature for one


def _is_code(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
