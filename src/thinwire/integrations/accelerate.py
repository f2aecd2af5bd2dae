"""accelerate: everything is prepared as usual, but no gradient is averaged behind the optimizer's back.

    model, opt, loader, scheduler = prepare(accelerator, model, opt, loader, scheduler)   # instead of accelerator.prepare

`accelerator.prepare` wraps the model in DistributedDataParallel, which sends every gradient at every step, and steps a
scheduler once per process. `accelerator.save_state` writes the optimizer of worker 0 only: use `save_state` and `load_state`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from thinwire.checkpoint import Resumed
from thinwire.errors import ConfigError
from thinwire.integrations import state
from thinwire.integrations.optional import require

_scheduler = require("accelerate.scheduler", extra="accelerate")


def prepare(accelerator: Any, *objects: Any) -> Any:
    """Prepare a model, a thinwire optimizer, data loaders and schedulers as `accelerator.prepare` does, without DDP.

    Autocast, gradient accumulation, clipping and the sharding of data loaders stay accelerate's. A scheduler steps once
    per step.

    Args:
        accelerator: an `accelerate.Accelerator` without DeepSpeed or FSDP.
        objects: what `accelerator.prepare` takes, in any order.

    Returns:
        The same objects, prepared, in the same order.

    Raises:
        ConfigError: where accelerate is configured to share the model among processes, or the optimizer is not thinwire's.
    """
    own_gradients(accelerator)
    prepared = accelerator.prepare(*objects)
    for each in prepared if isinstance(prepared, tuple) else (prepared,):
        if isinstance(each, _scheduler.AcceleratedScheduler):
            each.split_batches = True  # else it steps once for each process
        elif hasattr(each, "param_groups"):
            state.thinwire_optimizer(each)
    return prepared


def save_state(accelerator: Any, folder: Path | str, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Path:
    """Write a checkpoint of all workers; called by all of them after the same step, instead of `accelerator.save_state`.

    It holds the model, the optimizer and torch's random state of every worker, and the scheduler's state. The position in the
    data is yours to keep: `accelerator.skip_first_batches`.

    Args:
        accelerator: as given to `prepare`.
        folder: of this one checkpoint, on a disk that all workers share; what it held before is replaced.
        model: as prepared.
        optimizer: as prepared.
        scheduler: as prepared, if there is one.
    """
    return state.save_state(folder, accelerator.unwrap_model(model), state.thinwire_optimizer(optimizer), scheduler)


def load_state(accelerator: Any, folder: Path | str, model: nn.Module, optimizer: Any, scheduler: Any = None) -> Resumed:
    """Take over a checkpoint of `save_state`; called by all workers, after `prepare`.

    With the number of workers that wrote it, training goes on bit for bit, also between two rounds.

    Args:
        accelerator: as given to `prepare`.
        folder: as given to `save_state`.
        model: as prepared.
        optimizer: as prepared.
        scheduler: as prepared, if there is one.
    """
    return state.load_state(folder, accelerator.unwrap_model(model), state.thinwire_optimizer(optimizer), scheduler)


def own_gradients(accelerator: Any) -> None:
    """Have this accelerator leave models without DDP, and let each worker read its own data.

    Raises:
        ConfigError: where it is configured to share the model among processes.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(
            f"accelerate is set up for {kind}, which averages gradients or shares the model among all processes: use it "
            "without, and for a model that is sharded inside of each worker see the example of FSDP2 with a mesh"
        )
    # In evaluation mode a model gets autocast and torch.compile, and no DDP.
    accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
    # By default worker 0 would read an iterable data set for all and send it to them.
    accelerator.dataloader_config.dispatch_batches = False


@contextlib.contextmanager
def own_values(accelerator: Any) -> Iterator[None]:
    """Within it, what is gathered or reduced with this accelerator is this worker's own: nothing is sent."""
    names = ("gather", "gather_for_metrics", "reduce")
    for name in names:
        setattr(accelerator, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)
