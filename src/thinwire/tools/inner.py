"""The inner optimizers of runs, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.optim import QHADOPT, QHM, LowRankAdam, QHAdam, QHMuon, propose_beta
from thinwire.tools.config import RunConfig


def inner_of(name: str, model: nn.Module, config: RunConfig, *, K: int) -> Optimizer:
    """The inner optimizer that a run names.

    Args:
        name: of `RunConfig.inner`.
        model: whose parameters it trains.
        config: of the run, for its settings.
        K: steps between two averages, for which a slow momentum is chosen.
    """
    if name in _SLOW:
        refuse_low_rank_settings(config, name)
        return _SLOW[name](model.parameters(), **_slow_settings(name, config, K))
    if name == "low-rank":
        return _low_rank(model, config, K)
    refuse_slow_settings(config, name)
    refuse_low_rank_settings(config, name)
    if config.beta2 is not None and name in ("sgd", "momentum"):
        raise ConfigError(f"beta2 is of a second moment, which {name} does not have, got {config.beta2!r}")
    if name == "muon":
        return _muon(model, config)
    return _PLAIN[name](model.parameters(), config)


def _adamw(params: Any, config: RunConfig) -> Optimizer:
    return torch.optim.AdamW(params, lr=config.lr, betas=(0.9, beta2_of(config)), weight_decay=config.weight_decay)


_PLAIN: dict[str, Callable[[Any, RunConfig], Optimizer]] = {
    "adamw": _adamw,
    "adam": lambda p, c: torch.optim.Adam(p, lr=c.lr, betas=(0.9, 0.999 if c.beta2 is None else c.beta2)),
    "sgd": lambda p, c: torch.optim.SGD(p, lr=c.lr),
    "momentum": lambda p, c: torch.optim.SGD(p, lr=c.lr, momentum=0.9, nesterov=True),
}

_SLOW: dict[str, Callable[..., Optimizer]] = {"qhadam": QHAdam, "qhadopt": QHADOPT, "qhm": QHM, "qhmuon": QHMuon}


def _slow_settings(name: str, config: RunConfig, K: int) -> dict[str, Any]:
    synchronous = config.warm_start if config.warm_by == "ddp" else 0  # else the inner optimizer takes no step in the start
    warmup = synchronous if config.qh_warmup is None else config.qh_warmup
    betas = config.qh_betas or (propose_beta(K, steps=max(1, config.steps - warmup)).beta,)
    omegas = config.qh_omegas or ((0.95,) if len(betas) == 1 else None)
    if omegas is None:
        raise ConfigError(f"qh-omegas must be given with qh-betas={betas}: one weight for each momentum")
    settings = {"lr": config.lr, "betas": betas, "omegas": omegas, "weight_decay": config.weight_decay}
    reset = {"zero": True, "age": "age"}[config.qh_reset]
    settings |= {"lives": config.qh_lives, "warmup": warmup, "reset": reset, "lr_scale": config.qh_lr_scale}
    if name != "qhm":
        # A second moment must not forget a large gradient before the momentum does.
        fitting = 0.9999 if name == "qhadopt" else max(0.95, max(betas) ** 2)
        settings["beta2"] = fitting if config.beta2 is None else config.beta2
    return settings


def refuse_slow_settings(config: RunConfig, name: str) -> None:
    """Raise a `ConfigError` where a run has settings of slow momenta and `name` has none."""
    plain = RunConfig()
    for setting in ("qh_betas", "qh_omegas", "qh_lives", "qh_warmup", "qh_reset", "qh_lr_scale"):
        if (value := getattr(config, setting)) != getattr(plain, setting):
            flag = setting.replace("_", "-")
            raise ConfigError(f"{flag} is a setting of {', '.join(_SLOW)}, not of {name}, got {value!r}")


def refuse_low_rank_settings(config: RunConfig, name: str, *, full_rank: bool = False) -> None:
    """Raise a `ConfigError` where a run has settings of low-rank moments and `name` has none; `full_rank` may be allowed."""
    for setting in ("low_rank_source", *(() if full_rank else ("full_rank",))):
        if (value := getattr(config, setting)) is not None:
            whose = "--inner low-rank" if setting == "low_rank_source" else "lordo and --inner low-rank"
            raise ConfigError(f"{setting.replace('_', '-')} is a setting of {whose}, not of {name}, got {value!r}")


def beta2_of(config: RunConfig) -> float:
    """Decay of the second moment of plain optimizers."""
    return 0.95 if config.beta2 is None else config.beta2


def groups_of(model: nn.Module, config: RunConfig) -> list[dict[str, Any]] | Iterator[nn.Parameter]:
    """The model's parameters; in two groups where the run has its embeddings stepped at full rank."""
    if config.full_rank is None:
        return model.parameters()
    embeddings = _embeddings(model)
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in embeddings]},
        {"params": [p for p in model.parameters() if id(p) in embeddings], "rank": 0},
    ]
    return [group for group in groups if group["params"]]


def _embeddings(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}


def _low_rank(model: nn.Module, config: RunConfig, K: int) -> Optimizer:
    """LoRDO's optimizer on one worker, with LoRDO's own settings in a start of it: their states are of one shape."""
    beta, omega = (config.qh_betas or (0.9,))[0], (config.qh_omegas or (0.97,))[0]
    settings: dict[str, Any] = {"H": K, "betas": (beta, beta2_of(config)), "omega": omega, "lives": config.qh_lives}
    settings |= {name: config.settings[name] for name in ("rank", "source") if name in config.settings}
    settings |= {"source": config.low_rank_source} if config.low_rank_source else {}
    return LowRankAdam(groups_of(model, config), lr=config.lr, weight_decay=config.weight_decay, **settings)


def _muon(model: nn.Module, config: RunConfig) -> Optimizer:
    """Muon as in MuLoCo: of matrices but the embedding, AdamW of the rest; our own, since torch's takes matrices only."""
    embeddings = _embeddings(model)
    matrices = [p for p in model.parameters() if p.dim() >= 2 and id(p) not in embeddings]
    rest = [p for p in model.parameters() if p.dim() < 2 or id(p) in embeddings]
    groups = [{"params": matrices}, {"params": rest, "matrices": False}]
    settings: dict[str, Any] = {"lr": config.lr, "betas": 0.9, "omegas": 1.0, "beta2": beta2_of(config)}
    return QHMuon([g for g in groups if g["params"]], weight_decay=config.weight_decay, **settings)
