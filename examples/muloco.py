"""MuLoCo: DiLoCo around Muon, on a small GPT and simulated workers.

    python examples/muloco.py
    python examples/muloco.py --workers 4 --steps 120

Muon is for the matrices inside the blocks. Embedding, head and norms are AdamW's. Both must be ONE inner optimizer, since one
DiLoCo sends one message and takes one outer step: two of them would double the rounds. `torch.optim.Muon` takes matrices only;
`thinwire.optim.QHMuon` takes both, by parameter group: with one momentum of weight 1 it is Muon as in MuLoCo (momentum 0.9,
no Nesterov look-ahead), and its groups with `matrices=False` are stepped by AdamW's rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from torch import nn

import thinwire
from thinwire import Link, World
from thinwire.tasks import make_task


@dataclass(frozen=True)
class Settings:
    """Train gpt-nano with MuLoCo on simulated workers."""

    workers: int = 2
    """Simulated workers."""
    steps: int = 60
    """Steps of each worker."""
    H: int = 15
    """Local steps per round; 30 in the paper."""
    lr: float = 3e-3
    """Learning rate of both rules."""


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Muon of the blocks' matrices, AdamW of everything else, as one optimizer."""
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.") or p.dim() != 2]
    groups = [{"params": hidden, "weight_decay": 5e-3}, {"params": rest, "matrices": False}]
    return thinwire.optim.QHMuon(groups, lr=lr, betas=0.9, omegas=1.0, beta2=0.95)


def train(link: Link, settings: Settings) -> tuple[float, float]:
    """What one worker does; the same on real processes with `thinwire.connect()`."""
    task = make_task("gpt-nano", workers=link.size, batch=4)
    model = task.model()
    opt = thinwire.DiLoCo(muon(model, settings.lr), link, H=settings.H, outer_lr=0.7, outer_momentum=0.6)
    before = task.evaluate(model)["loss"]
    for step in range(1, settings.steps + 1):
        task.loss(model, task.batch(link.rank, step)).backward()
        opt.step()
        opt.zero_grad()
    opt.finish()
    with opt.shared_model():
        return before, task.evaluate(model)["loss"]


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    results = World(settings.workers).run(lambda link: train(link, settings))
    before, after = results[0]
    assert all(loss == after for _, loss in results), "all workers hold the same model"
    rounds = -(-settings.steps // settings.H)
    print(f"{settings.workers} workers, {rounds} rounds: validation loss {before:.3f} -> {after:.3f} on all of them")


if __name__ == "__main__":
    main(tyro.cli(Settings))
