"""The command line. torch is imported only by the commands that need it, so that `thinwire --help` answers at once."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from thinwire import __version__
from thinwire.errors import ConfigError, ThinwireError

HELP = """\
thinwire trains one PyTorch model on many workers joined by thin wires.

usage: thinwire COMMAND [options]

  demo          Train a small GPT on 2 real workers with DDP, DeMo and DiLoCo; compare loss, bytes
                and the speed on a link of 100 Mbit/s. About 3 minutes.
  train         Train with real worker processes. Starts them itself on this machine; under
                torchrun it joins the job it is in.
  sim           The same training on simulated workers over a network of your choice: how long
                would it take at 100 Mbit/s and 20 ms?
  compare       Run several methods with several seeds, and record loss, bytes and time of each:
                thinwire compare ddp demo "diloco --H 32" --task gpt-nano --workers 4 --seeds 3
  report        Turn runs into one page: loss against bytes, steps and time, with a table.
  plan          What each method would cost on your link, and which one to take:
                thinwire plan --params 1.3b --workers 8 --bandwidth 200mbit --step-time 0.9s
  keys          Make a key, with which a worker signs what it sends to an object store.
  run           Make a run on an object store, whose workers come and go, and change its roster:
                thinwire run create s3://bucket/run --key owner.key --add ed25519:...
  lab           A real thin wire on this machine: network namespaces shaped to a bandwidth.
  doctor        Check this machine, and measure bandwidth and latency between ranks.
  algorithms    List the methods, with what each sends and keeps.
  tasks         List the models and data that are built in.
  beta          Propose the decay of a slow momentum for a period: thinwire beta 32 --steps 2000

examples
  thinwire train --algorithm diloco --task gpt-nano --workers 4 --steps 300 --H 32
  thinwire train --algorithm diloco --help            its settings; --help-all shows every flag
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
    except KeyboardInterrupt as stop:  # no error: it says what is kept and how to go on, where there is anything
        print(f"thinwire: stopped by Ctrl-C{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output has gone, for instance `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.stdout.flush()
    sys.exit(code)


def _complain(what: object, code: int) -> int:
    print(f"thinwire: error: {what}", file=sys.stderr)
    return code


# Commands with a module of their own in `thinwire.tools.commands`, and the short ones below.
MODULES = ("demo", "train", "sim", "compare", "report", "plan", "keys", "run", "lab", "doctor")
LOOKED_AT = ("train", "sim", "compare", "report", "plan", "doctor")  # for what is wrong, before torch is imported


def _dispatch(arguments: list[str]) -> int:
    lists: dict[str, Callable[[list[str]], int]] = {"algorithms": _algorithms, "tasks": _tasks, "beta": _beta}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        print(f"thinwire {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    if command in lists:
        return lists[command](rest)
    if command in MODULES:
        if command in LOOKED_AT:
            importlib.import_module("thinwire.tools.early").look(command, rest)
        return importlib.import_module(f"thinwire.tools.commands.{command}").main(rest)
    known = [*MODULES, *lists]
    close = difflib.get_close_matches(command, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(f"unknown command {command!r}{hint}: choose from {', '.join(known)}")


# --- Lists ----------------------------------------------------------------------------------------------------


def _algorithms(arguments: list[str]) -> int:
    """List the methods."""
    _no_more(arguments, "algorithms")
    from rich.console import Console
    from rich.table import Table

    from thinwire.tools.names import FIXED, OF_PAPERS, described

    table = Table("name", "what it does", "equal on all workers", title="thinwire train --algorithm NAME", title_justify="left")
    for method in described().values():
        equal = ", ".join([*method.replicated, *(f"{key} after each round" for key in method.synced)])
        table.add_row(method.name, method.summary, equal)
    for name, (base, fixed) in FIXED.items():
        settings = ", ".join(f"{k}={v}" for k, v in fixed.items())
        table.add_row(name, f"{base} with {settings}" if fixed else _IN_WORDS[name], "")
    for name, (base, paper) in OF_PAPERS.items():
        table.add_row(name, f"{base}: {described()[base].papers[paper]}", "")
    Console().print(table)
    return 0


_IN_WORDS = {
    "ddp": "data-parallel, by torch's DistributedDataParallel on real processes",
    "alone": "No exchange at all: what training costs without a wire, and what is lost by it.",
}


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
    from thinwire.maths.propose import propose_beta
    from thinwire.tools.command_flags import BetaFlags
    from thinwire.tools.flags import parse_flags

    flags = parse_flags(BetaFlags, "beta", arguments)
    print(propose_beta(flags.K, retention=flags.retention, steps=flags.steps).explanation)
    return 0


def _no_more(arguments: list[str], command: str) -> None:
    if arguments and arguments[0] not in ("-h", "--help"):
        raise ConfigError(f"thinwire {command} takes no arguments, got {' '.join(arguments)!r}")
