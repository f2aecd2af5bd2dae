"""Checkpoints of wrapped models: the names in them are the model's own."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from thinwire import DiLoCo, Link, SoloLink, World, checkpoint
from thinwire.checkpoint.names import plain_name
from thinwire.core.optimizer import Algorithm
from thinwire.errors import CheckpointError


class Net(nn.Module):
    def __init__(self, wrap_first: bool = False):
        super().__init__()
        first = nn.Linear(3, 3)
        self.first = checkpoint_wrapper(first) if wrap_first else first
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


class Wrapped(nn.Module):
    """Holds a model as DistributedDataParallel does."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def made(kind: str, link: Link, seed: int = 0) -> tuple[nn.Module, Algorithm]:
    torch.manual_seed(seed)
    plain = Net(wrap_first=kind == "activation checkpointing")
    model = {"compiled": lambda m: torch.compile(m, backend="eager"), "ddp": Wrapped}.get(kind, lambda m: m)(plain)
    assert isinstance(model, nn.Module)
    opt = DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.1), link, H=4)
    for step in range(2):
        plain(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * link.rank + step))).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


@pytest.mark.parametrize("kind", ["compiled", "ddp", "activation checkpointing"])
@pytest.mark.parametrize("back", [False, True], ids=["into a plain one", "and back"])
def test_a_wrapped_models_checkpoint_loads_into_a_plain_one(kind: str, back: bool, tmp_path: Path) -> None:
    written, read = ("plain", kind) if back else (kind, "plain")
    model, opt = made(written, SoloLink())
    path = checkpoint.save(tmp_path, model, opt, SoloLink())
    keys = json.loads((path / "thinwire.json").read_text())["tensors"]
    assert {"worker0/param/first.weight", "worker0/buffer/norm.running_mean"} <= keys.keys()
    assert "worker0/state/first.weight/inner.exp_avg" in keys
    other, other_opt = made(read, SoloLink(), seed=1)
    assert checkpoint.load(path, other, other_opt, SoloLink()).step == 2
    mine, theirs = ({plain_name(k): v for k, v in m.state_dict().items()} for m in (model, other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    for a, b in zip(opt.state_dict()["state"].values(), other_opt.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_checkpoint_that_was_written_with_prefixes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        for place in ("names", "layout"):
            before.setattr(f"thinwire.checkpoint.{place}.plain_name", lambda name: name)
        model, opt = made("compiled", SoloLink())
        path = checkpoint.save(tmp_path, model, opt, SoloLink())
    assert "_orig_mod.first.weight" in (path / "thinwire.json").read_text()
    other, other_opt = made("plain", SoloLink(), seed=1)
    checkpoint.load(path, other, other_opt, SoloLink())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_one_run_may_save_the_model_and_its_wrapper(tmp_path: Path) -> None:
    model, opt = made("ddp", SoloLink())
    checkpoint.save(tmp_path, model, opt, SoloLink())
    checkpoint.save(tmp_path, model.module, opt, SoloLink())  # type: ignore[arg-type]


def test_two_names_that_become_equal_are_refused(tmp_path: Path) -> None:
    inside = nn.Linear(2, 2)
    inside.module = nn.Linear(2, 2)
    opt = DiLoCo(torch.optim.SGD(inside.parameters(), lr=0.1), SoloLink(), H=2)
    told = "'weight' and 'module.weight' have the same name without _orig_mod, module, _checkpoint_wrapped_module: rename one"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.save(tmp_path, inside, opt, SoloLink())


def test_plain_names() -> None:
    assert plain_name("_orig_mod.module.blocks.0._checkpoint_wrapped_module.mlp.weight") == "blocks.0.mlp.weight"
    assert plain_name("my_module.weight") == "my_module.weight"
    assert plain_name("module") == "module", "a parameter of that name"


def test_another_number_of_workers_resumes_without_the_warning_of_another_workers_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="thinwire")
    World(2).run(lambda link: checkpoint.save(tmp_path, *made("plain", link), link))
    caplog.clear()

    def resume(link: Link) -> int:
        model, opt = made("plain", link, seed=1)
        checkpoint.load(checkpoint.finished(tmp_path)[-1], model, opt, link)
        return opt.steps

    assert World(3).run(resume) == [2] * 3
    assert World(2).run(resume) == [2] * 2
    assert "has loaded the state" not in caplog.text
