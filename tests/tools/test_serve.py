"""`thinwire run serve` and `thinwire train --join tcp://`: a run on a cluster from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LIMIT, until
from thinwire.tools.cli import main


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["run", "serve", "tcp://127.0.0.1:1", "--own-loop"], "say how many workers may take part"),
        (["run", "serve", "127.0.0.1:1", "--members", "2"], "tcp://host:port, got '127.0.0.1:1'"),
        (["run", "serve", "tcp://192.0.2.1:0", "--members", "2", "--own-loop"], "this machine cannot listen at '192.0.2.1'"),
        (["run", "serve", "tcp://127.0.0.1:0", "--members", "2", "--quorum", "3", "--own-loop"], "quorum must be from 1 to 2"),
        (["train", "--join", "tcp://127.0.0.1:99999", "--id", "0"], "tcp://host:port, got 'tcp://127.0.0.1:99999'"),
    ],
)
def test_what_cannot_be_is_told(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.slow
def test_workers_join_a_host_and_end_with_one_model(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "thinwire", *words]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)

    settings = ["--algorithm", "diloco", "--task", "quadratic", "--lr", "0.01", "--H", "5", "--steps", "200"]
    host = start("host", "run", "serve", "tcp://127.0.0.1:0", "--folder", "host", "--members", "2", *settings)
    until(lambda: "serving a run" in (tmp_path / "host.log").read_text() or host.poll() is not None, "the host serves")
    url = (tmp_path / "host.log").read_text().split(" at ")[1].strip()
    try:
        join = ["train", "--join", url, "--out"]
        workers = [start(f"w{id}", *join, f"w{id}", "--id", str(id), "--keep", f"kept{id}") for id in range(2)]
        assert [worker.wait(LIMIT) for worker in workers] == [0, 0], (tmp_path / "w0.log").read_text()
    finally:
        host.send_signal(signal.SIGTERM)
        assert host.wait(LIMIT) == 0
    losses = [json.loads((tmp_path / f"w{id}" / "summary.json").read_text())["val_loss"] for id in range(2)]
    assert losses[0] == losses[1]
    assert list((tmp_path / "kept0" / "ckpt").iterdir()) or (tmp_path / "kept0" / "run").exists()
