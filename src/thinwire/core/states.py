"""States with periods: named groups of tensors that all workers average, each at its own beat.

Parameters, momenta, second moments, low-rank moments and fragments of a model are all the same to it. All states that are due
travel in ONE message and change together below the commit line; a round that is refused changes none of them. A method on top
of `StateAveraging` sets `self.states` and writes

    due = self.due_states()
    mean, sent = self.average(due.outgoing(), codec=due.codec, want_sent=due.lossy, weight=due.weight)
    self.commit()
    due.take(mean, sent)

How a state is averaged follows from what it has:

    nothing           s_i <- mean_j s_j                              its values travel, exactly or rounded
    feedback          q_i = C(s_i);  s_i <- s_i - q_i + mean_j q_j   what a lossy codec leaves out stays in the state
    both, feedback    the same of differences: q_i = C(s_i - a);  a <- a + mean_j q_j: for sparse codecs, which would otherwise
    and anchor        send what is large everywhere again and again
    anchor            D_i = s_i - a (+ e_i);  Q = mean_j C(D_j);  a <- a + Q;  s_i <- a;  e_i <- D_i - C(D_i)
    anchor and outer  the same with  a <- a + eta (Q + mu m),  m <- mu m + Q first: an outer Nesterov step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire.codecs import Codec, Dense, Parts
from thinwire.codecs.base import check_codec
from thinwire.core.exchange import message_nbytes
from thinwire.core.optimizer import Algorithm
from thinwire.errors import ConfigError, NonFiniteRound, RoundAborted
from thinwire.schedules import Schedule, as_schedule

Tensors = Callable[[], list[Tensor]]  # asked anew in every round: loading a checkpoint may have put others in their place


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

    def take(self, given: list[Tensor], mean: list[Tensor], sent: list[Tensor], *, healed: bool = False) -> None:
        """Take the average, and where a bad worker is `healed` nothing but it; only below a commit line."""
        mine = self.tensors()
        if self.feedback:
            if self.anchor is not None:
                torch._foreach_add_(self.anchor(), mean)
            if healed:
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


class Due:
    """The states of one round.

    Attributes:
        states: in the order in which they travel.
        weight: how much this worker counts, where workers count differently.
    """

    def __init__(self, states: Sequence[State], *, weight: float | None = None):
        """Nothing is sent yet."""
        self.states, self.weight = list(states), weight
        self._given: list[list[Tensor]] = []

    @property
    def lossy(self) -> bool:
        """Whether any of them asks what was sent."""
        return any(s.lossy for s in self.states)

    @property
    def codec(self) -> Codec:
        """The codec of the message: that of the states, or one of parts where they have several."""
        if len({s.codec for s in self.states}) == 1:
            codec = self.states[0].codec
            # Weights are not added up on a narrow wire, where they would be rounded.
            return replace(codec, gather=True) if self.weight is not None and isinstance(codec, Dense) else codec
        return Parts(tuple((len(s.tensors()), s.codec) for s in self.states))

    def outgoing(self) -> list[Tensor]:
        """What is to be averaged of all of them, one after the other; zeros of a worker that has no say."""
        self._given = [s.outgoing() for s in self.states]
        everything = [t for given in self._given for t in given]
        return [torch.zeros_like(t) for t in everything] if self.weight == 0 else everything

    def take(self, mean: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Give every state its average; only below a commit line."""
        start = 0
        for state, given in zip(self.states, self._given, strict=True):
            here = slice(start, start + len(given))
            state.take(given, list(mean[here]), list(sent[here]), healed=self.weight == 0)
            start += len(given)


class StateAveraging(Algorithm):
    """Base of the methods whose rounds average states with periods; they set `states` when they are made.

    A worker whose numbers have gone bad, and that has no anchor to go back to, is healed by the next round: all know its name,
    all states are averaged then whether they are due or not, it has no say, and takes the average of the others.
    """

    sends_fragments = True
    states: tuple[State, ...] = ()

    @property
    def sick(self) -> list[int]:
        """Ranks of the workers whose numbers went bad and that the next round heals; known to all, kept in checkpoints."""
        return self.param_groups[0].get("sick", [])

    @property
    def evaluated(self) -> str:
        """Which model `shared_model` shows, in words."""
        if "anchor" in self._slots:
            return super().evaluated
        return "worker 0's own, which is everybody's right after an average of the parameters"

    def due_states(self) -> Due:
        """The states of this round."""
        weight = None
        if self.sick:
            self.due = tuple(range(len(self.states)))  # a bad worker needs all of them
            weight = float(self.link.rank not in self.sick)
        return Due([self.states[i] for i in self.due], weight=weight)

    def commit(self) -> None:
        """The commit line: below it, and only below it, shared state may change."""
        super().commit()
        self._set_counter("sick", [])

    def begin_anew(self) -> None:
        """Among other workers nobody is known to be bad."""
        super().begin_anew()
        self._set_counter("sick", [])

    def refuse(self, refusal: RoundAborted, *, step: int | None = None) -> None:
        """Go on without a round that did not take place, or raise, as the policies say."""
        super().refuse(refusal, step=step)
        if isinstance(refusal, NonFiniteRound) and "anchor" not in self._slots:
            self._set_counter("sick", sorted({*self.sick, *refusal.culprits}))
            if len(self.sick) == self.link.size:
                raise self.training_diverged(f"no worker is left to heal the others ({refusal})", since=self.steps)
            if self.link.rank in refusal.culprits:
                for t in self.message():
                    t.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def newcomer_takes(self, key: str) -> bool:
        """All that is averaged, and what belongs to it in the inner optimizer; parameters where no anchor holds them."""
        if key == "param":
            return "anchor" not in self._slots
        return key.startswith("inner") or any(s.name == key for s in self.states)

    def whole_round(self) -> bool:
        """Whether the parameters, or the last part of them, are among what is due."""
        return any(self.states[i].name == "param" for i in self.due)

    def message(self) -> list[Tensor]:
        """Tensors shaped like those that a round of all states averages."""
        return [t for state in self.states for t in state.tensors()]

    def message_nbytes(self) -> int:
        """Length in bytes of one worker's message of a round in which all states are due."""
        return message_nbytes(self.link, Due(self.states).codec, self.message())

    def shared_state(self) -> dict[str, list[Tensor]]:
        """Everything that is bit-equal on all workers right after a round: what was just averaged, and what always is."""
        averaged = {f"averaged {s.name}": s.tensors() for s in (self.states[i] for i in self.due) if not s.feedback}
        return super().shared_state() | averaged


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
