"""The command line. torch is imported only by the commands that need it, so that `thinwire --help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire import __version__
from thinwire.errors import ConfigError, ThinwireError

if TYPE_CHECKING:
    from thinwire.links import Link
    from thinwire.run.config import RunConfig

HELP = """\
thinwire trains one PyTorch model on many workers joined by thin wires.

usage: thinwire COMMAND [options]

  demo          Train a small GPT on 2 real workers, once with all gradients sent and once with
                the best method so far, and compare loss and bytes. About 2 minutes.
  train         Train with real worker processes. Starts them itself on this machine; under
                torchrun it joins the job it is in.
  sim           The same training on simulated workers over a network of your choice: how long
                would it take at 100 Mbit/s and 20 ms?
  algorithms    List the methods, with what each sends and keeps.
  tasks         List the models and data that are built in.
  beta          Propose the decay of a slow momentum for a period: thinwire beta 32 --steps 2000

examples
  thinwire train --algorithm diloco --task gpt-nano --workers 4 --steps 300 --H 32
  thinwire train --algorithm diloco --help            all settings of that method
  thinwire train --resume --out runs/my-run           go on from the last checkpoint
  torchrun --nproc-per-node 4 -m thinwire train --algorithm ddp --task gpt-nano
  thinwire sim --algorithm ddp --bandwidth 100mbit --latency 20ms --workers 8

In your own training loop it is one line: wrap your optimizer.
  opt = thinwire.DiLoCo(torch.optim.AdamW(model.parameters()), thinwire.connect(), H=32)
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed while running, 2 wrong settings, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
    except ConfigError as error:
        code = _complain(error, 2)
    except ThinwireError as error:
        code = _complain(error, 1)
    except KeyboardInterrupt:
        code = _complain("stopped by Ctrl-C; finished checkpoints are kept", 130)
    except BrokenPipeError:  # the reader of our output has gone, for instance `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def _complain(what: object, code: int) -> int:
    print(f"thinwire: error: {what}", file=sys.stderr)
    return code


