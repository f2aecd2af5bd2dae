"""The Triton kernels of a sparse round beside torch operations, on the same numbers: part of `benchmarks.report_gpu`.

What takes turns is encoding (momentum, transform, selection, bytes), reading the messages of all workers, their mean's squares,
and the step. Messages of equal slots must have the same bytes; means differ by the last bits of the transform.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire import DCT, Mean, Sign, TopK, kernels
from thinwire.codecs import Messages
from thinwire.codecs.device.decoder import DeviceReceived
from thinwire.codecs.device.fused_decoder import read_on_device
from thinwire.kernels import triton

WAYS = {"kernels": "auto", "torch": "off"}  # and what switches them
DECAY, LR = 0.999, 1e-3


def installed() -> str | None:
    """The version of Triton; None where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("triton")
    return None


@contextlib.contextmanager
def switched(way: str) -> Iterator[None]:
    """Within it, kernels are used, or torch operations."""
    before = os.environ.get(kernels.SETTING)
    os.environ[kernels.SETTING] = WAYS[way]
    try:
        yield
    finally:
        os.environ.pop(kernels.SETTING)
        if before is not None:
            os.environ[kernels.SETTING] = before


def compare(
    device: torch.device,
    shapes: Sequence[tuple[int, ...]],
    *,
    wait: Callable[[], None],
    repeats: int,
    k: int = 128,
    workers: int = 8,
) -> dict[str, Any]:
    """Seconds of each part, medians, and whether both ways say the same; of torch operations alone where there are no kernels.

    Args:
        device: where the tensors are.
        shapes: of the parameters.
        wait: until the device has done what it was given.
        repeats: turns of each way.
        k: entries that are kept of a block.
        workers: whose messages are read.
    """
    with switched("kernels"):
        ways = list(WAYS) if triton.available(device) else ["torch"]
        found: dict[str, Any] = {"triton": installed(), "kernels": triton.name(device), "k": k, "workers": workers}
    chain, chance = DCT(64) >> TopK(k) >> Sign(), torch.Generator().manual_seed(0)

    def numbers(some: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [torch.randn(shape, generator=chance).to(device) for shape in some]

    params, slots = numbers(shapes), numbers(chain.slot_shapes([torch.empty(s, device="meta") for s in shapes]))
    grads, plan = numbers(shapes), chain.plan([torch.empty(s, device="meta") for s in shapes])
    payloads = [chain.encode_slots([s + rank for s in slots], params).payload for rank in range(workers)]
    messages = Messages(payloads, params, mean=Mean(over="senders"))
    made: dict[str, tuple[bytes, list[Tensor]]] = {}
    for way in ways:
        with switched(way):
            made[way] = (chain.encode_slots(slots, params).payload.to_bytes(), read_on_device(chain, plan, messages).tensors())
            parts = {name: list[float]() for name in ("encode", "read", "squares", "step")}
            for turn in range(repeats + 1):
                momentum, x, read = [s.clone() for s in slots], [p.clone() for p in params], list[DeviceReceived]()
                work: dict[str, Callable[[], Any]] = {
                    "encode": lambda m=momentum: chain.encode_slots(m, grads, decay=DECAY, scale=1.0),
                    "read": lambda out=read: out.append(read_on_device(chain, plan, messages, raises=False)),
                    "squares": lambda out=read: out[0].squares(),
                    "step": lambda out=read, x=x: out[0].step(x, [LR] * len(x), [False] * len(x)),
                }
                for name, part in work.items():
                    wait()
                    started = time.perf_counter()
                    part()
                    wait()
                    if turn:  # the first turn compiles
                        parts[name].append(time.perf_counter() - started)
            found[f"{way} s"] = {name: statistics.median(times) for name, times in parts.items()}
    if len(made) == 2:
        (raw, means), (other, others) = made.values()
        pairs = list(zip(means, others, strict=True))
        found["messages are equal"] = raw == other
        found["largest relative distance of means"] = max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
    return found
