import tempfile
import threading
import time
from pathlib import Path

import torch

import thinwire
from thinwire.errors import LinkError
from thinwire.links import Done, Link


class FolderLink(Link):
    """Workers that share a folder: each writes its messages as files, and waits for those of the others."""

    def __init__(self, folder, rank, size, timeout=60.0):
        self.folder, self.place, self.timeout, self.posted = Path(folder), (rank, size), timeout, 0

    @property
    def rank(self):
        return self.place[0]

    @property
    def size(self):
        return self.place[1]

    def post(self, payload, op):
        self.posted += 1
        mine = self.folder / f"{self.posted}-{self.rank}"
        mine.with_suffix(".part").write_bytes(payload.to_bytes())
        mine.with_suffix(".part").rename(mine)  # nobody reads half a message
        if op == "gather":
            return Done([self.message(payload, rank) for rank in range(self.size)])
        if op == "broadcast":
            return Done([self.message(payload, payload.source)])
        if op == "mean":
            total = sum(self.message(payload, rank).data for rank in range(self.size))
            return Done([payload.like(total / self.size)])
        raise LinkError(f"a FolderLink can gather, broadcast and average, not {op}")

    def message(self, payload, rank):
        path, deadline = self.folder / f"{self.posted}-{rank}", time.monotonic() + self.timeout
        while not path.exists():
            if time.monotonic() > deadline:
                raise LinkError(f"no message of rank {rank} within {self.timeout:g} s", lost=[rank])
            time.sleep(0.001)
        raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        return payload.like(raw.view(payload.data.dtype)).of(rank)  # whose it is, the link says


def train(link, results):
    generator = torch.Generator().manual_seed(link.rank)  # each worker has data of its own
    w = torch.nn.Parameter(torch.zeros(3))
    opt = thinwire.DiLoCo(torch.optim.SGD([w], lr=0.1), link, H=4)
    for _ in range(8):
        x = torch.randn(16, 3, generator=generator)
        (x @ w - x.sum(1)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    results[link.rank] = w.detach().clone()


results = {}
with tempfile.TemporaryDirectory() as folder:
    workers = [threading.Thread(target=train, args=(FolderLink(folder, rank, 2), results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
assert torch.equal(results[0], results[1])
print(results[0].tolist())
