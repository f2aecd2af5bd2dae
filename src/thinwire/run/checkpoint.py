"""Checkpoints on torch.distributed.checkpoint: replicated state once, each worker's own state under `worker{r}/`.

Stock checkpointing takes tensors of one name for duplicates and keeps one of them, so that the momenta of different workers
would be silently mixed. Here the algorithm's declaration decides: what is bit-equal on all workers is written once under
`replicated/`, everything else under the name of its worker. Slots that live in the domain of a codec are plain tensors on every
process, so where a worker is sharded they also have the name of their shard: `momentum@1of2`.

A checkpoint is written aside and then renamed, so that a kill at any moment leaves the last good one:

    run/checkpoints/step-00000040/     finished: thinwire.json and the files of torch.distributed.checkpoint
    run/checkpoints/.writing-.../      being written, or left by a kill: ignored, and removed by the next save

A step that is saved twice (by a run that went back to an older checkpoint) becomes step-00000040.1 before the first is removed.

Loading reads everything into buffers of its own and checks it before anything of the model or the optimizer is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from thinwire.algorithm import Algorithm
from thinwire.errors import CheckpointError
from thinwire.links.base import Link
from thinwire.links.mesh import shard_of
from thinwire.links.shards import reshard

FORMAT = 1
_FINISHED = re.compile(r"step-(\d+)(?:\.(\d+))?")
_DESCRIPTION = "thinwire.json"


@dataclass
class Resumed:
    """What a checkpoint gave.

    Attributes:
        step: the step after which it was written.
        extra: the numbers that were saved with it for this worker, for instance the meter's totals.
        notes: what could not be taken over and was re-initialised, one sentence each; empty for the same world.
    """

    step: int
    extra: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def finished(folder: Path) -> list[Path]:
    """All finished checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(m[1]), int(m[2] or 0), p) for p in folder.iterdir() if (m := _FINISHED.fullmatch(p.name))]
    return [p for *_, p in sorted(named) if (p / _DESCRIPTION).is_file()]


