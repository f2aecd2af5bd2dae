"""`thinwire keys`, `thinwire run` and `thinwire train --join`: a run on a store from the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs obstore: pip install 'thinwire[store]'")
pytest.importorskip("cryptography", reason="needs cryptography: pip install 'thinwire[store]'")

from tests.processes import LIMIT, until
from thinwire.errors import ConfigError
from thinwire.tools.cli import main
from thinwire.tools.elastic import config_of_run

Command = Callable[..., str]


@pytest.fixture
def thinwire(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        told = capsys.readouterr()
        assert ended.value.code == code, told.err
        return told.out if code == 0 else told.err

    return run


def make_run(thinwire: Command, folder: Path, *more: str, workers: int = 1) -> str:
    url = f"file://{folder}/run"
    keys = [f"{id}.key" for id in range(workers)]
    for key in keys:
        thinwire("keys", "new", "--out", key)
    thinwire("run", "create", url, "--key", "0.key", "--add", *keys, "--task", "quadratic", "--lr", "0.01", *more)
    return url


def test_keys_are_made_and_shown(thinwire: Command) -> None:
    public = thinwire("keys", "new").strip()
    assert re.fullmatch(r"ed25519:\S{44}", public)
    assert thinwire("keys", "show", "thinwire.key").strip() == public
    assert "exists already" in thinwire("keys", "new", code=2)
    assert "did you mean 'show'" in thinwire("keys", "shwo", code=2)


def test_a_run_is_made_and_its_roster_changed(thinwire: Command, tmp_path: Path) -> None:
    url = make_run(thinwire, tmp_path, "--algorithm", "diloco", "--H", "7", workers=2)
    shown = thinwire("run", "show", url)
    assert "algorithm=diloco" in shown and "H=7" in shown and "worker 1: ed25519:" in shown
    thinwire("keys", "new", "--out", "new.key")
    assert (
        thinwire("run", "add", url, "new.key", "--key", "0.key") == "added worker 2: it may take part from the next round on\n"
    )
    gone = thinwire("keys", "show", "1.key").strip()
    assert "revoked worker 1" in thinwire("run", "revoke", url, gone, "--key", "0.key")
    assert f"worker 1: {gone} (revoked)" in thinwire("run", "show", url)
    assert "owned by" in thinwire("run", "add", url, gone, "--key", "1.key", code=2)
    assert "there is a run at this address already" in thinwire(
        "run", "create", url, "--key", "0.key", "--task", "quadratic", code=2
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--algorithm", "noloco"], "noloco needs workers that never change"),
        (["--warm-start", "5"], "--warm-start 5 needs workers that never change"),
        (["--workers", "3"], "--workers 3 needs workers that never change"),
        (["--quorum", "2"], "quorum must be from 1 to 1 with 1 workers, got 2"),
        (["--lr", "-1"], "lr must be above zero"),
    ],
)
def test_a_run_that_cannot_be_is_not_made(words: list[str], why: str, thinwire: Command, tmp_path: Path) -> None:
    thinwire("keys", "new")
    assert why in thinwire("run", "create", f"file://{tmp_path}/run", "--task", "quadratic", *words, code=2)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_worker_alone_trains_to_the_end_and_who_comes_later_reads_the_result(thinwire: Command, tmp_path: Path) -> None:
    url = make_run(thinwire, tmp_path, "--algorithm", "diloco", "--H", "5", "--steps", "20")
    told = thinwire("train", "--join", url, "--key", "0.key", "--out", "one", "--eval-every", "10")
    assert "worker 0 joined at step 0 of 20" in told
    assert re.search(r"round \d+ members 1 counted 1 deadline", told)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["step"] == 20 and summary["rounds"] >= 4
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20]
    thinwire("keys", "new", "--out", "new.key")
    thinwire("run", "add", url, "new.key", "--key", "0.key")
    later = thinwire("train", "--join", url, "--key", "new.key", "--out", "two")
    assert f"validation loss {summary['val_loss']:.4f}" in later


def test_a_key_that_is_not_in_the_roster_is_told_how_to_get_there(thinwire: Command, tmp_path: Path) -> None:
    url = make_run(thinwire, tmp_path)
    public = thinwire("keys", "new", "--out", "other.key").strip()
    assert f"thinwire run add {url} {public}" in thinwire("train", "--join", url, "--key", "other.key", code=2)
    assert "there is no run at this address" in thinwire("train", "--join", f"file://{tmp_path}/none", "--key", "0.key", code=2)
    other = thinwire("keys", "show", "other.key").strip()
    assert "this run is owned by" in thinwire("train", "--join", url, "--key", "0.key", "--owner", other, code=2)


def test_settings_of_a_run_that_this_version_does_not_know_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown settings: colour"):
        config_of_run({"algorithm": "demo", "colour": "red"})
    with pytest.raises(ConfigError, match="its workers bring their own loop"):
        config_of_run({})
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        config_of_run({"algorithm": "demo", "steps": "many"})


# --- Real processes -----------------------------------------------------------------------------------------------------------


def start(*words: str, log: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, env=environment)


@pytest.mark.slow
def test_a_worker_that_is_stopped_by_ctrl_c_comes_back_and_both_end_with_one_model(thinwire: Command, tmp_path: Path) -> None:
    url = make_run(thinwire, tmp_path, "--algorithm", "diloco", "--H", "5", "--steps", "4000", workers=2)

    def join(id: int, name: str) -> subprocess.Popen[bytes]:
        words = ("-m", "thinwire", "train", "--join", url, "--key", f"{id}.key", "--out", name)
        return start(*words, log=tmp_path / f"{name}.log")

    first, second = join(0, "first"), join(1, "second")
    until(lambda: "step" in (tmp_path / "second.log").read_text(), "the second worker trains")
    second.send_signal(signal.SIGINT)
    assert second.wait(LIMIT) == 130
    assert "left the run at step" in (tmp_path / "second.log").read_text()
    second = join(1, "third")
    assert (first.wait(LIMIT), second.wait(LIMIT)) == (0, 0)
    losses = [json.loads((tmp_path / name / "summary.json").read_text())["val_loss"] for name in ("first", "third")]
    assert losses[0] == losses[1]
    assert "joined at step 0" not in (tmp_path / "third.log").read_text()


@pytest.mark.slow
def test_of_two_processes_with_one_key_one_ends_and_the_other_trains_on(thinwire: Command, tmp_path: Path) -> None:
    url = make_run(thinwire, tmp_path, "--algorithm", "diloco", "--H", "5", "--steps", "100000")
    twins = [
        start("-m", "thinwire", "train", "--join", url, "--key", "0.key", "--out", f"twin{n}", log=tmp_path / f"{n}.log")
        for n in range(2)
    ]
    try:
        until(lambda: any(twin.poll() is not None for twin in twins), "one of them ends")
        gone = next(n for n, twin in enumerate(twins) if twin.poll() is not None)
        assert "another process has the same key" in (tmp_path / f"{gone}.log").read_text().replace("\n", " ")
        at = number_of_rounds(tmp_path / "run")
        until(lambda: number_of_rounds(tmp_path / "run") > at + 5, "the other trains on")
        assert twins[1 - gone].poll() is None
    finally:
        for twin in twins:
            twin.kill()
            twin.wait()


def number_of_rounds(run: Path) -> int:
    return len(list((run / "x").iterdir()))


@pytest.mark.slow
def test_the_example_with_a_loop_of_ones_own(thinwire: Command, tmp_path: Path) -> None:
    url = make_run(thinwire, tmp_path, "--own-loop", workers=2)
    script = str(Path(__file__).parents[2] / "examples" / "elastic.py")
    workers = [start(script, url, f"{id}.key", log=tmp_path / f"{id}.log") for id in range(2)]
    assert [worker.wait(LIMIT) for worker in workers] == [0, 0]
    losses = {(tmp_path / f"{id}.log").read_text().split("validation loss ")[1] for id in range(2)}
    assert len(losses) == 1
    assert float(losses.pop()) < 0.1


def test_the_example_has_ten_changed_lines() -> None:
    root = Path(__file__).parents[2]
    text = (root / "examples" / "elastic.py").read_text()
    numbers = [int(number) for number in re.findall(r"# (\d+)\b", text)]
    assert numbers == list(range(1, 11))
    plain = set((root / "docs" / "examples" / "plain.py").read_text().splitlines())
    body = text.split('"""', 2)[2].splitlines()
    assert [line for line in body if line not in plain and "# " not in line and line not in ("import sys", "")] == [
        '    print(f"worker {link.rank}: validation loss {train(link):.4f}")'
    ]
