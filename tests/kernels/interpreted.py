"""Triton kernels in Triton's interpreter, against torch operations and numpy: run by `test_triton.py` in a process of its own.

TRITON_INTERPRET=1 must be set before anything imports triton, and THINWIRE_KERNELS=auto. A block takes about 0.1 s.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import device_kernels
from numpy.typing import NDArray
from torch import Tensor

from tests.codecs.test_device import _mutated, normal, same
from thinwire import DCT, DecoupledDiLoCo, DeMo, Int8, Link, Mean, Sign, SoloLink, TopK, World, kernels
from thinwire.codecs import Chain, Made, Messages
from thinwire.codecs.device import checksum
from thinwire.codecs.device.decoder import DeviceReceived
from thinwire.codecs.device.envelope import open_all
from thinwire.codecs.device.fused import Sent, in_triton
from thinwire.codecs.device.fused_decoder import FusedReceived
from thinwire.codecs.parts import frames_of
from thinwire.codecs.stages import Transform, torch_everywhere
from thinwire.codecs.wire import HEADER_NBYTES, fingerprint
from thinwire.core.deferred import Selected
from thinwire.errors import WireError
from thinwire.kernels import triton
from thinwire.kernels.triton import start as starting
from thinwire.kernels.triton import trial
from thinwire.maths.update_rules import whitening
from thinwire.payload import Payload

CPU = torch.device("cpu")
ROUND = 7
Shapes = list[tuple[int, ...]]
Array = NDArray[np.float32]
# Two blocks of 64 x 64, one of them mostly padding; two tensors sent whole, of which one has two groups; small blocks
PADDED: Shapes = [(64, 70), (16,), (264,), (5, 64)]
DEFAULT = DCT(64) >> TopK(32) >> Sign()


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1" and os.environ[kernels.SETTING] == "auto", "see test_triton.py"


@pytest.fixture
def equal_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that does nothing: the last bits of a matrix product depend on the order of its sums."""
    monkeypatch.setattr(Transform, "matrix", lambda *_: None)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Torch operations do it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.SETTING, "off")
        yield


def like_of(shapes: Shapes) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(same, some, others))


# --- Encoding ----------------------------------------------------------------------------------------------------------------


def three_ways(chain: Chain, shapes: Shapes, slots: list[Tensor]) -> bytes:
    """The message of slots by kernels, by torch operations and by numpy, and what is left after it was taken off."""
    like, left = like_of(shapes), list[list[Tensor]]()
    with torch_everywhere():
        by_kernels = chain.encode_slots(slots, like, round=ROUND)
    assert any(isinstance(sent, Sent) for sent in by_kernels.sent)  # type: ignore[attr-defined]
    with torch_everywhere(), without_kernels():
        by_torch = chain.encode_slots(slots, like, round=ROUND)
    assert not any(isinstance(sent, Sent) for sent in by_torch.sent)  # type: ignore[attr-defined]
    with without_kernels():
        by_numpy = chain.encode_slots(slots, like, round=ROUND)
    assert bool(by_kernels.finite) is bool(by_torch.finite) is by_numpy.finite
    assert torch.equal(by_kernels.payload.data, by_torch.payload.data)
    assert (by_kernels.rows is None) is all(len(shape) > 1 for shape in shapes)  # type: ignore[attr-defined]
    for encoded in (by_kernels, by_torch) if by_numpy.finite else ():
        left.append([slot.clone() for slot in slots])
        encoded.take_from(left[-1], scale=[0.3 * i for i in range(len(slots))])
    assert not left or equal(*left)
    assert torch.equal(by_torch.payload.data, by_numpy.payload.data) or _ties(slots)
    return by_kernels.payload.to_bytes()


def _ties(slots: Sequence[Tensor]) -> bool:
    """Of equal entries numpy takes any."""
    return any(slot.abs().unique().numel() < slot.numel() for slot in slots)


def test_messages_of_slots_are_those_of_torch_and_numpy() -> None:
    three_ways(DEFAULT, PADDED, normal(DEFAULT.slot_shapes(like_of(PADDED)), 1))


