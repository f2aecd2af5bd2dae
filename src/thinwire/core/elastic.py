"""ElasticEngine: the rounds of a worker on a link whose workers come and go.

Joining, catching up after being late, coming back after a crash and reading along are one thing: the ordinary round of a worker
whose message was not counted. The state of a run is a checkpoint and the rounds after it, in order, bit for bit.

    join     settings are compared; the newest checkpoint is taken; all rounds since are followed; hello; the next round decided
    step     at a round: send, wait for the manifest, apply what it counts
    late     the message was left out: apply the round, follow to the newest, and send there at once what was kept
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from thinwire.core.counted import Counted, Verdict, buffers_nbytes, slice_hash
from thinwire.core.history import History
from thinwire.core.ledger import Ledger
from thinwire.core.outgoing import Outgoing
from thinwire.core.policy import Policy
from thinwire.core.rates import Rates
from thinwire.core.rounds import InFlight, RoundEngine
from thinwire.errors import ConfigError, Diverged, NonFiniteRound, RoundAborted
from thinwire.links.decided import Decided, Moved, RoundGone
from thinwire.links.manifest import Manifest, Terms
from thinwire.payload import LARGEST, all_finite, zero_invalid_

if TYPE_CHECKING:
    from thinwire.core.optimizer import Algorithm

log = logging.getLogger("thinwire")

_RESENDS = 3  # times that what was left out is sent again at once, before training goes on
_MOST_RELOADS = 3  # times that a worker takes a checkpoint because its state was wrong
_FAR = 1 << 20  # steps within which a schedule has something due


class ElasticEngine(RoundEngine):
    """The rounds of one worker on an elastic link.

    Args:
        optimizer: the method.
        policy: what to do when something goes wrong.
        tau: 0.

    Attributes:
        ledger: which worker trains on what.
        carrying: whether this worker has done something that no round has counted yet.
        worked_on: the last block that this worker has taken a step on, and that no round has counted yet.
    """

    def __init__(self, optimizer: Algorithm, policy: Policy, tau: int):
        """Refuse what an elastic link cannot do."""
        link = optimizer.link.elastic
        assert link is not None
        _check_supported(optimizer, tau)
        super().__init__(optimizer, policy, tau)
        self.link, self.ledger, self.joined, self.carrying = link, Ledger(), False, False
        self.worked_on: int | None = None
        self.rates, self.history = Rates(optimizer), History(self)
        self._invalid_in_row = self._reloads = self._left_out = 0

    @property
    def elastic(self) -> ElasticEngine:
        """This engine."""
        return self

    @property
    def block(self) -> int | None:
        """What this worker trains on until the next round."""
        return self.ledger.block_of(self.link.rank)

    @property
    def block_step(self) -> int:
        """Steps since the round before."""
        return self.opt.steps - self.link.place.step

    # --- Coming -----------------------------------------------------------------------------------------------------------

    def handshake(self) -> None:
        """The door was at `join()`."""
        if not self.joined:
            raise ConfigError(
                "on an elastic link call opt.join() before the first batch: the run may be far ahead of this worker"
            )

    def join(self, schedulers: Sequence[LRScheduler] = ()) -> None:
        """Take the state of the run, follow it to its newest round, and be expected in the next one."""
        opt, self.rates.schedulers = self.opt, tuple(schedulers)
        self.link.terms = self._terms(0)
        self.history.settle()
        self.follow()
        self.history.hold_state()
        self.history.enter()
        self.joined = opt.handshake_done = True
        if opt.steps:
            self.rates.move_schedulers(step=True)

    def follow(self) -> int:
        """Apply all rounds that are decided, without a message; how many there were."""
        if not self.joined:
            self.link.longest = self._longest()
        return self.history.follow()

    def _longest(self) -> int:
        """Bytes of the longest message that a worker of this run may send."""
        everything = tuple(range(self.opt.schedule.fragments))
        full = [self.opt.message_of(everything, round=round) for round in self.opt.codecs.first_rounds]
        return max(out.nbytes(1, gathered=True) for out in full if out is not None) + buffers_nbytes(self.opt.buffers)

    # --- Taking part ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """After a step: a round, where one is due."""
        opt = self.opt
        self.carrying, self.worked_on = True, self.block
        if due := opt.schedule.due(opt.steps):
            counted = self._round(opt.steps, due, opt.send)
            self._left_out = 0 if counted else self._left_out + 1
            if not counted and not self.link.ended:
                self._catch_up()

    def _catch_up(self) -> None:
        """After a message that was left out: train on where this worker is not behind, else send at once what it kept."""
        behind = self.follow() > 0
        if not behind and self._left_out == 1 and self.opt.carried() is not None:
            self.link.say("here")
            return
        counted = False
        for _ in range(_RESENDS):
            if not counted and not self.link.ended and self._still_mine():
                counted = self._send_kept()
        self._left_out = 0 if counted else self._left_out
        if not counted and not self.link.ended and (self.opt.carried() is None or self.block is None):
            self.worked_on = None
            self.history.enter()  # with nothing: what it has trained on is issued again

    def finish(self) -> None:
        """Bring in what no round has counted yet, and tell the others that the run has ended."""
        if self.joined and not self.link.ended:
            self._end_run()
        self.opt.buffer_average.restore()

    def _end_run(self) -> None:
        everything = tuple(range(self.opt.schedule.fragments))
        if self.carrying and "param" not in self.opt.replicated:
            counted = self._round(self.opt.steps, everything, self.opt.send, last=True)
            for _ in range(_RESENDS):
                if counted or self.link.ended or not self._still_mine():
                    break
                counted = self._round(self.opt.steps, everything, self._kept, last=True, kept=True)
        if not self.link.ended:
            self.link.say("end")
            self.link.ended = True

    def settle_missing(self) -> None:
        """Nothing: a message that cannot be read is left out by all."""

    def _still_mine(self) -> bool:
        """Follow to the newest round; whether what was left out is still this worker's to send, and not another's by now."""
        self.follow()
        if self.block is None and self.worked_on is not None:
            self.history.forget()
        return self.block is not None

    def _send_kept(self) -> bool:
        """Send at once, in the newest round, what was left out; whether nothing is left to send."""
        if self.opt.carried() is None:
            return False
        if not self.carrying:
            return True
        step = next(s for s in range(self.opt.steps + 1, self.opt.steps + _FAR) if self._which(s, last=False)[1])
        return self._round(step, self.opt.schedule.due(step), self._kept, kept=True)

    def _kept(self) -> Outgoing:
        out = self.opt.carried()
        assert out is not None
        return out

    def _round(
        self, step: int, due: tuple[int, ...], make: Callable[[], Outgoing], *, last: bool = False, kept: bool = False
    ) -> bool:
        """Send a message in the round at hand, and take what the round brings; whether the message was counted."""
        which = self.opt.which(due)
        if not which:
            return True
        opt = self.opt
        opt.set_counter("thinwire_step", step)
        flight = InFlight(self.link.place.number, step, due, which, last, opt.link.peers())
        self.begin(flight)
        self.link.terms, self.link.kept = self._terms(step, last=last), kept
        self.link.blocks = self.ledger.up_to(self.link.rank, self.worked_on)
        self.link.step_seconds = 0.0 if opt.pace is None else opt.pace.seconds
        out = make()
        if self._mark_invalid(flight.number, again=False):
            out = replace(out, invalid=True)
        opt.remember(out)
        try:
            exchange = self._exchange(flight, out, read_only=False)
            exchange.ticket.wait()
        except Moved as moved:
            opt.set_counter("thinwire_step", self.link.place.step)  # what the run has counted: others may take this state
            self.history.found_again(moved)
            self._left_out += 1  # what this round did not bring in is sent again at once
            return not self.carrying
        except RoundGone as gone:
            self.history.take_checkpoint(str(gone), after=gone.number)
            return True  # nothing is left to send again
        decided = None if self.link.ended else self.link.decided
        if decided is None:
            opt.set_counter("thinwire_step", self.link.place.step)  # what the run has counted
        return decided is not None and self.take(decided, exchange)

    def _exchange(self, flight: InFlight, out: Outgoing, *, read_only: bool) -> Counted:
        flight.exchange = Counted(
            None if read_only else self.opt.link,
            out,
            peers=flight.peers,
            round=flight.number,
            largest=LARGEST,
            state_hash=self._hash(flight.number),
            buffers=self._buffers(flight),
        )
        return flight.exchange

    def _buffers(self, flight: InFlight) -> list[Tensor]:
        """Those that are averaged in a round."""
        due = flight.last or flight.number % self.opt.buffers_every == 0
        return self.opt.buffer_average.local() if due else []

    def _terms(self, step: int, *, last: bool = False) -> Terms:
        return Terms(step, last, self.rates.told())

    def _which(self, step: int, *, last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is due in a round of this step, and the parameters that it is about."""
        due = tuple(range(self.opt.schedule.fragments)) if last else self.opt.schedule.due(step)
        return due, self.opt.which(due) if due else ()

    def _hash(self, number: int) -> int:
        """Of a slice of the replicated state; of all of it in the round after a checkpoint, which may be a wrong one."""
        state, every = [t for tensors in self.opt.replicated_state().values() for t in tensors], self.link.checkpoint_every
        state += self.opt.buffer_average.agreed if self.opt.buffer_average.averaged else []
        return slice_hash(state, number, whole=bool(every) and number % every == 1 % every)

    # --- What a round brings --------------------------------------------------------------------------------------------

    def take(self, decided: Decided, exchange: Counted | None) -> bool:
        """Apply a round as all workers do; whether this worker's own message was counted in it.

        Args:
            decided: the round.
            exchange: of this worker's message in it; None where it only follows.
        """
        opt, manifest = self.opt, decided.manifest
        terms, flight = manifest.terms, self.current
        opt.set_counter("thinwire_round", manifest.number)
        opt.set_counter("thinwire_step", terms.step)
        if opt.pace is not None:
            opt.pace.told(decided.step_seconds, terms.step)
        due, which = self._which(terms.step, last=terms.last)
        if not manifest.counted or not which:
            self._book(decided, Verdict())
            return False
        if exchange is None or (flight.step, flight.last) != (terms.step, terms.last):
            flight = InFlight(manifest.number, terms.step, due, which, terms.last, opt.link.peers())
            self.begin(flight)
            exchange = self._exchange(flight, opt.send(), read_only=True)
        verdict = exchange.judge(decided.messages)
        self._book(decided, verdict)
        for sender, why in verdict.left_out.items():
            log.warning("round %d: worker %d is left out: %s", manifest.number, sender, why)
        if self._diverged(manifest, verdict, exchange.state_hash):
            return False
        included = self._apply_verdict(flight, verdict, decided)
        if not self.history.replaying:
            opt.watch.tell(opt)
        self.history.write_in_turn(manifest, mine=decided.mine)
        return included

    def _book(self, decided: Decided, verdict: Verdict) -> None:
        """Book what is applied as counted, and what gave NaN or Inf, which is not tried again; the rest is still to be sent."""
        manifest = decided.manifest
        applied = set(decided.blocks) - set(verdict.left_out) if verdict.arrived is not None else set()
        counted = {who: decided.blocks[who] for who in applied | (verdict.invalid & set(decided.blocks))}
        self.ledger.settle(counted=counted, hello=manifest.hello, bye=manifest.bye, expected=manifest.expected)
        if decided.mine and self.link.rank in counted:
            self.worked_on = None

    def _apply_verdict(self, flight: InFlight, verdict: Verdict, decided: Decided) -> bool:
        opt = self.opt
        sick = decided.mine and self.link.rank in verdict.invalid
        if verdict.arrived is None:
            self._no_round(flight, verdict)
        if sick and self._heal(flight, verdict):
            return True
        if verdict.arrived is None:
            return sick  # nothing is left to send again
        self._invalid_in_row = self._invalid_in_row if sick else 0
        included = verdict.arrived.included and decided.mine
        with self.rates.of_round(decided.manifest.terms.lr, keep=self.history.replaying):
            self.apply(flight, replace(verdict.arrived, included=included, share=_share(decided, verdict)))
        if verdict.buffers:
            opt.buffer_average.agree_on(verdict.buffers)
        if opt.whole_round():
            opt.set_counter("thinwire_synced", opt.steps)
            self.carrying = self.carrying and not included
        return included or sick

    def _no_round(self, flight: InFlight, verdict: Verdict) -> None:
        """No message was left to apply: on no worker."""
        if self.history.replaying:
            self.aborted += 1
            return
        what = f"round {flight.number} did not take place: no message is left"
        invalid = sorted(verdict.invalid)
        names = ", ".join(f"worker {i}" for i in invalid)
        refusal = NonFiniteRound(f"{what}, NaN or Inf in those of {names}", culprits=invalid) if invalid else RoundAborted(what)
        flight.exchange = None
        self.refuse(refusal, number=flight.number, step=flight.step)

    def _heal(self, flight: InFlight, verdict: Verdict) -> bool:
        """This worker's contribution was not finite: go back to what all agreed on; whether a checkpoint had to be taken."""
        opt = self.opt
        self._invalid_in_row += 1
        if self.policy.on_nonfinite == "raise" and verdict.arrived is not None:
            raise NonFiniteRound(
                f"round {flight.number}: NaN or Inf in the contribution of this worker", culprits=[self.link.rank]
            )
        if opt.give_up_after and self._invalid_in_row >= opt.give_up_after:
            what = f"{self._invalid_in_row} contributions of worker {self.link.rank} in a row were not finite"
            raise self.refusals.training_diverged(what, since=opt.steps)
        opt.restore()
        zero_invalid_(t for tensors in opt.inner_state().values() for t in tensors)
        self.carrying = False
        if all_finite([t for tensors in opt.replicated_state().values() for t in tensors]):
            return False
        self._start_again("its replicated state is not finite")
        return True

    def _resync(self) -> None:
        """On an elastic link a worker whose replicated state is invalid takes a checkpoint: see `_heal`."""

    # --- Replicas that differ ---------------------------------------------------------------------------------------------

    def _diverged(self, manifest: Manifest, verdict: Verdict, mine: int) -> bool:
        """Compare this worker's replicated state with that of the others; whether it had to be taken anew."""
        if verdict.majority and mine not in (0, verdict.majority):
            what = f"its replicated state before round {manifest.number} is not that of the majority"
        elif verdict.majority is None and not self.history.replaying:
            what = f"before round {manifest.number} there are as many workers with one replicated state as with another"
        else:
            return False
        if self.policy.on_divergence == "warn":
            log.warning("%s; training goes on", what)
            return False
        self._start_again(what, older=self.history.replaying)
        return True

    def _start_again(self, why: str, *, older: bool = False) -> None:
        """Take the newest checkpoint and all rounds since, as a worker that comes; an older one where that was wrong."""
        self._reloads += 1
        if self._reloads > _MOST_RELOADS:
            raise Diverged(f"worker {self.link.rank} took a checkpoint {_MOST_RELOADS} times, and again: {why}")
        self.history.take_checkpoint(why, older=older)


