"""What is compared in the evidence for decoupled momentum: arms, their learning rates, seeds. One entry is one training run.

Every arm is tuned on seed 0 over as many points as any other with as many settings; the best point or two are then run on two
more seeds, and the one with the least mean loss counts. Arms that are there for reference have seed 0 only. All runs have 4
workers in the simulator, whose results are those of real processes bit for bit where messages are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from thinwire.tools.config import RunConfig

WORKERS = 4
STEPS = {"gpt-nano": 384, "cnn-fashion": 400}
BATCH = {"gpt-nano": 4, "cnn-fashion": 32}
SEEDS = (0, 1, 2)
FINALISTS = {"gpt-nano": 2, "cnn-fashion": 1}
H = 8


@dataclass(frozen=True)
class Arm:
    """A method and the points at which it is tuned.

    Attributes:
        name: in tables and figures.
        task: what is trained.
        algorithm: of `thinwire train`.
        wire: of `thinwire train`; None for the method's own.
        settings: of the algorithm, the same at all points.
        run: of the run, likewise: inner optimizer, betas, warm start and so on.
        grid: lists of values by setting ("lr", the run's and the algorithm's own); their product is searched.
        steps: of a run, if not the task's.
        batch: of one worker, if not the task's.
        seeds: the best points are run on all of these; with one seed the best is taken as it is.
        finalists: how many points that are.
    """

    name: str
    task: str
    algorithm: str
    wire: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    run: dict[str, Any] = field(default_factory=dict)
    finalists: int = 2
    steps: int | None = None
    batch: int | None = None

    def candidates(self) -> Iterator[dict[str, Any]]:
        """All points of the grid."""
        for values in itertools.product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


@dataclass(frozen=True)
class Run:
    """One training run; `key` tells it from all others."""

    arm: str
    task: str
    algorithm: str
    wire: str | None
    lr: float
    settings: dict[str, Any]
    seed: int
    steps: int
    batch: int
    run: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The command that repeats it."""
        flags = {"algorithm": self.algorithm, "task": self.task, "workers": WORKERS, "steps": self.steps, "batch": self.batch}
        flags |= {"seed": self.seed, "lr": self.lr, "eval-every": 0, "weight-decay": 0.01}
        flags |= {"wire": f'"{self.wire}"'} if self.wire else {}
        flags |= {name.replace("_", "-"): value for name, value in {**self.run, **self.settings}.items()}
        return "thinwire sim " + " ".join(_flag(name, value) for name, value in flags.items())


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, tuple):
        return f"--{name} {' '.join(map(str, value))}"
    return f"--{name} {value}"


def run_of(arm: Arm, point: dict[str, Any], seed: int) -> Run:
    """One run of an arm."""
    known = {f.name for f in fields(RunConfig)}
    settings = {**arm.settings, **{k: v for k, v in point.items() if k not in known}}
    run = {**arm.run, **{k: v for k, v in point.items() if k in known and k != "lr"}}
    steps, batch = arm.steps or STEPS[arm.task], arm.batch or BATCH[arm.task]
    return Run(arm.name, arm.task, arm.algorithm, arm.wire, point["lr"], settings, seed, steps, batch, run)


LRS = {"gpt-nano": [1e-3, 1.4e-3, 2e-3, 2.8e-3], "cnn-fashion": [4e-3, 8e-3, 1.6e-2, 3.2e-2]}  # of DeMo
INNER_LRS = {"gpt-nano": [1.4e-3, 2e-3], "cnn-fashion": [1.6e-2, 3.2e-2]}  # of AdamW between rounds
ADAMW_LRS = {"gpt-nano": [2e-3, 2.8e-3, 4e-3, 5.6e-3], "cnn-fashion": [8e-3, 1.6e-2, 3.2e-2, 6.4e-2]}


def _adamw(task: str) -> Arm:
    return Arm("AdamW-DDP", task, "data-parallel", grid={"lr": ADAMW_LRS[task]}, finalists=FINALISTS[task])


