"""The lab: namespaces that are shaped, counted and always removed. What needs root is tried for real where there is root."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.processes import LIMIT, until
from tests.tiers import first_quick
from thinwire.errors import ConfigError
from thinwire.tools import lab as lab_module
from thinwire.tools import namespaces as net
from thinwire.tools.cli import main
from thinwire.tools.commands.lab import Speed, parse_speeds
from thinwire.tools.lab import Counters, JobFailed, Lab, LabError, Rates, find, take_down
from thinwire.tools.measured import COLUMNS, Measured, cells, read_figures, show_measured

inf = math.inf
LONG = "36000"  # seconds that a process sleeps which a test ends


def no_lab() -> str | None:
    """What is missing for a lab here, if anything."""
    if os.geteuid() != 0:
        return "network namespaces of the lab: run the tests as root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return f"the lab needs {' and '.join(missing)}: apt-get install iproute2" if missing else None


def real(test: Callable[..., None]) -> Callable[..., None]:
    """A test that makes a lab: skipped where it cannot, and alone with the machine's network for as long as it runs."""
    return pytest.mark.skipif(no_lab() is not None, reason=no_lab() or "")(pytest.mark.usefixtures("network")(test))


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a lab that no other test has; whatever is left of the lab is removed."""
    chosen = f"test-{os.getpid()}-{abs(hash(request.node.name)) % 10000}"
    yield chosen
    if no_lab() is None:
        take_down(chosen)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["lab", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# --- Rates in words and in commands ----------------------------------------------------------------------------------------


def test_speeds_of_the_command_line() -> None:
    assert parse_speeds("10mbit,1gbit", None) == [Speed("10mbit", 10e6), Speed("1gbit", 1e9)]
    assert parse_speeds("1mbit:2mbit,inf", None) == [Speed("1mbit:2mbit", (1e6, 2e6)), Speed("inf", inf)]
    assert parse_speeds("110mbit", "500mbit") == [Speed("110mbit up, 500mbit down", 110e6, 500e6)]
    assert [s.down for s in parse_speeds("1mbit,2mbit", "3mbit")] == [3e6, 3e6]
    assert [s.down for s in parse_speeds("1mbit,2mbit", "3mbit,4mbit:5mbit")] == [3e6, (4e6, 5e6)]
    with pytest.raises(ConfigError, match="--down lists 3 speeds, but --bandwidth 2"):
        parse_speeds("1mbit,2mbit", "3mbit,4mbit,5mbit")


def test_rates_of_every_worker() -> None:
    assert net.rates_of(2, 5e6) == (Rates(5e6, 5e6), Rates(5e6, 5e6))
    assert net.rates_of(2, [5e6, inf]) == (Rates(5e6, 5e6), Rates(inf, inf))
    assert net.rates_of(2, 110e6, (500e6, 400e6)) == (Rates(110e6, 500e6), Rates(110e6, 400e6))
    assert str(Rates(110e6, 500e6)) == "110mbit up, 500mbit down"
    assert str(Rates(1.5e9, 1.5e9)) == "1.5gbit"
    assert str(Rates()) == "unshaped"


@pytest.mark.parametrize(
    ("workers", "bandwidth", "message"),
    [
        (3, (1e6, 2e6), "bandwidth lists 2 workers, but there are 3"),
        (0, 1e6, "workers must be a whole number of at least 1, got 0"),
        (251, 1e6, "a lab has at most 250 workers, got 251"),
        (2, 1e3, "the lab shapes to 10kbit and more, got 1kbit"),
        (2, -1e6, "bandwidth must be above zero bits per second"),
    ],
)
def test_rates_that_cannot_be(workers: int, bandwidth: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lab(workers, bandwidth=bandwidth)


def test_a_burst_is_ten_milliseconds_and_two_frames_at_least() -> None:
    assert net.burst(100e6) == 125_000
    assert net.burst(1e9) == 1_250_000
    assert net.burst(20e3) == 4000 >= 2 * 1514


def test_the_commands_that_make_a_lab() -> None:
    commands = [" ".join(c) for c in net.commands_up("x", (Rates(20e6, 50e6), Rates(inf, inf)))]
    assert commands[0] == "ip netns add thinwire-x-hub", "who makes the hub has the name"
    assert "ip -n thinwire-x-hub link add w1 type veth peer name eth0 netns thinwire-x-1" in commands
    assert "ip -n thinwire-x-0 addr add 10.77.0.1/24 dev eth0" in commands
    assert "tc -n thinwire-x-0 qdisc replace dev eth0 root tbf rate 20000000bit burst 25000b latency 20ms" in commands
    assert "tc -n thinwire-x-hub qdisc replace dev w0 root tbf rate 50000000bit burst 62500b latency 20ms" in commands
    assert "tc -n thinwire-x-1 qdisc replace dev eth0 root pfifo" in commands
    inside = [c for c in commands if not c.startswith("ip netns add")]
    assert all(c.split()[1] == "-n" for c in inside), "nothing is done in the machine's own network"


def test_the_queue_of_a_wire() -> None:
    (command, *_) = net.commands_shape("x", (Rates(2e6, 2e6),), 0.5)
    assert " ".join(command).endswith("tbf rate 2000000bit burst 4000b latency 500ms")
    with pytest.raises(ConfigError, match="queue must be above zero seconds, got 0"):
        Lab(2, queue=0)


def test_what_a_job_finds_in_its_environment() -> None:
    found = Lab(3).environment(2)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("2", "3", "0", "1")
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in found, "rank 0 holds the store"


# --- What is missing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["up"], ["status"], ["down"], ["run", "--", "true"], ["run", "--name", "x", "--", "true"]])
def test_without_root_it_says_so(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert call(*command) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("thinwire: error: network namespaces need root: run this with sudo")


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_without_iproute2_it_names_the_package(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(net, "SBIN", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    _program(tmp_path / ("tc" if tool == "ip" else "ip"), "exit 0")
    assert call("up") == 2
    assert f"the command '{tool}' is missing: install iproute2 (Debian, Ubuntu: apt-get install iproute2)" in (
        capsys.readouterr().err
    )


def _program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.mark.parametrize(
    ("word", "said", "meaning"),
    [
        ("tbf", "Error: Specified qdisc kind is unknown.", "the kernel needs the token bucket sch_tbf"),
        ("bridge", "Error: Unknown device type.", "the kernel needs bridges"),
        ("veth", "Error: Unknown device type.", "the kernel needs veth pairs"),
    ],
)
def test_what_the_kernel_lacks_is_shown_and_what_was_made_is_removed(
    word: str, said: str, meaning: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an `ip` and a `tc` that keep a list of namespaces and do nothing else, so that no root is needed."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(net, "SBIN", ())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    made = tmp_path / "made"
    made.mkdir()
    fail = f'case " $* " in *" {word} "*) echo "{said}" >&2; exit 2;; esac'
    names = f'case "$1 $2" in "netns add") touch {made}/$3;; "netns delete") rm {made}/$3;; "netns list") ls {made};; esac'
    _program(tmp_path / "ip", fail, names)
    _program(tmp_path / "tc", fail)
    with pytest.raises(LabError) as failed:
        Lab(2, bandwidth=20e6, name="x").up()
    assert said in str(failed.value)
    assert meaning in str(failed.value)
    assert list(made.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["upp"], "unknown command 'lab upp' (did you mean 'up'?): choose from run, up, status, down"),
        (["up", "--latency", "20ms"], "the lab shapes bandwidth and has no --latency: `thinwire sim --latency 20ms`"),
        (["up", "--bandwidth", "10mbit,20mbit"], "one speed; rates per worker are joined by colons, got '10mbit,20mbit'"),
        (["up", "--bandwidth", "fast"], "bandwidth must look like 100mbit, 1.5gbit or inf"),
        (["up", "--name", "My/Lab"], "a lab's name has small letters, digits and dashes"),
        (["run", "--bandwidth", "10mbit"], "no command given; put it after `--`"),
        (["run", "--", "no-such-program"], "there is no program 'no-such-program' to run"),
        (["run", "--timeout", "0s", "--", "true"], "timeout must be above zero, got '0s'"),
        (["run", "--out", "no/such/folder/x", "--", "true"], "cannot write no/such/folder/x: No such file or directory"),
        (["run", "--bandwidth", "1mbit,2mbit:3mbit:4mbit", "--", "true"], "bandwidth lists 3 workers, but there are 2"),
        (["run", "--bandwidth", "1mbit,2mbit", "--", "thinwire", "train", "--out", "x"], "one folder for 2 speeds"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_made(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "commands_up", lambda *_: pytest.fail("made a lab"))
    assert call(*arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert (err.count("\n"), message in err) == (1, True), err


def test_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    assert "thinwire lab run --bandwidth 10mbit,100mbit,1gbit -- thinwire train" in capsys.readouterr().out
    assert call() == 2


# --- What is measured ------------------------------------------------------------------------------------------------------


def _measured() -> Measured:
    ranks = [{"seconds": t, "step": 20, "waiting": w, "sent": 900} for t, w in ((10.0, 4.0), (12.0, 7.0))]
    passed = (Counters(1000, 990, 5, 5, 1010, 1000), Counters(980, 990, 5, 5, 990, 1000))
    return Measured("10mbit", (Rates(10e6, 10e6), Rates(10e6, inf)), ("true",), 20.0, passed, tuple(ranks))


def test_figures_of_a_job() -> None:
    job = _measured()
    assert job.seconds_per_step == 0.6, "the slowest rank's"
    assert job.waiting == pytest.approx(11 / 22)
    assert job.utilisation == pytest.approx(0.5)
    assert (job.metered, job.total.sent, job.total.payload_sent) == (1800, 1980, 1980 - 10 * 66)
    assert job.ratio == pytest.approx(1320 / 1800), "headers are not what a link meters"
    line = json.loads(json.dumps(job.record(), allow_nan=False))
    assert (line["down"], line["framed_sent"], line["payload_over_metered"]) == ([10e6, None], 2000, job.ratio)
    assert dict(zip(COLUMNS, cells(job), strict=True))["headers"] == "33.3%"


def test_a_command_that_trains_nothing_has_times_and_bytes_only() -> None:
    job = Measured("inf", (Rates(),), ("true",), 2.0, (Counters(),))
    assert (job.seconds_per_step, job.waiting, job.utilisation, job.metered, job.ratio) == (None,) * 5
    assert cells(job) == ("2.0", "-", "-", "-", "-", "0 B", "-", "-")


def test_figures_are_taken_only_where_all_ranks_left_them(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text('{"rank": 0}')
    assert read_figures(tmp_path, 2) == ()
    (tmp_path / "rank1.json").write_text('{"rank": 1}')
    assert read_figures(tmp_path, 2) == ({"rank": 0}, {"rank": 1})


def test_a_table_for_a_terminal_and_lines_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    show_measured([_measured()], Console(force_terminal=True, width=120))
    table = capsys.readouterr().out
    assert "s/step" in table and "─" in table
    show_measured([_measured()], Console(force_terminal=False))
    line = capsys.readouterr().out
    assert line.startswith(
        "10mbit: the job took 20.0 s, a training step 0.6 s, of which 50% computing and 50% waiting for messages;"
    )
    assert "interfaces sent 1.98 kB, of which" in line and "the workers metered 1.8 kB of messages" in line


def test_signals_are_held_back_while_the_network_changes() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with lab_module._undisturbed():
            signal.raise_signal(signal.SIGINT)
            seen.append("went on")
        seen.append("not reached")
    assert seen == ["went on"]


# --- For real --------------------------------------------------------------------------------------------------------------

SEND = """
import os, socket, sys, time
size, rank = int(sys.argv[1]), int(os.environ["RANK"])
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], 5000))
    wire, _ = server.accept()
    for _ in range(3):
        left, started = size, time.monotonic()
        wire.sendall(b"!")  # nothing is on its way before this, however late this process is
        while left:
            left -= len(wire.recv(min(left, 1 << 20)))
        print("took", time.monotonic() - started, flush=True)
