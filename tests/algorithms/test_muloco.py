"""MuLoCo is a recipe: DiLoCo around Muon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import LIMIT

EXAMPLE = Path(__file__).parents[2] / "examples" / "muloco.py"

# torch.optim.Muon multiplies bfloat16 matrices, which some CPUs can do only without their newest instructions.
TORCH_MUON = """
import torch, thinwire
from thinwire import World

def worker(link):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))
    inner = torch.optim.Muon(model.parameters(), lr=0.05, momentum=0.9, nesterov=False, weight_decay=0.0)
    opt = thinwire.DiLoCo(inner, link, H=5, outer_lr=0.7, outer_momentum=0.6, alarm_every=1)
    losses = []
    for step in range(20):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * link.rank + step))
        loss = (model(x) - x[:, :3]).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], opt.rounds

(losses, a, rounds), (_, b, _) = World(2).run(worker)
assert all(torch.equal(x, y) for x, y in zip(a, b)), "bit-equal after a round"
assert rounds == 4 and losses[-1] < 0.7 * losses[0], losses
print("ok")
"""


def run(*command: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=LIMIT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_trains_and_all_workers_hold_one_model() -> None:
    output = run(str(EXAMPLE), "--steps", "30", "--H", "10")
    found = re.search(r"2 workers, 3 rounds: validation loss (\d\.\d+) -> (\d\.\d+) on all of them", output)
    assert found, output
    assert float(found[2]) < float(found[1]) - 1.0


@pytest.mark.slow  # a process of its own; any torch optimizer takes the same way
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_torchs_own_muon_of_matrices_is_an_inner_optimizer_like_any_other() -> None:
    assert run("-c", TORCH_MUON) == "ok\n"
