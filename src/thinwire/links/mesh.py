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


def worker_count(shards: int) -> int | None:
    """How many workers of `shards` processes the launcher's job makes; None outside of a job."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        return None
    processes = int(os.environ["WORLD_SIZE"])
    if processes % shards:
        raise ConfigError(f"{processes} processes do not divide into workers of {shards} shards each")
    return processes // shards


def make_mesh(*, workers: int, shards: int, device: str = "cpu") -> DeviceMesh:
    """The mesh of all processes with the axes "replicate" (workers, slow) and "shard" (inside a worker, fast)."""
    processes = dist.get_world_size()
    if workers * shards != processes:
        raise ConfigError(f"{workers} workers of {shards} shards need {workers * shards} processes, there are {processes}")
    return init_device_mesh(device, (workers, shards), mesh_dim_names=("replicate", "shard"))


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
