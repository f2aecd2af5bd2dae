"""Rules of the architecture that import-linter cannot see."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import thinwire
from thinwire.algorithms import found
from thinwire.core.optimizer import Algorithm

SOURCE = Path(__file__).parents[1] / "src" / "thinwire"


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_torch_distributed_is_known_only_to_links_and_sharding() -> None:
    """House rule 5."""
    files = {str(p.relative_to(SOURCE)): p for p in SOURCE.rglob("*.py")}
    assert len(files) > 30
    users = {name for name, path in files.items() if any(n.startswith("torch.distributed") for n in _imported(path))}
    assert {name for name in users if not name.startswith(("links/", "sharding/"))} == set()
    dtensor = {name for name, path in files.items() if "DTensor" in path.read_text() and not name.startswith("sharding/")}
    assert all("DTensor)" not in files[name].read_text() for name in dtensor), "no isinstance(x, DTensor) outside of sharding/"


def test_algorithm_files_are_short_and_know_nothing_of_the_network() -> None:
    """House rules 1 and 2: a method says what it sends and what it applies, and the engine does the rest."""
    files = [p for p in (SOURCE / "algorithms").glob("*.py") if p.name != "__init__.py"]
    assert len(files) >= 9
    for path in files:
        text = path.read_text()
        assert len(text.splitlines()) <= 185, path.name
        for cls in [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]:
            used = {ast.unparse(n) for n in ast.walk(cls) if isinstance(n, ast.Attribute)}
            assert not used & {"self.link", "self.engine.queue", "self.engine.policy"}, (
                f"{path.name}: the network is the engine's"
            )
            for method in (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name in ("send", "send_again")):
                calls = [ast.unparse(n.func) for n in ast.walk(method) if isinstance(n, ast.Call)]
                changing = [name for name in calls if name.endswith("_") and not name.startswith("_")]
                assert not changing, f"{path.name}: {method.name} changes something: {changing}"
    for cls in found().values():
        assert cls.send is not Algorithm.send and cls.apply is not Algorithm.apply


def test_every_public_name_can_be_had_and_unknown_ones_not() -> None:
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    assert set(thinwire.__all__) <= set(dir(thinwire))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        thinwire.nothing  # noqa: B018


MOST_LINES, MOST_METHODS = 400, 30


@cache
def _files() -> dict[str, ast.Module]:
    return {str(p.relative_to(SOURCE)): ast.parse(p.read_text()) for p in sorted(SOURCE.rglob("*.py"))}


def test_no_source_file_is_long() -> None:
    lines = {name: len((SOURCE / name).read_text().splitlines()) for name in _files()}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    print(f"over {MOST_LINES} lines: {long}")
    assert not long, f"over {MOST_LINES} lines: {long}"


def test_no_class_is_large() -> None:
    """Methods that a class defines itself, properties included."""
    methods = {
        f"{name}: {cls.name}": sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in cls.body)
        for name, tree in _files().items()
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef)
    }
    large = {name: count for name, count in methods.items() if count > MOST_METHODS}
    print(f"over {MOST_METHODS} methods: {large}")
    assert not large, f"over {MOST_METHODS} methods: {large}"


def _defined(tree: ast.Module) -> set[str]:
    """Names of functions, classes, variables and attributes that a module defines or sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _of_another_library(node: ast.expr, tree: ast.Module) -> bool:
    """Whether an expression begins with the name of a module that is not ours: `torch._foreach_mul`, `os._exit`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    theirs = [n for n in imports if not (isinstance(n, ast.ImportFrom) and (n.module or "").startswith("thinwire"))]
    names = {(alias.asname or alias.name).partition(".")[0] for n in theirs for alias in n.names}
    return isinstance(node, ast.Name) and node.id in names


def test_no_private_name_of_another_package_is_used() -> None:
    """An object's `_name` is for itself, for its subclasses, and for the package that defines it."""
    files, packages = _files(), dict[str, set[str]]()
    for name, tree in files.items():
        packages.setdefault(name.partition("/")[0], set()).update(_defined(tree))
    found = set()
    for name, tree in files.items():
        own = packages[name.partition("/")[0]]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("thinwire"):
                private = {a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")}
                found |= {f"{name}: {n}" for n in private if n not in own}
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_itself and node.attr not in own and not _of_another_library(node.value, tree):
                found.add(f"{name}: {ast.unparse(node)}")
    assert not found, f"private names of other packages: {sorted(found)}"
