"""DeMo: the limits in which it is a known optimizer, a reference in a few lines of numpy, and nothing lost on the way."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.conformance.training import assert_close, assert_same
from tests.processes import LIMIT, Pool
from tests.tiers import first_quick
from thinwire import (
    DCT,
    Chain,
    Codec,
    DeMo,
    Flaky,
    Float,
    Hadamard,
    Identity,
    Link,
    Metered,
    Network,
    Payload,
    RandomK,
    RandomOrthogonal,
    Sign,
    SoloLink,
    Striding,
    TopK,
    TorchLink,
    World,
)
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES
from thinwire.errors import CheckpointError, ConfigError, FingerprintMismatch
from thinwire.links.base import LinkDecorator, Ticket
from thinwire.network import Op
from thinwire.sharding.mesh import make_mesh, shard_model

Shape = tuple[int, ...]

AWKWARD: list[Shape] = [(16, 24), (11, 5), (8,), (4, 2, 3), ()]  # padded ones, a folded one, and one without dimensions
EVEN: list[Shape] = [(16, 24), (8, 8), (16,)]  # multiples of blocks of 8
PLAIN: dict[str, Any] = {"lr": 0.1, "beta": 0.9, "alpha": 1.0, "phi": "sgd", "whiten": False, "weight_decay": 0.0}
EVERYTHING = [Float("fp32"), DCT(64) >> TopK(4096), DCT(8) >> Float("fp32"), Hadamard(8) >> Float("fp32")]
CODECS = [
    DCT(8) >> TopK(6) >> Float("bf16"),
    DCT(8) >> TopK(6) >> Sign(),
    DCT(8) >> RandomK(0.25) >> Float("fp32"),
    Identity(8) >> Striding(0.25) >> Float("bf16"),
    Striding(0.25) >> Sign(),
    RandomOrthogonal(8) >> TopK(6),
    Float("fp32"),
    Float("bf16"),
]

everything = pytest.mark.parametrize("codec", EVERYTHING, ids=repr)
codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)


# --- What is trained: every worker pulls the parameters towards its own target, with noise -----------------------------------


def start(shapes: list[Shape] = AWKWARD) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(99)
    return [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]


def demo(params: Any, link: Link, **settings: Any) -> DeMo:
    return DeMo(params, link, **{**PLAIN, **settings})


def noise(rank: int, step: int, i: int, shape: Shape) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(10_000 * rank + 100 * step + i))


def pull(rank: int, step: int, i: int, x: Tensor) -> Tensor:
    """A gradient that depends on the worker, the step and the parameters."""
    return 0.5 * (x - noise(rank, 0, i, tuple(x.shape))) + noise(rank, step, i, tuple(x.shape))


def blind(rank: int, step: int, i: int, x: Tensor) -> Tensor:
    """A gradient that does not look at the parameters."""
    return noise(rank, step, i, tuple(x.shape))


Gradient = Callable[[int, int, int, Tensor], Tensor]


def train(
    opt: torch.optim.Optimizer, params: list[nn.Parameter], rank: int, steps: int, *, first: int = 1, gradient: Gradient = pull
) -> None:
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = gradient(rank, step, i, p.detach())
        opt.step()


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def run(
    workers: int = 3, steps: int = 6, *, shapes: list[Shape] = AWKWARD, gradient: Gradient = pull, **settings: Any
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters and momenta of every worker after some steps."""

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        params = start(shapes)
        opt = demo(params, link, alarm_every=1, **settings)
        train(opt, params, link.rank, steps, gradient=gradient)
        return values(params), [m.clone() for m in opt.slot("momentum")]

    return World(workers).run(worker)


def on_the_mean_gradient(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], workers: int, steps: int, shapes: list[Shape] = AWKWARD
) -> list[Tensor]:
    """What an ordinary optimizer makes of the mean gradient of all workers."""
    params = start(shapes)
    opt = make(params)
    for step in range(1, steps + 1):
        for i, p in enumerate(params):
            p.grad = torch.stack([pull(rank, step, i, p.detach()) for rank in range(workers)]).mean(0)
        opt.step()
    return values(params)


class SignSGD(torch.optim.Optimizer):
    """x <- x - lr sign(g)."""

    def __init__(self, params: list[nn.Parameter], lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


# --- With everything sent it is a known optimizer of the mean gradient -------------------------------------------------------


@everything
def test_everything_sent_and_taken_off_is_sign_sgd_of_the_mean_gradient_and_leaves_no_momentum(codec: Codec) -> None:
    def worker(link: Link) -> list[list[Tensor]]:
        params, seen = start(), []
        opt = demo(params, link, phi="sign", codec=codec, beta=0.999)
        for step in range(1, 6):
            train(opt, params, link.rank, 1, first=step)
            seen.append(values(params))
            assert all(not m.any() for m in opt.slot("momentum")), f"something is left after step {step}"
        return seen

    for seen in World(4).run(worker):
        for step, params in enumerate(seen, start=1):
            assert_close(params, on_the_mean_gradient(lambda p: SignSGD(p, 0.1), 4, step))


@everything
def test_phi_sgd_with_everything_sent_is_sgd_of_the_mean_gradient(codec: Codec) -> None:
    expected = on_the_mean_gradient(lambda p: torch.optim.SGD(p, lr=0.1), 3, 6)
    for params, _ in run(codec=codec):
        assert_close(params, expected, 1e-5)


@everything
def test_phi_adam_with_everything_sent_is_adamw_of_the_mean_gradient(codec: Codec) -> None:
    same: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}
    expected = on_the_mean_gradient(lambda p: torch.optim.AdamW(p, **same), 3, 8)
    for params, _ in run(steps=8, phi="adam", codec=codec, **same):
        assert_close(params, expected, 1e-5)


def test_whitened_with_everything_sent_one_worker_is_adam_without_its_momentum() -> None:
    expected = on_the_mean_gradient(lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.0, 0.9), eps=1e-6), 1, 8)
    ((params, _),) = run(1, 8, lr=0.05, whiten=True, betas=(0.5, 0.9), eps=1e-6, codec=Float("fp32"))
    assert_close(params, expected, 1e-5)


