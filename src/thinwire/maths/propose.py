"""Which beta suits a period: the arithmetic behind a slow momentum.

A momentum u <- beta u + (1 - beta) g that all workers agreed on has the weight beta^K left after K local steps. MT-DAO wants
it to be most of what a worker follows, so beta^K should be near 1. But a momentum that is slower than the run never gets to
know the direction: its half-life ln(1/2) / ln(beta) must lie well below the number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError, check_whole_number

LIVES = 4  # half-lives that should fit into a run


def half_life(beta: float) -> float:
    """Steps after which half of a momentum's weight lies on newer gradients.

    >>> round(half_life(0.999))
    693
    """
    if not 0 < beta < 1:
        raise ConfigError(f"beta must be above 0 and below 1, got {beta!r}")
    return math.log(0.5) / math.log(beta)


@dataclass(frozen=True)
class BetaProposal:
    """A beta and the reasons for it.

    Attributes:
        beta: the proposal.
        K: the period it is for.
        retention: beta^K, the weight that the last agreed momentum has just before the next average.
        half_life: in steps.
        limited_by_run: whether the run is too short for the retention that was asked for.
        explanation: all of it in words.
    """

    beta: float
    K: int
    retention: float
    half_life: float
    limited_by_run: bool
    explanation: str


def propose_beta(K: int, *, retention: float = 0.9, steps: int | None = None) -> BetaProposal:
    """The beta for which beta^K is the retention asked for, or as much as a run of this length can bear.

    >>> round(propose_beta(32).beta, 4)
    0.9967

    Args:
        K: steps between two averages of the momentum.
        retention: how much of the agreed momentum should be left after K steps.
        steps: length of the run; without it, it is taken to be long enough.
    """
    check_whole_number("K", K)
    if not 0 < retention < 1:
        raise ConfigError(f"retention must be above 0 and below 1, got {retention!r}")
    beta = retention ** (1 / K)
    limited = False
    if steps is not None:
        check_whole_number("steps", steps)
        slowest = 0.5 ** (LIVES / steps)
        limited = beta > slowest
        beta = min(beta, slowest)
    kept, half = beta**K, half_life(beta)
    words = f"beta = {beta:.5g}: of a momentum that all agreed on {kept:.0%} is left after K = {K} local steps"
    words += f", and it halves in {half:.0f} steps"
    if limited:
        words += f". For {retention:.0%} it would have to be {retention ** (1 / K):.5g}, which is too slow for a run of {steps}"
        words += f" steps: {LIVES} half-lives should fit into it. Average the momentum more often, or train longer"
    return BetaProposal(beta, K, kept, half, limited, f"{words}.")
