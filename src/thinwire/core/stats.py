"""Figures of an optimizer for logs, and callbacks after every round.

Bytes and seconds are the meter's. Norms take a pass over the model and a copy of it, so they are measured only once somebody
has asked: from the first `stats()` or `on_round()` on. Nothing here exchanges anything: a worker may ask alone. Where a model
is sharded, norms are those of this process's part.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thinwire.codecs import Codec
from thinwire.core.slots import SlotOptimizer
from thinwire.links.metered import Meter

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm
    from thinwire.core.rounds import RoundEngine

Stats = dict[str, float]
Callback = Callable[[Stats], object]


class Watch:
    """Who is told of rounds, and the norms of the last one.

    Attributes:
        asked: whether norms are measured.
        drift: see `Reporting.stats`.
        update_norm: see `Reporting.stats`.
        callbacks: called after every round.
    """

    def __init__(self):
        """Nobody has asked yet."""
        self.asked, self.drift, self.update_norm = False, math.nan, math.nan
        self.callbacks: OrderedDict[int, Callback] = OrderedDict()

    @contextmanager
    def measured(self, opt: Algorithm, which: Sequence[int]) -> Iterator[None]:
        """Measure what a round does to the parameters with these numbers, where somebody has asked."""
        if not self.asked:
            yield
            return
        anchored, before = opt.agreed() is not None, [t.clone() for t in _agreed(opt, which)]
        apart = _distance(opt.part("param", which), before) if anchored else 0.0
        yield
        after = _agreed(opt, which)
        moved = _distance(after, before)
        if moved == 0 and not opt.whole_round():  # parameters were not due, only other states
            return
        if not anchored and "param" not in opt.replicated:  # the round has told the mean, which is the agreed model
            apart, before = moved, after
        size = _norm(before) if apart else 1.0
        self.drift, self.update_norm = apart / size if size else math.nan, moved

    def tell(self, opt: Algorithm) -> None:
        """Call everyone who wants to know of a round."""
        for callback in list(self.callbacks.values()):
            callback(opt.stats())


class Reporting(SlotOptimizer):
    """The part of an `Algorithm` that tells how training goes."""

    meter: Meter
    watch: Watch
    engine: RoundEngine
    chosen: str = ""  # why, where `thinwire.auto` has chosen it

    @property
    def codec(self) -> Codec:
        """What is sent in the round at hand."""
        return self.codecs.at(self.engine.current.number)

    def stats(self) -> Stats:
        """Where this worker stands, as a flat dict of plain numbers for any logger; exchanges nothing.

        * `step`, `rounds`, `aborted`: steps, rounds (refused ones too), and rounds that were refused;
        * `pending`, `in_flight`: local steps since the last round, and messages that are under way;
        * `lr`: of the first parameter group;
        * `sent`, `received`, `waiting`: bytes, and seconds of waiting on the wire; `sent.round`, `sent.vote`, ... by purpose;
        * `message_bytes`: the length of this worker's last message;
        * `drift`: how far this worker's parameters x were from the agreed ones a right before the last round was applied,
          norm(x - a) / norm(a). For a method that keeps no anchor, a is the mean that the round has found. 0 where the
          parameters of workers are never apart;
        * `update_norm`: the norm of what the last round changed in the agreed parameters; in this worker's own where a method
          keeps no anchor.

        `drift` and `update_norm` are NaN until a round has been measured. Measuring takes a pass over the model and a copy of
        it per round, and begins with the first call of this or of `on_round`.
        """
        self.watch.asked = True
        totals, last, group = self.meter.totals, self.meter.last("round"), self.param_groups[0]
        found: Stats = {
            "step": self.steps,
            "rounds": self.rounds,
            "aborted": self.engine.aborted,
            "pending": self.pending_steps,
            "in_flight": len(self.engine.queue),
            "lr": float(group.get("lr", math.nan)),
            "sent": totals.sent,
            "received": totals.received,
            "waiting": totals.waiting,
            "message_bytes": 0 if last is None else last.payload,
            "drift": self.watch.drift,
            "update_norm": self.watch.update_norm,
        }
        return found | {f"sent.{purpose.replace(' ', '_')}": each.sent for purpose, each in self.meter.purposes.items()}

    def on_round(self, callback: Callback) -> RemovableHandle:
        """Call `callback(stats)` after every round, applied or refused, at the same point on all workers.

        What it raises is raised by `step()` or `finish()`. A callback may exchange something where all workers do.

        Returns:
            A handle whose `remove()` ends it.
        """
        self.watch.asked = True
        handle = RemovableHandle(self.watch.callbacks)
        self.watch.callbacks[handle.id] = callback
        return handle


def _agreed(opt: Algorithm, which: Sequence[int]) -> list[Tensor]:
    agreed = opt.agreed()
    return opt.part("param", which) if agreed is None else [agreed[i] for i in which]


def _distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return _norm([x.float() - y.float() for x, y in zip(a, b, strict=True)])


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm([t.float() for t in tensors]))
