"""Algorithm: how what was exchanged is applied. The object a user holds, and always a `torch.optim.Optimizer`.

A method is one file in `thinwire.algorithms` with one class that reads like the paper: `send` says what a worker sends, `apply`
what all workers do with what arrived. The rest is given: state slots (`core.slots`), the round between the two (`core.rounds`),
gates, counters, policies, and a `state_dict` that resumes bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from thinwire.codecs import Codec, CodecSchedule, Dense
from thinwire.codecs.base import check_codec
from thinwire.core import gates
from thinwire.core.buffers import Buffers
from thinwire.core.elastic import ElasticEngine
from thinwire.core.outgoing import Arrived, Outgoing
from thinwire.core.owning import OwningOptimizer
from thinwire.core.pace import Pace
from thinwire.core.policy import Policy, PolicyOptions
from thinwire.core.replicas import drift
from thinwire.core.rounds import RoundEngine
from thinwire.core.shared_model import shared_model
from thinwire.core.sites import Site
from thinwire.core.slots import CODED_BY, WHOSE, Start, coded_slots
from thinwire.core.stats import Reporting, Watch
from thinwire.errors import ConfigError, RoundAborted
from thinwire.links.base import Link
from thinwire.links.metered import metered
from thinwire.payload import describe, zero_invalid_
from thinwire.schedules import Schedule, as_schedule
from thinwire.sharding.shards import local

__all__ = ["Algorithm", "Policy", "PolicyOptions", "Start"]


class Algorithm(OwningOptimizer, Reporting):
    """Base of all methods that own their update rule; `Wrapper` is the base of those around an inner optimizer.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        link: this worker's end of the wire.
        defaults: settings that may differ per group, such as lr.
        H: exchange every H steps, or a `Schedule`.
        tau: steps between sending and applying a round.
        codec: what is sent; a `CodecSchedule` where the method takes one.
        slots: name -> "zeros", "param", "coded" or "count": state kept per parameter, made at once, in float32 or wider. A
            "coded" one has the shape that the codec's chain keeps for it (`Chain.slot_shapes`), a "count" is a single number.
            A function makes a slot of a shape of its own, such as low-rank moments; None for parameters without it.
        settings: what must agree on all workers besides; shown by `repr`.
        options: see `Policy`.
    """

    sends_fragments: ClassVar[bool] = False
    needs_whole_tensors: ClassVar[bool] = False  # cannot train a model that is sharded
    pace: Pace | None = None  # of workers that take different numbers of steps per round
    takes_over: ClassVar[tuple[str, ...]] = ()  # slots that it takes from the inner optimizer of a start, where that has them
    takes_schedules: ClassVar[bool] = False  # whether it may have other codecs in later rounds
    second_moment: ClassVar[tuple[str, str] | None] = None  # slots of this worker's own, and of how many gradients it is
    changed_by_sending: ClassVar[tuple[str, ...]] = ()  # slots that making a message changes, whatever becomes of the round
    rounds_leave_inner: ClassVar[bool] = False  # whether `apply` never changes the inner optimizer's state
    in_pairs: ClassVar[bool] = False  # a round is between two workers: one pair may refuse it while the others take it

    # GradScaler then always calls step() and leaves the unscaling to us. Without it, the one worker that found an Inf would
    # skip step() and with it the collective that all others are waiting in.
    _step_supports_amp_scaling = True
    grad_scale: Tensor  # there while a GradScaler calls step()

    def __init__(
        self,
        params: Iterable[Any],
        link: Link,
        *,
        defaults: dict[str, Any] | None = None,
        H: int | Schedule = 1,
        tau: int = 0,
        codec: Codec | CodecSchedule | None = None,
        slots: Mapping[str, Start] | None = None,
        settings: Mapping[str, object] | None = None,
        **options: Unpack[PolicyOptions],
    ):
        """Check the settings and make every state slot."""
        if not isinstance(link, Link):
            raise ConfigError(f"link must be a thinwire Link such as thinwire.connect() returns, got {type(link).__name__}")
        self.policy = Policy.of(options)
        self.link, self.meter = metered(link)
        self.schedule, self.watch = as_schedule(H), Watch()
        self.peers = link.peers()  # of the round at hand
        if not (isinstance(codec, CodecSchedule) and self.takes_schedules):
            codec = Dense() if codec is None else check_codec(codec)
        if self.schedule.fragments > 1 and not self.sends_fragments:
            raise ConfigError(f"{type(self).__name__} sends the model whole, got a schedule of fragments: {self.schedule!r}")
        self.buffer_average = Buffers(self.policy.buffers)
        self.buffers = self.buffer_average.tensors
        every_step = bool(self.schedule.due(1) and self.schedule.due(2))
        # In rounds whose messages they are part of they cost no exchange of their own.
        self.buffers_every = self.policy.buffers_every or (32 if every_step and link.elastic is None else 1)
        give_up_after = self.policy.give_up_after
        self.give_up_after = (32 if every_step else 8) if give_up_after is None else give_up_after
        self.due: tuple[int, ...] = ()
        super().__init__(params, defaults or {}, codec=codec, slots=slots or {}, settings=settings or {})
        self._set_whose()
        self.site = None if link.two_level is None else Site(self, link.two_level)
        self.choose_route(self.policy.route)
        self.engine = (RoundEngine if link.elastic is None else ElasticEngine)(self, self.policy, tau)

    # --- What a method writes ------------------------------------------------------------------------------------------

    def local_step(self) -> None:
        """What happens at every step without the network; nothing for most methods that exchange at every step."""

    def send(self) -> Outgoing:
        """What this worker sends in a round; nothing may change. Called at every step at which the schedule says so."""
        raise NotImplementedError

    def apply(self, arrived: Arrived) -> None:
        """What all workers do with what arrived: here, and only here, shared state changes."""
        raise NotImplementedError

    def send_again(self) -> Outgoing:
        """The message that was in flight when a checkpoint was written, once more; for methods with tau > 0."""
        raise NotImplementedError

    def remember(self, outgoing: Outgoing) -> None:
        """Told what `send` gave, right before it is posted: keep what `send_again` needs, drop what is not needed any more."""

    def outgoing(self, tensors: Sequence[Tensor], **how: Any) -> Outgoing:
        """These tensors by the optimizer's own codec; `how` names other attributes of `Outgoing`."""
        return Outgoing(list(tensors), **{"codec": self.codec, **how})

    def whole_round(self) -> bool:
        """Whether this round brings in all local progress; not where only some of the states or fragments are due."""
        return len(self.due) == self.schedule.fragments

    def which(self, due: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002
        """Numbers of the parameters that a round of these fragments is about; all of them where there are no fragments."""
        return tuple(range(len(self._active)))

    def restore(self) -> None:
        """Go back to the last agreed state; whatever is invalid in this worker's own slots becomes zero."""
        for name in self._slots:
            if name not in self.replicated:
                zero_invalid_(self.slot(name))

    def committed(self) -> None:
        """Told when all workers are about to apply a round."""

    def refused(self, refusal: RoundAborted) -> None:
        """Told when training goes on without a round."""

    # --- One step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: local work, and a round of exchange when one is due."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self.engine.deferred is not None:
                self.engine.deferred.settle()
            if self.site is not None and not self.handshake_done:
                self.site.greet()
            gates.handshake_once(self)
            gates.check_param_groups(self)
            gates.check_settings(self)
            gates.unscale_gradients(self)
            if self.site is not None:
                self.site.average_gradients()
            self.set_counter("thinwire_step", self.steps + 1 if self.pace is None else self.pace.next_step(self.steps))
            self.link.tick()
            with self.engine.overflow_named():
                self.local_step()
            self.engine.advance()
            if self.site is not None:
                self.site.compare()
            if self.engine.deferred is not None:
                self.engine.deferred.hand_over()
        return loss

    def finish(self) -> None:
        """Apply what is in flight and exchange what local steps have gathered, so that no worker's last steps are lost.

        Call it on all workers after the last step; there is no further round where the last step ended with one.
        """
        with torch.no_grad(), self.at_hand():
            self.engine.finish()

    def average_buffers(self) -> None:
        """Give all workers the mean of the buffers."""
        if self.buffers and self.site is not None:
            self.site.average_buffers(self.buffer_average.local())
        if self.buffers:
            self.buffer_average.average(self.link, self.shards, round=self.rounds)

    @property
    def aborted_rounds(self) -> int:
        """Rounds that did not take place."""
        return self.engine.aborted

    def message_nbytes(self) -> int:
        """Length in bytes of one worker's messages until all was sent once: the formula of the method's docs, as code."""
        return sum(self.message_sizes())

    def message_sizes(self) -> list[int]:
        """Length in bytes of one worker's message of each kind of round; of a full one where there are no fragments."""
        messages, workers = [self.message_of(due) for due in self.kinds_of_rounds()], self.link.peers().size
        gathered, found = self.link.elastic is not None, []
        for due, out in zip(self.kinds_of_rounds(), messages, strict=True):
            halves = None if out is None else self.owned_nbytes(out, due)
            found.append(sum(halves.up) if halves else 0 if out is None else out.nbytes(workers, gathered=gathered))
        return found

    @torch.no_grad()
    def message_of(self, due: tuple[int, ...], *, round: int | None = None) -> Outgoing | None:
        """What this worker would send in a round in which these states or fragments are due; None of an empty fragment.

        Args:
            due: the states or fragments.
            round: number of the round; by default the next one.
        """
        before, at_hand = (self.due, self.peers), self.engine.current
        self.due, self.peers = due, self.link.peers()
        self.engine.current = replace(at_hand, number=self.rounds + 1 if round is None else round)
        try:
            with self.at_hand():
                return self.send() if self.which(due) else None
        finally:
            (self.due, self.peers), self.engine.current = before, at_hand

    def kinds_of_rounds(self) -> list[tuple[int, ...]]:
        """What is due in each of the rounds in which everything is sent once; one full round for most."""
        return [tuple(range(self.schedule.fragments))]

    # --- The model that all workers agree on -----------------------------------------------------------------------------

    def shared_model(self, model: nn.Module | None = None, *, mean_over: Link | None = None) -> AbstractContextManager[None]:
        """Within it the parameters are the ones all workers agreed on last: what should be evaluated and shipped.

        Where other parameters than those in use are shown, so are the `buffers` as they were averaged last.

        Args:
            model: give it where it is sharded by FSDP2, which otherwise could go on with a gathered copy of its parameters.
            mean_over: take the mean of the workers' models over this link instead; then it is an exchange of all workers.
        """
        return shared_model(self, model, mean_over)

    @property
    def evaluated(self) -> str:
        """Which model `shared_model` shows, in words."""
        return "the model that all workers agreed on in the last round"

    def agreed(self) -> list[Tensor] | None:
        """The parameters to evaluate and ship, where they are not the parameters themselves."""
        return None

    def drift(self, link: Link | None = None) -> float:
        """How far apart the models are that `shared_model` shows on the workers; 0 exactly where they are bit-equal.

        Args:
            link: where the exchange goes instead of this optimizer's own link, for instance past a meter.
        """
        with self.at_hand():
            return drift(link or self.link, self.agreed() or self.params(), shards=self.shards)

    # --- Starting, joining and resuming ------------------------------------------------------------------------------------

    @property
    def common_steps(self) -> int:
        """Steps that all workers have in common."""
        return self.steps if self.pace is None else self.steps - self.pending_steps

    def fingerprint(self) -> dict[str, object]:
        """All that must agree on every worker, down to the values of replicated state; of this process's shards."""
        settled = replace(self.policy, buffers=(), route="gather", give_up_after=self.give_up_after)
        policy = asdict(replace(settled, buffers_every=self.buffers_every))
        policy |= {"route": "gather" if self.owners is None else repr(self.owners)}
        device = self.params()[0].device
        kernels = gates.KERNELS if device.type == "cpu" else gates.TRITON
        return {
            "algorithm": type(self).__name__,
            "schedule": repr(self.schedule),
            "codec": repr(self.codecs),
            **{k: gates.plain(v) for k, v in self.settings.items()},
            **policy,
            **({"members of a site": self.site.members} if self.site is not None else {}),
            "buffers": [describe(local(b)) for b in self.buffers],
            **gates.describe_parameters(self),
            **({kernels: told} if (told := self.codecs.arithmetic(device)) else {}),
            "steps so far": self.common_steps,
            "rounds so far": self.rounds,
            **gates.hashes_of_replicated(self),
        }

    def joiner_copies(self, key: str) -> bool:  # noqa: ARG002
        """Whether a worker that joins may copy this of any other's own state ("param", a slot, "inner.exp_avg", ...).

        No for most: what is not replicated is each worker's own. Yes where workers average it from time to time.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """The state as any torch optimizer gives it; its parameter groups say which worker's it is, and of how many."""
        self._set_whose()
        if self.engine.deferred is not None:
            self.engine.deferred.settle_alone()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict()` gave; checked as a whole before anything changes.

        The state of another worker is loaded too, with a warning where workers have state of their own.
        """
        super().load_state_dict(state_dict)
        self._set_whose()
        gates.warn_of_another_worker(self, state_dict["param_groups"][0])
        self.engine.reload()
        if self.engine.deferred is not None:
            self.engine.deferred.forget()

    def _set_whose(self) -> None:
        peers = self.link.peers()
        for name, value in zip(WHOSE, (peers.id, peers.size), strict=True):
            self.set_counter(name, value)
        if coded_slots(self):
            self.set_counter(CODED_BY, repr(self.codecs))
