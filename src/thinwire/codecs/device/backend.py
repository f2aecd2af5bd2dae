"""Which chains torch operations can do on a device; numpy and C kernels do the others on the host."""

from __future__ import annotations

import torch

from thinwire.codecs.device.indices import KNOWN
from thinwire.codecs.device.positions import BY_SIZE
from thinwire.codecs.device.values import FORMATS
from thinwire.codecs.registry import INDEX_CODES
from thinwire.codecs.stages import Stages, off_host


def on_device(stages: Stages, device: torch.device) -> bool:
    """Whether messages of tensors there are made and read in torch operations: off the CPU, of stages that it knows."""
    if not off_host(device) or device.type == "mps":  # which has no float64
        return False
    selection, codes = stages.selection, [code for _, code in INDEX_CODES.items()]
    chosen = not selection.indexed or (type(selection) in BY_SIZE and all(code in KNOWN for code in codes))
    return type(stages.values) in FORMATS and chosen