@pytest.mark.slow
@pytest.mark.parametrize("k", [8, 24, 40, 128, 200, 256])
def test_messages_of_any_k(k: int) -> None:
    chain = DCT(64) >> TopK(k) >> Sign()
    assert in_triton(chain)
    three_ways(chain, PADDED, normal(chain.slot_shapes(like_of(PADDED)), k))


@pytest.mark.slow
def test_messages_in_several_parts() -> None:
    chain, shapes = DEFAULT.split(3), [(128, 128), (64, 100), (2048,)]
    three_ways(chain, shapes, normal(chain.slot_shapes(like_of(shapes)), 1))


@pytest.mark.slow
@pytest.mark.parametrize("k", [32, 128])
def test_ties_go_to_the_first_and_nan_is_largest(k: int) -> None:
    chain, g = DCT(64) >> TopK(k) >> Sign(), torch.Generator().manual_seed(0)
    slot = torch.randint(-3, 4, (128, 64), generator=g).float()
    slot[:64] = -0.0
    slot[64:, 5] = 9.0
    three_ways(chain, [(128, 64)], [slot])
    for bad in (math.inf, -math.inf):
        slot[3, 7] = bad
        three_ways(chain, [(128, 64)], [slot])
    slot[3, 7] = math.nan  # whose bits are not specified
    with torch_everywhere():
        encoded = chain.encode_slots([slot], like_of([(128, 64)]))
    (sent,) = encoded.sent  # type: ignore[attr-defined]
    assert not encoded.finite and 3 * 64 + 7 in (sent.entries[0] & 0xFFF).tolist()


B2, EPS, STEPS = (0.95, 0.99), (1e-8, 1e-6), (3, 1)  # of two groups of parameters, in turn


def gradients(shapes: Shapes, clip: float | Tensor, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Made]:
    """Second moments, and gradients that are whitened while they are encoded."""
    g, v = [t.to(dtype) for t in normal(shapes, 3)], [t.square() for t in normal(shapes, 4)]
    groups = [{"betas": (0.9, B2[i % 2]), "eps": EPS[i % 2]} for i in range(len(shapes))]
    counts = [torch.tensor(float(STEPS[i % 2])) for i in range(len(shapes))]
    return v, whitening(g, v, counts, groups, clip=clip)  # type: ignore[arg-type]


def fma(a: Array, b: Array | float, c: Array) -> Array:
    """Rounded once, but for ties that are none in float64."""
    return (a.astype(np.float64) * np.float32(b) + c.astype(np.float64)).astype(np.float32)


@pytest.mark.usefixtures("equal_coefficients")
@pytest.mark.parametrize(
    ("clip", "dtype"),
    [(1.0, torch.float32), pytest.param(torch.tensor(0.3), torch.bfloat16, marks=pytest.mark.slow)],
)
def test_whitening_and_momentum_are_rounded_as_torch_does(clip: float | Tensor, dtype: torch.dtype) -> None:
    """Given equal coefficients to the last bit, but for the square root, which torch does not round to nearest on CPUs."""
    shapes: Shapes = [(64, 70), (64, 64), (264,), (16,)]
    decay, scale = [0.999, 0.0, 0.5, 0.0], [1.0, 0.5, 0.3, 0.25]
    slots, (v, made) = normal(DEFAULT.slot_shapes(like_of(shapes)), 5), gradients(shapes, clip, dtype)
    due: list[Array] = []
    for i, (g, moment, slot) in enumerate(zip(made.sources[0], v, slots, strict=True)):
        b2, eps, step = B2[i % 2], np.float32(EPS[i % 2]), STEPS[i % 2]
        wide, full = (g.float() * clip).numpy(), np.zeros(slot.shape, np.float32)
        after = fma(np.float32(1 - b2) * wide, wide, moment.numpy() * np.float32(b2))
        full[tuple(map(slice, g.shape))] = wide / (np.sqrt(after) / np.float32(math.sqrt(1 - b2**step)) + eps)
        due += [fma(full, scale[i], slot.numpy() * np.float32(decay[i])), after]
    with torch_everywhere():
        encoded = DEFAULT.encode_slots(slots, like_of(shapes), round=ROUND, made=made, decay=decay, scale=scale)
    assert isinstance(encoded.sent[0], Sent) and encoded.rows is not None  # type: ignore[attr-defined]
    for a, b in zip([t for pair in zip(slots, v, strict=True) for t in pair], due, strict=True):
        assert np.array_equal(a.numpy(), b)
    with without_kernels():  # of what is left in the slots
        assert DEFAULT.encode_slots(slots, like_of(shapes), round=ROUND).payload.to_bytes() == encoded.payload.to_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("clip", [1.0, torch.tensor(0.3)])
