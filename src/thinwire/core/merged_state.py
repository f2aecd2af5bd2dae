"""The state of a wrapper and of its inner optimizer as one mapping: what `optimizer.state` of a `Wrapper` is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

PREFIX, READY = "inner.", "inner_ready"

Entries = Mapping[str, Any]


class MergedState(MutableMapping[Tensor, Entries]):
    """Parameter -> the wrapper's slots, and the inner optimizer's entries with the prefix "inner.".

    Loaders look here for the names to load. Entries are shown, not kept, so they cannot be changed one by one; those of a
    parameter can be replaced as a whole, as Lightning does to move them to a device.

    Args:
        own: the wrapper's slots.
        inner: the inner optimizer.
        inner_entries: gives what is shown of the inner optimizer's state of a parameter.
    """

    def __init__(self, own: dict[Tensor, dict[str, Any]], inner: Optimizer, inner_entries: Callable[[Tensor], dict[str, Any]]):
        """Show these two."""
        self._own, self._inner, self._inner_entries = own, inner, inner_entries

    def __getitem__(self, p: Tensor) -> Entries:
        """The entries of a parameter; none of one that does not take part, as in any torch optimizer."""
        return MappingProxyType({**self._own[p], **self._inner_entries(p)} if p in self._own else {})

    def __setitem__(self, p: Tensor, entries: Entries) -> None:
        """Replace the entries of a parameter; those of the inner optimizer only where it has made its state."""
        self._own[p] = {k: v for k, v in entries.items() if k != READY and not k.startswith(PREFIX)}
        if entries.get(READY):
            self._inner.state[p] = {k.removeprefix(PREFIX): v for k, v in entries.items() if k.startswith(PREFIX)}

    def __delitem__(self, p: Tensor) -> None:
        """Forget both optimizers' entries of a parameter."""
        del self._own[p]
        self._inner.state.pop(p, None)

    def __iter__(self) -> Iterator[Tensor]:
        """The parameters that take part."""
        return iter(self._own)

    def __len__(self) -> int:
        """Number of parameters that take part."""
        return len(self._own)

    def __contains__(self, p: object) -> bool:
        """Whether a parameter takes part."""
        return p in self._own
