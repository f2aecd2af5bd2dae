"""`thinwire sim`: the same training on simulated workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from thinwire.errors import ConfigError
from thinwire.network import Network, parse_bandwidth, parse_duration
from thinwire.run.config import new_folder
from thinwire.run.flags import one_or_each, parse_run
from thinwire.run.simulate import simulate
from thinwire.run.start import TrainPlace, claim_folder, rehearse
from thinwire.run.summary import show_summary


@dataclass(frozen=True, kw_only=True)
class SimPlace:
    """The simulated network, and where the run is kept."""

    bandwidth: str = "inf"
    """Of each worker's link, such as 100mbit; a comma-separated list gives each worker its own."""
    down: str | None = None
    """Downward bandwidth where it differs, as on home links."""
    latency: str = "0ms"
    """Of one message, such as 20ms; or a comma-separated list."""
    step_time: str | None = None
    """Time of one local step, such as 100ms, or a list with a straggler, such as 100ms,100ms,300ms; by default measured."""
    out: str | None = None
    """The run folder; by default runs/sim-ALGORITHM-TASK-TIME."""


def main(arguments: list[str]) -> int:
    """Train on simulated workers and report simulated time."""
    config, place = parse_run("sim", arguments, SimPlace, None)

    config = replace(config, workers=config.workers or 2)
    if config.shards != 1:
        raise ConfigError(f"the simulator does not shard models, got --shards {config.shards}")
    network = Network(
        bandwidth=one_or_each(place.bandwidth, parse_bandwidth),
        latency=one_or_each(place.latency, parse_duration),
        down=None if place.down is None else one_or_each(place.down, parse_bandwidth),
    )
    assert config.workers is not None
    network.check(config.workers)
    step_time = None if place.step_time is None else one_or_each(place.step_time, parse_duration)
    if isinstance(step_time, tuple) and len(step_time) != config.workers:
        raise ConfigError(f"step-time lists {len(step_time)} workers, but there are {config.workers}")
    rehearse(config)
    folder = claim_folder(config, TrainPlace(out=place.out or new_folder(f"sim-{config.algorithm}-{config.task}")))
    figures = simulate(config, folder, network=network, step_time=step_time, console=Console())
    show_summary(folder)
    computing = figures["simulated_seconds"] - figures["waiting"]
    how = f"{place.step_time} per step" if place.step_time else "computing as fast as one worker does on this machine"
    print(
        f"simulated time {figures['simulated_seconds']:.1f} s at {place.bandwidth} and {place.latency} ({how}): "
        f"{computing:.1f} s computing, {figures['waiting']:.1f} s waiting on the wire"
    )
    return 0
