"""LoRDO: Adam with moments of low rank, a projector from what all workers did together, and states averaged every H steps.

"LoRDO: Distributed Low-Rank Optimization with Infrequent Communication", arXiv 2602.04396. Of a matrix n x m, n <= m (a tall
one is transposed), with the projector Q (n x r, orthonormal) and the moments u, v (r x m; ' corrected for bias):

    every step, every worker i:   S = clip(g_i) + E_i;  ghat = Q^T S;  E_i <- S - Q ghat       error feedback
                                  u <- b1 u + (1 - b1) ghat;  v <- b2 v + (1 - b2) ghat^2
                                  x <- x - lr [(1 - omega) S / mean(den) + omega Q (u' / den)]     den = sqrt(v') + eps
    every H steps:                D = mean_i x_i - a;  a <- a + D;  x_i <- a;  u <- mean_i u_i;  v <- mean_i v_i
                                  Q <- top r left singular vectors of D;  u, v turned into its basis (`thinwire.maths.low_rank`)

With omega = 1 no step leaves the span of Q, so Q never does. A message has n m + 2 r m values per matrix: all find Q from D.
Not of the paper's main form: Q from mean_i g_i, for n m values more, or from a sketch mean_i g_i Omega, for n (r + 8) more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from thinwire.codecs import Codec, Dense
from thinwire.core.optimizer import PolicyOptions, Start
from thinwire.core.projectors import Projecting
from thinwire.core.slots import clipped, log, overwrite
from thinwire.core.states import State, state_codecs, state_periods
from thinwire.errors import ConfigError, check_choice
from thinwire.links.base import Link
from thinwire.maths import low_rank
from thinwire.schedules import Periods, Schedule, as_schedule
from thinwire.sharding.mesh import shard_of


class LoRDO(Projecting):
    """Local steps of low-rank Adam with a full-rank term; parameters and moments averaged, the projector made of the result.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(8, 8)
        >>> opt = thinwire.LoRDO(model.parameters(), thinwire.connect(), lr=8e-3, rank=2)

    Args:
        params: parameters or groups; lr, rank, omega, betas, lives, eps and weight_decay may differ per group.
        link: this worker's end of the wire.
        lr: the step size.
        rank: r, a whole number, or below 1 a part of a matrix's shorter side. Vectors, matrices whose shorter side is r or
            less, and groups with rank 0 (the place for embeddings) are stepped by quasi-hyperbolic Adam at full rank.
        H: steps between two averages of the parameters, with a new projector each time; or a `Schedule`.
        K_u: of the first moments, H by default.
        K_v: of the second moments, H by default.
        omega: weight of the momentum; the rest is the raw gradient's. 1 is low-rank Adam whose projector stagnates.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: decoupled, times lr.
        clip_norm: scale this worker's gradient down to this norm; 0 never.
        qh: the raw gradient enters "outside" of the projection, or "inside", which does not cure the stagnation.
        feedback: keep what the projection leaves out of a gradient, and add it to the next.
        rotate: turn the moments into the basis of a new projector.
        projection: from a "global" source, or each worker's "local" gradient, an ablation without averaged moments.
        source: what a global projector is taken from: the averaged "difference" of the parameters, which is sent anyway, the
            averaged "gradient" of the step before the round, or a "sketch" of that, r + 8 columns instead of all.
        lives: let the first moment grow slow with the run, as in `thinwire.optim.QHAdam`; 0 has it slow from the start.
        average_feedback: average E in rounds, too.
        from_start: what it takes over from the low-rank Adam of a synchronous start (`WarmStart`): the projectors "Q", the
            second moments "v" too, or "all", first moments and E as well, with a beta that grows from theirs by `lives`.
        codec: what is sent; one for all states or one by name ("param", "exp_avg", "exp_avg_sq"; "E" and "Q" where they are
            sent), as in `MTDAO`.
        options: see `thinwire.Policy`.
    """

    name = "lordo"
    replicated = frozenset({"anchor", "Q"})

    def __init__(
        self,
        params: Iterable[Any],
        link: Link,
        *,
        lr: float = 1e-3,
        rank: int | float = 0.25,
        H: int | Schedule = 32,
        K_u: int | Schedule | None = None,
        K_v: int | Schedule | None = None,
        omega: float = 0.97,
        betas: tuple[float, float] = (0.999, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        qh: low_rank.QH = "outside",
        feedback: bool = True,
        rotate: bool = True,
        projection: Literal["global", "local"] = "global",
        source: low_rank.Source = "difference",
        lives: float = 0.0,
        average_feedback: bool = False,
        from_start: Literal["Q", "v", "all"] = "Q",
        codec: Codec | Mapping[str, Codec] | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Check the settings that all groups share; `add_param_group` checks the others."""
        low_rank.check_settings(qh=qh, source=source, projection=projection, clip_norm=clip_norm, periods=(K_u, K_v))
        check_choice("from_start", from_start, ("Q", "v", "all"))
        if average_feedback and not feedback:
            raise ConfigError("average_feedback averages E, which feedback=False does without: give one of them only")
        self.clip_norm, self.qh, self.rotate, self.projection, self.source = clip_norm, qh, rotate, projection, source
        self.from_start = from_start
        self.replicated = self.replicated if projection == "global" else frozenset({"anchor"})
        periods = state_periods(low_rank.MOMENTS if projection == "global" else (), H, K_u, K_v)
        periods |= {"E": as_schedule(H)} if average_feedback else {}
        periods |= {"Q": as_schedule(H)} if source != "difference" else {}  # the last: what it turns was averaged by then
        codecs, beats = state_codecs(list(periods), codec), Periods(tuple(periods.values()))
        averaged = codecs["param"].linear and len(set(codecs.values())) == 1  # on the wire
        self.unowned = "" if averaged else "its moments have other shapes than the parameters, of which owners have blocks"
        group = {"lr": lr, "rank": rank, "omega": omega, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        group |= {"lives": lives}
        settings = {**group, "H": H, "K_u": K_u, "K_v": K_v, "clip_norm": clip_norm, "qh": qh, "feedback": feedback}
        settings |= {"rotate": rotate, "projection": projection, "source": source, "average_feedback": average_feedback}
        settings |= {"from_start": from_start, "codecs": {k: repr(c) for k, c in codecs.items()}}
        slots: dict[str, Start] = {"anchor": "param", "step": "count"}
        slots |= {"step_of_reset": "count"} if from_start != "Q" else {}  # where u may be younger than v
        slots |= low_rank.slots(lambda: self.param_groups[-1]["rank"], feedback=feedback)
        slots |= {} if codecs["param"].holds(torch.float32) else {"residual": "zeros"}
        super().__init__(
            params, link, defaults=group, H=beats, codec=codecs["param"], slots=slots, settings=settings, **options
        )
        self.engine.deferred = None  # a new projector is looked at, so that gates may be too
        self.states = tuple(self._state(name, periods, codecs) for name in periods)
        self.choose_route(self.policy.route)

    def _state(self, name: str, periods: Mapping[str, Schedule], codecs: Mapping[str, Codec]) -> State:
        period, codec = periods[name], codecs[name]
        if name == "Q":
            return self.projector_state(period, codec)
        if name == "E":
            return State(name, lambda: self.slot(name), period, codec, feedback=not isinstance(codec, Dense))
        if name != "param":  # v is turned by means of u, so it is the same on all workers only where u is
            apart = period != periods["exp_avg"] or any(not isinstance(codecs[k], Dense) for k in (name, "exp_avg"))
            return State(name, lambda: self.slot(name), period, codec, feedback=apart)
        anchor, residual = (lambda: self.slot("anchor")), (lambda: self.slot("residual")) if "residual" in self._slots else None
        return State(name, self.params, period, codec, anchor=anchor, residual=residual, outer=self.move)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        low_rank.check_group(group, settings=self.settings, sharded=shard_of(group["params"])[1] > 1)

    def local_step(self) -> None:
        """One step of low-rank Adam; skipped when this worker's gradient is not finite."""
        torch._foreach_add_(self.slot("step"), 1)  # t, also of a skipped step: v is turned by it, on all workers alike
        if not self.gradients_finite():
            log.warning("rank %d, step %d: NaN or Inf in the gradient, local step skipped", self.peers.id, self.steps)
            self.engine.invalid_next = self.policy.on_nonfinite == "raise"  # all raise together in the next round
            self.clip = 0.0
            return
        self.clip = clipped(self.gradients(), self.clip_factor(self.clip_norm))
        low_rank.step(self._active, self.state, self.groups(), qh=self.qh, clip=self.clip)

    def restore(self) -> None:
        """Back to the last agreed parameters; what is not finite in the moments and in E becomes zero."""
        overwrite(self.params(), self.slot("anchor"))
        low_rank.zero_nonfinite(self.state.values())

    def agreed(self) -> list[Tensor]:
        """The anchor."""
        return self.slot("anchor")

    def memory(self) -> dict[str, int]:
        """Elements of this worker's state by slot: the moments exp_avg and exp_avg_sq, Q, E, the anchor."""
        return {name: sum(t.numel() for t in self.slot(name)) for name in self._slots}
