"""Whether Triton kernels can be had on a device, how they are started, and the tables of addresses that they are given."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import check_choice
from thinwire.kernels.build import SETTING

log = logging.getLogger("thinwire")

LEAST_CAPABILITY = (8, 0)  # of a GPU: what the kernels have been compiled for, and newer
# How kernels are compiled. Matrix products are sums of float32 in one order, whatever the matrix units of a card would do: the
# inverse has to give the same bits on all workers.
SETTINGS: dict[str, Any] = {
    "forward": "ieee",
    "inverse": "ieee",
    # Of 32 threads, for each program.
    "warps": {"encode": 16, "combine": 16, "crc_segments": 4, "crc_join": 8, "restore": 4},  # 1 for all others
}
_MODULES = {
    "blocks": ("encode",),
    "received": ("read", "combine", "take"),
    "rows": ("encode_rows", "read_rows", "combine_rows", "take_rows"),
    "checksum": ("crc_segments", "crc_join"),
    "envelope": ("open_envelopes",),
    "gate": ("restore",),
}
_TABLES = 64  # tables of addresses that are kept
_trying, _keeping = threading.Lock(), threading.Lock()
_kept: dict[tuple[Any, ...], Tensor] = {}


@functools.cache
def installed() -> bool:
    """Whether there is a Triton to import; nothing is imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def possible(device: torch.device) -> bool:
    """Whether kernels could run on tensors there, if Triton were installed and they were not switched off."""
    if interpreted():
        return device.type == "cpu"
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def available(device: torch.device) -> bool:
    """Whether kernels are used on tensors there; else torch operations do the same."""
    return name(device) != "off"


def name(device: torch.device) -> str:
    """Which arithmetic kernels use there, for the handshake: a hash of what they make of given numbers, or "off"."""
    setting = os.environ.get(SETTING, "auto")
    check_choice(SETTING, setting, ("auto", "off"))
    if setting == "off" or not installed() or not possible(device):
        return "off"
    with _trying:  # several threads may ask for the first time
        return _tried(device)


@functools.lru_cache(maxsize=16)
def _tried(device: torch.device) -> str:
    try:
        from thinwire.kernels.triton.trial import trial

        return f"triton-{hashlib.sha256(trial(device)).hexdigest()[:16]}"
    except Exception as error:  # a compiler, a driver or a card that Triton cannot use: torch operations can
        log.warning("the Triton kernels cannot be used, so sparse rounds use torch operations: %s", error)
        return "off"


def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel; all of thinwire's are started here.

    Args:
        kernel: its name.
        grid: how many programs.
        arguments: what it is given.
        constants: what it is compiled for; dtypes are torch's.
    """
    tl = importlib.import_module("triton.language")
    dtypes = {n: getattr(tl, str(c).removeprefix("torch.")) for n, c in constants.items() if isinstance(c, torch.dtype)}
    # What is rounded together is said by the kernels, so that it is the same on every card and in the interpreter.
    given = constants | dtypes
    with _device_of(arguments):
        _kernel(kernel)[grid](*arguments, **given, num_warps=SETTINGS["warps"].get(kernel, 1), enable_fp_fusion=False)


def _device_of(arguments: Sequence[Any]) -> AbstractContextManager[Any]:
    """Within it the GPU that the arguments are on is the current one, on which Triton starts kernels."""
    device = next((a.device for a in arguments if isinstance(a, Tensor)), None)
    return nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device)


@functools.cache
def _kernel(name: str) -> Any:
    module = next(module for module, names in _MODULES.items() if name in names)
    return getattr(importlib.import_module(f"thinwire.kernels.triton.{module}"), name)


def addresses(lists: Sequence[Sequence[Tensor | None]], device: torch.device) -> Tensor:
    """Where tensors are, int64 [lists, tensors], 0 for None; copied without a wait, and only where it changes.

    Gradients may be somewhere else at each step; most often they are not.
    """
    found = tuple(0 if t is None else t.data_ptr() for some in lists for t in some)
    return _table((device, len(lists), found), lambda: np.array(found, np.int64).reshape(len(lists), -1), device)


def _table(key: tuple[Any, ...], make: Callable[[], np.ndarray], device: torch.device) -> Tensor:
    with _keeping:
        if key not in _kept:
            while len(_kept) >= _TABLES:
                del _kept[next(iter(_kept))]
            host = torch.from_numpy(make())
            _kept[key] = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
        return _kept[key]


STRETCH, STEP = 1 << 16, 1 << 11  # bytes of a tensor that a program gives back, in all and at once


def restore(new: Sequence[Tensor], old: Sequence[Tensor], refused: Tensor) -> None:
    """Give contiguous tensors their old values where a flag on the device (0-d, bool) says so, in one launch.

    Args:
        new: changed in place.
        old: of the same shapes and dtypes.
        refused: the flag.
    """
    sizes, device = tuple(t.numel() * t.element_size() for t in new), refused.device
    if not any(sizes):
        return
    places, nbytes = _stretches(sizes, device)
    given = (places, addresses([new, old], device), len(new), nbytes, refused.view(torch.uint8))
    launch("restore", (len(places),), *given, SIZE=STRETCH, STEP=STEP)


@functools.lru_cache(maxsize=64)
def _stretches(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The table of stretches, int32 [stretches, 2], and the bytes of each tensor."""
    counts = [-(-size // STRETCH) for size in sizes]
    table = [np.stack([np.full(n, i, np.int32), np.arange(n, dtype=np.int32)], 1) for i, n in enumerate(counts)]
    return torch.from_numpy(np.concatenate(table)).to(device), torch.tensor(sizes, dtype=torch.int64).to(device)
