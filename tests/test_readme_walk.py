"""The README followed line by line by somebody who has only the wheel: every snippet and command works and says what it should.

Fenced blocks of the README are read in order. A block marked `python` is a script. A block without a mark holds commands, one a
line; where some lines start with "$ ", those are the commands, and the others must be lines of what the command before them
prints. Commands of `thinwire` and `pip` are run, those that train for long in the short form that `SHORT` has for them; of
`make` only the target is looked up, since it would make an environment of its own.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.installed import ROOT, Installed, install, patient
from tests.test_readme import PRELUDE
from tests.tools.test_lab import no_lab

# What a command gets in place of, or besides, its own flags, so that it takes seconds: by the words it starts with.
SHORT: dict[str, dict[str, str]] = {
    "thinwire train": {"--steps": "4", "--workers": "2", "--eval-every": "0", "--checkpoint-every": "0"},
    "thinwire sim": {"--steps": "4", "--eval-every": "0"},
    "thinwire compare": {"--steps": "4", "--workers": "2", "--seeds": "1", "--eval-every": "0"},
    "thinwire demo": {"--steps": "2"},
    "thinwire lab run": {"--bandwidth": "100mbit"},
}


@dataclass(frozen=True)
class Command:
    """A line of a block, and what must be among the lines that it prints."""

    words: tuple[str, ...]
    prints: tuple[str, ...] = ()


def blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page with their mark, "" for none."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.S | re.M)


def commands(block: str) -> list[Command]:
    """The commands of a block."""
    lines = [line for line in block.splitlines() if line.strip()]
    if not any(line.startswith("$ ") for line in lines):
        return [Command(tuple(shlex.split(line, comments=True))) for line in lines if shlex.split(line, comments=True)]
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            found.append(Command(tuple(shlex.split(line[2:], comments=True))))
        else:
            found[-1] = Command(found[-1].words, (*found[-1].prints, line.strip()))
    return found


def shortened(words: tuple[str, ...]) -> tuple[str, ...]:
    """The same command with the flags of `SHORT`; also of one that follows after `--`."""
    if "--" in words:
        at = words.index("--")
        return (*shortened(words[:at]), "--", *shortened(words[at + 1 :]))
    flags = next((flags for start, flags in SHORT.items() if words[: len(start.split())] == tuple(start.split())), {})
    mine = list(words)
    for flag, value in flags.items():
        if flag in mine:
            mine[mine.index(flag) + 1] = value
        else:
            mine += [flag, value]
    return tuple(mine)


def newest(word: str, cwd: Path) -> str:
    """The path that a pattern such as `runs/compare-...` stands for."""
    if not word.endswith("..."):
        return word
    found = sorted(cwd.glob(f"{word.removesuffix('...')}*"))
    assert found, f"the README has {word} before anything has made it"
    return str(found[-1].relative_to(cwd))


def from_wheel(words: tuple[str, ...], wheel: Path) -> tuple[str, ...]:
    """The words of pip with the wheel in place of the checkout: `-e '.[report]'` is `thinwire.whl[report]`."""
    mine = [word for word in words if word not in ("-e", "--editable")]
    return tuple(f"{wheel}{word[1:]}" if re.fullmatch(r"\.(\[[\w,]+\])?", word) else word for word in mine)


# --- The tools above -----------------------------------------------------------------------------------------------------


def test_how_a_page_is_read() -> None:
    page = "```python\nx = 1\n```\ntext\n```\n$ thinwire --version  # now\nthinwire 0.1.0\n```\n"
    page += "```\nmake demo  # long\n\npip install .\n```\n"
    (mark, code), (_, shown), (_, plain) = blocks(page)
    assert (mark, code) == ("python", "x = 1\n")
    assert commands(shown) == [Command(("thinwire", "--version"), ("thinwire 0.1.0",))]
    assert commands(plain) == [Command(("make", "demo")), Command(("pip", "install", "."))]


def test_how_a_command_is_shortened() -> None:
    assert shortened(("thinwire", "sim", "--steps", "384")) == ("thinwire", "sim", "--steps", "4", "--eval-every", "0")
    long = shlex.split("thinwire lab run --bandwidth 10mbit,1gbit -- thinwire train --algorithm demo")
    short = shlex.split("thinwire lab run --bandwidth 100mbit -- thinwire train --algorithm demo --steps 4 --workers 2")
    assert shortened(tuple(long))[: len(short)] == tuple(short)
    assert from_wheel(("pip", "install", "-e", ".[report]"), Path("t.whl")) == ("pip", "install", "t.whl[report]")


def test_the_readme_has_no_command_that_is_not_known() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for mark, block in blocks((ROOT / "README.md").read_text()):
        for command in commands(block) if mark in ("", "bash", "sh") else []:
            assert command.words[0] in ("thinwire", "pip", "make", "git", "cd"), command
            assert command.words[0] != "make" or command.words[1] in targets, command


# --- The walk ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@patient
@pytest.mark.usefixtures("network")
def test_every_line_of_the_readme_works(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    installed = install(tmp_path_factory)
    done = [0, 0]
    for mark, block in blocks((ROOT / "README.md").read_text()):
        if mark == "python":
            script = tmp_path / "snippet.py"
            script.write_text(PRELUDE + block)
            _succeeds(installed, "python", (str(script),), tmp_path)
            done[0] += 1
        for command in commands(block) if mark in ("", "bash", "sh") else []:
            done[1] += _walk(installed, command, tmp_path)
    assert min(done) > 0, "there are snippets and commands"


def _walk(installed: Installed, command: Command, cwd: Path) -> bool:
    """Run a command of the README, if it is one that can be run here."""
    program, *words = (newest(word, cwd) for word in shortened(command.words))
    if program == "pip":
        constraints = ("-c", str(ROOT / "constraints.txt"))
        out = _succeeds(installed, "python", ("-m", "pip", *from_wheel(tuple(words), installed.wheel), *constraints), cwd)
    elif program == "thinwire" and not (words[:1] == ["lab"] and no_lab()):
        out = _succeeds(installed, "thinwire", tuple(words), cwd)
    else:
        return False
    for line in command.prints:
        assert line in [printed.strip() for printed in out.splitlines()], f"{command.words} prints no line {line!r}: {out}"
    return True


def _succeeds(installed: Installed, program: str, words: tuple[str, ...], cwd: Path) -> str:
    done = installed.call(program, *words, cwd=cwd)
    assert done.returncode == 0, f"{program} {shlex.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout
