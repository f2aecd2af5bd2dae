"""What a checkpoint of another number of workers or shards does not hold, and what takes its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.merged_state import PREFIX, READY
from thinwire.core.optimizer import Algorithm
from thinwire.core.owning import OWED
from thinwire.errors import CheckpointError


def taken_from_first(key: str, optimizer: Algorithm) -> bool:
    """Whether a worker of another world takes this over: what is replicated, and of the first worker what a joiner may copy."""
    owner, section, *_ = key.split("/")
    kind = key.rpartition("/")[2] if section == "state" else section
    return owner == "replicated" or section in ("buffer", "extra") or optimizer.joiner_copies(kind)


def owed_of_all(key: str, optimizer: Algorithm) -> tuple[int, str, str] | None:
    """Of a key that holds what an owner has left out: the owner, the name of the parameter and the slot; None of any other."""
    owner, _, rest = key.partition("/state/")
    name, _, slot = rest.rpartition("/")
    slot = slot.partition("@")[0]
    if slot not in optimizer.owed_slots or not owner.removeprefix("worker").isdecimal():
        return None
    return int(owner.removeprefix("worker")), name, slot


def fill_for_other_shards(
    parts: dict[str, Tensor], elsewhere: set[str], names: Mapping[int, str], optimizer: Algorithm
) -> list[str]:
    """Start again with the coded slots of a worker that was sharded in another way; says which."""
    fresh, missing = optimizer.state_dict()["state"], elsewhere - parts.keys()
    lost = set()
    for index, name in names.items():
        for key, value in fresh.get(index, {}).items():
            if f"state/{name}/{key}" in missing:
                parts[f"state/{name}/{key}"] = torch.zeros_like(value)
                lost.add(key)
    return [f"re-initialised, since workers were sharded in another way: {', '.join(sorted(lost))}"] if lost else []


def fill_for_another_route(
    parts: dict[str, Tensor], slots: Sequence[str], names: Mapping[int, str], optimizer: Algorithm
) -> str:
    """Drop what owners owed where none average messages now, and begin at zero where none did before; says so.

    Args:
        parts: by name; changed in place.
        slots: that the optimizer had which wrote the checkpoint.
        names: of the parameters by their number in the state dict.
        optimizer: that will load it.
    """
    note = optimizer.owed_elsewhere(slots)
    fresh = optimizer.state_dict()["state"] if note else {}
    for index, name in names.items() if note else ():
        for key, value in fresh.get(index, {}).items():
            if key in optimizer.owed_slots:
                parts.setdefault(f"state/{name}/{key}", torch.zeros_like(value))
    for key in [key for key in parts if note and key.startswith("state/")]:
        slot = key.rpartition("/")[2].partition("@")[0]
        if slot.startswith(OWED) and slot in slots and slot not in optimizer.owed_slots:
            del parts[key]
    return note


def fill_for_another_world(
    parts: dict[str, Tensor],
    parameters: Mapping[str, Tensor],
    names: Mapping[int, str],
    optimizer: Algorithm,
    workers: int,
    owed: Mapping[tuple[int, str, str], Tensor],
) -> list[str]:
    """Complete what replicated state alone does not hold; says what was re-initialised.

    Args:
        parts: by name; completed in place.
        parameters: of the model.
        names: of the parameters by their number in the state dict.
        optimizer: that will load it.
        workers: how many wrote it.
        owed: what each of them had left out as an owner, by worker, name and slot.
    """
    notes = []
    if optimizer.joiner_copies("param"):
        notes.append("all workers start from the parameters of the first, and from its averaged states")
    elif "param" not in optimizer.replicated:
        if "anchor" not in optimizer.replicated:
            raise CheckpointError(f"{type(optimizer).__name__} needs the {workers} workers that wrote it: no shared parameters")
        for name, p in parameters.items():
            if f"param/{name}" not in parts:  # frozen parameters are there already
                parts[f"param/{name}"] = parts.get(f"state/{name}/anchor", p.detach())
        notes.append(f"all workers start from the parameters that the {workers} workers agreed on last")
    notes += _deal_again(parts, owed, names, optimizer, workers)
    fresh = optimizer.state_dict()["state"]
    lost = set()
    for index, name in names.items():
        for key, value in fresh.get(index, {}).items():
            if not key.startswith(PREFIX) and f"state/{name}/{key}" not in parts:
                parts[f"state/{name}/{key}"] = torch.zeros_like(value)
                lost.add(key)
    if not optimizer.joiner_copies("inner") and "inner" not in optimizer.replicated and hasattr(optimizer, "inner"):
        lost.add("the inner optimizer's state")
    if any(key.startswith("buffer/") for key in parts):
        notes.append("buffers such as BatchNorm's statistics are those of the first worker")
    lost -= {READY, "invalid_in_flight", "outgoing"}  # the latter two are meaningless without the round they belong to
    if lost:
        notes.append(f"re-initialised, since it was each worker's own: {', '.join(sorted(lost))}")
    return notes


def _deal_again(
    parts: dict[str, Tensor],
    owed: Mapping[tuple[int, str, str], Tensor],
    names: Mapping[int, str],
    optimizer: Algorithm,
    workers: int,
) -> list[str]:
    """Give this worker, as an owner of other blocks, what the owners before it have left out of them."""
    dealt = set()
    for slot, deal in optimizer.redealt(workers).items():
        for index, again in deal.items():
            before = [owed.get((worker, names[index], slot)) for worker in range(workers)]
            if all(t is not None for t in before):
                parts[f"state/{names[index]}/{slot}"] = again([t for t in before if t is not None])
                dealt.add(slot)
    return [f"dealt to the owners of today: {', '.join(sorted(dealt))}"] if dealt else []
