"""Lightning Fabric: its processes, precision and samplers, and the exchange left to the optimizer.

    fabric = L.Fabric(strategy=ThinwireFabric(), devices=2)
    fabric.launch()
    opt = thinwire.DiLoCo(inner, thinwire.connect(), H=32)
    model, opt = fabric.setup(model, opt)

With `strategy="ddp"` `fabric.setup(model, opt)` wraps the model in torch's DDP, which averages every gradient at every step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.integrations.optional import require
from thinwire.integrations.state import is_thinwire, thinwire_optimizer

_DDPStrategy: Any = require("lightning.fabric.strategies", extra="lightning").DDPStrategy
_BackwardSyncControl: Any = require("lightning.fabric.strategies.strategy", extra="lightning")._BackwardSyncControl


class ThinwireFabric(_DDPStrategy):
    """The processes and samplers of "ddp" without its gradient sync.

    What `fabric.setup` returns behaves like the optimizer: `opt.finish()`, `opt.shared_model()` and `thinwire.checkpoint` work
    with it. Of a model, give `thinwire.checkpoint` the one inside, `model.module`.

    Args:
        options: of Fabric's `DDPStrategy`, such as `timeout` and `process_group_backend`, but none of torch's DDP.
    """

    def __init__(self, **options: Any):
        """Refuse what would be for the wrapper that is not there."""
        super().__init__(**options)
        if self._ddp_kwargs:
            raise ConfigError(
                f"{next(iter(self._ddp_kwargs))} is a setting of torch's DistributedDataParallel, which {type(self).__name__} "
                "does without: leave it out"
            )
        self._backward_sync_control = _NothingToSync()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Leave the model as it is."""
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer that would leave workers without exchange."""
        if not is_thinwire(optimizer):
            raise ConfigError(
                f"{type(self).__name__} averages no gradients, so workers would train models of their own with "
                f"{type(optimizer).__name__}: give fabric.setup a thinwire optimizer, such as "
                "thinwire.DiLoCo(inner, thinwire.connect())"
            )
        return thinwire_optimizer(optimizer)

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Refuse to let fabric.save write worker 0's optimizer for all."""
        if any(is_thinwire(value) and value.link.size > 1 for value in state.values()):
            raise ConfigError(
                "fabric.save writes the optimizer of worker 0 only: use thinwire.checkpoint.save(folder, model.module, opt, "
                "link) on all workers, which saves what each of them has of its own"
            )
        super().save_checkpoint(path, state, *args, **kwargs)


class _NothingToSync(_BackwardSyncControl):
    """For fabric.no_backward_sync: a backward pass never talks to other workers."""

    def no_backward_sync(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()
