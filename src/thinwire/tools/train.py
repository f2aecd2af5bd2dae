"""The training loop of one worker: the same function under torchrun, on processes we start, and in the simulator."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from thinwire import checkpoint
from thinwire.core.gates import handshake, tell_all
from thinwire.core.optimizer import Algorithm
from thinwire.core.phases import at_work
from thinwire.errors import CheckpointError, ConfigError, NonFiniteRound, TrainingDiverged
from thinwire.links import Link, Metered, SoloLink, TorchLink
from thinwire.links.ddp import MeteredDDP
from thinwire.links.metered import Totals
from thinwire.payload import Payload
from thinwire.tasks.task import Task
from thinwire.tools.build import check_total, clips_itself, device_of, optimizer_of, task_of, warm_start_of
from thinwire.tools.config import RunConfig
from thinwire.tools.names import ALONE
from thinwire.warm_start import WarmStart

log = logging.getLogger("thinwire")

_BAD_LOSSES = 8  # so many steps in a row with a loss that is not finite, on all workers, are no accident


@dataclass(frozen=True)
class Progress:
    """Where a worker stands after a step.

    Attributes:
        step: steps taken.
        loss: this worker's training loss at that step.
        seconds: training time so far on the link's clock, without evaluations and checkpoints.
        items: tokens, images or samples that all workers together have seen.
        sent: bytes that this worker has sent.
        received: bytes that it has received.
        payload: bytes of its own messages, before a ring or a gather multiplies them.
        rounds: exchanges so far.
        waiting: seconds of `seconds` that it spent waiting on the wire.
        validation: figures of the shared model, where it was evaluated after this step; with `drift`, how far the workers'
            models are apart, and `mean_...`, the figures of their mean, where they are.
    """

    step: int
    loss: float
    seconds: float
    items: int
    sent: int
    received: int
    payload: int
    rounds: int
    waiting: float
    validation: dict[str, float] | None = None

    @staticmethod
    def of(step: int, loss: float, seconds: float, items: int, totals: Totals, validation: dict[str, float] | None) -> Progress:
        """With what a meter has counted."""
        wire = (totals.sent, totals.received, totals.payload, totals.rounds, totals.waiting)
        return Progress(step, loss, seconds, items, *wire, validation)

    def record(self) -> dict[str, Any]:
        """A flat line for metrics.jsonl."""
        line = {k: v for k, v in asdict(self).items() if k != "validation"}
        return line | {f"val_{k}": v for k, v in (self.validation or {}).items()}


class Watcher(Protocol):
    """Somebody who wants to know how a run goes on: the progress display, the metrics file."""

    def __call__(self, progress: Progress, /) -> None:
        """Called after every step."""


class Trainer:
    """One worker's model, optimizer and data, and the loop over them.

    Args:
        config: what to run.
        link: this worker's end of the wire.
        task: model and data; made from the config where it is not given.
        shard: shards the model in place over the fast axis of a mesh, where there is one.
        part: which part of its worker's batch this process takes: (number of the shard, number of shards).
    """

    def __init__(
        self,
        config: RunConfig,
        link: Link,
        *,
        task: Task | None = None,
        shard: Callable[[nn.Module], nn.Module] | None = None,
        part: tuple[int, int] = (0, 1),
    ):
        """Build everything; only torch's DDP uses the wire already."""
        self.config, self.link, self.part = config, Metered(link), part
        self.task = task or task_of(config, link.data_size)
        self.model = self.task.model().to(device_of(config))
        if shard is not None:
            self.model = shard(self.model)
        # torch's own DDP where it can be had, so that the baseline is as strong as it can be.
        self.ddp = None
        if config.algorithm == "ddp" and isinstance(link, TorchLink) and config.shards == 1:
            self.ddp = MeteredDDP(self.model, self.link)
            self.ddp.rehearse(lambda model: self.task.loss(model, self.task.batch(self.link.rank, 1)))
        own = replace(config, clip_norm=0.0) if self.ddp else config  # gradients are averaged before the optimizer sees them
        # DDP exchanges by itself; "alone" is the control that trains without a wire.
        self.wire = SoloLink() if self.ddp or config.algorithm == ALONE else self.link
        self.optimizer: Algorithm | WarmStart
        if config.warm_start > 0 and not self.ddp:
            self.optimizer = warm_start_of(config, self.model, self.link, wire=self.wire)
        else:
            self.optimizer = optimizer_of(own, self.model, self.wire)
        if part[1] > 1 and (rows := len(self.task.batch(0, 1)[0])) % part[1]:
            raise ConfigError(f"a batch of {rows} does not divide among {part[1]} shards: choose another --batch or --shards")
        check_total(self.optimizer, config.steps)
        self.step, self.seconds, self._before = 0, 0.0, 0.0
        self.unsaved = ""  # why the last checkpoint could not be written
        self._bad_losses = 0  # the last so many steps of this worker had a loss that is not finite
        self._save_waits = False  # whether a checkpoint is due and waits for parameters that are finite

    def run(self, watch: Watcher, *, checkpoints: Path | None = None, checkpoint_every: int = 0) -> Progress:
        """Train to the end; resumes from the newest checkpoint if `resume` was called before.

        No checkpoint is written of parameters that are not finite, so that the last good one is never removed for a bad one.

        Args:
            watch: called after every step.
            checkpoints: folder to save into; None saves nothing.
            checkpoint_every: steps between two checkpoints; 0 saves none.

        Raises:
            TrainingDiverged: on all workers, where their numbers are lost.
        """
        try:
            return self._run(watch, checkpoints, checkpoint_every)
        except TrainingDiverged as error:
            saved = checkpoint.finished(checkpoints) if checkpoints is not None else []
            kept = f"the checkpoint of step {checkpoint.step_of(saved[-1])} is kept" if saved else "there is no checkpoint"
            raise TrainingDiverged(f"{error}; {kept}", since=error.since) from error

    def _run(self, watch: Watcher, checkpoints: Path | None, checkpoint_every: int) -> Progress:
        config = self.config
        if self.ddp:  # its exchanges do not pass through our gates
            handshake(self.link.link, self.optimizer.fingerprint())
        progress = self._progress(float("nan"))
        self._start_clock()
        evaluated = saved = self.step
        while self.step < config.steps:
            loss = self._one_step(self.step + 1)
            last = self.step >= config.steps
            if last:
                self.optimizer.finish()
            # Workers of different pace are at the same step only where a round has just ended.
            together = last or in_step(self.optimizer)
            evaluate = last or (together and _passed(config.eval_every, evaluated, self.step))
            due = checkpoint_every > 0 and (last or _passed(checkpoint_every, saved, self.step))
            save = checkpoints is not None and together and due
            self._bad_losses = 0 if math.isfinite(loss) else self._bad_losses + 1
            fit = False
            if evaluate or save:
                self._stop_clock()
                fit = self._check_numbers(last)
            progress = self._progress(float(loss), self.evaluate() if evaluate else None)
            watch(progress)
            if last and not math.isfinite((progress.validation or {}).get("loss", 0.0)):
                raise self._diverged("the validation loss at the end is not finite", since=self.step)
            if save and fit:
                assert checkpoints is not None
                self._save_or_warn(checkpoints)
            evaluated = self.step if evaluate else evaluated
            saved = self.step if save and fit else saved  # what could not be saved is tried again at the next step
            if evaluate or save:
                self._start_clock()
        return progress

    def _one_step(self, step: int) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        shard, shards = self.part
        x, y = self.task.batch(self.link.data_rank, step)
        batch = x.chunk(shards)[shard], y.chunk(shards)[shard]  # FSDP2 averages the gradients of the parts
        loss = self.task.loss(self.ddp.module if self.ddp else self.model, batch)
        loss.backward()
        if self.ddp and (culprits := self.ddp.backward_done()):
            self._refuse(culprits)
        if self.config.clip_norm and (self.ddp or not clips_itself(type(at_work(self.optimizer)))):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step = self.optimizer.steps
        return loss.detach()

    def _refuse(self, culprits: list[int]) -> None:
        """What the finite gate does for every other method: DDP has averaged a NaN, so no worker takes this step."""
        names = ", ".join(f"rank {r}" for r in culprits)
        what = f"step {self.step + 1} refused on all {self.link.size} workers: NaN or Inf in the contribution of {names}"
        self.optimizer.engine.refuse(NonFiniteRound(what, culprits=culprits), step=self.step + 1)
        self.optimizer.zero_grad()  # without gradients the step that follows changes nothing but its number

    def _check_numbers(self, last: bool) -> bool:
        """Whether all workers' numbers are fit to be saved; one byte from each, not metered.

        The parameters of some workers may be bad between two rounds: the next round resets them. All workers are past that
        where the parameters they would go back to are bad; where each one's own are (of a single worker at the end of the run
        only: before, it goes back to the last agreed ones and tries again); or where all losses have been bad for a while.
        Before that, parameters that give none but bad losses are not saved either: they may be finite, and out of all bounds.

        Raises:
            TrainingDiverged: on all workers alike.
        """
        optimizer = self.optimizer
        refusals = optimizer.engine.refusals
        mine = (not optimizer.params_finite(), not refusals.agreed_finite(), refusals.lost_parameters)
        flags = (*mine, self._bad_losses > 0, self._bad_losses >= _BAD_LOSSES)
        byte = sum(1 << bit for bit, flag in enumerate(flags) if optimizer.shards.any(flag))
        told = self.link.link.all_gather(Payload.of_bytes(bytes([byte]), purpose="finite", fixed=True))
        said = [p.to_bytes()[0] for p in told]
        bad, agreed, lost, losses, long = ([bool(byte & 1 << bit) for byte in said] for bit in range(len(flags)))
        workers = f"all {self.link.size} workers" if self.link.size > 1 else "the worker"
        if any(agreed):
            ranks = ", ".join(f"rank {rank}" for rank, flag in enumerate(agreed) if flag)
            raise self._diverged(f"the parameters to go on from hold NaN or Inf on {ranks}", since=self.step)
        if all(a or b for a, b in zip(bad, lost, strict=True)) and (self.link.size > 1 or last):
            raise self._diverged(f"the parameters of {workers} hold NaN or Inf", since=self.step)
        if all(long):
            what = f"the losses of {workers} have been NaN or Inf for {_BAD_LOSSES} steps or more"
            raise self._diverged(what, since=self.step + 1 - self._bad_losses)
        if any(bad) and not self._save_waits:
            ranks = ", ".join(f"rank {rank}" for rank, flag in enumerate(bad) if flag)
            log.warning(
                "step %d: NaN or Inf in the parameters of %s, nothing is saved until they are finite again", self.step, ranks
            )
        self._save_waits = any(bad)
        return not any(bad) and (last or not all(losses))

    def evaluate(self) -> dict[str, float]:
        """Figures of the shared model, computed by worker 0 and told to all; not metered.

        `drift` is NaN where a worker's parameters are not finite, and it has no agreed ones to be compared instead.
        """
        figures: dict[str, float] = {}
        if self.link.rank == 0:
            with self.optimizer.shared_model(self.model):
                figures = self.task.evaluate(self.model)
        try:
            figures["drift"] = self.optimizer.drift(self.link.link)
            if figures["drift"] > 0:  # there is no shared model: worker 0's was evaluated, and here is the mean of all
                with self.optimizer.shared_model(self.model, mean_over=self.link.link):
                    if self.link.rank == 0:
                        figures |= {f"mean_{k}": v for k, v in self.task.evaluate(self.model).items()}
        except NonFiniteRound:  # on all workers alike
            figures["drift"] = math.nan
        return tell_all(self.link.link, figures, float)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; called by all workers after the same step."""
        extra = {**self.link.meter.state_dict(), "seconds": self.seconds, "handshake": float(self.optimizer.handshake_done)}
        checkpoint.save(folder, self.model, self.optimizer, self.link.link, extra=extra)

    def _save_or_warn(self, folder: Path) -> None:
        """Save; where that fails, on all workers alike, go on training: there may be room again for the next one."""
        try:
            self.save(folder)
            self.unsaved = ""
        except CheckpointError as error:
            log.warning("%s; training goes on", error)
            self.unsaved = str(error)

    def resume(self, folder: Path) -> list[str]:
        """Go on from the newest checkpoint in `folder`, if there is one; says what was taken over."""
        saved = checkpoint.finished(folder)
        if not saved:
            return ["no checkpoint yet: starting from step 0"]
        notes = []
        while True:  # a damaged one is passed over for the one before it
            path = saved.pop()
            try:
                resumed = checkpoint.load(path, self.model, self.optimizer, self.link.link)
                break
            except CheckpointError as error:
                if not saved:
                    raise
                notes.append(str(error))
        if resumed.step >= self.config.steps:
            raise ConfigError(f"{folder.parent} is finished: it has all {resumed.step} steps; give a larger --steps to go on")
        self.step = resumed.step
        if resumed.extra:
            self.seconds = resumed.extra.pop("seconds")
            again = bool(resumed.extra.pop("handshake"))
            if (site := self.link.two_level) is not None and not site.sends:  # the totals are of the member that sends
                resumed.extra |= {"sent": 0.0, "received": 0.0}
            self.link.meter.load_state_dict(resumed.extra, handshake_repeats=again)
        return [*notes, f"resumed from step {resumed.step}", *resumed.notes]

    def _progress(self, loss: float, validation: dict[str, float] | None = None) -> Progress:
        totals = self.link.meter.totals
        seconds = self.seconds + (self.link.now() - self._before if self._before >= 0 else 0.0)
        items = self.step * self.task.batch_items * self.link.data_size
        return Progress.of(self.step, loss, seconds, items, totals, validation)

    def _diverged(self, what: str, *, since: int) -> TrainingDiverged:
        return self.optimizer.engine.refusals.training_diverged(what, since=since)

    def _start_clock(self) -> None:
        self._before = self.link.now()
        if self.optimizer.pace is not None:
            self.optimizer.pace.restart_clock()

    def _stop_clock(self) -> None:
        self.seconds += self.link.now() - self._before
        self._before = -1.0


def in_step(optimizer: Algorithm | WarmStart) -> bool:
    """Whether all workers have taken the same number of steps now, as the counter has it."""
    return optimizer.pace is None or optimizer.pace.in_step(optimizer.steps)


def _passed(period: int, before: int, now: int) -> bool:
    """Whether a multiple of the period lies after `before`, up to `now`."""
    return bool(period) and now // period > before // period
