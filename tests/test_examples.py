"""Every example of the docs runs, with the output that its page shows (the docs build checks that page and file agree)."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
RUNS = {
    "plain.py": ([], r"validation loss 0\.\d+"),
    "train.py": ([], r"worker 0 of 1: validation loss 0\.\d+"),
    "simulate.py": ([], r"on all 4 workers after [\d.]+ simulated seconds"),
    "amp.py": ([], r"worker 0 of 1: 0\.\d+"),
    "resume.py": (["{tmp}", "20"], r"."),
    "utilisation.py": ([], r"100000 Mbit/s"),
    "predict.py": ([], r"H=32: 23.2 MB a step, 0.198 s waiting, 83.5% computing"),
    "message_bytes.py": ([], r"TopK\(32\) >> Sign\(\) +gather +1,291,268 "),
    "decoupled_momentum.py": ([], r"validation loss 0\.0\d+ on both workers, 141 bytes per worker and step"),
    "ternary.py": ([], r"DCT\(64\) >> TopK\(32\) >> Trits\(0\.7\) takes 3468 bytes"),
    "logged_link.py": ([], None),
    "warm_start.py": (["{tmp}/rounds.jsonl"], r"'rounds': 22, 'sent': 28744, 'sent\.round': 28680, 'sent\.handshake': 64"),
    "folder_link.py": ([], r"\[1\.\d+, 1\.\d+, 1\.\d+\]"),
}
SHARDED = {"sharded.py"}
ADMITTED_ELSEWHERE = {"sign_mean.py"}  # a file for algorithms/, not a script


def run(command: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_forgotten() -> None:
    assert {p.name for p in EXAMPLES.glob("*.py")} == {*RUNS, *SHARDED, *ADMITTED_ELSEWHERE}


@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, shown = RUNS[name]
    monkeypatch.setattr(sys, "argv", [name, *(a.replace("{tmp}", str(tmp_path)) for a in arguments)])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.syspath_prepend(EXAMPLES)  # one of them imports another
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")  # in this process: a new one would take seconds to come up
    finally:
        for path in EXAMPLES.glob("*.py"):
            sys.modules.pop(path.stem, None)
    output = capsys.readouterr().out
    assert shown is None or re.search(shown, output), output


@pytest.mark.slow
def test_sharded_example_on_four_processes() -> None:
    output = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLES / "sharded.py")])
    losses = re.findall(r"worker (\d) of 2: validation loss (0\.\d+)", output)
    assert sorted(worker for worker, _ in losses) == ["0", "0", "1", "1"]
    assert len({loss for _, loss in losses}) == 1, "all processes evaluate the one model that they agreed on"
