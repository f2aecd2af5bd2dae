"""Save and load: what all workers do together."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from thinwire.checkpoint.description import (
    Description,
    check_fits,
    describe,
    read_description,
    restored_groups,
    write_description,
)
from thinwire.checkpoint.files import (
    DESCRIPTION,
    TensorReader,
    describe_tensors,
    file_of,
    finished,
    free_name,
    pieces_for,
    publish,
    remove_old,
    sum_of,
    verify,
    write_sums,
    write_tensors,
)
from thinwire.checkpoint.layout import coded_names, coded_slot, flat_state, parameter_names, region_for, whole_region
from thinwire.checkpoint.names import buffers_of, parameters_of, unwrapped
from thinwire.checkpoint.processes import Processes
from thinwire.checkpoint.resize import (
    fill_for_another_route,
    fill_for_another_world,
    fill_for_other_shards,
    owed_of_all,
    taken_from_first,
)
from thinwire.core.buffers import check_statistics
from thinwire.core.optimizer import Algorithm
from thinwire.core.phases import Phases, at_work
from thinwire.core.slots import other_codec
from thinwire.core.state_layout import check_state, state_layout
from thinwire.errors import CheckpointError
from thinwire.links.base import Link
from thinwire.payload import all_finite
from thinwire.sharding.shards import local, region_of, reshard, with_local

log = logging.getLogger("thinwire")

_FINITE = "finite"

# The run that a model of this process is trained in: its first checkpoint gives it an id, a loaded one hands its own on. By the
# model, since a warm start changes the optimizer in the middle of a run.
_RUNS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass
class Resumed:
    """What a checkpoint gave.

    Attributes:
        step: the step after which it was written.
        extra: the numbers that were saved with it for this worker, for instance the meter's totals.
        notes: what could not be taken over and was re-initialised, one sentence each; empty for the same world and route.
    """

    step: int
    extra: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Algorithm | Phases,
    link: Link,
    *,
    extra: Mapping[str, float] | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of all workers; called by all of them, on all of their shards, after the same step.

    Args:
        folder: where the checkpoints of this run live; shared by all workers. One that holds checkpoints of another run is
            refused: to go on with that run, load one of them first.
        model: its parameters and buffers are saved.
        optimizer: all of its state is saved, and the inner optimizer's.
        link: joins the workers.
        extra: numbers of this worker to keep with it.
        keep: how many finished checkpoints to leave; older ones of this run are removed.

    Returns:
        The finished checkpoint's folder.

    Raises:
        CheckpointError: on all workers, where it could not be written; what was saved before is untouched.
    """
    folder, optimizer = Path(folder), at_work(optimizer)
    reshard(model)
    check_statistics(optimizer, model)
    optimizer.engine.settle_missing()  # no worker may be behind the others in what is saved
    processes = Processes(link, state_layout(optimizer).trained)
    name = f"step-{optimizer.steps:08d}"
    aside = folder / f".writing-{name}"
    own: dict[Path, bool] = {}  # finished checkpoints of this run, and whether they are finite; known to the first process
    problem = f"could not write the checkpoint of step {optimizer.steps}: {{}}; older ones are untouched"

    def prepare() -> str:
        if not processes.first:
            return ""
        run = _RUNS.get(unwrapped(model)) or secrets.token_hex(8)
        own.update(_of_this_run(folder, run))
        for left in folder.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        return run

    def write() -> str:
        if not processes.writes:
            return ""
        state = flat_state(model, optimizer, processes.worker, random, extra or {})
        return _write_files(aside, state, optimizer, processes, run)

    def finish() -> str:
        if not processes.first:
            return ""
        checksums, finite = _checksums(sums, processes)
        tensors = describe_tensors(aside, checksums, {"run": run, "step": optimizer.steps})
        description = describe(
            optimizer, run=run, workers=processes.workers, shards=processes.shards, finite=finite, tensors=tensors
        )
        write_description(aside, description)
        write_sums(aside, checksums | {DESCRIPTION: sum_of(aside / DESCRIPTION)})
        target = free_name(folder, name)
        publish(aside, target)
        own[target] = finite
        remove_old({p: own[p] for p in finished(folder) if p in own}, target, keep)
        return target.name

    random = processes.random_states()  # an exchange inside a site: before anything can fail on one member alone
    try:
        run = processes.together(prepare, problem=problem)[0]
        sums = processes.together(write, problem=problem)
        path = folder / processes.together(finish, problem=problem)[0]
    except CheckpointError:
        if processes.first:  # no process writes any more, and a full disk needs the room
            shutil.rmtree(aside, ignore_errors=True)
        raise
    _RUNS[unwrapped(model)] = run
    return path


