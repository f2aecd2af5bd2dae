"""RoundEngine: the one owner of a round, from sending to applying, for every method.

A method says what it sends (`send`) and what becomes of what arrived (`apply`). What is sent at step t is applied after step
t + tau, and travels meanwhile:

    tau = 0:    step t | send, wait, apply | step t+1
    tau = 1:    step t | send              | step t+1 | apply | ...        waits only for what is late

Between the two lie the gates: a contribution that is invalid refuses the round on all workers alike, messages that one worker
could not read do too, and the link has the last word (`commit`). Shared state changes in `apply` and nowhere else, so a round
is applied by all workers or by none.

What is in flight is not part of a checkpoint, but what it was made of is: after a resume the messages are sent once more
(`send_again`), with the numbers that they had, so that training goes on bit for bit. Which they are follows from the schedule,
the step and the counter "in_flight".
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.core import gates
from thinwire.core.deferred import DeviceGate
from thinwire.core.exchange import Exchange, post
from thinwire.core.hashing import hash_each
from thinwire.core.outgoing import Arrived
from thinwire.core.owners import Owned
from thinwire.core.policy import Policy
from thinwire.core.refusals import Refusals, culprits_of, damaged
from thinwire.core.replicas import compare_replicas, resync
from thinwire.core.resend import Resend
from thinwire.errors import ConfigError, Diverged, NonFiniteRound, RoundAborted, WireError
from thinwire.links.base import Peers
from thinwire.payload import LARGEST, Payload, all_finite, once

if TYPE_CHECKING:
    from thinwire.core.elastic import ElasticEngine
    from thinwire.core.optimizer import Algorithm

log = logging.getLogger("thinwire")


VOTE_NBYTES = 1  # of a worker that tells the others whether it could read their messages
_MOST_IN_FLIGHT = 48  # messages at once whose marks a float64 holds as bits


@dataclass
class InFlight:
    """A message on its way.

    Attributes:
        number: of the round.
        step: after which it was sent.
        due: what the schedule named: fragments or states.
        which: numbers of the parameters in it: those of a group that was added since are not.
        last: whether it is that of `finish()`, after which all workers are equal.
        peers: who takes part.
        exchange: what to wait for; None after a resume, until it has been sent again, and once it was applied.
        in_params: whether the parameters still hold the steps that were sent; of a round that is kept back.
    """

    number: int
    step: int
    due: tuple[int, ...]
    which: tuple[int, ...]
    last: bool = False
    peers: Peers | None = None
    exchange: Exchange | None = None
    in_params: bool = True


class RoundEngine:
    """The rounds of one worker.

    Args:
        optimizer: the method.
        policy: what to do when something goes wrong.
        tau: steps between sending and applying.
    """

    def __init__(self, optimizer: Algorithm, policy: Policy, tau: int):
        """Nothing is in flight yet."""
        self.opt, self.policy, self.tau = optimizer, policy, tau
        self.queue: deque[InFlight] = deque()
        self.current = InFlight(0, 0, (), ())  # the round that is being sent or applied
        self.refusals = Refusals(optimizer)
        self.resend = Resend(self)
        self.aborted = 0
        self.invalid_next: bool | Tensor = False  # the next message is refused in this worker's name, whatever it says
        self.writing: Callable[[], AbstractContextManager[object]] = nullcontext  # around what changes replicated state
        self.deferred = DeviceGate.of(self)  # where gates are not looked at until the next step
        optimizer.set_counter("in_flight", 0)
        if tau and optimizer.schedule.fragments > _MOST_IN_FLIGHT:
            raise ConfigError(f"with tau > 0 there are at most {_MOST_IN_FLIGHT} fragments, got {optimizer.schedule.fragments}")
        if tau:
            marks = torch.tensor(0.0, dtype=torch.float64, device="cpu")
            optimizer.own_state[optimizer._active[0]]["invalid_in_flight"] = marks

    @property
    def elastic(self) -> ElasticEngine | None:
        """This engine, where workers come and go."""
        return None

    def handshake(self) -> None:
        """Before the first step: refuse to begin unless all workers were started with the same settings."""
        self.settle_missing()  # a worker that is behind for a while would seem to differ
        gates.greet(self.opt)

    # --- Sending ---------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """After a step: send what is due, and apply what was sent tau steps ago."""
        due = self.opt.due = self.opt.schedule.due(self.opt.steps)
        which = self.opt.which(due) if due else ()
        with self.opt.at_hand(None if self.tau and self.resend.active else {*which, *self._ready()}):
            if which and any(not set(which).isdisjoint(flight.which) for flight in self.queue):
                self._settle_ready()  # what is sent now depends on what arrives now
            if which:
                self._post(due, which)
            self._settle_ready()

    def _ready(self) -> Iterator[int]:
        """Numbers of the parameters that rounds are about which arrive now."""
        return (i for flight in self.queue if flight.step <= self.opt.steps - self.tau for i in flight.which)

    def finish(self) -> None:
        """Apply what is in flight, then exchange once what local steps have gathered since the last round."""
        while self.queue:
            self._settle()
        self.settle_missing()
        if self.opt.pending_steps > 0 and "param" not in self.opt.replicated:
            due = tuple(range(self.opt.schedule.fragments))
            self._post(due, self.opt.which(due), last=True)
            self._settle()
            self.settle_missing()
        self.opt.average_buffers()

    def settle_missing(self) -> None:
        """At the end of training and before a checkpoint: rounds that a worker could not read are sent again. Collective."""
        if self.deferred is not None:
            self.deferred.settle()
        if self.resend.active:
            with self.opt.at_hand():
                self.resend.settle()

    def _post(self, due: tuple[int, ...], which: tuple[int, ...], *, last: bool = False) -> None:
        self._send_again()
        flight = InFlight(self.opt.rounds + len(self.queue) + 1, self.opt.steps, due, which, last)
        self._start(flight, again=False)
        self.queue.append(flight)
        self.opt.set_counter("in_flight", len(self.queue))

    def _start(self, flight: InFlight, *, again: bool) -> None:
        """Put a message on its way, for the first time or once more."""
        opt, self.current = self.opt, flight
        opt.due, opt.peers = flight.due, opt.link.peers()
        out = opt.send_again() if again else opt.send()
        if (invalid := self._mark_invalid(flight.number, again=again)) is not False:
            out = replace(out, invalid=invalid)
        if not again:
            opt.remember(out)
        flight.due, flight.peers = opt.due, opt.peers
        missing = self.tau > 0 and self.resend.missing
        how = {"any_shard": opt.shards.any, "largest": LARGEST, "missing": missing}
        how |= {"peers": opt.peers, "round": flight.number}
        owners = None if out.codec.linear or opt.peers.size < 2 else opt.owners
        if owners is not None:
            flight.exchange = Owned(opt.link, out, owners=owners, **opt.owned(flight.which), **how)
        else:
            flight.exchange = post(opt.link, out, **how) if self.deferred is None else self.deferred.post(out, **how)
        if self.tau:
            self.resend.remember(flight.number, flight.exchange)

    def _mark_invalid(self, number: int, *, again: bool) -> bool | Tensor:
        """Whether a message is refused in this worker's name; of one that was sent before, whether it was then."""
        if not self.tau:
            invalid, self.invalid_next = self.invalid_next, False
            return invalid
        marks, bit = self.opt.own_state[self.opt._active[0]]["invalid_in_flight"], 1 << number % _MOST_IN_FLIGHT
        if not again:
            marks.fill_(int(marks) & ~bit | bit * bool(self.invalid_next))
            self.invalid_next = False
        return bool(int(marks) & bit)

    def _send_again(self) -> None:
        """Send what was in flight when the checkpoint was written."""
        for flight in self.queue:
            if flight.exchange is None:
                self._start(flight, again=True)

    # --- Arriving --------------------------------------------------------------------------------------------------------

    def _settle_ready(self) -> None:
        while self.queue and self.queue[0].step <= self.opt.steps - self.tau:
            self._settle()

    def _settle(self) -> None:
        """The round of the message that was sent first."""
        self._send_again()
        opt, flight = self.opt, self.queue.popleft()
        opt.set_counter("in_flight", len(self.queue))
        opt.set_counter("thinwire_round", flight.number)
        self.begin(flight)
        refusal: RoundAborted | None = None
        try:
            try:
                with self.overflow_named():
                    arrived = self._agree(flight)
                    if arrived is not None:
                        self.apply(flight, arrived)
                    if opt.whole_round():  # also where it is kept back: the counter is the same on all workers
                        opt.set_counter("thinwire_synced", opt.steps)
            except RoundAborted as found:
                refusal = found
            if opt.in_pairs and self.policy.on_nonfinite == "raise":
                refusal = self.refusals.of_any_pair(refusal, flight.number)
            if refusal is not None:
                flight.exchange = None
                self.refuse(refusal, number=flight.number)
            else:
                self._after(flight.number)
        finally:
            if opt.in_pairs:  # also of a refused round: all workers must agree on whether `finish()` has something to do
                opt.set_counter("thinwire_synced", opt.steps)
        if opt.pace is not None:  # `finish()` may end a round in the middle of its steps: quotas change between whole ones
            opt.pace.agree(opt.shards, settle=opt.pace.in_step(opt.steps))
        opt.watch.tell(opt)

    def begin(self, flight: InFlight) -> None:
        """Make this the round at hand."""
        assert flight.peers is not None
        self.current, self.opt.due, self.opt.peers = flight, flight.due, flight.peers

    def apply(self, flight: InFlight, arrived: Arrived) -> None:
        """Apply what all workers apply; on a device, where the round is not refused."""
        opt = self.opt
        if self.deferred is not None and arrived.refused is not None:
            self.deferred.apply(flight, arrived)
            return
        self.begin(flight)
        if opt.pace is not None and arrived.included:
            opt.pace.committed()
        opt.committed()
        if flight.exchange is not None:
            flight.exchange.commit()
        with opt.watch.measured(opt, flight.which), self.writing():
            opt.apply(replace(arrived, which=flight.which, last=flight.last))
        flight.exchange = None  # it holds messages as long as the model, and `current` would keep it until the next round

    def _agree(self, flight: InFlight) -> Arrived | None:
        """Wait for the messages; what is returned all workers apply. None where it is kept back until it was sent again."""
        exchange = flight.exchange
        assert exchange is not None
        if self.tau and self.resend.watches(exchange):
            return self.resend.receive(flight)
        arrived, problem = None, None
        try:
            arrived = exchange.wait()
        except (WireError, NonFiniteRound) as found:
            problem = found
        if exchange.to_vote and not self.opt.in_pairs and exchange.peers.size > 1:
            self._vote(flight.number, problem if isinstance(problem, WireError) else None)
        if problem is not None:
            raise problem
        self.opt.link.commit()
        assert arrived is not None
        return arrived

    def _vote(self, number: int, error: WireError | None) -> None:
        """Tell each other whether the messages could be read: what one worker could not, no worker may apply.

        Raises:
            WireError: on all of them, where none could: a message was wrong when it was sent.
            DamagedRound: on all of them, where some could: it was damaged on the way.
        """
        ballot = Payload.of_bytes(bytes([error is not None]), purpose="vote", fixed=True)
        told = self.opt.link.all_gather(ballot)
        failed = once(told, "vote", lambda: [p.sender for p in told if p.to_bytes() != b"\x00"])
        if failed and len(failed) < len(told):
            raise damaged(number, failed, len(told), error) from error

    def _after(self, number: int) -> None:
        """What comes after a round that was applied: buffers, and the divergence alarm."""
        opt = self.opt
        if number % opt.buffers_every == 0 and not opt.in_pairs:  # those who refused would not take part
            opt.average_buffers()
        if self.policy.alarm_every and number % self.policy.alarm_every == 0:
            if self.deferred is not None and self.deferred.settle():  # the round was refused after all
                return
            if not (hashes := hash_each(opt.shared_state())):  # a method that lets everything drift
                return
            if self.tau and self.resend.missing:  # this worker is behind the others for a while
                hashes = dict.fromkeys(hashes, 0)
            try:
                compare_replicas(opt.link, hashes, round=number, any_shard=opt.shards.any)
            except Diverged as alarm:
                if self.policy.on_divergence == "raise":
                    raise
                log.warning("%s", alarm)

    # --- Rounds that do not take place -------------------------------------------------------------------------------------

    def refuse(self, refusal: RoundAborted, *, number: int | None = None, step: int | None = None) -> None:
        """Go on without a round that did not take place, or raise, as the policies say.

        A worker whose replicated parameters are the cause takes them from the others. A round that was refused for a NaN or Inf
        is not gone on from, and `TrainingDiverged` is raised on all workers, where

        * the parameters that all workers have in common are not finite: no later round can make them so;
        * all of two or more workers were to blame, and with local steps: the parameters of each have become invalid since the
          last round, which is no fault of one machine. Gradients alone do not count, since a GradScaler finds an Inf in them
          on all workers now and then. Nor does a single worker: it goes back to its last agreed parameters, and is counted;
        * it is the last of `give_up_after` in a row.

        All of that is known to all workers alike, so that they raise together. In methods `in_pairs` only the two of a pair
        know: there each worker counts the rounds in a row that were refused in its own name, and raises for itself.

        Args:
            refusal: what the round was refused with.
            number: of the round, where that is not the last one begun.
            step: which it belongs to, where that is not the last one taken.
        """
        opt, nonfinite = self.opt, isinstance(refusal, NonFiniteRound)
        if nonfinite and self.policy.on_nonfinite == "raise":
            raise refusal
        self.aborted += 1
        if nonfinite and "param" in opt.replicated and opt.peers.size > 1:
            with self.writing():
                self._resync()
        mine = opt.peers.id in culprits_of(refusal)
        number, step = opt.rounds if number is None else number, opt.steps if step is None else step
        given_up = self.refusals.count(refusal, number, step)
        if given_up is None:
            log.warning("%s; training goes on without it", refusal)
        if self.policy.on_abort == "restore" or mine:
            with opt.at_hand():
                opt.restore()
            self.resend.progress_lost()
        if given_up is not None:
            raise given_up
        opt.refused(refusal)

    def _resync(self) -> None:
        """Where a worker's replicated state is what is invalid, it takes that of the others."""
        state = [t for tensors in self.opt.replicated_state().values() for t in tensors]
        invalid = not all_finite(self.opt.params(), LARGEST)
        how = {"invalid": invalid, "behind": self.tau > 0 and self.resend.missing, "any_shard": self.opt.shards.any}
        if took := resync(self.opt.link, state, **how):
            names = ", ".join(f"rank {r}" for r in took)
            log.warning("the replicated state of %s was invalid: it was taken from the other workers", names)

    @contextmanager
    def overflow_named(self) -> Iterator[None]:
        """Say in words of training what torch says of a step so long that its size is no number of the parameters' dtype."""
        try:
            yield
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            what = f"the size of a step overflows ({error})"
            raise self.refusals.training_diverged(what, since=self.opt.steps) from error

    # --- Resuming ----------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Among other workers: forget what is in flight, since what it was made of is no more, and who was to be resynced."""
        self.queue.clear()
        self.resend.reset()
        self.opt.set_counter("in_flight", 0)
        if "resync" in self.opt.param_groups[0]:
            self.opt.set_counter("resync", [])

    def reload(self) -> None:
        """After a checkpoint was loaded: what was in flight is sent again at the next step."""
        opt = self.opt
        self.queue.clear()
        self.resend.reset()
        count, first = opt.param_groups[0].get("in_flight", 0), max(0, opt.steps - self.tau) + 1
        sent = [
            (step, due, which)
            for step in range(first, opt.steps + 1)
            if (due := opt.schedule.due(step)) and (which := opt.which(due))
        ]
        if count > len(sent):  # local values still hold what was sent: the next round carries it along
            log.warning("%d messages were in flight with another tau or other fragments: their rounds are left out", count)
            count = 0
        for place, (step, due, which) in enumerate(sent[len(sent) - count :]):
            self.queue.append(InFlight(opt.rounds + place + 1, step, due, which))
        opt.set_counter("in_flight", count)
