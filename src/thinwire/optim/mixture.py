"""What the direction of a quasi-hyperbolic optimizer is mixed from: momenta at several time scales and the raw gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire.errors import ConfigError, check_choice, check_not_negative, check_whole_number
from thinwire.maths.lives import age_of, beta_at

Tensors = list[Tensor] | tuple[Tensor, ...]
Reset = bool | Literal["age"]


@dataclass(frozen=True)
class Mixture:
    """N momenta and their weights.

    Attributes:
        betas: decay of each momentum.
        omegas: weight of each momentum; what is missing to 1 is the weight of the raw gradient.
        lives: at an age of t steps the half-life of a momentum is at most t / lives; 0 sets no limit.
    """

    betas: tuple[float, ...]
    omegas: tuple[float, ...]
    lives: float = 0.0

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for values out of range."""
        betas, omegas = self.betas, self.omegas
        if not betas or len(betas) != len(omegas):
            raise ConfigError(f"betas and omegas must be as many as there are momenta, got betas={betas}, omegas={omegas}")
        check_not_negative("lives", self.lives)
        check_decay("betas", betas, betas)
        if not all(w >= 0 for w in omegas) or math.fsum(omegas) > 1 + 1e-9:
            raise ConfigError(f"omegas must be at least 0 and sum up to at most 1, got {omegas}")

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Mixture:
        """The settings of a parameter group."""
        return cls(as_tuple(group["betas"]), as_tuple(group["omegas"]), group["lives"])

    def at(self, age: int) -> Mixture:
        """As it is when the momenta have seen `age` gradients, the current one included."""
        if not self.lives:
            return self
        return replace(self, betas=tuple(beta_at(b, age, self.lives) for b in self.betas))


@dataclass(frozen=True)
class MomentumSwitch:
    """A warm-up with one plain momentum, after which the `Mixture` takes over.

    Attributes:
        warmup: number of warm-up steps.
        warmup_beta: decay of the momentum during the warm-up.
        reset: zero the momenta after it; "age" keeps them, and lets their betas grow from `warmup_beta` on.
        lr_scale: multiplies lr after it.
    """

    warmup: int = 0
    warmup_beta: float = 0.9
    reset: Reset = True
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for values out of range."""
        check_choice("reset", self.reset, (True, False, "age"))
        check_whole_number("warmup", self.warmup, least=0)
        check_decay("warmup_beta", [self.warmup_beta], self.warmup_beta)
        check_not_negative("lr_scale", self.lr_scale)

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> MomentumSwitch:
        """The settings of a parameter group."""
        return cls(group["warmup"], group["warmup_beta"], group["reset"], group["lr_scale"])

    def resets_at(self, step: int) -> bool:
        """Whether the momenta are zeroed, or their age begins anew, before this step of the group."""
        return bool(self.reset) and 0 < self.warmup == step - 1

    def first_age(self, lives: float) -> int:
        """The age at which a momentum goes on after the warm-up: 0 once zeroed, else that at which `lives` allows its beta."""
        return age_of(self.warmup_beta, lives) if self.reset == "age" else 0

    def applied(self, lr: float, mixture: Mixture, *, step: int, age: int) -> tuple[float, Mixture]:
        """The learning rate and the mixture of one step.

        Args:
            lr: of the group.
            mixture: of the group.
            step: of the group, from 1.
            age: gradients that the momenta have seen, the current one included.
        """
        if step > self.warmup:
            return lr * self.lr_scale, mixture.at(age)
        many = len(mixture.betas)
        return lr, Mixture((self.warmup_beta,) * many, (1.0, *[0.0] * (many - 1)))


class Step:
    """One step of parameters that have seen equally many gradients.

    Args:
        number: of the step, from 1.
        lr: the step size.
        mixture: of this step.
        seen: the sum of the weights that each moment has given to gradients before this step, the momenta first.
        settings: of the parameter group.

    Attributes:
        seen: with the weights of this step.
        rest: the weight of the raw gradient.
    """

    def __init__(self, number: int, lr: float, mixture: Mixture, seen: Sequence[float], settings: Mapping[str, Any]):
        """Add the weights of this step to `seen`."""
        self.number, self.lr, self.betas, self.omegas, self.settings = number, lr, mixture.betas, mixture.omegas, settings
        decays = [*mixture.betas, settings.get("beta2", 0.0)]
        self.seen = [s + (1 - b) * (1 - s) for s, b in zip(seen, decays, strict=False)]
        self.rest = max(0.0, 1 - math.fsum(mixture.omegas))

    def accumulate(self, momenta: Sequence[Tensors], g: Tensors) -> None:
        """u_j <- b_j u_j + (1 - b_j) g, all in place."""
        for u, b in zip(momenta, self.betas, strict=True):
            torch._foreach_lerp_(u, g, 1 - b)

    def parts(self, momenta: Sequence[Tensors], g: Tensors, *, unbiased: bool) -> Iterator[tuple[Tensors, float]]:
        """What the direction is a sum of: lists of tensors and their weights."""
        for u, seen, w in zip(momenta, self.seen, self.omegas, strict=False):
            if w:
                yield u, w / seen if unbiased else w
        if self.rest > 1e-12:
            yield g, self.rest


def as_tuple(value: float | Sequence[float]) -> tuple[float, ...]:
    """One number or several, as a tuple of floats."""
    return (float(value),) if isinstance(value, int | float) else tuple(float(v) for v in value)


def check_decay(name: str, values: Sequence[float], shown: object) -> None:
    """Raise a `ConfigError` unless all values are from 0 to below 1."""
    if not all(0 <= b < 1 for b in values):
        raise ConfigError(f"{name} must be from 0 to below 1, got {shown!r}")
