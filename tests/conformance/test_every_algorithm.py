"""The admission rule: every class in `thinwire.algorithms` passes all of this, in the simulator and on real processes."""

from __future__ import annotations

import inspect
import io
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import thinwire
from tests.conformance.training import (
    ALGORITHMS,
    NAMES,
    H,
    adamw,
    assert_close,
    assert_same,
    backward,
    build,
    codec_of,
    model_of,
    named,
    sgd,
    shared,
    snapshot,
    train,
)
from tests.processes import Pool
from tests.tiers import first_quick
from thinwire import Flaky, Metered, SoloLink, World
from thinwire.core.fragments import Fragments
from thinwire.core.optimizer import Algorithm
from thinwire.core.wrapper import Wrapper
from thinwire.network import ring_traffic

every = pytest.mark.parametrize("name", named())
wrappers = pytest.mark.parametrize("name", named(lambda n: issubclass(ALGORITHMS[n], Wrapper)))
periodic_and_whole = pytest.mark.parametrize(
    "name",
    [n for n, c in ALGORITHMS.items() if "H" in inspect.signature(c.__init__).parameters and not c.sends_fragments],
)
drifting = pytest.mark.parametrize("name", named(lambda n: "param" not in ALGORITHMS[n].replicated))


@every
def test_it_is_named_and_documented(name: str) -> None:
    cls = ALGORITHMS[name]
    assert name == name.lower()
    assert "_" not in name
    assert cls.__doc__, "the class says what the method does"
    assert inspect.getmodule(cls).__doc__, "the file begins with the method's equations"
    apart = cls.evaluated is not Algorithm.evaluated
    assert cls.replicated | cls.synced or apart, (
        "bit-equal somewhere after a round, or it says which of several models is shown"
    )


@every
def test_unknown_arguments_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="no_such_setting"):
        build(name, model_of().parameters(), SoloLink(), no_such_setting=1)


@every
def test_bad_policies_are_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="'keep', 'restore', got 'explode'"):
        build(name, model_of().parameters(), SoloLink(), on_abort="explode")
    with pytest.raises(ValueError, match="'skip', 'raise', got 'ignore'"):
        build(name, model_of().parameters(), SoloLink(), on_nonfinite="ignore")


# --- Workers agree ---------------------------------------------------------------------------------------------------------


@every
def test_shared_state_is_bit_equal_after_every_round_and_replicated_state_always(name: str) -> None:
    def worker(link: thinwire.Link) -> list[tuple[bool, dict]]:
        model = model_of()
        opt = build(name, model.parameters(), link, alarm_every=1)
        seen = []
        for step in range(1, 2 * H + 2):
            train(model, opt, link.rank, 1, first=step)
            seen.append((opt.pending_steps == 0, shared(opt)))
            if step in (H + 1, 2 * H + 1):  # what sends fragments is equal everywhere only then
                opt.finish()
                seen.append((opt.pending_steps == 0, shared(opt)))
        return seen

    cls = ALGORITHMS[name]
    workers = World(3).run(worker)
    rounds = 0
    for mine, *others in zip(*workers, strict=True):
        after_round, state = mine
        rounds += after_round
        for key, tensors in state.items():
            if after_round or key.split(".")[0] in cls.replicated:
                for _, other in others:
                    assert_same(tensors, other[key], f"{name}: {key}")
    assert rounds >= 2, "the test saw too few rounds"


@wrappers
def test_one_worker_equals_its_inner_optimizer(name: str) -> None:
    cls = ALGORITHMS[name]
    neutral = {"outer_lr": 1.0, "outer_momentum": 0.0, "tau": 0}  # the limit in which an outer step is plain averaging
    known = inspect.signature(cls.__init__).parameters
    alone, reference = model_of(), model_of()
    neutral = {k: v for k, v in neutral.items() if k in known}
    opt = build(name, alone.parameters(), SoloLink(), inner=adamw, codec=codec_of(name, gather=False), **neutral)
    inner = adamw(reference.parameters())
    for step in range(1, 3 * H):
        train(alone, opt, 0, 1, first=step)
        backward(reference, 0, step)
        inner.step()
        inner.zero_grad()
    assert_close(snapshot(alone), snapshot(reference))