else:
    while True:
        try:
            wire = socket.create_connection((os.environ["MASTER_ADDR"], 5000))
            break
        except OSError:
            time.sleep(0.1)
    for _ in range(3):
        wire.recv(1)
        wire.sendall(bytes(size))
"""


@real
def test_no_transfer_is_faster_than_its_wire_and_all_is_counted(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    size = 500_000
    with Lab(2, bandwidth=20e6, name=name) as lab:
        assert find()[name].rates == (Rates(20e6, 20e6),) * 2

        def send() -> tuple[float, tuple[Counters, ...]]:
            job = lab.run([sys.executable, "-c", SEND, str(size)], timeout=LIMIT)
            said = capfd.readouterr().out
            return min(float(line.split()[1]) for line in said.splitlines()), job.counters

        seconds, (receiver, sender) = send()
        assert seconds > 0.75 * 8 * size * 1514 / 1448 / 20e6
        assert 3 * size < sender.sent < 1.07 * 3 * size
        assert sender.payload_sent == pytest.approx(3 * size, rel=0.005)
        assert sender.framed_sent > 1.04 * 3 * size, "the shaper counts the headers of all frames"
        assert receiver.received >= sender.sent

        lab.reshape(bandwidth=(inf, inf), down=(8e6, inf))
        assert find()[name].rates == (Rates(inf, 8e6), Rates(inf, inf))
        slower, _ = send()
        assert slower > 0.75 * 8 * size * 1514 / 1448 / 8e6, "it is the receiver's downward rate now"
    assert name not in net.namespaces()


@real
def test_nothing_is_left_after_an_exception(name: str) -> None:
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    with pytest.raises(ZeroDivisionError), Lab(2, name=name) as lab:  # noqa: PT012
        inside = subprocess.Popen([net.tool_path("ip"), "netns", "exec", lab.namespaces[0], "sleep", LONG])
        until(lambda: inside.pid in net.processes_in(lab.namespaces), "a process in the lab")
        assert net.namespaces()[name] == [*lab.namespaces, net.hub(name)]
        assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout == before
        _ = 1 / 0
    assert name not in net.namespaces()
    assert inside.wait(timeout=LIMIT) == -signal.SIGTERM, "what still ran in the lab was ended"


@real
def test_a_name_that_is_taken_is_refused_and_the_other_lab_stays(name: str) -> None:
    Lab(1, name=name).up()
    with pytest.raises(LabError, match=f"is up already: `thinwire lab down --name {name}` removes it"), Lab(2, name=name):
        pytest.fail("got in")
    assert net.namespaces()[name] == [net.home(name, 0), net.hub(name)]


@real
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_who_is_stopped_while_it_is_made_leaves_nothing(
    stop: signal.Signals, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, called = net.call, []

    def stopped(command: list[str]) -> str:
        called.append(command)
        if len(called) == 8:
            signal.raise_signal(stop)
        return whole(command)

    monkeypatch.setattr(net, "call", stopped)
    with pytest.raises(KeyboardInterrupt if stop == signal.SIGINT else SystemExit):
        Lab(2, name=name).up()
    assert len(called) > 8
    assert name not in net.namespaces()


@real
def test_a_rank_that_fails_is_named_and_the_others_are_ended(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"if [ $RANK = 1 ]; then echo something broke >&2; exit 7; fi; sleep {LONG} & sleep {LONG}; true"
    with Lab(3, name=name) as lab:
        with pytest.raises(JobFailed, match=r"rank 1 of `sh -c .*` failed with exit code 7; all ranks were ended"):
            lab.run(["sh", "-c", script], patience=0.5)
        assert net.processes_in(lab.namespaces) == set(), "also what they had started"
    assert "[rank 1] something broke" in capfd.readouterr().err


@real
def test_a_job_that_takes_too_long_is_ended(name: str) -> None:
    with Lab(2, name=name) as lab, pytest.raises(JobFailed, match=r"rank 0 of `sleep 36000` does not answer within 0\.3 s"):
        lab.run(["sleep", LONG], timeout=0.3)
    with pytest.raises(LabError, match="is not up"):
        lab.run(["true"])


@real
def test_up_status_run_and_down(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("up", "--name", name, "--bandwidth", "110mbit:20mbit", "--down", "500mbit") == 0
    out = capfd.readouterr().out
    assert f"worker 1: namespace thinwire-{name}-1, eth0 10.77.0.2, 20mbit up, 500mbit down" in out
    assert f"thinwire lab down --name {name}" in out

    assert call("status") == 0
    assert f"{name} worker 0: thinwire-{name}-0 10.77.0.1, 110mbit up, 500mbit down, sent " in capfd.readouterr().out

    show = "ip -o -4 addr show dev eth0 | grep -o '10.77.0.[0-9]*/'; echo $RANK of $WORLD_SIZE"
    assert call("run", "--name", name, "--bandwidth", "1mbit", "--", "sh", "-c", show) == 0
    out = capfd.readouterr().out
    assert "10.77.0.1/\n0 of 2\n" in out and "1 of 2" not in out, "rank 0's output only"
    assert find()[name].rates == (Rates(110e6, 500e6), Rates(20e6, 500e6)), "as it was before"

    assert call("run", "--name", name, "--workers", "3", "--", "true") == 2
    assert f"--workers 3 does not fit the lab '{name}', which has 2" in capfd.readouterr().err
    assert call("down", "--name", name) == 0
    assert f"removed the lab '{name}': thinwire-{name}-0, thinwire-{name}-1, thinwire-{name}-hub" in capfd.readouterr().out
    assert call("down", "--name", name) == 0
    assert capfd.readouterr().out == f"no lab called '{name}' is up\n"


@real
@pytest.mark.parametrize("borrowed", [False, True], ids=["a lab of its own", "a lab that is up"])
@pytest.mark.parametrize("stop", first_quick([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_who_is_stopped_leaves_no_process_and_no_namespace_of_his(stop: signal.Signals, borrowed: bool, name: str) -> None:
    rates = Lab(2, name=name, bandwidth=50e6).rates
    flags = ["--name", name, "--bandwidth", "20mbit"] if borrowed else []
    if borrowed:
        Lab(2, name=name, bandwidth=50e6).up()
    command = [
        sys.executable,
        "-m",
        "thinwire",
        "lab",
        "run",
        *flags,
        "--",
        "sh",
        "-c",
        f"echo started; sleep {LONG} & sleep {LONG}",
    ]
    handled = signal.signal(stop, signal.SIG_DFL)  # under nohup it is ignored, and so it would be by what is started
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        signal.signal(stop, handled)
        assert process.stdout is not None
        for line in process.stdout:
            if line == b"started\n":
                break
        lab = name if borrowed else f"run-{process.pid}"
        inside = net.processes_in(net.namespaces()[lab])
        assert len(inside) >= 2
        os.killpg(process.pid, stop)
        try:
            _, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 128 + stop
    assert (b"stopped by Ctrl-C" in err) == (stop == signal.SIGINT)
    assert [pid for pid in inside if net._runs(pid)] == []
    if borrowed:
        assert find()[name].rates == rates, "as it was found"
    else:
        assert lab not in net.namespaces()


@pytest.mark.slow
@real
def test_a_training_in_the_lab_is_measured(tmp_path: Path) -> None:
    train = ["thinwire", "train", "--task", "quadratic", "--algorithm", "diloco", "--steps", "20", "--H", "5"]
    flags = ["--workers", "2", "--bandwidth", "50mbit", "--out", str(tmp_path / "lab.jsonl")]
    command = [sys.executable, "-m", "thinwire", "lab", "run", *flags, "--", *train]
    path = os.pathsep.join([str(Path(lab_module.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "50mbit: the job took " in done.stdout
    [line] = (tmp_path / "lab.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert [f["rank"] for f in record["figures"]] == [0, 1]
    assert record["metered_sent"] == sum(f["sent"] for f in record["figures"]) > 0
    assert record["interface_sent"] > record["payload_sent"] > record["metered_sent"]
    assert record["seconds_per_step"] > 0 and 0 <= record["waiting"] <= 1
    assert f"metered {record['metered_sent'] / 1000:.3g} kB" in done.stdout
    [folder] = (tmp_path / "runs").glob("lab-*/1-50mbit")
    assert json.loads((folder / "summary.json").read_text())["step"] == 20
    assert not (folder / "checkpoints").exists(), "checkpoints would travel too"
