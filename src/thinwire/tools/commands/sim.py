"""`thinwire sim`: the same training on simulated workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from thinwire.tools.config import new_folder
from thinwire.tools.flags import parse_run
from thinwire.tools.runners import SimulatedRunner
from thinwire.tools.start import TrainFlags, claim_folder, rehearse
from thinwire.tools.summary import read_summary, show_summary


@dataclass(frozen=True, kw_only=True)
class SimFlags:
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
    config, flags = parse_run("sim", arguments, SimFlags, None)

    config = replace(config, workers=config.workers or 2)
    runner = SimulatedRunner(bandwidth=flags.bandwidth, down=flags.down, latency=flags.latency, step_time=flags.step_time)
    runner.check(config)
    rehearse(config)
    out = flags.out or new_folder(f"sim-{config.algorithm}-{config.task}")
    folder = claim_folder(config, TrainFlags(out=out), where=runner.name)
    runner.run(folder, Console())
    show_summary(folder)
    figures = read_summary(folder)
    computing = figures["simulated_seconds"] - figures["waiting"]
    how = f"{flags.step_time} per step" if flags.step_time else "computing as fast as one worker does on this machine"
    print(
        f"simulated time {figures['simulated_seconds']:.1f} s at {flags.bandwidth} and {flags.latency} ({how}): "
        f"{computing:.1f} s computing, {figures['waiting']:.1f} s waiting on the wire"
    )
    return 0