def step_of(path: Path) -> int:
    """The step of a finished checkpoint, from its name."""
    match = _FINISHED.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Algorithm,
    link: Link,
    *,
    extra: Mapping[str, float] | None = None,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint of all workers; called by all of them after the same step.

    Args:
        folder: where checkpoints live; shared by all workers.
        model: its parameters and buffers are saved.
        optimizer: all of its state is saved, and the inner optimizer's.
        link: tells which worker this is.
        extra: numbers of this worker to keep with it.
        keep: how many finished checkpoints to leave; older ones are removed.
        group: all processes of all workers; None for every process of the job.

    Returns:
        The finished checkpoint's folder.
    """
    reshard(model)
    name = f"step-{optimizer.steps:08d}"
    aside = folder / f".writing-{name}"
    state = _flat_state(model, optimizer, link, extra or {}, _number(group))

    def prepare() -> None:
        for left in folder.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)

    def write() -> None:
        with _quiet():
            dcp.save(state, checkpoint_id=aside, process_group=group, no_dist=not dist.is_initialized())

    def finish() -> None:
        _write_description(aside / _DESCRIPTION, optimizer, link)
        target = _free_name(folder, name)
        _publish(aside, target)
        _remove_old(folder, target, keep)

    first = _is_first(group)
    for work in (prepare if first else None, write, finish if first else None):
        _together(group, work, f"the checkpoint of step {optimizer.steps}")
    return finished(folder)[-1]


def load(path: Path, model: nn.Module, optimizer: Algorithm, link: Link, *, group: dist.ProcessGroup | None = None) -> Resumed:
    """Take over a checkpoint; called by all workers.

    With the number of workers that wrote it, training goes on bit for bit. With another number, replicated state is taken
    over, all workers start from the last agreed parameters, and per-worker state is re-initialised and listed in `notes`. With
    another number of shards per worker, only slots in the domain of a codec are: its blocks end where shards do.

    Args:
        path: a finished checkpoint, as `finished(folder)` lists them.
        model: as it was built for the saved run.
        optimizer: of the same class, around the same parameters.
        link: tells which worker this is.
        group: all processes of all workers; None for every process of the job.
    """
    reshard(model)
    description = _read_description(path, optimizer)
    same_world = description["workers"] == link.size
    if not same_world and 0 in description["groups"][0].get("sick", []) and optimizer.newcomer_takes("param"):
        raise CheckpointError(
            f"the first worker's numbers were bad when {path} was written, so others cannot start from it: resume with the "
            f"{description['workers']} workers that wrote it, which heal it, or from another checkpoint"
        )
    stored = _read_metadata(path)
    names = _parameter_names(model, optimizer)
    parameters = dict(model.named_parameters())
    # Another world takes what it can from the first worker: buffers such as BatchNorm's statistics, and the meter.
    wanted = ("replicated/", f"worker{link.rank}/") if same_world else ("replicated/", "worker0/")
    coded = _coded_names(optimizer)
    state: dict[str, Any] = {}
    plain: dict[str, str] = {}  # key in the checkpoint -> without worker and shard
    elsewhere: set[str] = set()  # coded slots of a worker that was sharded in another way
    for key, kind in stored.items():
        if not key.startswith(wanted) or not isinstance(kind, TensorStorageMetadata):
            continue
        if not same_world and not _taken_from_first(key, optimizer):
            continue
        name, slot, written = _coded_slot(key, coded)
        if slot and written != coded[slot]:
            elsewhere.add(name)
            continue
        state[key] = torch.empty(kind.size, dtype=kind.properties.dtype) if slot else _buffer_for(key, kind, parameters)
        plain[key] = name
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=path, process_group=group, no_dist=not dist.is_initialized())
    except (OSError, CheckpointException) as cause:
        raise CheckpointError(f"{path} is damaged: {_gist(cause)}") from cause
    parts = {plain[key]: value for key, value in state.items()}
    if same_world:
        notes = _fill_for_other_shards(parts, elsewhere, names, optimizer)
    else:
        notes = _fill_for_another_world(parts, parameters, names, optimizer, description["workers"])
    _apply(parts, description, model, optimizer, names)
    if notes:
        optimizer.begin_anew()
    if not same_world:
        optimizer._set_counter("thinwire_synced", optimizer.steps)
    elif f"rng/{_number(group)}" in parts:
        torch.set_rng_state(parts[f"rng/{_number(group)}"])
    extra = {k.removeprefix("extra/"): float(v) for k, v in parts.items() if k.startswith("extra/")}
    return Resumed(step=description["step"], extra=extra, notes=notes)


def _taken_from_first(key: str, optimizer: Algorithm) -> bool:
    """Whether a worker of another world takes this over: what is replicated, and of the first worker what a newcomer may."""
    owner, section, *_ = key.split("/")
    kind = key.rpartition("/")[2] if section == "state" else section
    return owner == "replicated" or section in ("buffer", "extra") or optimizer.newcomer_takes(kind)


# --- Layout --------------------------------------------------------------------------------------------------------------


def _flat_state(
    model: nn.Module, optimizer: Algorithm, link: Link, extra: Mapping[str, float], process: int
) -> dict[str, Tensor]:
    """Every tensor under its place in the checkpoint."""

    def place(kind: str) -> str:
        return "replicated/" if kind in optimizer.replicated else f"worker{link.rank}/"

    own = f"worker{link.rank}/"
    trained = {id(p) for p in optimizer._active}  # all others are frozen, and so the same on all workers
    state = {
        f"{place('param') if id(p) in trained else 'replicated/'}param/{name}": p.detach()
        for name, p in model.named_parameters()
    }
    state |= {f"{own}buffer/{name}": b for name, b in model.named_buffers() if name in model.state_dict()}
    state |= {f"{own}extra/{name}": torch.tensor(float(value), dtype=torch.float64) for name, value in extra.items()}
    state[f"{own}rng/{process}"] = torch.get_rng_state()
    saved, coded = optimizer.state_dict()["state"], _coded_names(optimizer)
    for index, name in _parameter_names(model, optimizer).items():
        entries = saved.get(index, {})
        ready = bool(entries.get("inner_ready", True))
        for key, value in entries.items():
            kind = "inner" if key.startswith("inner") else key
            if value is None or (key.startswith("inner.") and not ready):
                continue
            state[f"{place(kind)}state/{name}/{coded.get(key, key)}"] = _as_tensor(value, key)
    return state


def _coded_names(optimizer: Algorithm) -> dict[str, str]:
    """The slots in the domain of the codec, and their names in the checkpoint.

    A shard's slot is no part of a whole: the codec's blocks begin anew on every shard. Without a number of their own,
    torch.distributed.checkpoint would take the slots of a worker's shards for copies of one tensor, and keep one.
    """
    number, shards = shard_of(optimizer._active)
    mark = f"@{number}of{shards}" if shards > 1 else ""
    return {slot: slot + mark for slot, start in optimizer._slots.items() if start == "coded"}


def _coded_slot(key: str, coded: Mapping[str, str]) -> tuple[str, str, str]:
    """A key without worker and shard, which coded slot it holds ("" for none), and how that is written in the key."""
    name = key.partition("/")[2]
    before, _, written = name.rpartition("/")
    slot = written.partition("@")[0]
    if not name.startswith("state/") or slot not in coded:
        return name, "", ""
    return f"{before}/{slot}", slot, written


def _as_tensor(value: object, key: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, int | float):
        return torch.tensor(value, dtype=torch.float64)
    raise CheckpointError(f"optimizer state {key!r} is a {type(value).__name__}: only tensors and numbers can be saved")


def _parameter_names(model: nn.Module, optimizer: Algorithm) -> dict[int, str]:
    """Number in the optimizer's state dict -> name in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    everyone = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [i for i, p in enumerate(everyone) if id(p) not in names]
    if strangers:
        raise CheckpointError(f"the optimizer's tensors {strangers} are not parameters of this model")
    return {i: names[id(p)] for i, p in enumerate(everyone)}


