"""Parts: one message of several codecs says what its parts would say alone, in as many bytes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from benchmarks.fuzz import BODY, ENVELOPE, READ, WRONG, Case, fuzz, limited_memory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import (
    DCT,
    Codec,
    Dense,
    Float,
    Fp4,
    Int8,
    Mean,
    Messages,
    Parts,
    RandomK,
    Sign,
    Striding,
    TopK,
    TwoBit,
)
from thinwire.codecs.wire import PART_NBYTES
from thinwire.core.average import average, message_nbytes
from thinwire.errors import ConfigError, NonFiniteRound, WireError
from thinwire.links import Link, Metered
from thinwire.payload import Payload
from thinwire.sim import World

calm = settings(deadline=None, database=None, derandomize=True)
CODECS: list[Codec] = [
    DCT(8) >> TopK(3) >> Sign(),
    Dense("bf16"),
    Dense("fp32"),
    Dense("fp64"),
    Dense("fp16", gather=True),
    TopK(4) >> TwoBit(),
    RandomK(0.3, seed=5) >> Float("bf16"),
    Striding(3) >> Sign(),
    Int8(),
    Fp4(),
    Sign(),
]
SHAPES: list[tuple[int, ...]] = [(), (7,), (9, 20), (0,), (2, 3, 5), (1,), (70,), (3,)]


def some(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g) for s in shapes]


def dealt(parts: Parts, tensors: Sequence[Tensor]) -> list[tuple[Codec, list[Tensor]]]:
    found, start = [], 0
    for count, codec in parts.parts:
        found.append((codec, list(tensors[start : start + count])))
        start += count
    return found


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def parted(rng: random.Random, tensors: int) -> Parts:
    left, parts = tensors, []
    while left:
        count = rng.randint(1, left)
        parts.append((count, rng.choice(CODECS)))
        left -= count
    return Parts(tuple(parts))


@given(seed=st.integers(0, 10**6), shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8))
@calm
def test_a_message_is_that_of_its_parts(seed: int, shapes: list[tuple[int, ...]]) -> None:
    """Odd numbers of bytes before a part of wide numbers included: nothing of it depends on where a part begins."""
    parts = parted(random.Random(seed), len(shapes))
    tensors = some(shapes, seed)
    before = [t.clone() for t in tensors]
    message = parts.encode(tensors, round=5)
    same(tensors, before)
    alone = dealt(parts, tensors)
    raw = message.to_bytes()
    for codec, mine in alone:  # that of a codec without parts of its own is one
        body = codec.encode(mine, round=5).to_bytes()
        head = PART_NBYTES if codec.linear else 0
        assert raw[head : head + len(body)] == body
        raw = raw[head + len(body) :]
    assert not raw
    meta = [torch.empty_like(t, device="meta") for t in tensors]
    assert message.nbytes == parts.nbytes(tensors) == parts.nbytes(meta)
    assert message.nbytes == sum(codec.nbytes(mine) + PART_NBYTES * codec.linear for codec, mine in alone)
    expected = [t for codec, mine in alone for t in codec.decode(codec.encode(mine, round=5), mine, round=5)]
    same(parts.decode(message, meta, round=5), expected)
    again, finite = parts.encode_finite(tensors, round=5)
    assert finite
    assert again.to_bytes() == message.to_bytes()


MEANS = [Mean(), Mean(over="senders"), Mean(clip_norm=0.5), Mean(median_norm=True)]
WEIGHTED = [(mean, weights) for mean in MEANS for weights in (None, [1.0, 0.0, 2.5])]


@pytest.mark.parametrize(("mean", "weights"), [*WEIGHTED, (Mean(trimmed=0.34), None)])  # a trimmed mean takes no weights
def test_the_mean_is_that_of_its_parts(mean: Mean, weights: list[float] | None) -> None:
    parts = Parts(((2, DCT(8) >> TopK(3) >> Sign()), (1, Dense("bf16")), (3, TopK(4) >> TwoBit()), (2, Int8())))
    workers = [some(SHAPES, seed) for seed in range(3)]
    found = parts.combine(
        Messages([parts.encode(w, round=2) for w in workers], workers[0], round=2, mean=mean, weights=weights)
    )
    expected: list[Tensor] = []
    for i, (codec, like) in enumerate(dealt(parts, workers[0])):
        messages = [codec.encode(dealt(parts, w)[i][1], round=2) for w in workers]
        if codec.linear:
            messages = [Payload(m.data.view(torch.uint8)) for m in messages]
        expected += codec.combine(Messages(messages, like, round=2, mean=mean, weights=weights))
    same(found, expected)


def test_codecs_that_change_with_the_round_do_so_in_a_part() -> None:
    parts = Parts(((1, Dense()), (1, RandomK(0.2, seed=1) >> Float("fp32"))))
    tensors = some([(3,), (400,)])
    first, second = (parts.decode(parts.encode(tensors, round=r), tensors, round=r)[1] for r in (1, 2))
    assert not torch.equal(first != 0, second != 0)


def test_equal_parts_are_equal_and_never_averaged_on_the_wire() -> None:
    a, b = (Parts(((1, Dense()), (2, Sign()))) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert repr(a) == repr(b)
    assert not a.linear
    assert not Parts(((1, Dense()),)).linear
    assert not a.holds(torch.float32)


def test_a_value_that_is_not_finite_is_told_of_whichever_part() -> None:
    parts = Parts(((1, Dense()), (1, Dense("fp16", gather=True)), (1, DCT(8) >> TopK(3) >> Sign())))
    for i in range(3):
        tensors = some([(4,), (5,), (9, 9)])
        tensors[i].view(-1)[0] = float("nan")
        assert not parts.encode_finite(tensors)[1] or i == 2, "a selection may leave it out: the exchange looks itself"
    large = [torch.ones(4), torch.full((5,), 1e6), torch.ones(9, 9)]
    assert not parts.encode_finite(large)[1], "finite, but not in half precision"


# --- What is wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1])
def test_a_part_holds_something(count: int) -> None:
    with pytest.raises(ConfigError, match=f"a part has at least one tensor, got {count}"):
        Parts(((count, Dense()),))


def test_parts_are_some_and_of_codecs() -> None:
    with pytest.raises(ConfigError, match="at least one codec, got none"):
        Parts(())
    with pytest.raises(ConfigError, match="must be a thinwire Codec, got 'sign'"):
        Parts(((1, "sign"),))  # type: ignore[arg-type]


def test_other_numbers_of_tensors_are_refused() -> None:
    parts = Parts(((1, Dense()), (2, Sign())))
    for wrong in (2, 4):
        with pytest.raises(ConfigError, match=f"is for 3 tensors, got {wrong}"):
            parts.encode(some([(3,)] * wrong))
        with pytest.raises(ConfigError, match=f"is for 3 tensors, got {wrong}"):
            parts.nbytes(some([(3,)] * wrong))


@pytest.mark.parametrize("change", [-1000, -4, -1, 1, 4, 100])
def test_messages_of_another_length_are_refused(change: int) -> None:
    parts, like = Parts(((2, DCT(8) >> TopK(3) >> Sign()), (1, Dense()), (1, Sign()))), some([(9, 20), (7,), (5,), (3,)])
    raw = parts.encode(like).to_bytes()
    bad = Payload.of_bytes(raw[: max(0, len(raw) + change)] if change < 0 else raw + bytes(change))
    for read in (lambda: parts.decode(bad, like), lambda: parts.combine(Messages([parts.encode(like), bad], like))):
        with pytest.raises(WireError, match=f"a message of {bad.nbytes} bytes.*make {len(raw)}"):
            read()


def test_messages_that_mean_harm_are_refused_or_read_as_something_sound() -> None:
    """The mutator of tests/codecs/test_hostile.py on a message of parts."""
    shapes = [(9, 20), (3,), (70,), (2, 3, 5)]
    mixed = [
        Parts(((1, DCT(8) >> TopK(3) >> Sign()), (1, Dense("bf16")), (2, TopK(4) >> TwoBit()))),
        Parts(((2, TopK(2) >> Float("fp16")), (1, Int8()), (1, Dense("fp32")))),
        Parts(((1, Sign()), (1, Dense("fp16", gather=True)), (1, Fp4()), (1, RandomK(3, seed=2) >> Float("fp32")))),
    ]
    with limited_memory(512 << 20):
        judged = list(fuzz([Case(codec, shapes, Mean()) for codec in mixed], 3000, seed=1))
    seen = Counter(j.outcome.split(":")[0] for j in judged)
    wrong = [str(j) for j in judged if j.outcome.startswith(WRONG)]
    assert not wrong, f"{len(wrong)}: {wrong[:5]}"
    for expected in (ENVELOPE, BODY, READ):
        assert seen[expected.split(":")[0]] > 20, seen


def test_noise_in_a_body_is_refused_or_read() -> None:
    parts, like = Parts(((1, Sign()), (1, DCT(8) >> TopK(3) >> Float("fp32")), (1, Dense()))), some([(3,), (9, 20), (5,)])
    rng = random.Random(0)
    for _ in range(300):
        bad = Payload.of_bytes(rng.randbytes(parts.nbytes(like)))
        for read in (lambda p=bad: parts.decode(p, like), lambda p=bad: parts.combine(Messages([p, p], like))):
            try:
                found = read()
            except WireError:
                continue
            assert [t.shape for t in found] == [t.shape for t in like]


# --- In an exchange -------------------------------------------------------------------------------------------------------


def test_an_exchange_of_parts_is_one_message_and_the_mean_of_what_was_sent() -> None:
    parts = Parts(((2, DCT(8) >> TopK(3) >> Sign()), (1, Dense("bf16")), (1, Dense())))
    shapes = [(9, 20), (7,), (5,), (3, 3)]

    def worker(link: Link) -> tuple:
        metered = Metered(link)
        mean, sent = average(metered, parts, some(shapes, link.rank), want_sent=True, round=1)
        assert message_nbytes(link, parts, some(shapes)) == metered.meter.recent[-1].payload
        return mean, sent, len(metered.meter.recent)

    results = World(3).run(worker)
    for rank, (mean, sent, messages) in enumerate(results):
        assert messages == 1
        same(mean, results[0][0])
        same(sent, parts.decode(parts.encode(some(shapes, rank), round=1), some(shapes), round=1))
        for i, m in enumerate(mean):
            torch.testing.assert_close(m, torch.stack([results[r][1][i] for r in range(3)]).mean(0))


def test_a_nan_in_any_part_is_found_and_named() -> None:
    parts = Parts(((1, DCT(8) >> TopK(3) >> Sign()), (1, Dense("bf16"))))

    def worker(link: Link, where: int) -> tuple[int, ...]:
        tensors = some([(9, 20), (5,)])
        if link.rank == 1:
            tensors[where].view(-1)[0] = float("nan")
        with pytest.raises(NonFiniteRound) as caught:
            average(link, parts, tensors)
        return caught.value.culprits

    for where in (0, 1):
        assert World(3).run(lambda link, where=where: worker(link, where)) == [(1,)] * 3