def load(path: Path, model: nn.Module, optimizer: Algorithm | Phases, link: Link) -> Resumed:
    """Take over a checkpoint; called by all workers, on all of their shards.

    With the number of workers that wrote it, training goes on bit for bit. With another number, replicated state is taken
    over, all workers start from the last agreed parameters, and per-worker state is re-initialised and listed in `notes`. With
    another number of shards per worker, only slots in the domain of a codec are: its blocks end where shards do.

    Every file that is read is compared with its checksum first. Nothing is changed on any worker unless all could read all.

    Args:
        path: a finished checkpoint, as `finished(folder)` lists them.
        model: as it was built for the saved run.
        optimizer: of the same class, around the same parameters.
        link: joins the workers.

    Raises:
        CheckpointError: on all workers, where the checkpoint is damaged on any of them or does not fit.
    """
    path = Path(path)
    reshard(model)
    processes = Processes(link, state_layout(at_work(optimizer)).trained)
    result: list[_Read] = []

    def read() -> str:
        result.append(_read(path, model, optimizer, processes))
        return f"step {result[0].description.step} of run {result[0].description.run[:64]}"

    told = processes.together(read, problem=f"{path} is damaged: {{}}")
    if len(set(told)) > 1:
        raise CheckpointError(f"workers found different checkpoints at {path}: {', '.join(sorted(set(told)))}")
    (got,) = result
    optimizer.load_state_dict(got.state)
    with torch.no_grad():
        for name, p in parameters_of(model).items():
            p.copy_(got.parts[f"param/{name}"])
        for name, b in buffers_of(model).items():
            if f"buffer/{name}" in got.parts:
                b.copy_(got.parts[f"buffer/{name}"])
    if got.notes:
        optimizer.engine.reset()
    if not got.same_world:
        optimizer.set_counter("thinwire_synced", optimizer.steps)
    elif f"rng/{processes.place}" in got.parts:
        torch.set_rng_state(got.parts[f"rng/{processes.place}"])
    _RUNS[unwrapped(model)] = got.description.run
    extra = {k.removeprefix("extra/"): float(v) for k, v in got.parts.items() if k.startswith("extra/")}
    if got.route:
        log.warning("%s", got.route)
    changed = [got.route, other_codec(at_work(optimizer), got.description.groups[0])]
    return Resumed(step=got.description.step, extra=extra, notes=[*got.notes, *filter(None, changed)])


# --- Writing ---------------------------------------------------------------------------------------------------------------


def _of_this_run(folder: Path, run: str) -> dict[Path, bool]:
    """The finished checkpoints of a run; one that cannot be read is left alone, one of another run is a `CheckpointError`."""
    own = {}
    for path in finished(folder):
        try:
            other, _ = read_description(path)
        except CheckpointError:
            continue
        if other.run != run:
            raise CheckpointError(
                f"{folder} holds a checkpoint of another run (step {other.step}, {other.algorithm}): "
                "load it first to go on with that run, or save into another folder"
            )
        own[path] = other.finite
    return own


def _write_files(aside: Path, state: Mapping[str, Tensor], optimizer: Algorithm, processes: Processes, run: str) -> str:
    """Write this process's files; returns a line with the name and checksum of each, and whether parameters are finite."""
    worker, shard = processes.worker, processes.shard
    lines = [_FINITE] if all_finite(optimizer.params()) else []
    for owner in ("replicated", f"worker{worker}"):
        if owner == "replicated" and worker != 0:
            continue
        mine = {key: tensor for key, tensor in state.items() if key.partition("/")[0] == owner}
        name = file_of(owner, shard)
        about = {"run": run, "step": optimizer.steps, "owner": owner, "shard": shard}
        regions = {key: region_of(tensor) for key, tensor in mine.items()}
        checksum = write_tensors(aside / name, {key: local(tensor) for key, tensor in mine.items()}, regions, about)
        lines.append(f"{name} {checksum}")
    return "\n".join(lines)


def _checksums(told: list[str], processes: Processes) -> tuple[dict[str, str], bool]:
    """The checksum of every file by its name, from what all processes told, and whether all found their parameters finite."""
    lines = "\n".join(told).splitlines()
    checksums = {name: value for name, _, value in (line.partition(" ") for line in lines if line != _FINITE)}
    owners = ["replicated", *(f"worker{worker}" for worker in range(processes.workers))]
    expected = {file_of(owner, shard) for owner in owners for shard in range(processes.shards)}
    if checksums.keys() != expected:
        odd = sorted(checksums.keys() ^ expected)[0][:80]
        raise CheckpointError(f"the workers did not write the files that make a checkpoint: {odd!r} is missing or unknown")
    return checksums, all(_FINITE in text.splitlines() for text in told)


# --- Reading ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Read:
    """What was read and found to fit; nothing of it is applied yet."""

    description: Description
    same_world: bool
    parts: dict[str, Tensor]
    state: dict[str, Any]
    notes: list[str]
    route: str  # a note too, but nothing else has changed: what was in flight goes on


