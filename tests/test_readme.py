"""The README's code runs as it stands, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md", "SECURITY.md"]


# What the README's snippets take from the reader's own program.
PRELUDE = """
import torch

class MyModel(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)

loader = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(40)]
loss_fn = torch.nn.functional.mse_loss
"""


def test_the_code_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        names: dict[str, Any] = {}
        exec(PRELUDE + block, names)
        opt = names["opt"]
        assert (opt.steps, opt.pending_steps) == (40, 0) and opt.rounds > 1
        assert all(bool(torch.isfinite(p).all()) for p in names["model"].parameters())


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_are_good(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text()):
        path = ROOT / (target or page)
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in _anchors(path.read_text()), f"{page} links to {target}#{anchor}"


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as Markdown makes them: here and on the site of the docs alike."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


def test_no_figure_is_left_to_be_filled_in() -> None:
    for page in PAGES:
        assert not re.search(r"\b[A-Z]{3,}_[A-Z]{3,}\b(?!\.)", re.sub(r"`[^`]*`", "", (ROOT / page).read_text())), page
