"""How a worker process ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.tools import worker


class _Left(BaseException):
    pass


@pytest.mark.parametrize(("rank", "said"), [("0", "thinwire: error: it is finished\n"), ("1", "")])
def test_a_config_error_ends_the_process_at_once_whatever_its_threads_do(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Path) -> None:
        raise ConfigError("it is finished")

    def leave(code: int) -> None:
        raise _Left(code)

    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setenv("THINWIRE_LAUNCHER", "1")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(worker.sys, "argv", ["worker", "run"])
    monkeypatch.setattr(worker.signal, "signal", nothing)
    monkeypatch.setattr(worker, "end_with", nothing)
    monkeypatch.setattr(worker, "read_run_toml", refuse)
    monkeypatch.setattr(worker.os, "_exit", leave)
    with pytest.raises(_Left, match="2"):
        worker.main()
    assert capfd.readouterr().err == said
