"""Learning rates over a run: the same numbers from the command line's config and from torch's scheduler."""

import pytest
import torch

import thinwire
from thinwire.errors import ConfigError
from thinwire.tools.config import RunConfig


def rates_of(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def sgd(lr: float = 0.4) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)


def test_wsd_rises_stays_and_falls_to_zero_over_the_last_quarter():
    rates = rates_of(thinwire.wsd(sgd(), steps=40, warmup=4), 40)
    assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert set(rates[4:30]) == {0.4}
    assert rates[30:] == pytest.approx([0.4 * left / 10 for left in range(9, -1, -1)])


def test_the_command_line_has_the_same_rates():
    config = RunConfig(lr=0.4, steps=40, lr_warmup=4, lr_schedule="wsd")
    assert [config.lr_at(step) for step in range(1, 41)] == pytest.approx(rates_of(thinwire.wsd(sgd(), steps=40, warmup=4), 40))


def test_other_decays_and_ends():
    config = RunConfig(lr=1.0, steps=100, lr_warmup=0, lr_schedule="wsd", lr_decay=0.5, lr_final=0.2)
    assert [config.lr_at(step) for step in (50, 75, 100)] == pytest.approx([1.0, 0.6, 0.2])
    assert RunConfig(lr=2.0, lr_warmup=2, lr_schedule="constant").lr_at(300) == 2.0


def test_a_warm_start_has_its_own_peak_and_the_decay_is_of_the_whole_run():
    config = RunConfig(lr=1.0, warm_lr=3.0, warm_start=50, steps=100, lr_warmup=0, lr_schedule="wsd")
    assert [config.lr_at(step) for step in (50, 51, 75, 100)] == [3.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "linear"}, "lr-schedule must be one of 'cosine', 'wsd', 'constant', got 'linear'"),
        ({"lr_final": 1.5}, "lr-final must be from 0 to 1, got 1.5"),
        ({"lr_schedule": "constant", "lr_final": 0.1}, "leave out lr-final, got 0.1"),
        ({"lr_schedule": "wsd", "lr_decay": 0.0}, "lr-decay must be above 0 and at most 1, got 0.0"),
        ({"lr_decay": 0.5}, "lr-decay is a setting of the schedule wsd, got 0.5 with cosine"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings).validate()


def test_wsd_of_a_worker_that_joins_late_goes_on_at_the_counted_step():
    scheduler = thinwire.wsd(sgd(), steps=40)
    expected = rates_of(thinwire.wsd(sgd(), steps=40), 40)
    scheduler.last_epoch = 34  # as `opt.join(scheduler)` does after a jump to step 35
    scheduler.optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(expected[35])
