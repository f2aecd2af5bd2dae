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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError, check_not_negative, check_whole_number
from thinwire.maths.orthogonalize import orthogonalised
from thinwire.sharding.shards import local

Tensors = list[Tensor] | tuple[Tensor, ...]

_PIECE = 1 << 16  # elements; five tensors of it in float32 are 1.3 MB, which the second-level cache of a core holds


class Common(TypedDict, total=False):
    """What all quasi-hyperbolic optimizers take besides; keyword arguments of each.

    Attributes:
        lives: let a momentum grow slow with the run: at its age of t steps its half-life is at most t / lives, until it is that
            of its beta; 0 has it slow from the start. A momentum that is slow when directions still change fast costs much.
        weight_decay: decoupled: x <- x (1 - lr wd) first.
        warmup: so many first steps are taken with one plain momentum (beta `warmup_beta`, weight 1); then come `betas` and
            `omegas`. The recipe of the authors of MT-DAO, who warm up synchronously.
        warmup_beta: the momentum's decay during the warm-up.
        reset: zero the momenta after the warm-up.
        lr_scale: multiplies lr after the warm-up.
    """

    lives: float
    weight_decay: float
    warmup: int
    warmup_beta: float
    reset: bool
    lr_scale: float


_USUAL: Common = {"lives": 0.0, "weight_decay": 0.0, "warmup": 0, "warmup_beta": 0.9, "reset": True, "lr_scale": 1.0}


