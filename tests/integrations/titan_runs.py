"""What the tests of torchtitan train: titan's container, scheduler and checkpointer around a small model in two parts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchtitan.distributed.parallel_dims as titan_dims
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig

import thinwire
from tests.integrations.frameworks import foreign_collectives
from thinwire import Link
from thinwire.integrations.torchtitan import ThinwireOptimizers, ThinwireParallelDims

METHODS: dict[str, dict[str, Any]] = {"diloco": {"H": 8}, "demo": {}, "decoupled-diloco": {"H": 8}, "mt-dao": {"H": 8}}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def container(parts: list[nn.Module], link: Link | None, method: str) -> ThinwireOptimizers:
    groups = [
        ParamGroupConfig(pattern=r"bias$", optimizer_name="AdamW", optimizer_kwargs=ADAMW | {"weight_decay": 0.0}),
        ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=ADAMW),
    ]
    config = ThinwireOptimizers.Config(
        param_groups=groups, implementation="for-loop", algorithm=method, algorithm_kwargs=METHODS[method], link=link
    )
    return config.build(model_parts=parts)


class Training:
    """titan's objects around a model in two parts, as its trainer makes them."""

    def __init__(self, link: Link, folder: Path, method: str, *, seed: int):
        torch.manual_seed(seed)
        whole = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.link, self.parts = link, [nn.ModuleDict({"first": whole[0]}), nn.ModuleDict({"last": whole[2]})]
        self.optimizers = container(self.parts, link, method)
        schedule = LRSchedulersContainer.Config(warmup_steps=4)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=40)
        self.step = 0
        self.checkpointer = CheckpointManager.Config(enable=True, folder=str(folder), interval=12, keep_latest_k=0).build(
            dataloader=None,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
        )

    def train(self, until: int, *, save: bool = False) -> None:
        while self.step < until:
            self.step += 1
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 * self.link.rank + self.step))
            y = self.parts[1]["last"](self.parts[0]["first"](x).tanh())
            (y - x.sum(1, keepdim=True)).square().mean().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            if save:
                self.checkpointer.save(self.step)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten().clone() for part in self.parts for p in part.parameters()])


def run(link: Link, folder: Path, method: str) -> dict[str, Any]:
    """20 steps with a checkpoint after 12, and the last 8 again from that checkpoint."""
    warnings.simplefilter("ignore")  # of titan's scheduler
    with foreign_collectives() as foreign:
        straight = Training(link, folder, method, seed=0)
        straight.train(12)
        drifted, rounds, between = straight.weights(), straight.optimizers.optimizers[0].rounds, dict(foreign)
        straight.checkpointer.save(12)
        straight.train(20)
    with straight.optimizers.shared_model():
        shared = straight.weights()
    straight.optimizers.finish()
    again = Training(link, folder, method, seed=1)
    assert again.checkpointer.load(12)
    again.step, loaded = 12, again.weights()
    rates = [group["lr"] for opt in again.optimizers for group in opt.param_groups]
    again.train(20)
    again.optimizers.finish()
    return {
        "between": between,
        "rounds": rounds,
        "wrappers": len(straight.optimizers),
        "drifted": drifted,
        "loaded": loaded,
        "shared": shared,
        "end": straight.weights(),
        "again": again.weights(),
        "rates": rates,
    }


def sharded(link: Link) -> dict[str, Any]:
    """Two workers of two shards each: gradients with titan's meshes, and what is left of them for titan to sum over."""
    with mock.patch.object(titan_dims, "device_type", "cpu"):
        dims = ThinwireParallelDims(
            dp_replicate=2, dp_shard=2, cp=1, tp=1, pp=1, ep=1, world_size=4, spmd_backend="partial_dtensor"
        )
        batch = dims.get_mesh("batch")
    part = batch.get_local_rank(), batch.size()
    dims.stay_in_worker()
    names = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]  # as titan's models do
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(model, mesh=dims.get_mesh(names))
    try:
        refused = ""
        container([model], None, "diloco")
    except thinwire.errors.ConfigError as error:
        refused = str(error)
    optimizers = container([model], dims.link(), "diloco")
    worker = dims.link().rank
    model(torch.full((4, 8), 1.0 + worker)).square().mean().backward()
    gradient = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])  # type: ignore[union-attr]
    optimizers.step()
    return {
        "part": part,
        "worker": (worker, dims.link().size),
        "hidden": dims.get_activated_mesh(["dp_replicate", "fsdp"]).mesh_dim_names,
        "summed_over": (dims.get_mesh("batch").size(), dims.get_mesh("loss").size()),
        "gradient": gradient,
        "refused": refused,
        "steps": optimizers.optimizers[0].steps,
    }
