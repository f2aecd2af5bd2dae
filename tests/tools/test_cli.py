"""The command line as a newcomer meets it: it teaches, and a mistake is one line with what is allowed, exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.algorithms import found
from thinwire.tools.cli import main
from thinwire.tools.config import presets


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out, err


def test_help_needs_nothing_but_python_itself_and_teaches() -> None:
    """So that it answers at once: torch alone takes seconds to import."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "thinwire", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "thinwire" in imported and not imported & {"torch", "numpy", "tyro", "rich", "safetensors", "matplotlib"}
    for word in ("demo", "train", "sim", "torchrun", "--resume", "thinwire.DiLoCo("):
        assert word in done.stdout
    code = "import sys, thinwire.tools.cli, thinwire; assert 'torch' not in sys.modules and 'tyro' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, "thinwire 0.1.0\n")
    code, out, _ = call(capsys)
    assert code == 2
    assert "usage: thinwire COMMAND" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian' (did you mean 'train'?): choose from demo, train, sim"),
        (
            ["train", "--algorithm", "dilocoo"],
            "unknown algorithm 'dilocoo' (did you mean 'diloco'?): choose from alone, data-parallel",
        ),
        (["sim", "--algorithm=nope"], "unknown algorithm 'nope': choose from"),
        (["train", "--H", "-3"], "H must be a whole number of at least 1, got -3"),
        (["train", "--H", "0"], "H must be a whole number of at least 1, got 0"),
        (["train", "--steps", "0"], "steps must be a whole number of at least 1, got 0"),
        (["train", "--workers", "0"], "workers must be a whole number of at least 1, got 0"),
        (["train", "--lr", "-1"], "lr must be above zero, got -1.0"),
        (["train", "--outer-momentum", "1.5"], "outer_momentum must be in [0, 1), got 1.5"),
        (["train", "--task", "gpt-nan"], "did you mean 'gpt-nano'?"),
        (["train", "--data", "no/such/file.txt"], "no/such/file.txt"),
        (["train", "--algorithm", "local-sgd", "--wire", "bf16"], "LocalSGD sends parameters themselves"),
        (["train", "--algorithm", "data-parallel", "--wire", "TopK(8)"], "its codec is a Dense one, got TopK(8)"),
        (["train", "--algorithm", "ddp", "--wire", "bf16"], "which ignores --wire bf16: use --algorithm data-parallel"),
        (["train", "--algorithm", "ddp", "--shards", "2"], "which ignores --shards 2: use --algorithm data-parallel"),
        (["train", "--task", "quadratic", "--shards", "2"], "0-d parameter, which FSDP2 does not shard: use --shards 1"),
        (["train", "--batch", "3", "--shards", "2"], "a batch of 3 does not divide over 2 shards"),
        (["train", "--weight-decay", "nan"], "weight-decay must be at least 0 and finite, got nan"),
        (["train", "--outer-lr", "inf"], "outer_lr must be above zero and finite, got inf"),
        (["train", "--timeout", "soon"], "a duration must look like 20ms, 1.5s or 2min, got 'soon'"),
        (["train", "--timeout", "0s"], "timeout must be above zero seconds, got '0s'"),
        (["train", "--checkpoint-every", "-1"], "checkpoint-every must be at least 0, got -1"),
        (["train", "--resume"], "--resume needs --out FOLDER"),
        (["train", "--resume", "--out", "no/such/run"], "nothing to resume: no/such/run/run.toml does not exist"),
        (["sim", "--bandwidth", "fast"], "bandwidth must look like 100mbit, 1.5gbit or inf and be above zero, got 'fast'"),
        (["sim", "--bandwidth", "1mbit,2mbit,3mbit", "--workers", "2"], "bandwidth lists 3 workers, but there are 2"),
        (["sim", "--step-time", "1ms,2ms", "--workers", "3"], "step-time lists 2 workers, but there are 3"),
        (["sim", "--shards", "2"], "the simulator does not shard models, got --shards 2"),
        (["tasks", "now"], "takes no arguments, got 'now'"),
        (["demo", "--bandwidth", "none"], "bandwidth must look like"),
    ],
)
def test_a_mistake_is_one_line_with_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("thinwire: error: ")
    assert err.count("\n") == 1, "one line"
    assert message in err


@pytest.mark.parametrize("processes", ["6", "3"])
def test_processes_that_do_not_divide_into_workers(
    processes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("RANK", "0")
    code, _, err = call(capsys, "train", "--shards", "4")
    assert code == 2
    assert err == f"thinwire: error: {processes} processes do not divide into workers of 4 shards each\n"


def test_workers_that_do_not_fit_the_torchrun_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    code, _, err = call(capsys, "train", "--workers", "3")
    assert code == 2
    assert "--workers 3 does not fit this torchrun job, which has 4 workers" in err


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = call(capsys, "train", "--device", "cuda")
    assert (code, err) == (2, "thinwire: error: --device cuda: torch finds no GPU on this machine\n")


def test_unknown_flags_and_values_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["train", "--no-such-flag", "1"], ["train", "--wire", "int3"], ["train", "--steps", "many"]):
        code, out, err = call(capsys, *arguments)
        assert code == 2
        assert "Traceback" not in out + err


def test_the_help_of_train_shows_the_settings_of_the_chosen_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    code, diloco, _ = call(capsys, "train", "--algorithm", "diloco", "--help")
    assert code == 0
    assert "--outer-momentum" in diloco
    assert "0.7 in the paper" in diloco, "the docstring's words are the help"
    _, local, _ = call(capsys, "train", "--algorithm", "local-sgd", "--help")
    assert "--H" in local
    assert "--outer-momentum" not in local


@pytest.mark.parametrize("name", sorted({*found(), *presets()}))
def test_every_method_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag of a method may be called like one of the run."""
    code, out, _ = call(capsys, "sim", "--algorithm", name, "--help")
    assert code == 0
    assert f"Settings of {name}" in " ".join(out.split())


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "tasks")
    assert (code, "gpt-nano" in out) == (0, True)
    code, out, _ = call(capsys, "algorithms")
    assert (code, "diloco" in out, "local-adam" in out) == (0, True, True)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, "sim", "--task", "quadratic", "--out", str(tmp_path / "file" / "run"))
    assert code == 2
    assert "cannot write the run folder" in err
    assert err.count("\n") == 1
