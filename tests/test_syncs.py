"""What a step and a round ask of a device, on a pretend one; and that gates which stay on it decide as those of a CPU do."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from benchmarks import report_gpu
from benchmarks.pair import SIZES, gpt_shapes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import thinwire
from thinwire import (
    DCT,
    MTDAO,
    DataParallel,
    DecoupledDiLoCo,
    DeMo,
    DiLoCo,
    Identity,
    Link,
    LocalSGD,
    Sign,
    SoloLink,
    StreamingDiLoCo,
    TopK,
)
from thinwire.algorithms import found
from thinwire.core import deferred
from thinwire.core import on_device as on_device_exchange
from thinwire.core.offload import Offload
from thinwire.errors import ConfigError, NonFiniteRound
from thinwire.links.base import Done, Ticket
from thinwire.network import Op
from thinwire.optim import QHAdam
from thinwire.payload import LARGEST, Payload, all_finite
from thinwire.sim import World
from thinwire.tools.doctor import syncs
from thinwire.tools.doctor.pretend import NO_LAUNCH, SCALAR, SIZE, TO_DEVICE, TO_HOST, Audit, Crossing, on_device, on_host
from thinwire.tools.doctor.pretend import device as pretend_device

Make = Callable[[list[nn.Parameter], Link], thinwire.Algorithm]

# --- The pretend device -----------------------------------------------------------------------------------------------------


def test_every_way_to_make_the_host_wait_is_seen() -> None:
    ways: list[tuple[str, Callable[[Tensor], object]]] = [
        (TO_HOST, lambda x: x.cpu()),
        (TO_HOST, lambda x: torch.empty(3).copy_(x)),
        (TO_HOST, lambda x: x.tolist()),
        (TO_DEVICE, lambda x: torch.ones(3).to(x.device)),
        (TO_DEVICE, lambda x: x.copy_(torch.ones(3))),
        (TO_DEVICE, lambda x: x[torch.tensor([0, 2])]),
        (SCALAR, lambda x: x.sum().item()),
        (SCALAR, lambda x: bool(x.isfinite().all())),
        (SCALAR, lambda x: torch.equal(x, x)),
        (SIZE, lambda x: x.nonzero()),
        (SIZE, lambda x: x[x > 0]),
    ]
    x = on_device(torch.tensor([1.0, -2.0, 3.0]))
    for kind, way in ways:
        with Audit() as seen:
            way(x)
        assert [c.kind for c in seen.crossings] == [kind] and seen.blocking == 1


def test_what_does_not_wait_is_told_apart_and_values_are_real() -> None:
    x = on_device(torch.arange(6.0).view(2, 3))
    with Audit() as seen:
        y = torch.where(x > 2, x, torch.zeros((), device=x.device)) @ x.T
        host = torch.empty(2, 2)
        host.copy_(y, non_blocking=True)
    assert not seen.blocking and seen.by_file(blocking=False) == {"?": 1}
    assert seen.launches["mm"] == 1 and seen.launches["where"] == 1
    assert torch.equal(host, torch.tensor([[0.0, 0], [14, 50]])) and y.device.type == pretend_device().type
    with pytest.raises(RuntimeError, match="two devices"):
        x + torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"\.cpu\(\) first"):
        x.numpy()


def test_a_crossing_has_the_line_of_thinwire_that_asked_for_it() -> None:
    with Audit() as seen:
        assert all_finite([on_device(torch.ones(3))])  # payload.py looks in the name of whoever asks
        thinwire.core.hashing.hash_tensors([on_device(torch.ones(3))])
    assert [c.file for c in seen.crossings] == ["?", "core/hashing.py"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2 * LARGEST, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_finite_gate_of_a_device_is_that_of_a_cpu(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, dtype=dtype), torch.empty(0, dtype=dtype), torch.tensor([[-1.0, bad]], dtype=dtype)]
    there = [on_device(t) for t in tensors]
    for largest in (math.inf, LARGEST):
        assert all_finite(there, largest) == all_finite(tensors, largest)
    assert all_finite([on_device(torch.empty(0))])


def adamw(params: list[nn.Parameter], **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, **how)


# --- The budget -------------------------------------------------------------------------------------------------------------

Files = dict[str, int]

# Crossings for which the host waits, by file: at most these. A change may lower them, and then lowers them here. Two copies are
# those of a link that moves host memory.
NOTHING: Files = {}
DENSE: Files = {"core/exchange.py": 2}
GATHERED: Files = {"core/on_device.py": 2}
LORDO: Files = {"core/slots.py": 1, "maths/low_rank.py": 12, "core/exchange.py": 4}
NOLOCO: Files = {"core/exchange.py": 3, "codecs/device/envelope.py": 1, "codecs/dense.py": 2}
LOCAL_STEPS: dict[str, Files] = {"lordo": {"core/slots.py": 1}}
ROUNDS: dict[tuple[str, str], Files] = {
    ("demo", "gloo"): GATHERED,
    ("decoupled-diloco", "gloo"): GATHERED,
    **{(name, "gloo"): DENSE for name in ("data-parallel", "diloco", "local-sgd", "mt-dao", "streaming-diloco")},
    ("lordo", "nccl"): LORDO,
    ("lordo", "gloo"): LORDO | {"core/exchange.py": 6},
    ("noloco", "nccl"): NOLOCO,
    ("noloco", "gloo"): NOLOCO | {"core/exchange.py": 5},
}
FIRST_STEP: Files = {"core/gates.py": 4, "core/hashing.py": 3, "core/slots.py": 1, "maths/low_rank.py": 3} | DENSE | GATHERED
FIRST_STEP |= {"codecs/device/bits.py": 40}  # tables that a process copies once
ALARM: Files = {"core/hashing.py": 1, "core/replicas.py": 2}
LAUNCHES = {"demo": 650, "decoupled-diloco": 700, "lordo": 300, "noloco": 330}  # of a round; of the others 100
BARS = {"demo", "decoupled-diloco", "diloco", "mt-dao"}  # must never make the host wait over NCCL


def over(budget: Files, crossings: Iterable[Crossing]) -> Files:
    """How much more often files make the host wait than a budget allows."""
    found = Counter(c.file for c in crossings if c.blocking)
    return {file: many - budget.get(file, 0) for file, many in found.items() if many > budget.get(file, 0)}


def _budgets() -> list[Any]:
    """Every method over every backend; those that the bars are about are quick."""
    pairs = [(name, backend) for name in sorted(found()) for backend in syncs.BACKENDS]
    return [p if p[0] in BARS or p[1] == "nccl" else pytest.param(*p, marks=pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize(("name", "backend"), _budgets())
def test_the_host_waits_no_more_often_than_the_budget_says(name: str, backend: syncs.Backend) -> None:
    rows = {row.what: row for row in syncs.audit_named(name, backend=backend, alarm=name == "diloco")}
    assert rows.keys() >= {syncs.FIRST, syncs.ROUND}
    rounds = ROUNDS.get((name, backend), NOTHING)
    assert name not in BARS or sum(rounds.values()) <= (0 if backend == "nccl" else 2)
    budgets = {syncs.LOCAL: LOCAL_STEPS.get(name, NOTHING), syncs.ROUND: rounds, syncs.ALARM: Counter(rounds) + Counter(ALARM)}
    budgets[syncs.FIRST] = FIRST_STEP
    for what, row in rows.items():
        assert not (more := over(budgets[what], row.crossings)), (
            f"{name} over {backend}, {what}: {more} more in {row.crossings}"
        )
        assert row.later <= 1, "one copy that does not block carries all that was decided in a step"
    assert rows[syncs.ROUND].launches <= LAUNCHES.get(name, 100)


def test_a_look_at_a_value_goes_over_the_budget() -> None:
    """The test before can fail: a method that looks at its difference in a round is found, with its line."""

    class Looking(DiLoCo):
        def apply(self, arrived: thinwire.Arrived) -> None:
            assert self.params_finite()
            super().apply(arrived)

    seen = syncs.audit(lambda p, link: Looking(adamw(p, foreach=True), link, H=2), backend="nccl")
    assert over(ROUNDS.get(("diloco", "nccl"), NOTHING), seen[syncs.ROUND].crossings) == {"core/slots.py": 1}


def test_launches_do_not_grow_with_the_number_of_tensors() -> None:
    make: Make = lambda p, link: DeMo(p, link, codec=DCT(16) >> TopK(8) >> Sign())  # noqa: E731
    few, many = (syncs.audit(make, backend="nccl", shapes=[(32, 16), (16,)] * n)[syncs.ROUND] for n in (2, 8))
    assert sum(many.launches.values()) <= sum(few.launches.values()) + 6


class Meta(SoloLink):
    """Eight workers without memory, of which the others say what this one says."""

    @property
    def size(self) -> int:
        return 8

    def post(self, payload: Payload, op: Op) -> Ticket:
        return Done([payload.of(rank) for rank in range(self.size if op == "gather" else 1)])


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        there = any(t.is_meta for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))  # counts are on the host
        name = func.overloadpacket.__name__.removesuffix("_")
        self.names[name] += there and name not in NO_LAUNCH
        return result


def test_a_whole_round_of_demo_at_124m_parameters_looks_at_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there are none, and no memory: whatever looks at one raises. The bar is 1,500 launches."""
    monkeypatch.setattr(deferred, "Later", lambda numbers: type("Nothing", (), {"read": lambda _: [0.0] * numbers.numel()})())
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in gpt_shapes(*SIZES["124M"])]
    opt = DeMo(params, Meta(), alarm_every=0, codec=DCT(64) >> TopK(128) >> Sign())
    opt.handshake_done = True
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        with Launches() as launches:
            opt.step()
    print(f"{launches.names.total()} launches for {len(params)} tensors: {launches.names}")
    assert launches.names.total() <= 1500


