"""Several short messages in one go: the bytes and values of one by one, and errors that name whose message it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thinwire import DCT, Float, Fp4, Int8, Owners, Sign, Ternary, TopK, TwoBit
from thinwire.codecs.base import Messages
from thinwire.codecs.bits import cut, joined, pack, packed_segments
from thinwire.codecs.chain import Chain
from thinwire.codecs.deal import deal_of
from thinwire.codecs.indices import Bitmap, EliasFano, IndexCode, Packed
from thinwire.codecs.stages import Row, Values
from thinwire.errors import WireError
from thinwire.payload import Payload

CODES = [Packed(4096, 8), Packed(100, 5), Bitmap(32, 8), Bitmap(30, 7), EliasFano(4096, 32, 6), EliasFano(4096, 5, 9)]
FORMATS = [Sign(), Sign(group=16), TwoBit(), Ternary(), Fp4(), Int8(), Float("fp32"), Float("bf16")]
ROWS = [Row(8, (8,)), Row(8, (16, 24)), Row(5, (5, 10)), Row(10, (40,)), Row(256, (70,)), Row(7, (7, 7, 7))]


@pytest.mark.parametrize("width", [1, 3, 8, 12, 17])
@pytest.mark.parametrize("count", [8, 24])
def test_rows_that_are_packed_as_one_are_cut_into_those_packed_one_by_one(width: int, count: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << width, (5, count))
    lengths = packed_segments(count, width)
    assert lengths is not None
    rows = cut(pack(numbers.reshape(-1), width), lengths, 5)
    assert (rows == np.stack([pack(one, width) for one in numbers])).all()
    assert (joined(rows, lengths) == pack(numbers.reshape(-1), width)).all()
    assert packed_segments(count + 1, 3) is None, "the last eight are not all there"


def sets(code: IndexCode, rows: int, n: int) -> np.ndarray:
    generator = np.random.default_rng(1)
    each = [np.sort(generator.choice(code.L, code.k, replace=False)) for _ in range(rows * n)]
    return np.array(each, np.uint16).reshape(rows, n, code.k)


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("code", CODES, ids=repr)
def test_indices_of_several_messages(code: IndexCode, n: int) -> None:
    indices = sets(code, 4, n)
    codes = code.encode_all(indices)
    assert (codes == np.stack([code.encode(one) for one in indices])).all()
    read = np.empty_like(indices)
    code.read_all(codes, read)
    assert (read == indices).all()
    worst = np.full((4, n, code.k), code.L - 1, np.uint16)  # the same index over and over
    if isinstance(code, Packed):
        with pytest.raises(WireError, match="duplicate index"):
            code.read_all(code.encode_all(worst), read)


@pytest.mark.parametrize("row", ROWS, ids=repr)
@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_values_of_several_messages(form: Values, row: Row) -> None:
    values = np.random.default_rng(2).standard_normal(6 * row.count).astype(np.float32)
    raw, read = form.write_all(values, row, 6)
    each = [form.write(one, row) for one in values.reshape(6, -1)]
    assert (raw == np.stack([bytes_ for bytes_, _ in each])).all()
    assert (read == np.concatenate([told for _, told in each])).all()
    assert (form.read_all(raw, row) == read).all()
    assert (form.read_all(raw[:1], row) == read[: row.count]).all()
    if not isinstance(form, Float):
        raw[3, :2] = 0xFF  # a scale that is not a number
        with pytest.raises(WireError, match="not finite"):
            form.read_all(raw, row)


@pytest.mark.parametrize("half", ["up", "back"])
@pytest.mark.parametrize("trouble", ["scale", "length"])
def test_the_sender_of_a_short_message_that_is_not_sound_is_named(half: str, trouble: str) -> None:
    like = [torch.zeros(128, 64), torch.zeros(64, 64), torch.zeros(300)]
    chain = Chain.of(DCT(64) >> TopK(8) >> Sign())
    deal = deal_of(chain, Owners().back_of(chain), like, range(3), 3)
    shares = [deal.shares[0].up] * 3 if half == "up" else [share.back for share in deal.shares]
    payloads = [Payload(torch.zeros(share.nbytes, dtype=torch.uint8)) for share in shares]
    for share, payload in zip(shares, payloads, strict=True):
        for section in share.parts[0].sections:
            if section.code is not None:
                code = section.code.encode(np.tile(np.arange(section.k, dtype=np.uint16), (section.blocks, 1)))
                payload.data[section.start : section.middle] = torch.from_numpy(code)
    section = shares[1].parts[0].sections[-1]
    bad = payloads[1].data.clone()
    bad[section.middle : section.middle + 2] = 0xFF
    payloads[1] = Payload(bad if trouble == "scale" else bad[:-1])
    messages = Messages(payloads, like, 1, ids=[0, 7, 2])
    with pytest.raises(WireError) as caught:
        deal.receive(0, messages) if half == "up" else deal.read(payloads, like, round=1)
    assert caught.value.rank == (7 if half == "up" else 1)