# --- Rounds that fail ---------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("at", ["commit", "exchange"])
@pytest.mark.parametrize("on_abort", ["keep", "restore"])
def test_an_aborted_round_touches_nothing_shared_and_training_goes_on(name: str, at: str, on_abort: str) -> None:
    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), Flaky(link, {2}, at=at), on_abort=on_abort, alarm_every=1)

        def train_until(round: int) -> None:
            while opt.rounds < round:
                train(model, opt, link.rank, 1, first=opt.steps + 1)

        train_until(1)
        before = {k: v for k, v in shared(opt).items() if k.split(".")[0] in opt.replicated}
        agreed, whole = snapshot(model), opt.pending_steps == 0
        train_until(2)
        after = {k: v for k, v in shared(opt).items() if k.split(".")[0] in opt.replicated}
        drifted = snapshot(model) if whole else agreed
        aborted = opt.aborted_rounds
        train_until(3)
        if not whole:
            opt.finish()
        return before, after, agreed, drifted, aborted, snapshot(model), opt.pending_steps

    results = World(2).run(worker)
    for before, after, agreed, drifted, aborted, final, pending in results:
        assert aborted == 1
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key], f"{key} changed in a round that did not take place")
        if on_abort == "restore":
            assert_same(agreed, drifted, "restore goes back to the last agreed parameters")
        assert pending == 0
        assert not all(torch.equal(a, b) for a, b in zip(agreed, final, strict=True)), "training went on"
        assert_same(final, results[0][5], "the next round brings all workers together")


@every
@pytest.mark.parametrize("bad", first_quick([float("nan"), float("inf")]))
def test_a_nan_in_one_gradient_poisons_nobody(name: str, bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """The bar: NaN at step 20 of 40 on one worker; all end finite and equal, and the log names the rank."""

    def worker(link: thinwire.Link) -> list:
        model = model_of()
        opt = build(name, model.parameters(), link, alarm_every=1)
        for step in range(1, 41):
            backward(model, link.rank, step)
            if step == 20 and link.rank == 1:
                model.first.weight.grad[2, 3] = bad
            opt.step()
            opt.zero_grad()
        opt.finish()
        return snapshot(model)

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        first, *others = World(3).run(worker)
    for params in (first, *others):
        assert all(bool(torch.isfinite(p).all()) for p in params)
        if ALGORITHMS[name].synced | ALGORITHMS[name].replicated:
            assert_same(first, params)
    assert any("rank 1" in r.getMessage() and "NaN or Inf" in r.getMessage() for r in caplog.records)
    assert not any("rank 0" in r.getMessage() or "rank 2" in r.getMessage() for r in caplog.records)


@drifting
def test_a_worker_with_nan_is_named_refused_and_restored(name: str) -> None:
    """A worker whose parameters are NaN already: nobody averages them in, and it comes back by itself."""

    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), link, alarm_every=1)
        train(model, opt, link.rank, H)
        if link.rank == 1:
            with torch.no_grad():
                model.first.weight.fill_(float("nan"))
                for tensors in opt.inner_state().values():
                    tensors[0].fill_(float("inf"))
        opt.zero_grad()
        for step in range(H + 1, 3 * H + 1):
            backward(model, link.rank, step)
            opt.step()
            opt.zero_grad()
        opt.finish()
        return opt.aborted_rounds, snapshot(model), [t for tensors in opt.inner_state().values() for t in tensors]

    cls, results = ALGORITHMS[name], World(3).run(worker)
    aborted = [aborted for aborted, *_ in results]
    if cls.in_pairs:
        assert aborted[1] == 1 and sum(aborted) <= 2, "refused by the bad worker and the one it met, once"
    else:
        assert aborted == [1, 1, 1], "refused on ALL workers, once"
    for _, params, moments in results:
        assert all(bool(torch.isfinite(t).all()) for t in moments), "the inner optimizer's state is finite again too"
        assert all(bool(torch.isfinite(p).all()) for p in params)
        if cls.synced | cls.replicated:
            assert_same(params, results[0][1])