def _demo(name: str, task: str, wire: str, seeds: tuple[int, ...] = SEEDS, **settings: Any) -> Arm:
    return Arm(name, task, "demo", wire, settings, {"lr": LRS[task]}, seeds, finalists=FINALISTS[task])


def _diloco(task: str) -> Arm:
    grid = {"lr": INNER_LRS[task], "outer_lr": [0.7, 1.0], "outer_momentum": [0.0, 0.5] if task == "gpt-nano" else [0.5]}
    return Arm(f"DiLoCo H={H}", task, "diloco", None, {"H": H}, grid, finalists=FINALISTS[task])


def _decoupled(name: str, task: str, wire: str, *, betas: Sequence[float] = (0.9, 0.95)) -> Arm:
    grid = {"lr": INNER_LRS[task], "outer_lr": [0.7, 1.0], "beta": list(betas)}
    return Arm(name, task, "decoupled-diloco", wire, {"H": H}, grid, finalists=FINALISTS[task])


GPT = [
    _adamw("gpt-nano"),
    _demo("DeMo 1-bit k=172", "gpt-nano", "DCT(64) >> TopK(172) >> Sign()"),
    _decoupled("decoupled DiLoCo 1-bit k=128", "gpt-nano", "DCT(64) >> TopK(128) >> Sign()"),
    _diloco("gpt-nano"),
    _decoupled("decoupled DiLoCo 1-bit k=512", "gpt-nano", "DCT(64) >> TopK(512) >> Sign()", betas=[0.95]),
    _demo("DeMo 1-bit k=22", "gpt-nano", "DCT(64) >> TopK(22) >> Sign()"),
]

CNN = [
    _adamw("cnn-fashion"),
    _demo("DeMo 1-bit 3%", "cnn-fashion", "DCT(64) >> TopK(0.03) >> Sign()"),
    _diloco("cnn-fashion"),
    _decoupled("decoupled DiLoCo 1-bit 3%", "cnn-fashion", "DCT(64) >> TopK(0.03) >> Sign()", betas=[0.95]),
    _demo("DeMo 1-bit k=6", "cnn-fashion", "DCT(64) >> TopK(6) >> Sign()"),
]

# How far it goes: other numbers of coefficients, value formats, transforms and periods, at the settings that were best above.
DECOUPLED_BEST = {"lr": [1.4e-3], "outer_lr": [1.0], "beta": [0.95]}
FRONTIER = [
    *(
        Arm(f"DeMo {name}", "gpt-nano", "demo", wire, {}, {"lr": [2e-3]}, (0,))
        for name, wire in {
            "1-bit k=8": "DCT(64) >> TopK(8) >> Sign()",
            "1-bit k=172, no transform": "Identity(64) >> TopK(172) >> Sign()",
            "bf16 k=48": 'DCT(64) >> TopK(48) >> Float("bf16")',
        }.items()
    ),
    *(
        Arm(f"decoupled DiLoCo {name}", "gpt-nano", "decoupled-diloco", wire, settings, DECOUPLED_BEST, (0,))
        for name, wire, settings in [
            ("1-bit k=128 H=4", "DCT(64) >> TopK(128) >> Sign()", {"H": 4}),
            ("1-bit k=128 H=32", "DCT(64) >> TopK(128) >> Sign()", {"H": 32}),
            ("1-bit k=32 H=8", "DCT(64) >> TopK(32) >> Sign()", {"H": 8}),
        ]
    ),
    Arm(
        "decoupled DiLoCo 1-bit k=1024",
        "gpt-nano",
        "decoupled-diloco",
        "DCT(64) >> TopK(1024) >> Sign()",
        {"H": 8},
        {"lr": [2e-3], "outer_lr": [0.7], "beta": [0.95]},
        (0,),
    ),
    Arm(
        "SparseLoCo H=8",
        "gpt-nano",
        "decoupled-diloco",
        "Identity(64) >> TopK(64) >> TwoBit()",
        {"H": 8, "over": "workers"},
        DECOUPLED_BEST,
        (0,),
    ),
]

