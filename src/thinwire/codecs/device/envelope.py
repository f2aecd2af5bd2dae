"""Envelopes on a device: the messages of a round are opened together, with one flag per worker for what is not sound.

`open_all` looks at nothing from the host. `unseal_all` reads its flags, once for all messages; where one is set, the messages
are opened on the host one by one, which says what is wrong and decides.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs.device.bits import aligned, bytes_on, table
from thinwire.codecs.device.checksum import crc32_around, sums_by_kernels
from thinwire.codecs.stages import off_host
from thinwire.codecs.wire import (
    HEADER_NBYTES,
    INVALID,
    MISSING,
    PART_NBYTES,
    Envelope,
    envelope_header,
    part_header,
    seal,
    unseal_each,
    with_checksum,
)
from thinwire.kernels import triton
from thinwire.payload import Payload

Frame = tuple[int, int]  # where a part begins and ends in a body


@dataclass(frozen=True)
class Opened:
    """What the envelopes of all messages say, on the device, [messages] each.

    Attributes:
        wrong: not what it must be, or damaged.
        invalid: an undamaged header of this round says that the contribution is invalid; the rest may be wrong.
        flags: `wire.INVALID` and `wire.MISSING`.
        weights: how much each contribution counts, float32.
        states: hashes of the senders' replicated states, as the bits of int64.
    """

    wrong: Tensor
    invalid: Tensor
    flags: Tensor
    weights: Tensor
    states: Tensor


def open_all(raw: Tensor, senders: Sequence[int], frames: Sequence[Frame], *, fingerprint: int, round: int) -> Opened:
    """Check envelopes, frames and checksums of several messages.

    Args:
        raw: all of them, [messages, nbytes].
        senders: whose they should be.
        frames: the parts of a body, which fill it.
        fingerprint: see `wire.unseal`.
        round: see `wire.unseal`.
    """
    due = [envelope_header(Envelope(s), len(frames), frames[-1][1], fingerprint=fingerprint, round=round) for s in senders]
    if triton.available(raw.device):
        return _open_by_kernel(raw, due, frames)
    words = aligned(raw[:, :HEADER_NBYTES], torch.int64)
    wanted = [[int.from_bytes(head[at : at + 8], "little", signed=True) for head in due] for at in range(0, 48, 8)]
    flags = words[:, 0] >> 40 & 0xFF
    first = words[:, 0] & ~(0xFF << 40)
    weights = aligned(raw[:, 48:52], torch.float32).squeeze(1)
    wrong = [first != wanted[0][0], flags > (INVALID | MISSING), ~(weights.isfinite() & (weights >= 0))]
    # The fingerprint, the round and the length are the same in all of them; the hash of the state may be anything.
    wrong += [words[:, nth] != wanted[nth][0] for nth in (1, 2, 5)]
    wrong.append(words[:, 3] != table(tuple(wanted[3]), torch.int64, raw.device))
    wrong.append(damaged := _damaged(raw, [(0, HEADER_NBYTES, HEADER_NBYTES)]))
    invalid = (flags & INVALID != 0) & ~damaged & (words[:, 2] == wanted[2][0])
    body = raw[:, HEADER_NBYTES:]
    for start, stop in frames:
        length = aligned(body[:, start + 16 : start + 24], torch.int64).squeeze(1)
        wrong.append(length != stop - start - PART_NBYTES)
    wrong.append(_damaged(body, [(start, start + PART_NBYTES, stop) for start, stop in frames]))
    return Opened(torch.stack(wrong).any(0), invalid, flags, weights, words[:, 4])


def _open_by_kernel(raw: Tensor, due: list[bytes], frames: Sequence[Frame]) -> Opened:
    """The same by Triton kernels: see `kernels.triton.envelope`."""
    device, many = raw.device, len(raw)
    words = [[int.from_bytes(head[at : at + 8], "little", signed=True) for at in range(0, 48, 8)] for head in due]
    parts = [(HEADER_NBYTES + start, HEADER_NBYTES + start + PART_NBYTES, HEADER_NBYTES + stop) for start, stop in frames]
    sums = sums_by_kernels(raw, [(0, HEADER_NBYTES, HEADER_NBYTES), *parts])
    told = torch.empty((2, many), dtype=torch.uint8, device=device)
    whole, weights = torch.empty((2, many), dtype=torch.int64, device=device), torch.empty(many, device=device)
    tables = (table(tuple(word[3] for word in words), torch.int64, device), _frames_on(tuple(frames), device), len(frames))
    first, fingerprint, round, _, _, nbytes = words[0]
    given = (raw, raw.stride(0), *tables, sums, first, fingerprint, round, nbytes, *told, whole[0], weights, whole[1])
    how = {"HEADER": HEADER_NBYTES, "PART": PART_NBYTES, "INVALID": INVALID, "KNOWN": INVALID | MISSING}
    triton.launch("open_envelopes", (many,), *given, **how)
    wrong, invalid = told.view(torch.bool)
    return Opened(wrong, invalid, whole[0], weights, whole[1])


@functools.lru_cache(maxsize=64)
def _frames_on(frames: tuple[Frame, ...], device: torch.device) -> Tensor:
    return torch.tensor(frames, dtype=torch.int64).to(device)


def seal_unless(invalid: Tensor, body: Payload, envelope: Envelope, *, fingerprint: int, round: int, parts: int) -> Payload:
    """`wire.seal`, as an invalid contribution where a flag on the device (0-d) says so, which nobody looks at."""
    how = {"fingerprint": fingerprint, "round": round}
    valid, nbytes = seal(body, envelope, parts=parts, **how), body.nbytes
    # The other message is known to the host but for the zeros that follow, and of that only the header changes.
    head = bytes_on(envelope_header(replace(envelope, invalid=True), 1, nbytes, **how), body.data.device)
    part = table(tuple(_part_of_zeros(nbytes)), torch.uint8, head.device)
    zeros = head.new_zeros(nbytes - PART_NBYTES)
    return valid.like(torch.where(invalid, torch.cat([head, part, zeros]), valid.data))


@functools.lru_cache(maxsize=64)
def _part_of_zeros(nbytes: int) -> bytes:
    """The header of the part of an invalid message, of so many bytes with the zeros that follow it."""
    rest = nbytes - PART_NBYTES
    return with_checksum(part_header(0, 0, rest, 0), [np.zeros(rest, np.uint8)])


def _damaged(raw: Tensor, stretches: Sequence[tuple[int, int, int]]) -> Tensor:
    """Whether a checksum is wrong: of stretches that begin and end somewhere, with the checksum in front of a place within."""
    told = torch.cat([aligned(raw[:, at - 4 : at], torch.int32) for _, at, _ in stretches], 1)
    return (crc32_around(raw, stretches) != told).any(1)


def unseal_all(
    messages: Sequence[Payload], *, fingerprint: int, round: int, nbytes: int, frames: Sequence[Frame] | None
) -> list[tuple[Payload, Envelope]]:
    """`wire.unseal` of the messages of all workers, which say whose they are.

    Args:
        messages: as they came, each with its sender.
        fingerprint: see `wire.unseal`.
        round: see `wire.unseal`.
        nbytes: see `wire.unseal`.
        frames: the parts of a body; None where they are not known.

    Raises:
        WireError: see `wire.unseal`.
    """
    senders = [message.sender for message in messages if message.sender is not None]
    even = all(m.data.dtype == torch.uint8 and m.nbytes == HEADER_NBYTES + nbytes for m in messages)
    if frames and even and len(senders) == len(messages) and off_host(messages[0].data.device):
        raw = torch.stack([message.data for message in messages])
        opened = open_all(raw, senders, frames, fingerprint=fingerprint, round=round)
        weights = opened.weights.view(torch.int32)
        told = torch.stack([opened.wrong, opened.flags, weights, opened.states], 1).cpu()
        if not told[:, 0].any():
            return [_unsealed(*each) for each in zip(messages, senders, told, strict=True)]
    return unseal_each(messages, fingerprint=fingerprint, round=round, nbytes=nbytes)


def _unsealed(message: Payload, sender: int, told: Tensor) -> tuple[Payload, Envelope]:
    """The body and the envelope of a message that is sound."""
    _, flags, bits, state = told.tolist()
    weight = float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    envelope = Envelope(sender, weight, bool(flags & INVALID), state % (1 << 64), bool(flags & MISSING))
    return message.like(message.data[HEADER_NBYTES:]), envelope
