"""`average` against a mean by hand, on links of every kind, and the three gates: each lets the good pass and names the bad."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.processes import Pool
from thinwire.codecs import WIRE_DTYPES, Dense
from thinwire.codecs.wire import HEADER_NBYTES, PART_NBYTES
from thinwire.core.average import average
from thinwire.core.exchange import post
from thinwire.core.gates import handshake
from thinwire.core.hashing import hash_tensors
from thinwire.core.outgoing import Outgoing
from thinwire.core.replicas import compare_replicas
from thinwire.errors import Diverged, FingerprintMismatch, NonFiniteRound
from thinwire.links import Link, LinkDecorator, Metered, SoloLink, Ticket
from thinwire.network import Network, Op
from thinwire.payload import Payload
from thinwire.sim import World

calm = settings(deadline=None, database=None, derandomize=True)
both_ways = pytest.mark.parametrize("gather", [False, True], ids=["mean", "gather"])
SHAPES = [(), (0,), (7,), (3, 5), (2, 1, 3)]


def contribution(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(s, generator=g).to(dtype) for s in SHAPES]


def mean_in_rank_order(workers: list[list[Tensor]]) -> list[Tensor]:
    means = []
    for each in zip(*workers, strict=True):
        total = each[0].clone()
        for t in each[1:]:
            total += t
        means.append(total / len(workers))
    return means


def error_of(call: Callable[[], Any]) -> Exception | None:
    """What it raised, so that a test can look at it on every worker."""
    try:
        call()
    except Exception as error:
        return error
    return None


# --- The mean --------------------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mean_of_one_is_itself(gather: bool, dtype: torch.dtype) -> None:
    mine = contribution(0, dtype)
    wire = "fp64" if dtype == torch.float64 else "fp32"
    mean, sent = average(SoloLink(), Dense(wire, gather=gather), mine)
    assert sent == []
    for a, b in zip(mean, mine, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@both_ways
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_is_the_mean_of_all_and_bit_equal_on_all(size: int, gather: bool) -> None:
    results = World(size).run(lambda link: average(link, Dense(gather=gather), contribution(link.rank))[0])
    all_of_them = [contribution(r) for r in range(size)]
    by_hand = mean_in_rank_order(all_of_them)
    for i, m in enumerate(by_hand):
        torch.testing.assert_close(m, torch.stack([w[i] for w in all_of_them]).mean(0))
    for mean in results:
        for a, b in zip(mean, by_hand, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)


def _average_here(link: Link, gather: bool) -> tuple[list[Tensor], list[Tensor]]:
    return average(link, Dense("bf16", gather=gather), contribution(link.rank), want_sent=True)


@both_ways
def test_on_real_processes_too(gather: bool, pool: Pool) -> None:
    simulated = World(3).run(lambda link: _average_here(link, gather))
    real = pool.run(_average_here, 3, gather)
    for (mean, sent), (sim_mean, sim_sent) in zip(real, simulated, strict=True):
        for m, s, first in zip(mean, sim_mean, real[0][0], strict=True):
            assert torch.equal(m, first), "bit-equal on all workers"
            if gather:
                assert torch.equal(m, s), "gathered sums go in rank order everywhere"
            else:
                torch.testing.assert_close(m, s, rtol=2e-2, atol=2e-2)
        for a, b in zip(sent, sim_sent, strict=True):
            assert torch.equal(a, b)


@both_ways
@pytest.mark.parametrize("name", list(WIRE_DTYPES))
def test_what_was_sent_is_what_the_others_decode(name: str, gather: bool) -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        return average(link, Dense(name, gather=gather), contribution(link.rank), want_sent=True)

    results = World(3).run(worker)
    for rank, (_, sent) in enumerate(results):
        for s, t in zip(sent, contribution(rank), strict=True):
            assert torch.equal(s, t.to(WIRE_DTYPES[name]).to(s.dtype))
    if gather or name in ("fp32", "fp64"):  # else the sum is rounded in the wire's dtype as well
        for mean, _ in results:
            for a, b in zip(mean, mean_in_rank_order([sent for _, sent in results]), strict=True):
                assert torch.equal(a, b)


@both_ways
def test_sent_mean_and_inputs_share_no_memory(gather: bool) -> None:
    """Whoever writes into one of them (error feedback does) must not change the others."""
    mine = contribution(0)
    mean, sent = average(SoloLink(), Dense(gather=gather), mine, want_sent=True)
    for t in sent:
        t.fill_(77)
    for a, b in zip(mean, contribution(0), strict=True):
        assert torch.equal(a, b)
    for t in mean:
        t.fill_(88)
    for a, b in zip(mine, contribution(0), strict=True):
        assert torch.equal(a, b)
    assert all(bool((t == 77).all()) for t in sent)


@both_ways
def test_inputs_are_not_changed_and_workers_own_their_means(gather: bool) -> None:
    def worker(link: Link) -> tuple[list[Tensor], list[Tensor]]:
        mine = contribution(link.rank)
        mean, _ = average(link, Dense(gather=gather), mine)
        for t in mean:
            t.fill_(link.rank)
        average(link, Dense(), mine)  # everyone has written by now
        return mine, mean

    for rank, (mine, mean) in enumerate(World(3).run(worker)):
        assert all(torch.equal(a, b) for a, b in zip(mine, contribution(rank), strict=True))
        assert all(bool((t == rank).all()) for t in mean), "another worker wrote into this worker's mean"


@both_ways
@pytest.mark.parametrize("tensors", [0, 1, 40])
def test_one_exchange_whatever_the_number_of_tensors(tensors: int, gather: bool) -> None:
    def worker(link: Link) -> tuple[int, list[int]]:
        metered = Metered(link)
        average(metered, Dense(gather=gather), [torch.ones(3)] * tensors)
        return metered.meter.totals.rounds, [e.payload for e in metered.meter.recent]

    for rounds, payloads in World(2).run(worker):
        assert rounds == len(payloads) == 1
        assert payloads[0] - 4 * 3 * tensors == (HEADER_NBYTES + PART_NBYTES if gather else 8), (
            "the values, and a header or one status number per worker"
        )


@both_ways
def test_any_layout_and_mixed_dtypes(gather: bool) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    odd = [base.T, base[:, ::2], torch.arange(3).to(torch.bfloat16), torch.tensor(2.5, dtype=torch.float64)]
    mean, sent = average(SoloLink(), Dense(gather=gather), odd, want_sent=True)
    for a, s, t in zip(mean, sent, odd, strict=True):
        assert torch.equal(a, t.float())
        assert torch.equal(s, t.float())


@both_ways
def test_parameters_may_be_averaged_as_they_are(gather: bool) -> None:
    """A contribution is a value: whether it requires a gradient does not matter, and the mean does not."""
    mean, sent = average(SoloLink(), Dense(gather=gather), [torch.nn.Parameter(torch.ones(3))], want_sent=True)
    assert mean[0].tolist() == sent[0].tolist() == [1, 1, 1]
    assert not mean[0].requires_grad


# --- Posting now, waiting later ----------------------------------------------------------------------------------------------


@both_ways
def test_a_posted_average_hides_behind_computing(gather: bool) -> None:
    """4 kB at 1 kB/s take seconds; steps taken meanwhile are free."""

    def worker(link: Link, steps: int) -> float:
        pending = post(link, Outgoing([torch.full((1000,), float(link.rank))], Dense(gather=gather)))
        for _ in range(steps):
            link.tick()
        mean = pending.wait().mean
        assert bool((mean[0] == 0.5).all())
        return link.now()

    network = Network(bandwidth=8e3, latency=0.1)
    (alone, _), (hidden, _), (longer, _) = (
        World(2, network=network, step_time=0.5).run(lambda link, s=s: worker(link, s)) for s in (0, 4, 40)
    )
    assert alone > 4 * 0.5, "the test needs a wire that is slower than four steps"
    assert hidden == alone
    assert longer == 40 * 0.5


@both_ways
def test_inputs_may_change_once_posted(gather: bool) -> None:
    def worker(link: Link) -> list[Tensor]:
        mine = contribution(link.rank)
        pending = post(link, Outgoing(mine, Dense(gather=gather), want_sent=True))
        for t in mine:
            t.fill_(math.nan)
        arrived = pending.wait()
        mean, sent = arrived.mean, arrived.sent
        assert all(torch.equal(a, b) for a, b in zip(sent, contribution(link.rank), strict=True))
        return mean

    expected = mean_in_rank_order([contribution(0), contribution(1)])
    for mean in World(2).run(worker):
        assert all(torch.equal(a, b) for a, b in zip(mean, expected, strict=True))


def _two_at_once(link: Link, gather: bool) -> list[float]:
    codec = Dense(gather=gather)
    first = post(link, Outgoing([torch.tensor([1.0 + link.rank])], codec), round=1)
    second = post(link, Outgoing([torch.tensor([10.0 * link.rank])] * 2, codec), round=2)
    b, a = second.wait().mean, first.wait().mean  # in any order
    return [float(t) for t in (*a, *b)]


@both_ways
def test_two_averages_may_be_under_way(gather: bool, pool: Pool) -> None:
    expected = [[2.0, 10.0, 10.0]] * 3
    assert World(3).run(lambda link: _two_at_once(link, gather)) == expected
    assert pool.run(_two_at_once, 3, gather) == expected


# --- The finite gate ---------------------------------------------------------------------------------------------------------


def refused(size: int, codec: Dense, contribute: Callable[[int], Tensor]) -> list[NonFiniteRound]:
    """Average something bad, then something good; returns the error of every worker."""

    def worker(link: Link) -> tuple[Exception | None, list[Tensor]]:
        mine = [torch.ones(3), contribute(link.rank)]
        error = error_of(lambda: average(link, codec, mine, round=5))
        return error, average(link, codec, contribution(link.rank))[0]

    results = World(size).run(worker)
    for _, mean in results:
        assert all(torch.equal(a, b) for a, b in zip(mean, results[0][1], strict=True)), "the next round is good"
    return [error for error, _ in results]


@both_ways
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("culprits", [(0,), (2,), (1, 3), (0, 1, 2, 3)])
def test_what_is_not_finite_is_refused_on_all_workers_by_name(gather: bool, bad: float, culprits: tuple[int, ...]) -> None:
    def contribute(rank: int) -> Tensor:
        t = torch.full((2, 4), float(rank))
        t[1, rank] = bad if rank in culprits else 0.0
        return t

    errors = refused(4, Dense(gather=gather), contribute)
    assert all(isinstance(e, NonFiniteRound) for e in errors)
    names = ", ".join(f"rank {r}" for r in culprits)
    for error in errors:
        assert error.culprits == culprits
        assert f"NaN or Inf in the contribution of {names}" in f"{error}"
        assert "round 5 refused on all 4 workers" in str(error)
        assert not any(f"rank {r}" in str(error) for r in range(4) if r not in culprits)


def test_opposite_infinities_do_not_hide_each_other() -> None:
    for gather in (False, True):
        errors = refused(3, Dense(gather=gather), lambda rank: torch.tensor([(math.inf, -math.inf, 0.0)[rank]]))
        assert [e.culprits for e in errors] == [(0, 1)] * 3


@both_ways
def test_a_value_that_the_wire_cannot_hold_is_its_senders_fault(gather: bool) -> None:
    errors = refused(3, Dense("fp16", gather=gather), lambda rank: torch.tensor([1e5 if rank == 1 else 1.0]))
    assert [e.culprits for e in errors] == [(1,)] * 3


def test_a_sum_that_the_wire_cannot_hold_is_nobodys_fault() -> None:
    """60000 fits in fp16, twice 60000 does not: refused on all, no rank is blamed, and the message says why."""
    errors = refused(2, Dense("fp16"), lambda rank: torch.tensor([6e4]))
    for error in errors:
        assert isinstance(error, NonFiniteRound)
        assert error.culprits == ()
        assert "round 5 refused on all 2 workers" in str(error)
        assert "overflow" in str(error)
        assert "rank" not in str(error)


def test_the_message_of_an_overflow_blames_no_contribution() -> None:
    for error in refused(2, Dense("fp16"), lambda rank: torch.tensor([6e4])):
        assert "in the contribution of" not in str(error), "every contribution was finite"


def test_gathered_values_are_added_in_float32_and_do_not_overflow() -> None:
    (mean, _), _ = World(2).run(lambda link: average(link, Dense("fp16", gather=True), [torch.tensor([6e4])]))
    assert mean[0].item() == 6e4
    errors = refused(2, Dense("fp32", gather=True), lambda rank: torch.tensor([3e38]))
    assert [e.culprits for e in errors] == [(), ()], "float32 overflows where fp16 would have"


@both_ways
def test_large_float64_values_are_finite(gather: bool) -> None:
    values = torch.tensor([1e300, -1e200], dtype=torch.float64)
    for mean, _ in World(2).run(lambda link: average(link, Dense("fp64", gather=gather), [values])):
        assert torch.equal(mean[0], values)


@both_ways
def test_alone_a_nan_is_refused_too(gather: bool) -> None:
    with pytest.raises(NonFiniteRound, match="rank 0") as caught:
        average(SoloLink(), Dense(gather=gather), [torch.tensor([1.0, math.nan])])
    assert caught.value.culprits == (0,)


class Spy(LinkDecorator):
    """Keeps a copy of every message that is posted."""

    def post(self, payload: Payload, op: Op) -> Ticket:
        self.posted = payload.data.clone()
        return self.link.post(payload, op)


def test_a_bad_contribution_to_a_mean_stays_at_home() -> None:
    """A NaN on the wire would poison what a ring adds up on the way; zeros and a raised flag travel instead."""
    spy = Spy(SoloLink())
    bad = torch.tensor([1.0, math.nan, 3.0])
    assert isinstance(error_of(lambda: average(spy, Dense(), [bad])), NonFiniteRound)
    assert spy.posted.tolist() == [0, 0, 0, 1]


def test_a_refused_round_costs_no_second_exchange() -> None:
    def worker(link: Link) -> int:
        metered = Metered(link)
        bad = torch.tensor([math.nan if link.rank else 1.0])
        assert isinstance(error_of(lambda: average(metered, Dense(), [bad])), NonFiniteRound)
        return metered.meter.totals.rounds

    assert World(2).run(worker) == [1, 1]


def _refused_here(link: Link, gather: bool) -> tuple[tuple[int, ...], float]:
    bad = torch.tensor([math.nan if link.rank == 1 else 1.0, 2.0])
    error = error_of(lambda: average(link, Dense(gather=gather), [bad]))
    assert isinstance(error, NonFiniteRound)
    return error.culprits, float(average(link, Dense(gather=gather), [torch.tensor(float(link.rank))])[0][0])


@both_ways
def test_real_processes_refuse_together_and_go_on(gather: bool, pool: Pool) -> None:
    assert pool.run(_refused_here, 3, gather) == [((1,), 1.0)] * 3


@both_ways
def test_a_bad_shard_makes_all_shards_of_the_worker_refuse(gather: bool) -> None:
    """`any_shard` says yes although this shard's own values are finite: another one's are not."""

    def worker(link: Link) -> Exception | None:
        asked = []

        def any_shard(flag: bool) -> bool:
            asked.append(flag)
            return flag or (link.rank == 1 and len(asked) == 1)  # before the message is posted

        return error_of(lambda: average(link, Dense(gather=gather), [torch.ones(2)], any_shard=any_shard))

    errors = World(3).run(worker)
    assert all(isinstance(e, NonFiniteRound) for e in errors)
    assert [e.culprits for e in errors] == [(1,)] * 3


# --- The handshake -----------------------------------------------------------------------------------------------------------

SETTINGS = {"lr": 0.1, "codec": {"name": "Dense", "dtype": "fp32"}, "shapes": [[3, 4], [5]], "dtype": torch.float32}


def shaken(*fingerprints: dict) -> list[Exception | None]:
    return World(len(fingerprints)).run(lambda link: error_of(lambda: handshake(link, fingerprints[link.rank])))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_equal_settings_pass_in_any_order(size: int) -> None:
    backwards = dict(reversed(SETTINGS.items()))
    assert shaken(*[SETTINGS if r % 2 else backwards for r in range(size)]) == [None] * size


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.2}, "lr is 0.1 on rank 0 and 0.2 on rank 2"),
        ({"codec": {"name": "Dense", "dtype": "bf16"}}, "codec.dtype is 'fp32' on rank 0 and 'bf16' on rank 2"),
        ({"shapes": [[3, 4], [6]]}, "shapes[1][0] is 5 on rank 0 and 6 on rank 2"),
        ({"shapes": [[3, 4]]}, "shapes has 2 entries on rank 0 and 1 on rank 2"),
        ({"shapes": [[3], [5]]}, "shapes[0] has 2 entries on rank 0 and 1 on rank 2"),
        ({"shapes": "none"}, "shapes is [[3, 4], [5]] on rank 0 and 'none' on rank 2"),
        ({"dtype": torch.bfloat16}, "dtype is 'torch.float32' on rank 0 and 'torch.bfloat16' on rank 2"),
        ({"extra": 7}, "extra is missing on rank 0 and 7 on rank 2"),
        ({"lr": None}, "lr is 0.1 on rank 0 and None on rank 2"),
    ],
    ids=["value", "nested", "in a list", "list length", "inner list length", "kind", "not json", "new key", "None"],
)
def test_a_difference_is_named_with_both_values_and_ranks_on_all(change: dict, said: str) -> None:
    errors = shaken(SETTINGS, SETTINGS, {**SETTINGS, **change})
    for error in errors:
        assert isinstance(error, FingerprintMismatch)
        assert said in str(error)
        assert str(error).count(" on rank 0") == 1, "nothing else is said to differ"


def test_a_shard_without_a_difference_refuses_with_the_shard_that_has_one() -> None:
    with pytest.raises(FingerprintMismatch, match="another shard of this worker says in what"):
        handshake(SoloLink(), {"lr": 1.0}, any_shard=lambda _: True)


def test_a_key_that_is_missing_is_named() -> None:
    without = {k: v for k, v in SETTINGS.items() if k != "lr"}
    for error in shaken(SETTINGS, without):
        assert isinstance(error, FingerprintMismatch)
        assert "lr is 0.1 on rank 0 and missing on rank 1" in str(error)


def test_a_key_that_is_missing_differs_from_one_that_is_none() -> None:
    """A digest that differs must never pass, even if no single value looks different."""
    errors = shaken({"clip": None}, {})
    assert all(isinstance(e, FingerprintMismatch) for e in errors)
    assert all("clip" in str(e) for e in errors)


def test_when_rank_0_is_the_odd_one_it_is_still_found() -> None:
    errors = shaken({"H": 10}, {"H": 20}, {"H": 20})
    assert all("H is 10 on rank 0 and 20 on rank 1" in str(e) for e in errors)


def test_many_differences_are_cut_short_and_counted() -> None:
    errors = shaken({f"k{i}": 0 for i in range(5)}, {f"k{i}": 1 for i in range(5)})
    for error in errors:
        assert str(error).count(" on rank 0 and ") == 3
        assert "(and 2 more)" in str(error)


def test_a_handshake_is_not_a_round_and_is_short_when_all_is_well() -> None:
    def worker(link: Link) -> list:
        metered = Metered(link)
        handshake(metered, {**SETTINGS, "long": "x" * 10_000})
        assert metered.meter.totals.rounds == 0
        return [(e.purpose, e.payload) for e in metered.meter.recent]

    assert World(2).run(worker) == [[("handshake", 32)]] * 2


def _shake_here(link: Link) -> str:
    handshake(link, {"same": "on all"})
    return str(error_of(lambda: handshake(link, {"rank": link.rank, "text": "x" * link.rank})))


def test_real_processes_shake_hands(pool: Pool) -> None:
    """The differing texts have different lengths, which a real link must gather all the same."""
    said = pool.run(_shake_here, 3)
    assert len(set(said)) == 1
    assert "rank is 0 on rank 0 and 1 on rank 1; text is '' on rank 0 and 'x' on rank 1" in said[0]


# --- The alarm ---------------------------------------------------------------------------------------------------------------


def test_equal_replicas_raise_no_alarm() -> None:
    World(3).run(lambda link: compare_replicas(link, {"param": 5, "momentum": -(2**63)}, round=1))
    compare_replicas(SoloLink(), {"param": 5}, round=1)


def test_a_difference_names_the_part_and_the_ranks_on_all() -> None:
    def worker(link: Link) -> Exception | None:
        hashes = {"param": 1, "momentum": 2 if link.rank in (0, 2) else 3, "step": 4 + (link.rank == 3)}
        return error_of(lambda: compare_replicas(link, hashes, round=7))

    for error in World(4).run(worker):
        assert isinstance(error, Diverged)
        assert str(error) == "round 7: replicas are no longer bit-equal: momentum on rank 1, 3; step on rank 3 vs rank 0"


def test_another_shards_difference_raises_the_alarm_here_too() -> None:
    def worker(link: Link) -> Exception | None:
        return error_of(lambda: compare_replicas(link, {"param": 1}, round=2, any_shard=lambda flag: True))

    for error in World(2).run(worker):
        assert isinstance(error, Diverged)
        assert "on another shard" in str(error)


def _alarm_here(link: Link) -> str:
    compare_replicas(link, {"param": 1}, round=1)
    return str(error_of(lambda: compare_replicas(link, {"param": 1, "outer": link.rank == 2}, round=2)))


def test_real_processes_raise_the_alarm_together(pool: Pool) -> None:
    said = pool.run(_alarm_here, 3)
    assert said == ["round 2: replicas are no longer bit-equal: outer on rank 2 vs rank 0"] * 3


def test_an_alarm_is_not_a_round() -> None:
    metered = Metered(SoloLink())
    compare_replicas(metered, {"a": 1, "b": 2}, round=1)
    assert metered.meter.totals.rounds == 0
    assert [(e.purpose, e.payload) for e in metered.meter.recent] == [("alarm", 16)]


# --- The hash ----------------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@given(
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
@calm
def test_every_bit_counts(dtype: torch.dtype, lengths: list[int], place: int, bit: int) -> None:
    tensors = [torch.arange(n).to(dtype) for n in lengths]
    before = hash_tensors(tensors)
    assert -(2**63) <= before < 2**63
    which = tensors[place % len(tensors)].view(torch.uint8)
    which[place % which.numel()] ^= 1 << (bit if dtype != torch.bool else 0)
    assert hash_tensors(tensors) != before


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20), data=st.data())
@calm
def test_places_count(values: list[float], data: st.DataObject) -> None:
    i, j = data.draw(st.tuples(*[st.integers(0, len(values) - 1)] * 2))
    tensor = torch.tensor(values)
    swapped = tensor.clone()
    swapped[i], swapped[j] = tensor[j], tensor[i]
    same = torch.equal(tensor.view(torch.int32), swapped.view(torch.int32))
    assert (hash_tensors([tensor]) == hash_tensors([swapped])) == same


def test_the_order_of_tensors_counts() -> None:
    a, b = torch.arange(1.0, 4.0), torch.arange(4.0, 9.0)
    assert hash_tensors([a, b]) != hash_tensors([b, a])
    assert hash_tensors([a, b]) != hash_tensors([torch.cat([a, b])])


@pytest.mark.parametrize(
    ("one", "other"),
    [([0, 1, 1, 0], [1, 0, 0, 1]), ([1, 2, 3], [2, 0, 4]), ([5, 5, 5, 5, 5], [6, 4, 5, 4, 6])],
    ids=["two swaps", "second difference", "mirrored pair"],
)
def test_changes_that_balance_each_other_are_seen(one: list[int], other: list[int]) -> None:
    """Same sum and same first moment: a hash whose weights grow linearly with the place cannot tell these apart."""
    assert hash_tensors([torch.tensor(one, dtype=torch.int32)]) != hash_tensors([torch.tensor(other, dtype=torch.int32)])
    assert hash_tensors([torch.tensor(one).float()]) != hash_tensors([torch.tensor(other).float()])


def test_signed_zeros_and_nans_are_bits_like_any_other() -> None:
    assert hash_tensors([torch.tensor([0.0])]) != hash_tensors([torch.tensor([-0.0])])
    nan = torch.tensor([math.nan])
    assert hash_tensors([nan]) == hash_tensors([nan.clone()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_layout_in_memory_does_not_count(dtype: torch.dtype) -> None:
    t = torch.arange(35).reshape(5, 7).to(dtype)
    assert hash_tensors([t.T]) == hash_tensors([t.T.contiguous()])
    assert hash_tensors([t[:, 1:4]]) == hash_tensors([t[:, 1:4].clone()])
    flat = t.flatten()
    for start in range(4):
        window = flat[start : start + 8]
        assert hash_tensors([window]) == hash_tensors([window.clone()]), "an odd place in the storage"
    assert hash_tensors([torch.nn.Parameter(torch.ones(3))]) == hash_tensors([torch.ones(3)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_and_empty_tensors_have_hashes(dtype: torch.dtype) -> None:
    one, zero = torch.tensor(1).to(dtype), torch.tensor(0).to(dtype)
    assert hash_tensors([one]) != hash_tensors([zero])
    assert hash_tensors([one]) == hash_tensors([one.reshape(1)])
    empty = torch.empty(0, 3, dtype=dtype)
    assert hash_tensors([empty]) == hash_tensors([empty.clone()])
    assert hash_tensors([empty, one]) != hash_tensors([empty, zero])


def test_the_number_of_threads_does_not_count() -> None:
    big = torch.randn(3 << 20)  # several chunks
    threads = torch.get_num_threads()
    try:
        hashes = set()
        for n in (1, 2):
            torch.set_num_threads(n)
            hashes.add(hash_tensors([big]))
    finally:
        torch.set_num_threads(threads)
    assert len(hashes) == 1
    changed = big.clone()
    changed[-1] += 1
    assert hash_tensors([changed]) not in hashes, "the last chunk counts too"
