"""docs/security.md names the tests that show what it claims: they must exist, and each claim must have one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_the_page_is_in_the_menu() -> None:
    assert "security.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_claim_names_its_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("|---", "| what holds"))]
    assert len(rows) >= 15
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`", row)] == []


def test_all_four_threats_are_there_with_what_does_not_hold() -> None:
    for kind in ("An untrusted host on the network", "A hostile or faulty worker", "An untrusted file", "User errors"):
        section = PAGE.split(f"## {kind}\n")[1].split("\n## ")[0]
        assert "| what holds | shown by |" in section
        assert "What does not hold:" in section