def test_transformed_coefficients_are_near_those_of_torch(clip: float | Tensor) -> None:
    shapes, found = [(64, 70), (128, 64)], []
    for fused in (True, False):
        slots, (v, made) = normal(DEFAULT.slot_shapes(like_of(shapes)), 5), gradients(shapes, clip)
        with torch_everywhere(), contextlib.nullcontext() if fused else without_kernels():
            encoded = DEFAULT.encode_slots(slots, like_of(shapes), round=ROUND, made=made, decay=0.9, scale=0.5)
        found.append([*slots, *v])
        if fused:
            with without_kernels():
                assert (
                    DEFAULT.encode_slots(slots, like_of(shapes), round=ROUND).payload.to_bytes() == encoded.payload.to_bytes()
                )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("equal_coefficients")
def test_tensors_without_slots_and_tensors_that_are_made_otherwise() -> None:
    """With gaps, of other dtypes, made by a function that the kernels do not know, with slots and without."""
    shapes: Shapes = [(64, 70), (64, 64)]
    tensors = normal(shapes, 6)
    tensors[0] = tensors[0].T.contiguous().T
    odd = Made((tensors, [torch.full_like(t, 2.0) for t in tensors]), lambda _, t, f: t * f)
    found: list[list[bytes]] = []
    for fused in (True, False):
        with torch_everywhere(), contextlib.nullcontext() if fused else without_kernels():
            sent = [DEFAULT.encode_tensors(what) for what in (tensors, odd, [t.double() for t in tensors])]
            slots = normal(shapes_of_slots := DEFAULT.slot_shapes(like_of(shapes)), 7)
            assert len(shapes_of_slots) == 2
            sent.append(DEFAULT.encode_slots(slots, tensors, decay=0.5, scale=0.25, made=odd))
            found.append([e.payload.to_bytes() for e in sent] + [slot.numpy().tobytes() for slot in slots])
    assert found[0] == found[1]


# --- Decoding ----------------------------------------------------------------------------------------------------------------


def messages_of(chain: Chain, shapes: Shapes, workers: int, mean: Mean, weights: list[float] | None = None) -> Messages:
    """Messages with entries that several of them have, and some with a scale of 0."""
    like, payloads = like_of(shapes), []
    for worker in range(workers):
        slots = [a + 2 * b for a, b in zip(*(normal(chain.slot_shapes(like), n) for n in (worker, 99)), strict=True)]
        if worker == 1:
            slots[0].mul_(-0.0)
        with without_kernels():
            payloads.append(chain.encode_slots(slots, like, round=ROUND).payload)
    return Messages(payloads, like, ROUND, mean, weights)


def received(chain: Chain, messages: Messages) -> tuple[FusedReceived, DeviceReceived]:
    """By kernels, and by torch operations."""
    with torch_everywhere():
        fused = chain.receive(messages)
    assert isinstance(fused, FusedReceived) and fused._rows is not None
    return fused, DeviceReceived(chain, chain.plan(messages.like), messages)


