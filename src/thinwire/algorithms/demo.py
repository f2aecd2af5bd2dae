"""DeMo: decoupled momentum. Each worker keeps its own momentum; only the fast part of it is sent, at every step.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870 (v1 of 2024; v2 of 2026 has alpha and phi):

    every step, every worker i:   v_i <- b2 v_i + (1 - b2) g_i^2     ours: each worker whitens its own gradient,
                                  g_i <- g_i / (sqrt(v_i) + eps)     so that what is left out of Q is small everywhere
                                  m_i <- beta m_i + s g_i            s = 1, lr ("lr", v1) or 1 - beta ("ema", v2)
                                  q_i <- C(m_i)                      what the codec keeps: of each block the top k of its DCT
                                  m_i <- m_i - alpha q_i             what was sent leaves the momentum; alpha = 1 in v1
                                  Q   <- mean_i q_i                  over those who sent an entry, or over all workers
                                  x   <- x - lr (phi(Q) + wd x)      phi: sign (v1), sgd, muon; ours: unit, adam

The parameters are bit-equal on all workers at any time; the momenta m_i are each worker's own, and live in the domain of the
codec's transform. With everything sent and alpha = 1 no momentum is left: phi = sign, not whitened, is then signSGD.

On a mesh (`fully_shard` on one axis, the link on the other) every process does so with its shard: FlexDeMo, arXiv 2502.06728.

One step sends `message_nbytes()` to each of the M - 1 others. Memory: a slot, one more to whiten, two more for phi = adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Self, Unpack

from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs import DCT, Chain, Codec, CodecSchedule, Mean, Sign, TopK
from thinwire.core.optimizer import Algorithm, PolicyOptions, Start
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.slots import clipped
from thinwire.errors import ConfigError, check_choice, check_not_negative
from thinwire.links.base import Link
from thinwire.maths.update_rules import UpdateRule, apply_shared, check_group, check_moment, rms_of, whitening
from thinwire.sharding.mesh import shard_of
from thinwire.sharding.shards import local

DEFAULT_CODEC = CodecSchedule(DCT(64) >> TopK(256) >> Sign(), 32, DCT(64) >> TopK(64) >> Sign())  # why: docs/results.md


class DeMo(Algorithm):
    """Send the fast part of every worker's momentum at every step; see `v1` and `v2` for the papers' settings.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.DeMo(model.parameters(), thinwire.connect(), lr=2e-3)

    Args:
        params: parameters or groups; lr, beta, alpha, phi, betas, eps and weight_decay may differ per group.
        link: this worker's end of the wire.
        lr: the step size.
        beta: decay of the momentum.
        alpha: which part of what was sent is taken off the momentum; 1 in v1, 0.2 best in v2.
        phi: update rule: unit (divided by its root mean square), sign, sgd, muon (of matrices; others take sign), or adam.
        whiten: divide each worker's gradient by the root of its own running second moment before it enters the momentum.
        betas: of phi = adam; the second also of `whiten`.
        eps: of both.
        inflow: how gradients enter the momentum: times 1 ("gradient"), times lr ("lr", v1) or times 1 - beta ("ema", v2).
        weight_decay: decoupled, times lr.
        moment: what the second moment of `whiten` is kept in: "fp32", or "bf16" where the second of `betas` is at most 0.99.
        clip_norm: scale this worker's gradient down to this norm; 0 never.
        over: mean over the "senders" of an entry, as published, or over all "workers".
        robust: protect the mean from bad contributions: "median", "trimmed=0.25", "clip=1.5"; see `Mean.of`.
        delay: apply a round one step later, so that it travels during the next pass; it cost 17% of loss in our runs.
        codec: what is sent of the momentum, a chain or a `CodecSchedule`; by default 256 of each 64 x 64 in the first 32
            rounds, those of a warm start among them, and 64 from then on, in 1 bit each.
        options: see `thinwire.Policy`.
    """

    name = "demo"
    replicated = frozenset({"param", "m", "v", "updates"})
    takes_schedules = True
    second_moment = ("own_v", "own_count")
    changed_by_sending = ("momentum", "own_v")  # the gradient is in them
    owners_keep = 0.9  # what is left out of means grows old: docs/scaling.md

    def __init__(
        self,
        params: Iterable[Any],
        link: Link,
        *,
        lr: float = 2e-3,
        beta: float = 0.999,
        alpha: float = 1.0,
        phi: UpdateRule = "unit",
        whiten: bool = True,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        inflow: Literal["gradient", "lr", "ema"] = "gradient",
        weight_decay: float = 0.0,
        moment: Literal["fp32", "bf16"] = "fp32",
        clip_norm: float = 0.0,
        over: Literal["senders", "workers"] = "senders",
        robust: str = "",
        delay: bool = False,
        codec: Codec | CodecSchedule | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Check the settings that all groups share; `add_param_group` checks the others."""
        check_choice("inflow", inflow, ("gradient", "lr", "ema"))
        check_not_negative("clip_norm", clip_norm)
        codec = CodecSchedule.of(codec or DEFAULT_CODEC).map(Chain.of)
        self.mean = Mean.of(over, robust)
        self.inflow, self.clip_norm, self.whiten, self.moment = inflow, clip_norm, whiten, moment
        group = {"lr": lr, "beta": beta, "alpha": alpha, "phi": phi, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        settings = {**group, "whiten": whiten, "inflow": inflow, "clip_norm": clip_norm}
        settings |= {"over": self.mean.over, "robust": robust, "delay": delay}
        settings |= {"moment": moment} if moment != "fp32" else {}
        squares: Start = "zeros" if moment == "fp32" else "bf16 zeros"
        slots: dict[str, Start] = {"momentum": "coded", "own_v": squares, "own_count": "count", "m": "zeros", "v": "zeros"}
        slots["updates"] = "count"
        self.delay, self._clip = delay, 1.0
        self._g: list[Tensor] = []  # what enters the momentum in the round at hand
        if isinstance(params, Optimizer):
            what = f"{type(self).__name__} is the optimizer itself"
            raise ConfigError(f"{what}: give it model.parameters(), not a {type(params).__name__}")
        super().__init__(params, link, defaults=group, tau=int(delay), codec=codec, slots=slots, settings=settings, **options)

    @classmethod
    def v1(cls, params: Iterable[Any], link: Link, **settings: Any) -> Self:
        """The published code of 2024: lr inside the momentum, all that was sent taken off it, sign, 32 of each 64 x 64."""
        paper: dict[str, Any] = {"lr": 4e-4, "inflow": "lr", "alpha": 1.0, "clip_norm": 1.0, "codec": DCT(64) >> TopK(32)}
        return cls(params, link, **(paper | {"phi": "sign", "whiten": False} | settings))

    @classmethod
    def v2(cls, params: Iterable[Any], link: Link, **settings: Any) -> Self:
        """The paper of 2026: only a part of what was sent is taken off; choose phi = sgd, sign or muon."""
        paper: dict[str, Any] = {"lr": 4e-4, "inflow": "ema", "alpha": 0.2, "clip_norm": 1.0, "codec": DCT(64) >> TopK(8)}
        return cls(params, link, **(paper | {"phi": "sign", "whiten": False} | settings))

    def wants(self, slot: str, group: Mapping[str, Any]) -> bool:
        """Only phi = adam has moments of what was received."""
        return slot == "momentum" or (self.whiten if slot.startswith("own_") else group["phi"] == "adam")

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_group(group, sharded=shard_of(group["params"])[1] > 1)
        check_moment(self.moment, group["betas"][1])

    def local_step(self) -> None:
        """Look at this worker's gradient; one that is invalid is left out of everything."""
        groups, self._g, self._clip = self.groups(), self.gradients(), 1.0
        if any(group["phi"] == "adam" and "m" not in self.state[p] for p, group in zip(self._active, groups, strict=True)):
            raise ConfigError("phi = adam needs moments from the start: give it to the constructor or to add_param_group")
        if self.engine.deferred is not None:
            self.engine.deferred.send_if_finite(self)
        else:
            self.engine.invalid_next = not self.gradients_finite()
        if self.engine.invalid_next is True:
            return
        self._clip = clipped(self._g, self.clip_factor(self.clip_norm))
        for count in self.slot("own_count"):
            count.add_(1)

    def send(self) -> Outgoing:
        """Add the gradient to the momentum, and send the fast part: m_i <- beta m_i + s g_i;  q_i <- C(m_i)."""
        groups, clip, made = self.groups(), self._clip, None
        if self.whiten and self._g:  # while it enters the momentum
            clip, made = 1.0, whitening(self._g, self.slot("own_v"), self.slot("own_count"), groups, clip=clip)
        scale = [clip * {"gradient": 1, "lr": g["lr"], "ema": 1 - g["beta"]}[self.inflow] for g in groups]
        decay, tensors = [g["beta"] for g in groups], self._g or self.params()
        return replace(self.send_again(), tensors=tensors, made=made, decay=decay, scale=scale)

    def send_again(self) -> Outgoing:
        """The fast part of the momentum as it is: what was sent leaves it only in `apply`."""
        return self.outgoing(self.params(), slots=self.slot("momentum"), mean=self.mean, invalid=False)

    carried = send_again  # of a message that was not counted the gradient is in the momentum already

    def remember(self, outgoing: Outgoing) -> None:  # noqa: ARG002
        """The gradient is about to enter the momentum, and is not kept until the next step."""
        self._g = []

    def apply(self, arrived: Arrived) -> None:
        """All workers apply the same."""
        momentum, params, groups = arrived.outgoing.slots or [], [self._active[i] for i in arrived.which], self.groups()
        groups, x = [groups[i] for i in arrived.which], self.part("param", arrived.which)
        arrived.take_from(momentum, scale=[group["alpha"] for group in groups])  # m_i <- m_i - alpha q_i
        m, v = ([local(self.state[p][name]) if name in self.state[p] else None for p in params] for name in ("m", "v"))
        rms = rms_of(arrived, self.shards, params) if any(g["phi"] == "unit" for g in groups) else []
        counts = [self.state[p].get("updates") for p in params]
        apply_shared(arrived, x, groups, m=m, v=v, counts=counts, rms=rms)  # x <- x - lr (phi(Q) + wd x)
