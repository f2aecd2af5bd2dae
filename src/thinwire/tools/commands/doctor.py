"""`thinwire doctor`: check this machine, and measure bandwidth and latency between ranks."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from thinwire.algorithms import found
from thinwire.errors import ConfigError, LinkError, ThinwireError, WireError, how_to_install
from thinwire.links import Link, connect, disconnect, host_job
from thinwire.links.heartbeat import Heartbeat
from thinwire.links.rendezvous import in_job
from thinwire.network import parse_duration, show_bandwidth, show_bytes, show_seconds
from thinwire.tools.command_flags import DoctorFlags, TrainFlags
from thinwire.tools.config import write_whole
from thinwire.tools.doctor import (
    PARTS,
    Finding,
    Machine,
    Measurements,
    Swap,
    inspect_machine,
    look_at_all,
    look_at_links,
    look_at_machine,
    machine_of,
    measure,
    plan_command,
    syncs,
    tell_each_other,
)
from thinwire.tools.flags import parse_flags, with_json_name
from thinwire.tools.plan import parse_count
from thinwire.tools.ports import Port, advice, at_port, listening, of_job
from thinwire.tools.processes import a_job, see_through

MOST_SHOWN = 8  # ranks of a matrix that fits a screen


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Attributes:
        machines: of all ranks in order, or this one.
        measured: between the ranks; None where there is only one.
        findings: what is broken or unusual.
        plan: the command to go on with.
        ports: that the processes of the job have open.
    """

    machines: list[Machine]
    measured: Measurements | None = None
    findings: list[Finding] = field(default_factory=list)
    plan: str | None = None
    ports: list[Port] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken; warnings do not count."""
        return all(finding.level != "broken" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        measured = None if self.measured is None else self.measured.as_json()
        told = {"machines": list(map(asdict, self.machines)), "findings": list(map(asdict, self.findings))}
        ports = [{**asdict(port), "reach": port.reach} for port in self.ports]
        told |= {"measured": measured, "plan": self.plan, "ports": ports}
        return {"healthy": self.healthy, "workers": len(self.machines), **told}

    @staticmethod
    def from_json(told: dict[str, Any]) -> Report:
        """What `as_json` gave."""
        machines, findings = [Machine(**m) for m in told["machines"]], [Finding(**f) for f in told["findings"]]
        measured = told["measured"] and Measurements.from_json(told["measured"])
        ports = [Port(p["address"], p["port"], p["owner"]) for p in told["ports"]]
        return Report(machines, measured, findings, told["plan"], ports)


def main(arguments: list[str]) -> int:
    """Look, measure and report; 1 where something is broken."""
    flags = parse_flags(DoctorFlags, "doctor", with_json_name(arguments))
    timeout = parse_duration(flags.timeout)
    if timeout <= 0:
        raise ConfigError(f"timeout must be above zero seconds, got {flags.timeout!r}")
    if flags.workers < 1:
        raise ConfigError(f"workers must be a whole number of at least 1, got {flags.workers}")
    params = None if flags.params is None else parse_count(flags.params)
    if flags.pid is not None:
        return _look_at_job(flags, flags.pid)
    if flags.syncs:
        return _count_crossings(flags)
    if flags.algorithm is not None or flags.codec is not None:
        raise ConfigError("--algorithm and --codec say what --syncs is to look at: give that too")
    if in_job():
        return _as_rank(flags, timeout, params)
    report = _alone(flags, timeout)
    _tell(report, flags, where="started here, on the loopback")
    return 0 if report.healthy else 1


def _as_rank(flags: DoctorFlags, timeout: float, params: int | None) -> int:
    """Be one rank of the job that this process is in; the first one reports."""
    try:
        if flags.backend == "nccl":
            if not torch.cuda.is_available():
                raise LinkError("--backend nccl: torch finds no GPU on this machine")
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        mine = inspect_machine()
        if broken := [finding.text for finding in look_at_machine(mine) if finding.level == "broken"]:
            raise LinkError(broken[0])
        link = connect(backend=flags.backend, timeout=timeout)
        machines = [machine_of(told, rank, mine) for rank, told in enumerate(tell_each_other(link, asdict(mine), dict))]
        ports = ports_of_all(link)
        measured = measure(link)
        findings = [finding for machine in unique(machines) for finding in look_at_machine(machine)]
        findings += look_at_all(machines) + look_at_links(measured, machines, params=params, timeout=train_timeout())
        findings += [Finding("warning", text) for text in advice(ports, one_machine=len(unique(machines)) == 1)]
        plan = plan_command(measured, workers=len(machines), params=flags.params)
        report = Report(machines, measured, findings, plan, ports)
        if link.rank == 0:
            _tell(report, flags, where="of this job")
        disconnect()
    except ThinwireError as error:
        # Leave at once: what is left of a broken job could wait for the lost rank.
        print(f"thinwire: {error}", file=sys.stderr, flush=True)
        Heartbeat.end(error)
        os._exit(1)
    return 0 if report.healthy else 1


def ports_of_all(link: Link) -> list[Port]:
    """What all ranks listen on, and who holds the job's store; gathered from all of them."""
    ports = listening(os.getpid(), f"rank {link.rank}")
    if link.rank == 0 and "MASTER_PORT" in os.environ:
        ports += at_port(int(os.environ["MASTER_PORT"]), "the job's store")
    owners = {(port.address, port.port): port.owner for port in ports}  # the store is one of rank 0's own where it holds it
    told = tell_each_other(link, [[*place, owner] for place, owner in owners.items()], list)
    return sorted({port_of(entry, rank) for rank, entries in enumerate(told) for entry in entries}, key=lambda p: (p.owner, p))


