"""thinwire.checkpoint.export: the shared model as one safetensors file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.conformance.training import adamw, train
from tests.processes import LIMIT, Pool, meet
from thinwire import MTDAO, DiLoCo, Link, SoloLink, TorchLink, World, checkpoint, running_statistics
from thinwire.errors import CheckpointError
from thinwire.sharding.mesh import make_mesh, shard_model


class Tied(nn.Module):
    """An embedding whose weight is that of the head, and BatchNorm for its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.second.weight

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.head(self.second(self.norm(self.first(x))))[:, :3]


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def test_it_is_the_shared_model_with_tied_weights_once(tmp_path: Path) -> None:
    path = tmp_path / "out" / "model.safetensors"

    def worker(link: Link) -> dict[str, Tensor] | None:
        model = tied()
        opt = DiLoCo(adamw(model.parameters()), link, H=4, buffers=running_statistics(model))
        train(model, opt, link.rank, 6)
        own = model.first.weight.detach().clone()
        assert checkpoint.export(model, opt, path) == path
        assert torch.equal(model.first.weight, own), "the worker's own parameters are back"
        with opt.shared_model():
            return {name: t.clone() for name, t in model.state_dict().items()}

    shared = World(2, step_time=0.0).run(worker)[0]
    assert shared is not None
    found = load_file(path)
    assert sorted(found) == sorted(name for name in shared if name != "head.weight")
    assert all(torch.equal(found[name], shared[name]) for name in found)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "second.weight"}
    assert load_model(fresh := tied(), str(path)) == (set(), [])
    assert fresh.head.weight is fresh.second.weight and torch.equal(fresh.head.weight, shared["head.weight"])
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_names_are_those_of_the_bare_model(tmp_path: Path) -> None:
    model = tied()
    expected = {name for name in model.state_dict() if name != "head.weight"}
    model.second = checkpoint_wrapper(model.second)  # type: ignore[assignment]
    compiled = torch.compile(model, backend="eager")
    opt = DiLoCo(adamw(compiled.parameters()), SoloLink(), H=4)  # type: ignore[attr-defined]
    path = checkpoint.export(compiled, opt, tmp_path / "model.safetensors")  # type: ignore[arg-type]
    assert set(load_file(path)) == expected


def test_the_mean_where_a_method_keeps_no_shared_model(tmp_path: Path) -> None:
    def worker(link: Link) -> Tensor:
        model = tied()
        opt = MTDAO(adamw(model.parameters()), link, H=4)
        train(model, opt, link.rank, 6)
        checkpoint.export(model, opt, tmp_path / "mean.safetensors", mean=True)
        return model.first.weight.detach()

    a, b = World(2, step_time=0.0).run(worker)
    assert not torch.equal(a, b)
    torch.testing.assert_close(load_file(tmp_path / "mean.safetensors")["first.weight"], (a + b) / 2)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tied()
    opt = DiLoCo(adamw(model.parameters()), SoloLink(), H=4)
    path = checkpoint.export(model, opt, tmp_path / "model.safetensors")
    before = path.read_bytes()

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("thinwire.checkpoint.model_file.save_file", full)
    with pytest.raises(CheckpointError, match=r"could not write .*model.safetensors: OSError: .* No space left"):
        checkpoint.export(model, opt, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def _sharded(link: TorchLink, folder: Path) -> int:
    mesh = make_mesh(workers=2, shards=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    shard_model(model, mesh["shard"])
    opt = DiLoCo(adamw(model.parameters()), TorchLink(mesh["replicate"], timeout=LIMIT), H=4)
    path = checkpoint.export(model, opt, folder / "model.safetensors")
    meet(link)  # nobody reads before worker 0 has written
    found = load_file(path)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return len(found)


def test_a_sharded_model_is_written_whole(tmp_path: Path, pool: Pool) -> None:
    assert pool.run(_sharded, 4, tmp_path) == [4] * 4
