"""A codec of one's own: one byte per value."""

from dataclasses import dataclass

import torch

from thinwire import Codec, Payload
from thinwire.payload import split


@dataclass(frozen=True)
class Int8(Codec):
    """Each tensor as one float32 scale and one byte per value."""

    linear = False  # messages with different scales cannot be averaged as they are

    def encode(self, tensors, *, round=0):
        scales = torch.stack([t.abs().amax().float() if t.numel() else torch.zeros(()) for t in tensors]).clamp(min=1e-30)
        steps = [(t / scale * 127).round().to(torch.int8).flatten() for t, scale in zip(tensors, scales, strict=True)]
        return Payload(torch.cat([scales.view(torch.uint8), *(s.view(torch.uint8) for s in steps)]))

    def decode(self, payload, like, *, round=0):
        head = 4 * len(like)
        scales = payload.data[:head].view(torch.float32)
        steps = split(payload.data[head:].view(torch.int8).float(), like)
        return [s * (scale / 127) for s, scale in zip(steps, scales, strict=True)]

    def nbytes(self, like):
        return sum(4 + t.numel() for t in like)