# The authors' rules, one seed.
REFERENCE = [
    Arm(
        "published rule k=32 fp32",
        "gpt-nano",
        "decoupled-diloco",
        "DCT(64) >> TopK(32)",
        {"H": H, "mode": "published", "beta": 0.95},
        {"lr": [1.4e-3], "outer_lr": [0.3, 0.7], "over": ["senders", "workers"]},
        (0,),
    ),
    Arm(
        "DeMo as published (v1) k=32 bf16",
        "gpt-nano",
        "demo",
        'DCT(64) >> TopK(32) >> Float("bf16")',
        {"phi": "sign", "whiten": False, "inflow": "lr"},
        {"lr": [1e-3, 2e-3]},
        (0,),
    ),
    Arm(
        "published rule k=32 fp32",
        "cnn-fashion",
        "decoupled-diloco",
        "DCT(64) >> TopK(32)",
        {"H": H, "mode": "published", "beta": 0.95},
        {"lr": [1.6e-2], "outer_lr": [0.7], "over": ["senders", "workers"]},
        (0,),
    ),
]


def _ordering(name: str, wire: str = 'DCT(64) >> TopK(8) >> Float("bf16")', **settings: Any) -> Arm:
    """DeMo as published at one fixed learning rate, one thing changed: small and short."""
    settings = {"phi": "sign", "whiten": False, **settings}
    return Arm(name, "gpt-nano", "demo", wire, settings, {"lr": [1e-3]}, (0,), steps=120, batch=2)


ORDERINGS = [
    _ordering("alpha 1, beta 0.999, DCT, k=8"),
    _ordering("alpha 0", alpha=0.0),
    _ordering("alpha 0.2", alpha=0.2),
    _ordering("alpha 0.5", alpha=0.5),
    _ordering("beta 0.9", beta=0.9),
    _ordering("beta 0.99", beta=0.99),
    _ordering("k=2", 'DCT(64) >> TopK(2) >> Float("bf16")'),
    _ordering("k=32", 'DCT(64) >> TopK(32) >> Float("bf16")'),
    _ordering("k=128", 'DCT(64) >> TopK(128) >> Float("bf16")'),
    _ordering("identity", 'Identity(64) >> TopK(8) >> Float("bf16")'),
    _ordering("Hadamard", 'Hadamard(64) >> TopK(8) >> Float("bf16")'),
    _ordering("random orthogonal", 'RandomOrthogonal(64) >> TopK(8) >> Float("bf16")'),
]

# Several clocks: short batches and more rounds than above, so that a slow momentum has something to remember. Everything is
# averaged every 32 steps unless a name says otherwise, and all second moments have beta2 = 0.99.
CLOCKED: dict[str, Any] = {"steps": 768, "batch": 2, "finalists": 1}
LONGER: dict[str, Any] = {**CLOCKED, "steps": 1024}
SHORTER: dict[str, Any] = {**CLOCKED, "steps": 512}
K = {"H": 32}
SCRATCH: dict[str, Any] = {"beta2": 0.99}  # cosine to 10%
WARM: dict[str, Any] = {"beta2": 0.99, "warm_start": 256, "warm_lr": 2e-3, "lr_final": 1.0}  # as the authors: then constant
SLOW: dict[str, Any] = {"inner": "qhadam", "qh_betas": (0.98,), "qh_omegas": (0.9,), "qh_lives": 8.0}
SLOWER: dict[str, Any] = {"inner": "qhadam", "qh_betas": (0.99,), "qh_omegas": (0.95,), "qh_lives": 4.0}
ADAMW: dict[str, Any] = {"inner": "adamw"}


