"""Newton-Schulz orthogonalisation of matrices, the update of Muon (Jordan et al. 2024)."""

from __future__ import annotations

import math

from torch import Tensor

# Newton-Schulz coefficients of Jordan et al. (2024): after five steps all singular values lie between about 0.7 and 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalised(M: Tensor, *, steps: int = 5) -> Tensor:
    """About M (M^T M)^(-1/2), by Newton-Schulz steps in float32; scaled so that its entries have a root mean square of 0.2.

    The scale (Liu et al. 2025, arXiv 2502.16982) makes one learning rate serve matrices of all shapes, and about the one of
    AdamW.

    Args:
        M: two or more dimensions; folded into (first, all others).
        steps: each costs three matrix products.
    """
    a, b, c = _QUINTIC
    X = M.reshape(M.shape[0], math.prod(M.shape[1:])).float()
    wide = X.shape[0] <= X.shape[1]
    X = X if wide else X.T  # the products are of the shorter side
    X = X / X.norm().clamp_min(1e-12)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return (X if wide else X.T).reshape(M.shape) * (0.2 * math.sqrt(max(X.shape)))
