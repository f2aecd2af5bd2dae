"""`thinwire train --join URL`: one worker of a run whose workers come and go, started alone, on its own machine."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.logging import RichHandler
from torch import nn

from thinwire.errors import ConfigError
from thinwire.links import Metered
from thinwire.links.elastic import ElasticLink, Status
from thinwire.links.join import TCP, join, open_cluster, open_run
from thinwire.network import parse_duration
from thinwire.tasks.task import Task
from thinwire.tools.build import clips_itself, device_of, optimizer_of, task_of
from thinwire.tools.config import Device, RunConfig, config_of, new_folder, write_run_toml
from thinwire.tools.display import Display, MetricsFile
from thinwire.tools.summary import keep_result, show_figures, summarise
from thinwire.tools.train import Progress, Watcher

log = logging.getLogger("thinwire")

_NOT_ELASTIC = ("ddp", "alone", "noloco")


@dataclass(frozen=True, kw_only=True)
class JoinFlags:
    """Take part in a run on an object store or a cluster, as one worker; task, algorithm and settings are those of the run.

    It starts from the newest checkpoint of the run and the rounds after it, and may be stopped and started again at any time.
    """

    join: str
    """The address of the run: s3://bucket/run, gs://bucket/run, az://container/run, file:///folder, or tcp://host:port."""
    key: str | None = None
    """This worker's key, a file of `thinwire keys new`; by default thinwire.key. On a cluster there are no keys."""
    id: int | None = None
    """This worker's number on a cluster (tcp://), the same whenever it is started."""
    keep: str | None = None
    """A folder in which this worker of a cluster keeps checkpoints, from which the run is founded again if all die."""
    owner: str | None = None
    """The public key of the run's owner: another's run is refused."""
    out: str | None = None
    """A folder for this worker's metrics; by default runs/ALGORITHM-TASK-TIME."""
    device: Device = "auto"
    """Where to compute: auto takes GPUs where torch finds them."""
    data: str | None = None
    """Where this machine has the run's text or images, if not where its owner said."""
    eval_every: int = 0
    """Steps between evaluations of the shared model by this worker; 0 evaluates at the end only."""
    patience: float = 3.0
    """How many times the usual wait a round waits for those who are late."""
    outage: str = "10min"
    """How long the store may be away, and how long a round may take, before this worker gives up."""


def main(arguments: list[str]) -> int:
    """Join the run and train until it ends."""
    flags = tyro.cli(JoinFlags, prog="thinwire train", args=arguments)
    outage = parse_duration(flags.outage)
    if outage <= 0:
        raise ConfigError(f"outage must be above zero seconds, got {flags.outage!r}")
    who: dict[str, Any]
    if flags.join.startswith(TCP):
        train = open_cluster(flags.join, outage=outage)[1]["train"]
        who = {"key": flags.key, "owner": flags.owner, "id": flags.id, "keep": flags.keep}
    else:
        _, run, _ = open_run(flags.join, owner=flags.owner, outage=outage)
        train = run.train
        who = {"key": flags.key or "thinwire.key", "owner": run.owner.text, "id": flags.id, "keep": flags.keep}
    config = config_of_run(train, device=flags.device, data=flags.data, eval_every=flags.eval_every)
    link = join(flags.join, outage=outage, timeout=outage, patience=flags.patience, **who)
    worker = ElasticTrainer(config, link)
    folder = Path(flags.out or f"{new_folder(f'{config.algorithm}-{config.task}')}-worker{link.rank}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_run_toml(folder / "run.toml", config, joined=flags.join, worker=link.rank)
    except OSError as cause:
        raise ConfigError(f"cannot write the folder {folder}: {cause.strerror or cause}") from cause
    console = Console()
    with interrupted_by_sigterm(), _warnings_on(console):
        return _train(worker, folder, console)


def _train(worker: ElasticTrainer, folder: Path, console: Console) -> int:
    config, link = worker.config, worker.link.link
    assert isinstance(link, ElasticLink)
    try:
        worker.optimizer.join()
        console.print(f"[dim]worker {link.rank} joined at step {worker.step} of {config.steps}", highlight=False)
        metrics = MetricsFile(folder / "metrics.jsonl", after=worker.step)
        title = f"{config.algorithm} {config.task} worker {link.rank}"
        display = ElasticDisplay(title, config.steps, worker.task.unit, console=console, link=link)

        def watch(now: Progress, /) -> None:
            metrics(now)
            display(now)

        with contextlib.closing(metrics), display:
            progress = worker.run(watch)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C does not wait for the store
            link.close()
        print(f"worker {link.rank} left the run at step {worker.step}; the same command brings it back", flush=True)
        return 130
    link.close()
    figures = summarise(worker, progress)
    keep_result(folder, figures, [metrics.problem])
    show_figures(figures, folder)
    return 0


def config_of_run(train: dict[str, Any], **mine: Any) -> RunConfig:
    """The settings that run.json gives, and what this machine has its own way.

    Args:
        train: of run.json, which its owner signed.
        mine: settings of this machine: None leaves what the run says.
    """
    known = {f.name for f in fields(RunConfig)}
    if not train or not train.keys() <= known:
        unknown = ", ".join(sorted(train.keys() - known))
        what = f"unknown settings: {unknown}" if unknown else "no settings: its workers bring their own loop (thinwire.join)"
        raise ConfigError(f"this run cannot be joined by `thinwire train`: it has {what}")
    try:
        config = replace(config_of(train), **{name: value for name, value in mine.items() if value is not None})
        config.validate()
    except TypeError as error:
        raise ConfigError(f"the settings of this run are unsound: {error}") from error
    check_elastic(config)
    return config


def check_elastic(config: RunConfig) -> None:
    """Raise a `ConfigError` for settings that need workers who are all there at the same time."""
    if config.algorithm in _NOT_ELASTIC:
        raise ConfigError(f"{config.algorithm} needs workers that never change: use data-parallel, or another method")
    for name, usual in {"warm_start": 0, "non_iid": None, "shards": 1, "workers": None}.items():
        if getattr(config, name) != usual:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(config, name)} needs workers that never change: leave it out")


