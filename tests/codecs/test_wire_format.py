"""The bytes are what docs/wire-format.md says: a reader written from the page reads them, and golden messages never change."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.fuzz import mutations, resealed
from torch import Tensor

from tests.codecs import plain_reader
from tests.codecs.catalogue import SELECTIONS, TRANSFORMS, VALUES
from tests.codecs.plain_reader import Refused
from tests.tiers import diagonals, first_quick
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
    RandomK,
    RandomOrthogonal,
    Sign,
    Striding,
    Ternary,
    TopK,
    TwoBit,
)
from thinwire.codecs.bits import pack
from thinwire.codecs.indices import Bitmap, EliasFano, IndexCode, Packed, index_code
from thinwire.codecs.selection import Selection
from thinwire.codecs.shared_seed import numbers
from thinwire.codecs.stages import Row
from thinwire.codecs.transforms import Transform
from thinwire.codecs.values import Values
from thinwire.codecs.wire import Envelope, fingerprint, seal, unseal
from thinwire.errors import WireError
from thinwire.payload import Payload

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"

SHAPES = [(9, 20), (3,), (), (0, 4), (2, 3, 5), (70,), (17, 1), (1, 33), (15, 8), (6, 48), (16, 5, 8)]


def contribution(shapes: list[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) for s in shapes]


def message_of(codec: Codec, tensors: list[Tensor], *, round: int = 7, sender: int = 1, weight: float = 1.0) -> bytes:
    body = codec.encode(tensors, round=round)
    return seal(body, Envelope(sender, weight), fingerprint=fingerprint(codec, tensors), round=round).to_bytes()


def assert_same(plain: list[list[float]], tensors: list[Tensor], *, exact: bool) -> None:
    for flat, t in zip(plain, tensors, strict=True):
        assert len(flat) == t.numel()
        ours = t.flatten().double()
        theirs = torch.tensor(flat, dtype=torch.float64)
        if exact:
            assert torch.equal(theirs, ours)
        else:
            largest = max(map(abs, flat), default=0.0)
            torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-6 * largest)


# --- The independent reader ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("selection", "values"), diagonals(SELECTIONS, VALUES), ids=repr)
def test_a_reader_written_from_the_page_reads_every_message(selection: Selection, values: Values) -> None:
    tensors = contribution()
    for transform in TRANSFORMS:
        chain = Chain(transform, selection, values)
        body = chain.encode(tensors, round=7)
        assert plain_reader.body_nbytes(repr(chain), SHAPES) == body.nbytes == chain.nbytes(tensors)
        ours = chain.decode(body, tensors, round=7)
        if chain.linear:
            theirs = plain_reader.read_body(body.to_bytes(), repr(chain), SHAPES, round=7)
        else:
            theirs = plain_reader.read(message_of(chain, tensors), repr(chain), SHAPES, round=7, sender=1)
        assert_same(theirs, ours, exact=isinstance(transform, Identity))


def test_the_chains_above_use_blocks_groups_and_whole_tensors() -> None:
    """Else they would not test much."""
    chains = [Chain(t, TopK(3), v) for t in TRANSFORMS for v in VALUES]
    layouts = [chain.plan(contribution()).layout for chain in chains]
    assert sum(len(layout.groups) >= 2 for layout in layouts) > len(chains) / 2
    assert all(layout.groups and len(layout.dense) >= 2 for layout in layouts)
    assert all(max(len(g.grids) for g in layout.groups) >= 2 for layout in layouts)
    grids = [g for layout in layouts for group in layout.groups for g in group.grids]
    assert any(g.slot != (g.rows, g.cols) for g in grids), "nothing is padded"


@pytest.mark.parametrize("values", [Float("bf16"), Sign()], ids=repr)
@pytest.mark.parametrize("k", [8, 32])
def test_it_reads_blocks_of_64_by_64(k: int, values: Values) -> None:
    tensors = contribution([(128, 65), (100,)])
    chain = Chain(selection=TopK(k), values=values)
    theirs = plain_reader.read(message_of(chain, tensors), repr(chain), [(128, 65), (100,)], round=7, sender=1)
    assert_same(theirs, chain.decode(chain.encode(tensors), tensors), exact=True)


def test_it_reads_tensors_of_two_values_that_are_equal_everywhere_but_in_one_place() -> None:
    """Groups without any large value, scales of zero, and negative zeros."""
    tensors = [torch.zeros(9, 20), torch.full((9, 20), -0.0), torch.full((300,), 2.0), torch.zeros(300)]
    tensors[0][3, 4] = -5
    for values in VALUES:
        chain = Chain(Identity(8), TopK(3), values)
        shapes = [tuple(t.shape) for t in tensors]
        theirs = plain_reader.read(message_of(chain, tensors), repr(chain), shapes, round=7, sender=1)
        assert_same(theirs, chain.decode(chain.encode(tensors), tensors), exact=True)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fp64"])
def test_the_text_under_a_fingerprint_is_the_one_of_the_page(name: str) -> None:
    torch_name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}[name]
    texts: dict[str, Codec] = {
        f"Dense(dtype=torch.{torch_name}, gather=True)": Dense(name, gather=True),
        "DCT(64) >> TopK(32) >> Sign()": DCT() >> TopK() >> Sign(),
        "Identity(128) >> TopK(0.01)": Identity(128) >> TopK(0.01) >> Float("fp32"),
        "RandomOrthogonal(64, seed=3) >> RandomK(8, seed=3) >> Int8(64)": RandomOrthogonal(64, seed=3)
        >> RandomK(8, seed=3)
        >> Int8(64),
        "RandomOrthogonal(32) >> RandomK(1e-05) >> Fp4(128)": RandomOrthogonal(32, seed=0) >> RandomK(1e-5) >> Fp4(128),
        "Striding(8) >> Fp4()": Identity(64) >> Striding(8) >> Fp4(256),
        "TwoBit()": TwoBit(0),
        "TopK(2) >> Float('bf16')": TopK(2) >> Float("bf16"),
    }
    tensors = contribution([(4, 9), (), (3,)])
    for text, codec in texts.items():
        assert repr(codec) == text
        assert fingerprint(codec, tensors) == plain_reader.fingerprint(text, [(4, 9), (), (3,)])


@pytest.mark.parametrize("width", range(1, 64))
def test_it_unpacks_what_is_packed(width: int) -> None:
    some = [random.Random(width).getrandbits(width) for _ in range(21)]
    for count in (0, 1, 7, 8, 9, 21):
        raw = pack(np.array(some[:count], np.int64), width).tobytes()
        assert plain_reader.unpack(raw, count, width) == some[:count]


def test_it_chooses_the_same_index_code() -> None:
    pairs = [(L, k) for L in range(1, 70) for k in range(1, L + 1)]
    for L, k in [
        *pairs,
        (4096, 1),
        (4096, 8),
        (4096, 32),
        (4096, 128),
        (1000, 10),
        (1000, 30),
        (4096, 256),
        (4096, 1024),
        (4096, 4000),
        (65536, 64),
        (255, 250),
    ]:
        for n in (1, 2, 7, 8, 100):
            ours, theirs = index_code(L, k, n), plain_reader.choose_code(L, k, n)
            assert theirs.name == type(ours).__name__
            assert theirs.bits == ours.bits
            assert theirs.low == getattr(ours, "low", 0)
            assert theirs.nbytes(n) == ours.nbytes(n)


@pytest.mark.parametrize(
    "code",
    [
        Packed(100, 7),
        Packed(1, 1),
        Bitmap(100, 7),
        Bitmap(64, 64),
        EliasFano(100, 7, 3),
        EliasFano(64, 7),
        EliasFano(4096, 32, 6),
    ],
    ids=repr,
)
def test_it_reads_every_index_code(code: IndexCode) -> None:
    """Those that are never the shortest too."""
    rows = [sorted(random.Random(i).sample(range(code.L), code.k)) for i in range(11)]
    low = getattr(code, "low", 0)
    raw = code.encode(np.array(rows)).tobytes()
    assert plain_reader.Code(type(code).__name__, code.L, code.k, low).read(raw, len(rows)) == rows


@pytest.mark.parametrize(
    "chain",
    first_quick(
        [
            Identity(8) >> TopK(3) >> Float("bf16"),
            Hadamard(4) >> TopK(2) >> Int8(),
            Identity(16) >> TopK(5) >> Fp4(3),
            RandomK(2) >> TwoBit(),
            TopK(4) >> Sign(),
        ],
        quick=2,
    ),
    ids=repr,
)
def test_both_readers_accept_and_refuse_the_same(chain: Chain) -> None:
    """Mutated messages, sealed again so that the checksum lets them pass."""
    shapes: list[tuple[int, ...]] = [(9, 20), (3,), (70,), (16, 64)]
    good = [message_of(chain, contribution(shapes, seed)) for seed in (0, 1)]
    print_of_it, nbytes = fingerprint(chain, contribution(shapes)), chain.nbytes(contribution(shapes))
    outcomes = {"accepted": 0, "refused": 0}
    for mutation in mutations(random.Random(3), good, 300):
        raw = resealed(mutation.message)
        try:
            theirs = plain_reader.read(raw, repr(chain), shapes, round=7, sender=1)
        except Refused:
            theirs = None
        ours = None
        try:
            body, envelope = unseal(Payload.of_bytes(raw), fingerprint=print_of_it, round=7, sender=1, nbytes=nbytes)
            if not envelope.invalid:
                ours = chain.decode(body, contribution(shapes), round=7)
        except WireError:
            pass
        assert (ours is None) == (theirs is None), raw.hex()
        outcomes["refused" if ours is None else "accepted"] += 1
        if ours is not None and theirs is not None and isinstance(chain.transform, Identity):
            assert_same(theirs, ours, exact=True)
    assert min(outcomes.values()) > 20, "only one side was tested"


# --- The examples of the page ----------------------------------------------------------------------------------------------


def on_the_page(text: str) -> bool:
    return " ".join(text.split()) in " ".join(PAGE.read_text().split())


def spaced(raw: bytes) -> str:
    return raw.hex(" ")


def test_the_whole_message_of_the_page() -> None:
    a, b = torch.zeros(4, 9), torch.tensor([3.14159])
    a[0, 5], a[2, 2] = -1.5, 0.75
    shown = re.search(r"```text\n(54 48 4e 57.*?)```", PAGE.read_text(), re.S)
    assert shown
    raw = bytes.fromhex("".join(line[:24] for line in shown[1].splitlines()))
    chain, shapes = TopK(2) >> Float("bf16"), [(4, 9), (1,)]
    assert raw == message_of(chain, [a, b])
    assert plain_reader.read(raw, repr(chain), shapes, round=7, sender=1) == [a.flatten().tolist(), [3.140625]]
    told = plain_reader.fingerprint(repr(chain), shapes)
    assert on_the_page(f"`{spaced(told.to_bytes(8, 'little'))}`, and the fingerprint is {told:#018x}.")
    assert index_code(36, 2, 1) == EliasFano(36, 2, 1)


def test_the_packed_numbers_of_the_page() -> None:
    for some, width, shown in (([0xABC, 0x123, 0x456], 12, (3, 7)), ([1, 2, 3, 4, 5, 6, 7, 0, 5], 3, (3, 6))):
        raw = pack(np.array(some), width).tobytes()
        assert len(raw) == shown[1]
        assert on_the_page(f"| `{spaced(raw[: shown[0]])}` and `{spaced(raw[shown[0] :])}` |")


def test_the_index_codes_of_the_page() -> None:
    assert EliasFano(40, 3, 3).encode(np.array([[5, 20, 21]])).tobytes() == bytes.fromhex("19650100")
    assert on_the_page("a single block takes `19` and `65 01 00`.")
    shown = re.findall(r"\| (\d+) \| (\d+) \| ([A-Z]\w+)(?:\((\d+)\))? \| ([\d.]+) \|", PAGE.read_text())
    assert len(shown) == 6
    for L, k, name, low, bits in shown:
        code = index_code(int(L), int(k))
        assert (type(code).__name__, getattr(code, "low", 0)) == (name, int(low or 0))
        assert f"{code.bits / int(k):.3g}" == bits


def test_the_values_of_the_page() -> None:
    for values, scales in ((Int8(), 2), (Fp4(), 2), (TwoBit(), 4), (Ternary(), 2), (Sign(), 2)):
        raw, read = values.write(np.array([1, -0.5, 0.26, -0.1, 0.004], np.float32), Row(5, (5,)))
        assert on_the_page(f"| `{spaced(raw[:scales].tobytes())}` | `{spaced(raw[scales:].tobytes())}` |")
        assert on_the_page(", ".join(f"{v:.8g}" for v in read[:3]))


def test_the_shared_numbers_of_the_page() -> None:
    for purpose in (1, 2, 3):
        ours = numbers(7, 3, purpose, 2).tolist()
        assert ours == [plain_reader.u(7, 3, purpose, i) for i in (0, 1)]
        assert on_the_page(f"{ours[0]:#018x}, {ours[1]:#018x}")
    rows = RandomK(4, seed=7).positions(16, 3, 0, 3).tolist()
    assert on_the_page("; ".join(", ".join(map(str, row)) for row in rows))
    assert on_the_page(f"the places {', '.join(map(str, Striding(3).positions(10, 4, 0, 1)[0].tolist()))}.")


@pytest.mark.parametrize("transform", [DCT(32), Hadamard(32), RandomOrthogonal(32, seed=4)], ids=repr)
def test_the_matrices_of_the_page(transform: Transform) -> None:
    for n in (1, 2, 8, 32):
        ours = transform.basis(n, 6)
        assert ours is not None
        stage = plain_reader.parse(repr(transform)).transform
        np.testing.assert_allclose(ours, plain_reader.matrix(stage, n, 6), atol=1e-14)


# --- Golden messages -------------------------------------------------------------------------------------------------------


def exact(*shape: int, step: int = 2531) -> Tensor:
    """Multiples of 1/64, of distinct magnitudes and both signs, that every machine transforms without rounding."""
    n = math.prod(shape)
    modulus = 1 << n.bit_length()
    size = torch.tensor([(i * step) % modulus + 1 for i in range(n)], dtype=torch.float32) / 64
    sign = torch.tensor([1.0 if (i * i + i // 3) % 2 else -1.0 for i in range(n)])
    return (size * sign).view(shape)


GOLDEN: dict[str, tuple[Codec, list[Tensor], str]] = {}


def golden(name: str, codec: Codec, tensors: list[Tensor], raw: str) -> None:
    GOLDEN[name] = codec, tensors, raw


golden(
    "one bit",
    TopK(32) >> Sign(),
    [exact(64, 512), exact(7)],
    "54484e570200010085668156aaa198d607000000000000000100000000000000000000000000000073010000000000000000003f65be2763"
    "00000000000000000900000000000000530100000000000008000400d031b4e1c056602bd00a580115d0025a68036a8016d006d802b68016"
    "5a402bd00a54815a400b68030bd802b60256c00ad8025a40a0026a402da00d68036c015bd80ab402ad402ba0025a400b6d802da00558015b"
    "c016d002011550056a815aa036a00d6863ffa45540fa906a097fb45e83c462449b152ea019ef561f79f947ab6e4aec39b5194ab98056bdc1"
    "7658b0c021f1d0257b734ebc835240ffa455e0ab96f0af573cb0984cb4d95c7c4f5a913ea45ae51fadd720b11831b55941b98066bcc176c0"
    "ba29ede7d4f228e50269f5069b6ac10277c543976032e12922efa014d03f6915f8906a097fb45e038b116d3617ae461b38e9436af947eb65"
    "4a2c36b55941b98066546fb01db0c021d27e4e3c4a017d5abd81af5ab0f0af573c742c26135e9bcd7f447f447f447f447f447f447f447f44"
    "c5dfe34df49e96df2dfea3fdd7c57bf9c7fb69f97f17ffb4eb737c2dfee8fe74893d6d",
)
golden(
    "int8",
    Hadamard(4) >> TopK(2) >> Int8(),
    [exact(12, 16, step=13), exact(16, 3, step=11)],
    "54484e5702000100ab53cb74146b701607000000000000000100000000000000000000000000000070000000000000000000003f5314eb1b"
    "0000000000000000100000000000000050000000000000000500010059554900b7f7d0f7f9edf7f9e0f7f9b7212121313e3d423df33cf63c"
    "343d0f3d043d5e3dfd3c0d3d503d443d323c4b3c433c3a3ca67fbb7f8e7f81a1497f5781819f437f8187819d5f7f7fa5814a8146813981b9",
)
golden(
    "a cosine transform",
    DCT(8) >> TopK(3) >> Sign(),
    [exact(32, 32, step=77), exact(1)],
    "54484e57020001005e49287be7775d7a0700000000000000010000000000000000000000000000006d000000000000000000003fccd07c23"
    "000000000000000011000000000000004d000000000000000800010055f263feac5b976eedb43650ba406b976e0db835d0d2ad5b03ad0d94"
    "6ed5ba40e9b66e0db43650d6334263426c423a426642474252427f4254428742314247423942434281423742629eb5cdf566803c01",
)
golden(
    "packed indices",
    Identity(8) >> TopK(1) >> TwoBit(3),
    [exact(20, 9), exact(4)],
    "54484e57020001001e7fb8044621ad2507000000000000000100000000000000000000000000000037000000000000000000003ff1264c44"
    "00000000000000000700000000000000170000000000000007000300c892708e08fa010e00007c40804049407840ed0704e03d00000100",
)
golden(
    "random rotations",
    RandomOrthogonal(4, seed=3) >> TopK(2) >> Float("fp16"),
    [exact(16, 16, step=11)],
    "54484e5702000100348c6413b6707a3407000000000000000100000000000000000000000000000070000000000000000000003f06e81fad"
    "00000000000000001000000000000000500000000000000003000100b4326eb1a8a8a8a9646464752020c2a8a8a8b4640846dc45b8468cc6"
    "68c73cc7c047ec4748c61cc6f8c6cc46a8477c4700c8d447c8c69cc678c74c47fc47e8c718c6ecc50847dc46b8478cc7a8c5e44758462c46",
)
golden(
    "gaps in rows of bits",
    TopK(256) >> Sign(),
    [exact(64, 64)],
    "54484e5702000100506a9f63749415d807000000000000000100000000000000000000000000000002010000000000000000003f74196d3a"
    "00000000000000000100000000000000e20000000000000008000400a5d0a4db94420a292989a4a4849294420a299144525242494a218594"
    "48222929a124a590929448222929a124a59092944822299450925248494a2425299450925248494a24252994501229a424259292144a5212"
    "29a424259292144a521229a484124949a8ce78a874c643ab331e509df1509df1d0ea8c0754673c54673cb43ae301d5196fa8ce786875c603"
    "aa33de509df1509df180ea8c375467eca13ae301d5196fa8ced84375c64375c61baa33f6509d8987ea8c375467eca13a130fd5190fd5197b"
    "f842565b5b5bafb7b7d76b6b6babadadadd7dbdbdb6b6b6babd5d6d6d6dbdbdbebb5",
)
golden(
    "a random choice",
    RandomK(5, seed=7) >> Fp4(),
    [exact(70), exact(1)],
    "54484e57020001005283601bc6a2d99c07000000000000000100000000000000000000000000000030000000000000000000003fa582ebad"
    "0000000000000000030000000000000010000000000000000600000098dc1609cc3ff7760c0000000000803c0f000000",
)
golden(
    "strides",
    Striding(0.1) >> TwoBit(),
    [exact(11, 11)],
    "54484e570200010055659e8141bb02b707000000000000000100000000000000000000000000000028000000000000000000003fa9ec5c32"
    "00000000000000000100000000000000080000000000000007000000589a46dbe83eb23fb4e5f100",
)
golden(
    "everything in one bit",
    Sign(),
    [exact(2, 5), exact(300)],
    "54484e5702000100150ffca8ece88c390700000000000000010000000000000000000000000000004d000000000000000000003f6e624b59"
    "000000000000000003000000000000002d000000000000000800000068b35541023e83406f406db76ddbb66ddbb66ddbb66ddbb66ddbb66d"
    "dbb66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb62d",
)
golden(
    "everything in three values",
    Ternary(),
    [exact(2, 5), exact(300)],
    "54484e570200010044fec905bb1adfdb07000000000000000100000000000000000000000000000064000000000000000000003f3ddd9a84"
    "00000000000000000300000000000000440000000000000009000000cb48f48d273ead40a24099e39ce90787e9d600e7d617d8d69e00d59e"
    "11a29ee9019ce91951e9d602e1d617a2d69e02cf9e47009ee90199e93400e9d605d8d69e00d69e08bd9ee900",
)
golden(
    "three values in blocks",
    DCT(8) >> TopK(3) >> Ternary(16),
    [exact(32, 32, step=77), exact(1)],
    "54484e570200010061e5044932fc2e7207000000000000000100000000000000000000000000000057000000000000000000003fb7d8c7ef"
    "00000000000000001100000000000000370000000000000009000100a2532ab1ac5b976eedb43650ba406b976e0db835d0d2ad5b03ad0d94"
    "6ed5ba40e9b66e0db43650d6524261424b427cce8698e985d7f18511803c02",
)
golden(
    "dense",
    Dense("bf16", gather=True),
    [exact(2, 3, step=3), exact(1)],
    "54484e5702000100992783b54a1bf7040700000000000000010000000000000000000000000000002e000000000000000000003f836c4e5c"
    "000000000000000002000000000000000e0000000000000002000000f142cad880bc803de0bd00bda03d00be80bc",
)
INVALID = (
    "54484e5702010100efcdab89674523010000000000010000ffffffffffffffff1032547698badcfe23000000000000000000803f34587356"
    "000000000000000000000000000000000300000000000000000000009ed1aeaa000000"
)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_messages_never_change(name: str) -> None:
    """If this fails, the wire has changed: raise the version, and say so on the page."""
    codec, tensors, shown = GOLDEN[name]
    raw = bytes.fromhex(shown)
    assert message_of(codec, tensors, weight=0.5).hex() == raw.hex()
    told, nbytes = fingerprint(codec, tensors), codec.nbytes(tensors)
    body, envelope = unseal(Payload.of_bytes(raw), fingerprint=told, round=7, sender=1, nbytes=nbytes)
    assert envelope == Envelope(1, 0.5)
    decoded = codec.decode(body, tensors, round=7)
    if isinstance(codec, Dense):
        assert all(torch.equal(d, t) for d, t in zip(decoded, tensors, strict=True))
    else:
        shapes = [tuple(t.shape) for t in tensors]
        assert_same(plain_reader.read(raw, repr(codec), shapes, round=7, sender=1), decoded, exact=False)


def test_the_golden_message_of_a_worker_whose_contribution_is_invalid() -> None:
    body = Payload.of_bytes(bytes(35))
    envelope = Envelope(2**64 - 1, invalid=True, state_hash=0xFEDCBA9876543210)
    sealed = seal(body, envelope, fingerprint=0x0123456789ABCDEF, round=1 << 40)
    assert sealed.to_bytes().hex() == INVALID
    read, told = unseal(sealed, fingerprint=0x0123456789ABCDEF, round=1 << 40, sender=2**64 - 1, nbytes=35)
    assert told == envelope
    assert read.nbytes == 35
