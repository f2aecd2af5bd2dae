"""What is looked at before a command is imported, which brings torch and takes seconds: names and flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from thinwire.errors import ConfigError
from thinwire.tasks import check_name
from thinwire.tools.arms import alternatives, split_arguments, split_words
from thinwire.tools.command_flags import CompareFlags, DoctorFlags, PlanFlags, ReportFlags, SimFlags, TrainFlags
from thinwire.tools.config import RunConfig
from thinwire.tools.flags import first_look, parse_flags, peek, wants_help, with_json_name
from thinwire.tools.names import NoSetting

_OF_RUNS = {"train": TrainFlags, "sim": SimFlags}
_PLAIN = {"plan": PlanFlags, "doctor": DoctorFlags, "report": ReportFlags}


def look(command: str, arguments: Sequence[str]) -> None:
    """Refuse what is wrong about a command; answer `--help` where that needs no torch; say what is about to start.

    Args:
        command: any; nothing is known of some.
        arguments: the words after it.
    """
    words = list(arguments)
    if command == "train" and peek(words, "--join") is not None:
        return  # its settings are in the run, and the flags are others
    if command in _PLAIN:
        flags = parse_flags(_PLAIN[command], command, with_json_name(words))
        if isinstance(flags, PlanFlags) and flags.task is not None:
            check_name(flags.task)
    elif command in _OF_RUNS and not wants_help(words):
        run, _ = first_look(command, words, _OF_RUNS[command])
        _announce(run, simulated=command == "sim")
    elif command == "compare" and not wants_help(words):
        _look_at_arms(words)


def _look_at_arms(arguments: list[str]) -> None:
    words, common = split_arguments(arguments)
    for one in (one for word in words for one in alternatives(word)):
        name, algorithm, own = split_words(one)
        try:
            first_look("compare", [*common, "--algorithm", algorithm, *own], CompareFlags)
        except ConfigError as error:
            hint = "; a setting of one method is given with it, such as 'diloco --H 32'" if isinstance(error, NoSetting) else ""
            raise ConfigError(f"in {name!r}: {error}{hint}") from error


def _announce(run: RunConfig, *, simulated: bool) -> None:
    """Say at once what is being started: it takes a while until there is a first step to show."""
    if "WORLD_SIZE" in os.environ:  # torchrun has started it
        return
    workers = (run.workers or 2) * run.shards
    kind = "simulated worker" if simulated else "worker" if run.shards == 1 else "process"
    plural = "" if workers == 1 else "es" if kind == "process" else "s"
    print(f"starting {workers} {kind}{plural} ...", file=sys.stderr, flush=True)
