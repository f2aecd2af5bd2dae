"""Triton kernels for sparse rounds on GPUs: never needed, and not imported before they are used.

`available(device)` says whether they are used on tensors there: an NVIDIA GPU, Triton installed (`thinwire[triton]`), and not
switched off (THINWIRE_KERNELS=off). Else torch operations do the same in more launches and several times the traffic. All
that is exact has the same bits either way; of the transform the last bits differ, so all workers must use the same, which the
handshake compares (`name(device)`).
"""

from thinwire.kernels.triton.start import SETTINGS, addresses, available, launch, name, possible, restore

__all__ = ["SETTINGS", "addresses", "available", "launch", "name", "possible", "restore"]
