"""The envelope of a message that is gathered: a header of 48 bytes before the body. docs/wire-format.md describes both.

A message comes from somebody else: it is read as if it were made to do harm. Length, magic, version, checksum, fingerprint,
round and rank are checked here, in this order and before anything is allocated; the codec then checks its body from end to
end before anything is applied.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import WireError
from thinwire.payload import Payload

MAGIC = b"THNW"
VERSION = 1
_HEADER = struct.Struct("<4sBBHQQIfQII")  # magic, version, flags, 0, fingerprint, round, rank, weight, length, 0, checksum
HEADER_NBYTES = _HEADER.size
_WITHDRAWN = 1


@dataclass(frozen=True)
class Envelope:
    """What a header says, besides what every message of a round says alike.

    Attributes:
        rank: the sender.
        weight: how much its contribution counts.
        withdrawn: the sender has nothing good to give: its body means nothing and the round is refused in its name.
    """

    rank: int
    weight: float = 1.0
    withdrawn: bool = False


def fingerprint(codec: Codec, like: Sequence[Tensor]) -> int:
    """64 bits that tell whether two workers mean the same codec and the same tensors.

    The first eight bytes, little-endian, of the SHA-256 of the codec as it is written, a line break, and the shapes:
    "64x64,10,".
    """
    shapes = "".join("x".join(map(str, t.shape)) + "," for t in like)
    return int.from_bytes(hashlib.sha256(f"{codec!r}\n{shapes}".encode()).digest()[:8], "little")


def seal(body: Payload, envelope: Envelope, *, fingerprint: int, round: int) -> Payload:
    """Put a body into its envelope."""
    raw = body.raw()
    told = (MAGIC, VERSION, _WITHDRAWN * envelope.withdrawn, 0, fingerprint, round, envelope.rank, envelope.weight, raw.numel())
    checksum = zlib.crc32(raw.cpu().numpy().data, zlib.crc32(_HEADER.pack(*told, 0, 0)))
    header = torch.frombuffer(bytearray(_HEADER.pack(*told, 0, checksum)), dtype=torch.uint8)
    return body.like(torch.cat([header.to(raw.device), raw]))


def unseal(message: Payload, *, fingerprint: int, round: int, rank: int, nbytes: int) -> tuple[Payload, Envelope]:
    """Check an envelope and take the body out.

    Args:
        message: as it came.
        fingerprint: of this worker's codec and tensors.
        round: in which it was received.
        rank: whose message it should be.
        nbytes: how long its body must be.

    Returns:
        The body, a view into the message, and the envelope.

    Raises:
        WireError: naming what is wrong, what was found and what was expected.
    """
    raw = message.data

    def refuse(what: str) -> WireError:
        return WireError(what, rank=rank)

    if raw.dtype != torch.uint8:
        raise refuse(f"not bytes but {str(raw.dtype).removeprefix('torch.')}")
    if raw.numel() < HEADER_NBYTES:
        raise refuse(f"too short for a header: {message.nbytes} bytes, where {HEADER_NBYTES} are needed")
    head = raw[:HEADER_NBYTES].cpu().numpy().tobytes()
    magic, version, flags, zero, told, number, sender, weight, length, zeros, checksum = _HEADER.unpack(head)
    if magic != MAGIC:
        raise refuse(f"wrong magic: {magic!r} instead of {MAGIC!r}, so it is no message of thinwire")
    if version != VERSION:
        raise refuse(f"wire version {version}, where this thinwire reads version {VERSION}")
    if length != nbytes:
        raise refuse(f"a body of {length} bytes is announced, where these shapes and this codec make {nbytes}")
    if raw.numel() != HEADER_NBYTES + length:
        raise refuse(f"wrong length: {raw.numel()} bytes came, where the header announces {HEADER_NBYTES + length}")
    body = raw[HEADER_NBYTES:]
    found = zlib.crc32(body.cpu().numpy().data, zlib.crc32(head[:-4] + bytes(4)))
    if found != checksum:
        raise refuse(f"wrong checksum: {found:#010x} instead of {checksum:#010x}, so it was damaged on the way")
    if flags & ~_WITHDRAWN or zero or zeros:
        raise refuse(f"unknown flags: {flags:#04x}, {zero:#06x}, {zeros:#010x}")
    if told != fingerprint:
        raise refuse(f"fingerprint {told:#018x} instead of {fingerprint:#018x}: another codec, or tensors of other shapes")
    if number != round:
        raise refuse(f"of round {number}, in round {round}")
    if sender != rank:
        raise refuse(f"sent in the name of rank {sender}")
    if not (math.isfinite(weight) and weight >= 0):
        raise refuse(f"weight {weight!r}, which must be finite and not negative")
    return message.like(body), Envelope(sender, weight, bool(flags & _WITHDRAWN))