def port_of(entry: Any, rank: int) -> Port:
    """A port that a rank has told of."""
    try:
        address, number, owner = entry
        return Port(str(ipaddress.ip_address(address)), int(number), str(owner)[:40])
    except (ValueError, TypeError):
        raise WireError("not the description of a port", rank=rank) from None


def _look_at_job(flags: DoctorFlags, pid: int) -> int:
    """Say what a running job has open on this machine."""
    ports = of_job(pid)
    findings = [Finding("warning", text) for text in advice(ports, one_machine=False)]
    if flags.json is not None:
        _write(Report([], findings=findings, ports=ports).as_json(), flags.json)
    if flags.json != "-":
        console = Console(highlight=False, soft_wrap=True)
        _show_ports(console, ports)
        _show_findings(console, findings)
    return 0


def _count_crossings(flags: DoctorFlags) -> int:
    """Say how often steps and rounds make the host wait for a device."""
    names = [flags.algorithm] if flags.algorithm else sorted(found())
    rows = [row for name in names for at in syncs.BACKENDS for row in syncs.audit_named(name, wire=flags.codec, backend=at)]
    if flags.json is not None:
        _write({"rows": [row.as_json() for row in rows]}, flags.json)
    if flags.json != "-":
        _show_crossings(Console(highlight=False, soft_wrap=True), rows, lines=flags.algorithm is not None)
    return 0


def unique(machines: list[Machine]) -> list[Machine]:
    """One entry per host."""
    return list({machine.host: machine for machine in reversed(machines)}.values())[::-1]


def train_timeout() -> float:
    """Seconds that a worker of `thinwire train` waits for the others by default."""
    return parse_duration(TrainFlags().timeout)


def _alone(flags: DoctorFlags, timeout: float) -> Report:
    """This machine, and what processes started on it measure."""
    machine = inspect_machine()
    findings = look_at_machine(machine)
    if flags.workers < 2 or any(finding.level == "broken" for finding in findings):
        return Report([machine], findings=findings)
    told = _started_here(flags, timeout)
    if isinstance(told, Finding):
        return Report([machine], findings=[*findings, told])
    theirs = [finding for finding in told.findings if finding not in findings]
    return Report([machine] * flags.workers, told.measured, findings + theirs, told.plan, told.ports)


def _started_here(flags: DoctorFlags, timeout: float) -> Report | Finding:
    """What processes of this command report to each other over the loopback."""
    store, places = host_job(flags.workers)
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // flags.workers))}
    words = ["--timeout", flags.timeout, "--backend", flags.backend, *(["--params", flags.params] if flags.params else [])]
    with tempfile.TemporaryDirectory(prefix="thinwire-doctor-") as folder, a_job() as ranks:
        answer = Path(folder) / "report.json"
        command = [sys.executable, "-m", "thinwire", "doctor", *words, "--json", str(answer)]
        for place in places:
            ranks.append(subprocess.Popen(command, env=environment | place, stdout=subprocess.DEVNULL))
        failure = see_through(ranks, patience=timeout + 10, limit=60 + 5 * timeout)
        told = answer.read_text() if failure is None else ""
    del store  # until here it served them
    if failure is None:
        return Report.from_json(json.loads(told))
    text = f"{flags.workers} processes on this machine could not exchange messages: rank {failure.number} {failure.how}"
    return Finding("broken", text)


# --- What is shown -----------------------------------------------------------------------------------------------------------


def _tell(report: Report, flags: DoctorFlags, *, where: str) -> None:
    if flags.json is not None:
        _write(report.as_json(), flags.json)
    if flags.json == "-":
        return
    console = Console(highlight=False, soft_wrap=True)
    for machine in unique(report.machines):
        _show_machine(console, machine)
    if report.measured is not None:
        _show_links(console, report.measured, len(report.machines), where)
    if report.ports:
        console.print()
        _show_ports(console, report.ports)
    console.print()
    _show_findings(console, report.findings)
    if report.plan:
        console.print(f"go on with:\n  {report.plan}")


