"""Policy: what to do when something goes wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from torch import Tensor

from thinwire.core.route import Route, check_route
from thinwire.errors import ConfigError, check_choice, check_whole_number


@dataclass(frozen=True)
class Policy:
    """What to do when something goes wrong: keyword arguments of every algorithm, or one object as `policy=`.

    Attributes:
        on_abort: after a round that did not take place, "keep" the local progress (the next round carries it along) or
            "restore" the last agreed parameters.
        on_nonfinite: after a NaN or Inf, "skip" the step or round and go on, or "raise" on every worker.
        give_up_after: raise `TrainingDiverged` on every worker when so many rounds in a row were refused for a NaN or Inf; 0
            never. By default 8, and 32 for methods that exchange at every step: there a GradScaler, whose scale starts at
            65536, may rightly refuse up to 16 first steps. See `RoundEngine.refuse` for what does not wait for so many.
        alarm_every: compare a hash of what must be bit-equal every so many rounds; 0 never.
        on_divergence: when that comparison fails, "raise" or "warn".
        buffers: what is not trained but should be the same everywhere, averaged in float32 after rounds:
            `thinwire.running_statistics(model)` where a model has BatchNorm.
        route: how messages that cannot be averaged on the wire reach all workers: "gather" sends each one to all, so that bytes
            grow with the number of workers; "owners" has each worker average its share of the blocks and send that to all, so
            that they do not; "auto" takes what sends fewer bytes. An `Owners` has its settings.
        buffers_every: rounds between averagings of BatchNorm statistics (`buffers`); 0 means every round for methods with local
            steps, and every 32nd for those that exchange at every step. `finish()` always does it.
    """

    on_abort: Literal["keep", "restore"] = "keep"
    on_nonfinite: Literal["skip", "raise"] = "skip"
    give_up_after: int | None = None
    alarm_every: int = 64
    on_divergence: Literal["raise", "warn"] = "raise"
    buffers: Iterable[Tensor] = ()
    buffers_every: int = 0
    route: Route = "gather"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_choice("on_abort", self.on_abort, ("keep", "restore"))
        check_choice("on_nonfinite", self.on_nonfinite, ("skip", "raise"))
        check_choice("on_divergence", self.on_divergence, ("raise", "warn"))
        if self.give_up_after is not None:
            check_whole_number("give_up_after", self.give_up_after, least=0)
        check_whole_number("alarm_every", self.alarm_every, least=0)
        check_whole_number("buffers_every", self.buffers_every, least=0)
        check_route(self.route)

    @staticmethod
    def of(options: PolicyOptions) -> Policy:
        """The policy that keyword arguments say, on top of the one that they may hold as `policy`."""
        given = dict(options)
        base = given.pop("policy", None)
        if base is not None and not isinstance(base, Policy):
            raise ConfigError(f"policy must be a thinwire.Policy, got {base!r}")
        if unknown := sorted(given.keys() - Policy.__dataclass_fields__.keys()):
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
        return replace(base or Policy(), **given)


class PolicyOptions(TypedDict, total=False):
    """The attributes of `Policy` as keyword arguments, for type checkers."""

    on_abort: Literal["keep", "restore"]
    on_nonfinite: Literal["skip", "raise"]
    give_up_after: int | None
    alarm_every: int
    on_divergence: Literal["raise", "warn"]
    buffers: Iterable[Tensor]
    buffers_every: int
    route: Route
    policy: Policy | None