def _clocks(run: dict[str, Any], slow: dict[str, Any], lrs: list[float], length: dict[str, Any]) -> list[Arm]:
    """The methods with several clocks and their baselines, each tuned over as many points: three, from scratch two.

    Where the best of three was the last of its row, one more was tried. From scratch the last three have one seed.
    """
    warm = run is WARM
    more = [2.8e-3] if warm else []
    seeds, few = SEEDS, SEEDS if warm else SEEDS[:1]
    grid, longer, one = {"lr": lrs}, {"lr": [*lrs, *more]}, {"lr": lrs if warm else lrs[1:2]}
    plain, desloc = {**run, **ADAMW}, {**K, "K_u": 96, "K_v": 192}
    outer = {"lr": lrs[1:2], "outer_lr": [0.7], "outer_momentum": [0.3, 0.5, 0.8, 0.9] if warm else [0.5, 0.8]}
    return [
        Arm("AdamW-DDP", "gpt-nano", "data-parallel", None, {}, grid, seeds, run=plain, **length),
        Arm("Local Adam", "gpt-nano", "mt-dao", None, K, grid, seeds, run=plain, **length),
        Arm("MT-DAO", "gpt-nano", "mt-dao", None, K, longer, seeds, run={**run, **slow}, **length),
        Arm("DiLoCo", "gpt-nano", "diloco", None, K, outer, few, run=plain, **length),
        Arm("DES-LOC (32, 96, 192)", "gpt-nano", "mt-dao", None, desloc, one, few, run=plain, **length),
        Arm("QHAdam-DDP", "gpt-nano", "data-parallel", None, {}, longer if warm else one, few, run={**run, **slow}, **length),
    ]


CLOCKS = _clocks(SCRATCH, SLOW, [1.4e-3, 2e-3], CLOCKED)
WARM_CLOCKS = _clocks(WARM, SLOWER, [1e-3, 1.4e-3, 2e-3], LONGER)


def _wire(name: str, wire: str, seeds: tuple[int, ...] = (0,), **periods: int) -> Arm:
    """MT-DAO after a warm start with compressed averages, at the learning rate that was best for dense ones."""
    run = {**WARM, **SLOWER}
    return Arm(f"MT-DAO {name}", "gpt-nano", "mt-dao", wire, {**K, **periods}, {"lr": [2e-3]}, seeds, run=run, **LONGER)


WIRES = [
    _wire("fp4, K_v=192", "fp4", SEEDS, K_v=192),
    _wire("fp4, K_u=64, K_v=384", "fp4", SEEDS, K_u=64, K_v=384),
    _wire("fp4, K_x=64, K_u=128, K_v=384", "fp4", H=64, K_u=128, K_v=384),
    _wire("bf16", "bf16"),
    _wire("int8", "int8"),
    _wire("1-bit k=512, K_v=192", "DCT(64) >> TopK(512) >> Sign()", K_v=192),
    _wire("1-bit k=128, K_v=384", "DCT(64) >> TopK(128) >> Sign()", K_v=384),
]

# The baseline's projectors are of the synchronous steps, every 32 as LoRDO's; a warm start of LoRDO is the baseline itself.
LOW_RANK: dict[str, Any] = {"inner": "low-rank", "qh_betas": (0.95,), "qh_omegas": (0.97,)}
LORDO_OWN: dict[str, Any] = {**K, "betas": (0.95, 0.99), "omega": 0.97, "rank": 0.25}
WARM_LOW_RANK: dict[str, Any] = {**WARM, "warm_lr": 4e-3}


def _low_rank(run: dict[str, Any], lrs: list[float], length: dict[str, Any]) -> list[Arm]:
    own = LORDO_OWN | ({"betas": (0.99, 0.99)} if run is WARM_LOW_RANK else {})
    inner = {**LOW_RANK, "qh_betas": (0.9,)} if run is WARM_LOW_RANK else LOW_RANK
    grid, seeds = {"lr": lrs}, SEEDS if run is WARM_LOW_RANK else SEEDS[:1]
    return [
        Arm("low-rank Adam, DDP", "gpt-nano", "data-parallel", None, {}, grid, seeds, run={**run, **inner}, **length),
        Arm("LoRDO", "gpt-nano", "lordo", None, own, grid, seeds, run=run, **length),
    ]


LORDO = _low_rank(SCRATCH, [2e-3, 4e-3], SHORTER)
WARM_LORDO = _low_rank(WARM_LOW_RANK, [1e-3, 2e-3, 4e-3], LONGER)

