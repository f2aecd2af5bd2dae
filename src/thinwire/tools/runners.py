"""Runners make the runs of a comparison: on real processes, on processes behind thin wires, or on simulated workers."""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

from rich.console import Console

from thinwire import checkpoint
from thinwire.errors import ConfigError
from thinwire.network import Network, parse_bandwidth, parse_duration
from thinwire.sim import Churn, World
from thinwire.tools.config import RunConfig, about_run, read_run_toml
from thinwire.tools.elastic import check_elastic
from thinwire.tools.flags import one_or_each
from thinwire.tools.lab import Lab
from thinwire.tools.launch import launch, worker_environment
from thinwire.tools.names import ALONE
from thinwire.tools.simulate import simulate
from thinwire.tools.start import refuse_what_ddp_ignores
from thinwire.tools.tables import network_of, read_events


class Runner(Protocol):
    """Makes runs. Which one it is does not change their result, but their time."""

    @property
    def name(self) -> str:
        """In words, as a record has it."""
        ...

    def command(self, config: RunConfig) -> list[str]:
        """The words of a command that makes such a run, to be followed by those of the run."""
        ...

    @property
    def about(self) -> dict[str, str]:
        """What a run's folder must say of it."""
        ...

    def check(self, config: RunConfig) -> None:
        """Raise a `ConfigError` for a run that cannot be made there."""
        ...

    def run(self, folder: Path, console: Console) -> None:
        """Make the run that is described in `folder`, or go on with it."""
        ...