# --- Gates that stay on the device ------------------------------------------------------------------------------------------

SHAPES = ((4, 3), (3,), ())
SPARSE = Identity(4) >> TopK(5) >> Sign()  # without a transform, whose last bits depend on the order of sums


METHODS: dict[str, Make] = {
    "diloco": lambda params, link: DiLoCo(adamw(params, foreach=True), link, H=3),
    "diloco, fused": lambda params, link: DiLoCo(adamw(params, fused=True), link, H=3),
    "diloco, momentum": lambda params, link: DiLoCo(torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True), link, H=3),
    "local-sgd": lambda params, link: LocalSGD(torch.optim.SGD(params, lr=0.1, foreach=True), link, H=3),
    "mt-dao": lambda params, link: MTDAO(QHAdam(params, warmup=4, reset=True), link, H=3, clip_value=1.0),
    "streaming": lambda params, link: StreamingDiLoCo(adamw(params, foreach=True), link, H=4, fragments=2, tau=1, alpha=0.5),
    "data-parallel": lambda params, link: DataParallel(adamw(params, foreach=True), link),
    "demo": lambda params, link: DeMo(params, link, lr=0.05, codec=SPARSE, phi="sign", weight_decay=0.1),
    "decoupled-diloco": lambda params, link: DecoupledDiLoCo(adamw(params, foreach=True), link, H=3, codec=SPARSE),
}
OFFLOADED: dict[str, Make] = {
    "diloco": lambda params, link: DiLoCo(adamw(params, foreach=True), link, H=3, offload="host"),
    "streaming": lambda params, link: StreamingDiLoCo(
        adamw(params, foreach=True), link, H=4, fragments=2, tau=1, alpha=0.5, offload="host"
    ),
    "decoupled-diloco": lambda params, link: DecoupledDiLoCo(
        adamw(params, foreach=True), link, H=3, outer_momentum=0.5, codec=SPARSE, offload="host"
    ),
}