def _dispatch(arguments: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "demo": _demo,
        "train": _train,
        "sim": _sim,
        "algorithms": _algorithms,
        "tasks": _tasks,
        "beta": _beta,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        print(f"thinwire {__version__}")
        return 0
    if arguments[0] not in commands:
        import difflib

        close = difflib.get_close_matches(arguments[0], commands, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"unknown command {arguments[0]!r}{hint}: choose from {', '.join(commands)}")
    return commands[arguments[0]](arguments[1:])


# --- train -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainPlace:
    """Where a run lives and how it is kept safe; does not change its result."""

    out: str | None = None
    """The run folder; by default runs/ALGORITHM-TASK-TIME."""
    resume: bool = False
    """Go on from the last checkpoint of the run in --out, with the settings it was started with."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for none."""
    timeout: str = "120s"
    """How long a worker waits for the others before it gives up and names who is missing; longer than an evaluation."""


def _train(arguments: list[str]) -> int:
    """Train with real worker processes; under torchrun join the job."""
    saved = _saved_config(arguments)
    config, place = _parse("train", arguments, TrainPlace, saved)
    from thinwire.links.mesh import worker_count
    from thinwire.network import parse_duration

    timeout = parse_duration(place.timeout)
    if timeout <= 0:
        raise ConfigError(f"timeout must be above zero seconds, got {place.timeout!r}")
    if place.checkpoint_every < 0:
        raise ConfigError(f"checkpoint-every must be at least 0, got {place.checkpoint_every}")
    in_job = worker_count(config.shards)
    if in_job is not None and config.workers not in (None, in_job) and saved is None:
        raise ConfigError(f"--workers {config.workers} does not fit this torchrun job, which has {in_job} workers")
    config = replace(config, workers=in_job or config.workers or 2)
    other_wire = config.wire not in (None, "fp32")
    if config.algorithm == "ddp" and (other_wire or config.shards > 1):
        flag = f"--wire {config.wire}" if other_wire else f"--shards {config.shards}"
        raise ConfigError(f"ddp is torch's DistributedDataParallel, which ignores {flag}: use --algorithm data-parallel")
    _rehearse(config)
    if in_job is not None:
        return _join(config, place, timeout)
    folder = _claim_folder(config, place)
    from thinwire.run.launch import launch
    from thinwire.run.summary import show_summary

    assert config.workers is not None
    processes = config.workers * config.shards
    launch(folder, processes, timeout=timeout, resume=place.resume, checkpoint_every=place.checkpoint_every)
    show_summary(folder)
    return 0


def _join(config: RunConfig, place: TrainPlace, timeout: float) -> int:
    """Be one worker of the torchrun job that this process is in."""
    from thinwire.links import disconnect
    from thinwire.run.summary import show_summary
    from thinwire.run.worker import join, work

    link = join(config, timeout=timeout)
    folder = _agree_on_folder(config, place, link)
    work(config, folder, link, resume=place.resume, checkpoint_every=place.checkpoint_every)
    if link.rank == 0:
        show_summary(folder)
    disconnect()
    return 0


def _agree_on_folder(config: RunConfig, place: TrainPlace, link: Link) -> Path:
    """The first process claims the folder and tells the others, or all of them refuse together."""
    from thinwire.run.train import tell_all

    verdict: dict[str, str] = {}
    if link.rank == 0:
        try:
            verdict = {"folder": str(_claim_folder(config, place))}
        except ConfigError as error:
            verdict = {"error": str(error)}
    verdict = tell_all(link, verdict)
    if "error" in verdict:
        raise ConfigError(verdict["error"])
    return Path(verdict["folder"])


def _saved_config(arguments: list[str]) -> RunConfig | None:
    """The config of the run that --resume names."""
    if "--resume" not in arguments or {"-h", "--help"} & set(arguments):
        return None
    from thinwire.run.config import read_run_toml

    out = _peek(arguments, "--out")
    if out is None:
        raise ConfigError("--resume needs --out FOLDER, the folder of the run to go on with")
    path = Path(out) / "run.toml"
    if not path.is_file():
        raise ConfigError(f"nothing to resume: {path} does not exist")
    return read_run_toml(path)


def _claim_folder(config: RunConfig, place: TrainPlace) -> Path:
    """Make the run folder and its run.toml; refuse one that holds another run."""
    from thinwire.run.config import about_run, check_same_run, new_folder, now, read_run_toml, write_run_toml

    folder = Path(place.out or new_folder(f"{config.algorithm}-{config.task}"))
    record = folder / "run.toml"
    if record.exists():
        check_same_run(folder, read_run_toml(record), config)
        if not place.resume:
            raise ConfigError(f"{folder} already holds this run: add --resume to go on with it, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        command = " ".join(sys.argv[1:])
        new = {"resumed": now(), "resumed_by": command} if place.resume else {"command": command, "cores": os.cpu_count() or 0}
        write_run_toml(record, config, **{**about_run(record), **new})
    except OSError as cause:
        raise ConfigError(f"cannot write the run folder {folder}: {cause.strerror or cause}") from cause
    return folder


def _rehearse(config: RunConfig) -> None:
    """Build everything small once, so that a wrong setting is one line now and not a crash in every worker later."""
    import torch

    from thinwire.links import SoloLink
    from thinwire.run.train import device_of, optimizer_of, task_of

    device_of(config)
    task = task_of(config, config.workers or 2)
    try:
        optimizer_of(config, torch.nn.Linear(2, 2), SoloLink()).check_total(config.steps)
    except ValueError as error:  # torch's own, too
        raise ConfigError(str(error)) from error
    if config.shards > 1:
        if any(p.dim() == 0 for p in task.model().parameters()):
            raise ConfigError(f"the task {config.task} has a 0-d parameter, which FSDP2 does not shard: use --shards 1")
        if len(task.batch(0, 1)[0]) % config.shards:
            raise ConfigError(f"a batch of {len(task.batch(0, 1)[0])} does not divide over {config.shards} shards")


# --- sim -------------------------------------------------------------------------------------------------------------------


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


def _sim(arguments: list[str]) -> int:
    """Train on simulated workers and report simulated time."""
    config, place = _parse("sim", arguments, SimPlace, None)
    from rich.console import Console

    from thinwire.network import Network, parse_bandwidth, parse_duration
    from thinwire.run.config import new_folder
    from thinwire.run.simulate import simulate
    from thinwire.run.summary import show_summary

    config = replace(config, workers=config.workers or 2)
    if config.shards != 1:
        raise ConfigError(f"the simulator does not shard models, got --shards {config.shards}")
    network = Network(
        bandwidth=_one_or_each(place.bandwidth, parse_bandwidth),
        latency=_one_or_each(place.latency, parse_duration),
        down=None if place.down is None else _one_or_each(place.down, parse_bandwidth),
    )
    assert config.workers is not None
    network.check(config.workers)
    step_time = None if place.step_time is None else _one_or_each(place.step_time, parse_duration)
    if isinstance(step_time, tuple) and len(step_time) != config.workers:
        raise ConfigError(f"step-time lists {len(step_time)} workers, but there are {config.workers}")
    _rehearse(config)
    folder = _claim_folder(config, TrainPlace(out=place.out or new_folder(f"sim-{config.algorithm}-{config.task}")))
    figures = simulate(config, folder, network=network, step_time=step_time, console=Console())
    show_summary(folder)
    computing = figures["simulated_seconds"] - figures["waiting"]
    how = f"{place.step_time} per step" if place.step_time else "computing as fast as one worker does on this machine"
    print(
        f"simulated time {figures['simulated_seconds']:.1f} s at {place.bandwidth} and {place.latency} ({how}): "
        f"{computing:.1f} s computing, {figures['waiting']:.1f} s waiting on the wire"
    )
    return 0


def _one_or_each(text: str, parse: Callable[[str], float]) -> float | tuple[float, ...]:
    values = tuple(parse(part) for part in text.split(","))
    return values[0] if len(values) == 1 else values


# --- Flags -----------------------------------------------------------------------------------------------------------------


def _parse(command: str, arguments: list[str], place_type: Any, saved: RunConfig | None) -> tuple[RunConfig, Any]:
    """The config and place that the arguments give; the algorithm decides which settings there are."""
    import tyro

    from thinwire.algorithms import found
    from thinwire.run.config import RunConfig, resolve_algorithm
    from thinwire.run.settings import as_dict, settings_class

    base = saved or RunConfig()
    chosen = _peek(arguments, "--algorithm") or base.algorithm
    algorithms = found()
    name, fixed = resolve_algorithm(chosen, algorithms)
    own = settings_class(algorithms[name], {**fixed, **(base.settings if chosen == base.algorithm else {})})

    def flags(
        run: RunConfig = replace(base, algorithm=chosen, settings={}),  # noqa: B008
        settings: own = own(),  # type: ignore[valid-type] # noqa: B008
        place: place_type = place_type(),  # type: ignore[valid-type] # noqa: B008
    ) -> tuple[RunConfig, Any, Any]:
        return run, settings, place

    flags.__annotations__ = {"run": RunConfig, "settings": own, "place": place_type}
    run, settings, place = tyro.cli(
        flags,
        prog=f"thinwire {command}",
        description=f"{_ABOUT[command]} Settings of {chosen}: {_first_line(algorithms[name])}",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )
    config = replace(run, settings=as_dict(settings), data=_absolute(run.data))
    config.validate()
    return config, place


_ABOUT = {
    "train": "Train with real worker processes: started here, or joined under torchrun.",
    "sim": "Train on simulated workers and report the time that a network of your choice would take.",
}


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").splitlines()[0]


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


def _peek(arguments: list[str], flag: str) -> str | None:
    """The value of a flag before the real parsing, which needs it."""
    for i, argument in enumerate(arguments):
        if argument == flag and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
    return None


# --- Lists and the demo ----------------------------------------------------------------------------------------------------


def _algorithms(arguments: list[str]) -> int:
    """List the methods."""
    _no_more(arguments, "algorithms")
    from rich.console import Console
    from rich.table import Table

    from thinwire.algorithms import found
    from thinwire.run.config import PRESETS

    table = Table("name", "what it does", "equal on all workers", title="thinwire train --algorithm NAME", title_justify="left")
    for name, cls in found().items():
        equal = ", ".join([*sorted(cls.replicated), *(f"{key} after each round" for key in sorted(cls.synced))])
        table.add_row(name, _first_line(cls), equal)
    for name, (base, fixed) in PRESETS.items():
        settings = ", ".join(f"{k}={v}" for k, v in fixed.items()) or "by torch's DistributedDataParallel on real processes"
        table.add_row(name, f"{base} with {settings}" if fixed else f"{base}, {settings}", "")
    Console().print(table)
    return 0


def _tasks(arguments: list[str]) -> int:
    """List the built-in models and data."""
    _no_more(arguments, "tasks")
    from thinwire.tasks import TASKS

    width = max(map(len, TASKS))
    for name, description in TASKS.items():
        print(f"{name:{width}}  {description}")
    print(
        "\n--data reads your own text (gpt-*) or an image set. --non-iid makes the workers' data differ: for gpt-* the share\n"
        "of sequences from a worker's own part of the files (0 to 1), for images the alpha of a Dirichlet split by label,\n"
        "for the quadratic the distance from each worker's optimum to the common one."
    )
    return 0


def _beta(arguments: list[str]) -> int:
    """Propose the beta of a slow momentum and say why."""
    import tyro

    from thinwire.optim.propose import propose_beta

    def flags(K: int, /, *, steps: int | None = None, retention: float = 0.9) -> str:
        """Propose the decay (beta) of the slow momentum of mt-dao, so that what workers agreed on outlives a period.

        Args:
            K: steps between two averages of the momentum.
            steps: length of the run; a momentum must be faster than that.
            retention: how much of the agreed momentum shall be left after K steps.
        """
        return propose_beta(K, retention=retention, steps=steps).explanation

    print(tyro.cli(flags, prog="thinwire beta", args=arguments))
    return 0


def _demo(arguments: list[str]) -> int:
    """Train twice on 2 real workers and compare."""
    from thinwire.run.demo import demo

    return demo(arguments)


def _no_more(arguments: list[str], command: str) -> None:
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ConfigError(f"thinwire {command} takes no arguments, got {' '.join(arguments)!r}")