@every
def test_on_nonfinite_raise_stops_all_workers_together_with_the_culprit_named(name: str) -> None:
    def worker(link: thinwire.Link) -> tuple:
        model, refused = model_of(), []
        opt = build(name, model.parameters(), link, on_nonfinite="raise")
        for step in range(1, 2 * H + 1):
            backward(model, link.rank, step)
            if link.rank == 1 and step == 2:
                model.first.weight.grad[0, 0] = float("nan")
            try:
                opt.step()
            except thinwire.errors.NonFiniteRound as refusal:
                refused.append((str(refusal), refusal.culprits))
            opt.zero_grad()
        return refused, opt.aborted_rounds

    for refused, _ in World(3).run(worker):
        ((message, culprits),) = refused  # once: those who catch it may go on
        assert culprits == (1,)
        assert "NaN or Inf in the contribution of rank 1" in message
        assert ("; all 3 workers stop" if ALGORITHMS[name].in_pairs else "refused on all 3 workers: ") in message


# --- Training that diverges ------------------------------------------------------------------------------------------------


@every
def test_workers_that_all_lose_their_numbers_stop_together(name: str) -> None:
    """Nothing is left to restore them from: the parameters of all are NaN."""

    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), link)
        train(model, opt, link.rank, H)
        with torch.no_grad():
            for p in opt.params():  # a fragment that is in flight would restore some
                p.fill_(float("nan"))
        for step in range(H + 1, 3 * H + 1):
            try:
                train(model, opt, link.rank, 1, first=step)
            except thinwire.errors.TrainingDiverged as error:
                return step, str(error), error.since, opt.rounds
        return 0, "went on", 0, 0

    results = World(2).run(worker)
    assert len({(step, since, rounds) for step, _, since, rounds in results}) == 1, "at the same step"
    for step, message, since, _ in results:
        assert H < since <= step
        assert f"training has diverged at step {since}: the " in message
        assert "in the contribution of rank 0, rank 1" in message or name == "noloco"
        assert "most likely the learning rate is too high (lr is 0.0" in message
        assert "or the data hold NaN or Inf" in message


def _spoil(opt: Algorithm, model: torch.nn.Module) -> None:
    """Make this worker's next contribution bad: its gradient where that is sent, else its parameters."""
    with torch.no_grad():
        if "param" in opt.replicated:
            model.first.weight.grad[0, 0] = float("nan")
        else:
            for p in opt.params():  # each in a fragment of its own, where there are any
                p.fill_(float("nan"))


@pytest.mark.parametrize(
    ("name", "size"),
    # Of methods in pairs only the two of a pair know of a refusal: see tests/algorithms/test_noloco.py.
    [(name, size) for name in NAMES for size in (1, 3) if size == 1 or not ALGORITHMS[name].in_pairs],
)
def test_refusals_in_a_row_end_in_the_same_error_on_all_workers(name: str, size: int) -> None:
    bad = size - 1

    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        # With "restore" all methods have parameters to go back to: without, the round after a refused one resyncs that worker.
        opt = build(name, model.parameters(), link, give_up_after=3, on_abort="restore", inner=adamw)
        for step in range(1, 10 * H):
            backward(model, link.rank, step)
            if link.rank == bad and step > 1:  # not before the handshake has compared starting values
                _spoil(opt, model)
            try:
                opt.step()
            except thinwire.errors.TrainingDiverged as error:
                return str(error), opt.rounds, opt.aborted_rounds
            opt.zero_grad()
        return "went on", opt.rounds, opt.aborted_rounds

    results = World(size).run(worker)
    assert len(set(results)) == 1, "all at the same round, with the same words"
    message, _, aborted = results[0]
    assert "3 rounds in a row were refused" in message
    assert aborted == 3


