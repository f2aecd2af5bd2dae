"""transformers: a Trainer whose workers are joined by a thinwire optimizer, and a mixin for trl's trainers.

    trainer = ThinwireTrainer(model, args, train_dataset=data, algorithm=partial(thinwire.DiLoCo, H=32))

    class ThinwireSFTTrainer(ThinwireMixin, trl.SFTTrainer):
        pass

The Trainer itself would wrap the model in DistributedDataParallel, which sends every gradient at every step, save the optimizer
of worker 0 for all of them, and evaluate weights that have drifted apart. Here

* no gradient and no number crosses the wire between rounds; a log that is due waits for the next round, since HF gathers the
  loss then. What trl gathers for its metrics at every step is each worker's own instead;
* each worker evaluates its part of the data with the model that all workers agreed on last, and HF averages the losses;
  `save_model` and checkpoints hold that same model;
* checkpoints hold every worker's state beside it, and training resumes bit for bit, also between two rounds;
* the last steps are brought in before the last evaluation and the last checkpoint;
* the logs tell bytes sent, rounds and seconds of waiting: `wire_sent`, `wire_rounds`, `wire_waiting`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.core.optimizer import Algorithm
from thinwire.core.slots import overwrite
from thinwire.errors import ConfigError
from thinwire.integrations import state
from thinwire.integrations.accelerate import own_gradients, own_values
from thinwire.integrations.optional import require
from thinwire.links import Link, connect
from thinwire.links.metered import metered

_Trainer: Any = require("transformers", extra="transformers").Trainer
_Mixed: Any = object  # whatever trainer the mixin is mixed with


class ThinwireMixin(_Mixed):
    """Turns any class derived from `transformers.Trainer` into one whose workers are joined by a thinwire optimizer.

    Args:
        args: whatever the trainer takes.
        algorithm: makes the thinwire optimizer of the optimizer that HF has made from `args.optim`, with its learning rate
            and weight decay, and of the link; such as `functools.partial(thinwire.DiLoCo, H=32)`. Not needed where
            `optimizers` or `optimizer_cls_and_kwargs` give a thinwire optimizer.
        link: this worker's end of the wire; that of `thinwire.connect()` by default. Its bytes are counted.
        options: whatever the trainer takes.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: Callable[[Optimizer, Link], Algorithm] | None = None,
        link: Link | None = None,
        **options: Any,
    ):
        self._algorithm, self._link = algorithm, link
        self._log_due, self._rounds, self._finished_at, self._best_loaded = False, 0, -1, False
        super().__init__(*args, **options)

    @property
    def thinwire(self) -> Algorithm:
        """The thinwire optimizer, once training has begun."""
        return state.thinwire_optimizer(self.optimizer)

    def _made(self) -> bool:
        return state.is_thinwire(state.unwrapped(self.optimizer))

    # --- No traffic but ours ---------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, which then leaves the model without DDP."""
        for name in ("deepspeed", "fsdp", "parallelism_config"):
            if value := getattr(self.args, name, None):
                raise ConfigError(
                    f"{name}={value!r} shares the model among all processes, and this adapter trains one whole copy on each: "
                    f"leave {name} away, or use FSDP2 with a mesh in a loop of your own"
                )
        self.args.average_tokens_across_devices = False  # one round trip at every step
        super().create_accelerator_and_postprocess()
        own_gradients(self.accelerator)

    def compute_loss(self, model: nn.Module, *args: Any, **options: Any) -> Any:
        """The loss; what a trainer gathers for its training metrics stays this worker's own."""
        with own_values(self.accelerator) if model.training else contextlib.nullcontext():
            return super().compute_loss(model, *args, **options)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Make the optimizer that HF would make, and the thinwire optimizer of it."""
        if self._made():
            self._go_on_from_best()
            return self.optimizer
        link, _ = metered(self._link or connect())  # before the optimizer, so that the start is counted too
        state.start_alike(link, self.model)
        made = super().create_optimizer(model)
        if not state.is_thinwire(made):
            if self._algorithm is None:
                raise ConfigError(
                    f"{type(self).__name__} needs a thinwire optimizer: give it algorithm=partial(thinwire.DiLoCo, H=32)"
                )
            made = self._algorithm(made, link)
        self.optimizer = state.thinwire_optimizer(made)
        return self.optimizer

    # --- The shared model ------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Evaluate or predict with the model that all workers agreed on last."""
        with self._shared_model():
            return super().evaluation_loop(*args, **options)

    def _save(self, *args: Any, **options: Any) -> None:
        with self._shared_model():
            super()._save(*args, **options)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._best_loaded = True  # it is in the parameters, and not what the optimizer has as the last agreed one

    def _go_on_from_best(self) -> None:
        """Where training begins again after the best model was loaded, the workers agree on that one."""
        if self._best_loaded and (agreed := self.thinwire.agreed()) is not None:
            overwrite(agreed, self.thinwire.params())
        self._best_loaded = False

    def _shared_model(self) -> contextlib.AbstractContextManager[None]:
        return self.thinwire.shared_model() if self._made() and not self._best_loaded else contextlib.nullcontext()

    # --- Rounds, logs and the end ----------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        ends = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        if ends:
            self._finish()
        met, self._rounds = self.thinwire.rounds != self._rounds, self.thinwire.rounds
        self._log_due |= self.control.should_log
        self.control.should_log = self._log_due and (met or ends)
        self._log_due &= not self.control.should_log
        super()._maybe_log_save_evaluate(*args, **options)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._finish()  # where training was stopped after the last step had been logged
        return super()._finalize_training(*args, **options)

    def _finish(self) -> None:
        if self._finished_at != self.thinwire.steps:
            self.thinwire.finish()
            self._finished_at = self.thinwire.steps

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log, together with what crossed the wire."""
        wire = state.wire_stats(self.thinwire) if self._made() else {}
        super().log(logs | wire, *args, **options)

    # --- Checkpoints -----------------------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state.save_state(output_dir, self.model, self.thinwire, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            state.load_state(checkpoint, self.model, self.thinwire, self.lr_scheduler)
            self._rounds = self.thinwire.rounds


class ThinwireTrainer(ThinwireMixin, _Trainer):
    """`transformers.Trainer` whose workers are joined by a thinwire optimizer; see `ThinwireMixin`."""