def test_whitening_divides_each_workers_gradient_by_its_own_second_moment() -> None:
    """Of two workers with gradients of 1 and 1000, each counts half; a common second moment would hear only one of them."""

    def loud(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        return torch.full_like(x, -1000.0 if rank else 1.0)

    before = values(start())
    for params, _ in run(2, 3, gradient=loud, whiten=True, codec=Float("fp32")):
        assert_close(params, before, 1e-4)


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_a_second_moment_in_bf16_is_half_as_large_and_training_hardly_another(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", kernels)
    found = {}
    for moment in ("fp32", "bf16"):
        x = [nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(5))]
        opt = DeMo(x, SoloLink(), lr=0.01, codec=Float(), phi="sgd", moment=moment)  # type: ignore[arg-type]
        random = torch.Generator().manual_seed(0)
        for _ in range(40):
            for p in x:
                p.grad = torch.randn(p.shape, generator=random)
            opt.step()
        found[moment] = [opt.state[p]["own_v"] for p in x], torch.cat([p.detach().flatten() for p in x])
    (wide, there), (narrow, here) = found["fp32"], found["bf16"]
    assert all(v.dtype == torch.bfloat16 for v in narrow) and all(v.dtype == torch.float32 for v in wide)
    for a, b in zip(wide, narrow, strict=True):
        torch.testing.assert_close(a.sqrt(), b.float().sqrt(), rtol=0.02, atol=0)
    assert 0 < float((there - here).abs().max()) < 0.01 * float((there - 1).abs().max())
    other = DeMo(x, SoloLink(), lr=0.01, codec=Float(), phi="sgd", moment="bf16")
    other.load_state_dict(opt.state_dict())
    assert all(torch.equal(other.state[p]["own_v"], opt.state[p]["own_v"]) for p in x)


def test_a_second_moment_in_bf16_is_refused_where_its_decay_would_be_lost() -> None:
    x = [nn.Parameter(torch.ones(4))]
    DeMo(x, SoloLink(), moment="bf16", betas=(0.9, 0.99))
    with pytest.raises(ConfigError, match=r"needs a second beta of at most 0.99, got 0.995: a decay by less than 1% is lost"):
        DeMo(x, SoloLink(), moment="bf16", betas=(0.9, 0.995))
    with pytest.raises(ConfigError, match="moment must be one of 'fp32', 'bf16', got 'fp16'"):
        DeMo(x, SoloLink(), moment="fp16")  # type: ignore[arg-type]


def test_phi_unit_with_everything_sent_moves_each_tensor_by_lr_in_the_root_mean_square() -> None:
    expected = on_the_mean_gradient(lambda p: _Unit(p, 0.1), 3, 5, EVEN)
    for codec in EVERYTHING:
        for params, _ in run(steps=5, shapes=EVEN, phi="unit", codec=codec):
            assert_close(params, expected, 1e-5)


class _Unit(SignSGD):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.square().mean().sqrt(), alpha=group["lr"])


def test_phi_unit_does_not_care_for_the_size_of_what_was_sent() -> None:
    """Also where only some entries are sent, and of a tensor that is padded."""
    small, large = (
        run(2, 4, gradient=lambda r, s, i, x, f=f: f * blind(r, s, i, x), phi="unit", codec=DCT(8) >> TopK(4))
        for f in (1, 64.0)
    )
    for (a, _), (b, _) in zip(small, large, strict=True):
        assert_close(a, b, 1e-5)


def test_nothing_is_divided_by_zero_where_nothing_was_sent() -> None:
    for phi in ("unit", "sign", "sgd", "adam", "muon"):
        for params, _ in run(2, 2, gradient=lambda r, s, i, x: torch.zeros_like(x), phi=phi, codec=DCT(8) >> TopK(4)):
            assert_same(params, values(start()), phi)


# --- Muon --------------------------------------------------------------------------------------------------------------------


def test_phi_muon_moves_along_all_singular_vectors_alike() -> None:
    """Matrices and folded convolutions by a step whose entries are about 0.2 on average; other tensors take the sign."""
    shapes: list[Shape] = [(12, 20), (20, 12), (6, 3, 3, 3), (7,), ()]
    before = start(shapes)
    mean = [torch.stack([pull(rank, 1, i, p.detach()) for rank in range(2)]).mean(0) for i, p in enumerate(before)]
    for codec in (Float("fp32"), DCT(4) >> Float("fp32")):
        for params, _ in run(2, 1, shapes=shapes, phi="muon", lr=0.5, codec=codec):
            step = [(b.detach() - a) / 0.5 for a, b in zip(params, before, strict=True)]
            for moved, g in zip(step[:3], mean[:3], strict=True):
                W, G = moved.flatten(1), g.flatten(1)
                U, _, Vh = torch.linalg.svd(G, full_matrices=False)
                inner = U.T @ W @ Vh.T / (0.2 * math.sqrt(max(G.shape)))  # diagonal: the singular vectors are those of G
                sizes = inner.diagonal()
                assert float(sizes.min()) > 0.6 and float(sizes.max()) < 1.3, sizes
                assert float((inner - sizes.diag()).abs().max()) < 1e-3
                assert 0.13 < float(W.square().mean().sqrt()) < 0.26
            for moved, g in zip(step[3:], mean[3:], strict=True):
                torch.testing.assert_close(moved, g.sign(), rtol=1e-5, atol=1e-5)


def test_phi_muon_takes_whole_matrices_however_they_are_cut_into_blocks() -> None:
    expected = run(2, 3, shapes=[(16, 24)], phi="muon", codec=DCT(8) >> Float("fp32"))[0][0]
    assert_close(run(2, 3, shapes=[(16, 24)], phi="muon", codec=Float("fp32"))[0][0], expected, 1e-4)


def test_an_empty_parameter_is_no_obstacle() -> None:
    for phi in ("sgd", "unit", "sign", "adam", "muon"):
        (params, _), _ = run(2, 2, shapes=[(0, 4), (4, 0), (3, 4)], phi=phi, codec=DCT(8) >> TopK(4))
        assert not torch.equal(params[2], start([(0, 4), (4, 0), (3, 4)])[2]), phi


# --- Sharded parameters ------------------------------------------------------------------------------------------------------


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = start([(8, 6), (8,)])


# Blocks that end where the shards do. Whitened gradients begin as +-1: ties, so top-k and sign would turn on a rounding.
_ON_A_MESH: list[dict[str, Any]] = [
    {"phi": phi, "whiten": whiten, "clip_norm": clip, "codec": codec}
    for codec, whiten in ((Float("fp32"), True), (Float("fp32"), False), (Identity(4) >> TopK(3), False))
    for phi, clip in (("sgd", 0.5), ("unit", 0.0), ("sign", 0.5), ("adam", 0.0))[: 2 if whiten else 4]
]


def _on_a_mesh(_: Link) -> tuple[int, list[list[Tensor] | str], str]:
    mesh = make_mesh(workers=2, shards=2)
    link, shard = TorchLink(mesh["replicate"], timeout=LIMIT), mesh["shard"].get_local_rank()
    seen: list[list[Tensor] | str] = []
    for settings in _ON_A_MESH:
        model = shard_model(_Two(), mesh)
        params: list[Any] = list(model.parameters())
        opt = demo(params, link, **settings)
        try:
            for step in range(1, 4):
                for i, p in enumerate(params):
                    whole = blind(link.rank, step, i, p.detach().full_tensor())
                    grad: Any = torch.zeros_like(p)
                    grad.to_local().copy_(whole.chunk(2)[shard])
                    p.grad = grad
                opt.step()
            seen.append([p.detach().full_tensor() for p in params])
        except RuntimeError as error:  # the same on all four processes: none is left waiting
            seen.append(f"{type(error).__name__}: {error}")
    refused = ""
    try:
        DeMo(shard_model(_Two(), mesh).parameters(), link, phi="muon")
    except ConfigError as error:
        refused = str(error)
    return link.rank, seen, refused


