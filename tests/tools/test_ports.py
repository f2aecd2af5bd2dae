"""What a job has open can be reached from this machine only, and `thinwire doctor` says what can be reached by whom."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire.errors import ConfigError, LinkError, WireError
from thinwire.links import host_job, store
from thinwire.links.store import hold_store
from thinwire.tools import ports
from thinwire.tools.commands.doctor import main, port_of
from thinwire.tools.ports import Port, advice, at_port, listening, of_job

# --- A job's sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # tests/tools/test_doctor.py looks at the ports of two real processes too
@pytest.mark.timeout(900)
def test_everything_that_a_real_job_listens_on_is_on_the_loopback(tmp_path: Path) -> None:
    words = ["train", "--workers", "2", "--task", "quadratic", "--steps", "1000000", "--out", str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "GLOO_SOCKET_IFNAME")}
    command = [sys.executable, "-m", "thinwire", *words]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        metrics = tmp_path / "run/metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):  # it trains
            assert job.poll() is None, job.communicate()[1].decode()[-2000:]
            time.sleep(0.1)
        found = of_job(job.pid)
    finally:
        job.send_signal(signal.SIGTERM)
        job.communicate()
    assert len({p.owner for p in found}) == 3, "the launcher holds the store, and gloo listens in both workers"
    assert [p for p in found if not p.local] == []


def test_the_store_of_a_job_on_this_machine_is_for_this_machine() -> None:
    held, places = host_job(2)
    port = int(places[0]["MASTER_PORT"])
    assert at_port(port) == [Port("127.0.0.1", port)]
    assert Port("127.0.0.1", port, "me") in listening(os.getpid(), "me")
    held.set("key", "value")
    assert held.get("key") == b"value"
    del held
    assert at_port(port) == [], "the socket goes with the store"


def test_the_interface_of_a_job_on_this_machine_is_the_loopback_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert host_job(1)[1][0]["GLOO_SOCKET_IFNAME"] == store.LOOPBACK
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert host_job(1)[1][0]["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LinkError, match=f"the job's store at 127.0.0.1:{port} cannot be opened"):
            hold_store("127.0.0.1", port)


class Opened(Exception):
    """Where a socket would have been opened."""


@pytest.mark.parametrize(
    ("host", "resolved", "tried"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("10.1.2.3", ["10.1.2.3"], "10.1.2.3"),
        ("localhost", ["::1", "127.0.0.1"], "::1"),
        ("node7", ["10.1.2.3"], "10.1.2.3"),
        ("node7", ["127.0.1.1"], ""),  # others know it by another address
        ("node7", ["127.0.1.1", "10.1.2.3"], "10.1.2.3"),
        ("no-such-name", [], ""),
    ],
)
def test_the_store_listens_at_the_address_that_the_job_uses(
    host: str, resolved: list[str], tried: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(name: str, *_: object, **__: object) -> list:
        if not resolved:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET6 if ":" in at else socket.AF_INET, 1, 6, "", (at, 0)) for at in resolved]

    def opened(_: object, at: str, __: int) -> socket.socket:
        raise Opened(at)

    monkeypatch.setattr(store.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(store, "_socket", opened)
    with pytest.raises(Opened) as caught, caplog.at_level(logging.WARNING, logger="thinwire"):
        hold_store(host, 1234)
    assert str(caught.value) == tried
    assert ("listens on all interfaces" in caplog.text) == (tried == "")


def test_an_address_that_is_not_this_machines_is_told_and_served_everywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(_: object, at: str, __: int) -> socket.socket:
        if at:
            raise OSError(errno.EADDRNOTAVAIL, "not here")
        raise Opened(at)

    monkeypatch.setattr(store, "_socket", opened)
    with pytest.raises(Opened), caplog.at_level(logging.WARNING, logger="thinwire"):
        hold_store("10.255.255.254", 1234)
    assert "'10.255.255.254', at which this machine cannot listen" in caplog.text
    assert "close port 1234 in the firewall" in caplog.text


# --- What is said of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "address", "reach"),
    [
        ("0100007F", "127.0.0.1", "this machine only"),
        ("00000000000000000000000001000000", "::1", "this machine only"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1", "this machine only"),
        ("00000000", "0.0.0.0", "every network that this machine is in"),
        ("00000000000000000000000000000000", "::", "every network that this machine is in"),
        ("0700000A", "10.0.0.7", "the network of 10.0.0.7"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel prints addresses in the machine's byte order")
def test_addresses_are_read_as_the_kernel_prints_them(kernel: str, address: str, reach: str) -> None:
    assert ports._address(kernel) == address
    assert Port(address, 1).reach == reach


def test_what_is_open_to_more_than_need_it_is_advised_on() -> None:
    local, private, everywhere = Port("127.0.0.1", 1, "rank 0"), Port("10.0.0.7", 2, "rank 1"), Port("::", 3, "the job's store")
    assert advice([local], one_machine=True) == advice([local, private], one_machine=False) == []
    (told,) = advice([local, private, everywhere], one_machine=True)
    assert "10.0.0.7:2 (rank 1), [::]:3 (the job's store), although all ranks are on this machine: start it with" in told
    (told,) = advice([local, private, everywhere], one_machine=False)
    assert "[::]:3 (the job's store), and whoever connects can write into the job: give the store an address" in told
    assert "rank 1" not in told


def test_doctor_says_what_a_running_job_has_open(capsys: pytest.CaptureFixture[str]) -> None:
    held, places = host_job(1)
    port = places[0]["MASTER_PORT"]
    assert main(["--pid", str(os.getpid())]) == 0
    out = capsys.readouterr().out
    assert f"127.0.0.1:{port} " in out
    assert "this machine only" in out
    assert main(["--pid", str(os.getpid()), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [p["reach"] for p in told["ports"] if p["port"] == int(port)] == ["this machine only"]
    del held


def test_a_process_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="there is no process 4194305"):  # above the largest that Linux gives
        main(["--pid", "4194305"])


@pytest.mark.parametrize(
    "entry", [None, [], ["1.2.3.4"], ["nowhere", 1, ""], ["127.0.0.1", "x", ""], 7, ["127.0.0.1", None, ""]]
)
def test_a_port_that_a_rank_makes_up_is_refused(entry: object) -> None:
    with pytest.raises(WireError, match="the message of rank 3: not the description of a port"):
        port_of(entry, 3)
