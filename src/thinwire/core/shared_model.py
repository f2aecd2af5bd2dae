"""The model that all workers agreed on last, put in the place of the parameters for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from thinwire.codecs.dense import Dense
from thinwire.core.average import average
from thinwire.core.buffers import check_statistics
from thinwire.core.slots import overwrite
from thinwire.links.base import Link

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm


@contextlib.contextmanager
def shared_model(opt: Algorithm, model: nn.Module | None, mean_over: Link | None) -> Iterator[None]:
    """See `Algorithm.shared_model`."""
    if model is not None:
        check_statistics(opt, model)
    if opt.engine.deferred is not None:
        opt.engine.deferred.settle_alone()
    agreed = opt.agreed()
    if mean_over is not None:
        with opt.at_hand():
            mine = opt.agreed() or opt.params()
            agreed, _ = average(mean_over, Dense(), mine, any_shard=opt.shards.any, purpose="mean model")
    if agreed is None:
        yield
        return
    buffers = opt.buffer_average.local() if opt.buffer_average.averaged else []
    mine, own = [x.clone() for x in opt.params()], [b.clone() for b in buffers]
    overwrite(opt.params(), agreed, model)
    overwrite(buffers, opt.buffer_average.agreed if buffers else [])
    try:
        yield
    finally:
        overwrite(opt.params(), mine, model)
        overwrite(buffers, own)
