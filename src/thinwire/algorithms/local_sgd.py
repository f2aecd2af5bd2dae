"""LocalSGD: train alone for H steps, then average the parameters (and, as Local Adam, the optimizer's moments too).

    every step, every worker i:   x_i <- InnerOpt(x_i, g_i)
    every H steps:                x   <- mean_i x_i              all workers go on from x
                                  s   <- mean_i s_i              for each inner state s, with average_inner=True

Stich, "Local SGD converges fast and communicates little" (2019); Local Adam: Cheng and Glasgow (2024). A copy of the last
average is kept (the slot "anchor"), so that a worker whose numbers went bad has a place to go back to.

With P parameters, M workers and S averaged states (0, or 2 for Adam), a round's message is N = b (P (1 + S) + M) bytes with
b bytes per value, a ring sends 2 N (M - 1) / M of it per worker, and there is one round every H steps.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.algorithm import Policy
from thinwire.codecs import Codec, Dense
from thinwire.errors import ConfigError
from thinwire.links.base import Link
from thinwire.schedules import Schedule
from thinwire.wrapper import Wrapper


class LocalSGD(Wrapper):
    """Average the parameters every H steps.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), thinwire.connect(), H=8)

    Args:
        inner: any torch optimizer; its state stays on the worker unless `average_inner` is set.
        link: this worker's end of the wire.
        H: local steps per round, or a `Schedule`.
        average_inner: average the inner optimizer's moments as well (Local Adam), for 1 + S times the bytes.
        codec: dense, not narrower than the parameters, since they are sent themselves; to send differences in few bits use
            `DiLoCo` with outer_lr=1 and outer_momentum=0, which is the same method.
        policy: see `thinwire.algorithm.Policy`.
    """

    name = "local-sgd"
    synced = frozenset({"param"})
    replicated = frozenset({"anchor"})

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 32,
        average_inner: bool = False,
        codec: Codec | None = None,
        **policy: Unpack[Policy],
    ):
        """Wrap `inner`."""
        settings = {"H": H, "average_inner": average_inner}
        super().__init__(inner, link, H=H, codec=codec, slots={"anchor": "param"}, settings=settings, **policy)
        self.average_inner = average_inner
        if average_inner:
            self.synced = frozenset({"param", "inner"})
        for p in self._active:
            wire = self.codec.wire_dtype if isinstance(self.codec, Dense) else None
            if wire is None or torch.promote_types(p.dtype, wire) != wire:
                raise ConfigError(
                    f"LocalSGD sends parameters themselves, so {self.codec!r} would round {p.dtype} weights at every round: "
                    "use a dense codec at least as wide, or DiLoCo(outer_lr=1, outer_momentum=0), which sends differences"
                )

    def message(self) -> list[Tensor]:
        """The parameters, and the moments where they are averaged too."""
        return [*self.params(), *self._moments()]

    def update(self) -> None:
        """One round: everyone takes the mean."""
        x_and_s = self.message()
        mean, _ = self.average(x_and_s)  # mean_i x_i, mean_i s_i
        self.commit()
        for mine, agreed in zip(x_and_s, mean, strict=True):
            mine.copy_(agreed)
        for anchor, agreed in zip(self.slot("anchor"), mean, strict=False):
            anchor.copy_(agreed)

    def _moments(self) -> list[Tensor]:
        """The inner states to average: the same list on every worker, whether or not its inner optimizer has made them yet."""
        if not self.average_inner:
            return []
        self.make_inner_state()
        moments = self.inner_state()
        return [t for key in sorted(moments) for t in moments[key]]
