"""Which backend makes and reads the messages of a chain: numpy and C kernels on the host, or torch operations on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from thinwire.codecs.device.indices import KNOWN
from thinwire.codecs.device.positions import BY_SIZE
from thinwire.codecs.device.values import FORMATS
from thinwire.codecs.registry import INDEX_CODES
from thinwire.codecs.stages import Stages

_everywhere = False


def off_host(device: torch.device) -> bool:
    """Whether numpy cannot look at tensors there."""
    return device.type != "cpu" or _everywhere


def on_device(stages: Stages, device: torch.device) -> bool:
    """Whether messages of tensors there are made and read in torch operations: off the CPU, of stages that it knows."""
    if not off_host(device) or device.type == "mps":  # which has no float64
        return False
    selection, codes = stages.selection, [code for _, code in INDEX_CODES.items()]
    chosen = not selection.indexed or (type(selection) in BY_SIZE and all(code in KNOWN for code in codes))
    return type(stages.values) in FORMATS and chosen


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Within it, torch operations are used on CPUs too: for tests that compare both backends."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before