BEST_MOMENTUM: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5}  # of DiLoCo, from scratch
MOMENTUM: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}  # likewise, after a warm start
BEST_OUTER = {"lr": [2e-3], "outer_lr": [0.7], "outer_momentum": [0.5]}
WARM_OUTER = {"lr": [1.4e-3], "outer_lr": [0.7], "outer_momentum": [0.9]}


def _streaming(name: str, tau: int, wire: str | None = None, *, warm: bool = False, **settings: float) -> Arm:
    """Streaming DiLoCo in four fragments at the outer settings that were best for DiLoCo; without feedback, as published."""
    settings = {**K, "fragments": 4, "tau": tau, **({"feedback": 0.0} if wire else {}), **settings}
    run, grid, length = (WARM, WARM_OUTER, LONGER) if warm else (SCRATCH, BEST_OUTER, SHORTER)
    name = f"Streaming DiLoCo {name}"
    return Arm(name, "gpt-nano", "streaming-diloco", wire, settings, grid, (0,), run={**run, **ADAMW}, **length)


STREAMING = [
    _streaming("tau=0", 0),
    _streaming("tau=1 alpha=0.5", 1, alpha=0.5),
    _streaming("tau=5 alpha=0.5", 5, alpha=0.5),
    _streaming("tau=1", 1),
    _streaming("tau=5", 5),
    _streaming("tau=1 alpha=0.5 fp4", 1, "fp4", alpha=0.5),
    _streaming("tau=1 alpha=0.5 2-bit", 1, "2-bit", alpha=0.5),
]
WARM_STREAMING = [
    _streaming("tau=0", 0, warm=True),
    _streaming("tau=1", 1, warm=True),
    _streaming("tau=2", 2, warm=True),
    _streaming("tau=3", 3, warm=True),
    _streaming("tau=5", 5, warm=True),
    _streaming("tau=1 fp4", 1, "fp4", warm=True),
    _streaming("tau=1 alpha=0.5", 1, warm=True, alpha=0.5),
    _streaming("tau=2 alpha=0.5", 2, warm=True, alpha=0.5),
    _streaming("tau=5 alpha=0.5", 5, warm=True, alpha=0.5),
    _streaming("tau=1 alpha=0.5 fp4", 1, "fp4", warm=True, alpha=0.5),
]

# The methods that are not in the tables above already, each in the protocol of the table that it joins: after a warm start on
# the GPT, from scratch on the CNN, and after a shorter warm start once more on a GPT of four times the size.
SPARSE_OWN: dict[str, Any] = {**K, "over": "workers", "beta": 0.95, "outer_lr": 1.0}
SPARSE = "Identity(64) >> TopK(64) >> TwoBit()"


def _after_warm_start(
    name: str, algorithm: str, wire: str | None, lrs: list[float], seeds: tuple[int, ...] = SEEDS, **settings: Any
) -> Arm:
    inner = {} if algorithm == "demo" else ADAMW
    settings = {"betas": (0.9, 0.95), **settings} if algorithm == "demo" else settings  # beta2 of WARM is its start's
    return Arm(name, "gpt-nano", algorithm, wire, settings, {"lr": lrs}, seeds, run={**WARM, **inner}, **LONGER)


DECOUPLED_WIRE = "DCT(64) >> TopK(128) >> Sign()"
HEADLINE = [
    WARM_CLOCKS[0],  # what they are measured against
    _after_warm_start("DeMo 1-bit k=172", "demo", "DCT(64) >> TopK(172) >> Sign()", [1e-3, 1.4e-3, 2e-3]),
    _after_warm_start("DeMo 1-bit k=32", "demo", "DCT(64) >> TopK(32) >> Sign()", [1.4e-3]),
    _after_warm_start("DeMo 1-bit k=8", "demo", "DCT(64) >> TopK(8) >> Sign()", [1.4e-3]),
    _after_warm_start("decoupled DiLoCo H=8 k=128", "decoupled-diloco", DECOUPLED_WIRE, [1e-3, 1.4e-3], H=8, beta=0.95),
    _after_warm_start("decoupled DiLoCo H=32 k=128", "decoupled-diloco", DECOUPLED_WIRE, [1.4e-3], (0,), H=32, beta=0.95),
    _after_warm_start("SparseLoCo H=32", "decoupled-diloco", SPARSE, [1e-3, 1.4e-3], **SPARSE_OWN),
    _after_warm_start("Streaming DiLoCo tau=1", "streaming-diloco", None, [1.4e-3], **K, fragments=4, tau=1, **MOMENTUM),
]


