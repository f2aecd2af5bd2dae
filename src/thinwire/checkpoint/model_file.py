"""Export: the shared model alone, as one safetensors file that any program can read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from thinwire.checkpoint.files import sync
from thinwire.checkpoint.names import plain_names
from thinwire.core.optimizer import Algorithm
from thinwire.core.phases import Phases
from thinwire.errors import CheckpointError
from thinwire.sharding.mesh import shard_of
from thinwire.sharding.shards import reshard, whole


def export(model: nn.Module, optimizer: Algorithm | Phases, path: str | Path, *, mean: bool = False) -> Path:
    """Write the model that all workers agree on to a safetensors file; call it on all workers.

    Worker 0 writes, and the others do nothing and wait for nothing, unless `mean` is asked for. The file is written aside and
    renamed, so that a reader finds a whole one. It holds the entries of `model.state_dict()` under the names of the bare model,
    without the prefixes of torch.compile, DDP and activation checkpointing. Of weights that are tied the first name is written;
    the metadata tell the others, as `safetensors.torch.save_model` does, so that its `load_model` reads the file.

    Args:
        model: that is trained.
        optimizer: of it.
        path: the file, such as "model.safetensors".
        mean: write the mean of all workers' models, for methods that keep no agreed one between rounds: an exchange of all.

    Raises:
        CheckpointError: where it could not be written; a file that was there before is as it was.
    """
    path = Path(path)
    two_level = optimizer.link.two_level
    first = optimizer.link.rank == 0 and (two_level is None or two_level.sends)
    if not first and not mean:
        return path
    reshard(model)
    with optimizer.shared_model(model, mean_over=optimizer.link if mean else None):
        if first:
            entries = {name: whole(t) for name, t in plain_names(model.state_dict().items()).items() if isinstance(t, Tensor)}
            if shard_of(list(model.parameters()))[0] == 0:
                _write(path, entries)
    return path


def _write(path: Path, entries: dict[str, Tensor]) -> None:
    names: dict[tuple[object, ...], str] = {}
    kept: dict[str, Tensor] = {}
    about = {"format": "pt"}
    for name, t in entries.items():
        place = (t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) if t.numel() else (name,)
        first = names.setdefault(place, name)
        if first == name:
            kept[name] = t.to("cpu", copy=True, memory_format=torch.contiguous_format)
        else:
            about[name] = first
    aside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(kept, aside, metadata=about)
        sync(aside)
        aside.replace(path)
    except Exception as cause:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"could not write {path}: {type(cause).__name__}: {cause}") from cause
    sync(path.parent)
