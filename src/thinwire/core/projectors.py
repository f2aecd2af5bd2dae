"""Projecting: methods whose moments live in a subspace, with a projector per matrix that is taken anew from what all did.

A method on top of it keeps the projectors in the slot "Q", and has `projector_state` as the last of its `states` where they are
not taken from the averaged difference of the parameters. The maths is that of `thinwire.maths.low_rank`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs import Codec
from thinwire.core.outgoing import Arrived
from thinwire.core.states import Derived, StateAveraging
from thinwire.core.wrapper import Wrapper
from thinwire.maths import low_rank
from thinwire.schedules import Schedule


class Projecting(StateAveraging):
    """Base of the methods that average states in rounds and then take new projectors.

    Attributes:
        projection: from what all did ("global"), or each worker's own gradient ("local").
        source: what global projectors are taken from.
        rotate: turn the moments into the basis of a new projector.
        from_start: what is taken over from a low-rank Adam that took the steps of a start: "Q", "v" too, or "all".
        clip: what the gradients at hand are multiplied by; 0 where there are none to take a projector from.
    """

    needs_whole_tensors = True  # singular vectors of a shard are not those of the matrix
    takes_over = ("Q",)
    projection: str = "global"
    source: low_rank.Source = "difference"
    rotate: bool = True
    from_start: str = "Q"
    clip: float = 0.0
    _sources: Sequence[Tensor] = ()  # of the projectors that a round brings

    def projector_state(self, period: Schedule, codec: Codec) -> Derived:
        """The projectors as a state that is made of averaged gradients or sketches."""
        return Derived("Q", lambda: self.slot("Q"), period, codec, give=self._given, outer=self._found)

    def projected(self) -> list[int]:
        """Numbers of the parameters that have a projector."""
        return [i for i, p in enumerate(self._active) if "Q" in self.state[p]]

    def move(self, a: list[Tensor], D: list[Tensor]) -> None:
        """Add an averaged difference to the anchor; new projectors may be taken from it."""
        torch._foreach_add_(a, D)  # a <- a + D
        if self.source == "difference":
            known = D if self.projection == "global" else self.gradients()
            self._sources = [low_rank.oriented(known[i]) for i in self.projected()]

    def _given(self) -> list[Tensor]:
        """What this worker gives for new projectors; zeros where it skipped the step, and at the end, without a gradient."""
        G, Q, flight = self.gradients(), self.slot("Q"), self.engine.current
        clip = 0.0 if flight.last else self.clip
        found = zip(self.projected(), Q, strict=True)
        return [low_rank.contribution(G[i], q, self.source, round=flight.number, clip=clip) for i, q in found]

    def _found(self, _: list[Tensor], mean: list[Tensor]) -> None:
        self._sources = mean

    def apply(self, arrived: Arrived) -> None:
        """All states that are due, then a new projector where the parameters are among them."""
        super().apply(arrived)
        if self.whole_round():
            sources, self._sources = self._sources, ()  # not kept: they may be as large as the model
            which, groups = self.projected(), self.groups()
            params, settings = [self._active[i] for i in which], [groups[i] for i in which]
            low_rank.refresh(params, self.state, settings, sources, turn=self.rotate)

    def joiner_copies(self, key: str) -> bool:
        """The number of steps too: averaged moments must not be corrected for bias again."""
        return super().joiner_copies(key) or (key in ("step", "step_of_reset") and self.projection == "global")

    def taken_over(self, before: Optimizer) -> None:
        """Go on with the moments of a low-rank Adam that took the steps of a start, as far as `from_start` says."""
        if self.from_start == "Q" or not isinstance(before, Wrapper):
            return
        theirs = {p: group for group in before.param_groups if "rank" in group for p in group["params"]}
        for p, group in zip(self._active, self.groups(), strict=True):
            if p in theirs:
                known = before.inner.state[p]
                low_rank.go_on(self.state[p], known, group, theirs[p], momenta=self.from_start == "all")
