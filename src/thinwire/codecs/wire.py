"""The frame of a message that is gathered: an envelope, then one or more parts. docs/wire-format.md describes them.

A message comes from somebody else: it is read as if it were made to do harm. `unseal` checks the envelope and the frames of the
parts, with their checksums, before anything is allocated; the codec then checks what is in them from end to end before anything
is applied.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.bits import Bytes
from thinwire.codecs.device.bits import bytes_on
from thinwire.codecs.device.checksum import crc32
from thinwire.codecs.stages import DENSE_GROUP, off_host
from thinwire.errors import WireError
from thinwire.payload import Payload

MAGIC = b"THNW"
VERSION = 2
# magic, version, flags, parts, fingerprint, round, sender, state hash, length of all parts, weight, checksum
_HEADER = struct.Struct("<4sBBHQQQQQfI")
HEADER_NBYTES = _HEADER.size
_PART = struct.Struct("<QQQHHI")  # first block, blocks, length, value format, index codes, checksum
PART_NBYTES = _PART.size
MOST_PARTS = (1 << 16) - 1
INVALID, MISSING = 1, 2  # flags


@dataclass(frozen=True)
class Envelope:
    """What a header says, besides what every message of a round says alike.

    Attributes:
        sender: id of the worker it comes from, 0 to 2**64 - 1.
        weight: how much its contribution counts.
        invalid: the sender's contribution is not finite: its body means nothing and the round is refused in its name.
        missing: the sender could not read the messages of an earlier round, and asks for them again.
        state_hash: a hash of the sender's replicated state, 0 to 2**64 - 1; 0 where none is given. (`hash_tensors` is signed:
            give it modulo 2**64.)
    """

    sender: int
    weight: float = 1.0
    invalid: bool = False
    state_hash: int = 0
    missing: bool = False


def fingerprint(codec: Codec, like: Sequence[Tensor]) -> int:
    """64 bits that tell whether two workers mean the same codec and the same tensors.

    The first eight bytes, little-endian, of the SHA-256 of the codec as it is written, a line break, and the shapes:
    "64x64,10,".
    """
    return _fingerprint(codec, tuple(tuple(t.shape) for t in like))


@functools.lru_cache(maxsize=256)
def _fingerprint(codec: Codec, shapes: tuple[tuple[int, ...], ...]) -> int:
    told = "".join("x".join(map(str, shape)) + "," for shape in shapes)
    return int.from_bytes(hashlib.sha256(f"{codec!r}\n{told}".encode()).digest()[:8], "little")


# --- Parts ---------------------------------------------------------------------------------------------------------------


def part_header(first: int, blocks: int, length: int, values: int, codes: int = 0) -> bytes:
    """The header of a part, with zeros for its checksum.

    Args:
        first: number of its first block.
        blocks: how many.
        length: bytes that follow.
        values: number of the value format.
        codes: bit i is set where indices are in the code with number i.
    """
    return _PART.pack(first, blocks, length, values, codes, 0)


def with_checksum(header: bytes, pieces: Iterable[Bytes]) -> bytes:
    """A part's header with the checksum of itself and of all that follows it."""
    checksum = zlib.crc32(header)
    for piece in pieces:
        checksum = zlib.crc32(np.ascontiguousarray(piece).data, checksum)
    return header[:-4] + struct.pack("<I", checksum)


def same_part(header: bytes, found: Bytes) -> None:
    """Compare what a part says of itself with what it must be.

    Raises:
        WireError: naming what differs.
    """
    told, due = _PART.unpack(found[:PART_NBYTES].tobytes()), _PART.unpack(header)
    names = ("first block", "number of blocks", "length", "value format", "index codes")
    for name, a, b in zip(names, told, due, strict=False):
        if a != b:
            raise WireError(f"a part whose {name} is {a}, where these shapes and this codec make {b}")


