"""C kernels for sparse rounds on CPUs: compiled once by the system's compiler, never needed.

`library()` gives them, or None where they are switched off (THINWIRE_KERNELS=off) or cannot be had: the codecs then do the same
in torch and numpy, several times slower. All that is exact has the same bits either way; of the transform the last bits differ,
so all workers must use the same, which the handshake compares (`name()`).
"""

from thinwire.kernels.build import SETTING, library, name
from thinwire.kernels.calls import BLOCK, Entries, Kernels, Whitening, cosines

__all__ = ["BLOCK", "SETTING", "Entries", "Kernels", "Whitening", "cosines", "library", "name"]
