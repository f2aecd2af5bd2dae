from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import tiers
from tests.processes import Pool, thread_count

MOST_THREADS = 80  # of a process of the pool at the end: three for each of the groups and meshes that tests share

torch.set_num_threads(1)
# Committed hashes are those of torch and numpy. Tests of the C kernels switch them on, and `make test-full` runs what they
# touch a second time with them.
os.environ.setdefault("THINWIRE_KERNELS", "off")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job, as CI may be, ignores Ctrl-C and hands that on to what it starts; tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    tiers.full = "not slow" not in config.option.markexpr
    no_clock = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
    settings.register_profile("thinwire", no_clock, max_examples=tiers.examples(100))
    settings.load_profile("thinwire")


# Modules with the longest tests. They come first, or the last of them runs alone while other cores have nothing to do.
LONGEST = ("test_readme_walk.py", "test_clean_install.py", "test_runs.py", "test_demo.py", "test_feature_examples.py")


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.thin_out(items)
    if tiers.full:
        items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four real gloo processes; tests use the first `size` of them."""
    workers = Pool(4)
    yield workers
    threads = max(workers.run(thread_count, 4))
    workers.close()
    assert threads <= MOST_THREADS, (
        f"a process of the pool has {threads} threads: a test keeps the process groups that it makes"
    )


@pytest.fixture
def network() -> Iterator[None]:
    """The machine's network for this test alone, among all that run at the same time: other tests wait here."""
    with Path(tempfile.gettempdir(), "thinwire-tests-network.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here (needs root): {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


# --- What was not tested -----------------------------------------------------------------------------------------------------

_LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count the slow or rare tests that were left out; with pytest-xdist this happens in its workers."""
    if items:
        config, kind = items[0].config, "rare" if tiers.full else "slow"
        count = sum(item.get_closest_marker(kind) is not None for item in items)
        config.stash[_LEFT_OUT] = config.stash.get(_LEFT_OUT, 0) + count


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended. Each of them has seen all tests."""
    count = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[_LEFT_OUT] = max(count, node.config.stash.get(_LEFT_OUT, 0))


def not_tested(slow: int, skipped: Sequence[str], rare: int = 0) -> list[str]:
    """One line for each thing that a run has left out, with the way to get it.

    Args:
        slow: how many slow tests were not selected.
        skipped: the reason of every test that was skipped, which says how to get it.
        rare: how many cases of tests with many were not selected, where slow tests were.
    """
    lines = [f"{_tests(slow)}, slow, and seven eighths of the random examples: make test-full"] if slow else []
    lines += [f"{_tests(rare)}, further cases of tests that have many: make test-all"] if rare else []
    lines += [f"{_tests(count)}, skipped: {reason}" for reason, count in Counter(skipped).most_common()]
    lines.append("GPUs and NCCL: there is no test of them here; all tests run on the CPU with gloo")
    return [*lines, "many kills of whole trainings: make chaos", "speed, and a million hostile messages: make bench"]


def _tests(count: int) -> str:
    return f"{count} test{'' if count == 1 else 's'}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())]
    terminalreporter.section("not tested")
    count = config.stash.get(_LEFT_OUT, 0)
    for line in not_tested(*((0, skipped, count) if tiers.full else (count, skipped))):
        terminalreporter.write_line(line)
