"""Lightning's Trainer: its processes, samplers, loggers and checkpoints, and the exchange left to the optimizer.

    trainer = L.Trainer(strategy=ThinwireStrategy(), devices=2, ...)    # and configure_optimizers returns a thinwire optimizer

`strategy="ddp"` would average every gradient at every step, save worker 0's optimizer for all, and validate weights that have
drifted apart. A checkpoint is Lightning's own file with the shared model, and a folder beside it with what each worker has of
its own, written by `thinwire.checkpoint`:

    last.ckpt                                        Lightning's: shared model, loops, schedulers, callbacks (a pickle)
    last.ckpt.thinwire/5f0c9a1e/step-00000012/       ours: JSON and safetensors of all workers
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import checkpoint as checkpoints
from thinwire.checkpoint.processes import Processes
from thinwire.core.optimizer import Algorithm
from thinwire.errors import CheckpointError, ConfigError
from thinwire.integrations.optional import require
from thinwire.integrations.state import is_thinwire, start_alike, thinwire_optimizer, wire_stats
from thinwire.links import Metered, connect

log = logging.getLogger("thinwire")

_pl: Any = require("lightning.pytorch", extra="lightning")
_Callback: Any = _pl.Callback
_DDPStrategy: Any = require("lightning.pytorch.strategies", extra="lightning").DDPStrategy
_SignalConnector: Any = require("lightning.pytorch.trainer.connectors.signal_connector", extra="lightning")._SignalConnector
_FITTING: Any = require("lightning.pytorch.trainer.states", extra="lightning").TrainerFn.FITTING

_KEY = "thinwire"  # in Lightning's file: which of the folders beside it belongs to it
_SAVED = re.compile(r"[0-9a-f]{8}/step-\d{1,15}")


class ThinwireStrategy(_DDPStrategy):
    """The processes and samplers of "ddp" without its gradient sync; adds a `Thinwire` callback where there is none.

    `configure_optimizers` returns one thinwire optimizer, made with `thinwire.connect()`, and any schedulers. All workers begin
    with the weights of worker 0, as with "ddp"; they are sent only where they differ.

    Args:
        options: of Lightning's `DDPStrategy`, such as `timeout` and `process_group_backend`, but none of torch's DDP.
    """

    def __init__(self, **options: Any):
        """Refuse what would be for the wrapper that is not there."""
        super().__init__(**options)
        hooks = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
        if unused := [*self._ddp_kwargs, *(name for name in hooks if options.get(name) is not None)]:
            raise ConfigError(
                f"{unused[0]} is a setting of torch's DistributedDataParallel, which {type(self).__name__} does without: "
                "leave it out"
            )
        self._shown = contextlib.ExitStack()  # holds the shared model while it is shown
        self._shows_shared = False
        self._weights_loaded = False  # for evaluation: what the file holds is wanted, not what training agreed on last
        self._loaded_from: Path | None = None
        self._random_state: Tensor | None = None

    @property
    def algorithm(self) -> Algorithm | None:
        """The thinwire optimizer; None before there is one."""
        return next((opt for opt in self.optimizers if is_thinwire(opt)), None)

    # --- Training ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Set up the model and its optimizer; nothing but the optimizer talks to other workers between two rounds."""
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm exchanges statistics in every forward pass: leave it out, and give the optimizer "
                "buffers=thinwire.running_statistics(model)"
            )
        if not any(isinstance(callback, Thinwire) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, Thinwire())
        if trainer.state.fn == _FITTING:
            self._weights_loaded = False
        # Lightning asks all workers at every step whether rank 0 has received a SIGTERM.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer._signal_connector = _OwnSignals(trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Leave the model as it is; all workers begin alike."""
        start_alike(connect(), self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Refuse optimizers that would leave workers without exchange."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or self.algorithm is None:
            found = ", ".join(type(opt).__name__ for opt in self.optimizers) or "none"
            raise ConfigError(
                f"configure_optimizers must return one thinwire optimizer, such as thinwire.DiLoCo(inner, thinwire.connect()), "
                f"got {found}: {type(self).__name__} averages no gradients, so workers would train models of their own"
            )
        thinwire_optimizer(self.algorithm)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Go on with the random numbers of the checkpoint; making an iterator over the data has used some."""
        super().on_train_batch_start(batch, batch_idx)
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
            self._random_state = None

    # --- The shared model --------------------------------------------------------------------------------------------------

    def show_shared(self) -> None:
        """Put the parameters that all workers agreed on last in the place of this worker's own, until `show_own`."""
        if self.algorithm is not None and not self._weights_loaded and not self._shows_shared:
            self._shown.enter_context(self.algorithm.shared_model())
            self._shows_shared = True

    def show_own(self) -> None:
        """Take the shared model away again, if it is there."""
        self._shown.close()
        self._shows_shared = False

    def on_validation_start(self) -> None:
        """Show the shared model."""
        self.show_shared()

    def on_validation_end(self) -> None:
        """Show this worker's own parameters again."""
        self.show_own()

    def on_test_start(self) -> None:
        """Show the shared model."""
        self.show_shared()

    def on_test_end(self) -> None:
        """Show this worker's own parameters again."""
        self.show_own()

    def on_predict_start(self) -> None:
        """Show the shared model."""
        self.show_shared()

    def on_predict_end(self) -> None:
        """Show this worker's own parameters again."""
        self.show_own()

    def on_exception(self, exception: BaseException) -> None:
        """Show this worker's own parameters again."""
        super().on_exception(exception)
        self.show_own()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The shared model: what is evaluated, and what a checkpoint holds."""
        if self.algorithm is None or self._weights_loaded or not self.is_global_zero:
            return super().lightning_module_state_dict()
        with self.algorithm.shared_model():
            state = super().lightning_module_state_dict()
            return {k: v.to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}

    # --- Checkpoints -------------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing of a thinwire optimizer: each worker's is saved beside Lightning's file."""
        return {} if is_thinwire(optimizer) else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Save what each worker has of its own, then Lightning's file, which names it; called on all workers."""
        if self.algorithm is None or "optimizer_states" not in checkpoint:  # weights only
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if "://" in str(filepath):
            raise ConfigError(f"workers save into a folder that all of them share on a file system, got {filepath}")
        shown = self._shows_shared
        self.show_own()
        saved = _save_workers(Path(filepath), self.lightning_module, self.algorithm)
        if shown:
            self.show_shared()
        checkpoint[_KEY] = f"{saved.parent.name}/{saved.name}"
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            for other in saved.parent.parent.iterdir():  # of a file of the same name that was just replaced
                if other != saved.parent:
                    shutil.rmtree(other, ignore_errors=True)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove Lightning's file and what is beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(Path(filepath)), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's file."""
        self._loaded_from = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the shared model."""
        super().load_model_state_dict(checkpoint, strict)
        self._weights_loaded = True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what each worker has of its own: parameters, optimizer state, buffers and random state."""
        opt, path = self.algorithm, self._loaded_from
        assert opt is not None and path is not None, "Lightning reads its file and makes the optimizer before"
        named = checkpoint.get(_KEY)
        if not isinstance(named, str) or not _SAVED.fullmatch(named):
            raise CheckpointError(
                f"{path} holds no state of thinwire's workers, so training cannot go on from it: it was saved with another "
                "strategy. Load its weights with load_from_checkpoint() and start a new run"
            )
        resumed = checkpoints.load(_beside(path) / named, self.lightning_module, opt, opt.link)
        for note in resumed.notes:
            log.warning("resumed from %s: %s", path, note)
        if isinstance(opt.link, Metered) and resumed.extra:
            opt.link.meter.load_state_dict(resumed.extra, handshake_repeats=True)
        self._random_state = torch.get_rng_state()


class Thinwire(_Callback):
    """Brings in the last local steps before the last validation and checkpoint, and logs what was sent.

    `ThinwireStrategy` adds one by itself. Logged at every step, of this worker: `wire_sent` (bytes), `wire_rounds` and
    `wire_waiting` (seconds), where the optimizer's link is `thinwire.Metered`.
    """

    def __init__(self) -> None:
        """Nothing is finished yet."""
        self._finished_after = -1  # steps

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Refuse another strategy."""
        if not isinstance(trainer.strategy, ThinwireStrategy):
            raise ConfigError(
                f"the Thinwire callback needs Trainer(strategy=ThinwireStrategy()), got {type(trainer.strategy).__name__}, "
                "which may average gradients at every step"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """After the last step bring in what is left; log."""
        last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        if 0 <= trainer.max_steps <= trainer.global_step or (last_epoch and trainer.is_last_batch):
            self._finish(trainer)
        if (opt := _strategy(trainer).algorithm) is not None:
            stats = wire_stats(opt)
            pl_module.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in stats.items()})

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Bring in what is left before the checkpoint of an epoch after which training is stopped."""
        if trainer.should_stop:
            self._finish(trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Bring in what is left."""
        self._finish(trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Bring in what is left before the validation for which training was stopped."""
        if trainer.state.fn == _FITTING and trainer.should_stop:
            self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        opt = _strategy(trainer).algorithm
        if opt is not None and opt.steps != self._finished_after:
            opt.finish()
            self._finished_after = opt.steps


class _OwnSignals(_SignalConnector):
    """Lightning's signals, but a worker that receives a SIGTERM stops by itself; the link tells the others."""

    def _sigterm_notifier_fn(self, signum: int, _: FrameType | None) -> None:
        launcher = self.trainer.strategy.launcher
        if not self.received_sigterm and launcher is not None:
            launcher.kill(signum)
        self.received_sigterm = True


def _strategy(trainer: Any) -> ThinwireStrategy:
    assert isinstance(trainer.strategy, ThinwireStrategy)
    return trainer.strategy


def _beside(path: Path) -> Path:
    """The folder that belongs to a checkpoint file of Lightning's, or to the one that it is a link to."""
    path = path.resolve()
    return path.with_name(f"{path.name}.thinwire")


def _save_workers(path: Path, module: nn.Module, opt: Algorithm) -> Path:
    """Save what each worker has of its own into a new folder beside worker 0's file."""

    def name() -> str:
        return f"{secrets.token_hex(4)} {path.name}"

    # A name may hold a metric, which differs between workers.
    told = Processes(opt.link, opt.params()).together(name, problem=f"could not save {path}: {{}}")[0]
    token, _, file = told.partition(" ")
    if not re.fullmatch(r"[0-9a-f]{8}", token) or Path(file).name != file:
        raise CheckpointError(f"rank 0 names no file to save: {told[:80]!r}")
    extra = opt.link.meter.state_dict() if isinstance(opt.link, Metered) else {}
    return checkpoints.save(_beside(path.with_name(file)) / token, module, opt, opt.link, extra=extra, keep=1)
