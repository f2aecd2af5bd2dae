"""Lightning Fabric with thinwire's strategy: a loop of one's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import thinwire
from tests.processes import Pool
from thinwire.errors import ConfigError

pytest.importorskip("lightning.fabric", reason="lightning not installed: make test-full installs it")

from tests.integrations import fabric_runs as runs
from thinwire.integrations.fabric import ThinwireFabric


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of this process alone, which is left again."""
    with mock.patch.dict(os.environ), runs.quiet():
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        yield
    thinwire.disconnect()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["diloco", "warm start"])
def test_setup_leaves_the_model_as_it_is(tmp_path: Path, method: str) -> None:
    straight = runs.train(1, 0, tmp_path, method)
    again = runs.train(1, 0, tmp_path, method, resume=True)
    assert straight["plain"] and straight["foreign"] == {}
    assert torch.equal(straight["end"], straight["shared"])
    assert torch.equal(straight["end"], again["end"])


@pytest.mark.slow
@pytest.mark.parametrize("method", runs.METHODS)
def test_two_processes_exchange_at_rounds_only_and_resume_bit_equal(pair: Pool, tmp_path: Path, method: str) -> None:
    (first, first_again), (second, second_again) = pair.run(runs.run, 2, tmp_path, method)
    for worker in (first, first_again, second, second_again):
        assert worker["plain"] and worker["foreign"] == {}
        assert torch.equal(worker["end"], first["end"])
    assert torch.equal(first["drifted"], second["drifted"]) == (method == "demo")


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_what_would_train_or_save_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="static_graph is a setting of torch's DistributedDataParallel"):
        ThinwireFabric(static_graph=True)
    fabric, net = runs.start(1, 0), torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="workers would train models of their own with SGD"):
        fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    opt = thinwire.DeMo(net.parameters(), thinwire.connect())
    _, prepared = fabric.setup(net, opt)
    fabric.save(tmp_path / "alone.ckpt", {"opt": prepared})
    with (
        mock.patch.object(type(opt.link), "size", 2),
        pytest.raises(ConfigError, match=r"fabric\.save writes the optimizer of worker 0 only"),
    ):
        fabric.save(tmp_path / "two.ckpt", {"opt": prepared})


@pytest.mark.slow
def test_fabrics_own_strategy_is_warned_of(pair: Pool) -> None:
    for told in pair.run(runs.naive, 2):
        assert any("same gradient" in message and "DistributedDataParallel" in message for message in told), told
