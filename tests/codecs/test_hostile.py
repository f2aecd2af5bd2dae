"""A message is read as if it were made to do harm: whatever it says, it is refused by name or read as something sound.

Whoever means harm can compute a checksum, so what is wrong inside a body is sealed again before it is sent.
"""

from __future__ import annotations

import math
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.fuzz import (
    BODY,
    ENVELOPE,
    INVALID,
    READ,
    WRONG,
    Case,
    Judged,
    cases,
    fuzz,
    limited_memory,
    resealed,
)
from torch import Tensor

from thinwire import DiLoCo
from thinwire.codecs import (
    DCT,
    Chain,
    Codec,
    Dense,
    Float,
    Fp4,
    Hadamard,
    Identity,
    Int8,
    Mean,
    Messages,
    RandomK,
    Sign,
    Ternary,
    TopK,
    TwoBit,
)
from thinwire.codecs.bits import pack
from thinwire.codecs.indices import Bitmap, EliasFano, IndexCode, Packed, index_code
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES, Envelope, fingerprint, seal, unseal
from thinwire.core.average import average, share
from thinwire.errors import ConfigError, NonFiniteRound, WireError
from thinwire.links import Link, LinkDecorator, SoloLink, Ticket
from thinwire.network import Op
from thinwire.payload import Payload
from thinwire.sim import World

MEGABYTE = 1 << 20

CHAIN = Identity(8) >> TopK(3) >> Float("bf16")
LIKE = [torch.empty(9, 20), torch.empty(3)]
FRAME = HEADER_NBYTES + PART_NBYTES  # of a message of one part


def sound(codec: Codec = CHAIN, like: list[Tensor] = LIKE, *, seed: int = 0, round: int = 7, sender: int = 1) -> bytes:
    g = torch.Generator().manual_seed(seed)
    body = codec.encode([torch.randn(t.shape, generator=g) for t in like], round=round)
    return seal(body, Envelope(sender), fingerprint=fingerprint(codec, like), round=round).to_bytes()


def opened(raw: bytes, codec: Codec = CHAIN, like: list[Tensor] = LIKE) -> tuple[Payload, Envelope]:
    nbytes = codec.nbytes(like)
    return unseal(Payload.of_bytes(raw), fingerprint=fingerprint(codec, like), round=7, sender=1, nbytes=nbytes)


def read(raw: bytes, chain: Chain = CHAIN, like: list[Tensor] = LIKE) -> list[Tensor]:
    """As an exchange of one worker reads it."""
    body, _ = opened(raw, chain, like)
    return chain.receive(Messages([body], like, round=7)).tensors()