@pytest.mark.slow
def test_on_a_mesh_every_rule_does_what_it_does_unsharded_and_muon_is_refused(pool: Pool) -> None:
    expected = [run(2, 3, shapes=[(8, 6), (8,)], gradient=blind, **settings) for settings in _ON_A_MESH]
    failed = []
    for rank, seen, refused in pool.run(_on_a_mesh, 4):
        for settings, params, unsharded in zip(_ON_A_MESH, seen, expected, strict=True):
            if isinstance(params, str):
                failed.append(f"phi={settings['phi']}: {params[:200]}")
            else:
                assert_close(params, unsharded[rank][0], 1e-5)
        assert "phi='muon' needs whole matrices and these parameters are sharded: use sign or adam" in refused
    assert not failed, "\n".join(sorted(set(failed)))


# --- Workers agree -----------------------------------------------------------------------------------------------------------


@codecs
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_parameters_are_bit_equal_on_all_workers_and_momenta_are_their_own(codec: Codec, delay: bool) -> None:
    (params, momenta), *others = run(4, 6, codec=codec, phi="sign", whiten=True, delay=delay)
    moved = [not torch.equal(a, b) for a, b in zip(params, values(start()), strict=True) if a.numel() > 1]
    assert all(moved)
    for theirs, own in others:
        assert_same(params, theirs)
        if codec != Float("fp32") or delay:  # of which nothing is left
            assert not all(torch.equal(a, b) for a, b in zip(momenta, own, strict=True))


def test_adams_moments_are_bit_equal_on_all_workers_and_checked_by_the_alarm() -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        params = start()
        opt = demo(params, link, phi="adam", whiten=True, codec=CODECS[1], alarm_every=1)
        train(opt, params, link.rank, 4)
        assert {"param", "m", "v"} <= opt.shared_state().keys()
        return [*opt.slot("m"), *opt.slot("v")], opt.slot("own_v")

    (moments, own), (theirs, their_own) = World(2).run(worker)
    assert_same(moments, theirs)
    assert all(not torch.equal(a, b) for a, b in zip(own, their_own, strict=True)), "what is whitened with is its own"


def test_workers_with_other_settings_are_refused_by_name() -> None:
    for name, values_ in {"alpha": (1.0, 0.5), "whiten": (False, True), "over": ("senders", "workers")}.items():
        with pytest.raises(FingerprintMismatch, match=name):
            World(2).run(
                lambda link, name=name, told=values_: demo(start(), link, **{"codec": CODECS[0], name: told[link.rank]}).step()
            )


# --- Nothing is lost ---------------------------------------------------------------------------------------------------------


class Recorded(LinkDecorator):
    """Keeps every message of a round that this worker posts, as bytes on their way would be."""

    def __init__(self, link: Link):
        super().__init__(link)
        self.sent: list[Payload] = []

    def post(self, payload: Payload, op: Op) -> Ticket:
        if payload.purpose == "round":
            body = payload.data[HEADER_NBYTES:] if op == "gather" else payload.data[: payload.data.numel() - self.size]
            self.sent.append(payload.like(body.clone()))
        return super().post(payload, op)


