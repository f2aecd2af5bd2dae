"""States with periods: named groups of tensors that all workers average, each at its own beat.

Parameters, momenta, second moments, low-rank moments and fragments of a model are all the same to it. All states that are due
travel in ONE message and change together; a round that is refused changes none of them. A method on top of `StateAveraging`
sets `self.states`; `send` and `apply` are given.

How a state is averaged follows from what it has:

    nothing           s_i <- mean_j s_j                              its values travel, exactly or rounded
    feedback          q_i = C(s_i);  s_i <- s_i - q_i + mean_j q_j   what a lossy codec leaves out stays in the state
    both, feedback    the same of differences: q_i = C(s_i - a);  a <- a + mean_j q_j: for sparse codecs, which would otherwise
    and anchor        send what is large everywhere again and again
    anchor            D_i = s_i - a (+ e_i);  Q = mean_j C(D_j);  a <- a + Q;  s_i <- a;  e_i <- D_i - C(D_i)
    anchor and outer  the same with  a <- a + eta (Q + mu m),  m <- mu m + Q first: an outer Nesterov step

A `Derived` state, such as a projector, is not averaged itself: all workers make it of the mean of something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs import Codec, Dense, Parts
from thinwire.codecs.base import check_codec
from thinwire.core.optimizer import Algorithm
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.owning import OWED
from thinwire.core.route import Route
from thinwire.errors import ConfigError, NonFiniteRound, RoundAborted
from thinwire.payload import zero_invalid_
from thinwire.schedules import Schedule, as_schedule

Tensors = Callable[[], list[Tensor]]  # asked again in every round: loading a checkpoint may have put others in their place


@dataclass(frozen=True)
class State:
    """A named group of tensors and how workers average it.

    Attributes:
        name: as in `inner_state()`, or "param".
        tensors: this worker's own.
        period: when it is due.
        codec: what is sent of it.
        feedback: keep what the codec leaves out in the state itself.
        anchor: the values that all agreed on last; then differences from them are sent.
        residual: what the codec has left out of the differences so far.
        outer: applies an averaged difference to the anchor; adds it by default.
    """

    name: str
    tensors: Tensors
    period: Schedule
    codec: Codec
    feedback: bool = False
    anchor: Tensors | None = None
    residual: Tensors | None = None
    outer: Callable[[list[Tensor], list[Tensor]], None] | None = None

    @property
    def lossy(self) -> bool:
        """Whether it asks what of it was sent."""
        return self.feedback or self.residual is not None

    def outgoing(self) -> list[Tensor]:
        """What is to be averaged; not the state itself where it is a difference."""
        if self.anchor is None:
            return self.tensors()
        D = list(torch._foreach_sub(self.tensors(), self.anchor()))
        if self.residual is not None:
            torch._foreach_add_(D, self.residual())
        return D

    def take(self, given: list[Tensor], mean: list[Tensor], sent: list[Tensor], *, resynced: bool = False) -> None:
        """Take the average, and nothing but it where this worker is `resynced`."""
        mine = self.tensors()
        if self.feedback:
            if self.anchor is not None:
                torch._foreach_add_(self.anchor(), mean)
            if resynced:
                torch._foreach_copy_(mine, mean if self.anchor is None else self.anchor())
            else:
                torch._foreach_sub_(mine, sent)
                torch._foreach_add_(mine, mean)
            return
        if self.anchor is None:
            torch._foreach_copy_(mine, mean)
            return
        anchor = self.anchor()
        if self.residual is not None:
            torch._foreach_sub_(given, sent)
            torch._foreach_copy_(self.residual(), given)
        if self.outer is None:
            torch._foreach_add_(anchor, mean)
        else:
            self.outer(anchor, mean)
        torch._foreach_copy_(mine, anchor)

    def skip(self, mean: list[Tensor]) -> None:
        """What a worker does whose own message was not counted: it follows the others and keeps its own progress.

        With an anchor s_i <- a' + (s_i - a); without one it takes the average, since nothing tells its progress apart.
        """
        mine = self.tensors()
        if self.anchor is None:
            torch._foreach_copy_(mine, mean)
            return
        anchor = self.anchor()
        progress = torch._foreach_sub(mine, anchor)
        if self.outer is None:
            torch._foreach_add_(anchor, mean)
        else:
            self.outer(anchor, mean)
        torch._foreach_copy_(mine, torch._foreach_add(progress, anchor))


@dataclass(frozen=True, kw_only=True)
class Derived(State):
    """A state that all workers make anew of something that they average: `give` makes what is sent, `outer` takes the mean."""

    give: Tensors

    def outgoing(self) -> list[Tensor]:
        """What this worker gives."""
        return self.give()

    def take(self, given: list[Tensor], mean: list[Tensor], sent: list[Tensor], *, resynced: bool = False) -> None:  # noqa: ARG002
        """Have it made; whether this worker's own was counted makes no difference."""
        self.skip(mean)

    def skip(self, mean: list[Tensor]) -> None:
        """Likewise."""
        assert self.outer is not None
        self.outer(self.tensors(), mean)


