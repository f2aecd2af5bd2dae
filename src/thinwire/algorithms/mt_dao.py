"""MT-DAO: momenta at several time scales, and every state of the optimizer averaged at its own period.

"MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates", arXiv 2510.05361. With a quasi-hyperbolic inner
optimizer (`thinwire.optim`), whose momenta u_j have betas b_j and weights w_j:

    every step, every worker i:   u_j <- b_j u_j + (1 - b_j) g_i                                    (algorithms 1 to 3)
                                  x_i <- x_i - lr [(1 - sum w) g_i + sum w_j u_j] / (sqrt(v) + eps)
    every H steps:                x   <- mean_i x_i
    every K_j steps:              u_j <- mean_i u_j
    every K_v steps:              v   <- mean_i v

A beta near 1 keeps most of the averaged momentum until the next average (b^K of it), so the workers go on in the direction
that all agreed on; the raw gradient keeps the step responsive. There is no outer optimizer. With plain inner optimizers the
same averaging is Local Adam (all periods equal) and DES-LOC (arXiv 2505.22549, longer periods for slower states).

Units of P values per step: 1/H + sum_j 1/K_j + 1/K_v, against 1 for gradients: 10.67 times fewer for N = 1 and all periods 32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs import Codec, Dense
from thinwire.core.optimizer import Policy, PolicyOptions, Start
from thinwire.core.states import State, StateAveraging, state_codecs, state_periods
from thinwire.core.wrapper import Wrapper, inner_keys
from thinwire.errors import ConfigError, check_not_negative
from thinwire.links.base import Link
from thinwire.maths.outer import Nesterov
from thinwire.schedules import Periods, Schedule
from thinwire.sharding.shards import local


class MTDAO(StateAveraging, Wrapper):
    """Local steps of any optimizer; parameters and optimizer states averaged, each at its own period.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = thinwire.optim.QHAdam(model.parameters(), lr=3e-3, betas=0.997, omegas=0.95)
        >>> opt = thinwire.MTDAO(inner, thinwire.connect(), H=32)

    Args:
        inner: `QHAdam`, `QHADOPT`, `QHM` or `QHMuon` for MT-DAO; AdamW for Local Adam and DES-LOC; any torch optimizer.
        link: this worker's end of the wire.
        H: steps between two averages of the parameters (K_x in the paper), or a `Schedule`.
        K_u: of the momenta; one for all or one each, H by default.
        K_v: of the second moment, H by default.
        clip_norm: scale this worker's gradient down to this norm first; 0 never.
        clip_value: and clamp its coordinates to this size; 0 never.
        outer_lr: eta of an outer Nesterov step on the averaged parameters; 1 with momentum 0 is the plain average.
        outer_momentum: mu; the paper's Nesterov baseline has eta 1 and mu 0.7.
        codec: what is sent; one for all states, or one by name ("param", "exp_avg", "exp_avg_sq", ...). By one that is not
            exact, parameters are sent as differences with error feedback; by one that is not dense, momenta keep what it leaves
            out, and second moments, which must not become negative, travel in bfloat16.
        options: see `thinwire.Policy`.
    """

    name = "mt-dao"
    usual_inner = "qhadam"
    replicated = frozenset({"anchor", "velocity"})

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        H: int | Schedule = 32,
        K_u: int | Schedule | Sequence[int | Schedule] | None = None,
        K_v: int | Schedule | None = None,
        clip_norm: float = 0.0,
        clip_value: float = 0.0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        codec: Codec | Mapping[str, Codec] | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Wrap `inner`, whose state is made at once."""
        check_not_negative("clip_norm", clip_norm)
        check_not_negative("clip_value", clip_value)
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.outer = Nesterov(outer_lr, outer_momentum)
        periods = state_periods(inner_keys(inner), H, K_u, K_v)
        codecs = state_codecs(list(periods), codec)
        exact = all(codecs["param"].holds(p.dtype) for group in inner.param_groups for p in group["params"])
        slots: dict[str, Start] = {}
        keep = Policy.of(options).on_abort == "restore" or link.elastic is not None  # what a worker left out has done since
        if not exact or not self.outer.plain or keep:
            slots["anchor"] = "param"
        if not exact:
            slots["residual"] = "zeros"
        if outer_momentum:
            slots["velocity"] = "zeros"
        slots |= {f"agreed_{name}": "zeros" for name, c in codecs.items() if name != "param" and c.sparse}
        settings = {"H": H, "K_u": K_u, "K_v": K_v, "clip_norm": clip_norm, "clip_value": clip_value}
        settings |= {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "codecs": {k: repr(c) for k, c in codecs.items()}}
        beats, sent = Periods(tuple(periods.values())), codecs["param"]
        super().__init__(inner, link, H=beats, codec=sent, slots=slots, settings=settings, **options)
        self.make_inner_state()
        self.replicated |= {name for name in slots if name.startswith("agreed_")}
        self.states = tuple(self._state(name, period, codecs[name]) for name, period in periods.items())
        self.choose_route(self.policy.route)

    def _adopt(self, group: dict[str, Any]) -> None:
        super()._adopt(group)
        if not self._wrapping:  # the constructor makes the states of all
            self.make_inner_state(known=[state.name for state in self.states])
            if "residual" not in self._slots and not all(self.codecs.at(1).holds(p.dtype) for p in group["params"]):
                raise ConfigError(f"{self.codecs!r} would round the parameters added: give all of them to the constructor")

    def _state(self, name: str, period: Schedule, codec: Codec) -> State:
        if name != "param":
            tensors = lambda: self.inner_state()[name]  # noqa: E731
            agreed = functools.partial(self._agreed_on, name) if f"agreed_{name}" in self._slots else None
            return State(name, tensors, period, codec, feedback=not isinstance(codec, Dense), anchor=agreed)
        anchor, residual = (functools.partial(self.slot, k) if k in self._slots else None for k in ("anchor", "residual"))
        return State(name, self.params, period, codec, anchor=anchor, residual=residual, outer=self._outer_step)

    def _agreed_on(self, name: str) -> list[Tensor]:
        return [local(self.state[p][f"agreed_{name}"]) for p in self._active if name in self.inner.state[p]]

    def _outer_step(self, a: list[Tensor], D: list[Tensor]) -> None:
        self.outer.step(a, D, self.slot("velocity"), along=True)

    @classmethod
    def des_loc(cls, inner: Optimizer, link: Link, *, H: int = 256, **settings: Any) -> Self:
        """DES-LOC: momenta averaged three times, and second moments six times, less often than the parameters."""
        paper: dict[str, Any] = {"H": H, "K_u": 3 * H, "K_v": 6 * H}
        return cls(inner, link, **(paper | settings))

    def prepare_gradients(self) -> None:
        """Clip."""
        grads = [local(p.grad) for p in self._active if p.grad is not None]
        factor = self.clip_factor(self.clip_norm)
        if isinstance(factor, Tensor) or factor < 1:
            torch._foreach_mul_(grads, factor)
        if self.clip_value and grads:
            torch._foreach_clamp_min_(grads, -self.clip_value)
            torch._foreach_clamp_max_(grads, self.clip_value)