@dataclass(frozen=True, kw_only=True)
class ProcessRunner:
    """Real workers on this machine, as in `thinwire train`.

    Args:
        checkpoint_every: steps between checkpoints, from which an unfinished run goes on.
        timeout: seconds that a worker waits for another.
    """

    checkpoint_every: int
    timeout: float

    @property
    def name(self) -> str:
        """Plainly that."""
        return "processes"

    def command(self, config: RunConfig) -> list[str]:
        """`thinwire train`."""
        del config
        return ["train"]

    @property
    def about(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def check(self, config: RunConfig) -> None:
        """Refuse what torch's DDP would ignore."""
        refuse_what_ddp_ignores(config)

    def run(self, folder: Path, console: Console) -> None:
        """Start the workers, which show progress themselves."""
        del console
        config = read_run_toml(folder / "run.toml")
        processes = (config.workers or 2) * config.shards
        every = _checkpoints(config, self.checkpoint_every)
        launch(folder, processes, timeout=self.timeout, resume=_can_resume(folder, config), checkpoint_every=every)


@dataclass(frozen=True, kw_only=True)
class LabRunner:
    """Real workers in network namespaces whose wires have a bandwidth; see `thinwire lab`.

    Args:
        bandwidth: in words.
        down: downward where it differs, in words.
        checkpoint_every: steps between checkpoints.
        timeout: seconds that a worker waits for another.
    """

    bandwidth: str
    down: str | None
    checkpoint_every: int
    timeout: float

    @property
    def name(self) -> str:
        """With the bandwidth."""
        return f"lab {self.bandwidth}" if self.down is None else f"lab {self.bandwidth} down {self.down}"

    def command(self, config: RunConfig) -> list[str]:
        """The lab around `thinwire train`; there, rates per worker are joined by colons."""
        down = [] if self.down is None else ["--down", self.down.replace(",", ":")]
        lab = ["lab", "run", "--workers", str(config.workers), "--bandwidth", self.bandwidth.replace(",", ":"), *down]
        return [*lab, "--", "thinwire", "train"]

    @property
    def about(self) -> dict[str, str]:
        """Nothing that its name does not say."""
        return {}

    def check(self, config: RunConfig) -> None:
        """Refuse shards, which would need a fast network inside of a worker, and what torch's DDP would ignore."""
        if config.shards != 1:
            raise ConfigError(f"a worker in the lab is one process, got --shards {config.shards}")
        refuse_what_ddp_ignores(config)
        self._lab(config)

    def run(self, folder: Path, console: Console) -> None:
        """Make the wires, start the workers behind them, remove the wires."""
        del console
        config = read_run_toml(folder / "run.toml")
        every = _checkpoints(config, self.checkpoint_every)
        environment = worker_environment(self.timeout, resume=_can_resume(folder, config), checkpoint_every=every)
        with self._lab(config) as lab:
            worker = [sys.executable, "-m", "thinwire.tools.worker", str(folder)]
            lab.run(worker, env=environment, timeout=math.inf, patience=self.timeout + 10)

    def _lab(self, config: RunConfig) -> Lab:
        """Of its rates, not made yet."""
        network = network_of(self.bandwidth, self.down, "0ms", None, config.workers or 2)
        return Lab(config.workers or 2, bandwidth=network.bandwidth, down=network.down)


@dataclass(frozen=True, kw_only=True)
class SimulatedRunner:
    """Workers in one process, as in `thinwire sim`. All settings are in its words.

    Args:
        bandwidth: of each worker's link.
        down: downward where it differs.
        latency: of one message.
        step_time: of one local step; None measures it.
        links: a file with the link of each worker, in place of the first three.
        churn: a file with the workers' joins and deaths; None where all are there at all times.
        sites: how many sites the workers are grouped into; None for none.
        inside: bandwidth inside a site.
    """

    bandwidth: str = "inf"
    down: str | None = None
    latency: str = "0ms"
    step_time: str | None = None
    links: str | None = None
    churn: str | None = None
    sites: str | None = None
    inside: str = "inf"

    @property
    def name(self) -> str:
        """With bandwidth and latency, where the network is limited."""
        if (self.links, self.churn, self.sites) != (None, None, None):
            sites = "" if self.sites is None else f", {self.sites} sites of {self.inside} inside"
            return f"simulated {self.wire}{sites}{'' if self.churn is None else f', churn of {self.churn}'}"
        limited = parse_limits(self.bandwidth, self.down, self.latency)
        down = "" if self.down is None else f" down {self.down}"
        return f"simulated {self.bandwidth} {self.latency}{down}" if limited else "simulated"

    @property
    def wire(self) -> str:
        """The network on which time was simulated, in words."""
        return f"with the links of {self.links}" if self.links is not None else f"at {self.bandwidth} and {self.latency}"

    def command(self, config: RunConfig) -> list[str]:
        """`thinwire sim` with the network."""
        del config
        return ["sim", *(word for name, value in self.about.items() for word in (f"--{name.replace('_', '-')}", value))]

    @property
    def about(self) -> dict[str, str]:
        """The network, where it is not the usual one."""
        usual = SimulatedRunner()
        return {name: getattr(self, name) for name in _WORDS if getattr(self, name) != getattr(usual, name)}

    def check(self, config: RunConfig) -> None:
        """Refuse shards, and lists that do not have one value per worker."""
        if config.shards != 1:
            raise ConfigError(f"the simulator does not shard models, got --shards {config.shards}")
        workers = config.workers or 2
        if self.sites is None and self.inside != "inf":
            raise ConfigError(f"--inside {self.inside} needs --sites: how many sites the workers are grouped into")
        step_time = self._step_time()
        if isinstance(step_time, tuple) and len(step_time) != workers:
            raise ConfigError(f"step-time lists {len(step_time)} workers, but there are {workers}")
        if self.churn is not None:
            check_elastic(replace(config, workers=None))
        self._world(config)

    def run(self, folder: Path, console: Console) -> None:
        """Simulate in this process."""
        config = read_run_toml(folder / "run.toml")
        simulate(config, folder, world=self._world(config), console=console)

    def _world(self, config: RunConfig) -> World:
        workers, sites = config.workers or 2, None if self.sites is None else int(self.sites)
        network = network_of(self.bandwidth, self.down, self.latency, self.links, workers if sites is None else sites)
        inside = Network(bandwidth=parse_bandwidth(self.inside))
        churn = None if self.churn is None else Churn(*read_events(self.churn, workers))
        how = {"step_time": self._step_time(), "seed": config.seed}
        return World(workers, network=network, sites=sites, inside=inside, churn=churn, **how)

    def _step_time(self) -> float | tuple[float, ...] | None:
        return None if self.step_time is None else one_or_each(self.step_time, parse_duration)


_WORDS = tuple(f.name for f in fields(SimulatedRunner))


def simulated_runner(folder: Path) -> SimulatedRunner:
    """The runner that simulates a run as its folder says."""
    about = about_run(folder / "run.toml")
    return SimulatedRunner(**{name: str(about[name]) for name in _WORDS if name in about})


def parse_limits(bandwidth: str, down: str | None, latency: str) -> bool:
    """Whether a network in words is limited at all; wrong words are a `ConfigError`."""
    return network_of(bandwidth, down, latency, None, 0) != Network()


def _checkpoints(config: RunConfig, every: int) -> int:
    return 0 if config.algorithm == ALONE else every  # a checkpoint holds a model that workers share


def _can_resume(folder: Path, config: RunConfig) -> bool:
    """Whether there is a checkpoint to go on from. One of the last step has no step left, so such a run starts again."""
    saved = checkpoint.finished(folder / "checkpoints")
    if saved and checkpoint.step_of(saved[-1]) < config.steps:
        return True
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return False
