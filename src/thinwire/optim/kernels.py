"""The steps of the quasi-hyperbolic optimizers on lists of tensors; the equations are in `thinwire.optim.quasi_hyperbolic`.

Every kernel is called as `kernel(x, g, slots, step)`:

    x        parameters, changed in place
    g        their gradients, of the same shapes
    slots    one list of tensors per state slot, the momenta first and the second moment last; changed in place
    step     its number, size, weights and settings
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.maths.orthogonalize import orthogonalised
from thinwire.optim.mixture import Step, Tensors

Kernel = Callable[[list[Tensor], list[Tensor], Sequence[list[Tensor]], Step], None]

_PIECE = 1 << 16  # elements; five tensors of it in float32 are 1.3 MB, which the second-level cache of a core holds


def qhm(x: list[Tensor], g: list[Tensor], slots: Sequence[list[Tensor]], step: Step) -> None:
    """One step of QHM."""
    step.accumulate(slots, g)
    for part, weight in step.parts(slots, g, unbiased=False):
        torch._foreach_add_(x, part, alpha=-step.lr * weight)


def qhadam(x: list[Tensor], g: list[Tensor], slots: Sequence[list[Tensor]], step: Step) -> None:
    """One step of QHAdam."""
    *momenta, v = slots
    beta2, eps = step.settings["beta2"], step.settings["eps"]
    step.accumulate(momenta, g)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)
    grown = math.sqrt(step.seen[-1])  # of v, which comes last
    root = torch._foreach_sqrt(v)
    torch._foreach_add_(root, eps * grown)  # sqrt(v / grown^2) + eps, times `grown`: saves a pass
    for part, weight in step.parts(momenta, g, unbiased=True):
        torch._foreach_addcdiv_(x, part, root, value=-step.lr * weight * grown)


def qhadopt(x: list[Tensor], g: list[Tensor], slots: Sequence[list[Tensor]], step: Step) -> None:
    """One step of QHADOPT; the first only sets the second moment."""
    *momenta, v = slots
    beta2, eps = step.settings["beta2"], step.settings["eps"]
    if step.number == 1:
        torch._foreach_copy_(v, torch._foreach_mul(g, g))
        return
    limit = (step.number - 1) ** 0.25
    n = torch._foreach_sqrt(v)
    torch._foreach_clamp_min_(n, eps)
    n = torch._foreach_div(g, n)
    torch._foreach_clamp_min_(n, -limit)
    torch._foreach_clamp_max_(n, limit)
    step.accumulate(momenta, n)
    for part, weight in step.parts(momenta, n, unbiased=False):
        torch._foreach_add_(x, part, alpha=-step.lr * weight)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, g, g, value=1 - beta2)


def qhmuon(x: list[Tensor], g: list[Tensor], slots: Sequence[list[Tensor]], step: Step) -> None:
    """One step of QHMuon, or of QHAdam where there is a second moment."""
    if len(slots) > len(step.betas):
        qhadam(x, g, slots, step)
        return
    step.accumulate(slots, g)
    ahead: Sequence[Tensors] = slots
    if step.settings["nesterov"]:
        ahead = [torch._foreach_lerp(u, g, 1 - b) for u, b in zip(slots, step.betas, strict=True)]
    direction = [torch.zeros_like(t) for t in g]
    for part, weight in step.parts(ahead, g, unbiased=False):
        torch._foreach_add_(direction, part, alpha=weight)
    for x_, d in zip(x, direction, strict=True):
        x_.sub_(orthogonalised(d), alpha=step.lr)


def in_wide_dtype(kernel: Kernel, x: list[Tensor], g: list[Tensor], slots: Sequence[list[Tensor]], step: Step) -> None:
    """Run a kernel in the dtype of the moments, where parameters or gradients are narrower."""
    wide = slots[0][0].dtype
    if all(t.dtype == wide for t in (*x, *g, *(t for slot in slots for t in slot))):
        kernel(x, g, slots, step)
        return
    copies = [t.to(wide) for t in x]
    kernel(copies, [t.to(wide) for t in g], slots, step)
    for t, copy in zip(x, copies, strict=True):
        t.copy_(copy)


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
