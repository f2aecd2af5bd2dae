"""Low-rank Adam with a full-rank term: the matrix maths of LoRDO and of `thinwire.optim.LowRankAdam`.

A matrix is taken so that its rows are the shorter side: n x m with n <= m, the transpose of a tall one. Tensors of more
dimensions are folded into (first, all others). Q is n x r with orthonormal columns; the moments u and v are r x m. One step:

    S = G + E;   ghat = Q^T S;   E <- S - Q ghat                      E: error feedback, zero without it
    u <- b1 u + (1 - b1) ghat;   v <- b2 v + (1 - b2) ghat^2
    den = sqrt(v / (1 - b2^t)) + eps;   uhat = u / (1 - b1^t)
    outside:  x <- x - lr [(1 - omega) S / mean(den) + omega Q (uhat / den)]        the first term has full rank
    inside:   x <- x - lr Q [((1 - omega) ghat + omega uhat) / den]                 stays in the span of Q

Parameters without a Q are stepped by quasi-hyperbolic Adam: `inside` with Q = 1. With `lives`, b1 grows with the age of u
(`thinwire.maths.lives`). A refresh takes a new Q from a source D, and turns the moments into its basis (the rule of LDAdam):

    D = the difference that training has made since the last refresh, the gradient of the last step G, or
        a sketch of it G Omega: n x (r + 8), Omega of random signs that all workers have in common
    Q_new = the r left singular vectors of D with the largest singular values;   R = Q_new^T Q
    u <- R u;   v <- (1 - b2^t) |(R * R) max(vhat - uhat^2, 0) + (R uhat)^2|        vhat = v / (1 - b2^t)
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.shared_seed import numbers
from thinwire.errors import ConfigError, check_choice, check_not_negative
from thinwire.maths.lives import age_of, beta_at, weight_seen

QH = Literal["outside", "inside"]
Source = Literal["difference", "gradient", "sketch"]
MOMENTS = ("exp_avg", "exp_avg_sq")  # u and v; called as in torch's Adam
_PER_GROUP = ("lr", "rank", "omega", "betas", "lives", "eps", "weight_decay")
_SPARE = 8  # columns of a sketch beyond the rank
_SKETCHES = 0x10A0D0  # purpose of the random numbers of sketches


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
            feedback; and as "step" t, the number of this step from 1, less "step_of_reset" of a u that is younger than v.
        groups: of each: lr, omega, betas, lives, eps and weight_decay.
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
    lr, omega, b1, (seen_u, seen_v) = group["lr"], group["omega"], _beta1(state, group), _weights_seen(state, group)
    b2 = group["betas"][1]
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
    den = (v / seen_v).sqrt_().add_(group["eps"])
    uhat = u / seen_u
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


def _age(state: Mapping[str, Tensor]) -> int:
    """Gradients that u has seen."""
    return int(state["step"]) - int(state.get("step_of_reset", 0))


def _beta1(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> float:
    return beta_at(group["betas"][0], _age(state), group.get("lives", 0.0))


def _weights_seen(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> tuple[float, float]:
    """The bias corrections of u and v; those of the first step where there was none yet."""
    b1, b2 = group["betas"]
    return weight_seen(b1, max(1, _age(state)), group.get("lives", 0.0)), weight_seen(b2, max(1, int(state["step"])))


def refresh(
    params: Iterable[Tensor],
    states: Mapping[Tensor, Mapping[str, Tensor]],
    groups: Iterable[Mapping[str, Any]],
    sources: Iterable[Tensor],
    *,
    turn: bool,
) -> None:
    """Give parameters the projectors of their sources; they keep theirs if a source is nothing, or not finite.

    Args:
        params: those that are projected; not changed.
        states: of each: Q, exp_avg and exp_avg_sq are changed in place; "step" is t.
        groups: of each, for betas and lives.
        sources: what to take it from, of each: `oriented`, or a sketch of that.
        turn: rotate the moments into the new basis.
    """
    for p, group, source in zip(params, groups, sources, strict=True):
        if not bool(source.any()) or not bool(source.isfinite().all()):
            continue
        Q, (u, v) = states[p]["Q"], (states[p][name] for name in MOMENTS)
        with one_thread():
            new = projector(source.to(Q.dtype), Q)
            if turn:
                rotate(u, v, new.T @ Q, seen=_weights_seen(states[p], group))
        Q.copy_(new)


def contribution(G: Tensor, Q: Tensor, source: str, *, round: int, clip: float = 1.0) -> Tensor:
    """What a worker gives of its gradient for a new projector; all give zeros where they have none, which keeps the old one.

    Args:
        G: of a parameter that is projected.
        Q: its projector.
        source: "gradient" for all of it, n x m, or "sketch" for n x (r + 8) of it.
        round: number of the refresh, another sketch in each.
        clip: multiplies it first; with 0 it is not looked at.
    """
    M, (n, r) = oriented(G).to(Q.dtype), Q.shape
    columns = M.shape[1] if source == "gradient" else min(n, r + _SPARE)
    if not clip:
        return M.new_zeros(n, columns)
    M = M if clip == 1 else M * clip
    if source == "gradient":
        return M
    with one_thread():
        return M @ _signs(M.shape[1], columns, round).to(M)


def _signs(rows: int, columns: int, round: int) -> Tensor:
    """A matrix of random signs, the same on all workers, of a size that keeps that of what it is multiplied with."""
    words = numbers(0, round, _SKETCHES, -(-rows * columns // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=rows * columns)
    return torch.from_numpy(bits).reshape(rows, columns).to(torch.float32).mul_(2).sub_(1).mul_(rows**-0.5)


def projector(D: Tensor, Q: Tensor) -> Tensor:
    """The r left singular vectors of D with the largest singular values, each with its largest entry positive.

    Where D has a lower rank than r, columns are added from the span of the old Q. A difference of nothing keeps the old Q.

    Args:
        D: n rows, at least r columns, in float32 or wider.
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


