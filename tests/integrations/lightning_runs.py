"""What the tests of Lightning train: a small module on data that is a function of worker and step."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

import thinwire
from tests.integrations.frameworks import foreign_collectives
from tests.processes import warnings_of_this_process
from thinwire import Algorithm, Link
from thinwire.integrations.lightning import ThinwireStrategy


def _diloco(inner: torch.optim.Optimizer, link: Link) -> Algorithm:
    return thinwire.DiLoCo(inner, link, H=8)


Make = Callable[[list[nn.Parameter], Link], Algorithm]

METHODS: dict[str, Make] = {
    "diloco": lambda params, link: thinwire.DiLoCo(torch.optim.AdamW(params, lr=1e-2), link, H=8),
    "demo": lambda params, link: thinwire.DeMo(params, link, lr=1e-2),
    "decoupled-diloco": lambda params, link: thinwire.DecoupledDiLoCo(torch.optim.AdamW(params, lr=1e-2), link, H=8),
    "mt-dao": lambda params, link: thinwire.MTDAO(torch.optim.AdamW(params, lr=1e-2), link, H=8),
    "warm start": lambda params, link: thinwire.WarmStart(torch.optim.AdamW(params, lr=1e-2), link, steps=5, then=_diloco),
}


class Batches:
    """A loader that knows its place, as Lightning saves and restores it."""

    def __init__(self, rank: int, count: int):
        self.rank, self.count, self.place, self.first = rank, count, 0, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        first, self.first = self.first, 0
        for place in range(first + 1, self.count + 1):
            self.place = place
            yield torch.randn(8, 8, generator=torch.Generator().manual_seed(1000 * self.rank + self.place))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["place"]


class Module(pl.LightningModule):
    """Regression with dropout, so that random numbers matter; validation is on the same data everywhere."""

    def __init__(self, method: str = "diloco", count: int = 20):
        super().__init__()
        self.method, self.count = method, count
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.seen: list[float] = []  # sums of the weights that were evaluated

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(weight_sum(self))
        self.log("val_loss", (self.net(batch) - batch.sum(1, keepdim=True)).square().mean() + self.global_rank)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> float:
        return weight_sum(self)

    def configure_optimizers(self) -> Any:
        link = thinwire.Metered(thinwire.connect())
        opt = METHODS[self.method](list(self.parameters()), link)
        return [opt], [{"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40), "interval": "step"}]

    def train_dataloader(self) -> Batches:
        return Batches(self.global_rank, self.count)

    def val_dataloader(self) -> Batches:
        return Batches(0, 1)

    def test_dataloader(self) -> Batches:
        return self.val_dataloader()

    def predict_dataloader(self) -> Batches:
        return self.val_dataloader()


def weight_sum(module: nn.Module) -> float:
    return float(sum(p.detach().double().sum() for p in module.parameters()))


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in module.parameters()])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lightning gives much advice."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trainer(folder: Path, size: int = 1, rank: int = 0, **settings: Any) -> pl.Trainer:
    os.environ["LOCAL_RANK"] = str(rank)  # started by us, not by Lightning
    usual = {"strategy": ThinwireStrategy(), "max_epochs": -1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    usual |= {"limit_val_batches": 0, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=size, default_root_dir=folder, **(usual | settings))


# --- What each of two workers does -------------------------------------------------------------------------------------------


class Watch(pl.Callback):
    """Notes collectives of others between the start of training and its last step, and this worker's weights after each."""

    def __init__(self, foreign: dict[str, int]):
        self.foreign, self.between, self.after = foreign, dict[str, int](), dict[int, Tensor]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.foreign.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any) -> None:
        self.between = dict(self.foreign)
        self.after[trainer.global_step] = weights(pl_module)


def resumed_run(link: Link, folder: Path, method: str) -> dict[str, Any]:
    """20 steps with a checkpoint after 12, in the middle of an interval, and the last 8 again from that checkpoint."""
    with quiet(), foreign_collectives() as foreign:
        torch.manual_seed(link.rank)  # the strategy gives all the weights of worker 0
        alone, watch = Module(method), Watch(foreign)
        fit = trainer(folder, link.size, link.rank, max_steps=20, callbacks=[watch])
        fit.fit(alone)
        torch.manual_seed(link.rank)
        straight, saving = Module(method), pl.callbacks.ModelCheckpoint(folder, "at-{step}", every_n_train_steps=12)
        fit = trainer(folder, link.size, link.rank, max_steps=20, callbacks=[saving], enable_checkpointing=True)
        fit.fit(straight)
        torch.manual_seed(7)
        again = Module(method)
        fit_again = trainer(folder, link.size, link.rank, max_steps=20)
        fit_again.fit(again, ckpt_path=folder / "at-step=12.ckpt")
    stored = torch.load(folder / "at-step=12.ckpt", weights_only=True)["state_dict"]
    return {
        "between": watch.between,
        "drifted": watch.after[12],
        "alone": weights(alone),
        "straight": weights(straight),
        "again": weights(again),
        "rounds": [int(f.callback_metrics["wire_rounds"]) for f in (fit, fit_again)],
        "sent": float(fit.callback_metrics["wire_sent"]),
        "stored": torch.cat([v.flatten() for v in stored.values()]),
        "wrapped": isinstance(fit.strategy.model, nn.parallel.DistributedDataParallel),
    }


def evaluations(link: Link, folder: Path) -> dict[str, Any]:
    """Validation in the middle of an interval and at the end, then test and predict, of the end and of the worst."""
    with quiet():
        torch.manual_seed(0)
        module, watch = Module(), Watch({})
        # The name holds a metric, which differs between workers.
        name, worst = "{step}-{val_loss:.6f}", {"monitor": "val_loss", "mode": "max", "save_top_k": 1}
        saving = pl.callbacks.ModelCheckpoint(folder, name, save_last=True, **worst)
        settings: dict[str, Any] = {"max_steps": 20, "limit_val_batches": 1, "val_check_interval": 4}
        fit = trainer(folder, link.size, link.rank, callbacks=[watch, saving], enable_checkpointing=True, **settings)
        fit.fit(module)
        during, own = list(module.seen), watch.after
        module.seen.clear()
        fit.test(module)
        predicted = fit.predict(module)
        [stored] = folder.glob("step=*.ckpt")
        fit.test(module, ckpt_path=stored)
    return {
        "during": during,
        "own": [float(own[step].double().sum()) for step in range(4, 21, 4)],
        "tested": module.seen,
        "predicted": predicted,
        "stored": stored.name,
    }


def stopped_by_sigterm(link: Link, folder: Path) -> dict[str, Any]:
    class Signal(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    with quiet(), foreign_collectives() as foreign:
        fit = trainer(folder, link.size, link.rank, max_steps=20, callbacks=[Watch(foreign), Signal()])
        try:
            fit.fit(Module())
            stopped = False
        except SIGTERMException:
            stopped = True
    return {"stopped": stopped, "step": fit.global_step, "foreign": dict(foreign)}


def naive(link: Link, folder: Path) -> list[str]:
    """What thinwire says of Lightning's own strategy."""
    with quiet(), warnings_of_this_process() as told:
        torch.manual_seed(0)
        trainer(folder, link.size, link.rank, max_steps=2, strategy="ddp").fit(Module())
    return told
