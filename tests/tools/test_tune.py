"""`thinwire compare --tune`: one grid for all methods, wider where the best is at an edge; then the runs that count."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from tests.tools.test_compare import call
from thinwire.errors import ConfigError
from thinwire.links import SoloLink
from thinwire.tools.arms import alternatives, split_arguments
from thinwire.tools.build import optimizer_of
from thinwire.tools.commands.compare import parse_arms
from thinwire.tools.compare import Run
from thinwire.tools.records import read_records
from thinwire.tools.runners import SimulatedRunner
from thinwire.tools.tune import parse_rates, tune

MATRIX = Path(__file__).parents[2] / "benchmarks" / "matrix"
JOB = ["--task", "quadratic", "--workers", "2", "--steps", "12", "--eval-every", "0", "--lr-warmup", "0", "--sim"]


def test_each_method_is_tuned_on_short_runs_of_one_seed_and_its_points_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # a narrow terminal leaves columns out
    command = ["data-parallel", "far = diloco --H {2,4}", "fixed = diloco --H 2 --lr 0.01", *JOB, "--warm-start", "3"]
    command += ["--seeds", "5,6", "--tune", "0.05,0.1", "--out", str(tmp_path)]
    code, printed, err = call(capsys, *command)
    assert (code, err) == (0, "")
    tuning, claims = read_records(tmp_path / "tuning" / "records.jsonl"), read_records(tmp_path)
    assert {(r.config.steps, r.config.warm_start, r.config.seed, r.config.val_part) for r in tuning} == {(4, 1, 5, "tuning")}
    assert {(r.config.steps, r.config.warm_start, r.config.val_part) for r in claims} == {(12, 3, "claim")}
    for arm in ("data-parallel", "far", "fixed"):
        mine = [r for r in tuning if r.arm == arm]
        best = min(mine, key=lambda r: r.loss)
        chosen = [r for r in claims if r.arm == arm]
        assert [r.config.seed for r in chosen] == [5, 6]
        assert {(r.config.lr, r.config.settings.get("H"), r.tried) for r in chosen} == {
            (best.config.lr, best.config.settings.get("H"), len(mine))
        }
        assert f"{arm}: lr {best.config.lr:g}, the best of" in printed
        rates = sorted({r.config.lr for r in mine})
        if arm == "fixed":
            assert rates == [0.01]
        else:  # AdamW moves by lr a step, and the optimum is far: the best is never the least that was tried
            assert rates[:3] == [0.05, 0.1, 0.2]
    assert len([r for r in tuning if r.arm == "far"]) % 2 == 0, "each alternative with every rate"
    assert "tried" in printed

    before = json.loads((tmp_path / "far-seed5" / "summary.json").read_text())
    code, printed, _ = call(capsys, *command)
    assert code == 0
    assert "[1/" not in printed, "all is there already"
    assert json.loads((tmp_path / "far-seed5" / "summary.json").read_text()) == before


def test_the_mean_over_several_seeds_decides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["data-parallel", *JOB, "--seeds", "5,6,7", "--tune", "0.05,0.1,0.2", "--tune-seeds", "2", "--out", str(tmp_path)]
    code, _, err = call(capsys, *command)
    assert (code, err) == (0, "")
    losses: dict[float, dict[int, float]] = {}
    for record in read_records(tmp_path / "tuning" / "records.jsonl"):
        losses.setdefault(record.config.lr, {})[record.config.seed] = record.loss
    assert all(set(of) == {5, 6} for of in losses.values()), "each rate with each of the seeds"
    best = min(losses, key=lambda lr: sum(losses[lr].values()))
    claims = read_records(tmp_path)
    assert {(r.config.seed, r.config.lr, r.tried) for r in claims} == {(seed, best, len(losses)) for seed in (5, 6, 7)}


def test_a_rate_that_is_best_on_one_seed_only_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    losses = {(0.1, 0): 3.0, (0.1, 1): 3.0, (0.2, 0): 2.0, (0.2, 1): 2.5, (0.4, 0): 1.0, (0.4, 1): 4.0, (0.8, 0): 0.5}

    def run_all(runs: list[Run], *_: object, **__: object) -> SimpleNamespace:
        found = {run: losses.get((run.config.lr, run.config.seed)) for run in runs}
        return SimpleNamespace(records={run: SimpleNamespace(loss=loss) for run, loss in found.items() if loss is not None})

    monkeypatch.setattr("thinwire.tools.tune.run_all", run_all)
    arms, _ = parse_arms(["ddp"], ["--task", "quadratic", "--steps", "12"])
    runner, console = SimulatedRunner(step_time="0s"), Console(quiet=True)
    settings = {"rates": [0.1, 0.2, 0.4], "fixed": frozenset(), "steps": None, "jobs": 1, "console": console}
    both = tune(arms, runner, tmp_path, seeds=[0, 1], **settings)["ddp"]
    assert (both.config.lr, both.tried) == (0.2, 3), "the mean counts"
    first = tune(arms, runner, tmp_path, seeds=[0], **settings)["ddp"]
    assert (first.config.lr, first.tried) == (0.8, 5), "1.6 has no loss"
    losses[0.2, 1] = math.nan
    assert tune(arms, runner, tmp_path, seeds=[0, 1], **settings)["ddp"].config.lr == 0.4, "a failed seed counts against a rate"


def test_a_file_has_methods_and_flags_of_all(tmp_path: Path) -> None:
    file = tmp_path / "arms.txt"
    file.write_text('# what is compared\nddp\n\nfar = diloco --H 4\n--task quadratic --steps 9\n--wire "DCT(8) >> Sign()"\n')
    words, flags = split_arguments(["demo", f"@{file}", "--steps", "12"])
    assert words == ["demo", "ddp", "far = diloco --H 4"]
    assert flags == ["--task", "quadratic", "--steps", "9", "--wire", "DCT(8) >> Sign()", "--steps", "12"], "the last one wins"
    with pytest.raises(ConfigError, match=r"cannot read the methods in .*nothing.*: No such file"):
        split_arguments([f"@{tmp_path}/nothing"])


@pytest.mark.parametrize("file", sorted(MATRIX.glob("*.txt")), ids=lambda file: file.name)
def test_the_methods_of_the_evidence_can_be_built(file: Path) -> None:
    whole = [*_used_with(file), file]
    words, common = split_arguments([f"@{part}" for part in whole])
    arms, _ = parse_arms(words, common) if words else ({}, None)
    for config in (config for configs in arms.values() for config in configs):
        optimizer_of(config, torch.nn.Linear(64, 64), SoloLink())
        windows = 512 if config.task.startswith("gpt") else None  # images are evaluated on a whole test set
        assert (config.lr_schedule, config.val_windows) == ("wsd", windows)


def _used_with(file: Path) -> list[Path]:
    """The other files of the command that a file names in its comment."""
    command = next((line for line in file.read_text().splitlines() if line.startswith("#   thinwire compare")), "")
    named = [MATRIX / Path(word).name for word in command.split() if word.startswith("@")]
    assert all(part.exists() for part in named)
    return [part for part in named if part != file]


def test_braces_stand_for_alternatives() -> None:
    assert alternatives("d = diloco --H {8,32} --outer-momentum {0,0.5}") == [
        "d = diloco --H 8 --outer-momentum 0",
        "d = diloco --H 8 --outer-momentum 0.5",
        "d = diloco --H 32 --outer-momentum 0",
        "d = diloco --H 32 --outer-momentum 0.5",
    ]
    assert alternatives("ddp") == ["ddp"]


@pytest.mark.parametrize("text", ["1e-3", "2e-3,1e-3", "1e-3,2e-3,3e-3", "a,b", "0,1", ""])
def test_rates_that_are_no_grid_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tune must be two or more learning rates a constant factor apart"):
        parse_rates(text)


def test_what_only_a_tuning_reads_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["diloco --H {2,4}"], "what stands in braces is for choosing settings: give --tune"),
        (["ddp", "--tune-steps", "4"], "--tune-steps is for choosing settings: give --tune"),
        (["ddp", "--tune-seeds", "1"], "--tune-seeds is for choosing settings: give --tune"),
        (["ddp", "--tune-seeds", "2"], "--tune-seeds is for choosing settings: give --tune"),
        (["ddp", "--tune", "1e-3,2e-3", "--tune-seeds", "2"], "tune-seeds must be from 1 to 1, the number of --seeds, got 2"),
        (["ddp", "--tune", "1e-3,2e-3", "--tune-seeds", "0"], "tune-seeds must be from 1 to 1, the number of --seeds, got 0"),
        (["ddp", "--tune", "1e-3,2e-3", "--tune-steps", "1"], "tune-steps must be a whole number of at least 2, got 1"),
    ):
        code, _, err = call(capsys, *words, *JOB)
        assert (code, message in err) == (2, True), err