def rotate(u: Tensor, v: Tensor, R: Tensor, *, seen: tuple[float, float]) -> None:
    """Turn the moments into a new basis.

    Args:
        u: r x m; changed in place.
        v: r x m; changed in place.
        R: r x r, from the old basis to the new one.
        seen: the bias corrections of both, 1 - b^t.
    """
    uhat, vhat = u / seen[0], v / seen[1]
    spread = (vhat - uhat * uhat).clamp_min_(0)
    u.copy_(R @ u)
    v.copy_((((R * R) @ spread + (R @ uhat).square_()) * seen[1]).abs_())


def go_on(
    state: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    group: Mapping[str, Any],
    was: Mapping[str, Any],
    *,
    momenta: bool,
) -> None:
    """Go on with what another low-rank Adam has of a parameter, as if it had been made with the betas of this one.

    Args:
        state: of this one, with "step_of_reset"; changed in place. Q was taken over already.
        before: of the other; nothing is taken where shapes are others.
        group: settings of this one.
        was: settings of the other.
        momenta: u and E too. With `lives`, b1 then grows from where it was; without them it is what it is at once.
    """
    names = [name for name in (*MOMENTS, "Q") if name in state]
    if "step" not in before or any(name not in before or before[name].shape != state[name].shape for name in names):
        return
    t, lives = max(1, int(before["step"])), group["lives"]
    seen_u, seen_v = _weights_seen(before, was)
    state["exp_avg_sq"].copy_(before["exp_avg_sq"] * (weight_seen(group["betas"][1], t) / seen_v))
    age = 0
    if momenta:
        age = age_of(was["betas"][0], lives) if lives else t
        state["exp_avg"].copy_(before["exp_avg"] * (weight_seen(group["betas"][0], age, lives) / seen_u))
        if "E" in state and "E" in before:
            state["E"].copy_(before["E"])
    state["step"].fill_(t)
    state["step_of_reset"].fill_(t - age)


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
    for name in ("lr", "weight_decay", "lives"):
        check_not_negative(name, group.get(name, 0.0))
    if not 0 <= group["omega"] <= 1:
        raise ConfigError(f"omega must be from 0 to 1, got {group['omega']!r}")
    if not 0 < group["eps"] < math.inf:
        raise ConfigError(f"eps must be above 0 and finite, got {group['eps']!r}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(f"betas must be two numbers from 0 to below 1, got {betas!r}")


def check_settings(
    *, qh: str, source: str, projection: str = "global", clip_norm: float = 0.0, periods: Sequence[object] = ()
) -> None:
    """Raise a `ConfigError` for settings of all groups that make no sense; `periods` are those of the moments."""
    check_choice("qh", qh, get_args(QH))
    check_choice("source", source, get_args(Source))
    check_choice("projection", projection, ("global", "local"))
    check_not_negative("clip_norm", clip_norm)
    if projection == "local" and source != "difference":
        raise ConfigError(f"with projection='local' each worker takes its own gradient: source is of all, got {source!r}")
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
