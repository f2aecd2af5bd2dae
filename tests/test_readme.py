"""The README's code runs as it stands, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md"]


def test_the_code_of_the_readme_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    weights = []

    class MyModel(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            weights.append(self.weight)

    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(40)]
    names = {"MyModel": MyModel, "loader": batches, "loss_fn": torch.nn.functional.mse_loss}
    exec(block, names)
    opt = names["opt"]
    assert (opt.steps, opt.rounds, opt.pending_steps) == (40, 40, 0)  # type: ignore[attr-defined]
    assert bool(torch.isfinite(weights[0]).all())


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_are_good(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), f"{page} links to {target}"


def test_no_figure_is_left_to_be_filled_in() -> None:
    for page in PAGES:
        assert not re.search(r"\b[A-Z]{3,}_[A-Z]{3,}\b(?!\.)", re.sub(r"`[^`]*`", "", (ROOT / page).read_text())), page