def put(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def resealed_header(raw: bytes) -> bytes:
    """With the right checksum of the header alone."""
    return resealed(raw)[:HEADER_NBYTES] + raw[HEADER_NBYTES:]


def refusal(call: Callable[[], Any]) -> str:
    """What the `WireError` says; nothing large may be allocated on the way."""
    tracemalloc.start()
    try:
        with limited_memory(64 * MEGABYTE), pytest.raises(WireError) as caught:
            call()
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()
    return str(caught.value)


def test_the_limit_on_memory_is_one() -> None:
    """Else that nothing fails under it would prove nothing."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("the size of the address space is not known here")
    with limited_memory(64 * MEGABYTE):
        np.empty(MEGABYTE, np.uint8)
        with pytest.raises(MemoryError):
            np.empty(256 * MEGABYTE, np.uint8)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(256 * MEGABYTE, dtype=torch.uint8)
    assert torch.empty(256 * MEGABYTE, dtype=torch.uint8).numel() == 256 * MEGABYTE


# --- The envelope ----------------------------------------------------------------------------------------------------------


def test_a_sound_message_is_read() -> None:
    """Else the refusals below would prove nothing."""
    assert opened(sound())[1] == Envelope(1)
    assert [t.shape for t in read(sound())] == [t.shape for t in LIKE]
    assert resealed(sound()) == sound()


HEADERS = {
    "magic": (0, b"THNV", "wrong magic: b'THNV' instead of b'THNW'"),
    "an older version": (4, b"\x01", "wire version 1, where this thinwire reads version 2"),
    "a newer version": (4, b"\x03", "wire version 3, where this thinwire reads version 2"),
    "an unknown flag": (5, b"\x04", "unknown flags: 0x04"),
    "an unknown flag beside a known one": (5, b"\x81", "unknown flags: 0x81"),
    "no parts": (6, b"\x00\x00", "more parts, where the header announces 0"),
    "too many parts": (6, b"\xff\xff", "1 parts, where the header announces 65535"),
    "fingerprint": (8, struct.pack("<Q", 5), "fingerprint 0x0000000000000005 instead of 0x"),
    "an older round": (16, struct.pack("<Q", 6), "of round 6, in round 7"),
    "an absurd round": (16, struct.pack("<Q", 2**64 - 1), "of round 18446744073709551615, in round 7"),
    "another sender": (24, struct.pack("<Q", 0), "sent in the name of 0"),
    "an absurd sender": (24, struct.pack("<Q", 2**64 - 1), "sent in the name of 18446744073709551615"),
    "a weight of NaN": (48, struct.pack("<f", math.nan), "weight nan, which must be finite and not negative"),
    "an infinite weight": (48, struct.pack("<f", math.inf), "weight inf, which must be finite and not negative"),
    "a negative weight": (48, struct.pack("<f", -1.0), "weight -1.0, which must be finite and not negative"),
    "a length of none": (40, struct.pack("<Q", 0), "a body of 0 bytes is announced, where these shapes and this codec make"),
    "a length of 2**60": (40, struct.pack("<Q", 2**60), "a body of 1152921504606846976 bytes is announced"),
    "a length of 2**64 - 1": (40, struct.pack("<Q", 2**64 - 1), "a body of 18446744073709551615 bytes is announced"),
    "a length that wraps around": (40, struct.pack("<Q", 2**64 - HEADER_NBYTES), "bytes is announced"),
    "a part of 2**60 bytes": (72, struct.pack("<Q", 2**60), "part 0: 1152921504606846976 bytes are announced, where"),
    "a part of no bytes": (72, struct.pack("<Q", 0), "part 1: |more parts"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_bad_header_is_refused_by_name_though_the_checksum_is_right(name: str) -> None:
    at, new, says = HEADERS[name]
    bad = resealed(put(sound(), at, new))
    assert bad != sound()
    said = refusal(lambda: opened(bad))
    assert said.startswith("the message of rank 1: ")
    assert any(one in said for one in says.split("|"))


PARTS = {
    "another first block": (0, struct.pack("<Q", 1), "a part whose first block is 1, where these shapes and this codec make 0"),
    "another number of blocks": (8, struct.pack("<Q", 2**63), "a part whose number of blocks is 9223372036854775808, where"),
    "another value format": (
        24,
        struct.pack("<H", 8),
        "a part whose value format is 8, where these shapes and this codec make 2",
    ),
    "another index code": (26, struct.pack("<H", 2), "a part whose index codes is 2, where these shapes and this codec make"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_says_something_else_of_itself_is_refused(name: str) -> None:
    at, new, says = PARTS[name]
    bad = resealed(put(sound(), HEADER_NBYTES + at, new))
    assert bad != sound()
    said = refusal(lambda: read(bad))
    assert said.startswith("the message of rank 0: ")
    assert says in said


def test_a_damaged_part_is_named() -> None:
    chain = CHAIN.split(3)
    raw, parts = sound(chain), chain.plan(LIKE).parts
    assert len(parts) == 3
    for nth, part in enumerate(parts):
        at = HEADER_NBYTES + part.stop - 1
        said = refusal(lambda at=at: opened(put(raw, at, bytes([raw[at] ^ 1])), chain))
        assert said.startswith(f"the message of rank 1: part {nth} of 3: wrong checksum: ")


def test_every_bit_of_a_message_is_under_the_checksum() -> None:
    """One flipped bit anywhere, and the message is refused before its body is looked at."""
    raw = sound()
    for bit in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="the message of rank 1: "):
            opened(bytes(bad))


def test_a_wrong_checksum_shows_both() -> None:
    raw = sound()
    for at, what in ((52, "wrong checksum of the header"), (56 + 28, "part 0 of 1: wrong checksum")):
        right = int.from_bytes(raw[at : at + 4], "little")
        said = refusal(lambda at=at, right=right: opened(put(raw, at, struct.pack("<I", right ^ 1))))
        assert f"{what}: {right:#010x} instead of {right ^ 1:#010x}, so it was damaged on the way" in said


@pytest.mark.parametrize("length", [0, 1, 4, 55])
def test_a_message_too_short_for_a_header(length: int) -> None:
    said = refusal(lambda: opened(sound()[:length]))
    assert f"too short for a header: {length} bytes, where 56 are needed" in said


@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_a_message_of_another_length_than_it_announces(change: int) -> None:
    raw = sound()
    bad = resealed(raw[:change] if change < 0 else raw + bytes(change))
    assert f"wrong length: {len(bad)} bytes came, where the header announces {len(raw)}" in refusal(lambda: opened(bad))


def test_a_message_as_long_as_it_announces_but_not_as_it_must_be() -> None:
    raw = sound()
    bad = resealed(put(raw, 40, struct.pack("<Q", len(raw) - 56 + 5)) + bytes(5))
    expected = CHAIN.nbytes(LIKE)
    assert f"a body of {expected + 5} bytes is announced, where these shapes and this codec make {expected}" in refusal(
        lambda: opened(bad)
    )


def test_a_message_that_is_no_row_of_bytes() -> None:
    floats = Payload(torch.zeros(500))
    with pytest.raises(WireError):
        unseal(floats, fingerprint=0, round=7, sender=1, nbytes=1944)


def test_messages_of_other_codecs_and_shapes_are_told_by_their_fingerprint() -> None:
    """Even where the lengths agree by chance."""
    like = [torch.empty(20, 9), torch.empty(3)]
    other = Identity(8) >> TopK(3) >> Float("fp16")
    assert other.nbytes(LIKE) == CHAIN.nbytes(LIKE)
    assert "another codec, or tensors of other shapes" in refusal(lambda: opened(sound(other)))
    assert Dense("bf16", gather=True).nbytes(like) == Dense("bf16", gather=True).nbytes(LIKE)
    dense = Dense("bf16", gather=True)
    assert "another codec, or tensors of other shapes" in refusal(lambda: opened(sound(dense, like), dense, LIKE))


def test_what_is_checked_first_is_what_is_said() -> None:
    """With everything wrong at once, corrected one by one, in the order of the page."""
    good = sound()
    bad = put(good, 0, b"XXXX\x09\xff\x01\x00" + bytes(8) + b"\xff" * 8 + b"\x05" + bytes(7))
    bad = put(bad, 40, struct.pack("<Qf", 2**60, -1.0) + bytes(4)) + b"more"
    bad = put(bad, FRAME, bytes([bad[FRAME] ^ 1]))
    correct: list[tuple[str, Callable[[bytes], bytes]]] = [
        ("wrong magic", lambda b: put(b, 0, good[0:4])),
        ("wire version", lambda b: put(b, 4, good[4:5])),
        ("checksum of the header", resealed_header),
        ("is announced", lambda b: resealed_header(put(b, 40, good[40:48]))),
        ("wrong length", lambda b: b[:-4]),
        ("unknown flags", lambda b: resealed_header(put(b, 5, good[5:8]))),
        ("fingerprint", lambda b: resealed_header(put(b, 8, good[8:16]))),
        ("of round", lambda b: resealed_header(put(b, 16, good[16:24]))),
        ("in the name of", lambda b: resealed_header(put(b, 24, good[24:32]))),
        ("weight", lambda b: resealed_header(put(b, 48, good[48:52]))),
        ("part 0 of 1: wrong checksum", lambda b: put(b, FRAME, good[FRAME : FRAME + 1])),
    ]
    for says, corrected in correct:
        with pytest.raises(WireError, match=says):
            opened(bad)
        bad = corrected(bad)
    assert bad == good


# --- The body --------------------------------------------------------------------------------------------------------------


def chain_of(values: Any) -> Chain:
    return Identity(8) >> TopK(3) >> values


def tampered(chain: Chain, section: str, change: Callable[[bytes], bytes], like: list[Tensor] = LIKE) -> bytes:
    """A message of which the indices or values of the first group, or the values sent whole, were changed, sealed again."""
    raw, plan = sound(chain, like), chain.plan(like)
    first = plan.sections[0] if plan.sections else None
    start, stop = {
        "indices": (first.start, first.middle) if first else (0, 0),
        "values": (first.middle, first.stop) if first else (0, 0),
        "whole": (plan.whole[0].start, plan.whole[0].stop) if plan.whole else (0, 0),
    }[section]
    assert stop > start, "there is no such section"
    part = raw[HEADER_NBYTES + start : HEADER_NBYTES + stop]
    bad = resealed(put(raw, HEADER_NBYTES + start, change(part)))
    assert len(bad) == len(raw)
    assert bad != raw
    return bad


BF16 = {"NaN": b"\xc0\x7f", "a signalling NaN": b"\x81\x7f", "Inf": b"\x80\x7f", "minus Inf": b"\x80\xff"}
FP16 = {"NaN": b"\x00\x7e", "a signalling NaN": b"\x01\x7c", "Inf": b"\x00\x7c", "minus Inf": b"\x00\xfc"}
FP32 = {name: b"\x00\x00" + raw for name, raw in BF16.items()} | {"the smallest NaN": b"\x01\x00\x80\x7f"}


@pytest.mark.parametrize("section", ["values", "whole"])
@pytest.mark.parametrize(("dtype", "bad"), [("bf16", BF16), ("fp16", FP16), ("fp32", FP32)])
def test_a_value_that_is_not_finite(dtype: str, bad: dict[str, bytes], section: str) -> None:
    chain = chain_of(Float(dtype))
    for value in bad.values():
        for place in (0, 2):
            raw = tampered(chain, section, lambda part, v=value, p=place: put(part, p * len(v), v))
            said = refusal(lambda raw=raw: read(raw, chain))
            assert "a value that is not finite" in said
            assert "rank 0" in said, "received alone, it is the first"


@pytest.mark.parametrize("values", [Int8(), Fp4(), TwoBit(), Ternary(), Sign(), Int8(2)], ids=repr)
@pytest.mark.parametrize("section", ["values", "whole"])
def test_a_scale_that_is_not_finite_or_negative(values: Any, section: str) -> None:
    chain, like = chain_of(values), [torch.empty(40, 40), torch.empty(3)]
    for name, scale in BF16.items():
        raw = tampered(chain, section, lambda part, s=scale: put(part, 0, s), like)
        assert "a scale that is not finite" in refusal(lambda raw=raw: read(raw, chain, like)), name
    for scale in (-1.0, -1e-38):
        raw = tampered(chain, section, lambda part, s=scale: put(part, 0, struct.pack("<f", s)[2:]), like)
        assert "a negative scale: -" in refusal(lambda raw=raw: read(raw, chain, like))


def test_a_scale_whose_product_is_not_finite() -> None:
    chain, like = chain_of(Int8()), [torch.empty(40, 40), torch.empty(3)]
    raw = tampered(chain, "values", lambda part: put(part, 0, b"\x7f\x7f"), like)
    assert "a value that is not finite" in refusal(lambda: read(raw, chain, like))


def test_an_int8_code_that_no_sender_writes() -> None:
    chain, like = chain_of(Int8()), [torch.empty(40, 40), torch.empty(1)]
    for section in ("values", "whole"):
        raw = tampered(chain, section, lambda part: part[:-1] + b"\x80", like)
        assert "an int8 code of -128, where -127 to 127 are used" in refusal(lambda raw=raw: read(raw, chain, like))


def test_a_byte_that_no_five_values_make() -> None:
    chain, like = chain_of(Ternary()), [torch.empty(40, 40), torch.empty(5)]
    for section in ("values", "whole"):
        raw = tampered(chain, section, lambda part: put(part, 2, b"\xf3"), like)
        assert "a byte of 243, where five values of three make at most 242" in refusal(lambda raw=raw: read(raw, chain, like))


@pytest.mark.parametrize("values", [Fp4(), TwoBit(), Sign()], ids=repr)
def test_padding_of_values_that_is_not_zero(values: Any) -> None:
    """Or a message could carry what no reader sees, and two messages could say the same."""
    chain, like = chain_of(values), [torch.empty(40, 40), torch.empty(3)]
    for section in ("values", "whole"):
        assert chain.plan(like).sections[0].count % 8, "without padding this tests nothing"
        raw = tampered(chain, section, lambda part: part[:-1] + bytes([part[-1] | 0x80]), like)
        assert "the padding of a value section is not zero" in refusal(lambda raw=raw: read(raw, chain, like))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_padding_of_indices_that_is_not_zero(k: int) -> None:
    chain, like = Identity(8) >> TopK(k) >> Float("bf16"), [torch.empty(8, 40), torch.empty(3)]
    raw = tampered(chain, "indices", lambda part: part[:-1] + bytes([part[-1] | 0x80]), like)
    assert "the padding of an index section is not zero" in refusal(lambda: read(raw, chain, like))


def test_an_index_out_of_range_in_a_chain() -> None:
    chain, like = Identity(48) >> TopK(1) >> Float("fp32"), [torch.empty(8 * 48)]
    assert chain.plan(like).sections[0].code == Packed(48, 1)
    raw = tampered(chain, "indices", lambda _: pack(np.array([0, 1, 2, 3, 48, 5, 6, 7]), 6).tobytes(), like)
    assert "index out of range: 48 in a block of 48" in refusal(lambda: read(raw, chain, like))


def test_a_duplicate_index_in_a_chain() -> None:
    """With low bits of their own, two indices may share their high part: then the low bits must tell them apart."""
    chain, like = TopK(8) >> Sign(), [torch.empty(64, 8 * 64)]
    code, good = chain.plan(like).sections[0].code, list(range(8))
    assert isinstance(code, EliasFano)
    read(tampered(chain, "indices", lambda _: code_of(code, [good] * 8), like), chain, like)
    for low in ([0, 1, 2, 3, 4, 5, 6, 6], [0, 1, 3, 2, 4, 5, 6, 7], [0] * 8, [31] * 8):
        raw = tampered(chain, "indices", lambda _, low=low: code_of(code, [*([good] * 7), low]), like)
        assert "duplicate index, or indices out of order, in a block" in refusal(lambda raw=raw: read(raw, chain, like))


def code_of(code: IndexCode, rows: list[list[int]]) -> bytes:
    """Any indices, good or bad, as the code would write them."""
    if isinstance(code, Packed):
        return pack(np.array(rows).reshape(-1), code.width).tobytes()
    if isinstance(code, EliasFano):
        high = [[(e >> code.low) + j for j, e in enumerate(row)] for row in rows]
        low = np.array([e % (1 << code.low) for row in rows for e in row])
        return code_of(code._row, high) + pack(low, code.low).tobytes()
    assert isinstance(code, Bitmap)
    return b"".join(sum({1 << e for e in row}).to_bytes(code.bits // 8, "little") for row in rows)


@pytest.mark.parametrize(
    ("code", "rows", "says"),
    [
        (Packed(48, 3), [[0, 1, 48]], "index out of range: 48 in a block of 48"),
        (Packed(48, 3), [[0, 1, 63], [0, 1, 2]], "index out of range: 63 in a block of 48"),
        (Packed(48, 3), [[63, 1, 2]], "indices out of order"),
        (Packed(48, 3), [[0, 1, 2], [3, 7, 7]], "duplicate index"),
        (Packed(48, 3), [[0, 1, 2], [7, 3, 8]], "indices out of order"),
        (Bitmap(12, 3), [[0, 1]], "a bitmap does not mark 3 entries of a block"),
        (Bitmap(12, 3), [[0, 1, 2, 3], [4, 5]], "a bitmap does not mark 3 entries of a block"),
        (Bitmap(12, 3), [[0, 1, 12]], "the padding of an index section is not zero"),
        (Bitmap(12, 3), [[0, 1, 2, 15], [0, 1, 2]], "the padding of an index section is not zero"),
        (EliasFano(35, 3, 3), [[0, 1, 35]], "index out of range: 35 in a block of 35"),
        (EliasFano(35, 3, 3), [[0, 9, 8]], "indices out of order"),
        (EliasFano(35, 3, 3), [[0, 9, 9], [0, 1, 2]], "duplicate index"),
        (EliasFano(35, 3, 3), [[0, 9, 2]], "a bitmap does not mark 3 entries of a block"),
        (EliasFano(35, 3, 3), [[0, 9, 40]], "the padding of an index section is not zero"),
    ],
)
def test_indices_that_no_sender_writes(code: IndexCode, rows: list[list[int]], says: str) -> None:
    """In all codes, those too that are never the shortest."""
    raw = np.frombuffer(code_of(code, rows), np.uint8)
    assert len(raw) == code.nbytes(len(rows))
    assert says in refusal(lambda: code.decode(raw, len(rows)))


@pytest.mark.parametrize(("L", "k"), [(10, 5), (64, 16), (300, 40), (1024, 100), (4096, 8), (4096, 32), (4096, 64)])
def test_the_first_and_the_last_sets_of_all_are_not_refused(L: int, k: int) -> None:
    code = index_code(L, k)
    rows = [range(k), range(L - k, L), [*range(L - k - 1, L - 2), L - 1], [L - k - 1, *range(L - k + 1, L)]]
    rows = np.array([list(row) for row in rows])
    assert (code.decode(code.encode(rows), len(rows)) == rows).all()


@pytest.mark.parametrize("k", [220, 256, 1024, 3500])
def test_large_parts_of_a_block_can_be_sent(k: int) -> None:
    x = torch.randn(64, 64)
    chain = TopK(k) >> Float("fp32")
    (back,) = chain.decode(chain.encode([x]), [x])
    kept = back != 0
    assert int(kept.sum()) == k
    assert torch.equal(back[kept], x[kept])


def test_a_body_of_another_length() -> None:
    """Without an envelope, as `decode` may be given it."""
    body = sound()[HEADER_NBYTES:]
    for bad in (b"", body[:1], body[:-1], body + b"\0"):
        said = refusal(lambda bad=bad: CHAIN.decode(Payload.of_bytes(bad), LIKE, round=7))
        assert f"a message of {len(bad)} bytes, where these shapes and {CHAIN!r} make {len(body)}" in said
    dense = Dense("bf16", gather=True)
    assert "a message of 5 bytes" in refusal(lambda: dense.decode(Payload.of_bytes(bytes(5)), LIKE))


def test_a_refusal_names_the_rank_whose_message_it_was() -> None:
    bodies = [Payload.of_bytes(sound(seed=s)[HEADER_NBYTES:]) for s in range(4)]
    bad = tampered(CHAIN, "values", lambda part: put(part, 0, BF16["NaN"]))[HEADER_NBYTES:]
    for rank in range(4):
        given = [*bodies]
        given[rank] = Payload.of_bytes(bad)
        with pytest.raises(WireError, match=f"the message of rank {rank}: a value that is not finite") as caught:
            CHAIN.receive(Messages(given, LIKE, round=7))
        assert caught.value.rank == rank


# --- Thousands -------------------------------------------------------------------------------------------------------------


def counted(all_judged: Iterable[Judged]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for judged in all_judged:
        assert not judged.outcome.startswith(WRONG), str(judged)
        counts[judged.outcome] += 1
    return counts


@pytest.mark.parametrize("messages", [3_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_thousands_of_mutated_messages_are_refused_or_sound(messages: int) -> None:
    """`benchmarks/fuzz.py` does the same with a million."""
    all_cases = cases()
    with limited_memory(256 * MEGABYTE):
        counts = counted(fuzz(all_cases, messages, seed=messages))
    assert counts[ENVELOPE] > 0.35 * messages
    assert counts[BODY] > 0.03 * messages
    assert counts[READ] > 0.03 * messages


def test_mutated_messages_allocate_no_more_than_sound_ones() -> None:
    all_cases = cases()
    counted(fuzz(all_cases, 500, seed=1))  # fills caches
    tracemalloc.start()
    try:
        counted(fuzz(all_cases, 1500, seed=2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * MEGABYTE


@pytest.mark.parametrize("mean", [Mean(), Mean(over="senders"), Mean(trimmed=0.4)], ids=repr)
def test_bodies_of_noise_are_refused_or_sound(mean: Mean) -> None:
    rng = random.Random(5)
    outcomes: list[Judged] = []
    for codec in (DCT(8) >> TopK(3) >> Sign(), Hadamard(8) >> RandomK(3) >> Fp4(), TopK(2) >> Float("bf16"), TwoBit()):
        case = Case(codec, [(9, 20), (70,)], mean)
        for _ in range(60):
            noise = resealed(case.good[0][:FRAME] + rng.randbytes(case.nbytes - PART_NBYTES))
            outcomes.append(Judged(case, "noise", noise, False, case.judge(noise, weighted=False, must_fail=False)))
    assert counted(outcomes)[BODY] > 50


def test_an_invalid_body_is_not_read() -> None:
    case = Case(CHAIN, [(9, 20), (3,)], Mean())
    bad = resealed(put(case.good[0], 5, b"\x01")[:FRAME] + b"\xff" * (case.nbytes - PART_NBYTES))
    assert case.judge(bad, weighted=False, must_fail=False) == INVALID


# --- Through the exchange ----------------------------------------------------------------------------------------------------


class Tampering(LinkDecorator):
    """Changes what worker 1 sends in chosen rounds, counted from 0; control messages are left alone."""

    def __init__(self, link: Link, change: Callable[[bytes], bytes], rounds: tuple[int, ...] = (0,)):
        super().__init__(link)
        self.change, self.rounds, self.seen = change, rounds, 0

    def post(self, payload: Payload, op: Op) -> Ticket:
        if payload.purpose == "round":
            self.seen += 1
            if self.rank == 1 and self.seen - 1 in self.rounds:
                changed = Payload.of_bytes(self.change(payload.to_bytes()))
                payload = payload.like(changed.data)
        return self.link.post(payload, op)


def flipped(raw: bytes) -> bytes:
    return put(raw, FRAME + 2, bytes([raw[FRAME + 2] ^ 4]))


HARM: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "damage": (flipped, "wrong checksum"),
    "an index code of noise": (lambda raw: resealed(put(raw, FRAME, b"\xff" * 8)), "index|padding"),
    "another round": (lambda raw: resealed(put(raw, 16, b"\x09")), "of round 9, in round 3"),
    "another name": (lambda raw: resealed(put(raw, 24, b"\x02")), "in the name of 2"),
    "an absurd length": (lambda raw: resealed(put(raw, 40, struct.pack("<Q", 2**60))), "bytes is announced"),
    "a weight of NaN": (lambda raw: resealed(put(raw, 48, struct.pack("<f", math.nan))), "weight nan"),
    "zeros": (lambda raw: bytes(len(raw)), "wrong magic"),
}


def outcome_of(call: Callable[[], Any]) -> str:
    with pytest.raises(WireError) as caught:
        call()
    assert caught.value.rank == 1
    return str(caught.value)


@pytest.mark.parametrize("name", HARM)
@pytest.mark.parametrize("codec", [TopK(3) >> Sign(), DCT(8) >> TopK(3) >> Float("bf16"), TopK(2) >> Int8()], ids=repr)
def test_an_exchange_refuses_a_bad_message_on_every_worker_and_changes_nothing(codec: Chain, name: str) -> None:
    change, says = HARM[name]

    def mine(rank: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(rank)
        return [torch.randn(s, generator=g) for s in ((9, 20), (3,), (17, 40))]

    def worker(link: Link) -> tuple[str, list[Tensor], list[Tensor]]:
        bad, tensors = Tampering(link, change), mine(link.rank)
        said = outcome_of(lambda: average(bad, codec, tensors, round=3, want_sent=True))
        mean, _ = average(bad, codec, tensors, round=4)  # the next round is as if nothing had been
        return said, tensors, mean

    results = World(3).run(worker)
    expected = codec.combine(Messages([codec.encode(mine(r), round=4) for r in range(3)], mine(0), round=4))
    for rank, (said, tensors, mean) in enumerate(results):
        assert said.startswith("the message of rank 1: ")
        assert any(s in said for s in says.split("|"))
        assert said == results[0][0], "the same on every worker"
        assert all(torch.equal(a, b) for a, b in zip(tensors, mine(rank), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(mean, expected, strict=True))


def test_slots_are_not_changed_by_a_bad_message() -> None:
    chain, like = DCT(8) >> TopK(3) >> Sign(), [torch.ones(9, 20), torch.ones(3)]

    def worker(link: Link) -> tuple[str, bool]:
        slots = [torch.full(s, float(link.rank)) for s in chain.slot_shapes(like)]
        before = [s.clone() for s in slots]
        said = outcome_of(lambda: share(Tampering(link, flipped), chain, slots, like))
        return said, all(torch.equal(a, b) for a, b in zip(slots, before, strict=True))

    for said, same in World(3).run(worker):
        assert "wrong checksum" in said
        assert same


def test_an_optimizer_is_as_it_was_after_a_bad_message() -> None:
    def worker(link: Link) -> tuple[str, bool, bool]:
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 9)
        bad = Tampering(link, flipped, rounds=(1,))
        opt = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), bad, H=1, codec=TopK(3) >> Sign())

        def step() -> None:
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(link.rank))
            model(x).square().sum().backward()
            opt.step()
            opt.zero_grad()

        step()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        replicated = replicated_state(opt)
        said = outcome_of(step)
        same = all(torch.equal(v, w) for v, w in zip(replicated_state(opt), replicated, strict=True))
        return said, same, any(not torch.equal(before[k], v) for k, v in model.state_dict().items())

    def replicated_state(opt: DiLoCo) -> list[Tensor]:
        names = [n for n in opt.replicated if n not in ("param", "inner")]
        assert names
        return [s.clone() for n in sorted(names) for s in opt.slot(n)]

    for said, same, moved in World(3).run(worker):
        assert "wrong checksum" in said
        assert same, "what all workers share has changed"
        assert moved, "the local step is this worker's own, and stays"


def shouting(chain: Chain, like: list[Tensor]) -> Callable[[bytes], bytes]:
    """Puts 3e38 for every value."""
    start = HEADER_NBYTES + chain.plan(like).sections[0].middle
    return lambda raw: resealed(raw[:start] + struct.pack("<f", 3e38) * ((len(raw) - start) // 4))


def test_finite_values_whose_mean_might_overflow_refuse_the_round() -> None:
    """Every message by itself is sound; what they make together may not be."""
    chain, like = DCT(8) >> TopK(3) >> Float("fp32"), [torch.empty(9, 20)]

    def worker(link: Link) -> str:
        slots = [torch.randn(s) for s in chain.slot_shapes(like)]
        with pytest.raises(NonFiniteRound) as caught:
            share(Tampering(link, shouting(chain, like)), chain, slots, like)
        return str(caught.value)

    for said in World(2).run(worker):
        assert said == "round 0 refused on all 2 workers: the sum of all contributions overflowed"


@pytest.mark.parametrize("codec", [Identity(8) >> TopK(3) >> Float("fp32"), Fp4()], ids=repr)
def test_a_mean_that_overflows_refuses_the_round_without_a_warning(codec: Codec) -> None:
    def worker(link: Link) -> str:
        with pytest.raises(NonFiniteRound) as caught:
            average(link, codec, [torch.full((9, 20), 3e38)])
        return str(caught.value)

    for said in World(2).run(worker):
        assert said == "round 0 refused on all 2 workers: the sum of all contributions overflowed"


def test_a_sender_without_weight_does_not_make_the_mean_over_senders_nan() -> None:
    chain, like = TopK(1) >> Float("bf16"), [torch.empty(4, 9)]
    bodies = []
    for rank in (0, 1):
        x = torch.zeros(4, 9)
        x[rank, rank] = 0.25
        bodies.append(chain.encode([x]))
    received = chain.receive(Messages(bodies, like, mean=Mean(over="senders"), weights=[1.0, 0.0]))
    (mean,) = received.tensors()
    assert mean[0, 0] == 0.25
    assert mean[1, 1] == 0, "only the one that weighs nothing sent it"


def test_a_weight_too_large_for_the_header_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="weight"):
        average(SoloLink(), CHAIN, [torch.ones(9, 20)], weight=1e39)