@pytest.mark.parametrize("name", first_quick(NAMES))
def test_zero_never_gives_up_and_a_wrong_number_is_refused(name: str) -> None:
    def worker(link: thinwire.Link) -> int:
        model = model_of()
        opt = build(name, model.parameters(), link, give_up_after=0)
        for step in range(1, 40 + 1):
            backward(model, link.rank, step)
            if link.rank == 1 and step > 1:
                _spoil(opt, model)
            opt.step()
            opt.zero_grad()
        return opt.aborted_rounds

    assert max(World(3).run(worker)) >= 5
    with pytest.raises(ValueError, match="give_up_after must be a whole number of at least 0, got -1"):
        build(name, model_of().parameters(), SoloLink(), give_up_after=-1)


@every
def test_workers_give_up_after_the_same_number(name: str) -> None:
    def worker(link: thinwire.Link) -> str:
        model = model_of()
        opt = build(name, model.parameters(), link, give_up_after=5 + link.rank)
        with pytest.raises(thinwire.errors.FingerprintMismatch) as refusal:
            train(model, opt, link.rank, 1)
        return str(refusal.value)

    for message in World(2).run(worker):
        assert "give_up_after is 5 on rank 0 and 6 on rank 1" in message


@every
def test_a_grad_scaler_that_starts_too_high_comes_down_on_all_workers(name: str) -> None:
    """It finds an Inf in the gradients of all workers at its first steps: no sign of training that has diverged."""

    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), link)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for step in range(1, 20 + 1):
            loss = model(torch.ones(2, 5), step).square().mean() * 2.0**14  # overflows at first
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        return scaler.get_scale(), snapshot(model)

    for scale, params in World(2).run(worker):
        assert scale <= 2.0**118
        assert all(bool(torch.isfinite(p).all()) for p in params)


# --- Settings that are no numbers ----------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize(
    ("setting", "value"), [("lr", float("nan")), ("lr", float("inf")), ("lr", torch.tensor(float("nan"))),
                           ("weight_decay", float("inf")), ("weight_decay", float("-inf")), ("betas", (0.9, float("nan")))]
)  # fmt: skip
def test_a_setting_that_is_not_finite_is_refused_before_anything_moves(name: str, setting: str, value: object) -> None:
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    if setting not in opt.param_groups[0]:
        assert (name, setting) in {("sign-mean", "weight_decay"), ("sign-mean", "betas")}, "only docs/extending.md's has none"
        return
    train(model, opt, 0, H + 1)
    before, state, counters = snapshot(model), _copied(opt.state_dict()["state"]), (opt.steps, opt.rounds)
    good = opt.param_groups[0][setting]
    opt.param_groups[0][setting] = value
    for _ in range(2):
        with pytest.raises(
            thinwire.errors.ConfigError, match=rf"^{setting} must be finite, got .*(nan|inf).* in parameter group 0"
        ):
            train(model, opt, 0, 1, first=H + 2)
        opt.zero_grad()
    assert (opt.steps, opt.rounds) == counters
    assert_same(before, snapshot(model))
    _assert_same_state(state, opt.state_dict()["state"])
    opt.param_groups[0][setting] = good
    train(model, opt, 0, H, first=H + 2)
    assert all(bool(torch.isfinite(p).all()) for p in snapshot(model))


@every
def test_a_limit_that_is_infinite_is_no_harm(name: str) -> None:
    """Optimizers that choose their own step size have settings such as growth_rate=inf."""
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    opt.param_groups[0]["growth_rate"] = float("inf")
    train(model, opt, 0, 2)
    assert opt.steps == 2


def _copied(state: dict) -> dict:
    return {i: {k: torch.as_tensor(v).clone() for k, v in entries.items()} for i, entries in state.items()}


