"""From a config to its parts: the device, the task, and the optimizer with its inner one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.algorithms import DataParallel, DeMo, found
from thinwire.codecs import parse_codec, parse_wire
from thinwire.core.buffers import running_statistics
from thinwire.core.optimizer import Algorithm
from thinwire.core.route import Owners, Route
from thinwire.core.wrapper import Wrapper
from thinwire.errors import ConfigError
from thinwire.links import Link
from thinwire.schedules import Every, Schedule, Stages, parse_schedule
from thinwire.tasks import make_task
from thinwire.tasks.task import Task
from thinwire.tools.config import RunConfig, resolve_algorithm
from thinwire.tools.inner import beta2_of, groups_of, inner_of, refuse_low_rank_settings, refuse_slow_settings
from thinwire.warm_start import WarmStart

WARM_WIRE = "DCT(64) >> TopK(256) >> Sign()"  # of a warm start by DeMo: what counts is the beginning
_PERIODS = ("H", "K_u", "K_v")
WARM_INNER = {"lordo": "low-rank"}  # what takes the synchronous steps of a warm start where a method has no inner optimizer


def check_total(optimizer: Algorithm | WarmStart, steps: int) -> None:
    """Raise a `ConfigError` for a number of steps at which the workers cannot stop together."""
    if optimizer.pace is not None:
        optimizer.pace.check_total(steps)


def device_of(config: RunConfig) -> torch.device:
    """Where this worker computes: its own GPU, or the CPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU on this machine")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def task_of(config: RunConfig, workers: int) -> Task:
    """The config's task for this number of workers."""
    names = ("seed", "batch", "data", "non_iid", "vocab", "val_windows", "val_part")
    return make_task(config.task, workers=workers, **{name: getattr(config, name) for name in names})


def warm_start_of(config: RunConfig, model: nn.Module, link: Link, *, wire: Link | None = None) -> WarmStart:
    """Averaged gradients around the inner optimizer that the config's algorithm will have, or one of its kind; then that.

    Args:
        config: of the run.
        model: to train.
        link: this worker's end of the wire.
        wire: what the algorithm uses, where that is another link.
    """
    inner = _inner_for(config, model)
    if config.warm_by == "demo" and (take := config.settings.get("from_start", "Q")) != "Q":
        raise ConfigError(f"from-start={take} goes on with the moments of a start by ddp, and demo has none of low rank")
    if inner is None:
        cls = found()[resolve_algorithm(config.algorithm, found())[0]]
        inner = inner_of(WARM_INNER.get(cls.name, "adamw"), model, config, K=longest_period(settings_of(config).get("H", 32)))

    def start(inner: Optimizer, link: Link) -> Algorithm:
        shared: dict[str, Any] = {"clip_norm": config.clip_norm, "buffers": running_statistics(model)}
        if config.warm_by == "ddp":
            return DataParallel(inner, link, **shared)
        codec = parse_wire(config.warm_wire or WARM_WIRE)
        own = {"lr": config.lr, "weight_decay": config.weight_decay, "betas": (0.9, beta2_of(config))}
        return DeMo(model.parameters(), link, codec=codec, **own, **shared)

    def then(inner: Optimizer, link: Link) -> Algorithm:
        optimizer = optimizer_of(config, model, wire or link, inner=inner)
        check_total(optimizer, config.steps)
        return optimizer

    moments = config.warm_by == "demo"
    return WarmStart(inner, link, steps=config.warm_start, start=start, then=then, second_moments=moments)


def _inner_for(config: RunConfig, model: nn.Module) -> Optimizer | None:
    """A new inner optimizer for the config's algorithm, None where it has none."""
    cls = found()[resolve_algorithm(config.algorithm, found())[0]]
    if not issubclass(cls, Wrapper):
        refuse_slow_settings(config, config.algorithm)
        refuse_low_rank_settings(config, config.algorithm, full_rank=cls.name in WARM_INNER)
        if config.inner is not None:
            raise ConfigError(f"{config.algorithm} is an optimizer itself and has no inner one, got --inner {config.inner}")
        return None
    settings = settings_of(config)
    H = inspect.signature(cls.__init__).parameters.get("H")
    K = settings.get("K_u") or settings.get("H", H.default if H else 32)
    return inner_of(config.inner or settings.get("inner", cls.usual_inner), model, config, K=longest_period(K))


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings of the config's algorithm and of its name; periods that are written as a text as schedules."""
    _, fixed = resolve_algorithm(config.algorithm, found())
    settings = {**fixed, **config.settings}
    return settings | {k: parse_schedule(settings[k]) for k in _PERIODS if isinstance(settings.get(k), str)}


def longest_period(period: int | Schedule) -> int:
    """The longest period that a setting has, which a slow momentum has to outlive."""
    if isinstance(period, Stages):
        return max(s.H for s in period.schedules if isinstance(s, Every))
    assert isinstance(period, int)
    return period


def optimizer_of(
    config: RunConfig,
    model: nn.Module,
    link: Link,
    *,
    inner: Optimizer | None = None,
    params: Sequence[dict[str, Any]] | None = None,
) -> Algorithm:
    """The config's algorithm around its inner optimizer, or around one that is there already.

    Args:
        config: of the run.
        model: to train.
        link: this worker's end of the wire.
        inner: the inner optimizer; a new one by default.
        params: parameter groups for an algorithm without one; by default the model's parameters.
    """
    algorithms = found()
    cls, settings = algorithms[resolve_algorithm(config.algorithm, algorithms)[0]], settings_of(config)
    settings.pop("inner", None)
    prescribed = settings.pop("wire", None)
    if wire := config.wire or prescribed:
        settings["codec"] = parse_wire(wire)
    if statistics := running_statistics(model):
        settings["buffers"] = statistics
    settings |= {} if config.route == "gather" else {"route": route_of(config)}
    make: Any = cls
    if clips_itself(cls):
        settings["clip_norm"] = config.clip_norm
    if issubclass(cls, Wrapper):
        return make(inner or _inner_for(config, model), link, **settings)
    _inner_for(config, model)  # refuses settings of an inner optimizer
    known = inspect.signature(cls.__init__).parameters
    own = {"lr": config.lr, "weight_decay": config.weight_decay}
    return make(params or groups_of(model, config), link, **{k: v for k, v in own.items() if k in known}, **settings)


def route_of(config: RunConfig) -> Route:
    """How messages reach all workers."""
    if config.route != "owners":
        return config.route
    return Owners(None if config.back is None else parse_codec(config.back), config.owner_feedback)


def clips_itself(cls: type[Algorithm]) -> bool:
    """Whether a method has a place of its own for clipping; for all others the loop does it, worker by worker."""
    return "clip_norm" in inspect.signature(cls.__init__).parameters
