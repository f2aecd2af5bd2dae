"""Update rules: what becomes of a shared update before it is applied, the phi of DeMo v2.

    sgd      phi(M) = M
    unit     phi(M) = M / rms(M)                                 rms: root mean square of the entries of a tensor
    sign     phi(M) = sign(M)                                    Signum; what DeMo v1 does
    muon     phi(M) = M (M^T M + eps I)^(-1/2)                   of matrices, times what makes its entries' rms 0.2
    adam     phi(M) = m / (sqrt(v) + eps)                        m, v: means of M and M^2 with betas b1, b2, corrected for bias

All rules see what every worker has decoded alike, so their state is bit-equal on all workers and costs no communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from thinwire.codecs.device.bits import number, table
from thinwire.codecs.device.chunks import alike
from thinwire.codecs.made import DeviceWhitening, Made
from thinwire.errors import ConfigError, check_choice, check_not_negative
from thinwire.kernels import Whitening
from thinwire.maths.orthogonalize import orthogonalised
from thinwire.sharding.shards import Shards

if TYPE_CHECKING:
    from thinwire.core.exchange import Arrived

UpdateRule = Literal["unit", "sign", "sgd", "muon", "adam"]
RULES = get_args(UpdateRule)
_MOST_IN_BF16 = 0.99  # of b2: measured, the root of v is 0.7% too large there, and 19% at 0.999


def whitened(g: Tensor, v: Tensor, *, b2: float, eps: float, step: int, clip: float = 1.0) -> Tensor:
    """A gradient divided by sqrt(v) + eps, with v <- b2 v + (1 - b2) g^2 first: what Adam makes of it, without momentum.

    Args:
        g: the gradient, or a piece of it; not changed.
        v: its running second moment; changed in place. In bfloat16 it is rounded to nearest after the step.
        b2: decay of the second moment.
        eps: see above.
        step: how many gradients there have been, this one included.
        clip: multiplies the gradient first.
    """
    dtype = _wide(v.dtype)
    wide = g.to(dtype) if clip == 1 else g.to(dtype) * clip
    square = (v if v.dtype == dtype else v.to(dtype)).mul_(b2).addcmul_(wide, wide, value=1 - b2)
    if square is not v:
        v.copy_(square)  # rounded to nearest; this step divides by what it was before
    root = square.sqrt().div_(math.sqrt(1 - b2**step)).add_(eps)
    return torch.div(wide, root, out=root)


@cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    """What second moments of this dtype are computed in; asked for once, since it is an operation like any other."""
    return torch.promote_types(dtype, torch.float32)


def whitening(
    g: Sequence[Tensor], v: Sequence[Tensor], counts: Sequence[Tensor], groups: Sequence[Mapping[str, Any]], *, clip: float
) -> Made:
    """Gradients that are `whitened` while they are encoded, each once.

    Args:
        g: gradients; not changed.
        v: running second moment of each; changed in place.
        counts: how many gradients each has seen, these included, 0-d.
        groups: the group of each, for betas and eps.
        clip: multiplies the gradients first.
    """
    steps = [int(count) for count in counts]

    def make(i: int, g: Tensor, v: Tensor) -> Tensor:
        return whitened(g, v, b2=groups[i]["betas"][1], eps=groups[i]["eps"], step=steps[i], clip=clip)

    def make_all(numbers: list[int], g: list[Tensor], v: list[Tensor]) -> list[Tensor]:
        made: list[Tensor] = list(g)
        for (b2, eps, step), some in alike([(groups[i]["betas"][1], groups[i]["eps"], steps[i]) for i in numbers]):
            found = _all_whitened([g[n] for n in some], [v[n] for n in some], b2=b2, eps=eps, step=step, clip=clip)
            for n, tensor in zip(some, found, strict=True):
                made[n] = tensor
        return made

    def kernel(i: int, v: Tensor) -> Whitening:
        b2 = groups[i]["betas"][1]
        return Whitening(v, b2, 1 / math.sqrt(1 - b2 ** steps[i]), groups[i]["eps"], clip)

    on_device = DeviceWhitening(g, v, [group["betas"][1] for group in groups], [group["eps"] for group in groups], steps, clip)
    by_kernels = kernel if all(t.dtype == torch.float32 for t in (*g, *v)) else None
    return Made((g, v), make, make_all, whitening=by_kernels, on_device=on_device)


def _all_whitened(g: list[Tensor], v: list[Tensor], *, b2: float, eps: float, step: int, clip: float = 1.0) -> Sequence[Tensor]:
    """`whitened` of many tensors in few operations."""
    dtypes = [_wide(t.dtype) for t in v]
    wide, kept = [t.to(dtype) for t, dtype in zip(g, dtypes, strict=True)], v
    v = [t.to(dtype) for t, dtype in zip(v, dtypes, strict=True)]  # the same tensors where they are as wide
    if isinstance(clip, Tensor) or clip != 1:
        wide = torch._foreach_mul(wide, clip)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, wide, wide, value=1 - b2)
    if narrow := [n for n, t in enumerate(kept) if t is not v[n]]:
        torch._foreach_copy_([kept[n] for n in narrow], [v[n] for n in narrow])  # rounded to nearest
    root = torch._foreach_sqrt(v)
    torch._foreach_div_(root, math.sqrt(1 - b2**step))
    torch._foreach_add_(root, eps)
    return torch._foreach_div(wide, root)


def apply_elementwise(
    rule: UpdateRule,
    x: Tensor,
    M: Tensor,
    *,
    lr: float,
    moments: tuple[Tensor, Tensor] | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    step: int = 1,
) -> None:
    """Step a piece of a tensor: x <- x - lr phi(M).

    Args:
        rule: "sgd", "unit" (of which the caller puts 1 / rms into `lr`), "sign" or "adam".
        x: the piece; changed in place.
        M: the shared update, of the same shape; may be overwritten.
        lr: the step size.
        moments: of Adam: the same pieces of m and v; changed in place.
        betas: of Adam.
        eps: of Adam.
        step: of Adam: how many updates there have been, this one included.
    """
    if rule == "adam":
        assert moments is not None
        (m, v), (b1, b2) = moments, betas
        M = M.to(m.dtype)
        v.mul_(b2).addcmul_(M, M, value=1 - b2)
        m.lerp_(M, 1 - b1)
        root = torch.sqrt(v, out=M).div_(math.sqrt(1 - b2**step)).add_(eps)
        x.addcdiv_(m.to(x.dtype), root.to(x.dtype), value=-lr / (1 - b1**step))
    else:
        x.sub_(M.sign_() if rule == "sign" else M, alpha=lr)


def check_group(group: Mapping[str, Any], *, sharded: bool) -> None:
    """Raise a `ConfigError` for settings of a parameter group that make no sense."""
    check_choice("phi", group["phi"], RULES)
    for name in ("whiten", "inflow", "clip_norm", "over", "delay", "codec"):
        if name in group:
            raise ConfigError(f"{name} is one for all parameter groups, got {name}={group[name]!r} in a group")
    for name in ("lr", "weight_decay"):
        check_not_negative(name, group[name])
    if not 0 < group["eps"] < math.inf:
        raise ConfigError(f"eps must be above 0 and finite, got {group['eps']!r}")
    for name in ("beta", "alpha"):
        if not 0 <= group[name] <= 1:
            raise ConfigError(f"{name} must be from 0 to 1, got {group[name]!r}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(f"betas must be two numbers from 0 to below 1, got {betas!r}")
    if group["phi"] == "adam":  # divides in the parameters' dtype; to whiten is done in float32
        check_eps(group["eps"], {p.dtype for p in group.get("params", ()) if p.requires_grad}, "phi = adam")
    if group["phi"] == "muon" and sharded:
        raise ConfigError("phi='muon' needs whole matrices and these parameters are sharded: use sign or adam, or do not shard")


def check_moment(moment: str, b2: float) -> None:
    """Raise a `ConfigError` for a second moment that is not kept in "fp32" or "bf16", or decays too little for bfloat16."""
    check_choice("moment", moment, ("fp32", "bf16"))
    if moment == "bf16" and b2 > _MOST_IN_BF16:
        raise ConfigError(
            f"moment='bf16' needs a second beta of at most {_MOST_IN_BF16}, got {b2!r}: a decay by less than 1% is lost in the "
            "rounding to bfloat16, so that the moment does not fall again; use moment='fp32'"
        )


def check_eps(eps: float, dtypes: Iterable[torch.dtype], whose: str) -> None:
    """Raise a `ConfigError` for an eps that is 0 in a dtype it is added in: it would not keep anybody from dividing by zero.

    Args:
        eps: as the setting has it.
        dtypes: of what it is added to.
        whose: what has this setting, for the message.
    """
    for dtype in dtypes:
        if eps > 0 and float(torch.tensor(eps, dtype=dtype, device="cpu")) == 0:
            raise ConfigError(
                f"{whose} has eps={eps:g}, which is 0 in {str(dtype).removeprefix('torch.')}: it would divide by zero. Keep "
                "the parameters in float32 and compute under torch.autocast, or in bfloat16, or give an eps of 1e-4"
            )


def apply_shared(
    shared: Arrived,
    x: list[Tensor],
    groups: list[dict[str, Any]],
    *,
    m: Sequence[Tensor | None],
    v: Sequence[Tensor | None],
    counts: Sequence[Tensor | None],
    rms: Sequence[float] | Tensor,
) -> None:
    """Step all parameters: x <- x - lr (phi(Q) + wd x), piece by piece but for Muon's.

    Args:
        shared: the round that brought Q.
        x: the parameters.
        groups: the group of each.
        m: Adam's first moment of each, None where it has none.
        v: likewise the second.
        counts: how many updates Adam's moments of each have seen, 0-d; changed in place, None where it has none.
        rms: root mean square of each Q, for phi = unit; see `rms_of`.
    """
    whole = {i for i, g in enumerate(groups) if g["phi"] == "muon" and x[i].dim() > 1}
    target = [torch.empty_like(t, dtype=torch.float32) if i in whole else t for i, t in enumerate(x)]
    decayed = [(t, 1 - g["lr"] * g["weight_decay"]) for t, g in zip(x, groups, strict=True) if g["weight_decay"]]
    if decayed:
        torch._foreach_mul_([t for t, _ in decayed], [factor for _, factor in decayed])
    for count in counts:
        if count is not None:
            count.add_(1)
    plain = not whole and all(g["phi"] != "adam" for g in groups)
    if shared.on_device and plain:
        _apply_together(shared, x, groups, rms)
        return
    rms = rms.tolist() if isinstance(rms, Tensor) else rms
    rates = [g["lr"] / max(rms[i], 1e-30) if g["phi"] == "unit" else g["lr"] for i, g in enumerate(groups)]
    if plain:
        shared.step(x, rates, [g["phi"] in ("sign", "muon") for g in groups])  # of what is no matrix muon takes the sign
        return
    for i, part, Q, m_part, v_part in shared.each(target, m, v):
        g = groups[i]
        if i in whole:
            part.copy_(Q)
        else:
            rule: UpdateRule = "sign" if g["phi"] == "muon" else g["phi"]
            step = 1 if (count := counts[i]) is None else int(count)
            apply_elementwise(rule, part, Q, lr=rates[i], moments=(m_part, v_part), betas=g["betas"], eps=g["eps"], step=step)
    for i in whole:
        x[i].sub_(orthogonalised(target[i]), alpha=groups[i]["lr"])


def rms_of(shared: Arrived, shards: Shards, params: Sequence[Tensor]) -> list[float] | Tensor:
    """The root mean square of each tensor of a shared update over all shards; a tensor where the update is on a device."""
    squares, lengths = shared.squares(), tuple(max(1, p.numel()) for p in params)
    if isinstance(squares, Tensor):
        return (shards.totals_on_device(squares) / table(lengths, squares.dtype, squares.device)).sqrt_()
    return [math.sqrt(s / n) for s, n in zip(shards.totals(squares), lengths, strict=True)]


def _apply_together(shared: Arrived, x: list[Tensor], groups: list[dict[str, Any]], rms: Sequence[float] | Tensor) -> None:
    """The step of rules without moments in few operations, of an update on a device."""
    scale = None
    if isinstance(rms, Tensor):
        unit = table(tuple(g["phi"] == "unit" for g in groups), torch.bool, rms.device)
        scale = torch.where(unit, rms.clamp_min(1e-30).reciprocal_(), number(1, rms.dtype, rms.device)).float()
    # Of what is no matrix muon takes the sign.
    shared.step(x, [g["lr"] for g in groups], [g["phi"] in ("sign", "muon") for g in groups], scale)
