"""A run of the tests ends by saying what it left out and how to get that; and no test looks at a clock."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.conftest import not_tested
from tests.processes import LIMIT

ROOT = Path(__file__).parents[1]


@pytest.mark.slow  # pytest in a process of its own
@pytest.mark.parametrize("how", [[], ["--numprocesses", "1"]], ids=["here", "xdist"])
def test_slow_tests_that_were_left_out_are_counted(how: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *how, "tests/test_clean_install.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    assert "= not tested =" in done.stdout, done.stdout + done.stderr
    assert re.search(r"\n\d+ tests?, slow, and seven eighths of the random examples: make test-full\n", done.stdout), (
        done.stdout
    )


def test_every_reason_to_skip_is_told_once_with_the_number_of_tests() -> None:
    assert not_tested(0, ["b: do that", "a: do this", "a: do this"])[:2] == [
        "2 tests, skipped: a: do this",
        "1 test, skipped: b: do that",
    ]
    assert not_tested(312, [])[0] == "312 tests, slow, and seven eighths of the random examples: make test-full"
    assert not_tested(0, [], rare=7)[0] == "7 tests, further cases of tests that have many: make test-all"
    assert any("GPU" in line for line in not_tested(0, []))


class _Item:
    def __init__(self, nodeid: str, folder: str = "algorithms", file: str = "test_x.py"):
        self.nodeid, self.path, self.marks = nodeid, ROOT / "tests" / folder / file, list[str]()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_of_many_cases_the_first_and_a_quarter_are_quick_and_half_are_rare_always_the_same() -> None:
    many, few = ([_Item(f"t.py::test_{count}[{n}]") for n in range(count)] for count in (90, 4))
    cheap = [_Item(f"t.py::test_cheap[{n}]", folder="codecs") for n in range(90)]
    bars = [_Item(f"t.py::test_budget[{n}]", folder="", file=tiers.WHOLE[0]) for n in range(90)]
    tiers.thin_out([*many, *few, *cheap, *bars])  # type: ignore[list-item]
    quick, slow, rare = ([i.nodeid for i in many if i.marks == marks] for marks in ([], ["slow"], ["slow", "rare"]))
    assert many[0].nodeid in quick
    assert len(quick) + len(slow) + len(rare) == 90 and 12 <= len(quick) <= 35 and 12 <= len(slow) <= 35
    assert not any(item.marks for item in [*few, *cheap, *bars])
    again = [_Item(f"t.py::test_90[{n}]") for n in range(90)]
    tiers.thin_out(again)  # type: ignore[list-item]
    assert [item.nodeid for item in again if not item.marks] == quick


CLOCKS = {
    "tests/browser.py": "a limit",
    "tests/clock.py": "stands for a clock",
    "tests/processes.py": "a limit",
    "tests/links/test_solo.py": "real time is what it is about, and nothing is too late for it",
    "tests/links/test_watch.py": "tells what it tests what time it is",
    "tests/tools/test_lab.py": "a wire is not faster than it should be, and may be slower",
    "tests/test_not_tested.py": "this list",
}


def test_no_test_looks_at_a_clock() -> None:
    """On a busy machine everything takes longer: a test that measures time, or waits for seconds only, fails there."""
    users = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if re.search(r"perf_counter|monotonic|time\.time", text):
            users.add(name)
        short = re.findall(r"(?:communicate|join|wait|poll|run)\((?:[^()]*, )?timeout=([\d.]+)", text)
        assert not [t for t in short if 1 < float(t) < 300], f"{name}: a limit in seconds {short}; use tests.processes.LIMIT"
    assert users == set(CLOCKS)