def _assert_same_state(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for index in a:
        assert a[index].keys() == b[index].keys()
        for key, value in a[index].items():
            assert torch.equal(value, torch.as_tensor(b[index][key])), (index, key)


@periodic_and_whole
def test_a_schedule_of_fragments_is_refused_by_what_sends_the_model_whole(name: str) -> None:
    with pytest.raises(ValueError, match="sends the model whole, got a schedule of fragments"):
        build(name, model_of().parameters(), SoloLink(), H=thinwire.Staggered(8, fragments=4))


# --- Resuming ----------------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("stop", first_quick([H + 1, H, 2 * H - 1]), ids=["mid-interval", "at a round", "just before a round"])
@pytest.mark.parametrize("inner", first_quick([adamw, sgd]))
def test_state_dict_resumes_bit_for_bit(name: str, stop: int, inner) -> None:
    def straight(link: thinwire.Link) -> list:
        model = model_of()
        opt = build(name, model.parameters(), link, inner=inner)
        train(model, opt, link.rank, 3 * H)
        return snapshot(model)

    def resumed(link: thinwire.Link) -> list:
        model = model_of()
        opt = build(name, model.parameters(), link, inner=inner)
        train(model, opt, link.rank, stop)
        disk = io.BytesIO()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, disk)
        disk.seek(0)
        saved = torch.load(disk, weights_only=True)
        model = model_of(seed=99)
        model.load_state_dict(saved["model"])
        opt = build(name, model.parameters(), link, inner=inner)
        opt.load_state_dict(saved["opt"])
        train(model, opt, link.rank, 3 * H - stop, first=stop + 1)
        return snapshot(model)

    for a, b in zip(World(2).run(straight), World(2).run(resumed), strict=True):
        assert_same(a, b)


@every
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.parametrize("stop", [0, H + 1], ids=["before the first step", "mid-interval"])
def test_resumes_through_stock_torch_checkpointing(name: str, stop: int, tmp_path: Path) -> None:
    """torch.distributed.checkpoint fills only what the reader has, and steps an optimizer whose state is empty."""
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    train(model, opt, 0, stop)
    state = {"model": model.state_dict(), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert opt.steps == stop, "saving must not take steps"

    other = model_of(seed=99)
    other_opt = build(name, other.parameters(), SoloLink())
    state = {"model": other.state_dict(), "opt": get_optimizer_state_dict(other, other_opt)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, other_opt, optim_state_dict=state["opt"])
    assert other_opt.steps == stop
    for m, o in ((model, opt), (other, other_opt)):
        train(m, o, 0, 2 * H, first=stop + 1)
    assert_same(snapshot(model), snapshot(other))


@every
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name: str) -> None:
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    train(model, opt, 0, H + 1)
    before, state = snapshot(model), opt.state_dict()
    bigger = torch.nn.Linear(4, 4)
    other = build(name, bigger.parameters(), SoloLink()).state_dict()
    with pytest.raises(thinwire.errors.CheckpointError, match="groups of"):
        opt.load_state_dict(other)
    assert_same(before, snapshot(model))
    again = opt.state_dict()
    assert again["param_groups"] == state["param_groups"]
    for index in state["state"]:
        for key, value in state["state"][index].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again["state"][index][key])), key


# --- Habitats ----------------------------------------------------------------------------------------------------------------


def _train_somewhere(link: thinwire.Link, name: str, gather: bool, dtype: torch.dtype, steps: int) -> list:
    torch.manual_seed(link.rank)
    model = model_of(dtype=dtype)
    opt = build(name, model.parameters(), link, codec=codec_of(name, gather), alarm_every=1)
    train(model, opt, link.rank, steps)
    return snapshot(model)


@every
@pytest.mark.parametrize("size", first_quick([2, 4]))
@pytest.mark.parametrize("dtype", first_quick([torch.float32, torch.bfloat16]), ids=["fp32", "bf16"])
def test_simulator_equals_real_processes(name: str, size: int, dtype: torch.dtype, pool: Pool) -> None:
    """Bit for bit where messages are gathered; up to the order of a ring's additions where they are reduced."""
    for gather in (True, False):
        args = (name, gather, dtype, 2 * H + 1)
        real = pool.run(_train_somewhere, size, *args)
        simulated = World(size).run(lambda link, args=args: _train_somewhere(link, *args))
        for a, b in zip(real, simulated, strict=True):
            if gather or size == 2:
                assert_same(a, b, f"{name} with {size} workers")
            else:
                assert_close(a, b, 1e-6 if dtype == torch.float32 else 2e-2)


