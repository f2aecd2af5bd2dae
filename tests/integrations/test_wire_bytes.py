"""What the adapters say they send is what the interfaces send: real frameworks in network namespaces, counted by the kernel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.integrations.frameworks import needs
from tests.processes import LIMIT
from tests.tools.test_lab import real
from thinwire.tools.lab import Lab

ROOT = Path(__file__).parents[2]

# 1.3M parameters, 16 steps with a round every 4th: four messages of 5 MB, beside which the start of a job weighs little.
TRANSFORMERS = """
import json, sys, torch, thinwire
from functools import partial
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from thinwire.integrations.transformers import ThinwireTrainer

torch.manual_seed(0)
sizes = dict(vocab_size=512, n_positions=16, n_embd=192, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes))
rows = torch.randint(1, 512, (128, 8))
args = TrainingArguments(sys.argv[1], max_steps=16, per_device_train_batch_size=2, logging_steps=4, save_strategy="no",
                         report_to=[], use_cpu=True, disable_tqdm=True)
trainer = ThinwireTrainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows],
                          algorithm=partial(thinwire.DiLoCo, H=4))
trainer.train()
opt = trainer.thinwire
"""
LIGHTNING = """
import json, os, sys
os.environ["NODE_RANK"] = os.environ["RANK"]
import torch, thinwire, lightning
from thinwire.integrations.lightning import ThinwireStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 576))
    def training_step(self, batch, _):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return thinwire.DiLoCo(torch.optim.AdamW(self.parameters(), lr=1e-3), thinwire.connect(), H=4)

torch.manual_seed(0)
loader = torch.utils.data.DataLoader(torch.randn(256, 64), batch_size=4)
trainer = lightning.Trainer(strategy=ThinwireStrategy(), accelerator="cpu", devices=1, num_nodes=2, max_steps=16, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, default_root_dir=sys.argv[1])
trainer.fit(Module(), loader)
opt = trainer.optimizers[0]
"""
TELL = """
import os
with open(os.path.join(sys.argv[1], f"worker{os.environ['RANK']}.json"), "w") as file:
    json.dump(opt.stats(), file)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(TRANSFORMERS, marks=needs("transformers", "accelerate"), id="transformers"),
        pytest.param(LIGHTNING, marks=needs("lightning"), id="lightning"),
    ],
)
@real
def test_bytes_of_the_interface_are_those_of_the_meter(program: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program + TELL)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Lab(2, bandwidth=200e6) as lab:
        job = lab.run(
            [sys.executable, str(script), str(tmp_path)], env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=LIMIT
        )
    for rank, counted in enumerate(job.counters):
        stats = json.loads((tmp_path / f"worker{rank}.json").read_text())
        assert stats["rounds"] == 4
        assert stats["sent"] > 15e6, "the messages are long enough to compare"
        assert 1 <= counted.payload_sent / stats["sent"] <= 1.05, (rank, counted.payload_sent, stats["sent"])