def _on_cnn(name: str, algorithm: str, *, wire: str | None = None, run: dict[str, Any] | None = None, **settings: Any) -> Arm:
    lrs = {"lr": [1.6e-2, 3.2e-2]}
    return Arm(name, "cnn-fashion", algorithm, wire, settings, lrs, run=run or {}, finalists=1)


CNN_HEADLINE = [
    _adamw("cnn-fashion"),
    _on_cnn("QHAdam-DDP", "data-parallel", run={**SLOW, "beta2": 0.99}),
    _on_cnn("Local Adam H=8", "mt-dao", run={**ADAMW, "beta2": 0.99}, H=H),
    _on_cnn("MT-DAO H=8", "mt-dao", run={**SLOW, "beta2": 0.99}, H=H),
    _on_cnn("Streaming DiLoCo H=8 tau=1", "streaming-diloco", H=H, fragments=4, tau=1, **BEST_MOMENTUM),
    _on_cnn(
        "SparseLoCo H=8", "decoupled-diloco", wire="Identity(64) >> TopK(0.03) >> TwoBit()", H=H, over="workers", beta=0.95
    ),
    _on_cnn("LoRDO H=8", "lordo", H=H, rank=0.25, omega=0.97, betas=(0.95, 0.99)),
]


def _larger(arm: Arm, lr: float, **settings: Any) -> Arm:
    """An arm of the warm-start protocol on a GPT of 3M parameters, one seed, at about the lr that was best on 0.8M."""
    run = {**arm.run, "warm_start": 128}
    point = {"lr": [lr], **{name: [value] for name, value in settings.items()}}
    return Arm(arm.name, "gpt-small", arm.algorithm, arm.wire, arm.settings, point, (0,), run=run, **SHORTER)


_BY_NAME = {arm.name: arm for arm in (*WARM_LORDO, *HEADLINE, *WARM_CLOCKS)}
LARGER = [
    _larger(_BY_NAME["AdamW-DDP"], 1.4e-3),
    _larger(_BY_NAME["QHAdam-DDP"], 2e-3),
    _larger(_BY_NAME["DeMo 1-bit k=172"], 1.4e-3),
    _larger(_BY_NAME["decoupled DiLoCo H=8 k=128"], 1.4e-3),
    _larger(_BY_NAME["MT-DAO"], 2e-3),
    _larger(_BY_NAME["DiLoCo"], 1.4e-3, outer_lr=0.7, outer_momentum=0.9),
    _larger(_BY_NAME["Local Adam"], 1.4e-3),
    _larger(_BY_NAME["SparseLoCo H=32"], 1.4e-3),
    _larger(_BY_NAME["Streaming DiLoCo tau=1"], 1.4e-3),
    _larger(_BY_NAME["low-rank Adam, DDP"], 2e-3),
    _larger(_BY_NAME["LoRDO"], 2e-3),
]

PARTS = {
    "gpt": GPT,
    "cnn": CNN,
    "frontier": FRONTIER,
    "reference": REFERENCE,
    "orderings": ORDERINGS,
    "clocks": CLOCKS,
    "warm-clocks": WARM_CLOCKS,
    "wires": WIRES,
    "lordo": LORDO,
    "warm-lordo": WARM_LORDO,
    "streaming": STREAMING,
    "warm-streaming": WARM_STREAMING,
    "headline": HEADLINE,
    "cnn-headline": CNN_HEADLINE,
    "larger": LARGER,
}
