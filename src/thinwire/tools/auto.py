"""auto: the planner's choice as an optimizer.

What `thinwire plan` recommends for a link is made around the user's own inner optimizer. All workers plan with the figures that
worker 0 has, so they choose alike; the handshake would refuse anything else.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.algorithms import DataParallel, found
from thinwire.core.buffers import running_statistics
from thinwire.core.gates import tell_all
from thinwire.core.optimizer import Algorithm
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError, check_whole_number
from thinwire.links.base import Link
from thinwire.network import GOODPUT, Network, parse_bandwidth, parse_duration
from thinwire.optim import QuasiHyperbolic
from thinwire.sharding.shards import local
from thinwire.tools.advice import METHODS, Method, Wishes, advise
from thinwire.tools.build import optimizer_of
from thinwire.tools.config import RunConfig, resolve_algorithm
from thinwire.tools.doctor.links import measure_ring
from thinwire.tools.plan import Cluster
from thinwire.warm_start import WarmStart

log = logging.getLogger("thinwire")

_TIMED = 3  # steps, after one that is not


def auto(
    model: nn.Module | Iterable[Tensor],
    inner: Optimizer,
    link: Link,
    *,
    step_time: float | str | Callable[[], object],
    bandwidth: float | str | None = None,
    latency: float | str | None = None,
    utilisation: float = 0.95,
    warm_start: int = 0,
    clip_norm: float = 0.0,
) -> Algorithm | WarmStart:
    """The method that loses least among those with which workers compute enough of the time on this link, as an optimizer.

    Why it was chosen is logged in one sentence, which is also in `opt.chosen`. It is called by all workers together, and goes
    by the figures of worker 0. The planner is that of `thinwire plan`; what methods lose was measured with a small model from
    scratch.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> opt = thinwire.auto(model, inner, thinwire.connect(), bandwidth="100mbit", latency="20ms", step_time=0.3)
        >>> opt.chosen
        'There is one worker, which exchanges nothing: data-parallel.'

    Args:
        model: to train, or its parameters; BatchNorm statistics of a model are averaged.
        inner: any torch optimizer. MT-DAO is considered where it has slow momenta (`thinwire.optim`). A method with an update
            rule of its own, such as DeMo, goes on with the learning rates and weight decays of its parameter groups.
        link: this worker's end of the wire.
        step_time: of one training step without any exchange: seconds, a text such as "300ms", or a function that does a forward
            and backward pass, which is called four times and timed.
        bandwidth: of each worker's link: bits per second, or a text such as "100mbit". By default it is measured, and so is the
            latency: a few seconds of messages between all workers.
        latency: of a message: seconds, or a text such as "20ms".
        utilisation: the part of the time that workers should compute.
        warm_start: so many first steps are synchronous; see `thinwire.WarmStart`.
        clip_norm: for methods that clip gradients themselves, since they average them; clip before `step()` for others.
    """
    check_whole_number("warm_start", warm_start, least=0)
    module = model if isinstance(model, nn.Module) else nn.ParameterList(model)
    if link.size < 2:
        return _told(DataParallel(inner, link, clip_norm=clip_norm, buffers=running_statistics(module)), _ALONE)
    cluster = _cluster(inner, link, step_time, bandwidth, latency)
    advice = advise(_shapes(inner), cluster, utilisation=utilisation, wishes=Wishes(methods=_methods(inner), route="auto"))
    offer = advice.best or advice.closest
    if offer is None:
        raise ConfigError(f"no method fits this link ({advice.sentence}): choose one by hand")
    config = replace(offer.config, clip_norm=clip_norm)

    def make(inner: Optimizer, link: Link) -> Algorithm:
        return optimizer_of(config, module, link, inner=inner, params=_own_groups(inner))

    def start(inner: Optimizer, link: Link) -> Algorithm:
        return DataParallel(inner, link, clip_norm=clip_norm, buffers=running_statistics(module))

    warm = warm_start and offer.method is not _SYNCHRONOUS
    opt = WarmStart(inner, link, steps=warm_start, start=start, then=make) if warm else make(inner, link)
    route = " Owners average its messages (route='owners')." if offer.by_owners else ""
    return _told(opt, advice.sentence + route + _about_inner(config, inner))


_ALONE = "There is one worker, which exchanges nothing: data-parallel."
_SYNCHRONOUS = Method("data-parallel", RunConfig(algorithm="data-parallel"), ((1, 0.0),))  # does not overlap, as DDP does


def _told(optimizer: Any, sentence: str) -> Any:
    optimizer.chosen = sentence
    if optimizer.link.rank == 0:
        log.info("%s", sentence)
    return optimizer


def _cluster(
    inner: Optimizer,
    link: Link,
    step_time: float | str | Callable[[], object],
    bandwidth: float | str | None,
    latency: float | str | None,
) -> Cluster:
    """The machines, as worker 0 knows them; what it was not told is measured."""
    mine = {"step_time": _seconds_of(step_time, inner, link) if callable(step_time) else _number(step_time, parse_duration)}
    mine["bandwidth"] = 0.0 if bandwidth is None else _number(bandwidth, parse_bandwidth)
    mine["latency"] = -1.0 if latency is None else _number(latency, parse_duration)
    told = tell_all(link, mine, float)
    goodput = GOODPUT
    if not told["bandwidth"] or told["latency"] < 0:
        measured = measure_ring(link)
        if not told["bandwidth"]:  # of messages, without headers
            told["bandwidth"], goodput = measured.bandwidth, 1.0
        if told["latency"] < 0:
            told["latency"] = measured.hop
    network = Network(bandwidth=told["bandwidth"], latency=told["latency"])
    return Cluster(workers=link.size, network=network, step_time=told["step_time"], goodput=goodput)


def _number(value: float | str, parse: Callable[[str], float]) -> float:
    return parse(value) if isinstance(value, str) else float(value)


def _seconds_of(passes: Callable[[], object], inner: Optimizer, link: Link) -> float:
    """The time of a forward and backward pass; the first one warms up."""
    found = []
    for _ in range(1 + _TIMED):
        started = link.now()
        passes()
        found.append(link.now() - started)
        inner.zero_grad()
    return statistics.median(found[1:])


def _shapes(inner: Optimizer) -> nn.Module:
    """What is trained, without memory; of a model that is sharded, this process's part."""
    everyone = [p for group in inner.param_groups for p in group["params"]]
    like = [nn.Parameter(torch.empty_like(local(p), device="meta"), requires_grad=p.requires_grad) for p in everyone]
    return nn.ParameterList(like)


def _methods(inner: Optimizer) -> tuple[Method, ...]:
    """Those whose loss is known, with an inner optimizer of this kind."""
    slow = isinstance(inner, QuasiHyperbolic)
    left_out = {"ddp", "lordo", *(("local-adam", "des-loc") if slow else ("mt-dao",))}
    return (_SYNCHRONOUS, *(m for m in METHODS if m.losses and m.config.algorithm not in left_out))


def _own_groups(inner: Optimizer) -> list[dict[str, Any]]:
    """Parameter groups for a method with an update rule of its own: what it shares with the inner optimizer's."""
    return [{k: group[k] for k in ("params", "lr", "weight_decay") if k in group} for group in inner.param_groups]


def _about_inner(config: RunConfig, inner: Optimizer) -> str:
    if issubclass(found()[resolve_algorithm(config.algorithm, found())[0]], Wrapper):
        return ""
    return f" It is an optimizer itself: of {type(inner).__name__} it takes learning rates and weight decays."
