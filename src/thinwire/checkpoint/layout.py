"""Where every tensor of a run stands in a checkpoint.

replicated/param/first.weight                   bit-equal on all workers, as the algorithm declares it
replicated/state/first.weight/anchor            a state slot of the algorithm
worker1/state/first.weight/inner.exp_avg        the inner optimizer's state of worker 1
worker1/state/first.weight/momentum@0of2        a slot in the domain of the codec, of shard 0 of 2
worker1/buffer/norm.running_mean                a buffer of the model
worker1/rng/0                                   torch's random state in shard 0, or in member 0 of a site
worker1/extra/sent                              a number of the caller's
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from thinwire.checkpoint.files import Stored
from thinwire.checkpoint.names import buffers_of, parameters_of, plain_name
from thinwire.core.optimizer import Algorithm
from thinwire.core.state_layout import StateLayout, state_layout
from thinwire.errors import CheckpointError
from thinwire.sharding.mesh import shard_of
from thinwire.sharding.shards import Region, region_of


def flat_state(
    model: nn.Module, optimizer: Algorithm, worker: int, random: Mapping[int, Tensor], extra: Mapping[str, float]
) -> dict[str, Tensor]:
    """Every tensor under its place in the checkpoint.

    Args:
        model: the parameters and buffers.
        optimizer: the state.
        worker: whose it is.
        random: torch's random state in this shard, by its number; or in all members of a site.
        extra: numbers of the caller's.
    """
    own, layout = f"worker{worker}/", state_layout(optimizer)

    def place(replicated: bool) -> str:
        return "replicated/" if replicated else own

    differing = {id(each.param) for each in layout.parameters if not each.replicated}
    state = {f"{place(id(p) not in differing)}param/{name}": p.detach() for name, p in parameters_of(model).items()}
    persistent = {plain_name(name) for name in model.state_dict()}
    state |= {f"{own}buffer/{name}": b for name, b in buffers_of(model).items() if name in persistent}
    state |= {f"{own}extra/{name}": torch.tensor(float(value), dtype=torch.float64) for name, value in extra.items()}
    state |= {f"{own}rng/{place}": values for place, values in random.items()}
    saved, names, coded = optimizer.state_dict()["state"], parameter_names(model, optimizer), coded_names(layout)
    for each in layout.parameters:
        values = saved.get(each.index, {})
        ready = bool(values.get("inner_ready", True))
        for entry in each.entries:
            key, value = entry.key, values[entry.key]
            if value is None or (key.startswith("inner.") and not ready):
                continue
            state[f"{place(entry.replicated)}state/{names[each.index]}/{coded.get(key, key)}"] = _as_tensor(value, key)
    return state


def coded_names(layout: StateLayout) -> dict[str, str]:
    """The slots in the domain of the codec, and their names in the checkpoint.

    A shard's slot is no part of a whole: the codec's blocks begin again on every shard. Without a number of their own, the
    slots of a worker's shards would be taken for copies of one tensor.
    """
    number, shards = shard_of(layout.trained)
    mark = f"@{number}of{shards}" if shards > 1 else ""
    return {slot: slot + mark for slot in layout.coded}


def coded_slot(key: str, coded: Mapping[str, str]) -> tuple[str, str, str]:
    """A key without worker, shard and wrappers, which coded slot it holds ("" for none), and how that is written in the key."""
    name = key.partition("/")[2]
    name = name if name.startswith("extra/") else plain_name(name)
    before, _, written = name.rpartition("/")
    slot = written.partition("@")[0]
    if not name.startswith("state/") or slot not in coded:
        return name, "", ""
    return f"{before}/{slot}", slot, written


def parameter_names(model: nn.Module, optimizer: Algorithm) -> dict[int, str]:
    """Number in the optimizer's state dict -> name in the model."""
    names = {id(p): name for name, p in parameters_of(model).items()}
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = [i for i, p in enumerate(everyone) if id(p) not in names]
    if unknown:
        raise CheckpointError(f"the optimizer's tensors {unknown} are not parameters of this model")
    return {i: names[id(p)] for i, p in enumerate(everyone)}


def region_for(name: str, stored: Stored, parameters: Mapping[str, Tensor]) -> tuple[Region, Tensor | None]:
    """The part of a stored tensor that this process needs, and the parameter like which it is laid out, if any.

    Args:
        name: the key in the checkpoint without its worker.
        stored: what the checkpoint holds.
        parameters: of the model, by name.
    """
    section, _, rest = name.partition("/")
    owner = rest.rpartition("/")[0] if section == "state" else rest
    like = parameters.get(owner)
    if section == "param" and (like is None or tuple(like.shape) != stored.shape):
        have = f"has shape {tuple(like.shape)} here" if like is not None else "does not exist here"
        raise CheckpointError(f"the checkpoint's parameter {owner!r} of shape {stored.shape} {have}")
    if like is not None and tuple(like.shape) == stored.shape and section in ("param", "state"):
        return region_of(like.detach()), like
    return whole_region(stored), None


def whole_region(stored: Stored) -> Region:
    """All of a stored tensor."""
    return Region(stored.shape, (0,) * len(stored.shape), stored.shape)


def _as_tensor(value: object, key: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    raise CheckpointError(f"optimizer state {key!r} is a {type(value).__name__}: only tensors and numbers can be saved")
