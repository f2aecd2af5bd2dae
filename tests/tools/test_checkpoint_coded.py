"""Checkpoints of slots in the domain of a codec: plain tensors on every process, also where the parameters are sharded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.test_sharded import uneven
from tests.conformance.training import assert_same, train
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import DCT, DeMo, Link, SoloLink, TopK, TorchLink, checkpoint
from thinwire.errors import CheckpointError
from thinwire.sharding.mesh import make_mesh, shard_model
from thinwire.sharding.shards import local, reshard

STOP, MORE = 3, 3
Summary = dict[str, Any]


def _demo(model: nn.Module, link: Link, **settings: Any) -> DeMo:
    return DeMo(model.parameters(), link, lr=0.01, codec=DCT(4) >> TopK(3), alarm_every=1, **settings)


def _built(link: Link, mesh: tuple[int, int] | None, seed: int, settings: dict[str, Any]) -> tuple[nn.Module, DeMo, Link]:
    """Model and optimizer on a mesh of (workers, shards), or unsharded on the link's own workers."""
    model = uneven(torch.float32)
    with torch.no_grad():
        model.second.weight.add_(0.01 * seed)  # so that loading has something to change
    if mesh is not None:
        axes = make_mesh(workers=mesh[0], shards=mesh[1])
        link = TorchLink(axes["replicate"], timeout=LIMIT)
        shard_model(model, axes)
    return model, _demo(model, link, **settings), link


def _state(model: nn.Module, opt: DeMo) -> Summary:
    """The whole parameters and this process's part of the rest, copied."""
    reshard(model)
    slots = {name: [t.clone() for t in opt.slot(name)] for name in opt._slots}
    whole = [(p.detach() if local(p) is p else p.detach().full_tensor()).clone() for p in model.parameters()]
    return slots | {"params": whole, "all": [*whole, *(t for tensors in slots.values() for t in tensors)]}


def _save(link: TorchLink, folder: Path, mesh: tuple[int, int] | None, settings: dict[str, Any]) -> Summary:
    model, opt, link = _built(link, mesh, 0, settings)
    train(model, opt, link.rank, STOP)
    checkpoint.save(folder, model, opt, link)
    saved = _state(model, opt)
    train(model, opt, link.rank, MORE, first=STOP + 1)
    return saved | {"end": _state(model, opt)["all"]}


def _load(link: TorchLink, folder: Path, mesh: tuple[int, int] | None, settings: dict[str, Any]) -> Summary:
    model, opt, link = _built(link, mesh, 1, settings)
    train(model, opt, link.rank, 1)  # nothing of what was there before may stay
    resumed = checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link)
    loaded = _state(model, opt)
    train(model, opt, link.rank, MORE, first=STOP + 1)
    end = _state(model, opt)["all"]
    opt.finish()
    return loaded | {"end": end, "notes": resumed.notes, "steps": opt.steps, "drift": opt.drift()}


