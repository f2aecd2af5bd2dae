"""Rules of the architecture that import-linter cannot see."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thinwire

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


def test_algorithm_files_are_short_and_have_one_network_line_and_one_commit_line() -> None:
    """House rules 1 and 2."""
    files = [p for p in (SOURCE / "algorithms").glob("*.py") if p.name != "__init__.py"]
    assert len(files) >= 3
    for path in files:
        text = path.read_text()
        assert len(text.splitlines()) <= 150, path.name
        for cls in [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]:
            calls = [ast.unparse(n.func) for n in ast.walk(cls) if isinstance(n, ast.Call)]
            network = sum(calls.count(f"self.{name}") for name in ("average", "post_average", "swap", "post_share"))
            assert network == 1, f"{path.name}: one network line"
            assert calls.count("self.commit") == 1, f"{path.name}: one commit line"


def test_every_public_name_can_be_had_and_unknown_ones_not() -> None:
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    assert set(thinwire.__all__) <= set(dir(thinwire))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        thinwire.nothing  # noqa: B018
