"""Low-rank Adam with a full-rank term: the matrix maths of LoRDO and of `thinwire.optim.LowRankAdam`.

A matrix is taken so that its rows are the shorter side: n x m with n <= m, the transpose of a tall one. Tensors of more
dimensions are folded into (first, all others). Q is n x r with orthonormal columns; the moments u and v are r x m. One step:

    S = G + E;   ghat = Q^T S;   E <- S - Q ghat                      E: error feedback, zero without it
    u <- b1 u + (1 - b1) ghat;   v <- b2 v + (1 - b2) ghat^2
    den = sqrt(v / (1 - b2^t)) + eps;   uhat = u / (1 - b1^t)
    outside:  x <- x - lr [(1 - omega) S / mean(den) + omega Q (uhat / den)]        the first term has full rank
    inside:   x <- x - lr Q [((1 - omega) ghat + omega uhat) / den]                 stays in the span of Q

Parameters without a Q are stepped by quasi-hyperbolic Adam: `inside` with Q = 1. A refresh takes a new Q from the difference D
that training has made since the last one, and turns the moments into the new basis (the rule of LDAdam):

    Q_new = the r left singular vectors of D with the largest singular values;   R = Q_new^T Q
    u <- R u;   v <- (1 - b2^t) |(R * R) max(vhat - uhat^2, 0) + (R uhat)^2|        vhat = v / (1 - b2^t)
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError, check_choice, check_not_negative

QH = Literal["outside", "inside"]
MOMENTS = ("exp_avg", "exp_avg_sq")  # u and v; called as in torch's Adam
_PER_GROUP = ("lr", "rank", "omega", "betas", "eps", "weight_decay")


def rank_of(p: Tensor, rank: float) -> int:
    """The rank r that a parameter is projected to; 0 where it is stepped at full rank.

    Args:
        p: the parameter.
        rank: a whole number, or below 1 a part of the shorter side (at least one). A matrix whose shorter side is not longer
            than r has nothing to gain, so it stays at full rank, as do vectors; so does everything for 0.
    """
    if p.dim() < 2 or not rank or not p.numel():
        return 0
    n = min(p.shape[0], p.numel() // p.shape[0])
    r = int(rank) if rank >= 1 else max(1, round(rank * n))
    return r if r < n else 0


def oriented(t: Tensor) -> Tensor:
    """A tensor of two or more dimensions as n x m with n <= m, the way it is projected; not a copy where it is contiguous."""
    M = t.reshape(t.shape[0], -1)
    return M.T if M.shape[0] >= M.shape[1] else M


def first_projector(p: Tensor, rank: float) -> Tensor | None:
    """The Q of before the first refresh: the first r rows of a matrix. None where it is stepped at full rank."""
    r = rank_of(p, rank)
    return torch.eye(oriented(p).shape[0], r, dtype=_wide(p), device=p.device) if r else None  # (n, r)


def slots(rank: Callable[[], float], *, feedback: bool) -> dict[str, Callable[[Tensor], Tensor | None]]:
    """What makes the state of a parameter, by name: u and v; where it is projected, Q and E.

    Args:
        rank: asked when a slot is made.
        feedback: whether there is an E.
    """

    def moment(p: Tensor) -> Tensor:
        r = rank_of(p, rank())
        return torch.zeros((r, oriented(p).shape[1]) if r else p.shape, dtype=_wide(p), device=p.device)

    def residual(p: Tensor) -> Tensor | None:
        return torch.zeros(oriented(p).shape, dtype=_wide(p), device=p.device) if rank_of(p, rank()) else None

    made: dict[str, Callable[[Tensor], Tensor | None]] = dict.fromkeys(MOMENTS, moment)
    made["Q"] = lambda p: first_projector(p, rank())
    return made | ({"E": residual} if feedback else {})


def step(
    params: Iterable[Tensor],
    states: Mapping[Tensor, Mapping[str, Tensor]],
    groups: Iterable[Mapping[str, Any]],
    *,
    qh: str,
    clip: float = 1.0,
) -> None:
    """Step all parameters that have a gradient.

    Args:
        params: changed in place.
        states: of each: exp_avg (u) and exp_avg_sq (v), changed in place; Q where it is projected, E where it has error
            feedback; and as "step" t, the number of this step from 1.
        groups: of each: lr, omega, betas, eps and weight_decay.
        qh: where the share of the raw gradient enters.
        clip: multiplies the gradients first.
    """
    for p, group in zip(params, groups, strict=True):
        if p.grad is not None:
            if p.grad.is_sparse:
                raise ConfigError("low-rank Adam takes dense gradients only")
            _step_one(p.detach(), p.grad, states[p], group, qh=qh, clip=clip)


def _step_one(x: Tensor, g: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any], *, qh: str, clip: float) -> None:
    (u, v), t = (state[name] for name in MOMENTS), int(state["step"])
    lr, omega, (b1, b2) = group["lr"], group["omega"], group["betas"]
    Q, E = state.get("Q"), state.get("E")
    G = g.to(u.dtype) if clip == 1 else g.to(u.dtype) * clip
    if t == 1 and Q is not None and not Q.any():  # a checkpoint of other workers did not bring it
        Q.fill_diagonal_(1)
    S = G if Q is None else oriented(G)
    if E is not None:
        S = S + E  # (n, m)
    ghat = S if Q is None else Q.T @ S  # (r, m)
    if E is not None and Q is not None:
        torch.sub(S, Q @ ghat, out=E)
    u.lerp_(ghat, 1 - b1)
    v.mul_(b2).addcmul_(ghat, ghat, value=1 - b2)
    den = (v / (1 - b2**t)).sqrt_().add_(group["eps"])
    uhat = u / (1 - b1**t)
    if Q is None:
        D = ((1 - omega) * ghat + omega * uhat) / den
    elif qh == "inside":
        D = Q @ (((1 - omega) * ghat + omega * uhat) / den)
    else:
        D = omega * (Q @ (uhat / den))
        if omega < 1:
            # A projection that has seen nothing but zeros knows no scale: 1 / eps would blow the step up.
            mu = torch.where(v.any(), den.mean(), math.inf)
            D += S * ((1 - omega) / mu)
    if Q is not None:
        D = like(x, D)
    if group["weight_decay"]:
        D.add_(x, alpha=group["weight_decay"])
    x.sub_(D, alpha=lr)  # computed in the wider of the two dtypes


def refresh(
    params: Iterable[Tensor],
    states: Mapping[Tensor, Mapping[str, Tensor]],
    groups: Iterable[Mapping[str, Any]],
    D: Iterable[Tensor],
    *,
    turn: bool,
) -> None:
    """Give all parameters that are projected the projector of their difference; they keep theirs if that is not finite.

    Args:
        params: not changed.
        states: of each: Q, exp_avg and exp_avg_sq are changed in place; "step" is t.
        groups: of each, for betas.
        D: what to take it from, in the parameters' shapes.
        turn: rotate the moments into the new basis.
    """
    for p, group, difference in zip(params, groups, D, strict=True):
        Q, (u, v) = states[p].get("Q"), (states[p][name] for name in MOMENTS)
        if Q is None or not bool(difference.isfinite().all()):
            continue
        with one_thread():
            new = projector(oriented(difference.to(Q.dtype)), Q)
            if turn:
                rotate(u, v, new.T @ Q, betas=group["betas"], t=max(1, int(states[p]["step"])))
        Q.copy_(new)


def projector(D: Tensor, Q: Tensor) -> Tensor:
    """The r left singular vectors of D with the largest singular values, each with its largest entry positive.

    Where D has a lower rank than r, columns are added from the span of the old Q. A difference of nothing keeps the old Q.

    Args:
        D: n x m, n <= m, in float32 or wider.
        Q: n x r, the projector so far, with orthonormal columns; not changed.
    """
    r = Q.shape[1]
    U, sigma, _ = torch.linalg.svd(D, full_matrices=False)
    least = float(sigma[0]) * max(D.shape) * torch.finfo(D.dtype).eps
    k = int((sigma > least).sum())
    if k == 0:
        return Q.clone()
    U = U[:, :r]
    if k < r:
        U = U[:, :k]
        # What the old Q spans beyond U: at least r - k of these singular values are 1, so the vectors are well determined.
        beyond, _, _ = torch.linalg.svd(Q - U @ (U.T @ Q), full_matrices=False)
        U = torch.linalg.qr(torch.cat([U, beyond[:, : r - k]], 1))[0]
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))  # (1, r)
    return U * torch.where(largest < 0, -1.0, 1.0).to(U.dtype)


def rotate(u: Tensor, v: Tensor, R: Tensor, *, betas: tuple[float, float], t: int) -> None:
    """Turn the moments into a new basis.

    Args:
        u: r x m; changed in place.
        v: r x m; changed in place.
        R: r x r, from the old basis to the new one.
        betas: for the bias corrections.
        t: likewise, steps so far.
    """
    grown1, grown2 = (1 - b**t for b in betas)
    uhat, vhat = u / grown1, v / grown2
    spread = (vhat - uhat * uhat).clamp_min_(0)
    u.copy_(R @ u)
    v.copy_((((R * R) @ spread + (R @ uhat).square_()) * grown2).abs_())


def zero_nonfinite(states: Iterable[Mapping[str, Tensor]]) -> None:
    """Set to zero what is not finite in moments and error feedback."""
    for state in states:
        for name in (*MOMENTS, "E"):
            if name in state:
                state[name].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def similarity(Q: Tensor, other: Tensor) -> float:
    """How much of one subspace lies in another: the mean square of the cosines between them, from 0 to 1."""
    return float(torch.linalg.svdvals(Q.T @ other).square().mean())


def like(x: Tensor, M: Tensor) -> Tensor:
    """The n x m matrix M in the shape of the parameter that it belongs to: `oriented` undone."""
    tall = x.shape[0] >= x.numel() // x.shape[0]
    return (M.T if tall else M).reshape(x.shape)


def check_group(group: Mapping[str, Any], *, settings: Iterable[str] = (), sharded: bool = False) -> None:
    """Raise a `ConfigError` for settings of a parameter group that make no sense.

    Args:
        group: the group.
        settings: names of all settings; those that may not differ per group are refused in one.
        sharded: whether a process has only a part of each tensor.
    """
    if sharded:
        raise ConfigError("projectors need whole matrices and these parameters are sharded: use DeMo or MTDAO, or do not shard")
    for name in settings:
        if name in group and name not in _PER_GROUP:
            raise ConfigError(f"{name} is one for all parameter groups, got {name}={group[name]!r} in a group")
    rank = group["rank"]
    if isinstance(rank, bool) or not isinstance(rank, int | float) or rank < 0 or (rank >= 1 and rank != int(rank)):
        raise ConfigError(f"rank must be a whole number, or a part of the shorter side below 1, got {rank!r}")
    for name in ("lr", "weight_decay"):
        check_not_negative(name, group[name])
    if not 0 <= group["omega"] <= 1:
        raise ConfigError(f"omega must be from 0 to 1, got {group['omega']!r}")
    if not 0 < group["eps"] < math.inf:
        raise ConfigError(f"eps must be above 0 and finite, got {group['eps']!r}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(f"betas must be two numbers from 0 to below 1, got {betas!r}")


def check_settings(*, qh: str, projection: str = "global", clip_norm: float = 0.0, periods: Sequence[object] = ()) -> None:
    """Raise a `ConfigError` for settings of all groups that make no sense; `periods` are those of the moments."""
    check_choice("qh", qh, ("outside", "inside"))
    check_choice("projection", projection, ("global", "local"))
    check_not_negative("clip_norm", clip_norm)
    if projection == "local" and any(K is not None for K in periods):
        raise ConfigError(
            f"with projection='local' moments are not averaged, since their bases differ: they have no periods, got {periods}"
        )


_thread_count = threading.Lock()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it the CPU computes on one thread: the last bits of a singular vector depend on how many there are."""
    with _thread_count:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