class StateAveraging(Algorithm):
    """Base of the methods whose rounds average states with periods; they set `states` when they are made.

    A worker whose state is invalid, and that has no anchor to go back to, is resynced by the next round: all know its id, all
    states are averaged then whether they are due or not, it counts with weight 0, and takes the average of the others.
    """

    sends_fragments = True
    states: tuple[State, ...] = ()

    @property
    def resync(self) -> list[int]:
        """Ids of the workers whose state is invalid and that the next round resyncs; known to all, kept in checkpoints."""
        return self.param_groups[0].get("resync", [])

    @property
    def evaluated(self) -> str:
        """Which model `shared_model` shows, in words."""
        if "anchor" in self._slots:
            return super().evaluated
        return "worker 0's own, which is everybody's right after an average of the parameters"

    def choose_route(self, route: Route) -> None:
        """See `OwningOptimizer`; not before there are states."""
        if self.states:
            super().choose_route(route)

    def sent_whole(self) -> tuple[Sequence[Codec], Sequence[int]]:
        """All states, one after the other."""
        states = [state for state in self.states if state.tensors()]
        return [_codec_of(states, weighted=False)], [*range(len(self._active))] * len(states)

    def owed_codecs(self) -> dict[str, Codec]:
        """Of each state; parameters have a slot of the usual name."""
        return {_owed_slot(state): state.codec for state in self.states}

    def owned(self, which: Sequence[int]) -> dict[str, Any]:
        """Every state that is due has all of them."""
        states = self.due_states()
        owed = [t for state in states for t in self._owed_of(_owed_slot(state), which)]
        return {"owed": owed, "model": self.params(), "which": [*which] * len(states)}

    def due_states(self) -> list[State]:
        """The states of the round at hand; where no matrix is projected, some have no tensors."""
        return [self.states[i] for i in self.due if self.states[i].tensors()]

    def send(self) -> Outgoing:
        """All states that are due, one after the other; all of them where a worker is resynced, which sends zeros."""
        weight = None
        if self.resync:
            self.due = tuple(range(len(self.states)))
            weight = float(self.peers.id not in self.resync)
        states = self.due_states()
        given = [t for state in states for t in state.outgoing()]
        if weight == 0:
            given = [torch.zeros_like(t) for t in given]
        lossy = any(state.lossy for state in states)
        return self.outgoing(given, codec=_codec_of(states, weighted=weight is not None), want_sent=lossy, weight=weight)

    def apply(self, arrived: Arrived) -> None:
        """Give every state its average."""
        start, given, mean, sent = 0, arrived.outgoing.tensors, arrived.mean, arrived.sent
        for state in self.due_states():
            here = slice(start, start := start + len(state.tensors()))
            if arrived.included:
                state.take(given[here], mean[here], sent[here], resynced=arrived.outgoing.weight == 0)
            else:
                state.skip(mean[here])

    def committed(self) -> None:
        """This round resyncs whoever needs it."""
        self.set_counter("resync", [])

    def refused(self, refusal: RoundAborted) -> None:
        """Name those whose state is invalid, so that the next round resyncs them."""
        if isinstance(refusal, NonFiniteRound) and "anchor" not in self._slots:
            self.set_counter("resync", sorted({*self.resync, *refusal.culprits}))
            if len(self.resync) == self.peers.size:
                what = f"no worker is left whose state is valid ({refusal})"
                raise self.engine.refusals.training_diverged(what, since=self.steps)
            if self.peers.id in refusal.culprits:
                zero_invalid_(t for state in self.states for t in state.tensors())

    def joiner_copies(self, key: str) -> bool:
        """All that is averaged, and what belongs to it in the inner optimizer; parameters where no anchor holds them."""
        if key == "param":
            return "anchor" not in self._slots
        return key.startswith("inner") or any(s.name == key for s in self.states)

    def caught_up(self) -> None:
        """Averaged moments must not be corrected for bias once more: they are as old as the run."""
        inner: Mapping[Tensor, Mapping[str, object]] = getattr(getattr(self, "inner", None), "state", {})
        for p in self._active:
            for entries in (self.own_state[p], inner.get(p, {})):
                if isinstance(count := entries.get("step"), Tensor):
                    count.clamp_(min=self.steps)

    def whole_round(self) -> bool:
        """Whether the parameters, or the last part of them, are among what is due."""
        return any(state.name == "param" for state in self.due_states())

    def shared_state(self) -> dict[str, list[Tensor]]:
        """Everything that is bit-equal on all workers right after a round: what was just averaged, and what always is."""
        averaged = {f"averaged {s.name}": s.tensors() for s in self.due_states() if not s.feedback}
        return super().shared_state() | averaged