def _buffer_for(key: str, kind: TensorStorageMetadata, parameters: Mapping[str, Tensor]) -> Tensor:
    """An empty tensor to read into: laid out like its parameter where it has the parameter's shape."""
    section, _, rest = key.partition("/")[2].partition("/")
    name = rest.rpartition("/")[0] if section == "state" else rest
    like = parameters.get(name)
    if section == "param" and (like is None or like.shape != kind.size):
        have = f"has shape {tuple(like.shape)} here" if like is not None else "does not exist here"
        raise CheckpointError(f"the checkpoint's parameter {name!r} of shape {tuple(kind.size)} {have}")
    if like is not None and like.shape == kind.size and section in ("param", "state"):
        return torch.empty_like(like.detach(), dtype=kind.properties.dtype)
    return torch.empty(kind.size, dtype=kind.properties.dtype)


def _fill_for_other_shards(
    parts: dict[str, Tensor], elsewhere: set[str], names: Mapping[int, str], optimizer: Algorithm
) -> list[str]:
    """Begin anew with the coded slots of a worker that was sharded in another way; says which."""
    fresh, missing = optimizer.state_dict()["state"], elsewhere - parts.keys()
    lost = set()
    for index, name in names.items():
        for key, value in fresh.get(index, {}).items():
            if f"state/{name}/{key}" in missing:
                parts[f"state/{name}/{key}"] = torch.zeros_like(value)
                lost.add(key)
    return [f"re-initialised, since workers were sharded in another way: {', '.join(sorted(lost))}"] if lost else []


def _fill_for_another_world(
    parts: dict[str, Tensor],
    parameters: Mapping[str, Tensor],
    names: Mapping[int, str],
    optimizer: Algorithm,
    workers: int,
) -> list[str]:
    """Complete what replicated state alone does not hold; says what was re-initialised."""
    notes = []
    if optimizer.newcomer_takes("param"):
        notes.append("all workers start from the parameters of the first, and from its averaged states")
    elif "param" not in optimizer.replicated:
        if "anchor" not in optimizer.replicated:
            raise CheckpointError(f"{type(optimizer).__name__} needs the {workers} workers that wrote it: no shared parameters")
        for name, p in parameters.items():
            if f"param/{name}" not in parts:  # frozen parameters are there already
                parts[f"param/{name}"] = parts.get(f"state/{name}/anchor", p.detach())
        notes.append(f"all workers start from the parameters that the {workers} workers agreed on last")
    fresh = optimizer.state_dict()["state"]
    lost = set()
    for index, name in names.items():
        for key, value in fresh.get(index, {}).items():
            if not key.startswith("inner") and f"state/{name}/{key}" not in parts:
                parts[f"state/{name}/{key}"] = torch.zeros_like(value)
                lost.add(key)
    if not optimizer.newcomer_takes("inner") and "inner" not in optimizer.replicated and hasattr(optimizer, "inner"):
        lost.add("the inner optimizer's state")
    if any(key.startswith("buffer/") for key in parts):
        notes.append("buffers such as BatchNorm's statistics are those of the first worker")
    lost -= {"withdrew"}  # of no use without the round it speaks of
    if lost:
        notes.append(f"re-initialised, since it was each worker's own: {', '.join(sorted(lost))}")
    return notes


