"""Mixed precision with a GradScaler, and gradient clipping."""

import torch

import thinwire

device = "cuda" if torch.cuda.is_available() else "cpu"


def train(link, steps=64):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=16)
    scaler = torch.amp.GradScaler(device)
    for step in range(steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * link.rank + step)).to(device)
        with torch.autocast(device, dtype=torch.float16):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)  # only where gradients are clipped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    opt.finish()
    return loss.item(), scaler.get_scale()


if __name__ == "__main__":
    link = thinwire.connect()
    print(f"worker {link.rank} of {link.size}:", *train(link))
    thinwire.disconnect()
