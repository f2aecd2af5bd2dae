"""Counts the collectives of torch.distributed that are not thinwire's, which only its links call."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


@contextlib.contextmanager
def counted() -> Iterator[tuple[list[str], list[str]]]:
    """Within it every collective is noted: the names of ours, and the names and callers of those of others.

    What torch's DDP does in C++ is not seen: test that no module is wrapped in it.
    """
    ours: list[str] = []
    foreign: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename.replace("\\", "/")
            if "/torch/distributed/" not in caller:  # else it is a part of a collective that was noted already
                mine = "/thinwire/links/" in caller
                (ours if mine else foreign).append(name if mine else f"{name} of {caller}")
            return original(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in NAMES}
    try:
        for name, original in originals.items():
            setattr(dist, name, counting(name, original))
        yield ours, foreign
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