def _write(told: dict[str, Any], name: str) -> None:
    text = json.dumps(told, indent=1)
    if name == "-":
        print(text)
    else:
        write_whole(Path(name), text + "\n")


def _show_findings(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        console.print(f"[{'red' if finding.level == 'broken' else 'yellow'}]{finding.level}:[/] ", end="")
        console.print(finding.text, markup=False)
    if not findings:
        console.print("nothing to complain about")


def _show_crossings(console: Console, rows: list[syncs.Row], *, lines: bool) -> None:
    console.print(
        "what a device is asked to do, on a pretend one, 2 workers, 5 tensors; the host waits for each crossing that blocks"
    )
    table = Table("algorithm", "link", "step", "blocking", "not blocking", "launches", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row.algorithm, row.backend, row.what, *map(str, (row.blocking, row.later, row.launches)))
    console.print(table)
    for row in rows if lines else ():
        if row.crossings:
            console.print(f"\n{row.algorithm} over {row.backend}, {row.what}:")
        for (where, kind, blocking), many in Counter((c.where, c.kind, c.blocking) for c in row.crossings).items():
            console.print(f"  {many:4} x {kind:22} {where}{'' if blocking else ' (not blocking)'}", markup=False)


def _show_ports(console: Console, ports: list[Port]) -> None:
    console.print("open ports, and who can connect to them:" if ports else "no open ports")
    for port in ports:
        console.print(f"  {port!s:24} {port.reach:40} {port.owner}", markup=False)


def _show_machine(console: Console, machine: Machine) -> None:
    known = machine.versions
    missing = [name for name, there in machine.extras.items() if not there]
    extras = ", ".join(name for name, there in machine.extras.items() if there) or "none"
    lab = [name for name, there in machine.lab.items() if not there]
    lines = {
        "host": f"{machine.host}, {known['platform']}",
        "versions": ", ".join(f"{name} {known[name]}" for name in ("thinwire", "torch", "numpy", "python")),
        "backends": ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in machine.backends.items()),
        "GPUs": ", ".join(machine.devices) or "none",
        "cores": f"{machine.cores}, torch uses {machine.threads} of them (OMP_NUM_THREADS {machine.omp or 'not set'})",
        "network": ", ".join(f"{name} {at}" for name, at in machine.interfaces.items() if at) or "no address",
        "gloo": f"GLOO_SOCKET_IFNAME {machine.gloo_interface or 'not set'}, {machine.host} is {machine.address or 'unknown'}",
        "extras": extras + (f"; not installed: {_how_to_get(missing)}" if missing else ""),
        "lab": f"thinwire lab cannot run: no {', '.join(lab)}" if lab else "root, ip and tc are there for thinwire lab",
        "disk": f"{show_bytes(machine.free)} free here",
    }
    for name, text in lines.items():
        console.print(f"{name:9} {text}")


def _how_to_get(missing: list[str]) -> str:
    """The packages that are missing, with the command that installs them where there is one."""
    commands = {package: how_to_install(part) for part, packages in PARTS.items() for package in packages}
    return ", ".join(f"{package} ({commands[package]})" if package in commands else package for package in missing)


def _show_links(console: Console, measured: Measurements, ranks: int, where: str) -> None:
    console.print(f"\n{ranks} ranks {where}; between two of them, bandwidth above and latency below the diagonal:")
    if ranks <= MOST_SHOWN:
        table = Table("rank", *map(str, range(ranks)), box=None, pad_edge=False)
        for row in range(ranks):
            table.add_row(str(row), *(_cell(measured, row, column) for column in range(ranks)))
        console.print(table)
    a, b = measured.slowest
    console.print(
        f"slowest: rank {a} with rank {b}, {show_bandwidth(measured.pair_bandwidth)} "
        f"({show_bytes(measured.pairs[a, b].nbytes)} swapped); the longest latency is {show_seconds(measured.pair_latency)}"
    )
    expected = measured.network.seconds("mean", [measured.nbytes] * ranks)
    console.print(
        f"as a check, an all-reduce of {show_bytes(measured.nbytes)} took {show_seconds(measured.seconds)}; by these figures "
        f"it should take {show_seconds(expected)}. They differ where cores or links are busy: then measure again"
    )


def _cell(measured: Measurements, row: int, column: int) -> str:
    if row == column:
        return "-"
    swap: Swap = measured.pairs[min(row, column), max(row, column)]
    return show_bandwidth(swap.bandwidth) if row < column else show_seconds(swap.latency)