def dense_blocks(like: Sequence[Tensor]) -> int:
    """Blocks of tensors that are sent whole."""
    return sum(-(-t.numel() // DENSE_GROUP) for t in like)


def in_one_part(raw: Tensor, *, blocks: int, values: int) -> Tensor:
    """Bytes [n] as one part of a message, [PART_NBYTES + n]; the first PART_NBYTES of `raw` are overwritten by its header."""
    header = part_header(0, blocks, raw.numel() - PART_NBYTES, values)
    if off_host(raw.device):
        raw[:PART_NBYTES] = _on(header, raw.device)
        raw[PART_NBYTES - 4 : PART_NBYTES] = crc32([raw[None]]).view(-1).view(torch.uint8)
        return raw
    complete = with_checksum(header, [raw[PART_NBYTES:].cpu().numpy()])
    raw[:PART_NBYTES] = torch.frombuffer(bytearray(complete), dtype=torch.uint8)
    return raw


def _walk(raw: Tensor, count: int | None) -> list[tuple[bytes, Tensor]]:
    """The parts of a body: header and all that follows; checksums are not looked at.

    Raises:
        WireError: parts that do not fill the body exactly, or are not `count`.
    """
    parts, at = [], 0
    while at < raw.numel() and len(parts) <= (MOST_PARTS if count is None else count):
        header = raw[at : at + PART_NBYTES].cpu().numpy().tobytes()
        if len(header) < PART_NBYTES:
            raise WireError(f"part {len(parts)}: {len(header)} bytes, where its header has {PART_NBYTES}")
        length = _PART.unpack(header)[2]
        at += PART_NBYTES
        if length > raw.numel() - at:
            raise WireError(f"part {len(parts)}: {length} bytes are announced, where {raw.numel() - at} follow")
        parts.append((header, raw[at : at + length]))
        at += length
    if count is not None and len(parts) != count:
        raise WireError(f"{'more' if len(parts) > count else len(parts)} parts, where the header announces {count}")
    return parts


def check_part(number: int, of: int, header: bytes, rest: Tensor) -> None:
    """Compare the checksum of a part with what came.

    Raises:
        WireError: naming the part.
    """
    told = int.from_bytes(header[-4:], "little")
    found = zlib.crc32(rest.cpu().numpy().data, zlib.crc32(header[:-4] + bytes(4)))
    if found != told:
        raise WireError(
            f"part {number} of {of}: wrong checksum: {found:#010x} instead of {told:#010x}, so it was damaged on the way"
        )


# --- Envelope ------------------------------------------------------------------------------------------------------------


def seal(body: Payload, envelope: Envelope, *, fingerprint: int, round: int, parts: int | None = None) -> Payload:
    """Put a body, which is one or more parts, into its envelope; of an invalid one the length alone is kept.

    Args:
        body: what is sent.
        envelope: what the header says.
        fingerprint: of codec and tensors.
        round: number of the round.
        parts: how many parts the body has, where that is known: it need not be looked at then.
    """
    raw = body.raw()
    if envelope.invalid:
        raw, parts = torch.zeros_like(raw), 1
        raw[:PART_NBYTES] = _on(_empty_header(raw.numel()), raw.device)
    parts = len(_walk(raw, None)) if parts is None else parts
    head = envelope_header(envelope, parts, raw.numel(), fingerprint=fingerprint, round=round)
    return body.like(torch.cat([_on(head, raw.device), raw]))


def _on(data: bytes, device: torch.device) -> Tensor:
    """Bytes as a tensor, on a device without a copy from the host; their number is a multiple of eight."""
    return bytes_on(data, device) if off_host(device) else torch.frombuffer(bytearray(data), dtype=torch.uint8)


@functools.lru_cache(maxsize=16)
def _empty_header(nbytes: int) -> bytes:
    """The header of a part of so many bytes, itself included, in which all others are zero."""
    return with_checksum(part_header(0, 0, nbytes - PART_NBYTES, 0), [np.zeros(nbytes - PART_NBYTES, np.uint8)])


def envelope_header(envelope: Envelope, parts: int, nbytes: int, *, fingerprint: int, round: int) -> bytes:
    """The header of a message with so many parts, of so many bytes together."""
    flags = INVALID * envelope.invalid | MISSING * envelope.missing
    told = (MAGIC, VERSION, flags, parts, fingerprint, round, envelope.sender, envelope.state_hash, nbytes, envelope.weight)
    head = _HEADER.pack(*told, 0)
    return head[:-4] + struct.pack("<I", zlib.crc32(head))


def unseal(message: Payload, *, fingerprint: int, round: int, sender: int, nbytes: int) -> tuple[Payload, Envelope]:
    """Check the envelope and the frames of the parts, and take the body out.

    Args:
        message: as it came.
        fingerprint: of this worker's codec and tensors.
        round: in which it was received.
        sender: whose message it should be.
        nbytes: how long its body must be.

    Returns:
        The body, a view into the message, and the envelope.

    Raises:
        WireError: naming what is wrong, what was found and what was expected.
    """
    try:
        return _unseal(message, fingerprint, round, sender, nbytes)
    except WireError as error:
        raise WireError(str(error), rank=sender) from None


def unseal_each(messages: Sequence[Payload], *, fingerprint: int, round: int, nbytes: int) -> list[tuple[Payload, Envelope]]:
    """`unseal` of the messages of all workers, which say whose they are."""
    opened = []
    for message in messages:
        assert message.sender is not None, "a link says whose message it brings"
        opened.append(unseal(message, fingerprint=fingerprint, round=round, sender=message.sender, nbytes=nbytes))
    return opened


def _unseal(message: Payload, fingerprint: int, round: int, sender: int, nbytes: int) -> tuple[Payload, Envelope]:
    raw = message.data
    if raw.dtype != torch.uint8:
        raise WireError(f"not bytes but {str(raw.dtype).removeprefix('torch.')}")
    if raw.numel() < HEADER_NBYTES:
        raise WireError(f"too short for a header: {message.nbytes} bytes, where {HEADER_NBYTES} are needed")
    head = raw[:HEADER_NBYTES].cpu().numpy().tobytes()
    magic, version, flags, parts, told, number, name, state, length, weight, checksum = _HEADER.unpack(head)
    if magic != MAGIC:
        raise WireError(f"wrong magic: {magic!r} instead of {MAGIC!r}, so it is no message of thinwire")
    if version != VERSION:
        raise WireError(f"wire version {version}, where this thinwire reads version {VERSION}")
    if (found := zlib.crc32(head[:-4] + bytes(4))) != checksum:
        raise WireError(
            f"wrong checksum of the header: {found:#010x} instead of {checksum:#010x}, so it was damaged on the way"
        )
    if length != nbytes:
        raise WireError(f"a body of {length} bytes is announced, where these shapes and this codec make {nbytes}")
    if raw.numel() != HEADER_NBYTES + length:
        raise WireError(f"wrong length: {raw.numel()} bytes came, where the header announces {HEADER_NBYTES + length}")
    if flags & ~(INVALID | MISSING):
        raise WireError(f"unknown flags: {flags:#04x}")
    if told != fingerprint:
        raise WireError(f"fingerprint {told:#018x} instead of {fingerprint:#018x}: another codec, or tensors of other shapes")
    if number != round:
        raise WireError(f"of round {number}, in round {round}")
    if name != sender:
        raise WireError(f"sent in the name of {name}")
    if not (math.isfinite(weight) and weight >= 0):
        raise WireError(f"weight {weight!r}, which must be finite and not negative")
    body = raw[HEADER_NBYTES:]
    for nth, (header, rest) in enumerate(_walk(body, parts)):
        check_part(nth, parts, header, rest)
    return message.like(body), Envelope(name, weight, bool(flags & INVALID), state, bool(flags & MISSING))


def read_flags(message: Payload, *, round: int) -> tuple[bool, bool]:
    """Whether the sender says that its contribution is invalid, and whether it asks for an earlier round.

    As far as the header can be read and is of this round; the rest may be damaged.
    """
    head = message.raw()[:HEADER_NBYTES].cpu().numpy().tobytes()
    if len(head) < HEADER_NBYTES or zlib.crc32(head[:-4] + bytes(4)) != int.from_bytes(head[-4:], "little"):
        return False, False
    _, _, flags, _, _, number, *_ = _HEADER.unpack(head)
    return (bool(flags & INVALID), bool(flags & MISSING)) if number == round else (False, False)
