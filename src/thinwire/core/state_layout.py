"""Which state an algorithm keeps, and whose it is: what a checkpoint has to know of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire.core.slots import COUNTERS

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

_INNER = "inner"  # what the keys of the inner optimizer's entries begin with


@dataclass(frozen=True)
class StateEntry:
    """One entry of the state of a parameter.

    Attributes:
        key: in the state dict, such as "anchor" or "inner.exp_avg".
        replicated: bit-equal on all workers at any time; otherwise each worker has its own.
        coded: in the domain of the codec, so that its shape is not the parameter's and differs between shards.
        inner: belongs to the inner optimizer.
        joiner_copies: a worker that joins may copy it from another one.
    """

    key: str
    replicated: bool
    coded: bool
    inner: bool
    joiner_copies: bool


@dataclass(frozen=True)
class ParameterState:
    """A parameter and the entries of its state.

    Attributes:
        index: its number in the state dict.
        param: the parameter.
        trained: it takes part in training; a frozen one is the same on all workers.
        replicated: its values are bit-equal on all workers at any time.
        entries: of its state, in the order of the state dict; none of a frozen one.
    """

    index: int
    param: Tensor
    trained: bool
    replicated: bool
    entries: tuple[StateEntry, ...]


@dataclass(frozen=True)
class StateLayout:
    """What `state_layout` says of an optimizer.

    Attributes:
        parameters: all of them, in the order of the state dict.
        slots: names of the state that the algorithm itself keeps per parameter.
        coded: those of them in the domain of the codec.
        counters: keys of every parameter group that count steps and rounds.
    """

    parameters: tuple[ParameterState, ...]
    slots: tuple[str, ...]
    coded: tuple[str, ...]
    counters: tuple[str, ...]

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that take part in training."""
        return [each.param for each in self.parameters if each.trained]


def state_layout(optimizer: Algorithm) -> StateLayout:
    """Which entries the state dict of an optimizer has for each parameter, and whose they are."""
    trained = {id(p) for p in optimizer._active}
    coded = [name for name, start in optimizer._slots.items() if start in ("coded", "owed")]
    saved = optimizer.state_dict()["state"]

    def entry(key: str) -> StateEntry:
        inner = key.startswith(_INNER)
        return StateEntry(
            key,
            replicated=(_INNER if inner else key) in optimizer.replicated,
            coded=key in coded,
            inner=inner,
            joiner_copies=optimizer.joiner_copies(key),
        )

    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [
        ParameterState(
            index,
            p,
            trained=id(p) in trained,
            replicated=id(p) not in trained or "param" in optimizer.replicated,
            entries=tuple(entry(key) for key in saved.get(index, {})),
        )
        for index, p in enumerate(everyone)
    ]
    return StateLayout(tuple(parameters), tuple(sorted(optimizer._slots)), tuple(coded), COUNTERS)


def check_state(optimizer: Algorithm, state_dict: Mapping[str, Any]) -> None:
    """Raise a `CheckpointError` for a state dict that `optimizer.load_state_dict` would refuse."""
    optimizer._checked(state_dict)
