"""Lightning's Trainer with thinwire's strategy: real trainings of a small module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import thinwire
from tests.processes import Pool
from thinwire.errors import CheckpointError, ConfigError

pl = pytest.importorskip("lightning.pytorch", reason="lightning not installed: make test-full installs it")

from tests.integrations import lightning_runs as runs  # noqa: E402
from tests.integrations.frameworks import foreign_collectives  # noqa: E402
from thinwire.integrations.lightning import Thinwire, ThinwireStrategy  # noqa: E402


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of this process alone, which is left again."""
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        with runs.quiet():
            yield
    thinwire.disconnect()


@pytest.mark.usefixtures("alone")
def test_one_process_validates_the_shared_model_finishes_and_resumes(tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(tmp_path, "at-{step}", every_n_train_steps=12)
    settings: dict[str, Any] = {"max_steps": 20, "limit_val_batches": 1, "val_check_interval": 12}
    straight = runs.Module()
    with foreign_collectives() as foreign:
        watch = runs.Watch(foreign)
        fit = runs.trainer(tmp_path, callbacks=[watch, saving], enable_checkpointing=True, **settings)
        fit.fit(straight)
    opt = fit.strategy.algorithm
    assert opt is not None and opt.steps == 20 and opt.pending_steps == 0, "the last 4 local steps were brought in"
    assert fit.callback_metrics["wire_rounds"] == 3
    at_8 = float(watch.after[8].double().sum())  # a worker alone with H=8: the model agreed on last
    assert len(straight.seen) == 1 and straight.seen[0] != pytest.approx(float(watch.after[12].double().sum()), abs=1e-6)
    assert straight.seen[0] == pytest.approx(at_8, abs=1e-6)
    again = runs.Module()
    runs.trainer(tmp_path, **settings).fit(again, ckpt_path=tmp_path / "at-step=12.ckpt")
    assert torch.equal(runs.weights(straight), runs.weights(again))


@pytest.mark.slow
@pytest.mark.parametrize("method", runs.METHODS)
def test_resume_in_mid_interval_is_bit_equal_and_nothing_foreign_is_sent(pair: Pool, tmp_path: Path, method: str) -> None:
    first, second = pair.run(runs.resumed_run, 2, tmp_path, method)
    for worker in (first, second):
        assert worker["between"] == {}, "no collective of Lightning's between rounds"
        assert not worker["wrapped"]
        assert torch.equal(worker["alone"], worker["straight"]), "saving changes nothing"
        assert torch.equal(worker["straight"], worker["again"])
        assert worker["rounds"] == [{"demo": 20, "warm start": 5 + 3}.get(method, 3)] * 2 and worker["sent"] > 0
    assert torch.equal(first["straight"], second["straight"]), "after finish() all workers have one model"
    assert torch.equal(first["drifted"], second["drifted"]) == (method == "demo")
    if method != "demo":
        assert not torch.equal(first["stored"], first["drifted"]) or method == "mt-dao", "Lightning's file has the shared model"


@pytest.mark.slow
def test_validation_test_and_predict_see_the_shared_model(pair: Pool, tmp_path: Path) -> None:
    first, second = pair.run(runs.evaluations, 2, tmp_path)
    assert first["during"] == second["during"], "all workers validate one model"
    assert all(first["own"][i] != second["own"][i] for i in (0, 2)), "their own ones have drifted apart, after 4 and 12 steps"
    assert first["own"][4] == second["own"][4] == first["during"][4], "the last steps are in before the last validation"
    assert first["tested"] == second["tested"] and len(first["tested"]) == 2
    assert first["tested"][0] == first["during"][-1] == first["predicted"][0]
    assert first["tested"][1] == first["during"][0] != first["during"][-1], "of a file, what is in the file"
    files, stored = sorted(p.name for p in tmp_path.iterdir()), first["stored"]
    assert files == sorted([stored, f"{stored}.thinwire", "last.ckpt", "last.ckpt.thinwire"]), "nothing is left of the others"
    assert all(len(list((tmp_path / name).iterdir())) == 1 for name in files if name.endswith(".thinwire"))


@pytest.mark.slow
def test_a_sigterm_stops_a_worker_without_a_collective(pair: Pool, tmp_path: Path) -> None:
    for worker in pair.run(runs.stopped_by_sigterm, 2, tmp_path):
        assert worker["stopped"] and worker["step"] == 4
        assert worker["foreign"] == {}


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_what_would_train_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="find_unused_parameters is a setting of torch's DistributedDataParallel"):
        ThinwireStrategy(find_unused_parameters=True)
    plain = runs.Module()
    plain.configure_optimizers = lambda: torch.optim.AdamW(plain.parameters())  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"must return one thinwire optimizer.* got AdamW"):
        runs.trainer(tmp_path, max_steps=1).fit(plain)
    with pytest.raises(ConfigError, match="sync_batchnorm exchanges statistics in every forward pass"):
        runs.trainer(tmp_path, max_steps=1, sync_batchnorm=True).fit(runs.Module())
    with pytest.raises(ConfigError, match=r"needs Trainer\(strategy=ThinwireStrategy\(\)\), got SingleDeviceStrategy"):
        runs.trainer(tmp_path, max_steps=1, strategy="auto", callbacks=[Thinwire()]).fit(runs.Module())


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_file_of_another_strategy_is_no_resume(tmp_path: Path) -> None:
    naive = runs.trainer(tmp_path, max_steps=2, strategy="auto")
    naive.fit(runs.Module())
    naive.save_checkpoint(tmp_path / "naive.ckpt")
    with pytest.raises(CheckpointError, match="holds no state of thinwire's workers"):
        runs.trainer(tmp_path, max_steps=4).fit(runs.Module(), ckpt_path=tmp_path / "naive.ckpt")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_file_that_is_written_again_keeps_one_folder_and_a_link_finds_it(tmp_path: Path) -> None:
    for _ in range(2):  # two runs: thinwire.checkpoint alone would refuse the second
        fit = runs.trainer(tmp_path, max_steps=3)
        fit.fit(runs.Module())
        fit.save_checkpoint(tmp_path / "one.ckpt")
    assert len(list((tmp_path / "one.ckpt.thinwire").iterdir())) == 1
    (tmp_path / "last.ckpt").symlink_to("one.ckpt")
    again = runs.trainer(tmp_path, max_steps=4)
    again.fit(runs.Module(), ckpt_path=tmp_path / "last.ckpt")
    assert again.strategy.algorithm.steps == 4


@pytest.mark.slow
def test_lightnings_own_strategy_is_warned_of(pair: Pool, tmp_path: Path) -> None:
    for told in pair.run(runs.naive, 2, tmp_path):
        assert any("same gradient" in message and "DistributedDataParallel" in message for message in told), told