class ElasticTrainer:
    """One worker's model, optimizer and data, and the loop over them while others come and go.

    Args:
        config: what to run.
        link: this worker's end of the run.
        task: model and data; made from the config where it is not given.
    """

    def __init__(self, config: RunConfig, link: ElasticLink, *, task: Task | None = None):
        """Build everything; nothing is read from the run yet but its settings."""
        self.config, self.link = config, Metered(link)
        self.task = task or task_of(config, 1)
        self.model = self.task.model().to(device_of(config))
        self.optimizer = optimizer_of(config, self.model, self.link)
        self.seconds, self.taken = 0.0, 0

    @property
    def step(self) -> int:
        """The counted step of the run, which goes on without this worker too."""
        return self.optimizer.steps

    def run(self, watch: Watcher) -> Progress:
        """Train from where `optimizer.join()` came to, until the run ends."""
        config, started, evaluated, loss = self.config, self.link.now(), self.step, math.nan
        while self.step < config.steps and not self.status.ended:
            loss = self.one_step()
            self.seconds = self.link.now() - started
            due = config.eval_every > 0 and self.step // config.eval_every > evaluated // config.eval_every
            evaluated = self.step if due else evaluated
            watch(self._progress(loss, self.evaluate() if due and self.step < config.steps else None))
        self.optimizer.finish()
        progress = self._progress(loss, self.evaluate())
        watch(progress)
        return progress

    @property
    def status(self) -> Status:
        """Where the run stands."""
        link = self.link.link
        assert isinstance(link, ElasticLink)
        return link.status

    def one_step(self) -> float:
        """One local step on the block that this worker has, and a round where one is due; the training loss."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self.config.lr_at(optimizer.steps + 1)
        block = optimizer.block
        assert block is not None, "whoever has joined has a block"
        loss = self.task.loss(self.model, self.task.block(block, optimizer.block_step))
        loss.backward()
        if self.config.clip_norm and not clips_itself(type(optimizer)):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        self.taken += 1
        return float(loss.detach())

    def evaluate(self) -> dict[str, float]:
        """Figures of the shared model, computed by this worker for itself."""
        with self.optimizer.shared_model(self.model):
            return self.task.evaluate(self.model)

    def _progress(self, loss: float, validation: dict[str, float] | None) -> Progress:
        items = self.taken * self.task.batch_items
        return Progress.of(self.step, loss, self.seconds, items, self.link.meter.totals, validation)


class ElasticDisplay(Display):
    """Progress that also tells who is there, who counted, and how long a round waits."""

    def __init__(self, *args: Any, link: ElasticLink, **kwargs: Any):
        """As `Display`, of a worker with this link."""
        super().__init__(*args, **kwargs)
        self._link = link

    def figures(self, progress: Progress) -> str:
        """The figures of every run, and the members of this one."""
        return f"{super().figures(progress)} {describe(self._link.status)}"


def describe(status: Status) -> str:
    """The members of a run on one line."""
    late = f" left out {', '.join(map(str, status.left_out))}" if status.left_out else ""
    counts = f"members {len(status.expected)} counted {len(status.counted)}{late}"
    return f"round {status.round} {counts} deadline {status.deadline:.2g} s"


@contextlib.contextmanager
def _warnings_on(console: Console) -> Iterator[None]:
    """What thinwire logs is shown above the progress."""
    handler = RichHandler(console=console, show_path=False, show_time=False)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM, by which machines that are rented by the minute are taken away, ends a command like Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