def _apply(
    parts: Mapping[str, Tensor],
    description: Mapping[str, Any],
    model: nn.Module,
    optimizer: Algorithm,
    names: Mapping[int, str],
) -> None:
    """Copy what was read into model and optimizer; all checks come first."""
    missing = [name for name, _ in model.named_parameters() if f"param/{name}" not in parts]
    if missing:
        raise CheckpointError(f"the checkpoint has no parameter {missing[0]!r} ({len(missing)} missing in all)")
    state: dict[int, dict[str, Tensor]] = {index: {} for index in names}
    for index, name in names.items():
        prefix = f"state/{name}/"
        state[index] = {
            k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix) and "/" not in k[len(prefix) :]
        }
    groups = [
        {**_restore_types(saved, group), "params": saved["params"]}
        for saved, group in zip(description["groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(parts[f"param/{name}"])
        for name, b in model.named_buffers():
            if f"buffer/{name}" in parts:
                b.copy_(parts[f"buffer/{name}"])


# --- The description file --------------------------------------------------------------------------------------------------


def _write_description(path: Path, optimizer: Algorithm, link: Link) -> None:
    groups = optimizer.state_dict()["param_groups"]
    description = {
        "format": FORMAT,
        "step": optimizer.steps,
        "workers": link.size,
        "algorithm": type(optimizer).__name__,
        "inner": optimizer.settings.get("inner"),
        "groups": [{k: v.item() if isinstance(v, Tensor) else v for k, v in g.items()} for g in groups],
    }
    with path.open("w") as file:
        json.dump(description, file, indent=1, default=repr)
        file.flush()
        os.fsync(file.fileno())


def _read_description(path: Path, optimizer: Algorithm) -> dict[str, Any]:
    try:
        description = json.loads((path / _DESCRIPTION).read_text())
    except (OSError, ValueError) as cause:
        raise CheckpointError(f"{path} is not a finished thinwire checkpoint: {cause}") from cause
    if description.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {description.get('format')!r}, this version reads {FORMAT}")
    if description["algorithm"] != type(optimizer).__name__:
        raise CheckpointError(f"{path} was written by {description['algorithm']}, not by {type(optimizer).__name__}")
    inner = optimizer.settings.get("inner")
    if description["inner"] != inner:
        raise CheckpointError(f"{path} was written with the inner optimizer {description['inner']}, not with {inner}")
    if len(description["groups"]) != len(optimizer.param_groups):
        groups = len(description["groups"])
        raise CheckpointError(f"{path} has {groups} parameter groups, this optimizer has {len(optimizer.param_groups)}")
    return description


def _restore_types(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no tuples and no tensors: give each setting the type that it has in the live optimizer."""
    restored = {}
    for key, value in saved.items():
        live = group.get(key)
        if isinstance(live, tuple):
            value = tuple(value)
        elif isinstance(live, Tensor):
            value = torch.full_like(live, value)
        restored[key] = value
    return restored


# --- Files and processes -----------------------------------------------------------------------------------------------


def _publish(aside: Path, target: Path) -> None:
    """Make a written checkpoint the finished one: every byte is on disk before the name changes."""
    for file in aside.iterdir():
        _sync(file)
    _sync(aside)
    aside.rename(target)
    _sync(target.parent)


def _free_name(folder: Path, name: str) -> Path:
    """A name for a new checkpoint; another one where the same step was saved before."""
    number = max([-1, *(int(m[2] or 0) for p in folder.glob(f"{name}*") if (m := _FINISHED.fullmatch(p.name)))]) + 1
    return folder / (f"{name}.{number}" if number else name)


def _remove_old(folder: Path, target: Path, keep: int) -> None:
    """Leave `target` and what is newest before it, each step once; later steps are of a run that was given up."""
    everything = finished(folder)
    so_far = everything[: everything.index(target) + 1]
    newest = {step_of(path): path for path in so_far}
    kept = set(list(newest.values())[-max(1, keep) :])
    for path in everything:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _read_metadata(path: Path) -> Mapping[str, Any]:
    try:
        return dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as cause:  # a pickle of torch's that was cut short may raise anything
        raise CheckpointError(f"{path} is damaged: {_gist(cause)}") from cause


def _gist(cause: BaseException) -> str:
    """What went wrong, on one line; torch wraps the errors of all ranks into one."""
    if isinstance(cause, CheckpointException) and cause.failures:
        rank, (error, _) = next(iter(cause.failures.items()))
        return f"rank {rank}: {_gist(error)}"
    return " ".join(f"{type(cause).__name__}: {cause}".split())[:200]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _number(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _together(group: dist.ProcessGroup | None, work: Callable[[], None] | None, what: str) -> None:
    """Do a part of the work and wait for all processes; a problem of any of them is raised on all."""
    problem = ""
    try:
        if work is not None:
            work()
    except (OSError, CheckpointException) as cause:
        problem = f"could not write {what}: {_gist(cause)}; older ones are untouched"
    problems: list[str | None] = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for told in filter(None, problems):
        raise CheckpointError(told)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch's checkpointing warns of what is meant here, such as saving without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
