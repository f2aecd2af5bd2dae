"""Error feedback of messages that hold differences: what a codec leaves out of one is added to the next.

    sent     q_i <- C(f r_i + D_i)
    then     r_i <- f r_i + D_i - q_i      of a message that was counted; where it was not, or the round is refused, r_i stays

`DecoupledDiLoCo` and `DeMo` need none of it: the momentum that they send from is their feedback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.codecs import Codec, CodecSchedule
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError

USUAL = 0.9  # less than all of it: part of what a codec leaves out is noise of the worker, which is better forgotten


def feedback_of(given: float | None, codec: Codec | CodecSchedule | None, merge: str) -> float:
    """The f of a method that sends differences: as it was given, else by what its codec leaves out.

    Args:
        given: None for `USUAL` where some codec is not exact and messages hold plain differences, and 0 elsewhere.
        codec: what is sent; None for exact differences.
        merge: rule of `thinwire.maths.outer.Merge`.

    Raises:
        ConfigError: there can be no such feedback.
    """
    if given is None:
        lossy = codec is not None and not all(one.holds(torch.float32) for one in CodecSchedule.of(codec).codecs)
        return USUAL if lossy and merge == "mean" else 0.0
    if not 0 <= given <= 1:
        raise ConfigError(f"feedback must be from 0 to 1, got {given!r}")
    if given and merge != "mean":
        raise ConfigError(
            f"feedback={given:g} needs merge='mean': lengths are not differences, got merge={merge!r}; leave feedback out, or "
            "give 0"
        )
    return given


class Feedback(Wrapper):
    """Base of methods that send differences D_i in the slot "residual" of which r_i is kept, where `feedback` is above 0."""

    feedback: float = 0.0  # f; to be set before the slots are made
    rests_on_host: ClassVar[tuple[str, ...]] = (*Wrapper.rests_on_host, "residual")

    def wants(self, slot: str, group: Mapping[str, Any]) -> bool:
        """A residual is kept only with feedback."""
        return super().wants(slot, group) and (slot != "residual" or self.feedback > 0)

    def fed_outgoing(self, D: list[Tensor], **how: Any) -> Outgoing:
        """A message of the differences of what is due, with what was left out of those before."""
        fed = self.with_feedback(D, self.which(self.due), "residual", self.feedback)  # f r_i + D_i
        return self.outgoing(fed, want_sent=True, source=D, **how)

    def keep_rest(self, arrived: Arrived) -> None:
        """What others could not read of this worker's message; one that was not counted keeps its steps in its parameters."""
        if arrived.included:
            rest = torch._foreach_sub(arrived.outgoing.tensors, arrived.sent)
            torch._foreach_copy_(self.part("residual", arrived.which), rest)  # r_i <- f r_i + D_i - q_i