class QuasiHyperbolic(Optimizer):
    """Base of the quasi-hyperbolic optimizers: settings, state, the switch after a warm-up, and pieces that stay in cache.

    Args:
        params: as for any torch optimizer; all settings may differ per group but the number of momenta.
        lr: learning rate.
        betas: decay of each momentum, one number or several.
        omegas: weight of each momentum; what is missing to 1 is the weight of the raw gradient.
        common: see `Common`.
        own: further settings of the subclass.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: float | Sequence[float],
        omegas: float | Sequence[float],
        common: Common,
        **own: Any,
    ):
        """Check the settings; state is made at the first step, as in torch's own."""
        if unknown := sorted(set(common) - set(_USUAL)):
            raise TypeError(f"{type(self).__name__} takes no argument {unknown[0]!r}")
        named = {"lr": lr, "betas": _several(betas), "omegas": _several(omegas), **_USUAL, **common, **own}
        defaults = {**named, "_taken": 0}  # no setting: a worker that skips a step has taken fewer
        super().__init__(params, defaults)

    # What a subclass writes.

    def slots(self, p: Tensor, group: Mapping[str, Any]) -> list[str]:  # noqa: ARG002
        """Names of the state tensors of a parameter, the momenta first."""
        return _momenta(len(group["betas"]))

    def kernel(self, group: Mapping[str, Any], mix: Mix, step: int) -> Callable[..., None]:
        """What steps lists of equally shaped tensors: called with (x, g, one list per slot)."""
        raise NotImplementedError

    # What they have in common.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in any torch optimizer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["betas"], group["omegas"] = _several(group["betas"]), _several(group["omegas"])
        try:
            _check(group)
            if len(group["betas"]) != (many := len(self.param_groups[0]["betas"])):
                raise ConfigError(f"all groups have the same number of momenta, here {many}, got betas={group['betas']}")
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["_taken"] += 1
            if group["warmup"] and group["_taken"] == group["warmup"] + 1 and group["reset"]:
                self._reset_momenta(group)
            self._step_group(group)
        return loss

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
            reset: zero the momenta; their bias correction then begins anew.
            lr_scale: multiplies whatever lr the groups are given from now on; by default as before.
        """
        given = {"betas": betas, "omegas": omegas, "lr_scale": lr_scale, "beta2": beta2}
        new: dict[str, Any] = {k: v for k, v in given.items() if v is not None} | {"warmup": 0}
        new |= {k: _several(new[k]) for k in ("betas", "omegas") if k in new}
        for group in self.param_groups:  # all of them before any is changed
            if len(new.get("betas", group["betas"])) != len(group["betas"]):
                raise ConfigError(f"there are {len(group['betas'])} momenta, got betas={new['betas']}")
            _check({**group, **new})
        self.defaults.update(new)  # of groups that are added later
        for group in self.param_groups:
            group.update({k: v for k, v in new.items() if k in group})
            if reset:
                self._reset_momenta(group)

    def _reset_momenta(self, group: Mapping[str, Any]) -> None:
        for state in (self.state[p] for p in group["params"] if self.state[p]):
            state["step_of_reset"].copy_(state["step"])
            for j, name in enumerate(_momenta(len(group["betas"]))):
                state[name].zero_()
                state["step_seen"][j] = 0

    def _step_group(self, group: dict[str, Any]) -> None:
        alike: dict[tuple[Any, ...], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise ConfigError(f"{type(self).__name__} takes dense gradients only")
            state = self.state[p]
            names = self.slots(p, group)
            if not state:
                state["step"], state["step_of_reset"] = torch.tensor(0.0), torch.tensor(0.0)
                # The sum of the weights that each moment has given to gradients so far, for bias corrections.
                state["step_seen"] = torch.zeros(len(names), dtype=torch.float64)
                wide = torch.promote_types(p.dtype, torch.float32)
                state.update({name: torch.zeros_like(p, dtype=wide) for name in names})
            state["step"] += 1
            age = int(state["step"] - state["step_of_reset"])
            seen = tuple(state["step_seen"].tolist())
            alike.setdefault((int(state["step"]), age, seen, tuple(names), p.dtype, p.device), []).append(p)
        warm = group["_taken"] <= group["warmup"]
        for (step, age, seen, names, *_), params in alike.items():
            mix = Mix.of(group, warm=warm, age=age, seen=seen)
            now = torch.tensor(mix.seen, dtype=torch.float64)
            for p in params:
                self.state[p]["step_seen"].copy_(now)
            kernel = self.kernel(group, mix, step)
            x, g = [local(p) for p in params], [local(p.grad) for p in params if p.grad is not None]
            slots = [[local(self.state[p][name]) for p in params] for name in names]
            for part in in_cache([x, g, *slots], whole=not self._elementwise(names)):
                if (shrink := mix.lr * group["weight_decay"]) and self._moves(step):
                    torch._foreach_mul_(part[0], 1 - shrink)
                _wide(kernel, *part)

    def _moves(self, step: int) -> bool:  # noqa: ARG002
        """Whether a parameter's step with this number changes it."""
        return True

    def _elementwise(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        """Whether a tensor with these slots may be stepped piece by piece."""
        return True

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in torch, but the moments keep their width: torch casts them to the parameters' dtype."""
        super().load_state_dict(dict(state_dict))
        keep_widths(self, state_dict)
        for group in self.param_groups:  # a JSON or a checkpoint reader may have made lists of them
            group["betas"], group["omegas"] = tuple(group["betas"]), tuple(group["omegas"])


class Mix:
    """The direction of one step: which weights the gradient and the momenta have.

    Args:
        lr: the step size.
        betas: of the momenta at this step.
        omegas: their weights.
        seen: the sum of the weights that each moment has given to gradients before this step, the momenta first.
        beta2: of the second moment, where there is one.
    """

    def __init__(self, lr: float, betas: Sequence[float], omegas: Sequence[float], seen: Sequence[float], beta2: float):
        """Add this step's weights."""
        self.lr, self.betas, self.omegas = lr, betas, omegas
        self.seen = [s + (1 - b) * (1 - s) for s, b in zip(seen, [*betas, beta2], strict=False)]
        self.rest = max(0.0, 1 - math.fsum(omegas))  # of the raw gradient

    @classmethod
    def of(cls, group: Mapping[str, Any], *, warm: bool, age: int, seen: Sequence[float]) -> Mix:
        """Of a group at a step; `age` counts the gradients that the momenta have seen, this one included."""
        lr, betas, omegas = group["lr"] * group["lr_scale"], group["betas"], group["omegas"]
        if warm:
            lr, betas = group["lr"], [group["warmup_beta"]] * len(betas)
            omegas = [1.0, *[0.0] * (len(betas) - 1)]
        elif group["lives"]:
            betas = [min(b, 0.5 ** (group["lives"] / age)) for b in betas]  # half-lives of at most age / lives
        return cls(lr, betas, omegas, seen, group.get("beta2", 0.0))

    def remember(self, momenta: Sequence[Tensors], g: Tensors) -> None:
        """u_j <- b_j u_j + (1 - b_j) g, all in place."""
        for u, b in zip(momenta, self.betas, strict=True):
            torch._foreach_lerp_(u, g, 1 - b)

    def parts(self, momenta: Sequence[Tensors], g: Tensors, *, unbiased: bool) -> Iterator[tuple[Tensors, float]]:
        """What the direction is a sum of: lists of tensors and their weights."""
        for u, seen, w in zip(momenta, self.seen, self.omegas, strict=False):
            if w:
                yield u, w / seen if unbiased else w
        if self.rest > 1e-12:
            yield g, self.rest


class QHAdam(QuasiHyperbolic):
    """Adam (decoupled weight decay) with N momenta and a share of the raw gradient.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.optim.QHAdam(model.parameters(), lr=2e-3, betas=0.997, omegas=0.95)

    Args:
        params: as for any torch optimizer.
        lr: learning rate; 2 to 4 times that of Adam for a slow momentum.
        betas: decay of each momentum; `propose_beta` finds one for a period.
        omegas: weight of each momentum; 1 with one momentum is AdamW.
        beta2: decay of the second moment.
        eps: added to its root.
        common: see `Common`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: float | Sequence[float] = 0.999,
        omegas: float | Sequence[float] = 0.95,
        beta2: float = 0.999,
        eps: float = 1e-8,
        **common: Unpack[Common],
    ):
        """Check the settings."""
        super().__init__(params, lr=lr, betas=betas, omegas=omegas, common=common, beta2=beta2, eps=eps)

    def slots(self, p: Tensor, group: Mapping[str, Any]) -> list[str]:
        """The momenta and the second moment."""
        return [*super().slots(p, group), "exp_avg_sq"]

    def kernel(self, group: Mapping[str, Any], mix: Mix, step: int) -> Callable[..., None]:  # noqa: ARG002
        """One step of QHAdam."""
        b2, eps = group["beta2"], group["eps"]
        grown = math.sqrt(mix.seen[-1])  # of v, which comes last

        def run(x: list[Tensor], g: list[Tensor], *slots: list[Tensor]) -> None:
            *momenta, v = slots
            mix.remember(momenta, g)
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, g, g, value=1 - b2)
            root = torch._foreach_sqrt(v)
            torch._foreach_add_(root, eps * grown)  # sqrt(v / grown^2) + eps, times `grown`: saves a pass
            for part, weight in mix.parts(momenta, g, unbiased=True):
                torch._foreach_addcdiv_(x, part, root, value=-mix.lr * weight * grown)

        return run


class QHADOPT(QuasiHyperbolic):
    """ADOPT with N momenta of the normalised gradient and a share of it raw.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        betas: decay of each momentum.
        omegas: weight of each momentum; 1 with one momentum is ADOPT.
        beta2: decay of the second moment.
        eps: least root of it.
        common: see `Common`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: float | Sequence[float] = 0.999,
        omegas: float | Sequence[float] = 0.95,
        beta2: float = 0.9999,
        eps: float = 1e-6,
        **common: Unpack[Common],
    ):
        """Check the settings."""
        super().__init__(params, lr=lr, betas=betas, omegas=omegas, common=common, beta2=beta2, eps=eps)

    def slots(self, p: Tensor, group: Mapping[str, Any]) -> list[str]:
        """The momenta and the second moment."""
        return [*super().slots(p, group), "exp_avg_sq"]

    def _moves(self, step: int) -> bool:
        return step > 1

    def kernel(self, group: Mapping[str, Any], mix: Mix, step: int) -> Callable[..., None]:
        """One step of QHADOPT; the first only sets the second moment."""
        b2, eps, most = group["beta2"], group["eps"], (step - 1) ** 0.25

        def run(x: list[Tensor], g: list[Tensor], *slots: list[Tensor]) -> None:
            *momenta, v = slots
            if step == 1:
                torch._foreach_copy_(v, torch._foreach_mul(g, g))
                return
            n = torch._foreach_sqrt(v)
            torch._foreach_clamp_min_(n, eps)
            n = torch._foreach_div(g, n)
            torch._foreach_clamp_min_(n, -most)
            torch._foreach_clamp_max_(n, most)
            mix.remember(momenta, n)
            for part, weight in mix.parts(momenta, n, unbiased=False):
                torch._foreach_add_(x, part, alpha=-mix.lr * weight)
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, g, g, value=1 - b2)

        return run


