"""The package as a user installs it: into an empty environment, with what it says it needs and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT

ROOT = Path(__file__).parents[1]


def call(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=2 * LIMIT, cwd=cwd, env=env)


@pytest.mark.slow
def test_it_installs_into_an_empty_environment_and_trains(tmp_path: Path) -> None:
    assert call(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path).returncode == 0
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if call(*pip, "download", "--no-deps", "packaging", cwd=tmp_path).returncode:
        pytest.skip("a clean installation: pip needs a package index that it can reach")
    done = call(*pip, "install", "-c", ROOT / "constraints.txt", ROOT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    listed = json.loads(call(*pip, "list", "--format", "json", cwd=tmp_path).stdout)
    names = {package["name"].lower() for package in listed}
    assert {"thinwire", "torch"} <= names and not names & {"matplotlib", "scikit-learn", "pytest", "hypothesis", "mkdocs"}
    thinwire = tmp_path / "venv" / "bin" / "thinwire"
    assert call(thinwire, "--version", cwd=tmp_path).stdout.startswith("thinwire ")
    quick = ["--algorithm", "diloco", "--task", "quadratic", "--steps", 20, "--H", 5, "--workers", 2, "--eval-every", 0]
    for command in ("train", "sim"):
        done = call(thinwire, command, *quick, "--out", tmp_path / command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((tmp_path / command / "summary.json").read_text())["step"] == 20
    done = call(thinwire, "train", "--task", "cnn-digits", "--steps", 1, "--out", tmp_path / "images", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'thinwire[images]'" in done.stderr
