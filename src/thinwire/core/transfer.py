"""The state of a run in one object: what a worker that joins needs, and what a checkpoint of an elastic run holds.

Tensors in the safetensors format, which holds numbers and nothing that could run, and a JSON text beside them: replicated
state, what a joiner copies of another's own, the counters, the learning rates, and whatever the caller adds. What is each
worker's own, such as error feedback, begins at zero on a worker that joins.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from thinwire.core.slots import COUNTERS, overwrite
from thinwire.core.state_layout import state_layout
from thinwire.errors import CheckpointError
from thinwire.payload import describe

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

_FORMAT = 1
_BESIDE = 1 << 20  # bytes of JSON, at most


def most_nbytes(opt: Algorithm) -> int:
    """Bytes that the packed state of an optimizer may have."""
    tensors = _parts(opt).values()
    return sum(t.numel() * t.element_size() for t in tensors) + 256 * len(tensors) + 2 * _BESIDE


def pack(opt: Algorithm, extra: dict[str, Any]) -> bytes:
    """The state of an optimizer right after a round, and `extra` (JSON)."""
    told = {
        "format": _FORMAT,
        "algorithm": type(opt).__name__,
        "counters": {name: opt.param_groups[0][name] for name in COUNTERS},
        "lr": [float(group["lr"]) for group in opt.param_groups if "lr" in group],
        "averaged": opt.buffer_average.averaged,
        "extra": extra,
    }
    return save({name: t.detach().cpu().contiguous() for name, t in _parts(opt).items()}, {"thinwire": json.dumps(told)})


def unpack(opt: Algorithm, raw: bytes) -> dict[str, Any]:
    """Take over a packed state; checked as a whole before anything changes. Returns what was `extra`.

    Raises:
        CheckpointError: it is damaged, or of another method or model.
    """
    told, tensors, wanted = _read_text(raw), _read_tensors(raw), _parts(opt)
    if told["algorithm"] != type(opt).__name__:
        raise CheckpointError(f"a state of {told['algorithm']!s:.40}, not of {type(opt).__name__}")
    if odd := sorted(tensors.keys() ^ wanted.keys()):
        raise CheckpointError(f"{odd[0][:80]!r} is in one of the state and this optimizer only")
    for name, t in wanted.items():
        if tensors[name].shape != t.shape or tensors[name].dtype != t.dtype:
            raise CheckpointError(f"{name!r} is {describe(tensors[name])}, where this optimizer has {describe(t)}")
    state = opt.state_dict()
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                entries[key] = tensors.get(f"{index}/{key}", torch.zeros_like(value))
    for group in state["param_groups"]:
        group.update({name: int(told["counters"][name]) for name in COUNTERS})
    opt.load_state_dict(state)
    overwrite(opt.params(), opt.agreed() or [tensors[f"{index}/param"] for index, _ in opt._indexed()])
    if told.get("averaged") is True:
        opt.buffer_average.agree_on([tensors[name] for name in _buffers(opt)])
    return told["extra"]


def read_extra(raw: bytes) -> dict[str, Any]:
    """What was `extra`, without looking at the tensors."""
    return _read_text(raw)["extra"]


def _read_tensors(raw: bytes) -> dict[str, Tensor]:
    try:
        return load(raw)
    except Exception as cause:  # safetensors has an error of its own, and raises others for other damage
        raise CheckpointError(f"not a packed state: {type(cause).__name__} {str(cause)[:100]}") from None


def _read_text(raw: bytes) -> dict[str, Any]:
    try:
        length = int.from_bytes(raw[:8], "little")
        if not 0 < length <= min(len(raw) - 8, 2 * _BESIDE):
            raise ValueError("its header has no length that can be")
        told = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["thinwire"])
        if told["format"] != _FORMAT:
            raise ValueError(f"format {told['format']!r}, where this version reads {_FORMAT}")
        if not all(type(told["counters"][name]) is int and told["counters"][name] >= 0 for name in COUNTERS):
            raise ValueError("counters that are none")
        if not isinstance(told["extra"], dict) or not isinstance(told["algorithm"], str):
            raise TypeError("extra")
        return told
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise CheckpointError(f"not a packed state: {type(cause).__name__} {str(cause)[:100]}") from None


def _parts(opt: Algorithm) -> dict[str, Tensor]:
    """What is packed, by name: the parameters as all agreed on them, and state that is replicated or that a joiner copies."""
    found = _buffers(opt)
    saved = opt.state_dict()["state"]
    if opt.agreed() is None:  # else they are among the state
        found |= {f"{index}/param": p.detach() for index, p in opt._indexed()}
    for parameter in state_layout(opt).parameters:
        for entry in parameter.entries:
            value = saved[parameter.index][entry.key]
            if (entry.replicated or entry.joiner_copies) and isinstance(value, Tensor):
                found[f"{parameter.index}/{entry.key}"] = value
    return found


def _buffers(opt: Algorithm) -> dict[str, Tensor]:
    """The values of the buffers that all workers agreed on last, by name."""
    return {f"buffer/{number}": b for number, b in enumerate(opt.buffer_average.agreed)}
