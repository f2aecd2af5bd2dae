"""Shards: the processes that together hold ONE worker's model (FSDP2). The slow wire is between workers, not here.

A link on the `replicate` axis sees one shard only. What one shard finds (a NaN, a difference) must be known to all shards
of that worker before any of them acts, or half a model would take a step that the other half refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: the shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Make FSDP2 give up its gathered copies of the parameters; does nothing to any other model.

    A forward pass without backward leaves the root module gathered: a copy that would not see parameters written meanwhile,
    and that `named_parameters()` would return in place of the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Shards:
    """The processes that share one worker's model; a single one where nothing is sharded.

    Args:
        params: the model's parameters; DTensors say over which mesh they are sharded.
    """

    def __init__(self, params: Iterable[Tensor]):
        """Find the mesh of the first sharded parameter."""
        mesh = next((p.device_mesh for p in params if isinstance(p, DTensor)), None)
        self._groups = [] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._device = "cpu" if mesh is None else mesh.device_type

    def any(self, flag: bool) -> bool:
        """Whether any shard of this worker raised its flag; a (fast, local) collective where there are several."""
        if not self._groups:
            return flag
        raised = torch.tensor([flag], dtype=torch.int32, device=self._device)
        for group in self._groups:
            dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
        return bool(raised)

    def totals(self, values: Sequence[float]) -> list[float]:
        """The sum of each number over all shards of this worker."""
        if not self._groups:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        for group in self._groups:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            mine = torch.stack(parts).sum(0)  # in rank order: the same bits in every worker, whatever its network
        return mine.tolist()

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Give all shards of this worker the mean of theirs: of what each has whole, such as running statistics."""
        for group in self._groups:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
                tensor.div_(dist.get_world_size(group))
