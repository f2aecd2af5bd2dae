"""Whose a state dict is, what of it must be there, and where loaders find the inner optimizer's part."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from tests.conformance.training import H, assert_same, build, model_of, snapshot, train
from thinwire import Link, SoloLink, World, Wrapper
from thinwire.core.optimizer import Algorithm
from thinwire.errors import CheckpointError


def trained(link: Link, name: str = "diloco", steps: int = H + 1) -> tuple[torch.nn.Module, Algorithm]:
    model = model_of()
    opt = build(name, model.parameters(), link)
    train(model, opt, link.rank, steps)
    return model, opt


# --- Whose it is -------------------------------------------------------------------------------------------------------------


def _swapped(name: str, shift: int, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said where each worker loads the state of the one `shift` places on."""
    states: dict[int, dict[str, Any]] = {}
    World(2).run(lambda link: states.update({link.rank: trained(link, name)[1].state_dict()}))
    caplog.clear()
    World(2).run(
        lambda link: build(name, model_of().parameters(), link).load_state_dict(states[(link.rank + shift) % len(states)])
    )
    return [record.getMessage() for record in caplog.records]


def test_the_state_of_another_worker_is_a_warning_that_says_what_to_use(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="thinwire")
    said = _swapped("diloco", 1, caplog)
    assert {text.partition(",")[0] for text in said} == {
        "worker 0 of 2 has loaded the state of worker 1 of 2",
        "worker 1 of 2 has loaded the state of worker 0 of 2",
    }
    assert all("each worker has state of its own (inner, param)" in text for text in said)
    assert all("one file per worker, or use thinwire.checkpoint" in text for text in said)
    assert "(momentum, own_count, own_v)" in _swapped("demo", 1, caplog)[0], "what is not among them is everybody's"
    assert _swapped("diloco", 0, caplog) == []
    assert _swapped("data-parallel", 1, caplog) == [], "all of its state is everybody's"


def test_the_state_of_another_number_of_workers_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, opt = trained(SoloLink())

    def load(link: Link) -> list[Any]:
        other = build("diloco", model_of().parameters(), link)
        other.load_state_dict(opt.state_dict())
        other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        return [[group["thinwire_worker"], group["thinwire_workers"]] for group in other.state_dict()["param_groups"]]

    assert World(2).run(load) == [[[rank, 2]] * 2 for rank in range(2)], "what was loaded is theirs now"
    assert "worker 0 of 2 has loaded the state of worker 0 of 1" in caplog.text


def test_a_state_without_a_worker_is_loaded_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    _, opt = trained(SoloLink())
    state = opt.state_dict()
    for group in state["param_groups"]:
        del group["thinwire_worker"], group["thinwire_workers"]
    World(2).run(lambda link: build("diloco", model_of().parameters(), link).load_state_dict(state))
    assert caplog.text == ""


# --- The inner optimizer's part ----------------------------------------------------------------------------------------------


def without_inner(state: dict[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    entries = {i: {k: v for k, v in e.items() if not k.startswith(dropped)} for i, e in state["state"].items()}
    return {**state, "state": entries}


@pytest.mark.parametrize("dropped", [("inner",), ("inner_ready",), ("inner.",)], ids=["all of it", "whether", "what"])
def test_a_state_without_the_inner_optimizers_part_is_refused_and_nothing_changes(dropped: tuple[str, ...]) -> None:
    _, opt = trained(SoloLink())
    model, other = trained(SoloLink(), steps=2)
    before = snapshot(model)
    with pytest.raises(
        CheckpointError, match=rf"of step {H + 1}, but what AdamW keeps of tensor 0 is not in it.*loader"
    ) as told:
        other.load_state_dict(without_inner(opt.state_dict(), dropped))
    assert "Load all that state_dict() gave, or use thinwire.checkpoint" in str(told.value)
    assert other.steps == 2
    assert_same(before, snapshot(model))


def test_before_the_first_step_there_is_nothing_to_miss() -> None:
    _, opt = trained(SoloLink(), steps=0)
    _, other = trained(SoloLink())
    other.load_state_dict(without_inner(opt.state_dict(), ("inner",)))
    assert other.steps == 0


def names(opt: Algorithm) -> list[set[str]]:
    return [set(opt.state[p]) for p in opt._active]


@pytest.mark.parametrize("steps", [0, H + 1])
@pytest.mark.parametrize("name", ["diloco", "data-parallel", "mt-dao"])
def test_loaders_find_in_state_what_state_dict_has(name: str, steps: int) -> None:
    _, opt = trained(SoloLink(), name, steps)
    assert isinstance(opt, Wrapper)
    saved = opt.state_dict()["state"]
    assert names(opt) == [set(entries) for entries in saved.values()]
    assert all({"inner_ready", "inner.exp_avg", "inner.step"} <= found for found in names(opt))
    assert len(opt.state) == len(opt._active) and all(p in opt.state for p in opt._active)
    for p in opt._active if steps else ():
        assert opt.state[p]["inner.exp_avg"] is opt.inner.state[p]["exp_avg"], "shown, not copied"


def test_state_of_a_wrapper_shows_and_takes_whole_entries_only() -> None:
    model, opt = trained(SoloLink())
    (frozen,) = [p for p in model.parameters() if not p.requires_grad]
    p = opt._active[0]
    assert dict(opt.state[frozen]) == {} and frozen not in opt.state
    with pytest.raises(TypeError, match="does not support item assignment"):
        opt.state[p]["anchor"] = torch.zeros(1)  # type: ignore[index]
    for p, entries in opt.state.items():  # as Lightning moves an optimizer to a device
        opt.state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in entries.items()}
    twin, straight = trained(SoloLink())
    for m, o in ((model, opt), (twin, straight)):
        train(m, o, 0, 2 * H, first=H + 2)
    assert_same(snapshot(model), snapshot(twin))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.parametrize("stop", [0, H + 1])
def test_flat_names_of_stock_torch_checkpointing_bring_the_inner_optimizer_along(stop: int) -> None:
    """It asks `optimizer.state` for the names, as torchtitan's loader does."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, opt = trained(SoloLink(), steps=stop)
    saved = {
        k: v.clone() if isinstance(v, Tensor) else v for k, v in get_optimizer_state_dict(model, opt, options=flat).items()
    }
    other = model_of(seed=99)
    other_opt = build("diloco", other.parameters(), SoloLink())
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, other_opt, optim_state_dict=saved, options=flat)
    assert other_opt.steps == stop
    for m, o in ((model, opt), (other, other_opt)):
        train(m, o, 0, 2 * H, first=stop + 1)
    assert_same(snapshot(model), snapshot(other))