def _bytes_of_rounds(link: thinwire.Link, name: str, gather: bool) -> tuple[list, list[int]]:
    model, metered = model_of(), Metered(link)
    opt = build(name, model.parameters(), metered, codec=codec_of(name, gather))
    train(model, opt, link.rank, 2 * H)
    rounds = [e for e in metered.meter.recent if e.purpose == "round"]
    if isinstance(opt, Fragments):  # fragments in the order of the schedule, which together make the message
        sizes = opt.message_sizes()
        assert sum(sizes) == opt.message_nbytes()
        expected = [sizes[p] for step in range(1, 2 * H + 1) for p in opt.schedule.due(step)]
        return rounds, expected[: len(rounds)]
    return rounds, [opt.message_nbytes()] * len(rounds)


@every
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("size", first_quick([2, 1, 4]))
def test_metered_bytes_equal_the_formula(name: str, size: int, gather: bool, pool: Pool) -> None:
    habitats = [
        World(size).run(lambda link: _bytes_of_rounds(link, name, gather)),
        pool.run(_bytes_of_rounds, size, name, gather),
    ]
    for workers in habitats:
        for rank, (rounds, expected) in enumerate(workers):
            assert len(rounds) >= 2
            for exchange, nbytes in zip(rounds, expected, strict=True):
                assert exchange.payload == nbytes
                if exchange.op != "deal":  # of parts that differ: tests/test_owners.py
                    assert (exchange.sent, exchange.received) == ring_traffic(exchange.op, [nbytes] * size, rank)


# --- An optimizer like any other -----------------------------------------------------------------------------------------


@every
def test_learning_rate_schedulers_drive_it(name: str) -> None:
    model, frozen_model = model_of(), model_of()
    opt = build(name, model.parameters(), SoloLink())
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.1)
    start = opt.param_groups[0]["lr"]
    for step in range(1, 5):
        train(model, opt, 0, 1, first=step)
        scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(start * 0.01)
    still = build(name, frozen_model.parameters(), SoloLink())
    torch.optim.lr_scheduler.LambdaLR(still, lambda _: 0.0)
    before = snapshot(frozen_model)
    train(frozen_model, still, 0, 2 * H)
    assert_close(before, snapshot(frozen_model), 1e-7)


@every
def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(name: str) -> None:
    with_closure, without = model_of(), model_of()
    opt_a, opt_b = (build(name, m.parameters(), SoloLink()) for m in (with_closure, without))
    calls = []
    for step in range(1, H + 1):

        def closure(step: int = step) -> torch.Tensor:
            calls.append(step)
            opt_a.zero_grad()
            return backward(with_closure, 0, step)

        with torch.no_grad():
            loss = opt_a.step(closure)
        assert torch.is_tensor(loss)
        assert loss > 0
        train(without, opt_b, 0, 1, first=step)
    assert calls == list(range(1, H + 1))
    assert_same(snapshot(with_closure), snapshot(without))


@every
def test_zero_grad(name: str) -> None:
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    backward(model, 0, 2)
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    backward(model, 0, 2)
    opt.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@every
def test_grad_scaler_with_an_overflow_on_one_worker_does_not_hang(name: str) -> None:
    """The scaler of one worker finds an Inf; if it skipped step(), all others would wait for ever."""

    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), link, alarm_every=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(1, 2 * H + 1):
            x_scale = 1e38 if step == 2 and link.rank == 1 else 1.0
            loss = (model(torch.ones(2, 5) * 0.1, step)).square().mean()
            scaler.scale(loss * x_scale).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        opt.finish()
        return snapshot(model), scaler.get_scale(), opt.steps

    results = World(2).run(worker)
    assert results[0][1] == 2.0**10
    assert results[1][1] == 2.0**9, "only the worker that overflowed backs off"
    for params, _, steps in results:
        assert steps == 2 * H
        assert all(bool(torch.isfinite(p).all()) for p in params)
        assert_same(params, results[0][0])