class QHM(QuasiHyperbolic):
    """SGD with N (damped) momenta and a share of the raw gradient.

    Args:
        params: as for any torch optimizer.
        lr: learning rate.
        betas: decay of each momentum.
        omegas: weight of each momentum.
        common: see `Common`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-1,
        *,
        betas: float | Sequence[float] = 0.999,
        omegas: float | Sequence[float] = 0.7,
        **common: Unpack[Common],
    ):
        """Check the settings."""
        super().__init__(params, lr=lr, betas=betas, omegas=omegas, common=common)

    def kernel(self, group: Mapping[str, Any], mix: Mix, step: int) -> Callable[..., None]:  # noqa: ARG002
        """One step of QHM."""

        def run(x: list[Tensor], g: list[Tensor], *momenta: list[Tensor]) -> None:
            mix.remember(momenta, g)
            for part, weight in mix.parts(momenta, g, unbiased=False):
                torch._foreach_add_(x, part, alpha=-mix.lr * weight)

        return run


class QHMuon(QHAdam):
    """Muon with N momenta mixed before the orthogonalisation; parameters that are no matrices are stepped by QHAdam.

    A group with `matrices=False` is stepped by QHAdam as a whole: the place for embeddings and output heads. Five Newton-Schulz
    steps in float32 as in `torch.optim.Muon`, scaled to the step size of AdamW ("match_rms_adamw" there).

    Args:
        params: as for any torch optimizer.
        lr: learning rate, about that of AdamW.
        betas: decay of each momentum.
        omegas: weight of each momentum; 1 with one momentum is Muon without Nesterov.
        nesterov: look ahead: u_j is replaced by (1 - b_j) g + b_j u_j in the direction.
        matrices: orthogonalise parameters of two or more dimensions.
        beta2: of QHAdam.
        eps: of QHAdam.
        common: see `Common`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: float | Sequence[float] = 0.999,
        omegas: float | Sequence[float] = 0.95,
        nesterov: bool = False,
        matrices: bool = True,
        beta2: float = 0.999,
        eps: float = 1e-8,
        **common: Unpack[Common],
    ):
        """Check the settings."""
        own = {"beta2": beta2, "eps": eps, "nesterov": nesterov, "matrices": matrices}
        QuasiHyperbolic.__init__(self, params, lr=lr, betas=betas, omegas=omegas, common=common, **own)

    def slots(self, p: Tensor, group: Mapping[str, Any]) -> list[str]:
        """The momenta, and the second moment of what is no matrix."""
        if p.dim() < 2 or not group["matrices"]:
            return super().slots(p, group)
        if local(p).shape != p.shape:
            raise ConfigError("QHMuon needs whole matrices and these parameters are sharded: use QHAdam, or do not shard")
        return _momenta(len(group["betas"]))

    def _elementwise(self, names: Sequence[str]) -> bool:
        return "exp_avg_sq" in names

    def kernel(self, group: Mapping[str, Any], mix: Mix, step: int) -> Callable[..., None]:
        """One step of QHMuon, or of QHAdam where there is a second moment."""
        adam, many = super().kernel(group, mix, step), len(group["betas"])

        def run(x: list[Tensor], g: list[Tensor], *slots: list[Tensor]) -> None:
            if len(slots) > many:
                adam(x, g, *slots)
                return
            mix.remember(slots, g)
            ahead: Sequence[Tensors] = slots
            if group["nesterov"]:
                ahead = [torch._foreach_lerp(u, g, 1 - b) for u, b in zip(slots, mix.betas, strict=True)]
            direction = [torch.zeros_like(t) for t in g]
            for part, weight in mix.parts(ahead, g, unbiased=False):
                torch._foreach_add_(direction, part, alpha=weight)
            for x_, d in zip(x, direction, strict=True):
                x_.sub_(orthogonalised(d), alpha=mix.lr)

        return run


