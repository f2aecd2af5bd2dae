"""FlexDeMo: a small GPT on 2 workers of 2 processes each; FSDP2 shards a worker's model inside, DeMo joins the workers outside.

    torchrun --nproc-per-node 4 examples/fsdp2_flexdemo.py
    torchrun --nproc-per-node 4 examples/fsdp2_flexdemo.py --wire "RandomK(0.05) >> Float('bf16')"

On CPUs over gloo, on GPUs over NCCL. With one worker per machine, `--shards` is the number of its GPUs: all of FSDP2's traffic
stays inside the machine, and what DeMo sends is all that crosses the network.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire
from thinwire import Metered, TorchLink
from thinwire.codecs import parse_codec
from thinwire.errors import ConfigError, check_whole_number
from thinwire.network import ring_traffic, show_bytes
from thinwire.tasks import make_task

SEQUENCES = 4  # of each process at each step


@dataclass(frozen=True)
class Settings:
    """Train a small GPT with FlexDeMo under torchrun, and count what crosses the slow axis."""

    workers: int = 2
    """Copies of the model: the slow axis."""
    shards: int = 2
    """Processes that share one copy: the fast axis."""
    steps: int = 40
    """Steps to train."""
    lr: float = 2e-3
    """Learning rate."""
    wire: str = "DCT(64) >> TopK(128) >> Sign()"
    """What is sent of the momentum, such as "DCT(64) >> TopK(32)", "RandomK(0.05)" or "Striding(0.05)"."""

    def check(self) -> None:
        """Refuse what cannot run, before anything is started."""
        for name in ("workers", "shards", "steps"):
            check_whole_number(f"--{name}", getattr(self, name))
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"--lr must be above 0 and finite, got {self.lr!r}")
        parse_codec(self.wire)
        needed, there = self.workers * self.shards, int(os.environ.get("WORLD_SIZE", "1"))
        if needed != there:
            raise ConfigError(
                f"--workers {self.workers} x --shards {self.shards} are {needed} processes, got {there}: "
                f"start it by torchrun --nproc-per-node {needed} {sys.argv[0]}"
            )


def say(text: str) -> None:
    """Print it once, not on every process."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main(settings: Settings) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    thinwire.connect()  # makes the process group of all processes

    # The mesh: each row is a worker. `shard` is the fast axis, `replicate` the slow one.
    mesh = init_device_mesh(device, (settings.workers, settings.shards), mesh_dim_names=("replicate", "shard"))
    worker, shard = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")

    # The model: the same seed on all workers, sharded over the fast axis only.
    task = make_task("gpt-nano", workers=settings.workers, batch=SEQUENCES * settings.shards)
    model = task.model().to(device)
    parameters = sum(p.numel() for p in model.parameters())
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])

    # The optimizer: each process exchanges its shards with the same shards of the other workers, over the slow axis only.
    link = Metered(TorchLink(mesh["replicate"], timeout=120))
    opt = thinwire.DeMo(model.parameters(), link, lr=settings.lr, codec=parse_codec(settings.wire))

    say(f"{settings.workers} workers x {settings.shards} shards on {device}, GPT of {parameters:,} parameters, {opt.codec!r}")
    for step in range(1, settings.steps + 1):
        x, y = (part.chunk(settings.shards)[shard] for part in task.batch(worker, step))  # this shard's part of the batch
        loss = task.loss(model, (x, y))
        loss.backward()  # FSDP2 averages the gradients of a worker's shards, and of nobody else
        opt.step()
        opt.zero_grad()
        if step % 10 == 0 or step == settings.steps:
            say(f"step {step:4d}: training loss {loss.item():.3f} (this process's part of the batch)")
    opt.finish()

    # All workers hold the same model; each computes its loss on the same text.
    sent = link.meter.totals.sent / settings.steps
    with opt.shared_model(model):
        mine = torch.tensor([worker, task.evaluate(model)["loss"], sent], dtype=torch.float64, device=device)
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(told, mine)  # numbers, not objects: those would be unpickled, and a pickle can run code
    losses = {loss for _, loss, _ in map(torch.Tensor.tolist, told)}
    assert len(losses) == 1, f"the workers' models differ: {losses}"
    of_worker = sum(bytes_sent for number, _, bytes_sent in map(torch.Tensor.tolist, told) if number == worker)
    dense = ring_traffic("mean", [4 * parameters] * settings.workers, rank=0).sent
    say(f"validation loss {losses.pop():.4f}, the same on all {settings.workers} workers")
    say(f"sent on the slow axis per step: {show_bytes(sent)} per process, {show_bytes(of_worker)} per worker")
    say(f"fp32 DDP would send there:      {show_bytes(dense)} per worker" + (f", {dense / of_worker:.0f}x" if dense else ""))
    thinwire.disconnect()


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    try:
        chosen.check()
        main(chosen)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
