"""The flags of the commands. No torch here, so that a wrong one is refused and `--help` answers at once.

`rare` names the fields that only `--help-all` shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from thinwire.network import BACKWARD, GOODPUT

SPEEDS = ("10mbit", "100mbit", "1gbit")  # links of a report


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Where a run lives and how it is kept safe; does not change its result."""

    rare: ClassVar[frozenset[str]] = frozenset({"timeout"})

    join: str | None = None
    """Take part in the run at this address as one worker, started alone; its settings come from there; the flags are
    others: `thinwire train --join URL --help`."""
    out: str | None = None
    """The run folder; by default runs/ALGORITHM-TASK-TIME."""
    resume: bool = False
    """Go on from the last checkpoint of the run in --out, with the settings it was started with."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for none."""
    timeout: str = "120s"
    """How long a worker waits for the others before it gives up and names who is missing; longer than an evaluation."""


@dataclass(frozen=True, kw_only=True)
class SimFlags:
    """The simulated network, and where the run is kept."""

    rare: ClassVar[frozenset[str]] = frozenset({"links", "churn", "sites", "inside"})

    bandwidth: str = "inf"
    """Of each worker's link, such as 100mbit; a comma-separated list gives each worker its own."""
    down: str | None = None
    """Downward bandwidth where it differs, as on home links."""
    latency: str = "0ms"
    """Of one message, such as 20ms; or a comma-separated list."""
    step_time: str | None = None
    """Time of one local step, such as 100ms, or a list with a straggler, such as 100ms,100ms,300ms; by default measured."""
    links: str | None = None
    """A file with the link of each worker, in place of --bandwidth, --down and --latency: a csv with the columns
    worker,up,down,latency."""
    churn: str | None = None
    """A file with the workers' joins and deaths, a csv with the columns seconds,worker,event: an elastic run."""
    sites: int | None = None
    """Group the workers into so many sites, whose members average gradients over a fast network and send as one worker; the
    flags of the network are then those between sites."""
    inside: str = "inf"
    """With --sites, the bandwidth inside a site, such as 10gbit."""
    out: str | None = None
    """The run folder; by default runs/sim-ALGORITHM-TASK-TIME."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Where the runs take place and are kept; does not change their results."""

    rare: ClassVar[frozenset[str]] = frozenset(
        {"down", "jobs", "checkpoint_every", "timeout", "tune_steps", "tune_seeds", "records"}
    )

    seeds: str = "1"
    """How many seeds each method is run with, from 0 on; or the seeds themselves, separated by commas, such as 0,5,7."""
    tune: str | None = None
    """Learning rates to choose from for every method, such as 1e-3,1.41e-3,2e-3: on the first seed or on
    --tune-seeds, in short runs, on validation samples that nothing is reported on; more are tried where the best is at
    an edge."""
    tune_steps: int | None = None
    """Steps of the runs that choose; by default a third."""
    tune_seeds: int | None = None
    """Choose by the mean loss over so many seeds, the first of --seeds; by default one. On one seed the best rate is often
    too large for others."""
    sim: bool = False
    """Simulate the workers in one process, as `thinwire sim` does; else they are real processes on this machine."""
    lab: bool = False
    """Put each worker behind a real wire of --bandwidth, as `thinwire lab` does; needs root."""
    bandwidth: str | None = None
    """Of each worker's link in the simulator or in the lab, such as 100mbit; or one per worker, separated by commas."""
    down: str | None = None
    """Downward bandwidth where it differs, as on home links."""
    latency: str | None = None
    """Of one message in the simulator, such as 20ms."""
    step_time: str | None = None
    """Time of one local step in the simulator, such as 100ms; by default measured."""
    jobs: int = 1
    """How many simulated runs at once, one thread each."""
    checkpoint_every: int = 50
    """Steps between checkpoints of real runs, from which an unfinished one goes on; 0 for none."""
    timeout: str = "120s"
    """How long a real worker waits for the others."""
    out: str | None = None
    """Folder of the comparison; by default runs/compare-TIME. Given again, what is finished there is not run again."""
    records: str | None = None
    """A file of records (.jsonl) that outlives the folder, such as one in a repository: runs that are in it are not made
    again, new ones are added. Runs that tune go to a file beside it."""


