"""Quasi-hyperbolic optimizers: N slow momenta as memory, mixed with the gradient of the moment so that steps stay responsive.

With momenta u_1 .. u_N, their betas b_j and weights w_j >= 0 (sum at most 1; the rest is the weight of the raw gradient):

    QHM      u_j <- b_j u_j + (1 - b_j) g                    x <- x - lr [(1 - sum w) g + sum w_j u_j]
    QHAdam   the same u_j, v <- b2 v + (1 - b2) g^2          x <- x - lr [(1 - sum w) g + sum w_j u_j'] / (sqrt(v') + eps)
             (' = corrected for bias as in Adam)
    QHADOPT  n <- clamp(g / max(sqrt(v), eps), +-t^(1/4))    with the v of the steps before; u_j as above of n
             x <- x - lr [(1 - sum w) n + sum w_j u_j]       then v <- b2 v + (1 - b2) g^2; the first call only sets v = g^2
    QHMuon   D <- (1 - sum w) g + sum w_j u_j                x <- x - lr orthogonalised(D), of matrices; QHAdam of the rest

Ma and Yarats, "Quasi-hyperbolic momentum and Adam for deep learning" (2019); Taniguchi et al., ADOPT (2024); as used by MT-DAO
(arXiv 2510.05361). N = 1 and w = 1 give SGD with (damped) momentum, AdamW, ADOPT and Muon. Memory is that of Adam for N = 1.

On a CPU a step goes through memory once: tensors are cut into pieces that stay in the cache while all operations on them are
done. Moments are float32 or wider, whatever the parameters are: 1 - 0.999 is lost in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor

from thinwire.errors import ConfigError, check_not_negative
from thinwire.optim import kernels
from thinwire.optim.base import GroupOptimizer
from thinwire.optim.mixture import Mixture, MomentumSwitch, Reset, Step, as_tuple, check_decay
from thinwire.sharding.shards import local


class Settings(TypedDict, total=False):
    """Keyword arguments of the quasi-hyperbolic optimizers; all may differ per parameter group but the number of momenta.

    Attributes:
        betas: decay of each momentum, one number or several.
        omegas: weight of each momentum; what is missing to 1 is the weight of the raw gradient.
        lives: let a momentum grow slow with the run: at its age of t steps its half-life is at most t / lives, until it is that
            of its beta; 0 has it slow from the start. A momentum that is slow when directions still change fast costs much.
        weight_decay: decoupled: x <- x (1 - lr wd) first.
        warmup: so many first steps are taken with one plain momentum (beta `warmup_beta`, weight 1); then come `betas` and
            `omegas`. The recipe of the authors of MT-DAO, who warm up synchronously.
        warmup_beta: the momentum's decay during the warm-up.
        reset: zero the momenta after the warm-up. "age" keeps them, and lets betas grow from `warmup_beta` on by `lives`: what
            was agreed on is not lost, and no beta jumps.
        lr_scale: multiplies lr after the warm-up.
        beta2: decay of the second moment; not of QHM.
        eps: added to the root of the second moment, or its least root in QHADOPT; not of QHM.
        nesterov: of QHMuon: look ahead, u_j is replaced by (1 - b_j) g + b_j u_j in the direction.
        matrices: of QHMuon: orthogonalise parameters of two or more dimensions.
    """

    betas: float | Sequence[float]
    omegas: float | Sequence[float]
    lives: float
    weight_decay: float
    warmup: int
    warmup_beta: float
    reset: Reset
    lr_scale: float
    beta2: float
    eps: float
    nesterov: bool
    matrices: bool


_COMMON: Settings = {"lives": 0.0, "weight_decay": 0.0, "warmup": 0, "warmup_beta": 0.9, "reset": True, "lr_scale": 1.0}


class QuasiHyperbolic(GroupOptimizer):
    """Base of the quasi-hyperbolic optimizers: settings, state, the switch after a warm-up, and pieces that stay in cache.

    A subclass has its defaults (`usual_lr`, `usual`), a kernel of `thinwire.optim.kernels`, and the names of its state.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        settings: see `Settings`.
    """

    tuples = ("betas", "omegas")
    usual_lr: ClassVar[float] = 1e-3
    usual: ClassVar[Settings] = {}
    kernel: ClassVar[kernels.Kernel]

    def __init__(self, params: Iterable[Any], lr: float | None = None, **settings: Unpack[Settings]):
        """Check the settings; state is made at the first step, as in torch's own."""
        known = {"lr": self.usual_lr, "betas": 0.0, "omegas": 0.0, **_COMMON, **self.usual}
        if unknown := sorted(set(settings) - set(known)):
            raise TypeError(f"{type(self).__name__} takes no argument {unknown[0]!r}")
        named = {**known, **({} if lr is None else {"lr": lr}), **settings}
        named |= {"betas": as_tuple(named["betas"]), "omegas": as_tuple(named["omegas"])}
        super().__init__(params, {**named, "_taken": 0})  # no setting: a worker that skips a step has taken fewer

    def slots(self, p: Tensor, group: Mapping[str, Any]) -> list[str]:  # noqa: ARG002
        """Names of the state tensors of a parameter: the momenta, and the second moment where there is one."""
        return [*_momenta(len(group["betas"])), *(["exp_avg_sq"] if "beta2" in self.usual else [])]

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise a `ConfigError` for a parameter group with wrong settings."""
        group["betas"], group["omegas"] = as_tuple(group["betas"]), as_tuple(group["omegas"])
        _check(group)
        if len(group["betas"]) != (many := len(self.param_groups[0]["betas"])):
            raise ConfigError(f"all groups have the same number of momenta, here {many}, got betas={group['betas']}")

    def switch(
        self,
        *,
        betas: float | Sequence[float] | None = None,
        omegas: float | Sequence[float] | None = None,
        beta2: float | None = None,
        reset: bool = True,
        lr_scale: float | None = None,
    ) -> None:
        """Change the time scales between two steps, as after a synchronous warm-up; the state stays where it is.

        Args:
            betas: of as many momenta as there are.
            omegas: likewise.
            beta2: of the second moment, where there is one.
            reset: zero the momenta; their bias correction then starts again.
            lr_scale: multiplies whatever lr the groups are given from now on; by default as before.
        """
        given = {"betas": betas, "omegas": omegas, "lr_scale": lr_scale, "beta2": beta2}
        new: dict[str, Any] = {k: v for k, v in given.items() if v is not None} | {"warmup": 0}
        new |= {k: as_tuple(new[k]) for k in ("betas", "omegas") if k in new}
        for group in self.param_groups:  # all of them before any is changed
            if len(new.get("betas", group["betas"])) != len(group["betas"]):
                raise ConfigError(f"there are {len(group['betas'])} momenta, got betas={new['betas']}")
            _check({**group, **new})
        self.defaults.update(new)  # of groups that are added later
        for group in self.param_groups:
            group.update({k: v for k, v in new.items() if k in group})
            if reset:
                self._reset_momenta(group)

    def _reset_momenta(self, group: Mapping[str, Any], *, age: int = 0) -> None:
        """Begin anew with momenta of zero, or, with an age, go on with those that there are as if they had it."""
        for state in (self.state[p] for p in group["params"] if self.state[p]):
            state["step_of_reset"].copy_(state["step"] - age)
            if age:
                continue
            for j, name in enumerate(_momenta(len(group["betas"]))):
                state[name].zero_()
                state["step_seen"][j] = 0

    def step_group(self, group: dict[str, Any]) -> None:
        """Take one step of the parameters of a group."""
        mixture, switch = Mixture.of(group), MomentumSwitch.of(group)
        group["_taken"] += 1
        if switch.resets_at(group["_taken"]):
            self._reset_momenta(group, age=switch.first_age(group["lives"]))
        for (number, age, seen, names, *_), params in self._alike(group).items():
            lr, mixed = switch.applied(group["lr"], mixture, step=group["_taken"], age=age)
            step = Step(number, lr, mixed, seen, group)
            now = torch.tensor(step.seen, dtype=torch.float64, device="cpu")
            for p in params:
                self.state[p]["step_seen"].copy_(now)
            x, g = [local(p) for p in params], [local(p.grad) for p in params if p.grad is not None]
            slots = [[local(self.state[p][name]) for p in params] for name in names]
            for x_part, g_part, *parts in kernels.in_cache([x, g, *slots], whole=not self._elementwise(names)):
                if (shrink := lr * group["weight_decay"]) and self._moves(number):
                    torch._foreach_mul_(x_part, 1 - shrink)
                kernels.in_wide_dtype(type(self).kernel, x_part, g_part, parts, step)

    def _alike(self, group: Mapping[str, Any]) -> dict[tuple[Any, ...], list[Tensor]]:
        """The parameters that have a gradient, by what they must have in common to be stepped together; their state is made."""
        alike: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ConfigError(f"{type(self).__name__} takes dense gradients only")
            state = self.state[p]
            names = self.slots(p, group)
            if not state:
                # Counts are the host's, whatever the default device: to look at them must not wait for anything.
                state["step"], state["step_of_reset"] = torch.tensor(0.0, device="cpu"), torch.tensor(0.0, device="cpu")
                # The sum of the weights that each moment has given to gradients so far, for bias corrections.
                state["step_seen"] = torch.zeros(len(names), dtype=torch.float64, device="cpu")
                wide = torch.promote_types(p.dtype, torch.float32)
                state.update({name: torch.zeros_like(p, dtype=wide) for name in names})
            state["step"] += 1
            age = int(state["step"] - state["step_of_reset"])
            seen = tuple(state["step_seen"].tolist())
            alike.setdefault((int(state["step"]), age, seen, tuple(names), p.dtype, p.device), []).append(p)
        return alike

    def _moves(self, step: int) -> bool:  # noqa: ARG002
        """Whether a parameter's step with this number changes it."""
        return True

    def _elementwise(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        """Whether a tensor with these slots may be stepped piece by piece."""
        return True


class QHM(QuasiHyperbolic):
    """SGD with N (damped) momenta and a share of the raw gradient.

    Defaults: lr 0.1, betas 0.999, omegas 0.7.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        settings: see `Settings`.
    """

    usual_lr = 1e-1
    usual: ClassVar[Settings] = {"betas": 0.999, "omegas": 0.7}
    kernel = staticmethod(kernels.qhm)


class QHAdam(QuasiHyperbolic):
    """Adam (decoupled weight decay) with N momenta and a share of the raw gradient.

    Defaults: lr 1e-3, betas 0.999, omegas 0.95, beta2 0.999, eps 1e-8. A slow momentum takes 2 to 4 times the learning rate of
    Adam, and `propose_beta` finds a beta for a period. One momentum of weight 1 is AdamW.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.optim.QHAdam(model.parameters(), lr=2e-3, betas=0.997, omegas=0.95)

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        settings: see `Settings`.
    """

    usual: ClassVar[Settings] = {"betas": 0.999, "omegas": 0.95, "beta2": 0.999, "eps": 1e-8}
    kernel = staticmethod(kernels.qhadam)


class QHADOPT(QuasiHyperbolic):
    """ADOPT with N momenta of the normalised gradient and a share of it raw.

    Defaults: lr 1e-3, betas 0.999, omegas 0.95, beta2 0.9999, eps 1e-6. One momentum of weight 1 is ADOPT.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        settings: see `Settings`.
    """

    usual: ClassVar[Settings] = {"betas": 0.999, "omegas": 0.95, "beta2": 0.9999, "eps": 1e-6}
    kernel = staticmethod(kernels.qhadopt)

    def _moves(self, step: int) -> bool:
        return step > 1


class QHMuon(QHAdam):
    """Muon with N momenta mixed before the orthogonalisation; parameters that are no matrices are stepped by QHAdam.

    A group with `matrices=False` is stepped by QHAdam as a whole: the place for embeddings and output heads. Five Newton-Schulz
    steps in float32 as in `torch.optim.Muon`, scaled to the step size of AdamW ("match_rms_adamw" there), so that lr is about
    that of AdamW. Defaults: those of QHAdam, nesterov False, matrices True. One momentum of weight 1 is Muon without Nesterov.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        settings: see `Settings`.
    """

    usual: ClassVar[Settings] = {**QHAdam.usual, "nesterov": False, "matrices": True}
    kernel = staticmethod(kernels.qhmuon)

    def slots(self, p: Tensor, group: Mapping[str, Any]) -> list[str]:
        """The momenta, and the second moment of what is no matrix."""
        if p.dim() < 2 or not group["matrices"]:
            return super().slots(p, group)
        if local(p).shape != p.shape:
            raise ConfigError("QHMuon needs whole matrices and these parameters are sharded: use QHAdam, or do not shard")
        return _momenta(len(group["betas"]))

    def _elementwise(self, names: Sequence[str]) -> bool:
        return "exp_avg_sq" in names


def _momenta(count: int) -> list[str]:
    """State keys of the momenta; the first is called as in torch's Adam."""
    return ["exp_avg", *(f"exp_avg_{j}" for j in range(2, count + 1))]


def _check(group: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` for settings of a group that are out of range."""
    for name in ("lr", "weight_decay"):
        check_not_negative(name, group[name])
    Mixture.of(group)
    MomentumSwitch.of(group)
    if group["reset"] == "age" and not group["lives"]:
        raise ConfigError("reset='age' lets betas grow by `lives`, which must then be above 0, got lives=0")
    if "beta2" in group:
        check_decay("beta2", [group["beta2"]], group["beta2"])
    if "eps" in group and not 0 < group["eps"] < math.inf:
        raise ConfigError(f"eps must be above 0 and finite, got {group['eps']!r}")
