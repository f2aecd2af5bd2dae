"""Two workers of two processes each: FSDP2 shards a worker's model inside, DiLoCo joins the workers outside."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire

thinwire.connect()  # makes the process group of all 4 processes
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
fully_shard(model, mesh=mesh["shard"])  # the fast axis, inside a worker
link = thinwire.TorchLink(mesh["replicate"])  # the slow axis, between workers
opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-2), link, H=16)
data = torch.Generator().manual_seed(1 + torch.distributed.get_rank())  # each process reads data of its own
for _ in range(200):
    x = torch.randn(32, 8, generator=data)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
opt.finish()
with opt.shared_model(model), torch.no_grad():  # give the sharded model, so that FSDP2 drops its gathered copy
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    print(f"worker {link.rank} of {link.size}: validation loss {(model(x) - x.sum(1, keepdim=True)).square().mean():.4f}")
thinwire.disconnect()
