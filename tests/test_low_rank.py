"""The matrix maths of low-rank Adam: shapes and sides, the projector, the rotation, and the optimizer on one worker."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.training import assert_close, assert_same, backward, model_of, snapshot
from thinwire import DataParallel, SoloLink, World
from thinwire.errors import ConfigError
from thinwire.maths import low_rank
from thinwire.maths.lives import age_of, beta_at, weight_seen
from thinwire.maths.low_rank import like, one_thread, oriented, projector, rank_of, rotate, similarity
from thinwire.optim import LowRankAdam, QHAdam

# --- Which matrices, and how they lie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((8, 4), 2, 2),
        ((8, 4), 4, 0),  # nothing to gain
        ((8, 4), 5, 0),
        ((8, 4), 0.25, 1),
        ((8, 4), 0.01, 1),  # at least one
        ((8, 4), 0, 0),
        ((8,), 2, 0),
        ((), 2, 0),
        ((1, 9), 1, 0),
        ((6, 2, 2), 2, 2),  # folded to 6 x 4
        ((2, 6, 6), 2, 0),  # folded to 2 x 36
        ((0, 4), 2, 0),
    ],
)
def test_which_rank_a_parameter_is_projected_to(shape: tuple[int, ...], rank: float, expected: int) -> None:
    assert rank_of(torch.zeros(shape), rank) == expected


@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (5, 5), (6, 2, 2), (2, 3, 4)])
def test_the_shorter_side_is_projected_and_the_shape_comes_back(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    M = oriented(x)
    assert M.shape[0] <= M.shape[1]
    assert torch.equal(like(x, M), x)
    rows = x.reshape(shape[0], -1).shape
    assert torch.equal(M, x.reshape(rows).T if rows[0] >= rows[1] else x.reshape(rows)), "rows >= columns: the columns"


def test_the_state_has_the_shapes_of_the_paper() -> None:
    made = {name: make(torch.zeros(20, 8)) for name, make in low_rank.slots(lambda: 3, feedback=True).items()}
    assert {name: tuple(t.shape) for name, t in made.items() if t is not None} == {
        "exp_avg": (3, 20),
        "exp_avg_sq": (3, 20),
        "Q": (8, 3),
        "E": (8, 20),
    }
    assert torch.equal(made["Q"], torch.eye(8)[:, :3]), "until the first refresh"
    assert "E" not in low_rank.slots(lambda: 3, feedback=False)


# --- The projector -----------------------------------------------------------------------------------------------------------


def orthonormal(n: int, r: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(torch.randn(n, r, generator=torch.Generator().manual_seed(seed)))[0]


def assert_orthonormal(Q: Tensor) -> None:
    torch.testing.assert_close(Q.T @ Q, torch.eye(Q.shape[1], dtype=Q.dtype), rtol=0, atol=2e-6)


def test_it_spans_the_strongest_directions() -> None:
    U, V = orthonormal(12, 12), orthonormal(30, 12, 1)
    D = U @ torch.diag(torch.arange(12.0, 0, -1)) @ V.T
    Q = projector(D, torch.eye(12, 4))
    assert_orthonormal(Q)
    assert similarity(Q, U[:, :4]) == pytest.approx(1, abs=1e-5)
    assert similarity(Q, U[:, 4:8]) == pytest.approx(0, abs=1e-5)


def test_the_largest_entry_of_every_column_is_positive() -> None:
    D = torch.randn(10, 17)
    Q = projector(D, torch.eye(10, 6))
    assert bool((Q.gather(0, Q.abs().argmax(0, keepdim=True)) > 0).all())
    torch.testing.assert_close(projector(-D, torch.eye(10, 6)), Q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("inside", [True, False], ids=["D in the span of Q", "D anywhere"])
def test_a_difference_of_low_rank_is_padded_from_the_old_span(k: int, inside: bool) -> None:
    old = orthonormal(16, 5)
    U = old @ orthonormal(5, k, 2) if inside else orthonormal(16, k, 3)
    new = projector(U @ torch.randn(k, 40), old)
    assert_orthonormal(new)
    assert similarity(new[:, :k], U) == pytest.approx(1, abs=1e-5), "first what D has"
    both = torch.linalg.qr(torch.cat([U, old], 1))[0]
    assert similarity(new, both) == pytest.approx(1, abs=1e-5), "then what Q had"
    if inside:
        assert similarity(new, old) == pytest.approx(1, abs=1e-5)


def test_no_difference_keeps_the_projector() -> None:
    Q = orthonormal(9, 3)
    assert torch.equal(projector(torch.zeros(9, 20), Q), Q)


def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    """They do without `one_thread`: 1 and 2 threads of MKL differ by 1e-5 on a 256 x 1024 matrix."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            p = nn.Parameter(torch.zeros(256, 512))
            states = {p: {name: make(p.detach()) for name, make in low_rank.slots(lambda: 16, feedback=False).items()}}
            states[p]["step"] = torch.tensor(3.0)
            states[p]["exp_avg"] += 1
            D = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
            low_rank.refresh([p], states, [{"betas": (0.9, 0.999)}], [D], turn=True)  # type: ignore[arg-type]
            found.append([states[p]["Q"], states[p]["exp_avg"]])
            assert torch.get_num_threads() == threads, "put back"
    finally:
        torch.set_num_threads(before)
    assert_same(found[0], found[1])  # type: ignore[arg-type]
    assert_same(found[0], found[2])  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_what_is_not_finite_gives_no_projector() -> None:
    p = nn.Parameter(torch.zeros(6, 9))
    state = {name: make(p.detach()) for name, make in low_rank.slots(lambda: 2, feedback=False).items()}
    low_rank.refresh([p], {p: state}, [{"betas": (0.9, 0.9)}], [torch.full((6, 9), float("nan"))], turn=True)  # type: ignore[arg-type]
    assert torch.equal(state["Q"], torch.eye(6, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["gradient", "sketch"])
def test_a_gradient_of_low_rank_is_found_from_all_of_it_and_from_a_sketch(source: str) -> None:
    """r + 8 random columns of a matrix of rank r span what it spans; those of two workers are of one sketch."""
    U = orthonormal(40, 4)
    grads = [(U @ torch.randn(4, 60, generator=torch.Generator().manual_seed(seed))).T for seed in (1, 2)]  # tall: 60 x 40
    old = torch.eye(40, 4)
    given = [low_rank.contribution(G, old, source, round=3) for G in grads]
    assert given[0].shape == ((40, 60) if source == "gradient" else (40, 12))
    both = low_rank.contribution(grads[0] + grads[1], old, source, round=3)
    torch.testing.assert_close(given[0] + given[1], both, rtol=1e-4, atol=1e-4)
    assert similarity(projector(both, old), U) == pytest.approx(1, abs=1e-5)
    assert not low_rank.contribution(torch.full((60, 40), float("nan")), old, source, round=3, clip=0.0).any()
    torch.testing.assert_close(low_rank.contribution(grads[0], old, source, round=3, clip=0.5), 0.5 * given[0])


def test_sketches_are_others_in_every_round_and_of_a_size_that_fits() -> None:
    G, old = torch.eye(20), torch.eye(20, 16)
    first, second = (low_rank.contribution(G, old, "sketch", round=number) for number in (1, 2))
    assert first.shape == (20, 20), "16 + 8 columns are more than there are rows"
    assert not torch.equal(first, second)
    assert torch.equal(first.abs(), torch.full((20, 20), 20**-0.5)), "signs"
    assert abs(float(first.sum())) < 20, "of which about half are positive"


# --- Betas that grow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("lives", [0.0, 0.5, 4.0])
def test_the_weight_that_a_growing_moment_has_given_is_that_of_its_steps(beta: float, lives: float) -> None:
    left = 1.0
    for age in range(1, 400):
        left *= beta_at(beta, age, lives)
        assert weight_seen(beta, age, lives) == pytest.approx(1 - left, rel=1e-9)


def test_a_moment_goes_on_at_the_age_that_has_its_beta() -> None:
    assert age_of(0.9, lives=4) == 26
    assert beta_at(0.99, 26, 4) == pytest.approx(0.9, abs=2e-3)
    assert age_of(0.0, lives=4) == 0


def test_with_lives_the_first_moment_is_corrected_for_its_bias() -> None:
    """Of a constant gradient the corrected moment is the gradient: rank 0 is Adam, whose steps then have the size lr."""
    p = nn.Parameter(torch.zeros(3))
    opt = LowRankAdam([p], lr=0.1, omega=1.0, betas=(0.99, 0.999), lives=4.0)
    for step in range(1, 60):
        p.grad = torch.full((3,), 2.0)
        opt.step()
        torch.testing.assert_close(p.detach(), torch.full((3,), -0.1 * step), rtol=1e-4, atol=0)


# --- The rotation ------------------------------------------------------------------------------------------------------------


def test_a_permutation_of_the_basis_permutes_the_moments() -> None:
    u, v = torch.randn(3, 5), torch.rand(3, 5) + 1
    order = [2, 0, 1]
    R = torch.eye(3)[order]
    turned_u, turned_v = u.clone(), v.clone()
    rotate(turned_u, turned_v, R, seen=(1.0, 1.0))
    assert torch.equal(turned_u, u[order])
    torch.testing.assert_close(turned_v, torch.maximum(v, u * u)[order])


def test_a_sign_flip_leaves_the_second_moment_alone() -> None:
    u, v = torch.randn(2, 5), torch.rand(2, 5) + 9
    turned_u, turned_v = u.clone(), v.clone()
    rotate(turned_u, turned_v, -torch.eye(2), seen=(1 - 0.9**100, 1 - 0.99**100))
    torch.testing.assert_close(turned_u, -u)
    torch.testing.assert_close(turned_v, v)


def test_the_direction_in_full_space_survives_a_turn_within_the_span() -> None:
    Q, u, v = orthonormal(8, 3), torch.randn(3, 5), torch.rand(3, 5)
    new = Q @ orthonormal(3, 3, 4)
    before = Q @ u
    rotate(u, v, new.T @ Q, seen=(1 - 0.9**7, 1 - 0.999**7))
    torch.testing.assert_close(new @ u, before)
    assert bool((v >= 0).all())


# --- One step, by hand -------------------------------------------------------------------------------------------------------


def test_two_steps_by_hand() -> None:
    """The formulas of the paper, written down once more in float64 for a tall matrix."""
    torch.manual_seed(3)
    x0, grads = torch.randn(6, 4, dtype=torch.float64), torch.randn(2, 6, 4, dtype=torch.float64)
    lr, b1, b2, eps, omega, wd = 0.1, 0.8, 0.9, 1e-8, 0.7, 0.01
    p = nn.Parameter(x0.clone())
    opt = LowRankAdam([p], lr=lr, rank=2, H=99, omega=omega, betas=(b1, b2), eps=eps, weight_decay=wd)
    x, P = x0.clone(), torch.eye(4, dtype=torch.float64)[:, :2]  # columns are the shorter side: right projection
    u, v, E = torch.zeros(6, 2).double(), torch.zeros(6, 2).double(), torch.zeros(6, 4).double()
    for t, g in enumerate(grads, 1):
        p.grad = g.clone()
        opt.step()
        S = g + E
        ghat = S @ P
        E = S - ghat @ P.T
        u, v = b1 * u + (1 - b1) * ghat, b2 * v + (1 - b2) * ghat**2
        den = (v / (1 - b2**t)).sqrt() + eps
        x = x - lr * ((1 - omega) * S / den.mean() + omega * (u / (1 - b1**t) / den) @ P.T + wd * x)
        torch.testing.assert_close(p.detach(), x)


def test_a_projection_that_has_seen_only_zeros_does_not_blow_up_the_step() -> None:
    p = nn.Parameter(torch.zeros(4, 6))
    opt = LowRankAdam([p], lr=0.1, rank=2)
    p.grad = torch.zeros(4, 6)
    p.grad[3] = 1  # outside of the first projector
    opt.step()
    assert not p.detach().any()
    assert opt.state[p]["E"][3].eq(1).all(), "error feedback keeps it"


@pytest.mark.parametrize("rank", [0, 99], ids=["rank 0", "rank above the shorter side"])
def test_without_projection_it_is_quasi_hyperbolic_adam(rank: int) -> None:
    mine, reference = model_of(), model_of()
    opt = LowRankAdam(mine.parameters(), lr=0.01, rank=rank, omega=0.9, betas=(0.95, 0.99), weight_decay=0.1)
    qh = QHAdam(reference.parameters(), lr=0.01, betas=0.95, omegas=0.9, beta2=0.99, weight_decay=0.1)
    for step in range(0, 12, 2):  # steps at which every parameter has a gradient
        for model, o in ((mine, opt), (reference, qh)):
            backward(model, 0, step)
            o.step()
            o.zero_grad()
    assert_close(snapshot(mine), snapshot(reference), 2e-6)


def test_bf16_parameters_are_stepped_in_float32() -> None:
    p = nn.Parameter(torch.randn(8, 6).to(torch.bfloat16))
    wide = nn.Parameter(p.detach().float())
    opts = [LowRankAdam([x], lr=0.05, rank=2, H=2) for x in (p, wide)]
    for _ in range(3):
        g = torch.randn(8, 6).to(torch.bfloat16)
        for x, opt in zip((p, wide), opts, strict=True):
            x.grad = g.to(x.dtype)
            opt.step()
    assert all(t.dtype == torch.float32 for t in opts[0].state[p].values())
    torch.testing.assert_close(p.detach().float(), wide.detach(), rtol=0.03, atol=0.03)


# --- The optimizer as one of torch's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_resumes_bit_for_bit(dtype: torch.dtype) -> None:
    def made(model: nn.Module) -> LowRankAdam:
        return LowRankAdam(model.parameters(), lr=0.01, rank=2, H=3)

    def trained(model: nn.Module, opt: LowRankAdam, first: int, last: int) -> None:
        for step in range(first, last):
            backward(model, 0, step)
            opt.step()
            opt.zero_grad()

    straight = model_of(dtype=dtype)
    opt = made(straight)
    trained(straight, opt, 0, 5)
    other = copy.deepcopy(straight)
    disk = io.BytesIO()
    torch.save(opt.state_dict(), disk)
    disk.seek(0)
    resumed = made(other)
    resumed.load_state_dict(torch.load(disk, weights_only=True))
    trained(straight, opt, 5, 12)
    trained(other, resumed, 5, 12)
    assert_same(snapshot(straight), snapshot(other))


def test_in_data_parallel_it_is_low_rank_ddp() -> None:
    """All workers stay bit-equal, and with equal batches they are one worker."""

    def worker(link: Any, same: bool) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        inner = LowRankAdam(model.parameters(), lr=0.01, rank=2, H=3)
        opt = DataParallel(inner, link, alarm_every=1)
        for step in range(10):
            backward(model, 0 if same else link.rank, step)
            opt.step()
            opt.zero_grad()
        return snapshot(model), [inner.state[p]["Q"] for p in inner.state if "Q" in inner.state[p]]

    for same in (True, False):
        (a, Q_a), (b, Q_b) = World(2).run(lambda link, same=same: worker(link, same))
        assert_same(a, b)
        assert len(Q_a) >= 2
        assert_same(Q_a, Q_b)
        if same:
            assert_same(a, worker(SoloLink(), True)[0])


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"rank": -1}, "rank must be a whole number, or a part of the shorter side below 1, got -1"),
        ({"rank": 2.5}, "got 2.5"),
        ({"rank": True}, "got True"),
        ({"omega": 1.5}, "omega must be from 0 to 1, got 1.5"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"lr": -1.0}, "lr"),
        ({"qh": "beside"}, "'outside', 'inside', got 'beside'"),
        ({"H": 0}, "H must be"),
        ({"source": "noise"}, "'difference', 'gradient', 'sketch', got 'noise'"),
        ({"lives": -1.0}, "lives must be at least 0"),
    ],
)
def test_bad_settings_are_refused(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LowRankAdam(model_of().parameters(), **bad)
    if not {"qh", "H", "source"} & bad.keys():
        opt = LowRankAdam(model_of().parameters())
        with pytest.raises(ConfigError, match=said):
            opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **bad})
        assert len(opt.param_groups) == 1, "refused as a whole"


def test_what_is_one_for_all_groups_is_refused_in_a_group() -> None:
    with pytest.raises(ConfigError, match="qh is one for all parameter groups, got qh='inside'"):
        LowRankAdam([{"params": model_of().parameters(), "qh": "inside"}])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(9, 4, sparse=True)
    opt = LowRankAdam(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients only"):
        opt.step()


def test_it_takes_a_closure() -> None:
    p = nn.Parameter(torch.ones(4, 6))

    def closure() -> Tensor:
        loss = p.square().sum()
        loss.backward()
        return loss

    assert LowRankAdam([p]).step(closure) == 24
