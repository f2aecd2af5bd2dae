"""Which method to take on a link: what each would cost there, and what each has lost where it was measured.

The costs are `thinwire.tools.plan`'s. The losses (losses.json, which `python -m benchmarks.results` makes from the records) are
those of small models and short runs, from scratch, with a decay of the learning rate. They are here for their order: a method
is preferred when it loses less and computes enough of the time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

from torch import nn

from thinwire.errors import ConfigError
from thinwire.network import Network, show_bytes
from thinwire.tools.build import optimizer_of
from thinwire.tools.config import RunConfig
from thinwire.tools.plan import (
    MOST_H,
    Cluster,
    Period,
    Prediction,
    bandwidth_for,
    cost_of,
    entries_per_block,
    largest_k,
    period_of,
    predict,
    smallest_H,
    steps_per_round,
    with_H,
    with_k,
)
from thinwire.tools.plan.messages import NullLink

Knob = Literal["H", "k", "bandwidth"]


@dataclass(frozen=True)
class Method:
    """A method with the settings that it is listed with, and what is known of its loss.

    Attributes:
        name: in the table.
        config: what to run.
        losses: (H or k, percent above AdamW-DDP), in ascending order of H or k; between them the logarithm is interpolated.
        tried: the range of H or k that somebody has trained with, here or in a paper.
    """

    name: str
    config: RunConfig
    losses: tuple[tuple[int, float], ...] = ()
    tried: tuple[int, int] = (1, 32)


def _measured() -> dict[str, tuple[tuple[int, float], ...]]:
    """The losses of each method by H or k, as the records have them; none of methods without a decayed run."""
    text = resources.files("thinwire.tools").joinpath("losses.json").read_text(encoding="utf-8")
    return {
        name: tuple((int(value), float(percent)) for value, percent in entries)
        for name, entries in json.loads(text)["losses"].items()
    }


def _run(algorithm: str, wire: str | None = None, **settings: Any) -> RunConfig:
    return RunConfig(algorithm=algorithm, wire=wire, settings=settings)


_MEASURED: dict[str, Any] = {"outer_momentum": 0.5, "outer_lr": 0.9}  # of DiLoCo, in the runs that its losses are from
_COARSE = {"over": "workers", "beta": 0.9, **_MEASURED}
_LISTED = (
    Method("ddp", _run("ddp")),
    Method("data-parallel bf16", _run("data-parallel", "bf16")),
    Method("demo", _run("demo"), tried=(8, 4096)),
    Method("demo delayed", _run("demo", delay=True), tried=(8, 4096)),
    Method("local-adam", _run("local-adam", H=32), tried=(1, 256)),
    Method("mt-dao", _run("mt-dao", H=32), tried=(1, 32)),
    Method("mt-dao fp4", _run("mt-dao", "fp4", H=32, K_v=192), tried=(1, 32)),
    Method("des-loc", _run("des-loc"), tried=(1, 256)),
    Method("diloco", _run("diloco", H=32, **_MEASURED), tried=(1, 1000)),
    Method("diloco fp4", _run("diloco", "fp4", H=32, **_MEASURED), tried=(1, 100)),
    Method("diloco ternary", _run("decoupled-diloco", "ternary", H=32, **_COARSE), tried=(1, 100)),
    Method("streaming-diloco", _run("streaming-diloco", H=32), tried=(1, 100)),
    Method("decoupled-diloco", _run("decoupled-diloco", H=32), tried=(1, 512)),
    Method("sparseloco", _run("sparseloco")),
    Method("lordo", _run("lordo", H=32)),
    Method("noloco", _run("noloco", H=32), tried=(1, 100)),
)
METHODS = tuple(replace(method, losses=_measured().get(method.name, ())) for method in _LISTED)


@dataclass(frozen=True)
class Loss:
    """What a method has lost against AdamW-DDP at some setting, in percent.

    Attributes:
        percent: interpolated between settings that were measured.
        at_least: whether the setting lies beyond those that were measured, so that it may be more.
    """

    percent: float
    at_least: bool = False

    def __str__(self) -> str:
        """Such as +0.5% or >+6.2%."""
        return f"{'>' if self.at_least else ''}{self.percent:+.1f}%"


def loss_at(method: Method, value: int, knob: Knob) -> Loss | None:
    """The loss of a method with this H or k; None where nothing is known of it."""
    points = method.losses
    if not points:
        return None
    worse = value < points[0][0] if knob == "k" else value > points[-1][0]
    if worse or value <= points[0][0] or value >= points[-1][0]:
        return Loss((points[0] if value <= points[0][0] else points[-1])[1], at_least=worse)
    for (a, low), (b, high) in itertools.pairwise(points):
        if a <= value <= b:
            return Loss(low + (high - low) * math.log(value / a) / math.log(b / a))
    raise AssertionError(f"{value} is between no two of {points}")


@dataclass(frozen=True)
class Offer:
    """A method on a link.

    Attributes:
        method: which.
        config: with the settings that the prediction is for.
        knob: what can be turned until workers compute enough of the time.
        value: the H or k of the config; 1 where it has neither.
        cost: per step.
        loss: at this setting, where it is known.
        needed: the smallest H, the largest k or the least bandwidth that is enough; None where none is.
        never: why none is: the "latency" is too much whatever is sent, or even the least message has too many "bytes".
        by_owners: whether its messages are averaged by owners, which the run must be told (`route="owners"`).
    """

    method: Method
    config: RunConfig
    knob: Knob
    value: int
    cost: Prediction
    loss: Loss | None
    needed: float | None
    never: Literal["latency", "bytes"] | None = None
    by_owners: bool = False

    @property
    def name(self) -> str:
        """The method and its H or k, and that owners average its messages where they do."""
        return f"{self.listed} by owners" if self.by_owners else self.listed

    @property
    def listed(self) -> str:
        """The method and its H or k."""
        return self.method.name if self.knob == "bandwidth" else f"{self.method.name} {self.knob}={self.value}"


@dataclass(frozen=True)
class Advice:
    """All methods on a link, and the one to take.

    Attributes:
        offers: in the order of `METHODS`.
        sentence: the recommendation.
        best: the offer that it recommends, with the settings that it recommends; None where nothing is enough.
        closest: where nothing is, what comes closest; else one with a much smaller loss that computes less, if there is one.
    """

    offers: tuple[Offer, ...]
    sentence: str
    best: Offer | None
    closest: Offer | None


@dataclass(frozen=True)
class Wishes:
    """Settings to use in place of those in `METHODS`, where a method has them."""

    H: int | None = None
    k: int | None = None
    tau: int | None = None
    route: Literal["gather", "owners", "auto"] = "gather"
    methods: Sequence[Method] = field(default=METHODS)


def advise(model: nn.Module, cluster: Cluster, *, utilisation: float = 0.95, wishes: Wishes | None = None) -> Advice:
    """What every method would cost, what it would take to compute `utilisation` of the time, and a recommendation.

    Args:
        model: of the shapes to train; its values do not matter.
        cluster: the machines.
        utilisation: the part of the time that workers should compute.
        wishes: other settings than those in `METHODS`.
    """
    wishes = wishes or Wishes()
    offers = tuple(offer_of(method, model, cluster, utilisation, wishes) for method in wishes.methods)
    ddp = predict(_run("ddp"), model, cluster)
    best = _best(offers, model, cluster, utilisation)
    below = math.inf if best is None or best.loss is None else best.loss.percent
    closest = _closest(offers, model, cluster, below=below)
    return Advice(offers, _sentence(best, closest, ddp, utilisation), best, closest)


def offer_of(method: Method, model: nn.Module, cluster: Cluster, utilisation: float, wishes: Wishes) -> Offer:
    """One method on a link."""
    config = _with_wishes(method.config, wishes)
    period = period_of(config, model, workers=cluster.workers, backward=cluster.backward)
    H, k = steps_per_round(config), entries_per_block(config)
    if H is not None:
        knob, value, needed = "H", H, smallest_H(config, period, cluster, utilisation)
    elif k is not None:
        knob, value, needed = "k", k, largest_k(config, model, cluster, utilisation)
    else:
        knob, value, needed = "bandwidth", 1, bandwidth_for(period, cluster, utilisation)
    never = None
    if needed is None:
        endless = replace(cluster, network=Network(latency=cluster.network.latency))
        longest = period if H is None else period.stretched(MOST_H / H)
        never = "latency" if cost_of(longest, endless).utilisation < utilisation else "bytes"
    loss = loss_at(method, value, knob)
    return Offer(method, config, knob, value, cost_of(period, cluster), loss, needed, never, _by_owners(period))


def _by_owners(period: Period) -> bool:
    return any(message.op == "deal" for message in period.messages)


def _with_wishes(config: RunConfig, wishes: Wishes) -> RunConfig:
    if wishes.H is not None and steps_per_round(config) is not None:
        config = with_H(config, wishes.H)
    if wishes.tau is not None and config.algorithm == "streaming-diloco":
        config = replace(config, settings={**config.settings, "tau": wishes.tau})
    if wishes.k is not None and entries_per_block(config) is not None:
        config = with_k(config, wishes.k)
    return _by_route(config, wishes.route)


def _by_route(config: RunConfig, route: Literal["gather", "owners", "auto"]) -> RunConfig:
    """The run with this route; gathered where owners cannot average what it sends."""
    if route == "owners" and config.algorithm != "ddp":
        try:
            optimizer_of(replace(config, route=route), nn.Linear(2, 2, device="meta"), NullLink(2))
        except ConfigError:
            return replace(config, route="gather")
    return replace(config, route=route)


# --- The recommendation ----------------------------------------------------------------------------------------------------


def _best(offers: Sequence[Offer], model: nn.Module, cluster: Cluster, utilisation: float) -> Offer | None:
    """The offer with the least loss that computes enough of the time, as it is listed or with its H or k turned."""
    enough = []
    for offer in offers:
        low, high = offer.method.tried
        if offer.cost.utilisation >= utilisation:
            enough.append(offer)
        elif offer.method.losses and offer.knob != "bandwidth" and offer.needed is not None and low <= offer.needed <= high:
            enough.append(_turned(offer, int(offer.needed), model, cluster))  # else nobody has trained with such an H or k
    enough = [offer for offer in enough if offer.loss is not None]
    return min(enough, key=_preference, default=None)


def _preference(offer: Offer) -> tuple[float, bool, float]:
    """Small is good: no loss, then nothing to tune (data parallel), then time."""
    assert offer.loss is not None
    return max(0.0, round(offer.loss.percent, 1)), offer.knob != "bandwidth", offer.cost.seconds_per_step


def _turned(offer: Offer, value: int, model: nn.Module, cluster: Cluster) -> Offer:
    """The offer with another H or k."""
    config = with_H(offer.config, value) if offer.knob == "H" else with_k(offer.config, value)
    loss = loss_at(offer.method, value, offer.knob)
    period = period_of(config, model, workers=cluster.workers, backward=cluster.backward)
    return replace(offer, config=config, value=value, cost=cost_of(period, cluster), loss=loss, by_owners=_by_owners(period))


def _closest(offers: Sequence[Offer], model: nn.Module, cluster: Cluster, *, below: float = math.inf) -> Offer | None:
    """The offer that computes most of the time, each with the H or k that sends least among those that were tried.

    Args:
        offers: as listed.
        model: of the shapes to train.
        cluster: the machines.
        below: percent of loss that it must be clearly below.
    """
    found = []
    for offer in offers:
        low, high = offer.method.tried
        furthest = {"H": max(high, offer.value), "k": min(low, offer.value), "bandwidth": 1}[offer.knob]
        loss = loss_at(offer.method, furthest, offer.knob)
        if loss is not None and loss.percent < below - 5:
            found.append(offer if offer.knob == "bandwidth" else _turned(offer, furthest, model, cluster))
    return max(found, key=lambda offer: offer.cost.utilisation, default=None)


def _sentence(best: Offer | None, closest: Offer | None, ddp: Prediction, utilisation: float) -> str:
    """The recommendation.

    Args:
        best: what to take; None where nothing computes enough of the time.
        closest: what comes closest to that, or with a much smaller loss than `best`.
        ddp: what that costs.
        utilisation: what would be enough.
    """
    otherwise = f"ddp would compute {_percent(ddp.utilisation)} of the time"
    if best is None:
        near = ""
        if closest is not None:
            sent = show_bytes(closest.cost.bytes_per_step)
            near = f": {closest.name} comes closest with {_percent(closest.cost.utilisation)} ({sent} per worker and step)"
        return f"Nothing that was tried computes {_percent(utilisation)} of the time on this link{near}, and {otherwise}."
    share = _percent(best.cost.utilisation)
    if best.method.name == "ddp":
        return f"Take ddp: it computes {share} of the time on this link, so there is nothing to gain by sending less."
    if closest is not None:
        otherwise = f"{closest.name} would compute {_percent(closest.cost.utilisation)} at {closest.loss}, {otherwise}"
    return (
        f"Take {best.name}: {show_bytes(best.cost.bytes_per_step)} per worker and step, computing {share} of the time, "
        f"{_loss_in_words(best)}; {otherwise}."
    )


def _loss_in_words(offer: Offer) -> str:
    assert offer.loss is not None
    if offer.loss.at_least:
        return f"with a loss that was not measured at this {offer.knob} ({offer.loss.percent:+.1f}% at the nearest)"
    return f"with a loss of about {offer.loss.percent:+.1f}% against ddp's in our small runs"


def _percent(share: float) -> str:
    """A share for people: with a digit more where it is close to nothing or to all."""
    return f"{100 * share:.1f}%" if share < 0.1 or share > 0.99 else f"{100 * share:.0f}%"
