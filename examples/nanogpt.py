"""A loop in the style of nanoGPT; the lines that end in `# <-` are what training on many workers adds to it.

torchrun --nproc-per-node 2 examples/nanogpt.py
"""

import argparse
import math
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import thinwire  # <-
from thinwire.tasks.gpt import GPT, GPTConfig

batch_size, block_size, accumulate = 8, 32, 2
max_iters, warmup_iters, eval_interval, H = 48, 8, 16, 8
learning_rate, min_lr, grad_clip = 1e-2, 1e-3, 1.0

link = thinwire.Metered(thinwire.connect())  # <-
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
train_data, val_data = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
torch.manual_seed(1337)  # the same weights on all workers
model = GPT(GPTConfig(layers=2, width=64, heads=2, context=block_size))
draw = torch.Generator().manual_seed(1337 + link.rank)  # other data on each worker <-
adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
opt = thinwire.DiLoCo(adamw, link, H=H)  # <-


def get_loss(data, generator):
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    rows = torch.stack([data[i : i + block_size + 1] for i in ix])
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def estimate_loss():
    generator = torch.Generator().manual_seed(0)
    with opt.shared_model():  # <-
        return sum(get_loss(val_data, generator).item() for _ in range(4)) / 4


def get_lr(it):
    ratio = max(0, it - warmup_iters) / (max_iters - warmup_iters)
    cosine = min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)
    return cosine * min(1, (it + 1) / warmup_iters)


for it in range(max_iters):
    for group in opt.param_groups:
        group["lr"] = get_lr(it)
    for _ in range(accumulate):
        (get_loss(train_data, draw) / accumulate).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    opt.step()
    opt.zero_grad()
    if it + 1 == max_iters:
        opt.finish()  # <-
    if (it + 1) % eval_interval == 0 and link.rank == 0:
        print(f"step {it + 1}: val loss {estimate_loss():.4f}, sent {link.meter.totals.sent:,} bytes")
thinwire.disconnect()  # <-