def _read(path: Path, model: nn.Module, whole: Algorithm | Phases, processes: Processes) -> _Read:
    description, sums = read_description(path)
    optimizer = whole.be_at(description.step) if isinstance(whole, Phases) else whole
    check_fits(description, path, optimizer)
    same_world = description.workers == processes.workers
    if not same_world and 0 in description.groups[0].get("resync", []) and optimizer.joiner_copies("param"):
        raise CheckpointError(
            f"the first worker's parameters were invalid when {path} was written, so others cannot start from them: resume "
            f"with the {description.workers} workers that wrote it, which resync it, or from another checkpoint"
        )
    names, parameters = parameter_names(model, optimizer), parameters_of(model)
    # Another world takes what it can from the first worker: buffers such as BatchNorm's statistics, and the meter.
    wanted = ("replicated/", f"worker{processes.worker}/") if same_world else ("replicated/", "worker0/")
    prefer = [file_of(owner.strip("/"), processes.shard) for owner in wanted]
    coded = coded_names(state_layout(optimizer))
    found: dict[str, str] = {}  # key in the checkpoint -> without worker and shard
    elsewhere: set[str] = set()  # coded slots of a worker that was sharded in another way
    for key in description.tensors:
        if not key.startswith(wanted) or (not same_world and not taken_from_first(key, optimizer)):
            continue
        name, slot, written = coded_slot(key, coded)
        if slot and written != coded[slot]:
            elsewhere.add(name)
        else:
            found[key] = name
    if twice := [name for name, count in Counter(found.values()).items() if count > 1]:
        raise CheckpointError(f"{path} is damaged: it has {twice[0]!r} twice")
    regions = {
        key: region_for("" if coded_slot(key, coded)[1] else name, description.tensors[key], parameters)
        for key, name in found.items()
    }
    left_out = {} if same_world else _left_out(description, optimizer, coded)
    files = {p.file for key in found for p in pieces_for(description.tensors[key], regions[key][0], prefer)}
    files |= {p.file for key in left_out for p in description.tensors[key].pieces}
    verify(path, sorted(files), sums)
    reader = TensorReader(path, description.about)
    parts: dict[str, Tensor] = {}
    for key, name in found.items():
        region, like = regions[key]
        values = reader.read(key, description.tensors[key], region, prefer)
        parts[name] = values if like is None else with_local(like.detach(), values)
    route = fill_for_another_route(parts, description.slots, names, optimizer)
    if same_world:
        notes = fill_for_other_shards(parts, elsewhere, names, optimizer)
    else:
        stored = {key: description.tensors[key] for key in left_out}
        owed = {place: reader.read(key, stored[key], whole_region(stored[key]), prefer) for key, place in left_out.items()}
        notes = fill_for_another_world(parts, parameters, names, optimizer, description.workers, owed)
    state = _state_dict(parts, description, optimizer, names)
    _check_all_there(parts, state, model, optimizer)
    return _Read(description, same_world, parts, state, notes, route)


def _left_out(description: Description, optimizer: Algorithm, coded: Mapping[str, str]) -> dict[str, tuple[int, str, str]]:
    """Where all workers that wrote a checkpoint have put what they had left out as owners, of this process's shard."""
    places = {key: owed_of_all(key, optimizer) for key in description.tensors}
    return {key: place for key, place in places.items() if place and coded_slot(key, coded)[2] == coded[place[2]]}


def _state_dict(
    parts: Mapping[str, Tensor], description: Description, optimizer: Algorithm, names: Mapping[int, str]
) -> dict[str, Any]:
    """What was read as a state dict of the optimizer."""
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in parts.items():
        section, _, rest = key.partition("/")
        if section == "state":
            name, _, slot = rest.rpartition("/")
            entries.setdefault(name, {})[slot] = value
    state = {index: entries.get(name, {}) for index, name in names.items()}
    return {"state": state, "param_groups": restored_groups(description, optimizer)}


def _check_all_there(parts: Mapping[str, Tensor], state: dict[str, Any], model: nn.Module, optimizer: Algorithm) -> None:
    """Raise a `CheckpointError` for whatever would not fit when it is applied."""
    missing = [name for name in parameters_of(model) if f"param/{name}" not in parts]
    if missing:
        raise CheckpointError(f"the checkpoint has no parameter {missing[0]!r} ({len(missing)} missing in all)")
    for name, b in buffers_of(model).items():
        if f"buffer/{name}" in parts and parts[f"buffer/{name}"].shape != b.shape:
            shape = tuple(parts[f"buffer/{name}"].shape)
            raise CheckpointError(f"the checkpoint's buffer {name!r} has shape {shape}, here it has {tuple(b.shape)}")
    check_state(optimizer, state)
    fresh = optimizer.state_dict()["state"]
    for index, entries in state["state"].items():
        for key, value in entries.items():
            here = fresh.get(index, {}).get(key)
            if isinstance(here, Tensor) and here.shape != value.shape:
                shapes = f"{tuple(value.shape)}, here it has {tuple(here.shape)}"
                raise CheckpointError(f"{key!r} of tensor {index} has shape {shapes}")
