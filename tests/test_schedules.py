"""When something is due, as sets of steps: periods, shifts, fragments that take turns, and what is no period at all."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import ConfigError
from thinwire.schedules import Every, Schedule, Stages, Staggered, Union, Warmup, as_schedule, parse_schedule

calm = settings(deadline=None, database=None, derandomize=True)
periods = st.integers(1, 40)
BAD = [0, -1, True, False, 2.0, 1.5, "4", None]


def due_steps(schedule: Schedule, steps: int) -> dict[int, tuple[int, ...]]:
    """The steps of a run at which something is due, and what."""
    return {s: schedule.due(s) for s in range(1, steps + 1) if schedule.due(s)}


# --- Every ---------------------------------------------------------------------------------------------------------------


@given(H=periods)
@calm
def test_every_is_due_at_multiples_of_its_period(H: int) -> None:
    assert due_steps(Every(H), 3 * H) == {H: (0,), 2 * H: (0,), 3 * H: (0,)}
    assert Every(H).fragments == 1


@given(H=periods, offset=st.integers(-100, 100), step=st.integers(1, 200))
@calm
def test_an_offset_shifts_the_beat_and_keeps_the_period(H: int, offset: int, step: int) -> None:
    shifted = Every(H, offset=offset)
    assert shifted.due(step) == Every(H).due(step - offset)
    assert shifted.due(step) == Every(H, offset=offset + H).due(step), "a whole period is no shift"
    assert sum(len(shifted.due(s)) for s in range(step, step + H)) == 1


def test_offsets_of_one_period_share_the_steps_among_them() -> None:
    for step in range(1, 20):
        assert sum(len(Every(5, offset=k).due(step)) for k in range(5)) == 1


# --- Staggered -------------------------------------------------------------------------------------------------------------

period_and_fragments = periods.flatmap(lambda H: st.tuples(st.just(H), st.integers(1, H)))


@given(both=period_and_fragments, start=st.integers(1, 100))
@calm
def test_each_fragment_is_due_once_in_any_window_of_one_period(both: tuple[int, int], start: int) -> None:
    H, fragments = both
    seen = [p for s in range(start, start + H) for p in Staggered(H, fragments=fragments).due(s)]
    assert sorted(seen) == list(range(fragments))


@given(both=period_and_fragments, start=st.integers(1, 100))
@calm
def test_never_two_fragments_at_once_and_evenly_spread(both: tuple[int, int], start: int) -> None:
    H, fragments = both
    schedule = Staggered(H, fragments=fragments)
    window = range(start, start + 2 * H)
    assert all(len(schedule.due(s)) <= 1 for s in window)
    turns = [s for s in window if schedule.due(s)]
    gaps = {b - a for a, b in pairwise(turns)}
    assert gaps <= {H // fragments, -(-H // fragments)}


@given(H=periods, step=st.integers(1, 200))
@calm
def test_one_fragment_is_the_whole_model(H: int, step: int) -> None:
    assert Staggered(H, fragments=1).due(step) == Every(H).due(step)


@given(H=periods, step=st.integers(1, 200))
@calm
def test_as_many_fragments_as_steps_leave_no_step_out(H: int, step: int) -> None:
    assert len(Staggered(H, fragments=H).due(step)) == 1


def test_the_turns_of_four_fragments() -> None:
    assert due_steps(Staggered(8, fragments=4), 8) == {2: (3,), 4: (2,), 6: (1,), 8: (0,)}
    assert Staggered(8, fragments=4).fragments == 4


def test_more_fragments_than_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fragments must be at most H=3.* got 4"):
        Staggered(3, fragments=4)


# --- Stages ----------------------------------------------------------------------------------------------------------------


def test_stages_come_one_after_the_other_on_one_beat() -> None:
    growing = Stages(2, 8, 4, 16, 8)
    assert list(due_steps(growing, 40)) == [2, 4, 6, 8, 12, 16, 24, 32, 40]
    assert list(due_steps(Stages(3, 5, 4), 12)) == [3, 8, 12], "steps are those of the run"
    assert growing.fragments == 1
    assert Stages(Staggered(4, fragments=2), 8, Staggered(8, fragments=2)).due(12) == (1,)


@given(H=periods, step=st.integers(1, 200))
@calm
def test_one_stage_is_its_schedule(H: int, step: int) -> None:
    assert Stages(H).due(step) == Every(H).due(step)


@pytest.mark.parametrize("text", ["4 until 64, 8 until 192, 32", " 4  until 64 ,8 until 192,32 "])
def test_stages_are_written_as_they_are_read(text: str) -> None:
    assert parse_schedule(text) == Stages(4, 64, 8, 192, 32)
    assert repr(parse_schedule(text)) == "4 until 64, 8 until 192, 32"
    assert parse_schedule("32") == 32


@pytest.mark.parametrize("text", ["", "4 until", "4, 8", "4 until 8", "4 until 8,", "many", "-4", "4 until -8, 2"])
def test_a_text_that_is_no_period_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a number of steps, or several such as '4 until 64, 8 until 192, 32', got"):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((4, 64), "end with a period"),
        ((), "end with a period"),
        ((4, 64, 8, 64, 32), "the last step of a stage must be a whole number of at least 65, got 64"),
        ((0, 64, 8), "H must be a whole number"),
        ((4, 0, 8), "of at least 1, got 0"),
        ((4, 8, Staggered(4, fragments=2)), "a sequence of stages needs schedules with one number of fragments"),
    ],
)
def test_wrong_stages_are_refused(parts: tuple, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Stages(*parts)


# --- Warmup and Union ------------------------------------------------------------------------------------------------------


@given(steps=st.integers(0, 30), H=periods, step=st.integers(1, 100))
@calm
def test_a_warm_up_is_every_step_and_then_the_other(steps: int, H: int, step: int) -> None:
    expected = Every(1) if step <= steps else Every(H)
    assert Warmup(steps, then=Every(H)).due(step) == expected.due(step)


def test_a_warm_up_sends_all_fragments() -> None:
    schedule = Warmup(2, then=Staggered(4, fragments=2))
    assert schedule.fragments == 2
    assert due_steps(schedule, 8) == {1: (0, 1), 2: (0, 1), 4: (0,), 6: (1,), 8: (0,)}


@given(both=period_and_fragments, step=st.integers(1, 100))
@calm
def test_no_warm_up_and_a_union_of_one_change_nothing(both: tuple[int, int], step: int) -> None:
    schedule = Staggered(both[0], fragments=both[1])
    assert Warmup(0, then=schedule).due(step) == schedule.due(step)
    assert Union((schedule,)).due(step) == schedule.due(step)
    assert Union((schedule, schedule)).due(step) == schedule.due(step), "due twice is sent once"


@given(a=periods, b=periods, step=st.integers(1, 200))
@calm
def test_a_union_is_due_when_any_is(a: int, b: int, step: int) -> None:
    assert bool(Union((Every(a), Every(b))).due(step)) == (step % a == 0 or step % b == 0)


def test_a_union_names_each_fragment_once_and_in_order() -> None:
    every_step = Staggered(2, fragments=2)  # step 1: (1,), step 2: (0,)
    slower = Staggered(4, fragments=2)  # step 2: (1,), step 4: (0,)
    union = Union((every_step, slower))
    assert union.fragments == 2
    assert due_steps(union, 4) == {1: (1,), 2: (0, 1), 3: (1,), 4: (0,)}


@pytest.mark.parametrize(
    ("schedules", "shown"),
    [((), "none"), ((Every(2), Staggered(4, fragments=2)), r"\[1, 2\]")],
)
def test_a_union_of_nothing_or_of_different_fragments_is_refused(schedules: tuple, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"one number of fragments, got {shown}"):
        Union(schedules)


# --- Bad settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "make",
    [Every, as_schedule, lambda H: Staggered(H, fragments=1), lambda p: Staggered(4, fragments=p)],
    ids=["Every", "as_schedule", "Staggered H", "Staggered fragments"],
)
def test_what_is_no_period_is_refused_with_its_value(make, bad: object) -> None:
    with pytest.raises(ConfigError, match="whole number of at least 1") as caught:
        make(bad)
    assert str(caught.value).endswith(f"got {bad!r}")


@pytest.mark.parametrize("bad", [-1, True, 2.0, "4", None])
def test_what_is_no_number_of_warm_up_steps_is_refused_with_its_value(bad: object) -> None:
    with pytest.raises(ConfigError, match="whole number of at least 0") as caught:
        Warmup(bad, then=Every(2))  # type: ignore[arg-type]
    assert str(caught.value).endswith(f"got {bad!r}")


def test_a_number_is_a_schedule_and_a_schedule_stays_itself() -> None:
    assert as_schedule(7) == Every(7)
    schedule = Warmup(3, then=Every(2))
    assert as_schedule(schedule) is schedule


@pytest.mark.parametrize("schedule", [Every(3), Staggered(4, fragments=2), Warmup(1, then=Every(2)), Union((Every(2),))])
def test_schedules_have_no_state_to_change(schedule: Schedule) -> None:
    assert isinstance(schedule, Schedule)
    assert hash(schedule) == hash(type(schedule)(**vars(schedule)))
    assert [schedule.due(s) for s in (5, 1, 5)] == [schedule.due(5), schedule.due(1), schedule.due(5)]
    with pytest.raises(AttributeError):
        schedule.H = 9  # type: ignore[misc]
