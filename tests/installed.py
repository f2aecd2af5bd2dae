"""thinwire as a user has it: built, and installed from its wheel into an environment that was empty."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import LIMIT

ROOT = Path(__file__).parents[1]
PATIENCE = 6 * LIMIT  # seconds for one command: to unpack torch has taken 23 minutes on a machine with a load of 20
patient = pytest.mark.timeout(4 * PATIENCE)


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and what it needs.

    Attributes:
        folder: of the environment.
        dist: holds the wheel and the sdist.
        packages: what was installed besides pip, and nothing else was.
    """

    folder: Path
    dist: Path
    packages: frozenset[str]

    @property
    def wheel(self) -> Path:
        """What was installed."""
        (wheel,) = self.dist.glob("*.whl")
        return wheel

    @property
    def sdist(self) -> Path:
        """The archive of the sources."""
        (sdist,) = self.dist.glob("*.tar.gz")
        return sdist

    def call(
        self, program: str, *words: object, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, which finds the others of it; the checkout is not on its path."""
        mine = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        mine["PATH"] = f"{self.folder / 'bin'}:{mine['PATH']}"
        command = [str(self.folder / "bin" / program), *map(str, words)]
        # Rich folds a line that does not fit, and an expected text may be cut in two.
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, env=mine | {"COLUMNS": "200"} | (env or {})
        )

    def pip(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Call pip with the versions that CI has."""
        return self.call("python", "-m", "pip", "--disable-pip-version-check", *words, cwd=cwd)


def install(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build and install once for all processes of pytest-xdist: it takes minutes.

    Raises:
        pytest.skip.Exception: where pip reaches no package index.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (shared / "installed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        listed = shared / "installed.json"
        made = Installed(shared / "installed", shared / "dist", frozenset())
        if not listed.exists():
            listed.write_text(json.dumps(_make(made, shared)))
    packages = json.loads(listed.read_text())
    if not packages:
        pytest.skip("a clean installation: pip needs a package index that it can reach")
    return Installed(made.folder, made.dist, frozenset(packages))


def _make(made: Installed, shared: Path) -> list[str]:
    """Build, install, and say which packages that brought; none where there is no package index."""
    subprocess.run([sys.executable, "-m", "venv", made.folder], check=True, timeout=LIMIT)
    if made.pip("download", "--no-deps", "packaging", cwd=shared).returncode:
        return []
    tools = shared / "build-tools"
    done = made.pip("install", "--target", tools, "hatchling", cwd=shared)
    assert done.returncode == 0, done.stderr
    built = made.call("python", "-m", "hatchling", "build", "-d", made.dist, cwd=ROOT, env={"PYTHONPATH": str(tools)})
    assert built.returncode == 0, built.stderr
    done = made.pip("install", "-c", ROOT / "constraints.txt", made.wheel, cwd=shared)
    assert done.returncode == 0, done.stderr
    listed = json.loads(made.pip("list", "--format", "json", cwd=shared).stdout)
    return [package["name"].lower() for package in listed]
