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
from tests.codecs.plain_reader import Refused
from tests.tiers import first_quick
from thinwire.codecs import (
    DCT,
    All,
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
    TopK,
    TwoBit,
)
from thinwire.codecs.bits import pack
from thinwire.codecs.indices import Bitmap, EliasFano, IndexCode, Packed, Ranked, index_code
from thinwire.codecs.selection import Selection
from thinwire.codecs.shared_seed import numbers
from thinwire.codecs.transforms import Transform
from thinwire.codecs.values import Values
from thinwire.codecs.wire import Envelope, fingerprint, seal, unseal
from thinwire.errors import WireError
from thinwire.payload import Payload

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"

TRANSFORMS = [Identity(8), DCT(8), Hadamard(8), RandomOrthogonal(8, seed=5)]
SELECTIONS = [TopK(3), TopK(0.15), RandomK(3, seed=9), RandomK(0.2), Striding(3), Striding(0.1), All()]
VALUES = [Float(), Float("bf16"), Float("fp16"), Int8(), Int8(5), Fp4(), Fp4(7), TwoBit(), TwoBit(4), Sign(), Sign(11)]
SHAPES = [(9, 20), (3,), (), (0, 4), (2, 3, 5), (70,), (17, 1), (1, 33), (15, 8), (6, 48), (16, 5, 8)]


def contribution(shapes: list[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) for s in shapes]


def message_of(codec: Codec, tensors: list[Tensor], *, round: int = 7, rank: int = 1, weight: float = 1.0) -> bytes:
    body = codec.encode(tensors, round=round)
    return seal(body, Envelope(rank, weight), fingerprint=fingerprint(codec, tensors), round=round).to_bytes()


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


@pytest.mark.parametrize("values", VALUES, ids=repr)
@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_a_reader_written_from_the_page_reads_every_message(selection: Selection, values: Values) -> None:
    tensors = contribution()
    for transform in TRANSFORMS:
        chain = transform >> selection >> values
        body = chain.encode(tensors, round=7)
        assert plain_reader.body_nbytes(repr(chain), SHAPES) == body.nbytes == chain.nbytes(tensors)
        ours = chain.decode(body, tensors, round=7)
        if chain.linear:
            theirs = plain_reader.read_body(body.to_bytes(), repr(chain), SHAPES, round=7)
        else:
            theirs = plain_reader.read(message_of(chain, tensors), repr(chain), SHAPES, round=7, rank=1)
        assert_same(theirs, ours, exact=isinstance(transform, Identity))


def test_the_chains_above_use_blocks_groups_and_whole_tensors() -> None:
    """Else they would not test much."""
    chains = [t >> TopK(3) >> v for t in TRANSFORMS for v in VALUES]
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
    chain = TopK(k) >> values
    theirs = plain_reader.read(message_of(chain, tensors), repr(chain), [(128, 65), (100,)], round=7, rank=1)
    assert_same(theirs, chain.decode(chain.encode(tensors), tensors), exact=True)


def test_it_reads_tensors_of_two_values_that_are_equal_everywhere_but_in_one_place() -> None:
    """Groups without any large value, scales of zero, and negative zeros."""
    tensors = [torch.zeros(9, 20), torch.full((9, 20), -0.0), torch.full((300,), 2.0), torch.zeros(300)]
    tensors[0][3, 4] = -5
    for values in VALUES:
        chain = Identity(8) >> TopK(3) >> values
        shapes = [tuple(t.shape) for t in tensors]
        theirs = plain_reader.read(message_of(chain, tensors), repr(chain), shapes, round=7, rank=1)
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
        Ranked(4096, 32, 5),
        Ranked(300, 40),
        Ranked(300, 40, 2),
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
            theirs = plain_reader.read(raw, repr(chain), shapes, round=7, rank=1)
        except Refused:
            theirs = None
        ours = None
        try:
            body, envelope = unseal(Payload.of_bytes(raw), fingerprint=print_of_it, round=7, rank=1, nbytes=nbytes)
            if not envelope.withdrawn:
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
    assert plain_reader.read(raw, repr(chain), shapes, round=7, rank=1) == [a.flatten().tolist(), [3.140625]]
    told = plain_reader.fingerprint(repr(chain), shapes)
    assert on_the_page(f"`{spaced(told.to_bytes(8, 'little'))}`, and the fingerprint is {told:#018x}.")
    assert index_code(36, 2) == Ranked(36, 2, 3)
    assert index_code(36, 2, 1) == EliasFano(36, 2, 1)


