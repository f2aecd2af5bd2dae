"""`thinwire doctor`: it measures what is there, says what is odd, and never waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.processes import LIMIT, Pool
from thinwire.errors import how_to_install
from thinwire.network import Network
from thinwire.sim import World
from thinwire.tools.command_flags import DoctorFlags
from thinwire.tools.commands.doctor import Report, _how_to_get, _tell, main
from thinwire.tools.doctor import (
    Finding,
    Machine,
    Measurements,
    Swap,
    inspect_machine,
    look_at_all,
    look_at_links,
    look_at_machine,
    measure,
    plan_command,
    tournament,
)
from thinwire.tools.ports import Port

HEALTHY = Machine(
    host="node7",
    address="10.0.0.7",
    interfaces={"lo": "127.0.0.1", "eth1": "10.0.0.7"},
    gloo_interface=None,
    versions={"thinwire": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "python": "3.12.1", "platform": "Linux"},
    extras={"matplotlib": True, "torchft": False},
    backends={"gloo": True, "nccl": False, "mpi": False},
    devices=[],
    cores=8,
    threads=4,
    omp=None,
    lab={"root": True, "ip": True, "tc": True},
    free=10**12,
)


def texts(findings: list[Finding]) -> list[str]:
    return [f"{finding.level}: {finding.text}" for finding in findings]


# --- Measuring ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("players", range(2, 10))
def test_in_a_tournament_everybody_meets_everybody_once(players: int) -> None:
    met = set()
    for partners in tournament(players):
        assert len(partners) == players
        assert sum(p is None for p in partners) == players % 2
        for rank, partner in enumerate(partners):
            if partner is not None:
                assert partners[partner] == rank != partner
                met.add((rank, partner))
    assert len(met) == players * (players - 1)


@pytest.mark.parametrize(("bandwidth", "latency"), [(1e6, 0.0), (100e6, 0.01), (10e9, 0.0001)])
def test_a_simulated_network_is_measured_as_what_it_is(bandwidth: float, latency: float) -> None:
    network = Network(bandwidth=bandwidth, latency=latency)
    told = World(3, network=network, step_time=0.0).run(measure)
    assert told[0] == told[1] == told[2]
    for swap in told[0].pairs.values():
        assert swap.latency == pytest.approx(latency, abs=1e-4)
        assert swap.bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert set(told[0].pairs) == {(0, 1), (0, 2), (1, 2)}
    assert told[0].bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert told[0].hop == pytest.approx(latency, abs=1e-4)
    assert told[0].seconds < 3


def test_messages_grow_until_they_take_a_while_and_no_longer() -> None:
    thin, fast = (World(2, network=Network(bandwidth=b), step_time=0.0).run(measure)[0] for b in (1e6, 10e9))
    assert thin.pairs[0, 1].nbytes == 1 << 16
    assert fast.pairs[0, 1].nbytes == 1 << 24


def test_the_rank_with_the_slow_link_is_named() -> None:
    network = Network(bandwidth=(1e8, 1e8, 1e7, 1e8), latency=0.001)
    measured = World(4, network=network, step_time=0.0).run(measure)[0]
    assert 2 in measured.slowest
    (told,) = texts(look_at_links(measured, [HEALTHY] * 4))
    assert told.startswith("warning: links are unequal: 10mbit between rank ")
    assert "the fastest has 100mbit; rank 2 is in most of the slow ones" in told


def test_links_inside_a_machine_may_be_faster() -> None:
    fast, slow = Swap(1e-5, 1e10, 1 << 24), Swap(1e-3, 1e8, 1 << 22)
    measured = Measurements({(0, 1): fast, (0, 2): slow, (1, 2): slow})
    hosts = [HEALTHY, HEALTHY, replace(HEALTHY, host="node8")]
    assert look_at_links(measured, hosts) == []
    assert len(look_at_links(measured, [HEALTHY] * 3)) == 1


def test_real_processes_measure_each_other(pool: Pool) -> None:
    told = pool.run(measure, 3)
    assert told[0] == told[1] == told[2]
    for swap in told[0].pairs.values():
        assert 1e-6 < swap.latency < 1
        assert 1e6 < swap.bandwidth < 1e12  # a loopback on whatever machine
    assert told[0].nbytes >= 1 << 16
    assert 1e6 < told[0].bandwidth < 1e12


def test_a_worker_alone_has_nothing_to_measure() -> None:
    assert World(1, step_time=0.0).run(measure) == [Measurements()]


# --- What is odd -------------------------------------------------------------------------------------------------------------


def test_a_healthy_machine_gives_no_cause_for_complaint() -> None:
    assert look_at_machine(HEALTHY) == []
    assert look_at_all([HEALTHY, HEALTHY]) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"backends": {"gloo": False, "nccl": False, "mpi": False}}, "broken: this torch has no torch.distributed backend"),
        ({"backends": {"gloo": False, "nccl": True, "mpi": False}}, "broken: this torch has no gloo"),
        (
            {"address": "127.0.1.1"},
            "warning: the host name 'node7' resolves to 127.0.1.1, so gloo cannot be reached from other machines: "
            "export GLOO_SOCKET_IFNAME=eth1",
        ),
        ({"address": None}, "warning: the host name 'node7' does not resolve, so gloo"),
        ({"gloo_interface": "eth0"}, "broken: GLOO_SOCKET_IFNAME is 'eth0', but the interfaces of node7 are lo, eth1"),
        ({"free": 10**6}, "warning: only 1 MB are free on this disk"),
    ],
)
def test_what_is_wrong_with_a_machine_is_told_with_what_to_do(change: dict[str, object], told: str) -> None:
    (text,) = texts(look_at_machine(replace(HEALTHY, **change)))
    assert text.startswith(told)


def test_an_interface_that_is_named_is_not_second_guessed() -> None:
    assert look_at_machine(replace(HEALTHY, address="127.0.1.1", gloo_interface="eth1")) == []


def test_other_versions_and_too_many_threads_are_found() -> None:
    older = replace(HEALTHY, host="node8", versions={**HEALTHY.versions, "torch": "2.6.0"})
    assert texts(look_at_all([HEALTHY, older])) == [
        "warning: torch is 2.13.0 on rank 0 and 2.6.0 on rank 1: install the same everywhere"
    ]
    assert texts(look_at_all([HEALTHY] * 4)) == [
        "warning: 4 ranks on node7 have 16 threads for 8 cores: export OMP_NUM_THREADS=2"
    ]
    assert texts(look_at_all([replace(HEALTHY, threads=1)] * 9)) == [
        "warning: 9 ranks share the 8 cores of node7: steps and figures suffer"
    ]


def test_a_timeout_that_is_too_short_for_the_model_is_found() -> None:
    measured = Measurements({(0, 1): Swap(0.01, 1e8, 1 << 22)}, hop=0.01, bandwidth=1e8)
    both = [HEALTHY, replace(HEALTHY, host="node8")]
    assert look_at_links(measured, both, params=1_000_000) == []
    (told,) = texts(look_at_links(measured, both, params=1_000_000_000))
    assert "1,000,000,000 float32 parameters takes 5.33 min, and a worker waits 120 s for the others" in told
    assert told.endswith("give thinwire train --timeout 641s")


def test_the_plan_to_go_on_with_has_what_was_measured() -> None:
    pairs = {(0, 1): Swap(0.0213, 300e6, 1 << 20), (0, 2): Swap(0.001, 94.2e6, 1 << 20), (1, 2): Swap(0.002, 200e6, 1 << 20)}
    measured = Measurements(pairs, hop=0.001, bandwidth=500e6)  # one source: what an all-reduce took is only a check
    assert plan_command(measured, workers=4, params="1.3b") == (
        "thinwire plan --workers 4 --bandwidth 94.2mbit --latency 21.3ms --framing 1 --params 1.3b --step-time ..."
    )


def test_the_figures_of_pairs_and_the_plan_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    measured = Measurements({(0, 1): Swap(0.0213, 94.2e6, 1 << 20)}, hop=0.001, bandwidth=500e6, nbytes=10**6, seconds=0.2)
    report = Report([inspect_machine()] * 2, measured, plan=plan_command(measured, workers=2, params=None))
    _tell(report, DoctorFlags(), where="of this job")
    out = capsys.readouterr().out
    assert "slowest: rank 0 with rank 1, 94.2mbit (1.05 MB swapped); the longest latency is 21.3 ms" in out
    assert "--bandwidth 94.2mbit --latency 21.3ms" in out
    assert "an all-reduce of 1 MB took 200 ms; by these figures it should take 128 ms" in out


def test_missing_packages_are_named_with_the_command_that_installs_them() -> None:
    told = _how_to_get(["scipy", "torchft"])
    assert told == f"scipy ({how_to_install('report')}), torchft"


# --- The command -------------------------------------------------------------------------------------------------------------


def test_a_report_survives_json() -> None:
    measured = Measurements({(0, 1): Swap(0.01, 1e8, 1 << 22)}, hop=0.01, bandwidth=1e8, nbytes=4, seconds=0.1)
    report = Report([HEALTHY] * 2, measured, [Finding("warning", "odd")], "thinwire plan", [Port("::1", 80, "rank 0")])
    told = json.loads(json.dumps(report.as_json()))
    assert told["healthy"] is True
    assert told["workers"] == 2
    assert Report.from_json(told) == report
    assert not Report([HEALTHY], findings=[Finding("broken", "gone")]).healthy


def test_this_machine_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["--workers", "1"]) == 0
    out = capsys.readouterr().out
    here = inspect_machine()
    assert f"torch {here.versions['torch']}" in out
    assert f"{here.cores}, torch uses {here.threads} of them" in out
    assert "gloo yes" in out
    assert "lo 127.0.0.1" in out
    assert here.interfaces["lo"] == "127.0.0.1"


def test_what_is_broken_is_exit_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-wire")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main([]) == 1
    assert "broken: GLOO_SOCKET_IFNAME is 'no-such-wire', but the interfaces of" in capsys.readouterr().out


@pytest.mark.slow  # starts a job; the measurement is below, in processes that are there
def test_two_processes_are_started_and_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert main(["--params", "70b", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True
    assert told["workers"] == 2
    assert [pair["ranks"] for pair in told["measured"]["pairs"]] == [[0, 1]]
    assert told["measured"]["bandwidth"] > 1e6
    assert {p["owner"] for p in told["ports"]} == {"rank 0", "rank 1", "the job's store"}
    assert {p["reach"] for p in told["ports"]} == {"this machine only"}
    assert told["plan"].startswith("thinwire plan --workers 2 --bandwidth ")
    assert any("give thinwire train --timeout" in finding["text"] for finding in told["findings"])


def test_a_rank_that_nobody_joins_says_so_and_ends() -> None:
    job = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "thinwire", "doctor", "--timeout", "0.5s"]
    ended = subprocess.run(command, env=os.environ | job, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "thinwire: rank 1: the job's store at 127.0.0.1:1 does not answer within 0.5 s; rank 0 or its"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeout", "0s"], "timeout must be above zero seconds, got '0s'"),
        (["--workers", "0"], "workers must be a whole number of at least 1, got 0"),
        (["--params", "many"], "params must look like 1.3b, 124m or 3_200_000, got 'many'"),
    ],
)
def test_mistakes_are_told_with_what_is_allowed(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(arguments)
