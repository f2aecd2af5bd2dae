"""DiLoCo: H local steps, then one step of an outer Nesterov optimizer on the averaged difference.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105, algorithm 1:

    every step, every worker i:   x_i <- InnerOpt(x_i, g_i)                     its state never leaves the worker
    every H steps:                D   <- mean_i (a - x_i)                       the outer gradient; a = last agreed point
                                  m   <- mu m + D
                                  a   <- a - eta (D + mu m)                     Nesterov; "eta m" without; "eta D" for mu = 0
                                  x_i <- a

Ours, for codecs that are not exact: r_i <- f r_i + D_i is sent in place of D_i = a - x_i, and what receivers read is taken off
again: what a codec leaves out is not lost, but sent later (error feedback).

With P parameters and M workers a round's message is N = b (P + M) bytes (b bytes per value), a ring sends 2 N (M - 1) / M of it
per worker, and there is one round every H steps. Memory: two slots beside the inner optimizer's state, three with feedback.
"""

from __future__ import annotations

from typing import Literal, Unpack

from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs import Codec, CodecSchedule, Dense, Mean
from thinwire.core.feedback import Feedback, feedback_of
from thinwire.core.offload import Place
from thinwire.core.optimizer import PolicyOptions, Start
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.errors import ConfigError
from thinwire.links.base import Link
from thinwire.maths.outer import Merge, MergeRule, Nesterov
from thinwire.schedules import Schedule


class DiLoCo(Feedback):
    """H local steps of any optimizer, then an outer Nesterov step on the mean difference.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> opt = thinwire.DiLoCo(inner, thinwire.connect(), H=32, outer_lr=0.7)

    Args:
        inner: any torch optimizer (AdamW in the paper); its state stays on the worker.
        link: this worker's end of the wire.
        H: local steps per round, or a `Schedule`; 30 to 500 in the papers.
        outer_lr: eta; 0.7 in the paper, 0.4 to 0.8 best for 1 to 8 workers at fixed total batch.
        outer_momentum: mu; 0.9 in the paper, best 0 for H below about 10.
        nesterov: Nesterov's form as in the paper, or plain heavy-ball momentum.
        merge: "mean" of the differences, or "rda", which keeps their length; see `thinwire.maths.outer`.
        robust: protect the mean from bad contributions: "median", "trimmed=0.25", "clip=1.5"; see `Mean.of`. It needs messages
            that are gathered, which is then the default.
        tau: steps between sending and applying a round, below H, in which it travels; what a worker does in them is dropped.
        pace: "equal" steps on all workers, or "speed": a slower one takes fewer of the H steps, and weighs as many as it took.
        feedback: f, part of what a codec leaves out that is sent later; by default 0.9 (a slot more), 0 of exact ones and rda.
        offload: "host" keeps anchor, outer momentum and residual in the host's memory between rounds, for parameters on a
            device; see the docs on memory. The same numbers.
        codec: what is sent of the differences, or a `CodecSchedule`; dense float32 by default.
        options: see `thinwire.Policy`.
    """

    name = "diloco"
    synced = frozenset({"param"})
    replicated = frozenset({"anchor", "momentum"})
    rounds_leave_inner = True
    takes_schedules = True

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 32,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        merge: MergeRule = "mean",
        robust: str = "",
        tau: int = 0,
        pace: Literal["equal", "speed"] = "equal",
        feedback: float | None = None,
        offload: Place = "none",
        codec: Codec | CodecSchedule | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`."""
        self.outer, self.merge = Nesterov(outer_lr, outer_momentum, nesterov), Merge(merge)
        self.mean, codec = Mean.of(robust=robust), Dense(gather=True) if robust and codec is None else codec
        if not self.mean.plain and codec is not None and any(one.linear for one in CodecSchedule.of(codec).codecs):
            raise ConfigError(f"robust={robust!r} needs messages that are gathered, such as Dense(gather=True), got {codec!r}")
        self.feedback = feedback_of(feedback, codec, merge)
        self.unowned = self.merge.unowned(codec)
        settings = {"H": H, "outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov}
        settings |= {"merge": merge, "robust": robust, "tau": tau, "pace": pace}
        settings |= {"feedback": self.feedback} if self.feedback else {}
        slots: dict[str, Start] = {"anchor": "param", "momentum": "zeros", "residual": "zeros"}
        base = {"codec": codec, "slots": slots, "settings": settings, "pace": pace, "offload": offload, **options}
        super().__init__(inner, link, H=H, tau=tau, **base)

    def send(self) -> Outgoing:
        """How far this worker went."""
        return self._outgoing(self.differences(self.which(self.due)))  # D_i <- a - x_i

    def send_again(self) -> Outgoing:
        """The same once more: x_i has moved on."""
        return self._outgoing([D.clone() for D in self.slot("outgoing")])

    def _outgoing(self, D: list[Tensor]) -> Outgoing:
        if self.feedback:
            return self.fed_outgoing(D, mean=self.mean, weight=self.work())  # q_i = C(f r_i + D_i)
        given, codec = self.merge.outgoing(D, self.shards), self.merge.codec(self.codec, len(D))
        return self.outgoing(given, codec=codec, mean=self.mean, weight=self.work(), source=D)

    def apply(self, arrived: Arrived) -> None:
        """The outer step."""
        before, which = self.anchor_before(arrived), arrived.which
        if self.feedback:
            self.keep_rest(arrived)  # r_i <- f r_i + D_i - q_i
        D = self.share_of(self.merge.merged(arrived.mean, self.shards), arrived)  # D <- mean_i D_i
        self.outer.step(self.part("anchor", which), D, self.part("momentum", which))  # m <- mu m + D;  a <- a - eta (D + mu m)
        self.move_to_anchor(arrived, before=before)
