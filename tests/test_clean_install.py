"""The package as a user installs it: into an empty environment, with what it says it needs and nothing else."""

from __future__ import annotations

import email
import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.installed import ROOT, Installed, install, patient
from thinwire import __version__


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(tmp_path_factory)


@pytest.mark.slow
@patient
def test_it_installs_into_an_empty_environment_and_trains(installed: Installed, tmp_path: Path) -> None:
    packages = installed.packages
    assert {"thinwire", "torch"} <= packages
    assert not packages & {"matplotlib", "scikit-learn", "pytest", "hypothesis", "mkdocs"}
    assert installed.call("thinwire", "--version", cwd=tmp_path).stdout == f"thinwire {__version__}\n"
    quick = ["--algorithm", "diloco", "--task", "quadratic", "--steps", 20, "--H", 5, "--workers", 2, "--eval-every", 0]
    for command in ("train", "sim"):
        done = installed.call("thinwire", command, *quick, "--out", tmp_path / command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads((tmp_path / command / "summary.json").read_text())["step"] == 20
    done = installed.call("thinwire", "train", "--task", "cnn-digits", "--steps", 1, "--out", tmp_path / "images", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install" in done.stderr and "[images]" in done.stderr


@pytest.mark.slow
@patient
def test_the_wheel_has_all_of_the_package_and_says_only_what_was_tested(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = set(wheel.namelist())
        (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        said = email.message_from_string(wheel.read(about).decode())
    package = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "thinwire").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("thinwire/")} == {
        name for name in package if "__pycache__" not in name
    }, "py.typed and the files of the report too, and nothing else"
    assert all(name.startswith(("thinwire/", f"thinwire-{__version__}.dist-info/")) for name in names)
    tested = [line for line in said.get_all("Classifier", []) if line.startswith(("Programming Language", "Operating System"))]
    assert tested == ["Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11"]
    assert said["License-Expression"] == "Apache-2.0" and said["Author"] == "The thinwire authors"


@pytest.mark.slow
@patient
def test_the_sdist_has_the_sources_and_builds_the_same_wheel(installed: Installed, tmp_path: Path) -> None:
    with tarfile.open(installed.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    parts = {name.partition("/")[0] for name in names}
    files = {"pyproject.toml", "Makefile", "constraints.txt", "mkdocs.yml", "LICENSE", "CITATION.cff", "PKG-INFO", ".gitignore"}
    pages = {path.name for path in ROOT.glob("*.md")}
    assert parts == files | pages | {"src", "tests", "docs", "benchmarks", "examples"}
    assert not [name for name in names if re.search(r"__pycache__|\.pyc$|\.egg-info", name)]
    done = installed.pip("wheel", "--no-deps", "-w", tmp_path, installed.sdist, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(again) as mine, zipfile.ZipFile(installed.wheel) as theirs:
        assert {i.filename: i.CRC for i in mine.infolist()} == {i.filename: i.CRC for i in theirs.infolist()}


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {__version__}" in lines and "  - name: The thinwire authors" in lines