def trained(
    make: Make, *, backend: syncs.Backend | None, steps: int = 10, spoil: Callable[[int, int, list[nn.Parameter]], None]
) -> list[dict[str, list[Tensor]]]:
    """Parameters and state of three workers, on the host, after training on a pretend device, or without one on the CPU."""
    pretend = backend is not None

    def work(link: Link) -> dict[str, list[Tensor]]:
        with Audit() if pretend else contextlib.nullcontext():
            torch.manual_seed(0)
            move: Callable[[Tensor], Tensor] = on_device if pretend else torch.clone
            params = [nn.Parameter(move(torch.randn(shape))) for shape in SHAPES]
            opt = make(params, link if backend is None else syncs.PretendLink(link, backend))
            chance = torch.Generator().manual_seed(1 + link.rank)
            for step in range(steps):
                for p in params:
                    p.grad = move(torch.randn(p.shape, generator=chance))
                spoil(link.rank, step, params)
                opt.step()
            opt.finish()
            state = opt.state_dict()
            entries = [e for of_p in state["state"].values() for e in of_p.values()]
            return {
                "params": [on_host(p.detach()) for p in params],
                "state": [on_host(e) for e in entries if isinstance(e, Tensor)],
            }

    return World(3, step_time=0.0).run(work)


def assert_same(some: list[dict[str, list[Tensor]]], others: list[dict[str, list[Tensor]]]) -> None:
    for a, b in zip(some, others, strict=True):
        for what in a:
            assert len(a[what]) == len(b[what])
            for x, y in zip(a[what], b[what], strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def bad_gradients(rank: int, step: int, params: list[nn.Parameter]) -> None:
    """In a first step, between rounds, right before one, and in one."""
    if (rank, step) in {(0, 0), (1, 3), (2, 5), (0, 8)}:
        assert params[step % 2].grad is not None
        params[step % 2].grad.view(-1)[0] = (math.nan, math.inf)[step % 2]


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "nccl") for name in METHODS), ("demo", "gloo"), ("decoupled-diloco", "gloo")]
)
def test_training_on_a_device_is_that_on_a_cpu_bit_for_bit(
    name: str, backend: syncs.Backend, caplog: pytest.LogCaptureFixture
) -> None:
    there = trained(METHODS[name], backend=backend, spoil=bad_gradients)
    told = sorted(r.message for r in caplog.records if "NaN or Inf" in r.message)
    caplog.clear()
    assert_same(there, trained(METHODS[name], backend=None, spoil=bad_gradients))
    assert told == sorted(r.message for r in caplog.records if "NaN or Inf" in r.message) != []


