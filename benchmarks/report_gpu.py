"""A record of thinwire on a GPU, to be sent in: nobody has run it on one yet.

    python -m benchmarks.report_gpu                                          # one GPU
    torchrun --nproc-per-node 2 -m benchmarks.report_gpu                     # NCCL too

It writes one JSON file: what the machine is (names and versions, nothing that identifies it), what a GPU does as a CPU does,
where the host is made to wait, seconds and memory of steps and rounds, and the Triton kernels beside torch operations.
docs/gpu.md says where to send it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.cuda import nccl

import thinwire
from benchmarks import device as on_device
from benchmarks import device_kernels
from benchmarks.pair import SIZES, gpt_shapes
from thinwire import DCT, MTDAO, DiLoCo, Sign, SoloLink, TopK
from thinwire.core.hashing import hash_tensors
from thinwire.optim import QHAdam
from thinwire.payload import all_finite
from thinwire.tools.config import write_whole


def machine(device: torch.device) -> dict[str, Any]:
    """Names and versions."""
    about: dict[str, Any] = {"thinwire": thinwire.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "gpu": properties.name}
        about |= {"memory GB": properties.total_memory / 1e9, "capability": [properties.major, properties.minor]}
        about |= {"triton": device_kernels.installed()}
        about |= {"nccl": list(nccl.version()) if torch.distributed.is_nccl_available() else None}
    return about


# --- What a GPU does as a CPU does ------------------------------------------------------------------------------------------


def _hashes(device: torch.device) -> bool:
    tensors = [torch.randn(300, 70), torch.randn(5, dtype=torch.float64), torch.randn(7).bfloat16()]
    return hash_tensors([t.to(device) for t in tensors]) == hash_tensors(tensors)


def _gates(device: torch.device) -> bool:
    values = (1.0, math.nan, math.inf, -math.inf, 1e30)
    found = [all_finite([torch.ones(9, device=device), torch.tensor([v, 1.0]).to(device)], 1e18) for v in values]
    return found == [True, False, False, False, False]


def _skipped_steps(device: torch.device) -> bool:
    """A gradient that is NaN leaves parameters and moments as they are, also with a fused optimizer."""
    for fused in (True, False):
        params = [nn.Parameter(torch.ones(64, 64, device=device))]
        opt = DiLoCo(torch.optim.AdamW(params, fused=fused), SoloLink(), H=8)
        for value in (1.0, math.nan):
            before = [t.clone() for t in _state(opt.inner, params)]
            params[0].grad = torch.full_like(params[0], value)
            opt.step()
        opt.state_dict()  # what was decided on the device is read
        if not all(torch.equal(a, b) for a, b in zip(before, _state(opt.inner, params), strict=True)):
            return False
    return True


def _state(inner: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    return [t for p in params for t in (p.detach(), *inner.state.get(p, {}).values())]


def _near_a_cpu(device: torch.device) -> float:
    """The largest relative distance of parameters after 32 steps of MT-DAO there and on the CPU, from the same gradients."""
    results = []
    for where in (device, torch.device("cpu")):
        chance = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(96, 64, generator=chance).to(where))]
        opt = MTDAO(QHAdam(params, lr=1e-3), SoloLink(), H=4, clip_norm=1.0)
        for _ in range(32):
            params[0].grad = torch.randn(96, 64, generator=chance).to(where)
            opt.step()
        opt.finish()
        results.append(params[0].detach().cpu())
    return float((results[0] - results[1]).norm() / results[1].norm())


def _messages(device: torch.device) -> bool:
    """What a GPU writes of slots, which are coefficients already, is what a CPU writes of them."""
    chain, like = DCT(64) >> TopK(32) >> Sign(), [torch.zeros(192, 128), torch.zeros(70)]
    slots = [torch.randn(shape) for shape in chain.slot_shapes(like)]
    there = chain.encode_slots([s.to(device) for s in slots], [t.to(device) for t in like]).payload.to_bytes()
    return there == chain.encode_slots(slots, like).payload.to_bytes()


CHECKS: dict[str, Callable[[torch.device], bool | float]] = {
    "hashes are those of a CPU": _hashes,
    "the finite gate decides as on a CPU": _gates,
    "a step with NaN in the gradient is left out": _skipped_steps,
    "messages of equal coefficients are bit-equal to a CPU's": _messages,
    "relative distance from a CPU after 32 steps": _near_a_cpu,
}


def checks(device: torch.device) -> dict[str, bool | float | str]:
    """What each check found; the error where one fails."""
    found: dict[str, bool | float | str] = {}
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        try:
            found[name] = check(device)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def kernels_of(device: torch.device, sizes: list[str], repeats: int) -> dict[str, Any]:
    """Kernels beside torch operations; the error where that fails, so that the rest of the record is kept."""
    found: dict[str, Any] = {}
    repeats = repeats if device.type == "cuda" else 1  # a dry run takes seconds for each
    for size in sizes:
        try:
            wait = functools.partial(on_device.wait_for, device)
            found[size] = device_kernels.compare(device, gpt_shapes(*SIZES[size]), wait=wait, repeats=repeats)
        except Exception as error:
            found[size] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["10M", "124M"], help="models (default: 10M 124M)")
    parser.add_argument("--repeats", type=int, default=10, help="rounds of each method (default: 10)")
    parser.add_argument("--device", default="cuda", help="cpu for a dry run of the whole (default: cuda)")
    parser.add_argument("--out", default="", help="the file (default: thinwire-gpu-DATE.json)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU on this machine; --device cpu makes a dry run")
    figures = {"date": time.strftime("%Y-%m-%d"), **machine(device), "checks": checks(device)}
    figures |= {"wire": on_device.measure(device, arguments.sizes, arguments.repeats)}
    figures |= {"kernels": kernels_of(device, arguments.sizes, arguments.repeats)}
    if os.environ.get("RANK", "0") != "0":
        return
    path = Path(arguments.out or f"thinwire-gpu-{figures['date']}.json")
    write_whole(path, json.dumps(figures, indent=1) + "\n")
    for name, result in figures["checks"].items():
        print(f"{name}: {result}")
    on_device.show(figures["wire"])
    print(json.dumps(figures["kernels"], indent=1))
    print(f"written to {path}: docs/gpu.md says where to send it")


if __name__ == "__main__":
    main()
