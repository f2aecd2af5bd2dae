"""How kernels are compiled, kept and loaded, and what becomes of a machine that cannot."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thinwire import DCT, TopK, kernels
from thinwire.errors import ConfigError
from thinwire.kernels import build

SUPPORTED = torch.backends.cpu.get_cpu_capability() in build.CPU_FLAGS
needs_cpu = pytest.mark.skipif(not SUPPORTED, reason="the kernels are for CPUs with AVX2: run the tests on one")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is loaded yet, and the cache is empty."""
    monkeypatch.setenv(kernels.SETTING, "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def test_without_a_compiler_the_plain_path_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    x = [torch.randn(64, 64)]
    assert kernels.library() is None and kernels.name() == "off"
    assert (DCT(64) >> TopK(4)).decode((DCT(64) >> TopK(4)).encode(x), x)[0].shape == (64, 64)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "that is nothing to warn of"


@needs_cpu
def test_a_compiler_that_fails_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", 'test "$1" = --version && exit 0; echo "out of ideas" >&2; exit 3'))
    assert kernels.library() is None and kernels.library() is None
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "out of ideas" in warning and "several times as long" in warning
    assert [p.name for p in build.cache_folder().iterdir()] == [], "nothing is left behind"


@needs_cpu
def test_a_compiler_whose_command_cannot_be_read_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", 'gcc "-O3')
    assert kernels.library() is None and kernels.name() == "off"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "CC is no command, 'gcc \"-O3'" in warning and "unset it" in warning


@needs_cpu
def test_a_user_without_a_home_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def nobody(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setenv("CC", compiler(tmp_path)[0])
    assert kernels.library() is None and kernels.name() == "off"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "set HOME or XDG_CACHE_HOME" in warning


@needs_cpu
@pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler: apt-get install gcc")
def test_a_library_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    blocks, messages = build._SOURCES
    wrong = tmp_path / "blocks.c"
    wrong.write_text(blocks.read_text().replace("new = load(&a[r][j]) * scale", "new = load(&a[r][j]) + scale"))
    monkeypatch.setattr(build, "_SOURCES", (wrong, messages))
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if flag != "-O3"))  # quickly
    assert kernels.library() is None
    assert "computes something else than it should" in caplog.text


def compiler(folder: Path) -> list[str]:
    """One that writes what it was asked to do into the library, and a line into a file each time."""
    write = 'told="$*"; while [ "$1" != -o ]; do shift; done; echo "$told" > "$2"'
    return [script(folder / "cc", f'test "$1" = --version && exit 0; echo once >> {folder}/runs; {write}')]


def test_a_library_is_compiled_once_into_a_private_folder(tmp_path: Path) -> None:
    folder = build.private_folder(tmp_path / "cache")
    assert folder.stat().st_mode & 0o777 == 0o700
    cc = compiler(tmp_path)
    paths = [build.build(cc, ("-mavx2",), folder) for _ in range(3)]
    assert (tmp_path / "runs").read_text() == "once\n" and len(set(paths)) == 1
    assert "-ffp-contract=off" in paths[0].read_text() and paths[0].stat().st_mode & 0o077 == 0
    other = build.build(cc, ("-mfma",), folder)
    assert set(folder.iterdir()) == {paths[0], other}, "other flags are another library, and nothing else is left"


def test_a_library_that_others_can_write_to_is_not_loaded(tmp_path: Path) -> None:
    path = build.build(compiler(tmp_path), ("-mavx2",), tmp_path)
    os.chmod(path, 0o777)
    with pytest.raises(build.CannotBuildError, match="writable by nobody else"):
        build.build(compiler(tmp_path), ("-mavx2",), tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(build.CannotBuildError, match="writable by nobody else"):
        build.private_folder(folder)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(build.CannotBuildError, match="not what it should be"):
        build.private_folder(tmp_path / "link")


def test_a_setting_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SETTING, "fast")
    with pytest.raises(ConfigError, match="THINWIRE_KERNELS must be one of 'auto', 'off', got 'fast'"):
        kernels.library()
    monkeypatch.setenv(kernels.SETTING, "off")
    assert kernels.library() is None