@dataclass(frozen=True, kw_only=True)
class BetaFlags:
    """Propose the decay (beta) of the slow momentum of mt-dao, so that what workers agreed on outlives a period."""

    K: Annotated[int, tyro.conf.Positional]
    """Steps between two averages of the momentum."""
    steps: int | None = None
    """Length of the run; a momentum must be faster than that."""
    retention: float = 0.9
    """How much of the agreed momentum should be left after K steps."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What each method would cost on your link per step, and which one to take. Nothing is trained and nothing is sent."""

    rare: ClassVar[frozenset[str]] = frozenset({"down", "links", "tau", "framing", "codec_time", "backward", "sites", "inside"})

    params: str | None = None
    """How many parameters the model has: 1.3b, 124m, 3_200_000. It is taken to be a GPT."""
    task: str | None = None
    """Or a built-in model, with its own shapes; `thinwire tasks` lists them."""
    workers: int = 2
    """How many workers."""
    bandwidth: str | None = None
    """Of each worker's link, such as 200mbit; a comma-separated list gives each its own. `thinwire doctor` measures it."""
    down: str | None = None
    """Downward bandwidth where it differs, as on home links."""
    latency: str = "0ms"
    """Of one message, such as 40ms; or a comma-separated list."""
    links: str | None = None
    """A file with the link of each worker, in place of --bandwidth, --down and --latency: a csv with the columns
    worker,up,down,latency."""
    sites: int | None = None
    """The workers are processes of so many sites, which average gradients over a fast network at every step and send as one;
    the flags of links are then those between sites."""
    inside: str = "inf"
    """With --sites, the bandwidth inside a site, such as 10gbit."""
    step_time: str | None = None
    """Time of one training step without any exchange, such as 0.9s."""
    utilisation: float = 0.95
    """The part of the time that workers should compute."""
    H: int | None = None
    """Steps per round of all methods that have it, in place of each one's own; other periods follow."""
    k: int | None = None
    """Entries per block of demo, decoupled-diloco and sparseloco, in place of their own."""
    tau: int | None = None
    """Steps that messages of streaming-diloco may travel, in place of 1."""
    route: Literal["gather", "owners", "auto"] = "auto"
    """Messages that the wire cannot average go to all workers (gather), to owners who average them wherever they can (owners),
    or to owners where that sends fewer bytes (auto)."""
    framing: float = GOODPUT
    """The part of the bandwidth that headers of Ethernet, IP and TCP leave for messages."""
    codec_time: str = "0s"
    """Time to pack and read one message that is gathered; depends on the machine, so by default it is not counted."""
    backward: float = BACKWARD
    """Which part of a step is the backward pass, during which ddp already sends; 0 for none."""
    json: str | None = None
    """Write everything to this file as JSON; without a name, or as -, print that and nothing else."""


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Check this machine, and measure bandwidth and latency between the ranks of a job, or between processes started here."""

    workers: int = 2
    """How many processes to start and measure, outside of a job; 1 for none."""
    params: str | None = None
    """Parameters of the model you want to train, such as 1.3b: warns where a timeout would be too short for it."""
    timeout: str = "60s"
    """How long to wait for a rank before it is called missing."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What to measure with."""
    syncs: bool = False
    """Only say how often a step and a round make the host wait for a device, counted on a pretend one: no GPU is needed."""
    algorithm: str | None = None
    """With --syncs: of which method; all of them by default."""
    codec: str | None = None
    """With --syncs: what it sends, such as "DCT(64) >> TopK(32) >> Sign()"; by default what the method sends."""
    pid: int | None = None
    """Only say which ports a job that runs on this machine has open, and to whom: the process that started it."""
    json: str | None = None
    """Write everything to this file as JSON; without a name, or as -, print that and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Put runs side by side: loss against bytes, steps and time, and a table with p-values. One HTML file and PNGs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run folders, folders of runs such as that of `thinwire compare`, or files of records (.jsonl)."""
    out: str | None = None
    """The HTML file; by default report.html in the first folder, or here where a file of records comes first."""
    baseline: str | None = None
    """What the others are held against, by its name in the table; by default the first ddp or data-parallel, else the first."""
    bandwidth: str = ",".join(SPEEDS)
    """Links of the figure of loss against time, separated by commas."""
    latency: str = "0ms"
    """Of one message on those links."""
    title: str | None = None
    """Of the page; by default the job in words."""
    together: bool = False
    """Compare all runs on one task, even if their steps, workers or batches differ; else these are sections of their own."""
    best: bool = False
    """Of methods with the same name and different settings keep the one with the most seeds, then with the least loss."""
    html: bool = True
    """Write the page and the PNGs; without them there is only the table in the terminal."""
    watch: bool = False
    """Refresh the report while runs go on, until all have ended or you press Ctrl-C; the page reloads itself."""
    every: str = "10s"
    """How often --watch refreshes, from 1s to 10min."""
