"""How the kernels are compiled, kept and loaded.

They are compiled when they are first asked for, into a folder that belongs to the user alone. The name of a library is a hash
of the source, the compiler, its flags and the CPU, so nothing stale is ever loaded; it is written beside and renamed, so that
many processes may do it at once. A library that is loaded is tried on numbers first.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from thinwire.errors import check_choice
from thinwire.kernels.calls import Kernels

log = logging.getLogger("thinwire")

SETTING = "THINWIRE_KERNELS"
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("blocks.c", "messages.c"))
_HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "cosines.h"))
# No contraction: the source says where a product and a sum are rounded once.
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")
# Of each kind of CPU that torch tells apart. Others have no fused multiply-add, without which the kernels are slow, or have
# never been tried.
CPU_FLAGS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"),
}
_TIME_LIMIT = 300  # seconds for the compiler
_LONGEST_ERROR = 500  # characters of what it says
_lock = threading.Lock()


class CannotBuildError(Exception):
    """Why there are no kernels; the plain path works without."""


def library() -> Kernels | None:
    """The kernels; None where they are off or cannot be had, of which a warning tells once."""
    setting = os.environ.get(SETTING, "auto")
    check_choice(SETTING, setting, ("auto", "off"))
    if setting == "off":
        return None
    with _lock:  # several threads may ask for the first time
        return _loaded()


def name() -> str:
    """Which arithmetic this process uses, for the handshake: a hash of what the kernels make of given numbers, or "off"."""
    found = library()
    return "off" if found is None else found.name


@functools.lru_cache(maxsize=1)
def _loaded() -> Kernels | None:
    cpu = torch.backends.cpu.get_cpu_capability()
    if cpu not in CPU_FLAGS:
        log.info("no C kernels for a CPU of kind %s: sparse rounds use torch and numpy", cpu)
        return None
    try:
        compiler = find_compiler()
        if compiler is None:
            log.info("no C compiler (cc): sparse rounds use torch and numpy, which takes several times as long")
            return None
        return Kernels(build(compiler, CPU_FLAGS[cpu], private_folder(cache_folder())))
    except (CannotBuildError, OSError, subprocess.SubprocessError) as error:
        log.warning("the C kernels cannot be used, so sparse rounds take several times as long: %s", error)
        return None


def find_compiler() -> list[str] | None:
    """The command of the system's compiler: what CC says, or cc; None where there is no such program.

    Raises:
        CannotBuildError: CC is no command.
    """
    told = os.environ.get("CC", "")
    try:
        command = shlex.split(told) or ["cc"]
    except ValueError as error:
        raise CannotBuildError(f"CC is no command, {told!r} ({error}): set it to that of a C compiler, or unset it") from error
    path = shutil.which(command[0])
    return None if path is None else [path, *command[1:]]


def cache_folder() -> Path:
    """Where libraries are kept: thinwire/kernels in XDG_CACHE_HOME, or in ~/.cache.

    Raises:
        CannotBuildError: the user has no home, as in a container whose user id is in no list.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "thinwire" / "kernels"
    except RuntimeError as error:
        told = "set HOME or XDG_CACHE_HOME to a folder that belongs to this user"
        raise CannotBuildError(f"no folder to keep them in ({error}): {told}") from error


def private_folder(folder: Path) -> Path:
    """Make a folder that nobody else can write to.

    Raises:
        CannotBuildError: there is one that somebody else owns or can write to: what is in it must not be run.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder, stat.S_ISDIR)
    return folder


def _check_private(path: Path, is_right_kind: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not is_right_kind(found.st_mode):
        raise CannotBuildError(f"{path} is not what it should be: remove it")
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        told = f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}"
        raise CannotBuildError(f"{told}: it must belong to user {os.geteuid()} and be writable by nobody else")


def build(compiler: list[str], cpu_flags: tuple[str, ...], folder: Path) -> Path:
    """The library for a kind of CPU, compiled unless it is in the folder already.

    Args:
        compiler: its command.
        cpu_flags: what the CPU can do.
        folder: see `private_folder`.

    Raises:
        CannotBuildError: what the compiler says.
    """
    command = [*compiler, *FLAGS, *cpu_flags]
    version = _run([*compiler, "--version"])
    told = [*(file.read_bytes() for file in (*_SOURCES, *_HEADERS)), version.encode(), *(word.encode() for word in command)]
    digest = hashlib.sha256(b"\0".join(told)).hexdigest()
    path = folder / f"{digest[:32]}.so"
    if not path.exists():
        handle, beside = tempfile.mkstemp(suffix=".tmp", dir=folder)
        os.close(handle)
        try:
            _run([*command, f"-I{_HEADERS[0].parent}", "-o", beside, *map(str, _SOURCES), "-lm"])
            os.chmod(beside, 0o700)
            os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)
    _check_private(path, stat.S_ISREG)
    return path


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIME_LIMIT, check=False)
    if done.returncode:
        raise CannotBuildError(f"{shlex.join(command)} failed: {(done.stderr or done.stdout).strip()[:_LONGEST_ERROR]}")
    return done.stdout