def as_parameters(codec: Codec, slots: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Slots brought back from the domain of the transform: P_h^T Q P_w for each block, without the padding."""
    chain = Chain.of(codec)
    out = [slot.clone() for slot in slots]
    if chain.transform.changes:
        return out
    for group in chain.plan(like).layout.groups:
        for grid in group.grids:
            blocks = slots[grid.index].view(grid.Y, grid.h, grid.X, grid.w)
            P_h, P_w = (
                torch.eye(n) if (P := chain.transform.basis(n, 0)) is None else torch.from_numpy(P).float()
                for n in (grid.h, grid.w)
            )
            matrix = torch.einsum("yhxw,hi,wj->yixj", blocks, P_h, P_w).reshape(grid.Y * grid.h, grid.X * grid.w)
            out[grid.index] = matrix[: grid.rows, : grid.cols].reshape(grid.shape)
    return out


@codecs
@pytest.mark.parametrize(("beta", "alpha"), first_quick([(0.8, 0.3), (1.0, 1.0), (1.0, 0.5), (0.8, 1.0)]))
def test_what_was_sent_and_what_is_left_is_the_sum_of_the_gradients(codec: Codec, beta: float, alpha: float) -> None:
    """m_T + alpha sum_t beta^(T-t) q_t = sum_t beta^(T-t) g_t on every worker, q_t read from the messages themselves."""
    T = 7

    def worker(link: Link) -> None:
        recorded, params = Recorded(link), start()
        like = values(params)
        opt = demo(params, recorded, beta=beta, alpha=alpha, codec=codec)
        train(opt, params, link.rank, T, gradient=blind)
        assert len(recorded.sent) == T
        total = as_parameters(codec, opt.slot("momentum"), like)
        for t, message in enumerate(recorded.sent, start=1):
            for m, q in zip(total, Chain.of(codec).decode(message, like, round=t), strict=True):
                m.add_(q, alpha=alpha * beta ** (T - t))
        expected = [sum(beta ** (T - t) * blind(link.rank, t, i, x) for t in range(1, T + 1)) for i, x in enumerate(like)]
        assert_close(total, [torch.as_tensor(e) for e in expected], 1e-5)

    World(2).run(worker)


@pytest.mark.parametrize(("inflow", "factor"), [("gradient", 1.0), ("lr", 0.1), ("ema", 0.25)])
def test_gradients_enter_the_momentum_as_the_inflow_says(inflow: str, factor: float) -> None:
    ((_, momenta),) = run(1, 1, gradient=blind, alpha=0.0, beta=0.75, lr=0.1, inflow=inflow, codec=CODECS[0])
    like = values(start())
    for i, m in enumerate(as_parameters(CODECS[0], momenta, like)):
        torch.testing.assert_close(m, factor * blind(0, 1, i, like[i]), rtol=1e-5, atol=1e-5)


def test_with_alpha_0_the_same_is_sent_again_and_with_alpha_1_the_next_largest() -> None:
    def spike(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        return torch.tensor([4.0, 3.0, 2.0, 1.0, 0, 0, 0, 0]) if step == 1 else torch.zeros(8)

    for alpha, expected in ((0.0, [12.0, 0, 0, 0]), (1.0, [4.0, 3.0, 2.0, 0]), (0.5, [6.0, 3.0, 0, 0])):
        (params, _), _ = run(2, 3, shapes=[(8,)], gradient=spike, alpha=alpha, beta=1.0, lr=1.0, codec=Identity(8) >> TopK(1))
        assert (start([(8,)])[0].detach() - params[0]).tolist()[:4] == pytest.approx(expected, abs=1e-5), alpha


# --- The papers' algorithm in a few lines of numpy ---------------------------------------------------------------------------

Array = NDArray[np.float64]


def dct(n: int) -> Array:
    i, j = np.mgrid[:n, :n]
    return np.sqrt(np.where(i == 0, 1, 2) / n) * np.cos(np.pi * (2 * j + 1) * i / (2 * n))


def forward(x: Array, s: int) -> Array:
    """The DCT of each s x s block (1 x s of a vector), one block per row."""
    x = np.atleast_2d(x)
    h = min(s, len(x))
    return np.einsum("yhxw,ih,jw->yxij", x.reshape(len(x) // h, h, -1, s), dct(h), dct(s)).reshape(-1, h * s)


def backward(Q: Array, shape: Shape, s: int) -> Array:
    rows, cols = (1, *shape)[-2:]
    h = min(s, rows)
    return np.einsum("yxij,ih,jw->yhxw", Q.reshape(rows // h, cols // s, h, s), dct(h), dct(s)).reshape(shape)


def largest(Q: Array, k: int) -> NDArray[np.bool_]:
    kept = np.zeros(Q.shape, bool)
    np.put_along_axis(kept, np.argsort(-np.abs(Q), axis=1)[:, :k], True, axis=1)
    return kept


def reference(
    workers: int,
    steps: int,
    *,
    lr: float,
    beta: float,
    alpha: float,
    s: int,
    k: int,
    inflow: float,
    phi: Callable[[Array], Array] = np.sign,
    over: str = "senders",
    decay: float = 0.0,
    delay: bool = False,
) -> list[Tensor]:
    """Steps 1 to 9 of the published code, tensor by tensor; alpha and phi as in v2."""

    def trained(i: int, x: Array) -> Tensor:
        delta = [np.zeros_like(x) for _ in range(workers)]
        underway: list[tuple[list[Array], Array]] = []  # what each worker sent, and the mean

        def send(gradients: list[Array]) -> None:
            delta[:] = [beta * d + inflow * g for d, g in zip(delta, gradients, strict=True)]
            Q = np.stack([forward(d, s) for d in delta])
            kept = np.stack([largest(q, k) for q in Q])
            senders = np.maximum(1, kept.sum(0)) if over == "senders" else np.full(Q[0].shape, workers)
            Q[~kept] = 0
            underway.append(([backward(q, x.shape, s) for q in Q], backward(Q.sum(0) / senders, x.shape, s)))

        def arrive() -> None:
            for sent, G in underway:
                delta[:] = [d - alpha * q for d, q in zip(delta, sent, strict=True)]
                x[...] = x * (1 - lr * decay) - lr * phi(G)
            underway.clear()

        for step in range(1, steps + 1):
            gradients = [pull(rank, step, i, torch.from_numpy(x).float()).double().numpy() for rank in range(workers)]
            if delay:
                arrive()
            send(gradients)
            if not delay:
                arrive()
        arrive()
        return torch.from_numpy(x).float()

    return [trained(i, p.detach().double().numpy()) for i, p in enumerate(start(EVEN))]


@pytest.mark.parametrize("workers", [2, 3])
def test_v1_is_the_published_code(workers: int) -> None:
    expected = reference(workers, 10, lr=0.05, beta=0.999, alpha=1.0, s=8, k=4, inflow=0.05)

    def worker(link: Link) -> list[Tensor]:
        params = start(EVEN)
        opt = DeMo.v1(params, link, lr=0.05, clip_norm=0.0, codec=DCT(8) >> TopK(4))
        train(opt, params, link.rank, 10)
        return values(params)

    for params in World(workers).run(worker):
        assert_close(params, expected, 1e-5)


@pytest.mark.parametrize(("phi", "rule"), [("sign", np.sign), ("sgd", lambda M: M)])
def test_v2_is_the_paper_of_2026(phi: str, rule: Callable[[Array], Array]) -> None:
    expected = reference(3, 10, lr=0.05, beta=0.95, alpha=0.2, s=8, k=4, inflow=1 - 0.95, phi=rule, decay=0.1)

    def worker(link: Link) -> list[Tensor]:
        params = start(EVEN)
        opt = DeMo.v2(params, link, lr=0.05, clip_norm=0.0, beta=0.95, phi=phi, weight_decay=0.1, codec=DCT(8) >> TopK(4))
        train(opt, params, link.rank, 10)
        return values(params)

    for params in World(3).run(worker):
        assert_close(params, expected, 1e-5)


@pytest.mark.parametrize("over", ["senders", "workers"])
def test_the_mean_goes_over_whom_it_says(over: str) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "beta": 0.9, "alpha": 1.0}
    expected = reference(3, 8, s=8, k=4, inflow=1.0, phi=lambda M: M, over=over, **settings)
    for params, _ in run(3, 8, shapes=EVEN, over=over, codec=DCT(8) >> TopK(4), **settings):
        assert_close(params, expected, 1e-5)


def test_an_entry_that_one_of_two_sent_counts_in_full_over_senders_and_half_over_workers() -> None:
    def apart(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        return torch.tensor([[5.0, 4.0, 1.0, 0.0], [5.0, 1.0, 3.0, 0.0]][rank])

    for over, expected in (("senders", [5.0, 4.0, 3.0, 0.0]), ("workers", [5.0, 2.0, 1.5, 0.0])):
        for params, momenta in run(2, 1, shapes=[(4,)], gradient=apart, lr=1.0, over=over, codec=Identity(4) >> TopK(2)):
            assert (start([(4,)])[0].detach() - params[0]).tolist() == pytest.approx(expected, abs=1e-6)
            assert sorted(momenta[0].flatten().tolist()) == [0.0, 0.0, 0.0, 1.0], "each takes off what it sent itself"


# --- Groups ------------------------------------------------------------------------------------------------------------------

_ONE: dict[str, Any] = {
    "lr": 0.1,
    "beta": 0.9,
    "alpha": 1.0,
    "phi": "sgd",
    "weight_decay": 0.0,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}
_OTHER: dict[str, Any] = {
    "lr": 0.02,
    "beta": 0.5,
    "alpha": 0.25,
    "phi": "adam",
    "weight_decay": 0.3,
    "betas": (0.7, 0.8),
    "eps": 1e-3,
}


@pytest.mark.parametrize(
    ("rules", "whiten", "later"),
    [
        (("sgd", "adam"), False, False),
        (("sgd", "adam"), True, True),
        (("unit", "sign"), True, False),
        (("muon", "unit"), False, True),
    ],
)
def test_two_groups_are_two_optimizers(rules: tuple[str, str], whiten: bool, later: bool) -> None:
    """Whether both are given at once or one is added later."""
    one, other = {**_ONE, "phi": rules[0]}, {**_OTHER, "phi": rules[1]}
    common: dict[str, Any] = {"whiten": whiten, "inflow": "ema", "codec": DCT(8) >> TopK(5)}

    def gradient(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        return pull(rank, step, x.shape[1], x)  # the same whichever place it has among the parameters

    def together(link: Link) -> list[Tensor]:
        a, b = start([(16, 24), (8, 16)])
        opt = DeMo([{"params": [a], **one}, *([] if later else [{"params": [b], **other}])], link, **common)
        if later:
            opt.add_param_group({"params": [b], **other})
        train(opt, [a, b], link.rank, 5, gradient=gradient)
        return values([a, b])

    def alone(link: Link, which: int) -> Tensor:
        p = start([(16, 24), (8, 16)])[which]
        train(DeMo([p], link, **common, **(one, other)[which]), [p], link.rank, 5, gradient=gradient)
        return p.detach().clone()

    for rank, params in enumerate(World(2).run(together)):
        assert_close(params, [World(2).run(lambda link, w=w: alone(link, w))[rank] for w in (0, 1)])


def test_settings_of_a_group_that_change_between_steps_count_from_then_on() -> None:
    """What lr schedulers do; beta and alpha may be scheduled as well."""
    (before, _), _ = run(2, 2, codec=CODECS[0])

    def worker(link: Link) -> list[Tensor]:
        params = start()
        opt = demo(params, link, codec=CODECS[0])
        train(opt, params, link.rank, 2)
        opt.param_groups[0].update(lr=0.0, beta=0.0, alpha=0.0)
        train(opt, params, link.rank, 1, first=3)
        like = values(params)
        for i, m in enumerate(as_parameters(CODECS[0], opt.slot("momentum"), like)):
            torch.testing.assert_close(m, pull(link.rank, 3, i, like[i]), rtol=1e-5, atol=1e-5)
        return like

    for params in World(2).run(worker):
        assert_same(params, before)


BAD = [
    ({"beta": 1.5}, "beta must be from 0 to 1, got 1.5"),
    ({"beta": -0.1}, "beta must be from 0 to 1, got -0.1"),
    ({"beta": math.nan}, "beta must be from 0 to 1, got nan"),
    ({"alpha": 1.01}, "alpha must be from 0 to 1, got 1.01"),
    ({"alpha": -1.0}, "alpha must be from 0 to 1, got -1.0"),
    ({"phi": "lion"}, "phi must be one of 'unit', 'sign', 'sgd', 'muon', 'adam', got 'lion'"),
    ({"betas": (0.9, 1.0)}, r"betas must be two numbers from 0 to below 1, got \(0.9, 1.0\)"),
    ({"betas": (0.9,)}, r"betas must be two numbers from 0 to below 1, got \(0.9,\)"),
    ({"betas": (-0.1, 0.9)}, r"betas must be two numbers from 0 to below 1, got \(-0.1, 0.9\)"),
    ({"lr": -0.1}, "lr must be at least 0 and finite, got -0.1"),
    ({"lr": math.nan}, "lr must be at least 0 and finite, got nan"),
    ({"lr": math.inf}, "lr must be at least 0 and finite, got inf"),
    ({"weight_decay": -1.0}, "weight_decay must be at least 0 and finite, got -1.0"),
    ({"eps": -1e-8}, r"eps must be .*, got -1e-08"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=lambda v: str(v)[:30])
def test_bad_settings_are_refused_for_all_and_for_one_group(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demo(start(), SoloLink(), codec=Float(), **bad)
    with pytest.raises(ConfigError, match=message):
        demo([{"params": start(), **bad}], SoloLink(), codec=Float())
    opt = demo(start(), SoloLink(), codec=Float())
    with pytest.raises(ConfigError, match=message):
        opt.add_param_group({"params": start([(3,)]), **bad})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"inflow": "momentum"}, "inflow must be one of 'gradient', 'lr', 'ema', got 'momentum'"),
        ({"over": "everyone"}, "over must be one of 'workers', 'senders', got 'everyone'"),
        ({"clip_norm": -1.0}, r"clip_norm must be at least 0 and finite, got -1.0"),
        ({"clip_norm": math.inf}, "clip_norm must be .* got inf"),
        ({"clip_norm": math.nan}, "clip_norm must be .* got nan"),
    ],
)
def test_bad_settings_that_all_groups_share_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demo(start(), SoloLink(), codec=Float(), **bad)


def test_a_group_that_was_refused_is_not_there() -> None:
    params = start([(3,)])
    opt = demo(params, SoloLink(), codec=Float())
    with pytest.raises(ConfigError, match="beta must be"):
        opt.add_param_group({"params": start([(3,)]), "beta": 2.0})
    with pytest.raises(ConfigError, match="must be real floating-point tensors"):
        opt.add_param_group({"params": [*start([(3,)]), nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    train(opt, params, 0, 1)
    assert len(opt.param_groups) == 1
    assert len(opt.slot("momentum")) == 1


@pytest.mark.parametrize("setting", [{"whiten": True, "phi": "sgd"}, {"whiten": False, "phi": "adam"}], ids=["whiten", "adam"])
def test_an_eps_of_0_does_not_divide_zero_by_zero(setting: dict[str, Any]) -> None:
    """An entry without a gradient is common (an embedding's row), and so is one that nobody sent: 0 / (sqrt(0) + 0) is NaN."""
    params = start([(4,)])
    try:
        opt = demo(params, SoloLink(), eps=0.0, codec=Float(), **setting)
    except ConfigError as refusal:
        assert "eps" in str(refusal)  # noqa: PT017  (either is fine)
        return
    train(opt, params, 0, 2, gradient=lambda r, s, i, x: torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert opt.aborted_rounds == 0
    assert bool(params[0].isfinite().all())


# --- Gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("limit", [0.5, 3.0, 1e6], ids=["always", "sometimes", "never"])
def test_clip_norm_clips_each_workers_gradient_as_torch_would(limit: float, whiten: bool) -> None:
    """Sizes from 0.01 to 100 of the limit, so that whitening, which remembers sizes, sees the difference as well."""
    clipped = []

    def sizes(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        return pull(rank, step, i, x) * 10.0 ** (step % 3 - 2)

    def by_hand(link: Link) -> list[Tensor]:
        params = start()
        opt = demo(params, link, codec=CODECS[0], whiten=whiten)
        for step in range(1, 7):
            for i, p in enumerate(params):
                p.grad = sizes(link.rank, step, i, p.detach())
            norm = torch.nn.utils.clip_grad_norm_(params, limit)
            clipped.append(float(norm) > limit)
            opt.step()
        return values(params)

    ours = run(2, 6, gradient=sizes, codec=CODECS[0], whiten=whiten, clip_norm=limit)
    for (params, _), expected in zip(ours, World(2).run(by_hand), strict=True):
        assert_close(params, expected, 2e-4 if whiten else 1e-5)
    assert any(clipped) == (limit < 1e6)
    assert all(clipped) is False or limit == 0.5


def test_without_clip_norm_nothing_is_clipped() -> None:
    for whiten in (False, True):
        assert_same(
            run(1, 4, whiten=whiten, codec=CODECS[0])[0][0], run(1, 4, whiten=whiten, codec=CODECS[0], clip_norm=1e9)[0][0]
        )


@pytest.mark.parametrize("codec", [Float("fp32"), DCT(8) >> TopK(4) >> Sign(), RandomOrthogonal(8) >> TopK(4)], ids=repr)
@pytest.mark.parametrize("phi", ["sgd", "sign", "unit", "adam", "muon"])
def test_a_step_does_not_change_the_gradients(codec: Codec, phi: str) -> None:
    for whiten, clip in ((False, 0.0), (True, 0.1), (False, 0.1)):
        params = start()
        opt = demo(params, SoloLink(), phi=phi, whiten=whiten, clip_norm=clip, codec=codec)
        for i, p in enumerate(params):
            p.grad = pull(0, 1, i, p.detach())
        before = [copy.deepcopy(p.grad) for p in params]
        opt.step()
        assert_same([p.grad for p in params if p.grad is not None], [g for g in before if g is not None])


@pytest.mark.parametrize("phi", ["sgd", "sign", "unit", "adam", "muon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_of_other_dtypes_move_as_float32_does(phi: str, dtype: torch.dtype) -> None:
    ends = {}
    for kind in (torch.float32, dtype):
        params = [nn.Parameter(p.detach().to(torch.bfloat16).to(kind)) for p in start()]
        opt = demo(params, SoloLink(), phi=phi, codec=DCT(8) >> TopK(8), whiten=True, beta=0.5)
        train(opt, params, 0, 3, gradient=lambda r, s, i, x: blind(r, s, i, x).bfloat16().to(x.dtype))
        assert all(p.dtype == kind for p in params)
        ends[kind] = [p.detach().float() for p in params]
    assert_close(ends[dtype], ends[torch.float32], 1e-5 if dtype == torch.float64 else 0.05)


@pytest.mark.parametrize("phi", ["sgd", "sign", "unit", "adam", "muon"])
@pytest.mark.parametrize("size", [1, 3])
def test_weight_decay_is_decoupled(phi: str, size: int) -> None:
    """Parameters shrink by 1 - lr wd in each step, whatever phi does; without a gradient that is all that happens."""
    still = run(size, 3, gradient=lambda r, s, i, x: torch.zeros_like(x), lr=0.1, weight_decay=0.5, phi=phi, codec=CODECS[0])
    for params, momenta in still:
        assert_close(params, [p.detach() * 0.95**3 for p in start()])
        assert all(not m.any() for m in momenta), "it does not pass through the momentum"
    decayed, plain = (run(size, 1, lr=0.1, weight_decay=wd, phi=phi, codec=CODECS[0]) for wd in (0.5, 0.0))
    for (a, _), (b, _) in zip(decayed, plain, strict=True):
        assert_close(a, [y - 0.05 * p.detach() for y, p in zip(b, start(), strict=True)], 1e-6)


# --- Bad gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("codec", [Float("fp32"), DCT(64) >> TopK(4096)], ids=repr)
@pytest.mark.parametrize("bad_step", [1, 3, 6])
def test_a_nan_on_one_worker_costs_that_gradient_and_no_other(bad_step: int, codec: Codec, delay: bool) -> None:
    """With beta = 1 and everything sent, the parameters end where the sum of all other gradients takes them."""
    T, workers = 6, 3

    def gradient(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        g = noise(rank, step, i, tuple(x.shape))
        return torch.full_like(g, math.nan) if (rank, step, i) == (1, bad_step, 0) else g

    def worker(link: Link) -> tuple[list[Tensor], int]:
        params = start()
        opt = demo(params, link, beta=1.0, codec=codec, delay=delay)
        train(opt, params, link.rank, T, gradient=gradient)
        opt.finish()
        if bad_step == T:  # what the others had to say waits in their momenta for one round more
            train(opt, params, link.rank, 1, gradient=lambda r, s, i, x: torch.zeros_like(x))
            opt.finish()
        return values(params), opt.aborted_rounds

    told = [(rank, step) for rank in range(workers) for step in range(1, T + 1) if (rank, step) != (1, bad_step)]
    for params, aborted in World(workers).run(worker):
        assert aborted == 1
        expected = []
        for i, p in enumerate(start()):
            expected.append(p.detach() - 0.1 / workers * sum(noise(rank, step, i, tuple(p.shape)) for rank, step in told))
        assert_close(params, expected, 1e-5)


@pytest.mark.parametrize("settings", [{"whiten": True}, {"phi": "adam"}], ids=["whiten", "adam"])
def test_a_refused_round_leaves_second_moments_as_they_were(settings: dict[str, Any]) -> None:
    """Their bias correction counts what entered them, not the rounds."""

    def end(steps: list[int], gradient: Gradient) -> list[Tensor]:
        params = start()
        opt = demo(params, SoloLink(), betas=(0.9, 0.95), codec=Float(), **settings)
        for step in steps:
            train(opt, params, 0, 1, first=step, gradient=gradient)
        return values(params)

    straight = end([2, 3], blind)
    after_nan = end([1, 2, 3], lambda r, s, i, x: torch.full_like(x, math.nan) if s == 1 else blind(r, s, i, x))
    assert_close(after_nan, straight)


def test_a_gradient_that_is_finite_but_huge_does_not_stop_the_training_for_good() -> None:
    """Its transform overflows: what is not finite must not stay in the momentum, where every later round would find it."""
    params = start([(64, 64)])
    opt = demo(params, SoloLink(), codec=DCT(64) >> TopK(8))
    train(opt, params, 0, 4, gradient=lambda r, s, i, x: torch.full_like(x, 1e38) if s == 1 else blind(r, s, i, x))
    assert bool(opt.slot("momentum")[0].isfinite().all())
    assert opt.aborted_rounds == 1


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("at", ["commit", "exchange"])
def test_a_round_that_did_not_take_place_stays_in_the_momenta(at: Any, delay: bool) -> None:
    T = 5

    def worker(link: Link) -> list[Tensor]:
        params = start()
        opt = demo(params, Flaky(link, {3}, at=at), beta=1.0, codec=Float(), delay=delay)
        train(opt, params, link.rank, T, gradient=blind)
        opt.finish()
        assert opt.aborted_rounds == 1
        return values(params)

    for params in World(2).run(worker):
        told = [(rank, step) for rank in range(2) for step in range(1, T + 1)]
        expected = [p.detach() - 0.05 * sum(blind(r, s, i, p) for r, s in told) for i, p in enumerate(start())]
        assert_close(params, expected, 1e-5)


# --- Delay -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_with_delay_a_round_is_applied_one_step_later(alpha: float) -> None:
    """As by hand: the gradient of step t is taken where round t - 1 has not arrived, and enters the momentum after it has."""
    settings: dict[str, Any] = {"lr": 0.05, "beta": 0.9, "alpha": alpha, "delay": True}
    expected = reference(3, 8, s=8, k=4, inflow=1.0, decay=0.2, **settings)
    settings |= {"phi": "sign", "weight_decay": 0.2, "codec": DCT(8) >> TopK(4)}

    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        params = start(EVEN)
        opt = demo(params, link, **settings)
        train(opt, params, link.rank, 1)
        assert_same(values(params), values(start(EVEN)), "the first round is still under way")
        train(opt, params, link.rank, 7, first=2)
        before = values(params)
        opt.finish()
        after = values(params)
        opt.finish()
        assert_same(values(params), after, "there is nothing left to finish")
        return before, after

    for before, after in World(3).run(worker):
        assert not torch.equal(before[0], after[0])
        assert_close(after, expected, 1e-5)


def test_with_delay_and_everything_sent_phi_adam_is_adamw_of_mean_gradients_that_are_one_step_old() -> None:
    same: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.97), "eps": 1e-6, "weight_decay": 0.3}
    expected = start()
    adamw = torch.optim.AdamW(expected, **same)
    for step in range(1, 8):
        mean = [torch.stack([pull(r, step, i, p.detach()) for r in range(2)]).mean(0) for i, p in enumerate(expected)]
        if step > 1:
            adamw.step()
        for p, g in zip(expected, mean, strict=True):
            p.grad = g
    adamw.step()

    def worker(link: Link) -> list[Tensor]:
        params = start()
        opt = demo(params, link, phi="adam", delay=True, codec=Float(), **same)
        train(opt, params, link.rank, 7)
        opt.finish()
        return values(params)

    for params in World(2).run(worker):
        assert_close(params, values(expected), 1e-5)


@pytest.mark.parametrize("codec", [CODECS[1], CODECS[2], CODECS[5], Float("fp32")], ids=repr)
def test_resuming_with_a_round_under_way_is_bit_equal_to_not_stopping(codec: Codec) -> None:
    settings: dict[str, Any] = {"phi": "adam", "whiten": True, "codec": codec, "delay": True}

    def worker(link: Link, stop: int) -> list[Tensor]:
        params = start()
        opt = demo(params, link, **settings)
        train(opt, params, link.rank, stop)
        if stop < 7:
            disk = io.BytesIO()
            torch.save({"params": values(params), "opt": opt.state_dict()}, disk)
            disk.seek(0)
            saved = torch.load(disk, weights_only=True)
            params = [nn.Parameter(x) for x in saved["params"]]
            opt = demo(params, link, **settings)
            opt.load_state_dict(saved["opt"])
            train(opt, params, link.rank, 7 - stop, first=stop + 1)
        opt.finish()
        return [*values(params), *opt.slot("momentum"), *opt.slot("own_v"), *opt.slot("m"), *opt.slot("v")]

    straight = World(2).run(lambda link: worker(link, 7))
    for stop in (1, 4):
        for a, b in zip(straight, World(2).run(lambda link, stop=stop: worker(link, stop)), strict=True):
            assert_same(a, b)


def test_finish_right_after_resuming_applies_the_round_that_was_under_way() -> None:
    def worker(link: Link, resume: bool) -> list[Tensor]:
        params = start()
        opt = demo(params, link, codec=CODECS[1], delay=True)
        train(opt, params, link.rank, 3)
        if resume:
            state, params = opt.state_dict(), [nn.Parameter(x) for x in values(params)]
            opt = demo(params, link, codec=CODECS[1], delay=True)
            opt.load_state_dict(state)
        opt.finish()
        return values(params)

    for a, b in zip(*(World(2).run(lambda link, r=r: worker(link, r)) for r in (False, True)), strict=True):
        assert_same(a, b)


def test_resuming_with_a_refused_round_under_way_is_bit_equal_to_not_stopping() -> None:
    """The NaN is found when its round is sent, the refusal takes place a step later, and a checkpoint may lie between."""

    def gradient(rank: int, step: int, i: int, x: Tensor) -> Tensor:
        return torch.full_like(x, math.nan) if (rank, step) == (1, 3) else pull(rank, step, i, x)

    def worker(link: Link, resume: bool) -> list[Tensor]:
        params = start()
        opt = demo(params, link, codec=CODECS[0], delay=True)
        train(opt, params, link.rank, 3, gradient=gradient)
        if resume:
            state, params = opt.state_dict(), [nn.Parameter(x) for x in values(params)]
            opt = demo(params, link, codec=CODECS[0], delay=True)
            opt.load_state_dict(state)
        train(opt, params, link.rank, 3, first=4, gradient=gradient)
        opt.finish()
        return values(params)

    for a, b in zip(*(World(2).run(lambda link, r=r: worker(link, r)) for r in (False, True)), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("compute", [0.5, 3.0, 20.0])
def test_delay_hides_the_wire_behind_computing(compute: float) -> None:
    """A step takes max(compute, wire) instead of their sum."""
    network = Network(bandwidth=8 * 100.0, latency=0.25)  # 100 bytes a second
    seconds = {}
    for delay in (False, True):

        def worker(link: Link, delay: bool = delay) -> tuple[float, float]:
            params = start()
            opt = demo(params, link, codec=CODECS[1], delay=delay, alarm_every=0)
            train(opt, params, link.rank, 3)
            begin = link.now()
            train(opt, params, link.rank, 4, first=4)
            return (link.now() - begin) / 4, network.seconds("gather", [opt.message_nbytes()] * link.size)

        world = World(3, network=network, step_time=compute)
        ((seconds[delay], wire), *others) = world.run(worker)
        assert 2.0 < wire < 10.0, "the test needs computing that is shorter and computing that is longer"
        assert all(other == (seconds[delay], wire) for other in others)
    vote = network.seconds("gather", [1] * 3)  # whether all could read the messages
    assert seconds[False] == pytest.approx(compute + wire + vote)
    assert seconds[True] == pytest.approx(max(compute, wire))


# --- The momentum is state ---------------------------------------------------------------------------------------------------


def test_the_momentum_is_in_the_optimizers_state_and_matters() -> None:
    """The published code keeps it elsewhere and loses it at every restart."""

    def worker(link: Link, keep: bool) -> tuple[list[Tensor], list[Tensor]]:
        params = start()
        opt = demo(params, link, codec=CODECS[0])
        train(opt, params, link.rank, 5)
        assert all("momentum" in opt.state[p] and bool(opt.state[p]["momentum"].any()) for p in params)
        disk = io.BytesIO()
        torch.save(opt.state_dict(), disk)
        disk.seek(0)
        state = torch.load(disk, weights_only=True)
        for saved, p in zip(state["state"].values(), params, strict=True):
            assert torch.equal(saved["momentum"], opt.state[p]["momentum"])
            if not keep:
                saved["momentum"].zero_()
        again = [nn.Parameter(x) for x in values(params)]
        other = demo(again, link, codec=CODECS[0])
        other.load_state_dict(state)
        train(opt, params, link.rank, 3, first=6)
        train(other, again, link.rank, 3, first=6)
        return values(params), values(again)

    for straight, resumed in World(2).run(lambda link: worker(link, keep=True)):
        assert_same(straight, resumed)
    for straight, resumed in World(2).run(lambda link: worker(link, keep=False)):
        assert not torch.equal(straight[0], resumed[0])


def test_a_state_without_momentum_or_of_another_codec_is_refused() -> None:
    opt = demo(start([(11, 9)]), SoloLink(), codec=DCT(8) >> TopK(4))
    state = copy.deepcopy(opt.state_dict())
    del state["state"][0]["momentum"]
    with pytest.raises(CheckpointError, match="tensor 0 has no 'momentum'"):
        opt.load_state_dict(state)
    wide = demo(start([(11, 9)]), SoloLink(), codec=DCT(64) >> TopK(4)).state_dict()
    with pytest.raises(CheckpointError, match=r"'momentum' of tensor 0 has shape \(11, 9\), here it has \(16, 16\)"):
        opt.load_state_dict(wide)


def test_only_what_a_rule_needs_is_kept() -> None:
    for phi, whiten, expected in (
        ("sgd", False, {"momentum"}),
        ("unit", True, {"momentum", "own_v", "own_count"}),
        ("adam", True, {"momentum", "own_v", "own_count", "m", "v", "updates"}),
    ):
        params = start([(8, 8), (4,)])
        opt = demo(params, SoloLink(), phi=phi, whiten=whiten, codec=CODECS[0])
        assert all(opt.state[p].keys() == expected for p in params)
        later = demo(params, SoloLink(), phi=phi, whiten=whiten, codec=CODECS[0], delay=True)
        assert later.state[params[0]].keys() == expected | {"invalid_in_flight"}, "which stands with the first parameter"


# --- Presets -----------------------------------------------------------------------------------------------------------------


def test_v1_has_the_settings_of_the_published_code() -> None:
    opt = DeMo.v1(start(), SoloLink())
    group = opt.param_groups[0]
    assert (group["lr"], group["beta"], group["alpha"], group["phi"]) == (4e-4, 0.999, 1.0, "sign")
    assert (group["weight_decay"], opt.inflow, opt.whiten, opt.mean.over) == (0.0, "lr", False, "senders")
    assert opt.codec == DCT(64) >> TopK(32) >> Float("fp32")
    assert not opt.delay


def test_v2_has_the_settings_of_the_paper_of_2026() -> None:
    opt = DeMo.v2(start(), SoloLink())
    group = opt.param_groups[0]
    assert (group["beta"], group["alpha"], group["phi"]) == (0.999, 0.2, "sign")
    assert (opt.inflow, opt.whiten, opt.mean.over) == ("ema", False, "senders")
    assert opt.codec == DCT(64) >> TopK(8) >> Float("fp32")


@pytest.mark.parametrize("preset", [DeMo.v1, DeMo.v2])
def test_presets_can_be_overridden(preset: Callable[..., DeMo]) -> None:
    other: dict[str, Any] = {"lr": 0.5, "beta": 0.5, "alpha": 0.75, "phi": "muon", "weight_decay": 0.1, "betas": (0.1, 0.2)}
    opt = preset(start(), SoloLink(), codec=Float("bf16"), whiten=True, inflow="gradient", delay=True, alarm_every=3, **other)
    assert {name: opt.param_groups[0][name] for name in other} == other
    assert (opt.codec, opt.whiten, opt.inflow, opt.delay) == (Chain.of(Float("bf16")), True, "gradient", True)
    assert opt.policy.alarm_every == 3


# --- Bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [8, 32, 128])
@pytest.mark.parametrize("form", [Sign(), Float("bf16"), Float("fp32")], ids=repr)
def test_a_vector_is_never_longer_on_the_wire_than_sent_whole(k: int, form: Any) -> None:
    for n in (1, 3, 10, 63, 64, 65, 100, 768, 1000):
        p = nn.Parameter(torch.zeros(n))
        header = HEADER_NBYTES + PART_NBYTES  # top-k messages travel in an envelope
        sent = demo([p], SoloLink(), codec=DCT(64) >> TopK(k) >> form).message_nbytes() - header
        assert 0 < sent <= form.nbytes([p])


def _rounds(link: Link, steps: int = 2, **settings: Any) -> list[tuple[str, int, int]]:
    params, metered = start([(64, 64), (128,)]), Metered(link)
    opt = demo(params, metered, **settings)
    train(opt, params, link.rank, steps)
    assert {e.payload for e in metered.meter.recent if e.purpose == "round"} == {opt.message_nbytes()}
    return [(e.op, e.payload, e.received) for e in metered.meter.recent if e.purpose == "round"]


@pytest.mark.parametrize("selection", [RandomK(0.125), Striding(0.125)], ids=repr)
def test_random_and_striding_send_values_only(selection: Codec) -> None:
    """A rate of r is r P values of four bytes, and a status number of each worker; half of what an index beside each costs."""
    M, P = 4, 64 * 64 + 128
    for rounds in World(M).run(lambda link: _rounds(link, codec=selection)):
        assert rounds == [("mean", P // 8 * 4 + 4 * M, 2 * (P // 8 * 4 + 4 * M) * (M - 1) // M)] * 2


def test_received_bytes_grow_with_the_workers_where_messages_are_gathered_and_not_where_they_are_averaged() -> None:
    sizes = (2, 4, 8)
    gathered, averaged = (
        [World(M).run(lambda link, codec=codec: _rounds(link, 1, codec=codec))[0][0] for M in sizes]
        for codec in (TopK(0.125), RandomK(0.125))
    )
    (payload,) = {nbytes for _, nbytes, _ in gathered}
    assert [received for _, _, received in gathered] == [payload * (M - 1) for M in sizes]
    assert all(received < 2 * nbytes for _, nbytes, received in averaged)
    assert averaged[-1][2] / averaged[0][2] < 2 * (7 / 8) / (2 * (1 / 2)) + 0.05


@pytest.mark.parametrize("selection", [RandomK(0.25, seed=5), Striding(0.25)], ids=repr)
def test_all_workers_choose_the_same_entries_by_the_round_alone(selection: Codec) -> None:
    """Those that moved are those that left the momentum, on every worker, and others in every round."""

    def worker(link: Link) -> list[Tensor]:
        (p,), chosen = start([(16, 16)]), []
        opt = demo([p], link, beta=1.0, codec=selection)
        for step in range(1, 4):
            before = p.detach().clone()
            train(opt, [p], link.rank, 1, first=step, gradient=blind)
            chosen.append(p.detach() != before)
            assert torch.equal(chosen[-1], opt.slot("momentum")[0] == 0)
            assert int(chosen[-1].sum()) == 64
        return chosen

    first, *others = World(3).run(worker)
    for other in others:
        assert_same(first, other)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


def test_with_striding_every_parameter_moves_once_in_as_many_rounds_as_the_stride_is_long() -> None:
    """The published code stays at the same entries for ever."""
    for params, _ in run(
        2, 8, shapes=[(16, 8), (64,)], gradient=lambda r, s, i, x: torch.ones_like(x), phi="sign", codec=Striding(0.125)
    ):
        assert_close(params, [p.detach() - 0.1 for p in start([(16, 8), (64,)])])


# --- First contact ------------------------------------------------------------------------------------------------------------


def test_an_optimizer_in_place_of_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DeMo is the optimizer itself: give it model.parameters\(\), not a SGD"):
        DeMo(torch.optim.SGD(start(), lr=0.1), SoloLink())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "setting", [{"whiten": False}, {"clip_norm": 1.0}, {"inflow": "lr"}, {"over": "workers"}, {"delay": True}]
)
def test_a_setting_that_is_one_for_all_groups_is_refused_in_a_group(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} is one for all parameter groups"):
        DeMo([{"params": start(), **setting}], SoloLink())


def test_a_rule_that_needs_state_cannot_be_chosen_later() -> None:
    params = start()
    opt = demo(params, SoloLink(), phi="sgd", codec=Float())
    opt.param_groups[0]["phi"] = "adam"
    before = values(params)
    with pytest.raises(ConfigError, match="phi = adam needs moments from the start"):
        train(opt, params, 0, 1)
    assert_same(before, values(params))


def test_an_interrupt_while_a_round_is_applied_sends_no_other() -> None:
    params = start()
    metered = Metered(SoloLink())
    opt = demo(params, metered, phi="sgd", codec=Float(), delay=True)
    train(opt, params, 0, 1)
    rounds = metered.meter.totals.rounds

    def interrupted() -> None:
        raise KeyboardInterrupt

    metered.commit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        train(opt, params, 0, 1)
    assert metered.meter.totals.rounds == rounds + 1, "the one that was under way, and no new one"
