"""What a run is: the settings of `thinwire train` and `thinwire sim`, and the run.toml that records them. No torch here."""

from __future__ import annotations

import json
import math
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

import thinwire
from thinwire.errors import ConfigError, check_not_negative, check_whole_number
from thinwire.lr_schedules import DECAY, LRSchedule, check_lr_schedule, lr_of_step
from thinwire.tools.names import FIXED, OF_PAPERS, check_algorithm

Inner = Literal["adamw", "adam", "sgd", "momentum", "muon", "qhadam", "qhadopt", "qhm", "qhmuon", "low-rank"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the result of a run."""

    rare: ClassVar[frozenset[str]] = frozenset(  # only `--help-all` shows them
        {
            "shards",
            "lr_warmup",
            "lr_final",
            "lr_decay",
            "qh_betas",
            "qh_omegas",
            "qh_lives",
            "beta2",
            "qh_warmup",
            "qh_reset",
            "qh_lr_scale",
            "warm_lr",
            "warm_by",
            "warm_wire",
            "low_rank_source",
            "full_rank",
            "route",
            "back",
            "owner_feedback",
        }
        | {"clip_norm", "weight_decay", "non_iid", "device", "vocab", "val_windows", "val_part"}
    )

    algorithm: str = "diloco"
    """Which method; `thinwire algorithms` lists them, `thinwire train --algorithm NAME --help` shows its settings."""
    task: str = "gpt-nano"
    """Which model and data; `thinwire tasks` lists them."""
    workers: int | None = None
    """How many workers; by default 2, or as many as the torchrun job has."""
    shards: int = 1
    """Processes that share one worker's model by FSDP2; the slow wire joins workers only."""
    steps: int = 300
    """Training steps of each worker."""
    seed: int = 0
    """Of weights, batches and non-IID splits."""
    lr: float = 1.5e-3
    """Peak learning rate, of the inner optimizer where there is one."""
    lr_warmup: int = 20
    """Steps over which the learning rate rises to its peak."""
    lr_schedule: LRSchedule = "cosine"
    """wsd falls to zero at the end."""
    lr_final: float | None = None
    """Where the decay of the learning rate ends, as a part of the peak; by default at 0.1 for cosine and at 0 for wsd."""
    lr_decay: float = DECAY
    """The last part of the run, over which wsd lets the learning rate fall."""
    inner: Inner | None = None
    """Optimizer of the local steps, where there are any; by default adamw, and qhadam for mt-dao. docs/cli.md has them all."""
    qh_betas: tuple[float, ...] | None = None
    """Of the momenta of the qh* optimizers; by default one that suits the period, see `thinwire beta`."""
    qh_omegas: tuple[float, ...] | None = None
    """Weights of those momenta, by default 0.95 for one; what is missing to 1 is the weight of the raw gradient."""
    qh_lives: float = 0.0
    """Let those momenta grow slow with the run: at step t a half-life is at most t / qh-lives; 0 has them slow at once."""
    beta2: float | None = None
    """Decay of the second moment; by default 0.95, of demo 0.99, of adam 0.999, of qhadopt 0.9999, of the other qh* at least
    beta squared. Of methods without an inner optimizer it is the second of --betas."""
    qh_warmup: int | None = None
    """Steps with beta 0.9 and omega 1 before the qh* optimizers switch to slow momenta; by default those of the warm start."""
    qh_reset: Literal["zero", "age"] = "zero"
    """What becomes of the momenta at that switch: zero, or kept, with betas that grow from 0.9 on by qh-lives (age)."""
    qh_lr_scale: float = 1.0
    """Multiplies the learning rate after that switch."""
    low_rank_source: Literal["difference", "gradient", "sketch"] | None = None
    """What low-rank takes its projectors from; by default differences of parameters. In a start of lordo, as lordo does."""
    full_rank: Literal["embeddings"] | None = None
    """What lordo and low-rank do not project; by default nothing but vectors."""
    warm_start: int = 0
    """So many first steps are synchronous (gradients averaged, inner optimizer as chosen); then the method takes over."""
    warm_lr: float | None = None
    """Peak learning rate during the warm start; by default lr."""
    warm_by: Literal["ddp", "demo"] = "ddp"
    """Who takes the steps of the warm start: averaged gradients, or demo, whose second moments the inner optimizer then has."""
    warm_wire: str | None = None
    """What demo sends in a warm start; by default "DCT(64) >> TopK(256) >> Sign()"."""
    clip_norm: float = 1.0
    """Scale gradients down to this norm: each worker its own, or the mean where gradients are averaged; 0 never."""
    weight_decay: float = 0.01
    """Of adamw and of methods with an update rule of their own."""
    batch: int | None = None
    """Sequences or images per worker and step; by default the task's own."""
    data: str | None = None
    """A text file or folder of text for gpt tasks; the folder of an image set."""
    vocab: int | None = None
    """Of gpt tasks: tokens of a byte-pair encoding that is trained on the text, once; by default a token is a byte."""
    non_iid: float | None = None
    """How far the workers' data differ; by default not at all. See `thinwire tasks`."""
    device: Device = "auto"
    """Where to compute: auto takes GPUs where torch finds them."""
    wire: str | None = None
    """What is sent, if not the method's own choice: fp32, bf16, fp16, int8, fp4, 2-bit, ternary, 1-bit, or a chain such as
    "DCT(64) >> TopK(32) >> Sign()"; "fp4 until 64, 1-bit"."""
    route: Literal["gather", "owners", "auto"] = "gather"
    """How messages that the wire cannot average reach all workers: each one to all (gather); averaged by owners of the blocks,
    so that bytes do not grow with the workers (owners); or whichever sends fewer bytes (auto)."""
    back: str | None = None
    """What owners send, a chain with the transform of --wire; by default four times the entries that they get of a block."""
    owner_feedback: float | None = None
    """The part of what an owner has left out that it adds in the next round; by default 0.9 with demo, and 1 with others."""
    val_windows: int | None = None
    """Of gpt tasks: windows of validation text; by default 64."""
    val_part: Literal["all", "tuning", "claim"] = "all"
    """Evaluate on all validation samples, or on one half of them: one to choose settings on, the other to report."""
    eval_every: int = 50
    """Steps between evaluations of the shared model; 0 evaluates at the end only."""
    settings: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """The algorithm's own settings."""

    def validate(self) -> None:
        """Raise a `ConfigError` for what can be seen to be wrong without torch."""
        for name in ("shards", "steps"):
            check_whole_number(name, getattr(self, name))
        for name in ("workers", "batch"):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name))
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr must be above zero, got {self.lr!r}")
        if self.warm_lr is not None and not 0 < self.warm_lr < math.inf:
            raise ConfigError(f"warm-lr must be above zero, got {self.warm_lr!r}")
        if self.warm_start >= self.steps:
            raise ConfigError(
                f"warm-start must be below steps={self.steps}, so that the method has its turn, got {self.warm_start}"
            )
        if self.warm_wire is not None and self.warm_by != "demo":
            raise ConfigError(f"warm-wire is what demo sends in a warm start: give --warm-by demo, got {self.warm_wire!r}")
        if (self.back is not None or self.owner_feedback is not None) and self.route != "owners":
            raise ConfigError(f"back and owner-feedback are of owners: give --route owners, got --route {self.route}")
        check_lr_schedule(self.lr_schedule, warmup=self.lr_warmup, final=self.lr_final, decay=self.lr_decay)
        for name in ("eval_every", "seed", "warm_start", "qh_warmup"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 0, got {getattr(self, name)!r}")
        for name in ("weight_decay", "clip_norm", "qh_lives"):
            check_not_negative(name.replace("_", "-"), getattr(self, name))

    def lr_at(self, step: int) -> float:
        """Learning rate of step `step` (from 1), a pure function of it: linear warm-up, then as `lr_schedule` says."""
        peak = self.warm_lr if self.warm_lr is not None and step <= self.warm_start else self.lr
        how: dict[str, Any] = {"warmup": self.lr_warmup, "final": self.lr_final, "decay": self.lr_decay}
        return lr_of_step(self.lr_schedule, step, steps=self.steps, peak=peak, **how)


@cache
def presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Names that stand for an algorithm with some of its settings fixed; "wire" is what it sends, "inner" its inner optimizer.

    Settings that the run has too, such as the learning rate, are left to the run.
    """
    from thinwire.algorithms import found  # here, since it brings torch

    run = {f.name for f in fields(RunConfig)}
    named: dict[str, tuple[str, dict[str, Any]]] = dict(FIXED)
    for name, (algorithm, method) in OF_PAPERS.items():
        given = getattr(found()[algorithm], method).__func__(_settings_of, None, None)
        fixed = {"inner": "adamw"} if algorithm == "mt-dao" else {}
        fixed |= {setting: value for setting, value in given.items() if setting not in run and setting != "codec"}
        named[name] = algorithm, fixed | ({"wire": repr(given["codec"])} if "codec" in given else {})
    return named


def _settings_of(*_: object, **settings: Any) -> dict[str, Any]:
    """Stands in for the class in a class method that makes an optimizer, to learn with which settings it would."""
    return settings


def resolve_algorithm(name: str, known: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The algorithm behind a name of the command line, and the settings that the name fixes."""
    if name in presets():
        return presets()[name]
    if name not in known:
        check_algorithm(name)
    return name, {}


# --- run.toml ------------------------------------------------------------------------------------------------------------

# These may differ between a run and its continuation: they do not change what was computed so far.
MAY_CHANGE = {"steps", "workers", "eval_every"}


def versions() -> dict[str, str]:
    """What the result may depend on besides the settings."""
    import numpy as np  # here, since torch takes seconds; their metadata may be missing where they were built from source
    import torch

    return {
        "thinwire": thinwire.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def now() -> str:
    """The time, for a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def new_folder(name: str) -> str:
    """Where a run goes that was given no folder."""
    return f"runs/{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none: aside first, then by its name."""
    aside = path.with_name(f".{path.name}")
    try:
        aside.write_text(text, encoding="utf-8")
    except OSError:  # a full disk: what has that name is as it was, and nothing is left beside it
        aside.unlink(missing_ok=True)
        raise
    aside.rename(path)


def about_run(path: Path) -> dict[str, object]:
    """What an earlier run.toml says of how it came about; empty if there is none."""
    return tomllib.loads(path.read_text(encoding="utf-8")).get("about", {}) if path.exists() else {}


def write_run_toml(path: Path, config: RunConfig, **about: object) -> None:
    """Record the resolved config, the versions and the time."""
    tables = {
        "run": {k: v for k, v in asdict(config).items() if k != "settings" and v is not None},
        "settings": config.settings,
        "versions": versions(),
        "about": {"started": now(), **about},
    }
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
    write_whole(path, "\n".join(lines))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # A JSON string is a TOML string, but for surrogate pairs and DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def config_of(values: Mapping[str, Any]) -> RunConfig:
    """The config of a run as JSON and TOML give it back: lists are tuples, and what is not known is left out."""
    known = {f.name for f in fields(RunConfig)}
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
    if plain.get("route", "gather") != "owners":
        plain.pop("owner_feedback", None)  # 1 in all runs from before methods had their own
    return RunConfig(**plain)


def read_run_toml(path: Path) -> RunConfig:
    """The config of an earlier run."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        tables["run"].setdefault("clip_norm", 0.0)  # of a run from before there was such a setting
        return config_of({**tables["run"], "settings": tables["settings"]})
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as cause:
        raise ConfigError(f"{path} is not a run.toml of thinwire: {cause}") from cause


def check_same_run(path: Path, old: RunConfig, new: RunConfig, *, resumed: bool = False) -> None:
    """Raise a `ConfigError` that names what differs where a folder holds a run of another config.

    Args:
        path: the folder.
        old: of the run that it holds.
        new: that was asked for.
        resumed: whether that run goes on. Then a codec may be named where none was, since defaults change between versions.
    """
    for key, was in asdict(old).items():
        now = asdict(new)[key]
        if key == "settings":
            was_set, now_set = {**was}, {**now}
            for name in sorted(was_set.keys() | now_set.keys()):
                if was_set.get(name) != now_set.get(name):
                    _refuse(path, name, was_set.get(name), now_set.get(name))
        elif key not in MAY_CHANGE and was != now and not (resumed and key == "wire" and was is None):
            _refuse(path, key, was, now)


def _refuse(path: Path, name: str, was: object, now: object) -> None:
    raise ConfigError(f"{path} holds a run of another config: {name} was {was!r}, now it is {now!r}; choose another --out")
