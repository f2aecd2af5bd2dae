"""Where the slow wire lies on a mesh of processes: FSDP2 shards a worker's model inside, the link joins workers outside.

mesh = make_mesh(workers=2, shards=2)
model = shard_model(model, mesh)                # fully_shard on the fast axis
link = TorchLink(mesh["replicate"])             # the slow axis only
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from thinwire.errors import ConfigError
from thinwire.links.torch import at_disconnect

_meshes: dict[tuple[int, int, str], tuple[DeviceMesh, dist.ProcessGroup]] = {}  # made so far, each with the job's group
at_disconnect(_meshes.clear)


def worker_count(shards: int) -> int | None:
    """How many workers of `shards` processes the launcher's job makes; None outside of a job."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return None
    processes = int(os.environ["WORLD_SIZE"])
    if processes % shards:
        raise ConfigError(f"{processes} processes do not divide into workers of {shards} shards each")
    return processes // shards


def make_mesh(*, workers: int, shards: int, device: str = "cpu") -> DeviceMesh:
    """The mesh of all processes with the axes "replicate" (workers, slow) and "shard" (inside a worker, fast).

    A mesh holds process groups, and every group holds threads and connections. So a mesh is made once per job: the same
    shape and device give the same mesh until `disconnect()`. Where one of its groups was destroyed, a new mesh is made.
    """
    processes = dist.get_world_size()
    if workers * shards != processes:
        raise ConfigError(f"{workers} workers of {shards} shards need {workers * shards} processes, there are {processes}")
    key, job = (workers, shards, device), dist.distributed_c10d._get_default_group()
    if any(made_in is not job for _, made_in in _meshes.values()):
        _meshes.clear()  # the job was left without disconnect(), and torch uses the names of its groups again
    mesh = _meshes[key][0] if key in _meshes else None
    if mesh is None or not _is_alive(mesh):
        mesh = init_device_mesh(device, (workers, shards), mesh_dim_names=("replicate", "shard"))
        _meshes[key] = mesh, job
    return mesh


def _is_alive(mesh: DeviceMesh) -> bool:
    """Whether all groups of a mesh can still be used."""
    try:
        return all(dist.get_backend(group) for group in mesh.get_all_groups())
    except (RuntimeError, ValueError):  # torch no longer knows the name, or the group
        return False


def shard_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a worker's model over the fast axis, block by block where the model has `blocks`."""
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def shard_of(params: Iterable[Tensor]) -> tuple[int, int]:
    """This process's number among those that share one worker's model, and how many they are; (0, 1) of plain tensors."""
    mesh = next((p.device_mesh for p in params if isinstance(p, DTensor)), None)
    if mesh is None:
        return 0, 1
    place = mesh.get_coordinate()
    assert place is not None, "a process that holds shards is on their mesh"
    number = 0
    for at, size in zip(place, mesh.shape, strict=True):
        number = number * size + at
    return number, math.prod(mesh.shape)
