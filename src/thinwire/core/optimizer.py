"""Algorithm: how what was exchanged is applied. The object a user holds, and always a `torch.optim.Optimizer`.

A method is one file in `thinwire.algorithms` with one class whose `update()` reads like the paper. This file gives it the
rest: eager state slots, gates, counters, abort policy, and a `state_dict` that resumes bit for bit.

Two kinds of state. Keys in `replicated` are bit-equal on all workers at any time; all other state, such as the moments of an
inner Adam, is each worker's own. Keys in `synced` (most often the parameters) are bit-equal right after a round. That
declaration drives the conformance tests, the checkpoint's layout, joining, abort safety and the divergence alarm. The
word "param" stands for the parameters, and "inner" for the inner optimizer's state.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.codecs import Chain, Codec, Dense, Mean
from thinwire.codecs.base import check_codec
from thinwire.codecs.chain import PerTensor
from thinwire.core.exchange import PendingAverage, PendingShare, average, message_nbytes, post_average, post_share, swap
from thinwire.core.gates import FROZEN, STARTING, compare_replicas, drift, handshake, hash_tensors, show_hash
from thinwire.errors import (
    CheckpointError,
    ConfigError,
    Diverged,
    NonFiniteRound,
    RoundAborted,
    TrainingDiverged,
    check_choice,
    check_whole_number,
)
from thinwire.links.base import Link
from thinwire.payload import Payload, all_finite, describe
from thinwire.schedules import Schedule, as_schedule
from thinwire.sharding.shards import Shards, local, reshard

log = logging.getLogger("thinwire")

# What a state slot begins as: zeros like the parameter, a copy of it, zeros in the domain of the codec's transform, one zero,
# or what a function makes of the parameter (None: it has no such slot).
Start = Literal["zeros", "param", "coded", "count"] | Callable[[Tensor], Tensor | None]

_COUNTERS = ("thinwire_step", "thinwire_round", "thinwire_synced")

# Settings whose names begin like this must be finite; see `_refuse_bad_settings`.
_FINITE = ("lr", "weight_decay", "momentum", "dampening", "beta", "omega", "alpha", "eps")


@dataclass
class _Refused:
    """Rounds that were refused for a NaN or Inf, as all workers count them.

    Attributes:
        in_row: so many, one after the other.
        since: the step of the first of them.
        round: the number of the last of them.
        step: the step of the last of them.
        lost: whether that one was refused because this worker's parameters were not finite.
    """

    in_row: int = 0
    since: int = 0
    round: int = -2
    step: int = -1
    lost: bool = False


class Policy(TypedDict, total=False):
    """What to do when something goes wrong; keyword arguments of every algorithm.

    Attributes:
        on_abort: after a round that did not take place, "keep" the local progress (the next round carries it along) or
            "restore" the last agreed parameters.
        on_nonfinite: after a NaN or Inf, "skip" the step or round and go on, or "raise" on every worker.
        give_up_after: raise `TrainingDiverged` on every worker when so many rounds in a row were refused for a NaN or Inf; 0
            never. By default 8, and 32 for methods that exchange at every step: there a GradScaler, whose scale starts at
            65536, may rightly refuse up to 16 first steps. See `Algorithm.refuse` for what does not wait for so many.
        alarm_every: compare a hash of what must be bit-equal every so many rounds; 0 never.
        on_divergence: when that comparison fails, "raise" or "warn".
        buffers: what is not trained but should be the same everywhere, averaged in float32 after rounds:
            `thinwire.running_statistics(model)` where a model has BatchNorm.
        buffers_every: rounds between averagings of BatchNorm statistics (`buffers`); 0 means every round for methods with local
            steps, and every 32nd for those that exchange at every step. `finish()` always does it.
    """

    on_abort: Literal["keep", "restore"]
    on_nonfinite: Literal["skip", "raise"]
    give_up_after: int | None
    alarm_every: int
    on_divergence: Literal["raise", "warn"]
    buffers: Iterable[Tensor]
    buffers_every: int


class Algorithm(Optimizer):
    """Base of all methods that own their update rule; `Wrapper` is the base of those around an inner optimizer.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        link: this worker's end of the wire.
        defaults: settings that may differ per group, such as lr.
        H: exchange every H steps, or a `Schedule`.
        codec: what is sent.
        slots: name -> "zeros", "param", "coded" or "count": state kept per parameter, made at once, in float32 or wider. A
            "coded" one has the shape that the codec's chain keeps for it (`Chain.slot_shapes`), a "count" is a single number.
            A function makes a slot of a shape of its own, such as low-rank moments; None for parameters without it.
        settings: what must agree on all workers besides; shown by `repr`.
        on_abort: see `Policy`.
        on_nonfinite: see `Policy`.
        give_up_after: see `Policy`.
        alarm_every: see `Policy`.
        on_divergence: see `Policy`.
        buffers: see `Policy`.
        buffers_every: see `Policy`.
    """

    name: ClassVar[str] = ""
    replicated: frozenset[str] = frozenset()
    synced: frozenset[str] = frozenset()
    sends_fragments: ClassVar[bool] = False
    needs_whole_tensors: ClassVar[bool] = False  # cannot train a model that is sharded
    warm_inner: ClassVar[str] = "adamw"  # what takes the synchronous steps of a warm start, where it has no inner optimizer
    taken_over: ClassVar[frozenset[str]] = frozenset()  # slots that go on from that one's state of the same name
    in_pairs: ClassVar[bool] = False  # a round is between two workers: one pair may refuse it while the others take it

    # GradScaler then always calls step() and leaves the unscaling to us. Without it, the one worker that found an Inf would
    # skip step() and with it the collective that all others are waiting in.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        link: Link,
        *,
        defaults: dict[str, Any] | None = None,
        H: int | Schedule = 1,
        codec: Codec | None = None,
        slots: Mapping[str, Start] | None = None,
        settings: Mapping[str, object] | None = None,
        on_abort: Literal["keep", "restore"] = "keep",
        on_nonfinite: Literal["skip", "raise"] = "skip",
        give_up_after: int | None = None,
        alarm_every: int = 64,
        on_divergence: Literal["raise", "warn"] = "raise",
        buffers: Iterable[Tensor] = (),
        buffers_every: int = 0,
    ):
        """Check the settings and make every state slot."""
        if not isinstance(link, Link):
            raise ConfigError(f"link must be a thinwire Link such as thinwire.connect() returns, got {type(link).__name__}")
        check_choice("on_abort", on_abort, ("keep", "restore"))
        check_choice("on_nonfinite", on_nonfinite, ("skip", "raise"))
        check_choice("on_divergence", on_divergence, ("raise", "warn"))
        if give_up_after is not None:
            check_whole_number("give_up_after", give_up_after, least=0)
        check_whole_number("alarm_every", alarm_every, least=0)
        check_whole_number("buffers_every", buffers_every, least=0)
        self.link, self.schedule, self.codec = link, as_schedule(H), Dense() if codec is None else check_codec(codec)
        if self.schedule.fragments > 1 and not self.sends_fragments:
            raise ConfigError(f"{type(self).__name__} sends the model whole, got a schedule of fragments: {self.schedule!r}")
        self.on_abort, self.on_nonfinite = on_abort, on_nonfinite
        self.alarm_every, self.on_divergence = alarm_every, on_divergence
        self.settings = dict(settings or {})
        self.buffers = [b for b in buffers if b.is_floating_point()]
        # Now, since the first forward pass changes them; the planner's, on the meta device, have no values.
        self._starting_buffers = hash_tensors([local(b) for b in self.buffers if not b.is_meta])
        self._agreed_buffers: list[Tensor] = []  # as they were averaged last
        every_step = bool(self.schedule.due(1) and self.schedule.due(2))
        self.buffers_every = buffers_every or (32 if every_step else 1)
        self.give_up_after = (32 if every_step else 8) if give_up_after is None else give_up_after
        self.due: tuple[int, ...] = ()
        self.aborted_rounds = 0
        self._refused = _Refused()
        self._slots = dict(slots or {})
        self._active: list[Tensor] = []
        self._frozen: list[Tensor] = []
        self._greeted = False
        self._withdrawn = False
        super().__init__(params, {**(defaults or {}), **dict.fromkeys(_COUNTERS, 0)})
        if not self._active:
            raise ConfigError(f"{type(self).__name__} has nothing to train: no parameter requires a gradient")
        self.shards = Shards(self._active)

    # --- What a method writes ------------------------------------------------------------------------------------------

    def local_step(self) -> None:
        """What happens at every step without the network; nothing for most methods that exchange at every step."""

    def update(self) -> None:
        """The paper goes here: called at every step at which the schedule says so."""
        raise NotImplementedError

    def average(
        self,
        tensors: Sequence[Tensor],
        *,
        want_sent: bool = False,
        mean: Mean | None = None,
        weight: float | None = None,
        codec: Codec | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The network line: mean over all workers of what each one's message decodes to, and what I sent."""
        return self.post_average(tensors, want_sent=want_sent, mean=mean, weight=weight, codec=codec).wait()

    def post_average(
        self,
        tensors: Sequence[Tensor],
        *,
        want_sent: bool = False,
        mean: Mean | None = None,
        weight: float | None = None,
        codec: Codec | None = None,
        round: int | None = None,
    ) -> PendingAverage:
        """The network line of methods that compute meanwhile: `average` begun and not waited for.

        The codec and the round are the optimizer's own unless given.
        """
        return post_average(
            self.link,
            codec or self.codec,
            tensors,
            round=self.rounds if round is None else round,
            want_sent=want_sent,
            withdraw=self._withdrawn,
            any_shard=self.shards.any,
            mean=mean,
            weight=weight,
        )

    def swap(self, tensors: Sequence[Tensor], partner: int | None) -> tuple[list[Tensor], list[Tensor]]:
        """The network line of methods `in_pairs`: what my message decodes to, and what my partner's does."""
        return swap(
            self.link,
            self.codec,
            tensors,
            partner,
            round=self.rounds,
            withdraw=self._withdrawn,
            any_shard=self.shards.any,
        )

    def post_share(
        self,
        slot: str,
        tensors: Sequence[Tensor],
        *,
        mean: Mean | None = None,
        weight: float | None = None,
        decay: PerTensor = 1.0,
        scale: PerTensor | None = None,
        round: int | None = None,
        withdraw: bool | None = None,
    ) -> PendingShare:
        """The network line of methods whose state is "coded": `average` without a copy of the model, begun and not waited for.

        Adds `tensors` to the slot first where `scale` is given; see `thinwire.share`. The round is this one unless
        given; `withdraw` tells that the tensors are (or are not) unfit, where the caller has looked.
        """
        return post_share(
            self.link,
            self.codec,
            self.slot(slot),
            tensors,
            round=self.rounds if round is None else round,
            withdraw=self._withdrawn or withdraw,
            any_shard=self.shards.any,
            mean=mean,
            weight=weight,
            decay=decay,
            scale=scale,
        )

    def commit(self) -> None:
        """The commit line: below it, and only below it, shared state may change."""
        self.link.commit()
        if self.whole_round():
            self._set_counter("thinwire_synced", self.steps)

    def whole_round(self) -> bool:
        """Whether this round brings in all local progress; not where only some of the states or fragments are due."""
        return len(self.due) == self.schedule.fragments

    def message(self) -> list[Tensor]:
        """Tensors shaped like those that one full round averages; by default one value per parameter."""
        return self.params()

    def message_nbytes(self) -> int:
        """Length in bytes of one worker's message of one full round: the formula of the method's docs, as code."""
        return message_nbytes(self.link, self.codec, self.message())

    def restore(self) -> None:
        """Go back to the last agreed state; nothing to do where workers never leave it."""

    # --- The state, as lists of local tensors ------------------------------------------------------------------------

    def params(self) -> list[Tensor]:
        """This process's part of every parameter that takes part."""
        return [local(p.detach()) for p in self._active]

    def slot(self, name: str) -> list[Tensor]:
        """This process's part of the state slot `name`, in the order of `params()`; of those parameters that have it."""
        return [local(self.state[p][name]) for p in self._active if name in self.state[p]]

    def gradients(self) -> list[Tensor]:
        """This process's part of every gradient, in the order of `params()`; zeros where a parameter has none."""
        return [torch.zeros_like(local(p.detach())) if p.grad is None else local(p.grad) for p in self._active]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter group of each of `params()`: where its lr and other settings are."""
        found = {p: group for group in self.param_groups for p in group["params"]}
        return [found[p] for p in self._active]

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self.param_groups[0]["thinwire_step"]

    @property
    def rounds(self) -> int:
        """Rounds begun so far, aborted ones too."""
        return self.param_groups[0]["thinwire_round"]

    @property
    def pending_steps(self) -> int:
        """Local steps since the last committed round."""
        return self.steps - self.param_groups[0]["thinwire_synced"]

    def _set_counter(self, name: str, value: int | list[int]) -> None:
        for group in self.param_groups:
            group[name] = value

    # --- One step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step: local work, and a round of exchange when one is due."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._greet()
            self._refuse_strangers()
            self._refuse_bad_settings()
            self._unscale_gradients()
            self._set_counter("thinwire_step", self._next_step())
            self.link.tick()
            with self._overflow_named():
                self.local_step()
            self.due = self.schedule.due(self.steps)
            if self.due:
                self._round()
        return loss

    def _next_step(self) -> int:
        """What the counter of steps becomes with the one that is being taken."""
        return self.steps + 1

    def finish(self) -> None:
        """Exchange what local steps have gathered since the last round, so that no worker's last steps are lost.

        Call it on all workers after the last step; it does nothing where the last step ended with a round.
        """
        with torch.no_grad():
            if self.pending_steps > 0 and "param" not in self.replicated:
                self.due = tuple(range(self.schedule.fragments))
                self._round()
            self.average_buffers()

    @contextlib.contextmanager
    def shared_model(self, model: nn.Module | None = None, *, mean_over: Link | None = None) -> Iterator[None]:
        """Within it the parameters are the ones all workers agreed on last: what should be evaluated and shipped.

        Where other parameters than those in use are shown, so are the `buffers` as they were averaged last.

        Args:
            model: give it where it is sharded by FSDP2, which otherwise could go on with a gathered copy of its parameters.
            mean_over: take the mean of the workers' models over this link instead; then it is an exchange of all workers.
        """
        agreed = self._agreed()
        if mean_over is not None:
            agreed, _ = average(mean_over, Dense(), agreed or self.params(), any_shard=self.shards.any, purpose="mean model")
        with self._swapped_in(agreed, model):
            yield

    @property
    def evaluated(self) -> str:
        """Which model `shared_model` shows, in words."""
        return "the model that all workers agreed on in the last round"

    @property
    def in_step(self) -> bool:
        """Whether all workers have taken the same number of steps now, as the counter has it."""
        return True

    def check_total(self, steps: int) -> None:
        """Raise a `ConfigError` for a number of steps at which the workers cannot stop together."""

    def newcomer_takes(self, key: str) -> bool:  # noqa: ARG002
        """Whether a worker that joins may copy this of any other's own state ("param", a slot, "inner.exp_avg", ...).

        No for most: what is not replicated is each worker's own. Yes where workers average it from time to time.
        """
        return False

    def take_over(self, before: Algorithm) -> None:
        """Go on where another optimizer of the same model stopped, as after a warm start, with what is `taken_over` of it."""
        for name in _COUNTERS:
            self._set_counter(name, before.param_groups[0][name])
        known = getattr(getattr(before, "inner", None), "state", {}) if self.taken_over else {}
        for p in self._active:
            for name in self.taken_over & self.state[p].keys() & known.get(p, {}).keys():
                if self.state[p][name].shape == known[p][name].shape:
                    self.state[p][name].copy_(known[p][name])

    def restart_clock(self) -> None:
        """Told after an evaluation or a checkpoint: what has passed since the last step was not training."""

    def begin_anew(self) -> None:
        """Told when a checkpoint could not bring all per-worker state: forget what was made of it."""

    def drift(self, link: Link | None = None) -> float:
        """How far apart the models are that `shared_model` shows on the workers; 0 exactly where they are bit-equal.

        Args:
            link: where the exchange shall go instead of this optimizer's own link, for instance past a meter.
        """
        return drift(link or self.link, self._agreed() or self.params(), shards=self.shards)

    def _agreed(self) -> list[Tensor] | None:
        """The parameters to evaluate and ship, where they are not the parameters themselves."""
        return None

    @contextlib.contextmanager
    def _swapped_in(self, other: list[Tensor] | None, model: nn.Module | None) -> Iterator[None]:
        if other is None:
            yield
            return
        buffers = [local(b) for b in self.buffers] if self._agreed_buffers else []
        mine, own = [x.clone() for x in self.params()], [b.clone() for b in buffers]
        overwrite(self.params(), other, model)
        overwrite(buffers, self._agreed_buffers)
        try:
            yield
        finally:
            overwrite(self.params(), mine, model)
            overwrite(buffers, own)

    def _round(self) -> None:
        self._set_counter("thinwire_round", self.rounds + 1)
        refusal: RoundAborted | None = None
        try:
            try:
                with self._overflow_named():
                    self.update()
            except RoundAborted as found:
                refusal = found
            if self.in_pairs and self.on_nonfinite == "raise":
                refusal = self._refusal_of_any_pair(refusal)
            if refusal is not None:
                self.refuse(refusal)
                return
            if self.rounds % self.buffers_every == 0 and not self.in_pairs:  # those who refused would not take part
                self.average_buffers()
            if self.alarm_every and self.rounds % self.alarm_every == 0:
                self._check_replicas()
        finally:
            self._withdrawn = False
            if self.in_pairs:  # also of a refused round: all workers must agree on whether `finish()` has something to do
                self._set_counter("thinwire_synced", self.steps)

    def average_buffers(self) -> None:
        """Give all workers the mean of the buffers; a worker whose own are not finite is named and everybody keeps theirs."""
        if not self.buffers:
            return
        mine = [local(b) for b in self.buffers]
        try:
            mean, _ = average(self.link, Dense(), mine, round=self.rounds, any_shard=self.shards.any, purpose="buffers")
        except NonFiniteRound as refusal:
            log.warning("buffers: %s; all keep their own", refusal)
            return
        mean = [m.contiguous() for m in mean]
        self.shards.average_(mean)
        self._agreed_buffers = [m.clone() for m in mean]
        for b, agreed in zip(mine, mean, strict=True):
            b.copy_(agreed)

    def refuse(self, refusal: RoundAborted, *, step: int | None = None) -> None:
        """Go on without a round that did not take place, or raise, as the policies say.

        A round that was refused for a NaN or Inf is not gone on from, and `TrainingDiverged` is raised on all workers, where

        * the parameters that all workers have in common are not finite: no later round can make them so;
        * all of two or more workers were to blame, and with local steps: the parameters of each have gone bad since the last
          round, which is no fault of one machine. Gradients alone do not count, since a GradScaler finds an Inf in them on all
          workers now and then. Nor does a single worker: it goes back to its last agreed parameters, and is counted;
        * it is the last of `give_up_after` in a row.

        All of that is known to all workers alike, so that they raise together. In methods `in_pairs` only the two of a pair
        know: there each worker counts the rounds in a row that were refused in its own name, and raises for itself.

        Args:
            refusal: what the round was refused with.
            step: which it belongs to, where that is not the last one taken.
        """
        poisoned = isinstance(refusal, NonFiniteRound)
        if poisoned and self.on_nonfinite == "raise":
            raise refusal
        self.aborted_rounds += 1
        mine = poisoned and self.link.rank in refusal.culprits
        diverged = self._count(refusal, self.steps if step is None else step) if poisoned else None
        if diverged is None:
            log.warning("%s; training goes on without it", refusal)
        if self.on_abort == "restore" or mine:
            self.restore()
        if diverged is not None:
            raise diverged

    def _count(self, refusal: NonFiniteRound, step: int) -> TrainingDiverged | None:
        """Count a refused round; the error to raise where training has diverged."""
        mine = self.link.rank in refusal.culprits
        if self.in_pairs and not mine:
            return None
        refused = self._refused
        if not 0 <= self.rounds - refused.round <= 1:  # the one before was taken, or a checkpoint was loaded
            refused.in_row, refused.since = 0, step
        refused.in_row += 1
        refused.round, refused.step, refused.lost = self.rounds, step, mine and not self.params_finite()
        common = self._common_parameters()
        everyone = len(refusal.culprits) == self.link.size > 1 and "param" not in self.replicated
        if self.shards.any(not all_finite(common)):
            what = "the parameters of all workers hold NaN or Inf"
        elif everyone:
            what = f"the numbers of all {self.link.size} workers have gone bad since the round before"
        elif self.give_up_after and refused.in_row >= self.give_up_after:
            what = f"{refused.in_row} rounds in a row were refused"
        else:
            return None
        return self.training_diverged(f"{what} ({refusal})", since=refused.since)

    def training_diverged(self, what: str, *, since: int) -> TrainingDiverged:
        """The error for training that has diverged: what was found, since which step, and what is the likely cause."""
        rates = sorted({float(group["lr"]) for group in self.param_groups if "lr" in group})
        lr = f" (lr is {', '.join(f'{rate:g}' for rate in rates)})" if rates else ""
        cause = f"most likely the learning rate is too high{lr}, or the data hold NaN or Inf"
        return TrainingDiverged(f"training has diverged at step {since}: {what}; {cause}", since=since)

    @property
    def lost_parameters(self) -> bool:
        """Whether after the last step a round was refused because this worker's parameters were not finite."""
        return self._refused.lost and self._refused.step == self.steps

    def params_finite(self) -> bool:
        """Whether this worker's parameters are finite, on all of its shards."""
        return not self.shards.any(not all_finite(self.params()))

    def agreed_finite(self) -> bool:
        """Whether the parameters that this worker would go back to are finite, on all of its shards."""
        agreed = self._agreed() or (self.params() if "param" in self.replicated else [])
        return not self.shards.any(not all_finite(agreed))

    def _common_parameters(self) -> list[Tensor]:
        """The parameters that are bit-equal on all workers at any time, where there are such."""
        if "param" in self.replicated:
            return self.params()
        return self.slot("anchor") if "anchor" in self.replicated else []

    def _refusal_of_any_pair(self, refusal: RoundAborted | None) -> RoundAborted | None:
        """Tell all workers of a round that some pair has refused, so that all can raise: one byte from each."""
        poisoned = isinstance(refusal, NonFiniteRound)
        said = poisoned + 2 * (poisoned and self.link.rank in refusal.culprits)
        told = self.link.all_gather(Payload.of_bytes(bytes([said]), purpose="refusals", fixed=True))
        heard = [int(answer.to_bytes()[0]) for answer in told]
        if not any(heard):
            return refusal
        by, culprits = ([r for r, flags in enumerate(heard) if flags & bit] for bit in (1, 2))
        names, whose = (", ".join(f"rank {r}" for r in ranks) for ranks in (by, culprits))
        what = f"round {self.rounds} refused by {names}: NaN or Inf in the contribution of {whose or 'another shard'}"
        return NonFiniteRound(f"{what}; all {self.link.size} workers stop", culprits=culprits)

    @contextlib.contextmanager
    def _overflow_named(self) -> Iterator[None]:
        """Say in words of training what torch says of a step so long that its size is no number of the parameters' dtype."""
        try:
            yield
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            raise self.training_diverged(f"the size of a step overflows ({error})", since=self.steps) from error

    # --- Gates ---------------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Compare fingerprints once, at the first step: a wrong setting is found before H steps are spent on it."""
        if not self._greeted:
            buffers = self._starting_buffers if self.steps == 0 else 0
            handshake(self.link, self.fingerprint(), any_shard=self.shards.any, buffers=buffers)
            self._greeted = True

    def fingerprint(self) -> dict[str, object]:
        """All that must agree on every worker, down to the values of replicated state; of this process's shards."""
        groups = [
            {k: _plain(v) for k, v in g.items() if k not in ("params", *_COUNTERS) and not k.startswith("_")}
            | {"tensors": len(g["params"])}
            for g in self.param_groups
        ]
        policy = {
            "on_abort": self.on_abort,
            "on_nonfinite": self.on_nonfinite,
            "give_up_after": self.give_up_after,
            "alarm_every": self.alarm_every,
            "on_divergence": self.on_divergence,
            "buffers_every": self.buffers_every,
            "buffers": [describe(local(b)) for b in self.buffers],
        }
        return {
            "algorithm": type(self).__name__,
            "schedule": repr(self.schedule),
            "codec": repr(self.codec),
            **{k: _plain(v) for k, v in self.settings.items()},
            **policy,
            "group": groups,
            "tensor": [describe(x) for x in self.params()],
            "steps so far": self._common_steps(),
            "rounds so far": self.rounds,
            **{f"{STARTING}{name!r}": show_hash(values) for name, values in self._alike().items()},
            FROZEN: show_hash([local(p.detach()) for p in self._frozen]),
        }

    def _common_steps(self) -> int:
        """Steps that all workers have in common."""
        return self.steps

    def _alike(self) -> dict[str, list[Tensor]]:
        """What must be bit-equal now: replicated state, and before the first step the parameters of any method."""
        alike = {name: values for name, values in self.shared_state().items() if self._is_replicated(name)}
        return alike or ({"param": self.params()} if self.steps == 0 else {})

    def _is_replicated(self, name: str) -> bool:
        return name.partition(".")[0] in self.replicated

    def shared_state(self) -> dict[str, list[Tensor]]:
        """Everything that is bit-equal on all workers right after a round, by name."""
        parts: dict[str, list[Tensor]] = {}
        for key in sorted(self.replicated | self.synced):
            if key == "param":
                parts[key] = self.params()
            elif key == "inner":
                parts.update({f"inner.{k}": v for k, v in self.inner_state().items()})
            elif values := self.slot(key):
                parts[key] = values
        return parts

    def inner_state(self) -> dict[str, list[Tensor]]:
        """The inner optimizer's floating state by key; empty without an inner optimizer."""
        return {}

    def _check_replicas(self) -> None:
        hashes = {name: hash_tensors(tensors) for name, tensors in self.shared_state().items()}
        if not hashes:  # a method that lets everything drift
            return
        try:
            compare_replicas(self.link, hashes, round=self.rounds, any_shard=self.shards.any)
        except Diverged as alarm:
            if self.on_divergence == "raise":
                raise
            log.warning("%s", alarm)

    def gradients_finite(self) -> bool:
        """Whether this worker's gradients are finite, on all of its shards."""
        grads = [local(p.grad) for p in self._active if p.grad is not None]
        return not self.shards.any(not all_finite(grads))

    def clip_factor(self, max_norm: float) -> float:
        """What to multiply this worker's gradient by, so that its norm over all shards is at most `max_norm` (0: no limit).

        The same as `torch.nn.utils.clip_grad_norm_` does.
        """
        if not max_norm:
            return 1.0
        grads = [local(p.grad) for p in self._active if p.grad is not None]
        (square,) = self.shards.totals([float(torch.nn.utils.get_total_norm(grads)) ** 2])
        return min(1.0, max_norm / (math.sqrt(square) + 1e-6))

    def _refuse_strangers(self) -> None:
        """Parameters that came in or woke up behind our back would be trained, but never exchanged."""
        known = len(self._active) + len(self._frozen)
        there = sum(len(group["params"]) for group in self.param_groups)
        if there != known:
            raise ConfigError(
                f"{there - known} parameters were added to the inner optimizer after {type(self).__name__} was made: "
                f"call add_param_group of {type(self).__name__} instead"
            )
        for p in self._frozen:
            if p.grad is not None:
                raise ConfigError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient but was frozen when {type(self).__name__} was made: "
                    "unfreeze it first, then make the optimizer"
                )

    def _refuse_bad_settings(self) -> None:
        """One step with an lr of NaN would leave NaN in the parameters for ever: refuse it before anything moves.

        A NaN is refused in any setting of a group, an infinity in those that multiply or divide. Others may be infinite:
        optimizers that choose their own step size have limits that are, by default. Tensors on a GPU are not looked at, which
        would make every step wait for it: what they spoil is found by the finite gate of the next round.
        """
        for number, group in enumerate(self.param_groups):
            for name, values in group.items():
                if name == "params":
                    continue
                for value in values if isinstance(values, tuple | list) else (values,):
                    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                        value = value.item()
                    if not isinstance(value, float | np.floating) or math.isfinite(value):
                        continue
                    if math.isnan(value) or name.startswith(_FINITE):
                        raise ConfigError(
                            f"{name} must be finite, got {values!r} in parameter group {number}: step {self.steps + 1} is "
                            "refused and nothing has changed; look at what sets it, such as a scheduler"
                        )

    def _unscale_gradients(self) -> None:
        scale = getattr(self, "grad_scale", None)  # set by GradScaler around step()
        if scale is not None:
            inverse = scale.reciprocal()
            for p in self._active:
                if p.grad is not None:
                    local(p.grad).mul_(inverse)

    # --- Parameter groups and state dicts ------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in any torch optimizer; on all workers alike. One that is refused leaves nothing behind."""
        with self._all_or_nothing():
            super().add_param_group(param_group)
            self._adopt(self.param_groups[-1])

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Take back what was added to groups, parameters and state within it, where that raises."""
        groups, active, frozen = len(self.param_groups), len(self._active), len(self._frozen)
        state, greeted = {p: dict(entries) for p, entries in self.state.items()}, self._greeted
        try:
            yield
        except BaseException:
            del self.param_groups[groups:], self._active[active:], self._frozen[frozen:]
            self.state.clear()
            self.state.update(state)
            self._greeted = greeted
            raise

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise a `ConfigError` for a parameter group that this method cannot train; nothing has been made of it yet."""
        for p in group["params"]:
            if p.requires_grad and not p.is_floating_point():
                raise ConfigError(f"parameters must be real floating-point tensors, got {p.dtype} of shape {tuple(p.shape)}")

    def _adopt(self, group: dict[str, Any]) -> None:
        """Make the state slots of a new group."""
        for name in _COUNTERS:
            group[name] = self.param_groups[0].get(name, 0)
        self._check_group(group)
        for p in group["params"]:
            if not p.requires_grad:
                self._frozen.append(p)
                continue
            self._active.append(p)
            # An entry even without slots: with an empty state torch's checkpointing would take a step "to initialise" it.
            state = self.state[p]
            wide = torch.promote_types(p.dtype, torch.float32)  # a decay of 0.999 would be lost in bf16
            for name, start in self._slots.items():
                if callable(start):
                    if (made := start(p.detach())) is not None:
                        state[name] = made
                elif start == "count" and self.wants(name, group):
                    state[name] = torch.tensor(0.0)
                elif start != "coded" and self.wants(name, group):
                    state[name] = p.detach().to(wide, copy=True) if start == "param" else torch.zeros_like(p, dtype=wide)
        self._make_coded()
        self._greeted = False

    def wants(self, slot: str, group: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether the parameters of a group have this slot; all of them, unless a method says otherwise."""
        return True

    def _make_coded(self) -> None:
        """Make the slots whose shape is the codec's affair: it depends on all tensors of a message."""
        names = [name for name, start in self._slots.items() if start == "coded"]
        if not names or not self._active:
            return
        shapes = Chain.of(self.codec).slot_shapes(self.params())
        for p, shape in zip(self._active, shapes, strict=True):
            for name in names:
                before = self.state[p].get(name)
                if before is None or before.shape != torch.Size(shape):
                    if before is not None and bool(before.any()):
                        log.warning("with the parameters added, tensors of a message lie otherwise: a %s begins anew", name)
                    self.state[p][name] = torch.zeros(shape, device=local(p).device)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict()` gave; checked as a whole before anything changes."""
        state = self._checked(state_dict)
        self._load_groups(state_dict["param_groups"])
        self._load_slots(state)
        self._greeted = False  # all workers must have loaded the same step

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """The state by parameter number, once it is known to fit.

        As in torch, parameters are matched by their place in the groups: stock checkpointing uses names as their keys.
        """
        groups = state_dict["param_groups"]
        mine, theirs = [len(g["params"]) for g in self.param_groups], [len(g["params"]) for g in groups]
        if mine != theirs:
            raise CheckpointError(f"state has parameter groups of {theirs} tensors, this optimizer has {mine}")
        missing = [k for k in _COUNTERS if k not in groups[0]]
        if missing:
            raise CheckpointError(f"not a state of thinwire's {type(self).__name__}: {missing[0]} is missing")
        keys = [key for group in groups for key in group["params"]]
        state = {index: state_dict["state"].get(key, {}) for index, key in enumerate(keys)}
        for index, p in self._indexed():
            for name, mine in self.state[p].items():
                if name not in state[index]:
                    raise CheckpointError(f"state of tensor {index} has no {name!r}, only {sorted(state[index])}")
                if state[index][name].shape != mine.shape:
                    shapes = f"{tuple(state[index][name].shape)}, here it has {tuple(mine.shape)}"
                    raise CheckpointError(f"{name!r} of tensor {index} has shape {shapes}")
        return state

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})

    def _load_slots(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for index, p in self._indexed():
                for name, mine in self.state[p].items():
                    mine.copy_(state[index][name])

    def _indexed(self) -> list[tuple[int, Tensor]]:
        """Every parameter that takes part, with its number in `state_dict()`."""
        everyone = [p for group in self.param_groups for p in group["params"]]
        active = {id(p) for p in self._active}
        return [(i, p) for i, p in enumerate(everyone) if id(p) in active]

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copy and pickle: a link cannot be copied along."""
        raise TypeError(
            f"{type(self).__name__} holds a link and cannot be copied or pickled: use state_dict() and a new object"
        )

    def __repr__(self) -> str:
        """The method and its settings, on one line."""
        settings = ", ".join(f"{k}={v!r}" for k, v in self.settings.items())
        return f"{type(self).__name__}({settings})"


def overwrite(params: list[Tensor], values: list[Tensor], model: nn.Module | None = None) -> None:
    """Copy `values` into parameters; give the model where FSDP2 shards it."""
    with torch.no_grad():
        for x, value in zip(params, values, strict=True):
            x.copy_(value)
    if model is not None:
        reshard(model)


def _plain(value: object) -> object:
    """A setting as something that JSON can hold and people can read."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else list(value.shape)
    if isinstance(value, dict | list | tuple | str | int | float | bool | type(None)):
        return value
    return repr(value)