@pytest.mark.usefixtures("equal_coefficients")
def test_means_are_those_of_torch_and_numpy() -> None:
    messages = messages_of(DEFAULT, PADDED, 3, Mean("senders"))
    fused, plain = received(DEFAULT, messages)
    with without_kernels():
        due = DEFAULT.receive(messages)
        by_numpy = due.tensors()
    found = fused.tensors()  # a product with the unit matrix turns -0 into 0, so these are compared as numbers
    assert all(map(torch.equal, found, plain.tensors())) and all(map(torch.equal, found, by_numpy))
    assert bool(fused.safe) and float(fused.largest) == float(plain.largest) == due.largest
    assert fused.squares().tolist() == pytest.approx(plain.squares().tolist(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("equal_coefficients")
@pytest.mark.parametrize("over", ["senders", "workers"])
@pytest.mark.parametrize(("weights", "scale"), [(None, None), ([0.5, 3.0, 0.0], torch.arange(5) + 0.5)])
def test_steps_are_those_of_torch(over: str, weights: list[float] | None, scale: Tensor | None) -> None:
    """Of float32, bfloat16 and float16, with and without signs and factors, and of tensors with gaps."""
    chain = DCT(64) >> TopK(40) >> Sign()
    shapes: Shapes = [(64, 70), (64, 64), (64, 64), (264,), (64, 64)]
    both = received(chain, messages_of(chain, shapes, 3, Mean(over), weights))  # type: ignore[arg-type]
    found, lr, sign = [], [0.1, 0.2, 0.3, 0.1, 0.1], [False, True, False, True, False]
    for one in both:
        x, scaled = normal(shapes, 8), [torch.zeros(shape) for shape in shapes]
        x[1], x[2], x[4] = x[1].bfloat16(), x[2].half(), x[4].T
        for _, parts, values in one.together(scaled, scale=scale):
            torch._foreach_copy_(parts, values)
        one.step(x, lr, sign, scale)
        assert x[4].stride() == (1, 64)
        found.append([*(t.float() for t in x), *scaled])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_transformed_means_are_near() -> None:
    fused, plain = received(DEFAULT, messages_of(DEFAULT, PADDED, 2, Mean()))
    for a, b in zip(fused.tensors(), plain.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def verdicts(count: int, chain: Chain, shapes: Shapes) -> list[bool]:
    """Of damaged messages: by kernels, which must be numpy's."""
    raws = [Payload.of_bytes(raw[HEADER_NBYTES:]) for raw in _mutated(random.Random(1), chain, shapes, count)]
    like, found = like_of(shapes), list[bool]()
    for at in range(0, count, 8):
        some = raws[at : at + 8]
        read = FusedReceived(chain, chain.plan(like), Messages(some, like, ROUND), frozenset({0}), raises=False)
        found += read.wrong.tolist()
    with without_kernels():
        due = [_refused(chain, Messages([raw], like, ROUND)) for raw in raws]
    assert found == due
    return due


def _refused(chain: Chain, messages: Messages) -> bool:
    try:
        chain.receive(messages)
    except WireError:
        return True
    return False


@pytest.mark.slow
def test_damaged_messages_have_the_verdict_of_the_host() -> None:
    assert set(verdicts(16, DEFAULT, [(64, 64), (64, 100)])) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("k", [8, 32, 128])
def test_damaged_messages_of_any_k_have_the_verdict_of_the_host(k: int) -> None:
    assert set(verdicts(150, DCT(64) >> TopK(k) >> Sign(), [(64, 64), (64, 100), (33,)])) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 4096, 70001])
def test_checksums_are_zlibs(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two messages, with and without what comes before; of more segments than are joined at once, too."""
    monkeypatch.setattr(checksum, "_TILE", 4)
    g = torch.Generator().manual_seed(length)
    raw = torch.randint(0, 256, (2, length), dtype=torch.uint8, generator=g)
    found = checksum.crc32_around(raw, [(0, 20, length), (7, 13, length - 2)])
    for message, told in zip(raw, found, strict=True):
        for (start, at, stop), crc in zip(((0, 20, length), (7, 13, length - 2)), told.tolist(), strict=True):
            data = message.numpy().tobytes()
            assert zlib.crc32(data[start : at - 4] + bytes(4) + data[at:stop]) == crc % (1 << 32)


# --- The trial --------------------------------------------------------------------------------------------------------------

ALL = [name for names in starting._MODULES.values() for name in names]


def tried_without(monkeypatch: pytest.MonkeyPatch, broken: str) -> set[str]:
    """The kernels that a trial starts, where one of them does nothing."""
    names, started = set[str](), starting.launch

    def launch(kernel: str, *arguments: Any, **constants: Any) -> None:
        names.add(kernel)
        if kernel != broken:
            started(kernel, *arguments, **constants)

    for module in (starting, trial):
        monkeypatch.setattr(module, "launch", launch)
    trial.trial(CPU)
    return names


def test_all_kernels_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried_without(monkeypatch, "") == set(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_kernel_that_does_nothing_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"{name}.* computes something else than it should"):
        tried_without(monkeypatch, name)


def test_a_report_compares_kernels_with_torch_operations() -> None:
    with torch_everywhere():
        found = device_kernels.compare(CPU, [(64, 64), (16,)], wait=lambda: None, repeats=1, k=32, workers=2)
    assert found["kernels"].startswith("triton-") and found["triton"]
    assert found["messages are equal"] is True and found["largest relative distance of means"] < 1e-5
    assert found["kernels s"].keys() == found["torch s"].keys()


# --- The whole ---------------------------------------------------------------------------------------------------------------


def test_which_kernels_are_used_is_in_the_handshake() -> None:
    with torch_everywhere():
        told = DEFAULT.arithmetic(CPU)
        assert told.startswith("triton-") and told == triton.name(CPU)
        for chain in (DCT(64) >> TopK(32) >> Int8(), DCT(64) >> TopK(33) >> Sign(), DCT(32) >> TopK(32) >> Sign()):
            assert Chain.of(chain).arithmetic(CPU) == "" and not in_triton(chain)
        with without_kernels():
            assert DEFAULT.arithmetic(CPU) == "off"
        opt = DeMo([torch.nn.Parameter(torch.zeros(64, 64))], SoloLink(), codec=DEFAULT)
        assert told in opt.fingerprint().values()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["DeMo", "DecoupledDiLoCo"])
def test_training_is_near_that_of_torch_operations(method: str) -> None:
    def work(link: Link) -> list[Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(64, 100)), torch.nn.Parameter(torch.randn(64))]
        if method == "DeMo":
            opt = DeMo(params, link, lr=1e-2, codec=DEFAULT)
        else:
            opt = DecoupledDiLoCo(torch.optim.SGD(params, lr=0.1), link, H=2, codec=DEFAULT)
        chance = torch.Generator().manual_seed(link.rank)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, generator=chance)
            opt.step()
        opt.finish()
        return [p.detach() for p in params]

    found = []
    for fused in (True, False):
        with torch_everywhere(), contextlib.nullcontext() if fused else without_kernels():
            first, second = World(2).run(work)
        assert equal(first, second) or method != "DeMo"
        found.append(first)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def opened_ways(count: int, chain: Chain, shapes: Shapes) -> list[bool]:
    """Whole messages of which some are damaged, with their envelopes: by kernels and by torch operations."""
    like, raws = like_of(shapes), list(_mutated(random.Random(2), chain, shapes, count))
    raw = torch.stack([torch.frombuffer(bytearray(r), dtype=torch.uint8) for r in raws])
    frames, mark = frames_of(chain, like), fingerprint(chain, like)
    by_kernels, by_torch = [], []
    for at in range(0, count, 4):
        some = raw[at : at + 4]
        how = {"fingerprint": mark, "round": ROUND}
        fused = open_all(some, [1] * len(some), frames, **how)
        with without_kernels():
            plain = open_all(some, [1] * len(some), frames, **how)
        for name in ("wrong", "invalid", "flags", "states"):
            assert torch.equal(getattr(fused, name), getattr(plain, name)), name
        assert same(fused.weights, plain.weights)
        by_kernels += fused.wrong.tolist()
        by_torch += plain.wrong.tolist()
    assert by_kernels == by_torch
    return by_kernels


@pytest.mark.slow
def test_envelopes_are_opened_as_by_torch() -> None:
    for chain in (DEFAULT, DEFAULT.split(2)):
        assert set(opened_ways(40, chain, [(64, 64), (64, 100), (16,)])) == {True, False}


def test_a_refused_step_is_taken_back() -> None:
    """Of any dtype, of more than one stretch, empty, and with gaps; nothing changes where it is not refused."""
    for refused in (False, True):
        tensors = [torch.randn(20000), torch.ones(3, 5).bfloat16(), torch.tensor(7), torch.empty(0), torch.randn(4, 6)[:, ::2]]
        before = [t.clone() for t in tensors]
        kept = Selected(tensors)
        for t in tensors:
            t.fill_(math.nan if t.is_floating_point() else 1)
        after = [t.clone() for t in tensors]
        kept.unless(torch.tensor(refused))
        for t, due in zip(tensors, before if refused else after, strict=True):
            torch.testing.assert_close(t, due, rtol=0, atol=0, equal_nan=True)
