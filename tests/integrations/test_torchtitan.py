"""torchtitan's container, scheduler, checkpointer and meshes on the CPU; its trainer needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import thinwire
from tests.processes import Pool
from thinwire.errors import CheckpointError, ConfigError

pytest.importorskip("torchtitan", reason="torchtitan not installed: make test-full installs it")

from tests.integrations import titan_runs as runs


@pytest.mark.filterwarnings("ignore")  # of torch's checkpointer without a job, and of titan's scheduler
def test_one_process_resumes_with_titans_checkpointer(tmp_path: Path) -> None:
    done = runs.run(thinwire.SoloLink(), tmp_path, "diloco")
    assert done["wrappers"] == 1, "one for both parts of the model"
    assert torch.equal(done["drifted"], done["loaded"])
    assert torch.equal(done["end"], done["again"])
    assert not torch.equal(done["shared"], done["end"]), "at step 20 the shared model is that of step 16"


@pytest.mark.slow
@pytest.mark.parametrize("method", runs.METHODS)
def test_two_processes_resume_bit_equal_each_with_its_own_state(pair: Pool, tmp_path: Path, method: str) -> None:
    first, second = pair.run(runs.run, 2, tmp_path, method)
    for worker in (first, second):
        assert worker["between"] == {}, "no collective of titan's"
        assert worker["rounds"] > 0 and worker["wrappers"] == 1
        assert torch.equal(worker["drifted"], worker["loaded"])
        assert torch.equal(worker["end"], worker["again"])
    assert torch.equal(first["drifted"], second["drifted"]) == (method == "demo")
    assert torch.equal(first["end"], second["end"])
    assert len(first["rates"]) == 4 and all(0 < rate < 1e-2 for rate in first["rates"]), "the scheduler drives all groups"


@pytest.mark.slow
def test_titans_meshes_keep_gradients_in_a_worker(pool: Pool) -> None:
    done = pool.run(runs.sharded, 4)
    assert [worker["part"] for worker in done] == [(0, 4), (1, 4), (2, 4), (3, 4)], "data is split over all processes"
    assert [worker["worker"] for worker in done] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(worker["hidden"] == ("fsdp",) and worker["summed_over"] == (2, 2) for worker in done)
    assert torch.equal(done[0]["gradient"], done[1]["gradient"]), "shards of one worker"
    assert not torch.equal(done[0]["gradient"], done[2]["gradient"]), "workers are not averaged"
    assert all("set the config's link" in worker["refused"] and worker["steps"] == 1 for worker in done)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    link = thinwire.SoloLink()
    training = runs.Training(link, tmp_path, "diloco", seed=0)
    state = training.optimizers.state_dict()
    state.pop("worker0.state.first.weight.inner.exp_avg")
    with pytest.raises(CheckpointError, match=r"no 'worker0.state.first.weight.inner.exp_avg' \(1 missing in all\)"):
        training.optimizers.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"algorithm must be one of .*'diloco'.* got 'diloc'"):
        runs.ThinwireOptimizers.Config(algorithm="diloc").build(model_parts=[])
    with pytest.raises(ConfigError, match="no context parallelism, got a degree of 2"):
        runs.ThinwireParallelDims(dp_replicate=1, dp_shard=1, cp=2, tp=1, pp=1, ep=1, world_size=2)
