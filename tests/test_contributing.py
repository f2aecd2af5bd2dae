"""The algorithms of CONTRIBUTING.md and docs/extending.md are admitted by the conformance suite, found there by itself."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import LIMIT
from thinwire import Link, World

ROOT = Path(__file__).parents[1]
SIGN_MEAN = ROOT / "docs" / "examples" / "sign_mean.py"


@pytest.mark.slow  # collects the whole suite in a process of its own
def test_the_example_algorithms_pass_the_conformance_suite(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    algorithm, test = blocks
    assert len([line for line in algorithm.splitlines() if line.strip()]) <= 35, "the example is short"
    shutil.copytree(ROOT / "src" / "thinwire", tmp_path / "thinwire", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "thinwire" / "algorithms" / "lookahead.py").write_text(algorithm)
    shutil.copy(SIGN_MEAN, tmp_path / "thinwire" / "algorithms")
    tests = tmp_path / "test_lookahead.py"
    tests.write_text(f"from tests.algorithms.test_identities import all_close, run\n\n\n{test}")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not rare", "-k", "lookahead or sign-mean", "--no-header"]
    command += ["-p", "no:cacheprovider", str(ROOT / "tests" / "conformance"), str(tests), "--rootdir", str(ROOT)]
    command += ["-c", str(ROOT / "pyproject.toml")]
    # The copy comes first on the path; the installed package is the same but for the new files.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 60, done.stdout[-500:]  # half of the cases of tests that have many
    assert "failed" not in done.stdout and "skipped" not in done.stdout


def test_the_method_of_the_page_steps_by_the_sign_of_the_mean() -> None:
    method = runpy.run_path(str(SIGN_MEAN))["SignMean"]
    gradients = [torch.tensor([3.0, -1.0, 0.5]), torch.tensor([-1.0, -2.0, -2.0])]

    def worker(link: Link) -> torch.Tensor:
        x = torch.nn.Parameter(torch.zeros(3))
        x.grad = gradients[link.rank].clone()
        method([x], link, lr=0.25).step()
        return x.detach()

    for x in World(2).run(worker):
        assert x.tolist() == [-0.25, 0.25, 0.25]
