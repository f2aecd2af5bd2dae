"""LocalSGD: train alone for H steps, then average the parameters.

    every step, every worker i:   x_i <- InnerOpt(x_i, g_i)
    every H steps:                x   <- mean_i x_i              all workers go on from x

Stich, "Local SGD converges fast and communicates little" (2019). A copy of the last average is kept (the slot "anchor"), so
that a worker whose parameters are invalid can go back to it. `MTDAO` averages the inner optimizer's moments too: with a
plain Adam inside, that is Local Adam.

With P parameters and M workers a round's message is N = b (P + M) bytes with b bytes per value, a ring sends 2 N (M - 1) / M of
it per worker, and there is one round every H steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch.optim import Optimizer

from thinwire.codecs import Codec
from thinwire.core.optimizer import PolicyOptions
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.slots import overwrite
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError
from thinwire.links.base import Link
from thinwire.schedules import Schedule


class LocalSGD(Wrapper):
    """Average the parameters every H steps.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), thinwire.connect(), H=8)

    Args:
        inner: any torch optimizer; its state stays on the worker.
        link: this worker's end of the wire.
        H: local steps per round, or a `Schedule`.
        codec: dense, not narrower than the parameters, since they are sent themselves; to send differences in few bits use
            `DiLoCo` with outer_lr=1 and outer_momentum=0, which is the same method.
        options: see `thinwire.Policy`.
    """

    name = "local-sgd"
    synced = frozenset({"param"})
    replicated = frozenset({"anchor"})
    sends_as_they_are = True
    rounds_leave_inner = True

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 32,
        codec: Codec | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`."""
        super().__init__(inner, link, H=H, codec=codec, slots={"anchor": "param"}, settings={"H": H}, **options)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        for p in group["params"]:
            if p.requires_grad and not self.codecs.at(1).holds(p.dtype):
                raise ConfigError(
                    f"LocalSGD sends parameters themselves, so {self.codecs!r} would round {p.dtype} weights at every round: "
                    "use a dense codec at least as wide, or DiLoCo(outer_lr=1, outer_momentum=0), which sends differences"
                )

    def send(self) -> Outgoing:
        """The parameters."""
        return self.outgoing(self.params())

    def apply(self, arrived: Arrived) -> None:
        """Everyone takes the mean."""
        before, mean = self.anchor_before(arrived), arrived.mean
        if arrived.share < 1:
            mean = [a.lerp(m.to(a.dtype), arrived.share) for a, m in zip(self.slot("anchor"), mean, strict=True)]
        overwrite(self.slot("anchor"), mean)  # x <- mean_i x_i
        self.move_to_anchor(arrived, before=before)