@every
def test_grad_scaler_is_transparent(name: str) -> None:
    scaled, plain = model_of(), model_of()
    opt_a, opt_b = (build(name, m.parameters(), SoloLink()) for m in (scaled, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(1, H + 1):
        for model, opt in ((scaled, opt_a), (plain, opt_b)):
            loss = model(torch.full((3, 5), 0.3), step).square().mean()
            if model is scaled:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
            else:
                loss.backward()
                opt.step()
            opt.zero_grad()
    assert_close(snapshot(scaled), snapshot(plain))


@every
def test_a_second_parameter_group_takes_part(name: str) -> None:
    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, [{"params": model.first.parameters()}], link)
        train_partly = [model.gain, model.second.weight]
        backward(model, link.rank, 1)
        opt.step()
        opt.zero_grad()
        model.zero_grad()
        opt.add_param_group({"params": train_partly, "lr": 0.005})
        start = [p.detach().clone() for p in train_partly]
        train(model, opt, link.rank, 2 * H - 1, first=2)
        opt.finish()
        return [p.detach().clone() for p in train_partly], start, [g["lr"] for g in opt.param_groups]

    (a, start, rates), (b, _, _) = World(2).run(worker)
    assert_same(a, b)
    assert not torch.equal(a[0], start[0]), "the added group is trained"
    assert rates[1] == 0.005


def _add_and_skip(link: thinwire.Link, name: str, at: int) -> tuple[list, int]:
    """Add a group before step `at`, at which one worker has a NaN in the gradient of a parameter that came with it."""
    model = model_of()
    added = [model.gain, model.second.weight, model.sometimes]
    opt = build(name, [{"params": list(model.first.parameters())}], link, alarm_every=1)
    for step in range(1, 4 * H):
        if step == at:
            opt.add_param_group({"params": added, "lr": 0.005})
        backward(model, link.rank, step)
        if step < at:
            for p in added:
                p.grad = None
        if step == at and link.rank == 1:
            model.second.weight.grad[0, 0] = float("nan")
        opt.step()
        opt.zero_grad()
        model.zero_grad()
    opt.finish()
    return snapshot(model), opt.message_nbytes()


@pytest.mark.parametrize("name", first_quick(NAMES))
def test_a_group_may_be_added_before_a_step_that_is_skipped(name: str, pool: Pool) -> None:
    for at in range(1, 2 * H + 1):
        simulated = World(2).run(lambda link, at=at: _add_and_skip(link, name, at))
        assert_same(simulated[0][0], simulated[1][0])
        assert all(bool(torch.isfinite(p).all()) for p in simulated[0][0])
    real = pool.run(_add_and_skip, 2, name, 2 * H)  # just before a round
    assert_same(real[0][0], real[1][0])
    assert_close(real[0][0], simulated[0][0])
    assert real[0][1] == real[1][1] == simulated[0][1]


@every
def test_a_refused_group_leaves_nothing_behind(name: str) -> None:
    model = model_of()
    opt = build(name, [{"params": list(model.first.parameters())}], SoloLink())
    train(model, opt, 0, H + 1)
    inner = getattr(opt, "inner", opt)
    before = [list(g["params"]) for g in opt.param_groups], list(opt._active), list(opt._frozen), list(opt.state)
    inside, state = list(inner.state), _copied(opt.state_dict()["state"])
    complex_one = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    known = model.first.weight
    for params in ([model.gain, complex_one], [model.frozen, model.gain, known]):
        with pytest.raises(ValueError, match=r"real floating-point|more than one parameter group"):
            opt.add_param_group({"params": params})
    assert before == ([list(g["params"]) for g in opt.param_groups], list(opt._active), list(opt._frozen), list(opt.state))
    assert [list(g["params"]) for g in inner.param_groups] == before[0]
    assert list(inner.state) == inside
    _assert_same_state(state, opt.state_dict()["state"])
    for p in (model.second.weight, model.gain, model.sometimes):
        p.requires_grad_(False)
    train(model, opt, 0, H, first=H + 2)


@wrappers
def test_an_eps_that_is_zero_in_float16_is_refused(name: str) -> None:
    """With state in the parameters' float16, AdamW's 1e-8 would divide 0 by 0; QHAdam's state is float32."""

    def made(params: object, inner: type[torch.optim.Optimizer], **settings: float) -> Algorithm:
        return build(name, params, SoloLink(), inner=lambda p: inner(p, lr=1e-3, **settings))

    message = r"AdamW has eps=1e-08, which is 0 in float16: it would divide by zero"
    with pytest.raises(thinwire.errors.ConfigError, match=message):
        made(model_of(dtype=torch.float16).parameters(), torch.optim.AdamW)
    for inner in (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        with pytest.raises(thinwire.errors.ConfigError, match="which is 0 in float16"):
            made(model_of(dtype=torch.float16).parameters(), inner)
    opt = made(model_of().parameters(), torch.optim.AdamW)
    half = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    with pytest.raises(thinwire.errors.ConfigError, match=message):
        opt.add_param_group({"params": [half]})
    assert len(opt.param_groups) == 1 and half not in opt.inner.state
    fitting = [(torch.float16, torch.optim.AdamW, {"eps": 1e-4}), (torch.bfloat16, torch.optim.AdamW, {})]
    fitting += [(torch.float16, torch.optim.SGD, {}), (torch.float16, thinwire.optim.QHAdam, {})]
    for dtype, inner, settings in fitting:
        model = model_of(dtype=dtype)
        opt = made(model.parameters(), inner, **settings)
        for _ in range(2 * H):
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            opt.step()
        assert all(bool(torch.isfinite(p).all()) for p in snapshot(model)), (dtype, inner)


@every
def test_unfreezing_a_parameter_behind_its_back_is_refused(name: str) -> None:
    model = model_of()
    opt = build(name, model.parameters(), SoloLink())
    model.frozen.requires_grad_(True)
    with pytest.raises(ValueError, match="was frozen when"):
        train(model, opt, 0, 1)


@every
def test_converges_on_a_noisy_quadratic(name: str) -> None:
    """200 steps, 4 workers: at most a twentieth of the distance to the optimum is left."""
    target = torch.linspace(-1, 1, 30)

    def worker(link: thinwire.Link) -> float:
        x = torch.nn.Parameter(torch.full((30,), 2.0))
        known = inspect.signature(ALGORITHMS[name].__init__).parameters
        own = {k: v for k, v in {"lr": 0.02, "betas": (0.9, 0.95)}.items() if k in known}
        opt = build(name, [x], link, inner=lambda p: torch.optim.SGD(p, lr=0.05), **own)
        noise = torch.Generator().manual_seed(link.rank)
        for _ in range(200):
            x.grad = (x.detach() - target) + 0.3 * torch.randn(30, generator=noise)
            opt.step()
        opt.finish()
        return float((x.detach() - target).norm())

    start = float((torch.full((30,), 2.0) - target).norm())
    distances = World(4).run(worker)
    assert max(distances) < start / 20


@every
def test_finish_brings_the_last_local_steps_in_once(name: str) -> None:
    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), link)
        train(model, opt, link.rank, H + 2)
        pending, rounds = opt.pending_steps, opt.rounds
        opt.finish()
        once = snapshot(model), opt.rounds
        opt.finish()
        return pending, rounds, once, snapshot(model), opt.rounds

    results = World(2).run(worker)
    for pending, rounds, (params, after), again, final in results:
        assert (after > rounds) == (pending > 0)
        assert final == after, "a second finish() does nothing"
        assert_same(params, again)
        assert_same(params, results[0][2][0], "all workers end with the same model")


@every
def test_shared_model_shows_what_all_agreed_on_and_puts_it_back(name: str) -> None:
    def worker(link: thinwire.Link) -> tuple:
        model = model_of()
        opt = build(name, model.parameters(), link)
        kept = opt.agreed() is not None or "param" in opt.replicated  # else all agree right after a round only
        train(model, opt, link.rank, H + 2 if kept else H)
        mine = snapshot(model)
        with opt.shared_model():
            agreed = snapshot(model)
        return mine, agreed, snapshot(model)

    results = World(2).run(worker)
    for mine, agreed, after in results:
        assert_same(mine, after)
        assert_same(agreed, results[0][1])


@every
def test_repr_shows_the_settings(name: str) -> None:
    opt: Algorithm = build(name, model_of().parameters(), SoloLink())
    assert repr(opt).startswith(type(opt).__name__ + "(")