def _owed_slot(state: State) -> str:
    return OWED if state.name == "param" else f"{OWED}_{state.name}"


def _codec_of(states: Sequence[State], *, weighted: bool) -> Codec:
    """The codec of a message: that of the states, or one of parts where they have several."""
    if len({s.codec for s in states}) == 1:
        codec = states[0].codec
        # Weights are not added up on a narrow wire, where they would be rounded.
        return replace(codec, gather=True) if weighted and isinstance(codec, Dense) else codec
    return Parts(tuple((len(s.tensors()), s.codec) for s in states))


def is_second_moment(key: str) -> bool:
    """Whether an optimizer's state with this key is a mean of squares or the like: it must not become negative."""
    return key.endswith("_sq") or key.startswith(("square", "sum", "acc", "exp_inf"))


def state_periods(
    keys: Sequence[str],
    H: int | Schedule,
    K_u: int | Schedule | Sequence[int | Schedule] | None,
    K_v: int | Schedule | None,
) -> dict[str, Schedule]:
    """When the parameters and each state of an inner optimizer are averaged.

    Args:
        keys: the names of the states.
        H: period of the parameters.
        K_u: of the momenta in the order of their names, one for all or one each; H by default.
        K_v: of second moments; H by default.
    """
    momenta = [key for key in keys if not is_second_moment(key)]
    given = list(K_u) if isinstance(K_u, list | tuple) else [K_u] * len(momenta)
    if len(given) != len(momenta):
        raise ConfigError(f"K_u names {len(given)} periods, but the momenta are {momenta}")
    found = {"param": H} | {key: H if K is None else K for key, K in zip(momenta, given, strict=True)}
    found |= {key: H if K_v is None else K_v for key in keys if is_second_moment(key)}
    return {name: as_schedule(period) for name, period in found.items()}  # type: ignore[arg-type]


def state_codecs(names: Sequence[str], codec: Codec | Mapping[str, Codec] | None) -> dict[str, Codec]:
    """What is sent of each state: by name where names are given, else the same of all but the second moments.

    Args:
        names: of the states, "param" among them.
        codec: one for all, or one by name with dense float32 for the others. One that is not dense would make second moments
            negative, so they are sent in bfloat16 beside it.
    """
    if isinstance(codec, Mapping):
        if unknown := sorted(set(codec) - set(names)):
            raise ConfigError(f"codec names {unknown[0]!r}, but the states are {', '.join(names)}")
        for name, one in codec.items():
            if not isinstance(check_codec(one), Dense) and is_second_moment(name):
                raise ConfigError(f"{name} must not become negative, so it needs a dense codec, got {one!r}")
        return {name: codec.get(name, Dense()) for name in names}
    chosen = Dense() if codec is None else check_codec(codec)
    dense = isinstance(chosen, Dense)
    return {name: chosen if dense or not is_second_moment(name) else Dense("bf16") for name in names}
