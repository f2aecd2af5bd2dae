"""Shards: the processes that together hold ONE worker's model (FSDP2). The slow wire is between workers, not here.

A link on the `replicate` axis sees one shard only. What one shard finds (a NaN, a difference) must be known to all shards
of that worker before any of them acts, or half a model would take a step that the other half refuses. The same holds for the
members of a site that are one worker (`TwoLevel`), though each of them has the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from thinwire.links.base import Link
from thinwire.payload import Payload


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: the shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor: a DTensor gathered from all shards of this worker, which all call it; any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Region(NamedTuple):
    """Which part of a whole tensor a process holds.

    Attributes:
        whole: shape of the whole tensor.
        offset: where the part begins, one number per dimension.
        shape: of the part.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def region_of(tensor: Tensor) -> Region:
    """The part of `tensor` that this process holds: of a DTensor its shard, of any other tensor all of it."""
    if not isinstance(tensor, DTensor):
        return Region(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Region(tuple(tensor.shape), tuple(offset), tuple(shape))


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """A tensor laid out like `like` whose part on this process is `part`; any dtype."""
    part = part.to(local(like).device)
    if not isinstance(like, DTensor):
        return part
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


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
        site: joins the members of this process's site, which have whole copies, where they are one worker.
    """

    def __init__(self, params: Iterable[Tensor], site: Link | None = None):
        """Find the mesh of the first sharded parameter."""
        self.site = site
        mesh = next((p.device_mesh for p in params if isinstance(p, DTensor)), None)
        self._groups = [] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._device = "cpu" if mesh is None else mesh.device_type

    @property
    def several(self) -> bool:
        """Whether there is more than this process."""
        return bool(self._groups)

    def any(self, flag: bool) -> bool:
        """Whether any process of this worker raised its flag; a (fast, local) collective where there are several."""
        if self.site is not None:
            told = self.site.all_gather(Payload.of_bytes(bytes([flag]), purpose="site flags", fixed=True))
            return any(p.to_bytes() != b"\x00" for p in told)
        return bool(self.any_on_device(torch.tensor(flag, device=self._device))) if self._groups else flag

    def any_on_device(self, flag: Tensor) -> Tensor:
        """`any` of a flag (0-d) that stays on its device: nobody looks at it, but for the members of a site."""
        if self.site is not None:
            return torch.tensor(self.any(bool(flag)), device=flag.device)
        raised = flag.to(torch.int32)
        for group in self._groups:
            dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group)
        return raised.bool() if self._groups else flag

    def totals(self, values: Sequence[float]) -> list[float]:
        """The sum of each number over all shards of this worker."""
        if not self._groups:
            return list(values)
        return self.totals_on_device(torch.tensor(values, dtype=torch.float64, device=self._device)).tolist()

    def totals_on_device(self, mine: Tensor) -> Tensor:
        """`totals` of numbers that stay on their device."""
        for group in self._groups:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            mine = torch.stack(parts).sum(0)  # in rank order: the same bits in every worker, whatever its network
        return mine

    def gather(self, raw: bytes) -> list[bytes]:
        """What each shard of this worker gives, all of one length."""
        told = [raw]
        for group in self._groups:
            mine = torch.frombuffer(bytearray(b"".join(told)), dtype=torch.uint8).to(self._device)
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, mine, group=group)
            joined = b"".join(part.cpu().numpy().tobytes() for part in parts)
            told = [joined[i : i + len(raw)] for i in range(0, len(joined), len(raw))]
        return told

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Give all shards of this worker the mean of theirs: of what each has whole, such as running statistics."""
        for group in self._groups:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
                tensor.div_(dist.get_world_size(group))
