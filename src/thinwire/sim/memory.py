"""Memory: simulated workers that are bit-equal in something hold one copy of it together.

What an algorithm declares `replicated` changes in `apply` and nowhere else, on each worker in turn. Around it a worker gets a
copy of its own, and gives it back afterwards where another worker has come to the same bits: 1,024 workers then hold one copy
of the parameters or the anchor, and the one that runs has a second. Gradients are freed when a worker waits for a round: its
message is made by then. Results are the same bits as without all this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.core.optimizer import Algorithm
from thinwire.core.wrapper import Wrapper
from thinwire.sim.world import World

_Key = tuple[object, ...]  # which tensor of an optimizer
_Set = Callable[[Tensor], None]


class SharedMemory:
    """One copy of what is bit-equal on the workers of a world.

    For training loops that leave replicated state to the optimizer: what else writes into it in place writes for all workers.

    Args:
        world: whose workers they are.
    """

    def __init__(self, world: World):
        """Nothing is shared yet."""
        self._world = world
        self._newest: dict[_Key, Tensor] = {}  # nobody writes to these

    def adopt(self, optimizer: Algorithm) -> None:
        """Share what this worker's optimizer declares replicated, from now on; called by the worker, once per optimizer."""
        optimizer.engine.writing = lambda: self._writing(optimizer)
        self._world.when_idle(optimizer.link.data_rank, lambda purpose: _free_gradients(optimizer, purpose))
        self._share(optimizer)

    @contextmanager
    def _writing(self, optimizer: Algorithm) -> Iterator[None]:
        for _, mine, put in _replicated(optimizer):
            put(mine.clone())
        yield
        self._share(optimizer)

    def _share(self, optimizer: Algorithm) -> None:
        for key, mine, put in _replicated(optimizer):
            theirs = self._newest.get(key)
            if theirs is not None and _same_bits(mine, theirs):
                put(theirs)
            else:
                self._newest[key] = mine


def _replicated(optimizer: Algorithm) -> Iterator[tuple[_Key, Tensor, _Set]]:
    """Every tensor that is bit-equal on all workers at any time, and what puts another in its place."""
    inner = optimizer.inner.state if isinstance(optimizer, Wrapper) and "inner" in optimizer.replicated else {}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for i, p in enumerate(trained):
        if "param" in optimizer.replicated:
            yield ("param", i), p.data, _setter_of(p)
        slots = {name: t for name, t in optimizer.own_state[p].items() if name in optimizer.replicated}
        for name, t in slots.items():
            yield ("slot", name, i), t, _setter_in(optimizer.own_state[p], name)
        for name, t in list(inner.get(p, {}).items()):
            if isinstance(t, Tensor):
                yield ("inner", name, i), t, _setter_in(inner[p], name)


def _setter_of(p: Tensor) -> _Set:
    def put(value: Tensor) -> None:
        p.data = value

    return put


def _setter_in(entries: dict[str, Any], name: str) -> _Set:
    def put(value: Tensor) -> None:
        entries[name] = value

    return put


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Also of NaN, and not of 0 and -0."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(_bits(a), _bits(b))


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)


def _free_gradients(optimizer: Algorithm, purpose: str) -> None:
    """A worker that waits for a round has made its message; before other messages it may still need its gradients."""
    if purpose == "round":
        optimizer.zero_grad()
