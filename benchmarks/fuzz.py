"""Messages made to do harm: `python -m benchmarks.fuzz --messages 1000000`.

Good messages of several codecs are mutated (bits, bytes, numbers that mean something, cuts, additions, swaps, splices) and read
as an exchange reads them. Every second one is sealed again with the right checksum, as somebody who means harm would do.

* With a wrong checksum, every message must be refused by its envelope or by the frame of a part.
* With a right one it must be refused with a `WireError` that names the sender, or be read: finite, of the right shapes. Values
  that are finite but so large that a mean may overflow are told by `Received.safe`, and the exchange refuses them.
* Nothing else may come out: no other error, no warning, no large allocation (the address space is limited while it runs), no
  message that takes seconds.

A few thousand go through the same mutator in tests/codecs/test_hostile.py.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import struct
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.codecs.catalogue import GATHERED
from torch import Tensor

from benchmarks import record
from thinwire.codecs import Chain, Codec, Fp4, Identity, Mean, Messages, Sign, Stage, TopK, TwoBit
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES, Envelope, fingerprint, seal, unseal
from thinwire.errors import WireError
from thinwire.payload import Payload, all_finite

ROUND, RANK = 7, 1
SHAPES: list[tuple[int, ...]] = [(9, 20), (3,), (70,), (2, 3, 5)]
LARGE: list[tuple[Codec, tuple[int, ...]]] = [
    (Identity(16) >> TopK(20) >> Fp4(5), (16, 128)),
    (TopK(256) >> Sign(), (64, 64)),  # gaps in rows of bits
    (TopK(1024) >> TwoBit(), (64, 64)),  # a bitmap
]
MEANS = [Mean(), Mean(over="senders"), Mean(clip_norm=1.0, median_norm=True), Mean(trimmed=0.3), Mean("senders", trimmed=0.4)]


# --- The mutator -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """A message that may be bad.

    Attributes:
        kind: what was done to it.
        message: the result, not sealed again.
    """

    kind: str
    message: bytes


# Zeros, ones, NaN, Inf, the largest and the smallest numbers of three float formats, and sizes beyond any memory.
TELLING = [
    *(bytes(n) for n in (1, 2, 4, 8)),
    *(b"\xff" * n for n in (1, 2, 4, 8)),
    *(struct.pack("<f", x) for x in (float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 3.4e38, 1e-45)),
    *(struct.pack("<H", x) for x in (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x7C00, 0xFC00, 0x7C01, 0x8000, 0x7F7F, 0x0001)),
    *(struct.pack("<Q", 1 << n) for n in (20, 31, 32, 40, 60, 63)),
    b"\x80",
    b"\x7f",
]


def mutations(rng: random.Random, good: Sequence[bytes], count: int, foreign: Sequence[bytes] = ()) -> Iterator[Mutation]:
    """So many mutated messages.

    Args:
        rng: the source of all choices.
        good: messages that a reader accepts, to be mutated.
        count: how many to make.
        foreign: messages of other codecs, rounds or ranks, to be spliced in.
    """
    kinds, others = list(_KINDS), [*good, *foreign]
    for _ in range(count):
        kind = rng.choice(kinds)
        raw = bytearray(rng.choice(good))
        frame = HEADER_NBYTES + PART_NBYTES
        first = frame if rng.random() < 0.5 and len(raw) > frame else 0
        yield Mutation(kind, bytes(_KINDS[kind](_Draft(rng, raw, first, others))))


def resealed(message: bytes) -> bytes:
    """The message with the checksums that belong to it, as far as it has headers to put them in."""
    if len(message) < HEADER_NBYTES:
        return message
    raw, at = bytearray(message), HEADER_NBYTES
    raw[HEADER_NBYTES - 4 : HEADER_NBYTES] = struct.pack("<I", zlib.crc32(raw[: HEADER_NBYTES - 4] + bytes(4)))
    while at + PART_NBYTES <= len(raw):
        stop = at + PART_NBYTES + int.from_bytes(raw[at + 16 : at + 24], "little")
        if stop > len(raw):
            break
        checksum = zlib.crc32(raw[at : at + PART_NBYTES - 4] + bytes(4) + raw[at + PART_NBYTES : stop])
        raw[at + PART_NBYTES - 4 : at + PART_NBYTES] = struct.pack("<I", checksum)
        at = stop
    return bytes(raw)


@dataclass
class _Draft:
    """A message to be mutated.

    Attributes:
        rng: the source of all choices.
        raw: the message; may be overwritten.
        first: the first byte to change. Half of all changes spare the headers, or few would come as far as the body.
        others: messages to take parts of.
    """

    rng: random.Random
    raw: bytearray
    first: int
    others: list[bytes]


def _flip_bits(d: _Draft) -> bytearray:
    for _ in range(d.rng.choice((1, 1, 1, 2, 3, 8))):
        d.raw[d.rng.randrange(d.first, len(d.raw))] ^= 1 << d.rng.randrange(8)
    return d.raw


def _change_bytes(d: _Draft) -> bytearray:
    for _ in range(d.rng.choice((1, 1, 2, 4))):
        d.raw[d.rng.randrange(d.first, len(d.raw))] = d.rng.randrange(256)
    return d.raw


def _put_number(d: _Draft) -> bytearray:
    number = d.rng.choice(TELLING)
    at = d.rng.randrange(d.first, len(d.raw))
    d.raw[at : at + len(number)] = number[: len(d.raw) - at]
    return d.raw


def _put_field(d: _Draft) -> bytearray:
    """One field of the header, or of that of the first part, at its place."""
    fields = ((0, 4), (4, 1), (5, 1), (6, 2), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4), (52, 4))
    part = tuple((HEADER_NBYTES + at, size) for at, size in ((0, 8), (8, 8), (16, 8), (24, 2), (26, 2), (28, 4)))
    at, size = d.rng.choice((*fields, *part))
    d.raw[at : at + size] = (d.rng.choice(TELLING) if d.rng.random() < 0.5 else d.rng.randbytes(size)).ljust(size, b"\0")[:size]
    return d.raw


def _cut(d: _Draft) -> bytearray:
    at = d.rng.randrange(d.first, len(d.raw))
    return d.raw[:at] if d.rng.random() < 0.5 else d.raw[:at] + d.raw[at + d.rng.randrange(1, 9) :]


def _lengthen(d: _Draft) -> bytearray:
    more = d.rng.randbytes(d.rng.choice((1, 2, 8, 48, 500)))
    at = d.rng.choice((len(d.raw), d.rng.randrange(d.first, len(d.raw))))
    return d.raw[:at] + more + d.raw[at:]


def _swap(d: _Draft) -> bytearray:
    size = d.rng.randrange(1, 9)
    a, b = sorted(d.rng.randrange(d.first, len(d.raw)) for _ in range(2))
    size = min(size, b - a, len(d.raw) - b)
    d.raw[a : a + size], d.raw[b : b + size] = d.raw[b : b + size], d.raw[a : a + size]
    return d.raw


def _repeat(d: _Draft) -> bytearray:
    """A stretch written over its neighbour: equal indices."""
    size = d.rng.randrange(1, 9)
    at = d.rng.randrange(d.first, len(d.raw))
    part = d.raw[at : at + size][: max(0, len(d.raw) - at - size)]
    d.raw[at + size : at + size + len(part)] = part
    return d.raw


def _splice(d: _Draft) -> bytearray:
    other = d.rng.choice(d.others)
    a, b = sorted(d.rng.randrange(d.first, len(d.raw) + 1) for _ in range(2))
    return d.raw[:a] + other[a:b] + d.raw[b:]


def _noise(d: _Draft) -> bytearray:
    d.raw[d.first :] = d.rng.randbytes(len(d.raw) - d.first)
    return d.raw


_KINDS = {
    "bits flipped": _flip_bits,
    "bytes changed": _change_bytes,
    "a telling number": _put_number,
    "a field of the header": _put_field,
    "cut": _cut,
    "lengthened": _lengthen,
    "swapped": _swap,
    "repeated": _repeat,
    "spliced": _splice,
    "noise": _noise,
}


# --- The judge -------------------------------------------------------------------------------------------------------------

UNCHANGED = "not changed after all"
ENVELOPE = "refused by the envelope or the frame of a part"
BODY = "refused by the body"
INVALID = "invalid by its sender's own word"
EXCHANGE = "refused by the exchange: the mean might not be finite"
READ = "read: finite, of the right shapes"
WRONG = "WRONG"


class Case:
    """A codec, its good messages, and a reader that is given bad ones.

    Args:
        codec: not linear.
        shapes: of the tensors.
        mean: how the bad message is combined with a good one.
    """

    def __init__(self, codec: Codec, shapes: Sequence[tuple[int, ...]], mean: Mean):
        self.codec: Codec = codec.chain if isinstance(codec, Stage) else codec
        self.shapes, self.mean = list(shapes), mean
        self.like = [torch.empty(s, device="meta") for s in shapes]
        self.told, self.nbytes = fingerprint(self.codec, self.like), self.codec.nbytes(self.like)
        self.good = [self.message(seed) for seed in (0, 1)]
        self.foreign = [self.message(2, round=ROUND + 1), self.message(2, rank=0), self.message(2, invalid=True)]
        self.neighbour = Payload.of_bytes(self.message(3)[HEADER_NBYTES:])
        assert all(self._read(message, weighted=True) == READ for message in self.good)

    def message(self, seed: int, *, round: int = ROUND, rank: int = RANK, invalid: bool = False) -> bytes:
        """A sealed message of random tensors."""
        g = torch.Generator().manual_seed(seed)
        body = self.codec.encode([torch.randn(s, generator=g) for s in self.shapes], round=round)
        return seal(body, Envelope(rank, 1.0, invalid), fingerprint=self.told, round=round).to_bytes()

    def judge(self, message: bytes, *, weighted: bool, must_fail: bool) -> str:
        """What becomes of a message; begins with WRONG if it must not.

        Args:
            message: as it came from rank 1, together with a good one of rank 0.
            weighted: whether its weight counts.
            must_fail: its checksum cannot be right.
        """
        if message in self.good:
            return UNCHANGED
        started = time.process_time()  # of this process alone: other work on the machine does not count
        try:
            outcome = self._read(message, weighted)
        except WireError as error:
            outcome = BODY if isinstance(error.__cause__, _FromBody) else ENVELOPE
            if error.rank != RANK or not str(error).startswith(f"the message of rank {RANK}: "):
                outcome = f"{WRONG}: does not name the sender: {error}"
        except Exception as error:
            outcome = f"{WRONG}: {type(error).__name__}: {error}"
        if must_fail and outcome != ENVELOPE:
            return f"{WRONG}: with a wrong checksum: {outcome}"
        if (seconds := time.process_time() - started) > 5:
            return f"{WRONG}: took {seconds:.1f} s: {outcome}"
        return outcome

    def _read(self, message: bytes, weighted: bool) -> str:
        payload = Payload.of_bytes(message, fixed=True)
        body, envelope = unseal(payload, fingerprint=self.told, round=ROUND, sender=RANK, nbytes=self.nbytes)
        if envelope.invalid:
            return INVALID
        weights = [1.0, envelope.weight] if weighted and not self.mean.trimmed else None
        try:
            tensors = self._combine([self.neighbour, body], weights)
        except WireError as error:
            raise error from _FromBody()
        if tensors is None:
            return EXCHANGE
        if [tuple(t.shape) for t in tensors] != self.shapes or any(t.dtype != torch.float32 for t in tensors):
            return f"{WRONG}: shapes {[tuple(t.shape) for t in tensors]}"
        return READ if all_finite(tensors) else f"{WRONG}: not finite"

    def _combine(self, bodies: list[Payload], weights: list[float] | None) -> list[Tensor] | None:
        """The mean; None where the exchange would refuse it."""
        if not isinstance(self.codec, Chain):
            tensors = self.codec.combine(Messages(bodies, self.like, round=ROUND, mean=self.mean, weights=weights))
            return tensors if all_finite(tensors) else None
        received = self.codec.receive(Messages(bodies, self.like, round=ROUND, mean=self.mean, weights=weights))
        return received.tensors() if received.safe else None


class _FromBody(Exception):
    """Marks an error as one of the body."""


def cases() -> list[Case]:
    """Every codec, the means in turns."""
    lists = [*((codec, SHAPES) for codec in GATHERED), *((codec, [shape]) for codec, shape in LARGE)]
    return [Case(codec, shapes, MEANS[i % len(MEANS)]) for i, (codec, shapes) in enumerate(lists)]


@contextlib.contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let the process have so many more bytes of address space and no more, where the system can tell how many it has."""
    statm = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = used + more if before[1] == resource.RLIM_INFINITY else min(used + more, before[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass(frozen=True)
class Judged:
    """What became of one message.

    Attributes:
        case: who read it.
        kind: how it was mutated.
        message: as it was read.
        weighted: whether its weight counted.
        outcome: begins with WRONG if it must not be.
    """

    case: Case
    kind: str
    message: bytes
    weighted: bool
    outcome: str

    def __str__(self) -> str:
        """All that is needed to do it again."""
        how = f"{self.case.codec!r}, {self.case.mean!r}, weighted={self.weighted}, {self.kind}"
        return f"{self.outcome}\n  {how}\n  {self.message.hex()}"


def fuzz(all_cases: Sequence[Case], messages: int, seed: int) -> Iterator[Judged]:
    """Mutate and judge so many messages, the cases in turns."""
    rng = random.Random(seed)
    foreign = [c.good[0] for c in all_cases]
    streams = [mutations(rng, c.good, messages, [*c.foreign, *foreign]) for c in all_cases]
    for number in range(messages):
        turn, at = divmod(number, len(all_cases))
        case, mutation = all_cases[at], next(streams[at])
        message = resealed(mutation.message) if turn % 2 else mutation.message
        must_fail = message != resealed(message)  # whole parts of another message may have been spliced in, with theirs
        weighted = rng.random() < 0.5
        outcome = case.judge(message, weighted=weighted, must_fail=must_fail)
        yield Judged(case, mutation.kind, message, weighted, outcome)


# --- The million -------------------------------------------------------------------------------------------------------------


def peak_nbytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(messages: int, seed: int, console: Console) -> dict[str, Any]:
    all_cases, outcomes, wrong = cases(), Counter[str](), list[Judged]()
    with (
        warnings.catch_warnings(),
        limited_memory(1 << 28),
        Progress(console=console, disable=not console.is_terminal, transient=True) as progress,
    ):
        warnings.simplefilter("error")
        for _ in fuzz(all_cases, 5000, seed + 1):  # fills caches, so that what is measured is what messages cost
            pass
        before, started = peak_nbytes(), time.perf_counter()
        task = progress.add_task("messages", total=messages)
        for number, judged in enumerate(fuzz(all_cases, messages, seed), start=1):
            outcomes[judged.outcome] += 1
            if judged.outcome.startswith(WRONG):
                wrong.append(judged)
            if number % 1000 == 0:
                progress.update(task, completed=number)
        seconds = time.perf_counter() - started
    for judged in wrong[:5]:
        console.print(str(judged), soft_wrap=True, highlight=False, markup=False)
    return {
        "messages": messages,
        "seed": seed,
        "codecs": len(all_cases),
        "outcomes": dict(outcomes.most_common()),
        "wrong": len(wrong),
        "seconds": round(seconds, 1),
        "messages_per_second": round(messages / seconds),
        "peak_MB": round(peak_nbytes() / 1e6, 1),
        "growth_MB": round((peak_nbytes() - before) / 1e6, 1),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("outcome", "messages", title=f"{figures['messages']:,} mutated messages of {figures['codecs']} codecs")
    for outcome, count in figures["outcomes"].items():
        table.add_row(outcome, f"{count:,}")
    console.print(table)
    console.print(
        f"{figures['messages_per_second']:,} messages per second, {figures['seconds']} s; "
        f"memory grew by {figures['growth_MB']} MB to {figures['peak_MB']} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000, help="how many (default: 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: 0)")
    parser.add_argument("--record", action="store_true", help="append the figures to records/fuzz.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    figures = run(arguments.messages, arguments.seed, console)
    show(figures, console)
    if arguments.record:
        record.append("fuzz", figures)
    if figures["wrong"] or figures["growth_MB"] > 64:
        sys.exit(1)


if __name__ == "__main__":
    main()
