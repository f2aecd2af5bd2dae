"""What the tests of Lightning Fabric train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.fabric
import torch
from torch import nn

import thinwire
from tests.integrations.frameworks import foreign_collectives
from tests.integrations.lightning_runs import METHODS, Batches, quiet, weights
from tests.processes import warnings_of_this_process
from thinwire import Link, checkpoint
from thinwire.integrations.fabric import ThinwireFabric


def start(size: int, rank: int, **settings: Any) -> lightning.fabric.Fabric:
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=size, **({"strategy": ThinwireFabric()} | settings))
    fabric.launch()
    return fabric


def train(size: int, rank: int, folder: Path, method: str = "diloco", *, resume: bool = False) -> dict[str, Any]:
    """20 steps of two batches each, with a checkpoint after 12; or the last 8 again."""
    with quiet(), foreign_collectives() as foreign:
        fabric = start(size, rank)
        torch.manual_seed(7 if resume else 0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        link = thinwire.connect()
        if resume:
            thinwire.broadcast(link, net)  # workers must begin alike, whatever they load then
        model, opt = fabric.setup(net, METHODS[method](list(net.parameters()), link))
        if resume:
            checkpoint.load(checkpoint.finished(folder)[-1], model.module, opt, link)
        batches = iter(Batches(rank, 40))
        for _ in range(2 * opt.steps):
            next(batches)
        foreign.clear()
        drifted = weights(net)
        while opt.steps < 20:
            for last in (False, True):
                x = next(batches)
                with fabric.no_backward_sync(model, enabled=not last):
                    fabric.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            opt.step()
            opt.zero_grad()
            if opt.steps == 12 and not resume:
                drifted = weights(net)
                checkpoint.save(folder, model.module, opt, link, keep=1)
        opt.finish()
        with opt.shared_model():
            shared = weights(net)
    plain = not any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    return {"foreign": dict(foreign), "end": weights(net), "shared": shared, "drifted": drifted, "plain": plain}


def run(link: Link, folder: Path, method: str) -> list[dict[str, Any]]:
    return [train(link.size, link.rank, folder, method, resume=resume) for resume in (False, True)]


def naive(link: Link) -> list[str]:
    """What thinwire says of Fabric's own strategy."""
    with quiet(), warnings_of_this_process() as told:
        fabric = start(link.size, link.rank, strategy="ddp")
        torch.manual_seed(0)
        net = nn.Linear(8, 1)
        model, opt = fabric.setup(net, METHODS["diloco"](list(net.parameters()), thinwire.connect()))
        fabric.backward(model(next(iter(Batches(link.rank, 1)))).square().mean())
        opt.step()
    return told
