"""The command line as a newcomer meets it: it teaches, and a mistake is one line with what is allowed, exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from thinwire.algorithms import found
from thinwire.tools import names
from thinwire.tools.cli import main
from thinwire.tools.config import presets, versions
from thinwire.tools.display import Display
from thinwire.tools.flags import first_line
from thinwire.tools.settings import settings_class
from thinwire.tools.train import Progress


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out, re.sub(r"\Astarting .* \.\.\.\n", "", err)


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


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch was imported")
sys.meta_path.insert(0, NoTorch())
from thinwire.tools.cli import main
codes = []
for words in [line.split(" ") for line in sys.stdin.read().splitlines()]:
    try:
        main(words)
    except SystemExit as ended:
        codes.append(ended.code)
    sys.stderr.write("--\\n")
print(codes)
"""


def test_wrong_names_are_refused_and_lists_made_without_torch() -> None:
    """One process that cannot import it answers all of them."""
    wrong = {
        "train --algorithm dilocoo": "unknown algorithm 'dilocoo' (did you mean 'diloco'?)",
        "train --task gpt-nan": "got 'gpt-nan'; did you mean 'gpt-nano'?",
        "train --inner adamm": "inner must be one of 'adamw', 'adam'",
        "sim --device tpu": "device must be one of 'auto', 'cpu', 'cuda', got 'tpu'",
        "train --algorithm demo --H 4": "demo exchanges at every step and has no --H; demo has --beta, --alpha, --phi",
        "train --algorithm alone --H 4": "alone exchanges nothing and has no --H; alone has no settings of its own",
        "train --algorithm demo --fragments 3": "--fragments is a setting of streaming-diloco, not of demo",
        "train --step 4": "unknown flag --step (did you mean '--steps'?)",
        "train --steps 0": "steps must be a whole number of at least 1, got 0",
        "compare ddp demox": "in 'demox': unknown algorithm 'demox' (did you mean 'demo'?)",
        "plan --task gpt-nan": "got 'gpt-nan'; did you mean 'gpt-nano'?",
        "doctor --backend mpi": "invalid choice 'mpi' for argument '--backend'",
    }
    fine = ["algorithms", "tasks", "beta 32 --steps 2000", "plan --help", "report --help-all", "doctor --help"]
    told = "\n".join([*wrong, *fine])
    done = subprocess.run([sys.executable, "-c", NO_TORCH], input=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (words, message), said in zip(wrong.items(), done.stderr.split("--\n"), strict=False):
        assert message in " ".join(said.split()), words
    assert done.stdout.splitlines()[-1] == str([2] * len(wrong) + [0] * len(fine))
    assert "see thinwire train --algorithm demo --help" in done.stderr
    for word in ("sparseloco", "K = 32", "gpt-nano"):
        assert word in done.stdout


def test_it_says_at_once_that_workers_are_started() -> None:
    """Before torch is imported, which takes a while."""
    program = NO_TORCH.replace("main(words)", "main(words)\n    except AssertionError as error:\n        print(error)")
    for words, said in (
        ("train --shards 1", "starting 2 workers ..."),
        ("sim --workers 5", "starting 5 simulated workers ..."),
    ):
        done = subprocess.run([sys.executable, "-c", program], input=words, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("torch was imported\n[]\n", f"{said}\n--\n")


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
            "unknown algorithm 'dilocoo' (did you mean 'diloco'?): choose from alone, coarse-diloco, data-parallel",
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


def test_the_help_is_short_and_readable_and_all_of_it_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    _, short, _ = call(capsys, "train", "--help")
    _, whole, _ = call(capsys, "train", "--help-all")
    assert len(short.splitlines()) < 80 < len(whole.splitlines())
    for rare in ("--qh-betas", "--on-abort", "--timeout", "--clip-norm"):
        assert rare not in short and rare in whole
    for ugly in ("{None}", "[FLOAT [", "default: None", "default: ''", "Schedule"):
        assert ugly not in whole
    for line in ("--qh-betas FLOAT ...", "--workers INT", "--pace equal|speed", "(default: on)"):
        assert line in whole


@pytest.mark.parametrize("name", sorted({*found(), *presets()}))
def test_every_method_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag of a method may be called like one of the run."""
    code, out, _ = call(capsys, "sim", "--algorithm", name, "--help-all")
    assert code == 0
    assert f"Settings of {name}" in " ".join(out.split())
    assert "{None}" not in out and "Schedule" not in out


def test_what_is_read_from_the_source_of_the_methods_is_what_they_have() -> None:
    assert names.names() == sorted({*found(), *presets()})
    for name, cls in found().items():
        described = names.described()[name]
        assert described.summary == first_line(cls)
        assert (set(described.replicated), set(described.synced)) == (cls.replicated, cls.synced)
        assert {f.name for f in fields(settings_class(cls, {}))} <= {*described.settings, *names.policies()}


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "tasks")
    assert (code, "gpt-nano" in out) == (0, True)
    code, out, _ = call(capsys, "algorithms")
    assert (code, "diloco" in out, "local-adam" in out) == (0, True, True)


def test_progress_fits_80_columns() -> None:
    """With the longest name, a validation loss, and large figures."""
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    validation = {"loss": 1234.5678}
    with Display("local-adam-nesterov resnet-cifar x64", 100_000, "tokens", console=console) as display:
        display(Progress(1, 9.9, 1.0, 1000, 0, 0, 0, 0, 0.0))
        display(Progress(99_999, 1234.5678, 9999.0, 10**11, 123_456_789_000, 0, 0, 9999, 9000.0, validation))
    drawn = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", screen.getvalue())
    last = [line.rstrip() for line in re.split(r"[\r\n]+", drawn) if line.strip()][-2:]
    assert all(len(line) <= 80 for line in last)
    assert "99999/100000" in last[0], "nothing is cut off"
    assert last[1].startswith("loss 1234.5678 val 1234.5678") and last[1].endswith("waiting 90%")


def test_a_torch_that_was_built_from_source_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found_version = metadata.version

    def no_torch(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return found_version(name)

    monkeypatch.setattr(metadata, "version", no_torch)
    assert versions()["torch"] == torch.__version__


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call(capsys, "sim", "--task", "quadratic", "--out", str(tmp_path / "file" / "run"))
    assert code == 2
    assert "cannot write the run folder" in err
    assert err.count("\n") == 1