@pytest.mark.parametrize("name", OFFLOADED)
def test_what_rests_on_the_host_between_rounds_has_the_same_bits(name: str) -> None:
    there = trained(OFFLOADED[name], backend="nccl", spoil=bad_gradients)
    assert_same(there, trained(OFFLOADED[name], backend=None, spoil=bad_gradients))


def test_what_rests_on_the_host_has_the_same_bits_after_a_refused_round() -> None:
    there = trained(OFFLOADED["diloco"], backend="nccl", steps=6, spoil=bad_parameters)
    assert_same(there, trained(OFFLOADED["diloco"], backend=None, steps=6, spoil=bad_parameters))


@pytest.mark.parametrize("name", OFFLOADED)
def test_what_rests_on_the_host_travels_once_a_round_and_the_host_never_waits_for_it(name: str) -> None:
    seen = syncs.audit(OFFLOADED[name], backend="nccl")
    if name != "streaming":  # where a fragment is sent or arrives at every step
        assert not [c for c in seen[syncs.LOCAL].crossings if c.file == "core/offload.py"]
    copies = [c for c in seen[syncs.ROUND].crossings if c.file == "core/offload.py"]
    assert copies and not any(c.blocking for c in seen[syncs.ROUND].crossings)
    there, back = (sum(c.nbytes for c in copies if c.kind == kind) for kind in (TO_DEVICE, TO_HOST))
    assert there == back > 0


