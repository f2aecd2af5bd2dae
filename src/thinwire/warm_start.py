"""WarmStart: synchronous steps first, then a method with local steps around the same inner optimizer.

Early in training gradients change fast, and workers that step alone drift apart for nothing. The first N steps are therefore
synchronous, or DeMo's; then the method takes over, and the inner optimizer goes on with the moments that it has:

    steps 1 to N:       start(inner, link), by default DataParallel
    steps N+1, ...:     then(inner, link)
"""

from __future__ import annotations

from torch.optim import Optimizer

from thinwire.algorithms import DataParallel
from thinwire.core.phases import Make, Phases
from thinwire.links.base import Link


class WarmStart(Phases):
    """Take the first steps synchronously, then let a method take over around the same inner optimizer.

    It is one optimizer to schedulers, checkpoints and loops: parameter groups stay, steps and bytes are counted through, and a
    state or checkpoint of any step can be loaded.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> opt = thinwire.WarmStart(
        ...     torch.optim.AdamW(model.parameters(), lr=1e-3),
        ...     thinwire.connect(),
        ...     steps=256,
        ...     then=lambda inner, link: thinwire.DiLoCo(inner, link, H=32),
        ... )

    Args:
        inner: any torch optimizer.
        link: this worker's end of the wire.
        steps: how many steps the start takes.
        then: makes the method, from (inner, link). One without an inner optimizer takes the parameter groups of `inner`, as in
            `lambda inner, link: thinwire.DeMo(inner.param_groups, link)`, so that learning rates go on.
        start: makes what takes the first steps, likewise; `DataParallel` by default. With `DeMo` the inner optimizer begins
            without moments when the method takes over, unless `second_moments` is given.
        second_moments: with a start by `DeMo`, give an inner Adam the second moments that DeMo has kept of this worker's own
            gradients; its momentum begins at zero.
    """

    def __init__(
        self,
        inner: Optimizer,
        link: Link,
        *,
        steps: int = 256,
        then: Make,
        start: Make | None = None,
        second_moments: bool = False,
    ):
        """Make the start; the method is made when its turn comes."""
        super().__init__(inner, link, steps=steps, start=start or DataParallel, then=then, second_moments=second_moments)
