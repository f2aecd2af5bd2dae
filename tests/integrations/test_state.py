"""What all adapters share, on simulated workers: no framework is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import thinwire
from thinwire.errors import CheckpointError
from thinwire.integrations.state import load_state, save_state, start_alike
from thinwire.links import Link


def made(link: Link, seed: int = 0) -> tuple[torch.nn.Module, thinwire.DiLoCo]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 1)
    return model, thinwire.DiLoCo(torch.optim.AdamW(model.parameters()), link, H=2)


def test_a_checkpoint_that_one_worker_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    def worker(link: Link) -> str:
        model, opt = made(link)
        save_state(tmp_path, model, opt)
        with pytest.raises(CheckpointError) as told:
            load_state(tmp_path / ("elsewhere" if link.rank else ""), model, opt)
        return str(told.value)

    told = thinwire.World(2).run(worker)
    assert told[0] == told[1] and "elsewhere holds no state of thinwire workers" in told[0]


def test_a_checkpoint_that_worker_0_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def worker(link: Link) -> str:
        with pytest.raises(CheckpointError) as told:
            save_state(tmp_path / "file" / "folder", *made(link))
        return str(told.value)

    told = thinwire.World(2).run(worker)
    assert told[0] == told[1] and "could not write into" in told[0]


def test_a_folder_of_another_run_is_written_anew(tmp_path: Path) -> None:
    def worker(link: Link) -> int:
        for _ in range(2):
            model, opt = made(link)
            save_state(tmp_path, model, opt)
        return load_state(tmp_path, model, opt).step

    assert thinwire.World(2).run(worker) == [0, 0]


def test_workers_that_start_with_other_weights_get_those_of_worker_0() -> None:
    def worker(link: Link) -> tuple[list[float], list[float]]:
        torch.manual_seed(link.rank)
        model = torch.nn.Linear(3, 1)
        model.bias.requires_grad_(False).fill_(7)  # the same on both
        metered = thinwire.Metered(link)
        start_alike(metered, model)
        again = thinwire.Metered(link)
        start_alike(again, model)
        broadcasts = [len([e for e in each.meter.recent if e.op == "broadcast"]) for each in (metered, again)]
        return model.weight.flatten().tolist(), broadcasts

    (first, sent), (second, _) = thinwire.World(2).run(worker)
    assert first == second and sent == [1, 0], "only what differs is sent"
