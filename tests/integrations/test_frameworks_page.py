"""docs/frameworks.md: its diffs are short, and what they give runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.integrations.frameworks import needs

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
MOST_LINES = 5


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTIONS[section], re.M | re.S)


def changed(section: str) -> tuple[str, int]:
    """The program that the diff of a section gives, and how many lines it adds."""
    (diff,) = blocks(section, "diff")
    lines = diff.splitlines()
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(after), sum(line.startswith("+") for line in lines)


@pytest.mark.parametrize("section", [name for name in SECTIONS if blocks(name, "diff")])
def test_a_framework_costs_at_most_five_lines(section: str) -> None:
    assert 0 < changed(section)[1] <= MOST_LINES


def run(section: str, names: dict[str, Any], *more: str) -> dict[str, Any]:
    for program in (changed(section)[0], *more):
        exec(program, names)
    return names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("transformers", "accelerate")
def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.integrations.test_transformers import sequences, tiny_model

    monkeypatch.chdir(tmp_path)
    names = run("transformers", {"model": tiny_model(), "data": sequences(512)})
    assert names["trainer"].thinwire.rounds == 2 and Path("shipped/model.safetensors").is_file()
    (demo,) = blocks("transformers", "python")
    exec(demo, names)
    names["trainer"].train()
    assert names["trainer"].thinwire.steps == names["trainer"].thinwire.rounds == 48


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("transformers", "accelerate", "trl", "datasets")
def test_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset

    from tests.integrations.test_transformers import sequences, tiny_model, tokenizer

    monkeypatch.chdir(tmp_path)
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in sequences(512)])
    names = run("trl", {"model": tiny_model(), "data": data, "tokenizer": tokenizer()})
    assert names["trainer"].thinwire.steps == 48 and names["trainer"].thinwire.pending_steps == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("accelerate")
def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.chdir(tmp_path)
    rows = [(torch.randn(3), torch.randn(1)) for _ in range(40)]
    names = {"Accelerator": Accelerator, "torch": torch, "model": torch.nn.Linear(3, 1)}
    names = run("accelerate", names | {"loader": torch.utils.data.DataLoader(rows)}, *blocks("accelerate", "python"))
    assert names["resumed"].step == names["opt"].optimizer.steps == 40
    assert names["opt"].optimizer.pending_steps == 0 and list(names["loader"]) == []


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of this process alone, which is left again."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield
    thinwire.disconnect()


def pairs(count: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader([(torch.randn(3), torch.randn(1)) for _ in range(count)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
@needs("lightning")
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("Lightning", {"torch": torch, "workers": 1, "loader": pairs(48)})
    opt = names["trainer"].strategy.algorithm
    assert opt.steps == 48 and opt.pending_steps == 0
    assert names["trainer"].callback_metrics["wire_rounds"] == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
@needs("lightning")
def test_fabric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "workers": 1, "loader": pairs(40), "model": torch.nn.Linear(3, 1)}
    names = run("Fabric", names, *blocks("Fabric", "python"))
    assert names["opt"].steps == 40 and names["opt"].pending_steps == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("torchtitan")
def test_torchtitan() -> None:
    model = torch.nn.Linear(3, 1)
    names = run("torchtitan", {"model": model})
    for _ in range(33):
        model(torch.randn(4, 3)).square().mean().backward()
        names["optimizers"].step()
        names["schedulers"].step()
        names["optimizers"].zero_grad()
    (opt,) = names["optimizers"]
    assert opt.steps == 33 and opt.rounds == 1
