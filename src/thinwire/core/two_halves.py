"""TwoHalves: the base of methods that can let a round travel during the next step.

A round is sent in one half and applied in the other. Without delay both happen in the same step. With it, a step first
applies the round before and then sends its own, which is under way during the next forward and backward pass:

    no delay:    backward t | send t, wait, apply t | backward t+1 | send t+1, wait, apply t+1
    delay:       backward t | apply t-1, send t     | backward t+1 | apply t, send t+1          waits only for what is late

What is under way is not part of a checkpoint. It is made again from the state it was made of: state that was sent changes
only when the round is applied, so `send` with the number of the round makes the same message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from thinwire.core.exchange import PendingShare
from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError, RoundAborted
from thinwire.links.base import Link


class TwoHalves(Algorithm):
    """Base of methods with a `send` and an `apply`.

    Args:
        params: see `Algorithm`.
        link: see `Algorithm`.
        defaults: see `Algorithm`.
        delay: apply a round one step later.
        base: further arguments of `Algorithm`.
    """

    def __init__(self, params: Iterable[Any], link: Link, *, defaults: dict[str, Any], delay: bool, **base: Any):
        """Nothing is under way yet."""
        if isinstance(params, Optimizer):
            what = f"{type(self).__name__} is the optimizer itself"
            raise ConfigError(f"{what}: give it model.parameters(), not a {type(params).__name__}")
        self.delay = delay
        self._underway: PendingShare | None = None
        super().__init__(params, link, defaults={**defaults, "underway": 0}, **base)
        self.state[self._active[0]]["withdrew"] = torch.tensor(0.0)

    @property
    def withdrew(self) -> bool:
        """Whether this worker had nothing good to give to the round that is under way."""
        return bool(self.state[self._active[0]]["withdrew"])

    @withdrew.setter
    def withdrew(self, bad: bool) -> None:
        self.state[self._active[0]]["withdrew"].fill_(float(bad))

    def send(self, round: int | None = None) -> PendingShare:
        """Put a round on its way. Where a number is given, that round once more: nothing new enters it."""
        raise NotImplementedError

    def apply(self, sent: PendingShare) -> None:
        """Wait for a round, commit it and apply it."""
        raise NotImplementedError

    def update(self) -> None:
        """Both halves of one round, or the second half of the one before and the first half of this one."""
        if not self.delay:
            self.apply(self.send())
            return
        refusal = None
        try:
            self._deliver()
        except RoundAborted as refused:  # this step's gradient must not be lost
            refusal = refused
        self._underway = self.send()
        self._set_counter("underway", self.rounds)
        if refusal is not None:
            raise refusal

    def _deliver(self) -> None:
        """Apply the round that is under way, if there is one; after a resume it is sent again first."""
        round = self.param_groups[0]["underway"]
        if round:
            sent, self._underway = self._underway or self.send(round), None
            self._set_counter("underway", 0)
            self.apply(sent)

    def finish(self) -> None:
        """Apply the round that is still under way; call it on all workers after the last step."""
        with torch.no_grad():
            try:
                with self._overflow_named():
                    self._deliver()
            except RoundAborted as refusal:
                self.refuse(refusal)
            self.average_buffers()

    def begin_anew(self) -> None:
        """The round that was under way was made of state that is no more."""
        self._underway = None
        self._set_counter("underway", 0)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in any algorithm; what was under way before is forgotten."""
        super().load_state_dict(state_dict)
        self._underway = None
        if not self.delay:  # what was under way has not left the state: the next round carries it along
            self._set_counter("underway", 0)
