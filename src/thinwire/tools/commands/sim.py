"""`thinwire sim`: the same training on simulated workers."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from thinwire.tools.command_flags import SimFlags, TrainFlags
from thinwire.tools.config import new_folder
from thinwire.tools.flags import parse_run
from thinwire.tools.runners import SimulatedRunner
from thinwire.tools.start import claim_folder, rehearse
from thinwire.tools.summary import read_summary, show_summary


def main(arguments: list[str]) -> int:
    """Train on simulated workers and report simulated time."""
    config, flags = parse_run("sim", arguments, SimFlags, None)

    config = replace(config, workers=config.workers or 2)
    words = {name: getattr(flags, name) for name in ("bandwidth", "down", "latency", "step_time", "links", "churn", "inside")}
    runner = SimulatedRunner(**words, sites=None if flags.sites is None else str(flags.sites))
    runner.check(config)
    rehearse(config)
    out = flags.out or new_folder(f"sim-{config.algorithm}-{config.task}")
    folder = claim_folder(config, TrainFlags(out=out), where=runner.name)
    try:
        runner.run(folder, Console())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was simulated so far is in {folder}: thinwire report {folder}") from None
    show_summary(folder)
    figures = read_summary(folder)
    computing = figures["simulated_seconds"] - figures["waiting"]
    how = f"{flags.step_time} per step" if flags.step_time else "computing as fast as one worker does on this machine"
    print(
        f"simulated time {figures['simulated_seconds']:.1f} s {runner.wire} ({how}): "
        f"{computing:.1f} s computing, {figures['waiting']:.1f} s waiting on the wire"
    )
    return 0
