"""What a person with a GPU is asked to run, as far as it runs without one: on the CPU and on the pretend device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import device, device_kernels, report_gpu

from thinwire import kernels
from thinwire.errors import ConfigError, check_choice
from thinwire.tools.commands import doctor
from thinwire.tools.doctor.pretend import Audit
from thinwire.tools.doctor.pretend import device as pretend_device

CPU = torch.device("cpu")
TINY = {"tiny": (1, 64, 64, 16)}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device, report_gpu):
        monkeypatch.setattr(module, "SIZES", TINY)


def test_steps_and_rounds_of_all_methods_are_measured_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    figures = device.measure(CPU, ["tiny"], 1)
    rows = figures["sizes"]["tiny"]["methods"]
    assert rows.keys() == device.METHODS.keys() and (figures["workers"], figures["device"]) == (1, "cpu")
    for name, row in rows.items():
        assert row["round s"] >= row["round s of the host"] > 0 and row["waits"] is None
        assert ("local s" in row) is not name.startswith("DeMo"), "every step of DeMo is a round"
    device.show(figures)
    told = capsys.readouterr().out
    assert all(name in told for name in device.METHODS) and "not looked at" in told


def test_they_are_measured_on_the_pretend_device() -> None:
    with Audit():
        figures = device.measure(pretend_device(), ["tiny"], 1, ["MT-DAO, QHAdam", "DeMo, k=32"])
    assert all(row["round s"] > 0 for row in figures["sizes"]["tiny"]["methods"].values())


def test_the_first_line_of_thinwire_that_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    class Number:
        def __init__(self, error: str):
            self.error = error

        def __eq__(self, other: object) -> bool:
            raise RuntimeError(self.error)

        __hash__ = None  # type: ignore[assignment]

    waiting = Number("called a synchronizing CUDA operation")
    told = device.first_wait(lambda: check_choice("x", waiting, ("a",)))  # type: ignore[arg-type]
    assert told is not None and told.startswith("errors.py:")
    assert device.first_wait(lambda: waiting == 1) == "called a synchronizing CUDA operation", "nothing of thinwire"
    assert device.first_wait(lambda: None) is None
    with pytest.raises(RuntimeError, match="out of memory"):
        device.first_wait(lambda: Number("out of memory") == 1)
    assert modes == ["error", "default"] * 4


@pytest.mark.parametrize("where", ["cpu", "pretend"])
def test_without_kernels_torch_operations_alone_are_measured(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SETTING, "off")
    shapes = [(128, 64), (64,)]
    with Audit():
        at = CPU if where == "cpu" else pretend_device()
        found = device_kernels.compare(at, shapes, wait=lambda: None, repeats=1, k=32, workers=2)
    assert found["kernels"] == "off" and "kernels s" not in found
    assert found["torch s"].keys() == {"encode", "read", "squares", "step"} and min(found["torch s"].values()) > 0
    assert kernels.library() is None, "the switch is as it was"


def test_a_comparison_that_fails_leaves_the_rest_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such card")

    monkeypatch.setattr(device_kernels, "compare", compare)
    assert report_gpu.kernels_of(CPU, ["tiny"], 1) == {"tiny": "RuntimeError: no such card"}


def test_a_dry_run_writes_the_whole_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "METHODS", {"DeMo, k=32": device.METHODS["DeMo, k=32"]})
    monkeypatch.setattr(device.measure, "__defaults__", (("DeMo, k=32",),))
    path = tmp_path / "record.json"
    monkeypatch.setattr("sys.argv", ["report", "--device", "cpu", "--sizes", "tiny", "--repeats", "1", "--out", str(path)])
    report_gpu.main()
    told = json.loads(path.read_text())
    assert told["kernels"]["tiny"]["kernels"] == "off" and told["wire"]["sizes"]["tiny"]["tensors"] > 1
    assert set(told["checks"]) == set(report_gpu.CHECKS)


def test_doctor_counts_crossings_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "syncs.json"
    assert doctor.main(["--syncs", "--algorithm", "diloco", "--json", str(path)]) == 0
    told, rows = capsys.readouterr().out, json.loads(path.read_text())["rows"]
    rounds = {row["backend"]: row["blocking"] for row in rows if row["what"] == "round"}
    assert rounds == {"nccl": 0, "gloo": 2}
    assert "core/exchange.py" in told and "diloco" in told
    with pytest.raises(ConfigError, match="give that too"):
        doctor.main(["--algorithm", "diloco"])
