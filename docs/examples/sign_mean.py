"""SignMean: step by the sign of the averaged gradient.

    every step, every worker i:    g <- mean_i g_i
                                   x <- x - lr sign(g)

With P parameters, M workers and b bytes per value, one step's message is N = b (P + M) bytes.
"""

from collections.abc import Iterable
from typing import Any, Unpack

from thinwire import Algorithm, Arrived, Link, Outgoing
from thinwire.core.policy import PolicyOptions


class SignMean(Algorithm):
    """Step by the sign of the averaged gradient.

    Args:
        params: parameters or parameter groups.
        link: this worker's end of the wire.
        lr: the step size.
        options: see `thinwire.Policy`.
    """

    name = "sign-mean"
    replicated = frozenset({"param"})  # bit-equal on all workers at any time

    def __init__(self, params: Iterable[Any], link: Link, *, lr: float = 0.02, **options: Unpack[PolicyOptions]):
        super().__init__(params, link, defaults={"lr": lr}, **options)

    def send(self) -> Outgoing:
        return self.outgoing(self.gradients())

    def apply(self, arrived: Arrived) -> None:
        for x, g, group in zip(self.params(), arrived.mean, self.groups(), strict=True):
            x.sub_(group["lr"] * g.sign())  # x <- x - lr sign(mean_i g_i)