def test_between_rounds_anchors_and_momenta_are_on_the_host_and_so_they_are_saved() -> None:
    def work(link: Link) -> None:
        with Audit():
            params = [nn.Parameter(on_device(torch.ones(4, 3)))]
            opt = OFFLOADED["diloco"](params, syncs.PretendLink(link, "nccl"))
            other = OFFLOADED["diloco"](params, syncs.PretendLink(link, "nccl"))
            for _ in range(4):
                params[0].grad = on_device(torch.full((4, 3), 0.5))
                opt.step()
            saved = opt.state_dict()
            kept = {name: t.device.type for name, t in saved["state"][0].items() if name in ("anchor", "momentum")}
            assert kept == {"anchor": "cpu", "momentum": "cpu"}
            other.load_state_dict(saved)
            for name in kept:
                assert torch.equal(other.state[params[0]][name], saved["state"][0][name])
            assert other.state[params[0]]["anchor"].device.type == "cpu"

    World(2, step_time=0.0).run(work)


def test_offload_is_one_of_two_places_and_not_for_workers_that_come_and_go() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="offload must be one of 'none', 'host', got 'disk'"):
        DiLoCo(adamw(model.parameters()), SoloLink(), offload="disk")  # type: ignore[arg-type]
    with Audit():
        params = [on_device(torch.ones(3))]
        link = type("Coming", (SoloLink,), {"elastic": object()})()
        with pytest.raises(ConfigError, match="here workers come and go: leave it out"):
            Offload.check(params, link)


def test_tensors_to_go_back_to_are_copied_in_lists_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of several a GPU would copy one by one."""
    dtypes: list[set[torch.dtype]] = []
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: dtypes.append({t.dtype for t in (*a, *b)}) or copy(a, b))
    tensors = [torch.tensor([float(n)], dtype=(torch.float32, torch.bfloat16, torch.int64)[n % 3]) for n in range(7)]
    kept = deferred.Selected(tensors)
    assert dtypes == [{torch.float32}, {torch.bfloat16}, {torch.int64}]
    assert all(map(torch.equal, kept.before, tensors))


def test_over_gloo_a_message_of_a_gpu_is_copied_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without a GPU can tell; what arrives cannot be sent there."""
    pinned, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **how: pinned.append(pin_memory) or empty(*a, **how))
    message = torch.arange(5).as_subclass(type("OnCard", (Tensor,), {"is_cuda": True}))
    assert torch.equal(on_device_exchange._to_host(message), torch.arange(5)) and pinned == [True]
    assert torch.equal(on_device_exchange._to_host(torch.arange(5)), torch.arange(5)) and pinned == [True]


def test_clipping_by_a_factor_that_nobody_looks_at_is_that_on_a_cpu() -> None:
    make: Make = lambda params, link: MTDAO(QHAdam(params), link, H=3, clip_norm=1.0)  # noqa: E731
    there, here = (trained(make, backend=backend, spoil=bad_gradients) for backend in ("nccl", None))
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)  # on a CPU the norm is a float64


def bad_parameters(rank: int, step: int, params: list[nn.Parameter]) -> None:
    if (rank, step) == (1, 4):  # the second round comes after the sixth step
        with torch.no_grad():
            params[0].view(-1)[0] = math.nan


@pytest.mark.parametrize("name", ["diloco", "local-sgd", "decoupled-diloco"])
def test_a_refused_round_changes_nothing_and_names_the_culprit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    there = trained(METHODS[name], backend="nccl", steps=6, spoil=bad_parameters)
    told = [r.message for r in caplog.records if "refused" in r.message]
    assert len(told) == 3 and all(
        "round 2 refused on all 3 workers: NaN or Inf in the contribution of rank 1" in t for t in told
    )
    # `finish` reads it, so that the culprit has gone back and all have exchanged once more.
    assert_same(there, trained(METHODS[name], backend=None, steps=6, spoil=bad_parameters))


def test_raise_raises_on_all_workers_at_the_next_step_and_when_training_ends() -> None:
    raised: list[tuple[int, ...]] = []

    def work(link: Link, *, more: bool) -> None:
        with Audit():
            params = [nn.Parameter(on_device(torch.ones(3)))]
            opt = LocalSGD(torch.optim.SGD(params, lr=0.1), link, H=2, on_nonfinite="raise")
            for step in range(3):
                params[0].grad = on_device(torch.full((3,), math.nan if (link.rank, step) == (1, 0) else 0.5))
                try:
                    opt.step() if more or step < 2 else opt.finish()
                except NonFiniteRound as refusal:
                    raised.append((link.rank, step, *refusal.culprits))
                    return

    for more in (True, False):
        World(2).run(lambda link, more=more: work(link, more=more))
        assert sorted(raised) == [(0, 2, 1), (1, 2, 1)]
        raised.clear()


