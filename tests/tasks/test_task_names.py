"""The list of tasks, and what `make_task` refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.errors import ConfigError
from thinwire.tasks import TASKS, make_task


def test_names_are_readable_without_torch():
    code = "import sys, thinwire.tasks as t; print('torch' in sys.modules, len(t.TASKS))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", str(len(TASKS))]


def test_descriptions_are_one_line():
    assert all(text and "\n" not in text for text in TASKS.values())


@pytest.mark.parametrize(("wrong", "meant"), [("gpt-nanno", "gpt-nano"), ("resnet_digits", "resnet-digits")])
def test_unknown_name_shows_the_names_and_a_guess(wrong: str, meant: str):
    with pytest.raises(ConfigError) as caught:
        make_task(wrong)
    message = str(caught.value)
    assert f"got {wrong!r}; did you mean {meant!r}?" in message
    assert all(name in message for name in TASKS)
    assert "\n" not in message


def test_unknown_name_without_a_neighbour_makes_no_guess():
    with pytest.raises(ConfigError, match=r"got 'zzzz'$"):
        make_task("zzzz")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 0.5}, "seed must be a whole number from 0"),
        ({"non_iid": 0.0}, "non_iid must be None or a number above 0, got 0.0"),
        ({"non_iid": -1.0}, "non_iid must be None or a number above 0, got -1.0"),
        ({"non_iid": float("nan")}, "non_iid must be None or a number above 0, got nan"),
        ({"data": Path("there")}, "the task quadratic brings its own data and reads no other, got data='there'"),
    ],
)
def test_wrong_settings_are_shown(settings: dict, message: str):
    with pytest.raises(ConfigError) as caught:
        make_task("quadratic", **settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_digits_take_no_data():
    with pytest.raises(ConfigError, match="cnn-digits brings its own data"):
        make_task("cnn-digits", data="there")


@pytest.mark.parametrize(
    ("name", "unit", "items", "metric"),
    [
        ("gpt-nano", "tokens", 8 * 128, None),
        ("cnn-digits", "images", 32, "accuracy"),
        ("quadratic", "samples", 8, None),
    ],
)
def test_default_batch_and_what_it_counts(name: str, unit: str, items: int, metric: str | None):
    task = make_task(name)
    assert (task.name, task.seed, task.workers) == (name, 0, 1)
    assert (task.unit, task.batch_items, task.metric) == (unit, items, metric)


@pytest.mark.parametrize(("name", "items"), [("gpt-nano", 3 * 128), ("resnet-digits", 3), ("quadratic", 3)])
def test_batch_sets_the_size_per_worker(name: str, items: int):
    task = make_task(name, batch=3)
    assert task.batch_items == items
    assert task.batch(0, 0)[0].shape[0] == 3
