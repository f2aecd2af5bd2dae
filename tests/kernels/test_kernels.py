"""The C kernels: the same bits from every build, exact where they are exact, and the plain path's results up to rounding."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.processes import Pool
from thinwire import DCT, DecoupledDiLoCo, DeMo, Float, Identity, Int8, Link, Mean, Sign, TopK, TwoBit, World, kernels
from thinwire.codecs import Chain, Messages
from thinwire.codecs.indices import EliasFano
from thinwire.codecs.stages import Row
from thinwire.errors import FingerprintMismatch, WireError
from thinwire.kernels import Entries, Kernels, Whitening, build
from thinwire.maths.update_rules import whitened
from thinwire.payload import Payload

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None or torch.backends.cpu.get_cpu_capability() not in build.CPU_FLAGS,
    reason="no C compiler, or no CPU that the kernels are for: apt-get install gcc",
)

CHAINS = [
    DCT(64) >> TopK(32) >> Sign(),
    DCT(64) >> TopK(128) >> Sign(),
    DCT(64) >> TopK(5) >> Float("bf16"),
    DCT(64) >> TopK(0.4) >> Int8(),
    Identity(64) >> TopK(64) >> TwoBit(),
    (DCT(64) >> TopK(12) >> Sign()).split(3),
]
SHAPES = [(130, 200), (64, 64), (64, 256), (10,), (3, 70, 5)]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setenv(kernels.SETTING, "auto")
    found = kernels.library()
    assert found is not None
    return found


def some(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slots_of(chain: Chain, seed: int = 0) -> list[torch.Tensor]:
    like = [some(s) for s in SHAPES]
    return [some(tuple(s), seed + i) for i, s in enumerate(chain.slot_shapes(like))]


# --- Bits ----------------------------------------------------------------------------------------------------------------


def _run(found: Kernels) -> list[bytes]:
    x, slot, mean = some((192, 128)), some((192, 128), 1), torch.empty(192, 128)
    out = []
    for k in (3, 128, 700):
        indices, values = np.empty((6, k), np.uint16), np.empty((6, k), np.float32)
        found.select(slot, x, indices, values, decay=0.9, scale=0.3)
        both = Entries(np.stack([indices, indices[::-1]]), np.stack([values.reshape(-1)] * 2), None, 0.0)
        found.mean(both, mean)
        found.subtract(slot, indices, values, 0.2)
        out += [slot.numpy().tobytes(), indices.tobytes(), values.tobytes(), mean.numpy().tobytes()]
        out.append(found.squares(both).tobytes())
        found.step(both, stepped := some((180, 100)), rate=0.1, sign=k == 3)
        whitening = Whitening(v := some((192, 128), 2).square(), 0.9, 1.5, 0.1, 0.3)
        found.accumulate(slot, x, decay=0.5, scale=0.2, whitening=whitening)
        out += [stepped.numpy().tobytes(), v.numpy().tobytes(), slot.numpy().tobytes()]
    return out


BUILDS = {
    "plain C": ("-DPLAIN_C",),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v4": ("-march=x86-64-v4",),
    "plain C, FMA in hardware": ("-DPLAIN_C", "-mfma"),
}


@pytest.mark.slow  # compiles anew
@pytest.mark.parametrize("name", BUILDS)
def test_every_width_of_vectors_and_plain_c_give_the_same_bits(name: str, on: Kernels, tmp_path: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    path = build.build(compiler, BUILDS[name], build.private_folder(tmp_path / "cache"))
    if name == "x86-64-v4" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("it compiles, and this CPU cannot run it: run the tests on one with AVX-512")
    other = Kernels(path)
    assert other.name == on.name
    assert _run(other) == _run(on)


def test_threads_change_no_bit(on: Kernels) -> None:
    before, threads = _run(on), torch.get_num_threads()
    x, one, three = some((640, 640)), torch.zeros(640, 640), torch.zeros(640, 640)
    on.accumulate(one, x, decay=0.0, scale=1.0)
    try:
        torch.set_num_threads(3)
        on.accumulate(three, x, decay=0.0, scale=1.0)
        assert _run(on) == before
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three)


@pytest.mark.parametrize("k", [1, 8, 33, 128, 1000, 4096])
def test_the_largest_are_taken_and_of_equal_ones_the_first(on: Kernels, k: int) -> None:
    x = some((128, 320))[:, 64:256]  # its rows are further apart than they are long
    x[:64, :64] = 0
    x[64:, :64] = x[64:, :64].round()
    x[3, 70], x[9, 150] = torch.nan, -torch.inf
    indices, values = np.empty((6, k), np.uint16), np.empty((6, k), np.float32)
    on.select(x, None, indices, values, decay=1.0, scale=1.0)
    blocks = x.numpy().reshape(2, 64, 3, 64).transpose(0, 2, 1, 3).reshape(6, 4096)
    due = np.sort(np.argsort(-np.nan_to_num(np.abs(blocks), nan=np.inf), axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(indices, due)
    np.testing.assert_array_equal(values, np.take_along_axis(blocks, due, axis=1))


@pytest.mark.parametrize(
    ("over", "weights"), [("senders", None), ("workers", None), ("senders", [1, 0, 2]), ("workers", [3, 1, 2])]
)
def test_means_are_those_of_the_plain_path_bit_for_bit(on: Kernels, over: str, weights: list[float] | None) -> None:
    mean, k = Mean(over=over), 200  # type: ignore[arg-type]
    shares = mean.weights(weights, 3)
    random = np.random.default_rng(0)
    indices = np.stack([np.sort(random.permutation(4096)[:k]) for _ in range(3)]).astype(np.uint16)[:, None]
    values = random.standard_normal((3, k)).astype(np.float32)
    entries = Entries(indices, values, None if weights is None else shares, float(shares.sum()) if over == "workers" else 0.0)
    places, means = mean.entries(indices[:, 0].astype(np.int64), values, shares)
    q = np.zeros(4096)
    q[places] = means
    P = kernels.cosines(64)
    out = torch.empty(64, 64)
    on.mean(entries, out)
    np.testing.assert_allclose(out.numpy(), P.T @ q.reshape(64, 64) @ P, atol=2e-6)
    # A sum of squares that differs in no place can only come from the same bits, but for the order of the sum.
    assert on.squares(entries)[0] == pytest.approx(float((means.astype(np.float64) ** 2).sum()), rel=1e-14)


# --- Messages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS, ids=repr)
def test_messages_and_residuals_are_the_same_bytes_with_and_without(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    like, made = [some(s) for s in SHAPES], []
    for setting in ("off", "auto"):
        monkeypatch.setenv(kernels.SETTING, setting)
        slots = slots_of(chain)
        encoded = chain.encode_slots(slots, like, round=2)
        encoded.take_from(slots, scale=0.7)
        received = chain.receive(Messages([encoded.payload, encoded.payload], like, round=2), own=(0, encoded))
        made.append((encoded, slots, received.squares(), received.tensors()))
    (off, plain_slots, plain_squares, plain), (on, slots, squares, tensors) = made
    assert torch.equal(off.payload.data, on.payload.data)
    assert all(torch.equal(a, b) for a, b in zip(plain_slots, slots, strict=True))
    assert squares == pytest.approx(plain_squares, rel=1e-12)
    for a, b in zip(plain, tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_the_transform_differs_in_last_bits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, x, slots = DCT(64) >> TopK(9), [some(s) for s in SHAPES], []
    for setting in ("off", "auto"):
        monkeypatch.setenv(kernels.SETTING, setting)
        slots.append(slots_of(chain))
        chain.accumulate(slots[-1], x, decay=0.9, scale=0.5)
    for a, b in zip(*slots, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("L", "k", "low"), [(4096, 32, 7), (4096, 128, 5), (4096, 7, 9), (100, 9, 3), (65536, 3, 14), (64, 5, 0)]
)
def test_sets_are_read_and_written_as_by_the_plain_path(L: int, k: int, low: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SETTING, "off")
    code, random, n = EliasFano(L, k, low), np.random.default_rng(1), 21
    sets = np.stack([np.sort(random.permutation(L)[:k]) for _ in range(n)])
    written = code.encode(sets)
    assert not code.read_into(written, np.empty((n, k), np.uint16)), "no kernel is on"
    monkeypatch.setenv(kernels.SETTING, "auto")
    np.testing.assert_array_equal(code.encode(sets.astype(np.uint16)), written)
    read, verdicts = np.empty((n, k), np.uint16), set()
    assert code.read_into(written, read)
    np.testing.assert_array_equal(read, sets)
    for _ in range(400):  # damage: read alike, or refused alike
        bad = written.copy()
        bad[random.integers(len(bad))] ^= 1 << random.integers(8)
        try:
            expected = code.decode(bad, n)
        except WireError:
            expected = None
        fine = code.read_into(bad, read)
        assert fine == (expected is not None)
        if expected is not None:
            np.testing.assert_array_equal(read, expected)
        verdicts.add(fine)
    assert False in verdicts


@pytest.mark.parametrize("k", [32, 12, 5])
def test_signs_are_read_as_by_the_plain_path(on: Kernels, k: int) -> None:
    row, sign = Row(k, (3 * k, 4 * k)), Sign()
    raw, back = sign.write(np.random.default_rng(2).standard_normal(7 * k).astype(np.float32), row)
    out = np.empty(4 * k, np.float32)
    assert sign.read_into(raw, row, 2 * k, 6 * k, out)
    np.testing.assert_array_equal(out, back[2 * k : 6 * k])
    assert not sign.read_into(raw, row, 1, k + 1, out) and not sign.read_into(raw, Row(k, (2 * k + 1,)), 0, k, out)


@pytest.mark.parametrize("k", [32, 12, 5])
def test_signs_are_written_as_by_the_plain_path_or_not_at_all(on: Kernels, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row, random, written = Row(k, (3 * k, 4 * k)), np.random.default_rng(3), []
    for spread in (0, 3, 40):  # of magnitudes, in powers of two: in the last a mean may depend on the order of additions
        values = (random.standard_normal(7 * k) * np.exp2(random.uniform(-spread, spread, 7 * k))).astype(np.float32)
        values[k : 2 * k] = 0
        values[0] = -0.0
        room = np.zeros(Sign().nbytes_of(row), np.uint8)
        written.append(on.write_signs(values.copy(), k, room))
        found, back = [], [values.copy() for _ in range(2)]
        for setting, read in zip(("off", "auto"), back, strict=True):
            monkeypatch.setenv(kernels.SETTING, setting)
            found.append(Sign().overwrite(read, row))
        np.testing.assert_array_equal(*found)
        np.testing.assert_array_equal(*(read.view(np.uint32) for read in back))
        np.testing.assert_array_equal(back[0], Sign().write(values, row)[1])
    assert written == [True, True, False]
    before = values.copy()
    assert not on.write_signs(values, k, room) and (values == before).all(), "nothing was changed"
    values[3] = np.nan
    assert not on.write_signs(values, k, room), "what is not finite is left to the plain path"


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("shape", [(128, 192), (100, 130), (65, 64)])
def test_a_step_has_the_bits_of_the_mean_and_of_torchs_subtraction(on: Kernels, shape: tuple[int, int], sign: bool) -> None:
    Y, X = (-(-n // 64) for n in shape)
    for k in (9, 110, 700):
        sets = [torch.randperm(4096, generator=torch.Generator().manual_seed(n))[:k].sort().values for n in range(2 * Y * X)]
        indices = torch.stack(sets).view(2, Y * X, k).numpy().astype(np.uint16)
        entries = Entries(indices, some((2, Y * X * k), k).numpy(), None, 0.0)
        mean, x = torch.empty(64 * Y, 64 * X), some((shape[0], shape[1] + 3), 7)[:, 2:-1]  # rows further apart than long
        on.mean(entries, mean)
        due = x.clone()
        mean = mean[: shape[0], : shape[1]]
        due.sub_(mean.sign() if sign else mean, alpha=0.3)
        on.step(entries, x, rate=0.3, sign=sign)
        assert torch.equal(x, due)


def test_whitened_by_the_kernels_is_whitened_by_torch_up_to_rounding(on: Kernels) -> None:
    g, v, out = some((128, 64)), some((128, 64), 1).square(), torch.zeros(128, 64)
    before, plain = v.clone(), torch.zeros(128, 64)
    on.accumulate(out, g, decay=0.0, scale=1.0, whitening=Whitening(v, 0.95, 1 / (1 - 0.95**3) ** 0.5, 1e-8, 0.5))
    on.accumulate(plain, whitened(g, before, b2=0.95, eps=1e-8, step=3, clip=0.5), decay=0.0, scale=1.0)
    torch.testing.assert_close(v, before, rtol=1e-6, atol=0)
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-5)


# --- Rounds --------------------------------------------------------------------------------------------------------------


def _train(link: Link) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.Tanh(), torch.nn.Linear(130, 64))
    demo = DeMo(model[0].parameters(), link, lr=1e-2)
    rest = DecoupledDiLoCo(torch.optim.SGD(model[2].parameters(), lr=0.1), link, H=2)
    for step in range(6):
        model(some((8, 70), 10 * step + link.rank)).square().mean().backward()
        for opt in (demo, rest):
            opt.step()
            opt.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_training_by_the_kernels_keeps_replicas_equal_and_stays_close_to_the_plain_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(kernels.SETTING, "off")
    plain = World(3).run(_train)
    monkeypatch.setenv(kernels.SETTING, "auto")
    fast = World(3).run(_train)
    for worker in fast[1:]:
        assert all(torch.equal(a, b) for a, b in zip(fast[0], worker, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(fast[0], plain[0], strict=True)), "the kernels were not used"
    for a, b in zip(fast[0], plain[0], strict=True):
        assert float((a - b).abs().mean()) < 1e-3


def _one_without(link: Link) -> str:
    before = os.environ[kernels.SETTING]
    os.environ[kernels.SETTING] = "off" if link.rank else "auto"
    try:
        p = torch.nn.Parameter(torch.ones(64, 64))
        p.grad = torch.full((64, 64), 1.0 + link.rank)
        DeMo([p], link).step()
    except FingerprintMismatch as refusal:
        return str(refusal)
    finally:
        os.environ[kernels.SETTING] = before
    return "accepted"


def test_workers_with_and_without_kernels_are_refused_and_told_what_to_do(pool: Pool) -> None:
    told = pool.run(_one_without, 2)
    assert told[0] == told[1]
    assert "C kernels is 'c-" in told[0] and "' on rank 0 and 'off' on rank 1" in told[0]
    assert "install a C compiler (cc) on all workers, or set THINWIRE_KERNELS=off on all of them" in told[0]


def test_a_codec_without_such_blocks_does_not_ask_for_kernels(on: Kernels) -> None:
    cpu = torch.device("cpu")
    assert (DCT(64) >> TopK(3)).arithmetic(cpu) == on.name
    for codec in (DCT(32) >> TopK(3), Identity(64) >> TopK(3), Sign()):
        assert codec.arithmetic(cpu) == ""
    assert (DCT(64) >> TopK(3)).arithmetic(torch.device("meta")) == ""


def test_a_damaged_message_is_refused_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, like, told = DCT(64) >> TopK(32) >> Sign(), [some((128, 128))], []
    for setting in ("off", "auto"):
        monkeypatch.setenv(kernels.SETTING, setting)
        payload = chain.encode(like)
        damaged = payload.data.clone()
        damaged[40:44] = 255
        with pytest.raises(WireError) as refusal:
            chain.receive(Messages([payload, Payload(damaged)], like, ids=[4, 9]))
        told.append((str(refusal.value), refusal.value.rank))
    assert told[0] == told[1] and told[0][1] == 9
