"""Which H, k or bandwidth would be enough, and a run with another H or k."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from thinwire.algorithms import found
from thinwire.codecs import Chain, Codec, CodecSchedule, TopK
from thinwire.errors import ConfigError
from thinwire.network import Network
from thinwire.tools.build import longest_period, optimizer_of, settings_of
from thinwire.tools.config import RunConfig, resolve_algorithm
from thinwire.tools.names import ALONE
from thinwire.tools.plan.cost import Cluster, cost_of, predict
from thinwire.tools.plan.messages import NullLink, Period
from thinwire.tools.plan.shapes import on_meta

MOST_H = 10**6  # steps between two rounds that are looked at


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

    return _smallest(enough, max(tau + 1, all_settings(config).get("fragments", 1)), MOST_H)


def largest_k(config: RunConfig, model: nn.Module, cluster: Cluster, utilisation: float) -> int | None:
    """The most entries of a block that leave workers computing `utilisation` of the time; None where one is too many."""
    codecs = _sparse(config)
    if codecs is None:
        return None
    params = [p for p in on_meta(model).parameters() if p.requires_grad]
    most = max((group.h * group.w for group in Chain.of(codecs.codecs[-1]).plan(params).layout.groups), default=1)

    def too_many(k: int) -> bool:
        return predict(with_k(config, k), model, cluster).utilisation < utilisation

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
    name, _ = resolve_algorithm(config.algorithm, found())
    known = inspect.signature(found()[name].__init__).parameters.values()
    return {p.name: p.default for p in known if p.default is not p.empty} | settings_of(config)


def steps_per_round(config: RunConfig) -> int | None:
    """The H of a run, the longest where it has several; None for a method that exchanges at every step."""
    H = all_settings(config).get("H")
    return None if H is None else longest_period(H)


def with_H(config: RunConfig, H: int) -> RunConfig:
    """The run with another H, its other periods longer or shorter by the same factor."""
    settings, before = all_settings(config), steps_per_round(config)
    if before is None:
        raise ConfigError(f"{config.algorithm} exchanges at every step and has no H, got H={H}")
    scaled: dict[str, Any] = {"H": H}
    for name in ("K_u", "K_v"):
        if period := settings.get(name):
            periods = map(longest_period, period if isinstance(period, list | tuple) else [period])
            each = [max(1, round(K * H / before)) for K in periods]
            scaled[name] = each if isinstance(period, list | tuple) else each[0]
    return replace(config, settings={**config.settings, **scaled})


def entries_per_block(config: RunConfig) -> int | None:
    """The k of a run, of a schedule that of its last codec; None where that does not select the largest entries of blocks."""
    codecs = _sparse(config)
    return None if codecs is None else _entries(codecs.codecs[-1])


def with_k(config: RunConfig, k: int) -> RunConfig:
    """The run with another number of entries per block; of a schedule in its last codec, after those that send more than k."""
    codecs = _sparse(config)
    if codecs is None:
        raise ConfigError(f"{config.algorithm} does not send the largest entries of blocks, got k={k}")
    *first, last = codecs.codecs
    more = [(codec, until) for codec, until in zip(first, codecs.until, strict=True) if _entries(codec) > k]
    schedule = CodecSchedule(*itertools.chain.from_iterable(more), replace(Chain.of(last), selection=TopK(k)))
    return replace(config, wire=repr(schedule))


def _entries(codec: Codec) -> int:
    """How many entries of a block of 64 x 64 a codec sends."""
    return Chain.of(codec).selection.count(1 << 12)


def _sparse(config: RunConfig) -> CodecSchedule | None:
    """The codecs of a run where all of them send the k largest entries of each block."""
    if config.algorithm in (ALONE, "ddp"):
        return None
    schedule = optimizer_of(config, nn.Linear(2, 2, device="meta"), NullLink(1)).codecs  # no method looks at the model
    sparse = all(isinstance(codec, Chain) and isinstance(codec.selection, TopK) for codec in schedule.codecs)
    return schedule if sparse else None
