"""What a run would cost on a link, before it is started: its messages from the optimizer itself, their time from `Network`.

Nothing is trained and nothing is sent. The optimizer of the run is built on tensors without memory (torch's "meta" device) and
asked for its schedule and for the length of its messages, so plan and meter count the same bytes. Then a clock runs through
some periods:

    a message is posted, travels for t_sync = hops * latency + bytes / bandwidth once the one before it has arrived, and is
    waited for tau steps later:  wait = max(0, t_sync - tau * t_step)          tau = 0 where a method blocks
    utilisation = t_step / (t_step + wait per step)                             the wait of a round falls on H steps

That is the cost model in closed form for one message at a time, and still right where several are under way.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.algorithms import found
from thinwire.codecs import Chain, Dense, TopK
from thinwire.core.exchange import message_nbytes
from thinwire.core.fragments import Streaming
from thinwire.core.optimizer import Algorithm
from thinwire.core.states import Due, StateAveraging
from thinwire.errors import ConfigError, check_not_negative, check_whole_number
from thinwire.links import Link, Ticket
from thinwire.maths.outer import Merge
from thinwire.network import Network, Op, ring_traffic
from thinwire.payload import Payload
from thinwire.schedules import Every, Periods, Schedule, Staggered, Union, Warmup
from thinwire.tasks.gpt import GPT, GPTConfig
from thinwire.tools.config import ALONE, RunConfig, resolve_algorithm
from thinwire.tools.train import optimizer_of

GOODPUT = 1448 / 1514  # of an Ethernet link: a frame of 1514 bytes has headers of Ethernet, IP and TCP with timestamps
BACKWARD = 2 / 3  # of a step: a backward pass has twice the matrix products of a forward pass
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes after which torch's DDP closes its first and its other buckets
_LAPS = 4  # periods that the clock runs through at least; the last is measured, when what is under way has settled


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machines: how many, how they are joined, how fast they compute.

    Attributes:
        workers: how many there are.
        network: bandwidth and latency of their links, as they are sold.
        step_time: seconds of one training step without any exchange.
        goodput: the part of the bandwidth that is left for messages; the rest are headers.
        codec_time: seconds that it takes to pack and read one message that is gathered; what a codec takes depends on the
            machine, so by default it is not counted.
        backward: which part of a step is the backward pass, during which torch's DDP already sends; 0 for no overlap.
    """

    workers: int
    network: Network
    step_time: float
    goodput: float = GOODPUT
    codec_time: float = 0.0
    backward: float = BACKWARD

    def __post_init__(self) -> None:
        """Check the figures."""
        check_whole_number("workers", self.workers)
        self.network.check(self.workers)
        check_not_negative("codec-time", self.codec_time)
        if not 0 < self.step_time < math.inf:
            raise ConfigError(f"step-time must be above zero seconds, got {self.step_time!r}")
        if not 0 < self.goodput <= 1:
            raise ConfigError(f"framing must be above 0 and at most 1, got {self.goodput!r}")
        if not 0 <= self.backward < 1:
            raise ConfigError(f"backward must be from 0 to below 1, got {self.backward!r}")

    def seconds(self, op: Op, nbytes: int) -> float:
        """How long one exchange takes; of pairs, the slowest one."""
        network = _scaled(self.network, self.goodput)
        if op != "pair":
            return network.seconds(op, [nbytes] * self.workers)
        pairs = itertools.combinations(range(self.workers), 2)
        return max((network.seconds(op, [nbytes] * 2, pair) for pair in pairs), default=0.0)

    def sent(self, op: Op, nbytes: int) -> float:
        """Bytes that a worker sends in one exchange, on the average; of an odd number one has no partner."""
        if op != "pair":
            return ring_traffic(op, [nbytes] * self.workers, 0).sent
        return nbytes * (self.workers // 2 * 2) / self.workers


def _scaled(network: Network, factor: float) -> Network:
    def times(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

    return replace(network, bandwidth=times(network.bandwidth), down=None if network.down is None else times(network.down))


# --- Which messages a run sends --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """One message of one worker.

    Attributes:
        posted: when it is sent, in steps since the period began; a fraction where it leaves in the middle of a step.
        needed: when it is waited for.
        nbytes: its length.
        op: how it travels.
    """

    posted: float
    needed: float
    nbytes: int
    op: Op


@dataclass(frozen=True)
class Period:
    """The messages of a run, which repeat after so many steps."""

    steps: float
    messages: tuple[Message, ...]

    def stretched(self, factor: float) -> Period:
        """The same messages with all periods `factor` times as long; what a message has to travel stays as it is."""
        # In this order, so that what is waited for at once still is: a sum in another order may round below `posted`.
        moved = [replace(m, posted=m.posted * factor, needed=m.posted * factor + (m.needed - m.posted)) for m in self.messages]
        return Period(self.steps * factor, tuple(moved))


class Seat(Link):
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
        return Period(1, tuple(_ddp_messages([p for p in model.parameters() if p.requires_grad], backward)))
    config.validate()
    optimizer = optimizer_of(replace(config, steps=10**6), on_meta(model), Seat(workers))
    steps, tau = _length(optimizer.schedule), _tau(optimizer)
    made: dict[tuple[int, ...], tuple[int, Op]] = {}
    messages = []
    for step in range(1, steps + 1):
        if due := optimizer.schedule.due(step):
            nbytes, op = made[due] if due in made else made.setdefault(due, _message(optimizer, due))
            messages += [Message(step, step + tau, nbytes, op)] if nbytes else []  # a fragment may be empty
    return _with_buffers(Period(steps, tuple(messages)), optimizer)


def _message(optimizer: Algorithm, due: tuple[int, ...]) -> tuple[int, Op]:
    """Length and way of the message of a round in which these states or fragments are due."""
    codec, nbytes = optimizer.codec, 0
    if isinstance(optimizer, StateAveraging):
        states = [optimizer.states[i] for i in due]
        codec = Due(states).codec
        nbytes = message_nbytes(optimizer.link, codec, [t for s in states for t in s.tensors()])
    elif isinstance(optimizer, Streaming):
        nbytes = sum(optimizer.fragment_nbytes()[p] for p in due)
    else:
        nbytes = optimizer.message_nbytes()
    if isinstance(merge := getattr(optimizer, "merge", None), Merge):
        codec = merge.codec(codec, 1)  # how many tensors does not matter for the way
    return nbytes, "pair" if optimizer.in_pairs else "mean" if codec.linear else "gather"


def _tau(optimizer: Algorithm) -> int:
    """Steps between sending and waiting."""
    return optimizer.tau if isinstance(optimizer, Streaming) else int(getattr(optimizer, "delay", False))


def _length(schedule: Schedule) -> int:
    """After how many steps a schedule repeats."""
    if isinstance(schedule, Every | Staggered):
        return schedule.H
    if isinstance(schedule, Periods | Union):
        return math.lcm(*map(_length, schedule.schedules))
    if isinstance(schedule, Warmup):
        return _length(schedule.then)
    raise ConfigError(f"a plan needs a schedule that repeats, got {schedule!r}")


def _with_buffers(period: Period, optimizer: Algorithm) -> Period:
    """With the averages of BatchNorm statistics, which follow every so many rounds and are waited for at once."""
    if not optimizer.buffers or optimizer.in_pairs:
        return period
    every, rounds = optimizer.buffers_every, len(period.messages)
    nbytes = message_nbytes(optimizer.link, Dense(), optimizer.buffers)
    laps = every // math.gcd(every, rounds)
    messages = []
    for number in range(laps * rounds):
        later = number // rounds * period.steps
        m = period.messages[number % rounds]
        messages.append(replace(m, posted=m.posted + later, needed=m.needed + later))
        if (number + 1) % every == 0:
            messages.append(Message(m.needed + later, m.needed + later, nbytes, "mean"))
    return Period(laps * period.steps, tuple(messages))


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


# --- What they cost --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """What one step of one worker costs, on the average over a period.

    Attributes:
        bytes_per_step: bytes that a worker sends, with what a ring or a gather multiplies.
        payload_per_step: bytes of its own messages.
        rounds_per_step: how many messages.
        largest_message: bytes of the longest one.
        wait_per_step: seconds of waiting on the wire.
        seconds_per_step: computing and waiting.
        utilisation: the part of the time that is spent computing.
    """

    bytes_per_step: float
    payload_per_step: float
    rounds_per_step: float
    largest_message: int
    wait_per_step: float
    seconds_per_step: float
    utilisation: float


def predict(config: RunConfig, model: nn.Module, cluster: Cluster) -> Prediction:
    """What a run would cost per step.

    Args:
        config: its algorithm, settings, wire and inner optimizer are looked at.
        model: of the shapes to train: `gpt_like(params)`, a task's own, or yours.
        cluster: the machines.
    """
    return cost_of(period_of(config, model, workers=cluster.workers, backward=cluster.backward), cluster)


def cost_of(period: Period, cluster: Cluster) -> Prediction:
    """What a period costs per step."""
    messages, steps = period.messages, period.steps
    seconds = max(cluster.step_time, _seconds_of_a_lap(period, cluster) / steps)  # not less by a rounding
    packing = cluster.codec_time * sum(m.op != "mean" for m in messages) / steps
    return Prediction(
        bytes_per_step=sum(cluster.sent(m.op, m.nbytes) for m in messages) / steps,
        payload_per_step=sum(m.nbytes for m in messages) / steps,
        rounds_per_step=len(messages) / steps,
        largest_message=max((m.nbytes for m in messages), default=0),
        wait_per_step=max(0.0, seconds - cluster.step_time - packing),
        seconds_per_step=seconds,
        utilisation=cluster.step_time / seconds,
    )


def _seconds_of_a_lap(period: Period, cluster: Cluster) -> float:
    """A worker's clock over one period, once what is under way from the periods before has settled."""
    travel = {(m.op, m.nbytes): cluster.seconds(m.op, m.nbytes) for m in period.messages}
    laps = _LAPS + math.ceil(max((m.needed - m.posted for m in period.messages), default=0.0) / period.steps)
    clock = wire_free = progress = began = 0.0
    arrival: dict[tuple[int, int], float] = {}
    for at, what, key in _events(period, laps):
        clock, progress = clock + (at - progress) * cluster.step_time, at
        if what == "post":
            message = period.messages[key[1]]
            clock += cluster.codec_time if message.op != "mean" else 0.0
            wire_free = max(clock, wire_free) + travel[message.op, message.nbytes]  # one wire: messages follow each other
            arrival[key] = wire_free
        elif what == "wait":
            clock = max(clock, arrival.pop(key))
        elif key[0] == laps - 2:
            began = clock
    # In the long run a lap takes no less than the wire is busy; a long tau hides that for more laps than were run.
    return max(clock - began, sum(travel[m.op, m.nbytes] for m in period.messages))


def _events(period: Period, laps: int) -> list[tuple[float, str, tuple[int, int]]]:
    """What happens in all laps, in order: (step, "post", "wait" or "z: end of the lap", (lap, message))."""
    found: list[tuple[float, str, tuple[int, int]]] = []
    for lap in range(laps):
        start = lap * period.steps
        found.append((start + period.steps, "z", (lap, 0)))
        for i, m in enumerate(period.messages):
            # A hair early, so that what a lap ends with is a part of it, whatever rounding does to sums of steps.
            posted, needed = (start + t - 1e-6 for t in (m.posted, m.needed))
            found += [(posted, "post", (lap, i)), (needed, "wait", (lap, i))]
    return sorted(event for event in found if event[0] <= laps * period.steps)


# --- What would be enough --------------------------------------------------------------------------------------------------


def smallest_H(config: RunConfig, period: Period, cluster: Cluster, utilisation: float) -> int | None:
    """The smallest H with which workers compute `utilisation` of the time; None where no H up to a million is enough.

    Args:
        config: of a method with an H. Its other periods, K_u and K_v, grow along.
        period: its messages, as `period_of` tells them.
        cluster: the machines.
        utilisation: from 0 to 1.
    """
    H = steps_per_round(config)
    if H is None:
        raise ConfigError(f"{config.algorithm} exchanges at every step and has no H")
    tau = max((math.ceil(m.needed - m.posted) for m in period.messages), default=0)

    def enough(candidate: int) -> bool:
        return cost_of(period.stretched(candidate / H), cluster).utilisation >= utilisation

    return _smallest(enough, max(tau + 1, all_settings(config).get("fragments", 1)), 10**6)


def largest_k(config: RunConfig, model: nn.Module, cluster: Cluster, utilisation: float) -> int | None:
    """The most entries of a block that leave workers computing `utilisation` of the time; None where one is too many."""
    chain = _sparse_chain(config, model)
    if chain is None:
        return None
    params = [p for p in on_meta(model).parameters() if p.requires_grad]
    most = max((group.h * group.w for group in chain.plan(params).layout.groups), default=1)

    def too_many(k: int) -> bool:
        return predict(with_k(config, model, k), model, cluster).utilisation < utilisation

    return (_smallest(too_many, 1, most) or most + 1) - 1 or None


def bandwidth_for(period: Period, cluster: Cluster, utilisation: float) -> float | None:
    """Bits per second at which workers compute `utilisation` of the time; None where the latency alone is too much."""

    def used(bandwidth: float) -> float:
        network = Network(bandwidth=bandwidth, latency=cluster.network.latency)
        return cost_of(period, replace(cluster, network=network)).utilisation

    if used(math.inf) < utilisation:
        return None
    low, high = 1.0, 1e18  # bits per second
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if used(middle) >= utilisation else (middle, high)
    return high


def _smallest(holds: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number from `least` to `most` for which something holds that then holds for all larger ones."""
    high = least
    while not holds(high):
        if high >= most:
            return None
        least, high = high + 1, min(2 * high, most)
    while least < high:
        middle = (least + high) // 2
        least, high = (least, middle) if holds(middle) else (middle + 1, high)
    return high


# --- Other settings of the same run ----------------------------------------------------------------------------------------


def all_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a run with those that its name fixes, and with the defaults of its class."""
    name, fixed = resolve_algorithm(config.algorithm, found())
    known = inspect.signature(found()[name].__init__).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty} | fixed | config.settings


def steps_per_round(config: RunConfig) -> int | None:
    """The H of a run; None for a method that exchanges at every step."""
    return all_settings(config).get("H")


def with_H(config: RunConfig, H: int) -> RunConfig:
    """The run with another H, its other periods longer or shorter by the same factor."""
    settings, before = all_settings(config), steps_per_round(config)
    if before is None:
        raise ConfigError(f"{config.algorithm} exchanges at every step and has no H, got H={H}")
    scaled: dict[str, Any] = {"H": H}
    for name in ("K_u", "K_v"):
        if period := settings.get(name):
            each = [max(1, round(K * H / before)) for K in (period if isinstance(period, list | tuple) else [period])]
            scaled[name] = each if isinstance(period, list | tuple) else each[0]
    return replace(config, settings={**config.settings, **scaled})


def entries_per_block(config: RunConfig, model: nn.Module) -> int | None:
    """The k of a run; None where its codec does not select the largest entries of blocks."""
    chain = _sparse_chain(config, model)
    return None if chain is None else chain.selection.count(1 << 12)


def with_k(config: RunConfig, model: nn.Module, k: int) -> RunConfig:
    """The run with another number of entries per block."""
    chain = _sparse_chain(config, model)
    if chain is None:
        raise ConfigError(f"{config.algorithm} does not send the largest entries of blocks, got k={k}")
    return replace(config, wire=repr(replace(chain, selection=TopK(k))))


def _sparse_chain(config: RunConfig, model: nn.Module) -> Chain | None:
    """The codec of a run where it sends the k largest entries of each block."""
    if config.algorithm in (ALONE, "ddp"):
        return None
    codec = optimizer_of(config, on_meta(model), Seat(1)).codec
    return codec if isinstance(codec, Chain) and isinstance(codec.selection, TopK) else None


# --- Models without memory -------------------------------------------------------------------------------------------------


def on_meta(model: nn.Module) -> nn.Module:
    """The model itself where it takes no memory, else a copy of its shapes."""
    if all(p.is_meta for p in model.parameters()):
        return model
    return copy.deepcopy(model).to("meta")


def parse_count(text: str) -> int:
    """A number of parameters from "1.3b", "124m", "820k" or a plain number.

    >>> parse_count("1.3b")
    1300000000
    """
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([kmbt]?)", text.strip().lower())
    if match is None:
        raise ConfigError(f"params must look like 1.3b, 124m or 3_200_000, got {text!r}")
    power = {"": 0, "k": 3, "m": 6, "b": 9, "t": 12}[match[2]]
    return round(float(match[1].replace("_", "").replace(",", "")) * 10**power)


def gpt_like(params: int) -> nn.Module:
    """A GPT of so many parameters, without memory: what a codec makes of a model depends on its shapes.

    Depth and width are those with a usual ratio; the rows of the embedding make up the rest, to less than one row.

    Args:
        params: how many, at least a thousand.
    """
    check_whole_number("params", params, least=1000)
    usual = 50_257 if params >= 50_000_000 else 256  # GPT-2's vocabulary, or bytes
    multiple = 64 if params >= 1_000_000 else 2
    fitting = {(1, 2): params // 2 - 27}  # rows of the embedding by (layers, width)
    for L in range(1, 129):
        for w in range(-(-32 * L // multiple) * multiple, 128 * L + 1, multiple):  # as wide as published GPTs of this depth
            if (rows := (params - 12 * L * w * w) // w - (2 * L + 1)) < 1:
                break
            fitting[L, w] = rows
    layers, width = min(fitting, key=lambda shape: abs(math.log(fitting[shape] / usual)))
    config = GPTConfig(vocab=fitting[layers, width], context=1, layers=layers, width=width, heads=max(1, width // 64))
    with torch.device("meta"):
        return GPT(config)
