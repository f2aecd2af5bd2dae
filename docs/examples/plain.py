"""An ordinary PyTorch training loop on one process; docs/quickstart.md shows what thinwire changes in it."""

import torch


def train(steps=800):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    data = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(32, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()

    with torch.no_grad():
        x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        return (model(x) - x.sum(1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    print(f"validation loss {train():.4f}")
