"""The examples of what models and loops have (LoRA, torch.compile, ...) run alone and under torchrun."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.test_examples import run

EXAMPLES = Path(__file__).parents[1] / "examples"
LOSS = re.compile(r"worker (\d) of (\d): validation loss (\d\.\d+) -> (\d\.\d+), 3 rounds of ([\d,]+) bytes")
SHOWN = {
    "lora.py": [],
    "compiled.py": ["aot_eager"],
    "gradient_checkpointing.py": [],
    "tied_weights.py": [],
    "frozen.py": [],
    "nanogpt.py": [],
}
ELSEWHERE = {"tiny.py", "fsdp2_flexdemo.py", "muloco.py", "elastic.py"}
needs_peft = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("peft", "transformers")),
    reason="peft, transformers not installed: make test-full installs them",
)
WITH_MARKS = [
    pytest.param("lora.py", marks=[needs_peft, pytest.mark.slow]),
    pytest.param("compiled.py", marks=pytest.mark.slow),  # the compiler takes long
    *(name for name in SHOWN if name not in ("lora.py", "compiled.py")),
]


def test_no_example_is_forgotten() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == {*SHOWN, *ELSEWHERE}


@pytest.mark.parametrize("name", WITH_MARKS)
@pytest.mark.filterwarnings("ignore")
def test_alone(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, *SHOWN[name]])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.modules.pop("tiny", None)
    output = capsys.readouterr().out
    if name == "nanogpt.py":
        losses = re.findall(r"val loss (\d\.\d+)", output)
        assert len(losses) == 3 and float(losses[-1]) < float(losses[0]), output
        return
    found = LOSS.findall(output)
    assert found and all(float(after) < float(before) for _, _, before, after, _ in found), output


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("lora.py", marks=needs_peft), "nanogpt.py"])  # others have the loop of lora.py
def test_under_torchrun(name: str) -> None:
    output = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name)])
    if name == "nanogpt.py":
        assert len(re.findall(r"val loss \d\.\d+, sent [1-9][\d,]+ bytes", output)) == 3, output
        return
    found = LOSS.findall(output)
    assert {worker for worker, *_ in found} == {"0", "1"}, output
    assert len({after for _, _, _, after, _ in found}) == 1, "both workers evaluate the one model that they agreed on"
