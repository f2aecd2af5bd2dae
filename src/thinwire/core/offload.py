"""Offload: state that is needed in rounds only, and waits for the next one in the memory of the host.

The anchor and the outer momenta of the DiLoCo family are read and changed once in H steps. With `offload="host"` they are on
the device for the time of a round only:

    round begins   host to device, from pinned memory: the host goes on meanwhile
    round          everything as without
    round ends     device to host, into the same pinned memory; who looks at it on the host waits until it is there

Between rounds a device has 4 bytes per parameter and slot more for activations; in a round it needs what it would need without.
Numbers are copied bit for bit, so nothing else changes. For parameters on a CPU nothing is done at all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from thinwire.errors import ConfigError, LinkError, check_choice
from thinwire.links.base import Link
from thinwire.sharding.shards import local

if TYPE_CHECKING:
    from thinwire.core.slots import SlotOptimizer

Place = Literal["none", "host"]

PATIENCE = 600.0  # seconds that the device may take for what it was given one step ago


class Offload:
    """The slots of one optimizer that rest on the host.

    Args:
        names: of the slots.
    """

    def __init__(self, names: Collection[str]):
        """Nothing rests yet."""
        self.names = frozenset(names)
        self._copied: torch.Event | None = None  # recorded once the last copies to the host were begun

    @classmethod
    def of(cls, place: Place, names: Collection[str]) -> Offload | None:
        """That of a setting; None where nothing is to be offloaded."""
        check_choice("offload", place, ("none", "host"))
        return cls(names) if place == "host" else None

    @staticmethod
    def check(params: Sequence[Tensor], link: Link) -> None:
        """Refuse links of which rounds are not made of a beginning and an end."""
        if params[0].device.type != "cpu" and (link.elastic is not None or link.two_level is not None):
            told = "workers come and go" if link.elastic is not None else "workers are sites"
            raise ConfigError(
                f"offload='host' is for links whose workers stay the same and are processes; here {told}: leave it out"
            )

    def rest(self, p: Tensor, entries: dict[str, Any]) -> None:
        """Move the slots of a parameter to the host; those that are made first are never read before that."""
        if p.device.type == "cpu":
            return
        if local(p) is not p:
            raise ConfigError("offload='host' needs parameters that are not sharded: leave it out, or do not shard")
        for name in self.names & entries.keys():
            host = torch.empty(entries[name].shape, dtype=entries[name].dtype, device="cpu", pin_memory=p.is_cuda)
            entries[name] = host.copy_(entries[name])

    @contextmanager
    def at_hand(self, optimizer: SlotOptimizer, which: Collection[int]) -> Iterator[None]:
        """Within it the slots of the parameters with these numbers are on their devices."""
        resting: list[tuple[dict[str, Any], str, Tensor]] = []
        for p in (optimizer._active[i] for i in which if optimizer._active[i].device.type != "cpu"):
            entries = optimizer.own_state[p]
            for name in self.names & entries.keys():
                if (host := entries[name]).device.type == "cpu":
                    resting.append((entries, name, host))
                    entries[name] = host.to(p.device, non_blocking=True)
        try:
            yield
        finally:
            devices = [entries[name].device for entries, name, _ in resting]
            for entries, name, host in resting:
                entries[name] = host.copy_(entries[name], non_blocking=True)
            if devices:
                self._copied = recorded(devices[-1])

    def wait(self) -> None:
        """Before somebody looks at what rests: until it is there."""
        if self._copied is not None:
            copied, self._copied = self._copied, None
            wait_for(copied)


def recorded(device: torch.device) -> torch.Event:
    """An event that happens once the device has done all that it was given so far."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device) if torch.accelerator.is_available() else None)
    return event


def wait_for(event: torch.Event) -> None:
    """Wait for an event; the device goes on with what it was given since.

    Raises:
        LinkError: it did not happen within `PATIENCE`.
    """
    deadline = time.monotonic() + PATIENCE
    while not event.query():
        if time.monotonic() > deadline:
            raise LinkError(f"the device has not ended the step before within {PATIENCE:g} s: does a worker take no part?")
        time.sleep(1e-4)


class Offloading:
    """Of an optimizer: slots that may rest on the host between rounds."""

    offload: Offload | None = None  # which, where any do
    _active: list[Tensor]

    def at_hand(self, which: Collection[int] | None = None) -> AbstractContextManager[None]:
        """Within it what rests on the host is where its parameter is: of these parameters, by default of all."""
        if self.offload is None:
            return nullcontext()
        return self.offload.at_hand(cast("SlotOptimizer", self), range(len(self._active)) if which is None else which)

    def wait_for_host(self) -> None:
        """Before somebody looks at what rests on the host: until all of it is there."""
        if self.offload is not None:
            self.offload.wait()
