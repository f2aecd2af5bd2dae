"""Phases: one optimizer that is two algorithms, one after the other, around the same parameters.

    step 1 ... N: the start          after step N: the method takes over          step N + 1 ...: the method

Which of the two is at work follows from the number of steps alone, so that state dicts and checkpoints need not say it: loading
one of any step brings the right one to work first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from thinwire.core.optimizer import Algorithm
from thinwire.core.slots import COUNTERS
from thinwire.core.stats import Callback, Stats
from thinwire.core.wrapper import Wrapper
from thinwire.errors import CheckpointError, ConfigError, check_whole_number
from thinwire.links.base import Link
from thinwire.links.metered import metered

Make = Callable[[Optimizer, Link], Algorithm]


@dataclass
class _Turn:
    """Whose turn it is; one object, which a framework's wrapper around the optimizer shares with it."""

    optimizer: Algorithm
    starting: bool


class Phases(Optimizer):
    """A start and a method, one after the other; whatever is not defined here is that of the one at work.

    Args:
        inner: the optimizer that both may be around.
        link: this worker's end of the wire.
        steps: how many the start takes.
        start: makes what takes the first steps, from (inner, link).
        then: makes what takes over.
        second_moments: give the inner optimizer of the method the second moments of a start that has its own, such as DeMo.

    Attributes:
        start_steps: how many the start takes.
    """

    _step_supports_amp_scaling = True  # as of any Algorithm

    def __init__(self, inner: Optimizer, link: Link, *, steps: int, start: Make, then: Make, second_moments: bool = False):
        """Make the start; the method is made when its turn comes."""
        check_whole_number("steps", steps)
        if not isinstance(inner, Optimizer):
            raise ConfigError(f"the inner optimizer must be a torch.optim.Optimizer, got {type(inner).__name__}")
        self.inner, self.start_steps, self._start, self._then = inner, steps, start, then
        self._second_moments = second_moments
        self.link, self.meter = metered(link)
        self._turn = _Turn(self._made(start), starting=True)
        self._wrapping = True
        super().__init__(self.at_work.param_groups, {})
        self._wrapping = False
        self._follow()

    @property
    def at_work(self) -> Algorithm:
        """The one of the two that takes the next step."""
        return self._turn.optimizer

    @property
    def starting(self) -> bool:
        """Whether that is the start."""
        return self._turn.starting

    def _made(self, make: Make) -> Algorithm:
        made = make(self.inner, self.link)
        if not isinstance(made, Algorithm):
            raise ConfigError(f"start and then must make a thinwire optimizer of (inner, link), got a {type(made).__name__}")
        return made

    def _follow(self) -> None:
        """Have the parameter groups and the state of the one at work; loading puts others in their place."""
        self.param_groups, self.state, self.defaults = self.at_work.param_groups, self.at_work.state, self.at_work.defaults

    # --- From one to the other ---------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        """Let the method go on where the start is."""
        before = self.at_work
        if before.engine.queue or ("param" not in before.replicated and before.pending_steps):
            before.finish()
        self._put_to_work(self._then)
        take_over(self.at_work, before)
        if self._second_moments and isinstance(self.at_work, Wrapper):
            hand_over_second_moments(self.at_work, before)
        self._follow()

    def be_at(self, step: int) -> Algorithm:
        """Have the one at work that has taken this step; its state is yet to be loaded."""
        if step < self.start_steps and not self.starting:
            self._put_to_work(self._start)
        elif step >= self.start_steps and self.starting:
            self._put_to_work(self._then)
        return self.at_work

    def _put_to_work(self, make: Make) -> None:
        before = self.at_work
        self._turn.optimizer, self._turn.starting = self._made(make), make is self._start
        self.at_work.watch, self.at_work.engine.aborted = before.watch, before.engine.aborted
        self.at_work.buffer_average.said_left_out = before.buffer_average.said_left_out

    # --- What an optimizer does --------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; the last one of the start brings the method to work."""
        with self._grad_scale_handed_on():
            loss = self.at_work.step(closure)
        if self.starting and self.at_work.steps >= self.start_steps:
            self._switch()
        return loss

    @contextmanager
    def _grad_scale_handed_on(self) -> Iterator[None]:
        """Give the one at work what a GradScaler sets around `step()`."""
        optimizer, scale = self.at_work, self.__dict__.get("grad_scale")
        if scale is None:
            yield
            return
        optimizer.grad_scale = scale
        try:
            yield
        finally:
            del optimizer.grad_scale

    def finish(self) -> None:
        """See `Algorithm.finish`."""
        self.at_work.finish()

    def stats(self) -> Stats:
        """See `Algorithm.stats`; what the start has sent is counted."""
        return self.at_work.stats()

    def on_round(self, callback: Callback) -> RemovableHandle:
        """See `Algorithm.on_round`; the callback is told of the rounds of both."""
        return self.at_work.on_round(callback)

    def shared_model(self, model: nn.Module | None = None, *, mean_over: Link | None = None) -> AbstractContextManager[None]:
        """See `Algorithm.shared_model`."""
        return self.at_work.shared_model(model, mean_over=mean_over)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in any torch optimizer; on all workers alike."""
        if self._wrapping:
            super().add_param_group(param_group)
            return
        if self.starting and not isinstance(self.at_work, Wrapper):
            name = type(self.at_work).__name__
            raise ConfigError(f"{name} has no inner optimizer: parameters can be added after its {self.start_steps} steps")
        self.at_work.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the one at work."""
        return self.at_work.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict()` gave, of any step."""
        step = state_dict["param_groups"][0].get(COUNTERS[0])
        if not isinstance(step, int):
            raise CheckpointError(f"not a state of thinwire's {type(self).__name__}: {COUNTERS[0]} is {step!r}")
        before = self.at_work, self.starting
        try:
            self.be_at(step).load_state_dict(state_dict)
        except BaseException:
            self._turn.optimizer, self._turn.starting = before
            raise
        finally:
            self._follow()
        if self.starting and not isinstance(self.at_work, Wrapper):
            self.inner.state.clear()  # it has taken no step yet

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked for is that of the one at work."""
        if name.startswith("__") or "_turn" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.at_work, name)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copy and pickle: a link cannot be copied along."""
        return self.at_work.__getstate__()

    def __repr__(self) -> str:
        """The one at work, on one line."""
        turn = f"first {self.start_steps} steps" if self.starting else f"after {self.start_steps} steps"
        return f"{type(self).__name__}({turn}: {self.at_work!r})"


def at_work(optimizer: Algorithm | Phases) -> Algorithm:
    """The algorithm that takes the next step."""
    return optimizer.at_work if isinstance(optimizer, Phases) else optimizer


def take_over(optimizer: Algorithm, before: Algorithm) -> None:
    """Go on where another optimizer of the same model stopped.

    Counters go on, and so do learning rates that a scheduler sets, where the two have parameter groups of their own.
    """
    for name in COUNTERS:
        optimizer.set_counter(name, before.param_groups[0][name])
    if len(optimizer.param_groups) == len(before.param_groups):
        for mine, theirs in zip(optimizer.param_groups, before.param_groups, strict=True):
            if "initial_lr" in theirs:
                mine |= {name: theirs[name] for name in ("lr", "initial_lr")}
    known = before.inner.state if isinstance(before, Wrapper) else {}
    for name in optimizer.takes_over:
        for p, state in optimizer.own_state.items():
            theirs = known.get(p, {}).get(name)
            if name in state and theirs is not None and state[name].shape == theirs.shape:
                state[name].copy_(theirs)
    optimizer.taken_over(before)


def hand_over_second_moments(optimizer: Wrapper, before: Algorithm) -> None:
    """Give an inner Adam the second moments that a worker's own gradients had in a start without an inner optimizer.

    Local steps are divided by the size of a worker's own gradients, which is what such a start has kept. Momenta begin at zero.
    """
    if before.second_moment is None:
        return
    moment, count = before.second_moment
    optimizer.make_inner_state()
    betas = {p: _beta2(group) for group in before.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        for p in group["params"]:
            theirs, mine = before.own_state.get(p, {}), optimizer.inner.state.get(p, {})
            if moment not in theirs or "exp_avg_sq" not in mine or not float(theirs[count]):
                continue
            t = float(theirs[count])
            grown = 1 - _beta2(group) ** t  # of a moment that has seen t gradients
            mine["exp_avg_sq"].copy_(theirs[moment] * (grown / (1 - betas[p] ** t)))
            mine["step"].fill_(t)
            if "step_seen" in mine:  # of quasi-hyperbolic optimizers, whose second moment comes last
                mine["step_of_reset"].fill_(t)
                mine["step_seen"][-1] = grown


def _beta2(group: Mapping[str, Any]) -> float:
    return group["beta2"] if "beta2" in group else group["betas"][1]