@pytest.mark.parametrize(
    "settings", first_quick([{"phi": "adam", "delay": True}, {}]), ids=["adam with a round under way", "unit"]
)
@pytest.mark.parametrize("mesh", [(2, 2), *(pytest.param(m, marks=pytest.mark.slow) for m in [(4, 1), (1, 4)])], ids=str)
def test_the_same_mesh_resumes_bit_for_bit(mesh: tuple[int, int], settings: dict[str, Any], tmp_path: Path, pool: Pool) -> None:
    """Shards that do not divide, an empty one, and a slot as large as the whole parameter are among them."""
    straight = pool.run(_save, 4, tmp_path, mesh, settings)
    resumed = pool.run(_load, 4, tmp_path, mesh, settings)
    for before, after in zip(straight, resumed, strict=True):
        assert after["notes"] == []
        assert_same(before["all"], after["all"])
        assert_same(before["end"], after["end"])
    first, second = straight[0]["momentum"], straight[1]["momentum"]
    differ = [a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert any(differ), "no two processes hold the same momentum: to mix them up would show"


def test_every_shard_has_a_name_of_its_own_and_other_state_has_not(tmp_path: Path, pool: Pool) -> None:
    pool.run(_save, 4, tmp_path, (2, 2), {})
    keys = _keys(tmp_path)
    for rank in range(2):
        mine = f"worker{rank}/state/first.weight/"
        assert {k for k in keys if k.startswith(mine) and "@" in k} == {f"{mine}momentum@0of2", f"{mine}momentum@1of2"}
        assert f"{mine}momentum" not in keys
        assert f"{mine}own_v" in keys
    assert "replicated/param/first.weight" in keys


@pytest.mark.parametrize("mesh", [None, (4, 1)], ids=["plain", "one shard"])
def test_a_worker_of_one_process_has_plain_names(mesh: tuple[int, int] | None, tmp_path: Path, pool: Pool) -> None:
    pool.run(_save, 4, tmp_path, mesh, {})
    assert not any("@" in k for k in _keys(tmp_path))
    assert "worker3/state/first.weight/momentum" in _keys(tmp_path)
    for after in pool.run(_load, 4, tmp_path, (4, 1) if mesh is None else None, {}):
        assert after["notes"] == [], "a mesh with one shard and no mesh are the same"


def test_another_sharding_of_as_many_workers_begins_with_new_momenta_only(tmp_path: Path, pool: Pool) -> None:
    """2 x 2 to 2 x 1."""
    before = pool.run(_save, 4, tmp_path, (2, 2), {})
    results = pool.run(_load, 2, tmp_path, None, {})
    for rank, after in enumerate(results):
        assert after["notes"] == ["re-initialised, since workers were sharded in another way: momentum"]
        assert_same(before[0]["params"], after["params"])
        assert not any(bool(m.any()) for m in after["momentum"])
        for v, *shards in zip(after["own_v"], before[2 * rank]["own_v"], before[2 * rank + 1]["own_v"], strict=True):
            assert torch.equal(v, torch.cat(shards)), "what is laid out like the parameters is put together"
        assert (after["steps"], after["drift"]) == (STOP + MORE, 0.0)
    assert not torch.equal(results[0]["own_v"][0], results[1]["own_v"][0])


def test_unsharded_workers_may_be_sharded_later(tmp_path: Path, pool: Pool) -> None:
    before = pool.run(_save, 2, tmp_path, None, {})
    for after in pool.run(_load, 4, tmp_path, (2, 2), {}):
        assert after["notes"] == ["re-initialised, since workers were sharded in another way: momentum"]
        assert_same(before[0]["params"], after["params"])
        assert after["drift"] == 0.0


@pytest.mark.parametrize("mesh", [(4, 1), pytest.param((1, 4), marks=pytest.mark.slow)], ids=str)
def test_another_number_of_workers_takes_over_what_is_shared(mesh: tuple[int, int], tmp_path: Path, pool: Pool) -> None:
    before = pool.run(_save, 4, tmp_path, (2, 2), {})
    for after in pool.run(_load, 4, tmp_path, mesh, {}):
        (note,) = after["notes"]
        assert re.match("re-initialised, since it was each worker's own: momentum, own_", note)
        assert_same(before[0]["params"], after["params"])
        assert not any(bool(t.any()) for t in [*after["momentum"], *after["own_v"]])


def test_momenta_of_another_codec_are_refused(tmp_path: Path) -> None:
    model = uneven(torch.float32)
    path = checkpoint.save(tmp_path, model, _demo(model, SoloLink()), SoloLink())
    with pytest.raises(CheckpointError, match=r"'momentum' of tensor 3 has shape \(8, 8\), here it has \(9, 6\)"):
        checkpoint.load(path, model, DeMo(model.parameters(), SoloLink(), codec=DCT(3) >> TopK(2)), SoloLink())


def _keys(folder: Path) -> set[str]:
    return set(json.loads((checkpoint.finished(folder)[-1] / "thinwire.json").read_text())["tensors"])


def _load_alone(link: TorchLink, folder: Path) -> tuple[int, list[str]]:
    model, opt, _ = _built(link, None, 1, {"delay": True, "weight_decay": 0.5})
    notes = checkpoint.load(checkpoint.finished(folder)[-1], model, opt, link).notes
    before = [p.detach().clone() for p in model.parameters()]
    opt.finish()  # would send a round of zeros and decay the weights for it
    assert_same(before, [p.detach() for p in model.parameters()], "nothing is under way")
    return opt.param_groups[0]["in_flight"], notes


def test_another_world_forgets_the_round_that_was_under_way(tmp_path: Path, pool: Pool) -> None:
    pool.run(_save, 2, tmp_path, None, {"delay": True, "weight_decay": 0.5})
    ((underway, notes),) = pool.run(_load_alone, 1, tmp_path)
    assert underway == 0
    assert notes == ["re-initialised, since it was each worker's own: momentum, own_count, own_v"]
