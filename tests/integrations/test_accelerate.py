"""The helper for loops with accelerate, with the real accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.integrations.frameworks import foreign_collectives, join, needs
from tests.processes import Pool, warnings_of_this_process
from thinwire.errors import CheckpointError, ConfigError
from thinwire.links import Link, SoloLink

pytestmark = [needs("accelerate"), pytest.mark.filterwarnings("ignore")]

H, STEPS, MIDDLE, LR = 4, 10, 6, 1e-2


class Loop:
    """A loop with everything that accelerate prepares: accumulation, clipping, a scheduler, shuffled data, autocast."""

    def __init__(self, link: Link, *, naive: bool = False, method: type = thinwire.DiLoCo, **options: Any):
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState

        from thinwire.integrations.accelerate import prepare

        AcceleratorState._reset_state()  # another test of this process may have had another precision
        torch.manual_seed(0)
        # The order of the data is then a function of the epoch, as a resumed run needs it.
        data = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=data, **options)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        opt = method(torch.optim.AdamW(model.parameters(), lr=LR), link, H=H)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / 100)
        rows = torch.randn(2 * 4 * 2 * STEPS, 3, generator=torch.Generator().manual_seed(1))
        loader = torch.utils.data.DataLoader(list(rows), batch_size=4, shuffle=True, generator=torch.Generator())
        ready = self.accelerator.prepare if naive else lambda *each: prepare(self.accelerator, *each)
        self.model, self.opt, self.loader, self.scheduler = ready(model, opt, loader, scheduler)
        self.seen: list[Tensor] = []
        self.foreign: list[dict[str, int]] = []

    def train(self, *, first: int = 0, last: int = STEPS, save: Path | None = None) -> None:
        from thinwire.integrations.accelerate import save_state

        with foreign_collectives() as foreign:
            for number, x in enumerate(self.accelerator.skip_first_batches(self.loader, 2 * first), start=2 * first):
                if number == 2 * first:
                    foreign.clear()  # once per epoch, accelerate agrees on the order of the data
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward((self.model(x) - x.sum(1, keepdim=True)).square().mean())
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.opt.step()
                    self.scheduler.step()
                    self.opt.zero_grad()
                self.seen.append(x)
                self.foreign.append(dict(foreign))
                if save and number + 1 == 2 * MIDDLE:
                    save_state(self.accelerator, save, self.model, self.opt, self.scheduler)
                if number + 1 == 2 * last:
                    break

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def test_it_trains_saves_and_resumes_between_two_rounds(tmp_path: Path) -> None:
    from thinwire.integrations.accelerate import load_state, prepare

    loop = Loop(SoloLink())
    loop.train(save=tmp_path / "saved")
    assert loop.opt.optimizer.steps == STEPS and loop.opt.optimizer.rounds == STEPS // H
    assert loop.scheduler.get_last_lr() == [pytest.approx(LR * (1 - STEPS / 100))]

    other = Loop(SoloLink())
    resumed = load_state(other.accelerator, tmp_path / "saved", other.model, other.opt, other.scheduler)
    assert resumed.step == other.opt.optimizer.steps == MIDDLE
    assert other.scheduler.get_last_lr() == [pytest.approx(LR * (1 - MIDDLE / 100))]

    with pytest.raises(CheckpointError, match="holds no state of thinwire workers"):
        load_state(other.accelerator, tmp_path, other.model, other.opt)
    with pytest.raises(ConfigError, match="needs a thinwire optimizer such as"):
        prepare(other.accelerator, torch.optim.SGD([nn.Parameter(torch.zeros(1))]))


# --- Two processes -----------------------------------------------------------------------------------------------------------


def resume(link: Link, name: str, folder: Path) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.integrations.accelerate import load_state

    join(link)
    straight = Loop(link, method=getattr(thinwire, name), mixed_precision="bf16")
    straight.train(save=folder)
    resumed = Loop(link, method=getattr(thinwire, name), mixed_precision="bf16")
    load_state(resumed.accelerator, folder, resumed.model, resumed.opt, resumed.scheduler)
    resumed.train(first=MIDDLE)
    assert not isinstance(straight.model, DistributedDataParallel)
    with straight.opt.optimizer.shared_model():
        shared = straight.weights()
    return {
        "equal": all(map(torch.equal, straight.weights(), resumed.weights())),
        "own": straight.weights(),
        "shared": shared,
        "foreign": straight.foreign,
        "seen": [tuple(row.tolist()) for x in straight.seen for row in x],
        "lr": straight.scheduler.get_last_lr(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DiLoCo", "DecoupledDiLoCo", "MTDAO"])
def test_two_workers_send_nothing_but_their_rounds_and_resume_bit_for_bit(name: str, pair: Pool, tmp_path: Path) -> None:
    a, b = pair.run(resume, 2, name, tmp_path)
    assert a["equal"] and b["equal"]
    assert a["foreign"] == b["foreign"] == [{}] * 2 * STEPS
    seen = [*a["seen"], *b["seen"]]
    assert len(set(seen)) == len(seen) == 2 * 4 * 2 * STEPS, "each worker reads data of its own"
    assert a["lr"] == b["lr"] == [pytest.approx(LR * (1 - STEPS / 100))], "the scheduler steps once per step"
    assert not all(map(torch.equal, a["own"], b["own"])), "no gradient was averaged between rounds"
    if name != "MTDAO":  # it has no anchor: between rounds each worker has its own model only
        assert all(map(torch.equal, a["shared"], b["shared"]))


def naive(link: Link) -> list[str]:
    join(link)
    with warnings_of_this_process() as told:
        Loop(link, naive=True).train(last=2)
    return told


@pytest.mark.slow
def test_prepare_of_accelerate_alone_is_warned_about(pair: Pool) -> None:
    for told in pair.run(naive, 2):
        assert any("have the same gradients" in text and "DistributedDataParallel" in text for text in told), told
