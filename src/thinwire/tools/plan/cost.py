"""What messages cost on a link: a clock runs through some periods of a run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from torch import nn

from thinwire.errors import ConfigError, check_not_negative, check_whole_number
from thinwire.network import BACKWARD, CONTROL_NBYTES, GOODPUT, Network, Op, Traffic, Wire, ring_hops, ring_traffic
from thinwire.tools.config import RunConfig
from thinwire.tools.plan.messages import Message, Period, period_of

_PERIODS = 4  # periods that the clock runs through at least; the last is measured, when what is under way has settled


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
        control: bytes on the wire that go with each part of a message that is dealt, besides it and its headers.
        members: how many processes a worker is, where workers are the sites of a `TwoLevel` link; `network` is between them.
        inside: the network inside a site.
    """

    workers: int
    network: Network
    step_time: float
    goodput: float = GOODPUT
    codec_time: float = 0.0
    backward: float = BACKWARD
    control: int = CONTROL_NBYTES
    members: int = 1
    inside: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        """Check the figures."""
        check_whole_number("workers", self.workers)
        check_whole_number("members", self.members)
        self.inside.check(self.members)
        self.network.check(self.workers)
        check_not_negative("codec-time", self.codec_time)
        if not 0 < self.step_time < math.inf:
            raise ConfigError(f"step-time must be above zero seconds, got {self.step_time!r}")
        if not 0 < self.goodput <= 1:
            raise ConfigError(f"framing must be above 0 and at most 1, got {self.goodput!r}")
        if not 0 <= self.backward < 1:
            raise ConfigError(f"backward must be from 0 to below 1, got {self.backward!r}")

    def seconds(self, message: Message) -> float:
        """How long one exchange takes; of pairs, the slowest one."""
        network, op, nbytes = _scaled(self.network, self.goodput), message.op, message.nbytes
        if op == "deal":
            most = message.most + math.ceil(self.control * (self.workers - 1) * self.goodput)
            return network.seconds_of([Traffic(most, most)] * self.workers, ring_hops(op, self.workers))
        if op != "pair":
            return network.seconds(op, [nbytes] * self.workers)
        pairs = itertools.combinations(range(self.workers), 2)
        return max((network.seconds(op, [nbytes] * 2, pair) for pair in pairs), default=0.0)

    def seconds_of_gradients(self, nbytes: int) -> float:
        """How long the members of a site take to average so many bytes."""
        return _scaled(self.inside, self.goodput).seconds("mean", [nbytes] * self.members)

    def seconds_of_result(self, message: Message) -> float:
        """How long it takes the member that sends for its site to tell the others what came: its lengths, and all of it."""
        if self.members == 1:
            return 0.0
        came = {"mean": message.nbytes, "gather": message.nbytes * self.workers, "pair": 2 * message.nbytes}
        head = 8 * (2 + 2 * max(2, self.workers))
        inside = _scaled(self.inside, self.goodput)
        return sum(inside.seconds("broadcast", [n] * self.members) for n in (head, came.get(message.op, message.most)))

    def without_sites(self) -> Cluster:
        """All processes of all sites, each on a link as thin as that of its site."""
        one = replace(self.network, bandwidth=self._each(self.network.bandwidth), latency=self._each(self.network.latency))
        one = replace(one, down=None if one.down is None else self._each(one.down))
        return replace(self, workers=self.workers * self.members, members=1, inside=Network(), network=one)

    def _each(self, value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return tuple(v for v in value for _ in range(self.members)) if isinstance(value, tuple) else value

    def sent(self, op: Op, nbytes: int) -> float:
        """Bytes that a worker sends in one exchange, on the average; of an odd number one has no partner.

        Args:
            op: what is exchanged.
            nbytes: length of the message; of one that is dealt, without the worker's own part.
        """
        if op == "deal":
            return nbytes
        if op != "pair":
            return ring_traffic(op, [nbytes] * self.workers, 0).sent
        return nbytes * (self.workers // 2 * 2) / self.workers


def _scaled(network: Network, factor: float) -> Network:
    def times(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor

    return replace(network, bandwidth=times(network.bandwidth), down=None if network.down is None else times(network.down))


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
    cluster = cluster.without_sites() if period.flat and cluster.members > 1 else cluster
    seconds = max(cluster.step_time, _seconds_of_a_period(period, cluster) / steps)  # not less by a rounding
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


def _seconds_of_a_period(period: Period, cluster: Cluster) -> float:
    """A worker's clock over one period, once what is under way from the periods before has settled."""
    told = {m: cluster.seconds_of_result(m) for m in period.messages}  # the next one of the same step is posted after that
    travel = {m: cluster.seconds(m) + (told[m] if m.needed == m.posted else 0.0) for m in period.messages}
    step_time = cluster.step_time + (cluster.seconds_of_gradients(period.dense) if cluster.members > 1 else 0.0)
    periods = _PERIODS + math.ceil(max((m.needed - m.posted for m in period.messages), default=0.0) / period.steps)
    clock = progress = began = 0.0
    wire = Wire()  # one for all messages, which follow each other
    arrival: dict[tuple[int, int], float] = {}
    for at, what, key in _events(period, periods):
        clock, progress = clock + (at - progress) * step_time, at
        if what == "post":
            message = period.messages[key[1]]
            clock += cluster.codec_time if message.op != "mean" else 0.0
            arrival[key] = wire.occupy(clock, travel[message])
        elif what == "wait":
            message = period.messages[key[1]]
            clock = max(clock, arrival.pop(key)) + (told[message] if message.needed > message.posted else 0.0)
        elif key[0] == periods - 2:
            began = clock
    # In the long run a period takes no less than the wire is busy; a long tau hides that for more periods than were run.
    return max(clock - began, sum(travel[m] for m in period.messages))


def _events(period: Period, periods: int) -> list[tuple[float, str, tuple[int, int]]]:
    """What happens in all periods, in order: (step, "post", "wait" or "z" for the end of one, (period, message))."""
    found: list[tuple[float, str, tuple[int, int]]] = []
    for number in range(periods):
        start = number * period.steps
        found.append((start + period.steps, "z", (number, 0)))
        for i, m in enumerate(period.messages):
            # A hair early, so that what a period ends with is a part of it, whatever rounding does to sums of steps.
            posted, needed = (start + t - 1e-6 for t in (m.posted, m.needed))
            found += [(posted, "post", (number, i)), (needed, "wait", (number, i))]
    return sorted(event for event in found if event[0] <= periods * period.steps)