def test_the_packed_numbers_of_the_page() -> None:
    for some, width, shown in (([0xABC, 0x123, 0x456], 12, (3, 7)), ([1, 2, 3, 4, 5, 6, 7, 0, 5], 3, (3, 6))):
        raw = pack(np.array(some), width).tobytes()
        assert len(raw) == shown[1]
        assert on_the_page(f"| `{spaced(raw[: shown[0]])}` and `{spaced(raw[shown[0] :])}` |")


def test_the_ranks_of_the_page() -> None:
    assert index_code(10, 5) == Ranked(10, 5, 0)
    assert index_code(10, 5).encode(np.array([[1, 3, 4, 8, 9]])).tobytes() == bytes.fromhex("cc")
    assert EliasFano(40, 3, 3).encode(np.array([[5, 20, 21]])).tobytes() == bytes.fromhex("19650100")
    assert on_the_page("a single block takes `cc`.")
    assert on_the_page("a single block takes `19` and `65 01 00`.")
    kept = [3, 255, 256, 1000, 2000, 2001, 4000, 4095]
    raw = index_code(4096, 8).encode(np.array([kept])).tobytes()
    s = [(e >> 8) + j for j, e in enumerate(kept)]
    terms = [math.comb(v, j + 1) for j, v in enumerate(s)]
    assert on_the_page(f"s = {', '.join(map(str, s))}. The rank is {' + '.join(map(str, terms))} = {sum(terms)}")
    assert on_the_page(f"`{spaced(raw[:2])}`, `{spaced(raw[2:5])}` and the low bits `{spaced(raw[5:])}`")
    shown = re.findall(r"\| (\d+) \| (\d+) \| ([A-Z]\w+)(?:\((\d+)\))?(?:: [^|]*)? \| ([\d.]+) \|", PAGE.read_text())
    assert len(shown) == 6
    for L, k, name, low, bits in shown:
        code = index_code(int(L), int(k))
        assert (type(code).__name__, getattr(code, "low", 0)) == (name, int(low or 0))
        assert f"{code.bits / int(k):.3g}" == bits


