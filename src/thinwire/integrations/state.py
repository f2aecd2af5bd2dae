"""What the adapters have in common: the start, the state of every worker, and what crossed the wire."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn
from torch.optim import Optimizer

from thinwire import checkpoint
from thinwire.checkpoint import Resumed
from thinwire.checkpoint.processes import Processes
from thinwire.core.gates import handshake
from thinwire.core.hashing import hash_tensors
from thinwire.core.optimizer import Algorithm
from thinwire.core.replicas import compare_replicas, copy_from
from thinwire.core.state_layout import state_layout
from thinwire.errors import CheckpointError, ConfigError, Diverged
from thinwire.links import Link
from thinwire.network import show_bytes
from thinwire.payload import describe
from thinwire.sharding.shards import local

log = logging.getLogger("thinwire")

_FOLDER, _SCHEDULER = "thinwire", "scheduler.json"


def unwrapped(optimizer: object) -> object:
    """The optimizer in accelerate's wrapper; one without a wrapper as it is."""
    return getattr(optimizer, "optimizer", optimizer)


def is_thinwire(optimizer: object) -> TypeGuard[Any]:
    """Whether this is a thinwire optimizer: an `Algorithm`, or something that stands for one."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "shared_model")


def thinwire_optimizer(optimizer: object) -> Algorithm:
    """The thinwire optimizer in what a framework has made of it.

    Raises:
        ConfigError: where there is none, or where its workers take different numbers of steps.
    """
    inner: Any = unwrapped(optimizer)
    if not is_thinwire(inner):
        raise ConfigError(f"needs a thinwire optimizer such as thinwire.DiLoCo(inner, link), got {type(inner).__name__}")
    if inner.pace is not None:
        raise ConfigError("pace='speed' is for loops of your own: a framework counts the same steps on all workers")
    return inner


def start_alike(link: Link, model: nn.Module) -> None:
    """Give all workers worker 0's weights where they differ, as DDP does.

    Call it before the optimizer is made. What is trained and what is not are compared by hash, and sent, apart from each other:
    where nothing differs, 16 bytes per worker cross the wire.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    rest = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    for what, part in {"trained": trained, "frozen": rest}.items():
        tensors = [local(t.detach()) for t in part]
        try:
            compare_replicas(link, {f"{what} weights": hash_tensors(tensors)}, round=0)
        except Diverged:
            size = show_bytes(sum(t.numel() * t.element_size() for t in tensors))
            log.warning("the %s weights differ at the start: worker 0's are sent, %s; the same seed saves that", what, size)
            handshake(link, {"tensor": [describe(t) for t in tensors]})
            copy_from(link, tensors, 0)


def save_state(folder: Path | str, model: nn.Module, optimizer: Algorithm, scheduler: Any = None) -> Path:
    """Write what every worker has of its own, and the scheduler's state once; called by all workers after the same step.

    Args:
        folder: of this one checkpoint, shared by all workers; what it held before is replaced.
        model: without the framework's wrapper.
        optimizer: the thinwire optimizer.
        scheduler: whose state is written as JSON.

    Raises:
        CheckpointError: on all workers, where it could not be written.
    """
    folder = Path(folder)
    processes = _processes(optimizer)

    def prepare() -> str:
        if processes.first:
            shutil.rmtree(folder / _FOLDER, ignore_errors=True)  # of an earlier run that had the same folder
            folder.mkdir(parents=True, exist_ok=True)
            if scheduler is not None:
                (folder / _SCHEDULER).write_text(_as_json(scheduler))
        return ""

    processes.together(prepare, problem=f"could not write into {folder}: {{}}")
    return checkpoint.save(folder / _FOLDER, model, optimizer, optimizer.link, extra=optimizer.meter.state_dict(), keep=1)


def load_state(folder: Path | str, model: nn.Module, optimizer: Algorithm, scheduler: Any = None) -> Resumed:
    """Take over what `save_state` wrote; called by all workers.

    Raises:
        CheckpointError: on all workers, where there is nothing that fits, or it is damaged; a scheduler's state too.
    """
    folder = Path(folder)
    of_scheduler: list[Any] = []

    def find() -> str:
        found = checkpoint.finished(folder / _FOLDER)
        if not found:
            raise CheckpointError(
                f"{folder} holds no state of thinwire workers: it was not written by this adapter, or is not on a disk that "
                "all workers share. To begin with its weights only, load them into the model and start without a checkpoint"
            )
        if scheduler is not None:
            of_scheduler.append(json.loads((folder / _SCHEDULER).read_text()))
        return found[-1].name

    name = _processes(optimizer).together(find, problem=f"could not read {folder}: {{}}")[0]
    resumed = checkpoint.load(folder / _FOLDER / name, model, optimizer, optimizer.link)
    for note in resumed.notes:
        log.warning("%s: %s", folder, note)
    optimizer.meter.load_state_dict(resumed.extra, handshake_repeats=True)
    if scheduler is not None:
        scheduler.load_state_dict(of_scheduler[0])
    return resumed


def wire_stats(optimizer: Algorithm) -> dict[str, float]:
    """What this worker has sent, in how many rounds, and how long it waited."""
    totals = optimizer.meter.totals  # not stats(), after which norms are measured in every round
    return {"wire_sent": totals.sent, "wire_rounds": totals.rounds, "wire_waiting": round(totals.waiting, 3)}


def _processes(optimizer: Algorithm) -> Processes:
    return Processes(optimizer.link, state_layout(optimizer).trained)


def _as_json(scheduler: Any) -> str:
    try:
        return json.dumps(scheduler.state_dict())
    except TypeError as error:
        raise CheckpointError(f"the state of {type(scheduler).__name__} cannot be written as JSON: {error}") from error
