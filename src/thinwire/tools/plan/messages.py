"""Which messages a run sends, asked of its optimizer on tensors without memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from thinwire.codecs import Codec, Dense
from thinwire.core.average import message_nbytes
from thinwire.core.fragments import Fragments
from thinwire.core.optimizer import Algorithm
from thinwire.core.rounds import VOTE_NBYTES
from thinwire.errors import ConfigError
from thinwire.links import Link, Ticket
from thinwire.network import BACKWARD, Op
from thinwire.payload import Payload
from thinwire.schedules import Every, Periods, Schedule, Stages, Staggered, Union, Warmup
from thinwire.tools.build import optimizer_of, warm_start_of
from thinwire.tools.config import RunConfig
from thinwire.tools.names import ALONE
from thinwire.tools.plan.shapes import on_meta

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes after which torch's DDP closes its first and its other buckets


@dataclass(frozen=True)
class Message:
    """One message of one worker.

    Attributes:
        posted: when it is sent, in steps since the period began; a fraction where it leaves in the middle of a step.
        needed: when it is waited for.
        nbytes: its length; of one that is dealt, the most bytes that leave a worker.
        op: how it travels.
        most: of one that is dealt, the most bytes that one worker sends or gets.
    """

    posted: float
    needed: float
    nbytes: int
    op: Op
    most: int = 0


@dataclass(frozen=True)
class Period:
    """The messages of a run, which repeat after so many steps.

    Attributes:
        steps: how many.
        messages: of one worker.
        dense: bytes of all gradients, which the members of a site average at every step.
        flat: whether all processes of all sites exchange messages as if there were no sites, as torch's DDP does.
    """

    steps: float
    messages: tuple[Message, ...]
    dense: int = 0
    flat: bool = False

    def stretched(self, factor: float) -> Period:
        """The same messages with all periods `factor` times as long; what a message has to travel stays as it is."""
        # In this order, so that what is waited for at once still is: a sum in another order may round below `posted`.
        moved = [replace(m, posted=m.posted * factor, needed=m.posted * factor + (m.needed - m.posted)) for m in self.messages]
        return replace(self, steps=self.steps * factor, messages=tuple(moved))


class NullLink(Link):
    """A place among `size` workers that exchanges nothing: enough to ask an optimizer how long its messages would be."""

    def __init__(self, size: int):
        """Take the first place."""
        self._size = size

    @property
    def rank(self) -> int:
        """The first."""
        return 0

    @property
    def size(self) -> int:
        """How many workers there would be."""
        return self._size

    def post(self, payload: Payload, op: Op) -> Ticket:
        """Refuse."""
        raise AssertionError(f"a plan sends nothing, but {op} of {payload.nbytes} bytes was posted")


def period_of(config: RunConfig, model: nn.Module, *, workers: int, backward: float = BACKWARD) -> Period:
    """The messages of a run, asked of its optimizer; `ddp` is torch's own, which is asked for its buckets.

    Args:
        config: its algorithm, settings, wire and inner optimizer are looked at.
        model: of the shapes to train; its values do not matter.
        workers: how many there are.
        backward: which part of a step is the backward pass.
    """
    if config.algorithm == ALONE or workers < 2:
        return Period(1, ())
    if config.algorithm == "ddp":
        return Period(1, tuple(_ddp_messages([p for p in model.parameters() if p.requires_grad], backward)), flat=True)
    config.validate()
    optimizer = optimizer_of(replace(config, steps=10**6), on_meta(model), NullLink(workers))
    steps = _length(optimizer.schedule)
    begun = -(-_begun_after(optimizer.schedule) // steps) * steps  # what schedules end with is what goes on
    at_last = max(optimizer.codecs.until, default=0)
    sent = _scheduled(optimizer, begun + 1, begun + steps, rounds=at_last)
    messages = tuple(replace(m, posted=m.posted - begun, needed=m.needed - begun) for m in sent)
    dense = sum(4 * p.numel() for p in optimizer.params())
    return _with_votes(_with_buffers(Period(steps, messages, dense), optimizer), workers)


def run_messages(config: RunConfig, model: nn.Module, *, workers: int) -> list[Message]:
    """All messages of a whole run in order: of its warm start, of the method, and of the end.

    The handshake, the alarms and the votes, a byte or so per step, are left out, as are the buffers of BatchNorm.

    Args:
        config: its algorithm, settings, wire, inner optimizer, steps and warm start are looked at.
        model: of the shapes to train; its values do not matter.
        workers: how many there are.
    """
    if config.algorithm == ALONE or workers < 2:
        return []
    model, link, first = on_meta(model), NullLink(workers), config.warm_start + 1
    messages = list(_scheduled(warm_start_of(config, model, link).at_work, 1, config.warm_start)) if config.warm_start else []
    optimizer = optimizer_of(config, model, link)
    messages += _scheduled(optimizer, first, config.steps, rounds=_rounds(messages))
    everything, last = tuple(range(optimizer.schedule.fragments)), optimizer.schedule.due(config.steps)
    messages = [replace(m, needed=min(m.needed, config.steps)) for m in messages]
    unsent = last != everything if isinstance(optimizer, Fragments) else not last
    if unsent and "param" not in optimizer.replicated:  # `finish()` sends what the last steps have changed
        last_round = _messages(optimizer, everything, round=_rounds(messages) + 1)
        messages += [Message(config.steps, config.steps, *one) for one in last_round]
    return messages


def _rounds(messages: Sequence[Message]) -> int:
    """How many rounds these messages are of: those of owners have two."""
    dealt = sum(m.op == "deal" for m in messages)
    return len(messages) - dealt // 2


def _scheduled(optimizer: Algorithm, first: int, last: int, *, rounds: int = 0) -> Iterator[Message]:
    """The messages that the schedule asks for from one step to another, both included, after so many rounds."""
    made: dict[tuple[tuple[int, ...], Codec], list[tuple[int, Op, int]]] = {}
    tau = optimizer.engine.tau
    for step in range(first, last + 1):
        if due := optimizer.schedule.due(step):
            kind = due, optimizer.codecs.at(rounds + 1)
            sent = made[kind] if kind in made else made.setdefault(kind, _messages(optimizer, due, round=rounds + 1))
            rounds += bool(sent)  # a fragment may be empty
            # What owners send back is sent when it is waited for.
            yield from (Message(step if nth == 0 else step + tau, step + tau, *one) for nth, one in enumerate(sent))


def _messages(optimizer: Algorithm, due: tuple[int, ...], *, round: int) -> list[tuple[int, Op, int]]:
    """Length, way and `most` of the messages of a round of these states or fragments; none of an empty fragment."""
    out = optimizer.message_of(due, round=round)
    if out is None:
        return []
    if halves := optimizer.owned_nbytes(out, due):
        return [(nbytes, "deal", most) for nbytes, most in zip(halves.most_sent(), halves.most_moved(), strict=True)]
    op: Op = "pair" if out.pair is not None else "mean" if out.codec.linear else "gather"
    return [(out.nbytes(optimizer.peers.size), op, 0)]


def _length(schedule: Schedule) -> int:
    """After how many steps a schedule repeats."""
    if isinstance(schedule, Every | Staggered):
        return schedule.H
    if isinstance(schedule, Periods | Union):
        return math.lcm(*map(_length, schedule.schedules))
    if isinstance(schedule, Warmup):
        return _length(schedule.then)
    if isinstance(schedule, Stages):
        return _length(schedule.schedules[-1])
    raise ConfigError(f"a plan needs a schedule that repeats, got {schedule!r}")


def _begun_after(schedule: Schedule) -> int:
    """After how many steps a schedule begins to repeat."""
    if isinstance(schedule, Periods | Union):
        return max(map(_begun_after, schedule.schedules))
    if isinstance(schedule, Warmup):
        return max(schedule.steps, _begun_after(schedule.then))
    if isinstance(schedule, Stages):
        return max([*schedule.until, _begun_after(schedule.schedules[-1])])
    return 0


def _with_buffers(period: Period, optimizer: Algorithm) -> Period:
    """With the averages of BatchNorm statistics, which follow every so many rounds and are waited for at once."""
    if not optimizer.buffers or optimizer.in_pairs:
        return period
    every, rounds = optimizer.buffers_every, len(period.messages)
    nbytes = message_nbytes(optimizer.link, Dense(), optimizer.buffers)
    repeats = every // math.gcd(every, rounds)
    messages = []
    for number in range(repeats * rounds):
        later = number // rounds * period.steps
        m = period.messages[number % rounds]
        messages.append(replace(m, posted=m.posted + later, needed=m.needed + later))
        if (number + 1) % every == 0:
            messages.append(Message(m.needed + later, m.needed + later, nbytes, "mean"))
    return replace(period, steps=repeats * period.steps, messages=tuple(messages))


def _with_votes(period: Period, workers: int) -> Period:
    """With what follows each gathered message that is waited for at once: a byte that says whether it could be read.

    It follows the second half of a round of owners too.
    """
    messages, dealt = [], 0
    for m in period.messages:
        messages.append(m)
        dealt += m.op == "deal"
        if m.op == "gather" and m.needed == m.posted:
            messages.append(Message(m.needed, m.needed, VOTE_NBYTES, "gather"))
        if m.op == "deal" and dealt % 2 == 0:
            votes = VOTE_NBYTES * (workers - 1)
            messages.append(Message(m.needed, m.needed, votes, "deal", votes))
    return replace(period, messages=tuple(messages))


def _ddp_messages(params: Sequence[Tensor], backward: float) -> Iterator[Message]:
    """One all-reduce per bucket, sent as soon as the backward pass has filled it; all are waited for at its end."""
    total, done = max(1, sum(p.numel() for p in params)), 0
    for bucket in ddp_buckets(params):
        done += sum(p.numel() for p in bucket)
        nbytes = sum(p.numel() * p.element_size() for p in bucket)
        yield Message(1 - backward * (1 - done / total), 1, nbytes, "mean")


def ddp_buckets(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """How torch's DDP cuts gradients into messages: from the last parameter to the first, closed when full, the first early."""
    buckets: list[list[Tensor]] = [[]]
    for p in reversed(params):
        limit = FIRST_BUCKET if len(buckets) == 1 else BUCKET
        if sum(q.numel() * q.element_size() for q in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(p)
    return buckets
