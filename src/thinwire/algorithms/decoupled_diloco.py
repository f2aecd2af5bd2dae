"""DecoupledDiLoCo: H local steps, then only the fast part of each worker's outer momentum is sent.

"Distributed Low-Communication Training with Decoupled Momentum Optimization", arXiv 2510.03371:

    every step, every worker i:   x_i <- InnerOpt(x_i, g_i)                its state never leaves the worker
    every H steps:                D_i <- a - x_i                           how far it went; a = the last outer point
                                  m_i <- beta m_i + D_i
                                  q_i <- C(m_i);   m_i <- m_i - q_i        what the codec keeps is sent, the rest stays
                                  Q   <- mean_i q_i
    mode "consensus":             v   <- mu v + Q                          all workers apply the shared part, and only that:
                                  a   <- a - eta (Q + mu v);  x_i <- a     replicas stay bit-equal; "eta Q" for mu = 0
    mode "published":             m_i <- m_i + Q                           the authors' code: local residual and local D_i
                                  a_i <- a_i - eta (D_i + beta m_i)        enter the step, so the outer points a_i drift apart

With everything sent m stays zero, and "consensus" is DiLoCo with outer momentum mu. With one worker "published" is DiLoCo with
outer momentum beta. With an identity transform, 2-bit values and mu = 0, "consensus" is SparseLoCo (arXiv 2508.15706).

A round sends `message_nbytes()` to each of the M - 1 others. Memory: two slots beside the inner state, three with mu > 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs import DCT, Codec, CodecSchedule, Identity, Made, Mean, Sign, Ternary, TopK, TwoBit
from thinwire.core.offload import Place
from thinwire.core.optimizer import PolicyOptions, Start
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.slots import overwrite
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError, check_choice
from thinwire.links.base import Link
from thinwire.maths.outer import Nesterov
from thinwire.schedules import Schedule


class DecoupledDiLoCo(Wrapper):
    """H local steps of any optimizer, then a sparse exchange of the outer momentum.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> opt = thinwire.DecoupledDiLoCo(inner, thinwire.connect(), H=32)

    Args:
        inner: any torch optimizer; its state stays on the worker.
        link: this worker's end of the wire.
        H: local steps per round, or a `Schedule`; 128 and 512 in the paper.
        mode: "consensus" keeps the replicas bit-equal; "published" is the authors' rule, under which they drift apart.
        outer_lr: eta; 0.7 in the authors' configs of the published rule.
        beta: decay of the local buffer, and in "published" also the momentum; 0.95 in the authors' configs.
        outer_momentum: mu of "consensus": a momentum of what all have received, which costs no communication.
        nesterov: Nesterov's form of the momentum, or plain heavy-ball.
        over: mean over the "senders" of an entry, as published, or over all "workers".
        robust: protect the mean from bad contributions: "median", "trimmed=0.25", "clip=1.5"; see `Mean.of`.
        tau: steps between sending and applying a round, below H, in which it travels; what a worker does in them is dropped.
        pace: "equal" steps on all workers, or "speed": a slower one takes fewer of the H steps, and weighs as many as it took.
        offload: "host" keeps anchor, momentum and velocity on the host between rounds, for parameters on a device.
        codec: what is sent of the momentum, or a `CodecSchedule`.
        options: see `thinwire.Policy`.
    """

    name = "decoupled-diloco"
    synced = frozenset({"param"})
    replicated = frozenset({"anchor", "velocity"})
    takes_schedules = rounds_leave_inner = True

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 32,
        mode: Literal["consensus", "published"] = "consensus",
        outer_lr: float = 1.0,
        beta: float = 0.95,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
        over: Literal["senders", "workers"] = "senders",
        robust: str = "",
        tau: int = 0,
        pace: Literal["equal", "speed"] = "equal",
        offload: Place = "none",
        codec: Codec | CodecSchedule | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`."""
        check_choice("mode", mode, ("consensus", "published"))
        if not 0 <= beta <= 1:
            raise ConfigError(f"beta must be from 0 to 1, got {beta!r}")
        if outer_momentum and mode == "published":
            raise ConfigError(f"the published rule has beta for its momentum: outer_momentum must be 0, got {outer_momentum!r}")
        if tau and mode == "published":
            raise ConfigError(f"the published rule applies each worker's own D_i at once: tau must be 0, got {tau!r}")
        codec = DCT(64) >> TopK(128) >> Sign() if codec is None else codec
        self.mean = Mean.of(over, robust)
        self.mode, self.beta, self.outer = mode, beta, Nesterov(outer_lr, outer_momentum, nesterov)
        if mode == "published":  # nothing is ever made equal again
            self.synced = self.replicated = frozenset()
        settings = {"H": H, "mode": mode, "outer_lr": outer_lr, "beta": beta, "outer_momentum": outer_momentum}
        settings |= {"nesterov": nesterov, "over": self.mean.over, "robust": robust, "tau": tau, "pace": pace}
        slots: dict[str, Start] = {"anchor": "param", "momentum": "zeros", "velocity": "zeros"}
        more = {"settings": settings, "pace": pace, "offload": offload, **options}
        super().__init__(inner, link, H=H, tau=tau, codec=codec, slots=slots, **more)

    @classmethod
    def sparseloco(cls, inner: Optimizer, link: Link, **settings: Any) -> Self:
        """SparseLoCo: error feedback without a transform, 64 of each 64 x 64 entries in two bits, the plain mean."""
        codec = Identity(64) >> TopK(64) >> TwoBit()
        paper: dict[str, Any] = {"H": 30, "outer_lr": 1.0, "beta": 0.95, "over": "workers", "codec": codec}
        return cls(inner, link, **(paper | settings))

    @classmethod
    def coarse(cls, inner: Optimizer, link: Link, **settings: Any) -> Self:
        """Ours: all entries in three values instead of a few exact ones, leaky feedback, and the shared momentum of DiLoCo."""
        ours: dict[str, Any] = {"H": 32, "outer_lr": 0.9, "beta": 0.9, "outer_momentum": 0.5, "over": "workers"}
        ours |= {"codec": Ternary()}
        return cls(inner, link, **(ours | settings))

    @classmethod
    def published(cls, inner: Optimizer, link: Link, **settings: Any) -> Self:
        """The authors' rule with the settings of their configs."""
        paper: dict[str, Any] = {"H": 128, "outer_lr": 0.7, "beta": 0.95, "over": "senders", "codec": DCT(64) >> TopK(32)}
        return cls(inner, link, mode="published", **(paper | settings))

    def wants(self, slot: str, group: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """A velocity is kept only where there is a momentum."""
        return slot != "velocity" or self.outer.momentum > 0

    @property
    def evaluated(self) -> str:
        """Which model `shared_model` shows, in words."""
        return super().evaluated if self.mode == "consensus" else "worker 0's own: under the published rule there is no other"

    def send(self) -> Outgoing:
        """The fast part of beta m_i + D_i, which is made aside, piece by piece: the round may yet be refused."""
        which = self.which(self.due)
        if self.engine.tau:  # D_i is kept anyway, since x_i moves on
            return self._outgoing(self.differences(which))  # D_i <- a - x_i
        m, a, x = (self.part(name, which) for name in ("momentum", "anchor", "param"))
        return self.outgoing(m, made=Made((m, a, x), self._fed), **self._how())  # q_i <- C(beta m_i + D_i)

    def send_again(self) -> Outgoing:
        """The same once more: x_i has moved on."""
        return self._outgoing([D.clone() for D in self.slot("outgoing")])

    def _outgoing(self, D: list[Tensor]) -> Outgoing:
        fed = self.with_feedback(D, self.which(self.due), "momentum", self.beta)  # beta m_i + D_i
        return self.outgoing(fed, source=D, **self._how())

    def _how(self) -> dict[str, Any]:
        return {"want_sent": True, "mean": self.mean, "weight": self.work()}

    def _fed(self, i: int, m: Tensor, a: Tensor, x: Tensor) -> Tensor:  # noqa: ARG002
        return torch.mul(m, self.beta).add_(a - x)  # beta m_i + D_i

    def apply(self, arrived: Arrived) -> None:
        """The outer step, piece by piece."""
        x, a, m, velocity = (self.part(name, arrived.which) for name in ("param", "anchor", "momentum", "velocity"))
        if arrived.outgoing.made is None:
            torch._foreach_copy_(m, arrived.outgoing.tensors)
        else:
            arrived.outgoing.made.replace_first()
        if arrived.included:
            for _, m_, sent in arrived.each_sent(m):
                m_.sub_(sent)  # m_i <- beta m_i + D_i - q_i
        for _, a_, Q, m_, x_, v in arrived.together(a, m, x, velocity or [None] * len(a)):  # Q <- mean_i q_i
            if self.mode == "published":
                torch._foreach_add_(m_, Q)
                step = torch._foreach_add(torch._foreach_sub(a_, x_), m_, alpha=self.beta) if self.outer.nesterov else m_
                torch._foreach_add_(a_, step, alpha=-self.outer.lr)
            else:
                self.outer.step(a_, Q, v if velocity else [])
        overwrite(x, a)
