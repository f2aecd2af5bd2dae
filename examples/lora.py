"""LoRA: only the adapter is trained, so only the adapter crosses the wire.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py

The base model stands for pretrained weights that every worker has on disk. It is made from a seed here, and never sent. In
thinwire's own loop as here, or with `ThinwireTrainer` and a `PeftModel`, the optimizer is made after `get_peft_model`.
"""

from __future__ import annotations

import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire


def main(steps: int = 24) -> None:
    link = thinwire.connect()
    torch.manual_seed(0)  # the adapter begins with random weights too: the same on all workers
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=tiny.CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = thinwire.DiLoCo(torch.optim.AdamW(trained, lr=2e-2), link, H=8)
    before = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    tiny.train(model, opt, link, steps, logits=lambda tokens: model(input_ids=tokens).logits)
    assert all(map(torch.equal, before, [p for p in model.parameters() if not p.requires_grad]))
    whole = 4 * sum(p.numel() for p in model.parameters())
    print(f"the whole model would take {whole:,} bytes, {whole / opt.message_nbytes():.0f} times as many")
    thinwire.disconnect()


if __name__ == "__main__":
    main()