def test_the_values_of_the_page() -> None:
    for values, scales in ((Int8(), 2), (Fp4(), 2), (TwoBit(), 4), (Sign(), 2)):
        raw, read = values.write(np.array([1, -0.5, 0.26, -0.1, 0.004], np.float32), 5)
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
    "ranks in three limbs",
    TopK(32) >> Sign(),
    [exact(64, 512), exact(7)],
    "54484e570100000085668156aaa198d60700000000000000010000000000003f4301000000000000000000004abc0c9aca8e454508da498b"
    "1815756d3ad640b8bd501968db8299e5be77865a986a5af7a01f77e00947afa0bd786561d9ac99008cd77debc68b63e0c5da2d5245b89f12"
    "b4877e91754f4ebef7026e55d92eb72083022ee07c08bb0ae7edc269f9e42f106539d56e157fda0e8b360d9387220caea3bf5403f15059f1"
    "e3ba43324c5a2e0e68f3763db9fcb8b491eccc96117540d717f6b1507014474fbb9dc91da2a0bf54835756fc75e36058929667f92f55e2a1"
    "b2e5c775876498cc960b75409b17f681dac87d66e3883a90ea0b5b5928f88da3272c8957823b44417fa9060f95153fae3b18262dcfe23435"
    "9878a8ca8feb1ac9f06cb95007b4a92fec030547729fc911053dd517bcb250fc75e3e80c4be25b9e7f447f447f447f447f447f447f447f44"
    "c5dfe34df49e96df2dfea3fdd7c57bf9c7fb69f97f17ffb4eb737c2dfee8fe74893d6d",
)
golden(
    "int8",
    Hadamard(4) >> TopK(2) >> Int8(),
    [exact(12, 16, step=13), exact(16, 3, step=11)],
    "54484e5701000000ab53cb74146b70160700000000000000010000000000003f4e0000000000000000000000470a3fdb3eb8132e47c3e55b"
    "b8dc271008083e3d423df33cf63c343d0f3d043d5e3dfd3c0d3d503d443d323c4b3c433c3a3ca67fbb7f8e7f81a1497f5781819f437f8187"
    "819d5f7f7fa5814a8146813981b9",
)
golden(
    "a cosine transform",
    DCT(8) >> TopK(3) >> Sign(),
    [exact(32, 32, step=77), exact(1)],
    "54484e57010000005e49287be7775d7a0700000000000000010000000000003f49000000000000000000000037ae67cccc25b2755c1e8fcc"
    "638bd6621e8574ebba468dba2e5c947551a36e8dba2e6ab4334263426c423a426642474252427f4254428742314247423942434281423742"
    "629eb5cdf566803c01",
)
golden(
    "packed indices",
    Identity(8) >> TopK(1) >> TwoBit(3),
    [exact(20, 9), exact(4)],
    "54484e57010000001e7fb8044621ad250700000000000000010000000000003f170000000000000000000000ec7a421d08fa010e00007c40"
    "804049407840ed0704e03d00000100",
)
golden(
    "random rotations",
    RandomOrthogonal(4, seed=3) >> TopK(2) >> Float("fp16"),
    [exact(16, 16, step=11)],
    "54484e5701000000348c6413b6707a340700000000000000010000000000003f4e000000000000000000000006a47f2eb55acd36994c3481"
    "00b156abed260846dc45b8468cc668c73cc7c047ec4748c61cc6f8c6cc46a8477c4700c8d447c8c69cc678c74c47fc47e8c718c6ecc50847"
    "dc46b8478cc7a8c5e44758462c46",
)
golden(
    "gaps in rows of bits",
    TopK(256) >> Sign(),
    [exact(64, 64)],
    "54484e5701000000506a9f63749415d80700000000000000010000000000003fe20000000000000000000000c4c8513294420a292989a4a4"
    "849294420a299144525242494a21859448222929a124a590929448222929a124a59092944822299450925248494a2425299450925248494a"
    "24252994501229a424259292144a521229a424259292144a521229a484124949a8ce78a874c643ab331e509df1509df1d0ea8c0754673c54"
    "673cb43ae301d5196fa8ce786875c603aa33de509df1509df180ea8c375467eca13ae301d5196fa8ced84375c64375c61baa33f6509d8987"
    "ea8c375467eca13a130fd5190fd5197bf842565b5b5bafb7b7d76b6b6babadadadd7dbdbdb6b6b6babd5d6d6d6dbdbdbebb5",
)
golden(
    "a random choice",
    RandomK(5, seed=7) >> Fp4(),
    [exact(70), exact(1)],
    "54484e57010000005283601bc6a2d99c0700000000000000010000000000003f10000000000000000000000060a24f3fcc3ff7760c000000"
    "0000803c0f000000",
)
golden(
    "strides",
    Striding(0.1) >> TwoBit(),
    [exact(11, 11)],
    "54484e570100000055659e8141bb02b70700000000000000010000000000003f080000000000000000000000b1668e7fe83eb23fb4e5f100",
)
golden(
    "everything in one bit",
    Sign(),
    [exact(2, 5), exact(300)],
    "54484e5701000000150ffca8ece88c390700000000000000010000000000003f2b0000000000000000000000c9db45f27a407d406db76ddb"
    "b66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb66ddbb62d",
)
golden(
    "dense",
    Dense("bf16", gather=True),
    [exact(2, 3, step=3), exact(1)],
    "54484e5701000000992783b54a1bf7040700000000000000010000000000003f0e000000000000000000000069c4d5d280bc803de0bd00bd"
    "a03d00be80bc",
)
WITHDRAWN = "54484e5701010000efcdab89674523010000000000010000020000000000803f0300000000000000000000006cc2892a000000"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_messages_never_change(name: str) -> None:
    """If this fails, the wire has changed: raise the version, and say so on the page."""
    codec, tensors, shown = GOLDEN[name]
    raw = bytes.fromhex(shown)
    assert message_of(codec, tensors, weight=0.5).hex() == raw.hex()
    told, nbytes = fingerprint(codec, tensors), codec.nbytes(tensors)
    body, envelope = unseal(Payload.of_bytes(raw), fingerprint=told, round=7, rank=1, nbytes=nbytes)
    assert envelope == Envelope(1, 0.5)
    decoded = codec.decode(body, tensors, round=7)
    if isinstance(codec, Dense):
        assert all(torch.equal(d, t) for d, t in zip(decoded, tensors, strict=True))
    else:
        shapes = [tuple(t.shape) for t in tensors]
        assert_same(plain_reader.read(raw, repr(codec), shapes, round=7, rank=1), decoded, exact=False)


def test_the_golden_message_of_a_worker_that_withdraws() -> None:
    body = Payload.of_bytes(bytes(3))
    sealed = seal(body, Envelope(2, withdrawn=True), fingerprint=0x0123456789ABCDEF, round=1 << 40)
    assert sealed.to_bytes().hex() == WITHDRAWN
    read, envelope = unseal(sealed, fingerprint=0x0123456789ABCDEF, round=1 << 40, rank=2, nbytes=3)
    assert envelope == Envelope(2, withdrawn=True)
    assert read.to_bytes() == bytes(3)
