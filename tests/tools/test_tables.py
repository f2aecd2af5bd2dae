"""Links and events from files: what they say, and errors that name the line."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from thinwire.errors import ConfigError
from thinwire.network import Network
from thinwire.tools.config import RunConfig, write_run_toml
from thinwire.tools.runners import SimulatedRunner
from thinwire.tools.tables import network_of, read_events, read_links


def file_of(folder: Path, text: str) -> str:
    path = folder / "links.csv"
    path.write_text(text)
    return str(path)


def test_each_worker_has_the_link_of_its_line(tmp_path: Path) -> None:
    links = file_of(tmp_path, "worker,up,down,latency\n# two at home\n1,10mbit,100mbit,20ms\n0, 1gbit, , \n*,inf,,1ms\n")
    network = read_links(links, 4)
    assert network.bandwidth == (1e9, 10e6, math.inf, math.inf)
    assert network.down == (1e9, 100e6, math.inf, math.inf)
    assert network.latency == (0.0, 0.02, 0.001, 0.001)
    assert read_links(file_of(tmp_path, "up,worker\n1gbit,*\n"), 2) == Network((1e9, 1e9), (0.0, 0.0))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("worker,up\n0,1gbit\n0,1gbit\n", r"line 3: a second line of worker 0"),
        ("worker,up\n0,fast\n", r"line 2, column 'up': bandwidth must look like 100mbit.*got 'fast'"),
        ("worker,up,latency\n\n0,1gbit,soon\n", r"line 3, column 'latency': a duration must look like.*'soon'"),
        ("worker,up\n7,1gbit\n", r"line 2, column 'worker': a worker is a number from 0 to 1, got '7'"),
        ("worker,up\n-1,1gbit\n", r"line 2, column 'worker': .* got '-1'"),
        ("worker,up\n*,1gbit\n*,2gbit\n", r"line 3: a second line of '\*'"),
        ("worker,up\n0,1gbit,3\n", r"line 2: 3 values, where the first line names 2 columns"),
        ("worker,up\n0,1gbit\n", r"no line of worker 1; a line of '\*' is for all that have none"),
        (
            "worker\n0\n",
            r"the first line names the columns worker,up,down,latency; down, latency may be left out, got 'worker'",
        ),
        ("worker,up,up\n", r"the first line names the columns"),
        ("", r"the first line names the columns .*, got ''"),
    ],
)
def test_what_is_wrong_with_a_file_of_links_is_said_with_its_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_links(file_of(tmp_path, text), 2)


def test_a_file_that_cannot_be_read_and_flags_beside_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.csv': No such file"):
        read_links(tmp_path / "nothing.csv", 2)
    links = file_of(tmp_path, "worker,up\n*,1gbit\n")
    with pytest.raises(ConfigError, match="leave out --bandwidth, --down and --latency"):
        network_of("10mbit", None, "0ms", links, 2)


def test_joins_and_deaths_of_a_trace(tmp_path: Path) -> None:
    trace = file_of(tmp_path, "seconds,worker,event\n90s,1,death\n1min,3,join\n2min,1,death\n100s,1,join\n")
    assert read_events(trace, 4) == ({3: 60.0}, [(90.0, 1), (120.0, 1)], [(100.0, 1)])
    with pytest.raises(ConfigError, match=r"line 2, column 'event': an event is join or death, got 'sleep'"):
        read_events(file_of(tmp_path, "seconds,worker,event\n1,0,sleep\n"), 4)
    with pytest.raises(ConfigError, match=r"line 2: worker 0 has a death after a death, at 2 s"):
        read_events(file_of(tmp_path, "seconds,worker,event\n2,0,death\n1,0,death\n"), 4)


def test_a_simulated_run_takes_its_links_from_the_file_and_its_sites_from_the_flags(tmp_path: Path) -> None:
    links = file_of(tmp_path, "worker,up\n*,1gbit\n")
    runner = SimulatedRunner(links=links, sites="2", inside="10gbit")
    runner.check(RunConfig(workers=4))
    assert runner.about == {"links": links, "sites": "2", "inside": "10gbit"}
    assert runner.name == f"simulated with the links of {links}, 2 sites of 10gbit inside"
    with pytest.raises(ConfigError, match="5 workers do not divide into 2 sites"):
        runner.check(RunConfig(workers=5))
    with pytest.raises(ConfigError, match="--inside 10gbit needs --sites"):
        SimulatedRunner(inside="10gbit").check(RunConfig(workers=4))


def test_a_trace_of_churn_makes_an_elastic_run(tmp_path: Path) -> None:
    trace = file_of(tmp_path, "seconds,worker,event\n1,1,death\n3,1,join\n2,2,join\n")
    config = RunConfig(algorithm="diloco", task="quadratic", workers=3, steps=24, settings={"H": 4})
    runner = SimulatedRunner(churn=trace, step_time="250ms")
    runner.check(config)
    write_run_toml(tmp_path / "run.toml", config)
    runner.run(tmp_path, Console(file=io.StringIO()))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["step"] == 24 and summary["simulated_seconds"] >= 6
    with pytest.raises(ConfigError, match="ddp needs workers that never change"):
        runner.check(RunConfig(algorithm="ddp", workers=3))