def keep_widths(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Put the state of a state dict in as it is, after torch has loaded it and cast it to the parameters' dtype.

    Counts, whose names begin with "step", stay on the CPU.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for key, p in zip(keys, params, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            where = "cpu" if name.startswith("step") else p.device
            optimizer.state[p][name] = torch.as_tensor(value).detach().to(where, copy=True)


def in_cache(columns: Sequence[list[Tensor]], *, whole: bool = False) -> Iterator[list[list[Tensor]]]:
    """Go through lists of tensors side by side, on a CPU in portions that stay in its cache.

    Args:
        columns: lists of equal length; tensors at the same place have the same shape.
        whole: do not cut tensors.
    """
    if not columns[0] or whole or columns[0][0].device.type != "cpu":
        yield [list(column) for column in columns]
        return
    portion: list[list[Tensor]] = [[] for _ in columns]
    held = 0
    for row in zip(*columns, strict=True):
        n = row[0].numel()
        if n > _PIECE and all(t.is_contiguous() for t in row):
            for pieces in zip(*(t.view(-1).split(_PIECE) for t in row), strict=True):
                yield [[piece] for piece in pieces]
            continue
        for column, t in zip(portion, row, strict=True):
            column.append(t)
        held += n
        if held >= _PIECE:
            yield portion
            portion, held = [[] for _ in columns], 0
    if portion[0]:
        yield portion


def _wide(kernel: Callable[..., None], x: list[Tensor], g: list[Tensor], *slots: list[Tensor]) -> None:
    """Run a kernel in the moments' width, where parameters or gradients are narrower."""
    wide = slots[0][0].dtype
    if all(t.dtype == wide for t in (*x, *g, *(t for slot in slots for t in slot))):
        kernel(x, g, *slots)
        return
    copies = [t.to(wide) for t in x]
    kernel(copies, [t.to(wide) for t in g], *slots)
    for t, copy in zip(x, copies, strict=True):
        t.copy_(copy)


def _momenta(count: int) -> list[str]:
    """State keys of the momenta; the first is called as in torch's Adam."""
    return ["exp_avg", *(f"exp_avg_{j}" for j in range(2, count + 1))]


def _several(value: float | Sequence[float]) -> tuple[float, ...]:
    return (float(value),) if isinstance(value, int | float) else tuple(float(v) for v in value)


def _check(group: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` for settings of a group that make no sense."""
    betas, omegas = group["betas"], group["omegas"]
    if not betas or len(betas) != len(omegas):
        raise ConfigError(f"betas and omegas must be as many as there are momenta, got betas={betas}, omegas={omegas}")
    for name in ("lr", "weight_decay", "lr_scale", "lives"):
        check_not_negative(name, group[name])
    for name, values in (("betas", betas), ("warmup_beta", [group["warmup_beta"]]), ("beta2", [group.get("beta2", 0.0)])):
        if not all(0 <= b < 1 for b in values):
            raise ConfigError(f"{name} must be from 0 to below 1, got {group[name]!r}")
    if not all(w >= 0 for w in omegas) or math.fsum(omegas) > 1 + 1e-9:
        raise ConfigError(f"omegas must be at least 0 and sum up to at most 1, got {omegas}")
    if "eps" in group and not 0 < group["eps"] < math.inf:
        raise ConfigError(f"eps must be above 0 and finite, got {group['eps']!r}")
    check_whole_number("warmup", group["warmup"], least=0)
