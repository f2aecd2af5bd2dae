"""Learning rates over a run: pure functions of the step. No torch here, so that the command line can use them without waiting.

All have a linear warm-up. Then "cosine" falls to a part of the peak, "wsd" (warm-up, stable, decay) stays at the peak and falls
in a straight line over the last part of the run, and "constant" stays.

Examples:
    >>> [round(lr_of_step("wsd", step, steps=8, warmup=2), 2) for step in range(1, 9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from thinwire.errors import ConfigError, check_choice, check_whole_number

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

LRSchedule = Literal["cosine", "wsd", "constant"]
DECAY = 0.25  # the part of a run over which "wsd" decays
FINAL: dict[LRSchedule, float] = {"cosine": 0.1, "wsd": 0.0, "constant": 1.0}  # where each ends, as a part of the peak


def lr_of_step(
    schedule: LRSchedule,
    step: int,
    *,
    steps: int,
    peak: float = 1.0,
    warmup: int = 0,
    final: float | None = None,
    decay: float = DECAY,
) -> float:
    """The learning rate of a step.

    Args:
        schedule: "cosine", "wsd" or "constant".
        step: counted from 1.
        steps: length of the run.
        peak: the largest rate.
        warmup: steps over which the rate rises to its peak.
        final: where the decay ends, as a part of the peak; by default at 0.1 for "cosine" and at 0 for "wsd".
        decay: of "wsd": the last part of the run, over which the rate falls.
    """
    if step <= warmup:
        return peak * step / warmup
    end = FINAL[schedule] if final is None else final
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        falling = max(1, round(decay * steps))
        return peak * (end + (1 - end) * min(1.0, max(0, steps - step) / falling))
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress)))


def check_lr_schedule(schedule: str, *, warmup: int, final: float | None, decay: float) -> None:
    """Raise a `ConfigError` for what `lr_of_step` does not take."""
    check_choice("lr-schedule", schedule, get_args(LRSchedule))
    check_whole_number("lr-warmup", warmup, least=0)
    if final is not None and not 0 <= final <= 1:
        raise ConfigError(f"lr-final must be from 0 to 1, got {final!r}")
    if final is not None and schedule == "constant":
        raise ConfigError(f"a constant learning rate has no end to fall to: leave out lr-final, got {final!r}")
    if not 0 < decay <= 1:
        raise ConfigError(f"lr-decay must be above 0 and at most 1, got {decay!r}")
    if decay != DECAY and schedule != "wsd":
        raise ConfigError(f"lr-decay is a setting of the schedule wsd, got {decay!r} with {schedule}")


def wsd(optimizer: Optimizer, *, steps: int, warmup: int = 0, decay: float = DECAY, final: float = 0.0) -> LambdaLR:
    """A torch scheduler: linear warm-up, the optimizer's learning rate, and a linear decay over the last part of the run.

    Call its `step()` after each `optimizer.step()`. It is a function of the number of steps alone, so that
    `opt.join(scheduler)` can move it along where workers come and go.

    Args:
        optimizer: thinwire's, or any other of torch.
        steps: length of the run.
        warmup: steps over which the rate rises.
        decay: the last part of the run, over which it falls.
        final: where it ends, as a part of the peak.
    """
    from torch.optim.lr_scheduler import LambdaLR

    check_whole_number("steps", steps)
    check_lr_schedule("wsd", warmup=warmup, final=final, decay=decay)
    return LambdaLR(optimizer, lambda taken: lr_of_step("wsd", taken + 1, steps=steps, warmup=warmup, final=final, decay=decay))