def test_what_a_device_decided_is_read_before_the_state_is_looked_at() -> None:
    with Audit():
        params = [nn.Parameter(on_device(torch.ones(3)))]
        opt = DiLoCo(adamw(params, foreach=True), SoloLink(), H=4)
        for value in (1.0, math.nan):
            params[0].grad = on_device(torch.full((3,), value))
            opt.step()
        assert float(opt.inner.state[params[0]]["step"]) == 2  # nobody knows yet
        assert float(opt.state_dict()["state"][0]["inner.step"]) == 1
        assert float(opt.inner.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("name", ["demo", "data-parallel"])
def test_a_state_saved_right_after_a_refused_round_is_that_of_a_cpu(name: str) -> None:
    """Where all workers act together on a refusal, and one of them saves alone: the host's counts are right all the same."""

    def saved(link: Link, backend: syncs.Backend | None) -> list[list[Any]]:
        found = []
        with contextlib.nullcontext() if backend is None else Audit():
            move: Callable[[Tensor], Tensor] = torch.clone if backend is None else on_device
            params = [nn.Parameter(move(torch.linspace(-1, 1, math.prod(shape)).view(shape))) for shape in SHAPES]
            opt = METHODS[name](params, link if backend is None else syncs.PretendLink(link, backend))
            for step in range(4):
                for p in params:
                    p.grad = move(torch.full(p.shape, math.nan if (link.rank, step) == (0, 1) else 0.5))
                opt.step()
                state = opt.state_dict()
                entries = [on_host(e).tolist() for of_p in state["state"].values() for e in of_p.values()]
                found.append([entries, [{k: v for k, v in g.items() if k != "foreach"} for g in state["param_groups"]]])
        return found

    here = World(2, step_time=0.0).run(lambda link: saved(link, None))
    for backend in syncs.BACKENDS:
        assert World(2, step_time=0.0).run(lambda link, backend=backend: saved(link, backend)) == here
    counts = [of_step[1][0]["thinwire_synced"] for of_step in here[0]]
    assert counts == [1, 1, 3, 4], "the second round was refused"


def test_a_local_step_and_a_dense_round_look_at_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there are none: whatever looks at one raises. What is read later has its own way to the host."""
    monkeypatch.setattr(deferred, "Later", lambda numbers: type("Nothing", (), {"read": lambda _: [0.0] * numbers.numel()})())
    params = [nn.Parameter(torch.empty(1024, 1024, device="meta")) for _ in range(3)]
    for make in (METHODS["diloco"], METHODS["mt-dao"]):
        opt = make(params, SoloLink())
        opt.handshake_done = True  # which compares hashes
        for _ in range(7):
            for p in params:
                p.grad = torch.empty_like(p)
            opt.step()
        assert opt.rounds == 2
    with pytest.raises(RuntimeError, match="meta"):
        opt.gradients_finite()


def test_the_checks_of_a_report_hold_on_the_pretend_device() -> None:
    with Audit():
        *sure, distance = report_gpu.checks(pretend_device()).values()
    assert sure == [True] * 4 and isinstance(distance, float) and distance < 1e-6


def test_counters_stay_on_the_host_whatever_the_default_device() -> None:
    torch.set_default_device("meta")
    try:
        params = [nn.Parameter(torch.ones(3, device="cpu"))]
        opt = thinwire.DeMo(params, SoloLink(), phi="adam")
        inner = QHAdam([nn.Parameter(torch.ones(2, device="cpu"))])
        for p in (*params, *inner.param_groups[0]["params"]):
            p.grad = torch.ones_like(p)
        opt.step()
        inner.step()
    finally:
        torch.set_default_device(None)
    states = [*opt.state.values(), *inner.state.values()]
    assert {t.device.type for state in states for t in state.values()} == {"cpu"}
