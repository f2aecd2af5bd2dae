"""The example in CONTRIBUTING.md is admitted by the conformance suite, found there by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT
from tests.tiers import first_quick

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("chosen", "least"),
    first_quick([("lookahead and (aborted or finish or eta)", 5), ("lookahead", 60)]),
    ids=["a part", "all"],
)
def test_the_example_algorithm_passes_the_conformance_suite(chosen: str, least: int, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    algorithm, test = blocks
    assert len([line for line in algorithm.splitlines() if line.strip()]) <= 35, "the example is short"
    shutil.copytree(ROOT / "src" / "thinwire", tmp_path / "thinwire", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "thinwire" / "algorithms" / "lookahead.py").write_text(algorithm)
    tests = tmp_path / "test_lookahead.py"
    tests.write_text(f"from tests.algorithms.test_identities import all_close, run\n\n\n{test}")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-k", chosen, "--no-header", "-p", "no:cacheprovider"]
    command += [str(ROOT / "tests" / "conformance"), str(tests), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    # The copy comes first on the path; the installed package is the same but for the new file.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least, done.stdout[-500:]
    assert "failed" not in done.stdout and "skipped" not in done.stdout
