"""StreamingDiLoCo: DiLoCo in fragments, each of which travels while the next steps are computed.

Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", arXiv 2501.18512,
algorithm 2. The parameters are dealt to P fragments; each is due every H steps, the fragments spread evenly over those:

    every step, every worker i:              x_i <- InnerOpt(x_i, g_i)                its state never leaves the worker
    if fragment p is due at step t:          D_i <- a - x_i                           of p's parameters; sent, not waited for
    after step t + tau:                      D   <- mean_i D_i
                                             m   <- mu m + D
                                             a   <- a - eta (D + mu m)                "eta m" without Nesterov's form
                                             x_i <- alpha x_i + (1 - alpha) a         the tau steps since t count by alpha

The next D_i is taken from a, the pure outer value, not from the mixture. With P = 1, tau = 0 and alpha = 0 it is DiLoCo.

Ours, as there: with codecs that are not exact r_i <- f r_i + D_i is sent in place of D_i, and what receivers read is taken off
again (error feedback).

H steps send what one round of DiLoCo does, and with M workers b M bytes more for each fragment beyond the first (b bytes per
value). The largest message is that of the largest fragment. Memory: a slot beside DiLoCo's where tau > 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.codecs import Codec
from thinwire.core.feedback import Feedback, feedback_of
from thinwire.core.fragments import FragmentLayout, Fragments
from thinwire.core.offload import Place
from thinwire.core.optimizer import PolicyOptions, Start
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.slots import overwrite
from thinwire.errors import ConfigError
from thinwire.links.base import Link
from thinwire.maths.outer import Merge, MergeRule, Nesterov


class StreamingDiLoCo(Fragments, Feedback):
    """H local steps of any optimizer; every fragment takes an outer Nesterov step in its turn, tau steps after it was sent.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> opt = thinwire.StreamingDiLoCo(inner, thinwire.connect(), H=32, fragments=4, tau=1)

    Args:
        inner: any torch optimizer (AdamW in the paper); its state stays on the worker.
        link: this worker's end of the wire.
        H: local steps between two rounds of one fragment; 30 and 100 in the paper.
        fragments: how many there are, at most H, or the parameters of each; see `thinwire.core.fragments.block_fragments`.
        layout: of a number of fragments: "balanced" packs tensors by size, "strided" deals them out in turn, "sequential" cuts
            their list into runs.
        tau: steps between sending and applying, below H; 1 in the paper's main runs, up to 5 advised.
        alpha: how much of the local values stays when a fragment is applied; 0.5 in the paper, 0 was better in our runs.
        outer_lr: eta; 0.4 in the paper.
        outer_momentum: mu.
        nesterov: Nesterov's form as in the paper, or plain heavy-ball momentum.
        merge: "mean" of the differences, or "rda", which keeps their length; see `thinwire.maths.outer`.
        feedback: f, part of what a codec leaves out that is sent later; by default 0.9 (a slot more), 0 of exact ones and rda.
        offload: "host" keeps anchor, outer momentum and residual in the host's memory, for parameters on a device, but for
            fragments of a round while it lasts; see the docs on memory. The same numbers.
        codec: what is sent of the differences; dense float32 by default, `Fp4()` in the paper.
        options: see `thinwire.Policy`.
    """

    name = "streaming-diloco"
    replicated = frozenset({"anchor", "momentum"})

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int = 32,
        fragments: int | Sequence[Sequence[Parameter]] = 4,
        layout: FragmentLayout = "balanced",
        tau: int = 1,
        alpha: float = 0.0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        merge: MergeRule = "mean",
        feedback: float | None = None,
        offload: Place = "none",
        codec: Codec | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`."""
        self.alpha = alpha
        if not 0 <= alpha < 1:
            raise ConfigError(f"alpha must be in [0, 1), since workers with alpha=1 would never meet, got {alpha!r}")
        self.outer, self.merge = Nesterov(outer_lr, outer_momentum, nesterov), Merge(merge)
        self.unowned = self.merge.unowned(codec)
        settings = {"H": H, "tau": tau, "alpha": alpha, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
        settings |= {"nesterov": nesterov, "merge": merge}
        self.feedback = feedback_of(feedback, codec, merge)
        settings |= {"feedback": self.feedback} if self.feedback else {}
        slots: dict[str, Start] = {"anchor": "param", "momentum": "zeros", "residual": "zeros"}
        base = {"codec": codec, "slots": slots, "settings": settings, "offload": offload, **options}
        super().__init__(inner, link, H=H, fragments=fragments, layout=layout, tau=tau, **base)

    def send(self) -> Outgoing:
        """How far this worker went in the parameters of the fragments that are due."""
        return self._outgoing(self.differences(self.which(self.due)))  # D_i <- a - x_i

    def send_again(self) -> Outgoing:
        """The same once more: x_i has moved on."""
        return self._outgoing([D.clone() for D in self.part("outgoing", self.which(self.due))])

    def _outgoing(self, D: list[Tensor]) -> Outgoing:
        if self.feedback:
            return self.fed_outgoing(D)  # q_i = C(f r_i + D_i)
        return self.outgoing(self.merge.outgoing(D, self.shards), codec=self.merge.codec(self.codec, len(D)), source=D)

    def apply(self, arrived: Arrived) -> None:
        """The outer step of the fragments that have arrived."""
        before = self.anchor_before(arrived)
        if self.feedback:
            self.keep_rest(arrived)  # r_i <- f r_i + D_i - q_i
        x, a, m = (self.part(name, arrived.which) for name in ("param", "anchor", "momentum"))
        D = self.share_of(self.merge.merged(arrived.mean, self.shards), arrived)
        self.outer.step(a, D, m)  # m <- mu m + D;  a <- a - eta (D + mu m)
        alpha = 0.0 if arrived.last or not arrived.included else self.alpha
        if alpha:
            overwrite(x, [a_.lerp(x_.to(a_.dtype), alpha) for a_, x_ in zip(a, x, strict=True)])
        else:
            self.move_to_anchor(arrived, before=before)

    def whole_round(self) -> bool:
        """Whether all workers are equal after this round."""
        flight = self.engine.current
        everything = len(self.due) == self.schedule.fragments and len(flight.which) == len(self._active)
        return (len(self.due) == self.schedule.fragments and flight.last) or (self.alpha == 0 and everything)

    def shared_state(self) -> dict[str, list[Tensor]]:
        """Everything that is bit-equal on all workers: after a whole round the parameters too."""
        return super().shared_state() | ({"param": self.params()} if self.pending_steps == 0 else {})

    def restore(self) -> None:
        """The fragments of a refused round go back to their anchor; everything does where this worker's state is invalid."""
        if not self.params_finite():
            super().restore()
        else:
            which = self.engine.current.which
            overwrite(self.part("param", which), self.part("anchor", which))
