"""Momenta that grow slow with the run: at an age of t steps the half-life of a momentum is at most t / lives.

    b_t = min(beta, 0.5^(lives / t));   u <- b_t u + (1 - b_t) g

0 lives set no limit. A momentum that is slow while directions still change fast costs much.
"""

from __future__ import annotations

import functools
import math


def beta_at(beta: float, age: int, lives: float) -> float:
    """The decay of a momentum in the step in which it sees its gradient number `age`, from 1.

    >>> beta_at(0.99, 4, lives=4), beta_at(0.99, 4, lives=0), beta_at(0.99, 1000, lives=4)
    (0.5, 0.99, 0.99)
    """
    return min(beta, 0.5 ** (lives / age)) if lives else beta


def weight_seen(beta: float, age: int, lives: float = 0.0) -> float:
    """The sum of the weights that a momentum of this age has given to gradients, for its bias correction.

    >>> weight_seen(0.9, 2) == 1 - 0.9**2
    True
    >>> round(weight_seen(0.99, 2, lives=4), 6)  # 1 - 0.5^4 * 0.5^2
    0.984375
    """
    if not lives:
        return 1 - beta**age
    # Up to this age `lives` decides, so the product of the betas is 0.5 to the power of a harmonic sum.
    young = min(age, int(lives * math.log(0.5) / math.log(beta))) if beta else 0
    return 1 - 0.5 ** (lives * _harmonic(young)) * beta ** (age - young)


def age_of(beta: float, lives: float) -> int:
    """The age at which `lives` allows this beta: where a momentum that had it goes on without a jump."""
    return round(lives * math.log(0.5) / math.log(beta)) if beta else 0


@functools.lru_cache(maxsize=16)
def _harmonic(n: int) -> float:
    return math.fsum(1 / k for k in range(1, n + 1))