def _share(decided: Decided, verdict: Verdict) -> float:
    """The part of a round's work that is in its mean; 1 where nobody who is missing can send the rest later.

    One that has died, or drops its work since its state is not that of the others, cannot either, and is not known yet.
    """
    assert verdict.arrived is not None
    there, manifest = set(verdict.arrived.ids), decided.manifest
    if manifest.terms.last:
        return 1.0
    missing = {*decided.expected, *manifest.here} - there - verdict.invalid - {*manifest.bye, *manifest.hello}
    return len(there) / (len(there) + len(missing))


def _check_supported(opt: Algorithm, tau: int) -> None:
    name = type(opt).__name__
    if opt.in_pairs:
        raise ConfigError(f"{name} exchanges in pairs, of which no manifest tells: it needs workers that stay")
    if tau:
        raise ConfigError(
            f"on an elastic link a round is applied before the next step, since its manifest says what to train on: {name} "
            f"needs tau=0 (delay=False), got {tau}"
        )
    if "param" not in opt.replicated and not ("anchor" in opt.replicated and "anchor" in opt._slots):
        raise ConfigError(f"the workers of {name} with these settings have no state in common that one who joins could take")
    if opt.shards.several:
        raise ConfigError(
            "a model that is sharded cannot be trained on an elastic link: all its shards would have to join as one"
        )
