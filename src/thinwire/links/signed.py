"""Signed objects: what a worker writes into the store of an elastic run, and how others check it.

A signature covers the key that the object is for and the chain (SHA-256 of the last manifest), so that an object of another
name, round or history does not verify. A message begins with a small header; whatever is wrong with it is a `WireError`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch

from thinwire.errors import WireError
from thinwire.links.manifest import Signer
from thinwire.payload import Payload

_MAGIC = b"THNE"
_VERSION = 2
# Magic, version, flags, round, sender, chain, step, blocks, seconds of a step, length.
_HEADER = struct.Struct("<4sBBQQ32sQIdQ")
MESSAGE_NBYTES = _HEADER.size
_LAST, _KEPT = 1, 2


@dataclass(frozen=True)
class Message:
    """The message of one worker in one round.

    Attributes:
        number: of the round.
        sender: whose it is.
        chain: SHA-256 of the manifest before.
        step: the run's counted step at which its sender says that the round takes place.
        last: whether it is the round of `finish()`.
        kept: whether it says what was left out of an earlier round, with no steps since.
        blocks: of those that its sender holds by the books of the run, how many it has worked on: the first ones.
        step_seconds: that its sender takes for a local step; 0 where it does not say.
        body: what it says.
    """

    number: int
    sender: int
    chain: bytes
    step: int
    last: bool
    kept: bool
    blocks: int
    step_seconds: float
    body: bytes


def seal_message(signer: Signer, message: Message) -> bytes:
    """The bytes of a message, signed."""
    flags = _LAST * message.last | _KEPT * message.kept
    told = (message.number, message.sender, message.chain, message.step, message.blocks, message.step_seconds)
    raw = _HEADER.pack(_MAGIC, _VERSION, flags, *told, len(message.body)) + message.body
    return raw + signer.sign(_context("message") + raw)


def open_message(signer: Signer, raw: bytes, *, number: int, sender: int, chain: bytes) -> Message:
    """What a message says; a `WireError` with the reason where it is not one of this worker, round and history."""
    room = MESSAGE_NBYTES + signer.nbytes
    if len(raw) < room:
        raise WireError(f"{len(raw)} bytes, where a message has at least {room}", rank=sender)
    magic, version, flags, n, who, told_chain, step, blocks, seconds, length = _HEADER.unpack_from(raw)
    told, signature = raw[: len(raw) - signer.nbytes], raw[len(raw) - signer.nbytes :]
    if magic != _MAGIC or version != _VERSION or flags & ~(_LAST | _KEPT):
        raise WireError(f"not a message of version {_VERSION}", rank=sender)
    if length != len(raw) - room:
        raise WireError(f"{len(raw) - room} bytes came, where {length} are announced", rank=sender)
    if who != sender:
        raise WireError(f"sent in the name of worker {who}", rank=sender)
    if n != number or told_chain != chain:
        raise WireError(f"of round {n} or of another history, in round {number}", rank=sender)
    if step >= 1 << 62 or not 0 <= seconds < math.inf:
        raise WireError(f"step {step} of {seconds} s, which cannot be", rank=sender)
    if not signer.verify(sender, _context("message") + told, signature):
        raise WireError("its signature is wrong", rank=sender)
    kinds = bool(flags & _LAST), bool(flags & _KEPT)
    return Message(n, who, told_chain, step, *kinds, blocks, seconds, told[MESSAGE_NBYTES:])


def seal_text(signer: Signer, kind: str, chain: bytes, text: bytes = b"") -> bytes:
    """Some bytes of a kind, such as "manifest", with the signature of this worker behind them."""
    return text + signer.sign(_context(kind) + chain + text)


def open_text(signer: Signer, sender: int, kind: str, chain: bytes, raw: bytes) -> bytes:
    """The bytes that `seal_text` was given; a `WireError` where the signature is not that of `sender`."""
    end = len(raw) - signer.nbytes
    if end < 0 or not signer.verify(sender, _context(kind) + chain + raw[:end], raw[end:]):
        raise WireError(f"the signature of its {kind} is wrong", rank=sender)
    return raw[:end]


def _context(kind: str) -> bytes:
    return f"thinwire {kind}\n".encode()


def as_payload(message: Message, like: Payload) -> Payload:
    """The body of a message as what came over a link; a copy, so that numbers in it are aligned."""
    data = torch.frombuffer(bytearray(message.body), dtype=torch.uint8) if message.body else like.data.new_empty(0)
    return Payload(data, purpose=like.purpose, fixed=False, sender=message.sender)
